"""What happens in a call, on either server: decode the request, call the function, encode its result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from quire.errors import ServiceUnavailableError
from quire.services._batching import Batcher, close_batchers
from quire.services._endpoints import Endpoint
from quire.services._errors import FUNCTION_FAILURES, REFUSALS, as_call_error, log, translate_failures
from quire.services._limits import Limits, RequestAccount, RequestBudget
from quire.services._metrics import Metrics
from quire.services._payloads import PartJoiner, Payload, split_parts

T = TypeVar("T")
_END: Any = object()
_CANCEL_SECONDS = 5.0
"""How long coroutines have to end after they were cancelled."""


class RunCoroutine(Protocol):
    """Runs a coroutine on an event loop, and waits for its result in the calling thread."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


class Calls:
    """Runs the calls of a server's endpoints."""

    def __init__(
        self, endpoints: Mapping[str, Endpoint], limits: Limits, run_coroutine: RunCoroutine, metrics: Metrics
    ) -> None:
        self.limits, self.budget, self._run_coroutine = limits, RequestBudget(limits), run_coroutine
        # Not the event loop's own executor: it has few threads, and each stream that waits for its caller takes one.
        self._readers = ThreadPoolExecutor(limits.max_streams, "quire reads")
        self._batchers = {
            endpoint.name: Batcher(endpoint, self._blocking_function(endpoint), metrics)
            for endpoint in endpoints.values()
            if endpoint.batched
        }

    def _blocking_function(self, endpoint: Endpoint) -> Callable[[Any], Any]:
        """Return the endpoint's function, or for a coroutine function one that waits for the result."""
        if not endpoint.is_async:
            return endpoint.function
        return lambda value: self._run_coroutine(_contain_exit(endpoint.function(value)))

    def close(self, grace: float) -> None:
        """Finish the batches that wait, within `grace` seconds."""
        close_batchers(self._batchers.values(), grace)
        self._readers.shutdown(wait=False)

    # --- unary calls

    def batcher(self, endpoint: Endpoint) -> Batcher:
        """Return the batcher of a batched endpoint."""
        return self._batchers[endpoint.name]

    def submit(self, endpoint: Endpoint, data: bytes) -> Future[Any]:
        """Queue a request of a batched endpoint; the future has the value that answers it."""
        return self._batchers[endpoint.name].submit(lambda: endpoint.input.decode_request(data), len(data))

    def answer(self, endpoint: Endpoint, data: bytes) -> bytes:
        """Return the encoded answer to a request."""
        value = endpoint.input.decode_request(data)
        with translate_failures(endpoint.name):
            result = self._blocking_function(endpoint)(value)
        return self.encode(endpoint, result)

    def encode(self, endpoint: Endpoint, value: object) -> bytes:
        """Encode what the function returned; a value of another type than it declares is the function's failure."""
        with translate_failures(endpoint.name):
            return endpoint.output.encode(endpoint.output.convert(value, f"{endpoint.name}()"))

    # --- streams

    def stream(
        self, endpoint: Endpoint, messages: Iterable[bytes], account: RequestAccount, *, framed: bool
    ) -> Generator[bytes, None, None]:
        """Yield the answers to a stream of requests, as messages or (`framed`) as parts of them.

        Each answer is produced when the previous one has been taken, so that a slow caller slows the function down.
        """
        for value in self._answer_stream(endpoint, RequestStream(messages, endpoint.input, account, framed=framed)):
            data = self.encode(endpoint, value)
            if framed:
                yield from split_parts(data, self.limits.max_message_bytes)
            else:
                yield data

    def _answer_stream(self, endpoint: Endpoint, requests: RequestStream) -> Iterator[Any]:
        if endpoint.input.stream:
            yield from self._call_streaming(endpoint, requests, requests)
            return
        # The function takes one value: it is called for each value of the stream, one after the other.
        for data in requests.messages():
            if endpoint.batched:
                yield self.submit(endpoint, data).result()
            else:
                yield from self._call_streaming(endpoint, endpoint.input.decode_request(data), requests)

    def _call_streaming(self, endpoint: Endpoint, argument: Any, requests: RequestStream) -> Iterator[Any]:
        """Yield everything that the function returns for a value, or for a stream of values.

        An error of the requests, which the function only passes on, is raised as it is, and not as the function's.
        """
        results: Any = ()
        try:
            if endpoint.is_async and endpoint.input.stream:
                argument = _AsyncRequests(argument, self._readers)
            if not endpoint.output.stream:
                results = iter([self._blocking_function(endpoint)(argument)])
            elif endpoint.is_async:
                results = _iterate_blocking(endpoint.function(argument), self._run_coroutine)
            else:
                results = iter(endpoint.function(argument))
            yield from results
        except FUNCTION_FAILURES as error:
            failure = requests.error
            if failure is None or isinstance(error, REFUSALS):
                failure = as_call_error(endpoint.name, error)
            raise failure from failure.__cause__
        finally:  # a caller who closes the stream ends the function, whose own `finally` runs here
            if hasattr(results, "close"):
                results.close()


