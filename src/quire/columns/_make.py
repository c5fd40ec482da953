"""Columns from data that comes from outside: checked, and with defaults where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from quire._extra_fields import Extra, build_tolerant_validator
from quire.columns._column import Column, Validity
from quire.columns._columns import Columns, DocumentColumn, DocumentsColumn
from quire.columns._stack import ShapePolicy, StackOptions, stack_values
from quire.columns._tensor import RaggedColumn, ScalarColumn, TensorColumn
from quire.errors import ColumnError, TensorError
from quire.schema import NAMES_AND_ALIASES, STORED, Field, FieldKind, Schema, field_validator
from quire.tensors import describe, format_shape, framework_of, to_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SCALAR_KINDS = {bool: "b", int: "iu", float: "f", complex: "c"}


def make_column(schema: Schema, field: Field, values: Any, shapes: ShapePolicy, rows: Validity = None) -> Column:
    """A column from a tensor with a row each, from a column of a batch, or from a sequence of values.

    `rows` is False where there is no document, and so no value.
    """
    path = f"{schema.name}.{field.name}"
    column = _ready_column(field, values, path, rows)
    if column is not None:
        return column
    if isinstance(values, Column):  # with the rows that have no value
        shapes = "pad" if isinstance(values, TensorColumn) and values.shapes is not None else shapes
        values = values.values()
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(type(values), "__iter__"):
        raise ColumnError(f"{path}: a column is made from a tensor or a sequence of values, got {describe(values)}.")
    return stack_values(
        field, validate_values(schema, field, list(values), path, rows), StackOptions(shapes=shapes), path
    )


def _ready_column(field: Field, values: Any, path: str, rows: Validity) -> Column | None:
    """The column of values that are columns already; None for a sequence."""
    framework = framework_of(values)
    if framework is not None and field.kind is FieldKind.TENSOR:
        return _tensor_column(field, values, path, rows)
    if framework is not None and field.kind is FieldKind.SCALAR:
        return _scalar_column(field, values, path, rows)
    made: Column | None = None
    if isinstance(values, RaggedColumn) and field.kind is FieldKind.TENSOR:
        made = _ragged_column(field, values, path)
    elif field.kind is FieldKind.DOCUMENT and _columns_of(values, field) is not None:
        made = DocumentColumn(
            field, values._columns.slice(slice(None))
        )  # its own, so that setting one leaves the other
    elif field.kind is FieldKind.DOCUMENTS and _columns_of(getattr(values, "flat", None), field) is not None:
        made = type(values._column)(field, *_parts(values._column))
    if made is not None and made.validity is not None and not field.nullable:
        missing = np.flatnonzero(~made.validity & (True if rows is None else rows))
        if len(missing):
            raise ColumnError(f"{path}, row {missing[0]}: there is no value, and the field takes no None.")
    return made


def _columns_of(values: Any, field: Field) -> Columns | None:
    """The columns of a batch, if they are those that the field has."""
    columns = getattr(values, "_columns", None)
    fits = isinstance(columns, Columns) and columns.schema.document_type is field.document_type and not field.recursive
    return columns if fits else None


def _parts(column: DocumentsColumn) -> tuple[Columns, NDArray[np.int64], Validity]:
    return column.flat.slice(slice(None)), column.offsets, column.validity


def _tensor_column(field: Field, values: Any, path: str, rows: Validity) -> Column:
    declared = field.type.framework
    try:
        values = values if declared is None else to_framework(getattr(values, "tensor", values), declared)
    except TensorError as error:
        raise ColumnError(f"{path}: {error}") from error
    framework = framework_of(values)
    assert framework is not None
    shape = framework.shape(values)
    if framework.is_sparse(values) or not shape or not field.spec.fits(shape[1:], framework.dtype(values)):
        row = format_shape(shape[1:]) if shape else "none"
        raise ColumnError(f"{path}: expected rows of {field.spec}, got {describe(values)}, whose rows are {row}.")
    return TensorColumn(field, values, framework, _same_length(rows, shape[0]))


def _ragged_column(field: Field, values: RaggedColumn, path: str) -> Column:
    dtype = values.framework.dtype(values.flat)
    for row in np.flatnonzero(values.valid_rows()).tolist():
        if not field.spec.fits(values.shapes[row], dtype):
            got = f"{dtype} {format_shape(values.shapes[row])}"
            raise ColumnError(f"{path}, row {row}: expected {field.spec}, got {got}.")
    return RaggedColumn(field, values.flat, values.framework, values.shapes, values.validity)


def _scalar_column(field: Field, values: Any, path: str, rows: Validity) -> Column:
    framework = framework_of(values)
    assert framework is not None
    kind = framework.to_numpy(values).dtype.kind if framework.convertible(values) is None else "?"
    shape = framework.shape(values)
    if len(shape) != 1 or kind not in _SCALAR_KINDS.get(field.type, ""):
        raise ColumnError(f"{path}: expected a vector of {field.type.__name__}, got {describe(values)}.")
    return ScalarColumn(field, values, framework, _same_length(rows, shape[0]))


def _same_length(rows: Validity, length: int) -> Validity:
    return rows if rows is not None and len(rows) == length else None  # another length is refused later


def validate_values(  # noqa: PLR0913
    schema: Schema,
    field: Field,
    values: list[Any],
    path: str,
    rows: Validity,
    extra: Extra = "forbid",
    *,
    stored: bool = False,
    by_name: bool = False,
) -> list[Any]:
    """The values as the field takes them; in rows without a document there must be None.

    With `extra='ignore'`, mappings may have more keys than the documents that they become have fields. Decoders pass
    `stored=True`: the values are what documents held, and not input for them. With `by_name`, mappings may have the
    names of fields also for classes that take aliases only.
    """
    there = list(range(len(values)))
    if rows is not None and len(rows) == len(values):
        there = np.flatnonzero(rows).tolist()
        for row in np.flatnonzero(~rows).tolist():
            if values[row] is not None:
                raise ColumnError(f"{path}, row {row}: there is no document to hold the value; pass None in this row.")
    try:
        options = {"context": STORED if stored else None, **(NAMES_AND_ALIASES if by_name else {})}
        checked = _validator(schema, field, extra).validate_python([values[row] for row in there], **options)
    except ValidationError as error:
        first = error.errors()[0]
        raise ColumnError(f"{path}, row {there[int(first['loc'][0])]}: {first['msg']}") from error
    found = dict(zip(there, checked, strict=True))
    return [found.get(row) for row in range(len(values))]


def _validator(schema: Schema, field: Field, extra: Extra) -> Any:
    """What checks a list of values of a field, made once."""
    key = "validator", field.name, extra
    if key not in schema.notes:
        if field.decodes_input:
            schema.notes[key] = field_validator(schema.document_type, field.name)
        else:
            annotation = schema.document_type.model_fields[field.name].rebuild_annotation()
            adapter = TypeAdapter(list[annotation], config=ConfigDict(arbitrary_types_allowed=True))  # type: ignore[valid-type]
            schema.notes[key] = adapter if extra == "forbid" else build_tolerant_validator(adapter.core_schema)
    return schema.notes[key]


def default_column(schema: Schema, field: Field, length: int) -> Column:
    path = f"{schema.name}.{field.name}"
    if field.required:
        raise ColumnError(f"{path} has no default; give a column for it.")
    info = schema.document_type.model_fields[field.name]
    if getattr(info, "default_factory_takes_validated_data", False):
        raise ColumnError(f"{path}: its default is made from other fields; give a column for it.")
    values = [info.get_default(call_default_factory=True) for _ in range(length)]
    if framework_of(info.default) is not None or isinstance(info.default, (list, tuple, dict)):
        values = validate_values(schema, field, values, path, None)  # as documents do with such defaults
    return stack_values(field, values, StackOptions(), path)
