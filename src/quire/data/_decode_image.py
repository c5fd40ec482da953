"""`decode_image`: encoded images become rows of one tensor, cropped, resized and augmented."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import Self

from quire.data._media_steps import DecodeErrors, DecodeStep, check_choices
from quire.errors import OptionError, reject_unknown_options
from quire.media import CHANNELS, INTERPOLATION_CODES, MAX_IMAGE_PIXELS, ImageRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.media import Box, ImageColor, ImageLayout, Interpolation

Crop = Literal["center", "random"]
_ATTEMPTS = 10
"""How often a random crop is drawn before the centre is taken, because none of the crops fits in the image."""
_DTYPES = ("uint8", "float16", "float32")


@reject_unknown_options
def decode_image(  # noqa: PLR0913 - the options of a step, each by name
    size: int | tuple[int, int],
    *,
    crop: Crop | None = None,
    flip: bool | float = False,
    resize: Interpolation = "bilinear",
    layout: ImageLayout = "CHW",
    dtype: str = "uint8",
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    color: ImageColor = "RGB",
    crop_scale: tuple[float, float] = (0.08, 1.0),
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3),
    center_scale: float = 1.0,
    exact: bool = False,
    max_pixels: int = MAX_IMAGE_PIXELS,
    seed: int = 0,
    threads: int | None = None,
    on_error: DecodeErrors = "raise",
    isolate: bool = False,
) -> ImageStep:
    """Decode a column of images into one tensor: a preprocessing step for `ImageBytes`, `ImageUrl` and plain bytes.

    Also takes documents and dicts of bytes and path, as Hugging Face stores images. Called with a list of values, the
    step returns one tensor in its evaluation form, without random augmentations.

    size: the height and width of the result, or one number for both.
    crop: None resizes the whole image, whatever its proportions; 'center' takes the largest centred part with the
        proportions of the result; 'random' takes a random part, and the centre in the evaluation form.
    flip: whether images are mirrored at random, with probability 0.5 or this one; never in the evaluation form.
    resize: Pillow's filter; those other than 'nearest' average the pixels that one of the result covers.
    dtype: 'uint8', or 'float32' or 'float16' with values from 0 to 1.
    normalize: the mean and standard deviation of each channel: `(value - mean) / std`; for floats, the default then.
    crop_scale, crop_ratio: the share of the area, and the proportions (width to height), of a random crop.
    center_scale: the share of each side that a centre crop takes, for instance 224 / 256.
    exact: decode every pixel with Pillow, the reference. Otherwise simplejpeg decodes JPEG if it is installed, and
        images that shrink to less than half are decoded at a reduced scale.
    max_pixels: the most pixels of an image; more are an error, before anything is decoded.
    seed: gives other random numbers than other steps of the dataset have; equal seeds crop an image and its mask alike.
    threads: that share the rows of a batch; by default one for each processor, and one in a worker process.
    on_error: 'raise', or for values that cannot be decoded: 'skip' leaves out the row, 'replace' puts the next row of
        the batch in its place, 'null' makes the value None, if the field is Optional.
    isolate: decode in child processes, one for each thread, so that a crash of a decoder library is a DecodeError of
        its row, which on_error handles, and not the end of the training run.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if normalize is not None and dtype == "uint8":
        dtype = "float32"
    mean, std = ((), ()) if normalize is None else (tuple(map(float, values)) for values in normalize)
    rows = ImageRows(height, width, color, layout, resize, dtype, mean, std, exact, max_pixels)
    return ImageStep(
        rows=rows,
        crop=crop,
        flip=0.5 if flip is True else float(flip),
        crop_scale=crop_scale,
        crop_ratio=crop_ratio,
        center_scale=center_scale,
        seed=seed,
        threads=threads,
        on_error=on_error,
        isolate=isolate,
    )


