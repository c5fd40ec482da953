"""The gRPC server on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from types import TracebackType
from typing import Any

from typing_extensions import Self, Unpack

from quire._optional import require
from quire.services._admission import Lane, Slots, held_by_streams, too_many
from quire.services._calls import OPTIONS, Calls
from quire.services._endpoints import Endpoint
from quire.services._errors import FAILURES, KIND, REFUSALS, Status, function_failed, status_of
from quire.services._security import check_caller
from quire.services._server import (
    LIVENESS,
    ServeOptions,
    Serving,
    _rpc_methods,
    add_tools,
    bind,
    not_serving,
    ready_names,
    serving,
)
from quire.services._service_spec import DESCRIBE, Offer, Offered, make_offer

grpc: Any = require("grpc", extra="grpc", needed_for="a gRPC service")
aio: Any = require("grpc.aio", extra="grpc", needed_for="a gRPC service")
_DONE: Any = object()


class AsyncServer:
    """A service on asyncio; it is served inside of `async with`. Functions that are not async run on threads."""

    port: int

    def __init__(self, offer: Offer, host: str, port: int, options: ServeOptions) -> None:
        self._offer, self._options, self._asked_port = offer, options, port
        self.host = host
        self._stopped: asyncio.Task[None] | None = None
        self._inside = 0
        self._starved: set[str] = set()

    async def start(self) -> Self:
        """Start to serve."""
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()
        self._calls = Calls(self._offer.endpoints, self._options.limits, self._run)
        limits = self._options.limits
        self._lane = Lane(limits.max_concurrency, "quire serve")
        self._threads = self._lane.slots = Slots(
            limits.max_concurrency,
            limits.max_stream_wait,
            refuse=self._refuse_waiting,
            report=partial(self._report_starved, "threads"),
        )
        self._places = Slots(  # all calls, also those that need no thread
            limits.max_concurrency + limits.max_queue,
            limits.max_stream_wait,
            refuse=lambda: None,  # nobody waits for a place
            report=partial(self._report_starved, "places"),
        )
        self._server = aio.server(**self._options.server_arguments())
        self._server.add_generic_rpc_handlers(list(_rpc_methods(self._offer, self._method, self._describe)))
        self._health = add_tools(self._server, self._offer, self._options, aio=True)
        self.port = bind(self._server, self.host, self._asked_port, self._options.tls)
        await self._server.start()
        for name in (LIVENESS, *ready_names(self._offer)):
            await self._health.set(name, serving())
        return self

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """What can be called, by name."""
        return self._offer.endpoints

    @property
    def address(self) -> str:
        """Host and port, as an `AsyncClient` takes them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def wait(self) -> None:
        """Wait until the server is asked to stop, by `stop()` or SIGTERM, and has."""
        with self._on_sigterm():
            await self._asked.wait()
        await self.stop()

    async def stop(self, grace: float | None = None) -> None:
        """Take no new calls, let those that run end within `grace` seconds, and end."""
        self._asked.set()
        if self._stopped is None:
            self._stopped = asyncio.create_task(self._stop(self._options.grace if grace is None else grace))
        await asyncio.shield(self._stopped)

    async def _stop(self, grace: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
        await asyncio.to_thread(self._calls.close, grace)
        self._threads.close()
        self._places.close()
        self._lane.shutdown(wait=False)

    # --- open streams that hold everything

    def _refuse_waiting(self) -> None:
        for work in self._lane.take_waiting():
            work.fail(held_by_streams(self._options.limits))

    def _report_starved(self, what: str, *, is_starved: bool) -> None:
        """Change the health; called from another thread."""
        if what == "threads" and not any(map(_needs_thread, self.endpoints.values())):
            return  # the calls go on without threads
        asyncio.run_coroutine_threadsafe(self._set_health(what, is_starved=is_starved), self._loop)

    async def _set_health(self, what: str, *, is_starved: bool) -> None:
        (self._starved.add if is_starved else self._starved.discard)(what)
        for name in ready_names(self._offer):
            await self._health.set(name, not_serving() if self._starved else serving())

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    @contextlib.contextmanager
    def _on_sigterm(self) -> Iterator[None]:
        try:
            self._loop.add_signal_handler(signal.SIGTERM, self._asked.set)
        except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or not a system that has them
            yield
            return
        try:
            yield
        finally:
            self._loop.remove_signal_handler(signal.SIGTERM)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the server's loop, and wait for it in a thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # --- what is called

    async def _describe(self, _: bytes, context: Any) -> bytes:
        try:
            check_caller(self._options.authorize, DESCRIBE, context)
        except Exception as error:  # noqa: BLE001
            await _abort(context, status_of(error))
        return self._offer.description

    @contextlib.contextmanager
    def _counted(self, *, is_unary: bool = False) -> Iterator[None]:
        """Let a call in, if there are not too many."""
        limits = self._options.limits
        if self._inside >= limits.max_concurrency + limits.max_queue:
            raise too_many(limits)
        self._inside += 1
        try:
            with self._places.hold(), self._places.end_by_itself() if is_unary else contextlib.nullcontext():
                yield
        finally:
            self._inside -= 1

    def _method(self, offered: Offered) -> Callable[..., Any]:
        async def unary(data: bytes, context: Any) -> bytes:
            try:
                with self._counted(is_unary=True):
                    return await self._answer(offered.endpoint, data, context)
            except Exception as error:  # noqa: BLE001 - the caller is told, and the server lives on
                status = status_of(error)
            await _abort(context, status)
            return b""

        async def stream(messages: Any, context: Any) -> AsyncIterator[bytes]:
            try:
                with self._counted():
                    async for message in self._stream(offered, messages, context):
                        yield message
            except Exception as error:  # noqa: BLE001
                status = status_of(error)
            else:
                return
            await _abort(context, status)

        async def gathered(messages: Any, context: Any) -> bytes:
            return b"".join([message async for message in stream(messages, context)])

        if not any(offered.streams):
            return unary
        return stream if offered.streams[1] else gathered

    async def _answer(self, endpoint: Endpoint, data: bytes, context: Any) -> bytes:
        check_caller(self._options.authorize, endpoint.name, context)
        with self._calls.budget.account() as account:
            account.take(len(data))
            if endpoint.batched:
                value = await asyncio.wrap_future(self._calls.submit(endpoint, data))
            elif endpoint.is_async:
                value = await self._awaited(endpoint, endpoint.takes.receive(data, OPTIONS))
            else:
                return await asyncio.wrap_future(self._lane.submit(self._answer_in_thread, endpoint, data))
            return self._calls.encode(endpoint, value)

    def _answer_in_thread(self, endpoint: Endpoint, data: bytes) -> bytes:
        with self._threads.end_by_itself():
            return self._calls.answer(endpoint, data)

    async def _awaited(self, endpoint: Endpoint, value: Any) -> Any:
        try:
            return await endpoint.function(value)
        except REFUSALS:
            raise
        except FAILURES as error:
            raise function_failed(endpoint.name, error) from error

    async def _stream(self, offered: Offered, messages: Any, context: Any) -> AsyncIterator[bytes]:
        check_caller(self._options.authorize, offered.endpoint.name, context)
        single: Any = _Blocking(messages, self._loop) if offered.streams[0] else [messages]
        with self._calls.budget.account() as account:
            made = self._calls.stream(offered.endpoint, single, account, framed=offered.framed)
            step = None
            try:
                while True:
                    step = self._lane.submit(next, made, _DONE)
                    message = await asyncio.wrap_future(step)
                    if message is _DONE:
                        return
                    yield message
            finally:
                if step is not None:
                    step.add_done_callback(lambda _: made.close())  # which must not happen while it runs


def serve_async(service: Any, host: str = "127.0.0.1", port: int = 0, **how: Unpack[Serving]) -> AsyncServer:
    """Serve on the running event loop, inside of `async with`; else as `serve` does."""
    options = ServeOptions.of("serve_async", how)
    return AsyncServer(make_offer(service, options.limits, options.name, options.previous), host, port, options)


def _needs_thread(endpoint: Endpoint) -> bool:
    """Whether calls of an endpoint wait for a thread: those of plain functions, and streams."""
    return not endpoint.is_unary or not (endpoint.is_async or endpoint.batched)


class _Blocking(Iterator[bytes]):
    """The messages of a call, read from a thread."""

    def __init__(self, messages: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._messages, self._loop = messages, loop
        self._iterator: Any = None

    def __next__(self) -> bytes:
        async def read() -> Any:
            if self._iterator is None:  # not before: gRPC's iterator warns if nothing is ever read from it
                self._iterator = aiter(self._messages)
            return await anext(self._iterator, _DONE)

        message = asyncio.run_coroutine_threadsafe(read(), self._loop).result()
        if message is _DONE:
            raise StopIteration
        return message  # type: ignore[no-any-return]


async def _abort(context: Any, status: Status) -> None:
    await context.abort(grpc.StatusCode[status.code], status.message, ((KIND, status.kind),))
