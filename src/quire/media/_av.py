"""Files of sound and moving pictures, opened by PyAV.

PyAV gets the bytes and nothing else: never an address, and no format that points to other files, like playlists.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NoReturn

from quire._optional import require
from quire.errors import DecodeError, EncodeError, QuireError
from quire.files import shown

Encoded = bytes | bytearray | memoryview | IO[bytes]
"""Encoded media: its bytes, or a file that can be read and sought in."""
_FORMATS = (
    "aac,ac3,aiff,amr,apng,asf,au,avi,caf,dv,eac3,flac,flv,gif,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mp3,mpeg,mpegts,"
    "mpegvideo,mxf,nut,ogg,rm,tta,voc,w64,wav,wv"
)
_BUFFER = 1 << 17


def pyav(needed_for: str, extra: str) -> Any:
    """The module, or the command that installs it."""
    return require("av", extra=extra, needed_for=needed_for)


@contextmanager
def opened(source: Encoded, where: str, kind: str) -> Iterator[Any]:
    """PyAV's container of a file; `kind` is 'audio' or 'video'."""
    av = pyav(f"decoding {'sound' if kind == 'audio' else 'a video'}", kind)
    file = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
    file.seek(0)
    with told(av, where, kind):
        options = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
        with av.open(
            file, options=options, metadata_errors="replace", buffer_size=_BUFFER, io_open=_refuse
        ) as container:
            yield container


@contextmanager
def told(av: Any, where: str, kind: str) -> Iterator[None]:
    """PyAV's errors, with the file that they are about."""
    try:
        yield
    except QuireError:
        raise
    except (av.FFmpegError, ValueError, OSError, ArithmeticError, LookupError, EOFError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DecodeError(f"{shown(where)}: the bytes are not {kind} that PyAV can read ({reason}).") from error


@contextmanager
def written(av: Any, what: str) -> Iterator[None]:
    """PyAV's errors while something is written."""
    try:
        yield
    except QuireError:
        raise
    except (av.FFmpegError, ValueError, LookupError) as error:
        raise EncodeError(f"the {what} cannot be written: {getattr(error, 'strerror', None) or error}.") from error


def stream_of(container: Any, where: str, kind: str) -> Any:
    """The first stream of a kind, or an error."""
    found = getattr(container.streams, kind)
    if not found:
        raise DecodeError(f"{shown(where)}: there is no {kind} in it, only {_others(container)}.")
    if found[0].codec_context is None:
        raise DecodeError(f"{shown(where)}: its {kind} is of a codec that PyAV does not know.")
    return found[0]


def seconds_of(container: Any, stream: Any) -> float:
    """How long it is by its own words; 0 if it does not say."""
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return float(container.duration or 0) / 1_000_000


def whole_packets(container: Any, stream: Any, where: str) -> Iterator[Any]:
    """The packets of a stream; one that is cut off is an error."""
    for packet in container.demux(stream):
        if packet.is_corrupt:
            at = "" if packet.dts is None else f" at about {float(packet.dts * packet.time_base):.3g} seconds"
            raise DecodeError(f"{shown(where)}: the file is cut off or damaged{at}.")
        yield packet


def _others(container: Any) -> str:
    return ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"


def _refuse(url: str, _flags: int, _options: Any) -> NoReturn:
    raise DecodeError(f"the file points to {shown(url)}, which is not opened.")
