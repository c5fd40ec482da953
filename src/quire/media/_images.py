"""Decode and encode images with Pillow."""

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
from quire.files import Target, display_uri
from quire.media._common import as_numpy, channels_last, limit_error, suffix_of, write_bytes
from quire.tensors import format_shape

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray
    from PIL.Image import Image

PILLOW_ERRORS = (  # Pillow's plugins raise all of these for damaged or unsupported images
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
    UserWarning,  # where warnings are turned into errors
)
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_EXTERNAL = {"EPS", "WMF"}  # formats that Pillow decodes by running another program
_DEEP = {"PNG", "PPM", "TIFF"}  # formats whose 16-bit pixels older Pillows store in 32 bits


def decode_frames(
    content: bytes, where: str = "the bytes", width: int | None = None, height: int | None = None
) -> list[NDArray[np.uint8]]:
    """Decode every frame of an image: uint8 of rows, columns and RGB.

    `width` and `height` resize; one alone leaves the other as it is. More pixels over all frames than Pillow allows
    (`PIL.Image.MAX_IMAGE_PIXELS`) are an error.
    """
    with open_image(content, where, all_frames=True) as image:
        return [_decode_frame(image, index, where, width, height) for index in range(getattr(image, "n_frames", 1))]


def decode_image(
    content: bytes,
    where: str = "the bytes",
    *,
    width: int | None = None,
    height: int | None = None,
    max_pixels: int | None = None,
) -> NDArray[np.uint8]:
    """Decode an image, or its first frame: uint8 of rows, columns and RGB.

    More than `max_pixels` before or after resizing is an error, and so is more than Pillow allows:
    `PIL.Image.MAX_IMAGE_PIXELS`.
    """
    with open_image(content, where) as image:
        pixels = max(image.width * image.height, (width or image.width) * (height or image.height))
        if max_pixels is not None and pixels > max_pixels:
            raise limit_error(where, f"the image has {image.width} x {image.height} pixels", "max_pixels", max_pixels)
        return _decode_frame(image, 0, where, width, height)


@contextmanager
def open_image(content: bytes, where: str, *, all_frames: bool = False) -> Iterator[Any]:
    """Open an image with Pillow, of which only the header is read, and turn Pillow's errors into DecodeError.

    Formats that run another program and images with too many pixels are refused before anything is decoded. The pixels
    of the first frame count, or with `all_frames` those of all.
    """
    pillow = import_pillow("decoding an image")
    try:
        with pillow.open(io.BytesIO(content)) as image:
            if image.format in _EXTERNAL:
                raise DecodeError(  # noqa: TRY301 - the first handler passes it on
                    f"{display_uri(where)}: {image.format} is not decoded, because that runs another program."
                )
            pixels = image.width * image.height * (getattr(image, "n_frames", 1) if all_frames else 1)
            if pillow.MAX_IMAGE_PIXELS is not None and pixels > pillow.MAX_IMAGE_PIXELS:
                raise _bomb_error(where, f"{pixels:,} pixels, more than {pillow.MAX_IMAGE_PIXELS:,}")
            yield image
    except DecodeError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise _bomb_error(where, str(error)) from error
    except PILLOW_ERRORS as error:
        # Pillow's own message for an unknown format shows the address of an object.
        reason = "unknown format" if isinstance(error, pillow.UnidentifiedImageError) else error
        raise DecodeError(
            f"{display_uri(where)}: the bytes are not an image that Pillow can read ({reason})."
        ) from error


def encode_image(array: NDArray[Any], image_format: str, quality: int | None = None) -> bytes:
    """Encode an array of rows, columns and at most four channels; formats without a quality ignore it."""
    pillow = import_pillow("encoding an image")
    mode = "L" if array.ndim == 2 else _MODES.get(array.shape[-1]) if array.ndim == 3 else None
    if array.dtype != np.uint8 or mode is None or not array.size:
        raise EncodeError(
            f"an image is uint8 of rows, columns and 1 to 4 channels, got {array.dtype} {format_shape(array.shape)}. "
            "Revert a normalised image by set_image_tensor_inv_normalization(); pass channel_axis=0 if the channels "
            "come first."
        )
    plain = np.ascontiguousarray(array.reshape(array.shape[:2]) if mode == "L" else array)
    return encode_pillow(pillow.frombuffer(mode, plain.shape[1::-1], plain, "raw", mode, 0, 1), image_format, quality)


def encode_pillow(image: Image, image_format: str, quality: int | None = None) -> bytes:
    """Encode a Pillow image; formats without a quality ignore it."""
    name = pillow_format(image_format)
    buffer = io.BytesIO()
    try:
        image.save(buffer, format=name, **({} if quality is None else {"quality": quality}))
    except PILLOW_ERRORS as error:
        raise EncodeError(f"the image cannot be written as {name}: {error}.") from error
    return buffer.getvalue()


def to_image_bytes(tensor: object, image_format: str = "png", *, channel_axis: int = -1) -> bytes:
    """Encode an image: uint8 of rows, columns and 1 to 4 channels; `channel_axis=0` if the channels come first."""
    array = as_numpy(tensor)
    return encode_image(array if array.ndim == 2 else channels_last(array, channel_axis), image_format)


def save_image(tensor: object, file: Target, *, image_format: str | None = None, channel_axis: int = -1) -> None:
    """Write an image to a file, by default in the format of the file's suffix."""
    content = to_image_bytes(tensor, image_format or suffix_of(file, "png"), channel_axis=channel_axis)
    write_bytes(file, content)


def pillow_format(name: str) -> str:
    """Return Pillow's name of a format, given by the suffix of its files: 'png', 'jpg', 'jpeg', 'webp'."""
    formats: dict[str, str] = import_pillow("encoding an image").registered_extensions()
    if f".{name.lower()}" not in formats:
        near = did_you_mean(name, ["png", "jpeg", "jpg", "webp", "gif", "tiff", "bmp"])
        raise EncodeError(f"{name!r} is not a format of images that Pillow writes. {near}")
    return formats[f".{name.lower()}"]


def import_pillow(needed_for: str) -> ModuleType:
    """Import `PIL.Image`, or raise an error with the install command."""
    return require("PIL.Image", extra="image", needed_for=needed_for)


def _bomb_error(where: str, why: str) -> DecodeError:
    return DecodeError(
        f"{display_uri(where)}: the image is too large to be decoded ({why}). "
        "If you trust it, raise PIL.Image.MAX_IMAGE_PIXELS."
    )


def _decode_frame(image: Image, index: int, where: str, width: int | None, height: int | None) -> NDArray[np.uint8]:
    if index:
        image.seek(index)
    rgb = to_rgb(image, where)
    if width or height:
        rgb = rgb.resize((width or rgb.width, height or rgb.height))
    return np.array(rgb)  # not asarray, which would share read-only memory


def to_rgb(image: Image, where: str) -> Image:
    """Convert an image to 8-bit RGB; 16-bit pixels keep their upper byte."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _DEEP):
        deep = np.asarray(image).astype(np.int64)
        return import_pillow("decoding an image").fromarray((deep >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise DecodeError(
            f"{display_uri(where)}: the pixels are {image.mode!r}, 32-bit numbers, which have no 8-bit form. "
            "Open the image with Pillow, convert it, and set `tensor` to the result."
        )
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")  # Pillow warns about the direct conversion
    return image.convert("RGB")
