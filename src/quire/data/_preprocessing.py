"""Preprocessing: plan which functions run on which fields, and run them on the columns of a batch."""

from __future__ import annotations

import copy
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
    wrap_rows,
)
from quire.data._arena import Arena
from quire.data._column_store import convert_column, convert_columns, has_ragged, unify_column, unify_shapes
from quire.data._infer_column import column_of, column_of_data, tensors_column, with_fields
from quire.errors import ColumnError, FunctionError, MissingValueError, PathError, SchemaError
from quire.schema import Field, FieldKind, FieldPath, Schema, join_path, parse_path
from quire.tensors import TensorType

if TYPE_CHECKING:
    from numpy.typing import NDArray

Function = Callable[[Any], Any]
Preprocessing = Mapping[Any, Function | Sequence[Function]]
"""Functions by dotted path, '' for the document itself, or by a document or field type."""
FunctionT = TypeVar("FunctionT", bound=Function)
EACH = ""
"""Behind the path of an array: each of its documents, which no path that users write can name."""


def batched(function: FunctionT) -> FunctionT:
    """Mark a function that takes a whole column: a tensor, a list, or a batch.

    The mark is set on the function itself, so that a decorated one is still found by its name in a worker. What takes
    no mark, such as `torch.sigmoid` or a method, is given back in a `functools.partial` that has it.
    """
    try:
        function.__quire_batched__ = True  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        function = functools.partial(function)  # type: ignore[assignment]
        function.__quire_batched__ = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Step:
    """Functions that run one after the other on each value, or one that takes the whole column, and where."""

    path: FieldPath
    functions: tuple[Function, ...]

    @functools.cached_property
    def is_batched(self) -> bool:
        """Whether the function takes a whole column."""
        return _is_batched(self.functions[0])

    @functools.cached_property
    def named_path(self) -> str:
        """The path as users write it."""
        return join_path(tuple(part for part in self.path if part != EACH))

    @property
    def name(self) -> str:
        """What a message calls the step."""
        return self.name_of(*self.functions)

    def name_of(self, *functions: Function) -> str:
        """What a message calls some of the functions."""
        path = repr(self.named_path) if self.named_path else "'' (the document)"
        return f"preprocessing of {path} by {', '.join(map(_function_name, functions))}"


def _is_batched(function: Function) -> bool:
    inner = getattr(function, "func", function)  # of a partial
    return bool(getattr(function, "__quire_batched__", False) or getattr(inner, "__quire_batched__", False))


def _function_name(function: Function) -> str:
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__name__", None) or repr(inner))


def plan_steps(schema: Schema, preprocessing: Preprocessing | None) -> tuple[Step, ...]:
    """The steps in order; a path that is not there is an error now."""
    if not isinstance(preprocessing or {}, Mapping):
        raise SchemaError(
            f"preprocessing: give functions by the path or type of what they change, as {{'photo.pixels': normalise}}; "
            f"'' is the document. Got {preprocessing!r}."
        )
    steps: list[Step] = []
    for key, given in (preprocessing or {}).items():
        runs = _runs(_functions(key, given))
        steps += [Step(path, functions) for path in _paths(schema, key) for functions in runs]
    return tuple(steps)


def _runs(functions: list[Function]) -> list[tuple[Function, ...]]:
    """Functions in groups that make one column: a batched one alone, others together."""
    runs: list[tuple[Function, ...]] = []
    for alone, group in itertools.groupby(functions, _is_batched):
        together = tuple(group)
        runs += [(function,) for function in together] if alone else [together]
    return runs


def _functions(key: Any, given: Any) -> list[Function]:
    listed = isinstance(given, (list, tuple)) and not callable(given)
    functions = list(given) if listed else [given]
    for function in functions:
        if not callable(function):
            raise SchemaError(f"preprocessing[{key!r}]: give a function or a list of functions, not {function!r}.")
    return functions


def _paths(schema: Schema, key: Any) -> list[FieldPath]:
    if isinstance(key, str):
        path = parse_path(key)
        schema.resolve(path)
        return [path]
    if not isinstance(key, type):
        raise SchemaError(f"preprocessing: a key is a path or a type, got {key!r}.")
    whole: list[FieldPath] = [()]
    found = whole if issubclass(schema.document_type, key) else list(_fields_of_type(schema, key, ()))
    if not found:
        raise PathError(f"preprocessing: {schema.name} has no field of the type {key.__name__}.")
    return found


def _fields_of_type(schema: Schema, tp: type, before: FieldPath) -> Iterator[FieldPath]:
    for field in schema.fields:
        path = (*before, field.name)
        if field.name == "id":  # a document stays known by it; who wants to change ids names their path
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


_MUTABLE = (FieldKind.LIST, FieldKind.DICT, FieldKind.UNION, FieldKind.ANY, FieldKind.DOCUMENT, FieldKind.DOCUMENTS)
_RAGGED = StackOptions(shapes="ragged")  # between steps; a later one may bring the rows to one shape
_MOST_NAMED = 8  # documents in one message


