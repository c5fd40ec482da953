"""Compressions: names, first bytes, the frames of zstd, and the limits of what comes out."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.codec import _compression
from quire.codec._compression import (
    COMPRESSIONS,
    Compression,
    Decompressor,
    check_compression,
    compression_of,
    decompress,
    get_compression,
)
from quire.errors import CodecError, DecodeError

DATA = b"".join(number.to_bytes(4, "little") for number in range(3_000))
NAMES = [
    *("gzip", "bz2", "lzma"),
    pytest.param("zstd", marks=pytest.mark.needs("zstandard")),
    pytest.param("lz4", marks=pytest.mark.needs("lz4")),
]


class Trickle(io.RawIOBase):
    """A source that gives at most `step` bytes for each read, like a socket, and records the sizes it is asked for."""

    def __init__(self, data: bytes, step: int = 1) -> None:
        super().__init__()
        self._rest, self._step = io.BytesIO(data), step
        self.sizes: list[int] = []

    def read(self, size: int = -1) -> bytes:
        self.sizes.append(size)
        return self._rest.read(self._step if size < 0 else min(size, self._step))


def drain(stream: Any, size: int) -> bytes:
    """Everything that a stream gives, read in pieces of at most `size` bytes."""
    parts = []
    while part := stream.read(size):
        assert len(part) <= size
        parts.append(part)
    assert stream.read(size) == b"", "a stream that has ended gives nothing more"
    return b"".join(parts)


# --- names and first bytes


def test_compressions_are_known_by_name_and_spelling() -> None:
    assert get_compression(None) is get_compression("none") is None
    for name, compression in COMPRESSIONS.items():
        assert get_compression(name) is compression
    for spelling, name in {"gz": "gzip", "xz": "lzma", "zst": "zstd", "bzip2": "bz2"}.items():
        assert get_compression(spelling) is COMPRESSIONS[name]
    with pytest.raises(CodecError, match="'gzipp' is not a compression. Did you mean 'gzip'"):
        get_compression("gzipp")


def test_compressions_are_known_by_their_first_bytes() -> None:
    for compression in COMPRESSIONS.values():
        assert compression_of(compression.magic + b"more") is compression
        assert compression_of(compression.magic[:-1]) is None
    assert compression_of(b"") is compression_of(b"\x93QUIRE\r\n") is None


def test_a_requested_compression_must_be_that_of_the_data() -> None:
    start = COMPRESSIONS["gzip"].magic
    assert check_compression(start, None) is check_compression(start, "gz") is COMPRESSIONS["gzip"]
    assert check_compression(b"plain", None) is check_compression(b"plain", "none") is None
    with pytest.raises(DecodeError, match="compress='bz2' was asked for, but the data is compressed with gzip"):
        check_compression(start, "bz2")
    with pytest.raises(DecodeError, match="compress='none' was asked for, but the data is compressed with gzip"):
        check_compression(start, "none")
    with pytest.raises(DecodeError, match="compress='gzip' was asked for, but the data is not compressed"):
        check_compression(b"plain", "gzip")


# --- streams


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1_000, 12_000, 12_001, 1 << 21])
def test_a_stream_is_decompressed_in_pieces_of_any_size(name: str, size: int) -> None:
    compression = COMPRESSIONS[name]
    data = compression.compress(DATA) + compression.compress(b"") + compression.compress(DATA[::-1])
    for source in (io.BytesIO(data), Trickle(data)):
        assert drain(Decompressor(source, compression, 200.0), size) == DATA + DATA[::-1]  # type: ignore[arg-type]
    assert decompress(data, compression, 1 << 30, 200.0) == DATA + DATA[::-1]


@pytest.mark.parametrize("name", NAMES)
def test_damaged_streams_name_their_compression(name: str) -> None:
    compression = COMPRESSIONS[name]
    data = compression.compress(DATA)
    for damaged in (data[:-1], data[: len(data) // 2], data[:9]):
        with pytest.raises(DecodeError, match=f"the {name} data is damaged: "):
            drain(Decompressor(io.BytesIO(damaged), compression, 200.0), 1 << 20)
        with pytest.raises(DecodeError, match=f"the {name} data is damaged: "):
            decompress(damaged, compression, 1 << 30, 200.0)


@pytest.mark.parametrize("name", ["gzip", "bz2", "lzma"])
def test_errors_that_are_not_about_the_data_are_raised_as_they_are(name: str) -> None:
    class Broken(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise KeyError(size)

    with pytest.raises(KeyError):
        Decompressor(Broken(), COMPRESSIONS[name], 200.0).read(1)  # type: ignore[arg-type]


def test_a_read_gives_at_most_a_mebibyte() -> None:
    stream = Decompressor(io.BytesIO(gzip.compress(bytes(3 << 20))), COMPRESSIONS["gzip"], 2_000.0)
    assert len(stream.read(1 << 30)) == 1 << 20
    assert len(stream.read((1 << 20) - 1)) == (1 << 20) - 1


def stored(data: bytes) -> Compression:
    """A compression whose reader ignores the source after the first 10 bytes, and gives the data."""

    class Reader:
        def __init__(self, source: Any) -> None:
            assert source.read(10) == b"0123456789"
            self._rest = io.BytesIO(data)

        def read(self, size: int) -> bytes:
            return self._rest.read(size)

    return Compression("stored", b"0", (), bytes, Reader)


@pytest.mark.parametrize("ratio", [1.0, 2.5])
def test_decompressed_bytes_are_bounded_by_a_ratio_to_compressed_bytes(
    monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    monkeypatch.setattr(_compression, "UNRATIONED_BYTES", 100)
    allowed = 100 + int(ratio * 10)
    source = b"0123456789 more"
    assert len(drain(Decompressor(io.BytesIO(source), stored(bytes(allowed)), ratio), 7)) == allowed
    message = rf"10 bytes of stored decompress to more than {ratio:g} times as many. Raise max_ratio"
    with pytest.raises(DecodeError, match=message):
        drain(Decompressor(io.BytesIO(source), stored(bytes(allowed + 1)), ratio), 7)
    with pytest.raises(DecodeError, match=message):
        decompress(source, stored(bytes(allowed + 1)), 1 << 30, ratio)


@pytest.mark.parametrize("name", ["gzip", "bz2", "lzma", pytest.param("zstd", marks=pytest.mark.needs("zstandard"))])
def test_every_compression_counts_what_it_reads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(_compression, "UNRATIONED_BYTES", 0)
    compression = COMPRESSIONS[name]
    content = bytes(100_000)
    data = compression.compress(content)
    enough = len(content) / len(data)
    assert drain(Decompressor(io.BytesIO(data), compression, 1.01 * enough), 1 << 20) == content
    with pytest.raises(DecodeError, match=f"^{len(data)} bytes of {name} decompress to more than"):
        drain(Decompressor(io.BytesIO(data), compression, 0.99 * enough), 1 << 20)


@pytest.mark.parametrize("name", NAMES)
def test_max_bytes_bounds_what_comes_out(name: str) -> None:
    compression = COMPRESSIONS[name]
    content = bytes((2 << 20) + 5)
    data = compression.compress(content)
    assert decompress(data, compression, len(content), 10_000.0) == content
    with pytest.raises(
        DecodeError, match=rf"the data decompresses to more than max_bytes={len(content) - 1}. Raise it"
    ):
        decompress(data, compression, len(content) - 1, 10_000.0)


# --- gzip data of one member


def test_one_gzip_member_is_decompressed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it was read as a stream")

    monkeypatch.setattr(_compression, "Decompressor", refuse)
    for content in (b"", b"x", DATA):
        limit = max(2 * len(content), 2)
        assert decompress(gzip.compress(content), COMPRESSIONS["gzip"], limit, 1.0) == content
    with pytest.raises(AssertionError, match="as a stream"):
        decompress(gzip.compress(DATA), COMPRESSIONS["gzip"], 2 * len(DATA) - 1, 1.0)


def test_only_half_of_what_the_ratio_allows_is_decompressed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compression, "UNRATIONED_BYTES", 100)
    content = bytes(10_000)
    data = gzip.compress(content)
    calls: list[int] = []
    original = _compression._decompress_gzip_member

    def record(data: Any, limit: int) -> bytes | None:
        calls.append(limit)
        return original(data, limit)

    monkeypatch.setattr(_compression, "_decompress_gzip_member", record)
    assert decompress(data, COMPRESSIONS["gzip"], 1 << 30, 1_000.0) == content
    assert decompress(data, COMPRESSIONS["gzip"], 40_000, 1_000.0) == content
    assert calls == [100 + 1_000 * len(data), 40_000]


def test_gzip_member_limit_is_exact() -> None:
    data = gzip.compress(DATA)
    assert _compression._decompress_gzip_member(data, 2 * len(DATA)) == DATA
    assert _compression._decompress_gzip_member(data, 2 * len(DATA) + 1) == DATA
    assert _compression._decompress_gzip_member(data, 2 * len(DATA) - 1) is None
    assert _compression._decompress_gzip_member(gzip.compress(b""), 0) == b""


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data + data,
        lambda data: data + b"\x00",
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: data[:-4] + (1).to_bytes(4, "little"),
        lambda data: data[:-4] + (0).to_bytes(4, "little"),
        lambda data: data[:50] + data[-4:],
        lambda data: b"BZh" + data[3:],
    ],
    ids=["two members", "trailing byte", "altered", "claims 1", "claims 0", "cut", "not gzip"],
)
def test_other_gzip_data_is_not_decompressed_as_one_member(spoil: Callable[[bytes], bytes]) -> None:
    assert _compression._decompress_gzip_member(spoil(gzip.compress(DATA)), 1 << 30) is None


def test_gzip_data_of_several_members_is_decompressed_whole() -> None:
    assert decompress(gzip.compress(b"a") + gzip.compress(b"bc"), COMPRESSIONS["gzip"], 100, 1.0) == b"abc"


# --- the source of a stream


@pytest.mark.parametrize("step", [1, 3, 100])
def test_counting_source_reads_whole_sizes_and_counts(step: int) -> None:
    source = _compression._CountingSource(Trickle(b"0123456789", step))  # type: ignore[arg-type]
    assert source.read(0) == b""
    assert source.count == 0
    assert source.read(4) == b"0123"
    assert source.count == 4
    assert source.read(20) == b"456789"
    assert source.count == 10
    assert source.read(1) == b""
    assert source.count == 10


def test_counting_source_reads_everything_without_a_size() -> None:
    source = _compression._CountingSource(io.BytesIO(b"0123456789"))
    assert source.read(2) == b"01"
    assert source.read() == b"23456789"
    assert source.count == 10


@pytest.mark.parametrize(
    ("name", "packed"), [("gzip", gzip.compress(DATA)), ("bz2", bz2.compress(DATA)), ("lzma", lzma.compress(DATA))]
)
def test_data_of_other_programs_is_decompressed(name: str, packed: bytes) -> None:
    assert decompress(packed, COMPRESSIONS[name], 1 << 20, 1.0) == DATA
    assert COMPRESSIONS[name].checks


# --- the frames of zstd

ZSTD = b"\x28\xb5\x2f\xfd"
RAW, RLE = 0, 1


def block(content: bytes, kind: int = RAW, *, last: bool = True, size: int | None = None) -> bytes:
    """A block of a frame; of a run-length block, `size` is the number of repetitions."""
    number = (len(content) if size is None else size) << 3 | kind << 1 | last
    return number.to_bytes(3, "little") + content


def frame(content: bytes, *, single: bool = True, size_flag: int = 0, dictionary_flag: int = 0) -> bytes:
    """A frame of one raw block, with a size of its own in each of the forms that RFC 8878 allows."""
    flags = size_flag << 6 | single << 5 | dictionary_flag
    window = b"" if single else b"\x00"  # 1 KiB
    dictionary = bytes((0, 1, 2, 4)[dictionary_flag])  # number 0: no dictionary
    width = (int(single), 2, 4, 8)[size_flag]
    claim = (len(content) - (256 if size_flag == 1 else 0)).to_bytes(width, "little") if width else b""
    return ZSTD + bytes([flags]) + window + dictionary + claim + block(content)


def skippable(size: int, kind: int = 0) -> bytes:
    return bytes([0x50 + kind]) + b"\x2a\x4d\x18" + size.to_bytes(4, "little") + bytes(size)


def read_zstd(data: bytes, size: int = 1 << 20) -> bytes:
    """What a stream of zstd frames holds."""
    return drain(_compression._ZstdFrames(io.BytesIO(data)), size)


@pytest.mark.needs("zstandard")
@pytest.mark.parametrize("dictionary_flag", range(4))
@pytest.mark.parametrize("size_flag", range(4))
@pytest.mark.parametrize("single", [False, True])
def test_every_form_of_a_frame_header_is_read(single: bool, size_flag: int, dictionary_flag: int) -> None:
    content = bytes(range(250)) + (b"x" * 50 if size_flag else b"")
    one = frame(content, single=single, size_flag=size_flag, dictionary_flag=dictionary_flag)
    assert read_zstd(one) == content
    assert read_zstd(one + frame(b"next")) == content + b"next"
    assert read_zstd(one + one, size=7) == content + content


def zstd_frames() -> Iterator[Any]:
    import zstandard

    for checksum in (False, True):
        for known in (False, True):
            yield zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=known)


@pytest.mark.needs("zstandard")
@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 65_791, 65_792, 131_072, 131_073, 400_000])
def test_frames_of_zstandard_are_read(length: int) -> None:
    content = (DATA * (length // len(DATA) + 1))[:length]
    for packer in zstd_frames():
        data = packer.compress(content)
        assert drain(_compression._ZstdFrames(io.BytesIO(data + data)), 100_000) == content + content


@pytest.mark.needs("zstandard")
def test_blocks_of_every_kind_are_read() -> None:
    head = ZSTD + b"\x00\x58"  # a window of 2 MiB, of unknown size, without a checksum
    blocks = block(b"ab", last=False) + block(b"c", RLE, last=False, size=1 << 17) + block(b"", last=False)
    content = b"ab" + b"c" * (1 << 17) + b"d"
    assert read_zstd(head + blocks + block(b"d")) == content
    assert read_zstd(head + blocks + block(b"d") + frame(b"e")) == content + b"e"
    largest = bytes(1 << 17)
    assert read_zstd(head + block(largest)) == largest


@pytest.mark.needs("zstandard")
def test_too_large_blocks_are_rejected_before_they_are_read() -> None:
    source = Trickle(ZSTD + b"\x00\x58" + block(bytes((1 << 17) + 1)), 1 << 20)
    with pytest.raises(EOFError, match="a block is too large"):
        _compression._ZstdFrames(source).read(1)  # type: ignore[arg-type]
    assert max(source.sizes) < 10


@pytest.mark.needs("zstandard")
def test_checksums_of_frames_are_checked() -> None:
    import zstandard

    data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(DATA))
    assert read_zstd(bytes(data) + frame(b"next")) == DATA + b"next"
    data[-1] ^= 1
    with pytest.raises(DecodeError, match="the zstd data is damaged: .*checksum"):
        decompress(bytes(data), COMPRESSIONS["zstd"], 1 << 20, 1.0)


@pytest.mark.needs("zstandard")
@pytest.mark.parametrize("size", [0, 1, 200, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (2 << 20) + 3])
def test_skippable_frames_are_skipped_in_pieces(size: int) -> None:
    for kind in (0, 7, 15):
        data = skippable(size, kind) + frame(b"ab") + skippable(3) + frame(b"cd")
        source = Trickle(data, 1 << 30)
        assert drain(_compression._ZstdFrames(source), 1 << 20) == b"abcd"  # type: ignore[arg-type]
        assert max(source.sizes) <= 1 << 20
    assert drain(_compression._ZstdFrames(io.BytesIO(skippable(size))), 10) == b""


@pytest.mark.needs("zstandard")
@pytest.mark.parametrize("magic", [b"\x4f\x2a\x4d\x18", b"\x60\x2a\x4d\x18", b"\x50\x2a\x4d\x19", b"abcd"])
def test_other_magic_numbers_are_rejected(magic: bytes) -> None:
    data = frame(b"ab") + magic + frame(b"cd")[4:]
    with pytest.raises(DecodeError, match="the zstd data is damaged"):
        decompress(data, COMPRESSIONS["zstd"], 1 << 20, 1.0)


@pytest.mark.needs("zstandard")
def test_truncated_frames_are_rejected() -> None:
    import zstandard

    whole = [frame(b"ab"), skippable(5), zstandard.ZstdCompressor(write_checksum=True).compress(DATA[:600])]
    data = b"".join(whole)
    ends = {0, len(whole[0]), len(whole[0]) + len(whole[1]), len(data)}
    for at in range(len(data) + 1):
        stream = _compression._ZstdFrames(io.BytesIO(data[:at]))
        if at in ends:
            drain(stream, 1 << 20)
        else:
            with pytest.raises(EOFError, match="it ends too early"):
                drain(stream, 1 << 20)


@pytest.mark.needs("zstandard")
def test_reads_do_not_read_ahead() -> None:
    data = frame(b"abcd") + frame(b"efgh")
    source = io.BytesIO(data)
    stream = _compression._ZstdFrames(source)
    assert stream.read(0) == b""
    assert source.tell() == 0
    assert stream.read(3) == b"abc"
    assert stream.read(1) == b"d"
    assert source.tell() == len(data) // 2, "the next frame is not begun before it is needed"
    assert stream.read(2) == b"ef"
    assert stream.read(9) == b"gh"


def test_zlib_data_is_not_gzip_data() -> None:
    assert _compression._decompress_gzip_member(zlib.compress(DATA), 1 << 40) is None
    with pytest.raises(DecodeError, match="the gzip data is damaged"):
        decompress(zlib.compress(DATA), COMPRESSIONS["gzip"], 1 << 20, 1.0)
