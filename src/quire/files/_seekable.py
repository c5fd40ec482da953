"""Remote files that can seek, of which only the parts that are needed are read."""

from __future__ import annotations

import importlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import Unpack

from quire.errors import OptionError, UriError, UriNotFoundError
from quire.files._fetch import (
    NO_TIMEOUT,
    RETRIES,
    FetchOptions,
    allowed_schemes,
    is_local_or_data,
    retry_download,
    translate_storage_errors,
)
from quire.files._remote import RemoteFolder
from quire.files._retry import RemoteOptions
from quire.files._transfer import split_address
from quire.files._uris import MAX_BYTES, TIMEOUT, display_uri, local_path, read_data_uri, scheme_of, too_large

if TYPE_CHECKING:
    from http.client import HTTPResponse

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
    """A file on a server that supports ranges: one response is read until the next seek.

    `_position` is where the reader is, and `_response_position` where the response is.
    """

    def __init__(self, uri: str, options: FetchOptions, allowed: frozenset[str] | None) -> None:
        self._http = importlib.import_module("quire.files._http")
        self._uri, self._allowed = uri, self._http.HTTP_SCHEMES if allowed is None else allowed
        self._timeout, self._retries = options.get("timeout", TIMEOUT), options.get("retries", RETRIES)
        self._response: HTTPResponse | None = None
        self._position, self._response_position, self._validator = 0, 0, ""
        self._size = -1
        self._retry(self._open)

    @property
    def has_ranges(self) -> bool:
        """Whether the server supports ranges, and reported the size of the file."""
        return self._size >= 0

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        size = min(len(view), self._size - self._position)
        if size <= 0:
            return 0
        content = self._retry(lambda: self._read(size))
        view[: len(content)] = content
        self._position += len(content)
        self._response_position = self._position
        return len(content)

    def copy_to(self, file: IO[bytes], max_bytes: int) -> None:
        """Download the whole file from a server that does not support ranges."""
        self._retry(lambda: self._copy(file, max_bytes))
        file.seek(0)

    def _copy(self, file: IO[bytes], max_bytes: int) -> None:
        if self._response is None or self._response.status == 206:  # a part of unknown size
            self._drop_response()
            self._response = self._http.open_url(self._uri, self._timeout, self._allowed)
        assert self._response is not None
        file.seek(0)
        file.truncate()
        announced, received = self._response.length, 0
        while chunk := self._response.read1(_BUFFER):
            received += len(chunk)
            if received > max_bytes:
                raise too_large(self._uri, "more than that came", max_bytes)
            file.write(chunk)
        if announced is not None and received < announced:
            raise self._http.incomplete_download(self._uri, received, announced)

    def close(self) -> None:
        self._drop_response()
        super().close()

    def _drop_response(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            with suppress(OSError):
                response.close()

    def _retry(self, call: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                with self._http.translate_errors(self._uri, self._timeout):
                    return call()
            except UriError:
                self._drop_response()
                raise

        return retry_download(attempt, self._retries)

    def _open(self) -> None:
        headers = {"Range": f"bytes={self._position}-"}
        response = self._http.open_url(self._uri, self._timeout, self._allowed, **headers)
        self._response, self._response_position = response, self._position
        validator = self._http.validator_of(response)
        size = self._http.sent_range(self._uri, response, self._position) if response.status == 206 else None
        if self._size >= 0 and (size != self._size or validator != self._validator):
            raise UriError(f"{display_uri(self._uri)}: the file was changed while it was read. Read it again.")
        if size is not None:
            self._size, self._validator = size, validator

    def _read(self, size: int) -> bytes:
        if self._response is None or self._response_position != self._position:
            self._drop_response()
            self._open()
        assert self._response is not None
        content = self._response.read1(size)
        if not content:
            raise self._http.incomplete_download(self._uri, self._position, self._size)
        return content
