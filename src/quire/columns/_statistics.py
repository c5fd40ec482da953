"""Statistics of columns: missing values, range, mean, lengths, shapes, histograms and the most frequent values.

`Statistics` is fed with parts of a dataset, one after the other; its memory does not grow with the number of rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np

from quire.columns._column import Column, PackedColumn, RaggedColumn, ScalarColumn, TensorColumn
from quire.columns._columns import Columns, DocumentColumn, DocumentsColumn
from quire.schema import Field, FieldKind, FieldPath, join_path
from quire.tensors import framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOP = 10
"""The number of most frequent values that are reported."""
_MAX_NUMBERS = 1 << 20
"""The most numbers that are kept for a histogram; of more, a random sample is kept."""
_MAX_VALUES = 200_000
"""The most different values that are counted; of more, the frequent ones are kept."""
_MAX_SHAPES = 1000
_SHORT = 200
_ORDERED = (FieldKind.DATETIME, FieldKind.DATE, FieldKind.TIME, FieldKind.TIMEDELTA, FieldKind.DECIMAL)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_FIRST, _LAST = (end.replace(tzinfo=timezone.utc) for end in (datetime.min, datetime.max))  # noqa: DTZ901


# --- results


@dataclass(frozen=True)
class Histogram:
    """The number of values between each edge and the next; edges are numbers, or dates and times as text."""

    edges: tuple[Any, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Lengths:
    """The lengths of values: characters of texts, bytes, items of lists."""

    minimum: int
    mean: float
    maximum: int
    histogram: Histogram | None


@dataclass(frozen=True)
class ColumnStatistics:
    """The statistics of the values at one path; None for those that do not apply to the kind of column.

    `rows` is the number of rows that were read; below an array of documents, the number of its documents. For tensors
    and lists, `minimum`, `maximum`, `mean`, `deviation` and `histogram` are those of the elements. NaN and infinities
    are counted in `not_finite` and excluded from all others.
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
        """Return the statistics as values for JSON; NaN and infinities become None."""
        content: dict[str, Any] = _to_plain(vars(self))
        for name, key in (("shapes", "shape"), ("dtypes", "dtype"), ("top", "value")):
            if content[name] is not None:
                content[name] = [{key: value, "count": count} for value, count in content[name]]
        return content


def _to_plain(value: Any) -> Any:
    if isinstance(value, (Histogram, Lengths)):
        return _to_plain(vars(value))
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else to_text(value)


class Statistics:
    """Collects the statistics of columns, part by part, for some paths or for all."""

    def __init__(self, paths: Iterable[FieldPath] | None = None, seed: int = 0) -> None:
        self._paths = None if paths is None else [tuple(path) for path in paths]
        self._seed = seed
        self._tallies: dict[FieldPath, ColumnTally] = {}

    def add(self, columns: Columns, parent: FieldPath = (), valid: NDArray[np.bool_] | None = None) -> None:
        """Add the rows of columns; `valid` is False in rows without a parent document."""
        for name, column in columns.columns.items():
            path = (*parent, name)
            selected = self._paths is None or any(path[: len(start)] == start for start in self._paths)
            if not selected and all(chosen[: len(path)] != path for chosen in self._paths or ()):
                continue  # nothing at this path or below it is selected
            rows = column.valid_rows() if valid is None else column.valid_rows() & valid
            if selected:
                if path not in self._tallies:
                    self._tallies[path] = ColumnTally(join_path(path), column.field, self._seed)
                self._tallies[path].add(column, rows)
            for child in column.children:  # the documents of arrays are not the rows: all of them have values
                self.add(child, path, rows if isinstance(column, DocumentColumn) else None)

    def to_dict(self, bins: int = 20) -> dict[str, ColumnStatistics]:
        """Return the statistics by path, in the order of the fields."""
        return {tally.path: tally.statistics(bins) for tally in self._tallies.values()}


# --- counting


