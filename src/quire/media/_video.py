"""Decode and encode video: frame by frame, or as arrays of shape (frames, rows, columns, channels)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import TypedDict, Unpack

from quire.errors import DecodeError, EncodeError, OptionError, check_options, did_you_mean
from quire.files import Target, display_uri
from quire.media._audio import MAX_SECONDS, Sound, add_audio, check_samples, decode_samples, mux_audio
from quire.media._common import as_numpy, channels_last, limit_error, suffix_of, write_seekable
from quire.media._pyav import (
    Encoded,
    duration_of,
    encode_errors,
    first_stream,
    import_av,
    open_container,
    read_packets,
)
from quire.tensors import format_shape, framework_of

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream
    from numpy.typing import NDArray

MAX_FRAME_PIXELS = 89_478_485
"""Default limit on the pixels of one frame: Pillow's limit for an image."""
MAX_CLIP_PIXELS = 1 << 30
"""Default limit on the pixels of all frames that are decoded at once: 3 GiB."""
MAX_FRAMES = 100_000
"""Default limit on the frames that are decoded at once."""

_FORMATS = {  # by suffix: the container, its codecs, of which the first available one is used, and the audio codec
    "mp4": ("mp4", ("libx264", "mpeg4"), "aac"),
    "m4v": ("mp4", ("libx264", "mpeg4"), "aac"),
    "mov": ("mov", ("libx264", "mpeg4"), "aac"),
    "mkv": ("matroska", ("libx264", "mpeg4"), "aac"),
    "avi": ("avi", ("mpeg4",), "libmp3lame"),
    "webm": ("webm", ("libvpx-vp9", "libvpx"), "libopus"),
    "gif": ("gif", ("gif",), ""),
}
_DETERMINISTIC = {"libx264": {"x264-params": "cpu-independent=1"}}
"""Codec options for reproducible bytes: without them x264's macroblock tree differs between runs now and then."""
_BITEXACT = {"fflags": "+bitexact"}
"""Container options without random numbers in the header."""
_ENCODING_OPTIONS = ("codec", "codec_options", "audio")
_PIXEL_FORMATS = {1: "gray", 3: "rgb24", 4: "rgba"}


class Frame(NamedTuple):
    """One frame of a video: uint8 pixels of rows, columns and RGB, and its time in seconds."""

    pixels: Any
    time: float
    is_key: bool = False


class Clip(NamedTuple):
    """All frames of a video with their times in seconds, the indices of the key frames, and the audio."""

    frames: Any
    times: Any
    key_frames: Any
    audio: Sound | None = None


class FrameOptions(TypedDict, total=False):
    """Select and resize frames.

    Frames from `start` to before `end`, in seconds; every `stride`-th; resized if `width` or `height` is given; with
    `key_frames` only the key frames, which skips decoding all others.
    """

    start: float
    end: float | None
    stride: int
    width: int | None
    height: int | None
    key_frames: bool


# --- decoding


def stream_frames(
    source: Encoded, where: str = "the bytes", *, max_pixels: int = MAX_FRAME_PIXELS, **options: Unpack[FrameOptions]
) -> Iterator[Frame]:
    """Yield the frames of a video; only a few are in memory at a time.

    A frame of more than `max_pixels` is an error.
    """
    _check_frame_options("stream_frames()", options)
    selection = _FrameSelection(where, max_pixels, **options)
    if selection.stride < 1:
        raise OptionError(f"stride is 1 or more, got {selection.stride}.")
    return selection.read(source)  # a generator of its own, so that options are checked before the first frame


def _check_frame_options(call: str, options: FrameOptions) -> None:
    check_options(call, options, FrameOptions.__annotations__)


@dataclass(frozen=True)
class _FrameSelection:
    where: str
    max_pixels: int
    start: float = 0.0
    end: float | None = None
    stride: int = 1
    width: int | None = None
    height: int | None = None
    key_frames: bool = False

    def read(self, source: Encoded) -> Iterator[Frame]:
        with open_container(source, self.where, "video") as container:
            stream = first_stream(container, self.where, "video")
            context = stream.codec_context
            self._check_size(context.width, context.height)
            self._check_size(self.width or context.width, self.height or context.height)
            context.options = {"max_pixels": str(self.max_pixels)}  # the header may understate the size
            if self.key_frames:
                context.skip_frame = "NONKEY"
            if self.start > 0:
                container.seek(int(self.start / stream.time_base), stream=stream)
            reformatter = import_av("decoding a video", "video").video.reformatter.VideoReformatter()
            count = 0
            for frame, time in self._decode(container, stream):
                if self.end is not None and time >= self.end:
                    return
                if time < self.start:  # seeking goes back to the key frame before
                    continue
                if count % self.stride == 0:
                    rgb = reformatter.reformat(frame, self.width or frame.width, self.height or frame.height, "rgb24")
                    yield Frame(rgb.to_ndarray(), time, bool(frame.key_frame))
                count += 1

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            raise limit_error(self.where, f"a frame has {width} x {height} pixels", "max_pixels", self.max_pixels)

    def _decode(self, container: InputContainer, stream: VideoStream) -> Iterator[tuple[Any, float]]:
        """Yield frames with their times; where the file has none, the time follows from the index and the rate."""
        rate = float(stream.average_rate or stream.guessed_rate or 25)
        index = 0
        for packet in read_packets(container, stream, self.where):
            for frame in packet.decode():
                yield frame, index / rate if frame.time is None else frame.time
                index += 1


