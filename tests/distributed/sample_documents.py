"""Document classes, documents and user functions for tests of shards."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.typing import NdArray, float16, float32, uint8


class Maker(BaseDocument):
    town: str
    since: int | None = None


class Good(BaseDocument):
    name: str
    price: int
    photo: NdArray[uint8, 2, 3]
    maker: Maker
    remark: str | None = None


class Rated(BaseDocument):
    name: str
    score: NdArray[float16, 2] | None = None
    stars: float | None = None


def good(number: int) -> Good:
    """Return the document of a number, the same in every process."""
    return Good(
        id=f"good {number:03d}",
        name=f"name {number % 5}",
        price=number,
        photo=np.full((2, 3), number % 256, np.uint8),
        maker=Maker(
            id=f"maker {number}", town=("Bath", "Cork", "Ely")[number % 3], since=None if number % 2 else number
        ),
        remark=None if number % 4 else f"remark {number}",
    )


def goods(number: int) -> DocumentArray[Good]:
    return DocumentArray[Good]([good(i) for i in range(number)])


def dearer(document: Good, by: int = 1, *, times: int = 1) -> Good:
    """Change the document in place."""
    document.price = document.price * times + by
    return document


def rated(document: Good) -> Rated:
    """Return a document of another class without an id, so that it keeps the original one."""
    if document.price == 7:
        raise ValueError("nobody rates a seven")
    return Rated(name=document.name, score=document.photo[0, :2].astype(np.float16), stars=document.price / 2)


def rated_without_a_word(document):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    return rated(document)


def badly_shaped(document: Good) -> Rated:
    """Return an invalid value for the field now and then."""
    shape = 3 if document.price == 7 else 2
    created = Rated(name=document.name)
    created.__dict__["score"] = np.zeros(shape, np.float16)
    return created


def in_columns(batch: DocumentBatch[Good]) -> DocumentBatch[Rated]:
    stars = np.full(len(batch), float(len(batch)))
    return DocumentBatch[Rated].from_columns({"id": batch.id, "name": batch.name, "stars": stars})


def twice(documents: DocumentArray[Good], suffix: str, *, start: int) -> Iterator[Good]:
    """Yield every document, and a copy of it."""
    for document in documents:
        yield document
        yield document.model_copy(update={"id": document.id + suffix, "price": document.price + start})


class Counting:
    """A stateful function: knows which process created it, and how often it was called."""

    def __init__(self, start: int) -> None:
        self.calls = start
        self.process = os.getpid()

    def __call__(self, document: Good) -> Good:
        self.calls += 1
        document.price, document.remark = self.calls, f"{self.process} {id(self)}"
        return document


class Vector(BaseDocument):
    """A large document."""

    data: NdArray[float32, 65536]


class Sensor(BaseDocument):
    place: str


class Measurement(BaseDocument):
    """64 KiB of a sensor: a few hundred exceed what functions get at a time."""

    sensor: Sensor | None
    number: int
    data: NdArray[uint8, 65536]


def measurements(rows: int, groups: int) -> DocumentArray[Measurement]:
    data = np.zeros(65536, np.uint8)
    places = [None, *(Sensor(id=f"s{i}", place=f"place {i}") for i in range(1, groups))]
    return DocumentArray[Measurement](
        [Measurement(id=f"m{i}", sensor=places[i % groups], number=i % groups, data=data) for i in range(rows)]
    )


def one_a_group(documents: DocumentArray[Measurement]) -> Iterator[Measurement]:
    """Yield the first document of each group, numbered by the size of the group."""
    groups: dict[int, list[Measurement]] = {}
    for document in documents:
        groups.setdefault(document.number, []).append(document)
    for members in groups.values():
        yield members[0].model_copy(update={"number": len(members)})
