"""Media types of bytes, by their first bytes, and of data URIs."""

from __future__ import annotations

from quire.errors import QuireError
from quire.files import read_data_uri

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
_SIGNATURE_BYTES = 64

MEDIA_SUFFIXES = {
    "audio/flac": ".flac",
    "audio/mp4": ".m4a",
    "audio/mpeg": ".mp3",
    "audio/ogg": ".ogg",
    "audio/wav": ".wav",
    "image/avif": ".avif",
    "image/bmp": ".bmp",
    "image/gif": ".gif",
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/tiff": ".tif",
    "image/webp": ".webp",
    "video/mp4": ".mp4",
    "video/quicktime": ".mov",
    "video/webm": ".webm",
    "video/x-msvideo": ".avi",
}
"""The usual suffix of every type that `detect_media_type` returns; `mimetypes` depends on the machine."""


def detect_media_type(content: bytes | bytearray) -> str | None:
    """Return the media type of an image, audio or video by its first 64 bytes; None for other bytes."""
    head = bytes(content[:_SIGNATURE_BYTES])
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
    family = text[5:16].partition("/")[0].lower()
    return family if text[:5].lower() == "data:" and family in ("image", "audio", "video") else None


def read_media_uri(text: str, max_bytes: int) -> bytes | None:
    """Return the content of a data URI of an image, audio or video.

    None for every other text, for damaged URIs, and for content of more than `max_bytes`.
    """
    # A percent-encoded byte takes three characters, so a longer text cannot fit and need not be decoded.
    if data_uri_family(text) is None or len(text) > 3 * max_bytes + 1024:
        return None
    try:
        return read_data_uri(text, max_bytes)
    except (QuireError, ValueError):
        return None
