"""How a dataset holds its documents: as columns that workers read without copying them.

Texts lie one behind the other in one run of bytes. As Python objects, each would have a count of its users, and a
forked worker that reads it would copy the page that the count lies in.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire._optional import is_installed, is_loaded
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    DocumentsColumn,
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
from quire.data._arena import Arena
from quire.errors import TensorError
from quire.schema import Field, FieldKind, FieldPath
from quire.tensors import get_framework, to_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


def default_framework() -> str:
    """torch where it is installed, else numpy."""
    return "torch" if is_installed("torch") else "numpy"


def stored(columns: Columns, framework: str) -> Columns:
    """Columns as a dataset holds them."""
    made = {name: _stored_column(column, framework) for name, column in columns.columns.items()}
    return Columns(columns.schema, made, len(columns), columns.validity, columns.extra_states)


def _stored_column(column: Column, framework: str) -> Column:
    if isinstance(column, DocumentColumn):
        return DocumentColumn(column.field, stored(column.columns, framework))
    if isinstance(column, DocumentsColumn):
        return DocumentsColumn(column.field, stored(column.flat, framework), column.offsets, column.validity)
    if isinstance(column, (TensorColumn, RaggedColumn)):
        return _converted(column, framework)
    if isinstance(column, ObjectColumn) and column.field.kind in (FieldKind.TEXT, FieldKind.BYTES):
        return _packed(column)
    return column


def converted(columns: Columns, framework: str) -> Columns:
    """The columns with the tensors and numbers of a framework."""
    made = {name: converted_column(column, framework) for name, column in columns.columns.items()}
    return replace(columns, columns=made)


def converted_column(column: Column, framework: str) -> Column:
    """The column with the tensors and numbers of a framework, those of nested documents too."""
    if isinstance(column, (TensorColumn, RaggedColumn)):
        return _converted(column, framework)
    if isinstance(column, DocumentColumn):
        return DocumentColumn(column.field, converted(column.columns, framework))
    if isinstance(column, DocumentsColumn):
        return DocumentsColumn(column.field, converted(column.flat, framework), column.offsets, column.validity)
    return column


def _converted(column: TensorColumn | RaggedColumn, name: str) -> Column:
    if column.framework.name == name:
        return column
    target = get_framework(name)
    try:
        return column.map_tensors(lambda _, value: (target, to_framework(value, target)))
    except TensorError:
        return column  # what the other framework has not, such as texts and dates, stays


def _packed(column: ObjectColumn) -> Column:
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


def has_ragged(columns: Columns) -> bool:
    """Whether a column, or one inside a column, is ragged."""
    for column in columns.columns.values():
        tp = type(column)
        if tp is RaggedColumn:
            return True
        inner = column.columns if tp is DocumentColumn else column.flat if tp is DocumentsColumn else None  # type: ignore[attr-defined]
        if inner is not None and type(inner) is not LaterColumns and has_ragged(inner):
            return True
    return False


def settled(columns: Columns, shapes: ShapePolicy) -> Columns:
    """Columns of a batch whose ragged ones are brought to one shape, as the policy says."""
    if shapes == "ragged":
        return columns
    made = {
        name: settled_column(column, shapes, f"{columns.schema.name}.{name}")
        for name, column in columns.columns.items()
    }
    return replace(columns, columns=made)


def settled_column(column: Column, shapes: ShapePolicy, path: str) -> Column:
    """The column, ragged no more, as the policy says."""
    if shapes == "ragged" or isinstance(column, TensorColumn):
        return column
    if isinstance(column, DocumentColumn):
        return DocumentColumn(column.field, settled(column.columns, shapes))
    if isinstance(column, DocumentsColumn):
        return DocumentsColumn(column.field, settled(column.flat, shapes), column.offsets, column.validity)
    if isinstance(column, RaggedColumn):
        rows = [None if row is None else column.framework.unwrap(row) for row in column.values()]
        return stack_values(column.field, rows, StackOptions(shapes=shapes), path)
    return column


# --- gathering


class GatherPlan(NamedTuple):
    """What is to be known of the columns for each batch, worked out once."""

    passing: frozenset[str]
    """Columns that functions take row by row, and make anew."""
    later: frozenset[str]
    """Nested documents without a tensor, which no function takes: gathered when somebody looks at them."""
    below: dict[str, GatherPlan]


def plan_gathering(columns: Columns, steps: Collection[tuple[FieldPath, bool]]) -> GatherPlan:
    """The plan for columns of a dataset; the steps are paths, and whether what is there passes."""
    taken = {path[:1] for path, _ in steps}
    nested = {name: c.columns for name, c in columns.columns.items() if type(c) is DocumentColumn}
    later = {name for name, inner in nested.items() if not taken & {(), (name,)} and not _has_tensors(inner)}
    below = {
        name: plan_gathering(inner, [(path[1:], passes) for path, passes in steps if path[:1] in ((), (name,))])
        for name, inner in nested.items()
    }
    return GatherPlan(
        frozenset(path[0] for path, passes in steps if passes and len(path) == 1), frozenset(later), below
    )


def _has_tensors(columns: Columns) -> bool:
    for column in columns.columns.values():
        if type(column) is DocumentColumn and not _has_tensors(column.columns):
            continue
        if not isinstance(column, ObjectColumn):
            return True
    return False


class Arenas(NamedTuple):
    """The memory that a batch is made in, and that of what is only looked at on the way."""

    batch: Arena
    scratch: Arena


def in_worker() -> bool:
    """Whether this is a worker process of torch's DataLoader."""
    if not is_loaded("torch.utils.data"):
        return False
    return sys.modules["torch.utils.data"].get_worker_info() is not None


