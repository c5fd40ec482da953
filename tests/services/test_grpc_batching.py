"""Dynamic batching: concurrent calls become one, and each caller gets its own rows."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import (
    DecodeError,
    FunctionError,
    OptionError,
    PathError,
    SchemaError,
    ServiceError,
    ServiceLimitError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from quire.services import AsyncClient, Client, Limits, endpoint, serve, serve_async
from quire.services._batching import Batcher
from quire.services._endpoints import make_endpoint
from quire.typing import NdArray, float32
from tests.services.sample_service import Batches, Picture, pictures

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


def run_concurrently(calls: list[Callable[[], Any]]) -> list[Any]:
    """Return the results or errors of calls that are made at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        wait(futures)
    return [future.exception() or future.result() for future in futures]


@pytest.fixture
def served() -> Iterator[tuple[Batches, Client]]:
    service = Batches()
    with serve(service) as server, Client(server.address) as client:
        yield service, client
        service.gate.set()


@pytest.mark.parametrize("name", ["rows", "columns", "awaited"])
def test_concurrent_calls_are_batched_and_get_their_own_rows(served: tuple[Batches, Client], name: str) -> None:
    service, client = served
    questions = [pictures(1 + i % 2, start=10 * i) for i in range(5)]
    answers = run_concurrently([lambda docs=docs: client[name](docs) for docs in questions])  # type: ignore[misc]
    assert sum(service.sizes) == 7
    assert len(service.sizes) < 5
    for question, answer in zip(questions, answers, strict=True):
        assert list(answer.label) == question.label
        if name != "awaited":
            assert np.stack(list(answer.pixels)).tolist() == (np.stack(question.pixels) + 1).tolist()


def test_batches_never_exceed_max_batch_size(served: tuple[Batches, Client]) -> None:
    service, client = served
    run_concurrently([lambda i=i: client.rows(pictures(3, start=i)) for i in range(9)])  # type: ignore[misc]
    assert max(service.sizes) <= 8
    assert sum(service.sizes) == 27


def test_request_larger_than_a_batch_is_split(served: tuple[Batches, Client]) -> None:
    service, client = served
    assert client.rows(pictures(20)).label == pictures(20).label
    assert service.sizes == [8, 8, 4]


def test_failing_rows_fail_only_their_caller(served: tuple[Batches, Client]) -> None:
    service, client = served
    bad = DocumentArray[Picture]([Picture(pixels=np.zeros(4, np.float32), label="bad")])
    questions = [pictures(1, start=i) for i in range(5)]
    questions.insert(3, bad)
    answers = run_concurrently([lambda docs=docs: client.rows(docs) for docs in questions])  # type: ignore[misc]
    failed = [isinstance(answer, FunctionError) for answer in answers]
    assert failed == [False, False, False, True, False, False]
    assert "a bad one" in str(answers[3])
    for i in (0, 1, 2, 4, 5):  # and no rows were processed twice
        assert answers[i][0].pixels.tolist() == (questions[i][0].pixels + 1).tolist()
    assert max(service.sizes) > 1


class Shapeless(BaseDocument):
    pixels: NdArray


@endpoint(max_batch_size=8, max_wait=0.2)
def double(docs: DocumentBatch[Shapeless]) -> DocumentBatch[Shapeless]:
    docs.pixels = docs.pixels * 2
    return docs


def test_callers_with_different_shapes_share_a_batch() -> None:
    with serve(double) as server, Client(server.address) as client:
        sizes = [3, 5, 3, 7]
        calls = [
            lambda size=size: client.double(DocumentArray[Shapeless]([Shapeless(pixels=np.ones(size))]))  # type: ignore[misc]
            for size in sizes
        ]
        answers = run_concurrently(calls)
    assert [answer[0].pixels.tolist() for answer in answers] == [[2.0] * size for size in sizes]


def test_batched_function_must_return_every_row(served: tuple[Batches, Client]) -> None:
    with pytest.raises(FunctionError, match="short got 2 rows and returned 1"):
        served[1].short(pictures(2))


