"""OpenTelemetry spans of clients and servers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry import trace

from quire import DocumentArray
from quire.errors import FunctionError
from quire.services import AsyncClient, Client, endpoint, serve, serve_async
from tests.services.sample_service import Picture, Score, pictures

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection", "opentelemetry", "opentelemetry.sdk")


def current_trace() -> str:
    return f"{trace.get_current_span().get_span_context().trace_id:032x}"


def plain(docs: DocumentArray[Picture]) -> DocumentArray[Score]:
    return DocumentArray[Score]([Score(value=0.0, of=current_trace()) for _ in docs])


async def awaited(docs: DocumentArray[Picture]) -> DocumentArray[Score]:
    await asyncio.sleep(0)
    return plain(docs)


def streamed(docs: Iterator[Picture]) -> Iterator[Score]:
    for _ in docs:
        yield Score(value=0.0, of=current_trace())


async def streamed_later(docs: AsyncIterator[Picture]) -> AsyncIterator[Score]:
    async for _ in docs:
        yield Score(value=0.0, of=current_trace())


@endpoint(max_batch_size=4, max_wait=0)
def batched(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    return docs


def broken(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    raise ValueError(f"broken for {len(docs)}")


SERVICE = [plain, awaited, streamed, streamed_later, batched, broken]
NAMES = [function.__name__ for function in SERVICE]


def check_spans(by_name: dict[tuple[str, str], Any], parent: Any, traces: list[str]) -> None:
    trace_id = parent.get_span_context().trace_id
    assert set(traces) == {f"{trace_id:032x}"}  # the functions run in the spans of the server
    for name in NAMES:
        client, server = by_name[name, "CLIENT"], by_name[name, "SERVER"]
        assert client.context.trace_id == server.context.trace_id == trace_id
        assert client.parent.span_id == parent.get_span_context().span_id
        assert server.parent.span_id == client.context.span_id
        assert server.attributes["rpc.method"] == client.attributes["rpc.method"] == name
        is_error = name == "broken"
        assert [span.status.status_code.name == "ERROR" for span in (client, server)] == [is_error] * 2
    assert by_name["broken", "SERVER"].attributes["rpc.grpc.status_code"] == "INTERNAL"
    assert by_name["broken", "SERVER"].attributes["error.type"] == "FunctionError"


def test_spans_of_a_server_are_children_of_the_spans_of_its_clients(spans: Any) -> None:
    with serve(SERVICE, tracing=True) as server, Client(server.address, tracing=True) as client:
        with trace.get_tracer("test").start_as_current_span("parent") as parent:
            traces = [*client.plain(pictures(1)).of, *client.awaited(pictures(1)).of]
            traces += [score.of for score in client.streamed(iter(pictures(2)))]
            traces += [score.of for score in client.streamed_later(iter(pictures(2)))]
            client.batched(pictures(1))
            with pytest.raises(FunctionError):
                client.broken(pictures(1))
        by_name = spans(2 * len(SERVICE) + 1)
    assert len(traces) == 6
    check_spans(by_name, parent, traces)


def test_spans_on_asyncio(spans: Any) -> None:
    async def main() -> None:
        async with (
            serve_async(SERVICE, tracing=True) as server,
            AsyncClient(server.address, tracing=True) as client,
        ):
            with trace.get_tracer("test").start_as_current_span("parent") as parent:
                traces = [*(await client.plain(pictures(1))).of, *(await client.awaited(pictures(1))).of]
                for name in ("streamed", "streamed_later"):
                    traces += [score.of async for score in await client[name](iter(pictures(2)))]
                await client.batched(pictures(1))
                with pytest.raises(FunctionError):
                    await client.broken(pictures(1))
            by_name = await asyncio.to_thread(spans, 2 * len(SERVICE) + 1)
            check_spans(by_name, parent, traces)

    asyncio.run(main())


def test_futures_and_closed_streams_end_their_spans(spans: Any) -> None:
    with serve(SERVICE, tracing=True) as server, Client(server.address, tracing=True) as client:
        client.plain.future(pictures(1)).result()
        answers = client.streamed(iter(pictures(3)))
        next(answers)
        answers.close()
        by_name = spans(4)
    assert by_name["plain", "CLIENT"].status.status_code.name == "UNSET"
    assert by_name["streamed", "CLIENT"].status.status_code.name == "UNSET"
    assert ("streamed", "SERVER") in by_name


def test_nothing_is_recorded_without_the_option(spans: Any) -> None:
    with serve(plain) as server, Client(server.address) as client:
        assert set(client.plain(pictures(1)).of) == {"0" * 32}
    assert not spans(0)


def test_tracing_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ImportError, match=r"quire-ml\[tracing\]"):
        serve(plain, tracing=True)
    with pytest.raises(ImportError, match=r"quire-ml\[tracing\]"):
        Client("127.0.0.1:1", tracing=True)
