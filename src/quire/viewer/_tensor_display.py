"""How tensors are displayed: as images, frames, vectors, heat maps or audio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from quire.schema import FieldKind, Schema

_MIN_EDGE = 8
"""Tensors with fewer rows or columns are displayed as numbers."""
CHANNELS = (1, 3, 4)
_PIXEL_DTYPES = ("uint8", "float16", "float32", "float64", "bfloat16")
TensorDisplay = Literal["image", "frames", "vector", "heat", "tensor"]

_SAMPLE_FIELDS = ("tensor", "audio", "waveform", "samples", "signal", "wave", "sound")
_RATE_FIELDS = ("rate", "sample_rate", "sampling_rate", "samplerate", "frame_rate")


def tensor_display(shape: Sequence[int], dtype: str) -> TensorDisplay:
    """Return how a tensor is displayed: as an image, as frames, a vector, a heat map, or in words."""
    if 0 in shape or not shape or dtype in ("string", ""):
        return "tensor"
    if len(shape) == 1:
        return "vector"
    if len(shape) == 2:
        return "image" if dtype == "uint8" and min(shape) >= _MIN_EDGE else "heat"
    if len(shape) == 3:
        return "image" if _has_image_shape(shape) and dtype in _PIXEL_DTYPES else "heat"
    return "frames" if len(shape) == 4 and _has_image_shape(shape[1:]) and dtype in _PIXEL_DTYPES else "heat"


def _has_image_shape(shape: Sequence[int]) -> bool:
    """Whether a shape has one, three or four channels, last or first, and enough pixels."""
    channels_last = shape[2] in CHANNELS and min(shape[:2]) >= _MIN_EDGE
    return channels_last or (shape[0] in CHANNELS and min(shape[1:]) >= _MIN_EDGE)


def sample_rate_field(name: str, schema: Schema) -> str | None:
    """Return the field with the sample rate of a tensor of audio samples; None if the field is not audio."""
    field = schema.by_name.get(name)
    if field is None or field.kind is not FieldKind.TENSOR or name not in _SAMPLE_FIELDS:
        return None
    kinds = (FieldKind.SCALAR, FieldKind.ANY, FieldKind.UNION)
    return next((rate for rate in _RATE_FIELDS if rate in schema.by_name and schema.by_name[rate].kind in kinds), None)
