"""What the methods of DocumentBatch do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic_core import CoreSchema, core_schema

from quire._equality import equal_values
from quire.array._filter import compile_filter
from quire.array._find import Metric, as_matrix, nearest
from quire.array._index import resolve_index
from quire.array._rows import check_method_typo, explain_vector_field, parametrised, query_vectors
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    DocumentsColumn,
    ObjectColumn,
    RaggedColumn,
    ShapePolicy,
    TensorColumn,
    TensorMap,
    concat_columns,
    default_column,
    dense_framework,
    fill_columns,
    make_column,
    present_rows,
    wrap_rows,
)
from quire.document import BaseDocument
from quire.errors import ColumnError, DocumentTypeError, MissingValueError, PathError, QueryError, did_you_mean
from quire.schema import Schema, join_path, parse_path
from quire.tensors import Framework, describe, get_framework, to_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Guard(NamedTuple):
    """How reading missing values of a batch raises: what the error calls the batch, and of which rows."""

    name: str
    skips_none: bool = False
    """Whether the numbers of rows of the batch that are None do not count: what becomes of them has no effect."""


BatchOf = Callable[[type[Any], Columns, Guard | None], Any]


class BatchList:
    """The arrays in a column: a batch of all their documents (`flat`), and where each row's begin and end (`offsets`).

    Its fields are those of `flat`; `batch.authors[i]` is the batch of one row's documents.
    """

    __slots__ = ("_column", "flat")
    _column: DocumentsColumn
    flat: Any

    def __init__(self, column: DocumentsColumn, batch_of: BatchOf, guard: Guard | None = None) -> None:
        object.__setattr__(self, "_column", column)
        object.__setattr__(self, "flat", batch_of(column.field.document_type, column.flat, guard))

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Row i has the documents offsets[i] to offsets[i + 1] of `flat`."""
        return self._column.offsets

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> Any:
        row = resolve_index(index, len(self))
        if not isinstance(row, int):
            raise ColumnError("a column of arrays is indexed by one position; use .flat and .offsets for more.")
        if self._column.validity is not None and not self._column.validity[row]:
            return None
        return self.flat[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # no field starts so
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.flat, name)

    def __setattr__(self, name: str, values: Any) -> None:
        setattr(self.flat, name, values)

    def __repr__(self) -> str:
        return f"<{len(self)} arrays with {len(self.flat)} {self.flat.schema.name} in all>"


# --- reading


def find_column(columns: Columns, path: str) -> Column:
    """The column at a path; through arrays it is the column of all their documents."""
    parts = parse_path(path)
    columns.schema.resolve(parts)
    if not parts:
        raise PathError("the empty path means the whole batch, which is not a column.")
    for depth, name in enumerate(parts):
        column = columns.columns[name]
        if depth == len(parts) - 1:
            return column
        if isinstance(column, DocumentColumn):
            columns = column.columns
        elif isinstance(column, DocumentsColumn):
            columns = column.flat
        else:
            raise PathError(f"{join_path(parts[: depth + 1])!r} is held as objects, so {path!r} is not a column.")
    raise AssertionError


def get_column(batch: Any, path: str, batch_of: BatchOf) -> Any:
    """A column's data: a tensor, a list, a batch, or a `BatchList`."""
    if not path:
        return batch
    column, guard = find_column(batch._columns, path), batch._guard
    if isinstance(column, (DocumentColumn, DocumentsColumn)):
        inner = None if guard is None else Guard(f"{guard.name}.{path}")
        if isinstance(column, DocumentColumn):
            return batch_of(column.field.document_type, column.columns, inner)
        return BatchList(column, batch_of, inner)
    if guard is not None and reads_as_none(batch, column, path):
        return None
    if isinstance(column, TensorColumn):
        return wrap_rows(column.field, column.framework, [column.data])[0]
    return column.values() if isinstance(column, ObjectColumn) else column


