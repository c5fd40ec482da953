"""What bytes, tensors and fields contain: media types by signature, how a tensor is displayed, which field is audio."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence
from typing import Literal
from urllib.parse import unquote_to_bytes

from quire.schema import FieldKind, Schema

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
    (b"OggS", "audio/ogg"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BRANDS = {b"M4A ": "audio/mp4", b"avif": "image/avif", b"avis": "image/avif", b"qt  ": "video/quicktime"}
"""Brands of ISO base media files (MP4 and its relatives) that are not video/mp4."""
_BMP_HEADER = 26
"""The least size of a BMP header; 'BM' alone also starts ordinary text."""

_MIN_EDGE = 8
"""Tensors with fewer rows or columns are displayed as numbers."""
CHANNELS = (1, 3, 4)
_PIXEL_DTYPES = ("uint8", "float16", "float32", "float64", "bfloat16")
TensorDisplay = Literal["image", "frames", "vector", "heat", "tensor"]

_SAMPLE_FIELDS = ("tensor", "audio", "waveform", "samples", "signal", "wave", "sound")
_RATE_FIELDS = ("rate", "sample_rate", "sampling_rate", "samplerate", "frame_rate")


def detect_media_type(head: bytes) -> str | None:
    """Return the media type of bytes by their beginning; None if a page cannot show them."""
    for signature, name in _SIGNATURES:
        if head.startswith(signature):
            return None if signature == b"BM" and len(head) < _BMP_HEADER else name
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], "video/mp4")
    if head[:4] == b"\x1aE\xdf\xa3":
        return "video/webm"
    # An MP3 frame without an ID3 tag: 11 bits of synchronisation, and the bits of layer III.
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2:
        return "audio/mpeg"
    return None


def data_uri_family(text: str) -> str | None:
    """Return 'image', 'audio' or 'video' if a text starts like a data URI of one; otherwise None."""
    family = text[5:16].partition("/")[0]
    return family if text.startswith("data:") and family in ("image", "audio", "video") else None


def decode_data_uri(text: str) -> bytes | None:
    """Return the content of a data URI of an image, audio or video; None for every other text."""
    head, comma, body = text.partition(",")
    if not comma or data_uri_family(head) is None:
        return None
    try:
        return b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (Base64Error, ValueError):
        return None


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
