"""Folders at addresses that fsspec supports: s3, gs, hdfs, http, memory and registered ones.

The asynchronous filesystems of fsspec (s3, gs, http, ...) run on an event loop in a thread, which a forked child does
not have, so each process opens its own connection. Their calls are cancelled when their time is over. Other
filesystems cannot cancel a call, so each runs in a thread that is abandoned after the timeout.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, TypeVar

from quire._lowlevel.forks import at_fork
from quire._optional import require
from quire.errors import StorageError, StorageNotFoundError
from quire.files._folder import (
    Entries,
    Entry,
    Folder,
    LocalFolder,
    check_range,
    encode_line,
    file_too_short,
    is_visible,
)
from quire.files._hub import PREFIX, HubFolder
from quire.files._open import open_target
from quire.files._retry import RemoteCall, RemoteOptions, run_with_timeout, timeout_error
from quire.files._uris import display_uri, local_path, scheme_of

T = TypeVar("T")

OBJECT_STORES = frozenset({"abfs", "abfss", "adl", "az", "gcs", "gs", "oci", "oss", "r2", "s3", "s3a"})
"""Stores where a file appears once its upload is complete, folders are not created, and a move is a copy."""
CLEANUP_SECONDS = 5.0
"""The time to remove what a failed write has left."""
_READ_ONLY = frozenset({"http", "https"})
_PART = 16 << 20
"""The bytes that one request reads at most."""
_CACHED_METHODS = frozenset({"info", "ls"})
"""Methods that fsspec may answer from a cache, which is stale when others write."""
_inherited: list[Any] = []
"""Connections from before a fork: to drop them would close the connections of the parent."""


# --- fsspec


def require_fsspec(url: str) -> Any:
    """Return the fsspec module; if it is missing, the error has the command that installs it."""
    module = require("fsspec", extra="parquet", needed_for=display_uri(url))
    _reset_loop_after_forks()
    return module


@cache
def _reset_loop_after_forks() -> None:
    """Let a forked child start an event loop of its own, which older releases of fsspec do not do."""
    at_fork(after_in_child=require("fsspec.asyn", extra="parquet", needed_for="fsspec").reset_lock)


class Connection:
    """The filesystem of an address, opened on first use and again after a fork."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self._url, self._options = url, storage_options
        self._opened: tuple[int, Any, str] | None = None

    def within(self, seconds: float) -> TimedFilesystem:
        """Return the filesystem for calls that together have that many seconds."""
        until = time.monotonic() + seconds
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            _inherited.append(opened)
            url_to_fs = require_fsspec(self._url).core.url_to_fs
            filesystem, root = run_with_timeout(partial(url_to_fs, self._url, **self._options), seconds)
            self._opened = opened = (os.getpid(), filesystem, root.rstrip("/"))
        return TimedFilesystem(opened[1], opened[2], until)


class TimedFilesystem:
    """Calls of a filesystem that share one timeout."""

    def __init__(self, filesystem: Any, root: str, until: float) -> None:
        self._filesystem, self.root, self._until = filesystem, root, until

    def path(self, name: str) -> str:
        """Return the path of a file of the folder, as the filesystem names it."""
        return f"{self.root}/{name}"

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the filesystem."""
        filesystem = self._filesystem
        seconds = max(self._until - time.monotonic(), 0.001)
        if method in _CACHED_METHODS:
            filesystem.invalidate_cache()
        coroutine = getattr(filesystem, f"_{method}", None) if filesystem.async_impl else None
        if not inspect.iscoroutinefunction(coroutine):
            return run_with_timeout(partial(getattr(filesystem, method), *args, **kwargs), seconds)
        asyn = require_fsspec(self.root).asyn
        try:
            return asyn.sync(filesystem.loop, coroutine, *args, timeout=seconds, **kwargs)
        except asyn.FSTimeoutError:
            raise timeout_error(seconds) from None


# --- folders


def open_folder(url: str | os.PathLike[str], options: RemoteOptions | None = None) -> Folder:
    """Return the folder at a path, a file:// address, a dataset on the Hub, or another address that fsspec supports."""
    text = os.fspath(url)
    if "://" not in text and "::" not in text:
        return LocalFolder(os.path.expanduser(text))  # noqa: PTH111 - a path as it was passed
    if scheme_of(text) == "file":
        return LocalFolder(local_path(text))
    if text.startswith(PREFIX):
        return HubFolder(text, options)
    return RemoteFolder(text, options or RemoteOptions())


