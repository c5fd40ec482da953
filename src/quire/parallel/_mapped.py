"""A map over threads or processes: bounded, in order, each result as soon as it is ready."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.errors import OptionError
from quire.parallel._flight import Chunks, Flight
from quire.parallel._pace import paced
from quire.parallel._pools import backend_of, check_pool, route_to, size_of
from quire.parallel._workers import Backend, Workers, check_backend, check_workers

T = TypeVar("T")
R = TypeVar("R")

_LARGEST_TASK = 128
"""Items in a task, at most, where several go together."""
_TASKS_A_WORKER = 2
"""Tasks under way for a worker, by default: the one that it is at, and the next."""


@dataclass(frozen=True)
class MapOptions:
    """How a map is to be run.

    At most `window` items are taken ahead of the consumer; by default two tasks a worker. Where single calls may be
    short, `task_seconds` lets several items go together as a task, as many as take about that long. A caller that does
    nothing but wait (`caller_waits`) works itself where that is faster than threads.
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
        """How many workers there are for the items: no more than items, if their number is known."""
        if self.pool is not None:
            return size_of(self.pool)
        most = len(items) if isinstance(items, Sized) else None
        wanted = check_workers(self.num_workers)
        return wanted if most is None else max(1, min(wanted, most))


def mapped(
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    backend: Backend = "thread",
    num_workers: int | None = None,
    window: int | None = None,
    ordered: bool = True,
    pool: Any = None,
) -> Iterator[R]:
    """The function's results, in the order of the items or (`ordered=False`) as they come.

    At most `window` items, by default two a worker, are taken ahead of the consumer. An error of the function is a
    `FunctionError`, raised at once; an error of `items` comes after the results of what was taken before it. `pool`
    may be `Workers`, an executor of `concurrent.futures` or a pool of `multiprocessing`, and is left open.
    """
    return run_map(function, items, MapOptions(backend, num_workers, window, ordered, pool))


def run_map(function: Callable[[T], R], items: Iterable[T], options: MapOptions) -> Iterator[R]:
    """`mapped` with its options in hand. The work begins when the first result is asked for."""
    return _results(function, items, options)


def _results(function: Callable[[T], R], items: Iterable[T], options: MapOptions) -> Iterator[R]:
    workers = options.workers(items)
    with contextlib.ExitStack() as stack:
        pool = options.pool
        if pool is None:
            pool = stack.enter_context(Workers(workers, options.backend))
        tasks = workers * _TASKS_A_WORKER if options.window is None else min(options.window, workers * _TASKS_A_WORKER)
        largest = _LARGEST_TASK if options.window is None else min(_LARGEST_TASK, options.window // tasks)
        chunks = Chunks(items, options.task_seconds, largest)
        flight = Flight(route_to(pool, function), chunks, tasks, options.item_name, ordered=options.ordered)
        shares_memory = backend_of(pool) == "thread"
        stack.push(lambda kind, *_: flight.cancel(wait=shares_memory and kind is not KeyboardInterrupt))
        waits_only = options.caller_waits and shares_memory
        for outcome in paced(function, flight, chunks, workers) if waits_only else flight.outcomes():
            yield from outcome.results
        if chunks.error is not None:
            raise chunks.error
