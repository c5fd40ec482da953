"""Whether the current thread may wait for others."""

from __future__ import annotations

import gc
import sys
import weakref


def may_wait() -> bool:
    """Return whether this thread may wait for others: not during a collection, nor while the interpreter exits.

    The collector closes an abandoned iterator in whatever thread it happens to run, whatever locks that thread holds.
    Waiting for worker threads there may deadlock, so a pool that the collector closes does not wait.
    """
    return not sys.is_finalizing() and not is_collecting()


class _Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def is_collecting() -> bool:
    """Return whether a garbage collection is running.

    Python does not say so. But `gc.collect` does nothing during a collection, so that a cycle which the youngest
    generation must contain survives it. A collection of another thread counts, too: while a finalizer of that thread
    waits, this one may run. Then the answer is cautious, and a caller does not wait although it could.
    """
    cycle = weakref.ref(_Cycle())
    gc.collect(0)
    return cycle() is not None
