"""Forked processes: hooks, locks that stay usable in them, and forks that wait."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def at_fork(
    *,
    before: Callable[[], None] | None = None,
    after_in_parent: Callable[[], None] | None = None,
    after_in_child: Callable[[], None] | None = None,
) -> None:
    """Call functions around each fork of this process; nothing where the system has no `fork`."""
    if hasattr(os, "register_at_fork"):
        hooks = {"before": before, "after_in_parent": after_in_parent, "after_in_child": after_in_child}
        os.register_at_fork(**{name: hook for name, hook in hooks.items() if hook is not None})


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


class ForkSafeCondition(ForkSafeLock):
    """A condition on a `ForkSafeLock`. In a child, those who waited are gone with their threads."""

    __slots__ = ("_condition",)

    def __init__(self) -> None:
        super().__init__()
        self._condition = threading.Condition(self._lock)

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait for a notification, and acquire the lock again; False after the timeout."""
        return self._condition.wait(timeout)

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until the predicate is true; False after the timeout."""
        return bool(self._condition.wait_for(lambda: bool(predicate()), timeout))

    def notify_all(self) -> None:
        """Wake every thread that waits."""
        self._condition.notify_all()

    def _renew(self) -> None:
        super()._renew()
        self._condition = threading.Condition(self._lock)


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in list(_locks):
        lock._renew()


at_fork(after_in_child=_renew_locks)


# --- forks that wait

_FORK_TIMEOUT = 30.0
"""Seconds that a fork waits for shards that are being opened, which takes long from a remote store."""
_change = threading.Condition(threading.Lock())
_busy = 0
_held_locks: list[threading.Lock] = []


@contextmanager
def no_fork() -> Iterator[None]:
    """Let forks of this process wait until the context is left.

    A thread that opens a shard may hold locks of Arrow and of Python's import system. A child forked meanwhile would
    inherit them, held by a thread that it does not have, and wait forever.
    """
    global _busy  # noqa: PLW0603 - of the process, as forks are
    with _change:
        _busy += 1
    try:
        yield
    finally:
        with _change:
            _busy = max(_busy - 1, 0)
            _change.notify_all()


def hold_during_forks(lock: threading.Lock) -> None:
    """Let every fork hold a lock, so that what it guards is complete in the child."""
    _held_locks.append(lock)


def _before_fork() -> None:
    _change.acquire()
    _change.wait_for(lambda: not _busy, _FORK_TIMEOUT)
    for lock in _held_locks:  # last: the threads that the fork waits for may need them
        lock.acquire()


def _after_in_parent() -> None:
    for lock in _held_locks:
        lock.release()
    _change.release()


def _after_in_child() -> None:
    global _change, _busy
    _change, _busy = threading.Condition(threading.Lock()), 0
    for lock in _held_locks:
        lock.release()


at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