class RequestStream(Iterator[Any]):
    """The values in a stream of messages, decoded when they are asked for."""

    def __init__(self, messages: Iterable[bytes], payload: Payload, account: RequestAccount, *, framed: bool) -> None:
        self.error: BaseException | None = None
        self._payload, self._account, self._framed = payload, account, framed
        self._source = messages
        self._messages = self.messages()

    def messages(self) -> Iterator[bytes]:
        """Yield the bytes of each value; those of the previous value are no longer counted then."""
        joiner = PartJoiner(self._account)
        for message in self._source:
            data: bytes | None = message
            if self._framed:
                data = joiner.add(message)
            else:
                self._account.take(len(message))
            if data is not None:
                yield data
                self._account.clear()
        joiner.finish()

    def __next__(self) -> Any:
        try:
            return self._payload.decode_request(next(self._messages))
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise


class _AsyncRequests(AsyncIterator[Any]):
    """A request stream that a thread reads, for a coroutine function that awaits its values."""

    def __init__(self, requests: Iterator[Any], threads: ThreadPoolExecutor) -> None:
        self._requests, self._threads = requests, threads

    async def __anext__(self) -> Any:
        value = await asyncio.get_running_loop().run_in_executor(self._threads, next, self._requests, _END)
        if value is _END:
            raise StopAsyncIteration
        return value


async def _contain_exit(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine; SystemExit becomes an ordinary error, since it would stop the event loop that runs it."""
    try:
        return await coroutine
    except SystemExit as error:
        raise RuntimeError(f"it asked the process to end (SystemExit: {error}).") from error


def _iterate_blocking(source: AsyncIterator[Any], run_coroutine: RunCoroutine) -> Iterator[Any]:
    """Iterate over an async iterator from a thread."""

    async def step() -> Any:
        return await anext(source, _END)

    try:
        while (value := run_coroutine(_contain_exit(step()))) is not _END:
            yield value
    finally:
        if hasattr(source, "aclose"):
            with suppress(ServiceUnavailableError):  # a loop that was closed has closed its generators
                run_coroutine(source.aclose())


class LoopThread:
    """An event loop in a thread of its own, which is started for the first coroutine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._futures: set[Future[Any]] = set()  # of the coroutines that threads wait for

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for its result; raise ServiceUnavailableError once the loop closes."""
        with self._lock:  # also to hand over the coroutine, so that none is left when the loop stops
            if self._closed:
                coroutine.close()
                raise ServiceUnavailableError("the server is stopping.")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run_loop, args=[self._loop], name="quire loop", daemon=True
                )
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._futures.add(future)
        try:
            return future.result()
        except CancelledError:
            if self._closed:
                raise ServiceUnavailableError("the server is stopping.") from None
            raise
        finally:
            with self._lock:
                self._futures.discard(future)

    def close(self) -> None:
        """Cancel the coroutines that still run, let them clean up, and stop the loop and its thread.

        Coroutines that do not end in time, or that block the loop, are abandoned: the threads that wait for them get
        ServiceUnavailableError. Closing again does nothing.
        """
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed or self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        # A coroutine may stop its own server: the loop then ends when that coroutine returns.
        if self._thread is not threading.current_thread():
            self._thread.join(3 * _CANCEL_SECONDS)  # more than `_cancel_all` takes, unless something blocks the loop
        if self._thread.is_alive():
            log.warning("a coroutine blocks the event loop, and is abandoned")
            self._release_threads()

    @staticmethod
    def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            loop.close()

    async def _cancel_all(self) -> None:
        loop = asyncio.get_running_loop()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            _, running = await asyncio.wait(running, timeout=_CANCEL_SECONDS)
        # Generators between two values run in no task. They are closed after the tasks, which may use them.
        closing = asyncio.ensure_future(loop.shutdown_asyncgens())
        _, unclosed = await asyncio.wait({closing}, timeout=_CANCEL_SECONDS)
        if running or unclosed:
            log.warning("coroutines still run %g s after they were cancelled, and are abandoned", _CANCEL_SECONDS)
        self._release_threads()
        loop.stop()

    def _release_threads(self) -> None:
        """Let the threads that still wait for a coroutine go on; `run` raises the error."""
        with self._lock:
            futures = list(self._futures)
        for future in futures:
            future.cancel()
