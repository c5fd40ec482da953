"""Fields of many documents at once: reading a column of rows, and setting one whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from quire.errors import ColumnError, PathError
from quire.schema import Field, FieldKind, FieldPath, Schema, parse_path
from quire.tensors import framework_of

MakeArray = Callable[[type[Any], list[Any]], Any]
_Step = tuple[Any, str, Any]  # a document, a field of it, and its new value


class NestedColumn(Sequence[Any]):
    """The nested documents or arrays of many documents, where some may be None; its fields are columns again.

    A column of arrays has a list for each row: `docs.authors.name` is `[['Ada', 'Grace'], [], None]`.
    """

    __slots__ = ("_field", "_items", "_make_array")
    _items: list[Any]

    def __init__(self, field: Field, items: list[Any], make_array: MakeArray) -> None:
        for name, value in (("_field", field), ("_items", items), ("_make_array", make_array)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __getitem__(self, key: Any) -> Any:
        return get_column(self, key, self._make_array) if isinstance(key, str) else self._items[key]

    def __setitem__(self, key: str, values: Any) -> None:
        set_column(self, parse_path(key), values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # no field starts so
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self[name]

    def __setattr__(self, name: str, values: Any) -> None:
        self[name] = values

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return type(self), (self._field, self._items, self._make_array)

    def __eq__(self, other: object) -> bool:
        return bool(self._items == (other._items if isinstance(other, NestedColumn) else other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._field.name}: {len(self)} x {self._field}>"

    @property
    def _documents(self) -> list[Any]:
        return self._items

    @property
    def _schema(self) -> Schema:
        schema: Schema = self._field.document_type.document_schema()
        return schema


def get_column(source: Any, path: str, make_array: MakeArray) -> Any:
    """The values at a path: a list; for nested documents an array, or a `NestedColumn` where some are missing."""
    parts = parse_path(path)
    fields = source._schema.resolve(parts)
    if not fields:
        return source
    field = fields[0]
    column = _wrap(field, _read(source._documents, field), make_array)
    return column if len(parts) == 1 else _descend(column, parts[1:], make_array)


def _descend(column: Any, rest: FieldPath, make_array: MakeArray) -> Any:
    return get_column(column, ".".join(rest), make_array)


def _read(items: list[Any], field: Field) -> list[Any]:
    return [_read_one(item, field.name) for item in items]


def _read_one(item: Any, name: str) -> Any:
    """A field of an item: a document, an array or a list of them, or None."""
    if item is None:
        return None
    if isinstance(item, list) or hasattr(type(item), "_trusted"):
        return [_read_one(inner, name) for inner in _inside(item)]
    return item.__dict__[name]


def _inside(item: Any) -> list[Any]:
    inner: list[Any] = item if isinstance(item, list) else item._documents
    return inner


def _wrap(field: Field, values: list[Any], make_array: MakeArray) -> Any:
    if field.kind not in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
        return values
    nested = [
        make_array(field.document_type, value) if isinstance(value, list) and all(map(_is_document, value)) else value
        for value in values
    ]
    if field.kind is FieldKind.DOCUMENT and not field.nullable and all(_is_document(value) for value in nested):
        return make_array(field.document_type, nested)
    return NestedColumn(field, nested, make_array)


def _is_document(value: Any) -> bool:
    return hasattr(type(value), "document_schema")


def set_column(source: Any, path: FieldPath, values: Any) -> None:
    """Set one field of every document. Lengths and values are checked before any document changes."""
    schema: Schema = source._schema
    if not path:
        raise PathError("the empty path means the documents themselves: set them by position, docs[:] = documents.")
    leaf = schema.resolve(path)[-1]
    where = f"{schema.name}.{'.'.join(path)}"
    steps: list[_Step] = []
    _plan(source._documents, path, _as_list(values, where, leaf), where, steps)
    if path == ("id",) and getattr(source, "_ids", None) is not None:
        source._ids.check_new_ids([value for _, _, value in steps])
    for document, name, value in steps:
        document.__dict__[name] = value
        document.__pydantic_fields_set__.add(name)


def _plan(items: list[Any], path: FieldPath, values: list[Any], where: str, steps: list[_Step]) -> None:
    if len(values) != len(items):
        raise ColumnError(f"{where}: there are {len(items)} documents, got {len(values)} values.")
    for row, (item, value) in enumerate(zip(items, values, strict=True)):
        _plan_one(item, path, value, f"{where}, row {row}", steps)


def _plan_one(item: Any, path: FieldPath, value: Any, where: str, steps: list[_Step]) -> None:
    if item is None:
        if value is not None:
            raise ColumnError(f"{where}: there is no document to hold the value; pass None in this row.")
    elif isinstance(item, list) or hasattr(type(item), "_trusted"):
        _plan(_inside(item), path, _as_list(value, where), where, steps)
    elif len(path) > 1:
        _plan_one(item.__dict__[path[0]], path[1:], value, where, steps)
    else:
        steps.append((item, path[0], _validated(item, path[0], value, where)))


def _validated(document: Any, name: str, value: Any, where: str) -> Any:
    trial = copy.copy(document)
    try:
        setattr(trial, name, value)
    except ValidationError as error:
        raise ColumnError(f"{where}: {error.errors()[0]['msg']}") from error
    return trial.__dict__[name]


def _as_list(values: Any, where: str, leaf: Field | None = None) -> list[Any]:
    framework = framework_of(values)
    if framework is not None and framework.shape(values) and not framework.is_sparse(values):
        if leaf is not None and leaf.kind in (FieldKind.SCALAR, FieldKind.TEXT, FieldKind.BYTES):
            plain: list[Any] = framework.to_numpy(values).tolist()
            return plain
        return framework.unstack(values)
    if isinstance(values, (str, bytes, dict)) or not hasattr(type(values), "__iter__"):
        raise ColumnError(f"{where}: a column is set from a sequence with a value for each document, got {values!r}.")
    return list(values)
