"""What bytes and tensors are, as a page shows them: told by the first bytes, or by shape and dtype."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
)
_SOUNDS = ((b"fLaC", "audio/flac"), (b"ID3", "audio/mpeg"), (b"OggS", "audio/ogg"))
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BRANDS = {b"M4A ": "audio/mp4", b"avif": "image/avif", b"avis": "image/avif", b"qt  ": "video/quicktime"}
_SMALLEST = 8
"""Pictures of fewer rows or columns are shown as numbers."""
CHANNELS = (1, 3, 4)


def media_type(head: bytes) -> str | None:
    """The media type of bytes by their beginning; None if they are nothing that a page shows."""
    for start, name in (*_IMAGES, *_SOUNDS):
        if head.startswith(start):
            return None if start == b"BM" and len(head) < 26 else name
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], "video/mp4")
    if head[:4] == b"\x1aE\xdf\xa3":
        return "video/webm"
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2:
        return "audio/mpeg"
    return None


def family(head: bytes) -> str | None:
    """'image', 'audio' or 'video'."""
    found = media_type(head)
    return None if found is None else found.partition("/")[0]


def data_uri_content(text: str) -> bytes | None:
    """The bytes that a data URI of an image, a sound or a film holds; None for every other text."""
    head, comma, body = text.partition(",")
    kind = head[5:].partition("/")[0]
    if not head.startswith("data:") or not comma or kind not in ("image", "audio", "video"):
        return None
    try:
        return b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (Base64Error, ValueError):
        return None


def tensor_look(shape: Sequence[int], dtype: str) -> str:
    """How a tensor is shown: 'image', 'frames', 'vector', 'heat' or 'tensor'."""
    if 0 in shape or not shape or dtype in ("string", ""):
        return "tensor"
    if len(shape) == 1:
        return "vector"
    if len(shape) == 2:
        return "image" if dtype == "uint8" and min(shape) >= _SMALLEST else "heat"
    if len(shape) == 3:
        return "image" if _is_picture(shape) and dtype in _PIXELS else "heat"
    return "frames" if len(shape) == 4 and _is_picture(shape[1:]) and dtype in _PIXELS else "heat"


_PIXELS = ("uint8", "float16", "float32", "float64", "bfloat16")


def _is_picture(shape: Sequence[int]) -> bool:
    """Whether there is a channel for each colour, behind or in front, and enough pixels."""
    behind = shape[2] in CHANNELS and min(shape[:2]) >= _SMALLEST
    return behind or (shape[0] in CHANNELS and min(shape[1:]) >= _SMALLEST)
