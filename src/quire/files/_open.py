"""Files by path, written atomically, or file objects, which are left open."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeGuard, cast

from quire.errors import OptionError, StorageError, StorageNotFoundError

Source = str | os.PathLike[str] | IO[bytes]
"""Where bytes are read from: a path, or an object that can be read."""
Target = str | os.PathLike[str] | IO[bytes]
"""Where bytes are written to: a path, or an object that can be written to."""


@contextmanager
def open_source(source: Source) -> Iterator[IO[bytes]]:
    """Open a file for reading; a file object is used as it is, and left open."""
    if not isinstance(source, (str, os.PathLike)):
        yield _check_file_object(source, "read")
        return
    try:
        file = Path(source).open("rb")  # noqa: SIM115 - errors inside the caller's block are not errors of opening
    except OSError as error:
        raise _storage_error(Path(source), "opened", error) from error
    with file:
        yield file


@contextmanager
def open_target(target: Target, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file for writing. At a path, it replaces the old file when it is complete, or not at all.

    The content goes to a temporary file in the same folder, which is renamed at the end. Without `durable`, the system
    may write it to the disk later: a loss of power can then leave a part of it. Devices and pipes, such as
    `/dev/stdout`, are written to and not replaced.
    """
    if not isinstance(target, (str, os.PathLike)):
        yield _check_file_object(target, "write")
        return
    if _is_device(Path(target)):
        with _open_device(Path(target)) as file:
            yield file
        return
    path = Path(os.path.realpath(target))  # a link stays a link
    # In the same folder, because only a rename within a file system is atomic.
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise _storage_error(path, "written", error) from error
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            # The content before the rename, and the name after it: otherwise a loss of power could leave the new name
            # with an empty file.
            if durable:
                os.fsync(file.fileno())
        _set_mode(part, path)
        part.replace(path)
        if durable:
            sync_folder(path.parent)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if _is_disk_error(error) or (isinstance(error, OSError) and error.filename == name):
            raise _storage_error(path, "written", error) from error
        raise


def _is_device(path: Path) -> bool:
    """Return whether a path is a device, a pipe or a socket."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # opening it will say why
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


@contextmanager
def _open_device(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("wb") as file:
            yield file
    except OSError as error:
        if _is_disk_error(error) or error.filename == str(path):
            raise _storage_error(path, "written", error) from error
        raise


def _is_disk_error(error: BaseException) -> TypeGuard[OSError]:
    """Return whether the system could not write to the open file; most errors of the caller's own name a file."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return isinstance(error, OSError) and error.errno in full and error.filename is None


def _storage_error(path: Path, action: str, error: OSError) -> StorageError:
    """Return a system error as a StorageError that names the path."""
    if isinstance(error, FileNotFoundError):
        missing = "there is no such file" if action == "opened" else f"there is no folder {str(path.parent)!r}"
        return StorageNotFoundError(f"{path}: {missing}.")
    storage_error = StorageError(f"{path}: the file cannot be {action}: {error.strerror or error}.")
    storage_error.errno = error.errno
    return storage_error


def _set_mode(part: Path, path: Path) -> None:
    """Give the temporary file the permissions of the file it replaces, or those that a new file gets."""
    with suppress(OSError):
        if path.exists():
            part.chmod(path.stat().st_mode & 0o7777)
        else:
            mask = os.umask(0)  # the mask can only be read by setting it
            os.umask(mask)
            part.chmod(0o666 & ~mask)


def sync_folder(folder: Path) -> None:
    """Let a new name in a folder survive a loss of power, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _check_file_object(file: object, method: str) -> IO[bytes]:
    if not hasattr(file, method):
        raise OptionError(f"expected a path or a file object with .{method}(), got {type(file).__name__}.")
    return cast("IO[bytes]", file)
