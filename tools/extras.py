"""Measure the size of each extra, and write the table of docs/installation.md.

Runs in an environment with every extra: `nox -s extras_page`. The size of an extra is the size of the files of all
packages that it installs in addition to the dependencies of quire.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "installation.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPLACEMENTS = {"tensorflow": "tensorflow-cpu"}  # installed in the environment instead
BEGIN, END = "<!-- extras: written by tools/extras.py -->\n", "<!-- end of extras -->\n"
ADDS = {
    "torch": "torch tensors in fields, `MultiModalDataset` and `StreamingDataset` for torch's `DataLoader`",
    "tensorflow": "TensorFlow tensors, `tf.data`, Keras",
    "jax": "JAX arrays",
    "paddle": "Paddle tensors",
    "scipy": "sparse tensors of scipy",
    "pandas": "data frames",
    "parquet": "datasets on disk, streams, shards",
    "http": "listing files over http, with fsspec",
    "remote": "datasets and files in S3, Google Cloud Storage, Azure and on web servers",
    "process": "lambdas and local functions in worker processes",
    "regex": "all regular expressions in queries, with linear run time",
    "compress": "zstd and lz4",
    "image": "images",
    "audio": "audio",
    "video": "video",
    "decode": "`decode_image` at full speed",
    "mesh": "meshes and point clouds",
    "ray": "shards and training on Ray",
    "spark": "shards and training on Spark, which requires Java 17 or newer",
    "lance": "`import_dataset` of Lance",
    "delta": "`import_dataset` of Delta Lake",
    "iceberg": "`import_dataset` of Iceberg",
    "huggingface": "datasets on the Hugging Face Hub",
    "lightning": "`Estimator.from_torch`, and `QuireDataModule` for Lightning",
    "grpc": "gRPC services",
    "metrics": "Prometheus metrics of gRPC services",
    "tracing": "spans of OpenTelemetry for gRPC services and clients",
    "fastapi": "documents in FastAPI routes",
    "index": "search with LanceDB",
    "postgres": "search in PostgreSQL",
    "plot": "plots of `quire plan`",
    "view": "the viewer",
    "all": "everything above",
}


def main() -> None:
    """Write the table."""
    core = closure([Requirement(line) for line in PROJECT["dependencies"]])
    rows = ["| extra | adds | packages | size |", "|---|---|---|---|"]
    for extra in PROJECT["optional-dependencies"]:
        added = sum(map(installed_size, closure(requirements_of(extra)) - core))
        direct = sorted({requirement.name for requirement in requirements_of(extra)})
        packages = "all of these" if extra == "all" else ", ".join(direct)
        rows.append(f"| `{extra}` | {ADDS[extra]} | {packages} | {format_size(added)} |")
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    quire = f"\nWithout extras, quire installs {', '.join(sorted(map(direct_name, PROJECT['dependencies'])))}: "
    PAGE.write_text(
        f"{before}\n" + "\n".join(rows) + f"\n{quire}{format_size(sum(map(installed_size, core)))}.\n\n{after}"
    )


def direct_name(line: str) -> str:
    """Return the name of the package of a requirement."""
    return Requirement(line).name


def requirements_of(extra: str) -> list[Requirement]:
    """Return the requirements of an extra, including those of other extras of quire that it names."""
    requirements = []
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue  # for another version of Python
        if requirement.name == PROJECT["name"]:
            requirements += [inner for name in sorted(requirement.extras) for inner in requirements_of(name)]
        else:
            requirements.append(requirement)
    return requirements


def closure(requirements: list[Requirement]) -> set[str]:
    """Return the names of all direct and indirect dependencies."""
    extras_by_name: dict[str, set[str]] = {}
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(REPLACEMENTS.get(requirement.name, requirement.name))
        new = (set(requirement.extras) | {""}) - extras_by_name.get(name, set())
        if not new:
            continue
        extras_by_name.setdefault(name, set()).update(new)
        for line in importlib.metadata.distribution(name).requires or []:
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in new):
                waiting.append(inner)
    return set(extras_by_name)


def installed_size(name: str) -> int:
    """Return the total size of the files of a package."""
    files = [Path(str(file.locate())) for file in importlib.metadata.distribution(name).files or []]
    return sum(path.stat().st_size for path in files if path.is_file())


def format_size(size: int) -> str:
    """Format a size in megabytes."""
    megabytes = size / 1e6
    digits = 0 if megabytes >= 10 else 1
    return re.sub(r"\.0$", "", f"{megabytes:,.{digits}f}") + " MB"


if __name__ == "__main__":
    main()
