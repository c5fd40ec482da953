"""Streams of blocks: the format of files and of `DocumentArray.to_bytes`.

    header segment | block segment ... | index segment | tail

Every segment starts with a head of 64 bytes:

    0  magic (8)   8  kind (1)   9  zeros (3)   12  CRC-32 of the payload, or 0 for none (4)
    16  length of the payload (8)   24  number of documents (8)   32  zeros (28)   60  CRC-32 of the head (4)

Then follow the payload and zeros up to a multiple of 64 bytes, so that in a file that is mapped into memory the buffers
of a message are aligned. The payload of a header and of an index is a message of quire.proto. The tail is a magic
number and the position of the index, by which a reader of a seekable file finds the blocks without reading them.

In a compressed stream every segment and the tail is compressed separately. The whole is still valid input for the usual
tools, and with the index blocks can be decompressed one by one and in parallel.
"""

from __future__ import annotations

import io
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import IO, Any, Protocol

import numpy as np

from quire.codec._compression import (
    Compression,
    Decompressor,
    check_compression,
    check_protocol,
    compression_of,
    decompress,
    read_whole,
)
from quire.codec._context import MAX_ROWS, DecodeOptions
from quire.codec._messages import VERSION_FIELD, HeaderField, IndexField, check_version
from quire.codec._wire import (
    DELIMITED,
    VARINT,
    Bytes,
    encode_packed,
    encode_text,
    iter_fields,
    read_text,
    read_uints,
    size_of,
)
from quire.errors import DecodeError, RowIndexError
from quire.parallel import cpu_count, ordered_map

MAGIC = b"\x93QUIRE\r\n"
HEADER, BATCH, ROWS, PICKLE, INDEX = b"H", b"B", b"A", b"P", b"E"
"""The kinds of segments; documents are a batch, encoded one by one (ROWS), or a pickle."""
_HEAD = struct.Struct("<8scxxxIQQ28xI")
_TAIL = struct.Struct("<8sQ")
_TAIL_MAGIC = b"\x93QUIREEN"
_TAIL_ROOM = 256
"""A tail takes at most this many bytes at the end of a file, also if it is compressed."""
_PIECE = 1 << 20
_MAX_FIRST_PIECE = 8 << 20
"""This much of compressed data contains its first bytes, whatever the compression."""
_TRUNCATED = " The data was cut off; load_binary(..., streaming=True) gives what is whole before it."


@dataclass(frozen=True)
class Segment:
    """One segment: its kind, its number of documents, its payload, and its number and position in the stream."""

    kind: bytes
    count: int
    payload: Any
    number: int
    offset: int

    @property
    def where(self) -> str:
        """Its place for error messages."""
        return _describe_place(self.number, self.offset)


def _describe_place(number: int, position: int) -> str:
    return f"block {number} (byte {position})"


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


# --- writing


def pack_segment(kind: bytes, count: int, parts: list[Any], *, checksum: bool = True) -> list[Any]:
    """Return a segment as the parts that make it up."""
    length = sum(map(size_of, parts))
    crc = 0
    for part in parts if checksum else ():
        crc = zlib.crc32(part, crc)
    # The last four bytes of a head are its own checksum, which cannot be part of what it is computed from.
    head = _HEAD.pack(MAGIC, kind, crc, length, count, 0)[:-4]
    return [head, zlib.crc32(head).to_bytes(4, "little"), *parts, bytes(-length % 64)]


Block = tuple[bytes, int, list[Any]]
"""The kind of a block, the number of its documents, and the parts that make it up."""


