"""Streams of blocks: what `DocumentArray.to_bytes` gives and what files hold.

    header segment | block segment ... | index segment | tail

A segment is a head of 64 bytes (magic, kind, checksum, length, number of documents), its payload, and zeros up to a
multiple of 64. In a packed stream each segment and the tail is packed alone: the whole is still what the usual tools
unpack, and with the index, which the tail points to, blocks are unpacked alone and side by side.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any

from quire.codec._compression import Compression, Unpacked, compression_of, read_whole, unpack
from quire.codec._context import ReadOptions
from quire.codec._wire import DELIMITED, VARINT, fields, packed, read_text, read_uints, text
from quire.errors import DecodeError
from quire.parallel import cpu_count, ordered_map

MAGIC = b"\x93QUIRE\r\n"
HEADER, BATCH, ROWS, PICKLE, INDEX = b"H", b"B", b"A", b"P", b"E"
"""The kinds of segments; documents come as a batch, row by row, or pickled."""
_HEAD = struct.Struct("<8scxxxIQQ28xI")
"""Magic, kind, checksum of the payload (0: none), its length, the number of documents, checksum of the head."""
_TAIL = struct.Struct("<8sQ")
_TAIL_MAGIC = b"\x93QUIREEN"
_TAIL_ROOM = 256
_PIECE = 1 << 20
_CUT = " The data was cut off; load_binary(..., streaming=True) gives what is whole before it."


@dataclass(frozen=True)
class Segment:
    """One segment: its kind, its number of documents, its payload, and where it lies."""

    kind: bytes
    count: int
    payload: Any
    number: int
    offset: int

    @property
    def where(self) -> str:
        """Its place, as a message tells it."""
        return f"block {self.number} (byte {self.offset})"


# --- out


def pack_segment(kind: bytes, count: int, parts: list[Any], *, checksum: bool = True) -> list[Any]:
    """A segment as the parts that make it up."""
    length = sum(part.nbytes if hasattr(part, "nbytes") else len(part) for part in parts)
    crc = 0
    for part in parts if checksum else ():
        crc = zlib.crc32(part, crc)
    fixed = _HEAD.pack(MAGIC, kind, crc, length, count, 0)[:-4]
    return [fixed, zlib.crc32(fixed).to_bytes(4, "little"), *parts, bytes(-length % 64)]


Block = tuple[bytes, int, list[Any]]
"""The kind of a block, the number of its documents, and the parts that make it up."""


def stream_parts(
    type_name: str,
    schema: str,
    blocks: Iterable[Block | Callable[[], Block]],
    compression: Compression | None,
    *,
    checksums: bool,
    workers: int | None = None,
) -> Iterator[list[Any]]:
    """A stream, segment by segment, each as the parts that make it up; packed ones are packed on several cores.

    Blocks that are yet to be made are made there, too.
    """
    header = b"\x08\x01" + text(2, type_name) + text(3, schema)
    position = 0
    offsets: list[int] = []
    counts: list[int] = []

    def pack(block: Block | Callable[[], Block]) -> tuple[int, list[Any]]:
        kind, count, parts = block() if callable(block) else block
        return count, _packed(pack_segment(kind, count, parts, checksum=checksums), compression)

    threads = workers or (cpu_count() if compression or checksums else 1)
    for count, segment in ordered_map(pack, _with_header(header, blocks), threads, prompt=workers is not None):
        offsets.append(position)
        counts.append(count)
        position += sum(part.nbytes if hasattr(part, "nbytes") else len(part) for part in segment)
        yield segment
    index = packed(1, offsets[1:]) + packed(2, counts[1:])
    yield _packed(pack_segment(INDEX, sum(counts), [index]), compression)
    yield _packed([_TAIL.pack(_TAIL_MAGIC, position)], compression)


def _with_header(header: bytes, blocks: Iterable[Block | Callable[[], Block]]) -> Iterator[Block | Callable[[], Block]]:
    yield HEADER, 0, [header]
    yield from blocks


def _packed(parts: list[Any], compression: Compression | None) -> list[Any]:
    return parts if compression is None else [compression.pack(b"".join(parts))]


# --- in


class Header:
    """What the first segment of a stream tells."""

    __slots__ = ("type_name",)

    def __init__(self, segment: Segment) -> None:
        self.type_name = ""
        if segment.kind != HEADER:
            raise DecodeError("the stream has no header.")
        data = bytes(segment.payload)
        version = 0
        for number, kind, a, b in fields(data, 0, len(data)):
            if number == 1 and kind == VARINT:
                version = a
            elif number == 2 and kind == DELIMITED:
                self.type_name = read_text(data, a, b)
        if version > 1:
            raise DecodeError(
                f"the stream has version {version} of the format, this quire reads up to 1: update quire."
            )


def is_stream(start: bytes) -> bool:
    """Whether the first bytes are those of a stream that is not packed."""
    return start.startswith(MAGIC)


def read_memory(data: Any, options: ReadOptions) -> Iterator[Segment]:
    """The segments of a stream in memory, as views of it."""
    view = memoryview(data).cast("B")
    compression = compression_of(bytes(view[:8]))
    if compression is not None:
        yield from read_file(io.BytesIO(view), options)
        return
    position = number = 0
    while True:
        head = bytes(view[position : position + _HEAD.size])
        kind, crc, length, count = _head(head, number, position)
        start = position + _HEAD.size
        if start + length > len(view):
            raise DecodeError(
                f"block {number} (byte {position}) ends {start + length - len(view)} bytes too early.{_CUT}"
            )
        segment = Segment(kind, count, view[start : start + length], number, position)
        _check(segment, crc)
        yield segment
        if kind == INDEX:
            return
        position, number = start + length + -length % 64, number + 1


def read_file(source: IO[bytes], options: ReadOptions) -> Iterator[Segment]:
    """The segments of a file; with an index, packed ones are unpacked on several cores.

    Memory is bounded by the largest segments. A damaged one is an error that names it, after all those before it.
    """
    index = read_index(source, options) if cpu_count() > 1 else None
    if index is None or index.compression is None:
        yield from _read_in_order(source, options)
        return
    yield from ordered_map(lambda piece: _unpack_segment(piece, index, options), index.pieces(source), cpu_count())


def _read_in_order(source: IO[bytes], options: ReadOptions) -> Iterator[Segment]:
    start = read_whole(source, 8)
    compression = compression_of(start)
    stream: Any = _Rejoined(start, source)
    if compression is not None:
        stream = Unpacked(stream, compression, options.max_ratio)
    position = number = 0
    while True:
        segment = _next_segment(stream, options, number, position)
        yield segment
        if segment.kind == INDEX:
            return
        length = len(segment.payload)
        position, number = position + _HEAD.size + length + -length % 64, number + 1


def _next_segment(stream: Any, options: ReadOptions, number: int, position: int) -> Segment:
    kind, crc, length, count = _head(_read(stream, _HEAD.size, number, position), number, position)
    _check_length(length, number, position, options)
    payload = _read(stream, length, number, position)
    _read(stream, -length % 64, number, position)
    segment = Segment(kind, count, memoryview(payload), number, position)
    _check(segment, crc)
    return segment


class _Rejoined:
    """A stream with the bytes that were looked at put before it again."""

    def __init__(self, start: bytes, source: IO[bytes]) -> None:
        self._start, self._source = start, source

    def read(self, size: int = -1) -> bytes:
        if not self._start:
            return self._source.read(size)
        start = self._start if size < 0 else self._start[:size]
        self._start = self._start[len(start) :]
        return start


def _head(head: bytes, number: int, position: int) -> tuple[bytes, int, int, int]:
    if not head.startswith(MAGIC) or len(head) < _HEAD.size:
        if number == 0 and not head.startswith(MAGIC):
            raise DecodeError("this is not a stream of quire's documents.")
        raise DecodeError(
            f"block {number} (byte {position}) is not there or its head is damaged: the data ends or was altered."
        )
    _, kind, crc, length, count, checksum = _HEAD.unpack(head)
    if zlib.crc32(head[:-4]) != checksum or kind not in (HEADER, BATCH, ROWS, PICKLE, INDEX):
        raise DecodeError(f"block {number} (byte {position}): the head is damaged.")
    return kind, crc, length, count


def _check(segment: Segment, crc: int) -> None:
    if crc and zlib.crc32(segment.payload) != crc:
        raise DecodeError(f"{segment.where}: the checksum is wrong: the data was altered.")


def _check_length(length: int, number: int, position: int, options: ReadOptions) -> None:
    if length > options.max_bytes:
        raise DecodeError(
            f"block {number} (byte {position}) has {length} bytes, more than max_bytes={options.max_bytes}. "
            "Raise it if you trust the source."
        )


def _read(stream: Any, size: int, number: int, position: int) -> bytes:
    """So many bytes, read in pieces, so that a false length costs no memory."""
    parts, missing = [], size
    while missing:
        try:
            part = stream.read(min(missing, _PIECE))
        except DecodeError as error:
            raise DecodeError(f"block {number} (byte {position}): {error}") from error
        if not part:
            raise DecodeError(f"block {number} (byte {position}) ends {missing} bytes too early.{_CUT}")
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


# --- the index


@dataclass(frozen=True)
class Index:
    """Where the blocks of a file lie, and how many documents are in each."""

    base: int
    offsets: list[int]
    counts: list[int]
    end: int
    compression: Compression | None

    def pieces(self, source: IO[bytes], blocks: Iterable[int] | None = None) -> Iterator[tuple[int, int, bytes]]:
        """The header and the blocks as they lie in the file: number, position and bytes of each."""
        bounds = [0, *self.offsets, self.end]
        for number in range(len(bounds) - 1) if blocks is None else (0, *(block + 1 for block in blocks)):
            start, end = bounds[number], bounds[number + 1]
            source.seek(self.base + start)
            yield number, start, source.read(end - start)


def read_index(source: IO[bytes], options: ReadOptions) -> Index | None:
    """The index of a file that can be sought in; None where it has none, and where its end is damaged."""
    if not (hasattr(source, "seekable") and source.seekable()):
        return None
    base = source.tell()
    try:
        return _read_index(source, base, options)
    except DecodeError:
        return None
    finally:
        source.seek(base)


def _read_index(source: IO[bytes], base: int, options: ReadOptions) -> Index | None:
    compression = compression_of(source.read(8))
    size = source.seek(0, io.SEEK_END) - base
    source.seek(base + max(0, size - _TAIL_ROOM))
    position = _tail_position(source.read(_TAIL_ROOM), compression)
    if position is None or position >= size:
        return None
    source.seek(base + position)
    segment = _read_segment(source, compression, options, 0, position)
    if segment.kind != INDEX:
        return None
    data = bytes(segment.payload)
    found: dict[int, list[int]] = {1: [], 2: []}
    for number, kind, a, b in fields(data, 0, len(data)):
        if number in found:
            found[number] += read_uints(data, kind, a, b)
    offsets, counts = found.values()
    rising = all(a < b for a, b in pairwise([0, *offsets, position]))
    return Index(base, offsets, counts, position, compression) if rising and len(offsets) == len(counts) else None


def _tail_position(end: bytes, compression: Compression | None) -> int | None:
    """Where the index begins, as the last packed piece of a file tells it."""
    if compression is None:
        return _tail(end)
    start = end.rfind(compression.magic)
    while start >= 0:
        with suppress(DecodeError):
            position = _tail(unpack(end[start:], compression, _TAIL_ROOM, 1.0))
            if position is not None:
                return position
        start = end.rfind(compression.magic, 0, start)
    return None


def _tail(end: bytes) -> int | None:
    magic, position = _TAIL.unpack(end[-_TAIL.size :]) if len(end) >= _TAIL.size else (b"", 0)
    return position if magic == _TAIL_MAGIC else None


def _unpack_segment(piece: tuple[int, int, bytes], index: Index, options: ReadOptions) -> Segment:
    number, position, data = piece
    compression = index.compression
    try:
        if compression is None:
            return _next_segment(io.BytesIO(data), options, number, position)
        unpacked = memoryview(unpack(data, compression, options.max_bytes, options.max_ratio))
        return _whole_segment(unpacked, number, position, checked=compression.checks)
    except DecodeError as error:
        if str(error).startswith("block "):
            raise
        raise DecodeError(f"block {number} (byte {position}): {error}") from error


def _whole_segment(data: memoryview, number: int, position: int, *, checked: bool) -> Segment:
    """A segment that lies in memory; its checksum is looked at unless the bytes are known to be right."""
    kind, crc, length, count = _head(bytes(data[: _HEAD.size]), number, position)
    payload = data[_HEAD.size : _HEAD.size + length]
    if len(payload) < length:
        raise DecodeError(f"block {number} (byte {position}) ends {length - len(payload)} bytes too early.{_CUT}")
    segment = Segment(kind, count, payload, number, position)
    if not checked:
        _check(segment, crc)
    return segment


def _read_segment(
    source: IO[bytes], compression: Compression | None, options: ReadOptions, number: int, position: int
) -> Segment:
    """The next segment of a stream, of which no more is read than it says to have."""
    stream: Any = source if compression is None else Unpacked(source, compression, options.max_ratio)
    return _next_segment(stream, options, number, position)


def read_blocks(source: IO[bytes], index: Index, blocks: list[int], options: ReadOptions) -> Iterator[Segment]:
    """The header and some of the blocks of a file, by number."""
    pieces = index.pieces(source, blocks)
    yield from ordered_map(lambda piece: _unpack_segment(piece, index, options), pieces, cpu_count())
