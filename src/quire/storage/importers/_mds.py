"""MDS, the format of MosaicML Streaming: `index.json`, and shards of concatenated rows.

A shard is the number of rows, the offsets of rows, and the rows: all 32-bit integers are little-endian. A row is the
sizes of the columns whose encoding has no fixed size, then the values of all columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic_core import from_json as parse_json

from quire.codec import decompress, get_compression
from quire.errors import DecodeError, OptionError, StorageError
from quire.files import Folder, display_uri, open_folder
from quire.media import encode_pillow, import_pillow
from quire.schema import Field, FieldKind
from quire.storage._shard_reader import local_file
from quire.storage.importers._source import (
    ForeignDataset,
    ImportOptions,
    decode_image_tensor,
    document_class,
    field_names,
    match_fields,
    source_errors,
    tensor_annotation,
    to_field_tensor,
    validate_rows,
)
from quire.storage.importers._unpickle import load_value

if TYPE_CHECKING:
    from numpy.typing import NDArray


INDEX = "index.json"
_MAX_RATIO = 1000.0


@dataclass(frozen=True)
class _Shard:
    """One shard, as the index describes it."""

    name: str
    rows: int
    size: int
    columns: tuple[Encoding, ...]
    compression: str | None

    @classmethod
    def parse(cls, entry: dict[str, Any], prefix: str) -> _Shard:
        """Parse an entry of the index; `prefix` is the folder of the split."""
        if (entry["format"], entry["version"]) != ("mds", 2):
            raise DecodeError(f"a shard of the format {entry['format']!r}, version {entry['version']}, not mds 2.")
        is_compressed = entry.get("compression") is not None
        columns = zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True)
        file = entry["zip_data"] if is_compressed and entry.get("zip_data") else entry["raw_data"]
        compression = entry["compression"].partition(":")[0] if is_compressed else None
        encodings = tuple(Encoding.parse(str(name), str(kind), size) for name, kind, size in columns)
        name, rows, size = f"{prefix}{file['basename']}", int(entry["samples"]), entry["raw_data"]["bytes"]
        return cls(name, rows, size, encodings, compression)

    def row_bounds(self, data: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the offsets of rows, which come after the number of rows, checked against the size of the data."""
        head = data[: 4 * (self.rows + 2)].tobytes()
        if len(head) < 4 * (self.rows + 2) or len(data) != self.size:
            raise DecodeError(
                f"the shard was altered or truncated: it has {len(data):,} bytes, the index says {self.size:,}."
            )
        numbers = np.frombuffer(head, "<u4").astype(np.int64)
        if numbers[0] != self.rows or (np.diff(numbers[1:]) < 0).any() or numbers[-1] > len(data):
            raise DecodeError("the shard was altered: its table of rows does not match the index.")
        return numbers[1:]

    def split_row(self, content: bytes) -> dict[str, bytes]:
        """Return the bytes of each column; the sizes of columns without a fixed one are at the start of the row."""
        count = sum(column.size is None for column in self.columns)
        sizes = iter(np.frombuffer(content[: 4 * count], "<u4").tolist())
        at, values = 4 * count, {}
        for column in self.columns:
            size = next(sizes, -1) if column.size is None else column.size
            if size < 0 or at + size > len(content):
                raise DecodeError(f"{column.name}: the row ends before its value.")
            values[column.name] = content[at : at + size]
            at += size
        return values


def read_mds(source: Any, document_type: type[Any] | None, options: ImportOptions) -> ForeignDataset:
    """Read an MDS dataset, or one of its splits."""
    folder = open_folder(source, options.remote)
    prefix = f"{options.split}/" if options.split else ""
    shards = _read_index(folder, f"{prefix}{INDEX}", prefix)
    columns = shards[0].columns if shards else ()
    pickled = [column.name for column in columns if column.kind == "pkl"]
    if pickled and not options.allow_pickle:
        raise OptionError(
            f"{display_uri(folder.url)}: {', '.join(pickled)}: pickled. Pass allow_pickle=True to read numbers, texts, "
            "containers and arrays of them; other classes are refused even so."
        )
    names = field_names(column.name for column in columns)
    annotations = {names[column.name]: _annotation(column, options) for column in columns}
    row_type = document_type or document_class(options.name or "Row", annotations)
    matches = match_fields(row_type, names, options.extra)

    def row(shard: _Shard, content: bytes, where: str) -> dict[str, Any]:
        values = shard.split_row(content)
        known = [(column, *matches[column.name]) for column in shard.columns if column.name in matches]
        return {key: _decode_value(column, values[column.name], field, where) for column, key, field in known}

    def rows(first: int) -> Iterator[Any]:
        for shard in shards:
            if first < shard.rows:
                places = (
                    (where, partial(row, shard, content, where)) for where, content in _read_rows(folder, shard, first)
                )
                yield from validate_rows(row_type, places, options.extra)
            first = max(0, first - shard.rows)

    return ForeignDataset(row_type, rows, sum(shard.rows for shard in shards))


def _read_index(folder: Folder, name: str, prefix: str) -> list[_Shard]:
    if not folder.exists(name):
        raise StorageError(
            f"{display_uri(folder.join(name))}: there is no such file. If the dataset has splits, pass split=..."
        )
    with source_errors(folder.join(name)):
        return [_Shard.parse(entry, prefix) for entry in json.loads(folder.read(name))["shards"]]