class ColumnTally:
    """Collects the statistics of one column."""

    def __init__(self, path: str, field: Field, seed: int) -> None:
        self.path, self.field = path, field
        self.rows = self.missing = 0
        self.numbers, self.lengths, self.values = NumberTally(seed), NumberTally(seed), ValueTally()
        self.shapes: Counter[tuple[int, ...]] = Counter()
        self.dtypes: Counter[str] = Counter()
        self.ends: list[tuple[float, Any]] = []
        """The least and the greatest date, time or decimal, each with its number."""

    def add(self, column: Column, valid: NDArray[np.bool_]) -> None:
        """Add a part of the column; `valid` marks the rows that have a value."""
        self.rows += len(valid)
        self.missing += int(len(valid) - valid.sum())
        if not valid.any():
            return
        if isinstance(column, DocumentsColumn):
            self.lengths.add(np.diff(column.offsets)[valid])
        elif isinstance(column, ScalarColumn):
            numbers = column.framework.to_numpy(column.data)[valid]
            self.numbers.add(numbers)
            self.values.add_numbers(numbers[numbers == numbers])
        elif isinstance(column, TensorColumn) and column.shapes is None:
            data = column.framework.to_numpy(column.data)
            data = data if valid.all() else data[valid]
            self.shapes[tuple(data.shape[1:])] += len(data)
            self.dtypes[data.dtype.name] += len(data)
            self._add_elements(data)
        elif isinstance(column, RaggedColumn) and valid.all():
            flat = column.framework.to_numpy(column.flat)
            self.shapes.update(map(tuple, column.shapes))
            self.dtypes[flat.dtype.name] += len(column.shapes)
            self._add_elements(flat)
        elif isinstance(column, PackedColumn) and self.field.kind is FieldKind.BYTES:
            self.lengths.add((column.ends - column.starts)[valid])
        elif not isinstance(column, DocumentColumn):
            values = column.values()
            self._add_values([values[row] for row in np.flatnonzero(valid).tolist()])

    def _add_elements(self, data: NDArray[Any]) -> None:
        if data.dtype.kind not in "cOUSMm":
            self.numbers.add(data)

    def _add_values(self, values: list[Any]) -> None:
        kind = self.field.kind
        if kind in (FieldKind.TEXT, FieldKind.LIST, FieldKind.BYTES, FieldKind.DOCUMENTS):
            self.lengths.add(np.fromiter(map(len, values), np.int64, len(values)))
        if kind is FieldKind.TEXT:
            self.values.add_texts(map(str, values))
        elif kind in _ORDERED:
            self._add_ordered(values)
        elif kind is FieldKind.TENSOR:
            for tensor in values:
                self._add_tensor(tensor)
        elif kind is FieldKind.LIST:
            self._add_items([item for value in values for item in value if item is not None])
        elif kind not in (FieldKind.BYTES, FieldKind.DOCUMENTS, FieldKind.DOCUMENT):
            self.values.add_texts(map(_short_text, values))

    def _add_tensor(self, tensor: Any) -> None:
        framework = framework_of(tensor)
        if framework is None:
            return
        self.shapes[tuple(framework.shape(tensor))] += 1
        self.dtypes[framework.dtype(tensor)] += 1
        if framework.layout(tensor) == "dense":
            self._add_elements(framework.to_numpy(tensor))

    def _add_ordered(self, values: list[Any]) -> None:
        numbers = [(to_seconds(value), value) for value in values]
        finite = [pair for pair in numbers if math.isfinite(pair[0])]
        self.numbers.add(np.array([number for number, _ in numbers], np.float64))
        self.values.add_texts(str(to_text(value)) for value in values)
        if finite:
            both = [*self.ends, *finite]
            self.ends = [min(both, key=itemgetter(0)), max(both, key=itemgetter(0))]

    def _add_items(self, items: list[Any]) -> None:
        kinds = {item.kind for item in self.field.items}
        if kinds == {FieldKind.TEXT}:
            self.values.add_texts(map(str, items))
        elif kinds == {FieldKind.SCALAR} and all(isinstance(item, (int, float)) for item in items):
            is_float = any(isinstance(item, float) or not -(1 << 63) <= item < 1 << 63 for item in items)
            numbers = np.array(items, np.float64 if is_float else np.int64)
            self.numbers.add(numbers)
            self.values.add_numbers(numbers[numbers == numbers])

    def statistics(self, bins: int) -> ColumnStatistics:
        """Return the statistics of all parts so far."""
        numbers, lengths = self.numbers, self.lengths
        has_numbers = numbers.count + numbers.not_finite > 0
        is_date = self.field.kind in (FieldKind.DATETIME, FieldKind.DATE, FieldKind.TIME)
        minimum, maximum = [value for _, value in self.ends] or [numbers.minimum, numbers.maximum]
        has_values = self.values.distinct != 0
        like = self.ends[0][1] if self.ends else None
        return ColumnStatistics(
            self.path,
            self.field.kind.value,
            str(self.field),
            self.rows,
            self.missing,
            not_finite=numbers.not_finite if has_numbers else None,
            minimum=minimum,
            maximum=maximum,
            mean=None if is_date or not numbers.count else numbers.mean,
            deviation=None if is_date else numbers.deviation,
            histogram=None if self.field.type is bool else numbers.histogram(bins, like),
            lengths=(
                Lengths(lengths.minimum, lengths.mean, lengths.maximum, lengths.histogram(bins))
                if lengths.count
                else None
            ),
            shapes=tuple(self.shapes.most_common(_MAX_SHAPES)) if self.shapes else None,
            dtypes=tuple(self.dtypes.most_common()) if self.shapes else None,
            top=self.values.top(TOP) if has_values else None,
            distinct=self.values.distinct if has_values else None,
        )


