"""What stages have done: how often they ran, on how many rows and bytes, and for how long.

A stage is wrapped in a `MeteredStage` when it is declared. Where it runs, it reports its counts: in the process of the
driver directly, elsewhere to whatever the engine passes reports on with (`collect_reports`). An engine that passes none
on has stages without counts.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import pyarrow as pa

from quire._lowlevel.forks import ForkSafeLock
from quire.distributed._batches import HeldBatches
from quire.distributed._engine import Stage, name_stage, prepare_stage
from quire.distributed._resources import Resources, resources_of


@dataclass(frozen=True)
class StageStats:
    """What one stage has done so far, in all jobs that needed its rows, on all workers."""

    name: str
    """The name of the function, or of quire's own stage."""
    calls: int = 0
    """How often it was run: once for a partition (on Ray, for a block), and again in each job that needs it."""
    rows_in: int = 0
    rows_out: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    """The time of all workers in this stage, without the stages before it."""
    retries: int = 0
    """How many of the calls repeated one whose worker was lost."""

    def add(self, other: StageStats) -> StageStats:
        """Return the sum of the counts."""
        names = [item.name for item in fields(self) if item.name != "name"]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


class StageReport(NamedTuple):
    """The counts of one call of a stage."""

    key: str
    counts: StageStats


_books: weakref.WeakValueDictionary[str, StageBook] = weakref.WeakValueDictionary()
"""The books of this process, by the keys that their stages report with."""


class StageBook:
    """Adds up the counts of one stage, on the driver."""

    def __init__(self, name: str, key: str | None = None) -> None:
        self.key = key or uuid.uuid4().hex
        self._stats, self._lock = StageStats(name), ForkSafeLock()
        _books[self.key] = self

    def __reduce__(self) -> tuple[Callable[[str, str], StageBook], tuple[str, str]]:
        return _load_book, (self._stats.name, self.key)  # the stages of a copy report with the same key

    @property
    def stats(self) -> StageStats:
        return self._stats

    def add(self, counts: StageStats) -> None:
        with self._lock:
            self._stats = self._stats.add(counts)


def _load_book(name: str, key: str) -> StageBook:
    """Return the book of a key in this process, or a new one in another process."""
    return _books.get(key) or StageBook(name, key)


class _Sink(threading.local):
    """Where reports of this thread go in a process that has no books."""

    reports: list[StageReport] | None = None


_sink = _Sink()


@contextmanager
def collect_reports() -> Iterator[list[StageReport]]:
    """Collect what stages report meanwhile in this thread of a worker, for the engine to pass on."""
    before, _sink.reports = _sink.reports, []
    try:
        yield _sink.reports
    finally:
        _sink.reports = before


def deliver_reports(reports: Iterable[StageReport]) -> list[StageReport]:
    """Add reports to the books of this process, and return those that belong to another one."""
    rest = []
    for report in reports:
        book = _books.get(report.key)
        if book is None:
            rest.append(report)
        else:
            book.add(report.counts)
    return rest


@dataclass(frozen=True)
class MeteredStage:
    """A stage that reports what it does."""

    stage: Stage
    key: str

    @property
    def schema(self) -> pa.Schema:
        return self.stage.schema

    @property
    def stateful(self) -> bool:
        return self.stage.stateful

    @property
    def resources(self) -> Resources | None:
        return resources_of(self.stage)

    @property
    def name(self) -> str:
        return name_stage(self.stage)

    def prepare(self) -> None:
        prepare_stage(self.stage)

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        source = _MeteredBatches(batches)
        # What is held already stays known as such, and is not copied by a stage that needs all rows.
        results = self.stage(partition, HeldBatches(source) if isinstance(batches, HeldBatches) else source)
        rows, size, seconds = 0, 0, 0.0
        try:
            while True:
                begin = time.perf_counter()
                try:
                    batch = next(results, None)
                finally:
                    seconds += time.perf_counter() - begin
                if batch is None:
                    break
                rows += _count_rows(batch)
                size += batch.nbytes
                yield batch
        finally:
            own = max(0.0, seconds - source.seconds)
            report = StageReport(self.key, StageStats("", 1, source.rows, rows, size, own))
            if deliver_reports([report]) and _sink.reports is not None:
                _sink.reports.append(report)


