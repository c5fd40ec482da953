"""Calls of served functions: values, streams, errors and types."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.errors import (
    DecodeError,
    DocumentTypeError,
    FunctionError,
    OptionError,
    PathError,
    SchemaError,
    ServiceError,
    ServiceLimitError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from quire.services import AsyncClient, Client, Limits, Server, endpoint, serve, serve_async, service_proto
from quire.typing import NdArray, float32
from tests.services import sample_service
from tests.services.sample_service import EVERYTHING, Picture, Score, pictures

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(EVERYTHING, limits=Limits(max_message_bytes=100_000)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


# --- calls


def test_call_returns_what_the_function_returns(client: Client) -> None:
    docs = pictures(3)
    answer = client.embed(docs)
    assert type(answer) is DocumentArray[Picture]
    assert answer.identical(sample_service.embed(pictures(3)))
    assert docs[0].embedding is None  # the argument is not changed


def test_batches_and_single_documents_can_be_sent(client: Client) -> None:
    doubled = client.double(pictures(3).stack())
    assert doubled.pixels.tolist() == [[0] * 4, [2] * 4, [4] * 4]
    assert client.rate(pictures(3)[2]) == Score(value=8, of="2")


def test_client_converts_between_rows_and_columns(client: Client) -> None:
    assert client.embed(pictures(2).stack()).label == ["0", "1"]
    assert client.double(list(pictures(2))).label == ["0", "1"]


def test_call_accepts_empty_array(client: Client) -> None:
    assert client.embed(pictures(0)) == pictures(0)


def test_client_lists_endpoint_signatures(client: Client) -> None:
    signatures = client.endpoints()
    assert signatures.keys() == {function.__name__ for function in EVERYTHING}
    assert signatures["total"] == "total(a stream of DocumentArray[Picture]) -> Score"


def test_async_functions_can_be_served(client: Client) -> None:
    assert client.later(pictures(2)) == sample_service.embed(pictures(2))
    assert [score.value for score in client.running_later(pictures(3))] == [0, 4, 12]


# --- streams and large values


def test_array_larger_than_a_message_is_sent_in_parts(client: Client) -> None:
    docs = pictures(5_000)
    assert len(docs.to_bytes()) > 100_000
    answer = client.embed(docs)
    assert answer.label == docs.label
    assert np.array_equal(np.stack(answer.embedding), np.stack(docs.pixels)[:, :2] * 2)


class Long(BaseDocument):
    text: str


def echo(doc: Long) -> Long:
    return doc


def test_document_larger_than_a_message_is_sent_in_parts() -> None:
    with serve(echo, limits=Limits(max_message_bytes=1_000)) as server, Client(server.address) as client:
        assert client.echo(Long(text="x" * 50_000)).text == "x" * 50_000


def test_streams_work_in_both_directions(client: Client) -> None:
    assert [score.value for score in client.running(pictures(4))] == [0, 4, 12, 24]
    assert [doc.label for doc in client.spread(pictures(3))] == ["0", "1", "2"]
    assert client.total([pictures(2), pictures(3)]).of == "5 pictures"
    assert [answer.label for answer in client.embed.stream([pictures(1), pictures(2)])] == [["0"], ["0", "1"]]
    assert list(client.embed.stream([])) == []
    for values in ([None], [pictures(1), None, pictures(2)]):  # None is no end of the stream
        with pytest.raises(DocumentTypeError, match="expected a document, an array or a batch, got NoneType"):
            list(client.embed.stream(values))
    assert client.total([]).of == "0 pictures"


def test_stream_requests_have_backpressure() -> None:
    reached: list[int] = []

    def source() -> Iterator[Picture]:
        for number in range(2_000):
            reached.append(number)
            yield Picture(pixels=np.zeros(4, np.float32), label="x" * 10_000)

    may_continue = threading.Event()

    def first(docs: Iterator[Picture]) -> Iterator[Picture]:
        yield next(docs)
        may_continue.wait(20)
        yield from docs

    with serve(first) as server, Client(server.address) as client:
        answers = client.first(source())
        next(answers)
        before = -1
        while before != len(reached):  # until no more values are taken
            before = len(reached)
            threading.Event().wait(0.3)
        assert len(reached) < 1_000  # the windows of HTTP/2 are full
        may_continue.set()
        assert sum(1 for _ in answers) == 1_999


def test_stream_answers_have_backpressure() -> None:
    produced: list[int] = []

    def many(doc: Picture) -> Iterator[Picture]:
        for number in range(20_000):
            produced.append(number)
            yield Picture(pixels=doc.pixels, label="x" * 10_000)

    with serve(many) as server, Client(server.address) as client:
        answers = client.many(pictures(1)[0])
        next(answers)
        before = -1
        while before != len(produced):
            before = len(produced)
            threading.Event().wait(0.3)
        assert len(produced) < 10_000  # gRPC's own buffers grow with the delay of the connection
        answers.close()


def test_closing_a_stream_ends_the_function() -> None:
    ended = threading.Event()

    def forever(doc: Picture) -> Iterator[Picture]:
        try:
            while True:
                yield doc
        finally:
            ended.set()

    with serve(forever) as server, Client(server.address) as client:
        answers = client.forever(pictures(1)[0])
        next(answers)
        answers.close()
        assert ended.wait(10)


def test_error_of_stream_source_is_raised_unchanged(client: Client) -> None:
    def source() -> Iterator[Picture]:
        yield pictures(1)[0]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(client.running(source()))


# --- errors


def test_function_error_has_type_and_message_of_the_failure(client: Client) -> None:
    with pytest.raises(FunctionError, match="fail failed: ValueError: no good: 7"):
        client.fail(pictures(1, start=7))


def test_service_error_of_a_function_reaches_the_caller(client: Client) -> None:
    with pytest.raises(ServiceLimitError, match="not 3 today"):
        client.refuse(pictures(3))


def test_result_of_wrong_type_is_a_function_error(client: Client) -> None:
    with pytest.raises(FunctionError, match="lie failed.*Score"):
        client.lie(pictures(1))


def broken(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    raise DecodeError(f"its own file is damaged: {len(docs)}")


@endpoint(max_batch_size=4, max_wait=0)
def broken_batched(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    return broken(docs)


async def broken_async(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    return broken(docs)


def broken_rows(docs: DocumentArray[Picture]) -> Iterator[Picture]:
    yield from broken(docs)


BROKEN = [broken, broken_batched, broken_async, broken_rows]


def test_codec_error_of_a_function_is_its_failure_everywhere() -> None:
    """Bytes that cannot be read are the caller's error only if they came from the caller."""
    message = "broken.* failed: DecodeError: its own file is damaged"
    with serve(BROKEN) as server, Client(server.address) as client:
        for function in BROKEN:
            with pytest.raises(FunctionError, match=message):
                list(client[function.__name__](pictures(1)))

    async def main() -> None:
        async with serve_async(BROKEN) as server, AsyncClient(server.address) as client:
            for function in BROKEN[:3]:
                with pytest.raises(FunctionError, match=message):
                    await client[function.__name__](pictures(1))
            with pytest.raises(FunctionError, match=message):
                [doc async for doc in await client.broken_rows(pictures(1))]

    asyncio.run(main())


