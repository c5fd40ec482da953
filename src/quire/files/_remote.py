"""Folders at remote addresses: s3, gs, az and http with obstore, and every other scheme with fsspec."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from quire._optional import is_installed, require
from quire.errors import OptionError, StorageError, StorageNotFoundError
from quire.files._folder import (
    Entries,
    Entry,
    Folder,
    LocalFolder,
    RangeRequest,
    add_line,
    check_range,
    encode_line,
    file_exists,
    file_too_short,
    is_visible,
)
from quire.files._fsspec import CLEANUP_SECONDS, FileInfo, FsspecClient, filesystem_class
from quire.files._hub import PREFIX, HubFolder
from quire.files._object_store import ConflictError, ObstoreClient, UnsupportedError, is_inherited
from quire.files._open import open_target
from quire.files._retry import RemoteCall, RemoteOptions, retry_pause, timeout_error
from quire.files._store_options import KINDS, package_of, translate_options
from quire.files._uris import display_uri, local_path, scheme_of

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
Item = TypeVar("Item")
Client = FsspecClient | ObstoreClient

_READ_ONLY = frozenset({"http", "https"})
_PART = 16 << 20
"""The bytes that one request reads at most."""
_PARTS_AHEAD = 4
"""The parts of a large file that are read at the same time, if the client can."""


def open_folder(url: str | os.PathLike[str], options: RemoteOptions | None = None) -> Folder:
    """Return the folder at a path, a dataset on the Hub, or any other address that obstore or fsspec supports."""
    if not isinstance(url, (str, os.PathLike)):
        raise OptionError(f"a folder is a path or a URL, got {type(url).__name__}.")
    text = os.fspath(url)
    if "://" not in text and "::" not in text:
        return LocalFolder(os.path.expanduser(text))  # noqa: PTH111 - a path as it was passed
    if scheme_of(text) == "file":
        return LocalFolder(local_path(text))
    if text.startswith(PREFIX):
        return HubFolder(text, options)
    return RemoteFolder(text, options or RemoteOptions())


class RemoteFolder(Folder):
    """A folder at a remote address, connected on first use in each process.

    Its clients send single requests; this class checks what they return, and retries. Addresses that obstore supports
    are read with it; with fsspec if obstore is not installed, if an option is for fsspec only, for the little that
    obstore cannot do (listing the links of a web page), and in a forked child, where obstore would hang.
    """

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self.url = url if url.endswith("://") else url.rstrip("/")
        self.options = options
        self._obstore: ObstoreClient | None = None
        self._fsspec: FsspecClient | None = None
        if scheme_of(url) in KINDS and "::" not in url:
            if sys.version_info >= (3, 11) and not is_installed("fsspec"):
                require("obstore", extra="remote", needed_for=display_uri(url))
            settings = translate_options(self.url, options.storage_options) if is_installed("obstore") else None
            if settings is not None:
                self._obstore = ObstoreClient(self.url, settings, options)
        if self._obstore is None:
            self._fsspec = FsspecClient(self.url, options.storage_options)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFolder, (self.url, self.options)

    def list(self, suffixes: Sequence[str] = (), *, hidden: bool = False) -> Entries:
        """Return the files here and in subfolders, sorted by name."""
        ends = tuple(suffixes)
        files = ((name, size) for name, size in self._walk(hidden=hidden) if not ends or name.endswith(ends))
        return sorted(Entry(name, self.size(name) if size is None else size) for name, size in files)

    def _walk(self, *, hidden: bool) -> Iterator[tuple[str, int | None]]:
        """Yield every file with its size, if known. fsspec's own walk takes a folder that it cannot read as empty."""
        folders, seen = [""], {""}  # object stores may list a folder among its own content
        while folders:
            for name, info in self._list_folder(folders.pop()):
                if name in seen or not (hidden or all(map(is_visible, name.split("/")))):
                    continue
                seen.add(name)
                if info.is_folder:
                    folders.append(name)
                else:
                    yield name, info.size

    def _list_folder(self, folder: str) -> Sequence[tuple[str, FileInfo]]:
        """Return the content of a subfolder, by names from the root."""
        call = RemoteCall("listing the files", self.join(folder) if folder else self.url)
        try:
            return self._run(call, lambda client, seconds: client.list_folder(folder, seconds))
        except StorageNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        """Return whether there is a file of that name."""
        try:
            return not self._info(name, "looking for the file").is_folder
        except StorageNotFoundError:
            return False

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        size = self.reported_size(name)
        return len(self.read(name)) if size is None else size

    def reported_size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if the server does not report it."""
        info = self._info(name, "asking for the size")
        if info.is_folder:
            raise StorageError(f"{display_uri(self.join(name))}: this is a folder, not a file.")
        return info.size

    def _info(self, name: str, what: str) -> FileInfo:
        return self._run(RemoteCall(what, self.join(name)), lambda client, seconds: client.info(name, seconds))

    # --- reading

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        call = RemoteCall("reading the file", self.join(name))
        return self._run(call, lambda client, seconds: client.read(name, seconds))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from start to stop."""
        return bytes(self.read_buffer(name, start, stop))

    def read_buffer(self, name: str, start: int, stop: int) -> memoryview:
        """Return the bytes from start to stop; if they are more than one part, they are copied once."""
        check_range(start, stop)
        parts = list(self._read_parts(name, start, stop))
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def read_ranges(self, requests: Sequence[RangeRequest], *, concurrency: int = 32) -> Sequence[bytes]:
        """Return the bytes of many ranges, in order, read at the same time."""
        workers = min(concurrency, len(requests), self._client().parallel_requests)
        return list(_map_in_order(lambda request: self.read_range(*request), requests, workers))

    def fetch(self, name: str, target: Path) -> None:
        """Download a file to a local path, part by part."""
        with open_target(target) as file:
            for part in self.parts(name):
                file.write(part)

    def parts(self, name: str, size: int | None = None) -> Iterator[memoryview]:
        """Yield the content of a file, part by part; the store is asked for the size if it is not passed."""
        size = self.reported_size(name) if size is None else size
        if size is None:
            yield memoryview(self.read(name))
        else:
            yield from self._read_parts(name, 0, size)

    def _read_parts(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        if start == stop:
            return
        first = min(start + _PART, stop)
        content, is_whole = self._read_part(name, start, first)
        if is_whole:  # the server does not support ranges: the other parts would be the whole file again
            if len(content) < stop:
                raise file_too_short(self.join(name), len(content), start, stop)
            yield content[start:stop]
            return
        yield content
        rest = [(begin, min(begin + _PART, stop)) for begin in range(first, stop, _PART)]
        workers = min(_PARTS_AHEAD, len(rest), self._client().parallel_requests)
        parts = _map_in_order(lambda part: (part, self._read_part(name, *part)), rest, workers)
        for (begin, end), (content, is_whole) in parts:
            yield content[begin:end] if is_whole else content

    def _read_part(self, name: str, start: int, stop: int) -> tuple[memoryview, bool]:
        """Return the bytes from start to stop; or the whole file, and True."""
        url = self.join(name)

        def read(client: Client, seconds: float) -> tuple[memoryview, bool]:
            content, is_whole = client.read_range(name, start, stop, seconds)
            if not is_whole and len(content) < stop - start:
                size = client.info(name, seconds).size
                if size is not None and size < stop:
                    raise file_too_short(url, size, start, stop)
                raise OSError(f"{len(content):,} bytes came instead of {stop - start:,}")
            return content, is_whole

        return self._run(RemoteCall(f"reading bytes {start:,} to {stop:,}", url, stop - start), read)

    # --- writing

    @contextmanager
    def open_for_write(self, name: str, *, durable: bool = True) -> Iterator[IO[bytes]]:  # noqa: ARG002 - it always is
        """Open a local file for writing, which is uploaded when it is complete."""
        url = self._check_writable(name)
        with tempfile.NamedTemporaryFile(prefix="quire-", suffix=".part") as file:
            yield file
            file.flush()
            self._upload(file.name, name, RemoteCall("writing the file", url, os.fstat(file.fileno()).st_size))

    def _upload(self, local: str, name: str, call: RemoteCall) -> None:
        """Upload a local file; where a partial upload would be visible, under a temporary name that is moved."""
        client = self._client()
        if client.uploads_atomically:
            self._run(
                call, lambda client, seconds: client.upload(local, name, call.size, seconds), client.upload_options
            )
            return
        assert isinstance(client, FsspecClient)
        folder, slash, last = name.rpartition("/")
        part = f"{folder}{slash}.{last}.{uuid.uuid4().hex}.part"
        try:
            self._run(call, lambda client, seconds: client.upload(local, part, call.size, seconds))
            try:
                call.run(lambda seconds: client.move(part, name, seconds), self.options)
            except StorageNotFoundError:
                # If the file has the right size, an earlier attempt moved it, and its answer was lost.
                if self.reported_size(name) != call.size:
                    raise
        except BaseException:
            once = replace(self.options, retries=0, deadline=min(self.options.deadline, CLEANUP_SECONDS))
            cleanup = RemoteCall("removing the half-written file", self.join(part))
            with suppress(StorageError):
                cleanup.run(lambda seconds: client.remove(part, seconds), once)
            raise

    def write_pieces(self, name: str, pieces: Iterable[Any]) -> None:
        """Write a file while its pieces are produced; an error, also one of the pieces, leaves no file."""
        self._client().write(name, pieces, self.options.timeout)

    @property
    def upload_options(self) -> RemoteOptions:
        """The options for a whole upload, without retries if the client retries its parts."""
        return self._client().upload_options or self.options

    def create(self, name: str, content: bytes) -> None:
        """Write a small file that must not exist; with obstore, the store itself ensures that."""
        url = self._check_writable(name)
        client = self._client()
        if isinstance(client, FsspecClient):
            super().create(name, content)
            return
        is_unknown = False  # whether an earlier request may have written the file, and its answer was lost

        def create(seconds: float) -> None:
            nonlocal is_unknown
            try:
                client.put(name, content, seconds)
            except ConflictError:
                if is_unknown and client.read(name, seconds) == content:
                    return
                raise file_exists(url) from None
            except BaseException:
                is_unknown = True
                raise

        RemoteCall("creating the file", url, len(content)).run(create, self.options)

    def append_line(self, name: str, line: str) -> None:
        """Add a line by rewriting the file; with obstore, only if no other process has written it meanwhile."""
        url, content = self._check_writable(name), encode_line(line)
        client = self._client()
        if isinstance(client, FsspecClient):
            try:
                before = self.read(name)
            except StorageNotFoundError:
                before = b""
            with self.open_for_write(name) as file:
                file.write(add_line(before, content))
            return
        sent: bytes | None = None  # the content of a request whose answer was lost

        def append(seconds: float) -> None:
            nonlocal sent
            until = time.monotonic() + seconds
            for number in range(1 << 30):
                before, tag = client.read_version(name, seconds)
                if sent is not None and before.startswith(sent):
                    return
                sent = add_line(before, content)
                try:
                    client.put(name, sent, seconds, tag)
                except ConflictError:
                    sent = None
                else:
                    return
                pause = retry_pause(min(number, 4))
                if time.monotonic() + pause >= until:
                    raise timeout_error(seconds)
                time.sleep(pause)

        RemoteCall("adding a line", url).run(append, self.options)

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""
        call = RemoteCall("removing the file", self.join(name))
        with suppress(StorageNotFoundError):
            self._run(call, lambda client, seconds: client.remove(name, seconds))

    def _check_writable(self, name: str) -> str:
        url = self.join(name)
        if scheme_of(self.url) in _READ_ONLY:
            raise StorageError(
                f"{display_uri(url)}: nothing is written to an http address. Write to a path or a store."
            )
        return url

    # --- clients

    def _run(self, call: RemoteCall, request: Callable[[Client, float], T], options: RemoteOptions | None = None) -> T:
        def attempt(seconds: float) -> T:
            try:
                return request(self._client(), seconds)
            except UnsupportedError:
                return request(self._fsspec_client(), seconds)

        return call.run(attempt, options or self.options)

    def _client(self) -> Client:
        if self._obstore is None:
            return self._fsspec_client()
        if not is_inherited():
            return self._obstore
        if filesystem_class(scheme_of(self.url) or "") is None:
            raise StorageError(
                f"{display_uri(self.url)}: obstore was used before this process was forked, and would hang here. "
                "Start workers with 'spawn' or 'forkserver' (in a DataLoader: multiprocessing_context='forkserver'), "
                f"or install the package that works after a fork: pip install '{package_of(self.url)}'."
            )
        return self._fsspec_client()

    def _fsspec_client(self) -> FsspecClient:
        if self._fsspec is None:
            self._fsspec = FsspecClient(self.url, self.options.storage_options)
        return self._fsspec


def _map_in_order(call: Callable[[Item], T], items: Sequence[Item], workers: int) -> Iterator[T]:
    """Yield the results of calls in threads, in the order of the items; at most `workers` are unfinished or unused."""
    if workers <= 1:
        yield from map(call, items)
        return
    futures = importlib.import_module("concurrent.futures")  # slow to import
    pool = futures.ThreadPoolExecutor(workers, thread_name_prefix="quire-read")
    pending: deque[Future[T]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(call, item))
            if len(pending) == workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
