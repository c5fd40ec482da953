"""How a dataset holds its documents in memory, and gathers the rows of a batch.

Texts are stored in one buffer, not as Python objects. Each object would have a reference count, and reading it in a
forked worker would write to the count, so that the system copies the page around it: in time, every worker would copy
the whole dataset.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire._optional import is_installed
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    ObjectColumn,
    PackedColumn,
    RaggedColumn,
    ShapePolicy,
    StackOptions,
    TensorColumn,
    pack,
    stack_values,
    validity_of,
)
from quire.data._arena import Arena, RowSource
from quire.errors import TensorError
from quire.schema import Field, FieldKind, FieldPath
from quire.tensors import get_framework, to_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


def default_framework() -> str:
    """Return the framework of batches: torch if it is installed, else numpy."""
    return "torch" if is_installed("torch") else "numpy"


def in_worker() -> bool:
    """Return whether this is a worker process of torch's DataLoader."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    return torch_data is not None and torch_data.get_worker_info() is not None


# --- conversion


def store_columns(columns: Columns, framework: str) -> Columns:
    """Convert columns to the form in which a dataset holds them."""

    def store(column: Column) -> Column:
        if isinstance(column, ObjectColumn) and column.field.kind in (FieldKind.TEXT, FieldKind.BYTES):
            return _pack_column(column)
        return _convert_leaf(column, framework)

    return columns.map_leaves(store)


def convert_columns(columns: Columns, framework: str) -> Columns:
    """Convert the tensors and numbers of columns to a framework, including those of nested documents."""
    return columns.map_leaves(lambda column: _convert_leaf(column, framework))


def convert_column(column: Column, framework: str) -> Column:
    """Convert the tensors and numbers of a column to a framework, including those of nested documents."""
    return column.map_leaves(lambda leaf: _convert_leaf(leaf, framework))


def _convert_leaf(column: Column, framework: str) -> Column:
    if not isinstance(column, (TensorColumn, RaggedColumn)) or column.framework.name == framework:
        return column
    target = get_framework(framework)
    try:
        return column.map_tensors(lambda _, value: (target, to_framework(value, target)))
    except TensorError:
        return column  # a dtype that the framework does not have, such as texts and dates


def _pack_column(column: ObjectColumn) -> Column:
    items = column.values()
    plain = str if column.field.kind is FieldKind.TEXT else bytes
    if isinstance(column, PackedColumn) or not set(map(type, items)) <= {plain, type(None)}:
        return column
    validity = validity_of(items)
    try:
        data, offsets = pack([plain() if item is None else item for item in items])
    except UnicodeEncodeError:
        return column
    return PackedColumn.from_offsets(column.field, data, offsets, validity)


# --- ragged columns


def has_ragged(columns: Columns) -> bool:
    """Return whether a column, or one of nested documents, is ragged; deferred columns never are."""
    for column in columns.columns.values():
        if type(column) is RaggedColumn:
            return True
        if any(not inner.is_deferred and has_ragged(inner) for inner in column.children):
            return True
    return False


def unify_shapes(columns: Columns, shapes: ShapePolicy) -> Columns:
    """Bring the ragged columns of a batch to one shape each, following the policy."""
    if shapes == "ragged":
        return columns
    unified = {
        name: unify_column(column, shapes, f"{columns.schema.name}.{name}") for name, column in columns.columns.items()
    }
    return replace(columns, columns=unified)


def unify_column(column: Column, shapes: ShapePolicy, path: str) -> Column:
    """Bring a ragged column to one shape, following the policy; other columns are returned unchanged."""
    if shapes == "ragged":
        return column
    if isinstance(column, RaggedColumn):
        rows = [None if row is None else column.framework.unwrap(row) for row in column.values()]
        return stack_values(column.field, rows, StackOptions(column.framework.name, shapes), path)
    return column.map_children(lambda columns: unify_shapes(columns, shapes))


# --- gathering