class Run(NamedTuple):
    """A batch on its way through the steps: where its rows come from, and how they are stacked again."""

    indices: NDArray[np.int64]
    ids: Column | None
    shapes: ShapePolicy
    framework: str
    name: str
    """The document class, as messages call it."""
    arena: Arena
    """The memory that its tensors are made in."""
    shows_zeros: bool
    """Whether batched functions read zeros for missing values; else reading them is an error."""

    def where(self, row: int) -> str:
        """The document that a row stands for, as a message names it."""
        document = f"document {int(self.indices[row])}"
        return document if self.ids is None else f"{document} (id {self.ids.value(row)})"

    def where_of(self, rows: NDArray[np.int64], element: int) -> str:
        """The document that a value belongs to, where value i belongs to row rows[i]."""
        return self.where(int(rows[element]))

    def documents(self) -> str:
        """All documents of the batch, as a message names them."""
        named = ", ".join(map(str, self.indices[:_MOST_NAMED].tolist()))
        return f"the batch of documents {named}{', ...' if len(self.indices) > _MOST_NAMED else ''}"

    def path(self, step: Step) -> str:
        """Where a step runs, as a message names it."""
        return f"{self.name}.{step.named_path}" if step.named_path else self.name


def run_steps(columns: Columns, steps: Iterable[Step], run: Run) -> Columns:
    """The columns after all steps."""
    rows = np.arange(len(columns))
    for step in steps:
        try:
            columns = _inside(columns, step, step.path or (EACH,), rows, run)
        except ColumnError as error:
            raise FunctionError(f"{step.name} on {run.documents()}: {error}") from error
    return columns


def in_shape(columns: Columns, run: Run) -> Columns:
    """The columns, ragged no more, as the policy says."""
    if run.shapes == "ragged" or not has_ragged(columns):
        return columns
    try:
        return unify_shapes(columns, run.shapes)
    except ColumnError as error:
        raise ColumnError(f"{run.documents()}: {error}") from error


def _whole(columns: Columns, step: Step, rows: NDArray[np.int64], run: Run) -> Columns:
    """The function runs on the documents, or on the batch of them."""
    schema, own, path = columns.schema, _own(columns), run.path(step)
    if step.is_batched:
        batch = DocumentBatch[schema.document_type]._wrap(unify_shapes(own, run.shapes))  # type: ignore[name-defined]
        if not run.shows_zeros:
            batch._guarded()
        result = _called_batched(step, batch, run)
        made = batch if result is None else result
        column = column_of_data(_document_field(schema), made, (len(columns), None), _RAGGED, path)
    else:
        results = _called(step, own.documents(), rows, run)
        where = functools.partial(run.where_of, rows)
        column = column_of(_document_field(schema), results, _RAGGED, path, where)
    if isinstance(column, DocumentColumn) and column.columns.validity is None:
        return convert_columns(column.columns, run.framework)
    raise FunctionError(f"{step.name} must give documents, or None after changing the document in place.")


def _document_field(schema: Schema) -> Field:
    return Field("", FieldKind.DOCUMENT, schema.document_type)


def _inside(columns: Columns, step: Step, path: FieldPath, rows: NDArray[np.int64], run: Run) -> Columns:
    """The columns with the one at the path changed. `rows` are the rows of the batch that these columns belong to."""
    name, *rest = path
    if name == EACH:
        return _whole(columns, step, rows, run)
    if name not in columns.columns:
        raise FunctionError(f"{step.name}: an earlier function gave a {columns.schema.name}, which has no {name!r}.")
    column = columns.columns[name]
    if not rest:
        made = convert_column(_changed(columns, column, step, rows, run), run.framework)
    elif isinstance(column, DocumentColumn):
        made = DocumentColumn(column.field, _inside(column.columns, step, tuple(rest), rows, run))
    elif isinstance(column, DocumentsColumn):
        owners = np.repeat(rows, np.diff(column.offsets))
        flat = _inside(column.flat, step, tuple(rest), owners, run)
        made = DocumentsColumn(_array_field(column.field, flat), flat, column.offsets, column.validity)
    else:
        made = _deep(column, step, tuple(rest), rows, run)
    changed = {**columns.columns, name: made}
    schema = columns.schema if made.field is column.field else with_fields(columns.schema, changed.values())
    return Columns(schema, changed, columns.length, columns.validity, columns.extra_states)


def _array_field(field: Field, flat: Columns) -> Field:
    """The field of arrays whose documents may be of another class now."""
    found = flat.schema.document_type
    return field if found is field.document_type else replace(field, type=DocumentArray[found])  # type: ignore[valid-type]


def _changed(columns: Columns, column: Column, step: Step, rows: NDArray[np.int64], run: Run) -> Column:
    own = _own_column(column)
    if step.is_batched:
        return _changed_whole(columns, own, step, run)
    values = own.values()
    results = _called(step, values, rows, run)
    if _shares_rows(own) and all(a is b for a, b in zip(values, results, strict=True)):
        return own  # changed in place, in the memory of the batch
    alike = tensors_column(column.field, results, run.arena)
    if alike is not None:
        return alike
    return column_of(column.field, results, _RAGGED, run.path(step), functools.partial(run.where_of, rows))


