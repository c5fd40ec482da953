"""Interceptors, options of gRPC, keepalive and the age of connections."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest

from quire import DocumentArray
from quire.errors import OptionError
from quire.services import AsyncClient, Client, endpoint, serve, serve_async
from tests.services.sample_service import Picture, embed, pictures, running

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


class Record(grpc.ServerInterceptor):  # type: ignore[misc]
    """Records the methods that are called, and on which threads their functions run."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.threads: list[str] = []

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        self.methods.append(details.method.rpartition("/")[2])
        handler = continuation(details)
        if not handler.response_streaming:
            return handler

        def replaced(request: Any, context: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            yield from handler.stream_stream(request, context)

        return grpc.stream_stream_rpc_method_handler(replaced)


class RecordLater(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self) -> None:
        self.methods: list[str] = []

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        self.methods.append(details.method.rpartition("/")[2])
        return await continuation(details)


class CountCalls(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
    def __init__(self) -> None:
        self.methods: list[str] = []

    def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        self.methods.append(details.method.rpartition("/")[2])
        return continuation(details, request)

    intercept_unary_unary = intercept_stream_stream = _intercept


class CountCallsLater(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    def __init__(self) -> None:
        self.methods: list[str] = []

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        self.methods.append(str(details.method).rpartition("/")[2].rstrip("'"))
        return await continuation(details, request)


CALLS = ["Describe", "embed", "running_stream"]


def test_interceptors_of_server_and_client_see_every_call() -> None:
    record, count = Record(), CountCalls()
    with (
        serve([embed, running], interceptors=[record]) as server,
        Client(server.address, interceptors=[count]) as client,
    ):
        assert client.embed(pictures(1)).label == ["0"]
        assert [score.value for score in client.running(iter(pictures(1)))] == [0]
        assert client.embed.future(pictures(1)).result().label == ["0"]
    assert record.methods == count.methods == [*CALLS, "embed"]
    assert all("streams" in name for name in record.threads)  # also if an interceptor replaces the function
    assert record.threads


def test_interceptors_of_asyncio_see_every_call() -> None:
    record, count = RecordLater(), CountCallsLater()

    async def main() -> None:
        async with (
            serve_async([embed, running], interceptors=[record]) as server,
            AsyncClient(server.address, interceptors=[count]) as client,
        ):
            assert (await client.embed(pictures(1))).label == ["0"]
            answers = await client.running(iter(pictures(1)))
            assert [score.value async for score in answers] == [0]

    asyncio.run(main())
    assert record.methods == CALLS
    assert count.methods == CALLS[:2]


def test_interceptors_of_the_other_kind_are_errors() -> None:
    with pytest.raises(OptionError, match="RecordLater is no grpc.ServerInterceptor"):
        serve(embed, interceptors=[RecordLater()])

    async def main() -> None:
        with pytest.raises(OptionError, match="Record is no grpc.aio.*ServerInterceptor"):
            await serve_async(embed, interceptors=[Record()]).start()
        with pytest.raises(OptionError, match="interceptors"):
            AsyncClient("127.0.0.1:1", interceptors=[CountCalls()])

    asyncio.run(main())
    with pytest.raises(OptionError, match="interceptors"):
        Client("127.0.0.1:1", interceptors=[object()])


def test_options_of_grpc_replace_those_of_quire() -> None:
    with serve(embed, options=[("grpc.max_receive_message_length", 1_000)]) as server:
        with grpc.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/quire.v1.Documents/embed")(bytes(2_000))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with Client(server.address, options=[("grpc.primary_user_agent", "school")]) as client:
            assert client.embed(pictures(1)).label == ["0"]
    for options in ([("max", 1)], ["grpc.x"], [("grpc.x",)]):
        with pytest.raises(OptionError, match="is no option of gRPC"):
            serve(embed, options=options)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="is no option of gRPC"):
            Client("127.0.0.1:1", options=options)  # type: ignore[arg-type]


def test_client_reconnects_when_connections_reach_their_age() -> None:
    peers: set[str] = set()

    def record(caller: Any) -> bool:
        peers.add(caller.peer)
        return True

    @endpoint(idempotent=True)
    def answer(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        return docs

    with (
        serve(answer, max_connection_age=0.3, authorize=record, keepalive=None) as server,
        Client(server.address, keepalive=10) as client,
    ):
        while len(peers) < 2:
            assert client.answer(pictures(1)).label == ["0"]


def test_keepalive_and_connection_age_reject_invalid_values() -> None:
    for keepalive in (0, 9, -1, float("nan"), True):
        with pytest.raises(OptionError, match="keepalive="):
            serve(embed, keepalive=keepalive)
        with pytest.raises(OptionError, match="keepalive="):
            Client("127.0.0.1:1", keepalive=keepalive)
    with pytest.raises(OptionError, match="max_connection_age=0"):
        serve(embed, max_connection_age=0)
