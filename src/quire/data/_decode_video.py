"""`decode_video`: some frames of encoded videos become rows of one tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import Self

from quire.data._decode_image import Crop, ImageStep, decode_image
from quire.data._media_steps import DecodeErrors, DecodeStep, check_choices
from quire.errors import OptionError, reject_unknown_options
from quire.media import MAX_FRAME_PIXELS, MAX_FRAMES, VideoRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.media import FrameTimes, ImageColor, Interpolation

VideoLayout = Literal["TCHW", "THWC", "CTHW"]
Clip = Literal["start", "center", "random"]


@reject_unknown_options
def decode_video(  # noqa: PLR0913 - the options of a step, each by name
    frames: int,
    size: int | tuple[int, int],
    *,
    rate: float | None = None,
    key_frames: bool = False,
    clip: Clip = "start",
    crop: Crop | None = None,
    flip: bool | float = False,
    resize: Interpolation = "bilinear",
    layout: VideoLayout = "TCHW",
    dtype: str = "uint8",
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    color: ImageColor = "RGB",
    max_pixels: int = MAX_FRAME_PIXELS,
    max_frames: int = MAX_FRAMES,
    seed: int = 0,
    threads: int | None = None,
    on_error: DecodeErrors = "raise",
    isolate: bool = False,
) -> VideoStep:
    """Decode frames of a column of videos into one tensor: a step for `VideoBytes`, `VideoUrl` and plain bytes.

    By default, `frames` frames are spread evenly over the video. All frames of a video get the same crop and flip.
    Called with a list of values, the step returns one tensor in its evaluation form.

    rate: take frames at this number per second instead. If the video ends before, the others are zeros, and
        `batch.mask(path)` shows which are its own.
    key_frames: take key frames only, which are the fastest to decode: spread evenly if there are more of them than
        `frames`, followed by zeros if there are less.
    clip: with `rate`, where the frames begin in a longer video: at its 'start', so that they are its 'center', or at
        a 'random' time, which is the centre in the evaluation form.
    max_pixels, max_frames: limits on the pixels of a frame, and on the frames of a video; more are an error.

    The other options are those of `decode_image`. FFmpeg resizes, not Pillow; `resize='hamming'` does not exist.
    """
    image = decode_image(
        size,
        crop=crop,
        flip=flip,
        resize=resize,
        layout="HWC" if layout == "THWC" else "CHW",
        dtype=dtype,
        normalize=normalize,
        color=color,
        max_pixels=max_pixels,
        seed=seed,
        threads=threads,
        on_error=on_error,
        isolate=isolate,
    )
    return VideoStep(
        frames=frames,
        image=image,
        rate=rate,
        key_frames=key_frames,
        clip=clip,
        layout=layout,
        max_frames=max_frames,
        seed=seed,
        threads=threads,
        on_error=on_error,
        isolate=isolate,
    )


@dataclass(frozen=True, kw_only=True)
class VideoStep(DecodeStep):
    """The step that `decode_video` returns."""

    frames: int
    image: ImageStep
    """How each frame is decoded."""
    rate: float | None = None
    key_frames: bool = False
    clip: Clip = "start"
    layout: VideoLayout = "TCHW"
    max_frames: int = MAX_FRAMES

    __name__: ClassVar[str] = "decode_video"
    draws: ClassVar[int] = ImageStep.draws + 1  # the last one is the time

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(
            "decode_video",
            layout=(self.layout, ("TCHW", "THWC", "CTHW")),
            clip=(self.clip, ("start", "center", "random")),
            resize=(self.image.rows.interpolation, ("nearest", "box", "bilinear", "bicubic", "lanczos")),
        )
        if self.frames < 1 or (self.rate is not None and not self.rate > 0):
            raise OptionError(f"decode_video: frames={self.frames} and rate={self.rate} are above 0.")
        if self.key_frames and self.rate is not None:
            raise OptionError("decode_video: frames are taken by `rate`, or they are key frames, not both.")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        first, *rest = self.image.shape
        return (first, self.frames, *rest) if self.layout == "CTHW" else (self.frames, first, *rest)

    @property
    def length_axis(self) -> int:
        """The axis of the frames."""
        return 1 if self.layout == "CTHW" else 0

    @property
    def dtype_name(self) -> str:
        """The dtype of a row."""
        return self.image.dtype_name

    def evaluation(self) -> Self:
        """Return the step without random augmentations: the centre in time and space, and no flip."""
        clip: Clip = "center" if self.clip == "random" else self.clip
        return replace(self, image=self.image.evaluation(), clip=clip)

    def decode_row(self, content: Any, row: NDArray[Any], where: str, draws: Sequence[float] | None) -> int:
        """Decode frames into a row, and return their number."""
        rows = VideoRows(self.image.rows, self.max_frames)
        return rows.decode_into(
            content,
            row.swapaxes(0, 1) if self.layout == "CTHW" else row,
            where,
            lambda times: self._choose_frames(times, draws),
            lambda width, height: self.image.choose_box(width, height, draws),
            flip=self.image.draws_flip(draws),
        )

    def _choose_frames(self, video: FrameTimes, draws: Sequence[float] | None) -> list[int]:
        times, number = video.times, self.frames
        if self.key_frames:
            keys = sorted({bisect_right(times, key) - 1 for key in video.keys})
            if len(keys) <= number:
                return keys
            return [keys[int((frame + 0.5) * len(keys) / number)] for frame in range(number)]
        if self.rate is None:
            return [int((frame + 0.5) * len(times) / number) for frame in range(number)]
        step = 1 / (self.rate * video.seconds)  # between two frames, in units of the stream
        extra = max(0.0, times[-1] - times[0] - step * (number - 1))
        share = 0.0 if self.clip == "start" else draws[-1] if draws is not None and self.clip == "random" else 0.5
        start = times[0] + extra * share
        # Half a unit more, because times of a stream are rounded to whole units.
        moments = [start + step * frame + 0.5 for frame in range(number)]
        # The last frame is shown as long as those before it.
        end = times[-1] + (times[-1] - times[0]) / max(len(times) - 1, 1)
        return [bisect_right(times, time) - 1 for time in moments if time < max(end, times[0] + 1)]
