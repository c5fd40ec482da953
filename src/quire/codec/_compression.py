"""Compressions and protocols: by name, by the suffix of a file, and by the first bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from types import ModuleType
from typing import IO, Any

from quire._optional import require
from quire.codec._wire import Bytes
from quire.errors import CodecError, DecodeError, did_you_mean

UNRATIONED_BYTES = 64 << 20
"""Compressed data may decompress to this many bytes whatever the ratio."""
_PIECE = 1 << 20


@dataclass(frozen=True)
class Compression:
    """One compression.

    Concatenated pieces of compressed data must decompress to the concatenated contents.
    """

    name: str
    magic: bytes
    suffixes: tuple[str, ...]
    compress: Callable[[Any], bytes]
    open: Callable[[IO[bytes]], Any]
    checks: bool = False
    """Whether the compressed data has checksums that are verified when it is decompressed."""


def _zstd(what: str) -> ModuleType:
    return require("zstandard", extra="compress", needed_for=f"compress='zstd' ({what})")


def _lz4() -> ModuleType:
    return require("lz4.frame", extra="compress", needed_for="compress='lz4'")


class _ZstdFrames:
    """A reader of concatenated zstd frames that reads no byte after the last frame it needs.

    zstandard's own reader takes the end of the source for the end of the frame, so it does not notice truncated data,
    and it reads ahead. This one parses the headers of frames and blocks (RFC 8878, section 3.1) to learn their sizes
    and feeds the decompressor one block at a time, which gives at most 128 KiB. Skippable frames are skipped. A read
    of the source must be short only at its end.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self._rest = source, memoryview(b"")
        self._frame: Any = None
        self._checksum = False

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes; none at the end."""
        parts = []
        while size:
            if not self._rest:
                piece = self._read_frame_header() if self._frame is None else self._read_block()
                if piece is None:
                    break
                if self._frame is not None:
                    self._rest = memoryview(self._frame.decompress(piece))
                    if self._frame.eof:
                        self._frame = None
            part, self._rest = self._rest[:size], self._rest[size:]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _read_frame_header(self) -> bytes | None:
        """Read the header of the next frame; None at the end, and empty for a skippable frame.

        The descriptor byte has the size of the content size in bits 6-7, the single-segment flag in bit 5, the
        checksum flag in bit 2, and the size of the dictionary id in bits 0-1.
        """
        magic = self._source.read(4)
        if not magic:
            return None
        # Skippable frames have 16 magic numbers, 0x184D2A50 to 0x184D2A5F. Their size may be forged: read in pieces.
        if len(magic) == 4 and magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5:
            size = int.from_bytes(self._read_exactly(4), "little")
            for piece in [_PIECE] * (size // _PIECE) + [size % _PIECE]:
                self._read_exactly(piece)
            return b""
        flags = self._read_exactly(1)[0]
        single, self._checksum = flags >> 5 & 1, flags >> 2 & 1 == 1
        size = (1 - single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
        self._frame = _zstd("reading").ZstdDecompressor().decompressobj()
        return magic + bytes([flags]) + self._read_exactly(size)

    def _read_block(self) -> bytes:
        """Read the next block, with the checksum of the frame after its last block.

        The three bytes of a block header have the last-block flag in bit 0, the type in bits 1-2 and the size above.
        A block of type 1 repeats a single byte.
        """
        head = self._read_exactly(3)
        number = int.from_bytes(head, "little")
        size = 1 if number >> 1 & 3 == 1 else number >> 3
        if size > _ZSTD_BLOCK:
            raise EOFError("a block is too large")
        return head + self._read_exactly(size) + self._read_exactly(4 if number & 1 and self._checksum else 0)

    def _read_exactly(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) < size:
            raise EOFError("it ends too early")
        return data


_ZSTD_BLOCK = 1 << 17


COMPRESSIONS = {
    compression.name: compression
    for compression in (
        Compression(
            "gzip",
            b"\x1f\x8b",
            (".gz", ".gzip"),
            lambda data: gzip.compress(data, compresslevel=6, mtime=0),
            lambda stream: gzip.GzipFile(fileobj=stream, mode="rb"),
            checks=True,
        ),
        Compression("bz2", b"BZh", (".bz2", ".bzip2"), bz2.compress, bz2.BZ2File, checks=True),
        Compression(
            "lzma",
            b"\xfd7zXZ\x00",
            (".xz", ".lzma"),
            lambda data: lzma.compress(data, preset=1),
            lzma.LZMAFile,
            checks=True,
        ),
        Compression(
            "zstd",
            b"\x28\xb5\x2f\xfd",
            (".zst", ".zstd"),
            lambda data: _zstd("writing").ZstdCompressor().compress(data),
            _ZstdFrames,
        ),
        Compression(
            "lz4",
            b"\x04\x22\x4d\x18",
            (".lz4",),
            lambda data: _lz4().compress(bytes(data)),
            lambda stream: _lz4().LZ4FrameFile(stream),
        ),
    )
}
_SPELLINGS = {"gz": "gzip", "xz": "lzma", "zst": "zstd", "bzip2": "bz2"}
STREAM_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, RuntimeError)


def get_compression(name: str | None) -> Compression | None:
    """Return the compression of that name; None for None and 'none'."""
    if name is None or name == "none":
        return None
    compression = COMPRESSIONS.get(_SPELLINGS.get(name, name))
    if compression is None:
        raise CodecError(f"{name!r} is not a compression. {did_you_mean(name, [*COMPRESSIONS, 'none'])}")
    return compression


def compression_of(start: bytes) -> Compression | None:
    """Return the compression of data by its first bytes."""
    return next((known for known in COMPRESSIONS.values() if start.startswith(known.magic)), None)


def check_compression(start: bytes, compress: str | None) -> Compression | None:
    """Return the compression of data by its first bytes; raise an error if it is not the requested one."""
    compression = compression_of(start)
    if compress is not None and get_compression(compress) is not compression:
        got = "not compressed" if compression is None else f"compressed with {compression.name}"
        raise DecodeError(f"compress={compress!r} was asked for, but the data is {got}.")
    return compression


PROTOCOLS = ("protobuf", "pickle")
_DOCARRAY_PROTOCOLS = {"protobuf-array": "protobuf", "pickle-array": "pickle"}
"""DocArray's names of the protocols of whole arrays, which mean the same here."""


