"""The forms of columns that hold no columns themselves: tensors, numbers, texts, blobs, objects."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.codec._batches import OFFSETS
from quire.codec._context import Reader
from quire.codec._decode import decode_value
from quire.codec._match import EXACT, check_exact, match
from quire.codec._tensors import MAX_AXES, TensorParts, decode_parts, decode_tensor, lent_tensor
from quire.codec._wire import DELIMITED, VARINT, fields, read_text
from quire.columns import (
    Column,
    LentColumn,
    ObjectColumn,
    PackedColumn,
    RaggedColumn,
    ScalarColumn,
    TensorColumn,
    Validity,
)
from quire.errors import DecodeError
from quire.schema import Field, FieldKind
from quire.tensors import Framework, format_shape, framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SCALARS = {bool: "b", int: "iu", float: "fiu", complex: "cfiu"}


class ColumnParts:
    """The fields of a column message."""

    __slots__ = ("end", "form", "name", "rows", "shapes", "start", "validity")

    def __init__(self, reader: Reader, start: int, end: int, rows: int) -> None:
        self.name, self.form, self.shapes, self.rows = "", 0, 0, rows
        self.start = self.end = marks = 0
        for number, kind, a, b in fields(reader.data, start, end):
            if kind == DELIMITED and number == 1:
                self.name = read_text(reader.data, a, b)
            elif kind == DELIMITED and 3 <= number <= 10:
                self.form, self.start, self.end = number, a, b
            elif kind == VARINT and number == 2:
                marks = a
            elif kind == VARINT and number == 11:
                self.shapes = a
        self.validity = read_validity(marks, rows, reader)


def tensor_form(reader: Reader, part: ColumnParts, field: Field) -> Column:
    """One tensor for all rows."""
    parts = TensorParts(reader, part.start, part.end)
    lent = lent_tensor(reader, parts) if reader.options.lend else None
    if lent is None:
        data, framework, shape = _known(decode_parts(reader, parts))
        dtype = framework.dtype(data)
    else:
        data, framework = lent
        shape, dtype = data.shape, parts.dtype
    if field.kind is not FieldKind.TENSOR or not shape or (lent is None and framework.is_sparse(data)):
        raise DecodeError(f"the bytes hold a column of tensors, but the field is {field}.")
    shapes = _padded_shapes(reader, part, shape) if part.shapes else None
    for row in {shape[1:]} if shapes is None else set(map(tuple, shapes.tolist())):
        if len(data) and not field.spec.fits(row, dtype):
            raise DecodeError(f"expected tensors of {field.spec}, got {dtype} {format_shape(row)}.")
    column = TensorColumn(field, data, framework, part.validity, shapes)
    return column if lent is None else LentColumn.lend(column)


def _known(data: Any) -> tuple[Any, Framework, tuple[int, ...]]:
    """A tensor that was read, its framework and its shape."""
    framework = framework_of(data)
    assert framework is not None
    data = framework.unwrap(data)
    return data, framework, framework.shape(data)


def _padded_shapes(reader: Reader, part: ColumnParts, shape: tuple[int, ...]) -> NDArray[np.int64]:
    sizes = _int64(reader.buffer(part.shapes))
    if len(sizes) != part.rows * (len(shape) - 1):
        raise DecodeError("the shapes of padded rows do not fit the column.")
    shapes = sizes.reshape(part.rows, len(shape) - 1)
    if (shapes < 0).any() or (shapes > np.array(shape[1:], np.int64)).any():
        raise DecodeError("a padded row is larger than the column.")
    return shapes


def scalars_form(reader: Reader, part: ColumnParts, field: Field) -> Column:
    """A vector of numbers."""
    data, framework, shape = _known(decode_tensor(reader, part.start, part.end))
    kind = framework.to_numpy(data).dtype.kind
    known = next((base for base in _SCALARS if field.kind is FieldKind.SCALAR and issubclass(field.type, base)), None)
    if len(shape) != 1 or known is None or kind not in _SCALARS[known]:
        raise DecodeError(f"the bytes hold a column of {framework.dtype(data)}, but the field is {field}.")
    if kind != _SCALARS[known][0] and known in (float, complex):  # widened since
        numbers = framework.to_numpy(data)
        if kind in "iu" and len(numbers) and max(int(numbers.max()), -int(numbers.min())) > EXACT:
            for number in numbers.tolist():
                check_exact(number, field)
        data = framework.from_numpy(numbers.astype(np.float64 if known is float else np.complex128))
    return ScalarColumn(field, data, framework, part.validity)


def ragged_form(reader: Reader, part: ColumnParts, field: Field) -> Column:
    """Tensors of mixed shapes."""
    start = end = ranks = sizes = 0
    for number, kind, a, b in fields(reader.data, part.start, part.end):
        if kind == DELIMITED and number == 1:
            start, end = a, b
        elif kind == VARINT and number in (2, 3):
            ranks, sizes = (a, sizes) if number == 2 else (ranks, a)
    flat = decode_tensor(reader, start, end)
    framework = framework_of(flat)
    assert framework is not None
    flat = framework.unwrap(flat)
    if field.kind is not FieldKind.TENSOR or len(framework.shape(flat)) != 1 or framework.is_sparse(flat):
        raise DecodeError(f"the bytes hold a ragged column, but the field is {field}.")
    shapes = _row_shapes(reader, ranks, sizes, part.rows, framework.shape(flat)[0])
    column = RaggedColumn(field, flat, framework, shapes, part.validity)
    dtype = framework.dtype(flat)
    for row in np.flatnonzero(column.valid_rows()).tolist():
        if not field.spec.fits(shapes[row], dtype):
            raise DecodeError(f"row {row}: expected {field.spec}, got {dtype} {format_shape(shapes[row])}.")
    return column


def _row_shapes(reader: Reader, ranks: int, sizes: int, rows: int, total: int) -> list[tuple[int, ...]]:
    axes = np.frombuffer(reader.buffer(ranks), np.uint8)
    every = _int64(reader.buffer(sizes))
    total_axes = int(axes.sum(dtype=np.int64))
    if len(axes) != rows or total_axes != len(every) or (axes > MAX_AXES).any() or (every < 0).any():
        raise DecodeError("the shapes of ragged rows do not fit the column.")
    reader.charge(100 * rows + 40 * len(every))
    ends = [0, *np.cumsum(axes, dtype=np.int64).tolist()]
    flat = every.tolist()
    shapes = [tuple(flat[a:b]) for a, b in pairwise(ends)]
    elements = sum(int(np.prod(shape, dtype=object)) for shape in shapes)
    if elements != total:
        raise DecodeError(f"the rows have other than the {total} elements of the column.")
    return shapes


def text_form(reader: Reader, part: ColumnParts, field: Field) -> Column:
    """Texts."""
    data, offsets = _strings(reader, part)
    if field.kind is not FieldKind.TEXT:
        raise DecodeError(f"the bytes hold a column of texts, but the field is {field}.")
    try:
        characters = len(str(data, "utf-8"))
    except UnicodeDecodeError as error:
        raise DecodeError(f"the text is not UTF-8: {error.reason}.") from error
    if characters != len(data):
        starts = np.frombuffer(data, np.uint8)[offsets[offsets < len(data)]]
        if ((starts & 0xC0) == 0x80).any():
            raise DecodeError("a text begins inside a character.")
    return PackedColumn.from_offsets(field, bytes(data) if reader.options.copy else data, offsets, part.validity)


def blobs_form(reader: Reader, part: ColumnParts, field: Field) -> Column:
    """Blobs."""
    data, offsets = _strings(reader, part)
    if field.kind is not FieldKind.BYTES:
        raise DecodeError(f"the bytes hold a column of blobs, but the field is {field}.")
    return PackedColumn.from_offsets(field, bytes(data) if reader.options.copy else data, offsets, part.validity)


def _strings(reader: Reader, part: ColumnParts) -> tuple[memoryview, NDArray[np.int64]]:
    found = {
        number: a for number, kind, a, _ in fields(reader.data, part.start, part.end) if kind == VARINT and number < 3
    }
    data = reader.buffer(found.get(1, 0))
    reader.charge(2 * len(data) + 80 * part.rows)  # when they are cut
    return data, read_offsets(reader.buffer(found.get(2, 0)), part.rows, len(data))


def read_offsets(buffer: memoryview, rows: int, end: int) -> NDArray[np.int64]:
    """Where each row begins and ends, checked against the rows and the data."""
    if len(buffer) != 8 * (rows + 1):
        raise DecodeError(f"{rows} rows have {8 * (rows + 1)} bytes of offsets, but {len(buffer)} are there.")
    offsets = _int64(buffer)
    if offsets[0] != 0 or offsets[-1] != end or (offsets[1:] < offsets[:-1]).any():
        raise DecodeError("the offsets of a column do not fit its data.")
    return offsets


def _int64(buffer: memoryview) -> NDArray[np.int64]:
    if len(buffer) % 8:
        raise DecodeError(f"{len(buffer)} bytes are no whole number of int64.")
    return np.frombuffer(buffer, OFFSETS).astype(np.int64)


def objects_form(reader: Reader, part: ColumnParts, field: Field) -> Column:
    """Values of any kind, one by one."""
    before = reader.left
    values = [
        decode_value(reader, a, b, field)
        for number, kind, a, b in fields(reader.data, part.start, part.end)
        if number == 1 and kind == DELIMITED
    ]
    reader.charge(24 * len(values) + (before - reader.left))  # pydantic makes its own of lists and dicts
    return ObjectColumn(field, [value if value is None else match(field, value) for value in values])


def read_validity(number: int, rows: int, reader: Reader) -> Validity:
    """Which rows have a value, from the buffer of that number; None where all have one."""
    if not number:
        return None
    marks = np.frombuffer(reader.buffer(number), np.uint8)
    if len(marks) != rows:
        raise DecodeError(f"{rows} rows have {len(marks)} marks of validity.")
    return marks.astype(np.bool_)
