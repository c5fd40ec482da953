"""`Workers`: a pool of threads or processes that can be kept between calls."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

from typing_extensions import Self

from quire._lowlevel.collector import may_wait
from quire._lowlevel.forks import ForkSafeLock
from quire.errors import OptionError
from quire.parallel._process import PickledFunction, WorkerProcess
from quire.parallel._tasks import Function, Outcome, run_task

Backend: TypeAlias = Literal["thread", "process"]
_Runner: TypeAlias = Callable[[Any, Any], Outcome]
_Order: TypeAlias = "tuple[Future[Outcome], Any, Iterable[Any]] | None"

_open: WeakSet[Workers] = WeakSet()


class Workers:
    """Threads or processes that are kept from one call to the next: `with Workers(4, 'process') as pool: ...`.

    Processes are spawned, unless `context` is another start method ('fork', 'forkserver') or a context of
    `multiprocessing`. A process that dies fails the call that it worked for; the next call gets a new process.
    """

    def __init__(
        self, num_workers: int | None = None, backend: Backend = "thread", *, context: str | BaseContext | None = None
    ) -> None:
        """Start the workers, by default one per core."""
        self.backend: Backend = check_backend(backend)
        self.num_workers = check_workers(num_workers)
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        self._processes: list[WorkerProcess] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        # An order that is put after `close` has emptied the queue would never be run, nor cancelled.
        self._closing = ForkSafeLock()
        self._owner = os.getpid()
        _open.add(self)
        try:
            self._start(context)
        except BaseException:
            self.close()
            raise

    def _start(self, context: str | BaseContext | None) -> None:
        runners: list[_Runner] = [run_task] * self.num_workers
        if self.backend == "process":
            if not isinstance(context, BaseContext):
                context = multiprocessing.get_context(context or "spawn")
            _close_processes_at_exit(os.getpid())
            # All processes start before the first thread: forking a process that has threads may deadlock.
            for _ in range(self.num_workers):
                self._processes.append(WorkerProcess(context))
            runners = [*self._processes]
        for runner in runners:
            thread = threading.Thread(target=_run_orders, args=(self._orders, runner), daemon=True)
            self._threads.append(thread)
            thread.start()

    def warm_up(self) -> Self:
        """Wait until every process has started."""
        for process in self._processes:
            process.warm_up()
        return self

    def _submit(self, function: Function | PickledFunction, items: Iterable[Any]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._closing:
            if self._closed:
                raise OptionError("these Workers are closed: make new ones.")
            self._orders.put((future, function, items))
        return future

    def close(self, *, wait: bool = True) -> None:
        """Stop the workers. Processes are terminated; threads finish their task, and with `wait` are joined."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        for process in self._processes:
            process.terminate()
        # Orders that no worker has begun are cancelled, so that nobody waits for their results. Then each thread gets
        # a None, which ends it.
        with contextlib.suppress(Empty):
            while order := self._orders.get_nowait():
                order[0].cancel()
        for _ in self._threads:
            self._orders.put(None)
        if (wait or self._processes) and may_wait():
            for thread in self._threads:
                thread.join()
            for process in self._processes:
                process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is not KeyboardInterrupt)


def _run_orders(orders: SimpleQueue[_Order], runner: _Runner) -> None:
    """Run orders in a thread until there is a None."""
    while order := orders.get():
        future, function, items = order
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(runner(function, items))
            except BaseException as error:  # noqa: BLE001 - the consumer of the results raises it
                future.set_exception(error)
        del future, function, items, order  # keep nothing alive while the thread waits


def _close_processes() -> None:
    """Close process pools that were left open at exit. Threads are left alone: their tasks may take long."""
    for workers in list(_open):
        if workers.backend == "process" and workers._owner == os.getpid():  # a forked child must not end those
            workers.close()


@functools.cache
def _close_processes_at_exit(owner: int) -> None:  # noqa: ARG001 - once in each process
    """Have multiprocessing close the pools at exit, before it ends the processes itself, so that none is restarted."""
    Finalize(None, _close_processes, exitpriority=10)


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_backend(backend: Backend) -> Backend:
    """Return the backend if it is 'thread' or 'process'; raise otherwise."""
    if backend not in ("thread", "process"):
        raise OptionError(f"backend={backend!r}: use 'thread' or 'process'.")
    return backend


def check_workers(num_workers: int | None) -> int:
    """Return the number of workers, by default that of the cores."""
    if num_workers is not None and num_workers < 1:
        raise OptionError(f"num_workers={num_workers}: at least one is needed. None means one per core.")
    return num_workers or cpu_count()
