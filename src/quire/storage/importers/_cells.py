"""Single values of foreign formats: arrays as numpy saves them, and encoded images."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import DecodeError
from quire.media import open_image
from quire.schema import Field
from quire.tensors import cast_numbers, common_dtype, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PLAIN = {"L", "LA", "RGB", "RGBA", "F"}
_MAX_RATIO = 1000
"""No array may be packed better than so many to one: it would not be one, but an attack on memory."""


def load_npy(content: bytes) -> NDArray[Any]:
    """An array as `np.save` wrote it; one of Python objects, which is a pickle, is refused."""
    array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    return array


def load_npz(content: bytes) -> dict[str, NDArray[Any]]:
    """Arrays as `np.savez` wrote them, by their names."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            if entry.file_size > _MAX_RATIO * max(entry.compress_size, 1024):
                raise DecodeError(f"{entry.filename} would unpack to {entry.file_size:,} bytes, too many to be real.")
        return {entry.filename.removesuffix(".npy"): load_npy(archive.read(entry)) for entry in archive.infolist()}


def load_image(content: bytes, where: str) -> NDArray[Any]:
    """The pixels of an image: rows and columns of gray, or rows, columns and channels, as it was encoded."""
    with open_image(content, where) as image:
        return _pixels(image)


def _pixels(image: Any) -> NDArray[Any]:
    if image.mode.startswith("I"):  # older Pillows hold sixteen bits in thirty-two
        return np.array(image).astype(np.uint16 if image.format in ("PNG", "PPM", "TIFF") else np.int32)
    if image.mode == "1":
        return np.array(image.convert("L"))
    if image.mode in _PLAIN:
        return np.array(image)
    return np.array(image.convert("RGBA" if "transparency" in image.info else "RGB"))


def tensor_of(content: bytes, field: Field, where: str) -> Any:
    """A tensor of the field's framework: of an array that numpy saved, or of an image."""
    if content.startswith(b"\x93NUMPY"):
        return in_field(load_npy(content), field)
    if content.startswith(b"PK"):
        return in_field(next(iter(load_npz(content).values())), field)
    return image_of(content, field, where)


def image_of(content: bytes, field: Field, where: str) -> Any:
    """A tensor of an image: gray or coloured, channels behind or in front, whatever fits the field."""
    pixels = load_image(content, where)
    dtype = field.spec.dtype or pixels.dtype.name
    fitting = (found for found in _readings(pixels) if field.spec.fits(found.shape, dtype))
    return in_field(next(fitting, pixels), field)


def _readings(pixels: NDArray[Any]) -> Iterator[NDArray[Any]]:
    yield pixels
    if pixels.ndim == 2:
        yield pixels[:, :, None]
        yield pixels[None]
        pixels = np.stack([pixels] * 3, axis=-1)
        yield pixels
    yield np.ascontiguousarray(pixels.transpose(2, 0, 1))
    if pixels.shape[2] == 4:
        yield from _readings(np.ascontiguousarray(pixels[:, :, :3]))


def in_field(array: NDArray[Any], field: Field) -> Any:
    """An array as the field has it: of its framework, and of its dtype if no number changes by that."""
    framework = field.type.framework or get_framework("numpy")
    if field.spec.dtype not in (None, "string"):
        array = cast_numbers(array, common_dtype(field.spec.dtype))
    return framework.from_numpy(array)
