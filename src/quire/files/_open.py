"""Files by path, or file objects, which are left open."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeGuard, cast

from quire.errors import OptionError, StorageError, StorageNotFoundError

Source = str | os.PathLike[str] | IO[bytes]
"""Where bytes are read from: a path, or an object that can be read."""
Target = str | os.PathLike[str] | IO[bytes]
"""Where bytes are written to: a path, or an object that can be written to."""


@contextmanager
def open_source(source: Source) -> Iterator[IO[bytes]]:
    """A file to read; one that was given as an object is left open."""
    if not isinstance(source, (str, os.PathLike)):
        yield _binary(source, "read")
        return
    try:
        file = Path(source).open("rb")  # noqa: SIM115 - an error of the caller is not one of opening
    except OSError as error:
        raise _explained(Path(source), "opened", error) from error
    with file:
        yield file


@contextmanager
def open_target(target: Target, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file to write. At a path, it takes the place of the old one when all of it is written, or not at all.

    Unless it is to be durable, the system may write it to the disk later: a loss of power can then leave less of it.
    """
    if not isinstance(target, (str, os.PathLike)):
        yield _binary(target, "write")
        return
    path = Path(os.path.realpath(target))  # a link stays a link
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise _explained(path, "written", error) from error
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        _take_mode(path, part)
        part.replace(path)
        if durable:
            _sync_folder(path.parent)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if _is_of_disk(error) or (isinstance(error, OSError) and error.filename == name):
            raise _explained(path, "written", error) from error
        raise


def _is_of_disk(error: BaseException) -> TypeGuard[OSError]:
    """Whether the system could not write to the open file; most errors of the caller's own name a file."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return isinstance(error, OSError) and error.errno in full and error.filename is None


def _explained(path: Path, action: str, error: OSError) -> StorageError:
    """An error of the system with the path that it is about."""
    if isinstance(error, FileNotFoundError):
        missing = "there is no such file" if action == "opened" else f"there is no folder {str(path.parent)!r}"
        return StorageNotFoundError(f"{path}: {missing}.")
    made = StorageError(f"{path}: the file cannot be {action}: {error.strerror or error}.")
    made.errno = error.errno
    return made


def _take_mode(path: Path, part: Path) -> None:
    """The permissions of the old file, or those that a new file gets here."""
    with suppress(OSError):
        if path.exists():
            part.chmod(path.stat().st_mode & 0o7777)
        else:
            mask = os.umask(0)
            os.umask(mask)
            part.chmod(0o666 & ~mask)


def _sync_folder(folder: Path) -> None:
    """Let the new name survive a loss of power, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _binary(file: Any, verb: str) -> IO[bytes]:
    if not hasattr(file, verb):
        raise OptionError(f"expected a path or a file object with .{verb}(), got {type(file).__name__}.")
    return cast("IO[bytes]", file)
