"""Admission control of a gRPC server: refuse calls beyond the limits, and calls that open streams would block.

Calls run on a `CountingExecutor`, which knows how many run or wait. The `AdmissionInterceptor` refuses calls before
their request is read: when too many run or wait, and when open streams hold every thread, which `Slots` notices.
Health checks are not counted, and run on threads of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from quire._optional import require
from quire.errors import ServiceLimitError
from quire.services._errors import error_to_status
from quire.services._limits import Limits

if TYPE_CHECKING:
    from grpc import HandlerCallDetails, RpcMethodHandler, ServicerContext


grpc: Any = require("grpc", extra="grpc", needed_for="a gRPC service")
HEALTH_SERVICE = "grpc.health.v1.Health"
_MAX_HEALTH_CHECKS = 64  # running or waiting
_POLL_SECONDS = 0.1


def too_many_calls(limits: Limits) -> ServiceLimitError:
    """Return the error for a call beyond `max_concurrency` and `max_queue`."""
    return ServiceLimitError(
        f"{limits.max_calls} calls are running or waiting already (max_concurrency + max_queue). Try again later."
    )


def blocked_by_streams(limits: Limits) -> ServiceLimitError:
    """Return the error for a call that would have to wait for open streams."""
    return ServiceLimitError(
        f"open streams hold all {limits.max_concurrency} threads of the server (max_concurrency), and released none "
        f"for {limits.max_stream_wait:g} s (max_stream_wait). Close streams that are not in use, give them a timeout, "
        "or serve with Limits(max_concurrency=...) above the number of streams that are open at once."
    )


# --- threads held by streams


class ReportStarved(Protocol):
    """Receives whether slots are starved."""

    def __call__(self, *, is_starved: bool) -> None: ...


class Slots:
    """The threads, or places, of a server, and whether open streams hold all of them.

    A unary call whose request is complete ends by itself, so calls that wait for unary calls get their turn. A stream
    ends when its caller wants it to, perhaps never. Slots are *starved* when calls other than such unary calls have
    held every one of them for `patience` seconds and none was released.

    refuse: called every `_POLL_SECONDS` while the slots are starved, so that no call waits for them.
    report: called when they become starved, and when they have not been for `patience` seconds. In between, a slot
        that is released and taken again by the next stream changes nothing.

    Both are called from a thread that is started when streams hold everything for the first time.
    """

    def __init__(self, count: int, patience: float, *, refuse: Callable[[], None], report: ReportStarved) -> None:
        self._count, self._patience, self._refuse, self._report = count, patience, refuse, report
        self._lock = threading.Lock()
        self._held = self._ending = 0
        # Whether streams hold everything, and since when that is so: one tuple, so that it is read without the lock.
        self._state = False, time.monotonic()
        self._blocked, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def starved(self) -> bool:
        """Whether streams have held every slot for `patience` seconds."""
        blocked, since = self._state
        return blocked and time.monotonic() - since >= self._patience

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold a slot for as long as a call has a thread or a place."""
        self._change(held=1)
        try:
            yield
        finally:
            self._change(held=-1)

    @contextmanager
    def ends_by_itself(self) -> Iterator[None]:
        """Mark the holder of a slot as a unary call whose request is complete."""
        self._change(ending=1)
        try:
            yield
        finally:
            self._change(ending=-1)

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._blocked.set()

    def _change(self, held: int = 0, ending: int = 0) -> None:
        with self._lock:
            self._held += held
            self._ending += ending
            blocked = self._held - self._ending >= self._count
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
            self._refuse_while_blocked()

    def _refuse_while_blocked(self) -> None:
        reported = False
        while not self._closed.wait(_POLL_SECONDS):
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


# --- threads


