"""Rows moved between partitions, in one way on all engines.

`ScatterRows` finds the target partition of each row, and serializes the rows for each target as one record batch: a
*pack*. Engines only move packs, by the number in a column (`Engine.exchange`): few rows of bytes, in which every type
survives. Rows carry their position and the hash of their keys, and the stages that follow an exchange sort by them:
results do not depend on the engine, on the number of partitions, or on the order in which packs arrive.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from quire._lowlevel.forks import ForkSafeLock
from quire.distributed._batches import BLOCK_BYTES, HeldBatches, rebatch_by_bytes
from quire.distributed._encoding import DocumentLayout
from quire.distributed._engine import Engine, Frame
from quire.distributed._keys import Keys, hash_keys, mix_bits, order_columns, partition_of_hash, sort_rows
from quire.distributed._metrics import PACKED_ROWS, Meters
from quire.distributed._partitions import gather_rows, hold_batches
from quire.distributed._stages import PartitionStage

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
TARGET = "partition"
PACKS = pa.schema(
    [
        pa.field(TARGET, pa.int32(), nullable=False),
        pa.field("side", pa.int8(), nullable=False),
        pa.field(PACKED_ROWS, pa.int32(), nullable=False),
        pa.field("pack", pa.large_binary(), nullable=False),
    ]
)
# Spaces keep these names apart from those of fields.
_POSITION = pa.field("quire position", pa.int64(), nullable=False)
_HASH = pa.field("quire hash", pa.uint64(), nullable=False)
_POSITION_BITS = 40
"""A position has the number of the partition in the upper bits, and the row in the lower ones."""
_SAMPLED_ROWS = 1024
"""How many keys of a partition decide the bounds of a sort."""


class Deferred(Generic[T]):
    """A value that a job computes once, on the driver, when it is first needed. It is pickled as the value."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._lock = ForkSafeLock()

    @classmethod
    def of(cls, value: T) -> Deferred[T]:
        return cls(lambda: value)

    def __reduce__(self) -> tuple[Any, tuple[T]]:
        return Deferred.of, (self.value(),)

    def value(self) -> T:
        with self._lock:
            if self._make is not None:
                self._value = self._make()
                self._make = None
            return self._value


