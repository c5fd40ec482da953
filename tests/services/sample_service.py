"""Documents and functions that tests serve, also in other processes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import ServiceLimitError
from quire.services import endpoint
from quire.typing import NdArray, float32


class Picture(BaseDocument):
    pixels: NdArray[float32, 4]
    label: str = ""
    embedding: NdArray[float32, 2] | None = None


class Score(BaseDocument):
    value: float
    of: str


def pictures(number: int, start: int = 0) -> DocumentArray[Picture]:
    return DocumentArray[Picture](
        [Picture(id=f"p{i}", pixels=np.full(4, i, np.float32), label=str(i)) for i in range(start, start + number)]
    )


def embed(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    """Return twice the first two pixels as the embedding."""
    for doc in docs:
        doc.embedding = doc.pixels[:2] * 2
    return docs


def double(docs: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    docs.pixels = docs.pixels * 2
    return docs


def rate(doc: Picture) -> Score:
    return Score(value=float(doc.pixels.sum()), of=doc.label)


def fail(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    raise ValueError(f"no good: {docs[0].label}")


def refuse(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    raise ServiceLimitError(f"not {len(docs)} today")


def lie(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    return [rate(doc) for doc in docs]  # type: ignore[return-value]


def total(parts: Iterator[DocumentArray[Picture]]) -> Score:
    documents = [doc for docs in parts for doc in docs]
    return Score(value=sum(float(doc.pixels.sum()) for doc in documents), of=f"{len(documents)} pictures")


def spread(docs: DocumentArray[Picture]) -> Iterator[Picture]:
    yield from docs


def running(parts: Iterator[Picture]) -> Iterator[Score]:
    value = 0.0
    for number, part in enumerate(parts):
        value += float(part.pixels.sum())
        yield Score(value=value, of=str(number))


async def later(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    await asyncio.sleep(0.001)
    return embed(docs)


async def running_later(parts: AsyncIterator[Picture]) -> AsyncIterator[Score]:
    value = 0.0
    async for part in parts:
        value += float(part.pixels.sum())
        yield Score(value=value, of="later")


@endpoint(idempotent=True)
def who(docs: DocumentArray[Picture]) -> DocumentArray[Score]:
    """Return the id of the process that answers."""
    return DocumentArray[Score]([Score(value=os.getpid(), of=doc.label) for doc in docs])


def slow(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    time.sleep(float(docs[0].label))
    return docs


EVERYTHING = [embed, double, rate, fail, refuse, lie, total, spread, running, later, running_later, who, slow]


class Batches:
    """Endpoints with dynamic batching, which record the sizes of their batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.begun, self.gate = threading.Event(), threading.Event()

    @endpoint(max_batch_size=8, max_wait=0.2)
    def rows(self, docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        self.sizes.append(len(docs))
        for doc in docs:
            if doc.label == "bad":
                raise ValueError("a bad one")
            doc.pixels = doc.pixels + 1
        return docs

    @endpoint(max_batch_size=8, max_wait=0.2)
    def columns(self, docs: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
        self.sizes.append(len(docs))
        docs.pixels = docs.pixels + 1
        return docs

    @endpoint(max_batch_size=8, max_wait=0.2)
    async def awaited(self, docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        self.sizes.append(len(docs))
        await asyncio.sleep(0)
        return embed(docs)

    @endpoint(max_batch_size=4, max_wait=0)
    def short(self, docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        return docs[:1]

    @endpoint(max_batch_size=2, max_wait=0)
    def held(self, docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        self.sizes.append(len(docs))
        self.begun.set()
        self.gate.wait(20)
        return docs
