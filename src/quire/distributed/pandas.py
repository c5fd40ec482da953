"""Files as shards of data frames: each file is a partition, read by pandas in the worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import quire.distributed._require_pyarrow  # noqa: F401 - raises if it is missing
from quire._optional import require
from quire.distributed._row_containers import concat_rows
from quire.distributed._sources import Paths, assign_to_partitions, find_files
from quire.distributed.xshards import XShards
from quire.errors import DecodeError, OptionError
from quire.files import RemoteOptions, display_uri, scheme_of
from quire.parallel import summary_of

if TYPE_CHECKING:
    import pandas as pd

    from quire.distributed._engine import Engine


__all__ = ["read_csv", "read_json", "read_parquet"]
_SUFFIXES = {
    "csv": (".csv", ".csv.gz", ".csv.bz2", ".csv.zst", ".csv.xz", ".csv.zip", ".tsv", ".txt"),
    "json": (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".json.bz2", ".json.zst"),
    "parquet": (".parquet", ".parq", ".pq"),
}
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_REFUSED_OPTIONS = {"chunksize", "iterator"}


def read_csv(
    file_path: Paths,
    *,
    num_shards: int | None = None,
    engine: str | Engine = "local",
    **how: Any,
) -> XShards:
    """Read CSV files as data frames: a file, a folder, a pattern, a URL, or several of them.

    Each file is a partition; `num_shards` redistributes the rows. All other arguments go to `pandas.read_csv`, for each
    file: pass the `dtype` of columns that look like integers in one file and like fractions in another.
    """
    return _read("csv", file_path, num_shards, engine, how)


def read_json(
    file_path: Paths,
    *,
    num_shards: int | None = None,
    engine: str | Engine = "local",
    **how: Any,
) -> XShards:
    """Read JSON files as data frames: a file, a folder, a pattern, a URL, or several of them.

    Files with one object per line need `lines=True`, except '.jsonl' and '.ndjson' files. All other arguments go to
    `pandas.read_json`.
    """
    return _read("json", file_path, num_shards, engine, how)


def read_parquet(
    file_path: Paths,
    columns: Sequence[str] | None = None,
    *,
    num_shards: int | None = None,
    engine: str | Engine = "local",
    **how: Any,
) -> XShards:
    """Read Parquet files as data frames: a file, a folder, a pattern, a URL, or several of them.

    Folders such as 'year=2024' become columns. All other arguments go to `pandas.read_parquet`, for each file.
    """
    chosen = {} if columns is None else {"columns": list(columns)}
    return _read("parquet", file_path, num_shards, engine, {**how, **chosen})


def _read(kind: str, paths: Paths, num_shards: int | None, engine: str | Engine, how: Mapping[str, Any]) -> XShards:
    refused = sorted(_REFUSED_OPTIONS & how.keys())
    if refused:
        raise OptionError(
            f"read_{kind}({refused[0]}=...): partitions are whole frames; use num_shards= for smaller ones."
        )
    require("pandas", extra="pandas", needed_for=f"read_{kind}()")
    remote = RemoteOptions(storage_options=how.get("storage_options") or {})
    files = _list_files(kind, paths, remote)
    grouped = assign_to_partitions(files, [file.size for file in files], num_shards, 1)
    parts = grouped if num_shards is not None and all(grouped) else [[file] for file in files]
    shards = XShards.from_objects(parts, engine=engine).transform_shard(read_files, kind, dict(how))
    return shards if num_shards in (None, len(parts)) else shards.repartition(num_shards)


def read_files(files: list[SourceFile], kind: str, how: Mapping[str, Any]) -> pd.DataFrame:
    """Read some files into one data frame."""
    return concat_rows([_read_frame(file, kind, how) for file in files])


def _read_frame(file: SourceFile, kind: str, how: Mapping[str, Any]) -> pd.DataFrame:
    pandas: Any = require("pandas", extra="pandas", needed_for=f"read_{kind}()")
    options = dict(how)
    if kind == "json" and (".jsonl" in file.url or ".ndjson" in file.url):
        options.setdefault("lines", True)
    columns = options.get("columns") if kind == "parquet" else None
    if columns is not None:
        options["columns"] = [name for name in columns if name not in file.folders]
    try:
        frame = getattr(pandas, f"read_{kind}")(file.url, **options)
    except Exception as error:
        raise DecodeError(f"{display_uri(file.url)}: pandas cannot read it: {summary_of(error)}") from error
    for name, value in file.folders.items():
        if name not in frame.columns and (columns is None or name in columns):
            frame[name] = value
    return frame if columns is None else frame[columns]


@dataclass
class SourceFile:
    """A file, and the values of its 'key=value' folders: 'year=2024/part-0.parquet'."""

    url: str
    folders: dict[str, Any]
    size: int


# --- finding files


def _list_files(kind: str, paths: Paths, remote: RemoteOptions) -> list[SourceFile]:
    files: list[SourceFile] = []
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        url = os.fspath(path)
        if scheme_of(url) in ("http", "https"):  # they have no folders, and pandas reads them by itself
            files.append(SourceFile(url, {}, 1))
        else:
            matches = find_files(url, _SUFFIXES[kind], remote)
            for file in matches:
                pairs = [part.partition("=") for part in file.name.split("/")[:-1] if "=" in part]
                folders = {key: None if value == _NULL_PARTITION else unquote(value) for key, _, value in pairs}
                files.append(SourceFile(file.url, folders, file.size))
    if not files:
        raise OptionError(f"read_{kind}([]): at least one file is needed.")
    for key in {key for file in files for key in file.folders}:
        # A column of folders is one of integers if all of its values look like integers.
        with_value = [source for source in files if source.folders.get(key) is not None]
        if all(str(source.folders[key]).isdecimal() for source in with_value):
            for source in with_value:
                source.folders[key] = int(source.folders[key])
    return files
