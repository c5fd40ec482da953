"""Memory of arguments and answers: equal to what was sent, independent and writable."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.columns import LentColumn
from quire.services import AsyncClient, Client, Limits, Server, endpoint, serve, serve_async
from quire.typing import NdArray

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


class Chart(BaseDocument):
    points: NdArray
    note: str = ""


_seen: list[Any] = []


def passed_on(batch: DocumentBatch[Chart]) -> DocumentBatch[Chart]:
    _seen.append(type(batch._columns.columns["points"]))
    return batch


def written(batch: DocumentBatch[Chart]) -> DocumentBatch[Chart]:
    batch.points += 1
    return batch


def rows(docs: DocumentArray[Chart]) -> DocumentArray[Chart]:
    for doc in docs:
        doc.points += 1
    return docs


@endpoint(max_batch_size=64, max_wait=0.05)
def together(batch: DocumentBatch[Chart]) -> DocumentBatch[Chart]:
    batch.points += 1
    return batch


def halves(batches: Iterator[DocumentBatch[Chart]]) -> Iterator[DocumentBatch[Chart]]:
    for batch in batches:
        batch.points += 1
        yield batch[: len(batch) // 2]
        yield batch[len(batch) // 2 :]


SERVED = [passed_on, written, rows, together, halves]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(SERVED, limits=Limits(max_message_bytes=200_000)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


def charts(number: int, width: int = 2000) -> DocumentBatch[Chart]:
    points = np.arange(number * width, dtype=np.float32).reshape(number, width)
    names = {"id": [f"c{i}" for i in range(number)], "note": ["ä"] * number}
    return DocumentBatch[Chart].from_columns({**names, "points": points})


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.sampled_from([1, 500, 2000, 9000]), st.sampled_from(["passed_on", "written", "together"]))
def test_answers_are_equal_independent_and_writable(client: Client, number: int, width: int, name: str) -> None:
    batch = charts(number, width)
    added = 0 if name == "passed_on" else 1
    first, second = client[name](batch), client[name](batch)
    assert first.identical(second)
    assert (first.points == batch.points + added).all()
    assert list(first.id) == list(batch.id)
    first.points[...] = -1
    assert (second.points == batch.points + added).all()
    assert batch.identical(charts(number, width))


def test_columns_passed_through_are_not_copied(client: Client) -> None:
    _seen.clear()
    answer = client.passed_on(charts(8))
    assert _seen == [LentColumn]
    assert type(answer._columns.columns["points"]) is LentColumn


def test_documents_of_an_answer_are_writable(client: Client) -> None:
    answer = client.rows(charts(8).unstack())
    answer[0].points[:] = 0
    assert (answer[1].points == charts(8).points[1] + 1).all()


def test_values_of_a_stream_are_independent(client: Client) -> None:
    answers = list(client.halves([charts(8), charts(8)]))
    answers[0].points[...] = 0
    assert [len(answer) for answer in answers] == [4, 4, 4, 4]
    assert (answers[2].points == charts(8).points[:4] + 1).all()


def test_batched_callers_do_not_share_memory(client: Client) -> None:
    answers: dict[int, Any] = {}

    def call(number: int) -> None:
        answers[number] = client.together(charts(number))
        answers[number].points -= 1

    threads = [threading.Thread(target=call, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers[number].identical(charts(number)) for number in range(1, 9))


def test_answers_of_async_server_are_writable() -> None:
    async def main() -> None:
        async with serve_async(SERVED) as server, AsyncClient(server.address) as client:
            passed, changed = await asyncio.gather(client.passed_on(charts(8)), client.written(charts(8)))
            passed.points += 1
            assert passed.identical(changed)

    asyncio.run(main())
