"""Videos as files have them, frame by frame, and as arrays of (frames, rows, columns, channels)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import TypedDict, Unpack

from quire.errors import DecodeError, OptionError
from quire.files import shown
from quire.media._audio import Sound, decode_audio
from quire.media._av import Encoded, opened, pyav, seconds_of, stream_of, whole_packets
from quire.media._limits import MAX_CLIP_PIXELS, MAX_FRAME_PIXELS, MAX_FRAMES, MAX_SECONDS, too_much

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Frame(NamedTuple):
    """One picture of a video: uint8 of rows, columns and red, green, blue; when it is shown, in seconds."""

    pixels: Any
    time: float
    is_key: bool = False


class Clip(NamedTuple):
    """All frames of a video with their times in seconds, which of them are key frames, and the sound."""

    frames: Any
    times: Any
    key_frames: Any
    audio: Sound | None = None


class FrameOptions(TypedDict, total=False):
    """Which frames, and of which size.

    From `start` to before `end`, in seconds; each `stride`-th; of another size if `width` or `height` is given; with
    `key_frames` only those that stand for themselves, which skips the work for all others.
    """

    start: float
    end: float | None
    stride: int
    width: int | None
    height: int | None
    key_frames: bool


def stream_frames(
    source: Encoded, where: str = "the bytes", *, max_pixels: int = MAX_FRAME_PIXELS, **options: Unpack[FrameOptions]
) -> Iterator[Frame]:
    """The frames of a video one after the other; no more than a few are in memory.

    A frame of more than `max_pixels` is an error.
    """
    chosen = _Choice(where, max_pixels, **options)
    if chosen.stride < 1:
        raise OptionError(f"stride is 1 or more, got {chosen.stride}.")
    return _stream(source, chosen)


@dataclass(frozen=True)
class _Choice:
    where: str
    max_pixels: int
    start: float = 0.0
    end: float | None = None
    stride: int = 1
    width: int | None = None
    height: int | None = None
    key_frames: bool = False

    def check(self, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            raise too_much(self.where, f"a frame has {width} x {height} pixels", "max_pixels", self.max_pixels)


def _stream(source: Encoded, chosen: _Choice) -> Iterator[Frame]:
    with opened(source, chosen.where, "video") as container:
        yield from _frames(container, stream_of(container, chosen.where, "video"), chosen)


def _frames(container: Any, stream: Any, chosen: _Choice) -> Iterator[Frame]:
    """The frames of a stream that was just opened."""
    context = stream.codec_context
    chosen.check(context.width, context.height)
    chosen.check(chosen.width or context.width, chosen.height or context.height)
    context.options = {"max_pixels": str(chosen.max_pixels)}  # the header may lie
    if chosen.key_frames:
        context.skip_frame = "NONKEY"
    if chosen.start > 0:
        container.seek(int(chosen.start / stream.time_base), stream=stream)
    reformatter = pyav("decoding a video", "video").video.reformatter.VideoReformatter()
    count = 0
    for frame, time in _timed(container, stream, chosen.where):
        if chosen.end is not None and time >= chosen.end:
            return
        if time < chosen.start:
            continue
        if count % chosen.stride == 0:
            rgb = reformatter.reformat(frame, chosen.width or frame.width, chosen.height or frame.height, "rgb24")
            yield Frame(rgb.to_ndarray(), time, bool(frame.key_frame))
        count += 1


def _timed(container: Any, stream: Any, where: str) -> Iterator[tuple[Any, float]]:
    """Frames with their times; where the file tells none, by their number."""
    rate = float(stream.average_rate or stream.guessed_rate or 25)
    number = 0
    for packet in whole_packets(container, stream, where):
        for frame in packet.decode():
            yield frame, number / rate if frame.time is None else frame.time
            number += 1


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
    """All frames of a video, held at once, and with `audio` its sound.

    More than `max_pixels` over all frames, `max_frames` or `max_seconds` is an error.
    """
    start, end = options.get("start", 0.0), options.get("end")
    with opened(source, where, "video") as container:
        seconds = seconds_of(container, stream_of(container, where, "video"))
        has_sound = bool(container.streams.audio)
    if (seconds if end is None else min(seconds, end)) - start > max_seconds:
        raise too_much(where, f"the video has {seconds:,.1f} seconds", "max_seconds", max_seconds)
    frames = stream_frames(source, where, max_pixels=max_pixels, **options)
    clip = _clip(frames, _ClipLimit(where, max_pixels, max_frames, max_seconds))
    sound = decode_audio(source, where, max_seconds=max_seconds) if audio and has_sound else None
    return clip._replace(audio=sound)


class _ClipLimit(NamedTuple):
    where: str
    pixels: int
    frames: int
    seconds: float

    def check(self, frames: int, pixels: int, seconds: float) -> None:
        if frames > self.frames:
            raise too_much(self.where, "the video has more frames", "max_frames", self.frames)
        if pixels > self.pixels:
            raise too_much(self.where, "the frames of the video have more pixels", "max_pixels", self.pixels)
        if seconds > self.seconds:
            raise too_much(self.where, "the video goes on after that", "max_seconds", self.seconds)


def _clip(frames: Iterator[Frame], limit: _ClipLimit) -> Clip:
    held = _Held()
    times, keys = [], []
    pixels = 0
    for number, frame in enumerate(frames):
        pixels += frame.pixels.shape[0] * frame.pixels.shape[1]
        times.append(frame.time)
        limit.check(number + 1, pixels, frame.time - times[0])
        held.add(frame.pixels, limit.where)
        keys += [number] if frame.is_key else []
    if not times:
        raise DecodeError(f"{shown(limit.where)}: there is no frame in it, or none between `start` and `end`.")
    return Clip(held.array(), np.array(times), np.array(keys, np.int64))


class _Held:
    """Frames in one array that grows."""

    def __init__(self) -> None:
        self._array: NDArray[np.uint8] = np.empty((0, 0, 0, 3), np.uint8)
        self._count = 0

    def add(self, pixels: NDArray[np.uint8], where: str) -> None:
        if self._count and pixels.shape != self._array.shape[1:]:
            raise DecodeError(f"{shown(where)}: the size of the frames changes. Pass width and height.")
        if self._count == len(self._array):
            grown = np.empty((max(16, 2 * self._count), *pixels.shape), np.uint8)
            if self._count:
                grown[: self._count] = self._array
            self._array = grown
        self._array[self._count] = pixels
        self._count += 1

    def array(self) -> NDArray[np.uint8]:
        """The frames; without what was not needed, if that is much."""
        found = self._array[: self._count]
        return found if len(found) > 0.75 * len(self._array) else found.copy()
