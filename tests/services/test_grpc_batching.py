"""Calls that come together are worked on together, and each caller gets its own rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
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
from tests.services.gallery import Batches, Picture, pictures

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What the calls give, or raise, when they are made at once."""
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
def test_calls_are_put_together_and_each_gets_its_own_rows(served: tuple[Batches, Client], name: str) -> None:
    service, client = served
    questions = [pictures(1 + i % 2, start=10 * i) for i in range(5)]
    answers = together([lambda docs=docs: client[name](docs) for docs in questions])  # type: ignore[misc]
    assert sum(service.sizes) == 7
    assert len(service.sizes) < 5
    for question, answer in zip(questions, answers, strict=True):
        assert list(answer.label) == question.label
        if name != "awaited":
            assert np.stack(list(answer.pixels)).tolist() == (np.stack(question.pixels) + 1).tolist()


def test_no_batch_is_larger_than_asked_for(served: tuple[Batches, Client]) -> None:
    service, client = served
    together([lambda i=i: client.rows(pictures(3, start=i)) for i in range(9)])  # type: ignore[misc]
    assert max(service.sizes) <= 8
    assert sum(service.sizes) == 27


def test_a_caller_with_more_rows_is_worked_on_in_pieces(served: tuple[Batches, Client]) -> None:
    service, client = served
    assert client.rows(pictures(20)).label == pictures(20).label
    assert service.sizes == [8, 8, 4]


def test_an_error_fails_only_the_caller_whose_rows_have_it(served: tuple[Batches, Client]) -> None:
    service, client = served
    bad = DocumentArray[Picture]([Picture(pixels=np.zeros(4, np.float32), label="bad")])
    questions = [pictures(1, start=i) for i in range(5)]
    questions.insert(3, bad)
    answers = together([lambda docs=docs: client.rows(docs) for docs in questions])  # type: ignore[misc]
    failed = [isinstance(answer, FunctionError) for answer in answers]
    assert failed == [False, False, False, True, False, False]
    assert "a bad one" in str(answers[3])
    for i in (0, 1, 2, 4, 5):  # and nobody's rows were worked on twice
        assert answers[i][0].pixels.tolist() == (questions[i][0].pixels + 1).tolist()
    assert max(service.sizes) > 1


class Shapeless(BaseDocument):
    pixels: NdArray


@endpoint(max_batch_size=8, max_wait=0.2)
def double(docs: DocumentBatch[Shapeless]) -> DocumentBatch[Shapeless]:
    docs.pixels = docs.pixels * 2
    return docs


def test_pictures_of_other_shapes_do_not_fail_each_other() -> None:
    with serve(double) as server, Client(server.address) as client:
        sizes = [3, 5, 3, 7]
        calls = [
            lambda size=size: client.double(DocumentArray[Shapeless]([Shapeless(pixels=np.ones(size))]))  # type: ignore[misc]
            for size in sizes
        ]
        answers = together(calls)
    assert [answer[0].pixels.tolist() for answer in answers] == [[2.0] * size for size in sizes]


def test_a_function_that_loses_rows_is_an_error(served: tuple[Batches, Client]) -> None:
    with pytest.raises(FunctionError, match="short got 2 rows and returned 1"):
        served[1].short(pictures(2))


def test_a_caller_who_gives_up_is_not_worked_on(served: tuple[Batches, Client]) -> None:
    service, client = served
    first = client.held.future(pictures(2))
    while not service.sizes:
        pass
    second = client.held.future(pictures(1))
    third = client.held.future(pictures(1, start=5))
    asyncio.run(asyncio.sleep(0.2))  # they are in the queue
    second.cancel()
    asyncio.run(asyncio.sleep(0.2))
    service.gate.set()
    assert len(first.result()) == 2
    assert third.result().label == ["5"]
    assert service.sizes == [2, 1]


def test_streams_and_the_asyncio_server_put_calls_together_too() -> None:
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


def test_an_empty_array_has_an_empty_answer(served: tuple[Batches, Client]) -> None:
    assert len(served[1].rows(pictures(0))) == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.sets(st.integers(0, 11)), st.integers(1, 9))
def test_whatever_comes_each_gets_its_own(rows: list[int], bad: set[int], size: int) -> None:
    """The law of the batcher: any sizes, any faulty callers, any limit."""

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


def test_batching_that_has_no_meaning_is_an_error() -> None:
    with pytest.raises(OptionError, match="max_batch_size=-1"):
        endpoint(max_batch_size=-1)
    with pytest.raises(OptionError, match="max_wait=-1"):
        endpoint(max_wait=-1)

    @endpoint(max_batch_size=4)
    def one(doc: Picture) -> Picture:
        return doc

    with pytest.raises(SchemaError, match="calls can be combined only where"):
        serve(one)
