"""Encoded pictures for tests of decoding, made from a seed, and the classes of documents that hold them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from quire import BaseDocument, DocumentArray
from quire.typing import ImageBytes, TorchTensor, uint8


class Photo(BaseDocument):
    number: int
    image: ImageBytes


class MaybePhoto(BaseDocument):
    number: int
    image: ImageBytes | None = None


class Example(BaseDocument):
    number: int
    image: TorchTensor[uint8, 3, 24, 32]


def pixels(width: int, height: int, seed: int = 0) -> Any:
    """Return smooth random pixels, as photographs have: uint8 of rows, columns and RGB."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 16), max(2, width // 16), 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encode(array: Any, image_format: str = "JPEG", **options: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    image = array if hasattr(array, "save") else Image.fromarray(array)
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def picture(number: int, **options: Any) -> bytes:
    """Return a JPEG whose size and pixels depend on its number."""
    return encode(pixels(64 + 16 * (number % 3), 48 + 8 * (number % 2), number), quality=90, **options)


def photos(count: int) -> DocumentArray[Photo]:
    return DocumentArray[Photo](Photo(id=f"p{n}", number=n, image=picture(n)) for n in range(count))
