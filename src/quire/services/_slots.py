"""Open streams that hold every thread of a server: notice it, refuse the calls that wait, and report it as health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from quire.errors import ServiceLimitError
from quire.services._limits import Limits

_POLL = 0.1


class Report(Protocol):
    """Receives whether slots are starved."""

    def __call__(self, *, is_starved: bool) -> None: ...


class Slots:
    """The threads, or places, of a server, and whether open streams hold all of them.

    A unary call whose request is complete ends by itself, so calls that wait for unary calls get their turn. A stream
    ends when its caller wants it to, perhaps never. Slots are *starved* when calls other than such unary calls have
    held every one of them for `patience` seconds and none was released. A thread follows this only from the first time
    that streams hold everything:

    refuse: is called every `_POLL` seconds while the slots are starved, so that no call waits for them.
    report: is called when they become starved, and when they have not been for `patience`
        seconds; in between, a slot that is released and taken again by the next stream changes nothing.
    """

    def __init__(self, number: int, patience: float, *, refuse: Callable[[], None], report: Report) -> None:
        self._number, self._patience, self._refuse, self._report = number, patience, refuse, report
        self._lock = threading.Lock()
        self._held = self._ending = 0
        self._state = False, time.monotonic()  # whether streams hold everything, and since when that is so
        self._blocked, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def starved(self) -> bool:
        """Whether streams have held every slot for as long as calls wait for one."""
        blocked, since = self._state
        return blocked and time.monotonic() - since >= self._patience

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold a slot, for as long as a call has a thread or a place."""
        self._count(held=1)
        try:
            yield
        finally:
            self._count(held=-1)

    @contextmanager
    def end_by_itself(self) -> Iterator[None]:
        """Mark the holder of a slot as a unary call whose request is complete."""
        self._count(ending=1)
        try:
            yield
        finally:
            self._count(ending=-1)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._blocked.set()

    def _count(self, held: int = 0, ending: int = 0) -> None:
        with self._lock:
            self._held += held
            self._ending += ending
            blocked = self._held - self._ending >= self._number
            if blocked == self._state[0]:
                return
            self._state = blocked, time.monotonic()
            if not blocked:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="quire slots", daemon=True)
                self._thread.start()
        self._blocked.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._blocked.wait()
            self._blocked.clear()
            self._follow()

    def _follow(self) -> None:
        """Refuse and report, until streams do not hold everything any more."""
        reported = False
        while not self._closed.wait(_POLL):
            blocked, since = self._state
            lasting = time.monotonic() - since >= self._patience
            if blocked and lasting:
                self._refuse()
                if not reported:
                    reported = True
                    self._report(is_starved=True)
            elif not blocked and (lasting or not reported):
                if reported:
                    self._report(is_starved=False)
                return


def held_by_streams(limits: Limits) -> ServiceLimitError:
    """The error of calls that would wait for open streams."""
    return ServiceLimitError(
        f"open streams hold all {limits.max_concurrency} threads of the server (max_concurrency), and released none "
        f"for {limits.max_stream_wait:g} s (max_stream_wait). Close streams that are not in use, give them a timeout, "
        "or serve with Limits(max_concurrency=...) above the number of streams that are open at once."
    )