def _read_rows(folder: Folder, shard: _Shard, first: int) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of rows from `first` on, each with its place."""
    where = folder.join(shard.name)
    with source_errors(where), local_file(folder, shard.name) as path:
        data: Any = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        compression = None if shard.compression is None else get_compression(shard.compression)
        if compression is not None:
            data = np.frombuffer(decompress(memoryview(data), compression, shard.size, _MAX_RATIO), np.uint8)
        bounds = shard.row_bounds(data)
        for number in range(first, shard.rows):
            yield f"{where}, row {number}", data[bounds[number] : bounds[number + 1]].tobytes()


# --- values


_NUMBERS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {"float16", "float32", "float64"}
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32"}
_DTYPES |= {34: "float32", 64: "uint64", 65: "int64", 66: "float64"}
_IMAGES = {"jpeg", "png", "pil"}
_LISTS = {"list[jpeg]", "list[png]", "list[pil]", "jpeg_array", "jpegarray"}


@dataclass(frozen=True)
class Encoding:
    """How a column is encoded: 'ndarray:float32:3,4' is an ndarray of that dtype and shape."""

    name: str
    kind: str
    size: int | None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, name: str, encoding: str, size: int | None) -> Encoding:
        """Parse an encoding of the index."""
        kind, _, rest = encoding.partition(":")
        if kind == "ndarray":
            dtype, _, sizes = rest.partition(":")
            if dtype and dtype not in _DTYPES.values():
                raise DecodeError(f"{name}: {dtype!r} is not a dtype of MDS.")
            return cls(name, kind, size, dtype or None, tuple(map(int, sizes.split(","))) if sizes else None)
        if kind not in _DECODERS and kind not in _NUMBERS | _IMAGES | _LISTS:
            raise DecodeError(f"{name}: {encoding!r} is not a known encoding of MDS.")
        return cls(name, kind, size)


def _annotation(column: Encoding, options: ImportOptions) -> Any:
    """Return the annotation of a field for a column."""
    kind = column.kind
    if kind == "ndarray":
        return tensor_annotation(column.dtype, column.shape)
    if kind in _NUMBERS:
        return float if kind.startswith("float") else int
    if kind in _IMAGES:
        return tensor_annotation("uint8") if options.images == "decode" else bytes
    return list[bytes] if kind in _LISTS else _DECODERS[kind][0]


def _decode_value(column: Encoding, content: bytes, field: Field, where: str) -> Any:
    """Decode a value of a column for a field."""
    kind = column.kind
    if kind == "ndarray":
        return to_field_tensor(_decode_array(column, content), field)
    if kind in _NUMBERS:
        return np.frombuffer(content, np.dtype(kind).newbyteorder("<"))[0].item()
    if kind in _LISTS:
        return _split_images(kind, content)
    if kind in _IMAGES:
        encoded = _as_png(content) if kind == "pil" else content
        return decode_image_tensor(encoded, field, where) if field.kind is FieldKind.TENSOR else encoded
    if kind == "str_int" and field.kind is FieldKind.TEXT:
        return content.decode()  # a number of any length
    return _DECODERS[kind][1](content)


_DECODERS: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
    "bytes": (bytes, bytes),
    "str": (str, bytes.decode),
    "int": (int, lambda content: int(np.frombuffer(content, "<i8")[0])),
    "str_int": (int, lambda content: int(content.decode())),
    "str_float": (float, lambda content: float(content.decode())),
    "str_decimal": (Decimal, lambda content: Decimal(content.decode())),
    "json": (Any, parse_json),
    "pkl": (Any, load_value),
}


def _decode_array(column: Encoding, content: bytes) -> NDArray[Any]:
    """Decode an array. The index has its dtype and shape, or else they come before the numbers.

    A dtype is a byte. A shape is a byte with the number of dimensions (6 bits) and the width of sizes (2 bits: 1, 2, 4
    or 8 bytes), followed by the sizes.
    """
    at, dtype, shape = 0, column.dtype, column.shape
    if dtype is None:
        dtype, at = _DTYPES.get(content[0]), 1
        if dtype is None:
            raise DecodeError(f"{column.name}: {content[0]} is not a dtype of MDS.")
    if shape is None:
        dimensions, width = content[at] >> 2, 1 << (content[at] & 3)
        sizes = np.frombuffer(content[at + 1 : at + 1 + dimensions * width], f"<u{width}")
        shape, at = tuple(map(int, sizes)), at + 1 + dimensions * width
        if len(shape) != dimensions:
            raise DecodeError(f"{column.name}: the shape is truncated.")
    numbers = np.frombuffer(content[at:], np.dtype(dtype).newbyteorder("<"))
    if len(numbers) != math.prod(shape):
        raise DecodeError(f"{column.name}: {len(numbers)} numbers do not fit the shape {shape}.")
    return numbers.reshape(shape).astype(dtype)


def _as_png(content: bytes) -> bytes:
    """Encode the raw pixels of a Pillow image as PNG."""
    width, height, size = np.frombuffer(content[:12], "<u4").tolist()
    mode = content[12 : 12 + size].decode()
    pillow = import_pillow("reading an image of MDS")
    return encode_pillow(pillow.frombytes(mode, (width, height), content[12 + size :]), "png")


def _split_images(kind: str, content: bytes) -> list[bytes]:
    """Return the images of a list, which are concatenated after their number and sizes."""
    at = 0 if kind.startswith("jpeg") else 4
    number = int(np.frombuffer(content[at : at + 4], "<u4")[0])
    sizes = np.frombuffer(content[at + 4 : at + 4 + 4 * number], "<u4").tolist()
    at += 4 + 4 * number
    if len(sizes) != number or at + sum(sizes) != len(content):
        raise DecodeError("the images of a list are truncated.")
    ends = [at + end for end in np.cumsum(sizes, dtype=np.int64).tolist()]
    parts = [content[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [_as_png(part) for part in parts] if kind == "list[pil]" else parts
