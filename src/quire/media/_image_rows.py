"""Decode images into rows of one array: crop, resize, rotate, flip and normalise without an object per image.

`IMAGE_DECODERS` says which library decodes which format. Everything after decoding is the same for all of them, so two
decoders differ by the pixels that they decode and by nothing else.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from quire._optional import require
from quire.errors import DecodeError, EncodeError
from quire.files import display_uri
from quire.media._common import is_available, limit_error
from quire.media._images import encode_image, import_pillow, open_image, to_rgb
from quire.media._media_types import detect_media_type

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

ImageColor = Literal["RGB", "L", "RGBA"]
ImageLayout = Literal["CHW", "HWC"]
Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels."""
ChooseBox = Callable[[int, int], Box]
"""Returns the part of an image of a width and height that is decoded."""

CHANNELS: dict[str, int] = {"L": 1, "RGB": 3, "RGBA": 4}
MAX_IMAGE_PIXELS = 89_478_485
"""Default limit on the pixels of an image: Pillow's own."""

# EXIF orientations from 5 on swap the width and the height; then, some mirror the columns, and some the rows.
_SWAPPED = 5
_MIRRORED_COLUMNS = (2, 3, 6, 7)
_MIRRORED_ROWS = (3, 4, 7, 8)
_ORIENTATION = 0x0112


# --- the decoders


class ImageDecoder(NamedTuple):
    """A library that decodes images: its module, its extra, the formats that it serves, and its function."""

    module: str
    extra: str
    media_types: tuple[str, ...]
    """The media types it serves; empty for every format that the library knows."""
    decode: Callable[[ImageRows, Any, str, ChooseBox], NDArray[np.uint8]]

    def serves(self, media_type: str | None) -> bool:
        """Return whether the library is installed and decodes a format."""
        return (not self.media_types or media_type in self.media_types) and is_available(self.module)


@dataclass(frozen=True)
class ImageRows:
    """How encoded images become rows of an array, all of one shape and dtype.

    The part of an image that is decoded is chosen by a function of its width and height, after the rotation that its
    EXIF data asks for. With `exact`, Pillow decodes every pixel; otherwise the fastest decoder may decode JPEG at a
    reduced scale, which is never below the size of the result.
    """

    height: int
    width: int
    color: ImageColor = "RGB"
    layout: ImageLayout = "CHW"
    interpolation: Interpolation = "bilinear"
    dtype: str = "uint8"
    mean: tuple[float, ...] = ()
    """The mean of each channel, of values from 0 to 1; with `std`, for floats only."""
    std: tuple[float, ...] = ()
    exact: bool = False
    max_pixels: int = MAX_IMAGE_PIXELS

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a row."""
        channels = CHANNELS[self.color]
        return (channels, self.height, self.width) if self.layout == "CHW" else (self.height, self.width, channels)

    def decode_into(
        self, content: Any, row: NDArray[Any], where: str, choose_box: ChooseBox, *, flip: bool = False
    ) -> None:
        """Decode an image into a row of an array, mirrored with `flip`. Bytes that are no image raise a DecodeError."""
        media_type = detect_media_type(content)
        if not len(content):
            raise DecodeError(f"{display_uri(where)}: there are no bytes to decode.")
        if media_type is not None and not media_type.startswith("image/"):
            raise DecodeError(f"{display_uri(where)}: the bytes are {media_type}, not an image.")
        decoders = IMAGE_DECODERS[-1:] if self.exact else IMAGE_DECODERS
        decode = next((decoder.decode for decoder in decoders if decoder.serves(media_type)), _decode_with_pillow)
        pixels = decode(self, content, where, choose_box)
        self.write(pixels[:, ::-1] if flip else pixels, row)

    def check_pixels(self, width: int, height: int, where: str) -> None:
        """Raise an error for an image without pixels, or with more than `max_pixels`."""
        if width < 1 or height < 1:
            raise DecodeError(f"{display_uri(where)}: the image has {width} x {height} pixels.")
        if width * height > self.max_pixels:
            raise limit_error(where, f"the image has {width} x {height} pixels", "max_pixels", self.max_pixels)

    def write(self, pixels: NDArray[np.uint8], row: NDArray[Any]) -> None:
        """Write uint8 pixels of rows, columns and channels to a row, in its layout and dtype."""
        if self.layout == "CHW":
            pixels = pixels.transpose(2, 0, 1)
        if self.dtype == "uint8":
            row[...] = pixels
            return
        scale, bias = _affine(self.mean, self.std)
        channels = (slice(None), None, None) if self.layout == "CHW" else ...
        wide = row if row.dtype == np.float32 else np.empty(row.shape, np.float32)
        np.multiply(pixels, scale[channels], out=wide)
        if bias.any():
            np.add(wide, bias[channels], out=wide)
        if wide is not row:
            row[...] = wide

    def resize(self, pixels: NDArray[np.uint8], box: Sequence[float], size: tuple[int, int]) -> NDArray[np.uint8]:
        """Resize a part of an array of rows, columns and channels; the box may have fractions of pixels."""
        left, top, right, bottom = math.floor(box[0]), math.floor(box[1]), math.ceil(box[2]), math.ceil(box[3])
        _, width, channels = pixels.shape
        if (right - left, bottom - top) == size and all(float(edge).is_integer() for edge in box):
            return pixels[top:bottom, left:right]
        # Pillow copies the part, and nothing around it, from rows that are `stride` bytes apart.
        mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
        stride = width * channels
        start = top * stride + left * channels
        image = import_pillow("decoding an image").frombuffer(
            mode, (right - left, bottom - top), pixels.reshape(-1)[start:], "raw", mode, stride, 1
        )
        return self.resize_image(image, (box[0] - left, box[1] - top, box[2] - left, box[3] - top), size)

    def resize_image(self, image: Image, box: Sequence[float], size: tuple[int, int]) -> NDArray[np.uint8]:
        """Resize a part of a Pillow image, and return its pixels as rows, columns and channels."""
        if (*box,) != (0, 0, *size) or image.size != size:
            image = image.resize(size, INTERPOLATION_CODES[self.interpolation], tuple(box))
        if self.layout == "HWC" or image.mode == "L":
            return np.asarray(image).reshape(size[1], size[0], -1)
        # Pillow separates the channels in two thirds of the time that numpy takes.
        channels = np.empty((CHANNELS[image.mode], size[1], size[0]), np.uint8)
        for channel, band in zip(channels, image.split(), strict=True):
            channel[...] = np.asarray(band)
        pixels: NDArray[np.uint8] = channels.transpose(1, 2, 0)
        return pixels


@functools.lru_cache(64)
def _affine(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the factors and summands of each channel that normalise pixels from 0 to 255."""
    means, deviations = np.array(mean or (0.0,)), np.array(std or (1.0,))
    return (1 / (255 * deviations)).astype(np.float32), (-means / deviations).astype(np.float32)


