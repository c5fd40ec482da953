"""The stream of blocks: its version, its index, and what is read when either is damaged."""

from __future__ import annotations

import io
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.codec import _blocks
from quire.codec._blocks import (
    BATCH,
    HEADER,
    INDEX,
    PICKLE,
    ROWS,
    Header,
    Index,
    Segment,
    encode_stream,
    pack_segment,
    read_blocks,
    read_file,
    read_index,
    read_memory,
)
from quire.codec._bytes import approximate_size
from quire.codec._compression import COMPRESSIONS, Compression, get_compression
from quire.codec._context import DecodeOptions
from quire.codec._wire import encode_delimited, encode_packed, encode_text, encode_uint
from quire.errors import DecodeError
from tests.codec.hostile import repair_checksums


class Line(BaseDocument):
    number: int


def lines(count: int = 5) -> DocumentArray[Line]:
    return DocumentArray[Line](Line(number=number) for number in range(count))


def with_version(version: int) -> bytes:
    """A stream whose header states another version, with right checksums."""
    data = bytearray(lines().to_bytes())
    assert data[64:66] == b"\x08\x01"
    data[65] = version
    return repair_checksums(bytes(data))


def test_later_versions_of_streams_are_rejected() -> None:
    for version in (0, 1):
        assert DocumentArray[Line].from_bytes(with_version(version)).number == list(range(5))
    for version in (2, 3, 100):
        with pytest.raises(DecodeError, match=rf"version {version} of the format, this quire reads up to 1"):
            DocumentArray[Line].from_bytes(with_version(version))
        with pytest.raises(DecodeError, match=rf"version {version} of the format"):
            list(DocumentArray[Line].load_binary(io.BytesIO(with_version(version)), streaming=True))


def test_index_has_the_offset_of_every_block() -> None:
    data = lines(7).to_bytes()
    index = read_index(io.BytesIO(data), DecodeOptions())
    assert index is not None
    assert sum(index.counts) == 7
    assert index.offsets == sorted(index.offsets)
    assert all(data[offset : offset + 8] == data[:8] for offset in (*index.offsets, index.end))
    pieces = list(index.pieces(io.BytesIO(data)))
    assert [number for number, _, _ in pieces] == list(range(len(index.offsets) + 1))
    assert b"".join(piece for _, _, piece in pieces) == data[: index.end]


def test_index_is_found_after_other_data_and_the_file_keeps_its_position() -> None:
    file = io.BytesIO(b"before" + lines().to_bytes())
    file.seek(6)
    index = read_index(file, DecodeOptions())
    assert index is not None
    assert index.base == 6
    assert file.tell() == 6


@pytest.mark.parametrize("cut", [1, 8, 16, 17, 64, 100])
def test_truncated_stream_has_no_index_and_yields_complete_blocks(cut: int) -> None:
    data = lines().to_bytes()[:-cut]
    file = io.BytesIO(data)
    assert read_index(file, DecodeOptions()) is None
    assert file.tell() == 0
    stream = DocumentArray[Line].load_binary(file, streaming=True)
    assert [next(stream).number for _ in range(5)] == list(range(5))


def test_every_flipped_bit_of_a_head_is_detected() -> None:
    data = lines().to_bytes()
    for position in range(64):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(DecodeError):
            DocumentArray[Line].from_bytes(bytes(damaged))


# --- segments as they are written

HEAD = struct.Struct("<8scxxxIQQ28xI")
MAGIC = b"\x93QUIRE\r\n"
OPTIONS = DecodeOptions()
GZIP = COMPRESSIONS["gzip"]
BLOCKS = [(BATCH, 3, [b"x" * 64]), (ROWS, 0, [b"", b"y" * 65]), (PICKLE, 2, [np.zeros((5, 20), np.int16), b"z"])]
COMPRESSED = [None, "gzip", "bz2", "lzma", pytest.param("zstd", marks=pytest.mark.needs("zstandard"))]


def stream(compress: str | None = None, *, checksums: bool = True) -> bytes:
    """A stream of a header and three blocks."""
    parts = encode_stream("a:B", "{}", BLOCKS, get_compression(compress), checksums=checksums)
    return b"".join(part for segment in parts for part in segment)


