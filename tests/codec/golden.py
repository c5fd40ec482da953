"""The classes and values of the golden bytes: core dependencies alone, every id fixed.

`python -m tests.codec.golden` writes the files of the current format version, which is done once for each version:
from then on they must never change.
"""

from __future__ import annotations

import gzip
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np

from quire import BaseDocument, DocumentArray
from quire.typing import AnyTensor, NdArray, float32, uint8

FOLDER = Path(__file__).parent / "golden" / "v1"
MODULE = "tests.codec.golden"


class Mood(Enum):
    CALM = "calm"
    WILD = 2


class Author(BaseDocument):
    name: str
    born: date | None = None


class Editor(Author):
    """A subclass: among authors, with more fields."""

    house: str = ""


class Paper(BaseDocument):
    """Every kind of field."""

    title: str
    number: int = 0
    score: float | None = None
    open: bool = False
    spin: complex = 0j
    body: bytes = b""
    mood: Mood = Mood.CALM
    when: datetime | None = None
    at: time | None = None
    lasts: timedelta = timedelta()
    key: UUID | None = None
    price: Decimal | None = None
    path: PurePosixPath = PurePosixPath()
    words: list[str] = []
    counts: dict[int, tuple[int, ...]] = {}
    tags: set[int] = set()
    either: Author | int | str | None = None
    anything: Any = None
    author: Author
    spare: Author | None = None
    authors: DocumentArray[Author] = []
    vector: NdArray[float32, 3]
    image: NdArray[uint8, 2, 2] | None = None
    loose: NdArray | None = None
    tensor: AnyTensor | None = None


def papers() -> DocumentArray[Paper]:
    """Three documents: full, with big and empty values, and mostly defaults."""
    full = Paper(
        id="p1",
        title="On tällä",
        number=2**40,
        score=0.5,
        open=True,
        spin=1 - 2j,
        body=b"\x00\xff",
        mood=Mood.WILD,
        when=datetime(2024, 10, 27, 2, 30, 1, 5, tzinfo=timezone(timedelta(hours=2))),
        at=time(1, 2, 3),
        lasts=timedelta(days=-1, microseconds=1),
        key=UUID(int=2**100),
        price=Decimal("1.10"),
        path="a/b.txt",
        words=["", "x"],
        counts={1: (2, 3), -4: ()},
        tags={5},
        either=Editor(id="e1", name="E", house="H"),
        anything=[
            None,
            True,
            2**70,
            -0.5,
            {"k": (1,), None: frozenset({2})},
            np.float32(1.5),
            np.arange(3, dtype="i2"),
        ],
        author=Author(id="a1", name="A", born=date(1906, 12, 9)),
        spare=Editor(id="e2", name="F"),
        authors=[Author(id="a2", name="B"), Editor(id="e3", name="G", house="I")],
        vector=[1, 2, 3],
        image=np.array([[0, 1], [2, 255]], np.uint8),
        loose=np.arange(1000, dtype=np.float64).reshape(10, 100),
        tensor=np.array([[1, 2]], np.int64),
    )
    large = Paper(
        id="p2",
        title="",
        number=-(2**63),
        score=float("inf"),
        anything="only text",
        either=7,
        author=Editor(id="e4", name="", house="Ä"),
        vector=[0, -0.0, 1e30],
        loose=np.zeros((0, 3)),
        tensor=np.array([1.5], np.float16),
    )
    return DocumentArray[Paper](
        [full, large, Paper(id="p3", title="plain", author=Author(id="a3", name="C"), vector=[4, 5, 6])]
    )


def contents() -> dict[str, bytes]:
    """What today's writer makes of the values, by the name of the file."""
    docs = papers()
    return {
        "document.bin": docs[0].to_bytes(),
        "plain.bin": docs[2].to_bytes(),
        "array.bin": docs.to_protobuf().SerializeToString(),
        "batch.bin": docs.stack(shapes="ragged").to_bytes(),
        "padded.bin": docs[:1].stack(shapes="pad").to_bytes(),
        "stream.bin": docs.to_bytes(),
        "empty.bin": DocumentArray[Paper]().to_bytes(),
    }


def main() -> None:
    """Write the files that are not there yet."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    files = contents()
    files["stream.gz.bin"] = papers().to_bytes(compress="gzip")
    assert gzip.decompress(files["stream.gz.bin"])
    for name, data in files.items():
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    from tests.codec import golden  # so that the classes have their name, and not that of the main module

    golden.main()
