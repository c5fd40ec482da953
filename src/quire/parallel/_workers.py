"""Who does the work: threads and processes, kept or not."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from multiprocessing.context import BaseContext
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

from typing_extensions import Self

from quire.errors import OptionError
from quire.parallel._collector import may_wait
from quire.parallel._ordered import cpu_count
from quire.parallel._process import Worker
from quire.parallel._tasks import Outcome, work_on

Backend: TypeAlias = Literal["thread", "process"]
Work: TypeAlias = Callable[[Any, Any], Outcome]
_Order: TypeAlias = "tuple[Future[Outcome], Any, Iterable[Any]] | None"

_open: WeakSet[Workers] = WeakSet()


class Workers:
    """Threads or processes that are kept from one call to the next: `with Workers(4, 'process') as pool: ...`.

    Processes are spawned, or started as `context` says: a start method ('fork', 'spawn', 'forkserver') or a context of
    `multiprocessing`. A process that dies is an error of the call that it worked for; the next call gets a new one.
    """

    def __init__(
        self, num_workers: int | None = None, backend: Backend = "thread", *, context: str | BaseContext | None = None
    ) -> None:
        """Start so many workers; by default, one a core."""
        self.backend: Backend = check_backend(backend)
        self.num_workers = check_workers(num_workers)
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        self._processes: list[Worker] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        _open.add(self)
        try:
            self._start(_context(context) if backend == "process" else None)
        except BaseException:
            self.close()
            raise

    def _start(self, context: BaseContext | None) -> None:
        """The processes before the threads, one of which speaks for each: forking and threads go ill together."""
        for _ in range(self.num_workers if context else 0):
            self._processes.append(Worker(context))  # type: ignore[arg-type]
        works: list[Work] = [*self._processes] if context else [work_on] * self.num_workers
        for work in works:
            thread = threading.Thread(target=_serve, args=(self._orders, work), daemon=True)
            self._threads.append(thread)
            thread.start()

    def warm_up(self) -> Self:
        """Wait until every process has started."""
        for process in self._processes:
            process.warm_up()
        return self

    def _submit(self, function: Any, items: Iterable[Any]) -> Future[Outcome]:
        if self._closed:
            raise OptionError("these Workers are closed: make new ones.")
        future: Future[Outcome] = Future()
        self._orders.put((future, function, items))
        return future

    def close(self, *, wait: bool = True) -> None:
        """End the workers. Processes are stopped in what they do; threads finish it, and are waited for or not."""
        if self._closed:
            return
        self._closed = True
        for process in self._processes:
            process.end()
        self._forget_orders()
        for _ in self._threads:
            self._orders.put(None)
        if (wait or self._processes) and may_wait():
            for thread in self._threads:
                thread.join()
            for process in self._processes:
                process.wait()

    def _forget_orders(self) -> None:
        with contextlib.suppress(Empty):
            while order := self._orders.get_nowait():
                order[0].cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is not KeyboardInterrupt)


def _close_processes() -> None:
    """What a program that ends has left open. Threads are left alone: they may be at work for long."""
    for workers in list(_open):
        if workers.backend == "process":
            workers.close()


atexit.register(_close_processes)


def _serve(orders: SimpleQueue[_Order], work: Work) -> None:
    """What a thread does: fulfil orders until there is a None."""
    while order := orders.get():
        future, function, items = order
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(function, items))
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is wanted
                future.set_exception(error)
        del future, function, items, order  # nothing is kept alive while the thread waits


def _context(context: str | BaseContext | None) -> BaseContext:
    return context if isinstance(context, BaseContext) else multiprocessing.get_context(context or "spawn")


def check_backend(backend: str) -> Any:
    """'thread' or 'process'."""
    if backend not in ("thread", "process"):
        raise OptionError(f"backend={backend!r}: use 'thread' or 'process'.")
    return backend


def check_workers(num_workers: int | None) -> int:
    """The number of workers; by default that of the cores."""
    if num_workers is not None and num_workers < 1:
        raise OptionError(f"num_workers={num_workers}: at least one is needed. None means one a core.")
    return num_workers or cpu_count()
