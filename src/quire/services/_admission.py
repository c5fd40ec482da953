"""Admission control of a gRPC server: refuse calls beyond the limits, and calls that open streams would block.

Unary calls and streams run on threads of their own (`CallPool`), so that open streams do not keep unary calls waiting.
The `AdmissionInterceptor` refuses calls before their request is read: when too many run or wait, and when calls that do
not end by themselves hold every thread, which `Slots` notices. `IdleStreams` ends streams whose caller is silent.
Health checks are not counted, and run on threads of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quire._optional import require
from quire.errors import ServiceLimitError
from quire.services._errors import Status, error_to_status, log
from quire.services._limits import Limits
from quire.services._metrics import Metrics

if TYPE_CHECKING:
    from grpc import HandlerCallDetails, RpcMethodHandler, ServicerContext


grpc: Any = require("grpc", extra="grpc", needed_for="a gRPC service")
HEALTH_SERVICE = "grpc.health.v1.Health"
_MAX_HEALTH_CHECKS = 64  # running or waiting
_POLL_SECONDS = 0.1
_END: Any = object()
_REFUSED = Status("RESOURCE_EXHAUSTED", "", ServiceLimitError.__name__)
T = TypeVar("T")


def too_many_calls(limits: Limits) -> ServiceLimitError:
    """Return the error for a unary call beyond `max_concurrency` and `max_queue`."""
    return ServiceLimitError(
        f"{limits.max_calls} calls are running or waiting already (max_concurrency + max_queue). Try again later."
    )


def too_many_streams(limits: Limits) -> ServiceLimitError:
    """Return the error for a stream beyond `max_streams` and `max_queue`."""
    return ServiceLimitError(
        f"{limits.max_open_streams} streams are open or waiting already (max_streams + max_queue). Try again later."
    )


def blocked_by_streams(limits: Limits) -> ServiceLimitError:
    """Return the error for a stream that would have to wait for open streams."""
    return ServiceLimitError(
        f"{limits.max_streams} streams are open (max_streams), and none has ended for {limits.max_stream_wait:g} s "
        "(max_stream_wait). Close streams that are not in use, give them a timeout, or serve with "
        "Limits(max_streams=...) above the number of streams that are open at once."
    )


def blocked_by_incomplete_requests(limits: Limits) -> ServiceLimitError:
    """Return the error for a unary call that would have to wait for calls whose request does not arrive."""
    return ServiceLimitError(
        f"calls whose request has not arrived hold all {limits.max_concurrency} threads of the server "
        f"(max_concurrency), and released none for {limits.max_stream_wait:g} s (max_stream_wait). Try again later."
    )


# --- threads held by streams


class ReportStarved(Protocol):
    """Receives whether slots are starved."""

    def __call__(self, *, is_starved: bool) -> None: ...


class ReportStarvedCalls(Protocol):
    """Receives whether a kind of calls ("unary" or "streams") is starved."""

    def __call__(self, kind: str, /, *, is_starved: bool) -> None: ...


class _SlotUse:
    """Changes the counts of slots inside a block. It has no state, so every call of a server uses the same object."""

    __slots__ = ("_change", "_ending", "_held")

    def __init__(self, change: Callable[[int, int], None], held: int, ending: int) -> None:
        self._change, self._held, self._ending = change, held, ending

    def __enter__(self) -> None:
        self._change(self._held, self._ending)

    def __exit__(self, *_: object) -> None:
        self._change(-self._held, -self._ending)


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
        self._hold, self._end = _SlotUse(self._change, 1, 0), _SlotUse(self._change, 0, 1)
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

    def hold(self) -> _SlotUse:
        """Hold a slot inside the block, for as long as a call has a thread or a place."""
        return self._hold

    def ends_by_itself(self) -> _SlotUse:
        """Mark the holder of a slot inside the block as a unary call whose request is complete."""
        return self._end

    def close(self) -> None:
        """Stop the thread; after that, neither `refuse` nor `report` is called."""
        self._closed.set()
        self._blocked.set()
        if self._thread is not None:
            self._thread.join()

    def _change(self, held: int, ending: int) -> None:
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
        self._idle = threading.Condition(self._count_lock)
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

    def wait_until_idle(self, seconds: float) -> int:
        """Wait until no call runs or waits, for at most `seconds`; return how many there are then."""
        with self._idle:
            self._idle.wait_for(lambda: self.pending == 0, seconds)
            return self.pending

    def _count_done(self, _: Future[Any]) -> None:
        with self._idle:
            self.pending -= 1
            if self.pending == 0:
                self._idle.notify_all()


# --- idle streams


class StreamActivity:
    """Since when the server waits for the caller of a stream."""

    __slots__ = ("_waiting_since",)

    def __init__(self) -> None:
        self._waiting_since: float | None = None

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Wait for the caller inside the block, to send a message or to take one."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def receive(self, messages: Iterable[T]) -> Iterator[T]:
        """Yield the messages of the caller."""
        iterator = iter(messages)
        while True:
            with self.wait():
                message: Any = next(iterator, _END)
            if message is _END:
                return
            yield message

    def is_idle(self, timeout: float) -> bool:
        """Return whether the server has waited for longer than `timeout` seconds."""
        since = self._waiting_since
        return since is not None and time.monotonic() - since > timeout


class IdleStreams:
    """Ends streams for whose callers the server has waited longer than `stream_idle_timeout`."""

    def __init__(self, limits: Limits) -> None:
        self._timeout = limits.stream_idle_timeout
        self._lock = threading.Lock()
        self._streams: dict[StreamActivity, Callable[[], object]] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, cancel: Callable[[], object]) -> Iterator[StreamActivity]:
        """Watch a stream inside the block; `cancel` is called, from a thread, when it has been idle for too long."""
        activity = StreamActivity()
        if self._timeout is None:
            yield activity
            return
        with self._lock:
            self._streams[activity] = cancel
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire idle streams", daemon=True)
                self._thread.start()
        try:
            yield activity
        finally:
            with self._lock:
                self._streams.pop(activity, None)

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _run(self) -> None:
        timeout = self._timeout or 0.0
        while not self._closed.wait(min(1.0, timeout / 4)):
            with self._lock:
                idle = [activity for activity in self._streams if activity.is_idle(timeout)]
                cancels = [self._streams.pop(activity) for activity in idle]
            for cancel in cancels:
                log.info("a stream was idle for %g s (stream_idle_timeout), and is ended", timeout)
                cancel()


# --- admission


PARKED_HANDLER = "quire_parked_handler"
"""The attribute of a method's function with the handler that lets its calls wait without a thread."""