def described(segments: Any) -> list[tuple[bytes, int, bytes]]:
    """The kinds, counts and payloads of the blocks, without header and index."""
    inner = [segment for segment in segments if segment.kind not in (HEADER, INDEX)]
    return [(segment.kind, segment.count, bytes(segment.payload)) for segment in inner]


EXPECTED = [(BATCH, 3, b"x" * 64), (ROWS, 0, b"y" * 65), (PICKLE, 2, bytes(200) + b"z")]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200])
def test_segment_has_a_head_a_payload_and_padding_to_64_bytes(length: int) -> None:
    payload = bytes(range(length))
    data = b"".join(pack_segment(BATCH, 7, [payload[:5], payload[5:]]))
    magic, kind, crc, size, count, checksum = HEAD.unpack(data[:64])
    assert (magic, kind, size, count) == (MAGIC, BATCH, length, 7)
    assert crc == zlib.crc32(payload)
    assert checksum == zlib.crc32(data[:60])
    assert data[64:] == payload + bytes(-length % 64)
    assert len(data) % 64 == 0


def test_segment_length_counts_the_bytes_of_arrays() -> None:
    array = np.arange(10, dtype=np.int32).reshape(2, 5)
    data = b"".join(pack_segment(BATCH, 1, [array, b"abc"]))
    assert HEAD.unpack(data[:64])[3] == 43
    assert data[64:107] == array.tobytes() + b"abc"


def test_segment_without_a_checksum_has_0_in_its_place() -> None:
    data = b"".join(pack_segment(BATCH, 1, [b"abc"], checksum=False))
    assert HEAD.unpack(data[:64])[2] == 0
    assert HEAD.unpack(data[:64])[5] == zlib.crc32(data[:60])


def test_stream_has_a_header_blocks_an_index_and_a_tail() -> None:
    segments = [b"".join(parts) for parts in encode_stream("a:B", "{}", BLOCKS, None, checksums=True)]
    kinds = [segment[8:9] for segment in segments[:-1]]
    assert kinds == [HEADER, BATCH, ROWS, PICKLE, INDEX]
    counts = [HEAD.unpack(segment[:64])[4] for segment in segments[:-1]]
    assert counts == [0, 3, 0, 2, 5]
    assert segments[0][64:].rstrip(b"\0") == b"\x08\x01" + encode_text(2, "a:B") + encode_text(3, "{}")
    starts = [sum(map(len, segments[:number])) for number in range(5)]
    assert segments[4][64:].rstrip(b"\0") == encode_packed(1, starts[1:4]) + encode_packed(2, [3, 0, 2])
    assert segments[5] == b"\x93QUIREEN" + starts[4].to_bytes(8, "little")
    assert all(HEAD.unpack(segment[:64])[2] for segment in segments[:-1])


def test_index_has_a_checksum_in_a_stream_without_checksums() -> None:
    segments = [b"".join(parts) for parts in encode_stream("a:B", "{}", BLOCKS, None, checksums=False)]
    assert [HEAD.unpack(segment[:64])[2] != 0 for segment in segments[:-1]] == [False, False, False, False, True]


@pytest.mark.parametrize("compress", COMPRESSED[1:])
def test_segments_are_compressed_separately(compress: str) -> None:
    compression = COMPRESSIONS[compress]
    plain = [b"".join(parts) for parts in encode_stream("a:B", "{}", BLOCKS, None, checksums=True)]
    segments = [b"".join(parts) for parts in encode_stream("a:B", "{}", BLOCKS, compression, checksums=True)]
    opened = [bytes(compression.open(io.BytesIO(segment)).read(1 << 20)) for segment in segments]
    assert opened[:4] == plain[:4]
    index = read_index(io.BytesIO(b"".join(segments)), OPTIONS)
    assert index is not None
    assert index.offsets == [sum(map(len, segments[:number])) for number in range(1, 4)]
    assert index.end == sum(map(len, segments[:4]))
    assert index.counts == [3, 0, 2]
    assert index.compression is compression


