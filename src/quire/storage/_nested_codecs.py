"""Forms of documents inside documents, and of lists."""

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
from quire.storage._arrow_codec import ArrowCodec, BytesCodec, NumberCodec, TextCodec, address_of, validity_bitmap
from quire.storage._row_locations import RowLocations

if TYPE_CHECKING:
    from numpy.typing import NDArray


PLACEHOLDER = pa.field("__rows__", pa.bool_(), nullable=False)
"""The column of a class without fields: it keeps the number of rows, and Parquet has no structs without a field."""


def placeholder(rows: int) -> pa.Array:
    """The column of a class without fields."""
    return pa.array(np.zeros(rows, np.bool_))


class DocumentCodec(ArrowCodec):
    """A nested document: a struct of its fields."""

    __slots__ = ("codecs", "schema")
    own_parts = 1

    def __init__(self, field: Field, path: str, schema: Schema, codecs: Sequence[ArrowCodec]) -> None:
        self.schema, self.codecs = schema, codecs
        super().__init__(field, path, pa.struct([_inside(codec) for codec in codecs] or [PLACEHOLDER]))

    @property
    def children(self) -> Sequence[ArrowCodec]:
        return self.codecs

    @property
    def is_narrow(self) -> bool:
        """Whether not all of a document is read."""
        inner = [codec for codec in self.codecs if isinstance(codec, DocumentCodec)]
        return len(self.codecs) < len(self.field.document_type.model_fields) or any(codec.is_narrow for codec in inner)

    def child_arrays(self, array: pa.Array) -> list[pa.Array]:
        return [array.field(codec.field.name) for codec in self.codecs]

    def locate_own(self, array: pa.Array) -> list[int]:
        return []

    def encode(self, column: Column) -> pa.Array:
        columns = column.columns if isinstance(column, DocumentColumn) else self._stacked(column.values())
        return self.encode_columns(columns)

    def encode_columns(self, columns: Columns) -> pa.Array:
        """The array of all rows of the columns."""
        arrays = encode_fields(self.codecs, columns, self.path)
        return self.array(arrays, len(columns), columns.validity)

    def array(self, arrays: Sequence[pa.Array], rows: int, validity: Validity) -> pa.Array:
        """The array of documents, from those of their fields."""
        children = list(arrays) or [placeholder(rows)]
        return pa.Array.from_buffers(self.type, rows, [validity_bitmap(validity)], children=children)

    def _stacked(self, documents: list[Any]) -> Columns:
        return stack(self.schema, documents, StackOptions(shapes="ragged"), self.path)

    def gather(self, rows: RowLocations) -> DocumentColumn:
        return DocumentColumn(self.field, self.gather_columns(rows))

    def gather_columns(self, rows: RowLocations) -> Columns:
        """The columns of the documents of rows."""
        made = {codec.field.name: codec.gather(rows) for codec in self.codecs}
        return Columns(self.schema, made, len(rows), rows.validity(self.first))


def _inside(codec: ArrowCodec) -> pa.Field:
    """A field of a nested document; where there is none, its fields have no values."""
    return codec.arrow_field().with_nullable(True)  # noqa: FBT003 - pyarrow's signature


def encode_fields(codecs: Sequence[ArrowCodec], columns: Columns, path: str) -> list[pa.Array]:
    """The arrays of all fields; columns that lack one, or hold more, are an error."""
    _refuse_extra_states(columns, path)
    for codec in codecs:
        if codec.field.name not in columns.columns:
            raise codec.fail("the batch has no column for it.")
    return [codec.encode(columns.columns[codec.field.name]) for codec in codecs]


def _refuse_extra_states(columns: Columns, path: str) -> None:
    """Rows that hold more than the schema would lose it."""
    for row, more in enumerate(columns.extra_states or ()):
        if more is None:
            continue
        if more.document_type is not columns.schema.document_type:
            raise EncodeError(
                f"{path}, row {row}: the shards hold documents of {columns.schema.name}, got the subclass "
                f"{more.document_type.__name__}, whose other fields would be lost. Write it as a dataset of its own."
            )
        if more.extra or more.fields:
            names = ", ".join([*(more.extra or ()), *more.fields])
            raise EncodeError(f"{path}, row {row}: {columns.schema.name} has no fields for {names}; declare them.")


