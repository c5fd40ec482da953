"""Locks on files, between processes and threads: the system lets go of them when their process ends.

And forks, which wait for shards that are being opened. A thread that opens one may hold locks of Arrow and of Python
itself: a child that is forked meanwhile would inherit them, held by a thread that it does not have, and wait for good.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.errors import StorageError

if sys.platform != "win32":
    import fcntl

_held: set[int] = set()
_opening = threading.Lock()
"""Held while a file is opened and noted, and by who forks, so that a child knows every one that it inherits."""


@contextmanager
def lock_file(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock; whether it is held, which without `wait` may not be. Its file is removed by who held it."""
    handle = _acquire(path, wait=wait)
    try:
        yield handle is not None
    finally:
        if handle in _held:  # not so in a child that was forked in between
            path.unlink(missing_ok=True)
            _release(handle)


def _acquire(path: Path, *, wait: bool) -> int | None:
    if sys.platform == "win32":
        raise StorageError(f"{path}: files are locked by flock, which this system has not.")
    while True:
        handle = _open(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, handle):
                return handle
        except BlockingIOError:
            _release(handle)
            return None
        except BaseException:
            _release(handle)
            raise
        _release(handle)  # who held it removed the file while we waited: others lock a new one


def _open(path: Path) -> int:
    with _opening:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _held.add(handle)
    return handle


def _is_at(path: Path, handle: int) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(handle))


def _release(handle: int) -> None:
    if sys.platform != "win32":
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough while a forked child has the file open too
    with _opening:
        _held.discard(handle)
        os.close(handle)


# --- forks

_PATIENCE = 30.0
"""Seconds: from far away, a shard may take long. Then a fork takes its chance."""
_change = threading.Condition(threading.Lock())
_busy = 0


@contextmanager
def no_fork() -> Iterator[None]:
    """Let no thread of this process fork."""
    global _busy  # noqa: PLW0603 - of the process, as forks are
    with _change:
        _busy += 1
    try:
        yield
    finally:
        with _change:
            _busy = max(_busy - 1, 0)
            _change.notify_all()


def _before_fork() -> None:
    _change.acquire()
    _change.wait_for(lambda: not _busy, _PATIENCE)
    _opening.acquire()  # last: who opens a shard opens files


def _in_parent() -> None:
    _opening.release()
    _change.release()


def _in_child() -> None:
    """Close what the parent holds: else its locks would last as long as this child."""
    global _change, _busy
    _change, _busy = threading.Condition(threading.Lock()), 0
    for handle in _held:
        with suppress(OSError):
            os.close(handle)
    _held.clear()
    _opening.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