def test_unknown_endpoint_error_suggests_nearest_name(client: Client) -> None:
    with pytest.raises(PathError, match="no endpoint 'embedd'. Did you mean 'embed'"):
        client.embedd(pictures(1))


def test_timeout_raises_service_timeout_error(client: Client) -> None:
    with pytest.raises(ServiceTimeoutError) as caught:
        client.slow(DocumentArray[Picture]([Picture(pixels=np.zeros(4, np.float32), label="5")]), timeout=0.05)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert str(caught.value).startswith(f"{client.target} slow: no answer in time.")


def leave(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    raise SystemExit(len(docs))


async def leave_later(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    await asyncio.sleep(0)
    raise SystemExit(len(docs))


def test_system_exit_in_a_function_fails_only_its_call() -> None:
    with serve([leave, leave_later, sample_service.embed]) as server, Client(server.address, timeout=20) as client:
        for called in (client.leave, client.leave_later, client.leave_later):
            with pytest.raises(FunctionError, match="leave.* failed: .*SystemExit: 1"):
                called(pictures(1))
        assert len(client.embed(pictures(1))) == 1


def test_system_exit_on_async_server_fails_only_its_call() -> None:
    async def run() -> None:
        async with (
            serve_async([leave, leave_later, sample_service.embed]) as server,
            AsyncClient(server.address, timeout=20) as client,
        ):
            for called in (client.leave, client.leave_later):
                with pytest.raises(FunctionError, match="leave.* failed: .*SystemExit: 1"):
                    await called(pictures(1))
            assert len(await client.embed(pictures(1))) == 1

    asyncio.run(run())


def test_closed_client_rejects_calls(server: Server) -> None:
    with Client(server.address) as client:
        embed = client.embed
    for call in (lambda: client.embed(pictures(1)), lambda: embed(pictures(1)), lambda: embed.future(pictures(1))):
        with pytest.raises(ServiceError, match="the client is closed"):
            call()

    async def run() -> None:
        async with AsyncClient(server.address) as client:
            await client.embed(pictures(1))
        with pytest.raises(ServiceError, match="the client is closed"):
            await client.embed(pictures(1))

    asyncio.run(run())


def test_client_explains_addresses_with_a_scheme_and_lists_without_documents(client: Client) -> None:
    for scheme in ("http", "https"):
        for client_type in (Client, AsyncClient):
            with pytest.raises(OptionError, match="'host:port', without a scheme"):
                client_type(f"{scheme}://localhost:50051")
    with pytest.raises(DocumentTypeError, match=r"got an empty list: pass DocumentArray\[T\]"):
        client.embed([])
    with pytest.raises(DocumentTypeError, match="got a list of int"):
        client.embed([1])


def test_serve_rejects_object_without_endpoints() -> None:
    with pytest.raises(SchemaError, match="int has no endpoint"):
        serve(3)
    with pytest.raises(SchemaError, match="Picture is a document class, and not a service: serve a function"):
        serve(Picture)


def test_future_can_be_cancelled(client: Client) -> None:
    docs = DocumentArray[Picture]([Picture(pixels=np.zeros(4, np.float32), label="0.5")])
    call = client.slow.future(docs)
    assert call.cancel()
    with pytest.raises(ServiceError, match="the call was cancelled") as caught:
        call.result()
    assert caught.value.code == "CANCELLED"
    assert client.embed.future(pictures(1)).result().label == ["0"]


def test_unreachable_server_error_names_address() -> None:
    with (
        Client("127.0.0.1:1", retries=0, timeout=5) as client,
        pytest.raises(ServiceUnavailableError, match="127.0.0.1:1"),
    ):
        client.embed(pictures(1))


def test_serve_rejects_port_in_use(server: Server) -> None:
    with pytest.raises(ServiceError, match=f"127.0.0.1:{server.port} cannot be opened"):
        serve(sample_service.embed, port=server.port)


# --- schemas of client and server


class Other(BaseDocument):
    pixels: NdArray[float32, 8]
    label: str = ""


class Less(BaseDocument):
    label: str = ""


class Same(BaseDocument):
    """Another class with the fields of Picture."""

    pixels: NdArray[float32, 4]
    label: str = ""
    embedding: NdArray[float32, 2] | None = None


def test_schema_mismatch_error_names_field(client: Client) -> None:
    with pytest.raises(
        SchemaError, match=r"embed: Other does not fit .*Picture.pixels: .*4.* is read, but .*8.* is sent"
    ):
        client.embed(DocumentArray[Other]([Other(pixels=np.zeros(8, np.float32))]))


def test_missing_required_field_error_names_field(client: Client) -> None:
    with pytest.raises(SchemaError, match=r"Picture.pixels: .* is required, and is not sent"):
        client.embed(DocumentArray[Less]([Less()]))


def test_other_class_with_equal_fields_is_accepted_and_returned(client: Client) -> None:
    answer = client.embed(DocumentArray[Same]([Same(pixels=np.ones(4, np.float32))]))
    assert type(answer) is DocumentArray[Same]
    assert answer[0].embedding.tolist() == [2, 2]


def test_call_rejects_value_that_is_no_document(client: Client) -> None:
    with pytest.raises(DocumentTypeError, match="embed: expected a document, an array or a batch, got str"):
        client.embed("docs")


def wrong(docs: DocumentArray[Other]) -> DocumentArray[Other]:
    return docs


def test_client_with_service_checks_its_signatures(server: Server) -> None:
    with Client(server.address, sample_service.embed) as client:
        assert type(client.embed(pictures(1))) is DocumentArray[Picture]
        with pytest.raises(DocumentTypeError, match="embed: expected documents of Picture, got Other"):
            client.embed(DocumentArray[Other]([Other(pixels=np.zeros(8, np.float32))]))


def test_server_names_field_of_unchecked_request(server: Server) -> None:
    """The client did not compare schemas, or did so before the server changed."""
    import grpc

    data = DocumentArray[Other]([Other(pixels=np.zeros(8, np.float32))]).stack().to_bytes()
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/quire.v1.Documents/embed")(data)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "pixels" in caught.value.details()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(docs): return docs", "no type for 'docs'"),
        ("def f(docs: DocumentArray[Picture]): return docs", "no type for 'return'"),
        ("def f(a: Picture, b: Picture) -> Picture: return a", "takes one argument"),
        ("def f(docs: list) -> Picture: return docs", "list cannot be sent"),
        ("def f(docs: 'Missing') -> Picture: return docs", "Missing"),
    ],
)
def test_serve_rejects_unsupported_signatures(source: str, message: str) -> None:
    namespace = {"DocumentArray": DocumentArray, "Picture": Picture}
    exec(source, namespace)
    with pytest.raises(SchemaError, match=message):
        serve(namespace["f"])


