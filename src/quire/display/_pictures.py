"""What can be looked at and listened to in a notebook: small pictures and sounds, as data URIs.

Images are decoded and encoded anew, so that nothing of the original reaches the page but its pixels. No address is
opened but those that hold their data themselves.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._typing import is_document_type
from quire.errors import QuireError
from quire.files import data_uri_type, read_data_uri, to_data_uri
from quire.media import decode_image, encode_image
from quire.tensors import framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIDE = 128
"""Pixels of the longer side of a small picture."""
_LEAST = 8
"""A matrix with fewer rows or columns is not taken for a picture."""
_MAX_BYTES, _MAX_PIXELS = 32 << 20, 40_000_000
_MAX_SOUND = 1 << 20
"""Bytes of a sound on a page; of a longer one, the beginning."""
_IMAGES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_SOUNDS = ((b"ID3", "audio/mpeg"), (b"OggS", "audio/ogg"), (b"fLaC", "audio/flac"))


def as_picture(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Pixels as rows, columns and channels, if an array is a picture: of bytes, with the channels first or last."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or not array.size:
        return None
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        if array.shape[0] not in (1, 3, 4):
            return None
        array = np.moveaxis(array, 0, -1)
    if min(array.shape[:2]) < _LEAST:
        return None
    return array[:, :, 0] if array.ndim == 3 and array.shape[-1] == 1 else array


def thumbnail(value: Any) -> str | None:
    """A small picture of a value as a data URI; None for what is no picture, and where Pillow is not installed."""
    try:
        pixels = _pixels(value)
        if pixels is None:
            return None
        step = -(-max(pixels.shape[:2]) // _SIDE)
        return to_data_uri(encode_image(np.ascontiguousarray(pixels[::step, ::step]), "png"), "image/png", base64=True)
    except (QuireError, ValueError):
        return None  # it is told of in words, as every value is


def _pixels(value: Any) -> NDArray[np.uint8] | None:
    if isinstance(value, str):
        value = _held(value, "image/")
    if isinstance(value, (bytes, bytearray)):
        is_image = value.startswith(_IMAGES) or value[8:12] == b"WEBP"
        return decode_image(bytes(value), max_pixels=_MAX_PIXELS) if is_image and len(value) <= _MAX_BYTES else None
    framework = framework_of(value)
    if framework is None or framework.dtype(value) != "uint8" or framework.layout(value) != "dense":
        return None
    return as_picture(framework.to_numpy(value))


def _held(text: str, kind: str) -> bytes | None:
    """The bytes in a data URI of some kind; no other address is opened."""
    if text[:5].lower() != "data:" or len(text) > 2 * _MAX_BYTES or not data_uri_type(text[:200]).startswith(kind):
        return None
    return read_data_uri(text, _MAX_BYTES)


def sound(value: Any) -> tuple[str, str] | None:
    """A sound as a data URI, and what is to be said of it: of encoded bytes, or of a document with samples and rate."""
    try:
        if isinstance(value, str):
            value = _held(value, "audio/")
        if isinstance(value, (bytes, bytearray)):
            return _encoded_sound(bytes(value))
        return _sampled_sound(value) if is_document_type(type(value)) else None
    except (QuireError, ValueError):
        return None


def _encoded_sound(content: bytes) -> tuple[str, str] | None:
    kind = next((kind for magic, kind in _SOUNDS if content.startswith(magic)), None)
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        kind = "audio/wav"
    if kind is None or len(content) > _MAX_SOUND:
        return None
    return to_data_uri(content, kind, base64=True), f"{len(content):,} bytes"


def _sampled_sound(document: Any) -> tuple[str, str] | None:
    """The samples of a document that has a rate: (frames) or (frames, channels) of float32 or int16."""
    samples, rate = document.__dict__.get("tensor"), document.__dict__.get("rate")
    framework = framework_of(samples)
    if framework is None or not isinstance(rate, int) or not 0 < rate <= 1_000_000:
        return None
    array = framework.to_numpy(samples)
    array = array[:, None] if array.ndim == 1 else array
    if array.dtype.name not in ("float32", "float64", "int16") or array.ndim != 2 or not 1 <= array.shape[1] <= 8:
        return None
    most = _MAX_SOUND // (2 * array.shape[1])
    seconds, cut = len(array) / rate, len(array) > most
    told = f"{seconds:.1f} s" + (f", first {most / rate:.1f} s" if cut else "")
    return to_data_uri(_wav(array[:most], rate), "audio/wav", base64=True), told


def _wav(samples: NDArray[Any], rate: int) -> bytes:
    """Sixteen bits a sample, in a RIFF file."""
    if samples.dtype != np.int16:
        samples = (np.clip(np.nan_to_num(samples), -1, 1) * 32767).astype("<i2")
    data, channels = samples.astype("<i2").tobytes(), samples.shape[1]
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    head = b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + struct.pack("<I", 16) + form
    return head + b"data" + struct.pack("<I", len(data)) + data