def encode_stream(
    type_name: str,
    schema: str,
    blocks: Iterable[Block | Callable[[], Block]],
    compression: Compression | None,
    *,
    checksums: bool,
    workers: int | None = None,
) -> Iterator[list[Any]]:
    """Yield the segments of a stream, each as the parts that make it up.

    Segments are compressed in parallel; blocks that are functions are encoded there, too.
    """
    text_fields = encode_text(HeaderField.TYPE, type_name) + encode_text(HeaderField.SCHEMA, schema)
    header: Block = HEADER, 0, [VERSION_FIELD + text_fields]
    position = 0
    offsets: list[int] = []  # of the header and of all blocks; the index leaves out the header
    counts: list[int] = []

    def pack(block: Block | Callable[[], Block]) -> tuple[int, list[Any]]:
        kind, count, parts = block() if callable(block) else block
        return count, _compress_parts(pack_segment(kind, count, parts, checksum=checksums), compression)

    threads = workers or (cpu_count() if compression or checksums else 1)
    for count, segment in ordered_map(pack, chain([header], blocks), threads, prompt=workers is not None):
        offsets.append(position)
        counts.append(count)
        position += sum(map(size_of, segment))
        yield segment
    # The index is written last, when the sizes of all segments are known. The tail points back to it, so that a reader
    # of a seekable file starts at the end.
    index = encode_packed(IndexField.OFFSETS, offsets[1:]) + encode_packed(IndexField.COUNTS, counts[1:])
    yield _compress_parts(pack_segment(INDEX, sum(counts), [index]), compression)
    yield _compress_parts([_TAIL.pack(_TAIL_MAGIC, position)], compression)


def _compress_parts(parts: list[Any], compression: Compression | None) -> list[Any]:
    return parts if compression is None else [compression.compress(b"".join(parts))]


def write_parts(out: IO[bytes], parts: Iterable[list[Any]]) -> None:
    """Write a stream, segment by segment."""
    for segment in parts:
        for part in segment:
            out.write(part)


# --- reading


class Header:
    """The content of the first segment of a stream."""

    __slots__ = ("type_name",)

    def __init__(self, segment: Segment) -> None:
        self.type_name = ""
        if segment.kind != HEADER:
            raise DecodeError("the stream has no header.")
        data = bytes(segment.payload)
        for number, wire_type, a, b in iter_fields(data, 0, len(data)):
            if number == HeaderField.VERSION and wire_type == VARINT:
                check_version(a, "stream has")
            elif number == HeaderField.TYPE and wire_type == DELIMITED:
                self.type_name = read_text(data, a, b)


def is_stream(start: bytes) -> bool:
    """Return whether the first bytes are those of a stream that is not compressed."""
    return start.startswith(MAGIC)


def read_segments(source: IO[bytes] | bytes | memoryview, options: DecodeOptions) -> Iterator[Segment]:
    """Yield the header and the blocks of a stream, in memory or in a file."""
    in_memory = isinstance(source, (bytes, bytearray, memoryview))
    segments = read_memory(source, options) if in_memory else read_file(source, options)  # type: ignore[arg-type]
    for segment in segments:
        if segment.number == 0:
            Header(segment)  # raises an error if it is none, or of a later version
        if segment.kind != INDEX:
            yield segment


def skip_header(segments: Iterator[Segment], protocol: str | None) -> Iterator[Segment]:
    """Yield the blocks after the header; raise an error if they are not of the requested protocol."""
    requested = None if protocol is None else check_protocol(protocol)
    for segment in segments:
        if segment.kind == HEADER:
            continue
        if requested is not None and (segment.kind == PICKLE) != (requested == "pickle"):
            raise DecodeError(f"protocol={protocol!r} was asked for, but the data was written with another.")
        yield segment


def memory_starts_stream(data: memoryview, compress: str | None) -> bool:
    """Return whether data in memory is a stream of blocks."""
    is_compressed = compression_of(bytes(data[:8])) is not None
    return starts_stream(io.BytesIO(data[: _MAX_FIRST_PIECE if is_compressed else 8]), compress)


def starts_stream(source: IO[bytes], compress: str | None) -> bool:
    """Return whether a file is a stream of blocks; files that are damaged or not seekable are assumed to be one."""
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
            return is_stream(Decompressor(source, compression, 1.0).read(8))
        except DecodeError:
            return True
    finally:
        source.seek(position)