@dataclass(frozen=True, kw_only=True)
class ImageStep(DecodeStep):
    """The step that `decode_image` returns."""

    rows: ImageRows
    crop: Crop | None = None
    flip: float = 0.0
    """The probability."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    center_scale: float = 1.0

    __name__: ClassVar[str] = "decode_image"
    draws: ClassVar[int] = 3 + 2 * _ATTEMPTS  # the flip, the place, and the area and proportions of each attempt

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.rows
        check_choices(
            "decode_image",
            crop=(self.crop, (None, "center", "random")),
            resize=(rows.interpolation, tuple(INTERPOLATION_CODES)),
            layout=(rows.layout, ("CHW", "HWC")),
            dtype=(rows.dtype, _DTYPES),
            color=(rows.color, tuple(CHANNELS)),
        )
        if rows.height < 1 or rows.width < 1:
            raise OptionError(f"decode_image: size is a height and a width, got {rows.height} x {rows.width}.")
        if not 0 <= self.flip <= 1 or not 0 < self.center_scale <= 1:
            raise OptionError(f"decode_image: flip={self.flip} and center_scale={self.center_scale} are from 0 to 1.")
        for name, (low, high) in (("crop_scale", self.crop_scale), ("crop_ratio", self.crop_ratio)):
            if not 0 < low <= high or (name == "crop_scale" and high > 1):
                raise OptionError(
                    f"decode_image: {name}={(low, high)} is no range of positive numbers, of shares up to 1."
                )
        channels = CHANNELS[rows.color]
        for name, numbers in (("mean", rows.mean), ("std", rows.std)):
            if numbers and len(numbers) not in (1, channels):
                raise OptionError(f"decode_image: normalize takes {channels} channels, and the {name} is {numbers}.")
        if rows.std and not all(value > 0 for value in rows.std):
            raise OptionError(f"decode_image: the standard deviations of normalize are above 0, got {rows.std}.")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.rows.shape

    @property
    def dtype_name(self) -> str:
        """The dtype of a row."""
        return self.rows.dtype

    def evaluation(self) -> Self:
        """Return the step without random augmentations: a centre crop, and no flip."""
        return replace(self, crop="center" if self.crop == "random" else self.crop, flip=0.0)

    def decode_row(self, content: Any, row: NDArray[Any], where: str, draws: Sequence[float] | None) -> None:
        """Decode an image into a row."""
        flip = self.draws_flip(draws)
        self.rows.decode_into(
            content, row, where, lambda width, height: self.choose_box(width, height, draws), flip=flip
        )

    def draws_flip(self, draws: Sequence[float] | None) -> bool:
        """Return whether the image is mirrored."""
        return draws is not None and draws[0] < self.flip

    def choose_box(self, width: int, height: int, draws: Sequence[float] | None) -> Box:
        """Return the part of an image that is decoded."""
        if self.crop is None:
            return 0, 0, width, height
        if self.crop == "random" and draws is not None:
            box = self._draw_box(width, height, draws)
            if box is not None:
                return box
        share = self.center_scale * min(width / self.rows.width, height / self.rows.height)
        across = min(width, max(1, round(self.rows.width * share)))
        down = min(height, max(1, round(self.rows.height * share)))
        left, top = (width - across) // 2, (height - down) // 2
        return left, top, left + across, top + down

    def _draw_box(self, width: int, height: int, draws: Sequence[float]) -> Box | None:
        """Return a random part of an image, as the "random resized crop" of other libraries; None if none fits."""
        (least, most), (narrow, wide) = self.crop_scale, map(math.log, self.crop_ratio)
        for attempt in range(_ATTEMPTS):
            area = width * height * (least + (most - least) * draws[3 + 2 * attempt])
            ratio = math.exp(narrow + (wide - narrow) * draws[4 + 2 * attempt])
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                left, top = int((width - across + 1) * draws[1]), int((height - down + 1) * draws[2])
                return left, top, left + across, top + down
        return None