class PendingCall:
    """A call that waits for a thread, and its future."""

    __slots__ = ("_call", "future")

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self.future = call, Future[Any]()

    def run(self) -> None:
        """Run the call in this thread."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001 - as in every executor, the future has it
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Let the call fail without running it."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class CountingExecutor(ThreadPoolExecutor):
    """A thread pool that counts the calls that run or wait, and from which waiting calls can be taken away."""

    slots: Slots | None = None

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, name)
        self._count_lock = threading.Lock()
        self._waiting: dict[PendingCall, None] = {}  # an ordered set
        self.pending = 0

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call."""
        pending = PendingCall(partial(call, *args, **kwargs))
        with self._count_lock:
            self._waiting[pending] = None
            self.pending += 1
        pending.future.add_done_callback(self._count_done)
        try:
            super().submit(self._run, pending)
        except RuntimeError:  # the executor is shut down, because the server stops
            self._waiting.pop(pending, None)
            pending.future.cancel()
            raise
        return pending.future

    def take_waiting(self) -> list[PendingCall]:
        """Remove and return the calls that wait; the executor will not run them."""
        with self._count_lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        return waiting

    def _run(self, pending: PendingCall) -> None:
        with self._count_lock:
            if pending not in self._waiting:
                return  # taken away
            del self._waiting[pending]
        with self.slots.hold() if self.slots is not None else nullcontext():
            pending.run()

    def _count_done(self, _: Future[Any]) -> None:
        with self._count_lock:
            self.pending -= 1


# --- admission


class AdmissionInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls beyond the limits, and calls for which open streams leave no thread."""

    def __init__(self, executor: CountingExecutor, limits: Limits, report: ReportStarved) -> None:
        self._executor, self._limits = executor, limits
        self._health_checks, self._refusals = CountingExecutor(2, "quire health"), CountingExecutor(1, "quire refusals")
        # A call that is refused after it has waited still reads its request first. A caller who never sends it must not
        # keep the others from being refused, so there are as many threads as calls that can wait.
        self._late_refusals = ThreadPoolExecutor(max(limits.max_queue, 1), "quire late refusals")
        self._thread_state = threading.local()
        self.slots = Slots(limits.max_concurrency, limits.max_stream_wait, refuse=self._refuse_waiting, report=report)
        executor.slots = self.slots
        self._refuse_too_many = self._make_refusal(too_many_calls(limits))
        self._refuse_blocked = self._make_refusal(blocked_by_streams(limits))

    def intercept_service(
        self, continuation: Callable[[Any], Any], details: HandlerCallDetails
    ) -> RpcMethodHandler | None:
        """Return the handler of the call, or one that refuses it."""
        if details.method.startswith(f"/{HEALTH_SERVICE}/"):
            if self._health_checks.pending >= _MAX_HEALTH_CHECKS:
                return self._refuse_too_many
            return self._with_health_threads(continuation(details))
        if self.slots.starved:
            return self._refuse_blocked
        return self._refuse_too_many if self._executor.pending >= self._limits.max_calls else continuation(details)

    def check(self) -> None:
        """Raise the refusal if this thread runs a call that waited in vain."""
        if getattr(self._thread_state, "is_refusing", False):
            raise blocked_by_streams(self._limits)

    def close(self) -> None:
        """Stop the threads."""
        self.slots.close()
        for threads in (self._health_checks, self._refusals, self._late_refusals):
            threads.shutdown(wait=False)

    def _make_refusal(self, error: ServiceLimitError) -> RpcMethodHandler:
        status = error_to_status(error)

        def refuse(_: object, context: ServicerContext) -> None:
            context.set_trailing_metadata(status.metadata)
            context.abort(grpc.StatusCode[status.code], status.message)

        refuse.experimental_thread_pool = self._refusals  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(refuse)  # of streams, because that does not wait for the request

    def _refuse_waiting(self) -> None:
        for pending in self._executor.take_waiting():
            self._late_refusals.submit(self._refuse_late, pending)

    def _refuse_late(self, pending: PendingCall) -> None:
        """Run a call in this thread, where `check` refuses it: only gRPC's own handler can answer the caller."""
        self._thread_state.is_refusing = True
        pending.run()

    def _with_health_threads(self, handler: RpcMethodHandler) -> RpcMethodHandler:
        """Return gRPC's handler of a health check, on the threads of health checks."""
        if handler is None:
            return None
        arity = "unary_stream" if handler.response_streaming else "unary_unary"
        behavior, make_handler = getattr(handler, arity), getattr(grpc, f"{arity}_rpc_method_handler")
        wrapped: Any = partial(behavior)
        wrapped.experimental_thread_pool = self._health_checks
        wrapped.experimental_non_blocking = getattr(behavior, "experimental_non_blocking", False)
        return make_handler(wrapped, handler.request_deserializer, handler.response_serializer)
