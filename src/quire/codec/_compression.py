"""Compressions: by name, by suffix, by the first bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from quire._optional import require
from quire.errors import CodecError, DecodeError, did_you_mean

FREE = 64 << 20
"""So many bytes may come out of a packed message whatever their ratio."""
_PIECE = 1 << 20


@dataclass(frozen=True)
class Compression:
    """One compression. Packed pieces put one behind the other unpack to the pieces' contents, one behind the other."""

    name: str
    magic: bytes
    suffixes: tuple[str, ...]
    pack: Callable[[Any], bytes]
    open: Callable[[IO[bytes]], Any]
    checks: bool = False
    """Whether packed pieces have checksums of their own, which are checked when they are unpacked."""


def _zstd(what: str) -> Any:
    return require("zstandard", extra="compress", needed_for=f"compress='zstd' ({what})")


def _lz4() -> Any:
    return require("lz4.frame", extra="compress", needed_for="compress='lz4'")


class _ZstdFrames:
    """The frames of a zstd stream, unpacked block by block, each of 128 KiB at most.

    zstandard's own reader takes the end of a file for the end of its frame, and reads ahead of what it is asked for.
    A read of the source must be short only at its end.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self._rest = source, memoryview(b"")
        self._frame: Any = None
        self._checksum = False

    def read(self, size: int) -> bytes:
        """At most so many bytes; none at the end."""
        parts = []
        while size:
            if not self._rest:
                piece = self._head() if self._frame is None else self._block()
                if piece is None:
                    break
                self._take(piece)
            part, self._rest = self._rest[:size], self._rest[size:]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _take(self, piece: bytes) -> None:
        if self._frame is not None:
            self._rest = memoryview(self._frame.decompress(piece))
            if self._frame.eof:
                self._frame = None

    def _head(self) -> bytes | None:
        """The head of the next frame; None at the end, and nothing for a frame to be skipped."""
        magic = self._source.read(4)
        if not magic:
            return None
        if len(magic) == 4 and magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5:
            for size in _in_pieces(int.from_bytes(self._exactly(4), "little")):
                self._exactly(size)
            return b""
        flags = self._exactly(1)[0]
        single, self._checksum = flags >> 5 & 1, flags >> 2 & 1 == 1
        size = (1 - single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
        self._frame = _zstd("reading").ZstdDecompressor().decompressobj()
        return magic + bytes([flags]) + self._exactly(size)

    def _block(self) -> bytes:
        """The next block of the frame, with what stands behind the last."""
        head = self._exactly(3)
        number = int.from_bytes(head, "little")
        size = 1 if number >> 1 & 3 == 1 else number >> 3
        if size > _ZSTD_BLOCK:
            raise EOFError("a block is too large")
        return head + self._exactly(size) + self._exactly(4 if number & 1 and self._checksum else 0)

    def _exactly(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) < size:
            raise EOFError("it ends too early")
        return data


_ZSTD_BLOCK = 1 << 17


def _in_pieces(size: int) -> list[int]:
    return [_PIECE] * (size // _PIECE) + [size % _PIECE]


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
    """The compression of that name; None and 'none' stand for no compression."""
    if name is None or name == "none":
        return None
    found = COMPRESSIONS.get(_SPELLINGS.get(name, name))
    if found is None:
        raise CodecError(f"{name!r} is not a compression. {did_you_mean(name, [*COMPRESSIONS, 'none'])}")
    return found


def compression_of(start: bytes) -> Compression | None:
    """The compression that the first bytes tell."""
    return next((known for known in COMPRESSIONS.values() if start.startswith(known.magic)), None)


def check_compression(start: bytes, compress: str | None) -> Compression | None:
    """The compression that the first bytes tell; one that was asked for must be it."""
    found = compression_of(start)
    if compress is not None and get_compression(compress) is not found:
        got = "not packed" if found is None else f"packed with {found.name}"
        raise DecodeError(f"compress={compress!r} was asked for, but the data is {got}.")
    return found


class Unpacked:
    """A packed stream, unpacked piece by piece: what comes out of it is held against what went in."""

    def __init__(self, source: IO[bytes], compression: Compression, max_ratio: float) -> None:
        self._counted = _Counted(source)
        self._stream = compression.open(self._counted)  # type: ignore[arg-type]
        self.name, self._max_ratio, self._out = compression.name, max_ratio, 0

    def read(self, size: int) -> bytes:
        """At most so many bytes; none at the end."""
        try:
            data: bytes = self._stream.read(min(size, _PIECE))
        except Exception as error:
            if not isinstance(error, STREAM_ERRORS) and type(error).__name__ != "ZstdError":
                raise
            raise DecodeError(f"the {self.name} data is damaged: {error}.") from error
        self._out += len(data)
        if self._out > FREE + self._max_ratio * self._counted.count:
            raise DecodeError(
                f"{self._counted.count} bytes of {self.name} unpack to more than {self._max_ratio:g} times as many. "
                "Raise max_ratio if you trust the source."
            )
        return data


def read_whole(source: IO[bytes], size: int) -> bytes:
    """Read `size` bytes, fewer only at the end of the source; one read of a raw pipe or a socket may give fewer."""
    parts = []
    while size and (part := source.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class _Counted:
    """A source that knows how much was read from it.

    A read is short only at the end: gzip and `_ZstdFrames` rely on it.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self.count = source, 0

    def read(self, size: int = -1) -> bytes:
        data = self._source.read() if size < 0 else read_whole(self._source, size)
        self.count += len(data)
        return data


def unpack(data: Any, compression: Compression, max_bytes: int, max_ratio: float) -> bytes:
    """Packed bytes, unpacked."""
    if compression.name == "gzip":
        found = _one_member(data, min(max_bytes, FREE + int(max_ratio * len(data))))
        if found is not None:
            return found
    stream = Unpacked(io.BytesIO(data), compression, max_ratio)
    parts, size = [], 0
    while part := stream.read(_PIECE):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise DecodeError(f"the data unpacks to more than max_bytes={max_bytes}. Raise it if you trust the source.")
    return b"".join(parts)


def _one_member(data: Any, limit: int) -> bytes | None:
    """The content of gzip data that is one whole member, in one go; None for any other.

    The last bytes of a member tell its size. zlib holds what it unpacks twice for a moment, so only half of the limit
    is unpacked this way, whether they tell the truth or not.
    """
    size = int.from_bytes(data[-4:], "little")
    if size > limit // 2:
        return None
    stream = zlib.decompressobj(wbits=31)
    try:
        found = stream.decompress(data, size + 1)
    except zlib.error:
        return None  # it is read again, for an error that tells more
    return found if stream.eof and not stream.unused_data else None