def _changed_whole(columns: Columns, column: Column, step: Step, run: Run) -> Column:
    """What a batched function makes of a column, which it gets in one shape if the policy asks for that."""
    column = unify_column(column, run.shapes, run.path(step))
    name, own = column.field.name, columns
    if column is not columns.columns[name]:
        own = replace(columns, columns={**columns.columns, name: column})
    given = _as_given(own, column, run)
    result = _called_batched(step, given, run)
    if result is None and not isinstance(given, list):
        return column
    whole = isinstance(column, TensorColumn) and column.validity is None
    validity = None if whole else column.valid_rows()
    data = given if result is None else result
    if isinstance(column, TensorColumn) and isinstance(data, (list, tuple)) and len(data) == len(column):
        data = column.mask_values(list(data))  # what it made of the zeros in rows without a value is no value
    return column_of_data(column.field, data, (len(column), validity), _RAGGED, run.path(step))


def _as_given(columns: Columns, column: Column, run: Run) -> Any:
    """A column as a batch gives it, for a batched function.

    Rows of a tensor without a value are zeros here, and have no value again in what the function returns.
    """
    if isinstance(column, TensorColumn):
        return wrap_rows(column.field, column.framework, [column.data])[0]
    batch = DocumentBatch[columns.schema.document_type]._wrap(columns)  # type: ignore[name-defined]
    if run.shows_zeros or not isinstance(column, (DocumentColumn, DocumentsColumn)):
        return batch[column.field.name]
    given = batch._guarded()[column.field.name]
    if isinstance(column, DocumentColumn):  # where it is None, it stays None
        given._set(given._columns, given._guard._replace(skips_none=True))
    return given


def _shares_rows(column: Column) -> bool:
    """Whether the values of the column are views of it: not where the field is typed with another framework."""
    if not isinstance(column, TensorColumn):
        return False
    declared = column.field.type.framework if isinstance(column.field.type, TensorType) else None
    return declared is None or declared is column.framework


def _deep(column: Column, step: Step, rest: FieldPath, rows: NDArray[np.int64], run: Run) -> Column:
    """A path that goes on inside documents held as objects, as recursive ones are."""
    if column.field.kind not in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS) or step.is_batched:
        what = (
            "is held as objects, and has no columns for a batched function" if step.is_batched else "has no fields now"
        )
        raise FunctionError(f"{step.name}: {column.field.name!r} {what}.")
    values = _own_column(column).values()
    for value, row in zip(values, rows.tolist(), strict=True):
        for document in [] if value is None else getattr(value, "_documents", [value]):
            _set_inside(document, rest, step, row, run)
    return ObjectColumn(column.field, values)


def _set_inside(document: Any, path: FieldPath, step: Step, row: int, run: Run) -> None:
    name, *rest = path
    value = document.__dict__.get(name)
    if value is None:
        return
    if not rest:
        document.__dict__[name] = _called(step, [value], np.array([row]), run)[0]
        return
    for inner in getattr(value, "_documents", [value]):
        _set_inside(inner, tuple(rest), step, row, run)


def _called(step: Step, values: list[Any], rows: NDArray[np.int64], run: Run) -> list[Any]:
    """What the functions give for each value; None stands for the value itself, which they may have changed."""
    results = values
    for function in step.functions:
        results = _mapped(function, results, step, rows, run)
    return results


def _mapped(function: Function, values: list[Any], step: Step, rows: NDArray[np.int64], run: Run) -> list[Any]:
    results: list[Any] = []
    try:
        for value in values:
            result = None if value is None else function(value)
            results.append(value if result is None else result)
    except Exception as error:
        name, where = step.name_of(function), run.where(int(rows[len(results)]))
        raise FunctionError(f"{name} failed on {where}: {type(error).__name__}: {error}") from error
    return results


def _called_batched(step: Step, column: Any, run: Run) -> Any:
    try:
        return step.functions[0](column)
    except MissingValueError as error:
        raise MissingValueError(
            f"{step.name} on {run.documents()}: {error} With missing='mask', functions read zeros, too."
        ) from error
    except Exception as error:
        raise FunctionError(f"{step.name} failed on {run.documents()}: {type(error).__name__}: {error}") from error


def _own(columns: Columns) -> Columns:
    """The columns with objects of their own: those of a batch are the source's, and functions may change them."""
    made = {name: _own_column(column) for name, column in columns.columns.items()}
    return replace(columns, columns=made, extra_states=copy.deepcopy(columns.extra_states))


def _own_column(column: Column) -> Column:
    if isinstance(column, TensorColumn):
        return column  # gathered for this batch
    if isinstance(column, DocumentColumn):
        return DocumentColumn(column.field, _own(column.columns))
    if isinstance(column, DocumentsColumn):
        return DocumentsColumn(column.field, _own(column.flat), column.offsets, column.validity)
    if isinstance(column, ObjectColumn) and (column.field.kind in _MUTABLE or column.field.kind is FieldKind.TENSOR):
        return ObjectColumn(column.field, copy.deepcopy(column.values()))
    return column
