"""The formats that commands know, and how they are told from each other."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path, PurePath

from quire._optional import require
from quire.codec._blocks import is_stream
from quire.codec._compression import COMPRESSIONS, compression_of
from quire.errors import OptionError, StorageNotFoundError

IMPORTED = ("petastorm", "mds", "webdataset", "huggingface")
SOURCES = ("dataset", "quire", "csv", "ndjson", "json", "files", *IMPORTED)
"""What can be read: 'dataset' is a folder or a file of Parquet or Arrow, 'quire' what `save_binary` writes."""
TARGETS = ("parquet", "arrow", "quire", "csv", "ndjson", "json", "files", "huggingface")
"""What can be written."""

_SUFFIXES = {
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".ndjson", ".jsonl"), "ndjson"),
    ".json": "json",
    **dict.fromkeys((".pb", ".protobuf", ".bin", ".quire", ".pickle", ".pkl"), "quire"),
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_PACKED = {suffix for known in COMPRESSIONS.values() for suffix in known.suffixes}


def form_by_suffix(path: str) -> str | None:
    """The format that the name of a file tells; None where it tells none."""
    suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
        return _SUFFIXES.get(suffixes[-1]) if suffixes else None
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def form_of(path: str) -> str:
    """The format of what is at a path."""
    named = form_by_suffix(path)
    if "://" in path:
        return "dataset" if named in (None, "parquet", "arrow") else named
    place = Path(path)
    if not place.exists():
        raise StorageNotFoundError(f"{path}: there is no such file or folder.")
    if place.is_dir():
        return _form_of_folder(place)
    if named in ("parquet", "arrow"):
        return "dataset"
    return named or _form_of_content(place)


def _form_of_content(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(64)
    if is_stream(start) or compression_of(start[:8]) is not None:
        return "quire"
    if start.lstrip()[:1] in (b"[", b"{"):
        return "json" if start.lstrip()[:1] == b"[" else "ndjson"
    raise OptionError(f"{path}: the file does not tell its format: pass --from {' or '.join(SOURCES)}.")


def _form_of_folder(path: Path) -> str:
    if (path / "_quire").is_dir():
        return "dataset"
    if (path / "dataset_dict.json").exists() or ((path / "state.json").exists() and list(path.glob("*.arrow"))):
        return "huggingface"
    if (path / "index.json").exists() and _is_mds(path / "index.json"):
        return "mds"
    if (path / "_common_metadata").exists() and _is_petastorm(path / "_common_metadata"):
        return "petastorm"
    found = {file.suffix for file in files_below(path)}
    if found & {".parquet", ".arrow"}:
        return "dataset"
    return "webdataset" if ".tar" in found else "files"


def files_below(path: Path) -> Iterator[Path]:
    """The files in a folder, and in those inside it, in order; hidden ones are left aside."""
    for entry in sorted(path.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from files_below(entry)
        elif entry.is_file():
            yield entry


def _is_mds(path: Path) -> bool:
    try:
        return "shards" in json.loads(path.read_bytes())
    except (ValueError, TypeError):
        return False


def _is_petastorm(path: Path) -> bool:
    require("pyarrow", extra="parquet", needed_for="Parquet")
    parquet = importlib.import_module("pyarrow.parquet")
    key = importlib.import_module("quire.storage.importers._petastorm").SCHEMA_KEY
    return key in (parquet.read_schema(path).metadata or {})
