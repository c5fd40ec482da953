"""Object stores and web servers, read and written with obstore: s3, gs, az and http.

obstore runs a pool of threads that a forked child does not have: after it was used in a parent, every call in a forked
child would wait for ever. `is_inherited` detects that. Before its first use in the parent, a fork is harmless, and
spawned processes have no threads to inherit. A store holds connections and secrets, so none is ever pickled: processes
get the address and the `storage_options`, and create their own.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from quire._lowlevel.forks import at_fork
from quire._optional import require
from quire.files._fsspec import FileInfo
from quire.files._retry import SLOWEST_TRANSFER, RemoteOptions, run_with_timeout, timeout_error
from quire.files._store_options import StoreSettings
from quire.files._uris import display_uri

T = TypeVar("T")

PART = 8 << 20
"""The bytes that one request of an upload sends, unless the file has too many parts of this size."""
_MOST_PARTS = 9000
"""S3 accepts 10,000."""
_PARALLEL_PARTS = 8
_BACKOFF = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=8), "base": 2}
_NO_TIMEOUT = 1e8
_was_used = False
_is_inherited = False


def is_inherited() -> bool:
    """Return whether obstore was used before this process was forked, so that it cannot be used here."""
    return _is_inherited


def _note_fork() -> None:
    global _is_inherited  # noqa: PLW0603 - of the process
    _is_inherited = _is_inherited or _was_used


at_fork(after_in_child=_note_fork)


class ObjectStoreError(OSError):
    """A request that a store did not answer as expected; `status` is the HTTP status, or 0."""

    def __init__(self, message: str, status: int = 0, attempts: int = 1) -> None:
        super().__init__(message)
        self.status, self.attempts = status, attempts


class UnsupportedError(Exception):
    """Something that obstore cannot do at this address, and fsspec may."""


class ConflictError(Exception):
    """A file that another process has written since it was read."""


class Version(NamedTuple):
    """The content of a file, and what identifies it for a conditional update; None for a missing file."""

    content: bytes
    tag: dict[str, str] | None


class ObstoreClient:
    """Requests to the store of a folder, safe to use from many threads.

    A request is not retried here, except those of an upload, whose parts are retried one by one.
    """

    uploads_atomically = True
    parallel_requests = 64

    def __init__(self, url: str, settings: StoreSettings, options: RemoteOptions) -> None:
        self._url, self._settings, self._options = url, settings, options
        self.upload_options = replace(options, retries=0)  # obstore retries the parts
        self._stores: dict[tuple[float, bool], Any] = {}

    def list_folder(self, folder: str, seconds: float) -> Sequence[tuple[str, FileInfo]]:
        """Return all files below a subfolder, by names from the root."""
        if self._settings.kind == "http":
            raise UnsupportedError  # obstore lists servers that speak WebDAV only
        entries = self._call(lambda obstore, store: obstore.list(store, prefix=folder or None).collect(), seconds)
        # Some tools mark folders with empty files of names that end with a slash, which obstore drops.
        folders = {parent for entry in entries for parent in _parents(entry["path"])}
        return [(e["path"], FileInfo(e["size"])) for e in entries if e["size"] or e["path"] not in folders]

    def info(self, name: str, seconds: float) -> FileInfo:
        """Return the size of a file."""
        return FileInfo(self._call(lambda obstore, store: obstore.head(store, name)["size"], seconds))

    def read(self, name: str, seconds: float) -> bytes:
        """Return the content of a file."""
        return self._call(lambda obstore, store: bytes(obstore.get(store, name).bytes()), seconds)

    def read_range(self, name: str, start: int, stop: int, seconds: float) -> tuple[memoryview, bool]:
        """Return the bytes from start to stop, or fewer at the end; or the whole file, and True."""
        try:
            content = self._call(lambda obstore, store: obstore.get_range(store, name, start=start, end=stop), seconds)
        except _NoRangesError:
            return memoryview(self.read(name, seconds)), True
        except _OutsideError:
            return memoryview(b""), False
        return memoryview(content), False  # not as bytes: the copy would cost half as much CPU time as the request

    def upload(self, local: str, name: str, size: int, seconds: float) -> None:
        """Upload a local file in parts, several at a time; a failed upload leaves none of them."""
        part = max(PART, -(-size // _MOST_PARTS))

        def upload(obstore: Any, store: Any) -> None:
            obstore.put(store, name, Path(local), chunk_size=part, max_concurrency=_PARALLEL_PARTS)

        self._call(upload, min(seconds, self._part_seconds(part)), retries=True)

    def write(self, name: str, pieces: Iterable[Any], seconds: float) -> None:
        """Write a file while its pieces are produced; an error, also one of the pieces, leaves no file."""
        size, parallel = 2 * PART, _PARALLEL_PARTS // 2  # so that files of up to 150 GB have few enough parts

        def write(obstore: Any, store: Any) -> None:
            with obstore.open_writer(store, name, buffer_size=size, max_concurrency=parallel) as file:
                for piece in pieces:
                    file.write(piece)

        self._call(write, max(seconds, self._part_seconds(size)), retries=True)

    def put(self, name: str, content: bytes, seconds: float, tag: dict[str, str] | None = None) -> None:
        """Write a small file that does not exist, or that still has the tag; raise ConflictError otherwise."""
        mode = "create" if tag is None else tag
        self._call(lambda obstore, store: obstore.put(store, name, content, mode=mode, use_multipart=False), seconds)

    def read_version(self, name: str, seconds: float) -> Version:
        """Return the content of a small file for a conditional update."""

        def read(obstore: Any, store: Any) -> Version:
            result = obstore.get(store, name)
            meta = result.meta
            tag = {key: meta[key] for key in ("e_tag", "version") if meta.get(key) is not None}
            return Version(bytes(result.bytes()), tag)

        try:
            return self._call(read, seconds)
        except FileNotFoundError:
            return Version(b"", None)

    def remove(self, name: str, seconds: float) -> None:
        """Remove a file."""
        self._call(lambda obstore, store: obstore.delete(store, name), seconds)

    def _part_seconds(self, size: int) -> float:
        return self._options.timeout + size / SLOWEST_TRANSFER

    def _call(self, request: Callable[[Any, Any], T], seconds: float, *, retries: bool = False) -> T:
        """Return the result of a request with obstore and a store; translate its errors."""
        global _was_used  # noqa: PLW0603 - of the process, as forks are
        obstore = require("obstore", extra="remote", needed_for=display_uri(self._url))
        _was_used = True  # before the request: a fork may happen while another thread waits for it
        seconds = _round_up(seconds)
        key = (seconds, retries)
        store = self._stores.get(key)
        if store is None:
            store = self._stores[key] = self._open(seconds, retries=retries)
        try:
            if threading.current_thread() is threading.main_thread():
                # obstore does not react to Ctrl-C before the end of a request; waiting for a thread does.
                return run_with_timeout(partial(request, obstore, store), _NO_TIMEOUT)
            return request(obstore, store)
        except (obstore.exceptions.BaseError, OSError) as error:
            # A file that is written piece by piece raises a plain OSError with the same text.
            if not isinstance(error, obstore.exceptions.BaseError) and type(error) not in (OSError, FileNotFoundError):
                raise
            raise _translate(error, seconds, obstore.exceptions) from None

    def _open(self, seconds: float, *, retries: bool) -> Any:
        """Create a store, which keeps its own pool of connections; the timeout of its requests cannot be changed."""
        needed_for = display_uri(self._url)
        stores = require("obstore.store", extra="remote", needed_for=needed_for)
        kinds = require("obstore", extra="remote", needed_for=needed_for).exceptions
        client = {
            "timeout": timedelta(seconds=seconds),
            "connect_timeout": timedelta(seconds=min(seconds, 10.0)),
            "user_agent": "quire",
            **self._settings.client,
        }
        retry = {
            "max_retries": self._options.retries if retries else 0,
            "retry_timeout": timedelta(seconds=min(self._options.deadline, 1e6)),
            "backoff": _BACKOFF,
        }
        try:
            return self._settings.open(stores, client, retry)
        except (kinds.BaseError, FileNotFoundError) as error:
            raise ValueError(_first_line(error)) from None


class _NoRangesError(Exception):
    """The server sent the whole file instead of a range."""


class _OutsideError(Exception):
    """A range that begins after the end of the file."""


# --- errors

_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z -]*)")
_ATTEMPTS = re.compile(r"after (\d+) retries")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_SYSTEM_REASON = re.compile(r'message: "([^"]*)"')
_QUERY = re.compile(r"(https?://[^\s?]+)\?[^\s,)]*")
_METADATA_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")


def _translate(error: Exception, seconds: float, kinds: Any) -> Exception:
    """Return an error of obstore as one of those that `RemoteCall` distinguishes.

    obstore has few classes of errors; what distinguishes the others is in their text.
    """
    text = str(error)
    match = _STATUS.search(text)
    status = int(match[1]) if match else 0
    retries = _ATTEMPTS.search(text)
    attempts = int(retries[1]) + 1 if retries else 1
    if any(server in text for server in _METADATA_SERVERS) and status < 500 and status != 429:
        return PermissionError(
            "no credentials were found in the storage_options, the environment, the profiles or the metadata of "
            "this machine; for a public bucket, pass storage_options={'anon': True}"
        )
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(_describe(text, match))
    if isinstance(error, (kinds.AlreadyExistsError, kinds.PreconditionError)) or status in (409, 412):
        return ConflictError(_describe(text, match))
    if "RangeNotSupported" in text or "non-partial response" in text:
        return _NoRangesError()
    if "MissingContentLength" in text or "MissingLastModified" in text:
        return UnsupportedError()
    if status == 416 or "StartTooLarge" in text:
        return _OutsideError()
    if isinstance(error, kinds.NotSupportedError) or "LOCATION" in text:
        return ObjectStoreError(_describe(text, match), status or 400)  # a status that is not retried
    if "kind: Timeout" in text:
        return timeout_error(seconds)
    return ObjectStoreError(_describe(text, match), status, attempts)


def _describe(text: str, status: re.Match[str] | None) -> str:
    """Return the reason of an error in one line, without secrets that are part of addresses."""
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if status is not None:
        details = [part[1] for part in (code, message) if part is not None]
        return ": ".join([f"the store answered {status[1]} {status[2]}".strip(), *details])
    if "LOCATION" in text:
        return "the bucket is in another region: set AWS_REGION, or pass it as storage_options={'region': ...}"
    if "ConnectError" in text or "kind: Connect" in text:
        reasons = _SYSTEM_REASON.findall(text)
        return f"no connection ({reasons[-1] if reasons else 'unknown host or refused'})"
    if "IncompleteBody" in text or "kind: Interrupted" in text:
        return "the connection broke off during the answer"
    return _first_line(text)


def _first_line(error: object) -> str:
    line = _QUERY.sub(r"\1", str(error).partition("\n")[0])
    return line if len(line) <= 300 else f"{line[:300]}..."


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _round_up(seconds: float) -> float:
    """Round a timeout up by at most a quarter, so that few stores are created, and connections are reused."""
    seconds = min(max(seconds, 0.001), 1e6)
    unit = 0.001
    while seconds / unit > 8:
        unit *= 2
    return -(-seconds // unit) * unit
