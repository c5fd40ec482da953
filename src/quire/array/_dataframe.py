"""Documents and columns from data frames.

A column of plain numbers or texts is taken as a whole; other values are validated one by one. Rows of a class with
validators of its own are built as documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from quire._extra_fields import Extra
from quire.codec import from_dict, is_spread, read_header, read_numbers, read_objects, to_pandas
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    ObjectColumn,
    ScalarColumn,
    ShapePolicy,
    StackOptions,
    Validity,
    default_column,
    stack,
    stack_values,
    validate_values,
)
from quire.errors import ColumnError, DecodeError
from quire.schema import Field, FieldKind, FieldPath, Schema, join_path
from quire.tensors import get_framework
from quire.typing import ID

if TYPE_CHECKING:
    from numpy.typing import NDArray

MakeColumn = Callable[[Field, list[Any], str], Column]
"""Makes a column of a field's values; the text is the path for errors."""

_UNKNOWN = Field("", FieldKind.ANY, Any, nullable=True, required=False)
_PLAIN = (bool, int, float, complex, str)
_ID = get_args(ID)[1:]
_CONFIG = {"strict", "allow_inf_nan", "coerce_numbers_to_str"}
"""Settings of pydantic that change how values are validated, besides those that start with `str_`."""


def documents_from_frame(document_type: type[Any], table: Any, extra: Extra) -> list[Any]:
    """Convert the rows of a data frame to documents."""
    content = _read_frame(document_type, table, extra, lambda field, values, _: ObjectColumn(field, values))
    return content.documents() if isinstance(content, Columns) else content


def columns_from_frame(document_type: type[Any], table: Any, extra: Extra, shapes: ShapePolicy) -> Columns:
    """Convert the rows of a data frame to columns."""
    options = StackOptions(shapes=shapes)
    content = _read_frame(
        document_type, table, extra, lambda field, values, path: stack_values(field, values, options, path)
    )
    return content if isinstance(content, Columns) else stack(document_type.document_schema(), content, options)


def _read_frame(document_type: type[Any], table: Any, extra: Extra, make_column: MakeColumn) -> Columns | list[Any]:
    frame = to_pandas(table)
    schema: Schema = document_type.document_schema()
    header = read_header(schema, list(frame.columns), extra, f"{schema.name} from a data frame")
    series = {leaf.path: frame.iloc[:, index] for index, leaf in enumerate(header) if leaf is not None}
    reader = _Reader(series, make_column, len(frame), extra)
    if _needs_rows(schema) or any(leaf is not None and leaf.is_unknown for leaf in header):
        rows = enumerate(reader.rows(schema))
        return [from_dict(document_type, row, f", row {index}", extra=extra) for index, row in rows]
    try:
        return reader.columns(schema)
    except ColumnError as error:
        raise DecodeError(str(error)) from error


def validate_columns(columns: Columns) -> Columns:
    """Validate columns with the types of a class by what else the class demands: constraints, and validators.

    Values of plain types, and tensors of a fixed shape, are taken as they are.
    """
    schema = columns.schema
    if _needs_rows(schema) and columns.columns:
        names = [schema.accepted[name][1] for name in columns.columns]
        rows = [*zip(*(column.values() for column in columns.columns.values()), strict=True)]
        documents = [
            from_dict(schema.document_type, dict(zip(names, row, strict=True)), f", row {index}", extra="ignore")
            for index, row in enumerate(rows)
        ]
        return stack(schema, documents, StackOptions(shapes="ragged"))
    try:
        return _validate_leaves(columns)
    except ColumnError as error:
        raise DecodeError(str(error)) from error


def _validate_leaves(columns: Columns) -> Columns:
    schema, validated = columns.schema, dict[str, Column]()
    for name, column in columns.columns.items():
        field, where = column.field, f"{schema.name}.{name}"
        is_fixed_tensor = field.kind is FieldKind.TENSOR and None not in (field.spec.dtype, field.spec.fixed_shape)
        if column.children:
            validated[name] = column.map_children(_validate_leaves)
        elif is_fixed_tensor or _is_plain(schema, field):
            validated[name] = column
        else:
            values = validate_values(schema, field, column.values(), where, columns.validity, "ignore", stored=True)
            validated[name] = stack_values(field, values, StackOptions(shapes="ragged"), where)
    return replace(columns, columns=validated)


def _needs_rows(schema: Schema) -> bool:
    """Return whether documents are validated by more than the types of their fields."""
    document_type = schema.document_type
    decorators = document_type.__pydantic_decorators__
    checks = (
        decorators.field_validators
        or decorators.validators
        or decorators.model_validators
        or decorators.root_validators
    )
    config = any(key in _CONFIG or key.startswith("str_") for key in document_type.model_config)
    names = any(field.spec.names for field in schema.fields if field.kind is FieldKind.TENSOR)
    if checks or config or names or document_type.__pydantic_post_init__ or document_type.__pydantic_custom_init__:
        return True
    return any(_needs_rows(field.document_type.document_schema()) for field in schema.fields if is_spread(field))


