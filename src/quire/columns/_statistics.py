"""What the columns of documents hold: how many values are missing, their range, lengths, shapes, the most frequent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np

from quire.columns._column import Column
from quire.columns._columns import Columns, DocumentColumn, DocumentsColumn
from quire.columns._moments import moment_text, seconds
from quire.columns._objects import PackedColumn
from quire.columns._tallies import NumberTally, ValueTally
from quire.columns._tensor import RaggedColumn, ScalarColumn, TensorColumn
from quire.schema import Field, FieldKind, FieldPath, join_path
from quire.tensors import framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOP = 10
"""So many of the values that come most often are told."""
_ORDERED = (FieldKind.DATETIME, FieldKind.DATE, FieldKind.TIME, FieldKind.TIMEDELTA, FieldKind.DECIMAL)
_MOST_SHAPES = 1000


@dataclass(frozen=True)
class Histogram:
    """How many values are between each edge and the next; edges are numbers, or moments as text."""

    edges: tuple[Any, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Lengths:
    """How long values are: texts in characters, bytes, lists in items."""

    minimum: int
    mean: float
    maximum: int
    histogram: Histogram | None


@dataclass(frozen=True)
class ColumnStatistics:
    """What is known of the values at one path; None for what a column of its kind does not have.

    `rows` are those that were looked at, below an array of documents its documents. Of tensors and lists, `minimum` and
    its like are those of the elements. NaN and infinities are counted in `not_finite`, and left aside elsewhere.
    """

    path: str
    kind: str
    type: str
    rows: int
    missing: int
    not_finite: int | None = None
    minimum: Any = None
    maximum: Any = None
    mean: float | None = None
    deviation: float | None = None
    histogram: Histogram | None = None
    lengths: Lengths | None = None
    shapes: tuple[tuple[tuple[int, ...], int], ...] | None = None
    dtypes: tuple[tuple[str, int], ...] | None = None
    top: tuple[tuple[Any, int], ...] | None = None
    distinct: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it; what is no number there is None."""
        made: dict[str, Any] = _plain(vars(self))
        for name, key in (("shapes", "shape"), ("dtypes", "dtype"), ("top", "value")):
            if made[name] is not None:
                made[name] = [{key: value, "count": count} for value, count in made[name]]
        return made


