"""The gRPC server on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Self, Unpack

from quire._optional import require
from quire.errors import ServiceError
from quire.services._admission import (
    CountingExecutor,
    Slots,
    blocked_by_streams,
    too_many_calls,
    too_many_streams,
)
from quire.services._calls import Calls
from quire.services._endpoints import Endpoint
from quire.services._errors import Status, idle_stream_error, translate_failures
from quire.services._inference import INFER
from quire.services._metrics import GONE, open_metrics
from quire.services._payloads import is_large
from quire.services._security import check_caller
from quire.services._server import (
    LIVENESS,
    NOT_SERVING,
    SERVING,
    UNWIND_SECONDS,
    BaseServer,
    CallRecord,
    ServeKeywords,
    ServeOptions,
    add_health,
)
from quire.services._service_spec import DESCRIBE, MethodSpec

if TYPE_CHECKING:
    from grpc.aio import ServicerContext


grpc: Any = require("grpc", extra="grpc", needed_for="a gRPC service")
aio: Any = require("grpc.aio", extra="grpc", needed_for="a gRPC service")
_END: Any = object()
_LARGE_REQUEST = 1 << 16  # bytes; decoding more takes long enough to delay other calls on the event loop
T = TypeVar("T")


class AsyncServer(BaseServer):
    """A service on asyncio, which runs inside of `async with`. Functions that are not async run on threads."""

    def __init__(self, service: object, host: str, port: int, options: ServeOptions) -> None:
        super().__init__(service, host, options)
        self._requested_port = port
        self._stopping: asyncio.Task[None] | None = None
        self._running_calls = self._open_streams = 0  # only changed on the event loop, so without a lock

    async def start(self) -> Self:
        """Start to serve."""
        limits = self._options.limits
        self._loop = asyncio.get_running_loop()
        self._stop_requested = asyncio.Event()
        interceptors = self._options.check_interceptors(aio.ServerInterceptor)
        arguments = self._server_arguments()
        self._metrics = open_metrics(self._options.metrics, self.host)
        self._calls = Calls(self.endpoints, limits, self._run_coroutine, self._metrics)
        self._executor = CountingExecutor(limits.max_concurrency, "quire unary")
        self._stream_executor = CountingExecutor(limits.max_streams, "quire streams")
        self._stream_slots = self._stream_executor.slots = Slots(
            limits.max_streams, limits.max_stream_wait, refuse=self._refuse_waiting, report=self._report_starved
        )
        self._server = aio.server(interceptors=interceptors, **arguments)
        self._add_services(self._server, self._make_method, self._make_description, self._infer)
        self._health = add_health(self._server, aio=True)
        try:
            self.port = self._bind(self._server, self._requested_port)
        except ServiceError:
            self._metrics.close()
            raise
        await self._server.start()
        for name in (LIVENESS, *self._readiness_names):
            await self._health.set(name, SERVING)
        return self

    async def wait(self) -> None:
        """Wait until the server has stopped, by `stop()` or SIGTERM."""
        with self._on_sigterm():
            await self._stop_requested.wait()
        await self.stop()

    async def stop(self, grace: float | None = None) -> None:
        """Accept no new calls, let running calls finish within `grace` seconds, and stop."""
        self._stop_requested.set()
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(self._options.grace if grace is None else grace))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace: float) -> None:
        # In the order of `Server.stop`; batches run in threads, and finish while the event loop goes on.
        deadline = time.monotonic() + grace
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
        await asyncio.to_thread(self._calls.close, max(0.0, deadline - time.monotonic()))
        await asyncio.to_thread(self._stream_slots.close)
        abandoned, end = 0, time.monotonic() + UNWIND_SECONDS
        for executor in (self._executor, self._stream_executor):
            executor.shutdown(wait=False)
            abandoned += await asyncio.to_thread(executor.wait_until_idle, max(0.0, end - time.monotonic()))
        self._count_abandoned(abandoned)
        await asyncio.to_thread(self._metrics.close)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    @contextlib.contextmanager
    def _on_sigterm(self) -> Iterator[None]:
        try:
            self._loop.add_signal_handler(signal.SIGTERM, self._stop_requested.set)
        except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or a system without signals
            yield
            return
        try:
            yield
        finally:
            self._loop.remove_signal_handler(signal.SIGTERM)

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop, and wait for it in a thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # --- admission

    @contextlib.contextmanager
    def _admit_call(self) -> Iterator[None]:
        """Admit a unary call, unless too many run already."""
        if self._running_calls >= self._options.limits.max_calls:
            raise too_many_calls(self._options.limits)
        self._running_calls += 1
        try:
            yield
        finally:
            self._running_calls -= 1

    @contextlib.contextmanager
    def _admit_stream(self) -> Iterator[None]:
        """Admit a stream, unless too many are open already."""
        if self._open_streams >= self._options.limits.max_open_streams:
            raise too_many_streams(self._options.limits)
        self._open_streams += 1
        try:
            yield
        finally:
            self._open_streams -= 1

    def _refuse_waiting(self) -> None:
        for pending in self._stream_executor.take_waiting():
            pending.fail(blocked_by_streams(self._options.limits))

    def _report_starved(self, *, is_starved: bool) -> None:
        """Change the health; called from a thread of `Slots`."""
        if self._is_unready("streams"):
            asyncio.run_coroutine_threadsafe(self._set_health(is_starved=is_starved), self._loop)

    async def _set_health(self, *, is_starved: bool) -> None:
        for name in self._readiness_names:
            await self._health.set(name, NOT_SERVING if is_starved else SERVING)

    async def _abort(self, context: ServicerContext, call: CallRecord, status: Status) -> None:
        metadata = status.metadata + self._response_metadata(call)
        await context.abort(grpc.StatusCode[status.code], status.message, metadata)

    # --- methods

    def _make_description(self, respond: Callable[[bytes], bytes]) -> Callable[..., Any]:
        """Return a method that describes the service to callers."""

        async def describe(data: bytes, context: ServicerContext) -> bytes:
            call = self._begin_call(DESCRIBE, context)
            try:
                call.run(check_caller, self._options.authorize, DESCRIBE, context)
                return call.run(respond, data)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                await self._abort(context, call, call.fail(error))
                return b""

        return describe

    async def _infer(self, data: bytes, context: ServicerContext) -> bytes:
        try:
            # The tensors of a large request take long enough to delay other calls on the event loop.
            endpoint = await _run(self._models.bind, data, in_thread=len(data) > _LARGE_REQUEST)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            call = self._begin_call(INFER, context, len(data))
            try:  # a caller who is refused does not learn which models exist
                call.run(check_caller, self._options.authorize, INFER, context)
                status = call.fail(error)
            except Exception as refusal:  # noqa: BLE001 - the caller gets it
                status = call.fail(refusal)
            await self._abort(context, call, status)
            return b""
        return await self._answer_call(endpoint, data, context)

    async def _answer_call(self, endpoint: Endpoint, data: bytes, context: ServicerContext) -> bytes:
        call = self._begin_call(endpoint.name, context, len(data))
        try:
            with self._admit_call(), call.activate():
                response = await self._answer(endpoint, data, context, call)
        except Exception as error:  # noqa: BLE001 - the caller gets it, and the server goes on
            status = call.fail(error)
        else:
            call.sent(len(response))
            call.end()
            return response
        finally:
            call.end(GONE)  # without effect if the call has ended already
        await self._abort(context, call, status)
        return b""

    def _make_method(self, method: MethodSpec) -> Callable[..., Any]:
        async def answer(data: bytes, context: ServicerContext) -> bytes:
            return await self._answer_call(method.endpoint, data, context)

        async def stream(messages: Any, context: ServicerContext) -> AsyncIterator[bytes]:
            call = self._begin_call(method.endpoint.name, context)
            try:
                with self._admit_stream():
                    async for message in self._stream(method, messages, context, call):
                        call.sent(len(message))
                        yield message
            except Exception as error:  # noqa: BLE001 - the caller gets it, and the server goes on
                status = call.fail(error)
            else:
                call.end()
                return
            finally:
                call.end(GONE)  # without effect if the call has ended already
            await self._abort(context, call, status)

        async def stream_to_one(messages: Any, context: ServicerContext) -> bytes:
            return b"".join([message async for message in stream(messages, context)])

        if not any(method.streams):
            return answer
        return stream if method.streams[1] else stream_to_one

    async def _answer(self, endpoint: Endpoint, data: bytes, context: ServicerContext, call: CallRecord) -> bytes:
        check_caller(self._options.authorize, endpoint.name, context)
        with self._calls.budget.account() as account:
            account.take(len(data))
            # Small values are decoded and encoded right here, since a change of threads would take longer.
            large = len(data) > _LARGE_REQUEST
            if endpoint.batched:
                future = await _run(self._calls.submit, endpoint, data, in_thread=large)
                value = await asyncio.wrap_future(future)
            elif endpoint.is_async:
                argument = await _run(endpoint.input.decode_request, data, in_thread=large)
                with translate_failures(endpoint.name):
                    value = await endpoint.function(argument)
            else:
                return await asyncio.wrap_future(self._executor.submit(call.run, self._calls.answer, endpoint, data))
            return await _run(self._calls.encode, endpoint, value, in_thread=large or is_large(value))

    async def _stream(
        self, method: MethodSpec, messages: Any, context: ServicerContext, call: CallRecord
    ) -> AsyncIterator[bytes]:
        call.run(check_caller, self._options.authorize, method.endpoint.name, context)
        await context.send_initial_metadata(self._stream_metadata)
        idle = self._options.limits.stream_idle_timeout
        requests: Any = _BlockingMessages(messages, self._loop, idle) if method.streams[0] else [messages]
        with self._calls.budget.account() as account:
            answers = self._calls.stream(method.endpoint, call.receive(requests), account, framed=method.framed)
            step = None
            try:
                while True:
                    # A thread for each answer, and not for the stream: one that waits for its reader holds none.
                    step = self._stream_executor.submit(call.run, next, answers, _END)
                    message = await asyncio.wrap_future(step)
                    if message is _END:
                        return
                    yield message
            finally:
                if step is not None:  # a generator cannot be closed while a thread runs it
                    step.add_done_callback(lambda _: answers.close())


def serve_async(
    service: object, host: str = "127.0.0.1", port: int = 0, **options: Unpack[ServeKeywords]
) -> AsyncServer:
    """Serve on the running event loop, inside of `async with`; the arguments are those of `serve`."""
    return AsyncServer(service, host, port, ServeOptions.from_keywords("serve_async", options))


class _BlockingMessages(Iterator[bytes]):
    """The messages of a stream, read from a thread."""

    def __init__(
        self, messages: AsyncIterable[bytes], loop: asyncio.AbstractEventLoop, idle_timeout: float | None
    ) -> None:
        self._messages, self._loop, self._idle_timeout = messages, loop, idle_timeout
        self._iterator: Any = None

    def __next__(self) -> bytes:
        async def read() -> Any:
            if self._iterator is None:  # not earlier: gRPC's iterator warns if nothing is ever read from it
                self._iterator = aiter(self._messages)
            try:
                return await asyncio.wait_for(anext(self._iterator, _END), self._idle_timeout)
            except asyncio.TimeoutError:
                raise idle_stream_error(f"{self._idle_timeout:g}") from None

        message = asyncio.run_coroutine_threadsafe(read(), self._loop).result()
        if message is _END:
            raise StopIteration
        return message  # type: ignore[no-any-return]


async def _run(function: Callable[..., T], *args: Any, in_thread: bool) -> T:
    # In the event loop's own threads, which no stream occupies.
    return await asyncio.to_thread(function, *args) if in_thread else function(*args)
