"""Limits of a server: large, concurrent and malformed requests are refused, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import DocumentArray
from quire.codec._wire import encode_delimited, encode_uint
from quire.errors import OptionError, ServiceLimitError, ServiceTimeoutError, ServiceUnavailableError
from quire.services import AsyncClient, Client, Limits, Server, serve, serve_async
from quire.services._errors import rpc_to_error
from quire.services._payloads import split_parts
from tests.services import sample_service
from tests.services.load_generator import ROOT, resident_memory
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


def test_request_over_the_limit_is_refused_by_the_server(channel: Any) -> None:
    parts = split_parts(pictures(5_000).stack().to_bytes(), 20_000)
    with pytest.raises(grpc.RpcError, match="max_request_bytes=50000") as caught:
        list(channel.stream_stream(METHOD + "_stream")(parts))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_request_over_the_limit_is_refused_before_it_is_sent() -> None:
    with serve(EVERYTHING, limits=Limits(max_request_bytes=50_000)) as server, Client(server.address) as client:
        client.contract()
        server.stop()  # from here on, sending anything is a ServiceUnavailableError
        for call in (client.embed, client.embed.future, lambda docs: list(client.embed.stream([docs]))):
            with pytest.raises(ServiceLimitError, match="max_request_bytes=50000"):
                call(pictures(5_000))


def test_request_limit_applies_to_each_value_of_a_stream(server: Server) -> None:
    with Client(server.address) as client:
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
            with grpc.insecure_channel(server.address) as other:  # a client that does not know the limit
                parts = split_parts(pictures(5_000).stack().to_bytes(), 20_000)
                answers = other.stream_stream(METHOD + "_stream")(parts)
                with pytest.raises(grpc.RpcError, match="max_request_bytes=50000"):
                    await asyncio.to_thread(list, answers)
            assert (await client.embed(pictures(1))).label == ["0"]
            async with AsyncClient(server.address, max_response_bytes=15_000) as small:
                for number in (400, 900):
                    with pytest.raises(ServiceLimitError, match="max_response_bytes=15000"):
                        await small.embed(pictures(number))

    asyncio.run(main())


def test_async_client_reports_a_call_that_ends_while_it_is_sent_as_unavailable() -> None:
    metadata = grpc.aio.Metadata()
    rpc = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, details="Internal error from Core")
    error = rpc_to_error(rpc, "localhost:1 embed")
    assert isinstance(error, ServiceUnavailableError)
    assert str(error) == "localhost:1 embed: the server ended the call while the request was being sent."


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
def test_streams_beyond_the_limit_are_refused_and_unary_calls_answered(kind: str) -> None:
    limits = Limits(max_concurrency=2, max_streams=3, max_stream_wait=0.2)
    message = r"3 streams are open \(max_streams\), and none has ended .*max_stream_wait.* Limits\(max_streams="
    with (
        run_server(kind, [sample_service.embed, sample_service.running], limits) as address,
        Client(address) as client,
        grpc.insecure_channel(address) as channel,
        open_streams(client, "running", 3) as ends,
    ):
        waiting = client.running(iter(pictures(1)), timeout=300)
        with pytest.raises(ServiceLimitError, match=message) as caught:
            next(waiting)
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        with pytest.raises(ServiceLimitError, match=message):  # now at once
            list(client.embed.stream([pictures(1)], timeout=300))
        calls = [client.embed.future(pictures(1, start=i), timeout=300) for i in range(20)]
        assert [call.result().label for call in calls] == [[str(i)] for i in range(20)]
        assert health_of(channel) == health_pb2.HealthCheckResponse.SERVING
        ends.pop()()  # one stream ends, and another one takes its place

        def is_admitted() -> bool:
            with contextlib.suppress(ServiceLimitError):
                return [score.value for score in client.running(iter(pictures(2)), timeout=300)] == [0, 4]
            return False

        wait_until(is_admitted)


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_open_streams_change_the_health_of_services_without_unary_endpoints(kind: str) -> None:
    limits = Limits(max_streams=2, max_stream_wait=0.1)
    with (
        run_server(kind, [sample_service.running], limits) as address,
        Client(address) as client,
        grpc.insecure_channel(address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        def statuses() -> list[int]:
            names = ("", "readiness", "quire.v1.Documents", "liveness")
            return [stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status for name in names]

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        with open_streams(client, "running", 2):
            wait_until(lambda: statuses() == [not_serving] * 3 + [serving])
        wait_until(lambda: statuses() == [serving] * 4)


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_idle_streams_are_ended(kind: str) -> None:
    limits = Limits(max_streams=2, stream_idle_timeout=0.3)
    services = [sample_service.embed, sample_service.running, sample_service.running_later]
    with run_server(kind, services, limits) as address, Client(address) as client:
        for name in ("running", "running_later"):
            requests: queue.SimpleQueue[Picture | None] = queue.SimpleQueue()
            answers = client[name](iter(requests.get, None), timeout=300)
            requests.put(pictures(1)[0])
            assert next(answers).value == 0
            with pytest.raises(ServiceTimeoutError, match=r"idle for 0.3 s.* Limits\(stream_idle_timeout=") as caught:
                next(answers)
            assert caught.value.code == "DEADLINE_EXCEEDED"
            requests.put(None)
        assert client.embed(pictures(1)).label == ["0"]

        async def main() -> None:
            async def values() -> AsyncIterator[Picture]:
                yield pictures(1)[0]
                await asyncio.sleep(600)

            async with AsyncClient(address) as client:
                answers = await client.running(values(), timeout=300)
                assert (await anext(answers)).value == 0
                with pytest.raises(ServiceTimeoutError, match=r"stream_idle_timeout"):
                    await anext(answers)

        asyncio.run(main())


def test_stream_whose_reader_stops_is_ended() -> None:
    ended = threading.Event()

    def many(doc: Picture) -> Iterator[Picture]:
        try:
            while True:
                yield Picture(pixels=doc.pixels, label="x" * 1_000_000)
        finally:
            ended.set()

    with serve(many, limits=Limits(stream_idle_timeout=0.3)) as server, Client(server.address) as client:
        answers = client.many(pictures(1)[0])
        next(answers)
        assert ended.wait(60)
        with pytest.raises(ServiceTimeoutError, match="idle"):
            list(answers)


def test_function_that_computes_for_long_is_not_idle() -> None:
    def slow(parts: Iterator[Picture]) -> Iterator[Picture]:
        for part in parts:
            time.sleep(1.0)
            yield part

    with serve(slow, limits=Limits(stream_idle_timeout=0.2)) as server, Client(server.address) as client:
        assert [doc.label for doc in client.slow(iter(pictures(2)), timeout=300)] == ["0", "1"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_a_refused_request_is_returned(tmp_path: Path) -> None:
    """In a process of its own, whose memory nothing else uses."""
    program = tmp_path / "server.py"
    program.write_text(
        "import sys\n"
        "from quire.services import Limits, serve\n"
        "from tests.services.sample_service import embed\n"
        "with serve(embed, limits=Limits(max_request_bytes=100 << 20)) as server:\n"
        "    print(server.address, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "QUIRE_SAFE": "0"}
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            with grpc.insecure_channel(process.stdout.readline().strip()) as channel:
                method = channel.stream_stream(METHOD + "_stream")
                with pytest.raises(grpc.RpcError):
                    list(method(iter([encode_uint(2, 1) + encode_delimited(1, bytes(10))])))
                before = resident_memory(process.pid)
                with pytest.raises(grpc.RpcError, match="max_request_bytes"):
                    list(method(split_parts(bytes(120 << 20), 4 << 20)))
                wait_until(lambda: resident_memory(process.pid) - before < 48 << 20)
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_calls_wait_for_long_unary_calls(kind: str) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def hold(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        begun.release()
        assert gate.wait(200)
        return docs

    limits = Limits(max_concurrency=1, max_queue=4, max_stream_wait=0)
    with (
        run_server(kind, [hold], limits) as address,
        Client(address) as client,
        grpc.insecure_channel(address) as channel,
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


def test_calls_whose_requests_do_not_arrive_are_not_waited_for() -> None:
    """A caller who starts unary calls without sending a request holds threads of the server."""
    limits = Limits(max_concurrency=2, max_stream_wait=0.1)
    gate = threading.Event()

    def never() -> Iterator[bytes]:
        gate.wait(100)
        yield GOOD

    with (
        serve(sample_service.embed, limits=limits) as server,
        Client(server.address) as client,
        grpc.insecure_channel(server.address) as channel,
    ):
        client.contract()
        silent = [channel.stream_unary(METHOD).future(never()) for _ in range(2)]
        message = "calls whose request has not arrived hold all 2 threads"

        def is_refused() -> bool:
            try:
                client.embed(pictures(1), timeout=300)
            except ServiceLimitError as error:
                return message in str(error)
            return False  # before the two calls have arrived

        wait_until(is_refused)
        wait_until(lambda: health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING)
        gate.set()
        assert all(call.result(60) for call in silent)
        wait_until(lambda: health_of(channel) == health_pb2.HealthCheckResponse.SERVING)
        assert client.embed(pictures(1)).label == ["0"]


def test_limits_reject_invalid_values() -> None:
    with pytest.raises(OptionError, match="max_concurrency=0: use 1 or more"):
        Limits(max_concurrency=0)
    with pytest.raises(OptionError, match="max_stream_wait=-1: use 0 or more"):
        Limits(max_stream_wait=-1)
    with pytest.raises(OptionError, match="max_streams=0: use 1 or more"):
        Limits(max_streams=0)
    with pytest.raises(OptionError, match="stream_idle_timeout=0: use a positive number"):
        Limits(stream_idle_timeout=0)
    assert Limits(stream_idle_timeout=None).stream_idle_timeout is None
