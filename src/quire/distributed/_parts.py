"""The partitions of the local engine: what each is made of, down to data in memory or in files."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from quire.distributed._chunks import CHUNK_BYTES, by_bytes, span
from quire.distributed._contract import Stage
from quire.distributed._spool import Batches, read_spool

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Part(ABC):
    """One partition, made anew whenever it is asked for."""

    @abstractmethod
    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its record batches."""

    def settled(self) -> Part:
        """The same partition, made of nothing but what another process can have."""
        return self


@dataclass(frozen=True)
class Held(Part):
    """Record batches in memory, or in a mapped file."""

    content: Sequence[pa.RecordBatch]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """As they are."""
        return iter(self.content)


@dataclass(frozen=True)
class Spooled(Part):
    """Record batches in a file that another process has written, or is to read."""

    path: str

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Mapped."""
        return iter(read_spool(self.path))


@dataclass(frozen=True)
class Nothing(Part):
    """What a stage begins with that makes its rows itself."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """None."""
        return iter(())


@dataclass(frozen=True)
class Staged(Part):
    """What a stage makes of another partition."""

    part: Part
    stage: Stage
    number: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        """As the stage gives them."""
        return self.stage(self.number, self.part.batches())

    def settled(self) -> Part:
        """With what it is made of settled."""
        return Staged(self.part.settled(), self.stage, self.number)


@dataclass(frozen=True)
class Chosen(Part):
    """Some columns of another partition."""

    part: Part
    names: tuple[str, ...]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Without a copy."""
        return (batch.select(list(self.names)) for batch in self.part.batches())

    def settled(self) -> Part:
        """With what it is made of settled."""
        return Chosen(self.part.settled(), self.names)


@dataclass(frozen=True)
class First(Part):
    """The first rows of several partitions, which are made one behind the other, and no more of them than needed."""

    parts: tuple[Part, ...]
    rows: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Until there are enough."""
        return span((batch for part in self.parts for batch in part.batches()), 0, self.rows)

    def settled(self) -> Part:
        """They are few: they are made here."""
        return Held(list(self.batches()))


class Exchange:
    """Rows that must all be there before the first of them can be given on; they are made once, when that is needed."""

    def __init__(self, make: Callable[[], list[Batches]]) -> None:
        self._make: Callable[[], list[Batches]] | None = make
        self._found: list[Batches] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, tuple[list[Batches]]]:
        return _exchange_of, (self.found(),)

    def found(self) -> list[Batches]:
        """The record batches of each partition."""
        with self._lock:
            if self._make is not None:
                self._found = self._make()
                self._make = None
            return self._found


def _exchange_of(found: list[Batches]) -> Exchange:
    return Exchange(lambda: found)


@dataclass(frozen=True)
class Exchanged(Part):
    """A partition of what is in an exchange, as it was."""

    exchange: Exchange
    number: int
    of: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its own rows."""
        return iter(self.exchange.found()[self.number])

    def settled(self) -> Part:
        """As it lies here."""
        return Held(list(self.batches()))


@dataclass(frozen=True)
class Evened(Exchanged):
    """A run of all rows, as long as those of the other partitions."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The run."""
        every = [batch for batches in self.exchange.found() for batch in batches]
        total = sum(map(len, every))
        return span(every, total * self.number // self.of, total * (self.number + 1) // self.of)


@dataclass(frozen=True)
class Shuffled(Exchanged):
    """A run of all rows in a random order."""

    seed: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Gathered from wherever they lie, a chunk at a time."""
        every = [batch for batches in self.exchange.found() for batch in batches]
        total, size = sum(map(len, every)), sum(batch.nbytes for batch in every)
        order = np.random.default_rng(self.seed).permutation(total)
        mine = order[total * self.number // self.of : total * (self.number + 1) // self.of]
        rows = max(1, CHUNK_BYTES * total // max(size, 1))
        return (gathered(every, mine[start : start + rows]) for start in range(0, len(mine), rows))


@dataclass(frozen=True)
class Keyed(Exchanged):
    """The rows whose keys belong to a partition."""

    places: Callable[[pa.RecordBatch], NDArray[np.int64]]
    """The partition that each row of a record batch belongs to."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Picked from wherever they lie."""
        return by_bytes(part for batches in self.exchange.found() for part in map(self._mine, batches) if len(part))

    def _mine(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.filter(pa.array(self.places(batch) == self.number))


def gathered(batches: Sequence[pa.RecordBatch], rows: NDArray[np.int64]) -> pa.RecordBatch:
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
class KeyPlaces:
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
        places = np.array([_place(key, self.partitions) for key in keys], np.int64)
        found: NDArray[np.int64] = places[inverse.reshape(-1)] if len(batch) else np.zeros(0, np.int64)
        return found


def _place(key: tuple[Any, ...], partitions: int) -> int:
    plain = tuple(value + 0.0 if isinstance(value, float) else value for value in key)  # -0.0 is 0.0
    digest = hashlib.blake2b(repr(plain).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % partitions