def decode_video(
    source: Encoded,
    where: str = "the bytes",
    *,
    audio: bool = False,
    max_pixels: int = MAX_CLIP_PIXELS,
    max_frames: int = MAX_FRAMES,
    max_seconds: float = MAX_SECONDS,
    **options: Unpack[FrameOptions],
) -> Clip:
    """Decode all frames of a video into one array, and with `audio` its audio, both from `start` to before `end`.

    More than `max_pixels` over all frames, `max_frames` or `max_seconds` is an error.
    """
    _check_frame_options("decode_video()", options)
    start, end = options.get("start", 0.0), options.get("end")
    with open_container(source, where, "video") as container:
        duration = duration_of(container, first_stream(container, where, "video"))
        has_audio = bool(container.streams.audio)
    if (duration if end is None else min(duration, end)) - start > max_seconds:
        raise limit_error(where, f"the video has {duration:,.1f} seconds", "max_seconds", max_seconds)
    buffer = _FrameBuffer(where)
    times: list[float] = []
    keys: list[int] = []
    pixels = 0
    for index, frame in enumerate(stream_frames(source, where, max_pixels=max_pixels, **options)):
        pixels += frame.pixels.shape[0] * frame.pixels.shape[1]
        times.append(frame.time)
        if index >= max_frames:
            raise limit_error(where, "the video has more frames", "max_frames", max_frames)
        if pixels > max_pixels:
            raise limit_error(where, "the frames of the video have more pixels", "max_pixels", max_pixels)
        if frame.time - times[0] > max_seconds:  # the header may understate the duration
            raise limit_error(where, "the video goes on after that", "max_seconds", max_seconds)
        buffer.append(frame.pixels)
        if frame.is_key:
            keys.append(index)
    if not times:
        raise DecodeError(f"{display_uri(where)}: there is no frame in it, or none between `start` and `end`.")
    sound = None
    if audio and has_audio:
        sound = decode_samples(source, where, (start, end), max_seconds=max_seconds)
    return Clip(buffer.array(), np.array(times), np.array(keys, np.int64), sound)