@pytest.mark.parametrize(
    ("compress", "checksums", "workers", "elsewhere"),
    [
        (None, False, None, False),
        (None, True, None, True),
        ("gzip", False, None, True),
        ("gzip", True, 1, False),
        (None, False, 2, True),
    ],
)
def test_blocks_are_encoded_in_threads_if_there_is_work_for_them(
    monkeypatch: pytest.MonkeyPatch, compress: str | None, checksums: bool, workers: int | None, elsewhere: bool
) -> None:
    monkeypatch.setattr(_blocks, "cpu_count", lambda: 2)
    threads = []

    def make() -> tuple[bytes, int, list[Any]]:
        threads.append(threading.get_ident())
        return BATCH, 1, [b"x"]

    parts = encode_stream("a:B", "{}", [make, make], get_compression(compress), checksums=checksums, workers=workers)
    data = b"".join(part for segment in parts for part in segment)
    assert described(read_memory(data, OPTIONS)) == [(BATCH, 1, b"x")] * 2
    assert [thread != threading.get_ident() for thread in threads] == [elsewhere] * 2


@pytest.mark.parametrize("workers", [None, 2])
def test_block_is_written_before_the_next_one_is_taken_with_workers(
    monkeypatch: pytest.MonkeyPatch, workers: int | None
) -> None:
    monkeypatch.setattr(_blocks, "cpu_count", lambda: 2)
    asked: list[tuple[int, bool]] = []

    def record(function: Callable[[Any], Any], items: Any, threads: int, *, prompt: bool = False) -> Iterator[Any]:
        asked.append((threads, prompt))
        return map(function, items)

    monkeypatch.setattr(_blocks, "ordered_map", record)
    list(encode_stream("a:B", "{}", BLOCKS, None, checksums=True, workers=workers))
    assert asked == [(2, workers is not None)]


# --- segments as they are read


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("compress", COMPRESSED)
def test_memory_and_files_yield_the_same_blocks(
    monkeypatch: pytest.MonkeyPatch, compress: str | None, cores: int
) -> None:
    monkeypatch.setattr(_blocks, "cpu_count", lambda: cores)
    data = stream(compress)
    assert described(read_memory(data, OPTIONS)) == EXPECTED
    assert described(read_file(io.BytesIO(data), OPTIONS)) == EXPECTED
    behind = io.BytesIO(b"before" + data)
    behind.seek(6)
    assert described(read_file(behind, OPTIONS)) == EXPECTED
    assert described(read_memory(bytearray(data), OPTIONS)) == EXPECTED


@pytest.mark.parametrize("compress", COMPRESSED)
@pytest.mark.parametrize("step", [1, 5, 1_000])
def test_pipes_with_short_reads_are_read(compress: str | None, step: int) -> None:
    class Pipe:
        def __init__(self, data: bytes) -> None:
            self._rest = io.BytesIO(data)

        def read(self, size: int = -1) -> bytes:
            return self._rest.read(step if size < 0 else min(size, step))

    assert described(read_file(Pipe(stream(compress)), OPTIONS)) == EXPECTED  # type: ignore[arg-type]


@pytest.mark.parametrize("read", [read_memory, lambda data, options: read_file(io.BytesIO(data), options)])
def test_segments_have_their_number_and_offset(read: Callable[..., Iterator[Segment]]) -> None:
    segments = list(read(stream(), OPTIONS))
    assert [segment.number for segment in segments] == [0, 1, 2, 3, 4]
    assert [segment.offset for segment in segments] == [0, 128, 256, 448, 768]
    assert [segment.where for segment in segments[:2]] == ["block 0 (byte 0)", "block 1 (byte 128)"]
    assert [segment.count for segment in segments] == [0, 3, 0, 2, 5]


def test_data_after_the_index_is_not_read() -> None:
    data = stream()
    assert described(read_memory(data[:-16], OPTIONS)) == EXPECTED
    assert described(read_memory(data + b"more", OPTIONS)) == EXPECTED
    assert described(read_file(io.BytesIO(data + b"more"), OPTIONS)) == EXPECTED


def test_segments_in_memory_are_views() -> None:
    data = bytearray(stream())
    segment = list(read_memory(data, OPTIONS))[1]
    data[128 + 64] = ord("!")
    assert bytes(segment.payload) == b"!" + b"x" * 63


