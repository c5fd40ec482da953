"""MDS, the format of MosaicML Streaming: index.json, and shards of rows one behind the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.codec._compression import get_compression, unpack
from quire.errors import DecodeError, OptionError, StorageError
from quire.files import Folder, open_folder, shown
from quire.storage.importers._classes import document_class, field_names, targets
from quire.storage.importers._mds_values import Encoding, annotation_of, value_of
from quire.storage.importers._reading import ImportOptions, Reading, local_file, made_documents, told

if TYPE_CHECKING:
    from numpy.typing import NDArray

INDEX = "index.json"
_MAX_RATIO = 1000.0


@dataclass(frozen=True)
class _Shard:
    """One shard, as the index tells."""

    name: str
    rows: int
    size: int
    columns: tuple[Encoding, ...]
    compression: str | None


def read_mds(source: Any, schema: type[Any] | None, options: ImportOptions) -> Reading:
    """An MDS dataset, or one of its splits."""
    folder = open_folder(source, options.remote)
    prefix = f"{options.split}/" if options.split else ""
    shards = _index(folder, f"{prefix}{INDEX}", prefix)
    columns = shards[0].columns if shards else ()
    _check_pickles(folder, columns, options)
    names = field_names(column.name for column in columns)
    made = {names[column.name]: annotation_of(column, options) for column in columns}
    document_type = schema or document_class(options.name or "Row", made)
    wanted = targets(document_type, names, options.extra)

    def row(shard: _Shard, content: bytes, where: str) -> dict[str, Any]:
        found = _split(shard, content)
        known = [(column, *wanted[column.name]) for column in shard.columns if column.name in wanted]
        return {key: value_of(column, found[column.name], field, where) for column, key, field in known}

    def rows(first: int) -> Iterator[Any]:
        for shard in shards:
            if first < shard.rows:
                places = (
                    (where, partial(row, shard, content, where)) for where, content in _contents(folder, shard, first)
                )
                yield from made_documents(document_type, places, options.extra)
            first = max(0, first - shard.rows)

    return Reading(document_type, rows, sum(shard.rows for shard in shards))


def _check_pickles(folder: Folder, columns: tuple[Encoding, ...], options: ImportOptions) -> None:
    pickled = [column.name for column in columns if column.kind == "pkl"]
    if pickled and not options.allow_pickle:
        raise OptionError(
            f"{shown(folder.url)}: {', '.join(pickled)}: pickled. Pass allow_pickle=True to read numbers, texts, "
            "containers and arrays of them; other classes are refused even so."
        )


def _index(folder: Folder, name: str, prefix: str) -> list[_Shard]:
    if not folder.exists(name):
        raise StorageError(f"{shown(folder.join(name))}: there is no such file. Of several splits, pass split=...")
    with told(folder.join(name)):
        return [_shard(told_of, prefix) for told_of in json.loads(folder.read(name))["shards"]]


def _shard(about: dict[str, Any], prefix: str) -> _Shard:
    if (about["format"], about["version"]) != ("mds", 2):
        raise DecodeError(f"a shard of the format {about['format']!r}, version {about['version']}, not mds 2.")
    packed = about.get("compression") is not None
    columns = zip(about["column_names"], about["column_encodings"], about["column_sizes"], strict=True)
    file = about["zip_data"] if packed and about.get("zip_data") else about["raw_data"]
    compression = about["compression"].partition(":")[0] if packed else None
    made = tuple(Encoding.parse(str(name), str(kind), size) for name, kind, size in columns)
    return _Shard(f"{prefix}{file['basename']}", int(about["samples"]), about["raw_data"]["bytes"], made, compression)


def _contents(folder: Folder, shard: _Shard, first: int) -> Iterator[tuple[str, bytes]]:
    """The bytes of rows, each with its place."""
    where = folder.join(shard.name)
    with told(where), local_file(folder, shard.name) as path:
        data: Any = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        if shard.compression is not None:
            data = np.frombuffer(_unpacked(shard, data), np.uint8)
        bounds = _bounds(shard, data)
        for number in range(first, shard.rows):
            yield f"{where}, row {number}", data[bounds[number] : bounds[number + 1]].tobytes()


def _unpacked(shard: _Shard, data: Any) -> bytes:
    compression = get_compression(shard.compression)
    if compression is None:
        return bytes(data)
    return unpack(memoryview(data), compression, shard.size, _MAX_RATIO)


def _bounds(shard: _Shard, data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where rows begin and end: behind the number of rows, checked against what is there."""
    head = data[: 4 * (shard.rows + 2)].tobytes()
    if len(head) < 4 * (shard.rows + 2) or len(data) != shard.size:
        raise DecodeError(
            f"the shard was altered or cut off: it has {len(data):,} bytes, the index says {shard.size:,}."
        )
    numbers = np.frombuffer(head, "<u4").astype(np.int64)
    if numbers[0] != shard.rows or (np.diff(numbers[1:]) < 0).any() or numbers[-1] > len(data):
        raise DecodeError("the shard was altered: its table of rows is not that of the index.")
    return numbers[1:]


def _split(shard: _Shard, content: bytes) -> dict[str, bytes]:
    """The bytes of each column; those that have no size of their own have it in front."""
    free = sum(column.size is None for column in shard.columns)
    told_sizes = iter(np.frombuffer(content[: 4 * free], "<u4").tolist())
    at, found = 4 * free, {}
    for column in shard.columns:
        size = next(told_sizes, -1) if column.size is None else column.size
        if size < 0 or at + size > len(content):
            raise DecodeError(f"{column.name}: the row ends before its value.")
        found[column.name] = content[at : at + size]
        at += size
    return found