class Painter:
    def embed(self, docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        return sample_service.embed(docs)

    def _hidden(self, docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        return docs

    def count(self) -> int:
        return 0


@pytest.mark.parametrize("service", [Painter, Painter()], ids=["class", "object"])
def test_class_serves_its_typed_public_methods(service: object) -> None:
    with serve(service) as server, Client(server.address) as client:
        assert client.endpoints().keys() == {"embed"}
        assert client.embed(pictures(1))[0].embedding.tolist() == [0, 0]


def test_serve_rejects_duplicate_endpoint_names() -> None:
    with pytest.raises(SchemaError, match="two endpoints are called 'embed'"):
        serve([sample_service.embed, Painter])


# --- asyncio


def test_async_server_and_client_support_all_calls() -> None:
    async def main() -> None:
        limits = Limits(max_message_bytes=100_000)
        async with serve_async(EVERYTHING, limits=limits) as server, AsyncClient(server.address) as client:
            docs = pictures(2_000)
            answers = await asyncio.gather(client.embed(docs), client.later(docs), client.double(docs.stack()))
            assert [len(answer) for answer in answers] == [2_000] * 3
            assert (await client.rate(pictures(2)[1])).value == 4
            assert [score.value async for score in await client.running(pictures(3))] == [0, 4, 12]
            assert [score.value async for score in await client.running_later(pictures(3))] == [0, 4, 12]
            assert (await client.total([pictures(2)])).of == "2 pictures"
            assert [answer.label async for answer in client.embed.stream([pictures(1)])] == [["0"]]
            with pytest.raises(DocumentTypeError, match="got NoneType"):
                [answer async for answer in client.embed.stream([pictures(1), None, pictures(2)])]
            with pytest.raises(FunctionError, match="no good"):
                await client.fail(pictures(1))
            with pytest.raises(PathError, match="Did you mean"):
                await client.embedd(pictures(1))
            with pytest.raises(ServiceTimeoutError):
                await client.slow(
                    DocumentArray[Picture]([Picture(pixels=np.zeros(4, np.float32), label="1")]), timeout=0.05
                )

    asyncio.run(main())


def test_cancelling_a_task_cancels_the_call() -> None:
    cancelled = threading.Event()

    async def wait(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return docs

    async def main() -> None:
        async with serve_async(wait) as server, AsyncClient(server.address) as client:
            task = asyncio.create_task(client.wait(pictures(1)))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(cancelled.wait, 10)

    asyncio.run(main())


class Embedder:
    """A service that needs its model, with a property that needs it too."""

    def __init__(self, model: str) -> None:
        self.model = model

    @property
    def size(self) -> int:
        return len(self.model)

    def embed(self, docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        return sample_service.embed(docs)


def test_client_reads_signatures_without_constructing_the_class() -> None:
    with serve(Embedder("a model")) as server, Client(server.address, Embedder) as client:
        assert client.embed(pictures(3)).identical(sample_service.embed(pictures(3)))
    assert "rpc Embed" in service_proto(Embedder)


# --- endpoints by function


def test_endpoint_by_function_has_types_of_function(client: Client) -> None:
    assert client[sample_service.embed](pictures(2)).identical(sample_service.embed(pictures(2)))
    assert client[sample_service.rate](pictures(3)[2]) == Score(value=8, of="2")
    assert client[sample_service.later](pictures(1))[0].embedding is not None
    assert [score.value for score in client[sample_service.running](pictures(3))] == [0, 4, 12]
    assert client[sample_service.total].stream([pictures(2)]).__next__().of == "2 pictures"


class Thumbnail(BaseDocument):
    pixels: NdArray[float32, 4]
    embedding: NdArray[float32, 2] | None = None


def test_endpoint_by_function_overrides_types_of_answers(client: Client) -> None:
    def embed(docs: DocumentArray[Picture]) -> DocumentArray[Thumbnail]:
        raise AssertionError(f"the client only reads the signature, not {docs}")

    assert type(client.embed(pictures(1))) is DocumentArray[Picture]
    assert type(client[embed](pictures(1))) is DocumentArray[Thumbnail]
    assert type(client.embed(pictures(1))) is DocumentArray[Picture]


def test_endpoint_by_method_of_class() -> None:
    with serve(sample_service.Batches) as server, Client(server.address) as client:
        answer = client[sample_service.Batches.columns](pictures(2).stack())
        assert answer.pixels[0].tolist() == [1, 1, 1, 1]
        assert len(client[sample_service.Batches.awaited](pictures(2))) == 2


def test_unknown_function_names_nearest_endpoint(client: Client) -> None:
    def embbed(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        return docs

    with pytest.raises(PathError, match="no endpoint 'embbed'. Did you mean 'embed'"):
        client[embbed](pictures(1))
    with pytest.raises(SchemaError, match="name it with @endpoint"):
        client[lambda docs: docs]


def test_async_endpoint_by_function(server: Server) -> None:
    async def calls() -> tuple[int, list[float], str]:
        async with AsyncClient(server.address) as client:
            docs = await client[sample_service.embed](pictures(2))
            running = await client[sample_service.running](pictures(3))
            total = await client[sample_service.total]([pictures(2), pictures(1)])
            return len(docs), [score.value async for score in running], total.of

    assert asyncio.run(calls()) == (2, [0, 4, 12], "3 pictures")


# --- dir


def test_dir_of_client_lists_endpoints(server: Server) -> None:
    with Client(server.address) as client:
        assert {"embed", "double", "endpoints"} <= set(dir(client))
    assert "close" in dir(client)


def test_dir_of_client_without_server_lists_known_endpoints() -> None:
    with Client("localhost:1", sample_service.embed) as client:
        assert {"embed", "close"} <= set(dir(client))
    with Client("localhost:1") as client:
        assert "embed" not in dir(client)


def test_dir_of_async_client_lists_endpoints_that_it_knows(server: Server) -> None:
    async def names() -> tuple[list[str], list[str]]:
        async with AsyncClient(server.address) as client:
            before = dir(client)
            await client.endpoints()
            return before, dir(client)

    before, after = asyncio.run(names())
    assert "embed" not in before
    assert "embed" in after


class Contents(BaseDocument):
    raw: bytes
    more: Any
    items: list[bytes]
    vector: NdArray


def pass_contents(doc: Contents) -> Contents:
    return doc


def test_values_in_a_stream_have_types_and_memory_of_their_own() -> None:
    """A value of one part is read from the message, and not from a copy of it."""
    doc = Contents(raw=b"\x00\xff" * 3000, more={"a": b"b" * 5000}, items=[b"1", b"2" * 4000], vector=np.arange(9000.0))
    with serve(pass_contents) as server, Client(server.address) as client:
        for answer in client.pass_contents.stream([doc, doc]):
            assert answer == doc
            assert [type(value) for value in (answer.raw, answer.more["a"], *answer.items)] == [bytes] * 4
            answer.vector[0] = -1
