"""Preprocessing: plan which functions run on which fields, and run them on the columns of a batch."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from quire.array import DocumentArray, DocumentBatch
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    DocumentsColumn,
    ObjectColumn,
    ShapePolicy,
    StackOptions,
    TensorColumn,
    with_fields,
    wrap_rows,
)
from quire.data._arena import Arena
from quire.data._column_store import convert_column, convert_columns, has_ragged, unify_column, unify_shapes
from quire.data._draws import Augmentation
from quire.data._infer_column import infer_batched_column, infer_column, stack_tensors
from quire.data._media_steps import DecodeStep, FailedRows, MediaStep, StepContext
from quire.errors import ColumnError, FunctionError, MissingValueError, PathError, SchemaError
from quire.schema import Field, FieldKind, FieldPath, Schema, join_path, parse_path
from quire.tensors import TensorType

if TYPE_CHECKING:
    from numpy.typing import NDArray

Function = Callable[[Any], Any]
Preprocessing = Mapping[Any, Function | Sequence[Function]]
"""Functions by dotted path ('' is the document itself), or by a document or field type."""
FunctionT = TypeVar("FunctionT", bound=Function)
EACH = ""
"""The last part of the path of an array of documents, for functions that run on each of them; users cannot name it."""

_MUTABLE = (FieldKind.LIST, FieldKind.DICT, FieldKind.UNION, FieldKind.ANY, FieldKind.DOCUMENT, FieldKind.DOCUMENTS)
_RAGGED = StackOptions(shapes="ragged")  # between steps; a later one may bring the rows to one shape
_MAX_NAMED = 8  # documents in one message


# --- planning


def batched(function: FunctionT) -> FunctionT:
    """Mark a function that takes a whole column: a tensor, a list, or a batch.

    The mark is an attribute of the function, so that workers still find a decorated function by its name. A callable
    that takes no attributes, such as `torch.sigmoid` or a method, is returned in a `functools.partial` with the mark.
    """
    try:
        function.__quire_batched__ = True  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        function = functools.partial(function)  # type: ignore[assignment]
        function.__quire_batched__ = True  # type: ignore[attr-defined]
    return function


def _is_batched(function: Function) -> bool:
    inner = getattr(function, "func", function)  # of a partial
    return bool(getattr(function, "__quire_batched__", False) or getattr(inner, "__quire_batched__", False))


@dataclass(frozen=True)
class Step:
    """The functions for one path: several that run in order on each value, or one that takes the whole column."""

    path: FieldPath
    functions: tuple[Function, ...]
    is_batched: bool = dataclasses.field(init=False, compare=False)
    """Whether the function takes a whole column."""
    named_path: str = dataclasses.field(init=False, compare=False)
    """The path as users write it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_batched", _is_batched(self.functions[0]))
        object.__setattr__(self, "named_path", join_path(tuple(part for part in self.path if part != EACH)))

    @property
    def name(self) -> str:
        """The name of the step in messages."""
        return self.describe(*self.functions)

    def describe(self, *functions: Function) -> str:
        """Describe some of the functions for a message."""
        path = repr(self.named_path) if self.named_path else "'' (the document)"
        inner = [getattr(function, "func", function) for function in functions]
        names = [str(getattr(function, "__name__", None) or repr(function)) for function in inner]
        return f"preprocessing of {path} by {', '.join(names)}"


def plan_steps(schema: Schema, preprocessing: Preprocessing | None) -> tuple[Step, ...]:
    """Plan the steps in order; an unknown path or type is an error."""
    if not isinstance(preprocessing or {}, Mapping):
        raise SchemaError(
            f"preprocessing: give functions by the path or type of what they change, as {{'photo.pixels': normalise}}; "
            f"'' is the document. Got {preprocessing!r}."
        )
    steps: list[Step] = []
    for key, value in (preprocessing or {}).items():
        functions: list[Any] = list(value) if isinstance(value, (list, tuple)) and not callable(value) else [value]
        for function in functions:
            if not callable(function):
                raise SchemaError(f"preprocessing[{key!r}]: give a function or a list of functions, not {function!r}.")
        groups: list[tuple[Function, ...]] = []  # a batched function is a step of its own, others run together
        for alone, group in itertools.groupby(functions, _is_batched):
            together = tuple(group)
            groups += [(function,) for function in together] if alone else [together]
        for path in _find_paths(schema, key):
            if functions and isinstance(functions[0], MediaStep) and all(path != step.path for step in steps):
                functions[0].check_field(_resolve_field(schema, path), f"{schema.name}.{join_path(path)}")
            steps += [Step(path, group) for group in groups]
    return tuple(steps)


