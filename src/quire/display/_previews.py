"""Previews of images and audio in a notebook: small, and embedded as data URIs.

Images are decoded and encoded again, so only their pixels reach the page. Nothing is fetched: data URIs are the only
addresses that are read.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._protocols import is_document_type
from quire.errors import QuireError
from quire.files import data_uri_type, read_data_uri, to_data_uri
from quire.media import decode_image, encode_image
from quire.tensors import framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_THUMBNAIL_SIDE = 128
"""Pixels of the longer side of a thumbnail."""
_MIN_SIDE = 8
"""A matrix with fewer rows or columns is not shown as an image."""
_MAX_BYTES, _MAX_PIXELS = 32 << 20, 40_000_000
_MAX_AUDIO_BYTES = 1 << 20
"""Bytes of audio per value; longer audio is truncated."""
_IMAGE_MAGIC = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_AUDIO_MAGIC = ((b"ID3", "audio/mpeg"), (b"OggS", "audio/ogg"), (b"fLaC", "audio/flac"))


def as_picture(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return an array as (rows, columns, channels) or (rows, columns) if it looks like an image, otherwise None.

    An image is uint8, with 1, 3 or 4 channels on the first or last axis.
    """
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or not array.size:
        return None
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        if array.shape[0] not in (1, 3, 4):
            return None
        array = np.moveaxis(array, 0, -1)
    if min(array.shape[:2]) < _MIN_SIDE:
        return None
    return array[:, :, 0] if array.ndim == 3 and array.shape[-1] == 1 else array


def render_thumbnail(value: Any) -> str | None:
    """Return a small image of a value as a data URI; None if it is not an image, or if Pillow is not installed."""
    try:
        pixels = _pixels_of(value)
        if pixels is None:
            return None
        step = -(-max(pixels.shape[:2]) // _THUMBNAIL_SIDE)
        content = encode_image(np.ascontiguousarray(pixels[::step, ::step]), "png")
        return to_data_uri(content, "image/png", base64=True)
    except (QuireError, ValueError):
        return None  # the value is shown as text


def _pixels_of(value: Any) -> NDArray[np.uint8] | None:
    if isinstance(value, str):
        value = _embedded_bytes(value, "image/")
    if isinstance(value, (bytes, bytearray)):
        is_image = value.startswith(_IMAGE_MAGIC) or value[8:12] == b"WEBP"
        return decode_image(bytes(value), max_pixels=_MAX_PIXELS) if is_image and len(value) <= _MAX_BYTES else None
    framework = framework_of(value)
    if framework is None or framework.dtype(value) != "uint8" or framework.layout(value) != "dense":
        return None
    return as_picture(framework.to_numpy(value))


def _embedded_bytes(text: str, kind: str) -> bytes | None:
    """Return the bytes of a data URI of a media type ('image/', 'audio/'); None for every other text."""
    if text[:5].lower() != "data:" or len(text) > 2 * _MAX_BYTES or not data_uri_type(text[:200]).startswith(kind):
        return None
    return read_data_uri(text, _MAX_BYTES)


def render_audio(value: Any) -> tuple[str, str] | None:
    """Return audio as a data URI with a description; None if the value is not audio.

    Audio is encoded bytes, or a document with samples in `tensor` and a `rate`.
    """
    try:
        if isinstance(value, str):
            value = _embedded_bytes(value, "audio/")
        if isinstance(value, (bytes, bytearray)):
            return _render_encoded(bytes(value))
        return _render_samples(value) if is_document_type(type(value)) else None
    except (QuireError, ValueError):
        return None


def _render_encoded(content: bytes) -> tuple[str, str] | None:
    kind = next((kind for magic, kind in _AUDIO_MAGIC if content.startswith(magic)), None)
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        kind = "audio/wav"
    if kind is None or len(content) > _MAX_AUDIO_BYTES:
        return None
    return to_data_uri(content, kind, base64=True), f"{len(content):,} bytes"


def _render_samples(document: Any) -> tuple[str, str] | None:
    """Render the samples of a document with a rate: (frames) or (frames, channels) of float32, float64 or int16."""
    samples, rate = document.__dict__.get("tensor"), document.__dict__.get("rate")
    framework = framework_of(samples)
    if framework is None or not isinstance(rate, int) or not 0 < rate <= 1_000_000:
        return None
    array = framework.to_numpy(samples)
    array = array[:, None] if array.ndim == 1 else array
    if array.dtype.name not in ("float32", "float64", "int16") or array.ndim != 2 or not 1 <= array.shape[1] <= 8:
        return None
    max_frames = _MAX_AUDIO_BYTES // (2 * array.shape[1])
    description = f"{len(array) / rate:.1f} s"
    if len(array) > max_frames:
        description += f", first {max_frames / rate:.1f} s"
    return to_data_uri(_encode_wav(array[:max_frames], rate), "audio/wav", base64=True), description


def _encode_wav(samples: NDArray[Any], rate: int) -> bytes:
    """Encode samples as 16-bit PCM in a RIFF file, without PyAV."""
    if samples.dtype != np.int16:
        samples = (np.clip(np.nan_to_num(samples), -1, 1) * 32767).astype("<i2")
    data, channels = samples.astype("<i2").tobytes(), samples.shape[1]
    format_chunk = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    header = b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + struct.pack("<I", 16) + format_chunk
    return header + b"data" + struct.pack("<I", len(data)) + data
