"""The values of MDS: what each of its encodings is as a field, and how its bytes are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic_core import from_json as parse_json

from quire.errors import DecodeError
from quire.media import encode_pillow, import_pillow
from quire.schema import Field, FieldKind
from quire.storage.importers._cells import image_of, in_field
from quire.storage.importers._classes import tensor_annotation
from quire.storage.importers._reading import ImportOptions
from quire.storage.importers._unpickle import load_value

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
        """The encoding that the index names."""
        kind, _, rest = encoding.partition(":")
        if kind == "ndarray":
            dtype, _, sizes = rest.partition(":")
            if dtype and dtype not in _DTYPES.values():
                raise DecodeError(f"{name}: {dtype!r} is not a dtype of MDS.")
            return cls(name, kind, size, dtype or None, tuple(map(int, sizes.split(","))) if sizes else None)
        if kind not in _READ and kind not in _NUMBERS | _IMAGES | _LISTS:
            raise DecodeError(f"{name}: {encoding!r} is not an encoding of MDS that is known here.")
        return cls(name, kind, size)


def annotation_of(column: Encoding, options: ImportOptions) -> Any:
    """The type of a field for a column."""
    kind = column.kind
    if kind == "ndarray":
        return tensor_annotation(column.dtype, column.shape)
    if kind in _NUMBERS:
        return float if kind.startswith("float") else int
    if kind in _IMAGES:
        return tensor_annotation("uint8") if options.images == "decode" else bytes
    return list[bytes] if kind in _LISTS else _READ[kind][0]


def value_of(column: Encoding, content: bytes, field: Field, where: str) -> Any:
    """A value of a column, as the field wants it."""
    kind = column.kind
    if kind == "ndarray":
        return in_field(_array(column, content), field)
    if kind in _NUMBERS:
        return np.frombuffer(content, np.dtype(kind).newbyteorder("<"))[0].item()
    if kind in _LISTS:
        return _parts(kind, content)
    if kind in _IMAGES:
        encoded = _as_png(content) if kind == "pil" else content
        return image_of(encoded, field, where) if field.kind is FieldKind.TENSOR else encoded
    if kind == "str_int" and field.kind is FieldKind.TEXT:
        return content.decode()  # a number of any length
    return _READ[kind][1](content)


_READ: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
    "bytes": (bytes, bytes),
    "str": (str, bytes.decode),
    "int": (int, lambda content: int(np.frombuffer(content, "<i8")[0])),
    "str_int": (int, lambda content: int(content.decode())),
    "str_float": (float, lambda content: float(content.decode())),
    "str_decimal": (Decimal, lambda content: Decimal(content.decode())),
    "json": (Any, parse_json),
    "pkl": (Any, load_value),
}


def _array(column: Encoding, content: bytes) -> NDArray[Any]:
    """An array whose dtype and shape are told by the index, or else in front of its numbers."""
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
            raise DecodeError(f"{column.name}: the shape is cut off.")
    numbers = np.frombuffer(content[at:], np.dtype(dtype).newbyteorder("<"))
    if len(numbers) != math.prod(shape):
        raise DecodeError(f"{column.name}: {len(numbers)} numbers are no array of the shape {shape}.")
    return numbers.reshape(shape).astype(dtype)


def _as_png(content: bytes) -> bytes:
    """The pixels of an image of Pillow's, as an image that everyone reads."""
    width, height, size = np.frombuffer(content[:12], "<u4").tolist()
    mode = content[12 : 12 + size].decode()
    pillow = import_pillow("reading an image of MDS")
    return encode_pillow(pillow.frombytes(mode, (width, height), content[12 + size :]), "png")


def _parts(kind: str, content: bytes) -> list[bytes]:
    """Images one behind the other, their sizes in front."""
    at = 0 if kind.startswith("jpeg") else 4
    number = int(np.frombuffer(content[at : at + 4], "<u4")[0])
    sizes = np.frombuffer(content[at + 4 : at + 4 + 4 * number], "<u4").tolist()
    at += 4 + 4 * number
    if len(sizes) != number or at + sum(sizes) != len(content):
        raise DecodeError("the images of a list are cut off.")
    ends = [at + end for end in np.cumsum(sizes, dtype=np.int64).tolist()]
    parts = [content[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [_as_png(part) for part in parts] if kind == "list[pil]" else parts