def _resolve_field(schema: Schema, path: FieldPath) -> Field:
    if not path or path[-1] == EACH:
        return Field(
            "", FieldKind.DOCUMENT, schema.resolve(path[:-1])[-1].document_type if path else schema.document_type
        )
    return schema.resolve(path)[-1]


def decode_steps(steps: Iterable[Step]) -> list[DecodeStep]:
    """Return the steps that decode media."""
    return [function for step in steps for function in step.functions if isinstance(function, DecodeStep)]


def _find_paths(schema: Schema, key: Any) -> list[FieldPath]:
    """Return the path of a key, or the paths of all fields of a type."""
    if isinstance(key, str):
        path = parse_path(key)
        schema.resolve(path)
        return [path]
    if not isinstance(key, type):
        raise SchemaError(f"preprocessing: a key is a path or a type, got {key!r}.")
    if issubclass(schema.document_type, key):
        return [()]
    paths = list(_fields_of_type(schema, key, ()))
    if not paths:
        raise PathError(f"preprocessing: {schema.name} has no field of the type {key.__name__}.")
    return paths


def _fields_of_type(schema: Schema, tp: type, prefix: FieldPath) -> Iterator[FieldPath]:
    for field in schema.fields:
        path = (*prefix, field.name)
        if field.name == "id":  # ids identify documents in messages; a function changes them only by path
            continue
        if _is_of_type(field, tp):
            yield path
        elif field.kind is FieldKind.DOCUMENTS and not field.recursive and issubclass(field.document_type, tp):
            yield (*path, EACH)
        elif field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS) and not field.recursive:
            yield from _fields_of_type(field.document_type.document_schema(), tp, path)


def _is_of_type(field: Field, tp: type) -> bool:
    if isinstance(field.type, TensorType) and isinstance(tp, TensorType):
        return field.type is tp or (tp is tp._plain and field.type._plain is tp)
    if field.kind is FieldKind.SCALAR:
        return field.type is tp  # a bool is no int here
    return isinstance(field.type, type) and issubclass(field.type, tp)


# --- running


class BatchRun(NamedTuple):
    """The context of preprocessing one batch."""

    indices: NDArray[np.int64]
    """The number of each row in the dataset."""
    ids: Column | None
    shapes: ShapePolicy
    framework: str
    name: str
    """The name of the document class in messages."""
    arena: Arena
    """The memory for new tensors."""
    shows_zeros: bool
    """Whether batched functions read zeros for missing values; otherwise, reading them is an error."""
    augmentation: Augmentation | None
    """What random augmentations depend on; None for the evaluation form of all steps."""
    failed: FailedRows
    """The rows that could not be decoded; steps add to it."""

    def keep_rows(self, kept: NDArray[np.int64]) -> BatchRun:
        """Return the context of some of the rows."""
        return self._replace(indices=self.indices[kept], ids=None if self.ids is None else self.ids.take(kept))

    def describe_row(self, row: int) -> str:
        """Describe the document of a row for a message."""
        document = f"document {int(self.indices[row])}"
        return document if self.ids is None else f"{document} (id {self.ids.value(row)})"

    def describe_owner(self, rows: NDArray[np.int64], element: int) -> str:
        """Describe the document that a value belongs to, if value i belongs to row rows[i]."""
        return self.describe_row(int(rows[element]))

    def describe_batch(self) -> str:
        """Describe the documents of the batch for a message."""
        numbers = ", ".join(map(str, self.indices[:_MAX_NAMED].tolist()))
        return f"the batch of documents {numbers}{', ...' if len(self.indices) > _MAX_NAMED else ''}"

    def describe_path(self, step: Step) -> str:
        """Describe the path of a step for a message."""
        return f"{self.name}.{step.named_path}" if step.named_path else self.name


def run_steps(columns: Columns, steps: Iterable[Step], run: BatchRun) -> Columns:
    """Run all steps on the columns of a batch."""
    rows = np.arange(len(columns))
    for step in steps:
        try:
            columns = _run_inside(columns, step, step.path or (EACH,), rows, run)
        except ColumnError as error:
            raise FunctionError(f"{step.name} on {run.describe_batch()}: {error}") from error
    return columns


def leave_out_failed(columns: Columns, run: BatchRun, group: int = 1) -> tuple[Columns, NDArray[np.int64] | None]:
    """Leave out or replace the rows that could not be decoded, and return which rows are left; None for all.

    With `group`, windows of `group` consecutive rows are left out together.
    """
    kept = run.failed.select(len(columns), group)
    return (columns, None) if kept is None else (columns.take(kept), kept)


