"""Sounds for the page: samples as WAV."""

from __future__ import annotations

import io
import wave
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import DecodeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SECONDS = 600
"""A longer sound is cut off."""
_CHANNELS = 8


def wav_of_samples(samples: NDArray[Any], rate: Any) -> bytes:
    """Samples as 16-bit WAV: floats between -1 and 1, or integers; channels behind the frames or in front of them."""
    if not isinstance(rate, (int, float)) or not 1 <= rate <= 1_000_000:
        raise DecodeError(f"a sound needs the samples a second as a number, got {rate!r}.")
    frames = _frames(samples)[: int(rate * SECONDS)]
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(frames.shape[1])
        file.setsampwidth(2)
        file.setframerate(int(rate))
        file.writeframes(_sixteen_bits(frames).tobytes())
    return buffer.getvalue()


def _frames(samples: NDArray[Any]) -> NDArray[Any]:
    if samples.ndim == 1:
        samples = samples[:, None]
    if samples.ndim == 2 and samples.shape[1] > _CHANNELS >= samples.shape[0]:
        samples = samples.T
    if samples.ndim != 2 or not 1 <= samples.shape[1] <= _CHANNELS or samples.dtype.kind not in "iuf":
        raise DecodeError(f"{samples.dtype.name} {samples.shape} is no sound of up to {_CHANNELS} channels.")
    return samples


def _sixteen_bits(frames: NDArray[Any]) -> NDArray[Any]:
    if frames.dtype.kind == "f":
        return np.asarray(np.nan_to_num(frames).clip(-1, 1) * 32767).astype("<i2")
    numbers = frames.astype(np.int64)
    bits = frames.dtype.itemsize * 8
    if frames.dtype.kind == "u":
        numbers -= 1 << (bits - 1)
    return np.asarray(numbers >> (bits - 16) if bits > 16 else numbers << (16 - bits)).astype("<i2")
