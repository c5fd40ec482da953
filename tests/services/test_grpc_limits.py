"""Limits of a server: large, concurrent and malformed requests are refused, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import DocumentArray
from quire.codec._wire import encode_delimited, encode_uint
from quire.errors import OptionError, ServiceLimitError
from quire.services import AsyncClient, Client, Limits, Server, serve, serve_async
from tests.services import sample_service
from tests.services.sample_service import EVERYTHING, Picture, pictures

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")
METHOD = "/quire.v1.Documents/embed"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = Limits(max_message_bytes=20_000, max_request_bytes=50_000)
    with serve([sample_service.embed, sample_service.total], limits=limits) as server:
        yield server


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


class Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


GOOD = pictures(2).stack().to_bytes()
MALFORMED = {
    "noise": b"\xff" * 100,
    "cut": GOOD[:-20],
    "pickle": pickle.dumps(Evil()),
    "pickled value": encode_delimited(3, encode_delimited(4, encode_delimited(26, pickle.dumps(Evil())))),
    "text": b"GET / HTTP/1.1",
    "many rows": GOOD.replace(encode_uint(3, 2), encode_uint(3, (1 << 47) + 1), 1),
    "another class": DocumentArray[sample_service.Score]([sample_service.Score(value=1, of="x")]).stack().to_bytes(),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_messages_are_invalid_arguments(
    channel: Any, server: Server, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    assert code_of(lambda: channel.unary_unary(METHOD)(data)) is grpc.StatusCode.INVALID_ARGUMENT
    parts = [encode_delimited(1, data)]
    assert code_of(lambda: list(channel.stream_stream(METHOD + "_stream")(iter(parts)))) is (
        grpc.StatusCode.INVALID_ARGUMENT
    )
    assert "unpickled" not in capfd.readouterr().out
    with Client(server.address) as client:
        assert client.embed(pictures(1)).label == ["0"]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_corrupted_bytes_are_refused_or_read(channel: Any, data: st.DataObject) -> None:
    """The only outcomes are an answer and INVALID_ARGUMENT: no crash, and no internal error."""
    altered = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        altered[data.draw(st.integers(0, len(altered) - 1))] = data.draw(st.integers(0, 255))
    method = data.draw(st.sampled_from([METHOD, "/Service/Embed"]))
    try:
        channel.unary_unary(method)(bytes(altered))
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()


def test_truncated_stream_is_an_invalid_argument(channel: Any) -> None:
    call = channel.stream_stream(METHOD + "_stream")
    assert (
        code_of(lambda: list(call(iter([encode_uint(2, 1) + encode_delimited(1, GOOD)]))))
        is grpc.StatusCode.INVALID_ARGUMENT
    )


def test_message_over_the_limit_is_refused(channel: Any) -> None:
    assert code_of(lambda: channel.unary_unary(METHOD)(bytes(20_001))) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_request_over_the_limit_is_refused(server: Server) -> None:
    with Client(server.address) as client:
        with pytest.raises(ServiceLimitError, match="max_request_bytes=50000"):
            client.embed(pictures(5_000))
        many = [pictures(500, start=i) for i in range(20)]  # each is below the limit
        assert client.total(many).of == "10000 pictures"


def test_calls_beyond_the_limits_are_refused_and_others_answered() -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def hold(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        begun.release()
        gate.wait(20)
        return docs

    limits = Limits(max_concurrency=2, max_queue=2)
    with serve(hold, limits=limits) as server, Client(server.address) as client:
        calls = [client.hold.future(pictures(1, start=i)) for i in range(4)]  # over one connection, so in order
        begun.acquire()
        begun.acquire()
        with pytest.raises(ServiceLimitError) as caught:
            client.hold(pictures(1), timeout=20)
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        gate.set()
        assert [call.result().label for call in calls] == [["0"], ["1"], ["2"], ["3"]]


def test_requests_beyond_max_pending_bytes_are_refused() -> None:
    gate, begun = threading.Event(), threading.Event()

    def hold(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        begun.set()
        gate.wait(20)
        return docs

    size = len(pictures(100).stack().to_bytes())
    with serve(hold, limits=Limits(max_pending_bytes=int(size * 1.5))) as server, Client(server.address) as client:
        first = client.hold.future(pictures(100))
        assert begun.wait(20)
        with pytest.raises(ServiceLimitError, match="max_pending_bytes"):
            client.hold(pictures(100), timeout=20)
        gate.set()
        assert len(first.result()) == 100
        assert len(client.hold(pictures(100))) == 100  # the bytes were released


def serve_blocking(limits: Limits) -> tuple[Any, threading.Event, threading.Semaphore]:
    """Serve a function that blocks its callers; return the event that lets them go, and one that counts them."""
    gate, begun = threading.Event(), threading.Semaphore(0)

    def hold(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        begun.release()
        gate.wait(20)
        return docs

    return serve(hold, limits=limits), gate, begun


def health_of(channel: Any) -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service="quire.v1.Documents"), timeout=20).status


def test_health_checks_are_answered_while_calls_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    server, gate, begun = serve_blocking(Limits(max_concurrency=1, max_queue=1))
    with server, Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
        calls = [client.hold.future(pictures(1, start=i)) for i in range(2)]
        assert begun.acquire(timeout=20)
        refused = "2 calls are running or waiting already"
        for _ in range(3):
            with pytest.raises(ServiceLimitError, match=refused):
                client.hold(pictures(1), timeout=20)
            assert health_of(channel) == health_pb2.HealthCheckResponse.SERVING
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        with pytest.raises(ServiceLimitError, match=refused):
            list(client.hold.stream([pictures(1)], timeout=20))
        gate.set()
        assert [call.result().label for call in calls] == [["0"], ["1"]]
    assert not caplog.records


def test_cancelled_waiting_call_frees_its_place() -> None:
    server, gate, begun = serve_blocking(Limits(max_concurrency=1, max_queue=1))
    with server, Client(server.address, retries=50) as client:
        first, second = (client.hold.future(pictures(1, start=i)) for i in range(2))
        assert begun.acquire(timeout=20)
        assert second.cancel()
        gate.set()
        assert first.result().label == ["0"]
        for i in range(20):
            assert call_until_admitted(client, pictures(1, start=i)).label == [str(i)]


def call_until_admitted(client: Client, docs: DocumentArray[Picture]) -> Any:
    """Call until there is a free place, which may take a moment."""
    for _ in range(1000):
        with contextlib.suppress(ServiceLimitError):
            return client.hold(docs)
    raise AssertionError("no place is free")


def test_response_over_max_response_bytes_error_suggests_stream(server: Server) -> None:
    message = "the response is larger than max_response_bytes=5000. Ask for fewer documents at a time, with .stream()"
    with Client(server.address, max_response_bytes=5_000) as client:
        with pytest.raises(ServiceLimitError, match=message) as caught:
            client.embed(pictures(200))
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        with pytest.raises(ServiceLimitError, match=message):
            client.embed.future(pictures(200)).result()
        parts = [len(answer) for answer in client.embed.stream(pictures(200).batch(20))]
        assert parts == [20] * 10


def test_max_response_bytes_counts_all_parts(server: Server) -> None:
    whole = len(pictures(1000).to_bytes())
    with Client(server.address, max_response_bytes=30_000) as client:
        assert whole > 30_000
        with pytest.raises(ServiceLimitError, match="max_response_bytes=30000"):
            client.embed(pictures(1000))
        with pytest.raises(ServiceLimitError, match="max_response_bytes=30000"):
            list(client.embed.stream([pictures(1), pictures(1000)]))
        assert len(client.embed(pictures(1))) == 1


def test_async_server_enforces_the_same_limits() -> None:
    async def main() -> None:
        limits = Limits(max_message_bytes=20_000, max_request_bytes=50_000)
        async with serve_async(EVERYTHING, limits=limits) as server, AsyncClient(server.address) as client:
            async with grpc.aio.insecure_channel(server.address) as channel:
                for data in (*MALFORMED.values(), bytes(20_001)):
                    with pytest.raises(grpc.RpcError) as caught:
                        await channel.unary_unary(METHOD)(data)
                    large = len(data) > 20_000
                    assert caught.value.code().name == ("RESOURCE_EXHAUSTED" if large else "INVALID_ARGUMENT")
            with pytest.raises(ServiceLimitError, match="max_request_bytes"):
                await client.embed(pictures(5_000))
            assert (await client.embed(pictures(1))).label == ["0"]
            async with AsyncClient(server.address, max_response_bytes=15_000) as small:
                for number in (400, 900):
                    with pytest.raises(ServiceLimitError, match="max_response_bytes=15000"):
                        await small.embed(pictures(number))

    asyncio.run(main())


def test_async_server_answers_health_checks_while_calls_are_refused() -> None:
    async def main() -> None:
        gate, begun = asyncio.Event(), asyncio.Semaphore(0)

        async def hold(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
            begun.release()
            await gate.wait()
            return docs

        limits = Limits(max_concurrency=1, max_queue=1)
        async with serve_async(hold, limits=limits) as server, AsyncClient(server.address) as client:
            await client.contract()
            calls = [asyncio.create_task(client.hold(pictures(1, start=i))) for i in range(2)]
            for _ in calls:
                await asyncio.wait_for(begun.acquire(), 20)
            async with grpc.aio.insecure_channel(server.address) as channel:
                for _ in range(3):
                    with pytest.raises(ServiceLimitError, match="2 calls are running or waiting already"):
                        await client.hold(pictures(1))
                    check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
                    assert (await check).status == health_pb2.HealthCheckResponse.SERVING
            gate.set()
            assert [answer.label for answer in await asyncio.gather(*calls)] == [["0"], ["1"]]
            assert (await client.hold(pictures(1))).label == ["0"]

    asyncio.run(main())


# --- open streams on every thread


@contextlib.contextmanager
def open_streams(client: Client, name: str, number: int) -> Iterator[list[Callable[[], None]]]:
    """Open idle streams that have had one answer, and yield functions that end them."""
    ends: list[Callable[[], None]] = []
    try:
        for _ in range(number):
            requests: queue.SimpleQueue[Picture | None] = queue.SimpleQueue()
            answers = client[name](iter(requests.get, None), timeout=300)
            requests.put(pictures(1)[0])
            next(answers)
            ends.append(partial(_end_stream, requests, answers))
        yield ends
    finally:
        for end in ends:
            end()


def _end_stream(requests: queue.SimpleQueue[Picture | None], answers: Iterator[Any]) -> None:
    requests.put(None)
    assert not list(answers)


def wait_until(check: Callable[[], bool]) -> None:
    """Wait for a lasting state, until the timeout of the test."""
    while not check():
        time.sleep(0.02)


@contextlib.contextmanager
def run_server(kind: str, service: Any, limits: Limits) -> Iterator[str]:
    """Run a server on threads, or on an event loop in a thread, and yield its address."""
    if kind == "threads":
        with serve(service, limits=limits) as server:
            yield server.address
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        started = asyncio.run_coroutine_threadsafe(serve_async(service, limits=limits).start(), loop).result()
        try:
            yield started.address
        finally:
            asyncio.run_coroutine_threadsafe(started.stop(), loop).result()
            asyncio.run_coroutine_threadsafe(loop.shutdown_asyncgens(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_idle_streams_on_every_thread_refuse_calls_and_change_health(kind: str) -> None:
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(run_server(kind, [sample_service.embed, sample_service.running], Limits()))
        client = stack.enter_context(Client(address))
        stub = health_pb2_grpc.HealthStub(stack.enter_context(grpc.insecure_channel(address)))

        def statuses() -> list[int]:
            names = ("", "readiness", "quire.v1.Documents", "liveness")
            return [stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status for name in names]

        ends = stack.enter_context(open_streams(client, "running", Limits().max_concurrency))
        message = r"open streams hold all 64 threads .*max_stream_wait.* Close streams .* Limits\(max_concurrency="
        waiting = [client.embed.future(pictures(1), timeout=300) for _ in range(3)]  # before the streams are noticed
        for call in waiting:
            with pytest.raises(ServiceLimitError, match=message) as caught:
                call.result()
            assert caught.value.code == "RESOURCE_EXHAUSTED"
        with pytest.raises(ServiceLimitError, match=message):
            client.embed(pictures(1), timeout=300)
        with pytest.raises(ServiceLimitError, match=message):
            list(client.embed.stream([pictures(1)], timeout=300))
        wait_until(lambda: statuses() == [not_serving] * 3 + [health_pb2.HealthCheckResponse.SERVING])
        ends.pop()()  # one stream ends, and its thread answers
        wait_until(lambda: stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status != not_serving)
        assert client.embed(pictures(1)).label == ["0"]
        assert statuses() == [health_pb2.HealthCheckResponse.SERVING] * 4


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_calls_wait_for_long_unary_calls(kind: str) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def hold(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        begun.release()
        assert gate.wait(200)
        return docs

    limits = Limits(max_concurrency=2, max_queue=4, max_stream_wait=0)
    with (
        run_server(kind, [hold, sample_service.running], limits) as address,
        Client(address) as client,
        grpc.insecure_channel(address) as channel,
        open_streams(client, "running", 1),
    ):
        first = client.hold.future(pictures(1), timeout=300)
        assert begun.acquire(timeout=200)
        second = client.hold.future(pictures(1, start=1), timeout=300)
        for _ in range(5):
            time.sleep(0.1)  # longer than it takes to refuse waiting calls
            assert health_of(channel) == health_pb2.HealthCheckResponse.SERVING
        assert not second.done()
        gate.set()
        assert [first.result().label, second.result().label] == [["0"], ["1"]]


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_idle_streams_of_async_functions_do_not_block_each_other(kind: str) -> None:
    """An event loop's own executor has six threads on a machine with two cores."""
    number = min(32, (os.cpu_count() or 1) + 4) + 2
    with (
        run_server(kind, [sample_service.running_later], Limits()) as address,
        Client(address) as client,
        open_streams(client, "running_later", number) as ends,
    ):
        assert len(ends) == number


def test_async_server_reports_streams_on_every_place_as_health() -> None:
    limits = Limits(max_concurrency=2, max_queue=0, max_stream_wait=0.1)

    async def echo(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        return docs

    with run_server("asyncio", [echo, sample_service.running], limits) as address, Client(address) as client:
        assert client.echo(pictures(1)).label == ["0"]
        with open_streams(client, "running", 2), grpc.insecure_channel(address) as channel:
            with pytest.raises(ServiceLimitError, match="2 calls are running"):
                client.echo(pictures(1), timeout=300)
            wait_until(lambda: health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING)
        with grpc.insecure_channel(address) as channel:
            wait_until(lambda: health_of(channel) == health_pb2.HealthCheckResponse.SERVING)


def test_limits_reject_invalid_values() -> None:
    with pytest.raises(OptionError, match="max_concurrency=0: use 1 or more"):
        Limits(max_concurrency=0)
    with pytest.raises(OptionError, match="max_stream_wait=-1: use 0 or more"):
        Limits(max_stream_wait=-1)