@pytest.mark.parametrize("read", [read_memory, lambda data, options: read_file(io.BytesIO(data), options)])
@pytest.mark.parametrize("missing", [1, 2, 7])
def test_truncated_payload_raises_an_error_with_the_missing_bytes(
    read: Callable[..., Iterator[Segment]], missing: int
) -> None:
    one = b"".join(pack_segment(HEADER, 0, [b"\x08\x01"]))
    data = one + b"".join(pack_segment(BATCH, 1, [b"x" * 64]))[: 128 - missing]
    segments = read(data, OPTIONS)
    assert next(segments).kind == HEADER
    with pytest.raises(
        DecodeError, match=rf"block 1 \(byte 128\) ends {missing} bytes too early. The data was cut off"
    ):
        next(segments)


def test_truncated_padding_raises_an_error() -> None:
    one = b"".join(pack_segment(INDEX, 0, [b"x" * 60]))
    assert len(list(read_memory(one[:-4], OPTIONS))) == 1
    assert len(list(read_file(io.BytesIO(one), OPTIONS))) == 1
    with pytest.raises(DecodeError, match=r"block 0 \(byte 0\) ends 4 bytes too early"):
        list(read_file(io.BytesIO(one[:-4]), OPTIONS))


@pytest.mark.parametrize("read", [read_memory, lambda data, options: read_file(io.BytesIO(data), options)])
def test_damaged_heads_are_rejected(read: Callable[..., Iterator[Segment]]) -> None:
    data = stream()
    for foreign in (b"something else" * 20, b"short"):
        with pytest.raises(DecodeError, match="this is not a stream of quire's documents|ends .* bytes too early"):
            list(read(foreign, OPTIONS))
    with pytest.raises(DecodeError, match=r"block 0 \(byte 0\)"):
        list(read(data[:63], OPTIONS))
    damaged = bytearray(data)
    damaged[128] ^= 1
    with pytest.raises(DecodeError, match=r"block 1 \(byte 128\) is missing or its head is damaged"):
        list(read(bytes(damaged), OPTIONS))
    unknown = b"".join(pack_segment(b"Z", 0, [b""]))
    with pytest.raises(DecodeError, match=r"block 0 \(byte 0\): the head is damaged"):
        list(read(unknown, OPTIONS))


def test_errors_distinguish_truncated_streams_from_other_data() -> None:
    with pytest.raises(DecodeError, match="this is not a stream"):
        next(read_memory(b"x" * 64, OPTIONS))
    with pytest.raises(DecodeError, match="this is not a stream"):
        next(read_memory(b"", OPTIONS))
    with pytest.raises(DecodeError, match=r"block 0 \(byte 0\) is missing or its head is damaged"):
        next(read_memory(stream()[:63], OPTIONS))
    segments = read_memory(stream()[:128], OPTIONS)
    next(segments)
    with pytest.raises(DecodeError, match=r"block 1 \(byte 128\) is missing"):
        next(segments)


@pytest.mark.parametrize("read", [read_memory, lambda data, options: read_file(io.BytesIO(data), options)])
def test_payloads_are_verified_if_they_have_a_checksum(read: Callable[..., Iterator[Segment]]) -> None:
    for checksums in (True, False):
        data = bytearray(stream(checksums=checksums))
        data[192] ^= 1
        if checksums:
            with pytest.raises(DecodeError, match=r"block 1 \(byte 128\): the checksum is wrong"):
                list(read(bytes(data), OPTIONS))
        else:
            assert described(read(bytes(data), OPTIONS))[0] == (BATCH, 3, b"y" + b"x" * 63)


def test_segment_may_have_at_most_max_bytes() -> None:
    data = stream()
    assert described(read_file(io.BytesIO(data), DecodeOptions(max_bytes=201))) == EXPECTED
    message = r"block 3 \(byte 448\) has 201 bytes, more than max_bytes=200. Raise it"
    with pytest.raises(DecodeError, match=message):
        list(read_file(io.BytesIO(data), DecodeOptions(max_bytes=200)))