class RemoteFolder(Folder):
    """A folder at a remote address, connected on first use in each process."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        require_fsspec(url)
        self.url = url if url.endswith("://") else url.rstrip("/")
        self.options = options
        self._connection = Connection(self.url, options.storage_options)

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
                if info["type"] == "directory":
                    folders.append(name)
                else:
                    yield name, info.get("size")

    def _list_folder(self, folder: str) -> Sequence[tuple[str, dict[str, Any]]]:
        """Return the content of a subfolder, by names from the root."""

        def list_names(filesystem: TimedFilesystem) -> Sequence[tuple[str, dict[str, Any]]]:
            start = f"{filesystem.root}/"
            infos = filesystem.call("ls", filesystem.path(folder).rstrip("/"), detail=True)
            return [(info["name"][len(start) :].rstrip("/"), info) for info in infos if info["name"].startswith(start)]

        url = self.join(folder) if folder else self.url
        try:
            return self._run(RemoteCall("listing the files", url), list_names)
        except StorageNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        """Return whether there is a file of that name."""
        try:
            return bool(self._info(name, "looking for the file")["type"] != "directory")
        except StorageNotFoundError:
            return False

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        size = self.reported_size(name)
        return len(self.read(name)) if size is None else size

    def reported_size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if the server does not report it."""
        info = self._info(name, "asking for the size")
        if info["type"] == "directory":
            raise StorageError(f"{display_uri(self.join(name))}: this is a folder, not a file.")
        size: int | None = info.get("size")
        return size

    def _info(self, name: str, what: str) -> dict[str, Any]:
        return self._run(
            RemoteCall(what, self.join(name)), lambda filesystem: filesystem.call("info", filesystem.path(name))
        )

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        call = RemoteCall("reading the file", self.join(name))
        return bytes(self._run(call, lambda filesystem: filesystem.call("cat_file", filesystem.path(name))))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from start to stop."""
        check_range(start, stop)
        return b"".join(self._read_parts(name, start, stop))

    def fetch(self, name: str, target: Path) -> None:
        """Download a file to a local path, part by part."""
        with open_target(target) as file:
            for part in self.parts(name):
                file.write(part)

    def parts(self, name: str, size: int | None = None) -> Iterator[bytes]:
        """Yield the content of a file, part by part; the store is asked for the size if it is not passed."""
        size = self.reported_size(name) if size is None else size
        if size is None:
            yield self.read(name)
        else:
            yield from self._read_parts(name, 0, size)

    def _read_parts(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        while start < stop:
            end = min(start + _PART, stop)
            content = self._read_part(name, start, end)
            if len(content) > end - start:  # the server does not support ranges, and sent the whole file
                if len(content) < stop:
                    raise file_too_short(self.join(name), len(content), start, stop)
                yield content[start:stop]
                return
            yield content
            start = end

    def _read_part(self, name: str, start: int, end: int) -> bytes:
        def read(filesystem: TimedFilesystem) -> bytes:
            content = bytes(filesystem.call("cat_file", filesystem.path(name), start=start, end=end))
            if len(content) < end - start:
                raise OSError(f"{len(content):,} bytes came instead of {end - start:,}. Is the file complete?")
            return content

        return self._run(RemoteCall(f"reading bytes {start:,} to {end:,}", self.join(name)), read)

    @contextmanager
    def open_for_write(self, name: str, *, durable: bool = True) -> Iterator[IO[bytes]]:  # noqa: ARG002 - it always is
        """Open a local file for writing, which is uploaded when it is complete."""
        url = self.join(name)
        if scheme_of(self.url) in _READ_ONLY:
            raise StorageError(
                f"{display_uri(url)}: nothing is written to an http address. Write to a path or a store."
            )
        with tempfile.NamedTemporaryFile(prefix="quire-", suffix=".part") as file:
            yield file
            file.flush()
            self._upload(file.name, name, RemoteCall("writing the file", url, os.fstat(file.fileno()).st_size))

    def _upload(self, local: str, name: str, call: RemoteCall) -> None:
        """Upload a local file; where a partial upload would be visible, under a temporary name that is moved."""
        if scheme_of(self.url) in OBJECT_STORES:
            self._run(call, lambda filesystem: filesystem.call("put_file", local, filesystem.path(name)))
            return
        folder, slash, last = name.rpartition("/")
        part = f"{folder}{slash}.{last}.{uuid.uuid4().hex}.part"

        def put(filesystem: TimedFilesystem) -> None:
            target = filesystem.path(part)
            filesystem.call("makedirs", target.rpartition("/")[0], exist_ok=True)
            filesystem.call("put_file", local, target)

        try:
            self._run(call, put)
            self._move(part, name, call)
        except BaseException:
            once = replace(self.options, retries=0, deadline=min(self.options.deadline, CLEANUP_SECONDS))
            cleanup = RemoteCall("removing the half-written file", self.join(part))
            with suppress(StorageError):
                cleanup.run(lambda seconds: _remove(self._connection.within(seconds), part), once)
            raise

    def _move(self, part: str, name: str, call: RemoteCall) -> None:
        try:
            self._run(call, lambda filesystem: filesystem.call("mv", filesystem.path(part), filesystem.path(name)))
        except StorageNotFoundError:
            if self.reported_size(name) != call.size:  # otherwise an earlier attempt moved it, and its answer was lost
                raise

    def append_line(self, name: str, line: str) -> None:
        """Rewrite the file with one more line."""
        content = encode_line(line)
        try:
            before = self.read(name)
        except StorageNotFoundError:
            before = b""
        with self.open_for_write(name) as file:
            file.write(before if not before or before.endswith(b"\n") else before + b"\n")
            file.write(content)

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(StorageNotFoundError):
            self._run(RemoteCall("removing the file", self.join(name)), lambda filesystem: _remove(filesystem, name))

    def _run(self, call: RemoteCall, request: Callable[[TimedFilesystem], T]) -> T:
        return call.run(lambda seconds: request(self._connection.within(seconds)), self.options)


def _remove(filesystem: TimedFilesystem, name: str) -> None:
    filesystem.call("rm_file", filesystem.path(name))
