"""Documents in the record batches that engines carry: out of them for the user's function, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from quire.array import DocumentArray, DocumentBatch
from quire.columns import Columns, ObjectColumn, StackOptions, stack
from quire.distributed._arenas import Tensors, stack_around
from quire.document import BaseDocument
from quire.errors import DecodeError, OptionError
from quire.schema import FieldKind, parse_path
from quire.storage import (
    CLASS_KEY,
    Layout,
    Paths,
    RowLocations,
    class_from_arrow,
    conform_fields,
    loaded_class,
    resolve_columns,
)

_RAGGED = StackOptions(shapes="ragged")
_inferred: dict[tuple[bytes, str], type[Any]] = {}
"""Classes that were made from Arrow schemas, so that each is made once in a process."""


@dataclass(frozen=True, eq=False)
class DocumentLayout:
    """How documents of a class, or some of their fields, lie in record batches.

    It travels to workers. A class that was made from an Arrow schema is nowhere to be found there, and goes as that
    schema (`origin`) instead.
    """

    document_type: type[Any]
    paths: Paths = None
    origin: tuple[bytes, str] | None = None

    @cached_property
    def layout(self) -> Layout:
        """The forms of the fields."""
        return Layout(self.document_type.document_schema(), paths=self.paths)

    @property
    def fields(self) -> pa.Schema:
        """The Arrow schema of frames."""
        return self.layout.fields

    def __reduce__(self) -> tuple[Callable[..., DocumentLayout], tuple[Any, ...]]:
        if self.origin is None:
            return DocumentLayout, (self.document_type, self.paths)
        return _from_origin, (*self.origin, self.paths)

    def is_like(self, other: DocumentLayout) -> bool:
        """Whether record batches of the one are those of the other."""
        return self.document_type is other.document_type and self.fields.equals(other.fields, check_metadata=True)

    def chosen(self, columns: Iterable[str]) -> DocumentLayout:
        """Some of the fields, by their paths."""
        paths = resolve_columns(self.layout.schema, columns)
        return DocumentLayout(self.document_type, paths, self.origin)

    def checked(self, path: str) -> DocumentLayout:
        """The layout itself, if it has a field at the path that holds one value a row."""
        fields = self.layout.schema.resolve(parse_path(path))
        if not fields or any(field.kind is FieldKind.DOCUMENTS for field in fields):
            raise OptionError(f"{path!r}: the path of a field with one value a row is needed.")
        return self

    # --- out of record batches

    def conformed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A record batch in this layout, without a copy where it is in it already."""
        if batch.schema.equals(self.fields, check_metadata=True):
            return batch
        return conformed(self, batch)

    def decode(self, batch: pa.RecordBatch) -> Columns:
        """The columns of a record batch, copied."""
        return self.layout.gather(self._located(batch))

    def decode_parts(self, batch: pa.RecordBatch, rows: int) -> Iterator[Columns]:
        """The same for so many rows at a time; of their large columns, no more are copied than are asked for."""
        sizes = [min(rows, len(batch) - start) for start in range(0, len(batch), rows)]
        return self.layout.gather_parts(self._located(batch), sizes)

    def _located(self, batch: pa.RecordBatch) -> RowLocations:
        batch = self.conformed(batch)
        addresses = self.layout.addresses()
        addresses.add(self.layout.locate(batch), batch)
        return RowLocations(addresses, np.zeros(len(batch), np.int64), np.arange(len(batch), dtype=np.int64))

    def batch(self, columns: Columns) -> DocumentBatch[Any]:
        """Columns as users see them."""
        return DocumentBatch[self.document_type]._wrap(columns)  # type: ignore[name-defined]

    def array(self, columns: Columns) -> DocumentArray[Any]:
        """The documents of columns."""
        return DocumentArray[self.document_type]._trusted(columns.documents())  # type: ignore[name-defined]

    # --- into record batches

    def encode(
        self, documents: list[Any], ids: list[Any] | None = None, tensors: Tensors | None = None
    ) -> pa.RecordBatch:
        """Documents as a record batch; with other ids than their own, if some are given.

        `tensors` are those of all documents by field, where they lie one behind the other already.
        """
        columns = stack_around(self.layout.schema, documents, tensors) if tensors else self._stacked(documents)
        if ids is not None:
            columns.set_column(ObjectColumn(columns.columns["id"].field, ids))
        return self.layout.encode(columns)

    def _stacked(self, documents: list[Any]) -> Columns:
        return stack(self.layout.schema, documents, _RAGGED)

    @cached_property
    def has_text_id(self) -> bool:
        """Whether documents have an id that is a text."""
        field = self.layout.schema.by_name.get("id")
        return field is not None and field.type is str


def conformed(target: DocumentLayout, batch: pa.RecordBatch) -> pa.RecordBatch:
    """A record batch of any origin in the layout of a class."""
    names = batch.schema.names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DecodeError(f"the data has two columns {twice!r}. Give one of them another name.")
    found = dict(zip(names, zip(batch.schema, batch.columns, strict=True), strict=True))
    arrays = conform_fields(target.layout.codecs, found, target.layout.schema, None, len(batch))
    return target.layout.batch(arrays, len(batch))


def layout_from_arrow(schema: pa.Schema, document_type: type[Any] | None = None) -> DocumentLayout:
    """The layout of a class; without one, of that which the schema names if it is loaded, or else of one made of it."""
    name = (schema.metadata or {}).get(CLASS_KEY, b"").decode()
    known = document_type or loaded_class(schema)
    if known is not None:
        return DocumentLayout(known)
    return _from_origin(schema.serialize().to_pybytes(), name.rpartition(":")[2].rpartition(".")[2] or "Row", None)


def _from_origin(schema: bytes, name: str, paths: Paths) -> DocumentLayout:
    key = schema, name
    if key not in _inferred:
        _inferred[key] = class_from_arrow(pa.ipc.read_schema(pa.py_buffer(schema)), name, BaseDocument)  # with ids
    return DocumentLayout(_inferred[key], paths, key)
