"""Lists and one-dimensional tensors of rows: their lengths, and ranges of their elements, without Python objects.

The length of a row is the number of items of a list, or the first axis of a tensor; it is 0 where a row has no value.
Shards of format 2 have the lengths of their rows in the block table. Those of other shards are read from the offsets of
the column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from quire.errors import DecodeError, OptionError
from quire.schema import FieldPath, join_path
from quire.storage._arrow_codec import ArrowCodec, NumberCodec, arrow_compute
from quire.storage._layout import Layout
from quire.storage._nested_codecs import DocumentCodec, ListCodec, OffsetsCodec
from quire.storage._row_locations import RowLocations
from quire.storage._tensor_codecs import ComplexCodec, RaggedTensorCodec, TensorCodec

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ElementRanges(NamedTuple):
    """Elements of rows in memory: the address of the first one, and their bytes. `owner` keeps the memory mapped."""

    addresses: NDArray[np.int64]
    sizes: NDArray[np.int64]
    owner: RowLocations

    def copy(self, span: slice, target: NDArray[np.uint8], places: NDArray[np.int64]) -> None:
        """Copy the elements of some rows into an array of bytes, those of each row from its place on."""
        addresses, sizes = self.addresses[span], self.sizes[span]
        if len(sizes) > 1:
            # Rows that are neighbours in memory and in the target, as in the stored order, are copied as one.
            is_next = (addresses[:-1] + sizes[:-1] == addresses[1:]) & (places[:-1] + sizes[:-1] == places[1:])
            firsts = np.flatnonzero(np.concatenate([[True], ~is_next]))
            addresses, places, sizes = addresses[firsts], places[firsts], np.add.reduceat(sizes, firsts)
        self.owner.addresses.memory.copy_ranges(addresses, sizes, target, places)


# --- lengths


def find_codec(layout: Layout, path: FieldPath) -> tuple[ArrowCodec, int]:
    """Return the codec of a field, also inside of nested documents, and the number of its column in the layout."""
    codec = layout.find_codec(path)
    if codec is None:
        raise OptionError(
            f"{join_path(path)!r} is not among the columns that the dataset reads, or not in a document: columns in "
            "arrays of documents have several values for each row."
        )
    return codec, [each.field.name for each in layout.codecs].index(path[0])


def has_lengths(codec: ArrowCodec) -> bool:
    """Whether rows of a field have a length: it is a list, an array of documents, or a tensor with an axis."""
    if isinstance(codec, TensorCodec):
        return bool(codec.shape) and not isinstance(codec, ComplexCodec)
    return isinstance(codec, (OffsetsCodec, RaggedTensorCodec))


def stored_lengths(codecs: Sequence[ArrowCodec], batch: Any, above: FieldPath = ()) -> Iterator[tuple[str, Any]]:
    """Yield the paths and lengths of all lists and tensors of any shape in a record batch of a layout."""
    for codec in codecs:
        name = codec.field.name
        if isinstance(codec, DocumentCodec) or (has_lengths(codec) and not isinstance(codec, TensorCodec)):
            # Of a struct, `field` ignores that it may be null; a null in a column of documents is a length of 0.
            array = batch.column(name) if isinstance(batch, pa.RecordBatch) else _child(batch, name)
            if isinstance(codec, DocumentCodec):
                yield from stored_lengths(codec.codecs, array, (*above, name))
            else:
                yield join_path((*above, name)), measure_array(codec, array)


def _child(array: pa.Array, name: str) -> pa.Array:
    """Return a field of a struct, with a null where the struct itself is null."""
    return arrow_compute().struct_field(array, [array.type.get_field_index(name)])


def lengths_at(layout: Layout, path: FieldPath, batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Return the lengths of the rows of a record batch at a path."""
    array: Any = batch.column(path[0])
    for name in path[1:]:
        array = _child(array, name)
    return measure_array(find_codec(layout, path)[0], array)


def measure_array(codec: ArrowCodec, array: pa.Array) -> NDArray[np.int64]:
    """Return the length of each row of an array of the codec."""
    pc = arrow_compute()
    if isinstance(codec, TensorCodec):
        lengths = np.full(len(array), codec.shape[0], np.int64)
    elif isinstance(codec, RaggedTensorCodec):
        # The first number of each shape; a tensor without an axis counts as empty.
        shapes = _child(array, codec.shape.field.name)
        ends = pc.fill_null(pc.list_value_length(shapes), 0)
        axes = np.asarray(ends, np.int64)
        sizes = np.asarray(shapes.flatten(), np.int64)
        lengths = np.zeros(len(array), np.int64)
        lengths[axes > 0] = sizes[(np.cumsum(axes) - axes)[axes > 0]]
        return lengths
    elif isinstance(codec, NumberCodec):
        lengths = np.asarray(pc.fill_null(array, 0), np.int64)
    else:
        lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0), np.int64)
    if array.null_count:
        lengths = np.where(np.asarray(array.is_valid()), lengths, 0)
    return lengths


# --- elements


def element_dtype(codec: ArrowCodec, path: str) -> np.dtype[Any]:
    """Return the dtype of the elements of a list of numbers or of one-dimensional tensors; others are an error."""
    if isinstance(codec, ListCodec) and isinstance(codec.item, NumberCodec) and codec.item.number_type is not bool:
        if codec.item.field.nullable:
            raise OptionError(f"{path!r}: items that may be None cannot be packed; declare list[int].")
        return np.dtype(codec.item.types[codec.item.number_type][1])
    if isinstance(codec, RaggedTensorCodec):
        if codec.dtype is None:
            raise OptionError(
                f"{path!r}: rows of a field without a dtype may have different ones, and cannot be packed. Declare it: "
                "NdArray[int32, 'length']."
            )
        return codec._numpy_dtype(None)
    if isinstance(codec, TensorCodec) and len(codec.shape) == 1 and codec.storage == "fixed":
        return codec.dtype
    raise OptionError(
        f"{path!r}: {codec.field} is no sequence of numbers. Packing takes lists of numbers, and tensors with one axis "
        "and a dtype, such as NdArray[int32, 'length']."
    )


def locate_elements(
    codec: ArrowCodec,
    rows: RowLocations,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> ElementRanges:
    """Locate `sizes` elements from `starts` on of each row, whose checksums are verified where that is due.

    `lengths` are the lengths that the rows must have: a caller that computed places from them would otherwise read or
    write the wrong ones.
    """
    width = element_dtype(codec, codec.path).itemsize
    if isinstance(codec, TensorCodec):
        part, begins, expected = codec.first + 1, rows.positions * codec.width, math.prod(codec.shape)
        own = np.full(len(rows), expected, np.int64)
    elif isinstance(codec, RaggedTensorCodec):
        part = codec.data.first + 3
        begins, own_bytes = rows.read_offsets(codec.data.first + 1)
        if (own_bytes % width).any():
            raise DecodeError(f"{codec.path}: the bytes of a row are no whole number of elements.")
        own = own_bytes // width
    else:
        assert isinstance(codec, ListCodec)
        part = codec.item.first + 1
        begins, own = rows.read_offsets(codec.first + 1)
        begins = begins * width
    differs = np.flatnonzero(own != lengths)
    if len(differs):
        row = int(differs[0])
        raise DecodeError(
            f"{codec.path}: a row has {int(own[row]):,} elements, and {int(lengths[row]):,} were expected. Tensors "
            "with more than one axis cannot be packed."
        )
    begins, sizes = begins + starts * width, sizes * width
    rows.addresses.verify_pieces(part, rows.batches, begins, sizes)
    return ElementRanges(rows.part(part) + begins, sizes, rows)
