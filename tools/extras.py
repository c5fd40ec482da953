"""Measure what each extra installs, and write the table of docs/installation.md.

Runs in an environment that has every extra: `nox -s extras_page`. An extra's size is that of the files of all
packages that it brings beyond quire's own dependencies, as installed there.
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
STANDS_FOR = {"tensorflow": "tensorflow-cpu"}  # which the environment has instead
BEGIN, END = "<!-- extras: written by tools/extras.py -->\n", "<!-- end of extras -->\n"
ADDS = {
    "torch": "torch tensors in fields, `MultiModalDataset` and `StreamingDataset` for torch's `DataLoader`",
    "tensorflow": "TensorFlow tensors, `tf.data`, Keras",
    "jax": "JAX arrays",
    "paddle": "Paddle tensors",
    "scipy": "sparse tensors of scipy",
    "pandas": "data frames",
    "parquet": "datasets on disk, streams, shards",
    "http": "addresses that begin with http and https through fsspec",
    "process": "lambdas and local functions in worker processes",
    "regex": "every regular expression in queries, matched in bounded time",
    "compress": "zstd and lz4",
    "image": "pictures",
    "audio": "sound",
    "video": "videos",
    "mesh": "meshes and point clouds",
    "ray": "shards and training on Ray",
    "spark": "shards and training on Spark, which needs Java 17 or newer",
    "grpc": "services",
    "fastapi": "documents in routes of FastAPI",
    "view": "the viewer",
    "all": "everything above",
}


def main() -> None:
    """Write the table."""
    core = closure([Requirement(line) for line in PROJECT["dependencies"]])
    rows = ["| extra | adds | packages | size |", "|---|---|---|---|"]
    for extra in PROJECT["optional-dependencies"]:
        size = sum(map(installed_size, closure(requirements_of(extra)) - core))
        direct = sorted({requirement.name for requirement in requirements_of(extra)})
        packages = "all of these" if extra == "all" else ", ".join(direct)
        rows.append(f"| `{extra}` | {ADDS[extra]} | {packages} | {shown(size)} |")
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    quire = f"\nWithout an extra, quire brings {', '.join(sorted(map(direct_name, PROJECT['dependencies'])))}: "
    PAGE.write_text(f"{before}\n" + "\n".join(rows) + f"\n{quire}{shown(sum(map(installed_size, core)))}.\n\n{after}")


def direct_name(line: str) -> str:
    """The name of the package that a requirement asks for."""
    return Requirement(line).name


def requirements_of(extra: str) -> list[Requirement]:
    """What an extra asks for, with the extras of quire itself that it names."""
    found = []
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == PROJECT["name"]:
            found += [inner for name in sorted(requirement.extras) for inner in requirements_of(name)]
        else:
            found.append(requirement)
    return found


def closure(requirements: list[Requirement]) -> set[str]:
    """The names of all packages that these need, directly or not."""
    found: dict[str, set[str]] = {}
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(STANDS_FOR.get(requirement.name, requirement.name))
        new = (set(requirement.extras) | {""}) - found.get(name, set())
        if not new:
            continue
        found.setdefault(name, set()).update(new)
        for line in importlib.metadata.distribution(name).requires or []:
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in new):
                waiting.append(inner)
    return set(found)


def installed_size(name: str) -> int:
    """The bytes of a package's files."""
    files = [Path(str(file.locate())) for file in importlib.metadata.distribution(name).files or []]
    return sum(path.stat().st_size for path in files if path.is_file())


def shown(size: int) -> str:
    """A size in megabytes, to two digits."""
    megabytes = size / 1e6
    digits = 0 if megabytes >= 10 else 1
    return re.sub(r"\.0$", "", f"{megabytes:,.{digits}f}") + " MB"


if __name__ == "__main__":
    main()
