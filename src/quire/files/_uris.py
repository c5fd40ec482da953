"""The bytes behind an address: a path, file://, http(s):// or data:, within limits of size and time."""

from __future__ import annotations

import importlib
import os
import re
import stat
from functools import cache
from mimetypes import MimeTypes
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from quire.errors import UriError, UriNotFoundError
from quire.files._data_uris import data_uri_type, read_data_uri
from quire.files._limits import MAX_BYTES, TIMEOUT, shown, too_large

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
