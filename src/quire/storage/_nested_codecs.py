"""Codecs of nested documents, arrays of documents, and lists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    DocumentsColumn,
    ObjectColumn,
    StackOptions,
    Validity,
    stack,
    validity_of,
)
from quire.errors import DecodeError, EncodeError
from quire.schema import Field, FieldKind, Schema
from quire.storage._arrow_codec import (
    ArrowCodec,
    BytesCodec,
    NumberCodec,
    TextCodec,
    address_of,
    mask_missing,
    to_offsets,
    validity_bitmap,
)
from quire.storage._block_table import count_nodes
from quire.storage._row_locations import RowLocations

if TYPE_CHECKING:
    from numpy.typing import NDArray


PLACEHOLDER = pa.field("__rows__", pa.bool_(), nullable=False)
"""The column of a class without fields. It keeps the number of rows, and Parquet has no structs without fields."""


def placeholder_array(rows: int) -> pa.Array:
    """Return the column of a class without fields."""
    return pa.array(np.zeros(rows, np.bool_))


class DocumentCodec(ArrowCodec):
    """A nested document as a struct of its fields."""

    __slots__ = ("codecs", "schema")
    own_parts = 1

    def __init__(self, field: Field, path: str, schema: Schema, codecs: Sequence[ArrowCodec]) -> None:
        self.schema, self.codecs = schema, codecs
        # All fields are nullable, because those of a missing document are null. Readers check the fields of the others.
        fields = [codec.arrow_field().with_nullable(True) for codec in codecs]  # noqa: FBT003 - pyarrow's signature
        super().__init__(field, path, pa.struct(fields or [PLACEHOLDER]))

    @property
    def children(self) -> Sequence[ArrowCodec]:
        return self.codecs

    @property
    def is_narrow(self) -> bool:
        """Whether only some of the fields of the document, or of documents in it, are read."""
        nested = [codec for codec in self.codecs if isinstance(codec, DocumentCodec)]
        return len(self.codecs) < len(self.field.document_type.model_fields) or any(c.is_narrow for c in nested)

    def child_arrays(self, array: pa.Array) -> list[pa.Array]:
        return [array.field(codec.field.name) for codec in self.codecs]

    def locate_own(self, array: pa.Array) -> list[int]:
        return []

    def can_read(self, field: pa.Field) -> bool:
        arrow_type = field.type
        return pa.types.is_struct(arrow_type) and all(
            (at := arrow_type.get_field_index(child.field.name)) >= 0 and child.can_read(arrow_type.field(at))
            for child in self.codecs
        )

    def field_nodes(self, arrow_type: pa.DataType, first: int) -> list[int]:
        fields = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        nested = [child.field_nodes(*find_node(child, fields, first + 1)) for child in self.codecs]
        return [first, *chain.from_iterable(nested)]

    def encode(self, column: Column) -> pa.Array:
        if isinstance(column, DocumentColumn):
            return self.encode_columns(column.columns)
        # Documents as objects, such as items of a list: their fields become columns first.
        return self.encode_columns(stack(self.schema, column.values(), StackOptions(shapes="ragged"), self.path))

    def encode_columns(self, columns: Columns) -> pa.Array:
        """Return the array of all rows of the columns."""
        return self.from_arrays(encode_fields(self.codecs, columns, self.path), len(columns), columns.validity)

    def from_arrays(self, arrays: Sequence[pa.Array], rows: int, validity: Validity) -> pa.Array:
        """Return the array of documents, from the arrays of their fields."""
        if not arrays:
            return pa.Array.from_buffers(
                self.type, rows, [validity_bitmap(validity)], children=[placeholder_array(rows)]
            )
        fields = [codec.field_of_type(array.type) for codec, array in zip(self.codecs, arrays, strict=True)]
        arrow_type = pa.struct([field.with_nullable(True) for field in fields])  # noqa: FBT003 - pyarrow's signature
        return pa.Array.from_buffers(arrow_type, rows, [validity_bitmap(validity)], children=list(arrays))

    def gather(self, rows: RowLocations) -> DocumentColumn:
        return DocumentColumn(self.field, self.gather_columns(rows))

    def gather_columns(self, rows: RowLocations) -> Columns:
        """Copy the columns of the documents of rows."""
        columns = {codec.field.name: codec.gather(rows) for codec in self.codecs}
        return Columns(self.schema, columns, len(rows), rows.validity(self.first))


def find_node(codec: ArrowCodec, fields: Sequence[pa.Field], first: int) -> tuple[pa.DataType, int]:
    """Return the type of a codec's field, and the number of its field node, if `first` is that of the first field."""
    # Arrow numbers nodes in depth-first order, so the nodes of all fields before this one come first.
    for field in fields:
        if field.name == codec.field.name:
            return field.type, first
        first += count_nodes(field.type)
    raise DecodeError(f"{codec.path}: the file has no column for it")


def encode_fields(codecs: Sequence[ArrowCodec], columns: Columns, path: str) -> list[pa.Array]:
    """Return the arrays of all fields. Missing columns, and values that no field takes, are errors."""
    # Documents may have more than the fields of the schema: those of a subclass, or values of unknown names that were
    # kept. A column for them would exist in some shards only, so they are errors, and not dropped silently.
    for row, extra in enumerate(columns.extra_states or ()):
        if extra is None:
            continue
        if extra.document_type is not columns.schema.document_type:
            raise EncodeError(
                f"{path}, row {row}: the shards hold documents of {columns.schema.name}, got the subclass "
                f"{extra.document_type.__name__}, whose other fields would be lost. Write it as a dataset of its own."
            )
        if extra.extra or extra.fields:
            names = ", ".join([*(extra.extra or ()), *extra.fields])
            raise EncodeError(f"{path}, row {row}: {columns.schema.name} has no fields for {names}; declare them.")
    for codec in codecs:
        if codec.field.name not in columns.columns:
            raise codec.encode_error("the batch has no column for it.")
    return [codec.encode(columns.columns[codec.field.name]) for codec in codecs]


