"""Remote files that can seek, of which only the parts that are needed are read."""

from __future__ import annotations

import importlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import Unpack

from quire.errors import OptionError, UriError, UriNotFoundError
from quire.files._fetch import (
    NO_TIMEOUT,
    RETRIES,
    FetchOptions,
    allowed_schemes,
    is_local_or_data,
    translate_storage_errors,
)
from quire.files._remote import RemoteFolder
from quire.files._retry import RemoteCall, RemoteOptions
from quire.files._transfer import split_address
from quire.files._uris import MAX_BYTES, TIMEOUT, display_uri, local_path, read_data_uri, scheme_of, uri_too_large

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")
_BUFFER = 1 << 18
_STORE_BUFFER = 1 << 20
"""The least that one request to a store reads."""


@contextmanager
def open_seekable(uri: str, **options: Unpack[FetchOptions]) -> Iterator[IO[bytes]]:
    """Open the file at a URI, and read what is needed of it.

    Over http, that takes a server that supports ranges; otherwise the file is downloaded to a temporary file first.
    `timeout` is for each wait, and `max_bytes` for what is downloaded to a temporary file.
    """
    if options.get("retries", RETRIES) < 0:
        raise OptionError(f"retries is 0 or more, got {options['retries']}.")
    allowed = allowed_schemes(uri, options.get("schemes"))
    scheme = scheme_of(uri)
    if scheme in ("http", "https"):
        with _RangeFile(uri, options, allowed) as raw:
            if raw.has_ranges:
                yield io.BufferedReader(cast("Any", raw), _BUFFER)
                return
            with tempfile.TemporaryFile() as file:
                raw.copy_to(file, options.get("max_bytes", MAX_BYTES))
                yield file
    elif scheme == "data":
        yield io.BytesIO(read_data_uri(uri, options.get("max_bytes", MAX_BYTES)))
    else:
        with _open_local(uri) if is_local_or_data(uri, allowed) else _open_in_store(uri, options) as file:
            yield file


def _open_local(uri: str) -> IO[bytes]:
    try:
        return open(local_path(uri), "rb", buffering=_BUFFER)  # noqa: PTH123 - the caller closes it
    except FileNotFoundError as error:
        raise UriNotFoundError(f"{display_uri(uri)}: there is no such file.") from error
    except (OSError, ValueError) as error:
        if isinstance(error, UriError):
            raise
        raise UriError(f"{display_uri(uri)}: the file cannot be read ({error}).") from error


def _open_in_store(uri: str, options: FetchOptions) -> IO[bytes]:
    seconds = options.get("timeout", TIMEOUT) or NO_TIMEOUT
    remote = RemoteOptions(options.get("retries", RETRIES), seconds, seconds, options.get("storage_options") or {})
    with translate_storage_errors():
        address = split_address(uri)
        folder = RemoteFolder(address.folder, remote)
        size = folder.size(address.name)
    return io.BufferedReader(cast("Any", _StoreFile(folder, address.name, size)), _STORE_BUFFER)


class _SeekableFile(io.RawIOBase):
    """A file of known size with a position."""

    _position, _size = 0, -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position


class _StoreFile(_SeekableFile):
    """A file in a store: each read is a request."""

    def __init__(self, folder: RemoteFolder, name: str, size: int) -> None:
        self._folder, self._name, self._size = folder, name, size

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        size = min(len(view), self._size - self._position)
        if size <= 0:
            return 0
        with translate_storage_errors():
            view[:size] = self._folder.read_buffer(self._name, self._position, self._position + size)
        self._position += size
        return size


class _RangeFile(_SeekableFile):
    """A file on a server, which is read from any position if the server supports ranges."""

    def __init__(self, uri: str, options: FetchOptions, allowed: frozenset[str] | None) -> None:
        http = importlib.import_module("quire.files._http")
        schemes = http.HTTP_SCHEMES if allowed is None else allowed
        self._uri, self._translate_errors = uri, http.translate_errors
        self._timeout, self._retries = options.get("timeout", TIMEOUT), options.get("retries", RETRIES)
        self._body = http.ResumableDownload(
            uri, lambda headers, seconds: http.open_url(uri, seconds, schemes, **headers)
        )
        self._retry(lambda: self._body.open(0, self._timeout))
        self._size = self._body.size if self.has_ranges else -1

    @property
    def has_ranges(self) -> bool:
        """Whether the server supports ranges, and reported the size of the file."""
        return self._body.has_ranges and self._body.size is not None

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        size = min(len(view), self._size - self._position)
        if size <= 0:
            return 0
        content: bytes = self._retry(lambda: self._body.read(self._position, size, self._timeout))
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def copy_to(self, file: IO[bytes], max_bytes: int) -> None:
        """Download the whole file from a server that does not support ranges."""
        if self._body.has_ranges:  # it did not report the size, so the end of a range may not be that of the file
            self._retry(lambda: self._body.open(0, self._timeout, is_range=False))

        def read() -> bytes:
            position = file.tell()
            content: bytes = self._body.read(position, _BUFFER, self._timeout, is_range=position > 0)
            return content

        while chunk := self._retry(read):
            if file.tell() + len(chunk) > max_bytes:
                raise uri_too_large(self._uri, "more than that came", max_bytes)
            file.write(chunk)
        file.seek(0)

    def close(self) -> None:
        self._body.close()
        super().close()

    def _retry(self, call: Callable[[], T]) -> T:
        def attempt(_: float) -> T:
            with self._translate_errors(self._uri, self._timeout):
                return call()

        # Each attempt has the timeout; a pause that a server asks for must not be longer than all of them.
        seconds = NO_TIMEOUT if self._timeout is None else self._timeout
        options = RemoteOptions(self._retries, seconds * (self._retries + 1), seconds)
        return RemoteCall("reading the file", self._uri).run(attempt, options)
