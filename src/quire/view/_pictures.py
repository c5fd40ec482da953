"""Pictures for the page: images and tensors as PNG or WebP that Pillow has made anew, whatever they were."""

from __future__ import annotations

import io
import struct
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._optional import require
from quire.errors import DecodeError
from quire.view._sniff import CHANNELS, tensor_look

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIZES = (96, 192, 384, 768, 1600)
"""The edges, in pixels, that a page may ask for."""
_PIXELS = 100_000_000
"""An image of more is not decoded."""
_MANY = 12_000_000
"""Images of more are decoded one at a time, whoever else looks."""
_alone = threading.Lock()
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "AVIF")
_BAD = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    OverflowError,
    MemoryError,
    struct.error,
    Warning,  # where warnings are errors
)
_PALETTE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Where the colours of heat maps pass: dark for the least, yellow for the most."""


def picture_of_bytes(content: bytes, size: int) -> tuple[bytes, str]:
    """The first frame of an encoded image, no larger than asked for; and the media type."""
    pillow: Any = require("PIL.Image", extra="view", needed_for="looking at images")
    try:
        formats = [name for name in _FORMATS if name in pillow.OPEN or pillow.init()]
        with pillow.open(io.BytesIO(content), formats=formats) as image:
            if image.width * image.height > _PIXELS:
                raise DecodeError(f"the image has {image.width} x {image.height} pixels, too many to look at.")
            image.draft("RGB", (size, size))  # of JPEG, no more is decoded than that needs
            with _alone if image.width * image.height > _MANY else nullcontext():
                return _encoded(_upright(image), size)
    except pillow.DecompressionBombError as error:
        raise DecodeError(f"the image is too large to look at ({error}).") from error
    except _BAD as error:
        if isinstance(error, DecodeError):
            raise
        raise DecodeError(f"the bytes are not an image that Pillow can read ({error}).") from error


def _upright(image: Any) -> Any:
    operations: Any = require("PIL.ImageOps", extra="view", needed_for="looking at images")
    if image.mode.startswith("I") or image.mode == "F":
        return _from_array(_stretched(np.asarray(image)))
    turned = operations.exif_transpose(image)
    with_alpha = turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info
    return turned.convert("RGBA" if with_alpha else "RGB")


def _encoded(image: Any, size: int) -> tuple[bytes, str]:
    """Small and quick: WebP."""
    image.thumbnail((size, size))
    buffer = io.BytesIO()
    try:
        image.save(buffer, format="WEBP", quality=82, method=1)
        return buffer.getvalue(), "image/webp"
    except (OSError, KeyError):  # a Pillow without WebP
        image.save(buffer := io.BytesIO(), format="PNG", compress_level=1)
        return buffer.getvalue(), "image/png"


def _from_array(array: NDArray[np.uint8]) -> Any:
    pillow: Any = require("PIL.Image", extra="view", needed_for="looking at images")
    return pillow.fromarray(np.ascontiguousarray(array))


def picture_of_tensor(array: NDArray[Any], size: int, frame: int = 0) -> tuple[bytes, str]:
    """An array as an image, or as a heat map; of a film, one frame."""
    look = tensor_look(array.shape, array.dtype.name)
    if look == "frames":
        array = array[min(max(frame, 0), len(array) - 1)]
        look = "image"
    if look == "image":
        return _encoded(_from_array(_pixels(array)), size)
    return heat_map(array, size)


def _pixels(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Rows, columns and colours of eight bits."""
    if array.ndim == 3 and array.shape[2] not in CHANNELS:
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.dtype == np.uint8:
        return array
    numbers = np.nan_to_num(array.astype(np.float32))
    if numbers.min() >= 0 and numbers.max() <= 1:
        return (numbers * 255 + 0.5).astype(np.uint8)
    return _stretched(numbers)


def _stretched(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Numbers between the least and the greatest, as 0 to 255."""
    numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    scaled = (np.nan_to_num(numbers, nan=low, posinf=high, neginf=low) - low) / ((high - low) or 1.0)
    return (scaled * 255 + 0.5).astype(np.uint8)


def heat_map(array: NDArray[Any], size: int) -> tuple[bytes, str]:
    """The first matrix of an array as colours, an element a pixel; of large ones, every so many elements."""
    if array.dtype.kind == "c":
        array = np.abs(array)
    if array.dtype.kind not in "biufV" or not array.size:
        raise DecodeError(f"there is no picture of {array.dtype.name} {array.shape}.")
    while array.ndim > 2:
        array = array[0]
    array = np.atleast_2d(array)
    rows, columns = (max(1, -(-length // size)) for length in array.shape)
    image = _from_array(_palette()[_stretched(array[::rows, ::columns])])
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue(), "image/png"


def _palette() -> NDArray[np.uint8]:
    places = np.linspace(0, 255, len(_PALETTE))
    channels = [np.interp(np.arange(256), places, [colour[i] for colour in _PALETTE]) for i in range(3)]
    return np.stack(channels, axis=1).astype(np.uint8)