def read_memory(data: Bytes, options: DecodeOptions) -> Iterator[Segment]:
    """Yield the segments of a stream in memory, as views of it if it is not compressed."""
    view = memoryview(data).cast("B")
    if compression_of(bytes(view[:8])) is not None:
        yield from read_file(io.BytesIO(view), options)
        return
    yield from _iter_segments(lambda number, at: _segment_in_memory(view[at:], number, at, verify=True))


def _iter_segments(read: Callable[[int, int], Segment]) -> Iterator[Segment]:
    """Yield segments up to the index; `read` reads the next one, given its number and position."""
    position = number = 0
    while True:
        segment = read(number, position)
        yield segment
        if segment.kind == INDEX:
            return
        length = len(segment.payload)
        position, number = position + _HEAD.size + length + -length % 64, number + 1


def read_file(source: IO[bytes], options: DecodeOptions) -> Iterator[Segment]:
    """Yield the segments of a file; with an index, compressed ones are decompressed in parallel.

    Memory is bounded by the largest segments. A damaged segment raises an error that names it, after all segments
    before it have been yielded.
    """
    index = read_index(source, options) if cpu_count() > 1 else None
    if index is not None and index.compression is not None:
        yield from ordered_map(lambda piece: _decode_piece(piece, index, options), index.pieces(source), cpu_count())
        return
    start = read_whole(source, 8)
    compression = compression_of(start)
    stream: _Source = _Rejoined(start, source)
    if compression is not None:
        stream = Decompressor(stream, compression, options.max_ratio)  # type: ignore[arg-type]
    yield from _iter_segments(lambda number, position: _read_segment(stream, options, number, position))


class _Rejoined:
    """A source whose first bytes have been read already, and are returned again."""

    def __init__(self, start: bytes, source: IO[bytes]) -> None:
        self._start, self._source = start, source

    def read(self, size: int = -1) -> bytes:
        if not self._start:
            return self._source.read(size)
        start = self._start if size < 0 else self._start[:size]
        self._start = self._start[len(start) :]
        return start


def _read_segment(stream: _Source, options: DecodeOptions, number: int, position: int) -> Segment:
    """Read the next segment of a stream, and no byte after it."""
    head = _read_exactly(stream, _HEAD.size, number, position)
    kind, crc, length, count = _parse_head(head, number, position)
    if length > options.max_bytes:
        raise DecodeError(
            f"{_describe_place(number, position)} has {length} bytes, more than max_bytes={options.max_bytes}. "
            "Raise it if you trust the source."
        )
    payload = _read_exactly(stream, length, number, position)
    _read_exactly(stream, -length % 64, number, position)
    segment = Segment(kind, count, memoryview(payload), number, position)
    _verify(segment, crc)
    return segment


def _read_exactly(stream: _Source, size: int, number: int, position: int) -> bytes:
    """Read `size` bytes in pieces, so that a wrong length does not allocate memory."""
    parts, missing = [], size
    while missing:
        try:
            part = stream.read(min(missing, _PIECE))
        except DecodeError as error:
            raise DecodeError(f"{_describe_place(number, position)}: {error}") from error
        if not part:
            raise DecodeError(f"{_describe_place(number, position)} ends {missing} bytes too early.{_TRUNCATED}")
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _segment_in_memory(data: memoryview, number: int, position: int, *, verify: bool) -> Segment:
    """Return the segment at the start of some data, as a view of it."""
    kind, crc, length, count = _parse_head(bytes(data[: _HEAD.size]), number, position)
    payload = data[_HEAD.size : _HEAD.size + length]
    if len(payload) < length:
        missing = length - len(payload)
        raise DecodeError(f"{_describe_place(number, position)} ends {missing} bytes too early.{_TRUNCATED}")
    segment = Segment(kind, count, payload, number, position)
    if verify:
        _verify(segment, crc)
    return segment


