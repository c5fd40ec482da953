"""Timeouts of calls, retries, and what happens to coroutines when a server stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from quire import DocumentArray
from quire.errors import (
    OptionError,
    ServiceError,
    ServiceLimitError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from quire.services import AsyncClient, Caller, Client, Limits, Server, _calls, endpoint, serve, serve_async
from quire.services._calls import LoopThread
from quire.services._client import BaseClient
from quire.services._payloads import Payload
from tests.services import sample_service
from tests.services.sample_service import Picture, Score, pictures

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve([sample_service.embed, sample_service.total, sample_service.running]) as server:
        yield server


@pytest.fixture
def silent_address() -> Iterator[str]:
    """The address of a server that does not describe its service before the end of the test."""
    gate = threading.Event()
    with serve(sample_service.embed, authorize=lambda _: gate.wait(60)) as server:
        yield server.address
        gate.set()


# --- the option


@pytest.mark.parametrize("timeout", [0, -1, 0.0, float("nan"), float("inf"), True, "5"])
def test_timeout_must_be_a_positive_number(server: Server, timeout: Any) -> None:
    for client_type in (Client, AsyncClient):
        with pytest.raises(OptionError, match="timeout="):
            client_type(server.address, timeout=timeout)
    with Client(server.address) as client:
        embed = client.embed
        for call in (embed, embed.future, lambda docs, timeout: embed.stream([docs], timeout=timeout)):
            with pytest.raises(OptionError, match=f"timeout={timeout!r}: use a positive number of seconds"):
                call(pictures(1), timeout=timeout)

    async def main() -> None:
        async with AsyncClient(server.address) as client:
            with pytest.raises(OptionError, match="timeout="):
                await client.embed(pictures(1), timeout=timeout)
            with pytest.raises(OptionError, match="timeout="):
                client.embed.stream([pictures(1)], timeout=timeout)

    asyncio.run(main())


def test_client_without_timeout_waits_for_the_answer(server: Server) -> None:
    with Client(server.address, timeout=None) as client:
        assert client.embed(pictures(1)).label == ["0"]
        assert client.total([pictures(2)]).of == "2 pictures"
        assert client.embed(pictures(1), timeout=60).label == ["0"]


# --- what it limits


def test_timeout_of_a_call_limits_reading_the_description(silent_address: str) -> None:
    with Client(silent_address, timeout=300) as client:
        for call in (
            client.embed,
            client.embed.future,
            lambda docs, timeout: next(client.embed.stream([docs], timeout=timeout)),
        ):
            with pytest.raises(ServiceTimeoutError, match="no answer in time"):
                call(pictures(1), timeout=0.2)

    async def main() -> None:
        async with AsyncClient(silent_address, timeout=300) as client:
            with pytest.raises(ServiceTimeoutError):
                await client.embed(pictures(1), timeout=0.2)
            with pytest.raises(ServiceTimeoutError):
                await anext(client.embed.stream([pictures(1)], timeout=0.2))

    asyncio.run(main())


def test_timeout_of_a_call_limits_waiting_for_another_thread(server: Server) -> None:
    with Client(server.address) as client:
        with client._lock, pytest.raises(ServiceTimeoutError):  # as while another thread reads the description
            client.embed(pictures(1), timeout=0.1)
        assert client.embed(pictures(1), timeout=60).label == ["0"]


def test_client_timeout_limits_calls_with_a_stream_of_values(server: Server) -> None:
    gate = threading.Event()

    def values() -> Iterator[DocumentArray[Picture]]:
        yield pictures(1)
        gate.wait(60)

    with Client(server.address) as client:
        client.contract()
        client.timeout = 0.3
        with pytest.raises(ServiceTimeoutError, match="total: no answer in time"):
            client.total(values())
        gate.set()

    async def values_later() -> AsyncIterator[DocumentArray[Picture]]:
        yield pictures(1)
        await asyncio.sleep(60)

    async def main() -> None:
        async with AsyncClient(server.address) as client:
            await client.contract()
            client.timeout = 0.3
            with pytest.raises(ServiceTimeoutError, match="total: no answer in time"):
                await client.total(values_later())

    asyncio.run(main())


def test_timeout_of_a_stream_limits_waiting_for_the_first_value(server: Server) -> None:
    closed = []

    async def no_values() -> AsyncIterator[Picture]:
        try:
            await asyncio.sleep(3600)
            yield pictures(1)[0]
        finally:
            closed.append(True)

    async def failing_values() -> AsyncIterator[Picture]:
        raise TimeoutError("of the values")
        yield

    async def main() -> None:
        async with AsyncClient(server.address) as client:
            for answers in (
                client.running.stream(no_values(), timeout=0.1),
                await client.running(no_values(), timeout=0.1),
            ):
                with pytest.raises(ServiceTimeoutError, match="no value to send in time"):
                    await asyncio.wait_for(anext(answers), 60)
            with pytest.raises(ServiceTimeoutError):
                await asyncio.wait_for(client.total(no_values(), timeout=0.1), 60)
            with pytest.raises(TimeoutError, match="of the values"):
                await anext(client.running.stream(failing_values(), timeout=60))

    asyncio.run(main())
    assert len(closed) == 3


def test_timeout_of_a_stream_includes_reading_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe_slowly(caller: Caller) -> bool:
        if caller.endpoint == "Describe":
            threading.Event().wait(0.3)
        return True

    timeouts: list[float] = []
    method_of = BaseClient._method

    def record_timeout(self: BaseClient, name: str, *, stream: bool = False) -> Any:
        method = method_of(self, name, stream=stream)

        def call(requests: Any, *, timeout: float, **arguments: Any) -> Any:
            timeouts.append(timeout)
            return method(requests, timeout=timeout, **arguments)

        return call

    monkeypatch.setattr(BaseClient, "_method", record_timeout)
    with serve(sample_service.running, authorize=describe_slowly) as server:
        with Client(server.address) as client:
            assert [score.value for score in client.running(iter(pictures(1)), timeout=60)] == [0]

        async def main() -> None:
            async with AsyncClient(server.address) as client:
                answers = await client.running(iter(pictures(1)), timeout=60)
                assert [score.value async for score in answers] == [0]

        asyncio.run(main())
    assert [timeout > 59.7 for timeout in timeouts] == [
        True,
        False,
    ] * 2  # of the description, and of the stream after it


def test_stream_of_answers_outlives_the_client_timeout(server: Server) -> None:
    """A stream may be open for hours; only a timeout of its own ends it."""
    with Client(server.address) as client:
        client.contract()
        client.timeout = 0.05
        passed = threading.Event()

        def values() -> Iterator[Picture]:
            yield pictures(1)[0]
            passed.wait(0.2)
            yield pictures(2)[1]

        assert [score.value for score in client.running(values())] == [0, 4]
        with pytest.raises(ServiceTimeoutError):
            list(client.running(values(), timeout=0.05))


# --- retries


class Busy:
    """Refuses its first calls."""

    def __init__(self) -> None:
        self.calls = 0

    @endpoint(idempotent=True)
    def later(self, docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        self.calls += 1
        if self.calls < 3:
            raise ServiceLimitError("the queue is larger than max_request_bytes")  # only the attribute decides
        return docs

    @endpoint(idempotent=True)
    def never(self, docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        self.calls += 1
        error = ServiceLimitError(f"{len(docs)} are too many")
        error.retryable = False
        raise error


def test_limit_errors_are_retried_unless_the_call_is_too_large() -> None:
    busy = Busy()
    with serve(busy, limits=Limits(max_request_bytes=20_000)) as server, Client(server.address) as client:
        assert client.later(pictures(1)).label == ["0"]
        assert busy.calls == 3
        with pytest.raises(ServiceLimitError, match="1 are too many") as caught:
            client.never(pictures(1))
        assert (busy.calls, caught.value.retryable) == (4, False)
        with pytest.raises(ServiceLimitError, match="max_request_bytes") as caught:
            client.later(pictures(2_000))
        assert not caught.value.retryable

    async def main() -> None:
        service = Busy()
        async with serve_async(service) as server, AsyncClient(server.address) as client:
            assert (await client.later(pictures(1))).label == ["0"]
            with pytest.raises(ServiceLimitError) as caught:
                await client.never(pictures(1))
            assert (service.calls, caught.value.retryable) == (4, False)
        async with (
            serve_async(sample_service.embed) as server,
            AsyncClient(server.address, max_response_bytes=2_000) as client,
        ):
            with pytest.raises(ServiceLimitError, match="max_response_bytes") as caught:
                await client.embed(pictures(200))
            assert not caught.value.retryable

    asyncio.run(main())


# --- coroutines of a server


def test_stopped_server_cancels_coroutines_and_lets_them_clean_up() -> None:
    begun, cleaned = threading.Event(), []

    async def hold(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            cleaned.append("function")
        return docs

    async def count(docs: DocumentArray[Picture]) -> AsyncIterator[Score]:
        try:
            for number in range(1_000_000):
                yield Score(value=number, of=docs[0].label)
        finally:
            cleaned.append("generator")

    with serve([hold, count]) as server, Client(server.address) as client:
        answers = client.count(pictures(1))
        assert next(answers).value == 0
        call = client.hold.future(pictures(1))
        assert begun.wait(20)
        server.stop(grace=0)
        assert sorted(cleaned) == ["function", "generator"]
        assert not any(thread.name == "quire loop" for thread in threading.enumerate())
        with pytest.raises(ServiceError):
            call.result(20)


def run_in_threads(loop: LoopThread, *coroutines: Coroutine[Any, Any, Any]) -> list[Future[Any]]:
    """Run coroutines on a loop, and return the futures of the threads that wait for them."""
    pool = ThreadPoolExecutor(len(coroutines))
    futures = [pool.submit(loop.run, coroutine) for coroutine in coroutines]
    pool.shutdown(wait=False)
    return futures


def test_closed_loop_releases_threads_of_coroutines_that_ignore_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_CANCEL_SECONDS", 0.1)
    begun, ended = threading.Event(), threading.Event()

    async def ignore_cancellation() -> None:
        begun.set()
        while not ended.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(600)

    loop = LoopThread()
    [waiting] = run_in_threads(loop, ignore_cancellation())
    assert begun.wait(20)
    loop.close()
    with pytest.raises(ServiceUnavailableError, match="stopping"):
        waiting.result(20)
    assert not any(thread.name == "quire loop" for thread in threading.enumerate())
    ended.set()


def test_closed_loop_releases_threads_while_a_coroutine_blocks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_CANCEL_SECONDS", 0.1)
    begun, gate = threading.Event(), threading.Event()

    async def block() -> None:
        begun.set()
        gate.wait(60)

    loop = LoopThread()
    waiting = run_in_threads(loop, block(), asyncio.sleep(0), asyncio.sleep(600))
    assert begun.wait(20)
    loop.close()
    errors = [future.exception(20) for future in waiting]
    assert any(isinstance(error, ServiceUnavailableError) for error in errors)
    gate.set()


def test_loop_is_closed_once_and_runs_nothing_afterwards() -> None:
    loop = LoopThread()
    assert loop.run(asyncio.sleep(0, "result")) == "result"
    for _ in range(3):
        loop.close()
        with pytest.raises(ServiceUnavailableError, match="stopping"):
            loop.run(asyncio.sleep(0))
    unused = LoopThread()
    unused.close()
    unused.close()


def test_function_may_stop_its_own_server() -> None:
    async def stop_async(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        servers[0].stop(grace=0)
        return docs

    @endpoint(max_batch_size=4)
    def stop_batched(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        servers[0].stop(grace=0)
        return docs

    for function in (stop_async, stop_batched):
        servers = [serve(function)]
        with Client(servers[0].address) as client, pytest.raises(ServiceError):
            client[function.__name__](pictures(1))
        servers[0].stop()


def test_async_server_decodes_large_requests_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding waits here until another call has been answered."""
    decoding, answered = threading.Event(), threading.Event()
    decode = Payload.decode_request

    def decode_slowly(self: Payload, data: bytes) -> Any:
        if len(data) > 100_000:
            decoding.set()
            assert answered.wait(20)
        return decode(self, data)

    @endpoint(max_batch_size=8, max_wait=0)
    def batched(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        return docs

    monkeypatch.setattr(Payload, "decode_request", decode_slowly)

    async def main() -> None:
        async with serve_async([sample_service.later, batched]) as server, AsyncClient(server.address) as client:
            for called in (client.later, client.batched):
                decoding.clear()
                answered.clear()
                slow = asyncio.create_task(called(pictures(5_000)))
                assert await asyncio.to_thread(decoding.wait, 20)
                assert (await called(pictures(1))).label == ["0"]
                answered.set()
                assert len(await slow) == 5_000

    asyncio.run(main())