def _plain(value: Any) -> Any:
    if isinstance(value, (Histogram, Lengths)):
        return _plain(vars(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else moment_text(value)


class ColumnTally:
    """Takes the parts of one column, and tells of them all."""

    def __init__(self, path: str, field: Field, seed: int) -> None:
        self.path, self.field = path, field
        self.rows = self.missing = 0
        self.numbers, self.lengths, self.values = NumberTally(seed), NumberTally(seed), ValueTally()
        self.shapes: Counter[tuple[int, ...]] = Counter()
        self.dtypes: Counter[str] = Counter()
        self.ends: list[Any] = []

    def add(self, column: Column, there: NDArray[np.bool_]) -> None:
        """Take a part; `there` tells the rows that have a value."""
        self.rows += len(there)
        self.missing += int(len(there) - there.sum())
        if there.any():
            self._take(column, there)

    def _take(self, column: Column, there: NDArray[np.bool_]) -> None:
        if isinstance(column, DocumentsColumn):
            self.lengths.add(np.diff(column.offsets)[there])
        elif isinstance(column, ScalarColumn):
            numbers = column.framework.to_numpy(column.data)[there]
            self.numbers.add(numbers)
            self.values.add_numbers(numbers[numbers == numbers])
        elif isinstance(column, TensorColumn) and column.shapes is None:
            self._take_tensors(column.framework.to_numpy(column.data), there)
        elif isinstance(column, RaggedColumn) and there.all():
            self._count_shapes(column.shapes, np.dtype(column.framework.to_numpy(column.flat[:0]).dtype).name)
            self._take_elements(column.framework.to_numpy(column.flat))
        elif isinstance(column, PackedColumn) and self.field.kind is FieldKind.BYTES:
            self.lengths.add((column.ends - column.starts)[there])
        elif not isinstance(column, DocumentColumn):
            values = column.values()
            self._take_values([values[row] for row in np.flatnonzero(there).tolist()])

    # --- tensors

    def _take_tensors(self, data: NDArray[Any], there: NDArray[np.bool_]) -> None:
        data = data if there.all() else data[there]
        self.shapes[tuple(data.shape[1:])] += len(data)
        self.dtypes[data.dtype.name] += len(data)
        self._take_elements(data)

    def _count_shapes(self, shapes: Iterable[tuple[int, ...]], dtype: str) -> None:
        before = self.shapes.total()
        self.shapes.update(map(tuple, shapes))
        self.dtypes[dtype] += self.shapes.total() - before

    def _take_elements(self, data: NDArray[Any]) -> None:
        if data.dtype.kind not in "cOUSMm":
            self.numbers.add(data)

    def _take_tensor(self, tensor: Any) -> None:
        framework = framework_of(tensor)
        if framework is None:
            return
        self.shapes[tuple(framework.shape(tensor))] += 1
        self.dtypes[framework.dtype(tensor)] += 1
        if framework.layout(tensor) == "dense":
            self._take_elements(framework.to_numpy(tensor))

    # --- objects

    def _take_values(self, values: list[Any]) -> None:
        kind = self.field.kind
        if kind is FieldKind.TEXT:
            self.lengths.add(np.fromiter(map(len, values), np.int64, len(values)))
            self.values.add_texts(map(str, values))
        elif kind in _ORDERED:
            self._take_moments(values)
        elif kind is FieldKind.TENSOR:
            for tensor in values:
                self._take_tensor(tensor)
        elif kind is FieldKind.LIST:
            self._take_lists(values)
        elif kind in (FieldKind.BYTES, FieldKind.DOCUMENTS):
            self.lengths.add(np.fromiter(map(len, values), np.int64, len(values)))
        elif kind is not FieldKind.DOCUMENT:
            self.values.add_texts(map(_named, values))

    def _take_moments(self, values: list[Any]) -> None:
        numbers = [(seconds(value), value) for value in values]
        finite = [pair for pair in numbers if math.isfinite(pair[0])]
        self.numbers.add(np.array([number for number, _ in numbers], np.float64))
        self.values.add_texts(str(moment_text(value)) for value in values)
        if finite:
            both = [*self.ends, *finite]
            self.ends = [min(both, key=itemgetter(0)), max(both, key=itemgetter(0))]

    def _take_lists(self, values: list[Any]) -> None:
        self.lengths.add(np.fromiter(map(len, values), np.int64, len(values)))
        items = [item for value in values for item in value if item is not None]
        kinds = {item.kind for item in self.field.items}
        if kinds == {FieldKind.TEXT}:
            self.values.add_texts(map(str, items))
        elif kinds == {FieldKind.SCALAR} and all(isinstance(item, (int, float)) for item in items):
            numbers = np.array(items, np.float64) if _is_float(items) else np.array(items, np.int64)
            self.numbers.add(numbers)
            self.values.add_numbers(numbers[numbers == numbers])

    # --- the result

    def statistics(self, bins: int) -> ColumnStatistics:
        """What was found."""
        numbers, told = self.numbers, self.numbers.count + self.numbers.not_finite > 0
        dated = self.field.kind in (FieldKind.DATETIME, FieldKind.DATE, FieldKind.TIME)
        minimum, maximum = [value for _, value in self.ends] or [numbers.minimum, numbers.maximum]
        counted = self.values.distinct != 0
        return ColumnStatistics(
            self.path,
            self.field.kind.value,
            str(self.field),
            self.rows,
            self.missing,
            not_finite=numbers.not_finite if told else None,
            minimum=minimum,
            maximum=maximum,
            mean=None if dated or not numbers.count else numbers.mean,
            deviation=None if dated else numbers.deviation,
            histogram=self._histogram(numbers, bins),
            lengths=self._lengths(bins),
            shapes=tuple(self.shapes.most_common(_MOST_SHAPES)) if self.shapes else None,
            dtypes=tuple(self.dtypes.most_common()) if self.shapes else None,
            top=self.values.top(TOP) if counted else None,
            distinct=self.values.distinct if counted else None,
        )

    def _histogram(self, numbers: NumberTally, bins: int) -> Histogram | None:
        found = numbers.histogram(bins)
        if found is None or self.field.type is bool:
            return None
        edges: Iterable[Any] = found[0]
        if self.ends:
            edges = [moment_text(edge, self.ends[0][1]) for edge in found[0]]
        return Histogram(tuple(edges), tuple(found[1]))

    def _lengths(self, bins: int) -> Lengths | None:
        found = self.lengths
        if not found.count:
            return None
        return Lengths(found.minimum, found.mean, found.maximum, self._length_histogram(bins))

    def _length_histogram(self, bins: int) -> Histogram | None:
        found = self.lengths.histogram(bins)
        return None if found is None else Histogram(tuple(found[0]), tuple(found[1]))


def _is_float(items: list[Any]) -> bool:
    return any(isinstance(item, float) or not -(1 << 63) <= item < 1 << 63 for item in items)


def _named(value: Any) -> str:
    """A value that may be anything in a few words: plain ones as they are, others by their class."""
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, (str, int, float, UUID)) or _is_path(value) else type(value).__name__


def _is_path(value: Any) -> bool:
    return hasattr(value, "__fspath__")


class Statistics:
    """Takes columns part by part, and tells of each path in them."""

    def __init__(self, wanted: Iterable[FieldPath] | None = None, seed: int = 0) -> None:
        self._wanted = None if wanted is None else [tuple(path) for path in wanted]
        self._seed = seed
        self._tallies: dict[FieldPath, ColumnTally] = {}

    def add(self, columns: Columns, before: FieldPath = (), there: NDArray[np.bool_] | None = None) -> None:
        """Take the rows of columns."""
        for name, column in columns.columns.items():
            path = (*before, name)
            if self._leads(path):
                rows = column.valid_rows() if there is None else column.valid_rows() & there
                if self._is_wanted(path):
                    self._tally(path, column.field).add(column, rows)
                self._descend(path, column, rows)

    def _descend(self, path: FieldPath, column: Column, there: NDArray[np.bool_]) -> None:
        if isinstance(column, DocumentColumn):
            self.add(column.columns, path, there)
        elif isinstance(column, DocumentsColumn):
            self.add(column.flat, path)

    def _tally(self, path: FieldPath, field: Field) -> ColumnTally:
        if path not in self._tallies:
            self._tallies[path] = ColumnTally(join_path(path), field, self._seed)
        return self._tallies[path]

    def _is_wanted(self, path: FieldPath) -> bool:
        return self._wanted is None or any(path[: len(start)] == start for start in self._wanted)

    def _leads(self, path: FieldPath) -> bool:
        """Whether something that is wanted is at the path, or below."""
        return self._is_wanted(path) or any(wanted[: len(path)] == path for wanted in self._wanted or ())

    def to_dict(self, bins: int = 20) -> dict[str, ColumnStatistics]:
        """The statistics by path, in the order of the fields."""
        return {tally.path: tally.statistics(bins) for tally in self._tallies.values()}