def _parse_head(head: bytes, number: int, position: int) -> tuple[bytes, int, int, int]:
    """Return the kind, the checksum, the length and the number of documents of a segment."""
    if not head.startswith(MAGIC) or len(head) < _HEAD.size:
        if number == 0 and not head.startswith(MAGIC):
            raise DecodeError("this is not a stream of quire's documents.")
        raise DecodeError(
            f"{_describe_place(number, position)} is missing or its head is damaged: the data ends or was altered."
        )
    _, kind, crc, length, count, checksum = _HEAD.unpack(head)
    if zlib.crc32(head[:-4]) != checksum or kind not in (HEADER, BATCH, ROWS, PICKLE, INDEX):
        raise DecodeError(f"{_describe_place(number, position)}: the head is damaged.")
    return kind, crc, length, count


def _verify(segment: Segment, crc: int) -> None:
    if crc and zlib.crc32(segment.payload) != crc:
        raise DecodeError(f"{segment.where}: the checksum is wrong: the data was altered.")


# --- the index


@dataclass(frozen=True)
class Index:
    """The positions of the blocks of a file, and the number of documents in each.

    Positions are relative to `base`, the position of the stream in the file; the index itself starts at `end`.
    """

    base: int
    offsets: list[int]
    counts: list[int]
    end: int
    compression: Compression | None

    def pieces(self, source: IO[bytes], blocks: Iterable[int] | None = None) -> Iterator[tuple[int, int, bytes]]:
        """Yield the header and the blocks, all or some, as they are in the file: number, position and bytes."""
        bounds = [0, *self.offsets, self.end]
        for number in range(len(bounds) - 1) if blocks is None else (0, *(block + 1 for block in blocks)):
            start, end = bounds[number], bounds[number + 1]
            source.seek(self.base + start)
            yield number, start, source.read(end - start)


def read_index(source: IO[bytes], options: DecodeOptions) -> Index | None:
    """Read the index of a seekable file; None if it has none or its end is damaged."""
    if not (hasattr(source, "seekable") and source.seekable()):
        return None
    base = source.tell()
    try:
        return _read_index(source, base, options)
    except DecodeError:
        return None
    finally:
        source.seek(base)


def _read_index(source: IO[bytes], base: int, options: DecodeOptions) -> Index | None:
    compression = compression_of(source.read(8))
    size = source.seek(0, io.SEEK_END) - base
    source.seek(base + max(0, size - _TAIL_ROOM))
    position = _index_position(source.read(_TAIL_ROOM), compression)
    if position is None or position >= size:
        return None
    source.seek(base + position)
    stream: _Source = source if compression is None else Decompressor(source, compression, options.max_ratio)
    segment = _read_segment(stream, options, 0, position)
    if segment.kind != INDEX:
        return None
    data = bytes(segment.payload)
    lists: dict[int, list[int]] = {IndexField.OFFSETS: [], IndexField.COUNTS: []}
    for number, wire_type, a, b in iter_fields(data, 0, len(data)):
        if number in lists:
            lists[number] += read_uints(data, wire_type, a, b)
    offsets, counts = lists.values()
    # An index is as untrusted as the blocks: positions must rise, so that each block has a length above zero.
    rising = all(a < b for a, b in pairwise([0, *offsets, position]))
    if not rising or len(offsets) != len(counts) or sum(counts) >= MAX_ROWS:
        return None
    return Index(base, offsets, counts, position, compression)


def _index_position(end: bytes, compression: Compression | None) -> int | None:
    """Return the position of the index by the last bytes of a file; None if they are no tail.

    A compressed tail starts with the magic number of the compression. As these bytes may also occur by chance, every
    occurrence is tried, the last one first.
    """
    if compression is None:
        return _parse_tail(end)
    start = end.rfind(compression.magic)
    while start >= 0:
        with suppress(DecodeError):
            position = _parse_tail(decompress(end[start:], compression, _TAIL_ROOM, 1.0))
            if position is not None:
                return position
        start = end.rfind(compression.magic, 0, start)
    return None


