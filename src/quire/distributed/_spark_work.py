"""What runs in the Python workers of Spark: stages between the columns of Spark, or record batches in packs.

A pack is a row of Spark whose one column holds a record batch as bytes. What goes from the driver to stages, and from
stages to the driver, goes in packs: Spark then has few rows to move, and no columns to turn.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from quire._optional import require
from quire.distributed._chain import Chain, in_parts, told
from quire.distributed._spark_types import spark_arrow_schema, from_spark, to_spark

Takes = Literal["numbers", "packs", "columns"]
"""What a source has: the numbers of partitions, packs with such numbers, or columns."""
Gives = Literal["packs", "columns", "counts"]
PACK_BYTES = 16 << 20
"""The most bytes of a record batch between Python and Spark, unless one row has more."""
NUMBER, PART, PACK = "id", "part", "pack"
PACKS = pa.schema([pa.field(PART, pa.int32()), pa.field(PACK, pa.binary())])
SPARK_PACKS = f"{PART} int, {PACK} binary"
COUNTS = f"{PART} int, count bigint"
_COUNTS = pa.schema([pa.field(PART, pa.int32()), pa.field("count", pa.int64())])


@dataclass(frozen=True)
class Work:
    """The stages of a frame, between what its source has and what is asked for."""

    chain: Chain
    takes: Takes
    gives: Gives
    first: int | None = 0
    """The number of the first partition in packs; None if all packs are to be of one."""

    def function(self) -> Callable[[Any], Any]:
        """As `mapInArrow` takes it."""
        return lambda batches: self(batches)  # noqa: PLW0108 - Spark looks for the signature of a function

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches of one task of Spark."""
        for part, data in self._parts(batches):
            yield from self._given(part, told(self.chain, part, data))
        _worker.settle()

    def _parts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        schema = self.chain.takes
        if self.takes == "numbers":
            for batch in batches:
                yield from ((number, iter(())) for number in batch.column(0).to_pylist())
        elif self.takes == "packs":
            for part, rows in groupby(_rows(batches), lambda row: row[0]):
                yield part, (batch for _, data in rows if len(batch := pa.ipc.read_record_batch(data, schema)))
        else:
            yield _task_number(), (from_spark(batch, schema) for batch in in_parts(batches) if len(batch))

    def _given(self, part: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if self.gives == "counts":
            count = sum(map(len, batches))
            yield pa.RecordBatch.from_arrays([pa.array([part], pa.int32()), pa.array([count])], schema=_COUNTS)
        elif self.gives == "packs":
            yield from self._packs(part, in_parts(batches, PACK_BYTES))
        else:
            carried = spark_arrow_schema(self.chain.schema)
            yield from (to_spark(batch, carried) for batch in in_parts(batches, PACK_BYTES))

    def _packs(self, part: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A partition without rows has a pack, too, and so is not forgotten."""
        number = 0 if self.first is None else self.first + part
        batch = next(batches, None)
        yield packed(number, empty_batch(self.chain.schema) if batch is None else batch)
        yield from (packed(number, batch) for batch in batches)


class _Worker:
    """The process that tasks run in, one after the other."""

    def __init__(self) -> None:
        self._modules = 0

    def settle(self) -> None:
        """Keep what tasks have imported from the collector: Spark calls it behind every task, and torch alone is large.

        So the time of a task does not depend on what the worker has loaded.
        """
        if len(sys.modules) > self._modules:
            gc.collect()
            gc.freeze()
            self._modules = len(sys.modules)


_worker = _Worker()


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """No rows."""
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def packed(part: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    """A record batch as a row."""
    data = batch.serialize()
    ends = pa.py_buffer(np.array([0, data.size], np.int32))
    return pa.RecordBatch.from_arrays(
        [pa.array([part], pa.int32()), pa.Array.from_buffers(pa.binary(), 1, [None, ends, data])], schema=PACKS
    )


def unpacked(rows: Iterable[Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The record batches of rows that Spark gave to the driver; those without rows are left out."""
    for row in rows:
        batch = pa.ipc.read_record_batch(pa.py_buffer(row[1]), schema)
        if len(batch):
            yield batch


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.Buffer]]:
    for batch in batches:
        parts, packs = batch.columns
        for row in range(len(batch)):
            yield parts[row].as_py(), packs[row].as_buffer()


def _task_number() -> int:
    pyspark: Any = require("pyspark", extra="spark", needed_for="engine='spark'")
    context = pyspark.TaskContext.get()
    return 0 if context is None else int(context.partitionId())
