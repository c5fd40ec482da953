"""Admission control of a gRPC server: refuse calls beyond the limits, and calls that open streams would block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

from quire._optional import require
from quire.errors import ServiceLimitError
from quire.services._errors import KIND
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


grpc: Any = require("grpc", extra="grpc", needed_for="a gRPC service")
HEALTH = "/grpc.health.v1.Health/"
_CHECKS = 64
"""So many questions for the health may wait."""


def too_many(limits: Limits) -> ServiceLimitError:
    """What callers are told of whom there are too many."""
    most = limits.max_concurrency + limits.max_queue
    return ServiceLimitError(f"{most} calls are in work or wait already (max_concurrency and max_queue). Try later.")


class Work:
    """A call that waits for a thread, and what becomes of it."""

    __slots__ = ("_call", "future")

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self.future = call, Future[Any]()

    def run(self) -> None:
        """Call it in this thread."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001 - as in every executor, it is the future's
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Let it fail without being called."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Lane(ThreadPoolExecutor):
    """Threads, and the number of calls that they work on or that wait for them."""

    slots: Slots | None = None

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, name)
        self._counting = threading.Lock()
        self._waiting: dict[Work, None] = {}  # in order
        self.held = 0

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a call wait for a thread."""
        work = Work(partial(call, *args, **kwargs))
        with self._counting:
            self._waiting[work] = None
            self.held += 1
        work.future.add_done_callback(self._gone)
        try:
            super().submit(self._work, work)
        except RuntimeError:  # the server stops
            self._waiting.pop(work, None)
            work.future.cancel()
            raise
        return work.future

    def take_waiting(self) -> list[Work]:
        """Return the calls that wait; none of them gets a thread any more."""
        with self._counting:
            waiting = list(self._waiting)
            self._waiting.clear()
        return waiting

    def _work(self, work: Work) -> None:
        with self._counting:
            if self._waiting.pop(work, work) is work:
                return  # somebody took it
        with self.slots.hold() if self.slots is not None else nullcontext():
            work.run()

    def _gone(self, _: Future[Any]) -> None:
        with self._counting:
            self.held -= 1


class Door(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls beyond the limits, or that open streams leave no thread, at once and without reading them."""

    def __init__(self, lane: Lane, limits: Limits, report: Report) -> None:
        self._lane, self._limits, self._most = lane, limits, limits.max_concurrency + limits.max_queue
        self._checks, self._refusals = Lane(2, "quire health"), Lane(1, "quire refusals")
        # A call that is refused after it has waited still reads its request first. A caller who never sends it must not
        # keep the others from being refused, so there are as many threads as calls that can wait.
        self._late_refusals = ThreadPoolExecutor(max(limits.max_queue, 1), "quire late refusals")
        self._late = threading.local()
        self.slots = Slots(limits.max_concurrency, limits.max_stream_wait, refuse=self._refuse_waiting, report=report)
        lane.slots = self.slots
        self._too_many = self._make_refusal(too_many(limits))
        self._held_by_streams = self._make_refusal(held_by_streams(limits))

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """The method that is called, or the refusal."""
        if details.method.startswith(HEALTH):
            return self._too_many if self._checks.held >= _CHECKS else self._aside(continuation(details))
        if self.slots.starved:
            return self._held_by_streams
        return self._too_many if self._lane.held >= self._most else continuation(details)

    def check(self) -> None:
        """Raise the refusal, in the thread of a call that has waited in vain."""
        if getattr(self._late, "is_refusing", False):
            raise held_by_streams(self._limits)

    def close(self) -> None:
        """End the threads."""
        self.slots.close()
        for threads in (self._checks, self._refusals, self._late_refusals):
            threads.shutdown(wait=False)

    def _make_refusal(self, error: ServiceLimitError) -> Any:
        def refuse(_: Any, context: Any) -> Any:
            context.set_trailing_metadata(((KIND, type(error).__name__),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

        refuse.experimental_thread_pool = self._refusals  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(refuse)  # which does not wait for what is sent

    def _refuse_waiting(self) -> None:
        for work in self._lane.take_waiting():
            self._late_refusals.submit(self._refuse_late, work)

    def _refuse_late(self, work: Work) -> None:
        """Let gRPC run a call here, where `check` refuses it: only gRPC can answer the caller."""
        self._late.is_refusing = True
        work.run()

    def _aside(self, method: Any) -> Any:
        """The method on threads of its own."""
        if method is None:
            return None
        arity = "unary_stream" if method.response_streaming else "unary_unary"
        answer, make = getattr(method, arity), getattr(grpc, f"{arity}_rpc_method_handler")
        moved: Any = partial(answer)
        moved.experimental_thread_pool = self._checks
        moved.experimental_non_blocking = getattr(answer, "experimental_non_blocking", False)
        return make(moved, method.request_deserializer, method.response_serializer)
