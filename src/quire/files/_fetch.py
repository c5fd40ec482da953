"""Reading all bytes that any URI names, within limits, from allowed schemes, with retries."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from quire.errors import OptionError, StorageError, StorageNotFoundError, UriError, UriNotFoundError, UriTimeoutError
from quire.files._remote import RemoteFolder
from quire.files._retry import RemoteCall, RemoteOptions
from quire.files._transfer import split_address
from quire.files._uris import MAX_BYTES, TIMEOUT, ReadLimits, display_uri, read_uri, scheme_of, uri_too_large

RETRIES = 2
"""How often a failed download is retried by default."""
NO_TIMEOUT = 1e8
"""The seconds that stand for no timeout, where a number is needed."""


class FetchOptions(ReadLimits, total=False):
    """Limits of reading from a URI, and where it may be read from.

    `timeout` is in seconds, for all attempts and all parts of a file together (60; None for no limit), and `max_bytes`
    the most that is read (1 GiB). A download that fails for a reason that may be temporary is retried up to `retries`
    times (2). `schemes` are the only ones that are read and redirected to, like ('https',): then no paths.
    `storage_options` are keys, endpoints and headers, in the names of fsspec's filesystems.
    """

    retries: int
    schemes: Iterable[str] | None
    storage_options: Mapping[str, Any]


def fetch(
    uri: str,
    *,
    timeout: float | None = TIMEOUT,
    max_bytes: int = MAX_BYTES,
    retries: int = RETRIES,
    schemes: Iterable[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the bytes at a local path, or at a URI: file://, http(s)://, data:, or any other of a store.

    `timeout` is a deadline for the whole of it, with retries and the parts of a large file; see `FetchOptions`.
    """
    allowed = allowed_schemes(uri, schemes)
    seconds = NO_TIMEOUT if timeout is None else timeout
    options = RemoteOptions(retries, seconds, seconds, storage_options or {})
    if scheme_of(uri) in ("http", "https"):
        http = importlib.import_module("quire.files._http")  # slow to import, and rarely needed
        allowed_redirects = http.HTTP_SCHEMES if allowed is None else allowed

        def download(left: float) -> bytes:
            content: bytes = http.read_http(uri, None if timeout is None else left, max_bytes, allowed_redirects)
            return content

        return RemoteCall("reading the file", uri).run(download, options)
    if is_local_or_data(uri, allowed):
        return read_uri(uri, max_bytes=max_bytes)
    return _fetch_from_store(uri, options, max_bytes)


def is_local_or_data(uri: str, allowed: frozenset[str] | None) -> bool:
    """Return whether a URI is a path, which may look like another URI, or a data URI."""
    return scheme_of(uri) in (None, "file", "data") or (allowed is None and os.path.lexists(uri))


def allowed_schemes(uri: str, schemes: Iterable[str] | None) -> frozenset[str] | None:
    """Return the schemes in lower case; raise UriError if that of the URI is not among them. None allows all."""
    if schemes is None:
        return None
    if isinstance(schemes, str):
        raise OptionError(f"schemes is a list of them: [{schemes!r}].")
    allowed = frozenset(scheme.lower() for scheme in schemes)
    scheme = scheme_of(uri)
    if scheme not in allowed or "::" in uri[:64]:  # fsspec chains URIs with ::
        what = "a path" if scheme is None else f"an address of scheme {scheme!r}"
        only = " and ".join(sorted(allowed)) or "no address"
        raise UriError(f"{display_uri(uri)}: {what} is not allowed here, only {only}.")
    return allowed


@contextmanager
def translate_storage_errors() -> Iterator[None]:
    """Raise StorageErrors as UriErrors."""
    try:
        yield
    except StorageNotFoundError as error:
        raise UriNotFoundError(str(error)) from error
    except StorageError as error:
        kind = UriTimeoutError if isinstance(error.__cause__, TimeoutError) else UriError
        raise kind(str(error)) from error


def _fetch_from_store(uri: str, options: RemoteOptions, max_bytes: int) -> bytes:
    end = time.monotonic() + options.deadline
    with translate_storage_errors():
        address = split_address(uri)
        folder = RemoteFolder(address.folder, options)
        size = folder.reported_size(address.name)
        if size is not None and size > max_bytes:
            raise uri_too_large(uri, f"the file has {size:,} bytes", max_bytes)
        parts: list[memoryview] = []
        for part in folder.parts(address.name, size):
            parts.append(part)
            # The options of a folder are for one request each: here, all of them share the time.
            left, received = end - time.monotonic(), sum(map(len, parts))
            if left <= 0 and size is not None and received < size:
                raise UriTimeoutError(
                    f"{display_uri(uri)}: {received:,} of {size:,} bytes came within {options.deadline:g} seconds. "
                    "Pass a larger timeout, or try again."
                )
            folder.options = replace(options, deadline=max(left, 0.001), timeout=max(left, 0.001))
        content = b"".join(parts)
    if len(content) > max_bytes:
        raise uri_too_large(uri, f"the file has {len(content):,} bytes", max_bytes)
    return content
