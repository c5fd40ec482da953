"""Pools that callers bring: how each takes work, and how it tells that it is well."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from multiprocessing.pool import Pool, ThreadPool
from typing import Any, NamedTuple, TypeAlias

from quire.errors import FunctionError, OptionError
from quire.parallel._ordered import cpu_count
from quire.parallel._process import Shipment
from quire.parallel._shipping import pack, unpack
from quire.parallel._tasks import Function, Outcome, work_on, work_packed
from quire.parallel._workers import Backend, Workers

Submit: TypeAlias = Callable[[Sequence[Any]], "Future[Outcome]"]


def backend_of(pool: Any) -> Backend:
    """Whether a pool is one of threads, which share memory with the caller, or of processes."""
    if isinstance(pool, Workers):
        return pool.backend
    threads = isinstance(pool, (ThreadPoolExecutor, ThreadPool)) and "Interpreter" not in type(pool).__name__
    return "thread" if threads else "process"


def size_of(pool: Any) -> int:
    """The number of workers of a pool, as far as it tells."""
    for name in ("num_workers", "_max_workers", "_processes"):
        size = getattr(pool, name, None)
        if isinstance(size, int):
            return size
    return cpu_count()


class Route(NamedTuple):
    """How a pool takes items, and how one asks whether it is well."""

    submit: Submit
    check: Callable[[], None] | None = None
    stop: Callable[[], None] | None = None
    """Makes threads end with the item that they are at, and not with their task."""


def route_to(pool: Any, function: Function) -> Route:
    """The way to have a pool call the function."""
    stop = threading.Event()
    if isinstance(pool, Workers):
        if pool.backend == "process":
            shipment = Shipment(function)
            return Route(lambda items: pool._submit(shipment, items))
        return Route(lambda items: pool._submit(function, _until_stopped(items, stop)), None, stop.set)
    watch = _PoolWatch(pool) if isinstance(pool, Pool) else None  # a ThreadPool is one, too
    submit, check = (watch.submit, watch.check) if watch else (pool.submit, None)
    if backend_of(pool) == "thread":
        return Route(lambda items: submit(work_on, function, _until_stopped(items, stop)), check, stop.set)
    return Route(_packing(submit, function), check)


def _until_stopped(items: Sequence[Any], stop: threading.Event) -> Iterator[Any]:
    for item in items:
        if stop.is_set():
            return
        yield item


def check_pool(pool: Any) -> Any:
    """A pool that can be used."""
    if isinstance(pool, (Workers, Executor, Pool)) or callable(getattr(pool, "submit", None)):
        return pool
    raise OptionError(
        f"pool={pool!r}: use quire.parallel.Workers, an executor of concurrent.futures or a pool of multiprocessing."
    )


_tokens = itertools.count()


def _packing(submit: Callable[..., Future[bytes]], function: Function) -> Submit:
    """The function goes with each task, packed, because such a pool does not say which process gets it."""
    token, data = f"{os.getpid()}-{next(_tokens)}", pack(function, to_own=False)[0]

    def send(items: Sequence[Any]) -> Future[Outcome]:
        outcome: Future[Outcome] = Future()
        task = submit(work_packed, token, data, pack(items, to_own=False)[0])
        outcome.add_done_callback(lambda ended: ended.cancelled() and task.cancel())
        task.add_done_callback(lambda done: _settle(outcome, done))
        return outcome

    return send


def _settle(outcome: Future[Outcome], done: Future[bytes]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(unpack(done.result()))
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is wanted
        outcome.set_exception(error)


class _PoolWatch:
    """A pool of multiprocessing with futures. It starts another process for one that dies, and forgets the task."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._seen: dict[int, Any] = {}
        self._look()

    def _look(self) -> None:
        """Take note of the processes that are alive."""
        for process in list(getattr(self._pool, "_pool", ())):
            if process.exitcode is None:
                self._seen[id(process)] = process

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Hand in a task."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._pool.apply_async(function, arguments, callback=future.set_result, error_callback=future.set_exception)
        return future

    def check(self) -> None:
        """An error if a process has died since the pool was first looked at."""
        self._look()
        for process in self._seen.values():
            if process.exitcode not in (None, 0):
                raise FunctionError(f"a process of the pool ended while it was at work: exit code {process.exitcode}.")