def unify_batch_shapes(columns: Columns, run: BatchRun) -> Columns:
    """Bring the ragged columns of a batch to one shape each, following the policy."""
    if run.shapes == "ragged" or not has_ragged(columns):
        return columns
    try:
        return unify_shapes(columns, run.shapes)
    except ColumnError as error:
        raise ColumnError(f"{run.describe_batch()}: {error}") from error


def _run_inside(columns: Columns, step: Step, path: FieldPath, rows: NDArray[np.int64], run: BatchRun) -> Columns:
    """Run a step on the column at a path. `rows[i]` is the row of the batch that row i of these columns belongs to."""
    name, *rest = path
    if name == EACH:
        return _run_on_documents(columns, step, rows, run)
    if name not in columns.columns:
        raise FunctionError(f"{step.name}: an earlier function gave a {columns.schema.name}, which has no {name!r}.")
    column = columns.columns[name]
    if not rest:
        changed = convert_column(_run_on_column(columns, column, step, rows, run), run.framework)
    elif isinstance(column, DocumentColumn):
        changed = DocumentColumn(column.field, _run_inside(column.columns, step, tuple(rest), rows, run))
    elif isinstance(column, DocumentsColumn):
        owners = np.repeat(rows, np.diff(column.offsets))
        flat = _run_inside(column.flat, step, tuple(rest), owners, run)
        field, document_type = column.field, flat.schema.document_type
        if document_type is not field.document_type:  # the function returned documents of another class
            field = replace(field, type=DocumentArray[document_type])  # type: ignore[valid-type]
        changed = DocumentsColumn(field, flat, column.offsets, column.validity)
    else:
        changed = _run_on_objects(column, step, tuple(rest), rows, run)
    new_columns = {**columns.columns, name: changed}
    schema = columns.schema if changed.field is column.field else with_fields(columns.schema, new_columns.values())
    return Columns(schema, new_columns, columns.length, columns.validity, columns.extra_states)


def _run_on_documents(columns: Columns, step: Step, rows: NDArray[np.int64], run: BatchRun) -> Columns:
    """Run a step on each document, or on the batch of them."""
    own, path = _own_columns(columns), run.describe_path(step)
    field = Field("", FieldKind.DOCUMENT, columns.schema.document_type)
    if step.is_batched:
        unified = unify_shapes(own, run.shapes)
        batch = DocumentBatch[columns.schema.document_type]._wrap(unified)  # type: ignore[name-defined]
        if not run.shows_zeros:
            batch._guard_missing()
        result = _call_batched(step, batch, run)
        column = infer_batched_column(field, batch if result is None else result, (len(columns), None), _RAGGED, path)
    else:
        results = _call_each(step, own.documents(), rows, run)
        column = infer_column(field, results, _RAGGED, path, functools.partial(run.describe_owner, rows))
    if isinstance(column, DocumentColumn) and column.columns.validity is None:
        return convert_columns(column.columns, run.framework)
    raise FunctionError(f"{step.name} must give documents, or None after changing the document in place.")


def _run_on_column(columns: Columns, column: Column, step: Step, rows: NDArray[np.int64], run: BatchRun) -> Column:
    function = step.functions[0]
    if isinstance(function, MediaStep):
        path = run.describe_path(step)
        context = StepContext(
            path, rows, run.indices, run.describe_row, run.framework, run.arena, run.augmentation, run.failed
        )
        return function.run(column, context)
    own = _own_column(column)
    if step.is_batched:
        return _run_batched(columns, own, step, run)
    values = own.values()
    results = _call_each(step, values, rows, run)
    if _shares_memory(own) and all(a is b for a, b in zip(values, results, strict=True)):
        return own  # changed in place: the values are views of the column, so nothing has to be stacked
    stacked = stack_tensors(column.field, results, run.arena)
    if stacked is not None:
        return stacked
    describe_row = functools.partial(run.describe_owner, rows)
    return infer_column(column.field, results, _RAGGED, run.describe_path(step), describe_row)


