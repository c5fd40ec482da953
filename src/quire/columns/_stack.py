"""Build columns: from documents (`stack`), from other columns (`concat_columns`), or from input (`make_column`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from quire._extra_fields import Extra, build_tolerant_validator
from quire.columns._column import (
    Column,
    LentColumn,
    ListColumn,
    ObjectColumn,
    RaggedColumn,
    ScalarColumn,
    TensorColumn,
    Validity,
    concat_validity,
    dense_framework,
)
from quire.columns._columns import Columns, DocumentColumn, DocumentsColumn, ExtraState
from quire.errors import ColumnError, TensorError
from quire.schema import NAMES_AND_ALIASES, STORED, Field, FieldKind, Schema, field_validator
from quire.tensors import (
    Framework,
    Tensor,
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
_SCALAR_KINDS = {bool: "b", int: "iu", float: "f", complex: "c"}


@dataclass(frozen=True)
class StackOptions:
    """How rows become columns.

    `framework` converts every tensor and number column; None keeps the framework of each tensor column and makes
    number columns numpy. `shapes` is the policy for tensors of mixed shapes. With `lists`, tensors, texts and objects
    are not stacked but stay lists (`ListColumn`), which encoders write without another copy. `for_gathering` stacks
    tensors in memory from which random rows are gathered faster, which may take longer to fill.
    """

    framework: str | None = None
    shapes: ShapePolicy = "error"
    lists: bool = False
    for_gathering: bool = False

    def __post_init__(self) -> None:
        if self.shapes not in ("error", "pad", "ragged"):
            raise ColumnError(f"shapes={self.shapes!r} is not a policy: use 'error', 'pad' or 'ragged'.")
        if self.framework is not None:
            dense_framework(self.framework)


def stack(
    schema: Schema,
    documents: Sequence[Any],
    options: StackOptions,
    where: str = "",
    stacked: Mapping[str, Column] | None = None,
) -> Columns:
    """Stack documents as columns. A document that is None becomes a row without a document.

    `stacked` are columns that exist already, by the names of their fields.
    """
    validity = validity_of(documents)
    try:
        rows = [None if document is None else document.__dict__ for document in documents]
    except AttributeError:
        raise ColumnError(f"{where or schema.name}, {describe_non_document(schema, documents)}") from None
    columns: dict[str, Column] = {}
    for field in schema.fields:
        if stacked and field.name in stacked:
            columns[field.name] = stacked[field.name]
        else:
            path = f"{where or schema.name}.{field.name}"
            columns[field.name] = stack_values(field, gather(rows, field.name, path, validity), options, path)
    return Columns(schema, columns, len(rows), validity, collect_extra_states(schema, documents))


def stack_values(field: Field, values: list[Any], options: StackOptions, path: str) -> Column:
    """Stack the values of one field as a column."""
    if field.kind is FieldKind.SCALAR:
        return _stack_scalars(field, values, options, path)
    if field.kind is FieldKind.DOCUMENT and not field.recursive:
        return DocumentColumn(field, stack(field.document_type.document_schema(), values, options, path))
    if field.kind is FieldKind.DOCUMENTS and not field.recursive:
        return _stack_arrays(field, values, options, path)
    if options.lists:
        return ListColumn(field, values)
    if field.kind is FieldKind.TENSOR:
        return _stack_tensors(field, values, options, path)
    return ObjectColumn(field, values)


def describe_non_document(schema: Schema, documents: Sequence[object]) -> str:
    """Return the message about the first value that is no document, such as a dict that `model_copy(update=)` has set.

    A document of any class will do: an unpickled one may be of a twin of the schema's class.
    """
    kinds = enumerate(map(type, documents))
    row = next(row for row, kind in kinds if kind is not type(None) and not hasattr(kind, "model_fields"))
    return f"row {row}: expected a {schema.name}, got {describe(documents[row])}; it was set without validation."


def gather(rows: list[dict[str, Any] | None], name: str, path: str, validity: Validity) -> list[Any]:
    """Return the values of one field; None in rows without a document."""
    try:
        if validity is None:
            return [row[name] for row in rows]  # type: ignore[index]
        return [None if row is None else row[name] for row in rows]
    except KeyError:
        index = next(i for i, row in enumerate(rows) if row is not None and name not in row)
        raise ColumnError(f"{path}: document {index} has no such value; it was made without validation.") from None


def validity_of(values: Sequence[Any]) -> Validity:
    """Return for each value whether it is not None; None if no value is None."""
    # By type: `None in values` would compare tensors with `==`, and a loop takes twice as long.
    if type(None) not in set(map(type, values)):
        return None
    return np.fromiter((value is not None for value in values), np.bool_, len(values))


_get_extra = attrgetter("__pydantic_extra__")


def collect_extra_states(schema: Schema, documents: Sequence[Any]) -> list[ExtraState | None] | None:
    """Return the state of each document beyond the schema; None if no document has any."""
    types = set(map(type, documents))
    if not schema.keeps_more and types <= {schema.document_type, type(None)}:
        present = documents if type(None) not in types else [item for item in documents if item is not None]
        if not any(map(_get_extra, present)):  # set by decoding with unknown='keep'
            return None
    extra_states: list[ExtraState | None] = []
    for document in documents:
        if document is None:
            extra_states.append(None)
            continue
        fields = {name: value for name, value in document.__dict__.items() if name not in schema.by_name}
        extra = document.__pydantic_extra__
        extra_states.append(ExtraState(type(document), fields, extra, document.__pydantic_private__))
    return extra_states


def _stack_scalars(field: Field, values: list[Any], options: StackOptions, path: str) -> Column:
    # A vector keeps neither subclasses of int nor floats in an int field (documents made without validation), so only
    # exact types are stacked; everything else stays as objects.
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
    return ScalarColumn(field, _convert(array, framework, path), framework, validity)


def _stack_arrays(field: Field, values: list[Any], options: StackOptions, path: str) -> Column:
    if not set(map(type, values)) <= {field.type, type(None)} or have_own_attributes(field.type, values):
        return ObjectColumn(field, values)  # columns hold neither the subclass nor the attributes of an array
    sizes = [0 if array is None else len(array._documents) for array in values]
    # The documents of row n are those from offsets[n] to offsets[n + 1] of one batch of all documents; a missing array
    # takes none, like an empty one, and the validity distinguishes the two.
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    documents = [document for array in values if array is not None for document in array._documents]
    flat = stack(field.document_type.document_schema(), documents, options, path)
    return DocumentsColumn(field, flat, offsets, validity_of(values))


def have_own_attributes(array_type: type[Any], arrays: list[Any]) -> bool:
    """Return whether any array has attributes of its own, which arrays of a subclass may have."""
    return bool(array_type.__dictoffset__) and any(array is not None and array.__dict__ for array in arrays)


# --- tensors


def _stack_tensors(field: Field, values: list[Any], options: StackOptions, path: str) -> Column:
    validity = validity_of(values)
    present = values if validity is None else [value for value in values if value is not None]
    target = None if options.framework is None else get_framework(options.framework)
    if not present:
        return _empty_tensor_column(field, len(values), target)
    if target is not None:
        present = [_convert(value, target, path) for value in present]
        values = present if validity is None else fill_gaps(validity, present, None)
    frameworks = set(map(framework_of_type, set(map(type, present))))
    framework = frameworks.pop()
    if frameworks or framework is None:  # of several frameworks, as a field of any tensor may hold
        return ObjectColumn(field, values)
    # A torch tensor's layout is cheap to read, so one tensor of each layout is asked whether it is sparse.
    is_torch = framework.name == "torch"
    layouts = {(value.layout, value.is_nested): value for value in present}.values() if is_torch else present
    if any(map(framework.is_sparse, layouts)):
        return ObjectColumn(field, values)
    dtypes = {value.dtype for value in present}
    if len(dtypes) > 1:
        widest = _widest_text(framework, dtypes)
        if widest is None:
            if field.type.framework is None:
                return ObjectColumn(field, values)
            names = [str(value.dtype) for value in present]
            raise _mixed_error(path, names, validity, "dtypes", "Cast them to one dtype.")
        present = [value.astype(widest, copy=False) for value in present]
    column = _stack_dense(field, present, framework, validity, path, options)
    return column if column.dtype == present[0].dtype else ObjectColumn(field, values)  # numpy changed the byte order


def _widest_text(framework: Framework, dtypes: set[Any]) -> np.dtype[Any] | None:
    """Return the dtype that holds the texts of numpy arrays of several widths ('<U1', '<U12'); None for other dtypes.

    A width is no property of the texts: numpy takes that of the longest one in each array.
    """
    if framework.name != "numpy" or {dtype.kind for dtype in dtypes} not in ({"U"}, {"S"}):
        return None
    if any(not dtype.isnative for dtype in dtypes):
        return None
    return max(dtypes, key=lambda dtype: dtype.itemsize)  # type: ignore[no-any-return]


def _stack_dense(
    field: Field, present: list[Any], framework: Framework, validity: Validity, path: str, options: StackOptions
) -> TensorColumn | RaggedColumn:
    """Stack dense tensors of one framework and dtype; `present` has those of the valid rows."""
    shapes = [value.shape for value in present] if framework.name == "torch" else list(map(framework.shape, present))
    mixed = len(set(shapes)) > 1
    if mixed and options.shapes == "error":
        hint = "Stack with shapes='pad' or shapes='ragged', or bring them to one shape."
        raise _mixed_error(path, [format_shape(shape) for shape in shapes], validity, "shapes", hint)
    if mixed and options.shapes == "ragged":
        flat = framework.concat([framework.reshape(value, (-1,)) for value in present])
        row_shapes = [tuple(shape) for shape in shapes]
        return RaggedColumn(
            field, flat, framework, row_shapes if validity is None else fill_gaps(validity, row_shapes, (0,)), validity
        )
    largest = tuple(shapes[0])
    if mixed:
        if len({len(shape) for shape in shapes}) > 1:
            raise ColumnError(
                f"{path}: tensors with different numbers of dimensions cannot be padded. Use shapes='ragged'."
            )
        largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        present = [framework.pad(value, largest) for value in present]
    if validity is not None:
        like = present[0]
        if framework.name == "numpy":
            zeros = np.zeros(largest, like.dtype)  # also for dtypes without a common name: text, records, dates
        else:
            zeros = framework.zeros(largest, framework.dtype(like), like=like)
        present = fill_gaps(validity, present, zeros)
        shapes = fill_gaps(validity, shapes, (0,) * len(largest))
    try:
        data = framework.stack_for_gathering(present) if options.for_gathering else framework.stack(present)
    except RuntimeError as error:
        raise ColumnError(f"{path}: the tensors do not stack: {error}") from error
    return TensorColumn(field, data, framework, validity, np.array(shapes, np.int64) if mixed else None)


def _empty_tensor_column(field: Field, length: int, target: Framework | None) -> Column:
    """Return a column in which every row is missing, with the declared shape as far as it is known."""
    framework = target or field.type.framework or get_framework("numpy")
    spec = field.spec
    if length and (spec.fixed_shape is None or spec.dtype is None):
        return ObjectColumn(field, [None] * length)
    sizes = [size if isinstance(size, int) else 0 for size in spec.shape or () if size is not Ellipsis]
    data = framework.zeros((length, *sizes), spec.dtype or "float32")
    return TensorColumn(field, data, framework, np.zeros(length, np.bool_) if length else None)


def _convert(value: Tensor, target: Framework, path: str) -> Tensor:
    source = framework_of(value)
    if source is target or source is None or source.is_sparse(value):
        return value
    try:
        return to_framework(value, target)
    except TensorError as error:
        raise ColumnError(f"{path}: {error}") from error


def fill_gaps(validity: NDArray[np.bool_], present: Sequence[Any], filler: Any) -> list[Any]:
    """Return the present values in their rows, and the filler in the other rows."""
    rest = iter(present)
    return [next(rest) if is_valid else filler for is_valid in validity.tolist()]


def _mixed_error(path: str, kinds: list[str], validity: Validity, what: str, hint: str) -> ColumnError:
    """Return an error that names the first two rows that differ."""
    other = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
    rows = np.flatnonzero(np.ones(len(kinds)) if validity is None else validity)
    return ColumnError(
        f"{path}: mixed {what}: row {rows[0]} has {kinds[0]}, row {rows[other]} has {kinds[other]}. {hint}"
    )


# --- concatenation


def concat_columns(parts: Sequence[Columns], shapes: ShapePolicy = "error") -> Columns:
    """Concatenate the rows of columns of one schema. `shapes` is the policy for tensors of mixed shapes."""
    kept = [part for part in parts if len(part)] or list(parts[:1])
    first = kept[0]
    if len(kept) == 1:
        return first.slice(slice(None))  # a copy of the dict: setting a column must not change the part
    columns = {
        name: _concat([part.columns[name] for part in kept], shapes, first.schema.name) for name in first.columns
    }
    validity = None
    if any(part.validity is not None for part in kept):
        validity = np.concatenate([np.ones(len(p), np.bool_) if p.validity is None else p.validity for p in kept])
    extra_states = None
    if any(part.extra_states is not None for part in kept):
        extra_states = [row for part in kept for row in part.extra_states or [None] * len(part)]
    return Columns(first.schema, columns, sum(map(len, kept)), validity, extra_states)


def _concat(columns: list[Any], shapes: ShapePolicy, where: str) -> Column:
    first: Any = columns[0]
    kinds = {TensorColumn if isinstance(column, LentColumn) else type(column) for column in columns}
    if kinds == {DocumentColumn}:
        return DocumentColumn(first.field, concat_columns([column.columns for column in columns], shapes))
    if kinds == {DocumentsColumn}:
        # The offsets of a column count from its own first document, so they move by the documents of those before it.
        starts = np.cumsum([0] + [int(column.offsets[-1]) for column in columns])
        parts = [column.offsets[1:] + start for column, start in zip(columns, starts, strict=False)]
        offsets = np.concatenate([[0], *parts]).astype(np.int64)
        flat = concat_columns([column.flat for column in columns], shapes)
        return DocumentsColumn(first.field, flat, offsets, concat_validity(columns))
    joined: Column | None = first.concat(columns[1:]) if len(kinds) == 1 else None
    if joined is not None:
        return joined
    if any(isinstance(column, RaggedColumn) for column in columns):
        shapes = "ragged"
    elif any(isinstance(column, TensorColumn) and column.shapes is not None for column in columns):
        shapes = "pad"
    values = [value for column in columns for value in column.values()]
    return stack_values(first.field, values, StackOptions(shapes=shapes), f"{where}.{first.field.name}")


# --- columns from input


def make_column(schema: Schema, field: Field, values: Any, shapes: ShapePolicy, rows: Validity = None) -> Column:
    """Make a column from a tensor whose first axis is the rows, from a column of a batch, or from a sequence of values.

    The values are validated. `rows` is False in rows without a document, which must not have a value.
    """
    path = f"{schema.name}.{field.name}"
    column = _make_whole_column(field, values, path, rows)
    if column is not None:
        return column
    if isinstance(values, Column):
        shapes = "pad" if isinstance(values, TensorColumn) and values.shapes is not None else shapes
        values = values.values()
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(type(values), "__iter__"):
        raise ColumnError(f"{path}: a column is made from a tensor or a sequence of values, got {describe(values)}.")
    validated = validate_values(schema, field, list(values), path, rows)
    return stack_values(field, validated, StackOptions(shapes=shapes), path)


def _make_whole_column(field: Field, values: Any, path: str, rows: Validity) -> Column | None:
    """Make a column from values that have the form of a column; None if they must be validated one by one."""
    framework = framework_of(values)
    if framework is not None and field.kind is FieldKind.TENSOR:
        return _make_tensor_column(field, values, path, rows)
    if framework is not None and field.kind is FieldKind.SCALAR:
        return _make_scalar_column(field, values, framework, path, rows)
    column: Column
    if isinstance(values, RaggedColumn) and field.kind is FieldKind.TENSOR:
        column = _make_ragged_column(field, values, path)
    elif field.kind is FieldKind.DOCUMENT and _is_batch_of(field, values):
        # slice() copies the dict of columns: setting a column of one batch must not change the other
        column = DocumentColumn(field, values._columns.slice(slice(None)))
    elif field.kind is FieldKind.DOCUMENTS and _is_batch_of(field, getattr(values, "flat", None)):
        nested = values._column
        column = DocumentsColumn(field, nested.flat.slice(slice(None)), nested.offsets, nested.validity)
    else:
        return None
    if column.validity is not None and not field.nullable:
        missing = np.flatnonzero(~column.validity & (True if rows is None else rows))
        if len(missing):
            raise ColumnError(f"{path}, row {missing[0]}: there is no value, and the field takes no None.")
    return column


def _is_batch_of(field: Field, values: Any) -> bool:
    """Return whether values are a batch of the documents that a field holds."""
    columns = getattr(values, "_columns", None)
    return isinstance(columns, Columns) and columns.schema.document_type is field.document_type and not field.recursive


def _make_tensor_column(field: Field, values: Any, path: str, rows: Validity) -> Column:
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
        hint = ""
        if shape and not field.spec.accepts(framework.dtype(values)):
            hint = f" Convert it to {field.spec.dtype_text} first."
        elif shape and field.spec.shape is not None and not framework.is_sparse(values):
            hint = f" Its shape must be {format_shape(('rows', *field.spec.shape))}."
        raise ColumnError(f"{path}: expected rows of {field.spec}, got {describe(values)}, whose rows are {row}.{hint}")
    return TensorColumn(field, values, framework, _validity_for(rows, shape[0]))


def _make_ragged_column(field: Field, values: RaggedColumn, path: str) -> Column:
    dtype = values.framework.dtype(values.flat)
    for row in np.flatnonzero(values.valid_rows()).tolist():
        if not field.spec.fits(values.shapes[row], dtype):
            got = f"{dtype} {format_shape(values.shapes[row])}"
            raise ColumnError(f"{path}, row {row}: expected {field.spec}, got {got}.")
    return RaggedColumn(field, values.flat, values.framework, values.shapes, values.validity)


def _make_scalar_column(field: Field, values: Any, framework: Framework, path: str, rows: Validity) -> Column:
    reason = framework.convertible(values)
    kind = framework.to_numpy(values).dtype.kind if reason is None else "?"
    shape = framework.shape(values)
    if len(shape) != 1 or kind not in _SCALAR_KINDS.get(field.type, ""):
        if len(shape) != 1:
            hint = "Pass one number for each row."
        else:
            hint = "Convert the numbers first." if reason is None else f"It cannot be read as numbers: {reason}."
        raise ColumnError(f"{path}: expected a vector of {field.type.__name__}, got {describe(values)}. {hint}")
    return ScalarColumn(field, values, framework, _validity_for(rows, shape[0]))


def _validity_for(rows: Validity, length: int) -> Validity:
    return rows if rows is not None and len(rows) == length else None  # `set_column` rejects another length


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
    """Validate the values of a field; rows without a document must be None.

    With `extra='ignore'`, mappings may have more keys than the documents that they become have fields. Decoders pass
    `stored=True`: the values come from documents, and are not input for them. With `by_name`, mappings may use the
    names of fields, even for classes that accept only aliases.
    """
    positions = list(range(len(values)))
    if rows is not None and len(rows) == len(values):
        positions = np.flatnonzero(rows).tolist()
        for row in np.flatnonzero(~rows).tolist():
            if values[row] is not None:
                raise ColumnError(f"{path}, row {row}: there is no document to hold the value; pass None in this row.")
    try:
        options = {"context": STORED if stored else None, **(NAMES_AND_ALIASES if by_name else {})}
        validator = _get_validator(schema, field, extra)
        validated = validator.validate_python([values[row] for row in positions], **options)
    except ValidationError as error:
        first = error.errors()[0]
        raise ColumnError(f"{path}, row {positions[int(first['loc'][0])]}: {first['msg']}") from error
    # Rows without a document were not validated, since a field that takes no None would reject them.
    by_position = dict(zip(positions, validated, strict=True))
    return [by_position.get(row) for row in range(len(values))]


def _get_validator(schema: Schema, field: Field, extra: Extra) -> SchemaValidator | TypeAdapter[Any]:
    """Return the validator for a list of values of a field; it is built once."""
    key = "validator", field.name, extra
    if key not in schema.notes:
        if field.decodes_input:
            schema.notes[key] = field_validator(schema.document_type, field.name)
        else:
            annotation = schema.document_type.model_fields[field.name].rebuild_annotation()
            adapter = TypeAdapter(list[annotation], config=ConfigDict(arbitrary_types_allowed=True))  # type: ignore[valid-type]
            schema.notes[key] = adapter if extra == "forbid" else build_tolerant_validator(adapter.core_schema)
    validator: SchemaValidator | TypeAdapter[Any] = schema.notes[key]
    return validator


def default_column(schema: Schema, field: Field, length: int) -> Column:
    """Make a column of a field's default."""
    path = f"{schema.name}.{field.name}"
    if field.required:
        raise ColumnError(f"{path} has no default; give a column for it.")
    info = schema.document_type.model_fields[field.name]
    if getattr(info, "default_factory_takes_validated_data", False):
        raise ColumnError(f"{path}: its default is made from other fields; give a column for it.")
    factory: Any = info.default_factory
    # pydantic inspects the signature of a factory whenever it calls one, which takes much longer than the call.
    values = [info.get_default() if factory is None else factory() for _ in range(length)]
    if framework_of(info.default) is not None or isinstance(info.default, (list, tuple, dict)):
        values = validate_values(schema, field, values, path, None)  # as documents do with such defaults
    return stack_values(field, values, StackOptions(), path)
