"""The folder of a dataset: its files by name, with the same methods for a local path and a remote address."""

from __future__ import annotations

import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from quire.errors import OptionError, StorageError, StorageExistsError, StorageNotFoundError
from quire.files._open import open_target, sync_folder
from quire.files._uris import display_uri

if sys.platform != "win32":
    import fcntl


class Entry(NamedTuple):
    """A file of a folder: its name, with slashes for subfolders, and its size in bytes."""

    name: str
    size: int


Entries = list[Entry]
RangeRequest = tuple[str, int, int]
"""The name of a file, and the bytes of it, from start to stop."""


class Folder(ABC):
    """The files of a dataset, by names like 'part-0.parquet' and 'year=2024/part-0.parquet'.

    A folder can be pickled, shared by threads, and used after a fork. Failures are StorageErrors; a missing file is a
    StorageNotFoundError.
    """

    url: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({display_uri(self.url)!r})"

    def join(self, name: str) -> str:
        """Return the address of a file."""
        start = self.url if self.url.endswith("://") else f"{self.url.rstrip('/')}/"
        return start + check_name(name, self.url)

    def local_path(self, name: str) -> Path | None:  # noqa: ARG002 - a remote folder has none
        """Return the path of a file that can be mapped into memory; None if it is not on this machine."""
        return None

    @abstractmethod
    def list(self, suffixes: Sequence[str] = (), *, hidden: bool = False) -> Entries:
        """Return the files here and in subfolders, sorted by name; none if the folder does not exist.

        `suffixes` keeps the files whose names end with one of them. Names that begin with a dot or an underscore, and
        everything below such folders, are left out unless `hidden`, as other readers do.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether there is a file of that name."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a small file."""

    @abstractmethod
    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from start to stop; raise StorageError if the file ends before stop."""

    def read_buffer(self, name: str, start: int, stop: int) -> memoryview:
        """Return the bytes from start to stop, without a copy of what the client of a store has received."""
        return memoryview(self.read_range(name, start, stop))

    def read_ranges(self, requests: Sequence[RangeRequest], *, concurrency: int = 32) -> Sequence[bytes]:  # noqa: ARG002
        """Return the bytes of many small ranges, in the order of the requests.

        A remote store is sent up to `concurrency` requests at the same time. The first error is raised.
        """
        return [self.read_range(*request) for request in requests]

    @abstractmethod
    def fetch(self, name: str, target: Path) -> None:
        """Copy a file to a local path, which is replaced when the copy is complete, or not at all."""

    @abstractmethod
    def open_for_write(self, name: str, *, durable: bool = True) -> AbstractContextManager[IO[bytes]]:
        """Open a file for writing, which appears, or replaces the old one, when it is complete, or not at all."""

    def create(self, name: str, content: bytes) -> None:
        """Write a small file in one step; raise StorageExistsError if it exists.

        Of several processes that create a file, one succeeds, at a local path and in stores that obstore writes to.
        With fsspec, the store is asked before.
        """
        if self.exists(name):
            raise file_exists(self.join(name))
        with self.open_for_write(name) as file:
            file.write(content)

    @abstractmethod
    def append_line(self, name: str, line: str) -> None:
        """Add a line to a small file.

        Many processes may do so at once, at a local path and in stores that obstore writes to. With fsspec, the file
        is rewritten, so only one process may do so at a time.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""


