"""What kind of column values make, whatever the schema says of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quire._protocols import is_array_type, is_document_type
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    DocumentsColumn,
    ObjectColumn,
    ScalarColumn,
    StackOptions,
    TensorColumn,
    Validity,
    collect_extra_states,
    gather,
    have_own_attributes,
    stack_values,
    validity_of,
)
from quire.data._arena import Arena
from quire.errors import ColumnError
from quire.schema import Field, FieldKind, Schema, simple_kind
from quire.tensors import describe, framework_of, plain_tensor_type

Where = Callable[[int], str]
"""How a message names a row."""


def column_of(field: Field, values: list[Any], options: StackOptions, path: str, where: Where) -> Column:
    """The column of values that a function gave: of the field's kind if they are, else of their own."""
    found = value_field(field, values, path, where)
    if found.kind is FieldKind.DOCUMENT and not found.recursive:
        return DocumentColumn(found, loose_stack(found.document_type.document_schema(), values, options, path, where))
    if found.kind is FieldKind.DOCUMENTS and not found.recursive:
        return _arrays_column(found, values, options, path, where)
    return _honest(stack_values(found, _plain_numbers(found, values), options, path))


def tensors_column(field: Field, values: list[Any], arena: Arena) -> Column | None:
    """The column of torch's tensors that are alike, stacked in the memory of the arena; None for other values."""
    framework = framework_of(values[0]) if values and field.kind is FieldKind.TENSOR else None
    if framework is None or framework.name != "torch" or field.type.framework not in (None, framework):
        return None
    data = arena.stack(values)
    return None if data is None else _honest(TensorColumn(field, data, framework))


def _arrays_column(field: Field, values: list[Any], options: StackOptions, path: str, where: Where) -> Column:
    """The column of arrays, whose documents may hold something else than their class says."""
    if not set(map(type, values)) <= {field.type, type(None)} or have_own_attributes(field.type, values):
        return ObjectColumn(field, values)
    arrays = [[] if array is None else array._documents for array in values]
    sizes = np.fromiter(map(len, arrays), np.int64, len(arrays))
    owners = np.repeat(np.arange(len(arrays)), sizes)
    documents = [document for array in arrays for document in array]
    schema = field.document_type.document_schema()
    flat = loose_stack(schema, documents, options, path, lambda row: where(int(owners[row])))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return DocumentsColumn(field, flat, offsets, validity_of(values))


def _plain_numbers(field: Field, values: list[Any]) -> list[Any]:
    """numpy's numbers as Python's; integers among floats as floats."""
    if field.kind is not FieldKind.SCALAR or set(map(type, values)) <= {field.type, type(None)}:
        return values
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    return [float(value) if field.type is float and type(value) is int else value for value in plain]


def _honest(column: Column) -> Column:
    """The column, whose field asks for no other shape or dtype than it has."""
    if (
        not isinstance(column, TensorColumn)
        or isinstance(column, ScalarColumn)
        or column.field.kind is not FieldKind.TENSOR
    ):
        return column
    framework, spec = column.framework, column.field.spec
    if column.shapes is None and not spec.fits(framework.shape(column.data)[1:], framework.dtype(column.data)):
        column.field = replace(column.field, type=plain_tensor_type(framework.name))
    return column


def loose_stack(schema: Schema, documents: list[Any], options: StackOptions, path: str, where: Where) -> Columns:
    """The columns of documents whose fields may hold something else than their class says."""
    validity = validity_of(documents)
    rows = [None if document is None else document.__dict__ for document in documents]
    made = {
        field.name: column_of(field, gather(rows, field.name, path, validity), options, f"{path}.{field.name}", where)
        for field in schema.fields
    }
    extra_states = collect_extra_states(schema, documents)
    return Columns(with_fields(schema, made.values()), made, len(rows), validity, extra_states)


def with_fields(schema: Schema, columns: Iterable[Column]) -> Schema:
    """The schema with the fields that columns have."""
    fields = tuple(column.field for column in columns)
    same = len(fields) == len(schema.fields) and all(map(operator.is_, fields, schema.fields))
    return schema if same else replace(schema, fields=fields)


