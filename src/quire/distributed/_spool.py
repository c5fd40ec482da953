"""Record batches that must wait: in memory while they are few, else in a temporary file that is mapped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from quire.storage._memory import map_file

IN_MEMORY = 32 << 20
"""So many bytes of a partition wait in memory."""
Batches = list[pa.RecordBatch]


def held(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Batches:
    """The record batches, all of them; those of a large partition lie in a file that is gone when nobody needs it."""
    waiting: Batches = []
    size = 0
    iterator = iter(batches)
    for batch in iterator:
        waiting.append(batch)
        size += batch.nbytes
        if size > IN_MEMORY:
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