class PackedRows(PackedColumn):
    """Some rows of a packed column; where they lie is looked up when somebody looks at them."""

    __slots__ = ("rows", "source")

    def __init__(self, source: PackedColumn, rows: NDArray[np.int64]) -> None:
        Column.__init__(self, source.field, None if source.validity is None else source.validity[rows])
        self.data, self.source, self.rows = source.data, source, rows

    def __getattr__(self, name: str) -> Any:
        if name not in ("starts", "ends"):
            return super().__getattr__(name)
        found = getattr(self.source, name)[self.rows]
        setattr(self, name, found)
        return found

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def restore(cls, field: Field, payload: dict[str, Any]) -> PackedColumn:  # type: ignore[override]
        return PackedColumn.restore(field, payload)


class LaterColumns(Columns):
    """Rows of other columns, gathered when somebody looks at them."""

    __slots__ = ("_wanted",)
    is_deferred = True
    _wanted: tuple[Columns, NDArray[np.int64], Arenas, GatherPlan]

    @classmethod
    def of(cls, columns: Columns, indices: NDArray[np.int64], arenas: Arenas, plan: GatherPlan) -> LaterColumns:
        """Such rows."""
        made = object.__new__(cls)
        made.schema, made.length, made._wanted = columns.schema, len(indices), (columns, indices, arenas, plan)
        made.validity = None if columns.validity is None else columns.validity[indices]
        made.extra_states = (
            None if columns.extra_states is None else [columns.extra_states[i] for i in indices.tolist()]
        )
        return made

    def __getattr__(self, name: str) -> Any:
        if name != "columns":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.columns = gathered(*self._wanted).columns
        return self.columns


def gathered(columns: Columns, indices: NDArray[np.int64], arenas: Arenas, plan: GatherPlan) -> Columns:
    """Rows by position; torch's tensors lie in memory of the arenas."""
    made: dict[str, Column] = {}
    for name, column in columns.columns.items():  # by exact type: this runs for every batch
        if type(column) is PackedColumn:
            made[name] = PackedRows(column, indices)
        elif type(column) is DocumentColumn:
            gather = LaterColumns.of if name in plan.later else gathered
            made[name] = DocumentColumn(column.field, gather(column.columns, indices, arenas, plan.below[name]))
        elif isinstance(column, TensorColumn) and column.framework.name == "torch":
            arena = arenas.scratch if name in plan.passing else arenas.batch
            made[name] = _gathered_tensors(column, indices, arena)
        else:
            made[name] = column.take(indices)
    extra_states = None if columns.extra_states is None else [columns.extra_states[i] for i in indices.tolist()]
    validity = None if columns.validity is None else columns.validity[indices]
    return Columns(columns.schema, made, len(indices), validity, extra_states)


def _gathered_tensors(column: TensorColumn, indices: NDArray[np.int64], arena: Arena) -> TensorColumn:
    shapes = None if column.shapes is None else column.shapes[indices]
    validity = None if column.validity is None else column.validity[indices]
    return type(column)(column.field, arena.take(column.data, indices), column.framework, validity, shapes)
