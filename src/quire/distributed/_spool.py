"""Record batches that must wait: in memory while they are few, else in a temporary file that is mapped."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from quire.storage import map_file

IN_MEMORY = 32 << 20
"""The most bytes of one partition that wait in memory."""
ALL_IN_MEMORY = 256 << 20
"""The most bytes of all partitions together that wait in memory."""
Batches = list[pa.RecordBatch]


class MemoryBudget:
    """How many bytes the partitions of one exchange may still keep in memory. Threads share it."""

    def __init__(self, size: int | None = None) -> None:
        self._left = ALL_IN_MEMORY if size is None else size
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


def held(batches: Iterable[pa.RecordBatch], schema: pa.Schema, budget: MemoryBudget | None = None) -> Batches:
    """Return all record batches. Large partitions, and those that the budget has no room for, are in a mapped file.

    The file is removed when nobody needs it.
    """
    waiting: Batches = []
    budget = budget or MemoryBudget()
    size = 0
    iterator = iter(batches)
    for batch in iterator:
        waiting.append(batch)
        fits = budget.take(batch.nbytes)
        size += batch.nbytes if fits else 0
        if not fits or size > IN_MEMORY:
            budget.give_back(size)
            return drain_spool(write_spool(_chain(waiting, iterator), schema))
    return [compact(batch) for batch in waiting]


def _chain(waiting: Batches, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    while waiting:
        yield waiting.pop(0)
    yield from rest


def compact(batch: pa.RecordBatch) -> pa.RecordBatch:
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