class GatherPlan:
    """Copies rows of the columns of a dataset to batches: how each column is copied is planned once.

    `steps` are the paths of preprocessing functions, and whether they read row by row.
    """

    __slots__ = ("_columns", "_deferred", "_names", "_nested", "_others", "_packed", "_tensors")

    def __init__(self, columns: Columns, steps: Collection[tuple[FieldPath, bool]]) -> None:
        self._columns = columns
        self._names: dict[str, Any] = dict.fromkeys(columns.columns)  # in the order of the batches
        self._packed: list[tuple[str, PackedColumn]] = []
        # Columns that functions read row by row are copied to memory of their own: the results go to a new column.
        self._tensors: list[tuple[str, TensorColumn, type[TensorColumn], RowSource, bool]] = []
        self._nested: list[tuple[str, DocumentColumn, GatherPlan]] = []
        # Nested documents without tensors that no function reads are gathered when the batch is asked for them.
        self._deferred: list[tuple[str, DocumentColumn, GatherPlan]] = []
        self._others: list[tuple[str, Column]] = []
        first_names = {path[:1] for path, _ in steps}
        row_by_row = {path[0] for path, by_row in steps if by_row and len(path) == 1}
        for name, column in columns.columns.items():
            if type(column) is PackedColumn:
                self._packed.append((name, column))
            elif type(column) is DocumentColumn:
                inner = [(path[1:], by_row) for path, by_row in steps if path[:1] in ((), (name,))]
                is_deferred = not first_names & {(), (name,)} and not _has_tensors(column.columns)
                plans = self._deferred if is_deferred else self._nested
                plans.append((name, column, GatherPlan(column.columns, inner)))
            elif isinstance(column, TensorColumn) and column.framework.name == "torch":
                rows = RowSource(column.data)
                kind = type(column.with_data(column.data, None, None))
                self._tensors.append((name, column, kind, rows, name in row_by_row))
            else:
                self._others.append((name, column))

    def gather(self, indices: NDArray[np.int64], arenas: Arenas) -> Columns:
        """Copy rows by position; torch's tensors are stored in memory of the arenas."""
        # This runs for every batch, when the copies of the batch before it have replaced the code and the objects in
        # the caches of the processor. Setting the attributes of columns here takes half the time of their `__init__`.
        source, gathered, new = self._columns, self._names.copy(), object.__new__
        for name, packed in self._packed:
            texts = gathered[name] = new(PackedRows)
            texts.field, texts.data, texts.source, texts.rows = packed.field, packed.data, packed, indices
            texts.validity = None if packed.validity is None else _select(packed.validity, indices)
        for name, column, kind, rows, by_row in self._tensors:
            tensors = gathered[name] = new(kind)
            tensors.field, tensors.framework = column.field, column.framework
            tensors.validity = None if column.validity is None else _select(column.validity, indices)
            tensors.shapes = None if column.shapes is None else column.shapes[indices]
            tensors.data = (arenas.scratch if by_row else arenas.batch).take(rows, indices)
        for name, nested, plan in self._nested:
            gathered[name] = DocumentColumn(nested.field, plan.gather(indices, arenas))
        for name, nested, plan in self._deferred:
            gathered[name] = DocumentColumn(nested.field, DeferredColumns.of(nested.columns, plan, indices, arenas))
        for name, other in self._others:
            gathered[name] = other.take(indices)
        columns, states = new(Columns), source.extra_states
        columns.schema, columns.columns, columns.length = source.schema, gathered, len(indices)
        columns.validity = None if source.validity is None else source.validity[indices]
        columns.extra_states = None if states is None else [states[i] for i in indices.tolist()]
        return columns


def _select(validity: NDArray[np.bool_], indices: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    selected = validity[indices]
    return None if selected.all() else selected


def _has_tensors(columns: Columns) -> bool:
    for column in columns.columns.values():
        if type(column) is DocumentColumn and not _has_tensors(column.columns):
            continue
        if not isinstance(column, ObjectColumn):
            return True
    return False


class Arenas(NamedTuple):
    """The memory for the columns of a batch, and that for columns which only preprocessing reads."""

    batch: Arena
    scratch: Arena


class PackedRows(PackedColumn):
    """Some rows of a packed column; their offsets are looked up when they are first read. `GatherPlan` makes it."""

    __slots__ = ("rows", "source")
    source: PackedColumn
    rows: NDArray[np.int64]

    def __getattr__(self, name: str) -> Any:
        # Python calls this for a slot without a value, so the lookup happens once.
        if name not in ("starts", "ends"):
            return super().__getattr__(name)
        offsets = getattr(self.source, name)[self.rows]
        setattr(self, name, offsets)
        return offsets

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def restore(cls, field: Field, payload: dict[str, Any]) -> PackedColumn:  # type: ignore[override]
        return PackedColumn.restore(field, payload)


class DeferredColumns(Columns):
    """Rows of other columns that are gathered when they are first read."""

    __slots__ = ("_arguments",)
    is_deferred = True
    _arguments: tuple[GatherPlan, NDArray[np.int64], Arenas]

    @classmethod
    def of(cls, columns: Columns, plan: GatherPlan, indices: NDArray[np.int64], arenas: Arenas) -> DeferredColumns:
        """Let the plan of the columns gather the rows when `columns` is read."""
        deferred = object.__new__(cls)
        deferred.schema, deferred.length = columns.schema, len(indices)
        deferred._arguments = (plan, indices, arenas)
        deferred.validity = None if columns.validity is None else columns.validity[indices]
        states = columns.extra_states
        deferred.extra_states = None if states is None else [states[i] for i in indices.tolist()]
        return deferred

    def __getattr__(self, name: str) -> Any:
        # `columns` is a slot without a value until it is first read.
        if name != "columns":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        plan, indices, arenas = self._arguments
        self.columns = plan.gather(indices, arenas).columns
        return self.columns