def _run_batched(columns: Columns, column: Column, step: Step, run: BatchRun) -> Column:
    """Run a batched function on a column, in one shape if the policy says so."""
    column = unify_column(column, run.shapes, run.describe_path(step))
    name = column.field.name
    if column is not columns.columns[name]:
        columns = replace(columns, columns={**columns.columns, name: column})
    argument = _make_argument(columns, column, run)
    result = _call_batched(step, argument, run)
    if result is None and not isinstance(argument, list):
        return column  # changed in place; a list is a copy, and is read back below
    data = argument if result is None else result
    if isinstance(column, TensorColumn) and isinstance(data, (list, tuple)) and len(data) == len(column):
        data = column.mask_values(list(data))  # results for rows without a value, which were zeros, are dropped
    has_all = isinstance(column, TensorColumn) and column.validity is None
    rows = len(column), None if has_all else column.valid_rows()
    return infer_batched_column(column.field, data, rows, _RAGGED, run.describe_path(step))


def _make_argument(columns: Columns, column: Column, run: BatchRun) -> Any:
    """Return a column as a batch does, for a batched function.

    Rows of a tensor without a value are zeros here, and have no value again in the result.
    """
    if isinstance(column, TensorColumn):
        return wrap_rows(column.field, column.framework, [column.data])[0]
    batch = DocumentBatch[columns.schema.document_type]._wrap(columns)  # type: ignore[name-defined]
    if run.shows_zeros or not isinstance(column, (DocumentColumn, DocumentsColumn)):
        return batch[column.field.name]
    nested = batch._guard_missing()[column.field.name]
    if isinstance(column, DocumentColumn):  # rows where the document is None stay None, and are no error
        nested._set(nested._columns, nested._guard._replace(skips_none=True))
    return nested


def _shares_memory(column: Column) -> bool:
    """Return whether the values of a column are views of it: not if the field is typed with another framework."""
    if not isinstance(column, TensorColumn):
        return False
    declared = column.field.type.framework if isinstance(column.field.type, TensorType) else None
    return declared is None or declared is column.framework


def _run_on_objects(column: Column, step: Step, rest: FieldPath, rows: NDArray[np.int64], run: BatchRun) -> Column:
    """Run a step inside documents that are held as objects, as recursive ones are."""
    if column.field.kind not in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS) or step.is_batched:
        reason = (
            "is held as objects, and has no columns for a batched function" if step.is_batched else "has no fields now"
        )
        raise FunctionError(f"{step.name}: {column.field.name!r} {reason}.")
    values = _own_column(column).values()
    for value, row in zip(values, rows.tolist(), strict=True):
        for document in [] if value is None else getattr(value, "_documents", [value]):
            _run_on_object(document, rest, step, row, run)
    return ObjectColumn(column.field, values)


def _run_on_object(document: Any, path: FieldPath, step: Step, row: int, run: BatchRun) -> None:
    name, *rest = path
    value = document.__dict__.get(name)
    if value is None:
        return
    if not rest:
        document.__dict__[name] = _call_each(step, [value], np.array([row]), run)[0]
        return
    for inner in getattr(value, "_documents", [value]):
        _run_on_object(inner, tuple(rest), step, row, run)


def _call_each(step: Step, values: list[Any], rows: NDArray[np.int64], run: BatchRun) -> list[Any]:
    """Call the functions for each value; if a function returns None, the value itself is the result."""
    for function in step.functions:
        results: list[Any] = []
        try:
            for value in values:
                result = None if value is None else function(value)
                results.append(value if result is None else result)
        except Exception as error:
            name, where = step.describe(function), run.describe_row(int(rows[len(results)]))
            raise FunctionError(f"{name} failed on {where}: {type(error).__name__}: {error}") from error
        values = results
    return values


def _call_batched(step: Step, argument: Any, run: BatchRun) -> Any:
    try:
        return step.functions[0](argument)
    except MissingValueError as error:
        raise MissingValueError(
            f"{step.name} on {run.describe_batch()}: {error} With missing='mask', functions read zeros, too."
        ) from error
    except Exception as error:
        batch = run.describe_batch()
        raise FunctionError(f"{step.name} failed on {batch}: {type(error).__name__}: {error}") from error


def _own_columns(columns: Columns) -> Columns:
    """Copy the objects of columns: a batch shares them with the dataset, and functions may change them."""
    own = {name: _own_column(column) for name, column in columns.columns.items()}
    return replace(columns, columns=own, extra_states=copy.deepcopy(columns.extra_states))


def _own_column(column: Column) -> Column:
    if isinstance(column, ObjectColumn) and (column.field.kind in _MUTABLE or column.field.kind is FieldKind.TENSOR):
        return ObjectColumn(column.field, copy.deepcopy(column.values()))
    return column.map_children(_own_columns)  # other leaves are gathered for this batch, or immutable
