"""Columns of one class as those of another class, without a copy of the values that both have in common."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from quire.columns._column import Column, RaggedColumn, ScalarColumn, TensorColumn
from quire.columns._columns import Columns, DocumentColumn, DocumentsColumn
from quire.columns._stack import StackOptions, default_column, stack_values, validate_values
from quire.errors import ColumnError
from quire.schema import Field, FieldKind, Schema
from quire.tensors import format_shape, plain_tensor_type


def retype_columns(
    columns: Columns, schema: Schema, new: Mapping[str, Column] | None = None, where: str = ""
) -> Columns:
    """Return the rows as columns of another class: its fields by name, `new` columns, and defaults for the others.

    Memory is shared with columns whose values the fields take unchanged; the others are validated and converted.
    Fields that the class does not declare, and the states of documents beyond their fields, are left out.
    """
    retyped: dict[str, Column] = {}
    missing = []
    for field in schema.fields:
        path = f"{where or schema.name}.{field.name}"
        if new is not None and field.name in new:
            retyped[field.name] = new[field.name]
        elif field.name in columns.columns:
            retyped[field.name] = _retype_column(columns, schema, field, path)
        elif field.required:
            missing.append(field.name)
        else:
            retyped[field.name] = default_column(schema, field, len(columns))
    if missing:
        names = " and ".join(f"{where or schema.name}.{name}" for name in missing)
        required = "is required" if len(missing) == 1 else "are required"
        if where:
            advice = f"pass the column {where.partition('.')[2]!r}"
        else:
            advice = f"pass {', '.join(f'{name}=...' for name in missing)}"
        raise ColumnError(
            f"{names} {required}, and the batch of {columns.schema.name} has no such column: {advice}, or declare a "
            "default."
        )
    return Columns(schema, retyped, len(columns), columns.validity)


def share_columns(columns: Columns) -> Columns:
    """Return the same columns in other dicts, at every level, so that setting a column changes only one of the two."""
    shared = {name: column.map_children(share_columns) for name, column in columns.columns.items()}
    return Columns(columns.schema, shared, columns.length, columns.validity, columns.extra_states)


def _retype_column(columns: Columns, schema: Schema, field: Field, path: str) -> Column:
    column = columns.columns[field.name]
    source = column.field
    if source.nullable and not field.nullable:
        rows = np.flatnonzero(~column.valid_rows() & (True if columns.validity is None else columns.validity))
        if len(rows):
            raise ColumnError(
                f"{path}, row {rows[0]}: there is no value, and the field takes no None ({len(rows)} of {len(column)} "
                f"rows). Fill them first, with fill_missing({{{field.name!r}: value}}), or declare {field} | None."
            )
    if _takes_unchanged(columns, source, schema, field):
        return column.map_children(share_columns).with_field(field)
    inner = None if field.recursive else field.kind
    if isinstance(column, DocumentColumn) and inner is FieldKind.DOCUMENT:
        return DocumentColumn(field, retype_columns(column.columns, field.document_type.document_schema(), where=path))
    if isinstance(column, DocumentsColumn) and inner is FieldKind.DOCUMENTS:
        flat = retype_columns(column.flat, field.document_type.document_schema(), where=path)
        return DocumentsColumn(field, flat, column.offsets, column.validity)
    if isinstance(column, (TensorColumn, RaggedColumn)) and source.kind is field.kind is FieldKind.TENSOR:
        _check_rows_fit(column, field, path)
        return column.with_field(field)
    values = validate_values(schema, field, column.values(), path, columns.validity, stored=True)
    return stack_values(field, values, StackOptions(shapes="ragged"), path)


def _takes_unchanged(columns: Columns, source: Field, schema: Schema, field: Field) -> bool:
    """Return whether every value of one field, except None, is a value of another field."""
    if replace(source, name=field.name, required=field.required, nullable=field.nullable) != field:
        return False
    if not field.constrained:
        return True
    # Fields only know that they are constrained. The constraints are equal if both annotations are, and hold only if
    # no preprocessing has changed the values since.
    own = columns.schema.document_type.document_schema().by_name.get(source.name)
    infos = [each.document_type.model_fields.get(field.name) for each in (columns.schema, schema)]
    annotations = [None if info is None else (info.annotation, info.metadata) for info in infos]
    return own is source and annotations[0] == annotations[1]


def _check_rows_fit(column: TensorColumn | RaggedColumn, field: Field, path: str) -> None:
    """Raise an error for the first row whose shape or dtype a tensor field does not take."""
    data = column.data if isinstance(column, TensorColumn) else column.flat
    dtype = column.framework.dtype(data)
    shapes: Sequence[Sequence[int]]
    rows: Sequence[int] = np.flatnonzero(column.valid_rows()).tolist()
    if isinstance(column, RaggedColumn):
        shapes = column.shapes
    elif column.shapes is not None:
        shapes = column.shapes.tolist()
    else:  # all rows have one shape
        shapes, rows = [column.framework.shape(data)[1:]], [0]
    for row in rows:
        if not field.spec.fits(tuple(shapes[row]), dtype):
            raise ColumnError(
                f"{path}: expected rows of {field.spec}, but the column has {dtype} {format_shape(shapes[row])}. "
                f"Pass {field.name}=... with rows of that type, or change the field."
            )


def relax_field(column: Column) -> Column:
    """Remove the shape and dtype from the field of a tensor column that does not have them."""
    if isinstance(column, ScalarColumn) or column.field.kind is not FieldKind.TENSOR:
        return column
    # A batch of another shape or dtype is fine, but its schema must not claim the declared ones.
    if isinstance(column, TensorColumn):
        framework, spec = column.framework, column.field.spec
        if column.shapes is None and not spec.fits(framework.shape(column.data)[1:], framework.dtype(column.data)):
            column.field = replace(column.field, type=plain_tensor_type(framework.name))
    elif isinstance(column, RaggedColumn) and not column.field.spec.accepts(column.framework.dtype(column.flat)):
        column.field = replace(column.field, type=plain_tensor_type(column.framework.name))
    return column


def with_fields(schema: Schema, columns: Iterable[Column]) -> Schema:
    """Return the schema with the fields of columns."""
    fields = tuple(column.field for column in columns)
    same = len(fields) == len(schema.fields) and all(map(operator.is_, fields, schema.fields))
    return schema if same else replace(schema, fields=fields)
