"""URIs: schemes, local paths, media types, data URIs, and reading the bytes that a URI names."""

from __future__ import annotations

import binascii
import importlib
import os
import re
import stat
from base64 import b64decode, b64encode
from functools import cache
from mimetypes import MimeTypes
from pathlib import Path
from typing import IO
from urllib.parse import quote_from_bytes, unquote, unquote_to_bytes, urlsplit

from typing_extensions import TypedDict

from quire.errors import UriError, UriNotFoundError

MAX_BYTES = 1 << 30
"""The default limit of what is read from one URI: 1 GiB."""
TIMEOUT = 60.0
"""The default number of seconds that a download may take."""
_PASSWORD = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)[^/?#]*@")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # at least two letters: C:\ is a drive
_WINDOWS_DRIVE = re.compile(r"/[A-Za-z]:")
_CHUNK = 1 << 20


class ReadLimits(TypedDict, total=False):
    """Limits of reading from a URI: `timeout` in seconds (None for no limit), and `max_bytes`."""

    timeout: float | None
    max_bytes: int


def display_uri(uri: str) -> str:
    """Return a URI for messages: without its password, and shortened if it is long."""
    plain = _PASSWORD.sub(r"\1...@", uri)
    return plain if len(plain) <= 200 else f"{plain[:80]}... ({len(uri):,} characters)"


def uri_too_large(uri: str, reason: str, max_bytes: int) -> UriError:
    """Return the error for a URI that has more bytes than may be read."""
    return UriError(
        f"{display_uri(uri)}: {reason}, and the limit is {max_bytes:,} bytes. Pass a larger max_bytes to read it."
    )


def scheme_of(uri: str) -> str | None:
    """Return the scheme of a URI in lower case; None for a path."""
    match = _SCHEME.match(uri) if ":" in uri else None
    return None if match is None else match[1].lower()


def local_path(uri: str) -> str:
    """Return the path that a path or a file:// URI names; raise UriError for any other URI."""
    scheme = scheme_of(uri)
    # A file may be called 'a:b.txt': an existing path is a path, whatever it looks like.
    if scheme is None or (scheme != "file" and os.path.lexists(uri)):
        return uri
    if scheme != "file":
        raise UriError(
            f"{display_uri(uri)}: addresses of scheme {scheme!r} cannot be read; local paths, file://, http(s):// and "
            "data: can. Fetch the content by other means."
        )
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise UriError(f"{display_uri(uri)}: a file:// address names no host but localhost. Write file:///path.")
    path = unquote(parts.path)
    return path[1:] if os.name == "nt" and _WINDOWS_DRIVE.match(path) else path


def guess_type(uri: str) -> str | None:
    """Return the media type by the suffix of a path or URI, or by the header of a data URI; None if unknown."""
    scheme = scheme_of(uri)
    if scheme == "data":
        return data_uri_type(uri)
    path = uri
    if scheme in ("http", "https"):
        path = uri.partition("://")[2].partition("#")[0].partition("?")[0].partition("/")[2]
    return _media_types().guess_type(os.path.basename(path), strict=False)[0]  # noqa: PTH119 - fast, for many files


@cache
def _media_types() -> MimeTypes:
    """Return the table of media types, without the files of this machine, so that every machine guesses alike."""
    types = MimeTypes()
    for suffix in ("avif", "heic", "webp"):
        types.add_type(f"image/{suffix}", f".{suffix}")
    return types


# --- data URIs (RFC 2397)


def to_data_uri(content: bytes, mime_type: str, *, charset: str | None = None, base64: bool = False) -> str:
    """Return bytes as a data URI, in base64 or percent-encoded."""
    header = mime_type if charset is None else f"{mime_type};charset={charset}"
    if base64:
        return f"data:{header};base64,{b64encode(content).decode()}"
    return f"data:{header},{quote_from_bytes(content)}"


def read_data_uri(uri: str, max_bytes: int) -> bytes:
    """Return the bytes in a data URI."""
    header, data = _split_data_uri(uri)
    content = unquote_to_bytes(data)
    if header.lower().endswith(";base64"):
        encoded = b"".join(content.split())
        try:
            content = b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
        except binascii.Error as error:
            raise UriError(f"{display_uri(uri)}: the data is not base64 ({error}).") from error
    if len(content) > max_bytes:
        raise uri_too_large(uri, f"the data has {len(content):,} bytes", max_bytes)
    return content


def data_uri_type(uri: str) -> str:
    """Return the media type of a data URI; text/plain if it has none."""
    return _split_data_uri(uri)[0].partition(";")[0].strip().lower() or "text/plain"


def _split_data_uri(uri: str) -> tuple[str, str]:
    header, comma, data = uri[len("data:") :].partition(",")
    if not comma:
        raise UriError(f"{display_uri(uri)}: a data URI has a comma before its data: data:text/plain,hello.")
    return header.rstrip(), data


# --- reading


def read_uri(uri: str, *, timeout: float | None = TIMEOUT, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes at a local path or a file://, http(s):// or data: URI.

    `timeout` is in seconds, for each wait of a download and (checked whenever data arrives) for all of it; None waits
    for ever. More than `max_bytes` is an error, raised before they are in memory.
    """
    scheme = scheme_of(uri)
    if scheme is None:
        return _read_path(uri, uri, max_bytes)
    if scheme == "data":
        return read_data_uri(uri, max_bytes)
    if scheme in ("http", "https"):
        http = importlib.import_module("quire.files._http")  # slow to import, and rarely needed
        content: bytes = http.read_http(uri, timeout, max_bytes)
        return content
    return _read_path(local_path(uri), uri, max_bytes)


def _read_path(path: str, uri: str, max_bytes: int) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a Path would take as long as the file
            return _read_file(file, uri, max_bytes)
    except FileNotFoundError as error:
        raise UriNotFoundError(
            f"{display_uri(uri)}: there is no such file. A relative path starts at the working folder, {Path.cwd()}."
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        if isinstance(error, UriError):
            raise
        raise UriError(f"{display_uri(uri)}: the file cannot be read ({error}).") from error


def _read_file(file: IO[bytes], uri: str, max_bytes: int) -> bytes:
    """Read a file of known size at once, and one without a size, like a pipe, in chunks."""
    # With one read of the known size, no buffer grows and is copied. Files of /proc have a size of 0, and content.
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        chunks = bytearray()
        while chunk := file.read(_CHUNK):
            chunks += chunk
            if len(chunks) > max_bytes:
                raise uri_too_large(uri, "it goes on after that", max_bytes)
        return bytes(chunks)
    if status.st_size > max_bytes:
        raise uri_too_large(uri, f"the file has {status.st_size:,} bytes", max_bytes)
    content = file.read(status.st_size)
    while len(content) < status.st_size and (chunk := file.read(status.st_size - len(content))):
        content += chunk  # a read may return less than it was asked for
    return content
