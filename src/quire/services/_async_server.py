"""The gRPC server on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Self, Unpack

from quire._optional import require
from quire.services._admission import CountingExecutor, Slots, blocked_by_streams, too_many_calls
from quire.services._calls import Calls
from quire.services._endpoints import Endpoint
from quire.services._errors import Status, error_to_status, translate_failures
from quire.services._payloads import is_large
from quire.services._security import check_caller
from quire.services._server import (
    LIVENESS,
    NOT_SERVING,
    SERVING,
    BaseServer,
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
        self._running_calls = 0  # only changed on the event loop, so without a lock
        self._starved: set[str] = set()

    async def start(self) -> Self:
        """Start to serve."""
        limits = self._options.limits
        self._loop = asyncio.get_running_loop()
        self._stop_requested = asyncio.Event()
        self._calls = Calls(self.endpoints, limits, self._run_coroutine)
        self._executor = CountingExecutor(limits.max_concurrency, "quire serve")
        self._threads = self._executor.slots = Slots(
            limits.max_concurrency,
            limits.max_stream_wait,
            refuse=self._refuse_waiting,
            report=partial(self._report_starved, "threads"),
        )
        self._places = Slots(  # all calls, including those that need no thread
            limits.max_calls,
            limits.max_stream_wait,
            refuse=lambda: None,  # nobody waits for a place
            report=partial(self._report_starved, "places"),
        )
        self._server = aio.server(**self._server_arguments())
        self._add_services(self._server, self._make_method, self._describe)
        self._health = add_health(self._server, aio=True)
        self.port = self._bind(self._server, self._requested_port)
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
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
        await asyncio.to_thread(self._calls.close, grace)
        self._threads.close()
        self._places.close()
        self._executor.shutdown(wait=False)

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
    def _admit(self, *, is_unary: bool = False) -> Iterator[None]:
        """Admit a call, unless too many run already."""
        limits = self._options.limits
        if self._running_calls >= limits.max_calls:
            raise too_many_calls(limits)
        self._running_calls += 1
        try:
            with self._places.hold(), self._places.ends_by_itself() if is_unary else contextlib.nullcontext():
                yield
        finally:
            self._running_calls -= 1

    def _refuse_waiting(self) -> None:
        for pending in self._executor.take_waiting():
            pending.fail(blocked_by_streams(self._options.limits))

    def _report_starved(self, resource: str, *, is_starved: bool) -> None:
        """Change the health; called from a thread of `Slots`."""
        # Streams need threads, and unary calls of plain functions that are not batched.
        needs_threads = any(
            not endpoint.is_unary or not (endpoint.is_async or endpoint.batched) for endpoint in self.endpoints.values()
        )
        if resource == "threads" and not needs_threads:
            return
        asyncio.run_coroutine_threadsafe(self._set_health(resource, is_starved=is_starved), self._loop)

    async def _set_health(self, resource: str, *, is_starved: bool) -> None:
        (self._starved.add if is_starved else self._starved.discard)(resource)
        for name in self._readiness_names:
            await self._health.set(name, NOT_SERVING if self._starved else SERVING)

    # --- methods

    async def _describe(self, _: bytes, context: ServicerContext) -> bytes:
        try:
            check_caller(self._options.authorize, DESCRIBE, context)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            await _abort(context, error_to_status(error))
        return self._spec.description

    def _make_method(self, method: MethodSpec) -> Callable[..., Any]:
        async def answer(data: bytes, context: ServicerContext) -> bytes:
            try:
                with self._admit(is_unary=True):
                    return await self._answer(method.endpoint, data, context)
            except Exception as error:  # noqa: BLE001 - the caller gets it, and the server goes on
                status = error_to_status(error)
            await _abort(context, status)
            return b""

        async def stream(messages: Any, context: ServicerContext) -> AsyncIterator[bytes]:
            try:
                with self._admit():
                    async for message in self._stream(method, messages, context):
                        yield message
            except Exception as error:  # noqa: BLE001 - the caller gets it, and the server goes on
                status = error_to_status(error)
            else:
                return
            await _abort(context, status)

        async def stream_to_one(messages: Any, context: ServicerContext) -> bytes:
            return b"".join([message async for message in stream(messages, context)])

        if not any(method.streams):
            return answer
        return stream if method.streams[1] else stream_to_one

    async def _answer(self, endpoint: Endpoint, data: bytes, context: ServicerContext) -> bytes:
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
                return await asyncio.wrap_future(self._executor.submit(self._answer_in_thread, endpoint, data))
            return await _run(self._calls.encode, endpoint, value, in_thread=large or is_large(value))

    def _answer_in_thread(self, endpoint: Endpoint, data: bytes) -> bytes:
        with self._threads.ends_by_itself():
            return self._calls.answer(endpoint, data)

    async def _stream(self, method: MethodSpec, messages: Any, context: ServicerContext) -> AsyncIterator[bytes]:
        check_caller(self._options.authorize, method.endpoint.name, context)
        requests: Any = _BlockingMessages(messages, self._loop) if method.streams[0] else [messages]
        with self._calls.budget.account() as account:
            answers = self._calls.stream(method.endpoint, requests, account, framed=method.framed)
            step = None
            try:
                while True:
                    # A thread for each answer, and not for the stream: one that waits for its reader holds none.
                    step = self._executor.submit(next, answers, _END)
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

    def __init__(self, messages: AsyncIterable[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._messages, self._loop = messages, loop
        self._iterator: Any = None

    def __next__(self) -> bytes:
        async def read() -> Any:
            if self._iterator is None:  # not earlier: gRPC's iterator warns if nothing is ever read from it
                self._iterator = aiter(self._messages)
            return await anext(self._iterator, _END)

        message = asyncio.run_coroutine_threadsafe(read(), self._loop).result()
        if message is _END:
            raise StopIteration
        return message  # type: ignore[no-any-return]


async def _run(function: Callable[..., T], *args: Any, in_thread: bool) -> T:
    # In the event loop's own threads, which no stream occupies.
    return await asyncio.to_thread(function, *args) if in_thread else function(*args)


async def _abort(context: ServicerContext, status: Status) -> None:
    await context.abort(grpc.StatusCode[status.code], status.message, status.metadata)
