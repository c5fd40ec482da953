"""The partitions of the local engine: what each is made of, down to data in memory or in temporary files.

Rows that must all exist before the first can be passed on (to repartition, shuffle or cache) are held in memory while
they are few, and else in a temporary file that is memory-mapped.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from quire._lowlevel.addresses import map_file
from quire._lowlevel.forks import ForkSafeLock
from quire.distributed._batches import CHUNK_BYTES, HeldBatches, slice_rows
from quire.distributed._engine import Stage, prepare_stage

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_PARTITION_BYTES = 32 << 20
"""The most bytes of one partition that are held in memory."""
MAX_EXCHANGE_BYTES = 256 << 20
"""The most bytes of all partitions of an exchange that are held in memory."""
Batches = list[pa.RecordBatch]


class ExchangeBudget:
    """How many bytes the partitions of one exchange may still keep in memory. Threads share it."""

    def __init__(self, size: int | None = None) -> None:
        self._left = MAX_EXCHANGE_BYTES if size is None else size
        self._lock = ForkSafeLock()

    def take(self, size: int) -> bool:
        """Reserve bytes, if that many are left."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self._left += size


def hold_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema, budget: ExchangeBudget | None = None) -> Batches:
    """Return all record batches. Large partitions, and those over the budget, are in a memory-mapped file.

    The file is deleted at once, and its space is freed with the last batch.
    """
    pending: Batches = []
    budget = budget or ExchangeBudget()
    size = 0
    iterator = iter(batches)
    for batch in iterator:
        pending.append(batch)
        # The bytes that were reserved for the batches so far are given back when all of them go to a file.
        fits = budget.take(batch.nbytes)
        size += batch.nbytes if fits else 0
        if not fits or size > MAX_PARTITION_BYTES:
            budget.give_back(size)
            return drain_spool(write_spool(_drain(pending, iterator), schema))
    return [copy_slice(batch) for batch in pending]


