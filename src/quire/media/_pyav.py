"""Audio and video containers, read by PyAV.

PyAV gets the bytes and nothing else: never a URL, and no format that refers to other files, such as playlists.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn

from quire._optional import require
from quire.errors import DecodeError, EncodeError, QuireError
from quire.files import display_uri

if TYPE_CHECKING:
    from types import ModuleType

    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.stream import Stream
    from av.video.stream import VideoStream


Encoded = bytes | bytearray | memoryview | IO[bytes]
"""Encoded media: its bytes, or a readable and seekable file."""
Kind = Literal["audio", "video"]

_FORMATS = (
    "aac,ac3,aiff,amr,apng,asf,au,avi,caf,dv,eac3,flac,flv,gif,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mp3,mpeg,mpegts,"
    "mpegvideo,mxf,nut,ogg,rm,tta,voc,w64,wav,wv"
)
_BUFFER = 1 << 17


def import_av(needed_for: str, extra: Kind) -> ModuleType:
    """Import PyAV, or raise an error with the install command."""
    return require("av", extra=extra, needed_for=needed_for)


@contextmanager
def open_container(source: Encoded, where: str, kind: Kind) -> Iterator[Any]:
    """Open a container for reading, and turn PyAV's errors into DecodeError, also while it is read."""
    av = import_av(f"decoding {'sound' if kind == 'audio' else 'a video'}", kind)
    file = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
    file.seek(0)
    try:
        # The whitelists keep FFmpeg from opening files and URLs that the content names, and `io_open` refuses the rest.
        options = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
        with av.open(
            file, options=options, metadata_errors="replace", buffer_size=_BUFFER, io_open=_refuse
        ) as container:
            yield container
    except QuireError:
        raise
    except (av.FFmpegError, ValueError, OSError, ArithmeticError, LookupError, EOFError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DecodeError(f"{display_uri(where)}: the bytes are not {kind} that PyAV can read ({reason}).") from error


def _refuse(url: str, _flags: int, _options: object) -> NoReturn:
    raise DecodeError(f"the file refers to {display_uri(url)}, which is not opened.")


@contextmanager
def encode_errors(av: ModuleType, what: str) -> Iterator[None]:
    """Turn PyAV's errors while something is written into EncodeError."""
    try:
        yield
    except QuireError:
        raise
    except (av.FFmpegError, ValueError, LookupError) as error:
        raise EncodeError(f"the {what} cannot be written: {getattr(error, 'strerror', None) or error}.") from error


def first_stream(container: InputContainer, where: str, kind: Kind) -> AudioStream | VideoStream:
    """Return the first audio or video stream, or raise."""
    streams = getattr(container.streams, kind)
    if not streams:
        others = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise DecodeError(f"{display_uri(where)}: there is no {kind} in it, only {others}.")
    if streams[0].codec_context is None:
        raise DecodeError(f"{display_uri(where)}: PyAV does not know the codec of its {kind}.")
    return streams[0]


def duration_of(container: InputContainer, stream: Stream) -> float:
    """Return the duration in seconds that the header states; 0 if it states none."""
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return float(container.duration or 0) / 1_000_000


def read_packets(container: InputContainer, stream: Stream, where: str) -> Iterator[Any]:
    """Yield the packets of a stream; raise for a truncated one."""
    for packet in container.demux(stream):
        if packet.is_corrupt:
            position = "" if packet.dts is None else f" at about {float(packet.dts * packet.time_base):.3g} seconds"
            raise DecodeError(f"{display_uri(where)}: the file is cut off or damaged{position}.")
        yield packet
