"""Missing values in requests: reading them fails the call of the caller who left them out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import FunctionError, MissingValueError
from quire.services import AsyncClient, Client, endpoint, serve, serve_async
from quire.typing import NdArray, float32

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


class Picture(BaseDocument):
    pixels: NdArray[float32, 2] | None = None
    label: str = ""
    bright: bool | None = None


def classify(docs: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    docs.bright = docs.pixels.mean(1) > 1
    return docs


async def classify_later(docs: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    await asyncio.sleep(0)
    return classify(docs)


@endpoint(max_batch_size=8, max_wait=0.3)
def classify_together(docs: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    return classify(docs)


@endpoint(max_batch_size=8, max_wait=0.3)
async def classify_together_later(docs: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    return await classify_later(docs)


def parts_now(parts: Iterator[DocumentBatch[Picture]]) -> Iterator[DocumentBatch[Picture]]:
    yield from map(classify, parts)


async def parts_later(parts: AsyncIterator[DocumentBatch[Picture]]) -> AsyncIterator[DocumentBatch[Picture]]:
    async for part in parts:
        yield classify(part)


def label(docs: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    """Reads no column with missing values."""
    docs.label = [text.upper() for text in docs.label]
    return docs


def classify_filled(docs: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    valid = docs.validity("pixels")
    docs.bright = [bool(mean > 1) if real else None for mean, real in _means(docs, valid)]
    return docs


def _means(docs: Any, valid: Any) -> Any:
    return zip(docs.fill_missing({"pixels": 0}).pixels.mean(1), valid.tolist(), strict=True)


def describe(docs: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    docs.label = ["no pixels" if docs.pixels is None else "pixels"] * len(docs)
    return docs


UNARY = [classify, classify_later, classify_together, classify_together_later]
STREAMS = [parts_now, parts_later]
EVERYTHING = [*UNARY, *STREAMS, label, classify_filled, describe]


def pictures(*pixels: float | None) -> DocumentBatch[Picture]:
    return DocumentArray[Picture](
        Picture(id=f"p{i}", label=f"l{i}", pixels=None if value is None else np.full(2, value, np.float32))
        for i, value in enumerate(pixels)
    ).stack()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serve(EVERYTHING) as server, Client(server.address) as client:
        yield client


@pytest.mark.parametrize("function", UNARY)
def test_reading_missing_values_raises_missing_value_error(client: Client, function: Callable[..., Any]) -> None:
    assert client[function.__name__](pictures(0, 3)).bright.tolist() == [False, True]
    with pytest.raises(
        MissingValueError, match=r"Picture\.pixels: row 1 \(id p1\) has no value \(1 of 3 are missing\)"
    ):
        client[function.__name__](pictures(0, None, 3))


@pytest.mark.parametrize("function", STREAMS)
def test_stream_raises_at_batch_with_missing_value(client: Client, function: Callable[..., Any]) -> None:
    answers = client[function.__name__](iter([pictures(0), pictures(2, None)]))
    assert next(answers).bright.tolist() == [False]
    with pytest.raises(MissingValueError, match=r"Picture\.pixels: row 1"):
        next(answers)


def test_async_server_raises_missing_value_error() -> None:
    async def main() -> None:
        async with serve_async(EVERYTHING) as server, AsyncClient(server.address) as client:
            for function in UNARY:
                assert (await client[function.__name__](pictures(0, 3))).bright.tolist() == [False, True]
                with pytest.raises(MissingValueError, match=r"Picture\.pixels: row 1 \(id p1\)"):
                    await client[function.__name__](pictures(0, None, 3))

    asyncio.run(main())


def test_unread_columns_may_have_missing_values(client: Client) -> None:
    answer = client.label(pictures(1, None))
    assert answer.label == ["L0", "L1"]
    assert answer[1].pixels is None
    assert answer.validity("pixels").tolist() == [True, False]


def test_function_may_fill_missing_values(client: Client) -> None:
    assert [doc.bright for doc in client.classify_filled(pictures(3, None, 0))] == [True, None, False]


def test_column_missing_in_every_row_reads_as_none(client: Client) -> None:
    assert client.describe(pictures(None, None)).label == ["no pixels"] * 2
    assert client.describe(pictures(1, 2)).label == ["pixels"] * 2
    with pytest.raises(FunctionError, match="NoneType"):
        client.classify(pictures(None))


@pytest.mark.parametrize("name", ["classify_together", "classify_together_later"])
def test_missing_value_fails_only_its_caller(client: Client, name: str) -> None:
    questions = [pictures(0), pictures(3), pictures(0, None), pictures(3), pictures(None), pictures(3)]
    with ThreadPoolExecutor(len(questions)) as pool:
        futures = [pool.submit(client[name], docs) for docs in questions]
        answers = [future.exception() or future.result().bright.tolist() for future in futures]
    assert [answers[i] for i in (0, 1, 3, 5)] == [[False], [True], [True], [True]]
    assert isinstance(answers[2], MissingValueError)
    assert "row 1 (id p1)" in str(answers[2])
    assert isinstance(answers[4], FunctionError)


def test_answer_with_missing_values_is_an_ordinary_batch(client: Client) -> None:
    answer = client.label(pictures(1, None))
    assert answer.pixels.tolist() == [[1, 1], [0, 0]]
