"""Times with and without a time zone in datasets that quire writes for Hugging Face."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray
from quire.errors import EncodeError
from quire.storage import import_dataset
from quire.storage._huggingface import write_huggingface

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")


class Part(BaseDocument):
    at: datetime | None = None


class Event(BaseDocument):
    at: datetime
    seen: datetime | None = None
    part: Part | None = None
    parts: DocumentArray[Part] = []


NAIVE = datetime(2024, 5, 1, 12, 30)  # noqa: DTZ001
ZONED = datetime(2024, 5, 1, 12, 30, tzinfo=timezone(timedelta(hours=2)))


def written(folder: Path, events: list[Event]) -> pa.Table:
    folder.mkdir(parents=True)
    write_huggingface(Event, events, folder)
    with pa.memory_map(str(folder / "data-00000-of-00001.arrow")) as file, pa.ipc.open_stream(file) as reader:
        return reader.read_all()


def test_naive_times_stay_naive(tmp_path: Path) -> None:
    events = [
        Event(id=f"{i}", at=NAIVE + timedelta(days=i), part=Part(at=NAIVE), parts=[Part(at=NAIVE)]) for i in range(3)
    ]
    table = written(tmp_path / "hf", events)
    assert table.schema.field("at").type == pa.timestamp("us")
    assert table.schema.field("part").type.field("at").type == pa.timestamp("us")
    assert table.column("at").to_pylist() == [event.at for event in events]
    again = import_dataset(tmp_path / "hf", tmp_path / "again", "huggingface", document_type=Event)
    assert [event.at for event in again] == [event.at for event in events]


def test_zoned_times_keep_their_instant(tmp_path: Path) -> None:
    table = written(tmp_path / "hf", [Event(at=ZONED)])
    assert table.schema.field("at").type == pa.timestamp("us", "UTC")
    assert table.column("at").to_pylist() == [ZONED]


def test_mixed_times_become_text_or_an_error(tmp_path: Path) -> None:
    table = written(tmp_path / "hf", [Event(at=NAIVE), Event(at=ZONED)])
    assert table.column("at").to_pylist() == ["2024-05-01T12:30:00", "2024-05-01T12:30:00+02:00"]
    with pytest.raises(
        EncodeError, match=r"at: the first times have no time zone, and 2024-05-01T12:30:00\+02:00 has one"
    ):
        written(tmp_path / "late", [*(Event(at=NAIVE) for _ in range(1000)), Event(at=ZONED)])


@settings(max_examples=30, deadline=None)
@given(data=st.data(), zoned=st.booleans())
def test_times_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, zoned: bool) -> None:
    zones = st.timezones() if zoned else st.none()
    times = st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=zones, allow_imaginary=False)  # noqa: DTZ001
    events = [
        Event(at=at, seen=seen) for at, seen in data.draw(st.lists(st.tuples(times, st.none() | times), max_size=4))
    ]
    table: Any = written(tmp_path_factory.mktemp("times") / "hf", events)
    assert table.column("at").to_pylist() == [event.at for event in events]
    assert table.column("seen").to_pylist() == [event.seen for event in events]
