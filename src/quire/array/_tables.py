"""Arrays and batches from tables: columns are checked as a whole where that is enough, else row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from quire._extra_fields import Extra
from quire.array._rows import common_type
from quire.codec._flat import is_spread, read_header
from quire.codec._frames import as_frame, document_parts, document_presence, read_numbers, read_objects, to_frame
from quire.codec._json import from_dict
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    ObjectColumn,
    ScalarColumn,
    StackOptions,
    Validity,
    default_column,
    stack_values,
    validate_values,
)
from quire.document import BaseDocument
from quire.errors import ColumnError, DecodeError, EncodeError, SchemaError
from quire.schema import Field, FieldKind, FieldPath, Schema, join_path
from quire.tensors import get_framework
from quire.typing import ID

if TYPE_CHECKING:
    from numpy.typing import NDArray

Hold = Callable[[Field, list[Any], str], Column]
_UNKNOWN = Field("", FieldKind.ANY, Any, nullable=True, required=False)
_PLAIN = (bool, int, float, complex, str)
_ID = get_args(ID)[1:]
_CONFIG = {"strict", "allow_inf_nan", "coerce_numbers_to_str"}  # and all that begins with str_


def row_type(array_type: type[Any], call: str) -> type[Any]:
    """The document class that rows become; an array without a type cannot tell."""
    if array_type.document_type is BaseDocument:
        name = array_type.__name__
        raise SchemaError(f"{name}.{call} does not know what the rows are: say {name}[Student].{call}.")
    document_type: type[Any] = array_type.document_type
    return document_type


def table_schema(array: Any, call: str) -> Schema:
    """The columns of an array; of one without a type, those of the class that all its documents have."""
    found = common_type(array)
    if found is BaseDocument and set(map(type, array._documents)) - {BaseDocument}:
        raise EncodeError(f"{call}: the array holds documents of several classes, which make no table. Use to_json().")
    schema: Schema = found.document_schema()
    return schema


def to_dataframe(array: Any) -> Any:
    """The documents as a data frame."""
    schema = table_schema(array, "to_dataframe()")
    parts = document_parts(schema, array._documents)
    return to_frame(parts, len(array), document_presence(schema, array._documents))


def as_objects(field: Field, values: list[Any], _: str) -> Column:
    """A column of an array's values, which stay what they are."""
    return ObjectColumn(field, values)


def as_stacked(shapes: Any) -> Hold:
    """A column of a batch."""
    options = StackOptions(shapes=shapes)
    return lambda field, values, path: stack_values(field, values, options, path)


def documents_from_frame(document_type: type[Any], table: Any, extra: Extra) -> list[Any]:
    """The rows of a data frame as documents."""
    found = _from_frame(document_type, table, extra, as_objects)
    return found.documents() if isinstance(found, Columns) else found


def columns_from_frame(batch_type: type[Any], table: Any, extra: Extra, shapes: Any) -> Columns:
    """The rows of a data frame as columns."""
    found = _from_frame(row_type(batch_type, "from_dataframe()"), table, extra, as_stacked(shapes))
    return found if isinstance(found, Columns) else batch_type(found, shapes=shapes)._columns


def _from_frame(document_type: type[Any], table: Any, extra: Extra, hold: Hold) -> Columns | list[Any]:
    frame = as_frame(table)
    schema: Schema = document_type.document_schema()
    header = read_header(schema, list(frame.columns), extra, f"{schema.name} from a data frame")
    series = {leaf.path: frame.iloc[:, index] for index, leaf in enumerate(header) if leaf is not None}
    reader = _Reader(series, hold, len(frame), extra)
    if _needs_rows(schema) or any(leaf is not None and leaf.is_unknown for leaf in header):
        rows = enumerate(reader.rows(schema))
        return [from_dict(document_type, row, f", row {index}", extra=extra) for index, row in rows]
    try:
        return reader.columns(schema)
    except ColumnError as error:
        raise DecodeError(str(error)) from error


def _needs_rows(schema: Schema) -> bool:
    """Whether documents are checked by more than the types of their fields."""
    document_type = schema.document_type
    told = document_type.__pydantic_decorators__
    checks = told.field_validators or told.validators or told.model_validators or told.root_validators
    config = any(key in _CONFIG or key.startswith("str_") for key in document_type.model_config)
    names = any(field.spec.names for field in schema.fields if field.kind is FieldKind.TENSOR)
    if checks or config or names or document_type.__pydantic_post_init__ or document_type.__pydantic_custom_init__:
        return True
    return any(_needs_rows(field.document_type.document_schema()) for field in schema.fields if is_spread(field))


