"""Folders at remote addresses that fsspec supports: s3, gs, hdfs, http, memory and registered ones."""

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

from quire._optional import require
from quire.errors import StorageError, StorageNotFoundError
from quire.files._folder import Entries, Entry, Folder, LocalFolder, check_range, ends_early, is_shown, line_bytes
from quire.files._open import open_target
from quire.files._retry import Errand, RemoteOptions, bounded, too_slow
from quire.files._uris import local_path, scheme_of, shown

_LOOKS = frozenset({"info", "ls"})
"""What fsspec may answer from memory, where others write too."""
_inherited: list[Any] = []
"""What was opened before a fork: to drop it is to close the connections of the parent."""


def require_fsspec(url: str) -> Any:
    """The module, or the command that installs it."""
    module = require("fsspec", extra="parquet", needed_for=shown(url))
    _start_anew_after_forks()
    return module


@cache
def _start_anew_after_forks() -> None:
    """Let a forked child start a loop of its own; older releases of fsspec do not see to it."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=require("fsspec.asyn", extra="parquet", needed_for="fsspec").reset_lock)


class Connection:
    """The filesystem of an address, opened on first use and again after a fork."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self._url, self._options = url, storage_options
        self._opened: tuple[int, Any, str] | None = None

    def within(self, seconds: float) -> Attempt:
        """Calls that have so many seconds together."""
        until = time.monotonic() + seconds
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            _inherited.append(opened)
            url_to_fs = require_fsspec(self._url).core.url_to_fs
            filesystem, root = bounded(partial(url_to_fs, self._url, **self._options), seconds)
            self._opened = opened = (os.getpid(), filesystem, root.rstrip("/"))
        return Attempt(opened[1], opened[2], until)


class Attempt:
    """Calls to a filesystem that share one time."""

    def __init__(self, filesystem: Any, root: str, until: float) -> None:
        self._filesystem, self.root, self._until = filesystem, root, until

    def path(self, name: str) -> str:
        """A file of the folder, as the filesystem names it."""
        return f"{self.root}/{name}"

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the filesystem."""
        filesystem = self._filesystem
        seconds = max(self._until - time.monotonic(), 0.001)
        if method in _LOOKS:
            filesystem.invalidate_cache()
        coroutine = getattr(filesystem, f"_{method}", None) if filesystem.async_impl else None
        if not inspect.iscoroutinefunction(coroutine):
            return bounded(partial(getattr(filesystem, method), *args, **kwargs), seconds)
        asyn = require_fsspec(self.root).asyn
        try:
            return asyn.sync(filesystem.loop, coroutine, *args, timeout=seconds, **kwargs)
        except asyn.FSTimeoutError:
            raise too_slow(seconds) from None


T = TypeVar("T")

_PART = 16 << 20
"""The bytes that one request reads at most."""
_OBJECT_STORES = frozenset({"abfs", "abfss", "adl", "az", "gcs", "gs", "oci", "oss", "r2", "s3", "s3a"})
"""Where a file appears when all of it was sent, folders are made by no one, and a move is a copy."""
_READ_ONLY = frozenset({"http", "https"})
_LAST_WORDS = 5.0
"""The seconds to remove what a failed write has left."""


def open_folder(url: str | os.PathLike[str], options: RemoteOptions | None = None) -> Folder:
    """The folder at a path, a file:// address, or any other address that fsspec knows."""
    text = os.fspath(url)
    if "://" not in text and "::" not in text:
        return LocalFolder(os.path.expanduser(text))  # noqa: PTH111 - a path as it was given
    if scheme_of(text) == "file":
        return LocalFolder(local_path(text))
    return RemoteFolder(text, options or RemoteOptions())


