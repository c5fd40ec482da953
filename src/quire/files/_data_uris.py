"""Data URIs: bytes written into an address (RFC 2397)."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from urllib.parse import quote_from_bytes, unquote_to_bytes

from quire.errors import UriError
from quire.files._limits import shown, too_large


def to_data_uri(content: bytes, mime_type: str, *, charset: str | None = None, base64: bool = False) -> str:
    """Bytes as a data URI, in base64 or with percent signs."""
    head = mime_type if charset is None else f"{mime_type};charset={charset}"
    if base64:
        return f"data:{head};base64,{b64encode(content).decode()}"
    return f"data:{head},{quote_from_bytes(content)}"


def read_data_uri(uri: str, max_bytes: int) -> bytes:
    """The bytes in a data URI."""
    head, data = _parts(uri)
    content = unquote_to_bytes(data)
    if head.lower().endswith(";base64"):
        content = _from_base64(uri, content)
    if len(content) > max_bytes:
        raise too_large(uri, f"the data has {len(content):,} bytes", max_bytes)
    return content


def data_uri_type(uri: str) -> str:
    """The media type that a data URI tells; text/plain if it tells none."""
    return _parts(uri)[0].partition(";")[0].strip().lower() or "text/plain"


def _parts(uri: str) -> tuple[str, str]:
    head, comma, data = uri[len("data:") :].partition(",")
    if not comma:
        raise UriError(f"{shown(uri)}: a data URI has a comma before its data: data:text/plain,hello.")
    return head.rstrip(), data


def _from_base64(uri: str, data: bytes) -> bytes:
    packed = b"".join(data.split())
    try:
        return b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except binascii.Error as error:
        raise UriError(f"{shown(uri)}: the data is not base64 ({error}).") from error