def _short_text(value: Any) -> str:
    """Return a value of any class as a short text: numbers, texts and paths as they are, others by their class."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (str, int, float, UUID)) or hasattr(value, "__fspath__"):
        return str(value)
    return type(value).__name__


class NumberTally:
    """The minimum, maximum, mean and deviation of numbers, and a sample of them for a histogram.

    NaN and infinities are counted in `not_finite` and excluded from all others.
    """

    def __init__(self, seed: int = 0) -> None:
        self.count = self.not_finite = 0
        self.minimum: Any = None
        self.maximum: Any = None
        self.mean = self._squares = 0.0
        self._sample: list[NDArray[np.float64]] = []
        self._room, self._one_in = _MAX_NUMBERS, 1
        self._random = np.random.default_rng(seed)

    def add(self, numbers: NDArray[Any]) -> None:
        """Add numbers of any shape."""
        finite = self._drop_not_finite(numbers.reshape(-1))
        if not len(finite):
            return
        least, greatest = finite.min().item(), finite.max().item()
        self.minimum = least if self.minimum is None else min(self.minimum, least)
        self.maximum = greatest if self.maximum is None else max(self.maximum, greatest)
        floats = finite.astype(np.float64)
        self._add_moments(floats)
        self._add_to_sample(floats)

    def _drop_not_finite(self, flat: NDArray[Any]) -> NDArray[Any]:
        if flat.dtype.kind in "biu":
            return flat.astype(np.uint8) if flat.dtype.kind == "b" else flat
        if flat.dtype.kind != "f":
            flat = flat.astype(np.float32)  # bfloat16 and other short types of machine learning
        is_finite = np.isfinite(flat)
        count = int(is_finite.sum())
        self.not_finite += len(flat) - count
        return flat if count == len(flat) else flat[is_finite]

    def _add_moments(self, numbers: NDArray[np.float64]) -> None:
        # Chan's parallel algorithm: the sums of squared differences of both parts, corrected by the distance of their
        # means. A plain sum of squares would lose all digits of a small deviation around a large mean.
        with np.errstate(over="ignore", invalid="ignore"):
            mean, count = float(numbers.mean()), len(numbers)
            distance, total = mean - self.mean, self.count + count
            self._squares += float(((numbers - mean) ** 2).sum()) + distance * distance * self.count * count / total
            self.mean += distance * count / total
            self.count = total

    def _add_to_sample(self, numbers: NDArray[np.float64]) -> None:
        # Once the sample is full, half of it is dropped at random, and of the numbers after that half as many enter.
        if self._one_in > 1:
            numbers = numbers[self._random.integers(0, len(numbers), -(-len(numbers) // self._one_in))]
        self._sample.append(numbers)
        self._room -= len(numbers)
        while self._room < 0:
            whole = np.concatenate(self._sample)
            self._sample = [whole[self._random.random(len(whole)) < 0.5]]
            self._room, self._one_in = _MAX_NUMBERS - len(self._sample[0]), self._one_in * 2

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the population, as `numpy.std` computes it."""
        return float(np.sqrt(self._squares / self.count)) if self.count else None

    def histogram(self, bins: int, like: Any = None) -> Histogram | None:
        """Return a histogram of the sample; for a date or time in `like`, its edges are the texts of such values."""
        if not self.count or not np.isfinite(float(self.maximum) - float(self.minimum)):
            return None
        try:
            counts, edges = np.histogram(np.concatenate(self._sample), bins, (self.minimum, self.maximum))
        except ValueError:  # too many bins for numbers that are so close to each other
            return None
        texts = edges.tolist() if like is None else [to_text(edge, like) for edge in edges.tolist()]
        return Histogram(tuple(texts), tuple(counts.tolist()))