def _parse_tail(end: bytes) -> int | None:
    magic, position = _TAIL.unpack(end[-_TAIL.size :]) if len(end) >= _TAIL.size else (b"", 0)
    return position if magic == _TAIL_MAGIC else None


def _decode_piece(piece: tuple[int, int, bytes], index: Index, options: DecodeOptions) -> Segment:
    """Return the segment of a piece of a file; see `Index.pieces`."""
    number, position, data = piece
    compression = index.compression
    try:
        if compression is None:
            return _read_segment(io.BytesIO(data), options, number, position)
        content = memoryview(decompress(data, compression, options.max_bytes, options.max_ratio))
        return _segment_in_memory(content, number, position, verify=not compression.checks)
    except DecodeError as error:
        if str(error).startswith("block "):
            raise
        raise DecodeError(f"{_describe_place(number, position)}: {error}") from error


# --- reading some of the documents

RowSelection = slice | Sequence[int]
"""The documents of a file to read: a slice, or positions."""


def select_blocks(
    source: IO[bytes], rows: RowSelection, options: DecodeOptions
) -> tuple[str, Iterator[tuple[Segment, Sequence[int]]]]:
    """Return the class name of a file's documents, and the blocks that contain some of them.

    Each block comes with the positions to take from it, in their order.
    """
    index = read_index(source, options)
    if index is None:
        raise DecodeError(
            "rows=... needs the index at the end of a file: the file is not seekable, or its end is damaged."
        )
    starts = [0, *accumulate(index.counts)]
    total, selected = starts[-1], rows
    if isinstance(rows, slice):
        selected = range(total)[rows]
    else:
        positions = np.array(rows, np.int64).reshape(-1)
        wrong = positions[(positions < -total) | (positions >= total)]
        if len(wrong):
            raise RowIndexError(f"the file has {total} documents; there is none at {wrong[0]}.")
        selected = np.where(positions < 0, positions + total, positions).tolist()
    runs = list(_split_by_block(selected, starts))
    segments = read_blocks(source, index, [block for block, _ in runs], options)

    def check_counts() -> Iterator[tuple[Segment, Sequence[int]]]:
        for segment, (block, positions) in zip(segments, runs, strict=True):
            # Positions were assigned to blocks by the index. If a block differs from it, they are other documents.
            if segment.count != index.counts[block]:
                count = index.counts[block]
                raise DecodeError(f"{segment.where} has {segment.count} documents, but {count} in the index.")
            yield segment, positions

    return Header(next(segments)).type_name, check_counts()


def read_blocks(source: IO[bytes], index: Index, blocks: list[int], options: DecodeOptions) -> Iterator[Segment]:
    """Yield the header and some of the blocks of a file, by number."""
    pieces = index.pieces(source, blocks)
    yield from ordered_map(lambda piece: _decode_piece(piece, index, options), pieces, cpu_count())


def _split_by_block(selected: Sequence[int], starts: list[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each block, with the consecutive positions that are in it, counted from its first document.

    The counts of an index are untrusted until the block is read, so the positions of a slice stay a range, and no list
    of them is created. For a range, the number of positions in a block follows from the distance to its end (or, for a
    negative step, to its start) and the step.
    """
    at = 0
    while at < len(selected):
        block = bisect_right(starts, selected[at]) - 1
        first, last = starts[block], starts[block + 1]
        if isinstance(selected, range):
            distance = last - 1 - selected[at] if selected.step > 0 else selected[at] - first
            length = distance // abs(selected.step) + 1
            part = selected[at : at + length]
            yield block, range(part.start - first, part.stop - first, part.step)
        else:
            length = 1
            while at + length < len(selected) and first <= selected[at + length] < last:
                length += 1
            yield block, [row - first for row in selected[at : at + length]]
        at += length