def test_cancelled_call_is_removed_from_the_queue(
    served: tuple[Batches, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, client = served
    queued: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    submit = Batcher.submit

    def report(self: Batcher, *request: Any) -> Future[Any]:
        future = submit(self, *request)
        queued.put(future)
        return future

    monkeypatch.setattr(Batcher, "submit", report)
    first = client.held.future(pictures(2))
    assert service.begun.wait(20)
    queued.get(timeout=20)
    second = client.held.future(pictures(1))
    in_queue, cancelled = queued.get(timeout=20), threading.Event()
    in_queue.add_done_callback(lambda _: cancelled.set())
    third = client.held.future(pictures(1, start=5))
    queued.get(timeout=20)
    second.cancel()
    assert cancelled.wait(20)
    service.gate.set()
    assert len(first.result()) == 2
    assert third.result().label == ["5"]
    assert service.sizes == [2, 1]


def test_async_server_and_streams_batch_calls() -> None:
    async def main() -> None:
        service = Batches()
        async with serve_async(service) as server, AsyncClient(server.address) as client:
            for name in ("rows", "columns", "awaited"):
                service.sizes.clear()
                answers = await asyncio.gather(*(client[name](pictures(1, start=i)) for i in range(6)))
                assert [list(answer.label) for answer in answers] == [[str(i)] for i in range(6)]
                assert len(service.sizes) < 6
            assert [len(answer) async for answer in client.rows.stream([pictures(1), pictures(2)])] == [1, 2]

    asyncio.run(main())


def test_batched_call_accepts_empty_array(served: tuple[Batches, Client]) -> None:
    assert len(served[1].rows(pictures(0))) == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.sets(st.integers(0, 11)), st.integers(1, 9))
def test_batcher_answers_every_caller_for_any_sizes_and_failures(rows: list[int], bad: set[int], size: int) -> None:
    """For any sizes of requests, failing callers and batch size, in one thread or two."""

    @endpoint(max_batch_size=size, max_wait=0.001, batch_workers=1 + size % 2)
    def work(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        assert len(docs) <= size
        if any(doc.label == "bad" for doc in docs):
            raise ValueError("bad")
        for doc in docs:
            doc.pixels = doc.pixels + 1
        return docs

    batcher = Batcher(make_endpoint(work), work)
    questions = []
    for i, number in enumerate(rows):
        docs = pictures(number, start=100 * i)
        if i in bad and number:
            docs[number // 2].label = "bad"
        questions.append(docs)
    data = [docs.to_bytes() for docs in questions]
    futures = [batcher.submit(lambda d=d: DocumentArray[Picture].from_bytes(d)) for d in data]  # type: ignore[misc]
    for i, (question, future) in enumerate(zip(questions, futures, strict=True)):
        if i in bad and len(question):
            assert isinstance(future.exception(20), FunctionError)
        else:
            answer = future.result(20)
            assert answer.label == question.label
            assert [p.tolist() for p in answer.pixels] == [(p + 1).tolist() for p in question.pixels]
    batcher.close(20)


def test_batcher_opened_again_runs_one_batch_at_a_time() -> None:
    begun, gate, running = threading.Event(), threading.Event(), threading.Lock()
    threads: list[threading.Thread] = []

    @endpoint(max_batch_size=1, max_wait=0)
    def work(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        assert running.acquire(blocking=False), "two batches at once"
        threads.append(threading.current_thread())
        begun.set()
        gate.wait(20)
        running.release()
        return docs

    batcher = Batcher(make_endpoint(work), work)
    abandoned = batcher.submit(lambda: pictures(1))
    assert begun.wait(20)
    batcher.close(0)  # gives up before the function returns
    with pytest.raises(ServiceUnavailableError):
        abandoned.result(0)
    batcher.open()
    futures = [batcher.submit(lambda: pictures(1)) for _ in range(3)]
    assert [thread for thread in threading.enumerate() if thread.name == "quire work"] == threads
    gate.set()
    assert [len(future.result(20)) for future in futures] == [1, 1, 1]
    assert len(set(threads)) == 1
    batcher.close(20)
    assert not threads[0].is_alive()
    batcher.open()
    assert len(batcher.submit(lambda: pictures(1)).result(20)) == 1
    assert threads[-1] is not threads[0]
    batcher.close(20)


def test_closed_batcher_fails_calls_that_its_function_keeps_waiting() -> None:
    begun, gate, threads = threading.Event(), threading.Event(), []

    @endpoint(max_batch_size=1, max_wait=0)
    def work(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        threads.append(threading.current_thread())
        begun.set()
        gate.wait(60)
        return docs

    batcher = Batcher(make_endpoint(work), work)
    futures = [batcher.submit(lambda: pictures(1)) for _ in range(3)]
    assert begun.wait(20)
    batcher.close(0)
    for future in futures:  # the running call, and those in the queue
        with pytest.raises(ServiceUnavailableError, match="work: the server is stopping"):
            future.result(0)
    with pytest.raises(ServiceUnavailableError, match="work: the server is stopping"):
        batcher.submit(lambda: pictures(1))
    gate.set()
    [thread] = threads
    thread.join(20)  # the function returns, and its result is ignored
    assert not thread.is_alive()


def test_calls_submitted_while_a_batcher_closes_are_answered_or_refused() -> None:
    @endpoint(max_batch_size=4, max_wait=0)
    def work(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        return docs

    for _ in range(50):
        batcher = Batcher(make_endpoint(work), work)
        start = threading.Barrier(5)

        def submit(batcher: Batcher = batcher, start: threading.Barrier = start) -> list[Future[Any]]:
            start.wait(20)
            futures = []
            with suppress(ServiceUnavailableError):
                futures += [batcher.submit(lambda: pictures(1)) for _ in range(20)]
            return futures

        with ThreadPoolExecutor(4) as pool:
            submitting = [pool.submit(submit) for _ in range(4)]
            start.wait(20)
            batcher.close(20)
            answers = [future.result(0) for each in submitting for future in each.result()]
        assert all(len(answer) == 1 for answer in answers)


def test_batched_calls_pass_arrays_of_the_declared_class() -> None:
    classes: list[type] = []

    @endpoint(max_batch_size=8, max_wait=0.2)
    def work(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        classes.append(type(docs))
        return docs

    batcher = Batcher(make_endpoint(work), work)
    futures = [batcher.submit(lambda: pictures(4)) for _ in range(2)]
    assert [future.result(20).label for future in futures] == [["0", "1", "2", "3"]] * 2
    batcher.close(20)
    assert set(classes) == {DocumentArray[Picture]}


# --- without a thread for each caller


def test_more_callers_than_threads_share_a_batch() -> None:
    sizes: list[int] = []
    begun, gate = threading.Event(), threading.Event()

    @endpoint(max_batch_size=128, max_wait=60)
    def count(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        sizes.append(len(docs))
        begun.set()
        gate.wait(60)
        return docs

    with serve(count, limits=Limits(max_concurrency=2)) as server, Client(server.address) as client:
        calls = [client.count.future(pictures(1, start=i)) for i in range(128)]
        assert begun.wait(60)
        # Callers of the next batch wait without a thread, too: other calls are answered meanwhile.
        client.contract()
        gate.set()
        assert [call.result().label for call in calls] == [[str(i)] for i in range(128)]
    assert sizes == [128]


def test_waiting_batched_calls_count_as_queued() -> None:
    gate, begun = threading.Event(), threading.Event()

    @endpoint(max_batch_size=1, max_wait=0)
    def hold(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        begun.set()
        gate.wait(60)
        return docs

    with serve(hold, limits=Limits(max_concurrency=1, max_queue=3)) as server, Client(server.address) as client:
        calls = [client.hold.future(pictures(1))]
        assert begun.wait(60)
        calls += [client.hold.future(pictures(1)) for _ in range(3)]
        with pytest.raises(ServiceLimitError, match="4 calls are running or waiting"):
            call_until(lambda: client.hold(pictures(1), timeout=0.2))
        gate.set()
        assert [call.result().label for call in calls] == [["0"]] * 4


def call_until(call: Callable[[], Any]) -> Any:
    """Call again while it times out, because calls that were made before may arrive after it."""
    while True:
        with suppress(ServiceTimeoutError):
            return call()


def test_batched_call_reports_errors_with_their_codes() -> None:
    @endpoint(max_batch_size=4, max_wait=0)
    def refuse(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        error = ServiceError(f"no such model for {len(docs)}")
        error.code = "NOT_FOUND"
        raise error

    limits = Limits(max_request_bytes=2_000, max_message_bytes=1 << 20)
    with (
        serve(refuse, authorize=lambda caller: caller.token == "secret", limits=limits) as server,
        Client(server.address, token="secret") as client,
        grpc.insecure_channel(server.address) as channel,
    ):
        with pytest.raises(ServiceError, match="no such model") as caught:
            client.refuse(pictures(1))
        assert caught.value.code == "NOT_FOUND"
        method, token = channel.unary_unary("/quire.v1.Documents/refuse"), (("authorization", "Bearer secret"),)
        for data, metadata, code in (
            (b"", (), grpc.StatusCode.UNAUTHENTICATED),
            (b"\xff" * 9, token, grpc.StatusCode.INVALID_ARGUMENT),
            (bytes(3_000), token, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.RpcError) as failed:
                method(data, metadata=metadata)
            assert failed.value.code() is code


class PassOn(grpc.ServerInterceptor):  # type: ignore[misc]
    """Replaces the function of unary methods, as interceptors that measure calls do."""

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)
        behavior = handler.unary_unary
        if behavior is None:
            return handler
        return grpc.unary_unary_rpc_method_handler(partial(behavior))


def test_batched_calls_pass_interceptors_that_replace_functions() -> None:
    service = Batches()
    with serve(service, interceptors=[PassOn()]) as server, Client(server.address) as client:
        answers = run_concurrently([lambda i=i: client.rows(pictures(1, start=i)) for i in range(4)])  # type: ignore[misc]
        assert [answer.label for answer in answers] == [[str(i)] for i in range(4)]


# --- fair queueing


def make_batcher(**options: Any) -> tuple[Batcher, list[list[str]], threading.Event]:
    """Return a batcher, the labels of each batch that its function has received, and the gate of the function."""
    batches: list[list[str]] = []
    gate = threading.Event()

    @endpoint(**options)
    def work(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        batches.append(docs.label)
        assert gate.wait(60)
        return docs

    return Batcher(make_endpoint(work), work), batches, gate


def wait_until(check: Callable[[], bool]) -> None:
    while not check():
        threading.Event().wait(0.01)


def test_small_requests_do_not_wait_for_the_whole_of_a_large_one() -> None:
    batcher, batches, gate = make_batcher(max_batch_size=4, max_wait=0)
    large = batcher.submit(lambda: pictures(40))
    wait_until(lambda: len(batches) == 1)
    small = [batcher.submit(lambda i=i: pictures(1, start=100 + i)) for i in range(3)]  # type: ignore[misc]
    gate.set()
    assert [future.result(60).label for future in small] == [["100"], ["101"], ["102"]]
    assert large.result(60).label == pictures(40).label
    batcher.close(60)
    assert batches[1] == ["100", "101", "102", "4"]  # the large one fills what the small ones leave
    assert max(len(batch) for batch in batches) == 4


def test_large_request_is_not_left_out_twice_in_a_row() -> None:
    batcher, batches, gate = make_batcher(max_batch_size=4, max_wait=0)
    first = batcher.submit(lambda: pictures(1, start=900))
    wait_until(lambda: len(batches) == 1)
    large = batcher.submit(lambda: pictures(10))
    small = [batcher.submit(lambda i=i: pictures(1, start=100 + i)) for i in range(40)]  # type: ignore[misc]
    gate.set()
    assert large.result(60).label == pictures(10).label
    assert [future.result(60).label for future in [first, *small]] == [[str(i)] for i in (900, *range(100, 140))]
    batcher.close(60)
    shares = [sum(int(label) < 100 for label in batch) for batch in batches[1:]]
    assert shares[:4] == [0, 2, 0, 2]


def test_large_request_fails_as_a_whole_and_others_do_not() -> None:
    @endpoint(max_batch_size=4, max_wait=0)
    def work(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        if "6" in docs.label:
            raise ValueError("six")
        return docs

    batcher = Batcher(make_endpoint(work), work)
    large = batcher.submit(lambda: pictures(20))
    small = [batcher.submit(lambda i=i: pictures(1, start=100 + i)) for i in range(8)]  # type: ignore[misc]
    assert isinstance(large.exception(60), FunctionError)
    assert [future.result(60).label for future in small] == [[str(100 + i)] for i in range(8)]
    assert batcher.submit(lambda: pictures(1)).result(60).label == ["0"]
    batcher.close(60)


def test_batch_workers_run_batches_at_the_same_time() -> None:
    together = threading.Barrier(3)

    @endpoint(max_batch_size=1, max_wait=0, batch_workers=3)
    def work(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        together.wait(60)
        return docs

    batcher = Batcher(make_endpoint(work), work)
    futures = [batcher.submit(lambda i=i: pictures(1, start=i)) for i in range(3)]  # type: ignore[misc]
    assert [future.result(60).label for future in futures] == [["0"], ["1"], ["2"]]
    assert batcher.submit(lambda: pictures(3)).result(60).label == ["0", "1", "2"]  # one row for each thread
    batcher.close(60)
    assert not [thread for thread in threading.enumerate() if thread.name == "quire work"]


def test_calls_beyond_max_queue_time_are_refused() -> None:
    batcher, batches, gate = make_batcher(max_batch_size=1, max_wait=0, max_queue_time=0.05)
    first = batcher.submit(lambda: pictures(1))
    wait_until(lambda: len(batches) == 1)
    late = batcher.submit(lambda: pictures(1, start=5))
    threading.Event().wait(0.1)
    gate.set()
    assert first.result(60).label == ["0"]
    with pytest.raises(ServiceLimitError, match=r"longer than max_queue_time=0.05"):
        late.result(60)
    assert batcher.submit(lambda: pictures(1, start=6)).result(60).label == ["6"]
    batcher.close(60)


def test_batches_are_limited_by_bytes() -> None:
    batcher, batches, gate = make_batcher(max_batch_size=100, max_wait=60, max_batch_bytes=1_000)
    sizes = [400, 400, 400, 2_000, 600]
    futures = [batcher.submit(lambda i=i: pictures(1, start=i), size) for i, size in enumerate(sizes)]  # type: ignore[misc]
    gate.set()
    batcher.close(60)  # the last batch does not wait for others
    assert [future.result(60).label for future in futures] == [[str(i)] for i in range(5)]
    assert batches == [["0", "1"], ["2"], ["3"], ["4"]]
    batcher, batches, gate = make_batcher(max_batch_size=100, max_wait=60, max_batch_bytes=1_000)
    gate.set()
    assert len(batcher.submit(lambda: pictures(200), 5_000).result(60)) == 200
    batcher.close(60)
    assert {len(batch) for batch in batches} == {40}


class Prompt(BaseDocument):
    tokens: list[int]
    text: str = ""
    length: int = 0
    vector: NdArray[float32, "length"] | None = None
    other: dict[str, int] = {}


def prompts(*lengths: int) -> DocumentArray[Prompt]:
    return DocumentArray[Prompt](
        Prompt(id=f"{i}", tokens=[i] * n, text="x" * n, length=n, vector=np.zeros(n, np.float32))
        for i, n in enumerate(lengths)
    )


@pytest.mark.parametrize("path", ["tokens", "text", "length", "vector"])
@pytest.mark.parametrize("kind", ["array", "batch"])
def test_batches_are_limited_by_tokens(path: str, kind: str) -> None:
    batches: list[list[int]] = []

    def note(docs: Any) -> Any:
        batches.append([len(tokens) for tokens in docs.tokens])
        return docs

    def rows(docs: DocumentArray[Prompt]) -> DocumentArray[Prompt]:
        return note(docs)  # type: ignore[no-any-return]

    def columns(docs: DocumentBatch[Prompt]) -> DocumentBatch[Prompt]:
        return note(docs)  # type: ignore[no-any-return]

    options: dict[str, Any] = {"max_batch_size": 100, "max_wait": 60, "max_batch_tokens": 100, "tokens": path}
    function = endpoint(**options)(rows if kind == "array" else columns)
    batcher = Batcher(make_endpoint(function), function)
    requests = [prompts(40), prompts(60), prompts(30), prompts(20, 60), prompts(150), prompts(90, 20, 80, 120, 1)]
    ready = [docs if kind == "array" else docs.stack(shapes="ragged") for docs in requests]
    with batcher._changed:  # so that all requests wait before the first batch begins
        futures = [batcher.submit(lambda docs=docs: docs) for docs in ready]  # type: ignore[misc]
    batcher.close(60)
    for docs, future in zip(requests, futures, strict=True):
        assert [len(tokens) for tokens in future.result(0).tokens] == [len(doc.tokens) for doc in docs]
    # A row with more tokens than a batch may have is alone; the rows of a large request fill the batches of others.
    assert all(sum(batch) <= 100 or len(batch) == 1 for batch in batches)
    assert [40, 60] in batches
    assert sorted(length for batch in batches for length in batch) == sorted(
        len(doc.tokens) for docs in requests for doc in docs
    )


@pytest.mark.parametrize("count", [-1, -(2**63), 2**31 + 1, 2**63 - 1])
@pytest.mark.parametrize("kind", [DocumentArray, DocumentBatch])
def test_numbers_of_tokens_that_callers_invent_are_errors(kind: Any, count: int) -> None:
    """A negative number would lift the limit for all other callers."""
    sizes: list[int] = []

    def work(docs: Any) -> Any:
        sizes.append(sum(docs.length))
        return docs

    work.__annotations__ = dict.fromkeys(("docs", "return"), kind[Prompt])
    options: dict[str, Any] = {"max_batch_size": 100, "max_wait": 0.2, "max_batch_tokens": 100, "tokens": "length"}
    service = endpoint(**options)(work)

    def counted(*lengths: int) -> DocumentArray[Prompt]:
        return DocumentArray[Prompt](Prompt(tokens=[1], length=length) for length in lengths)

    with serve(service) as server, Client(server.address) as client:
        refused = client.work.future(counted(1, count), timeout=60)
        calls = [client.work.future(counted(40, 40), timeout=60) for _ in range(4)]
        with pytest.raises(DecodeError, match=f"row 1: length={count} is no number of tokens"):
            refused.result()
        assert [len(call.result()) for call in calls] == [2] * 4
    assert max(sizes) <= 100


def test_endpoint_rejects_invalid_limits_of_tokens() -> None:
    with pytest.raises(OptionError, match="pass both"):
        endpoint(max_batch_size=4, max_batch_tokens=100)
    with pytest.raises(OptionError, match="only with max_batch_size"):
        endpoint(max_batch_tokens=100, tokens="tokens")
    for name, error, words in (("token", PathError, "tokens"), ("other", SchemaError, "use a field of lists")):

        @endpoint(max_batch_size=4, max_batch_tokens=100, tokens=name)
        def work(docs: DocumentArray[Prompt]) -> DocumentArray[Prompt]:
            return docs

        with pytest.raises(error, match=words):
            serve(work)


def test_endpoint_rejects_invalid_batching_options() -> None:
    for options in ({"max_batch_bytes": -1}, {"max_queue_time": 0}, {"batch_workers": 0}):
        with pytest.raises(OptionError, match=f"{next(iter(options))}="):
            endpoint(max_batch_size=4, **options)
    with pytest.raises(OptionError, match="batch_workers: only with max_batch_size"):
        endpoint(batch_workers=2)
    with pytest.raises(OptionError, match="max_batch_size=-1"):
        endpoint(max_batch_size=-1)
    with pytest.raises(OptionError, match="max_wait=-1"):
        endpoint(max_wait=-1)

    @endpoint(max_batch_size=4)
    def one(doc: Picture) -> Picture:
        return doc

    with pytest.raises(SchemaError, match="calls can be combined only where"):
        serve(one)
