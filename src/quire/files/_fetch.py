"""The bytes behind any address, within limits, from allowed schemes, and asked for again where that may help."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from quire.errors import OptionError, StorageError, StorageNotFoundError, UriError, UriNotFoundError, UriTimeoutError
from quire.files._remote import RemoteFolder
from quire.files._retry import _FIRST_PAUSE, _LONGEST_PAUSE, _PASSING_STATUS, RemoteOptions, _chance
from quire.files._transfer import place_of
from quire.files._uris import MAX_BYTES, TIMEOUT, Limits, read_uri, scheme_of, shown, too_large

RETRIES = 2
"""How often a download that failed is tried again, unless told otherwise."""
FOREVER = 1e8
"""As many seconds as a wait without an end has."""


class Fetching(Limits, total=False):
    """What reading from an address may take, and from where.

    `timeout` is in seconds, for all attempts together (60; None for any), and `max_bytes` the most that is read
    (1 GiB). A download that fails for a reason that may pass is tried again up to `retries` times (2). `schemes` are
    the only ones that are read and redirected to, like ('https',): no paths then. `storage_options` go to fsspec.
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
    """The bytes at a local path, or behind an address: file://, http(s)://, data:, or whatever fsspec knows."""
    if retries < 0:
        raise OptionError(f"retries is 0 or more, got {retries}.")
    allowed = allowed_schemes(uri, schemes)
    if scheme_of(uri) in ("http", "https"):
        http = importlib.import_module("quire.files._http")  # which takes as long as all of quire, and few need it
        read = partial(http.read_http, uri, max_bytes=max_bytes, schemes=http.WEB if allowed is None else allowed)
        return _tried(read, timeout, retries)
    if is_plain(uri, allowed):
        return read_uri(uri, max_bytes=max_bytes)
    seconds = FOREVER if timeout is None else timeout
    options = RemoteOptions(retries, seconds, seconds, storage_options or {})
    return _from_store(uri, options, max_bytes)


def is_plain(uri: str, allowed: frozenset[str] | None) -> bool:
    """Whether it takes no one else to read it: a path, which may look like an address, or a data URI."""
    return scheme_of(uri) in (None, "file", "data") or (allowed is None and os.path.lexists(uri))


def allowed_schemes(uri: str, schemes: Iterable[str] | None) -> frozenset[str] | None:
    """The schemes in small letters; an error if that of the address is not among them. None allows all."""
    if schemes is None:
        return None
    if isinstance(schemes, str):
        raise OptionError(f"schemes is a list of them: [{schemes!r}].")
    allowed = frozenset(scheme.lower() for scheme in schemes)
    found = scheme_of(uri)
    if found not in allowed or "::" in uri[:64]:  # fsspec's chains of addresses
        what = "a path" if found is None else f"an address of scheme {found!r}"
        only = " and ".join(sorted(allowed)) or "no address"
        raise UriError(f"{shown(uri)}: {what} is not allowed here, only {only}.")
    return allowed


def _tried(read: Any, timeout: float | None, retries: int) -> bytes:
    """What the first attempt that succeeds gives."""
    end = None if timeout is None else time.monotonic() + timeout
    for number in range(retries + 1):
        try:
            content: bytes = read(timeout=timeout)
        except UriError as error:
            pause = min(_FIRST_PAUSE * 2**number, _LONGEST_PAUSE) * _chance.uniform(0.5, 1)
            timeout = None if end is None else end - time.monotonic() - pause
            if number == retries or not may_pass(error) or (timeout is not None and timeout <= 0):
                raise
        else:
            return content
        time.sleep(pause)
    raise AssertionError("one of the attempts returns or raises")


def may_pass(error: UriError) -> bool:
    """Whether another attempt could go well."""
    status = getattr(error.__cause__, "code", None)
    if isinstance(status, int):
        return status >= 500 or status in _PASSING_STATUS
    invalid = isinstance(error.__cause__, ValueError)
    return isinstance(error, UriTimeoutError) or (error.__cause__ is not None and not invalid)


def _from_store(uri: str, options: RemoteOptions, max_bytes: int) -> bytes:
    try:
        place = place_of(uri)
        folder = RemoteFolder(place.folder, options)
        told = folder._told_size(place.name)
        if told is not None and told > max_bytes:
            raise too_large(uri, f"the file has {told:,} bytes", max_bytes)
        content = b"".join(folder.parts(place.name))
    except StorageNotFoundError as error:
        raise UriNotFoundError(str(error)) from error
    except StorageError as error:
        raise UriError(str(error)) from error
    if len(content) > max_bytes:
        raise too_large(uri, f"the file has {len(content):,} bytes", max_bytes)
    return content