class Router(Protocol):
    """Finds the target partition of each row."""

    @property
    def partitions(self) -> int:
        """The number of partitions that rows go to."""
        ...

    def route(
        self, batch: pa.RecordBatch, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the target of each row, and the hash that rows are ordered by there."""
        ...


@dataclass(frozen=True)
class HashRouter:
    """Routes rows by the hash of their keys."""

    keys: Keys
    partitions: int
    seed: int = 0

    def route(
        self,
        batch: pa.RecordBatch,
        positions: NDArray[np.int64],  # noqa: ARG002
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        hashes = hash_keys(self.keys.canonical(batch), self.seed)
        return partition_of_hash(hashes, self.partitions), hashes


@dataclass(frozen=True)
class PositionRouter:
    """Routes rows by the hash of their positions, for a shuffle of documents without ids."""

    partitions: int
    seed: int

    def route(
        self,
        batch: pa.RecordBatch,  # noqa: ARG002
        positions: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        hashes = mix_bits(positions.view(np.uint64) ^ mix_bits(np.array([self.seed], np.uint64)))
        return partition_of_hash(hashes, self.partitions), hashes


@dataclass(frozen=True)
class RangeRouter:
    """Routes rows by bounds between the keys of partitions, so that partitions are in the order of the keys."""

    keys: Keys
    descending: tuple[bool, ...]
    partitions: int
    bounds: Deferred[pa.Table]
    """The `order_columns` of the first row of each partition but the first one, with its position."""

    def route(
        self, batch: pa.RecordBatch, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        bounds, rows = self.bounds.value(), len(batch)
        columns = [*order_columns(self.keys.canonical(batch)), pa.array(positions)]
        # Rows and bounds are sorted together: a row belongs to the partition of the last bound before it.
        both = [
            pa.concat_arrays([bound.combine_chunks().cast(column.type), column])
            for bound, column in zip(bounds.columns, columns, strict=True)
        ]
        order = sort_rows(both, [*self.keys.order_directions(self.descending), False])
        is_bound = order < len(bounds)
        targets = np.empty(rows, np.int64)
        targets[order[~is_bound] - len(bounds)] = np.cumsum(is_bound)[~is_bound]
        return targets, np.zeros(rows, np.uint64)


class SampleKeys(PartitionStage):
    """Yields the keys of some rows of a partition, to find bounds for a sort."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        empty = pa.RecordBatch.from_pylist([], keys.source.fields)
        columns = order_columns(keys.canonical(empty))
        types = [*(column.type for column in columns), pa.int64()]
        self._schema = pa.schema([pa.field(str(i), kind, nullable=False) for i, kind in enumerate(types)])

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        sample, first = self.schema.empty_table(), partition << _POSITION_BITS
        for batch in batches:
            positions = np.arange(first, first + len(batch))
            columns = [*order_columns(self._keys.canonical(batch)), pa.array(positions)]
            sample = pa.concat_tables([sample, pa.table(columns, self.schema)])
            if len(sample) > _SAMPLED_ROWS:
                # Those with the lowest hashes of their positions: as good as at random, and the same in each attempt.
                places = mix_bits(sample.column(len(columns) - 1).to_numpy().view(np.uint64))
                kept = np.sort(np.argpartition(places, _SAMPLED_ROWS)[:_SAMPLED_ROWS])
                sample = sample.take(pa.array(kept)).combine_chunks()
            first += len(batch)
        yield from sample.combine_chunks().to_batches()


def find_bounds(engine: Engine, frame: Frame[Any], keys: Keys, descending: Sequence[bool], partitions: int) -> pa.Table:
    """Return keys that divide the rows into partitions of about one size. All rows are computed once."""
    stage = SampleKeys(keys)
    table = pa.Table.from_batches(engine.collect(engine.run(frame, stage)), stage.schema).combine_chunks()
    columns = [column.combine_chunks() for column in table.columns]
    order = sort_rows(columns, [*keys.order_directions(descending), False])
    places = [len(order) * number // partitions for number in range(1, partitions)] if len(order) else []
    return table.take(pa.array(order[places], pa.int64()))


class ScatterRows(PartitionStage):
    """Replaces rows by packs of those that go to the same partition."""

    def __init__(self, source: pa.Schema, router: Router, side: int = 0) -> None:
        self._source, self._router, self._side = source, router, side
        self._schema = carried_schema(source)
        self._next_rows: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_next_rows": {}}

    @property
    def schema(self) -> pa.Schema:
        return PACKS

    def prepare(self) -> None:
        if isinstance(self._router, RangeRouter):
            self._router.bounds.value()

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        # Ray may call a stage several times in one task, with a block each time. The rows of the later calls are
        # numbered after those of the earlier ones, so that positions are unique and in the order of the rows.
        row = self._next_rows.get(partition, 0)
        for chunk in rebatch_by_bytes(batches, BLOCK_BYTES):
            positions = np.arange(row, row + len(chunk)) + (partition << _POSITION_BITS)
            targets, hashes = self._router.route(chunk, positions)
            columns = [*chunk.columns, pa.array(positions), pa.array(hashes)]
            yield self._pack(pa.RecordBatch.from_arrays(columns, schema=self._schema), targets)
            row += len(chunk)
        self._next_rows[partition] = row

    def _pack(self, rows: pa.RecordBatch, targets: NDArray[np.int64]) -> pa.RecordBatch:
        order = np.argsort(targets, kind="stable")
        numbers, firsts = np.unique(targets[order], return_index=True)
        packs = [rows.take(pa.array(group)).serialize() for group in np.split(order, firsts[1:])]
        offsets, data = np.cumsum([0, *(pack.size for pack in packs)]), b"".join(map(memoryview, packs))
        columns = [
            pa.array(numbers, pa.int32()),
            pa.array(np.full(len(numbers), self._side, np.int8)),
            pa.array(np.diff([*firsts, len(order)]), pa.int32()),
            pa.Array.from_buffers(pa.large_binary(), len(packs), [None, pa.py_buffer(offsets), pa.py_buffer(data)]),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=PACKS)


def _pack_buffers(batch: pa.RecordBatch) -> Iterator[pa.Buffer]:
    """Yield the bytes of each pack, in the memory or the file that holds the record batch."""
    packs = batch.column("pack")
    if not len(packs):
        return
    _, offsets, data = packs.buffers()
    # A scalar of the array would be a copy of its bytes, outside the pool of Arrow.
    ends = np.frombuffer(offsets, np.int64)[packs.offset : packs.offset + len(packs) + 1].tolist()
    for start, end in pairwise(ends):
        yield data.slice(start, end - start)


def carried_schema(source: pa.Schema) -> pa.Schema:
    """Return the schema of rows in packs: with their position and hash."""
    return source.append(_POSITION).append(_HASH)


class HeldRows:
    """All rows of a partition: in memory while they are few, else in a temporary file that is mapped."""

    def __init__(self, schema: pa.Schema, packs: Iterable[pa.Buffer], *, held: bool) -> None:
        batches: Iterable[pa.RecordBatch] = (pa.ipc.read_record_batch(pack, schema) for pack in packs)
        self.batches = list(batches) if held else hold_batches(batches, schema)
        self.schema = schema
        self.rows = sum(map(len, self.batches))
        self.bytes: int = sum(batch.nbytes for batch in self.batches)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        return self._column(_POSITION.name, np.int64)

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        return self._column(_HASH.name, np.uint64)

    def _column(self, name: str, dtype: Any) -> NDArray[Any]:
        parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in self.batches]
        return np.concatenate([np.zeros(0, dtype), *parts])

    def arrays(self, find: Callable[[pa.RecordBatch], list[pa.Array]]) -> list[pa.Array]:
        """Return what a function finds in each record batch, of all rows."""
        parts = [find(batch) for batch in self.batches or [pa.RecordBatch.from_pylist([], self.schema)]]
        return [pa.concat_arrays(columns) for columns in zip(*parts, strict=True)]

    def take(self, rows: NDArray[np.int64]) -> pa.RecordBatch:
        """Return rows by number, with their positions and hashes."""
        if not len(rows):
            return pa.RecordBatch.from_pylist([], self.schema)
        return gather_rows(self.batches, rows)

    @property
    def chunk_rows(self) -> int:
        """How many rows have about BLOCK_BYTES."""
        return max(1, BLOCK_BYTES * self.rows // max(self.bytes, 1))


class GatherStage(PartitionStage):
    """A stage that follows an exchange of packs: it gets all rows of a partition, from one source or from two."""

    @property
    @abstractmethod
    def sources(self) -> tuple[pa.Schema, ...]:
        """The schema of the rows from each side."""

    @abstractmethod
    def combine(self, partition: int, sides: list[HeldRows]) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of the result."""

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        held = isinstance(batches, HeldBatches)
        schemas = [carried_schema(source) for source in self.sources]
        if len(schemas) == 1:
            packs = (pack for batch in batches for pack in _pack_buffers(batch))
            yield from self.combine(partition, [HeldRows(schemas[0], packs, held=held)])
            return
        # The packs of both sides arrive mixed: they are held, and read a side at a time.
        every = list(batches) if held else hold_batches(batches, PACKS)
        sides = []
        for number, schema in enumerate(schemas):
            packs = (
                pack
                for batch in every
                for side, pack in zip(batch.column("side").to_pylist(), _pack_buffers(batch), strict=True)
                if side == number
            )
            sides.append(HeldRows(schema, packs, held=True))
        yield from self.combine(partition, sides)


@dataclass(frozen=True)
class OrderRows(GatherStage):
    """Yields the rows of a partition in order: of their keys, of their hashes, or of their positions."""

    source: DocumentLayout
    by: Keys | str = "position"
    """Keys, 'hash' or 'position'. Rows that are equal stay in the order of their positions."""
    descending: tuple[bool, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        return self.source.fields

    @property
    def sources(self) -> tuple[pa.Schema, ...]:
        return (self.source.fields,)

    def combine(self, partition: int, sides: list[HeldRows]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        rows = sides[0]
        if isinstance(self.by, Keys):
            columns = [*order_columns(rows.arrays(self.by.canonical)), pa.array(rows.positions)]
            order = sort_rows(columns, [*self.by.order_directions(self.descending), False])
        else:
            order = np.lexsort((rows.positions, rows.hashes) if self.by == "hash" else (rows.positions,))
        yield from take_chunks(rows, order, self.source.fields.names)


def take_chunks(rows: HeldRows, order: NDArray[np.int64], names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield rows by number, about BLOCK_BYTES at a time, with some of the columns."""
    for start in range(0, len(order), rows.chunk_rows):
        yield rows.take(order[start : start + rows.chunk_rows]).select(names)


def exchange_rows(
    engine: Engine,
    inputs: Sequence[tuple[Frame[Any], pa.Schema, Router]],
    stage: GatherStage,
    meters: Meters | None = None,
) -> Frame[Any]:
    """Move the rows of one frame or of two to the partitions that their routers name, and run a stage there."""
    meters = meters or Meters()
    packs = [
        engine.run(frame, meters.add(ScatterRows(schema, router, side)))
        for side, (frame, schema, router) in enumerate(inputs)
    ]
    moved = engine.exchange(packs[0] if len(packs) == 1 else engine.union(packs), TARGET, inputs[0][2].partitions)
    return engine.run(moved, meters.add(stage))
