"""Streams of documents in files."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import IO, Any

import numpy as np

from quire.codec._blocks import (
    HEADER,
    INDEX,
    PICKLE,
    Header,
    Index,
    Segment,
    is_stream,
    read_blocks,
    read_file,
    read_index,
    read_memory,
)
from quire.codec._bytes import check_protocol
from quire.codec._compression import Unpacked, check_compression, compression_of
from quire.codec._context import ReadOptions
from quire.errors import DecodeError, RowIndexError

Rows = slice | Sequence[int]
"""Which documents of a file are read: a slice, or positions."""
_ENOUGH = 8 << 20
"""So much of packed data unpacks to its first bytes, whatever the compression."""


def write_parts(out: IO[bytes], parts: Iterable[list[Any]]) -> None:
    """Write a stream, segment by segment."""
    for segment in parts:
        for part in segment:
            out.write(part)


def segments_of(source: IO[bytes] | bytes | memoryview, options: ReadOptions) -> Iterator[Segment]:
    """The header and the blocks of a stream, in memory or in a file."""
    memory = isinstance(source, (bytes, bytearray, memoryview))
    found = read_memory(source, options) if memory else read_file(source, options)  # type: ignore[arg-type]
    for segment in found:
        if segment.number == 0:
            Header(segment)  # it is one, of a version that can be read
        if segment.kind != INDEX:
            yield segment


def check_asked(segments: Iterator[Segment], protocol: str | None) -> Iterator[Segment]:
    """The blocks behind the header; a protocol that was asked for must be theirs."""
    wanted = None if protocol is None else check_protocol(protocol)
    for segment in segments:
        if segment.kind == HEADER:
            continue
        if wanted is not None and (segment.kind == PICKLE) != (wanted == "pickle"):
            raise DecodeError(f"protocol={protocol!r} was asked for, but the data was written with another.")
        yield segment


def memory_starts_stream(data: memoryview, compress: str | None) -> bool:
    """Whether data in memory is a stream of blocks."""
    packed = compression_of(bytes(data[:8])) is not None
    return starts_stream(io.BytesIO(data[: _ENOUGH if packed else 8]), compress)


def starts_stream(source: IO[bytes], compress: str | None) -> bool:
    """Whether a file that can be sought in holds a stream of blocks; others are taken for one, and damaged ones too."""
    if not (hasattr(source, "seekable") and source.seekable()):
        return True
    position = source.tell()
    try:
        start = source.read(8)
        compression = check_compression(start, compress)
        if compression is None:
            return is_stream(start)
        source.seek(position)
        try:
            return is_stream(Unpacked(source, compression, 1.0).read(8))
        except DecodeError:
            return True
    finally:
        source.seek(position)


def selected_blocks(
    source: IO[bytes], rows: Rows, options: ReadOptions
) -> tuple[str, Iterator[tuple[Segment, Sequence[int]]]]:
    """The name of the documents' class, and the blocks that hold some of a file's documents.

    With each block come the positions that are wanted of it, in their order.
    """
    index = read_index(source, options)
    if index is None:
        raise DecodeError(
            "rows=... needs the index at the end of a file: the file cannot be sought in, or its end is damaged."
        )
    starts = [0, *accumulate(index.counts)]
    wanted = range(starts[-1])[rows] if isinstance(rows, slice) else _positions(rows, starts[-1])
    runs = list(_runs(wanted, starts))
    segments = read_blocks(source, index, [block for block, _ in runs], options)
    name = Header(next(segments)).type_name
    return name, _held_against(index, segments, runs)


def _held_against(
    index: Index, segments: Iterator[Segment], runs: list[tuple[int, Sequence[int]]]
) -> Iterator[tuple[Segment, Sequence[int]]]:
    """The blocks with their positions, if they have as many documents as the index tells."""
    for segment, (block, positions) in zip(segments, runs, strict=True):
        if segment.count != index.counts[block]:
            raise DecodeError(f"{segment.where} has {segment.count} documents, but {index.counts[block]} in the index.")
        yield segment, positions


def _runs(wanted: Sequence[int], starts: list[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """The numbers of blocks, each with the positions in it that come next.

    What an index tells is believed only when the block is read: those of a slice are a range, however many.
    """
    at = 0
    while at < len(wanted):
        block = bisect_right(starts, wanted[at]) - 1
        first, last = starts[block], starts[block + 1]
        if isinstance(wanted, range):
            run = (last - 1 - wanted[at] if wanted.step > 0 else wanted[at] - first) // abs(wanted.step) + 1
            part = wanted[at : at + run]
            yield block, range(part.start - first, part.stop - first, part.step)
        else:
            run = 1
            while at + run < len(wanted) and first <= wanted[at + run] < last:
                run += 1
            yield block, [row - first for row in wanted[at : at + run]]
        at += run


def _positions(rows: Sequence[int], total: int) -> list[int]:
    wanted: list[int] = np.array(rows, np.int64).reshape(-1).tolist()
    wrong = [row for row in wanted if not -total <= row < total]
    if wrong:
        raise RowIndexError(f"the file has {total} documents; there is none at {wrong[0]}.")
    return [row + total if row < 0 else row for row in wanted]
