"""What a table shows of rows: small values as they are; of what may be large, the size and the beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.columns import Validity
from quire.schema import FieldPath
from quire.storage._arrow_codec import ArrowCodec, BinaryCodec, BytesCodec, MessageCodec, TextCodec, mask_missing
from quire.storage._nested_codecs import DocumentCodec, DocumentsCodec, ListCodec
from quire.storage._row_locations import RowLocations
from quire.storage._tensor_codecs import ComplexCodec, RaggedTensorCodec, TensorCodec

if TYPE_CHECKING:
    from numpy.typing import NDArray


_VECTOR = 4096
"""Tensors of so many elements are shown with their values."""
_ITEMS = 64
"""Lists of so many items are."""
_MESSAGE = 1 << 14
"""Values without a column of their own are, up to so many bytes."""


class BytesPreview(NamedTuple):
    """The beginning of a text or a blob, and how many bytes it has."""

    content: bytes
    size: int


class ItemCount(NamedTuple):
    """How many items, or documents, there are."""

    items: int


class TensorPreview(NamedTuple):
    """The shape and dtype of a tensor, and the tensor itself if it is a small vector."""

    shape: tuple[int, ...]
    dtype: str
    values: NDArray[Any] | None = None


def preview_columns(codecs: Sequence[ArrowCodec], rows: RowLocations, head: int) -> dict[FieldPath, list[Any]]:
    """The values of each column of the rows, nested ones by their path: values, or one of the classes above."""
    return dict(_preview_fields(codecs, rows, head, (), None))


def _preview_fields(
    codecs: Sequence[ArrowCodec], rows: RowLocations, head: int, above: FieldPath, there: Validity
) -> Iterator[tuple[FieldPath, list[Any]]]:
    for codec in codecs:
        path = (*above, codec.field.name)
        own = _both(there, rows.validity(codec.first))
        if isinstance(codec, DocumentCodec):
            yield from _preview_fields(codec.codecs, rows, head, path, own)
        else:
            yield path, mask_missing(_preview_field(codec, rows, head), own)


def _both(first: Validity, second: Validity) -> Validity:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _preview_field(codec: ArrowCodec, rows: RowLocations, head: int) -> list[Any]:
    if isinstance(codec, (TextCodec, BytesCodec)):
        return _heads(codec, rows, head)
    if isinstance(codec, TensorCodec) and not isinstance(codec, ComplexCodec):
        return _tensors(codec, rows)
    if isinstance(codec, RaggedTensorCodec):
        return _ragged(codec, rows)
    if isinstance(codec, DocumentsCodec):
        return [ItemCount(size) for size in rows.content(codec.first + 1)[1].tolist()]
    if isinstance(codec, (ListCodec, MessageCodec)):
        return _if_small(codec, rows)
    return codec.gather(rows).values()


def _heads(codec: BinaryCodec, rows: RowLocations, head: int) -> list[Any]:
    starts, sizes = rows.content(codec.first + 1)
    short = np.minimum(sizes, head)
    data = rows.bytes_at(codec.first + 1, starts, short)
    ends = np.cumsum(short).tolist()
    cut = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return [BytesPreview(content, size) for content, size in zip(cut, sizes.tolist(), strict=True)]


def _tensors(codec: TensorCodec, rows: RowLocations) -> list[Any]:
    name = codec.dtype.name
    if len(codec.shape) != 1 or prod(codec.shape) > _VECTOR:
        return [TensorPreview(codec.shape, name)] * len(rows)
    data = rows.fixed(codec.first + 1, codec.width).view(codec.dtype)
    return [TensorPreview(codec.shape, name, row) for row in data]


def _ragged(codec: RaggedTensorCodec, rows: RowLocations) -> list[Any]:
    shapes = [tuple(shape or ()) for shape in codec._shape.gather(rows).values()]
    names = codec._names.get("dtype")
    dtypes = [codec._dtype or ""] * len(rows) if names is None else names.gather(rows).values()
    made = [TensorPreview(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    vectors = [i for i, shape in enumerate(shapes) if len(shape) == 1 and 0 < shape[0] <= _VECTOR]
    if vectors:
        picked = np.array(vectors)
        some = RowLocations(rows.addresses, rows.batches[picked], rows.places[picked], rows.framework)
        for i, value in zip(vectors, codec.gather(some).values(), strict=True):
            if value is not None:
                made[i] = made[i]._replace(values=np.asarray(value))
    return made


def _if_small(codec: ListCodec | MessageCodec, rows: RowLocations) -> list[Any]:
    """The values of the rows whose content is small; of the others, how much there is."""
    sizes = rows.content(codec.first + 1)[1]
    is_list = isinstance(codec, ListCodec)
    small = np.flatnonzero(sizes <= (_ITEMS if is_list else _MESSAGE))
    values: list[Any] = [ItemCount(size) if is_list else BytesPreview(b"", size) for size in sizes.tolist()]
    some = RowLocations(rows.addresses, rows.batches[small], rows.places[small], rows.framework)
    for i, value in zip(small.tolist(), codec.gather(some).values() if len(small) else [], strict=True):
        values[i] = value
    return values
