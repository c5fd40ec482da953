"""Locks that stay usable in forked processes."""

from __future__ import annotations

import os
import threading
import weakref


class ForkSafeLock:
    """A reentrant lock that a forked child never finds held by a thread that it does not have.

    `fork` copies the calling thread only. A plain lock that another thread holds at this moment is copied locked, and
    nothing in the child will ever release it: the first worker of a `DataLoader` that needs it blocks for ever, while
    the trainer waits for its batch. In the child, such a lock is therefore replaced. A lock that the forking thread
    itself holds stays held, and is released as usual.

    The thread that held the lock may have stopped between two of its changes, and the child sees the state of that
    moment. So the guarded state has to be valid after each single change, as a dict or a set is.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _renew(self) -> None:
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in list(_locks):
        lock._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
