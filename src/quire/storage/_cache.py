"""A local folder of files that are made once and kept while there is room, for many processes and threads.

A file has the name of its key. Who makes it, in the folder `<key>.part`, holds a lock on `<key>.lock`; the system lets
go of it when the process ends, whichever way. The one lock on `room.lock` is held, for a moment, by who counts the
files and removes some.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

from quire.errors import OptionError, StorageError
from quire.storage._locks import lock_file

Make = Callable[[Path], None]
"""Writes the file for a key to the path that it is given."""

_KEY = re.compile(r"[0-9a-f]{8,128}")
_LEFT = re.compile(rf"({_KEY.pattern})\.(part|lock)")
_MOST = 100 * 10**9


def cache_key(*parts: str | int) -> str:
    """A digest of the parts, in order: of 40 hex digits."""
    digest = blake2b(digest_size=20)
    for part in parts:
        content = str(part).encode("utf-8", "surrogatepass")
        digest.update(f"{type(part).__name__}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def default_folder() -> Path:
    """Where files are kept: QUIRE_CACHE, or `quire` in XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("QUIRE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute() / "shards"
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"  # noqa: PTH117 - '' is none
    return base / "quire" / "shards"


class _Held(NamedTuple):
    """A file in the folder; the oldest are the least recently used."""

    used: int
    key: str
    size: int


@dataclass(frozen=True, init=False)
class ShardCache:
    """Files by key, each made by one process while the others wait, at most `max_bytes` together.

    When there is no room for one more, the least recently used are removed; who has one open or mapped keeps it. What
    is just being made comes on top. Without `max_bytes`, it is half of what the disk has for it, and at most 100 GB.
    """

    folder: Path
    max_bytes: int

    def __init__(self, folder: str | os.PathLike[str] | None = None, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise OptionError(f"max_bytes is a number of bytes above 0, got {max_bytes}.")
        place = default_folder() if folder is None else Path(folder).expanduser().absolute()
        object.__setattr__(self, "folder", place)
        self._make_folder()
        object.__setattr__(self, "max_bytes", self._default_limit() if max_bytes is None else max_bytes)

    def holds(self, total_bytes: int) -> bool:
        """Whether that many bytes can all be here at the same time."""
        return total_bytes <= self.max_bytes

    def total_bytes(self) -> int:
        """The bytes of the files that are here."""
        return sum(held.size for held in self._files())

    def get(self, key: str, make: Make) -> Path:
        """The file for the key, which is made if it is not there.

        When others need room, it may be removed before it is opened: `open` has no such gap.
        """
        path = self._path(key)
        if not _touch(path):
            with self._lock(key):
                self._ensure(key, make)
        return path

    def open(self, key: str, make: Make) -> BinaryIO:
        """The file for the key, open for reading, or for mapping into memory; no one can take it away."""
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
        """Remove the file for the key, as one that is damaged; who has it open keeps it."""
        self._path(key).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every file, except what is just being made."""
        self._make_folder()
        with self._room():
            for held in self._files():
                self._remove(held)
            self._sweep()

    # --- making

    def _ensure(self, key: str, make: Make) -> None:
        """Make the file unless it is there. The lock of the key is held."""
        path = self._path(key)
        if _touch(path):
            return
        self._drop(key)
        part = self._workshop(key) / key
        part.parent.mkdir()
        try:
            make(part)
            self._admit(part, path, self._finish(part))
        finally:
            self._drop(key)

    def _finish(self, part: Path) -> int:
        """Bring what was made to the disk, so that a loss of power leaves no file with holes; its size."""
        try:
            with part.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._check_size(size)
                os.fsync(file.fileno())
        except FileNotFoundError as error:
            raise StorageError(f"{part}: the function that makes this file returned, and there is no file.") from error
        _touch(part)
        return size

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise StorageError(
                f"{self.folder}: a file of {size:,} bytes does not fit into a cache of {self.max_bytes:,} bytes. "
                "Pass a larger max_bytes, or write smaller shards."
            )

    def _drop(self, key: str) -> None:
        """Remove what is left of making a file, by us or by who was killed."""
        shutil.rmtree(self._workshop(key), ignore_errors=True)

    # --- room

    def _admit(self, part: Path, path: Path, size: int) -> None:
        """Give the file its name when there is room for it."""
        while True:
            with self._room():
                busy = self._make_room(size)
                if busy is None:
                    part.replace(path)
                    return
            with lock_file(self._lock_path(busy)):
                continue  # who is about to open that file has it now

    def _make_room(self, size: int) -> str | None:
        """Remove the least recently used until so many bytes have a place; the key of one that could not be."""
        files = sorted(self._files())
        excess = sum(held.size for held in files) + size - self.max_bytes
        if excess <= 0:
            return None
        self._sweep()
        busy = None
        for held in files:
            if excess <= 0:
                return None
            if self._remove(held):
                excess -= held.size
            else:
                busy = held.key
        return busy if excess > 0 else None

    def _remove(self, held: _Held) -> bool:
        """Remove a file unless someone is about to open it."""
        with lock_file(self._lock_path(held.key), wait=False) as mine:
            if mine:
                self._path(held.key).unlink(missing_ok=True)
            return mine

    def _sweep(self) -> None:
        """Remove what killed makers left."""
        matches = (_LEFT.fullmatch(name) for name in os.listdir(self.folder))  # noqa: PTH208 - names are enough
        for key in {match[1] for match in matches if match}:
            with lock_file(self._lock_path(key), wait=False) as mine:
                if mine:
                    self._drop(key)

    def _files(self) -> list[_Held]:
        try:
            with os.scandir(self.folder) as entries:
                return [held for entry in entries if _KEY.fullmatch(entry.name) and (held := _held(entry))]
        except FileNotFoundError:
            return []

    # --- places and locks

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise OptionError(f"a key is 8 to 128 hex digits, got {key!r}. Make one with cache_key(...).")
        return self.folder / key

    def _lock_path(self, key: str) -> Path:
        return self.folder / f"{key}.lock"

    def _workshop(self, key: str) -> Path:
        """The folder where a file is made, with whatever else its maker needs."""
        return self.folder / f"{key}.part"

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        self._make_folder()  # someone may have removed it
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
                f"{self.folder}: the folder of the cache cannot be made ({error.strerror}). "
                "Set the environment variable QUIRE_CACHE to a folder that can be written to."
            ) from error

    def _default_limit(self) -> int:
        """Half of the free disk, where what the cache holds counts as free, so that it does not shrink as it fills."""
        free = shutil.disk_usage(self.folder).free + self.total_bytes()
        return max(1, min(free // 2, _MOST))


def _held(entry: os.DirEntry[str]) -> _Held | None:
    try:
        status = entry.stat()
    except FileNotFoundError:
        return None  # removed since
    return _Held(status.st_mtime_ns, entry.name, status.st_size)


def _touch(path: Path) -> bool:
    """Note that the file is used; whether it is there."""
    now = time.time_ns()  # the clock of the system's own time stamps ticks too slowly to tell two uses apart
    try:
        os.utime(path, ns=(now, now))
    except FileNotFoundError:
        return False
    except PermissionError:
        return path.exists()  # made by another user
    return True
