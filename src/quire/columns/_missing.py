"""Missing numbers and tensors: rows whose value is None, where a column of numbers or tensors holds zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.columns._column import Column, ObjectColumn, RaggedColumn, TensorColumn, Validity
from quire.columns._columns import Columns, DocumentsColumn
from quire.columns._stack import ShapePolicy, StackOptions, stack_values
from quire.errors import ColumnError, PathError, TensorError
from quire.schema import Field, FieldKind, FieldPath, Schema, join_path
from quire.tensors import cast_numbers, common_dtype, describe, format_shape, framework_of, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUMERIC = (FieldKind.SCALAR, FieldKind.TENSOR)
"""The kinds of fields whose columns hold zeros in rows without a value."""


def present_rows(column: Column) -> Validity:
    """Return which rows of a column of numbers or tensors have a value; None if all have, and for other columns."""
    if isinstance(column, (TensorColumn, RaggedColumn)):
        return column.validity
    if isinstance(column, ObjectColumn) and column.field.kind in NUMERIC:
        present = column.valid_rows()
        return None if present.all() else present
    return None


class MissingValues(NamedTuple):
    """A column of numbers or tensors in which values are missing.

    `present` has an element for each value of the column. Below an array of documents these are not rows: value i
    belongs to row `owners[i]`.
    """

    path: FieldPath
    column: Column
    present: NDArray[np.bool_]
    owners: NDArray[np.int64] | None

    @property
    def is_absent(self) -> bool:
        """Whether the column has no value at all."""
        return not self.present.any()

    @property
    def number(self) -> int:
        """The number of missing values."""
        return int(len(self.present) - self.present.sum())

    @property
    def first_row(self) -> int:
        """The first row in which a value is missing."""
        value = int(np.argmin(self.present))
        return value if self.owners is None else int(self.owners[value])


def find_missing(
    columns: Columns, path: FieldPath = (), owners: NDArray[np.int64] | None = None
) -> Iterator[MissingValues]:
    """Yield the columns of numbers and tensors with missing values, including those of nested documents.

    Nested documents that are gathered on demand are skipped: nothing has changed them since they were checked.
    """
    for name, column in columns.columns.items():
        column_path = (*path, name)
        present = present_rows(column)
        if present is not None:
            yield MissingValues(column_path, column, present, owners)
        child_owners = owners
        if isinstance(column, DocumentsColumn):
            outer = np.arange(len(column)) if owners is None else owners
            child_owners = np.repeat(outer, np.diff(column.offsets))
        for child in column.children:
            if not child.is_deferred:
                yield from find_missing(child, column_path, child_owners)


# --- filling


def fill_columns(columns: Columns, fills: Mapping[FieldPath, Any], shapes: ShapePolicy = "error") -> Columns:
    """Return the columns with the missing values of some paths filled. The columns themselves are not changed.

    `shapes` is the policy for a value whose shape is not that of the other rows.
    """
    changed: dict[str, Column] = {}
    for name in dict.fromkeys(path[0] for path in fills):
        path = f"{columns.schema.name}.{name}"
        if name not in columns.columns:
            columns.schema.resolve((name,))  # raises an error that names the nearest fields
            raise PathError(f"the batch has no column {path}.")
        column = columns.columns[name]
        below = {rest[1:]: value for rest, value in fills.items() if rest[0] == name}
        if () in below:
            changed[name] = fill_column(column, below[()], path, shapes)
        elif column.children:
            changed[name] = column.map_children(partial(fill_columns, fills=below, shapes=shapes))
        else:
            raise PathError(f"{path} holds no columns, so {join_path(next(iter(below)))!r} cannot be filled inside it.")
    return replace(columns, columns={**columns.columns, **changed})


def fill_column(column: Column, value: Any, path: str, shapes: ShapePolicy = "error") -> Column:
    """Return the column with a value in the rows that have none."""
    check_fill(column.field, value, path)
    present = present_rows(column)
    if present is None:
        return column
    if isinstance(column, TensorColumn):
        framework, data = column.framework, column.data
        row_shape = framework.shape(data)[1:]
        filler = _cast(value, framework.dtype(data), path)
        if filler.ndim and filler.shape != row_shape:
            if shapes != "error":  # the rows of this batch have one shape by chance
                return _fill_objects(column, value, path, shapes)
            got, expected = format_shape(filler.shape), format_shape(row_shape)
            raise ColumnError(f"{path}: the value for missing rows has the shape {got}, and the rows have {expected}.")
        row_shapes = column.shapes
        if row_shapes is not None:  # a filled row is real up to the padded shape
            row_shapes = np.where(present[:, None], row_shapes, np.array(row_shape, np.int64))
        return column.with_data(framework.fill_rows(data, ~present, filler), None, row_shapes)
    if column.field.kind is FieldKind.SCALAR:
        return ObjectColumn(column.field, [value if row is None else row for row in column.values()])
    return _fill_objects(column, value, path, shapes)


def zero_missing(columns: Columns, is_selected: Callable[[FieldPath], bool], path: FieldPath = ()) -> Columns:
    """Return the columns with zeros in the missing rows of tensors at selected paths; the rows stay missing.

    A function on a whole column has computed something for these rows, too, such as the mean that it subtracts.
    """
    if columns.is_deferred:  # no function has changed documents that are gathered on demand
        return columns
    changed: dict[str, Column] = {}
    for name, column in columns.columns.items():
        own = (*path, name)
        if column.children:
            changed[name] = column.map_children(partial(zero_missing, is_selected=is_selected, path=own))
        elif isinstance(column, TensorColumn) and column.validity is not None and is_selected(own):
            framework, data = column.framework, column.data
            if framework.dtype(data) != "string":
                zero = framework.to_numpy(framework.zeros((), framework.dtype(data)))
                data = framework.fill_rows(data, ~column.validity, zero)
                changed[name] = column.with_data(data, column.validity, column.shapes)
    return replace(columns, columns={**columns.columns, **changed}) if changed else columns


def _fill_objects(column: Column, value: Any, path: str, shapes: ShapePolicy) -> Column:
    """Fill tensors without a common shape or dtype, or a column without any tensor: the value must be a tensor."""
    values, spec = column.values(), column.field.spec
    if isinstance(column, (RaggedColumn, TensorColumn)):  # it may have been converted from the field's framework
        framework = column.framework
        dtype: str | None = framework.dtype(column.flat if isinstance(column, RaggedColumn) else column.data)
    else:
        frameworks = (framework_of(row) for row in values if row is not None)
        framework = next(frameworks, None) or column.field.type.framework or get_framework("numpy")
        dtype = spec.dtype
    filler = np.asarray(value) if dtype is None else _cast(value, dtype, path)
    if not filler.ndim and spec.fixed_shape:
        filler = np.broadcast_to(filler, spec.fixed_shape)
    if not filler.ndim and spec.fixed_shape != ():
        raise ColumnError(f"{path}: the rows have no common shape: give a tensor for missing rows, not {value!r}.")
    tensor = framework.from_numpy(np.ascontiguousarray(filler).copy())
    rows = [tensor if row is None else framework.unwrap(row) for row in values]
    return stack_values(column.field, rows, StackOptions(shapes="pad" if shapes == "pad" else "ragged"), path)


def check_fill(field: Field, value: Any, path: str) -> None:
    """Raise an error for a value for missing rows that the field cannot hold."""
    if field.kind is FieldKind.SCALAR:
        if not _is_number(field.type, value):
            raise ColumnError(f"{path}: a missing {field.type.__name__} cannot be filled with {describe(value)}.")
        return
    if field.kind is not FieldKind.TENSOR:
        raise ColumnError(f"{path} is {field}: only missing numbers and tensors are filled.")
    spec = field.spec
    array = _cast(value, spec.dtype, path) if spec.dtype is not None else _as_numbers(value, path)
    if array.ndim and not spec.fits(array.shape, spec.dtype or array.dtype.name):
        raise ColumnError(f"{path}: expected {spec} for missing rows, got {describe(value)}.")


def _is_number(tp: type, value: Any) -> bool:
    """Return whether a field of a type takes a value; a bool does not count as another number."""
    if isinstance(value, (bool, np.bool_)) or tp is bool:
        return tp is bool and isinstance(value, (bool, np.bool_))
    if issubclass(tp, int):
        return isinstance(value, (int, np.integer)) and bool(-(1 << 63) <= value < 1 << 63)
    wider = (int, float, np.integer, np.floating)
    return isinstance(value, wider if issubclass(tp, float) else (*wider, complex, np.complexfloating))


def _as_numbers(value: Any, path: str) -> NDArray[Any]:
    framework = framework_of(value)
    try:
        array = np.asarray(value if framework is None else framework.to_numpy(framework.unwrap(value)))
    except (TypeError, ValueError, TensorError) as error:
        raise ColumnError(f"{path}: missing rows are filled with numbers, not {describe(value)}.") from error
    if array.dtype.kind not in "biufcV":  # V: the short floats
        raise ColumnError(f"{path}: missing rows are filled with numbers, not {describe(value)}.")
    return array


def _cast(value: Any, dtype: str, path: str) -> NDArray[Any]:
    array = _as_numbers(value, path)
    try:
        return cast_numbers(array, common_dtype(dtype))
    except TensorError as error:
        raise ColumnError(f"{path}: the value for missing rows, {describe(value)}, does not fit {dtype}.") from error


def numeric_paths(schema: Schema, path: FieldPath = (), *, nullable: bool = False) -> Iterator[FieldPath]:
    """Yield the paths of number and tensor fields that may be missing, themselves or with a document around them."""
    for field in schema.fields:
        may_miss, field_path = nullable or field.nullable, (*path, field.name)
        if field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS) and not field.recursive:
            outer = may_miss if field.kind is FieldKind.DOCUMENT else False  # the documents of an array are not None
            yield from numeric_paths(field.document_type.document_schema(), field_path, nullable=outer)
        elif field.kind in NUMERIC and may_miss:
            yield field_path
