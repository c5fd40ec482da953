"""Record batches cut, joined and cast: by bytes, by rows, and into the columns of a schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from quire.errors import DecodeError
from quire.storage import count_rows_within

MAX_BATCH_BYTES = 1 << 30
"""Offsets of Arrow's binary and text have 31 bits: batches stay well below."""


CHUNK_BYTES = 16 << 20
"""About so many bytes of a partition are in the hands of a function at a time."""


BLOCK_BYTES = CHUNK_BYTES // 4
"""About so many bytes of what it gave wait to be given on."""


_MIN_BYTES = CHUNK_BYTES // 8
"""Record batches of fewer bytes are joined."""


def rebatch_by_bytes(batches: Iterable[pa.RecordBatch], size: int = CHUNK_BYTES) -> Iterator[pa.RecordBatch]:
    """The rows in record batches of about so many bytes; what has between an eighth of it and all of it stays."""
    waiting: list[pa.RecordBatch] = []
    held = 0
    for batch in batches:
        for part in _split_batch(batch, size):
            if waiting and held + part.nbytes > size:
                yield _concat_batches(waiting)
                waiting, held = [], 0
            waiting.append(part)
            held += part.nbytes
            if held >= min(size, _MIN_BYTES):
                yield _concat_batches(waiting)
                waiting, held = [], 0
    if waiting:
        yield _concat_batches(waiting)


def rebatch_by_rows(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """The rows in record batches of exactly so many; the last may have fewer."""
    waiting: list[pa.RecordBatch] = []
    held = 0
    for batch in batches:
        start = 0
        while start < len(batch):
            part = batch.slice(start, size - held)
            start += len(part)
            held += len(part)
            waiting.append(part)
            if held == size:
                yield _concat_batches(waiting)
                waiting, held = [], 0
    if waiting:
        yield _concat_batches(waiting)


def rebatch_by_multiples(
    batches: Iterable[pa.RecordBatch], size: int, most: int = CHUNK_BYTES
) -> Iterator[pa.RecordBatch]:
    """The rows in record batches of so many, or of a multiple of it that has about so many bytes.

    What is done to a record batch as a whole is then done less often. The last may have fewer rows.
    """
    waiting: list[pa.RecordBatch] = []
    held = 0
    for batch in batches:
        start, several = 0, max(1, count_rows_within(batch, most) // size) * size
        while start < len(batch):
            part = batch.slice(start, size - held if held else several)
            part = part if held else part.slice(0, len(part) // size * size or len(part))
            start += len(part)
            held = (held + len(part)) % size
            waiting.append(part)
            if not held:
                yield _concat_batches(waiting)
                waiting = []
    if waiting:
        yield _concat_batches(waiting)


def split_evenly(batches: list[pa.RecordBatch], parts: int) -> list[list[pa.RecordBatch]]:
    """The rows in so many runs, whose lengths differ by one at most."""
    total = sum(map(len, batches))
    bounds = [total * i // parts for i in range(parts + 1)]
    return [list(slice_rows(batches, bounds[i], bounds[i + 1])) for i in range(parts)]


def slice_rows(batches: Iterable[pa.RecordBatch], start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """The rows from start to stop, sharing memory."""
    first = 0
    for batch in batches:
        low, high = max(start - first, 0), min(stop - first, len(batch))
        if low < high:
            yield batch.slice(low, high - low)
        first += len(batch)
        if first >= stop:
            return


def _split_batch(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    if not len(batch):
        return
    rows = count_rows_within(batch, size)
    for start in range(0, len(batch), rows):
        yield batch.slice(start, rows)


def _concat_batches(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def cast_to_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A record batch in the columns of a schema, with their marks; types that differ are cast."""
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
    """The same rows in record batches of no more than so many bytes, where a row allows it."""
    for batch in batches:
        rows = len(batch) if batch.nbytes <= most else max(1, len(batch) * most // batch.nbytes)
        for start in range(0, len(batch), rows or 1):
            yield batch.slice(start, rows)
