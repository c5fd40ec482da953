"""Adapters for pools: quire's `Workers`, executors of `concurrent.futures` and pools of `multiprocessing`."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from multiprocessing.pool import Pool, ThreadPool
from typing import Any, NamedTuple, TypeAlias

from quire.errors import FunctionError, OptionError
from quire.parallel._pickling import dump_value, load_value
from quire.parallel._process import PickledFunction
from quire.parallel._tasks import Function, Outcome, run_pickled_task, run_task
from quire.parallel._workers import Backend, Workers, cpu_count

Submit: TypeAlias = Callable[[Sequence[Any]], "Future[Outcome]"]


def backend_of(pool: Any) -> Backend:
    """Return whether a pool has threads, which share memory with the caller, or processes."""
    if isinstance(pool, Workers):
        return pool.backend
    # An InterpreterPoolExecutor derives from ThreadPoolExecutor, but its workers do not share objects.
    threads = isinstance(pool, (ThreadPoolExecutor, ThreadPool)) and "Interpreter" not in type(pool).__name__
    return "thread" if threads else "process"


def count_workers(pool: Any) -> int:
    """Return the number of workers of a pool; that of the cores if the pool does not say."""
    for name in ("num_workers", "_max_workers", "_processes"):
        size = getattr(pool, name, None)
        if isinstance(size, int):
            return size
    return cpu_count()


def check_pool(pool: Any) -> None:
    """Raise if an object cannot be used as a pool."""
    if not isinstance(pool, (Workers, Executor, Pool)) and not callable(getattr(pool, "submit", None)):
        raise OptionError(
            f"pool={pool!r}: use quire.parallel.Workers, an executor of concurrent.futures or a pool of "
            "multiprocessing."
        )


class PoolAdapter(NamedTuple):
    """How to have a pool call one function on items."""

    submit: Submit
    check: Callable[[], None] | None = None
    """Raises if a process of the pool has died."""
    stop: Callable[[], None] | None = None
    """Makes threads stop after the current item instead of after their task."""


def adapt_pool(pool: Any, function: Function) -> PoolAdapter:
    """Return the adapter that has a pool call the function."""
    stop = threading.Event()
    if isinstance(pool, Workers):
        if pool.backend == "process":
            pickled = PickledFunction(function)
            return PoolAdapter(lambda items: pool._submit(pickled, items))
        return PoolAdapter(lambda items: pool._submit(function, _until_stopped(items, stop)), None, stop.set)
    watched = _WatchedPool(pool) if isinstance(pool, Pool) else None  # a ThreadPool is a Pool, too
    submit, check = (watched.submit, watched.check) if watched else (pool.submit, None)
    if backend_of(pool) == "thread":
        return PoolAdapter(lambda items: submit(run_task, function, _until_stopped(items, stop)), check, stop.set)
    return PoolAdapter(_pickling_submit(submit, function), check)


def _until_stopped(items: Sequence[Any], stop: threading.Event) -> Iterator[Any]:
    for item in items:
        if stop.is_set():
            return
        yield item


_tokens = itertools.count()


def _pickling_submit(submit: Callable[..., Future[bytes]], function: Function) -> Submit:
    """Return a `submit` that pickles the items, and sends the pickled function with each task.

    The caller's pool does not say which process gets a task, so it cannot be known whether that process has the
    function already.
    """
    token, data = f"{os.getpid()}-{next(_tokens)}", dump_value(function, to_own=False)[0]

    def submit_items(items: Sequence[Any]) -> Future[Outcome]:
        outcome: Future[Outcome] = Future()
        task = submit(run_pickled_task, token, data, dump_value(items, to_own=False)[0])

        def load(done: Future[bytes]) -> None:
            if not outcome.set_running_or_notify_cancel():
                return
            try:
                outcome.set_result(load_value(done.result()))
            except BaseException as error:  # noqa: BLE001 - the consumer of the results raises it
                outcome.set_exception(error)

        outcome.add_done_callback(lambda ended: ended.cancelled() and task.cancel())
        task.add_done_callback(load)
        return outcome

    return submit_items


class _WatchedPool:
    """A pool of multiprocessing with futures and a check for dead processes.

    When a process dies, such a pool starts another and forgets the task, so its result would be awaited forever.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._seen: dict[int, Any] = {}
        self._remember_processes()

    def _remember_processes(self) -> None:
        for process in list(getattr(self._pool, "_pool", ())):
            if process.exitcode is None:
                self._seen[id(process)] = process

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Submit a task."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._pool.apply_async(function, arguments, callback=future.set_result, error_callback=future.set_exception)
        return future

    def check(self) -> None:
        """Raise if a process has died since the map began. Exit code 0 is a process that the pool replaced."""
        self._remember_processes()
        for process in self._seen.values():
            if process.exitcode not in (None, 0):
                raise FunctionError(f"a process of the pool ended while it was at work: exit code {process.exitcode}.")