class _OffsetsCodec(ArrowCodec):
    """Rows of any number of items: offsets, and the items of all rows one behind the other."""

    __slots__ = ("item",)
    own_parts = 3  # validity, offsets, how many items there are

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

    def array(self, items: pa.Array, offsets: NDArray[np.int64], validity: Any) -> pa.Array:
        """The array of lists."""
        if offsets[-1] >= 1 << 31:
            raise self.fail("one record batch would hold 2,147,483,648 items or more; write fewer rows at a time.")
        buffers = [validity_bitmap(validity), pa.py_buffer(offsets.astype(np.int32))]
        return pa.Array.from_buffers(self.type, len(offsets) - 1, buffers, children=[items])

    def inside(self, rows: RowLocations) -> tuple[RowLocations, NDArray[np.int64]]:
        """The items of the rows, and where those of each begin and end."""
        try:
            starts, sizes = rows.content(self.first + 1)
        except DecodeError as error:
            raise DecodeError(f"{self.path}: {error}") from error
        return rows.spread(starts, sizes), np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


class DocumentsCodec(_OffsetsCodec):
    """Arrays of documents: a list of structs."""

    __slots__ = ()
    item: DocumentCodec

    def __init__(self, field: Field, path: str, item: DocumentCodec) -> None:
        super().__init__(field, path, item, pa.field("item", item.type, nullable=False))

    def encode(self, column: Column) -> pa.Array:
        if isinstance(column, DocumentsColumn):
            items = self.item.encode_columns(column.flat)
            return self.array(items, column.offsets - column.offsets[0], column.validity)
        arrays = [() if array is None else array for array in column.values()]
        offsets = _offsets(arrays)
        documents = ObjectColumn(self.item.field, list(chain.from_iterable(arrays)))
        return self.array(self.item.encode(documents), offsets, validity_of(column.values()))

    def gather(self, rows: RowLocations) -> DocumentsColumn:
        inner, offsets = self.inside(rows)
        return DocumentsColumn(self.field, self.item.gather_columns(inner), offsets, rows.validity(self.first))


_ITEMS: dict[FieldKind, Any] = {FieldKind.SCALAR: NumberCodec, FieldKind.TEXT: TextCodec, FieldKind.BYTES: BytesCodec}


class ListCodec(_OffsetsCodec):
    """Lists of numbers, texts or blobs."""

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        item = field.items[0]
        codec = _ITEMS[item.kind](item, f"{path}[]")
        super().__init__(field, path, codec, pa.field("item", codec.type, nullable=item.nullable))

    def encode(self, column: Column) -> pa.Array:
        values = column.values()
        lists = [() if value is None else value for value in values]
        items = self.item.encode(ObjectColumn(self.item.field, list(chain.from_iterable(lists))))
        return self.array(items, _offsets(lists), validity_of(values))

    def gather(self, rows: RowLocations) -> ObjectColumn:
        inner, offsets = self.inside(rows)
        items, there = self.item.gather(inner).values(), rows.validity(self.first)
        lists: list[Any] = [items[a:b] for a, b in pairwise(offsets.tolist())]
        if there is not None:
            lists = [found if valid else None for found, valid in zip(lists, there.tolist(), strict=True)]
        return ObjectColumn(self.field, lists)


def _offsets(lists: Sequence[Any]) -> NDArray[np.int64]:
    sizes = np.fromiter(map(len, lists), np.int64, len(lists))
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def has_list_codec(field: Field) -> bool:
    """Whether a field is a list whose items have columns of their own."""
    if field.kind is not FieldKind.LIST or field.type is not list or len(field.items) != 1:
        return False
    item = field.items[0]
    plain = {FieldKind.SCALAR: (int, float, bool), FieldKind.TEXT: (str,), FieldKind.BYTES: (bytes,)}
    return item.type in plain.get(item.kind, ()) or item.wrapper is not None