class _MeteredBatches(Iterator[pa.RecordBatch]):
    """The input of a stage: counts its rows, and the time that the stages before take for them."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches, self.rows, self.seconds = iter(batches), 0, 0.0

    def __next__(self) -> pa.RecordBatch:
        begin = time.perf_counter()
        try:
            batch = next(self._batches)
        finally:
            self.seconds += time.perf_counter() - begin
        self.rows += _count_rows(batch)
        return batch


PACKED_ROWS = "packed rows"
"""The column that says how many rows of the shards each row of a record batch holds, where rows move."""


def _count_rows(batch: pa.RecordBatch) -> int:
    place = batch.schema.get_field_index(PACKED_ROWS)
    return len(batch) if place < 0 else sum(batch.column(place).to_pylist())


class Meters:
    """The books of the stages of one operation."""

    def __init__(self) -> None:
        self.books: list[StageBook] = []

    def add(self, stage: Stage) -> MeteredStage:
        """Return the stage as one that reports to a new book."""
        book = StageBook(name_stage(stage))
        self.books.append(book)
        return MeteredStage(stage, book.key)


def count_retries(stages: Iterable[Stage]) -> None:
    """Count one more call of each stage that repeats one whose worker was lost."""
    retry = StageStats("", retries=1)
    deliver_reports(StageReport(stage.key, retry) for stage in stages if isinstance(stage, MeteredStage))


# --- plans


@dataclass(frozen=True)
class PlanStep:
    """One operation on shards, with those that its rows come from."""

    operation: str
    """As it was called: `sort('year')`."""
    inputs: tuple[PlanStep, ...] = ()
    meters: Meters = field(default_factory=Meters, compare=False)
    notes: tuple[str, ...] = ()
    """What else is known: the class of the results, the partitions, whether rows move."""
    data: str = ""
    """What a source reads, such as the names and sizes of files, as a digest."""
    is_repeatable: bool = True
    """Whether each partition has the same rows whenever it is computed."""

    def steps(self, depth: int = 0) -> Iterator[tuple[int, PlanStep]]:
        """Yield this step and all before it, the last one first, with their depths in the tree."""
        yield depth, self
        for step in self.inputs:
            yield from step.steps(depth + 1)

    def __str__(self) -> str:
        lines = []
        for depth, step in self.steps():
            notes = f"  [{', '.join(step.notes)}]" if step.notes else ""
            lines.append(f"{'  ' * depth}{step.operation}{notes}")
        return "\n".join(lines)

    def digest(self) -> str:
        """Return a digest of all operations and of what is read."""
        content = [(depth, step.operation, step.notes, step.data) for depth, step in self.steps()]
        return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()

    def all_stats(self) -> list[StageStats]:
        """Return the counts of all stages, in the order in which rows pass through them."""
        chosen = dict.fromkeys(id(step) for _, step in self.steps())
        by_id = {id(step): step for _, step in self.steps()}
        return [book.stats for number in reversed(chosen) for book in by_id[number].meters.books]


class ShardStats(list[StageStats]):
    """The counts of the stages of shards; `print` shows them as a table."""

    def __str__(self) -> str:
        head = ("stage", "calls", "rows in", "rows out", "MB out", "seconds", "retries")
        rows = [
            (
                stats.name,
                f"{stats.calls:,}",
                f"{stats.rows_in:,}",
                f"{stats.rows_out:,}",
                f"{stats.bytes_out / 1e6:,.1f}",
                f"{stats.seconds:,.2f}",
                f"{stats.retries:,}",
            )
            for stats in self
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in (head, *rows)
        )
