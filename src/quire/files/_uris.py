"""Addresses: schemes, local paths, media types, data URIs, and the bytes behind an address."""

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
"""The most that is read from one address, unless told otherwise: 1 GiB."""
TIMEOUT = 60.0
"""The seconds that a download may take, unless told otherwise."""

_PASSWORD = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)[^/?#]*@")


class Limits(TypedDict, total=False):
    """What reading from an address may take: `timeout` in seconds (None for any), and `max_bytes`."""

    timeout: float | None
    max_bytes: int


def shown(uri: str) -> str:
    """An address as messages show it: without a password, and a long one is cut."""
    plain = _PASSWORD.sub(r"\1...@", uri)
    return plain if len(plain) <= 200 else f"{plain[:80]}... ({len(uri):,} characters)"


def too_large(uri: str, found: str, max_bytes: int) -> UriError:
    """The error of an address that holds more than may be read."""
    return UriError(f"{shown(uri)}: {found}, and the limit is {max_bytes:,} bytes. Pass a larger max_bytes to read it.")


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


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # of two letters and more: C:\ is a drive
_DRIVE = re.compile(r"/[A-Za-z]:")
_PART = 1 << 20


def read_uri(uri: str, *, timeout: float | None = TIMEOUT, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes at a local path, or behind a file://, http(s):// or data: address.

    `timeout` is in seconds, for each wait of a download and, looked at whenever a part arrives, for all of it; None
    waits as long as it takes. More than `max_bytes` is an error, raised before they are held in memory.
    """
    scheme = scheme_of(uri)
    if scheme is None:
        return _read_path(uri, uri, max_bytes)
    if scheme == "data":
        return read_data_uri(uri, max_bytes)
    if scheme in ("http", "https"):
        http = importlib.import_module("quire.files._http")  # which takes as long as all of quire, and few need it
        content: bytes = http.read_http(uri, timeout, max_bytes)
        return content
    return _read_path(local_path(uri), uri, max_bytes)


def scheme_of(uri: str) -> str | None:
    """The scheme of an address, in small letters; None for a path."""
    match = _SCHEME.match(uri) if ":" in uri else None
    return None if match is None else match[1].lower()


def local_path(uri: str) -> str:
    """The path that a plain or a file:// address means; a UriError for any other address."""
    scheme = scheme_of(uri)
    if scheme is None or (scheme != "file" and os.path.lexists(uri)):
        return uri
    if scheme != "file":
        raise UriError(
            f"{shown(uri)}: addresses of scheme {scheme!r} cannot be read; local paths, file://, http(s):// and data: "
            "can. Fetch the content by other means."
        )
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise UriError(f"{shown(uri)}: a file:// address names no host but localhost. Write file:///path.")
    path = unquote(parts.path)
    return path[1:] if os.name == "nt" and _DRIVE.match(path) else path


def guess_type(uri: str) -> str | None:
    """The media type that an address tells by its suffix, or by itself if it is a data URI; else None."""
    scheme = scheme_of(uri)
    if scheme == "data":
        return data_uri_type(uri)
    path = uri
    if scheme in ("http", "https"):
        path = uri.partition("://")[2].partition("#")[0].partition("?")[0].partition("/")[2]
    return _types().guess_type(os.path.basename(path), strict=False)[0]  # noqa: PTH119 - once for every file found


@cache
def _types() -> MimeTypes:
    """The table of types, without the files of this machine, so that every machine guesses alike."""
    types = MimeTypes()
    for suffix in ("avif", "heic", "webp"):
        types.add_type(f"image/{suffix}", f".{suffix}")
    return types


def _read_path(path: str, uri: str, max_bytes: int) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a Path would take as long as the file
            return _read_file(file, uri, max_bytes)
    except FileNotFoundError as error:
        raise UriNotFoundError(
            f"{shown(uri)}: there is no such file. A relative path starts at the working folder, {Path.cwd()}."
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        if isinstance(error, UriError):
            raise
        raise UriError(f"{shown(uri)}: the file cannot be read ({error}).") from error


def _read_file(file: IO[bytes], uri: str, max_bytes: int) -> bytes:
    """A file of known size at once; what has none, like a pipe, in parts."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        return _read_parts(file, uri, max_bytes)
    if status.st_size > max_bytes:
        raise too_large(uri, f"the file has {status.st_size:,} bytes", max_bytes)
    content = file.read(status.st_size)
    while len(content) < status.st_size and (part := file.read(status.st_size - len(content))):
        content += part  # a read may give less than it was asked for
    return content


def _read_parts(file: IO[bytes], uri: str, max_bytes: int) -> bytes:
    content = bytearray()
    while part := file.read(_PART):
        content += part
        if len(content) > max_bytes:
            raise too_large(uri, "it goes on after that", max_bytes)
    return bytes(content)
