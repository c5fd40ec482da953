"""Rows to columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from quire.columns._column import Column, Validity, dense_framework
from quire.columns._columns import Columns, DocumentColumn, DocumentsColumn, ExtraState
from quire.columns._objects import ObjectColumn
from quire.columns._tensor import RaggedColumn, ScalarColumn, TensorColumn
from quire.errors import ColumnError, TensorError
from quire.schema import Field, FieldKind, Schema
from quire.tensors import (
    Framework,
    describe,
    format_shape,
    framework_of,
    framework_of_type,
    get_framework,
    to_framework,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

ShapePolicy = Literal["error", "pad", "ragged"]
_SCALAR_DTYPES = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}


@dataclass(frozen=True)
class StackOptions:
    """How rows become columns.

    `framework` converts every tensor and number column; None keeps each tensor column's framework and makes numbers
    numpy. `shapes` says what to do with tensors of mixed shapes.
    """

    framework: str | None = None
    shapes: ShapePolicy = "error"

    def __post_init__(self) -> None:
        if self.shapes not in ("error", "pad", "ragged"):
            raise ColumnError(f"shapes={self.shapes!r} is not a policy: use 'error', 'pad' or 'ragged'.")
        if self.framework is not None:
            dense_framework(self.framework)


def stack(schema: Schema, documents: Sequence[Any], options: StackOptions, where: str = "") -> Columns:
    """The columns of documents; a document that is None is a row that is not there."""
    validity = validity_of(documents)
    try:
        rows = [None if document is None else document.__dict__ for document in documents]
    except AttributeError:
        raise _no_document(schema, documents, where) from None
    columns = {}
    for field in schema.fields:
        path = f"{where or schema.name}.{field.name}"
        columns[field.name] = stack_values(field, gather(rows, field.name, path, validity), options, path)
    return Columns(schema, columns, len(rows), validity, collect_extra_states(schema, documents))


def _no_document(schema: Schema, documents: Sequence[Any], where: str) -> ColumnError:
    """The error about the first row that is no document, such as a dict that `model_copy(update=...)` has set."""
    kinds = (type(None), schema.document_type)
    row, value = next((row, item) for row, item in enumerate(documents) if not isinstance(item, kinds))
    return ColumnError(
        f"{where or schema.name}, row {row}: expected a {schema.name}, got {describe(value)}; it was set without "
        "validation."
    )


def stack_values(field: Field, values: list[Any], options: StackOptions, path: str) -> Column:
    """The column of one field's values."""
    if field.kind is FieldKind.TENSOR:
        return _stack_tensors(field, values, options, path)
    if field.kind is FieldKind.SCALAR:
        return _stack_scalars(field, values, options, path)
    if field.kind is FieldKind.DOCUMENT and not field.recursive:
        return DocumentColumn(field, stack(field.document_type.document_schema(), values, options, path))
    if field.kind is FieldKind.DOCUMENTS and not field.recursive:
        return _stack_arrays(field, values, options, path)
    return ObjectColumn(field, values)


def gather(rows: list[dict[str, Any] | None], name: str, path: str, validity: Validity) -> list[Any]:
    """The values of one field; None in rows that are not there."""
    try:
        if validity is None:
            return [row[name] for row in rows]  # type: ignore[index]
        return [None if row is None else row[name] for row in rows]
    except KeyError:
        index = next(i for i, row in enumerate(rows) if row is not None and name not in row)
        raise ColumnError(f"{path}: document {index} has no such value; it was made without validation.") from None


def validity_of(values: Sequence[Any]) -> Validity:
    """Which values are not None; None where all are not."""
    if type(None) not in set(map(type, values)):
        return None
    return np.fromiter((value is not None for value in values), np.bool_, len(values))


_extra = attrgetter("__pydantic_extra__")


def collect_extra_states(schema: Schema, documents: Sequence[Any]) -> list[ExtraState | None] | None:
    """What the documents hold beyond the schema; None where they cannot hold more."""
    types = set(map(type, documents))
    if not schema.keeps_more and types <= {schema.document_type, type(None)}:
        present = documents if type(None) not in types else [item for item in documents if item is not None]
        if not any(map(_extra, present)):  # what was read with unknown='keep'
            return None
    return [None if document is None else _extra_state(schema, document) for document in documents]


def _extra_state(schema: Schema, document: Any) -> ExtraState:
    more = {name: value for name, value in document.__dict__.items() if name not in schema.by_name}
    return ExtraState(type(document), more, document.__pydantic_extra__, document.__pydantic_private__)


def _stack_scalars(field: Field, values: list[Any], options: StackOptions, path: str) -> Column:
    validity = validity_of(values)
    dtype = _SCALAR_DTYPES.get(field.type)
    filled = values if validity is None or dtype is None else [field.type() if v is None else v for v in values]
    if dtype is None or not set(map(type, filled)) <= {field.type}:
        return ObjectColumn(field, values)
    try:
        array: NDArray[Any] = np.array(filled, dtype)
    except OverflowError:
        return ObjectColumn(field, values)  # integers beyond 64 bits
    framework = get_framework(options.framework or "numpy")
    return ScalarColumn(field, _converted(array, framework, path), framework, validity)


def _stack_arrays(field: Field, values: list[Any], options: StackOptions, path: str) -> Column:
    if not set(map(type, values)) <= {field.type, type(None)} or have_own_attributes(field.type, values):
        return ObjectColumn(field, values)  # arrays with a class or with attributes of their own
    sizes = [0 if array is None else len(array._documents) for array in values]
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    documents = [document for array in values if array is not None for document in array._documents]
    flat = stack(field.document_type.document_schema(), documents, options, path)
    return DocumentsColumn(field, flat, offsets, validity_of(values))