class LocalFolder(Folder):
    """A folder at a path of this machine, which is created when the first file is written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - a link stays a link; workers may have another place
        self.url = str(self.path)

    def local_path(self, name: str) -> Path:
        """Return the path of a file, whether it exists or not."""
        return self.path / check_name(name, self.url)

    def list(self, suffixes: Sequence[str] = (), *, hidden: bool = False) -> Entries:
        """Return the files here and in subfolders, sorted by name."""
        with self._translate_errors("."):
            return sorted(self._walk("", tuple(suffixes), hidden=hidden))

    def _walk(self, subfolder: str, suffixes: tuple[str, ...], *, hidden: bool) -> Iterator[Entry]:
        # scandir gets the kind of each entry with its name; a call for each file takes long on network file systems.
        try:
            items = os.scandir(self.path / subfolder)
        except FileNotFoundError:
            return
        with items:
            for item in items:
                if not (hidden or is_visible(item.name)):
                    continue
                if item.is_dir():
                    yield from self._walk(f"{subfolder}{item.name}/", suffixes, hidden=hidden)
                elif not suffixes or item.name.endswith(suffixes):
                    yield Entry(subfolder + item.name, item.stat().st_size)

    def exists(self, name: str) -> bool:
        """Return whether there is a file of that name."""
        return self.local_path(name).is_file()

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        path = self.local_path(name)
        with self._translate_errors(name):
            return path.stat().st_size

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        path = self.local_path(name)
        with self._translate_errors(name):
            return path.read_bytes()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from start to stop."""
        check_range(start, stop)
        path = self.local_path(name)
        with self._translate_errors(name), path.open("rb") as file:
            file.seek(start)
            content = file.read(stop - start)
        if len(content) < stop - start:
            raise file_too_short(self.join(name), self.size(name), start, stop)
        return content

    def fetch(self, name: str, target: Path) -> None:
        """Copy a file to another path."""
        path = self.local_path(name)
        with self._translate_errors(name):
            source = path.open("rb")
        # Not inside: errors of the target must not name the source. `open_target` has its own.
        with source, open_target(target) as file:
            shutil.copyfileobj(source, file, 1 << 20)

    @contextmanager
    def open_for_write(self, name: str, *, durable: bool = True) -> Iterator[IO[bytes]]:
        """Open a file for writing, under a temporary name until it is complete and, if `durable`, on the disk."""
        path = self._create_parent(name)
        with open_target(path, durable=durable) as file:
            yield file

    def create(self, name: str, content: bytes) -> None:
        """Write a file that must not exist, and is on the disk when this returns."""
        path = self._create_parent(name)
        part = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
        with self._translate_errors(name):
            try:
                with part.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    path.hardlink_to(part)  # unlike a rename, this fails if the file exists
                except FileExistsError as error:
                    raise file_exists(str(path)) from error
                except OSError:  # a file system without links: a reader may see the file before its content
                    with path.open("xb") as file:
                        file.write(content)
            finally:
                part.unlink(missing_ok=True)
        sync_folder(path.parent)

    def append_line(self, name: str, line: str) -> None:
        """Add a line, which is on the disk when this returns."""
        path, content = self._create_parent(name), encode_line(line)
        with self._translate_errors(name):
            # With O_APPEND, the system writes at the end as it is then: no process overwrites the line of another. The
            # lock is for the repair of a partial line, which reads first and writes then.
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            with os.fdopen(handle, "r+b", buffering=0) as file, _lock_file(handle):
                end = file.seek(0, os.SEEK_END)
                if end:
                    file.seek(end - 1)
                    if file.read(1) != b"\n":
                        content = b"\n" + content  # a process was killed while writing: its partial line stays alone
                if file.write(content) != len(content):
                    file.truncate(end)  # so that no reader takes the rest for a damaged line
                    raise OSError("the disk took only a part of the line")
                os.fsync(handle)
        if not end:
            sync_folder(path.parent)

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""
        path = self.local_path(name)
        with self._translate_errors(name):
            path.unlink(missing_ok=True)

    def _create_parent(self, name: str) -> Path:
        path = self.local_path(name)
        with self._translate_errors(name):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        """Raise system errors as StorageErrors that name the file."""
        try:
            yield
        except StorageError:
            raise
        except FileNotFoundError as error:
            raise StorageNotFoundError(f"{self.path / name}: there is no such file.") from error
        except OSError as error:
            raise StorageError(f"{self.path / name}: {error.strerror or error}.") from error


def check_name(name: str, url: str) -> str:
    """Return the name if it stays within the folder: it may come from a file that a stranger wrote."""
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise StorageError(f"{display_uri(url)}: {name!r} is not the name of a file in this folder.")
    return name


def check_range(start: int, stop: int) -> None:
    """Raise OptionError unless the range of bytes is in order."""
    if not 0 <= start <= stop:
        raise OptionError(f"a range of bytes is 0 <= start <= stop, got {start} and {stop}.")


def file_too_short(url: str, size: int, start: int, stop: int) -> StorageError:
    """Return the error for a file that ends before a range that is read."""
    return StorageError(
        f"{display_uri(url)}: the file has {size:,} bytes, and bytes {start:,} to {stop:,} were asked for. "
        "Is the file complete?"
    )


def file_exists(url: str) -> StorageExistsError:
    """Return the error for a file that is to be created, and exists."""
    return StorageExistsError(f"{display_uri(url)}: the file exists already. It was not replaced.")


def is_visible(part: str) -> bool:
    """Return whether readers see a file or folder of that name, by the rule of Spark and Arrow."""
    return not part.startswith((".", "_"))


def encode_line(line: str) -> bytes:
    """Return a line with its line break, as bytes."""
    if "\n" in line:
        raise OptionError(f"a line has no line break in it, got {line[:80]!r}.")
    return line.encode() + b"\n"


def add_line(before: bytes, line: bytes) -> bytes:
    """Return the content of a file with one more line; a partial line at the end stays alone."""
    return before + line if not before or before.endswith(b"\n") else before + b"\n" + line


@contextmanager
def _lock_file(handle: int) -> Iterator[None]:
    """Lock a file against other processes, where the system can; otherwise a reader may see half of a line."""
    if sys.platform == "win32":
        yield
        return
    with suppress(OSError):  # some network file systems have no locks
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