def reads_as_none(batch: Any, column: Column, path: str) -> bool:
    """Whether a column of a guarded batch has no value at all; an error where only some rows have none."""
    there, guard = present_rows(column), batch._guard
    if there is None or not there.any():
        return there is not None
    documents = batch._columns.validity
    if guard.skips_none and documents is not None and len(documents) == len(there):
        there = there | ~documents
        if there.all():
            return False
    row, missing = int(np.argmin(there)), int(len(there) - there.sum())
    named = f"row {row}"
    ids = batch._columns.columns.get("id")
    if ids is not None and len(ids) == len(there):
        named += f" (id {ids.value(row)})"
    raise MissingValueError(
        f"{guard.name}.{path}: {named} has no value ({missing} of {len(there)} are missing), and reading the column "
        f"would give zeros in their place. batch.validity({path!r}) shows which rows have a value, and "
        f"batch.fill_missing({{{path!r}: value}}) fills the others."
    )


def fill_missing(columns: Columns, values: Mapping[str, Any]) -> Columns:
    """The columns with a value, by path, in the rows that have none."""
    if not isinstance(values, Mapping):
        raise ColumnError(f"fill_missing: give values by path, as {{'label': -100}}; got {describe(values)}.")
    for path in values:
        find_column(columns, path)  # names the nearest fields of a path that is not there
    return fill_columns(columns, {parse_path(path): value for path, value in values.items()})


def attribute(batch: Any, name: str) -> Any:
    """A column by attribute. Methods come first: a field called like one is read as batch['take']."""
    if name.startswith("_"):  # no field starts so
        raise AttributeError(f"{type(batch).__name__!r} object has no attribute {name!r}")
    try:
        return batch[name]
    except PathError:
        check_method_typo(batch, batch._columns.schema, name)
        raise


def positions(key: Any, length: int) -> NDArray[np.int64]:
    """Positions from anything that names rows."""
    rows = resolve_index(key, length)
    if type(rows) is np.ndarray:
        return rows
    return np.arange(*rows.indices(length)) if isinstance(rows, slice) else np.array([rows])


def select(batch: Any, rows: int | slice | NDArray[np.int64]) -> Any:
    """A document, a view of a run of rows, or a copy of chosen rows."""
    if isinstance(rows, int):
        return batch._columns.document(rows)
    columns = batch._columns
    if isinstance(rows, slice):
        ahead = rows.step is None or rows.step > 0  # torch has no views that run backwards
        return batch._derive(columns.slice(rows) if ahead else columns.take(positions(rows, len(columns))))
    return batch._derive(columns.take(rows))


def matching(columns: Columns, query: Any) -> NDArray[np.int64]:
    """The positions of the rows that match a query."""
    schema = None if columns.schema.document_type is BaseDocument else columns.schema
    return compile_filter(query, schema).rows(columns)


def find(
    columns: Columns, queries: Any, field: str, metric: Metric, limit: int
) -> list[tuple[NDArray[np.int64], NDArray[Any]]]:
    """Positions and scores of the nearest rows for each query; rows without a vector are left out."""
    with explain_vector_field():
        column = find_column(columns, field)
    rows = np.flatnonzero(column.valid_rows())
    if len(column) != len(columns):
        raise QueryError(f"{field}: a search goes over one vector a row, not over the documents of arrays.")
    wanted = query_vectors(queries, field)
    if isinstance(column, TensorColumn) and len(rows):
        matrix = as_matrix(column.data, field)[rows]
    else:
        values = column.values()
        matrix = as_matrix([values[row] for row in rows.tolist()], field) if len(rows) else wanted[:0]
    return [(rows[found], scores) for found, scores in nearest(matrix, wanted, metric, limit)]


def validity(column: Column) -> Any:
    """Which rows have a value, in the column's framework."""
    framework = column.framework if isinstance(column, (TensorColumn, RaggedColumn)) else get_framework("numpy")
    return framework.from_numpy(column.valid_rows().copy())


def mask(column: Column) -> Any:
    """Which elements are real, in the column's framework."""
    if not isinstance(column, TensorColumn):
        raise ColumnError(
            f"{column.field.name}: only a tensor column has a mask; it is held as {type(column).__name__}."
        )
    return column.framework.from_numpy(column.mask())


def row_mask(columns: Columns) -> Any:
    """Which rows stand for a document, in the framework of the tensors."""
    tensors = [column for column in columns.columns.values() if isinstance(column, (TensorColumn, RaggedColumn))]
    framework = tensors[0].framework if tensors else get_framework("numpy")
    there = np.ones(len(columns), np.bool_) if columns.validity is None else columns.validity.copy()
    return framework.from_numpy(there)


