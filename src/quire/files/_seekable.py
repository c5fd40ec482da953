"""Files behind addresses that can be sought in, of which only what is asked for is read."""

from __future__ import annotations

import importlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, cast

from typing_extensions import Unpack

from quire.errors import StorageError, UriError, UriNotFoundError
from quire.files._fetch import FOREVER, RETRIES, Fetching, allowed_schemes, is_plain, may_pass
from quire.files._remote import Connection, require_fsspec
from quire.files._transfer import place_of
from quire.files._uris import MAX_BYTES, TIMEOUT, local_path, read_data_uri, scheme_of, shown, too_large

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from typing_extensions import Buffer

_BUFFER = 1 << 18


@contextmanager
def open_seekable(uri: str, **fetching: Unpack[Fetching]) -> Iterator[IO[bytes]]:
    """The file at an address, read as it is needed.

    Over http that takes a server that knows ranges; what another sends is put into a file first. `timeout` is for each
    wait, and `max_bytes` for what is put into a file.
    """
    allowed = allowed_schemes(uri, fetching.get("schemes"))
    scheme = scheme_of(uri)
    if scheme in ("http", "https"):
        with _over_http(uri, fetching, allowed) as file:
            yield file
    elif scheme == "data":
        yield io.BytesIO(read_data_uri(uri, fetching.get("max_bytes", MAX_BYTES)))
    elif is_plain(uri, allowed):
        with _at_path(uri) as file:
            yield file
    else:
        with _in_store(uri, fetching) as file:
            yield file


def _at_path(uri: str) -> IO[bytes]:
    try:
        return open(local_path(uri), "rb", buffering=_BUFFER)  # noqa: PTH123 - who asks for it closes it
    except FileNotFoundError as error:
        raise UriNotFoundError(f"{shown(uri)}: there is no such file.") from error
    except (OSError, ValueError) as error:
        if isinstance(error, UriError):
            raise
        raise UriError(f"{shown(uri)}: the file cannot be read ({error}).") from error


@contextmanager
def _in_store(uri: str, fetching: Fetching) -> Iterator[IO[bytes]]:
    require_fsspec(uri)
    try:
        place = place_of(uri)
        seconds = fetching.get("timeout", TIMEOUT) or FOREVER
        attempt = Connection(place.folder, fetching.get("storage_options") or {}).within(seconds)
        file = attempt.ask("open", attempt.path(place.name), "rb")
    except FileNotFoundError as error:
        raise UriNotFoundError(f"{shown(uri)}: there is no such file.") from error
    except (StorageError, OSError) as error:
        raise UriError(f"{shown(uri)}: the file cannot be read ({error}).") from error
    with file:
        yield file


@contextmanager
def _over_http(uri: str, fetching: Fetching, allowed: frozenset[str] | None) -> Iterator[IO[bytes]]:
    raw = _WebFile(uri, fetching, allowed)
    with raw:
        if raw.has_ranges:
            yield io.BufferedReader(cast("Any", raw), _BUFFER)
            return
        with tempfile.TemporaryFile() as file:
            raw.copy_to(file, fetching.get("max_bytes", MAX_BYTES))
            yield file


class _WebFile(io.RawIOBase):
    """A file of a server that knows ranges: one answer is read on until somebody seeks."""

    def __init__(self, uri: str, fetching: Fetching, allowed: frozenset[str] | None) -> None:
        self._http = importlib.import_module("quire.files._http")
        self._uri, self._allowed = uri, self._http.WEB if allowed is None else allowed
        self._timeout, self._retries = fetching.get("timeout", TIMEOUT), fetching.get("retries", RETRIES)
        self._answer: HTTPResponse | None = None
        self._position, self._at, self._mark = 0, 0, ""
        self._size = -1
        self._again(self._open)

    @property
    def has_ranges(self) -> bool:
        """Whether the server said that it knows them, and how long the file is."""
        return self._size >= 0

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

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self._size - self._position)
        if wanted <= 0:
            return 0
        content: bytes = self._again(lambda: self._read(wanted))
        view[: len(content)] = content
        self._position += len(content)
        self._at = self._position
        return len(content)

    def copy_to(self, file: IO[bytes], max_bytes: int) -> None:
        """Put all of it into a file, as what cannot be asked for in parts."""
        self._again(lambda: self._copy(file, max_bytes))
        file.seek(0)

    def _copy(self, file: IO[bytes], max_bytes: int) -> None:
        if self._answer is None:
            self._open()
        assert self._answer is not None
        file.seek(0)
        file.truncate()
        told, found = self._answer.length, 0
        while part := self._answer.read1(_BUFFER):
            found += len(part)
            if found > max_bytes:
                raise too_large(self._uri, "more than that came", max_bytes)
            file.write(part)
        if told is not None and found < told:
            raise self._http.broken_off(self._uri, found, told)

    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            with suppress(OSError):
                answer.close()

    def _again(self, call: Any) -> Any:
        """The result of a call, which is made anew as often as is allowed."""
        for left in range(self._retries, -1, -1):
            try:
                with self._http.told_of(self._uri, self._timeout):
                    return call()
            except UriError as error:
                self._drop()
                if not left or not may_pass(error):
                    raise
        return None

    def _open(self) -> None:
        answer = self._http.asked(self._uri, self._timeout, self._allowed, Range=f"bytes={self._position}-")
        self._answer, self._at = answer, self._position
        mark = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        if self._size >= 0 and (answer.status != 206 or mark != self._mark):
            raise UriError(f"{shown(self._uri)}: the file was changed while it was read. Read it again.")
        total = (answer.headers.get("Content-Range") or "").rpartition("/")[2]
        if answer.status == 206 and total.isdigit():
            self._size, self._mark = int(total), mark

    def _read(self, wanted: int) -> bytes:
        if self._answer is None or self._at != self._position:
            self._drop()
            self._open()
        assert self._answer is not None
        content = self._answer.read1(wanted)
        if not content:
            raise self._http.broken_off(self._uri, self._position, self._size)
        return content
