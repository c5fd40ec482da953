"""Record batches that must wait: in memory while they are few, else in a temporary file that is mapped."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from quire.distributed._batches import CHUNK_BYTES, rebatch_by_bytes, slice_rows
from quire.distributed._engine import Stage
from quire.storage import map_file

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_PARTITION_BYTES = 32 << 20
"""The most bytes of one partition that wait in memory."""


MAX_EXCHANGE_BYTES = 256 << 20
"""The most bytes of all partitions together that wait in memory."""


Batches = list[pa.RecordBatch]


class ExchangeBudget:
    """How many bytes the partitions of one exchange may still keep in memory. Threads share it."""

    def __init__(self, size: int | None = None) -> None:
        self._left = MAX_EXCHANGE_BYTES if size is None else size
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Reserve bytes, if there are that many."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give_back(self, size: int) -> None:
        """Return reserved bytes."""
        with self._lock:
            self._left += size


def hold_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema, budget: ExchangeBudget | None = None) -> Batches:
    """Return all record batches. Large partitions, and those that the budget has no room for, are in a mapped file.

    The file is removed when nobody needs it.
    """
    waiting: Batches = []
    budget = budget or ExchangeBudget()
    size = 0
    iterator = iter(batches)
    for batch in iterator:
        waiting.append(batch)
        fits = budget.take(batch.nbytes)
        size += batch.nbytes if fits else 0
        if not fits or size > MAX_PARTITION_BYTES:
            budget.give_back(size)
            return drain_spool(write_spool(_chain_batches(waiting, iterator), schema))
    return [copy_slice(batch) for batch in waiting]


def _chain_batches(waiting: Batches, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    while waiting:
        yield waiting.pop(0)
    yield from rest


def copy_slice(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows alone: a small slice must not keep all of a large batch in memory."""
    if batch.get_total_buffer_size() <= 2 * batch.nbytes + 4096:
        return batch
    return batch.take(pa.array(range(len(batch)), pa.int64()))


def write_spool(batches: Iterable[pa.RecordBatch], schema: pa.Schema, folder: str | None = None) -> str:
    """The path of a new temporary file that has the record batches."""
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
    """The record batches of a file, mapped."""
    with Path(path).open("rb") as file:
        reader: Any = pa.ipc.open_file(map_file(file))
    return [reader.get_batch(i) for i in range(reader.num_record_batches)]


def drain_spool(path: str) -> Batches:
    """The record batches of a file whose name is no longer needed."""
    try:
        return read_spool(path)
    finally:
        Path(path).unlink(missing_ok=True)


class Partition(ABC):
    """One partition, made anew whenever it is asked for."""

    @abstractmethod
    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its record batches."""

    def settled(self) -> Partition:
        """The same partition, made of nothing but what another process can have."""
        return self


@dataclass(frozen=True)
class InMemoryPartition(Partition):
    """Record batches in memory, or in a mapped file."""

    content: Sequence[pa.RecordBatch]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """As they are."""
        return iter(self.content)


@dataclass(frozen=True)
class SpooledPartition(Partition):
    """Record batches in a file that another process has written, or is to read."""

    path: str

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Mapped."""
        return iter(read_spool(self.path))


@dataclass(frozen=True)
class EmptyPartition(Partition):
    """What a stage begins with that makes its rows itself."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """None."""
        return iter(())


@dataclass(frozen=True)
class StagedPartition(Partition):
    """What a stage makes of another partition."""

    part: Partition
    stage: Stage
    number: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        """As the stage gives them."""
        return self.stage(self.number, self.part.batches())

    def settled(self) -> Partition:
        """With what it is made of settled."""
        return StagedPartition(self.part.settled(), self.stage, self.number)


@dataclass(frozen=True)
class SelectedPartition(Partition):
    """Some columns of another partition."""

    part: Partition
    names: tuple[str, ...]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Without a copy."""
        return (batch.select(list(self.names)) for batch in self.part.batches())

    def settled(self) -> Partition:
        """With what it is made of settled."""
        return SelectedPartition(self.part.settled(), self.names)