def equal(a: Any, b: Any, *, ids: bool = False) -> bool:
    """Whether two batches have one document class and equal rows."""
    same = a.document_type is b.document_type and len(a) == len(b)
    return same and equal_values(a._columns.documents(), b._columns.documents(), ids=ids)


# --- setting


def set_attribute(batch: Any, name: str, values: Any) -> None:
    """Set a column by attribute."""
    fields = batch._columns.schema.by_name
    if name not in fields:
        raise PathError(f"{batch._columns.schema.name} has no field {name!r}. {did_you_mean(name, fields)}")
    if hasattr(type(batch), name):
        raise PathError(f"{name!r} is a method of {type(batch).__name__}: set the column by batch[{name!r}] = values.")
    batch[name] = values


def set_column(columns: Columns, path: str, values: Any) -> None:
    """Put values in the place of a column; they are checked first."""
    *parents, name = parse_path(path) or ("",)
    columns.schema.resolve((*parents, name))
    for parent in parents:
        column = find_column(columns, parent)
        if not isinstance(column, (DocumentColumn, DocumentsColumn)):
            raise PathError(f"{parent!r} is held as objects, so {path!r} is not a column.")
        columns = column.columns if isinstance(column, DocumentColumn) else column.flat
    field = columns.schema.resolve((name,))[0]
    columns.set_column(make_column(columns.schema, field, values, "error", columns.validity))


def columns_from(schema: Schema, given: Mapping[str, Any], shapes: ShapePolicy) -> Columns:
    """Columns from data; what is not given takes the field's default."""
    for name in given:
        schema.resolve((name,))
    made = {name: make_column(schema, schema.by_name[name], values, shapes) for name, values in given.items()}
    lengths = {name: len(column) for name, column in made.items()}
    if len(set(lengths.values())) > 1:
        raise ColumnError(f"{schema.name}: columns of different lengths: {lengths}.")
    length = next(iter(lengths.values()), 0)
    for field in schema.fields:
        if field.name not in made:
            made[field.name] = default_column(schema, field, length)
    return Columns(schema, {field.name: made[field.name] for field in schema.fields}, length)


def concat(batch_type: type[Any], batches: Iterable[Any], shapes: ShapePolicy) -> Any:
    """Batches of one document class put one behind the other."""
    given = list(batches)
    if not given:
        return batch_type()
    if batch_type.document_type is BaseDocument:
        batch_type = type(given[0])
    for index, batch in enumerate(given):
        if getattr(batch, "document_type", None) is not batch_type.document_type or not hasattr(batch, "_columns"):
            raise DocumentTypeError(
                f"{batch_type.__name__}.concat: item {index}: expected a {batch_type.__name__}, got {describe(batch)}."
            )
    made = batch_type._wrap(concat_columns([batch._columns for batch in given], shapes))
    return made._guarded() if any(batch._guard is not None for batch in given) else made


# --- tensors


def mover(device: Any, *, non_blocking: bool) -> TensorMap:
    """Moves tensors to a device."""
    return lambda framework, value: (framework, framework.to_device(value, device, non_blocking=non_blocking))


def converter(name: str) -> TensorMap:
    """Converts tensors to a framework; sparse ones, which have no columns, stay what they are."""
    target = dense_framework(name)

    def convert(framework: Framework, value: Any) -> tuple[Framework, Any]:
        return (framework, value) if framework.is_sparse(value) else (target, to_framework(value, target))

    return convert


def sharer() -> TensorMap:
    """Moves tensors, in place, into memory that other processes can map."""
    return lambda framework, value: (framework, value if framework.is_sparse(value) else framework.share(value))


# --- pydantic


def core_schema_of(batch_type: type[Any], source: Any, handler: Any, array_type: type[Any]) -> CoreSchema:
    """pydantic's plan for a field of batches: a batch as it is, or what becomes an array, stacked."""
    batch_type = parametrised(batch_type, source)
    rows = handler.generate_schema(array_type[batch_type.document_type])

    def validate(value: Any, inner: Callable[[Any], Any]) -> Any:
        return value if isinstance(value, batch_type) else batch_type(inner(value))

    return core_schema.no_info_wrap_validator_function(
        validate,
        rows,
        serialization=core_schema.wrap_serializer_function_ser_schema(
            lambda batch, inner: inner(batch.unstack()), schema=rows
        ),
    )
