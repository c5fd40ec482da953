"""The documents of the datasets in golden/: v1 was written by format 1, v2 by format 2; `write` makes others.

`Values` has enums and datetimes. Format 2 first stored members by name and times with their zones (v2-names), and later
values and timestamps where that loses nothing (v2-values). A format that is changed keeps these files, and gets others
next to them.
"""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np

from quire import BaseDocument, DocumentArray
from quire.storage import open_dataset, write_dataset
from quire.typing import AnyTensor, NdArray, float32, uint8

FOLDER = Path(__file__).parent / "golden"


class Shade(Enum):
    DARK = "dark blue"
    LIGHT = 2


class Inner(BaseDocument):
    name: str
    size: int = 0
    point: NdArray[float32, 2] = [0.0, 0.0]


class Golden(BaseDocument):
    number: int
    part: float | None
    flag: bool
    text: str
    blob: bytes
    shade: Shade
    day: date
    clock: time
    span: timedelta
    when: datetime | None
    price: Decimal
    key: UUID
    place: PurePosixPath
    wave: complex
    words: list[str]
    counts: list[int | None]
    table: dict[str, Any]
    either: int | str
    image: NdArray[uint8, 2, 3]
    maybe: NdArray[float32, 2] | None
    ragged: NdArray[float32]
    anything: AnyTensor | None
    inner: Inner
    spare: Inner | None
    many: DocumentArray[Inner]


_ZONES = (None, timezone.utc, timezone(timedelta(hours=-3)), ZoneInfo("Europe/Berlin"))


def _inner(number: int) -> Inner:
    return Inner(id=f"i{number}", name=f"inner {number}", size=number, point=np.full(2, number, np.float32))


def document(n: int) -> Golden:
    """Return the document of a number."""
    moment = datetime(2024, 10, 27, 2, 30, n, tzinfo=_ZONES[n % 4], fold=int(n % 4 == 3))
    return Golden(
        id=f"d{n}",
        number=n - 2,
        part=None if n % 3 == 0 else n / 4,
        flag=n % 2 == 0,
        text="é" * n,
        blob=bytes([n]) * n,
        shade=Shade.LIGHT if n % 2 else Shade.DARK,
        day=date(2024, 1, 1 + n),
        clock=time(n, 2, 3, 4),
        span=timedelta(days=-n, microseconds=1),
        when=None if n == 5 else moment,
        price=Decimal(n) / 8,
        key=UUID(int=n),
        place=PurePosixPath(f"/a/{n}"),
        wave=complex(n, -n),
        words=["w"] * (n % 3),
        counts=[n, None],
        table={"a": n, "b": [None, 1.5]},
        either=n if n % 2 else str(n),
        image=np.full((2, 3), n, np.uint8),
        maybe=None if n % 2 else np.full(2, n, np.float32),
        ragged=np.full((n % 3, 2), n, np.float32),
        anything=None if n == 1 else np.arange(n, dtype=np.int16 if n % 2 else np.float64),
        inner=_inner(n),
        spare=None if n % 2 else _inner(n + 10),
        many=DocumentArray[Inner]([_inner(k) for k in range(n % 3)]),
    )


def documents() -> list[Golden]:
    """Return all documents."""
    return [document(n) for n in range(6)]


class Color(Enum):
    RED = "red"
    BLUE = "deep blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 5


class Rate(Enum):
    HALF = 0.5
    WHOLE = 1.0


class Moment(BaseDocument):
    at: datetime | None
    color: Color


class Values(BaseDocument):
    color: Color
    level: Level | None
    rate: Rate
    naive: datetime
    utc: datetime | None
    zoned: datetime
    moment: Moment | None
    moments: DocumentArray[Moment]


def value_document(n: int) -> Values:
    """Return the document of a number, with enums and datetimes."""
    naive = datetime(1 if n == 0 else 9999 if n == 1 else 2024, 12, 31, 23, 59, 59, n)  # noqa: DTZ001
    moments = [
        Moment(id=f"m{k}", at=None if k else naive, color=Color.BLUE if k % 2 else Color.RED) for k in range(n % 3)
    ]
    return Values(
        id=f"v{n}",
        color=Color.RED if n % 2 else Color.BLUE,
        level=None if n == 3 else Level.HIGH if n % 2 else Level.LOW,
        rate=Rate.HALF if n % 2 else Rate.WHOLE,
        naive=naive,
        utc=None if n == 4 else datetime(2024, 1, 1 + n, tzinfo=timezone.utc),
        zoned=datetime(2024, 10, 27, 2, 30, n, tzinfo=_ZONES[n % 4], fold=int(n % 4 == 3)),
        moment=None if n % 3 == 0 else Moment(id=f"o{n}", at=naive.replace(tzinfo=timezone.utc), color=Color.RED),
        moments=DocumentArray[Moment](moments),
    )


def value_documents() -> list[Values]:
    """Return all documents with enums and datetimes."""
    return [value_document(n) for n in range(6)]


def write(folder: Path, rows: list[Any] | None = None) -> None:
    """Write both file formats, in a folder each."""
    rows = documents() if rows is None else rows
    write_dataset(rows, folder / "parquet", format="parquet", group_bytes=2000)
    write_dataset(rows, folder / "arrow", format="arrow", group_bytes=2000)


def write_versions(folder: Path) -> None:
    """Write datasets with a version of every kind, and 18 in all (v2-versions)."""
    write(folder)
    for kind in ("parquet", "arrow"):
        dataset = open_dataset(folder / kind, Golden)
        dataset.tag("written")
        dataset.delete({"number": -2})
        dataset.update({"number": 1}, part=0.5)
        dataset.upsert([document(4)], key="number")
        dataset.tag("before")
        dataset.compact()
        write_dataset([document(0)], folder / kind, Golden, mode="append", format=kind)  # type: ignore[arg-type]
        for _ in range(5):
            dataset.tag("other")
            dataset.untag("other")
