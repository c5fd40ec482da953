"""Dynamic batching: concurrent calls become one, and each caller gets its own rows."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import FunctionError, OptionError, SchemaError
from quire.services import AsyncClient, Client, endpoint, serve, serve_async
from quire.services._batching import Batcher
from quire.services._endpoints import make_endpoint
from quire.typing import NdArray
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

    def report(self: Batcher, read: Any) -> Future[Any]:
        future = submit(self, read)
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
    """For any sizes of requests, failing callers and batch size."""

    @endpoint(max_batch_size=size, max_wait=0.001)
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
    futures = [batcher.submit(lambda: pictures(1))]
    assert begun.wait(20)
    batcher.close(0)  # gives up before the function returns
    batcher.open()
    futures += [batcher.submit(lambda: pictures(1)) for _ in range(3)]
    assert [thread for thread in threading.enumerate() if thread.name == "quire work"] == threads
    gate.set()
    assert [len(future.result(20)) for future in futures] == [1, 1, 1, 1]
    assert len(set(threads)) == 1
    batcher.close(20)
    assert not threads[0].is_alive()
    batcher.open()
    assert len(batcher.submit(lambda: pictures(1)).result(20)) == 1
    assert threads[-1] is not threads[0]
    batcher.close(20)


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


def test_endpoint_rejects_invalid_batching_options() -> None:
    with pytest.raises(OptionError, match="max_batch_size=-1"):
        endpoint(max_batch_size=-1)
    with pytest.raises(OptionError, match="max_wait=-1"):
        endpoint(max_wait=-1)

    @endpoint(max_batch_size=4)
    def one(doc: Picture) -> Picture:
        return doc

    with pytest.raises(SchemaError, match="calls can be combined only where"):
        serve(one)