def _drain(pending: Batches, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    while pending:  # popped one by one, so that none stays in memory once it is written
        yield pending.pop(0)
    yield from rest


def copy_slice(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Copy the rows of a small slice, which would keep all of a large batch in memory."""
    if batch.get_total_buffer_size() <= 2 * batch.nbytes + 4096:
        return batch
    return batch.take(pa.array(range(len(batch)), pa.int64()))


def write_spool(batches: Iterable[pa.RecordBatch], schema: pa.Schema, folder: str | None = None) -> str:
    """Write record batches to a new temporary file, and return its path."""
    handle, path = tempfile.mkstemp(prefix="quire-", suffix=".arrow", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise
    return path


def read_spool(path: str) -> Batches:
    """Map the record batches of a file."""
    with Path(path).open("rb") as file:
        reader: Any = pa.ipc.open_file(map_file(file))
    return [reader.get_batch(i) for i in range(reader.num_record_batches)]


def drain_spool(path: str) -> Batches:
    """Map the record batches of a file, and delete its name."""
    try:
        return read_spool(path)
    finally:
        # The mapping keeps the content alive, and the kernel frees it with the last batch, even after a crash.
        Path(path).unlink(missing_ok=True)


class Partition(ABC):
    """One partition, computed again whenever its batches are requested."""

    @abstractmethod
    def batches(self) -> Iterator[pa.RecordBatch]:
        pass

    def to_portable(self) -> Partition:
        """Return the same partition, made only of what can be sent to another process."""
        return self


@dataclass(frozen=True)
class InMemoryPartition(Partition):
    """Record batches in memory, or in a mapped file."""

    content: Sequence[pa.RecordBatch]

    def batches(self) -> Iterator[pa.RecordBatch]:
        return iter(self.content)


@dataclass(frozen=True)
class SpooledPartition(Partition):
    """Record batches in a file that another process has written, or is to read."""

    path: str

    def batches(self) -> Iterator[pa.RecordBatch]:
        return iter(read_spool(self.path))


@dataclass(frozen=True)
class EmptyPartition(Partition):
    """The input of a stage that makes its rows itself."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        return iter(())


@dataclass(frozen=True)
class StagedPartition(Partition):
    """What a stage makes of another partition."""

    part: Partition
    stage: Stage
    number: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        return self.stage(self.number, self.part.batches())

    def to_portable(self) -> Partition:
        prepare_stage(self.stage)
        return StagedPartition(self.part.to_portable(), self.stage, self.number)


@dataclass(frozen=True)
class SelectedPartition(Partition):
    """Some columns of another partition."""

    part: Partition
    names: tuple[str, ...]

    def batches(self) -> Iterator[pa.RecordBatch]:
        return (batch.select(list(self.names)) for batch in self.part.batches())

    def to_portable(self) -> Partition:
        return SelectedPartition(self.part.to_portable(), self.names)


@dataclass(frozen=True)
class HeadPartition(Partition):
    """The first rows of several partitions, which are computed in order, and only as far as needed."""

    parts: tuple[Partition, ...]
    rows: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        return slice_rows((batch for part in self.parts for batch in part.batches()), 0, self.rows)

    def to_portable(self) -> Partition:
        return InMemoryPartition(list(self.batches()))


class Exchange:
    """Rows that must all exist before the first can be passed on; computed once, when they are needed."""

    def __init__(self, make: Callable[[], list[Batches]]) -> None:
        self._make: Callable[[], list[Batches]] | None = make
        self._batches: list[Batches] = []
        self._lock = ForkSafeLock()

    @classmethod
    def of(cls, partitions: list[Batches]) -> Exchange:
        """Return an exchange of rows that exist already."""
        return cls(lambda: partitions)

    def __reduce__(self) -> tuple[Any, tuple[list[Batches]]]:
        # Another process gets the rows, and not the function that makes them.
        return Exchange.of, (self.partitions(),)

    def partitions(self) -> list[Batches]:
        """Return the record batches of each partition."""
        with self._lock:
            if self._make is not None:
                self._batches = self._make()
                self._make = None
            return self._batches


@dataclass(frozen=True)
class ExchangedPartition(Partition):
    """A partition of an exchange, as it was."""

    exchange: Exchange
    number: int
    of: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        return iter(self.exchange.partitions()[self.number])

    def to_portable(self) -> Partition:
        return InMemoryPartition(list(self.batches()))


@dataclass(frozen=True)
class EvenPartition(ExchangedPartition):
    """A run of all rows, of the same length as in the other partitions."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        every = [batch for batches in self.exchange.partitions() for batch in batches]
        total = sum(map(len, every))
        return slice_rows(every, total * self.number // self.of, total * (self.number + 1) // self.of)


@dataclass(frozen=True)
class ShuffledPartition(ExchangedPartition):
    """A run of all rows in a random order."""

    seed: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Gather the rows a chunk at a time."""
        every = [batch for batches in self.exchange.partitions() for batch in batches]
        total, size = sum(map(len, every)), sum(batch.nbytes for batch in every)
        # Every partition computes the same permutation and takes its own run of it.
        order = np.random.default_rng(self.seed).permutation(total)
        own = order[total * self.number // self.of : total * (self.number + 1) // self.of]
        rows = max(1, CHUNK_BYTES * total // max(size, 1))
        return (gather_rows(every, own[start : start + rows]) for start in range(0, len(own), rows))


@dataclass(frozen=True)
class RoutedPartition(ExchangedPartition):
    """The rows that have the number of this partition in a column."""

    name: str

    def batches(self) -> Iterator[pa.RecordBatch]:
        return HeldBatches(self._own_rows())

    def _own_rows(self) -> Iterator[pa.RecordBatch]:
        for batches in self.exchange.partitions():
            for batch in batches:
                rows = np.flatnonzero(batch.column(self.name).to_numpy() == self.number)
                # Slices share memory, or the mapped file, with the exchange. Rows are few and large.
                yield from (batch.slice(row, 1) for row in rows.tolist())


def gather_rows(batches: Sequence[pa.RecordBatch], rows: NDArray[np.int64]) -> pa.RecordBatch:
    """Return rows by their numbers among those of all record batches."""
    # Rows are grouped by their batch, so that each batch is read by one `take`, and then put back into their order.
    starts = np.cumsum([0, *map(len, batches)])
    batch_of_row = np.searchsorted(starts, rows, side="right") - 1
    order = np.argsort(batch_of_row, kind="stable")
    numbers, firsts = np.unique(batch_of_row[order], return_index=True)
    groups = np.split(order, firsts[1:])
    parts = [
        batches[number].take(pa.array(rows[group] - starts[number]))
        for number, group in zip(numbers.tolist(), groups, strict=True)
    ]
    inverse = np.empty(len(rows), np.int64)
    inverse[order] = np.arange(len(rows))
    return pa.concat_batches(parts).take(pa.array(inverse))


@dataclass
class LazyTable:
    """A partition of a frame that is read when its table is requested."""

    part: Partition
    schema: pa.Schema

    def table(self) -> pa.Table:
        return pa.Table.from_batches(self.part.batches(), self.schema)

    def __deepcopy__(self, _: object) -> LazyTable:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"part": self.part.to_portable(), "schema": self.schema}
