"""Tasks on their way to the workers and back."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from quire.errors import FunctionError, QuireError
from quire.parallel._collector import may_wait
from quire.parallel._pools import Route
from quire.parallel._tasks import Function, Outcome, summary_of, work_on

T = TypeVar("T")

_MANY = 4
_HEARTBEAT = 0.2
"""Seconds between looks at a pool that does not tell when a process dies, and for Ctrl-C, which a wait may miss."""


class Chunks(Generic[T]):
    """Items in tasks: as many as take about the goal in seconds, but no more than the largest."""

    def __init__(self, items: Iterable[T], goal: float, largest: int) -> None:
        self._items, self._goal, self._largest = iter(items), goal, largest
        self._size, self._taken = 1, 0
        self.error: Exception | None = None

    def take(self) -> tuple[int, list[T]]:
        """The position of the first item, and the items; none at the end, or where taking one failed."""
        start, chunk = self._taken, list[T]()
        try:
            while len(chunk) < self._size and self.error is None:
                chunk.append(next(self._items))
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 - it is raised after the results of the items before it
            self.error = error
        self._taken += len(chunk)
        return start, chunk

    @property
    def short(self) -> bool:
        """Whether items are so short that many go together."""
        return self._size >= _MANY

    def learn(self, outcome: Outcome) -> None:
        """Tasks grow at most twofold at a time, so that one short item does not make a long task."""
        if self._goal and outcome.results:
            fitting = self._goal * len(outcome.results) / max(outcome.seconds, 1e-9)
            self._size = max(1, min(int(fitting), 2 * self._size, self._largest))


@dataclass(eq=False)
class Task:
    """Some items under way, and what came of them."""

    start: int
    size: int
    future: Future[Outcome]
    outcome: Outcome | None = None

    def settle(self, item_name: str) -> Outcome:
        """The outcome, if all went well; else the error, with the position of the item."""
        error = self.future.exception()
        if error is not None:
            last = self.start + self.size - 1
            where = f"{item_name} {self.start}" + (f" to {last}" if self.size > 1 else "")
            raise FunctionError(f"{where}: {_told(error)}") from error
        self.outcome = outcome = self.future.result()
        if failure := outcome.failure:
            where = f"{item_name} {self.start + failure.offset}"
            raise FunctionError(f"{where}: {failure.summary}") from failure.cause()
        return outcome


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, QuireError) else summary_of(error)


class Flight:
    """The tasks under way, never more than so many."""

    def __init__(self, route: Route, chunks: Chunks[Any], most: int, item_name: str, *, ordered: bool) -> None:
        self._route, self._chunks, self._most, self._ordered = route, chunks, most, ordered
        self._item_name = item_name
        self._waiting: deque[Task] = deque()
        self._finished: SimpleQueue[Task] = SimpleQueue()
        self._settled: deque[Task] = deque()
        self.more = True

    def outcomes(self, tasks: float = math.inf) -> Iterator[Outcome]:
        """The outcomes of so many tasks. For each one, up to two are taken: a slow source holds back nothing ready."""
        while True:
            taken = 0
            while self.more and tasks and len(self._waiting) < self._most and not (taken > 1 and self._is_ready()):
                taken += 1
                tasks -= 1
                self._take()
            if not self._waiting:
                return
            yield self._next()

    def outcomes_here(self, function: Function, tasks: int) -> Iterator[Outcome]:
        """The outcomes of so many tasks, done by the caller itself."""
        for _ in range(tasks):
            start, items = self._chunks.take()
            self.more = bool(items)
            if not items:
                return
            done: Future[Outcome] = Future()
            done.set_result(work_on(function, items))
            outcome = Task(start, len(items), done).settle(self._item_name)
            self._chunks.learn(outcome)
            yield outcome

    def _take(self) -> None:
        start, items = self._chunks.take()
        self.more = bool(items)
        if items:
            task = Task(start, len(items), self._route.submit(items))
            self._waiting.append(task)
            task.future.add_done_callback(lambda _: self._finished.put(task))

    def _next(self) -> Outcome:
        """The next outcome, waited for; an error in any of the tasks comes first."""
        while not self._is_ready():
            self._settle(self._wait())
        task = self._waiting[0] if self._ordered else self._settled.popleft()
        self._waiting.remove(task)
        assert task.outcome is not None
        return task.outcome

    def _is_ready(self) -> bool:
        with contextlib.suppress(Empty):
            while True:
                self._settle(self._finished.get_nowait())
        return bool(self._waiting[0].outcome if self._ordered else self._settled)

    def _settle(self, task: Task) -> None:
        self._chunks.learn(task.settle(self._item_name))
        if not self._ordered:
            self._settled.append(task)

    def _wait(self) -> Task:
        while True:
            if self._route.check is not None:
                self._route.check()
            with contextlib.suppress(Empty):
                return self._finished.get(timeout=_HEARTBEAT)

    def cancel(self, *, wait: bool) -> None:
        """Give up what is under way; with `wait`, until what has begun is over."""
        if self._route.stop is not None:
            self._route.stop()
        running = [task.future for task in self._waiting if not task.future.cancel()]
        if wait and may_wait():
            concurrent.futures.wait(running)
