"""Large tensors of documents that wait to be encoded, in the memory of the column that they are to be.

A function makes new tensors for every document. Held until a record batch is full, they would take fresh memory all
the time, which costs more than what is computed in it. Here they are copied as they come, into memory that was used
before, and what the function has made is free again for the next document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from quire.columns import Column, Columns, StackOptions, TensorColumn, collect_extra_states, gather, stack_values
from quire.columns._columns import _SETTERS
from quire.schema import Schema
from quire.storage import Layout, TensorCodec, take_buffer
from quire.tensors import get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


Tensors: TypeAlias = "Mapping[str, NDArray[Any]]"
"""By the name of a field, the tensors of all documents in one array."""
_RAGGED = StackOptions(shapes="ragged")


class Arena:
    """Room for the large tensors of so many bytes of documents, and how many are in it."""

    def __init__(self, layout: Layout, size: int) -> None:
        self._forms = [form for form in layout.codecs if type(form) is TensorCodec and form.is_large]
        self._rows = max(1, size // max(1, sum(form.width for form in self._forms)))
        self._type = layout.schema.document_type
        self._data: dict[str, NDArray[Any]] = {}
        self._used = 0
        self._whole = True

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another document."""
        return bool(self._forms) and self._used >= self._rows

    def taken(self, document: Any) -> Any:
        """The document, or another like it with its large tensors in here; not all of them can be."""
        values = document.__dict__
        if not self._whole or not self._forms or type(document) is not self._type:
            self._whole = False
            return document
        if not all(_fits(form, values.get(form.field.name)) for form in self._forms):
            self._whole = False
            return document
        return self._copied(document, values)

    def _copied(self, document: Any, values: dict[str, Any]) -> Any:
        made, content = object.__new__(self._type), values.copy()
        put_content, put_names, put_extra, put_private = _SETTERS
        for form in self._forms:
            name = form.field.name
            data = self._data.get(name)
            if data is None:
                data = self._data[name] = self._room(form)
            data[self._used] = values[name]
            content[name] = data[self._used]
        put_content(made, content)
        put_names(made, document.__pydantic_fields_set__)
        put_extra(made, document.__pydantic_extra__)
        put_private(made, document.__pydantic_private__)
        self._used += 1
        return made

    def _room(self, form: TensorCodec) -> NDArray[Any]:
        found: NDArray[Any] = take_buffer(self._rows * form.width).view(form.dtype)
        return found.reshape(self._rows, *form.shape)

    def columns(self) -> Tensors:
        """The tensors of all documents by field, if all of them are in here; it is then as good as new."""
        found = {name: data[: self._used] for name, data in self._data.items()} if self._whole else {}
        self._data, self._used, self._whole = {}, 0, True
        return found


def _fits(form: TensorCodec, value: Any) -> bool:
    return type(value) is np.ndarray and value.dtype == form.dtype and value.shape == form.shape


def stack_around(schema: Schema, documents: list[Any], tensors: Tensors) -> Columns:
    """The columns of documents, some of whose tensors lie in columns already."""
    rows = [document.__dict__ for document in documents]
    numpy, columns = get_framework("numpy"), dict[str, Column]()
    for field in schema.fields:
        path = f"{schema.name}.{field.name}"
        if field.name in tensors:
            columns[field.name] = TensorColumn(field, tensors[field.name], numpy)
        else:
            columns[field.name] = stack_values(field, gather(rows, field.name, path, None), _RAGGED, path)
    return Columns(schema, columns, len(rows), None, collect_extra_states(schema, documents))
