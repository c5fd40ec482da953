"""A local folder of files that are created once and kept while there is room, for many processes and threads.

A file has the name of its key. The process that creates it, in the folder `<key>.part`, holds a lock on `<key>.lock`,
which the system releases when the process ends, whichever way. The lock on `room.lock` is held for a moment by a
process that counts the files and removes some.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

from quire.errors import OptionError, StorageError
from quire.storage._locks import lock_file

Make = Callable[[Path], None]
"""A function that writes the file for a key to a path."""

_KEY = re.compile(r"[0-9a-f]{8,128}")
_LEFTOVER = re.compile(rf"({_KEY.pattern})\.(part|lock)")
_DEFAULT_MAX_BYTES = 100 * 10**9


def cache_key(*parts: str | int) -> str:
    """Return a digest of the parts, in order, of 40 hex digits."""
    digest = blake2b(digest_size=20)
    for part in parts:
        content = str(part).encode("utf-8", "surrogatepass")
        digest.update(f"{type(part).__name__}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def default_folder() -> Path:
    """Return the folder of the cache: QUIRE_CACHE, or `quire` in XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("QUIRE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute() / "shards"
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"  # noqa: PTH117 - '' is none
    return base / "quire" / "shards"


class _Entry(NamedTuple):
    """A file in the folder; entries sort by their last use."""

    used: int
    key: str
    size: int


@dataclass(frozen=True, init=False)
class ShardCache:
    """Files by key, each created by one process while the others wait, of at most `max_bytes` in total.

    When there is no room for another one, the least recently used are removed; processes that have them open or mapped
    keep them. Files that are being created come on top. The default of `max_bytes` is half of the free disk space, and
    at most 100 GB.
    """

    folder: Path
    max_bytes: int

    def __init__(self, folder: str | os.PathLike[str] | None = None, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise OptionError(f"max_bytes is a number of bytes above 0, got {max_bytes}.")
        # The dataclass is frozen, so that caches can be compared and hashed: attributes are set past it.
        place = default_folder() if folder is None else Path(folder).expanduser().absolute()
        object.__setattr__(self, "folder", place)
        self._make_folder()
        object.__setattr__(self, "max_bytes", self._default_limit() if max_bytes is None else max_bytes)

    def holds(self, total_bytes: int) -> bool:
        """Whether files of this total size fit into the cache at the same time."""
        return total_bytes <= self.max_bytes

    def total_bytes(self) -> int:
        """Return the total size of the files in the cache."""
        return sum(entry.size for entry in self._files())

    def get(self, key: str, make: Make) -> Path:
        """Return the path of the file for a key, which is created if it is missing.

        Another process that needs room may remove it before it is opened: `open` has no such gap.
        """
        path = self._path(key)
        if not _touch(path):
            with self._lock(key):
                self._ensure(key, make)
        return path

    def open(self, key: str, make: Make) -> BinaryIO:
        """Open the file for a key, which is created if it is missing. It stays readable even if it is removed."""
        path = self._path(key)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            with self._lock(key):
                self._ensure(key, make)
                return path.open("rb")
        _touch(path)
        return file

    def remove(self, key: str) -> None:
        """Remove the file for a key, such as a damaged one; processes that have it open keep it."""
        self._path(key).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every file, except those that are being created."""
        self._make_folder()
        with self._room():
            for entry in self._files():
                self._remove(entry)
            self._sweep()

    # --- creating files

    def _ensure(self, key: str, make: Make) -> None:
        """Create the file unless it exists. The caller holds the lock of the key."""
        path = self._path(key)
        if _touch(path):  # another process created it while this one waited for the lock
            return
        self._drop(key)
        part = self._part_folder(key) / key
        part.parent.mkdir()
        try:
            make(part)
            self._admit(part, path, self._finish(part))
        finally:
            self._drop(key)

    def _finish(self, part: Path) -> int:
        """Flush a new file to the disk, so that a loss of power leaves no file with holes; return its size."""
        try:
            with part.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._check_size(size)
                os.fsync(file.fileno())
        except FileNotFoundError as error:
            raise StorageError(f"{part}: the function that creates this file returned without creating it.") from error
        _touch(part)
        return size

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise StorageError(
                f"{self.folder}: a file of {size:,} bytes does not fit into a cache of {self.max_bytes:,} bytes. "
                "Pass a larger max_bytes, or write smaller shards."
            )

    def _drop(self, key: str) -> None:
        """Remove the unfinished file of this process, or of one that was killed."""
        shutil.rmtree(self._part_folder(key), ignore_errors=True)

    # --- room

    def _admit(self, part: Path, path: Path, size: int) -> None:
        """Rename the new file to its key when there is room for it."""
        # The size was measured, and room is made, before the file has its name: so the limit holds at any moment, and
        # the lock on `room.lock` keeps two processes from counting on the same free space.
        while True:
            with self._room():
                busy = self._make_room(size)
                if busy is None:
                    part.replace(path)
                    return
            # Wait without `room.lock`: the process that holds the lock of the busy file may need it to finish.
            with lock_file(self._lock_path(busy)):
                continue  # the process that was about to open that file has opened it

    def _make_room(self, size: int) -> str | None:
        """Remove the least recently used files until `size` bytes fit; return the key of a busy one if they do not."""
        files = sorted(self._files())
        excess = sum(entry.size for entry in files) + size - self.max_bytes
        if excess <= 0:
            return None
        self._sweep()  # unfinished files of killed processes do not count, but take up the disk
        busy = None
        for entry in files:
            if excess <= 0:
                return None
            if self._remove(entry):
                excess -= entry.size
            else:
                busy = entry.key
        return busy if excess > 0 else None

    def _remove(self, entry: _Entry) -> bool:
        """Remove a file unless a process is about to open it."""
        with lock_file(self._lock_path(entry.key), wait=False) as mine:
            if mine:
                self._path(entry.key).unlink(missing_ok=True)
            return mine

    def _sweep(self) -> None:
        """Remove the unfinished files of processes that were killed."""
        matches = (_LEFTOVER.fullmatch(name) for name in os.listdir(self.folder))  # noqa: PTH208 - names are enough
        for key in {match[1] for match in matches if match}:
            with lock_file(self._lock_path(key), wait=False) as mine:
                if mine:
                    self._drop(key)

    def _files(self) -> list[_Entry]:
        files: list[_Entry] = []
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for file in entries:
                if _KEY.fullmatch(file.name):
                    with suppress(FileNotFoundError):  # another process has removed it in the meantime
                        status = file.stat()
                        files.append(_Entry(status.st_mtime_ns, file.name, status.st_size))
        return files

    # --- places and locks

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise OptionError(f"a key is 8 to 128 hex digits, got {key!r}. Create one with cache_key(...).")
        return self.folder / key

    def _lock_path(self, key: str) -> Path:
        return self.folder / f"{key}.lock"

    def _part_folder(self, key: str) -> Path:
        """Return the folder where a file is created, which may hold other files of the function that creates it."""
        return self.folder / f"{key}.part"

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        self._make_folder()  # it may have been removed
        with lock_file(self._lock_path(key)):
            yield

    @contextmanager
    def _room(self) -> Iterator[None]:
        with lock_file(self.folder / "room.lock"):
            yield

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{self.folder}: the folder of the cache cannot be created ({error.strerror}). "
                "Set the environment variable QUIRE_CACHE to a folder that can be written to."
            ) from error

    def _default_limit(self) -> int:
        """Return half of the free disk space. Files of the cache count as free, so it does not shrink as it fills."""
        free = shutil.disk_usage(self.folder).free + self.total_bytes()
        return max(1, min(free // 2, _DEFAULT_MAX_BYTES))


def _touch(path: Path) -> bool:
    """Record that a file is used, and return whether it exists."""
    now = time.time_ns()  # the system's own time stamps are too coarse to tell two uses apart
    try:
        os.utime(path, ns=(now, now))
    except FileNotFoundError:
        return False
    except PermissionError:
        return path.exists()  # a file of another user
    return True
