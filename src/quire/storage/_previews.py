"""Previews of values for tables: small values as they are; of large ones, the size and the beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.columns import Validity
from quire.schema import FieldPath
from quire.storage._arrow_codec import ArrowCodec, BytesCodec, MessageCodec, TextCodec, mask_missing
from quire.storage._nested_codecs import DocumentCodec, DocumentsCodec, ListCodec
from quire.storage._row_locations import RowLocations
from quire.storage._tensor_codecs import ComplexCodec, RaggedTensorCodec, TensorCodec

if TYPE_CHECKING:
    from numpy.typing import NDArray


_MAX_VECTOR = 4096
"""Vectors of at most this number of elements are shown with their values."""
_MAX_ITEMS = 64
"""Lists of at most this number of items are shown with their values."""
_MAX_MESSAGE = 1 << 14
"""Values that are stored as messages are shown if these have at most this number of bytes."""


class BytesPreview(NamedTuple):
    """The beginning of a text or a blob, and the number of bytes of all of it."""

    content: bytes
    size: int


class ItemCount(NamedTuple):
    """The number of items of a list, or of documents of an array."""

    items: int


class TensorPreview(NamedTuple):
    """The shape and dtype of a tensor, and the tensor itself if it is a small vector."""

    shape: tuple[int, ...]
    dtype: str
    values: NDArray[Any] | None = None


def preview_columns(codecs: Sequence[ArrowCodec], rows: RowLocations, head: int) -> dict[FieldPath, list[Any]]:
    """Return the columns of rows, nested ones by their path: lists of values, or of one of the classes above."""
    return dict(_preview_fields(codecs, rows, head, (), None))


def _preview_fields(
    codecs: Sequence[ArrowCodec], rows: RowLocations, head: int, above: FieldPath, validity: Validity
) -> Iterator[tuple[FieldPath, list[Any]]]:
    for codec in codecs:
        path = (*above, codec.field.name)
        own = rows.validity(codec.first)
        if validity is not None:
            own = validity if own is None else own & validity
        # Fields of a missing document have values of some kind in the data; they are shown as missing.
        if isinstance(codec, DocumentCodec):
            yield from _preview_fields(codec.codecs, rows, head, path, own)
        else:
            yield path, mask_missing(_preview_values(codec, rows, head), own)


def _preview_values(codec: ArrowCodec, rows: RowLocations, head: int) -> list[Any]:
    """Return the values of rows, or what a table shows of them; only the bytes that are shown are read."""
    if isinstance(codec, (TextCodec, BytesCodec)):
        starts, sizes = rows.read_offsets(codec.first + 1)
        short = np.minimum(sizes, head)
        data = rows.gather_ranges(codec.first + 1, starts, short)
        ends = np.cumsum(short).tolist()
        heads = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return [BytesPreview(content, size) for content, size in zip(heads, sizes.tolist(), strict=True)]
    if isinstance(codec, TensorCodec) and not isinstance(codec, ComplexCodec):
        name = codec.dtype.name
        if len(codec.shape) != 1 or prod(codec.shape) > _MAX_VECTOR:
            return [TensorPreview(codec.shape, name)] * len(rows)
        vectors = rows.gather_fixed(codec.first + 1, codec.width).view(codec.dtype)
        return [TensorPreview(codec.shape, name, vector) for vector in vectors]
    if isinstance(codec, RaggedTensorCodec):
        shapes = codec.gather_shapes(rows)
        dtypes = [codec.dtype or ""] * len(rows) if codec.dtypes is None else codec.dtypes.gather(rows).values()
        previews = [TensorPreview(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        is_vector = [len(shape) == 1 and 0 < shape[0] <= _MAX_VECTOR for shape in shapes]
        for i, value in _gather_some(codec, rows, np.flatnonzero(is_vector)):
            if value is not None:
                previews[i] = previews[i]._replace(values=np.asarray(value))
        return previews
    if isinstance(codec, DocumentsCodec):
        return [ItemCount(size) for size in rows.read_offsets(codec.first + 1)[1].tolist()]
    if isinstance(codec, (ListCodec, MessageCodec)):
        sizes = rows.read_offsets(codec.first + 1)[1]
        is_list = isinstance(codec, ListCodec)
        values: list[Any] = [ItemCount(size) if is_list else BytesPreview(b"", size) for size in sizes.tolist()]
        for i, value in _gather_some(codec, rows, np.flatnonzero(sizes <= (_MAX_ITEMS if is_list else _MAX_MESSAGE))):
            values[i] = value
        return values
    return codec.gather(rows).values()


def _gather_some(codec: ArrowCodec, rows: RowLocations, positions: NDArray[np.intp]) -> Iterator[tuple[int, Any]]:
    """Yield the values of some of the rows, with their positions."""
    if len(positions):
        yield from zip(positions.tolist(), codec.gather(rows.select(positions)).values(), strict=True)