class OffsetsCodec(ArrowCodec):
    """Rows of any number of items: offsets, and the items of all rows concatenated.

    The parts are the validity, the offsets, and the number of items in the array.
    """

    __slots__ = ("item",)
    own_parts = 3

    def __init__(self, field: Field, path: str, item: ArrowCodec, item_field: pa.Field) -> None:
        self.item = item
        super().__init__(field, path, pa.list_(item_field))

    @property
    def children(self) -> tuple[ArrowCodec, ...]:
        return (self.item,)

    def child_arrays(self, array: pa.Array) -> list[pa.Array]:
        return [array.values]

    def locate_own(self, array: pa.Array) -> list[int]:
        return [address_of(array.buffers()[1]) + array.offset * 4, len(array.values)]

    def from_items(self, items: pa.Array, offsets: NDArray[np.int64], validity: Any) -> pa.Array:
        """Return the array of lists."""
        if offsets[-1] >= 1 << 31:  # the offsets of Arrow's lists have 32 bits
            raise self.encode_error(
                "one record batch would hold 2,147,483,648 items or more; write fewer rows at a time."
            )
        buffers = [validity_bitmap(validity), pa.py_buffer(offsets.astype(np.int32))]
        arrow_type = self.type
        if items.type != arrow_type.value_type:
            arrow_type = pa.list_(arrow_type.value_field.with_type(items.type))
        return pa.Array.from_buffers(arrow_type, len(offsets) - 1, buffers, children=[items])

    def locate_items(self, rows: RowLocations) -> tuple[RowLocations, NDArray[np.int64]]:
        """Return the locations of the items of rows, and the offsets of rows among them."""
        try:
            starts, sizes = rows.read_offsets(self.first + 1)
        except DecodeError as error:
            raise DecodeError(f"{self.path}: {error}") from error
        return rows.items(starts, sizes), to_offsets(sizes)


class DocumentsCodec(OffsetsCodec):
    """Arrays of documents as lists of structs: the fields of all documents are columns, as in a batch of them."""

    __slots__ = ()
    item: DocumentCodec

    def __init__(self, field: Field, path: str, item: DocumentCodec) -> None:
        super().__init__(field, path, item, pa.field("item", item.type, nullable=False))

    def can_read(self, field: pa.Field) -> bool:
        return pa.types.is_list(field.type) and self.item.can_read(field.type.value_field)

    def field_nodes(self, arrow_type: pa.DataType, first: int) -> list[int]:
        return [first, *self.item.field_nodes(arrow_type.value_type, first + 1)]

    def encode(self, column: Column) -> pa.Array:
        if isinstance(column, DocumentsColumn):
            return self.from_items(self.item.encode_columns(column.flat), column.offsets, column.validity)
        arrays = [() if array is None else array for array in column.values()]
        documents = ObjectColumn(self.item.field, list(chain.from_iterable(arrays)))
        return self.from_items(
            self.item.encode(documents), to_offsets([*map(len, arrays)]), validity_of(column.values())
        )

    def gather(self, rows: RowLocations) -> DocumentsColumn:
        items, offsets = self.locate_items(rows)
        return DocumentsColumn(self.field, self.item.gather_columns(items), offsets, rows.validity(self.first))


_ITEM_CODECS: dict[FieldKind, Any] = {
    FieldKind.SCALAR: NumberCodec,
    FieldKind.TEXT: TextCodec,
    FieldKind.BYTES: BytesCodec,
}
_ITEM_TYPES = {FieldKind.SCALAR: (int, float, bool), FieldKind.TEXT: (str,), FieldKind.BYTES: (bytes,)}


class ListCodec(OffsetsCodec):
    """Lists of numbers, texts or blobs."""

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        item = field.items[0]
        codec = _ITEM_CODECS[item.kind](item, f"{path}[]")
        super().__init__(field, path, codec, pa.field("item", codec.type, nullable=item.nullable))

    def encode(self, column: Column) -> pa.Array:
        values = column.values()
        lists = [() if value is None else value for value in values]
        items = self.item.encode(ObjectColumn(self.item.field, list(chain.from_iterable(lists))))
        return self.from_items(items, to_offsets([*map(len, lists)]), validity_of(values))

    def gather(self, rows: RowLocations) -> ObjectColumn:
        # The items of all rows are gathered at once, and cut into lists: one call instead of one for each row.
        locations, offsets = self.locate_items(rows)
        items = self.item.gather(locations).values()
        lists = [items[start:end] for start, end in pairwise(offsets.tolist())]
        return ObjectColumn(self.field, mask_missing(lists, rows.validity(self.first)))


def has_list_codec(field: Field) -> bool:
    """Whether a field is a list whose items have a column of their own."""
    if field.kind is not FieldKind.LIST or field.type is not list or len(field.items) != 1:
        return False
    item = field.items[0]
    return item.type in _ITEM_TYPES.get(item.kind, ()) or item.wrapper is not None
