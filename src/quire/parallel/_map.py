"""The parallel map: bounded, in order, and each result as soon as it is ready."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from quire._lowlevel.collector import may_wait
from quire.errors import FunctionError, OptionError, QuireError, reject_unknown_options
from quire.parallel._pools import PoolAdapter, adapt_pool, backend_of, check_pool, count_workers
from quire.parallel._tasks import Function, Outcome, run_task, summary_of
from quire.parallel._workers import Backend, Workers, check_backend, check_workers

T = TypeVar("T")
R = TypeVar("R")

_MAX_TASK_ITEMS = 128
"""Maximum number of items that are grouped into a task."""
_TASKS_PER_WORKER = 2
"""Tasks in flight per worker by default: the running one, and the next."""
_SHORT_TASK_ITEMS = 4
"""Items are short if at least this many are grouped into a task."""
_HEARTBEAT = 0.2
"""Seconds between checks of a pool that does not report a dead process, and for Ctrl-C, which a wait may miss."""


@dataclass(frozen=True)
class MapOptions:
    """Options of a map.

    At most `window` items are taken ahead of the consumer, by default two tasks per worker. Where single calls may be
    short, `task_seconds` groups items into tasks that take about that long. A caller that does nothing but wait
    (`caller_waits`) runs the function itself where that is faster than threads.
    """

    backend: Backend = "thread"
    num_workers: int | None = None
    window: int | None = None
    ordered: bool = True
    pool: Any = None
    task_seconds: float = 0.0
    item_name: str = "item"
    caller_waits: bool = False

    def __post_init__(self) -> None:
        check_backend(self.backend)
        check_workers(self.num_workers)
        if self.pool is not None:
            check_pool(self.pool)
        if self.window is not None and self.window < 1:
            raise OptionError(f"window={self.window}: at least one item must be taken ahead.")

    def workers(self, items: Iterable[Any]) -> int:
        """Return the number of workers for the items: no more than there are items, if their number is known."""
        if self.pool is not None:
            return count_workers(self.pool)
        workers = check_workers(self.num_workers)
        return max(1, min(workers, len(items))) if isinstance(items, Sized) else workers


@reject_unknown_options
def parallel_map(
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    backend: Backend = "thread",
    num_workers: int | None = None,
    window: int | None = None,
    ordered: bool = True,
    pool: Any = None,
) -> Iterator[R]:
    """Yield the function's results, in the order of the items or, with `ordered=False`, as they are ready.

    At most `window` items, by default two per worker, are taken ahead of the consumer. An error of the function is
    raised at once, as a `FunctionError`; an error of `items` is raised after the results of the items before it. `pool`
    may be `Workers`, an executor of `concurrent.futures` or a pool of `multiprocessing`, and is left open.
    """
    return run_map(function, items, MapOptions(backend, num_workers, window, ordered, pool))


def run_map(function: Callable[[T], R], items: Iterable[T], options: MapOptions) -> Iterator[R]:
    """Run `parallel_map` with `MapOptions`. The work begins when the first result is requested."""
    workers = options.workers(items)
    with contextlib.ExitStack() as stack:
        pool = options.pool
        if pool is None:
            pool = stack.enter_context(Workers(workers, options.backend))
        tasks = workers * _TASKS_PER_WORKER
        largest = _MAX_TASK_ITEMS
        if options.window is not None:
            tasks = min(options.window, tasks)
            largest = min(_MAX_TASK_ITEMS, options.window // tasks)
        chunks = _Chunks(items, options.task_seconds, largest)
        flight = _Flight(adapt_pool(pool, function), chunks, tasks, options.item_name, ordered=options.ordered)
        shares_memory = backend_of(pool) == "thread"
        stack.push(lambda kind, *_: flight.cancel(wait=shares_memory and kind is not KeyboardInterrupt))
        if options.caller_waits and shares_memory:
            outcomes = _run_where_faster(function, flight, chunks, workers)
        else:
            outcomes = flight.outcomes()
        for outcome in outcomes:
            yield from outcome.results
        if chunks.error is not None:
            raise chunks.error


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int, *, prompt: bool = False) -> Iterator[R]:
    """Yield results in the order of the items, from threads; errors of the function are raised as they are.

    At most one item per worker, and one more, is taken ahead of the consumer. With `prompt`, a result that is ready is
    yielded before another item is taken: for slow items.
    """
    if workers < 2:
        yield from map(function, items)
        return
    # Futures in the order of the items: the consumer waits for the oldest one, while the others are at work.
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            while len(waiting) > workers or (prompt and waiting and waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=may_wait(), cancel_futures=True)


class _Chunks(Generic[T]):
    """Items grouped into tasks that take about `goal` seconds, but have at most `largest` items."""

    def __init__(self, items: Iterable[T], goal: float, largest: int) -> None:
        self._items, self._goal, self._largest = iter(items), goal, largest
        self._size, self._position = 1, 0
        self.error: Exception | None = None

    def take(self) -> tuple[int, list[T]]:
        """Return the position of the first item and the items; no items at the end, or after an error of the source."""
        start, chunk = self._position, list[T]()
        try:
            while len(chunk) < self._size and self.error is None:
                chunk.append(next(self._items))
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 - raised after the results of the items before it
            self.error = error
        self._position += len(chunk)
        return start, chunk

    @property
    def short(self) -> bool:
        """Whether items are so short that many are grouped into a task."""
        return self._size >= _SHORT_TASK_ITEMS

    def adapt(self, outcome: Outcome) -> None:
        """Adapt the size of tasks; it at most doubles, so that one short item does not lead to a long task."""
        if self._goal and outcome.results:
            fitting = self._goal * len(outcome.results) / max(outcome.seconds, 1e-9)
            self._size = max(1, min(int(fitting), 2 * self._size, self._largest))


@dataclass(eq=False)
class _Task:
    """Items in flight, and their outcome."""

    start: int
    size: int
    future: Future[Outcome]
    outcome: Outcome | None = None

    def finish(self, item_name: str) -> Outcome:
        """Return the outcome, or raise the error with the position of the item."""
        where = f"{item_name} {self.start}" + (f" to {self.start + self.size - 1}" if self.size > 1 else "")
        if self.future.cancelled():
            raise FunctionError(f"{where}: the pool was closed before it ran. Read all results before you close it.")
        error = self.future.exception()
        if error is not None:
            reason = str(error) if isinstance(error, QuireError) else summary_of(error)
            raise FunctionError(f"{where}: {reason}") from error
        self.outcome = outcome = self.future.result()
        if failure := outcome.failure:
            where = f"{item_name} {self.start + failure.offset}"
            raise FunctionError(f"{where}: {failure.summary}") from failure.cause()
        return outcome


class _Flight:
    """The tasks in flight, never more than `limit`."""

    def __init__(self, pool: PoolAdapter, chunks: _Chunks[Any], limit: int, item_name: str, *, ordered: bool) -> None:
        self._pool, self._chunks, self._limit, self._ordered = pool, chunks, limit, ordered
        self._item_name = item_name
        self._in_flight: deque[_Task] = deque()
        self._done: SimpleQueue[_Task] = SimpleQueue()  # filled by the callbacks of the futures
        self._finished: deque[_Task] = deque()
        self.more = True

    def outcomes(self, tasks: float = math.inf) -> Iterator[Outcome]:
        """Yield the outcomes of n tasks, run by the pool.

        For each outcome at most two tasks are submitted, so that a slow source does not hold back what is ready.
        """
        while True:
            submitted = 0
            while (
                self.more and tasks and len(self._in_flight) < self._limit and not (submitted > 1 and self._is_ready())
            ):
                submitted += 1
                tasks -= 1
                self._submit_next()
            if not self._in_flight:
                return
            yield self._next_outcome()

    def outcomes_here(self, function: Function, tasks: int) -> Iterator[Outcome]:
        """Yield the outcomes of n tasks, run by the calling thread."""
        for _ in range(tasks):
            start, items = self._chunks.take()
            self.more = bool(items)
            if not items:
                return
            future: Future[Outcome] = Future()
            future.set_result(run_task(function, items))
            outcome = _Task(start, len(items), future).finish(self._item_name)
            self._chunks.adapt(outcome)
            yield outcome

    def _submit_next(self) -> None:
        start, items = self._chunks.take()
        self.more = bool(items)
        if items:
            task = _Task(start, len(items), self._pool.submit(items))
            self._in_flight.append(task)
            task.future.add_done_callback(lambda _: self._done.put(task))

    def _next_outcome(self) -> Outcome:
        """Wait for the next outcome; an error of any task is raised first."""
        while not self._is_ready():
            self._finish(self._wait())
        task = self._in_flight[0] if self._ordered else self._finished.popleft()
        self._in_flight.remove(task)
        assert task.outcome is not None
        return task.outcome

    def _is_ready(self) -> bool:
        with contextlib.suppress(Empty):
            while True:
                self._finish(self._done.get_nowait())
        return bool(self._in_flight[0].outcome if self._ordered else self._finished)

    def _finish(self, task: _Task) -> None:
        self._chunks.adapt(task.finish(self._item_name))
        if not self._ordered:
            self._finished.append(task)

    def _wait(self) -> _Task:
        # With a timeout, because a pool of multiprocessing does not report the death of a process: it is looked for.
        while True:
            if self._pool.check is not None:
                self._pool.check()
            with contextlib.suppress(Empty):
                return self._done.get(timeout=_HEARTBEAT)

    def cancel(self, *, wait: bool) -> None:
        """Cancel the tasks in flight; with `wait`, wait for those that have begun."""
        if self._pool.stop is not None:
            self._pool.stop()
        running = [task.future for task in self._in_flight if not task.future.cancel()]
        if wait and may_wait():
            concurrent.futures.wait(running)


# --- threads, or the calling thread


def _run_where_faster(function: Function, flight: _Flight, chunks: _Chunks[Any], workers: int) -> Iterator[Outcome]:
    """Yield the outcomes for a caller that only waits for them: by the workers, or by the caller if that is faster.

    Short calls that hold the GIL may take longer on threads. So both are measured where items are so short that many
    are grouped into a task. Workers that win keep the work; if the caller wins, they are tried again from time to time.
    """
    budget = 4 * workers
    yield from flight.outcomes(budget)  # until the size of tasks has settled
    while flight.more:
        pooled = _Measurement(flight.outcomes(budget if chunks.short else math.inf))
        yield from pooled
        alone = _Measurement(flight.outcomes_here(function, 4))
        yield from alone
        if pooled.rate >= alone.rate:
            yield from flight.outcomes()
        else:
            yield from flight.outcomes_here(function, 8 * budget)


class _Measurement:
    """Outcomes, and the rate of their results."""

    def __init__(self, outcomes: Iterator[Outcome]) -> None:
        self._outcomes, self._results, self._seconds = outcomes, 0, 0.0

    def __iter__(self) -> Iterator[Outcome]:
        while True:
            started = time.perf_counter()
            outcome = next(self._outcomes, None)
            self._seconds += time.perf_counter() - started
            if outcome is None:
                return
            self._results += len(outcome.results)
            yield outcome

    @property
    def rate(self) -> float:
        """Results per second."""
        return self._results / max(self._seconds, 1e-9)