def test_wrong_length_allocates_no_memory() -> None:
    class Source(io.BytesIO):
        largest = 0

        def read(self, size: int | None = -1, /) -> bytes:
            self.largest = max(self.largest, size or 0)
            return super().read(size)

        def seekable(self) -> bool:
            return False

    head = bytearray(b"".join(pack_segment(BATCH, 1, [b""])))
    head[16:24] = (1 << 29).to_bytes(8, "little")
    head[60:64] = zlib.crc32(head[:60]).to_bytes(4, "little")
    source = Source(bytes(head) + bytes((1 << 20) + 10))
    missing = (1 << 29) - (1 << 20) - 10
    with pytest.raises(DecodeError, match=rf"block 0 \(byte 0\) ends {missing} bytes too early"):
        list(read_file(source, OPTIONS))
    assert source.largest == 1 << 20


def test_large_payloads_are_joined_from_pieces() -> None:
    payload = bytes(range(256)) * (1 << 13) + b"end"
    data = b"".join(pack_segment(INDEX, 0, [payload]))
    [segment] = read_file(io.BytesIO(data), OPTIONS)
    assert bytes(segment.payload) == payload


def test_errors_of_compressed_data_name_the_block() -> None:
    data = stream("gzip")
    with pytest.raises(DecodeError, match=r"^block \d \(byte \d+\): the gzip data is damaged"):
        list(read_memory(data[:-60], OPTIONS))


def test_rejoined_source_returns_the_first_bytes_again() -> None:
    for size in (1, 3, 8, 100):
        rejoined = _blocks._Rejoined(b"01234567", io.BytesIO(b"89"))
        assert rejoined.read(0) == b""
        parts = []
        while part := rejoined.read(size):
            assert len(part) <= size
            parts.append(part)
        assert b"".join(parts) == b"0123456789"
    rejoined = _blocks._Rejoined(b"01", io.BytesIO(b"23"))
    assert rejoined.read() + rejoined.read() == b"0123"
    assert _blocks._Rejoined(b"", io.BytesIO(b"23")).read() == b"23"


# --- headers


def header(data: bytes, kind: bytes = HEADER) -> Header:
    return Header(Segment(kind, 0, memoryview(data), 0, 0))


def test_header_has_the_class_name() -> None:
    assert header(encode_uint(1, 1) + encode_text(2, "a:B") + encode_text(3, "{}")).type_name == "a:B"
    assert header(encode_uint(1, 1)).type_name == ""
    assert header(b"").type_name == ""


def test_header_ignores_fields_of_later_versions() -> None:
    later = encode_uint(9, 77) + encode_delimited(8, b"text") + encode_delimited(1, b"\x05") + encode_uint(2, 5)
    assert header(encode_uint(1, 1) + encode_text(2, "a:B") + later).type_name == "a:B"


def test_other_segments_are_rejected_as_header() -> None:
    with pytest.raises(DecodeError, match="the stream has no header"):
        header(encode_uint(1, 1), BATCH)


# --- the index


class Seeks(io.BytesIO):
    """A file that counts how often it is sought in."""

    count = 0

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self.count += 1
        return super().seek(offset, whence)


@pytest.mark.parametrize(("cores", "sought"), [(1, False), (2, True)])
def test_index_is_read_only_with_several_cores(monkeypatch: pytest.MonkeyPatch, cores: int, sought: bool) -> None:
    monkeypatch.setattr(_blocks, "cpu_count", lambda: cores)
    file = Seeks(stream("gzip"))
    assert described(read_file(file, OPTIONS)) == EXPECTED
    assert (file.count > 0) is sought


def with_index(offsets: list[int], counts: list[int], *, kind: bytes = INDEX, compress: str | None = None) -> bytes:
    """The stream with another index, which is whole."""
    original = stream(compress)
    end = read_index(io.BytesIO(original), OPTIONS).end  # type: ignore[union-attr]
    content = encode_packed(1, offsets) + encode_packed(2, counts)
    index = b"".join(pack_segment(kind, 5, [content]))
    tail = b"\x93QUIREEN" + end.to_bytes(8, "little")
    compression = get_compression(compress)
    if compression is not None:
        index, tail = compression.compress(index), compression.compress(tail)
    return original[:end] + index + tail