@dataclass(frozen=True)
class _Reader:
    """The series of a data frame by path."""

    series: dict[FieldPath, Any]
    hold: Hold
    length: int
    extra: Extra

    def columns(self, schema: Schema, prefix: FieldPath = (), rows: Validity = None) -> Columns:
        """The columns of a schema; `rows` is False where there is no document."""
        made = {field.name: self._column(schema, field, (*prefix, field.name), rows) for field in schema.fields}
        return Columns(schema, made, self.length, rows)

    def _column(self, schema: Schema, field: Field, path: FieldPath, rows: Validity) -> Column:
        inside = [given for given in self.series if given[: len(path)] == path]
        where = f"{schema.name}.{field.name}"
        if not inside:
            column = default_column(schema, field, self.length)
            return column if rows is None else self.hold(field, _where(column.values(), rows), where)
        if inside == [path]:
            return self._leaf(schema, field, path, rows)
        there = self._present(inside) if field.nullable else np.ones(self.length, np.bool_)
        there = there if rows is None else there & rows
        nested = self.columns(field.document_type.document_schema(), path, None if there.all() else there)
        return DocumentColumn(field, nested)

    def _leaf(self, schema: Schema, field: Field, path: FieldPath, rows: Validity) -> Column:
        series, where = self.series[path], f"{schema.name}.{field.name} (column {join_path(path)!r})"
        plain = _is_plain(schema, field)
        if plain and field.kind is FieldKind.SCALAR:
            found = read_numbers(series, field)
            if found is not None and _allowed(field, found[1], rows):
                return ScalarColumn(field, found[0], get_framework("numpy"), _both(found[1], rows))
        values = _read(series, field, where)
        values = values if rows is None else _where(values, rows)
        if not (plain and field.kind is FieldKind.TEXT and _all_text(field, values, rows)):
            values = validate_values(schema, field, values, where, rows, self.extra, by_name=True)
        return self.hold(field, values, where)

    def _present(self, inside: Iterable[FieldPath]) -> NDArray[np.bool_]:
        """The rows in which one of the columns has a value."""
        found = [self.series[path].notna().to_numpy() for path in inside]
        made: NDArray[np.bool_] = reduce(np.logical_or, found)
        return made

    def rows(self, schema: Schema, prefix: FieldPath = ()) -> list[dict[str, Any]]:
        """Every row as a dict of the fields that the frame has."""
        names, columns = [], []
        for field in schema.fields:
            path = (*prefix, field.name)
            inside = [given for given in self.series if given[: len(path)] == path]
            if inside:
                names.append(schema.accepted[field.name][1])
                columns.append(self._row_values(schema, field, path, inside))
        for path in self.series:  # of a class that keeps what it has no field for
            if path[:-1] == prefix and path[-1] not in schema.by_name:
                names.append(path[-1])
                columns.append(_read(self.series[path], _UNKNOWN, f"{schema.name}.{path[-1]}"))
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or [{}] * self.length

    def _row_values(self, schema: Schema, field: Field, path: FieldPath, inside: list[FieldPath]) -> list[Any]:
        if inside == [path]:
            return _read(self.series[path], field, f"{schema.name}.{field.name} (column {join_path(path)!r})")
        rows: list[Any] = self.rows(field.document_type.document_schema(), path)
        return _where(rows, self._present(inside)) if field.nullable else rows


def _read(series: Any, field: Field, where: str) -> list[Any]:
    try:
        return read_objects(series, field)
    except DecodeError as error:
        raise DecodeError(f"{where}, {error}") from None


def _where(values: list[Any], rows: NDArray[np.bool_]) -> list[Any]:
    return [value if there else None for value, there in zip(values, rows.tolist(), strict=True)]


def _both(found: Validity, rows: Validity) -> Validity:
    return found if rows is None else rows if found is None else found & rows


def _allowed(field: Field, found: Validity, rows: Validity) -> bool:
    """Whether every row that has a document has a number, or may have none."""
    return field.nullable or found is None or (rows is not None and bool((found | ~rows).all()))


def _is_plain(schema: Schema, field: Field) -> bool:
    """Whether a field takes every value of its class: no constraint, no literal, no validator in the annotation."""
    info = schema.document_type.model_fields[field.name]
    if field.type not in _PLAIN or any(extra not in _ID for extra in info.metadata):
        return False
    return info.annotation is field.type or set(get_args(info.annotation)) == {field.type, type(None)}


def _all_text(field: Field, values: list[Any], rows: Validity) -> bool:
    types = set(map(type, values))
    if types <= {str}:
        return True
    missing = values.count(None) if None in values else 0
    return types <= {str, type(None)} and (field.nullable or (rows is not None and missing == int((~rows).sum())))