def check_protocol(protocol: str | None) -> str:
    """Return a protocol, by default protobuf, or raise an error if there is none of that name."""
    protocol = "protobuf" if protocol is None else _DOCARRAY_PROTOCOLS.get(protocol, protocol)
    if protocol not in PROTOCOLS:
        raise CodecError(f"{protocol!r} is not a protocol. {did_you_mean(protocol, PROTOCOLS)}")
    return protocol


_PROTOCOL_SUFFIXES = {".protobuf": "protobuf", ".pb": "protobuf", ".pickle": "pickle", ".pkl": "pickle"}


def from_suffixes(file: object, protocol: str | None, compress: str | None) -> tuple[str | None, str | None]:
    """Return the protocol and the compression for a new file: the requested ones, else those of its name.

    The name of 'students.protobuf.gz', for example, has both.
    """
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "")
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes] if isinstance(name, (str, os.PathLike)) else []
    by_suffix = {suffix: known.name for known in COMPRESSIONS.values() for suffix in known.suffixes}
    compression = by_suffix.get(suffixes[-1]) if suffixes else None
    rest = suffixes[:-1] if compression else suffixes
    return protocol or (_PROTOCOL_SUFFIXES.get(rest[-1]) if rest else None), compress or compression


# --- decompression


class Decompressor:
    """A compressed stream, decompressed piece by piece; the size of the output is compared with that of the input."""

    def __init__(self, source: IO[bytes], compression: Compression, max_ratio: float) -> None:
        self._counted = _CountingSource(source)
        self._stream = compression.open(self._counted)  # type: ignore[arg-type]
        self.name, self._max_ratio, self._out = compression.name, max_ratio, 0

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes; none at the end."""
        try:
            data: bytes = self._stream.read(min(size, _PIECE))
        except Exception as error:
            if not isinstance(error, STREAM_ERRORS) and type(error).__name__ != "ZstdError":
                raise
            raise DecodeError(f"the {self.name} data is damaged: {error}.") from error
        self._out += len(data)
        if self._out > UNRATIONED_BYTES + self._max_ratio * self._counted.count:
            raise DecodeError(
                f"{self._counted.count} bytes of {self.name} decompress to more than {self._max_ratio:g} times as many."
                " Raise max_ratio if you trust the source."
            )
        return data


def read_whole(source: IO[bytes], size: int) -> bytes:
    """Read `size` bytes, fewer only at the end of the source; one read of a raw pipe or a socket may give fewer."""
    parts = []
    while size and (part := source.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class _CountingSource:
    """A source that counts the bytes read from it.

    A read is short only at the end: gzip and `_ZstdFrames` rely on it.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self.count = source, 0

    def read(self, size: int = -1) -> bytes:
        data = self._source.read() if size < 0 else read_whole(self._source, size)
        self.count += len(data)
        return data


def decompress(data: Bytes, compression: Compression, max_bytes: int, max_ratio: float) -> bytes:
    """Decompress data in memory."""
    if compression.name == "gzip":
        content = _decompress_gzip_member(data, min(max_bytes, UNRATIONED_BYTES + int(max_ratio * len(data))))
        if content is not None:
            return content
    stream = Decompressor(io.BytesIO(data), compression, max_ratio)
    parts, size = [], 0
    while part := stream.read(_PIECE):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise DecodeError(
                f"the data decompresses to more than max_bytes={max_bytes}. Raise it if you trust the source."
            )
    return b"".join(parts)


def _decompress_gzip_member(data: Bytes, limit: int) -> bytes | None:
    """Decompress gzip data that is one whole member in one call, which is faster; None for other data.

    The last four bytes of a member are the size of its content. For a moment zlib holds the output twice, so only half
    of the limit is decompressed this way, whether these bytes are true or not.
    """
    size = int.from_bytes(data[-4:], "little")
    if size > limit // 2:
        return None
    stream = zlib.decompressobj(wbits=31)
    try:
        content = stream.decompress(data, size + 1)
    except zlib.error:
        return None  # the general way raises an error that says more
    return content if stream.eof and not stream.unused_data else None