@dataclass(frozen=True)
class _Reader:
    """The series of a data frame by path."""

    series: dict[FieldPath, Any]
    make_column: MakeColumn
    length: int
    extra: Extra

    def columns(self, schema: Schema, prefix: FieldPath = (), rows: Validity = None) -> Columns:
        """Return the columns of a schema; `rows` is False in rows without a document."""
        columns = {field.name: self._column(schema, field, (*prefix, field.name), rows) for field in schema.fields}
        return Columns(schema, columns, self.length, rows)

    def _column(self, schema: Schema, field: Field, path: FieldPath, rows: Validity) -> Column:
        inside = self._paths_inside(path)
        where = f"{schema.name}.{field.name}"
        if not inside:
            column = default_column(schema, field, self.length)
            return column if rows is None else self.make_column(field, _mask(column.values(), rows), where)
        if inside == [path]:
            return self._leaf(schema, field, path, rows)
        present = self._present(inside) if field.nullable else np.ones(self.length, np.bool_)
        present = present if rows is None else present & rows
        nested = self.columns(field.document_type.document_schema(), path, None if present.all() else present)
        return DocumentColumn(field, nested)

    def _paths_inside(self, path: FieldPath) -> list[FieldPath]:
        return [known for known in self.series if known[: len(path)] == path]

    def _leaf(self, schema: Schema, field: Field, path: FieldPath, rows: Validity) -> Column:
        series, where = self.series[path], f"{schema.name}.{field.name} (column {join_path(path)!r})"
        plain = _is_plain(schema, field)
        if plain and field.kind is FieldKind.SCALAR:
            result = read_numbers(series, field)
            if result is not None:
                numbers, valid = result
                if field.nullable or valid is None or (rows is not None and bool((valid | ~rows).all())):
                    validity = valid if rows is None else rows if valid is None else valid & rows
                    return ScalarColumn(field, numbers, get_framework("numpy"), validity)
        values = _read_values(series, field, where)
        values = values if rows is None else _mask(values, rows)
        if not (plain and field.kind is FieldKind.TEXT and _all_text(field, values, rows)):
            values = validate_values(schema, field, values, where, rows, self.extra, by_name=True)
        return self.make_column(field, values, where)

    def _present(self, inside: Iterable[FieldPath]) -> NDArray[np.bool_]:
        """Return for each row whether one of the columns has a value."""
        present: NDArray[np.bool_] = reduce(np.logical_or, (self.series[path].notna().to_numpy() for path in inside))
        return present

    def rows(self, schema: Schema, prefix: FieldPath = ()) -> list[dict[str, Any]]:
        """Return every row as a dict of the fields that the frame has."""
        names, columns = [], []
        for field in schema.fields:
            path = (*prefix, field.name)
            inside = self._paths_inside(path)
            if inside:
                names.append(schema.accepted[field.name][1])
                columns.append(self._row_values(schema, field, path, inside))
        for path in self.series:  # extra fields, of a class with extra='allow'
            if path[:-1] == prefix and path[-1] not in schema.by_name:
                names.append(path[-1])
                columns.append(_read_values(self.series[path], _UNKNOWN, f"{schema.name}.{path[-1]}"))
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or [{}] * self.length

    def _row_values(self, schema: Schema, field: Field, path: FieldPath, inside: list[FieldPath]) -> list[Any]:
        if inside == [path]:
            return _read_values(self.series[path], field, f"{schema.name}.{field.name} (column {join_path(path)!r})")
        rows: list[Any] = self.rows(field.document_type.document_schema(), path)
        return _mask(rows, self._present(inside)) if field.nullable else rows


def _read_values(series: Any, field: Field, where: str) -> list[Any]:
    try:
        return read_objects(series, field)
    except DecodeError as error:
        raise DecodeError(f"{where}, {error}") from None


def _mask(values: list[Any], rows: NDArray[np.bool_]) -> list[Any]:
    return [value if is_valid else None for value, is_valid in zip(values, rows.tolist(), strict=True)]


def _is_plain(schema: Schema, field: Field) -> bool:
    """Return whether a field takes every value of its class: no constraint, literal or validator in the annotation."""
    info = schema.document_type.model_fields[field.name]
    if field.type not in _PLAIN or any(extra not in _ID for extra in info.metadata):
        return False
    return info.annotation is field.type or set(get_args(info.annotation)) == {field.type, type(None)}


def _all_text(field: Field, values: list[Any], rows: Validity) -> bool:
    """Return whether all values are texts, apart from None where a row may be missing."""
    types = set(map(type, values))
    if types <= {str}:
        return True
    missing = values.count(None) if None in values else 0
    return types <= {str, type(None)} and (field.nullable or (rows is not None and missing == int((~rows).sum())))
