"""Record batches split, joined and cast: by bytes, by rows, and to the columns of a schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from quire.errors import DecodeError
from quire.storage import count_rows_within

MAX_BATCH_BYTES = 1 << 30
"""Offsets of Arrow's binary and text have 31 bits, so batches stay well below that."""
CHUNK_BYTES = 16 << 20
"""About how many bytes of a partition a function is called with."""
BLOCK_BYTES = CHUNK_BYTES // 4
"""About how many bytes of results wait to be encoded."""
_MIN_BYTES = CHUNK_BYTES // 8
"""Smaller record batches are joined."""


class HeldBatches(Iterator[pa.RecordBatch]):
    """Record batches that stay available after they were iterated over: a stage that needs all need not copy them."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = iter(batches)

    def __next__(self) -> pa.RecordBatch:
        return next(self._batches)


def rebatch_by_bytes(batches: Iterable[pa.RecordBatch], size: int = CHUNK_BYTES) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of about `size` bytes; a batch between an eighth of it and all of it is kept."""
    pending: list[pa.RecordBatch] = []
    held = 0
    for batch in batches:
        rows = count_rows_within(batch, size) if len(batch) else 1
        for part in (batch.slice(start, rows) for start in range(0, len(batch), rows)):
            if pending and held + part.nbytes > size:
                yield _concat_batches(pending)
                pending, held = [], 0
            pending.append(part)
            held += part.nbytes
            # A batch that is large enough passes without a copy; only small ones are joined.
            if held >= min(size, _MIN_BYTES):
                yield _concat_batches(pending)
                pending, held = [], 0
    if pending:
        yield _concat_batches(pending)


def rebatch_by_rows(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of exactly `size`; the last may have fewer."""
    pending: list[pa.RecordBatch] = []
    held = 0
    for batch in batches:
        start = 0
        while start < len(batch):
            part = batch.slice(start, size - held)
            start += len(part)
            held += len(part)
            pending.append(part)
            if held == size:
                yield _concat_batches(pending)
                pending, held = [], 0
    if pending:
        yield _concat_batches(pending)


def rebatch_by_multiples(
    batches: Iterable[pa.RecordBatch], size: int, most: int = CHUNK_BYTES
) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of a multiple of `size` that has about `most` bytes, at least of `size`.

    What is done once for a record batch is then done less often. The last batch may have fewer rows.
    """
    pending: list[pa.RecordBatch] = []
    held = 0
    for batch in batches:
        start, several = 0, max(1, count_rows_within(batch, most) // size) * size
        while start < len(batch):
            # After the start of a group, only its remaining rows; else as many whole groups as this batch has.
            part = batch.slice(start, size - held if held else several)
            part = part if held else part.slice(0, len(part) // size * size or len(part))
            start += len(part)
            held = (held + len(part)) % size
            pending.append(part)
            if not held:
                yield _concat_batches(pending)
                pending = []
    if pending:
        yield _concat_batches(pending)


def split_evenly(batches: list[pa.RecordBatch], parts: int) -> list[list[pa.RecordBatch]]:
    """Split the rows into consecutive parts whose lengths differ by one at most."""
    total = sum(map(len, batches))
    bounds = [total * i // parts for i in range(parts + 1)]
    return [list(slice_rows(batches, bounds[i], bounds[i + 1])) for i in range(parts)]


def slice_rows(batches: Iterable[pa.RecordBatch], start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows from start to stop, sharing memory."""
    first = 0
    for batch in batches:
        low, high = max(start - first, 0), min(stop - first, len(batch))
        if low < high:
            yield batch.slice(low, high - low)
        first += len(batch)
        if first >= stop:
            return


def _concat_batches(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def cast_to_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a record batch with the columns and metadata of a schema; other types are cast."""
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    arrays = []
    for field in schema:
        place = batch.schema.get_field_index(field.name)
        if place < 0:
            raise DecodeError(f"{field.name}: the data of the engine has no such column: {batch.schema.names}.")
        array = batch.column(place)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def split_large(batches: Iterable[pa.RecordBatch], most: int = MAX_BATCH_BYTES) -> Iterator[pa.RecordBatch]:
    """Yield the rows in record batches of at most `most` bytes, as far as single rows allow."""
    for batch in batches:
        rows = len(batch) if batch.nbytes <= most else max(1, len(batch) * most // batch.nbytes)
        for start in range(0, len(batch), rows or 1):
            yield batch.slice(start, rows)