@dataclass(frozen=True)
class HeadPartition(Partition):
    """The first rows of several partitions, which are made one behind the other, and no more of them than needed."""

    parts: tuple[Partition, ...]
    rows: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Until there are enough."""
        return slice_rows((batch for part in self.parts for batch in part.batches()), 0, self.rows)

    def settled(self) -> Partition:
        """They are few: they are made here."""
        return InMemoryPartition(list(self.batches()))


class Exchange:
    """Rows that must all be there before the first of them can be given on; they are made once, when that is needed."""

    def __init__(self, make: Callable[[], list[Batches]]) -> None:
        self._make: Callable[[], list[Batches]] | None = make
        self._found: list[Batches] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, tuple[list[Batches]]]:
        return _restore_exchange, (self.found(),)

    def found(self) -> list[Batches]:
        """The record batches of each partition."""
        with self._lock:
            if self._make is not None:
                self._found = self._make()
                self._make = None
            return self._found


def _restore_exchange(found: list[Batches]) -> Exchange:
    return Exchange(lambda: found)


@dataclass(frozen=True)
class ExchangedPartition(Partition):
    """A partition of what is in an exchange, as it was."""

    exchange: Exchange
    number: int
    of: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its own rows."""
        return iter(self.exchange.found()[self.number])

    def settled(self) -> Partition:
        """As it lies here."""
        return InMemoryPartition(list(self.batches()))


@dataclass(frozen=True)
class EvenPartition(ExchangedPartition):
    """A run of all rows, as long as those of the other partitions."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The run."""
        every = [batch for batches in self.exchange.found() for batch in batches]
        total = sum(map(len, every))
        return slice_rows(every, total * self.number // self.of, total * (self.number + 1) // self.of)


@dataclass(frozen=True)
class ShuffledPartition(ExchangedPartition):
    """A run of all rows in a random order."""

    seed: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Gathered from wherever they lie, a chunk at a time."""
        every = [batch for batches in self.exchange.found() for batch in batches]
        total, size = sum(map(len, every)), sum(batch.nbytes for batch in every)
        order = np.random.default_rng(self.seed).permutation(total)
        mine = order[total * self.number // self.of : total * (self.number + 1) // self.of]
        rows = max(1, CHUNK_BYTES * total // max(size, 1))
        return (gather_rows(every, mine[start : start + rows]) for start in range(0, len(mine), rows))


@dataclass(frozen=True)
class KeyedPartition(ExchangedPartition):
    """The rows whose keys belong to a partition."""

    places: Callable[[pa.RecordBatch], NDArray[np.int64]]
    """The partition that each row of a record batch belongs to."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Picked from wherever they lie."""
        return rebatch_by_bytes(
            part for batches in self.exchange.found() for part in map(self._mine, batches) if len(part)
        )

    def _mine(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.filter(pa.array(self.places(batch) == self.number))


def gather_rows(batches: Sequence[pa.RecordBatch], rows: NDArray[np.int64]) -> pa.RecordBatch:
    """Rows by their numbers among those of all record batches."""
    starts = np.cumsum([0, *map(len, batches)])
    at = np.searchsorted(starts, rows, side="right") - 1
    order = np.argsort(at, kind="stable")
    numbers, firsts = np.unique(at[order], return_index=True)
    groups = np.split(order, firsts[1:])
    taken = [
        batches[number].take(pa.array(rows[group] - starts[number]))
        for number, group in zip(numbers.tolist(), groups, strict=True)
    ]
    back = np.empty(len(rows), np.int64)
    back[order] = np.arange(len(rows))
    return pa.concat_batches(taken).take(pa.array(back))


@dataclass(frozen=True)
class KeyPartitioner:
    """Which partition rows belong to: by the hash of the text of their values, each of which is made once."""

    names: tuple[str, ...]
    partitions: int

    def __call__(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """The partition of each row."""
        columns = [batch.column(name).dictionary_encode("encode") for name in self.names]
        codes = np.stack([np.asarray(column.indices) for column in columns], axis=1)
        unique, inverse = np.unique(codes, axis=0, return_inverse=True)
        values = [column.dictionary.to_pylist() for column in columns]
        keys = [tuple(values[i][code] for i, code in enumerate(row)) for row in unique.tolist()]
        places = np.array([_hash_key(key, self.partitions) for key in keys], np.int64)
        found: NDArray[np.int64] = places[inverse.reshape(-1)] if len(batch) else np.zeros(0, np.int64)
        return found


def _hash_key(key: tuple[Any, ...], partitions: int) -> int:
    plain = tuple(value + 0.0 if isinstance(value, float) else value for value in key)  # -0.0 is 0.0
    digest = hashlib.blake2b(repr(plain).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % partitions


@dataclass
class LazyTable:
    """A partition of a frame that is yet to be read."""

    part: Partition
    schema: pa.Schema

    def table(self) -> pa.Table:
        """Its rows."""
        return pa.Table.from_batches(self.part.batches(), self.schema)

    def __deepcopy__(self, _: Any) -> LazyTable:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"part": self.part.settled(), "schema": self.schema}