class ValueTally:
    """The frequency of values, and the number of different ones."""

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()
        self._is_complete = True

    def add(self, values: Iterable[Any]) -> None:
        """Add hashable values."""
        self._counts.update(values)
        self._prune()

    def add_numbers(self, numbers: NDArray[Any]) -> None:
        """Add numbers."""
        values, counts = np.unique(numbers, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            self._counts[value] += count
        self._prune()

    def add_texts(self, texts: Iterable[str]) -> None:
        """Add texts; of long ones only the beginning is kept, with a hash that tells them apart."""
        self.add(text if len(text) <= _SHORT else (text[:_SHORT], hash(text)) for text in texts)

    def _prune(self) -> None:
        if len(self._counts) > _MAX_VALUES:
            self._counts = Counter(dict(self._counts.most_common(_MAX_VALUES // 2)))
            self._is_complete = False

    @property
    def distinct(self) -> int | None:
        """The number of different values; None if there were too many to count."""
        return len(self._counts) if self._is_complete else None

    def top(self, most: int) -> tuple[tuple[Any, int], ...]:
        """Return the most frequent values with their counts."""
        pairs = sorted(self._counts.most_common(most), key=lambda pair: -pair[1])
        return tuple((f"{value[0]}…" if isinstance(value, tuple) else value, count) for value, count in pairs)


# --- dates and times as numbers


def to_seconds(value: Any) -> float:
    """Return the seconds since 1970, since midnight, or of a duration; a decimal as a float. No time zone means UTC."""
    if isinstance(value, datetime):
        return ((value if value.tzinfo else value.replace(tzinfo=timezone.utc)) - _EPOCH).total_seconds()
    if isinstance(value, date):
        return (value - _EPOCH.date()).total_seconds()
    if isinstance(value, time):
        return timedelta(0, value.second, value.microsecond, 0, value.minute, value.hour).total_seconds()
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def to_text(value: Any, like: Any = None) -> Any:
    """Return a date or time as text; a number of seconds as the text of a date or time of the class of `like`."""
    if isinstance(value, float) and isinstance(like, (date, time)):
        value = _from_seconds(value, like)
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if isinstance(value, (bool, int, float)) else str(value)


def _from_seconds(number: float, like: date | time) -> date | time:
    duration = timedelta(seconds=number)
    if isinstance(like, time):
        return (_EPOCH + min(duration, timedelta(1) - timedelta.resolution)).time()
    try:
        moment = _EPOCH + duration
    except OverflowError:  # rounded beyond the years of datetime
        moment = _LAST if number > 0 else _FIRST
    if not isinstance(like, datetime):
        return moment.date()
    return moment if like.tzinfo else moment.replace(tzinfo=None)
