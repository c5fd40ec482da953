"""Infer the column for the results of preprocessing, which may be of other types than the schema says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    relax_field,
    stack_values,
    validity_of,
    with_fields,
)
from quire.data._arena import Arena
from quire.errors import ColumnError
from quire.schema import Field, FieldKind, Schema, simple_kind
from quire.tensors import describe, framework_of, plain_tensor_type

DescribeRow = Callable[[int], str]
"""Describes a row, by its number, in an error message."""


def infer_column(
    field: Field, values: list[Any], options: StackOptions, path: str, describe_row: DescribeRow
) -> Column:
    """Make a column of the results of a function: of the kind of the field if they fit, else of their own kind."""
    inferred = infer_field(field, values, path, describe_row)
    if inferred.kind is FieldKind.DOCUMENT and not inferred.recursive:
        schema = inferred.document_type.document_schema()
        return DocumentColumn(inferred, stack_inferred(schema, values, options, path, describe_row))
    if inferred.kind is FieldKind.DOCUMENTS and not inferred.recursive:
        return _stack_arrays(inferred, values, options, path, describe_row)
    return relax_field(stack_values(inferred, _unify_numbers(inferred, values), options, path))


def stack_tensors(field: Field, values: list[Any], arena: Arena) -> Column | None:
    """Stack torch's tensors of one shape in memory of an arena; None for other values."""
    framework = framework_of(values[0]) if values and field.kind is FieldKind.TENSOR else None
    if framework is None or framework.name != "torch" or field.type.framework not in (None, framework):
        return None
    data = arena.stack(values)
    return None if data is None else relax_field(TensorColumn(field, data, framework))


def _stack_arrays(
    field: Field, values: list[Any], options: StackOptions, path: str, describe_row: DescribeRow
) -> Column:
    """Stack arrays of documents, whose fields may hold other types than their class says."""
    if not set(map(type, values)) <= {field.type, type(None)} or have_own_attributes(field.type, values):
        return ObjectColumn(field, values)
    arrays = [[] if array is None else array._documents for array in values]
    sizes = np.fromiter(map(len, arrays), np.int64, len(arrays))
    owners = np.repeat(np.arange(len(arrays)), sizes)
    documents = [document for array in arrays for document in array]
    schema = field.document_type.document_schema()
    flat = stack_inferred(schema, documents, options, path, lambda row: describe_row(int(owners[row])))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return DocumentsColumn(field, flat, offsets, validity_of(values))


def _unify_numbers(field: Field, values: list[Any]) -> list[Any]:
    """Convert numpy's numbers to Python's, and integers to floats if there are floats."""
    if field.kind is not FieldKind.SCALAR or set(map(type, values)) <= {field.type, type(None)}:
        return values
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    return [float(value) if field.type is float and type(value) is int else value for value in plain]


def stack_inferred(
    schema: Schema, documents: list[Any], options: StackOptions, path: str, describe_row: DescribeRow
) -> Columns:
    """Stack documents whose fields may hold other types than their class says.

    `quire.columns.stack` follows the schema. Here the values decide about each column, at any depth, and the schema
    follows the columns. So the two share the steps (`gather`, `stack_values`, ...), and not the traversal.
    """
    validity = validity_of(documents)
    rows = [None if document is None else document.__dict__ for document in documents]
    columns: dict[str, Column] = {}
    for field in schema.fields:
        values = gather(rows, field.name, path, validity)
        columns[field.name] = infer_column(field, values, options, f"{path}.{field.name}", describe_row)
    extra_states = collect_extra_states(schema, documents)
    return Columns(with_fields(schema, columns.values()), columns, len(rows), validity, extra_states)


def infer_field(field: Field, values: list[Any], path: str, describe_row: DescribeRow) -> Field:
    """Return the field that values need; values of several kinds are an error."""
    # One value of each type is enough: values of one type always get the same field.
    missing = any(value is None for value in values)
    kinds = {(type(value)): value for value in values if value is not None}
    fields = {tp: _infer_value_field(field, value) for tp, value in kinds.items()}
    inferred = set(fields.values())
    if not inferred or all(_is_same_kind(field, other) for other in inferred):
        return field if field.nullable or not missing else replace(field, nullable=True)
    # Integers among floats become floats; any other mixture has no common column.
    if len(inferred) > 1 and {other.type for other in inferred} != {int, float}:
        first = next(value for value in values if value is not None)
        row, other_value = next(
            (row, value)
            for row, value in enumerate(values)
            if value is not None and fields[type(value)] != fields[type(first)]
        )
        raise ColumnError(
            f"{path}: all rows must hold the same kind of value, but {describe_row(row)} gives {describe(other_value)} "
            f"where others give {describe(first)}."
        )
    result = next(other for other in inferred if len(inferred) == 1 or other.type is float)
    return replace(result, nullable=missing)


def _is_same_kind(field: Field, other: Field) -> bool:
    if field.kind in (FieldKind.ANY, FieldKind.UNION):
        return True
    same = field.kind is other.kind
    if field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
        return same and issubclass(other.type, field.type)
    if field.kind is FieldKind.TENSOR:
        return same and (field.type.framework is None or field.type.framework is other.type.framework)
    return same and (field.kind is not FieldKind.SCALAR or other.type is field.type)


def _infer_value_field(field: Field, value: Any) -> Field:
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


def infer_batched_column(
    field: Field, data: Any, rows: tuple[int, Validity], options: StackOptions, path: str
) -> Column:
    """Make a column of the result of a batched function: a tensor, a batch, or a sequence of values.

    `rows` are the number of rows, and which had a value before. The elements of a tensor are never missing, so the rows
    that had no value before have none in the result.
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
        column = _wrap_tensor(field, framework, framework.unwrap(data), validity)
    elif isinstance(data, (str, bytes, Mapping)) or not hasattr(type(data), "__iter__"):
        raise ColumnError(f"{path}: a batched function gives a tensor, a batch or a list, not {describe(data)}.")
    else:
        column = infer_column(field, list(data), options, path, lambda row: f"row {row} of the batch")
    if len(column) != number:
        raise ColumnError(f"{path}: the batch has {number} rows, and the function gave {len(column)}.")
    return column


def _wrap_tensor(field: Field, framework: Any, data: Any, validity: Validity) -> Column:
    missing = validity is not None and not validity.all()
    if field.kind is FieldKind.SCALAR and len(framework.shape(data)) == 1:
        kind = framework.to_numpy(data).dtype.kind if framework.convertible(data) is None else "?"
        tp = {"b": bool, "i": int, "u": int, "f": float, "c": complex}.get(kind)
        if tp is not None:
            return ScalarColumn(replace(field, type=tp), data, framework, validity)
    same = field.kind is FieldKind.TENSOR and field.type.framework in (None, framework)
    tensor_type = plain_tensor_type(framework.name)
    tensor = field if same else Field(field.name, FieldKind.TENSOR, tensor_type, nullable=missing)
    return relax_field(TensorColumn(tensor, data, framework, validity))
