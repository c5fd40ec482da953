"""Encoded images to arrays and back, by Pillow."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._optional import require
from quire.errors import DecodeError, EncodeError, did_you_mean
from quire.files import shown
from quire.media._limits import too_much
from quire.tensors import format_shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BAD_IMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
    UserWarning,  # where warnings are errors
)
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_PROGRAMS = {"EPS", "WMF"}
_DEEP = {"PNG", "PPM", "TIFF"}  # whose sixteen bits older Pillows hold in thirty-two


def decode_frames(
    content: bytes, where: str = "the bytes", width: int | None = None, height: int | None = None
) -> list[NDArray[np.uint8]]:
    """Every frame of an encoded image as rows, columns and red, green, blue.

    `width` and `height` resize; one alone leaves the other as it is. An image of more pixels than Pillow allows
    (`PIL.Image.MAX_IMAGE_PIXELS`, over all frames) is an error.
    """
    with opened_image(content, where) as image:
        frames = getattr(image, "n_frames", 1)
        _check_image(_pillow("decoding an image"), where, image, image.width * image.height * frames)
        return [_frame(image, index, where, width, height) for index in range(frames)]


def decode_image(
    content: bytes,
    where: str = "the bytes",
    *,
    width: int | None = None,
    height: int | None = None,
    max_pixels: int | None = None,
) -> NDArray[np.uint8]:
    """An encoded image, or the first frame of it, as rows, columns and red, green, blue.

    More than `max_pixels` is an error, and so is more than Pillow allows: `PIL.Image.MAX_IMAGE_PIXELS`.
    """
    with opened_image(content, where) as image:
        pixels = image.width * image.height
        if max_pixels is not None and max(pixels, (width or image.width) * (height or image.height)) > max_pixels:
            raise too_much(where, f"the image has {image.width} x {image.height} pixels", "max_pixels", max_pixels)
        _check_image(_pillow("decoding an image"), where, image, pixels)
        return _frame(image, 0, where, width, height)


@contextmanager
def opened_image(content: bytes, where: str) -> Iterator[Any]:
    """Pillow's image of bytes, of which only the head is read so far."""
    pillow = _pillow("decoding an image")
    try:
        with pillow.open(io.BytesIO(content)) as image:
            yield image
    except DecodeError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise _bomb(where, str(error)) from error
    except _BAD_IMAGE as error:
        raise DecodeError(f"{shown(where)}: the bytes are not an image that Pillow can read ({error}).") from error


def encode_image(array: NDArray[Any], image_format: str) -> bytes:
    """An array of rows, columns and at most four channels as an encoded image."""
    pillow = _pillow("encoding an image")
    return encode_pillow(_to_pillow(pillow, array), image_format)


def encode_pillow(image: Any, image_format: str) -> bytes:
    """Pillow's image as an encoded image."""
    name = pillow_format(image_format)
    buffer = io.BytesIO()
    try:
        image.save(buffer, format=name)
    except _BAD_IMAGE as error:
        raise EncodeError(f"the image cannot be written as {name}: {error}.") from error
    return buffer.getvalue()


def pillow_format(name: str) -> str:
    """Pillow's name of a format, by the suffix of its files: 'png', 'jpg', 'jpeg', 'webp'."""
    known = _pillow("encoding an image").registered_extensions()
    found: str | None = known.get(f".{name.lower()}")
    if found is None:
        near = did_you_mean(name, ["png", "jpeg", "jpg", "webp", "gif", "tiff", "bmp"])
        raise EncodeError(f"{name!r} is not a format of images that Pillow writes. {near}")
    return found


def _pillow(needed_for: str) -> Any:
    return require("PIL.Image", extra="image", needed_for=needed_for)


def _check_image(pillow: Any, where: str, image: Any, pixels: int) -> None:
    """Refuse an image, of which only the head was read so far."""
    if image.format in _PROGRAMS:
        raise DecodeError(f"{shown(where)}: {image.format} is not decoded, because that runs another program.")
    if pillow.MAX_IMAGE_PIXELS is not None and pixels > pillow.MAX_IMAGE_PIXELS:
        raise _bomb(where, f"{pixels:,} pixels, more than {pillow.MAX_IMAGE_PIXELS:,}")


def _bomb(where: str, why: str) -> DecodeError:
    return DecodeError(
        f"{shown(where)}: the image is too large to be decoded ({why}). "
        "If you trust it, raise PIL.Image.MAX_IMAGE_PIXELS."
    )


def _frame(image: Any, index: int, where: str, width: int | None, height: int | None) -> NDArray[np.uint8]:
    if index:
        image.seek(index)
    picture = _to_rgb(image, where)
    if width or height:
        picture = picture.resize((width or picture.width, height or picture.height))
    return np.array(picture)  # not asarray, which shares memory that cannot be written to


def _to_rgb(image: Any, where: str) -> Any:
    """Red, green and blue of eight bits; of sixteen bits the upper eight."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _DEEP):
        deep = np.asarray(image).astype(np.int64)
        return _pillow("decoding an image").fromarray((deep >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise DecodeError(
            f"{shown(where)}: the pixels are {image.mode!r}, 32-bit numbers, which have no eight-bit form. "
            "Open the image with Pillow, and set `tensor` to what you make of it."
        )
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")  # Pillow warns of the short way
    return image.convert("RGB")


def _to_pillow(pillow: Any, array: NDArray[Any]) -> Any:
    mode = "L" if array.ndim == 2 else _MODES.get(array.shape[-1]) if array.ndim == 3 else None
    if array.dtype != np.uint8 or mode is None or not array.size:
        raise EncodeError(
            f"an image is uint8 of rows, columns and 1 to 4 channels, got {array.dtype} {format_shape(array.shape)}. "
            "A normalised image is undone by set_image_tensor_inv_normalization(); channels in front are told by "
            "channel_axis=0."
        )
    plain = np.ascontiguousarray(array.reshape(array.shape[:2]) if mode == "L" else array)
    return pillow.frombuffer(mode, plain.shape[1::-1], plain, "raw", mode, 0, 1)
