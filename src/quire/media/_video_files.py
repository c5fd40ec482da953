"""Frames written as videos."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from quire.errors import EncodeError, OptionError, did_you_mean
from quire.media._audio import Sound, add_audio, checked_sound, mux_audio
from quire.media._av import pyav, written
from quire.media._tensors import as_numpy
from quire.tensors import format_shape, framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FORMATS = {  # by the suffix: the container, the codecs of which the first that is there is used, that of the sound
    "mp4": ("mp4", ("libx264", "mpeg4"), "aac"),
    "m4v": ("mp4", ("libx264", "mpeg4"), "aac"),
    "mov": ("mov", ("libx264", "mpeg4"), "aac"),
    "mkv": ("matroska", ("libx264", "mpeg4"), "aac"),
    "avi": ("avi", ("mpeg4",), "libmp3lame"),
    "webm": ("webm", ("libvpx-vp9", "libvpx"), "libopus"),
    "gif": ("gif", ("gif",), ""),
}
_SAME = {"libx264": {"x264-params": "cpu-independent=1"}}
"""Options with which codecs give the same bytes every time: x264's macroblock tree otherwise differs now and then."""
_BITEXACT = {"fflags": "+bitexact"}
"""Without random numbers in the header."""
_PIXELS = {1: "gray", 3: "rgb24", 4: "rgba"}


def encode_video(frames: Any, rate: float, video_format: str = "mp4", **options: Any) -> bytes:
    """Frames as an encoded video: 'mp4', 'webm', 'mkv', 'gif', ...; `options` are those of `write_video`."""
    buffer = io.BytesIO()
    write_video(frames, buffer, rate, video_format, **options)
    return buffer.getvalue()


def write_video(
    frames: Any,
    file: IO[bytes],
    rate: float,
    video_format: str,
    *,
    codec: str | None = None,
    codec_options: Mapping[str, str] | None = None,
    audio: Sound | None = None,
) -> None:
    """Write frames to a file that can be sought in: a tensor of them, or any iterable, of which one is held at a time.

    `codec` and its options are FFmpeg's: 'libx264' with {'crf': '18'}. `audio` is the sound of it. The same frames give
    the same bytes with the same FFmpeg on as many cores, unless `codec_options` have 'x264-params' of their own.
    """
    av = pyav("encoding a video", "video")
    container_format, codecs, audio_codec = _format_of(video_format)
    chosen = codec or next((name for name in codecs if name in av.codecs_available), codecs[0])
    given = _checked(frames)
    first = next(given, None)
    if first is None:
        raise EncodeError("a video has at least one frame, and there is none.")
    with written(av, "video"), av.open(file, "w", format=container_format, options=_BITEXACT) as container:
        how = {**_SAME.get(chosen, {}), **(codec_options or {})}
        stream = _add_video(container, chosen, _rate(rate), first, how)
        sound = None if audio is None else checked_sound(as_numpy(audio.samples))
        sounds = None if audio is None or sound is None else add_audio(av, container, audio_codec, sound, audio.rate)
        for frame in chain([first], given):
            container.mux(stream.encode(_to_frame(av, frame, first)))
        container.mux(stream.encode(None))
        if audio is not None and sound is not None:
            mux_audio(av, container, sounds, sound, audio.rate)


def _format_of(name: str) -> tuple[str, tuple[str, ...], str]:
    if name.lower() not in _FORMATS:
        raise EncodeError(f"{name!r} is not a format of videos that is written here. {did_you_mean(name, _FORMATS)}")
    return _FORMATS[name.lower()]


def _rate(rate: float) -> Fraction:
    if not rate > 0:
        raise OptionError(f"rate is the number of frames a second, got {rate}.")
    return Fraction(rate).limit_denominator(1001)


def _checked(frames: Any) -> Iterator[NDArray[np.uint8]]:
    """The frames one by one, each as an array of three axes."""
    given: Iterable[Any] = as_numpy(frames) if framework_of(frames) is not None else frames
    for number, frame in enumerate(given):
        array = as_numpy(getattr(frame, "pixels", frame))
        array = array[..., None] if array.ndim == 2 else array
        if array.ndim != 3 or array.dtype != np.uint8 or array.shape[2] not in _PIXELS or not array.size:
            raise EncodeError(
                f"a frame is uint8 of rows, columns and 1, 3 or 4 channels; frame {number} is {array.dtype} "
                f"{format_shape(array.shape)}. Channels in front are told by channel_axis=1."
            )
        yield array


def _add_video(container: Any, codec: str, rate: Fraction, frame: NDArray[np.uint8], options: dict[str, str]) -> Any:
    stream = container.add_stream(codec, rate=rate, options=options)
    stream.height, stream.width = frame.shape[:2]
    known = [found.name for found in stream.codec_context.codec.video_formats or ()]
    even = not (stream.height % 2 or stream.width % 2)
    wanted = ("yuv420p", "rgb8", "yuv444p") if even else ("yuv444p", "rgb8")  # half as many colours need even sizes
    stream.pix_fmt = next((name for name in wanted if name in known), known[0] if known else "yuv420p")
    return stream


def _to_frame(av: Any, array: NDArray[np.uint8], first: NDArray[np.uint8]) -> Any:
    if array.shape != first.shape:
        raise EncodeError(
            f"the frames of a video are of one shape, got {format_shape(first.shape)} and {format_shape(array.shape)}."
        )
    plain = array[..., 0] if array.shape[2] == 1 else array
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(plain), format=_PIXELS[array.shape[2]])