def value_field(field: Field, values: list[Any], path: str, where: Where) -> Field:
    """The field as the values have it; values of several kinds are an error."""
    missing = any(value is None for value in values)
    kinds = {(type(value)): value for value in values if value is not None}
    fields = {tp: _field_of(field, value) for tp, value in kinds.items()}
    different = set(fields.values())
    if not different or all(_same_kind(field, found) for found in different):
        return field if field.nullable or not missing else replace(field, nullable=True)
    if len(different) > 1 and {found.type for found in different} != {int, float}:
        raise _mixed(values, fields, path, where)
    found = next(found for found in different if len(different) == 1 or found.type is float)
    return replace(found, nullable=missing)


def _same_kind(field: Field, found: Field) -> bool:
    if field.kind in (FieldKind.ANY, FieldKind.UNION):
        return True
    same = field.kind is found.kind
    if field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
        return same and issubclass(found.type, field.type)
    if field.kind is FieldKind.TENSOR:
        return same and (field.type.framework is None or field.type.framework is found.type.framework)
    return same and (field.kind is not FieldKind.SCALAR or found.type is field.type)


def _field_of(field: Field, value: Any) -> Field:
    plain = Field(field.name, FieldKind.ANY, type(value))
    framework = framework_of(value)
    if framework is not None:
        return replace(plain, kind=FieldKind.TENSOR, type=plain_tensor_type(framework.name))
    if isinstance(value, np.generic):
        return replace(plain, kind=FieldKind.SCALAR, type=type(value.item()))
    if is_document_type(type(value)):
        return replace(plain, kind=FieldKind.DOCUMENT, recursive=field.recursive)
    if is_array_type(type(value)):
        return replace(plain, kind=FieldKind.DOCUMENTS, recursive=field.recursive)
    return replace(plain, kind=simple_kind(type(value)))


def _mixed(values: list[Any], fields: Mapping[type, Field], path: str, where: Where) -> ColumnError:
    first = next(value for value in values if value is not None)
    row = next(
        row for row, value in enumerate(values) if value is not None and fields[type(value)] != fields[type(first)]
    )
    return ColumnError(
        f"{path}: all rows must hold the same kind of value, but {where(row)} gives {describe(values[row])} "
        f"where others give {describe(first)}."
    )


def column_of_data(field: Field, data: Any, rows: tuple[int, Validity], options: StackOptions, path: str) -> Column:
    """The column of what a batched function gave: a tensor, a batch, or a sequence of values.

    `rows` are how many there are, and which had a value before: in a tensor, which cannot tell, others stay without.
    """
    number, validity = rows
    columns = getattr(data, "_columns", None)
    if isinstance(columns, Columns):
        column: Column = DocumentColumn(
            replace(
                field, kind=FieldKind.DOCUMENT, type=columns.schema.document_type, nullable=columns.validity is not None
            ),
            columns,
        )
    elif isinstance(arrays := getattr(data, "_column", None), DocumentsColumn):
        column = arrays
    elif (framework := framework_of(data)) is not None and framework.shape(data) and not framework.is_sparse(data):
        column = _tensor_column(field, framework, framework.unwrap(data), validity)
    elif isinstance(data, (str, bytes, Mapping)) or not hasattr(type(data), "__iter__"):
        raise ColumnError(f"{path}: a batched function gives a tensor, a batch or a list, not {describe(data)}.")
    else:
        column = column_of(field, list(data), options, path, lambda row: f"row {row} of the batch")
    if len(column) != number:
        raise ColumnError(f"{path}: the batch has {number} rows, and the function gave {len(column)}.")
    return column


def _tensor_column(field: Field, framework: Any, data: Any, validity: Validity) -> Column:
    missing = validity is not None and not validity.all()
    if field.kind is FieldKind.SCALAR and len(framework.shape(data)) == 1:
        kind = framework.to_numpy(data).dtype.kind if framework.convertible(data) is None else "?"
        tp = {"b": bool, "i": int, "u": int, "f": float, "c": complex}.get(kind)
        if tp is not None:
            return ScalarColumn(replace(field, type=tp), data, framework, validity)
    same = field.kind is FieldKind.TENSOR and field.type.framework in (None, framework)
    tensor_type = plain_tensor_type(framework.name)
    tensor = field if same else Field(field.name, FieldKind.TENSOR, tensor_type, nullable=missing)
    return _honest(TensorColumn(tensor, data, framework, validity))
