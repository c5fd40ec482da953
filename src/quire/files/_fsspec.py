"""Stores that fsspec supports: hdfs, memory, ftp, and, where obstore is not installed, s3, gs, az and http.

The asynchronous filesystems of fsspec (s3, gs, http, ...) run on an event loop in a thread, which a forked child does
not have, so each process opens its own connection. Their calls are cancelled when their time is over. Other
filesystems cannot cancel a call, so each runs in a thread that is abandoned after the timeout.
"""

from __future__ import annotations

import inspect
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

from quire._lowlevel.forks import at_fork
from quire._optional import require
from quire.files._retry import RemoteOptions, run_with_timeout, timeout_error
from quire.files._uris import display_uri, scheme_of

OBJECT_STORES = frozenset({"abfs", "abfss", "adl", "az", "gcs", "gs", "oci", "oss", "r2", "s3", "s3a"})
"""Stores where a file appears once its upload is complete, folders are not created, and a move is a copy."""
_REMOTE_EXTRA = frozenset({"abfs", "abfss", "adl", "az", "gcs", "gs", "s3", "s3a"})
_PARALLEL = OBJECT_STORES | {"hf", "http", "https"}
CLEANUP_SECONDS = 5.0
"""The time to remove what a failed write has left."""
UPLOAD_PART = 16 << 20
"""The bytes that a store is sent at once."""
_CACHED_METHODS = frozenset({"info", "ls"})
"""Methods that fsspec may answer from a cache, which is stale when others write."""
_inherited: list[Any] = []
"""Connections from before a fork: to drop them would close the connections of the parent."""


class FileInfo(NamedTuple):
    """What a store reports about a file: its size, if known, and whether it is a folder."""

    size: int | None
    is_folder: bool = False


def require_fsspec(url: str) -> Any:
    """Return the fsspec module; if it is missing, the error has the command that installs it."""
    scheme = scheme_of(url)
    extra = "http" if scheme in ("http", "https") else "remote" if scheme in _REMOTE_EXTRA else "parquet"
    module = require("fsspec", extra=extra, needed_for=display_uri(url))
    _reset_loop_after_forks()
    return module


def filesystem_class(scheme: str) -> type[Any] | None:
    """Return fsspec's class for a scheme; None if its package is not installed."""
    try:
        implementation: type[Any] = require_fsspec(scheme).get_filesystem_class(scheme)
    except (ImportError, ValueError):
        return None
    return implementation


@cache
def _reset_loop_after_forks() -> None:
    """Let a forked child start an event loop of its own, which older releases of fsspec do not do."""
    at_fork(after_in_child=require("fsspec.asyn", extra="parquet", needed_for="fsspec").reset_lock)


class FsspecClient:
    """Calls of the filesystem of a folder, which is opened on first use and again after a fork."""

    upload_options: RemoteOptions | None = None

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        require_fsspec(url)
        self._url, self._options = url, storage_options
        self._opened: tuple[int, Any, str] | None = None
        scheme = scheme_of(url)
        self.uploads_atomically = scheme in OBJECT_STORES
        # Some filesystems, as those of ftp and sftp, use one connection, and cannot be called from several threads.
        self.parallel_requests = 8 if scheme in _PARALLEL else 1

    def list_folder(self, folder: str, seconds: float) -> Sequence[tuple[str, FileInfo]]:
        """Return the content of a subfolder, by names from the root."""
        calls = self._within(seconds)
        start = f"{calls.root}/"
        infos = calls.call("ls", calls.path(folder).rstrip("/"), detail=True)
        return [(i["name"][len(start) :].rstrip("/"), _file_info(i)) for i in infos if i["name"].startswith(start)]

    def info(self, name: str, seconds: float) -> FileInfo:
        """Return the size of a file."""
        calls = self._within(seconds)
        return _file_info(calls.call("info", calls.path(name)))

    def read(self, name: str, seconds: float) -> bytes:
        """Return the content of a file."""
        calls = self._within(seconds)
        return bytes(calls.call("cat_file", calls.path(name)))

    def read_range(self, name: str, start: int, stop: int, seconds: float) -> tuple[memoryview, bool]:
        """Return the bytes from start to stop, or fewer at the end; or the whole file, and True."""
        calls = self._within(seconds)
        content = memoryview(calls.call("cat_file", calls.path(name), start=start, end=stop))
        return content, len(content) > stop - start  # some servers do not support ranges, and send all of it

    def upload(self, local: str, name: str, size: int, seconds: float) -> None:  # noqa: ARG002 - of every client
        """Upload a local file; another process may see a part of it unless `uploads_atomically`."""
        calls = self._within(seconds)
        target = calls.path(name)
        if not self.uploads_atomically:
            calls.call("makedirs", target.rpartition("/")[0], exist_ok=True)
        calls.call("put_file", local, target)

    def write(self, name: str, pieces: Iterable[Any], seconds: float) -> None:
        """Write a file while its pieces are produced; an error, also one of the pieces, leaves no file."""
        calls = self._within(seconds)
        if self.uploads_atomically:
            file = calls.call("open", calls.path(name), "wb", block_size=UPLOAD_PART)
            try:
                for piece in pieces:
                    file.write(piece)
                file.close()
            except BaseException:
                file.closed = True  # otherwise the garbage collector closes it, which completes the upload
                with suppress(Exception):
                    file.discard()
                raise
            return
        part = f".{name}.{uuid.uuid4().hex}.part"
        try:
            calls.call("makedirs", calls.root or "/", exist_ok=True)
            with calls.call("open", calls.path(part), "wb") as file:
                for piece in pieces:
                    file.write(piece)
            # With time of its own: that of `calls` began before the pieces, which may have taken hours.
            self.move(part, name, seconds)
        except BaseException:
            with suppress(Exception):
                self.remove(part, CLEANUP_SECONDS)
            raise

    def move(self, name: str, target: str, seconds: float) -> None:
        """Rename a file."""
        calls = self._within(seconds)
        calls.call("mv", calls.path(name), calls.path(target))

    def remove(self, name: str, seconds: float) -> None:
        """Remove a file."""
        calls = self._within(seconds)
        calls.call("rm_file", calls.path(name))

    def _within(self, seconds: float) -> _TimedFilesystem:
        """Return the filesystem for calls that together have that many seconds."""
        until = time.monotonic() + seconds
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            _inherited.append(opened)
            url_to_fs = require_fsspec(self._url).core.url_to_fs
            filesystem, root = run_with_timeout(partial(url_to_fs, self._url, **self._options), seconds)
            self._opened = opened = (os.getpid(), filesystem, root.rstrip("/"))
        return _TimedFilesystem(opened[1], opened[2], until)


class _TimedFilesystem:
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


def _file_info(info: Mapping[str, Any]) -> FileInfo:
    return FileInfo(info.get("size"), info["type"] == "directory")