class _FrameBuffer:
    """An array of frames that doubles its capacity: the number of frames is not known in advance."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._array: NDArray[np.uint8] = np.empty((0, 0, 0, 3), np.uint8)
        self._count = 0

    def append(self, pixels: NDArray[np.uint8]) -> None:
        if self._count and pixels.shape != self._array.shape[1:]:
            raise DecodeError(f"{display_uri(self._where)}: the size of the frames changes. Pass width and height.")
        if self._count == len(self._array):
            grown = np.empty((max(16, 2 * self._count), *pixels.shape), np.uint8)
            if self._count:
                grown[: self._count] = self._array
            self._array = grown
        self._array[self._count] = pixels
        self._count += 1

    def array(self) -> NDArray[np.uint8]:
        """Return the frames; copied if more than a quarter of the capacity is unused."""
        frames = self._array[: self._count]
        return frames if len(frames) > 0.75 * len(self._array) else frames.copy()


# --- encoding


def encode_video(frames: Iterable[Any], rate: float, video_format: str = "mp4", **options: Any) -> bytes:
    """Encode frames as 'mp4', 'webm', 'mkv', 'gif', ...; `options` are those of `write_video`."""
    check_options("encode_video()", options, _ENCODING_OPTIONS)
    buffer = io.BytesIO()
    write_video(frames, buffer, rate, video_format, **options)
    return buffer.getvalue()


def to_video_bytes(
    frames: Iterable[Any], rate: float, video_format: str = "mp4", *, channel_axis: int = -1, **options: Any
) -> bytes:
    """Encode frames, a tensor or any iterable of tensors. `options`: codec, codec_options, audio."""
    check_options("to_video_bytes()", options, _ENCODING_OPTIONS)
    return encode_video(_channels_last_frames(frames, channel_axis), rate, video_format, **options)


def save_video(
    frames: Iterable[Any],
    file: Target,
    rate: float,
    *,
    video_format: str | None = None,
    channel_axis: int = -1,
    **options: Any,
) -> None:
    """Write frames to a file: a tensor, or any iterable of frames, of which one is in memory at a time.

    The format is by default that of the file's suffix. `options`: codec and codec_options, which are FFmpeg's, and
    audio, a `Sound`.
    """
    check_options("save_video()", options, _ENCODING_OPTIONS)  # before the file is created
    name = video_format or suffix_of(file, "mp4")
    write_seekable(
        file, lambda target: write_video(_channels_last_frames(frames, channel_axis), target, rate, name, **options)
    )


def _channels_last_frames(frames: Any, channel_axis: int) -> Any:
    """Move the channels to the last axis; `channel_axis` counts in the whole tensor, or in each item of an iterable."""
    if channel_axis == -1:
        return frames
    if framework_of(frames) is not None:
        return channels_last(as_numpy(frames), channel_axis)
    if isinstance(frames, (str, bytes)) or not isinstance(frames, Iterable):
        raise OptionError(f"frames are a tensor or an iterable of tensors, got {type(frames).__name__}.")
    return (channels_last(as_numpy(getattr(frame, "pixels", frame)), channel_axis) for frame in frames)


def write_video(
    frames: Iterable[Any],
    file: IO[bytes],
    rate: float,
    video_format: str,
    *,
    codec: str | None = None,
    codec_options: Mapping[str, str] | None = None,
    audio: Sound | None = None,
) -> None:
    """Encode frames into a seekable file: a tensor, or any iterable of frames, of which one is in memory at a time.

    `codec` and `codec_options` are FFmpeg's: 'libx264' with {'crf': '18'}. `audio` is the sound track. The same frames
    give the same bytes with the same FFmpeg on the same number of cores, unless `codec_options` sets 'x264-params'.
    """
    av = import_av("encoding a video", "video")
    if video_format.lower() not in _FORMATS:
        near = did_you_mean(video_format, _FORMATS)
        raise EncodeError(f"{video_format!r} is not a format of videos that can be written. {near}")
    if not rate > 0:
        raise OptionError(f"rate is the number of frames per second, got {rate}.")
    container_format, codecs, audio_codec = _FORMATS[video_format.lower()]
    codec = codec or next((name for name in codecs if name in av.codecs_available), codecs[0])
    checked = _check_frames(frames)
    first = next(checked, None)
    if first is None:
        raise EncodeError("a video has at least one frame, and there is none.")
    with encode_errors(av, "video"), av.open(file, "w", format=container_format, options=_BITEXACT) as container:
        options = {**_DETERMINISTIC.get(codec, {}), **(codec_options or {})}
        stream = container.add_stream(codec, rate=Fraction(rate).limit_denominator(1001), options=options)
        stream.height, stream.width = first.shape[:2]
        supported = [pixel_format.name for pixel_format in stream.codec_context.codec.video_formats or ()]
        is_even = not (stream.height % 2 or stream.width % 2)
        # yuv420p, which every player shows, has one color value for two rows and columns.
        preferred = ("yuv420p", "rgb8", "yuv444p") if is_even else ("yuv444p", "rgb8")
        default = supported[0] if supported else "yuv420p"
        stream.pix_fmt = next((name for name in preferred if name in supported), default)
        samples = audio_stream = None
        if audio is not None:  # every stream must be added before the first packet is written
            samples = check_samples(as_numpy(audio.samples))
            audio_stream = add_audio(av, container, audio_codec, samples, audio.rate)
        for frame in chain([first], checked):
            if frame.shape != first.shape:
                shapes = f"{format_shape(first.shape)} and {format_shape(frame.shape)}"
                raise EncodeError(f"the frames of a video are of one shape, got {shapes}.")
            plain = np.ascontiguousarray(frame[..., 0] if frame.shape[2] == 1 else frame)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(plain, format=_PIXEL_FORMATS[frame.shape[2]])))
        container.mux(stream.encode(None))
        if audio is not None and samples is not None:
            mux_audio(av, container, audio_stream, samples, audio.rate)


def _check_frames(frames: Iterable[Any]) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames as arrays of three axes; raise for what is not a frame."""
    items: Iterable[Any] = as_numpy(frames) if framework_of(frames) is not None else frames
    for number, frame in enumerate(items):
        array = as_numpy(getattr(frame, "pixels", frame))
        array = array[..., None] if array.ndim == 2 else array
        if array.ndim != 3 or array.dtype != np.uint8 or array.shape[2] not in _PIXEL_FORMATS or not array.size:
            raise EncodeError(
                f"a frame is uint8 of rows, columns and 1, 3 or 4 channels; frame {number} is {array.dtype} "
                f"{format_shape(array.shape)}. Pass channel_axis=1 if the channels come first."
            )
        yield array
