"""Decode a number of frames of a video into a row of one array: which frames, and where they are in the file.

A first look at the packets, without decoding, gives the time of every frame and of the key frames. So the frames are
chosen exactly, also where the header states a wrong duration, and only what they depend on is decoded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.errors import DecodeError
from quire.files import display_uri
from quire.media._common import limit_error
from quire.media._image_rows import ChooseBox, ImageRows
from quire.media._pyav import first_stream, import_av, open_container, read_packets
from quire.media._video import MAX_FRAMES

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream
    from numpy.typing import NDArray

_FILTERS = {"nearest": "POINT", "box": "AREA", "bilinear": "BILINEAR", "bicubic": "BICUBIC", "lanczos": "LANCZOS"}


class FrameTimes(NamedTuple):
    """The times of the frames of a video in units of its stream, in order, and those of its key frames."""

    times: list[int]
    keys: list[int]
    seconds: float
    """The length of a unit."""


ChooseFrames = Callable[[FrameTimes], list[int]]
"""Returns the indices of the frames of a video that are decoded, in order."""


@dataclass(frozen=True)
class VideoRows:
    """How encoded videos become rows of an array: each frame as `images` say, in its layout and dtype."""

    images: ImageRows
    max_frames: int = MAX_FRAMES

    def decode_into(
        self,
        content: Any,
        row: NDArray[Any],
        where: str,
        choose_frames: ChooseFrames,
        choose_box: ChooseBox,
        *,
        flip: bool = False,
    ) -> int:
        """Decode the chosen frames into the frames of a row, and return their number; the others become zeros."""
        with open_container(content, where, "video") as container:
            stream = first_stream(container, where, "video")
            times = self._scan(container, stream, where)
            chosen = choose_frames(times)
            if not chosen:
                raise DecodeError(f"{display_uri(where)}: there is no frame in it.")
            frames = self._decode(container, stream, times, [times.times[index] for index in chosen], where)
            reformatter = import_av("decoding a video", "video").video.reformatter.VideoReformatter()
            count = 0
            for frame in frames:
                pixels = self._resize(reformatter, frame, choose_box)
                self.images.write(pixels[:, ::-1] if flip else pixels, row[count])
                count += 1
        row[count:] = 0
        return count

    def _scan(self, container: InputContainer, stream: VideoStream, where: str) -> FrameTimes:
        """Read the times of all frames from the packets, and return to the beginning."""
        context = stream.codec_context
        self.images.check_pixels(context.width, context.height, where)
        context.options = {"max_pixels": str(self.images.max_pixels)}  # the header may understate the size
        context.thread_count = 1  # rows are decoded at the same time, by threads of their own
        times, keys = [], []
        for packet in read_packets(container, stream, where):
            time = packet.dts if packet.pts is None else packet.pts
            if time is None or not packet.size:
                continue
            times.append(time)
            if packet.is_keyframe:
                keys.append(time)
            if len(times) > self.max_frames:
                raise limit_error(where, "the video has more frames", "max_frames", self.max_frames)
        if not times:
            raise DecodeError(f"{display_uri(where)}: there is no frame in it, or none with a time.")
        container.seek(min(times), stream=stream)
        return FrameTimes(sorted(times), sorted(keys), float(stream.time_base or 1))

    def _decode(
        self, container: InputContainer, stream: VideoStream, times: FrameTimes, chosen_times: list[int], where: str
    ) -> Iterator[Any]:
        """Yield the frame at each time, or the next one after it; the last frame of the video for all that is left."""
        position, last = 0, None
        if set(chosen_times) <= set(times.keys):
            stream.codec_context.skip_frame = "NONKEY"
        while position < len(chosen_times):
            begin = position
            for packet in read_packets(container, stream, where):
                for frame in packet.decode():
                    last = frame
                    while position < len(chosen_times) and (frame.pts is None or frame.pts >= chosen_times[position]):
                        yield frame
                        position += 1
                if position == len(chosen_times):
                    return
                # Skip to the key frame before the next one, if it is further than what follows here.
                key = bisect_right(times.keys, chosen_times[position]) - 1
                if position > begin and key >= 0 and last is not None and times.keys[key] > (last.pts or 0):
                    container.seek(times.keys[key], stream=stream)
                    stream.codec_context.flush_buffers()
                    break
            else:
                break  # the end of the video
        if last is None:
            raise DecodeError(f"{display_uri(where)}: no frame of it can be decoded.")
        for _ in range(len(chosen_times) - position):
            yield last

    def _resize(self, reformatter: Any, frame: Any, choose_box: ChooseBox) -> NDArray[np.uint8]:
        """Resize a frame so that the chosen part has the size of the row, and cut the part out."""
        images = self.images
        left, top, right, bottom = choose_box(frame.width, frame.height)
        across, down = images.width / (right - left), images.height / (bottom - top)
        width = max(images.width, round(frame.width * across))
        height = max(images.height, round(frame.height * down))
        name = {"RGB": "rgb24", "L": "gray", "RGBA": "rgba"}[images.color]
        resized = reformatter.reformat(frame, width, height, name, interpolation=_FILTERS[images.interpolation])
        x = min(round(left * across), width - images.width)
        y = min(round(top * down), height - images.height)
        pixels: NDArray[np.uint8] = resized.to_ndarray().reshape(height, width, -1)
        return pixels[y : y + images.height, x : x + images.width]
