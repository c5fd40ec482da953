"""The formats that commands read and write, and how the format of a path is detected."""

from __future__ import annotations

import codecs
import importlib
import json
from collections.abc import Iterator
from pathlib import Path, PurePath

from quire._optional import require
from quire.codec import COMPRESSIONS, compression_of, is_stream
from quire.errors import OptionError, StorageNotFoundError

IMPORTED_FORMATS = ("petastorm", "mds", "webdataset", "huggingface", "lance", "delta", "iceberg")
SOURCE_FORMATS = ("dataset", "quire", "csv", "ndjson", "json", "files", *IMPORTED_FORMATS)
"""Formats to read: 'dataset' is a folder or file of Parquet or Arrow, 'quire' is what `save_binary` writes."""
TARGET_FORMATS = ("parquet", "arrow", "quire", "csv", "ndjson", "json", "files", "huggingface")
"""Formats to write."""

_SUFFIXES = {
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".ndjson", ".jsonl"), "ndjson"),
    ".json": "json",
    **dict.fromkeys((".pb", ".protobuf", ".bin", ".quire", ".pickle", ".pkl"), "quire"),
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COMPRESSION_SUFFIXES = {suffix for compression in COMPRESSIONS.values() for suffix in compression.suffixes}
_TABLE_FILES = {"delta": "_delta_log/*", "lance": "_versions/*.manifest", "iceberg": "metadata/*.metadata.json"}
"""Files that only tables of these formats have."""


def format_from_suffix(path: str) -> str | None:
    """Return the format that the suffix of a path stands for, None for an unknown suffix."""
    suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSION_SUFFIXES:
        suffixes.pop()
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def detect_format(path: str) -> str:
    """Detect the format of a file, a folder or a URL: by its suffix, then by its content."""
    by_suffix = format_from_suffix(path)
    if "://" in path:
        return "dataset" if by_suffix in (None, "parquet", "arrow") else by_suffix
    place = Path(path)
    if not place.exists():
        raise StorageNotFoundError(f"{path}: there is no such file or folder.")
    if place.is_dir():
        return _detect_folder_format(place)
    if by_suffix in ("parquet", "arrow"):
        return "dataset"
    if by_suffix is not None:
        return by_suffix
    with place.open("rb") as file:
        start = file.read(64)
    if is_stream(start) or compression_of(start[:8]) is not None:
        return "quire"
    first = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if first in (b"[", b"{"):
        return "json" if first == b"[" else "ndjson"
    raise OptionError(f"{path}: the format of the file is unknown: pass --from, one of {', '.join(SOURCE_FORMATS)}.")


def _detect_folder_format(path: Path) -> str:
    # Formats with a marker file come first: all of them also hold Parquet, Arrow or other files.
    if (path / "_quire").is_dir():
        return "dataset"
    if (path / "dataset_dict.json").exists() or ((path / "state.json").exists() and list(path.glob("*.arrow"))):
        return "huggingface"
    try:
        if (path / "index.json").exists() and "shards" in json.loads((path / "index.json").read_bytes()):
            return "mds"
    except (ValueError, TypeError):
        pass  # an index of another program
    for name, pattern in _TABLE_FILES.items():
        if any(path.glob(pattern)):
            return name
    if (path / "_common_metadata").exists():
        require("pyarrow", extra="parquet", needed_for="Parquet")
        metadata = importlib.import_module("pyarrow.parquet").read_schema(path / "_common_metadata").metadata
        if importlib.import_module("quire.storage.importers").PETASTORM_SCHEMA_KEY in (metadata or {}):
            return "petastorm"
    suffixes = {file.suffix for file in iter_files(path)}
    if suffixes & {".parquet", ".arrow"}:
        return "dataset"
    return "webdataset" if ".tar" in suffixes else "files"


def iter_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders in order, without hidden ones."""
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from iter_files(entry)
        elif entry.is_file():
            yield entry