def have_own_attributes(array_type: type[Any], arrays: list[Any]) -> bool:
    """Whether an array has attributes of its own, which a subclass may bring."""
    return bool(array_type.__dictoffset__) and any(array is not None and array.__dict__ for array in arrays)


def _stack_tensors(field: Field, values: list[Any], options: StackOptions, path: str) -> Column:
    validity = validity_of(values)
    present = values if validity is None else [value for value in values if value is not None]
    target = None if options.framework is None else get_framework(options.framework)
    if not present:
        return _no_tensors(field, len(values), target)
    if target is not None:
        present = [_converted(value, target, path) for value in present]
        values = present if validity is None else _spread_over(validity, present, None)
    frameworks = set(map(framework_of_type, set(map(type, present))))
    framework = frameworks.pop()
    if frameworks or framework is None or any(map(framework.is_sparse, _layouts(framework, present))):
        return ObjectColumn(field, values)
    if len({value.dtype for value in present}) > 1:
        if field.type.framework is None:
            return ObjectColumn(field, values)
        raise _mixed(path, [str(value.dtype) for value in present], validity, "dtypes", "Cast them to one dtype.")
    column = _stack_dense(_Tensors(field, present, framework, validity, path), options.shapes)
    return column if column.dtype == present[0].dtype else ObjectColumn(field, values)  # as with other byte orders


def _layouts(framework: Framework, present: list[Any]) -> Iterable[Any]:
    """Tensors of every layout that there is: one of each where that is told quickly."""
    if framework.name != "torch":
        return present
    return {(value.layout, value.is_nested): value for value in present}.values()


@dataclass(frozen=True)
class _Tensors:
    """Dense tensors of one framework and dtype on their way into a column."""

    field: Field
    present: list[Any]
    framework: Framework
    validity: Validity
    path: str


def _stack_dense(tensors: _Tensors, policy: ShapePolicy) -> TensorColumn | RaggedColumn:
    framework, present, validity = tensors.framework, tensors.present, tensors.validity
    shapes = [value.shape for value in present] if framework.name == "torch" else list(map(framework.shape, present))
    mixed = len(set(shapes)) > 1
    if mixed and policy == "error":
        hint = "Stack with shapes='pad' or shapes='ragged', or bring them to one shape."
        raise _mixed(tensors.path, [format_shape(shape) for shape in shapes], validity, "shapes", hint)
    if mixed and policy == "ragged":
        return _ragged(tensors, [tuple(shape) for shape in shapes])
    largest = _largest(shapes, tensors.path) if mixed else tuple(shapes[0])
    if mixed:
        present = [framework.pad(value, largest) for value in present]
    if validity is not None:
        zeros = _zeros(framework, largest, present[0])
        present = _spread_over(validity, present, zeros)
        shapes = _spread_over(validity, shapes, (0,) * len(largest))
    try:
        data = framework.stack(present)
    except RuntimeError as error:
        raise ColumnError(f"{tensors.path}: the tensors do not stack: {error}") from error
    return TensorColumn(tensors.field, data, framework, validity, np.array(shapes, np.int64) if mixed else None)


def _zeros(framework: Framework, shape: tuple[int, ...], like: Any) -> Any:
    if framework.name == "numpy":
        return np.zeros(shape, like.dtype)  # also what has no common name: text, records, dates
    return framework.zeros(shape, framework.dtype(like), like=like)


def _largest(shapes: list[tuple[int, ...]], path: str) -> tuple[int, ...]:
    if len({len(shape) for shape in shapes}) > 1:
        raise ColumnError(
            f"{path}: tensors with different numbers of dimensions cannot be padded. Use shapes='ragged'."
        )
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


def _ragged(tensors: _Tensors, shapes: list[tuple[int, ...]]) -> RaggedColumn:
    framework, validity = tensors.framework, tensors.validity
    flat = framework.concat([framework.reshape(value, (-1,)) for value in tensors.present])
    if validity is not None:
        shapes = _spread_over(validity, shapes, (0,))
    return RaggedColumn(tensors.field, flat, framework, shapes, validity)


def _no_tensors(field: Field, length: int, target: Framework | None) -> Column:
    """A column without a single tensor: of the declared shape as far as it is known."""
    framework = target or field.type.framework or get_framework("numpy")
    spec = field.spec
    if length and (spec.fixed_shape is None or spec.dtype is None):
        return ObjectColumn(field, [None] * length)
    sizes = [size if isinstance(size, int) else 0 for size in spec.shape or () if size is not Ellipsis]
    data = framework.zeros((length, *sizes), spec.dtype or "float32")
    return TensorColumn(field, data, framework, np.zeros(length, np.bool_) if length else None)


def _converted(value: Any, target: Framework, path: str) -> Any:
    source = framework_of(value)
    if source is target or source is None or source.is_sparse(value):
        return value
    try:
        return to_framework(value, target)
    except TensorError as error:
        raise ColumnError(f"{path}: {error}") from error


def _spread_over(validity: Any, present: list[Any], filler: Any) -> list[Any]:
    """The present values at their rows, and the filler in the rows that have none."""
    rest = iter(present)
    return [next(rest) if there else filler for there in validity.tolist()]


def _mixed(path: str, found: list[str], validity: Validity, what: str, hint: str) -> ColumnError:
    other = next(i for i, value in enumerate(found) if value != found[0])
    rows = np.flatnonzero(np.ones(len(found)) if validity is None else validity)
    return ColumnError(
        f"{path}: mixed {what}: row {rows[0]} has {found[0]}, row {rows[other]} has {found[other]}. {hint}"
    )