INTERPOLATION_CODES = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
"""The numbers of Pillow's `Image.Resampling`, so that options are checked without Pillow."""


class _Placement(NamedTuple):
    """Where the chosen part of an image is in the stored pixels, which EXIF data may say to rotate."""

    box: Box
    size: tuple[int, int]
    """The width and height of the result before it is rotated."""

    @classmethod
    def of(cls, rows: ImageRows, stored: tuple[int, int], orientation: int, choose_box: ChooseBox) -> _Placement:
        width, height = stored[::-1] if orientation >= _SWAPPED else stored
        left, top, right, bottom = choose_box(width, height)
        # The columns or rows of the upright image may run the other way in the stored one.
        if orientation in _MIRRORED_COLUMNS:
            left, right = width - right, width - left
        if orientation in _MIRRORED_ROWS:
            top, bottom = height - bottom, height - top
        if orientation >= _SWAPPED:
            return cls((top, left, bottom, right), (rows.height, rows.width))
        return cls((left, top, right, bottom), (rows.width, rows.height))

    def scale(self) -> tuple[float, float]:
        """Return how much the width and height of the part shrink; above 1 if they grow."""
        left, top, right, bottom = self.box
        return self.size[0] / (right - left), self.size[1] / (bottom - top)


def _rotate(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return a view of stored pixels as an EXIF orientation, from 1 to 8, says that they are shown."""
    if orientation >= _SWAPPED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in _MIRRORED_ROWS:
        pixels = pixels[::-1]
    if orientation in _MIRRORED_COLUMNS:
        pixels = pixels[:, ::-1]
    return pixels


def _decode_with_simplejpeg(rows: ImageRows, content: Any, where: str, choose_box: ChooseBox) -> NDArray[np.uint8]:
    simplejpeg: Any = require("simplejpeg", extra="decode", needed_for="decoding JPEG")
    color = {"L": "GRAY", "RGB": "RGB", "RGBA": "RGBA"}[rows.color]
    try:
        height, width, stored_color, _ = simplejpeg.decode_jpeg_header(content)
        if stored_color in ("CMYK", "YCCK"):
            return _decode_with_pillow(rows, content, where, choose_box)
        rows.check_pixels(width, height, where)
        orientation = _read_jpeg_orientation(content)
        place = _Placement.of(rows, (width, height), orientation, choose_box)
        factors = place.scale()
        # libjpeg has fast code for some reduced scales only: from half the size down, all of them save time.
        pixels = simplejpeg.decode_jpeg(
            content,
            color,
            min_width=math.ceil(width * min(factors[0], 1)),
            min_height=math.ceil(height * min(factors[1], 1)),
            min_factor=2,
        )
    except ValueError:
        # simplejpeg raises for the slightest damage, such as a stray byte between two segments, which every other
        # decoder ignores. The reference decoder decides whether the image can be used.
        return _decode_with_pillow(rows, content, where, choose_box)
    across, down = pixels.shape[1] / width, pixels.shape[0] / height
    left, top, right, bottom = place.box
    box = left * across, top * down, right * across, bottom * down
    return _rotate(rows.resize(pixels, box, place.size), orientation)


def _decode_with_pillow(rows: ImageRows, content: Any, where: str, choose_box: ChooseBox) -> NDArray[np.uint8]:
    with open_image(content, where) as image:
        width, height = image.size
        rows.check_pixels(width, height, where)
        orientation = _read_orientation(image)
        place = _Placement.of(rows, (width, height), orientation, choose_box)
        if image.format == "JPEG" and not rows.exact and image.mode in ("L", "RGB"):
            factors = place.scale()
            image.draft(None, (math.ceil(width * min(factors[0], 1)), math.ceil(height * min(factors[1], 1))))
        across, down = image.width / width, image.height / height
        left, top, right, bottom = place.box
        box = left * across, top * down, right * across, bottom * down
        edges = math.floor(box[0]), math.floor(box[1]), math.ceil(box[2]), math.ceil(box[3])
        part = _convert(image, rows.color, where)
        if edges != (0, 0, *part.size):
            part = part.crop(edges)
            box = box[0] - edges[0], box[1] - edges[1], box[2] - edges[0], box[3] - edges[1]
        return _rotate(rows.resize_image(part, box, place.size), orientation)


def _convert(image: Image, color: ImageColor, where: str) -> Image:
    if image.mode == color:
        image.load()
        return image
    if color == "RGBA" and image.mode in ("LA", "PA", "P", "La", "RGBa"):
        return image.convert("RGBA")
    if color == "L" and image.mode in ("1", "RGB"):
        return image.convert("L")
    rgb = to_rgb(image, where)
    return rgb if color == "RGB" else rgb.convert(color)


IMAGE_DECODERS = (
    ImageDecoder("simplejpeg", "decode", ("image/jpeg",), _decode_with_simplejpeg),
    ImageDecoder("PIL", "image", (), _decode_with_pillow),
)
"""The decoders of images, the best one first; the last is the reference."""


def encode_row(pixels: NDArray[Any], image_format: str, quality: int | None) -> bytes:
    """Encode pixels of rows, columns and channels: JPEG with simplejpeg if it is installed, all else with Pillow."""
    color = {1: "GRAY", 3: "RGB"}.get(pixels.shape[-1] if pixels.ndim == 3 else 0)
    is_jpeg = image_format.lower() in ("jpg", "jpeg") and pixels.dtype == np.uint8 and pixels.size
    if color is None or not is_jpeg or not is_available("simplejpeg"):
        return encode_image(pixels, image_format, quality)
    simplejpeg: Any = require("simplejpeg", extra="decode", needed_for="encoding JPEG")
    subsampling = "Gray" if color == "GRAY" else "420"
    try:
        content: bytes = simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels), 75 if quality is None else quality, color, subsampling
        )
    except ValueError as error:
        raise EncodeError(f"the image cannot be written as JPEG: {error}.") from error
    return content


# --- EXIF orientation


def _read_orientation(image: Image) -> int:
    """Return the EXIF orientation of an image that Pillow has opened: 1 to 8, and 1 if it has none."""
    if "exif" not in image.info:
        return 1
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - damaged EXIF data raises anything, and says nothing about the pixels
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _read_jpeg_orientation(content: Any) -> int:
    """Return the EXIF orientation of a JPEG: 1 to 8, and 1 if it has none, or none that can be read."""
    view, position = memoryview(content), 2
    try:
        while True:
            marker, length = struct.unpack_from(">HH", view, position)
            if marker == 0xFFE1 and bytes(view[position + 4 : position + 10]) == b"Exif\0\0":
                return _parse_orientation(view[position + 10 : position + 2 + length])
            # Exif data comes before the tables and the pixels: stop at the first segment of another kind.
            if not 0xFFE0 <= marker <= 0xFFEF and marker != 0xFFFE:
                return 1
            position += 2 + length
    except struct.error:
        return 1


def _parse_orientation(tiff: memoryview) -> int:
    """Return the orientation in the first directory of TIFF data, which is how EXIF is stored."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(tiff[:4]))
    if order is None:
        return 1
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, start)
    for entry in range(count):
        tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, start + 2 + 12 * entry)
        if tag == _ORIENTATION:
            return value if kind == 3 and 1 <= value <= 8 else 1
    return 1
