"""What happens in a call, whichever server it came through: read, check, call the function, write."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from quire.codec import ReadOptions
from quire.errors import QuireError
from quire.services._batching import Batcher
from quire.services._endpoints import Endpoint
from quire.services._errors import FAILURES, REFUSALS, function_failed
from quire.services._limits import Account, Budget, Limits
from quire.services._payloads import Joiner, Side, parts_of

OPTIONS = ReadOptions(unknown="drop", lend=True)
"""How requests are read: nothing is unpickled, no class is imported, and values are checked against their fields.

What a function does not look at is not copied.
"""
_DONE: Any = object()
Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on an event loop, and waits for it in this thread."""


class Calls:
    """The endpoints of a server at work."""

    def __init__(self, endpoints: Mapping[str, Endpoint], limits: Limits, run: Run) -> None:
        """With the endpoints, and what runs those that are async."""
        self.limits, self.budget, self._run = limits, Budget(limits), run
        # Not the event loop's own executor: that has few threads, and each stream that waits for its caller takes one.
        self._readers = ThreadPoolExecutor(limits.max_concurrency, "quire reads")
        self.batchers = {e.name: Batcher(e, self._caller(e)) for e in endpoints.values() if e.batched}

    def _caller(self, endpoint: Endpoint) -> Callable[[Any], Any]:
        if not endpoint.is_async:
            return endpoint.function
        return lambda value: self._run(_contained(endpoint.function(value)))

    # --- one value for one value

    def submit(self, endpoint: Endpoint, data: bytes) -> Future[Any]:
        """Let a request wait for others; its answer is a value."""
        return self.batchers[endpoint.name].submit(lambda: endpoint.takes.receive(data, OPTIONS))

    def answer(self, endpoint: Endpoint, data: bytes) -> bytes:
        """The answer to a request, in bytes."""
        return self.encode(endpoint, self._one(endpoint, endpoint.takes.receive(data, OPTIONS)))

    def _one(self, endpoint: Endpoint, value: Any) -> Any:
        try:
            return self._caller(endpoint)(value)
        except REFUSALS:
            raise
        except FAILURES as error:
            raise function_failed(endpoint.name, error) from error

    def encode(self, endpoint: Endpoint, value: Any) -> bytes:
        """What the function gave, checked, in bytes."""
        try:
            return endpoint.gives.encode(endpoint.gives.check(value, f"{endpoint.name}()"))
        except QuireError as error:
            raise function_failed(endpoint.name, error) from error

    # --- streams

    def stream(
        self, endpoint: Endpoint, messages: Iterable[bytes], account: Account, *, framed: bool
    ) -> Generator[bytes, None, None]:
        """The answers to a stream of requests, in messages; each is made when the one before has been taken."""
        items = Items(messages, endpoint.takes, account, framed=framed)
        for value in self._answers(endpoint, items):
            data = self.encode(endpoint, value)
            if framed:
                yield from parts_of(data, self.limits.max_message_bytes)
            else:
                yield data

    def _answers(self, endpoint: Endpoint, items: Items) -> Iterator[Any]:
        if endpoint.takes.stream:
            yield from self._guarded(endpoint, lambda: self._made(endpoint, items), items)
            return
        for data in items.raw():
            if endpoint.batched:
                yield self.submit(endpoint, data).result()
            else:
                value = endpoint.takes.receive(data, OPTIONS)
                yield from self._guarded(endpoint, lambda value=value: self._made(endpoint, value), items)  # type: ignore[misc]

    def _made(self, endpoint: Endpoint, value: Any) -> Iterator[Any]:
        """Everything that the function gives for a value, or for a stream of values."""
        if endpoint.is_async and endpoint.takes.stream:
            value = _AsyncItems(value, self._readers)
        if not endpoint.gives.stream:
            return iter([self._caller(endpoint)(value)])
        if endpoint.is_async:
            return _stepped(endpoint.function(value), self._run)
        return iter(endpoint.function(value))

    def _guarded(self, endpoint: Endpoint, make: Callable[[], Iterator[Any]], items: Items) -> Iterator[Any]:
        """What the function gives, with its own errors told apart from those of what it reads."""
        made: Any = ()
        try:
            made = make()
            yield from made
        except REFUSALS:
            raise
        except FAILURES as error:
            if items.fault is not None:
                raise items.fault from None
            raise function_failed(endpoint.name, error) from error
        finally:
            if hasattr(made, "close"):
                made.close()

    def close(self, grace: float) -> None:
        """Finish what waits, within so many seconds."""
        for batcher in self.batchers.values():
            batcher.close(grace)
        self._readers.shutdown(wait=False)


class Items(Iterator[Any]):
    """The values in a stream of messages, read when they are asked for."""

    def __init__(self, messages: Iterable[bytes], side: Side, account: Account, *, framed: bool) -> None:
        self.fault: BaseException | None = None
        self._side, self._account, self._framed = side, account, framed
        self._messages = messages
        self._raw = self.raw()

    def raw(self) -> Iterator[bytes]:
        """The bytes of each value; those of the one before are no longer counted."""
        joiner = Joiner(self._account)
        for message in self._messages:
            data = joiner.add(message) if self._framed else self._counted(message)
            if data is not None:
                yield data
                self._account.clear()
        joiner.finish()

    def _counted(self, message: bytes) -> bytes:
        self._account.take(len(message))
        return message

    def __next__(self) -> Any:
        try:
            return self._side.receive(next(self._raw), OPTIONS)
        except StopIteration:
            raise
        except BaseException as error:
            self.fault = error
            raise


class _AsyncItems(AsyncIterator[Any]):
    """Values that are read by a thread, for a function that awaits them."""

    def __init__(self, items: Iterator[Any], threads: ThreadPoolExecutor) -> None:
        self._items, self._threads = items, threads

    async def __anext__(self) -> Any:
        found = await asyncio.get_running_loop().run_in_executor(self._threads, next, self._items, _DONE)
        if found is _DONE:
            raise StopAsyncIteration
        return found


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    """What a function gives on an event loop, which would end where the function asks the process to."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"it asked the process to end (SystemExit: {error}).") from error


def _stepped(source: Any, run: Run) -> Iterator[Any]:
    """An async iterator, step by step from a thread."""

    async def step() -> Any:
        return await anext(source, _DONE)

    try:
        while (found := run(_contained(step()))) is not _DONE:
            yield found
    finally:
        if hasattr(source, "aclose"):
            run(source.aclose())


class LoopThread:
    """An event loop in a thread of its own, which starts when the first coroutine is to be run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it there, and wait for it here."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="quire loop", daemon=True)
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End the loop."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