class ParkedCalls:
    """The number of calls that wait for their batch without a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self, change: int) -> None:
        """Count a call that begins (1) or has ended (-1) its wait."""
        with self._lock:
            self.count += change


@dataclass(frozen=True)
class CallPool:
    """The threads of one kind of calls, and how calls of the kind are refused."""

    executor: CountingExecutor
    slots: Slots
    most: int
    """The number of calls that may run or wait."""
    refuse_full: RpcMethodHandler
    refuse_blocked: RpcMethodHandler


class AdmissionInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls beyond the limits, and calls for which others that do not end leave no thread."""

    def __init__(
        self, limits: Limits, stream_methods: Collection[str], report: ReportStarvedCalls, metrics: Metrics
    ) -> None:
        """Admit calls; the methods in `stream_methods`, by path, are streams."""
        self._stream_methods, self._metrics = stream_methods, metrics
        self.parked = ParkedCalls()
        self._health_checks, self._refusals = CountingExecutor(2, "quire health"), CountingExecutor(1, "quire refusals")
        # A call that is refused after it has waited still reads its request first. A caller who never sends it must not
        # keep the others from being refused, so there are as many threads as calls that can wait.
        self._late_refusals = ThreadPoolExecutor(max(2 * limits.max_queue, 1), "quire late refusals")
        self._thread_state = threading.local()

        def make_pool(
            kind: str, threads: int, most: int, full: ServiceLimitError, blocked: ServiceLimitError
        ) -> CallPool:
            executor = CountingExecutor(threads, f"quire {kind}")
            slots = executor.slots = Slots(
                threads,
                limits.max_stream_wait,
                refuse=partial(self._refuse_waiting, executor, blocked),
                report=partial(report, kind),
            )
            return CallPool(executor, slots, most, self._make_refusal(full), self._make_refusal(blocked))

        self.unary = make_pool(
            "unary",
            limits.max_concurrency,
            limits.max_calls,
            too_many_calls(limits),
            blocked_by_incomplete_requests(limits),
        )
        self.streams = make_pool(
            "streams", limits.max_streams, limits.max_open_streams, too_many_streams(limits), blocked_by_streams(limits)
        )

    def intercept_service(
        self, continuation: Callable[[Any], Any], details: HandlerCallDetails
    ) -> RpcMethodHandler | None:
        """Return the handler of the call, or one that refuses it."""
        if details.method.startswith(f"/{HEALTH_SERVICE}/"):
            if self._health_checks.pending >= _MAX_HEALTH_CHECKS:
                return self.unary.refuse_full
            return self._with_threads(continuation(details), self._health_checks)
        pool = self.streams if details.method in self._stream_methods else self.unary
        waiting = pool.executor.pending + (self.parked.count if pool is self.unary else 0)
        if pool.slots.starved or waiting >= pool.most:
            self._metrics.refuse(details.method.rpartition("/")[2], _REFUSED)
            return pool.refuse_blocked if pool.slots.starved else pool.refuse_full
        handler = continuation(details)
        if pool is self.streams:
            return self._with_threads(handler, pool.executor)
        # Unless an interceptor has replaced the function, a batched call waits without a thread.
        return getattr(handler.unary_unary, PARKED_HANDLER, handler) if handler is not None else None

    def check(self) -> None:
        """Raise the refusal if this thread runs a call that waited in vain."""
        refusal: ServiceLimitError | None = getattr(self._thread_state, "refusal", None)
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self.unary, self.streams):
            pool.slots.close()  # first, since it passes calls to the others
            pool.executor.shutdown(wait=False)
        for threads in (self._health_checks, self._refusals, self._late_refusals):
            threads.shutdown(wait=False)

    def wait_until_idle(self, seconds: float) -> int:
        """Wait until no call runs, for at most `seconds`; return how many there are then."""
        end = time.monotonic() + seconds
        return sum(
            pool.executor.wait_until_idle(max(0.0, end - time.monotonic())) for pool in (self.unary, self.streams)
        )

    def _make_refusal(self, error: ServiceLimitError) -> RpcMethodHandler:
        status = error_to_status(error)

        def refuse(_: object, context: ServicerContext) -> None:
            context.set_trailing_metadata(status.metadata)
            context.abort(grpc.StatusCode[status.code], status.message)

        refuse.experimental_thread_pool = self._refusals  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(refuse)  # of streams, because that does not wait for the request

    def _refuse_waiting(self, executor: CountingExecutor, refusal: ServiceLimitError) -> None:
        for pending in executor.take_waiting():
            self._late_refusals.submit(self._refuse_late, pending, refusal)

    def _refuse_late(self, pending: PendingCall, refusal: ServiceLimitError) -> None:
        """Run a call in this thread, where `check` refuses it: only gRPC's own handler can answer the caller."""
        self._thread_state.refusal = refusal
        pending.run()

    @staticmethod
    def _with_threads(handler: RpcMethodHandler | None, executor: CountingExecutor) -> RpcMethodHandler | None:
        """Return a handler that runs on the threads of an executor.

        Interceptors may have replaced the function of the handler, so the threads are chosen here and not before.
        """
        if handler is None:
            return None
        kinds = ("unary", "stream")
        arity = f"{kinds[handler.request_streaming]}_{kinds[handler.response_streaming]}"
        behavior, make_handler = getattr(handler, arity), getattr(grpc, f"{arity}_rpc_method_handler")
        wrapped: Any = partial(behavior)
        wrapped.experimental_thread_pool = executor
        wrapped.experimental_non_blocking = getattr(behavior, "experimental_non_blocking", False)
        return make_handler(wrapped, handler.request_deserializer, handler.response_serializer)