def test_inconsistent_index_is_ignored() -> None:
    assert read_index(io.BytesIO(with_index([128, 256, 448], [3, 0, 2])), OPTIONS) == Index(
        0, [128, 256, 448], [3, 0, 2], 768, None
    )
    for offsets, counts in (
        ([128, 256], [3, 0, 2]),
        ([128, 256, 448], [3, 0]),
        ([256, 128, 448], [3, 0, 2]),
        ([128, 128, 448], [3, 0, 2]),
        ([128, 256, 768], [3, 0, 2]),
        ([0, 256, 448], [3, 0, 2]),
        ([128, 256, 448], [3, 0, 1 << 63]),  # not a number of rows: positions of 64 bits would overflow
    ):
        assert read_index(io.BytesIO(with_index(offsets, counts)), OPTIONS) is None
    assert read_index(io.BytesIO(with_index([128, 256, 448], [3, 0, 2], kind=BATCH)), OPTIONS) is None


def test_index_may_have_any_increasing_offsets() -> None:
    for offsets in ([1, 2, 3], [765, 766, 767]):
        index = read_index(io.BytesIO(with_index(offsets, [3, 0, 2])), OPTIONS)
        assert index is not None
        assert index.offsets == offsets


def test_index_ignores_fields_of_later_versions() -> None:
    content = encode_packed(1, [128]) + encode_packed(2, [3]) + encode_delimited(3, b"\x07") + encode_uint(9, 4)
    plain = b"".join(pack_segment(HEADER, 0, [bytes(64)])) + b"".join(pack_segment(INDEX, 3, [content]))
    data = plain[:128] + b"".join(pack_segment(BATCH, 3, [b""])) + plain[128:]
    index = read_index(io.BytesIO(data + b"\x93QUIREEN" + (192).to_bytes(8, "little")), OPTIONS)
    assert index == Index(0, [128], [3], 192, None)


def test_uncompressed_stream_is_read_in_order_without_its_index() -> None:
    data = with_index([64, 300, 500], [1, 1, 1])
    assert read_index(io.BytesIO(data), OPTIONS) is not None
    assert described(read_file(io.BytesIO(data), OPTIONS)) == EXPECTED


def test_a_tail_that_points_beyond_the_file_is_ignored() -> None:
    data = stream()
    for position in (len(data), len(data) + 1, 1 << 60):
        assert read_index(io.BytesIO(data[:-8] + position.to_bytes(8, "little")), OPTIONS) is None
    for short in (b"", b"\x93QUIREEN", data[-15:], data[-16:]):
        assert read_index(io.BytesIO(short), OPTIONS) is None


def test_only_seekable_files_have_an_index() -> None:
    class Once(io.BytesIO):
        def seekable(self) -> bool:
            return False

    class Bare:
        def read(self, size: int = -1) -> bytes:
            raise AssertionError(size)

    assert read_index(Once(stream()), OPTIONS) is None
    assert read_index(Bare(), OPTIONS) is None  # type: ignore[arg-type]
    for compress in (None, "gzip"):
        assert described(read_file(Once(stream(compress)), OPTIONS)) == EXPECTED


@pytest.mark.parametrize("before", [0, 6, 1_000])
@pytest.mark.parametrize("compress", COMPRESSED)
def test_index_offsets_are_relative_to_the_stream(compress: str | None, before: int) -> None:
    data = stream(compress)
    file = io.BytesIO(b"." * before + data)
    file.seek(before)
    index = read_index(file, OPTIONS)
    assert index is not None
    assert index.base == file.tell() == before
    assert b"".join(piece for _, _, piece in index.pieces(file)) == data[: index.end]
    pieces = list(index.pieces(file, [2, 0]))
    assert [(number, start) for number, start, _ in pieces] == [(0, 0), (3, index.offsets[2]), (1, index.offsets[0])]
    assert [piece for _, _, piece in pieces] == [
        data[: index.offsets[0]],
        data[index.offsets[2] : index.end],
        data[index.offsets[0] : index.offsets[1]],
    ]
    assert described(read_blocks(file, index, [2, 0], OPTIONS)) == [EXPECTED[2], EXPECTED[0]]


