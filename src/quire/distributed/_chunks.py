"""Record batches of another size: so many bytes, or so many rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from quire.storage import count_rows_within

CHUNK_BYTES = 16 << 20
"""About so many bytes of a partition are in the hands of a function at a time."""
BLOCK_BYTES = CHUNK_BYTES // 4
"""About so many bytes of what it gave wait to be given on."""
_SMALL = CHUNK_BYTES // 8
"""Record batches of fewer bytes are joined."""


def by_bytes(batches: Iterable[pa.RecordBatch], size: int = CHUNK_BYTES) -> Iterator[pa.RecordBatch]:
    """The rows in record batches of about so many bytes; what has between an eighth of it and all of it stays."""
    waiting: list[pa.RecordBatch] = []
    held = 0
    for batch in batches:
        for part in _cut(batch, size):
            if waiting and held + part.nbytes > size:
                yield _joined(waiting)
                waiting, held = [], 0
            waiting.append(part)
            held += part.nbytes
            if held >= min(size, _SMALL):
                yield _joined(waiting)
                waiting, held = [], 0
    if waiting:
        yield _joined(waiting)


def by_rows(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
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
                yield _joined(waiting)
                waiting, held = [], 0
    if waiting:
        yield _joined(waiting)


def by_multiples(batches: Iterable[pa.RecordBatch], size: int, most: int = CHUNK_BYTES) -> Iterator[pa.RecordBatch]:
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
                yield _joined(waiting)
                waiting = []
    if waiting:
        yield _joined(waiting)


def evenly(batches: list[pa.RecordBatch], parts: int) -> list[list[pa.RecordBatch]]:
    """The rows in so many runs, whose lengths differ by one at most."""
    total = sum(map(len, batches))
    bounds = [total * i // parts for i in range(parts + 1)]
    return [list(span(batches, bounds[i], bounds[i + 1])) for i in range(parts)]


def span(batches: Iterable[pa.RecordBatch], start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """The rows from start to stop, sharing memory."""
    first = 0
    for batch in batches:
        low, high = max(start - first, 0), min(stop - first, len(batch))
        if low < high:
            yield batch.slice(low, high - low)
        first += len(batch)
        if first >= stop:
            return


def _cut(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    if not len(batch):
        return
    rows = count_rows_within(batch, size)
    for start in range(0, len(batch), rows):
        yield batch.slice(start, rows)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
