"""Gather the rows of a remote stream in a thread, some steps before the loop takes them.

Opening a block takes time: it has to arrive, and is verified and decoded. If a loop did this itself whenever it takes a
batch, it would wait for it after every step. Local files are gathered by the loop, which costs about as much as taking
a batch from a thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

from quire._lowlevel.forks import ForkSafeCondition
from quire.errors import OptionError

StepsT = TypeVar("StepsT")
T = TypeVar("T")
_GROUPS = 3
"""The number of groups that are gathered at most: the one that is taken, and two after it."""


def gather_ahead(groups: Iterator[StepsT], gather: Callable[[StepsT], Iterator[T]]) -> Iterator[T]:
    """Yield what `gather` yields for each group; a thread calls it, for the next groups while one is taken.

    The groups themselves come from the thread that iterates: the rank of a trainer may belong to its thread. An error
    is raised where it would be without the thread. When the iteration is closed, the thread ends with the item that it
    is making, and the caller does not wait for it. At the end, the thread has ended.
    """
    gatherer, owner = _Gatherer(gather), os.getpid()
    try:
        for group in islice(groups, _GROUPS):
            gatherer.submit(group)
        while gatherer.pending:
            for item in gatherer.take_group():
                yield item
                if os.getpid() != owner:
                    raise OptionError(
                        "this iteration began before the process was forked, and its thread is in the parent: iterate "
                        "over the dataset in the child from the beginning."
                    )
            for group in islice(groups, 1):
                gatherer.submit(group)
        gatherer.join()
    finally:
        gatherer.stop()


class _Gatherer(Generic[StepsT, T]):
    """A thread that gathers groups one after another, and the items that it has made."""

    def __init__(self, gather: Callable[[StepsT], Iterator[T]]) -> None:
        self._gather = gather
        self._changed = ForkSafeCondition()
        self._groups: deque[StepsT] = deque()
        self._items: deque[tuple[str, Any]] = deque()
        self._is_stopped = False
        self.pending = 0
        """The number of groups that were submitted, and not taken to their end."""
        self._thread: threading.Thread | None = None

    def submit(self, group: StepsT) -> None:
        with self._changed:
            self._groups.append(group)
            self.pending += 1
            self._changed.notify_all()
        if self._thread is None:
            # A daemon: the end of the program does not wait for blocks that a store does not send.
            self._thread = threading.Thread(target=self._run, daemon=True, name="quire-stream")
            self._thread.start()

    def take_group(self) -> Iterator[T]:
        """Yield the items of the next group; raise the error of gathering them."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items)
                kind, item = self._items.popleft()
            if kind == "end":
                self.pending -= 1
                return
            if kind == "error":
                raise item
            yield item
            del item  # its memory can be reused as soon as the caller has let it go

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._groups.clear()
            self._items.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """End the thread, which is idle.

        If the program forks next, for instance for the workers of a DataLoader, a thread that is just ending could hold
        a lock of the C library, which would stay locked in the child.
        """
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _put(self, kind: str, item: Any = None) -> bool:
        with self._changed:
            if not self._is_stopped:
                self._items.append((kind, item))
                self._changed.notify_all()
            return not self._is_stopped

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._groups or self._is_stopped)
                if self._is_stopped:
                    return
                group = self._groups.popleft()
            try:
                for item in self._gather(group):
                    if not self._put("item", item):
                        return
                    del item
            except BaseException as error:  # noqa: BLE001 - raised in the thread that takes the items
                self._put("error", error)
                return
            del group
            self._put("end")
