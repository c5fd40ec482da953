"""Locks on files, between processes and threads.

A lock is an `flock` on a file, which the system releases when its process ends, whichever way. Two facts need care:

- The holder removes the file of a lock when it releases it. A process that waited for the lock then holds one on a file
  without a name, while others create and lock a new file. So a waiter checks that its file still has its name, and
  starts again if not.
- An flock belongs to the open file, which a forked child inherits: closing it in the parent does not release the lock
  while the child has it open. Children therefore close every inherited lock file, and release is explicit.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire._lowlevel.forks import at_fork, hold_during_forks
from quire.errors import StorageError

if sys.platform != "win32":
    import fcntl

_held: set[int] = set()
"""The descriptors of all lock files that are open, for children to close."""
_opening = threading.Lock()
"""Held while a lock file is opened or closed, and during a fork, so that `_held` is complete in the child."""


@contextmanager
def lock_file(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock on a file, and yield whether it is held; without `wait`, another process may have it."""
    handle = _acquire(path, wait=wait)
    try:
        yield handle is not None
    finally:
        if handle in _held:  # not in a child that was forked in between
            path.unlink(missing_ok=True)
            _release(handle)


def _acquire(path: Path, *, wait: bool) -> int | None:
    if sys.platform == "win32":
        raise StorageError(f"{path}: files are locked by flock, which this system does not have.")
    while True:
        with _opening:  # a fork between these two lines would leave the child a lock file that it does not know
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            _held.add(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(handle)):
                    return handle
        except BlockingIOError:
            _release(handle)
            return None
        except BaseException:
            _release(handle)
            raise
        _release(handle)  # the holder removed the file while this process waited: others lock a new one


def _release(handle: int) -> None:
    if sys.platform != "win32":
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough while a forked child has the file open too
    with _opening:
        _held.discard(handle)
        os.close(handle)


# --- forks


def _close_inherited_files() -> None:
    """Close the lock files of the parent: otherwise its locks would last as long as this child."""
    for handle in _held:
        with suppress(OSError):
            os.close(handle)
    _held.clear()


hold_during_forks(_opening)
at_fork(after_in_child=_close_inherited_files)
