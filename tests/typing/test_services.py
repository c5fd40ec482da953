"""Static types of clients: checked by mypy and pyright, and run as tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import assert_type

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.services import AsyncClient, Client, endpoint, serve

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


class Text(BaseDocument):
    text: str


class Length(BaseDocument):
    length: int


@endpoint(idempotent=True)
def measure(docs: DocumentArray[Text]) -> DocumentArray[Length]:
    return DocumentArray[Length](Length(length=len(doc.text)) for doc in docs)


def shout(docs: DocumentBatch[Text]) -> DocumentBatch[Text]:
    return docs.with_columns(text=[text.upper() for text in docs.text])


def lengths(texts: Iterator[Text]) -> Iterator[Length]:
    for text in texts:
        yield Length(length=len(text.text))


def total(texts: Iterator[Text]) -> Length:
    return Length(length=sum(len(text.text) for text in texts))


def split(text: Text) -> Iterator[Text]:
    for word in text.text.split():
        yield Text(text=word)


async def later(docs: DocumentArray[Text]) -> DocumentArray[Length]:
    return measure(docs)


async def lengths_later(texts: AsyncIterator[Text]) -> AsyncIterator[Length]:
    async for text in texts:
        yield Length(length=len(text.text))


class Model:
    def shorten(self, docs: DocumentArray[Text]) -> DocumentArray[Text]:
        return DocumentArray[Text](Text(text=doc.text[:1]) for doc in docs)


SERVICE: list[Any] = [measure, shout, lengths, total, split, later, lengths_later, Model()]


def texts() -> DocumentArray[Text]:
    return DocumentArray[Text]([Text(text="one two"), Text(text="three")])


def test_endpoints_by_function_have_types_of_function() -> None:
    docs = texts()
    with serve(SERVICE) as server, Client(server.address) as client:
        assert_type(client[measure](docs), DocumentArray[Length])
        assert_type(client[measure](docs, timeout=5)[0].length, int)
        assert_type(client[measure].future(docs).result(), DocumentArray[Length])
        assert_type(client[measure].stream([docs]), Iterator[DocumentArray[Length]])
        assert_type(client[shout](docs.stack()), DocumentBatch[Text])
        assert_type(client[lengths](docs), Iterator[Length])
        assert_type(client[lengths].stream(docs), Iterator[Length])
        assert_type(client[total](docs), Length)
        assert_type(client[split](docs[0]), Iterator[Text])
        assert_type(client[split].stream(docs), Iterator[Text])
        assert_type(client[later](docs), DocumentArray[Length])
        assert_type(client[lengths_later](docs), Iterator[Length])
        assert_type(client[Model.shorten](docs), DocumentArray[Text])
        assert_type(client[Model().shorten](docs), DocumentArray[Text])
        assert_type(client.measure(docs), Any)
        assert_type(client["measure"](docs), Any)


def test_async_endpoints_by_function_have_types_of_function() -> None:
    docs = texts()

    async def calls(address: str) -> None:
        async with AsyncClient(address) as client:
            assert_type(await client[measure](docs), DocumentArray[Length])
            assert_type(client[measure].stream([docs]), AsyncIterator[DocumentArray[Length]])
            assert_type(await client[lengths](docs), AsyncIterator[Length])
            assert_type(client[lengths].stream(docs), AsyncIterator[Length])
            assert_type(await client[total](docs), Length)
            assert_type(await client[split](docs[0]), AsyncIterator[Text])
            assert_type(await client[later](docs), DocumentArray[Length])
            assert_type(await client[lengths_later](docs), AsyncIterator[Length])
            assert_type(await client[Model.shorten](docs), DocumentArray[Text])

    with serve(SERVICE) as server:
        asyncio.run(calls(server.address))


if TYPE_CHECKING:

    def mistakes(client: Client, docs: DocumentArray[Length]) -> None:
        """Each line is an error for both type checkers, which also report unused ignores."""
        client[measure](docs)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        client[measure](texts(), timeot=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