class RemoteFolder(Folder):
    """A folder behind an address. It is connected on first use, in each process anew."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        require_fsspec(url)
        self.url = url if url.endswith("://") else url.rstrip("/")
        self.options = options
        self._connection = Connection(self.url, options.storage_options)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFolder, (self.url, self.options)

    def list(self, suffixes: Sequence[str] = (), *, hidden: bool = False) -> Entries:
        """The files here and in folders below, sorted by name."""
        ends = tuple(suffixes)
        kept = ((name, size) for name, size in self._walk(hidden=hidden) if not ends or name.endswith(ends))
        return sorted(Entry(name, self.size(name) if size is None else size) for name, size in kept)

    def _walk(self, *, hidden: bool) -> Iterator[tuple[str, int | None]]:
        """Every file with its size where it is told. fsspec's own walk takes a folder that it cannot read as empty."""
        folders, seen = [""], {""}
        while folders:
            for name, info in self._listed(folders.pop()):
                if name in seen or not (hidden or all(map(is_shown, name.split("/")))):
                    continue
                seen.add(name)
                if info["type"] == "directory":
                    folders.append(name)
                else:
                    yield name, info.get("size")

    def _listed(self, folder: str) -> Sequence[tuple[str, dict[str, Any]]]:
        """What is in a folder, by names from the root."""

        def ask(attempt: Attempt) -> Sequence[tuple[str, dict[str, Any]]]:
            start = f"{attempt.root}/"
            found = attempt.ask("ls", attempt.path(folder).rstrip("/"), detail=True)
            inside = [info for info in found if info["name"].startswith(start)]
            return [(info["name"][len(start) :].rstrip("/"), info) for info in inside]

        url = self.join(folder) if folder else self.url
        try:
            return self._run(Errand("listing the files", url), ask)
        except StorageNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""
        try:
            return bool(self._info(name, "looking for the file")["type"] != "directory")
        except StorageNotFoundError:
            return False

    def size(self, name: str) -> int:
        """The bytes of a file."""
        size = self._told_size(name)
        return len(self.read(name)) if size is None else size

    def _told_size(self, name: str) -> int | None:
        """The bytes of a file; None where the server does not tell."""
        info = self._info(name, "asking for the size")
        if info["type"] == "directory":
            raise StorageError(f"{shown(self.join(name))}: this is a folder, not a file.")
        size: int | None = info.get("size")
        return size

    def _info(self, name: str, what: str) -> dict[str, Any]:
        return self._run(Errand(what, self.join(name)), lambda attempt: attempt.ask("info", attempt.path(name)))

    def read(self, name: str) -> bytes:
        """All of a small file."""
        errand = Errand("reading the file", self.join(name))
        return bytes(self._run(errand, lambda attempt: attempt.ask("cat_file", attempt.path(name))))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Exactly the bytes from start to stop."""
        check_range(start, stop)
        return b"".join(self._parts(name, start, stop))

    def fetch(self, name: str, target: Path) -> None:
        """Download a file to a local path, part by part."""
        with open_target(target) as file:
            for part in self.parts(name):
                file.write(part)

    def parts(self, name: str) -> Iterator[bytes]:
        """All of a file, some at a time."""
        size = self._told_size(name)
        if size is None:
            yield self.read(name)
        else:
            yield from self._parts(name, 0, size)

    def _parts(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from start to stop, some at a time. A server that knows no ranges sends all, which is then cut."""
        while start < stop:
            end = min(start + _PART, stop)
            content = self._part(name, start, end)
            if len(content) > end - start:
                yield self._cut(name, content, start, stop)
                return
            yield content
            start = end

    def _cut(self, name: str, content: bytes, start: int, stop: int) -> bytes:
        if len(content) < stop:
            raise ends_early(self.join(name), len(content), start, stop)
        return content[start:stop]

    def _part(self, name: str, start: int, end: int) -> bytes:
        def ask(attempt: Attempt) -> bytes:
            content = bytes(attempt.ask("cat_file", attempt.path(name), start=start, end=end))
            if len(content) < end - start:
                raise OSError(f"{len(content):,} bytes came instead of {end - start:,}. Is the file whole?")
            return content

        return self._run(Errand(f"reading bytes {start:,} to {end:,}", self.join(name)), ask)

    @contextmanager
    def open_for_write(self, name: str, *, durable: bool = True) -> Iterator[IO[bytes]]:  # noqa: ARG002 - it always is
        """A local file to write, which is sent when all of it is written."""
        url = self.join(name)
        if scheme_of(self.url) in _READ_ONLY:
            raise StorageError(f"{shown(url)}: nothing is written to an http address. Write to a path or a store.")
        with tempfile.NamedTemporaryFile(prefix="quire-", suffix=".part") as file:
            yield file
            file.flush()
            self._put(file.name, name, Errand("writing the file", url, os.fstat(file.fileno()).st_size))

    def _put(self, local: str, name: str, errand: Errand) -> None:
        if scheme_of(self.url) in _OBJECT_STORES:
            self._run(errand, lambda attempt: attempt.ask("put_file", local, attempt.path(name)))
            return
        folder, slash, last = name.rpartition("/")
        part = f"{folder}{slash}.{last}.{uuid.uuid4().hex}.part"
        try:
            self._run(errand, lambda attempt: _send(attempt, local, part))
            self._move(part, name, errand)
        except BaseException:
            self._forget(part)
            raise

    def _move(self, part: str, name: str, errand: Errand) -> None:
        try:
            self._run(errand, lambda attempt: attempt.ask("mv", attempt.path(part), attempt.path(name)))
        except StorageNotFoundError:
            if self._told_size(name) != errand.size:  # else an earlier attempt moved it, and the answer was lost
                raise

    def _forget(self, part: str) -> None:
        once = replace(self.options, retries=0, deadline=min(self.options.deadline, _LAST_WORDS))
        errand = Errand("removing the half-written file", self.join(part))
        with suppress(StorageError):
            errand.run(lambda seconds: _remove(self._connection.within(seconds), part), once)

    def append_line(self, name: str, line: str) -> None:
        """Write the file anew with one more line."""
        content = line_bytes(line)
        try:
            before = self.read(name)
        except StorageNotFoundError:
            before = b""
        with self.open_for_write(name) as file:
            file.write(before if not before or before.endswith(b"\n") else before + b"\n")
            file.write(content)

    def delete(self, name: str) -> None:
        """Remove a file; fine if it is not there."""
        with suppress(StorageNotFoundError):
            self._run(Errand("removing the file", self.join(name)), lambda attempt: _remove(attempt, name))

    def _run(self, errand: Errand, ask: Callable[[Attempt], T]) -> T:
        return errand.run(lambda seconds: ask(self._connection.within(seconds)), self.options)


def _send(attempt: Attempt, local: str, name: str) -> None:
    target = attempt.path(name)
    attempt.ask("makedirs", target.rpartition("/")[0], exist_ok=True)
    attempt.ask("put_file", local, target)


def _remove(attempt: Attempt, name: str) -> None:
    attempt.ask("rm_file", attempt.path(name))