def test_compressed_tail_is_found_among_false_magic_numbers() -> None:
    magic = b"\x1f\x8b"
    tail = GZIP.compress(b"\x93QUIREEN" + (300).to_bytes(8, "little"))
    assert _blocks._index_position(magic + b"x" + magic + tail, GZIP) == 300
    assert _blocks._index_position(b"\x00" * 50 + tail, GZIP) == 300
    assert _blocks._index_position(tail, GZIP) == 300
    assert _blocks._index_position(tail[:-1], GZIP) is None
    assert _blocks._index_position(b"nothing here", GZIP) is None
    assert _blocks._index_position(GZIP.compress(b"other") + tail, GZIP) == 300
    assert _blocks._index_position(GZIP.compress(b"x" * 20), GZIP) is None


def stored(data: bytes) -> bytes:
    """Packed data in which the magic of its compression occurs again, as it may by chance."""
    return b"\x1f\x8b" + data


def test_compressed_tail_that_contains_the_magic_number_is_found() -> None:
    class Reader:
        def __init__(self, source: Any) -> None:
            self._source = source
            if self._source.read(2) != b"\x1f\x8b":
                raise EOFError("no magic")

        def read(self, size: int) -> bytes:
            return bytes(self._source.read(size))

    inner = Compression("stored", b"\x1f\x8b", (), stored, Reader)
    position = int.from_bytes(b"\x1f\x8b\x1f\x8b", "little")
    tail = b"\x93QUIREEN" + position.to_bytes(8, "little")
    assert _blocks._index_position(inner.compress(tail), inner) == position


@pytest.mark.parametrize("checks", [True, False])
def test_pieces_are_verified_unless_their_compression_verifies_them(checks: bool) -> None:
    compression = replace(GZIP, checks=checks)
    segment = bytearray(b"".join(pack_segment(BATCH, 1, [b"abc"])))
    segment[64] ^= 1
    index = Index(0, [], [], 0, compression)
    piece = (4, 99, compression.compress(bytes(segment)))
    if checks:
        assert bytes(_blocks._decode_piece(piece, index, OPTIONS).payload) == b"`bc"
    else:
        with pytest.raises(DecodeError, match=r"^block 4 \(byte 99\): the checksum is wrong"):
            _blocks._decode_piece(piece, index, OPTIONS)


@pytest.mark.parametrize("compression", [None, GZIP])
def test_invalid_pieces_raise_errors_with_their_block(compression: Compression | None) -> None:
    def read(data: bytes, **options: Any) -> Segment:
        content = data if compression is None else compression.compress(data)
        index = Index(0, [], [], 0, compression)
        return _blocks._decode_piece((4, 99, content), index, DecodeOptions(**options))

    data = b"".join(pack_segment(BATCH, 1, [b"abc"]))
    segment = read(data)
    assert (segment.kind, segment.count, bytes(segment.payload)) == (BATCH, 1, b"abc")
    assert (segment.number, segment.offset) == (4, 99)
    with pytest.raises(DecodeError, match=r"^block 4 \(byte 99\) ends 1 bytes too early. The data was cut off"):
        read(data[:66])
    with pytest.raises(DecodeError, match=r"^block 4 \(byte 99\).* more than max_bytes=2"):
        read(data, max_bytes=2)
    with pytest.raises(DecodeError, match=r"^block 4 \(byte 99\) "):
        read(data[:10])


def test_damaged_pieces_name_their_block_once() -> None:
    index = Index(0, [], [], 0, GZIP)
    with pytest.raises(DecodeError, match=r"^block 4 \(byte 99\): the gzip data is damaged") as error:
        _blocks._decode_piece((4, 99, b"\x1f\x8bnonsense"), index, OPTIONS)
    assert str(error.value).count("block 4") == 1
    with pytest.raises(DecodeError, match=r"^block 4 \(byte 99\): the data decompresses to more than max_bytes=10"):
        _blocks._decode_piece((4, 99, GZIP.compress(bytes(500))), index, DecodeOptions(max_bytes=10))


def test_size_of_nested_arrays_is_estimated_without_a_search_for_similar_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shelf(BaseDocument):
        books: DocumentArray[BaseDocument]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an attribute of an array was looked up that it does not have")

    shelf = Shelf(books=[BaseDocument(), BaseDocument()])
    monkeypatch.setattr("difflib.get_close_matches", refuse)
    assert approximate_size(shelf) > 2 * approximate_size(shelf.books[0])
