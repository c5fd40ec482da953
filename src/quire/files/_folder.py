"""The folder of a dataset: its files by name, the same calls for a local path and for a remote address."""

from __future__ import annotations

import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from quire.errors import OptionError, StorageError, StorageNotFoundError
from quire.files._open import _sync_folder, open_target
from quire.files._uris import shown

if sys.platform != "win32":
    import fcntl


class Entry(NamedTuple):
    """A file of a folder: its name, with slashes below folders, and its size in bytes."""

    name: str
    size: int


Entries = list[Entry]


class Folder(ABC):
    """The files of a dataset, by names like 'part-0.parquet' and 'year=2024/part-0.parquet'.

    It can be pickled, and used by many threads and after a fork. What goes wrong is a StorageError; a file that is not
    there is a StorageNotFoundError.
    """

    url: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self.url)!r})"

    def join(self, name: str) -> str:
        """The address of a file."""
        start = self.url if self.url.endswith("://") else f"{self.url.rstrip('/')}/"
        return start + checked_name(name, self.url)

    def local_path(self, name: str) -> Path | None:  # noqa: ARG002 - a remote folder has none
        """The path of a file that can be mapped into memory; None if it is not on this machine."""
        return None

    @abstractmethod
    def list(self, suffixes: Sequence[str] = (), *, hidden: bool = False) -> Entries:
        """The files here and in folders below, sorted by name; none if there is no such folder.

        `suffixes` keeps those whose names end so. Names that begin with a dot or an underscore, and all below such
        folders, are left out like other readers do, unless `hidden`.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""

    @abstractmethod
    def size(self, name: str) -> int:
        """The bytes of a file."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All of a small file."""

    @abstractmethod
    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Exactly the bytes from start to stop; an error if the file ends before."""

    @abstractmethod
    def fetch(self, name: str, target: Path) -> None:
        """Copy a file to a local path, which has all of it or is as it was."""

    @abstractmethod
    def open_for_write(self, name: str, *, durable: bool = True) -> AbstractContextManager[IO[bytes]]:
        """A file to write; it is there, or takes the place of the old one, when all of it is written, or not at all."""

    @abstractmethod
    def append_line(self, name: str, line: str) -> None:
        """Add a line to a small file.

        At a local path many processes may do so at once. At a remote address the file is written anew: let one process
        do so at a time.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file; fine if it is not there."""


class LocalFolder(Folder):
    """A folder at a path of this machine; it is made when the first file is written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - a link stays a link; workers may have another place
        self.url = str(self.path)

    def local_path(self, name: str) -> Path:
        """The path of a file, whether it is there or not."""
        return self.path / checked_name(name, self.url)

    def list(self, suffixes: Sequence[str] = (), *, hidden: bool = False) -> Entries:
        """The files here and in folders below, sorted by name."""
        with self._told("."):
            return sorted(self._entries("", tuple(suffixes), hidden=hidden))

    def _entries(self, below: str, suffixes: tuple[str, ...], *, hidden: bool) -> Iterator[Entry]:
        try:
            found = os.scandir(self.path / below)
        except FileNotFoundError:
            return
        with found:
            for item in found:
                if not (hidden or is_shown(item.name)):
                    continue
                if item.is_dir():
                    yield from self._entries(f"{below}{item.name}/", suffixes, hidden=hidden)
                elif not suffixes or item.name.endswith(suffixes):
                    yield Entry(below + item.name, item.stat().st_size)

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return self.local_path(name).is_file()

    def size(self, name: str) -> int:
        """The bytes of a file."""
        path = self.local_path(name)
        with self._told(name):
            return path.stat().st_size

    def read(self, name: str) -> bytes:
        """All of a small file."""
        path = self.local_path(name)
        with self._told(name):
            return path.read_bytes()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Exactly the bytes from start to stop."""
        check_range(start, stop)
        path = self.local_path(name)
        with self._told(name), path.open("rb") as file:
            file.seek(start)
            content = file.read(stop - start)
        if len(content) < stop - start:
            raise ends_early(self.join(name), self.size(name), start, stop)
        return content

    def fetch(self, name: str, target: Path) -> None:
        """Copy a file to another path."""
        path = self.local_path(name)
        with self._told(name):
            source = path.open("rb")
        with source, open_target(target) as file:
            shutil.copyfileobj(source, file, 1 << 20)

    @contextmanager
    def open_for_write(self, name: str, *, durable: bool = True) -> Iterator[IO[bytes]]:
        """A file to write, under another name until all of it is written, and, if it is to be durable, on the disk."""
        path = self._parent_made(name)
        with open_target(path, durable=durable) as file:
            yield file

    def append_line(self, name: str, line: str) -> None:
        """Add a line, on the disk when this returns."""
        path, content = self._parent_made(name), line_bytes(line)
        with self._told(name):
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            with os.fdopen(handle, "r+b", buffering=0) as file, _alone(handle):
                end = file.seek(0, os.SEEK_END)
                if end and _byte_at(file, end - 1) != b"\n":
                    content = b"\n" + content  # someone was killed while writing: their half line stays alone
                if file.write(content) != len(content):
                    file.truncate(end)  # so that no reader takes the rest for a damaged line
                    raise OSError("the disk took only a part of the line")
                os.fsync(handle)
        if not end:
            _sync_folder(path.parent)

    def delete(self, name: str) -> None:
        """Remove a file; fine if it is not there."""
        path = self.local_path(name)
        with self._told(name):
            path.unlink(missing_ok=True)

    def _parent_made(self, name: str) -> Path:
        path = self.local_path(name)
        with self._told(name):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Errors of the system, with the file that they are about."""
        try:
            yield
        except FileNotFoundError as error:
            raise StorageNotFoundError(f"{self.path / name}: there is no such file.") from error
        except OSError as error:
            raise StorageError(f"{self.path / name}: {error.strerror or error}.") from error


def checked_name(name: str, url: str) -> str:
    """The name, if it stays within the folder: it may come from a file that a stranger wrote."""
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise StorageError(f"{shown(url)}: {name!r} is not the name of a file in this folder.")
    return name


def check_range(start: int, stop: int) -> None:
    """A range of bytes has its ends in order."""
    if not 0 <= start <= stop:
        raise OptionError(f"a range of bytes is 0 <= start <= stop, got {start} and {stop}.")


def ends_early(url: str, size: int, start: int, stop: int) -> StorageError:
    """The error of a file that is shorter than it should be."""
    return StorageError(
        f"{shown(url)}: the file has {size:,} bytes, and bytes {start:,} to {stop:,} were asked for. Is it whole?"
    )


def is_shown(part: str) -> bool:
    """Whether readers see a file or folder of that name, as Spark and Arrow do."""
    return not part.startswith((".", "_"))


def line_bytes(line: str) -> bytes:
    """One line, with its end."""
    if "\n" in line:
        raise OptionError(f"a line has no line break in it, got {line[:80]!r}.")
    return line.encode() + b"\n"


@contextmanager
def _alone(handle: int) -> Iterator[None]:
    """Let no other process write in between, where the system has such locks: half of a line may be seen."""
    if sys.platform == "win32":
        yield
        return
    with suppress(OSError):  # some network disks have none
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)


def _byte_at(file: IO[bytes], position: int) -> bytes:
    file.seek(position)
    return file.read(1)
