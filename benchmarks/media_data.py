"""The images and videos of media.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import PIL.Image


def picture(size: int, seed: int = 0) -> Any:
    """Return an image with edges and noise, about as hard to compress as a photo."""
    chance = np.random.default_rng(seed)
    coarse = chance.integers(0, 255, (max(2, size // 16), max(2, size // 16), 3), np.uint8)
    smooth = np.asarray(PIL.Image.fromarray(coarse).resize((size, size), PIL.Image.Resampling.BICUBIC))
    return (smooth.astype(np.int16) + chance.integers(-6, 6, smooth.shape)).clip(0, 255).astype(np.uint8)


def film(frames: int) -> Iterator[Any]:
    """Yield the frames of a moving image with camera noise."""
    large = picture(512).astype(np.int16)
    noise = np.random.default_rng(1).integers(-9, 9, large.shape)
    for number in range(frames):
        moved = np.roll(large, 3 * number, axis=1) + np.roll(noise, 7919 * number)
        yield moved[:360, :480].clip(0, 255).astype(np.uint8)
