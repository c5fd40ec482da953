"""Enums are stored by value, and datetimes as timestamps, where that loses nothing."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone
from enum import Enum, Flag, IntEnum
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AwareDatetime, ConfigDict

from quire import BaseDocument, DocumentArray
from quire.errors import DecodeError, StorageError
from quire.storage import DatasetWriter, load_parquet, open_dataset, read_arrow_schema, save_parquet, write_dataset
from quire.storage._shard_reader import ShardReader
from tests.codec.round_trips import exact

pytestmark = pytest.mark.needs("pyarrow")

NAIVE, UTC = pa.timestamp("us"), pa.timestamp("us", "UTC")
ZONED = pa.struct([pa.field("at", NAIVE, nullable=False), pa.field("zone", pa.string())])
DAY = datetime(2024, 5, 1, 12, 30)  # noqa: DTZ001
BERLIN = ZoneInfo("Europe/Berlin")


class Color(Enum):
    RED = "red"
    BLUE = "blue"
    SCARLET = "red"  # noqa: PIE796 - an alias


class Renamed(Enum):
    CRIMSON = "red"


class Level(IntEnum):
    LOW = 1
    HIGH = 5


class Rate(Enum):
    HALF = 0.5


class Switch(Enum):
    ON = True
    OFF = False


class Mixed(Enum):
    TEXT = "text"
    NUMBER = 1


class Pair(Enum):
    ONE = (1, 2)


class Huge(Enum):
    BIG = 2**70


class Unknown(Enum):
    NAN = float("nan")


class Bits(Flag):
    X = 1
    Y = 2


def stored_types(folder: Path, document_type: Any, cache: Path) -> list[pa.Schema]:
    dataset = open_dataset(folder, document_type, cache=cache)
    return [read_arrow_schema(dataset.folder, shard) for shard in dataset.shards]


# --- enums


class Enums(BaseDocument):
    color: Color | None
    level: Level
    rate: Rate
    switch: Switch
    mixed: Mixed
    pair: Pair
    huge: Huge
    unknown: Unknown
    bits: Bits


def enums(n: int) -> Enums:
    return Enums(
        color=None if n == 1 else Color.BLUE,
        level=Level.HIGH,
        rate=Rate.HALF,
        switch=Switch.ON if n % 2 else Switch.OFF,
        mixed=Mixed.TEXT if n % 2 else Mixed.NUMBER,
        pair=Pair.ONE,
        huge=Huge.BIG,
        unknown=Unknown.NAN,
        bits=Bits.X | Bits.Y,
    )


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_enums_are_stored_by_value_where_arrow_has_the_type(tmp_path: Path, kind: Any) -> None:
    documents = [enums(n) for n in range(3)]
    write_dataset(documents, tmp_path / "rows", format=kind)
    [schema] = stored_types(tmp_path / "rows", Enums, tmp_path)
    types = {name: str(schema.field(name).type) for name in schema.names if name != "id"}
    assert types == {
        "color": "string",
        "level": "int64",
        "rate": "double",
        "switch": "bool",
        **dict.fromkeys(("mixed", "pair", "huge", "unknown"), "string"),  # their names
        "bits": "binary",
    }
    dataset = open_dataset(tmp_path / "rows", Enums, cache=tmp_path)
    rows = list(dataset[:].unstack())
    assert [row.__dict__ for row in rows] == [document.__dict__ for document in documents]
    assert rows[0].level is Level.HIGH


def test_other_tools_see_values_without_extension_types(tmp_path: Path) -> None:
    write_dataset([enums(0)], tmp_path / "rows")
    table = pq.read_table(tmp_path / "rows", columns=["color", "level", "mixed"])
    assert table.to_pylist() == [{"color": "blue", "level": 5, "mixed": "NUMBER"}]
    assert b"ARROW:extension:name" not in (table.schema.field("color").metadata or {})


def test_enum_values_of_another_version_of_the_class_are_errors(tmp_path: Path) -> None:
    class Old(Enum):
        RED = "red"
        GREEN = "green"

    class Row(BaseDocument):
        color: Old

    class Later(BaseDocument):
        color: Color

    write_dataset([Row(color=Old.RED), Row(color=Old.GREEN)], tmp_path / "rows", format="arrow")
    dataset = open_dataset(tmp_path / "rows", Later, cache=tmp_path)
    assert dataset[0].color is Color.RED
    with pytest.raises(StorageError, match=r"Later\.color: a stored text is not a valid"):
        dataset[1]


def test_number_that_no_member_has_is_an_error(tmp_path: Path) -> None:
    class More(IntEnum):
        TOP = 9

    class Row(BaseDocument):
        level: More

    class Later(BaseDocument):
        level: Level

    write_dataset([Row(level=More.TOP)], tmp_path / "rows", format="arrow")
    with pytest.raises(StorageError, match=r"Later\.level: a stored number is not a valid"):
        open_dataset(tmp_path / "rows", Later, cache=tmp_path)[0]


def test_renamed_member_keeps_its_value(tmp_path: Path) -> None:
    class Row(BaseDocument):
        color: Color

    class Later(BaseDocument):
        color: Renamed

    write_dataset([Row(color=Color.RED)], tmp_path / "rows")
    assert open_dataset(tmp_path / "rows", Later, cache=tmp_path)[0].color is Renamed.CRIMSON


def test_enum_fields_that_hold_values_round_trip(tmp_path: Path) -> None:
    class Row(BaseDocument):
        model_config = ConfigDict(use_enum_values=True)
        color: Color
        level: Level

    rows = [Row(color=Color.RED, level=Level.LOW)]
    write_dataset(rows, tmp_path / "rows")
    document = open_dataset(tmp_path / "rows", Row, cache=tmp_path)[0]
    assert (document.color, document.level) in (("red", 1), (Color.RED, Level.LOW))


# --- datetimes


class Timed(BaseDocument):
    at: datetime | None


def write_times(folder: Path, times: list[datetime | None], **options: Any) -> list[Timed]:
    documents = [Timed(id=str(n), at=at) for n, at in enumerate(times)]
    write_dataset(documents, folder, Timed, **options)
    return documents


_TIMES: dict[str, tuple[list[datetime | None], Any]] = {
    "naive": ([DAY, None, datetime.min, datetime.max], NAIVE),  # noqa: DTZ901
    "utc": ([DAY.replace(tzinfo=timezone.utc), None, datetime.min.replace(tzinfo=timezone.utc)], UTC),
    "no values": ([None, None], NAIVE),
    "offset": ([DAY.replace(tzinfo=timezone(timedelta(hours=2)))], ZONED),
    "zone": ([datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold) for fold in (0, 1)], ZONED),
    "gap": ([datetime(2024, 3, 31, 2, 30, tzinfo=BERLIN)], ZONED),
    "naive and utc": ([DAY, DAY.replace(tzinfo=timezone.utc)], ZONED),
    "utc and offset": ([DAY.replace(tzinfo=timezone.utc), DAY.replace(tzinfo=timezone(timedelta(hours=2)))], ZONED),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("name", _TIMES)
def test_datetimes_are_timestamps_where_that_loses_nothing(tmp_path: Path, name: str, kind: Any) -> None:
    times, expected = _TIMES[name]
    documents = write_times(tmp_path / "rows", times, format=kind)
    [schema] = stored_types(tmp_path / "rows", Timed, tmp_path)
    assert schema.field("at").type == expected
    dataset = open_dataset(tmp_path / "rows", Timed, cache=tmp_path)
    dataset.verify()
    assert exact(list(dataset[:].unstack()), documents)
    assert exact(list(dataset.read().unstack()), documents)
    without_class = open_dataset(tmp_path / "rows", cache=tmp_path)
    assert [row.at for row in without_class[:]] == times


def test_utc_of_zoneinfo_and_pydantic_is_stored_as_utc(tmp_path: Path) -> None:
    parsed = Timed.model_validate_json('{"at": "2024-05-01T12:30:00Z"}').at
    times = [parsed, DAY.replace(tzinfo=ZoneInfo("UTC"))]
    write_times(tmp_path / "rows", times)
    assert stored_types(tmp_path / "rows", Timed, tmp_path)[0].field("at").type == UTC
    assert open_dataset(tmp_path / "rows", Timed, cache=tmp_path)[:].at == times


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_times_of_another_kind_begin_a_new_shard_once(tmp_path: Path, kind: Any) -> None:
    blocks = [[None], [DAY], [DAY.replace(tzinfo=timezone.utc)], [DAY], [DAY.replace(tzinfo=timezone.utc)], [None]]
    with DatasetWriter(tmp_path / "rows", Timed, format=kind, group_bytes=1) as writer:
        for block in blocks:
            writer.write([Timed(at=at) for at in block])
    types = [schema.field("at").type for schema in stored_types(tmp_path / "rows", Timed, tmp_path)]
    assert types == [NAIVE, ZONED]
    dataset = open_dataset(tmp_path / "rows", Timed, cache=tmp_path)
    assert [row.at for row in dataset[:]] == [at for block in blocks for at in block]
    assert [row.at for row in dataset[[5, 2, 0, 1]]] == [None, DAY.replace(tzinfo=timezone.utc), None, DAY]


class Nested(BaseDocument):
    one: Timed | None
    many: DocumentArray[Timed]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_datetimes_in_nested_documents_are_timestamps(tmp_path: Path, kind: Any) -> None:
    utc = DAY.replace(tzinfo=timezone.utc)
    documents = [
        Nested(id="a", one=Timed(id="1", at=DAY), many=[Timed(id="2", at=utc), Timed(id="3", at=None)]),
        Nested(id="b", one=None, many=[]),
        Nested(id="c", one=Timed(id="4", at=None), many=[Timed(id="5", at=utc)]),
    ]
    write_dataset(documents, tmp_path / "rows", format=kind, group_bytes=1)
    [schema] = stored_types(tmp_path / "rows", Nested, tmp_path)
    assert schema.field("one").type.field("at").type == NAIVE
    assert schema.field("many").type.value_type.field("at").type in (UTC, NAIVE)
    dataset = open_dataset(tmp_path / "rows", Nested, cache=tmp_path)
    assert exact(list(dataset[:].unstack()), documents)
    assert exact(list(dataset[[2, 0]].unstack()), [documents[2], documents[0]])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_damaged_timestamp_is_detected(tmp_path: Path, kind: Any) -> None:
    write_times(tmp_path / "rows", [DAY] * 200, format=kind)
    [shard] = (tmp_path / "rows").glob(f"*.{kind}")
    content = bytearray(shard.read_bytes())
    value = int((DAY - datetime(1970, 1, 1)) / timedelta(microseconds=1)).to_bytes(8, "little")  # noqa: DTZ001
    place = content.find(value)
    assert place > 0
    content[place] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StorageError, match="altered"):
        open_dataset(tmp_path / "rows", Timed, cache=tmp_path)[0]


def test_single_file_has_timestamps_unless_the_times_differ(tmp_path: Path) -> None:
    utc = DAY.replace(tzinfo=timezone.utc)
    for times, expected in (([DAY] * 3, NAIVE), ([utc] * 3, UTC), ([DAY, utc, DAY], ZONED)):
        documents = DocumentArray[Timed]([Timed(at=at) for at in times])
        save_parquet(documents, Timed, tmp_path / "rows.parquet", group_bytes=1)
        assert pq.read_schema(tmp_path / "rows.parquet").field("at").type == expected
        assert load_parquet(Timed, tmp_path / "rows.parquet", cache=tmp_path).identical(documents.stack())


def test_timestamps_of_other_tools_are_still_validated(tmp_path: Path) -> None:
    class Aware(BaseDocument):
        at: AwareDatetime

    pq.write_table(pa.table({"id": ["a"], "at": pa.array([DAY], NAIVE)}), tmp_path / "rows.parquet")
    with pytest.raises(StorageError, match="timezone"):
        open_dataset(tmp_path / "rows.parquet", Aware, cache=tmp_path)[0]


zones = st.sampled_from([None, timezone.utc, timezone(timedelta(hours=-3, minutes=7)), BERLIN, ZoneInfo("UTC")])
times = st.none() | st.datetimes(timezones=zones, allow_imaginary=True)


@given(st.lists(st.lists(times, max_size=4), min_size=1, max_size=4), st.sampled_from(["parquet", "arrow"]))
def test_datetimes_are_equal_after_a_round_trip(tmp_path_factory: Any, blocks: list[Any], kind: Any) -> None:
    folder = tmp_path_factory.mktemp("rows")
    with DatasetWriter(folder / "rows", Timed, format=kind, group_bytes=1) as writer:
        for block in blocks:
            writer.write([Timed(at=at) for at in block])
    dataset = open_dataset(folder / "rows", Timed, cache=folder / "cache")
    expected = [at for block in blocks for at in block]
    results = [] if not len(dataset) else [row.at for row in dataset[:]]
    for one, other in zip(results, expected, strict=True):
        if one is None or other is None:
            assert one is other
        elif isinstance(other.tzinfo, ZoneInfo):
            assert (one.replace(tzinfo=None), one.utcoffset()) == (other.replace(tzinfo=None), other.utcoffset())
        else:
            assert one == other
            assert one.utcoffset() == other.utcoffset()


# --- filters


class Event(BaseDocument):
    at: datetime
    utc: datetime
    day: date
    clock: time
    color: Color
    level: Level


def event(n: int) -> Event:
    at = datetime(2024, 1, 1) + timedelta(hours=n)  # noqa: DTZ001
    return Event(
        at=at,
        utc=at.replace(tzinfo=timezone.utc),
        day=at.date(),
        clock=at.time(),
        color=Color.RED if n < 50 else Color.BLUE,
        level=Level.LOW if n < 50 else Level.HIGH,
    )


@pytest.fixture
def events(tmp_path: Path) -> Path:
    with DatasetWriter(tmp_path / "events", Event, group_bytes=1) as writer:
        for start in range(0, 100, 10):
            writer.write([event(n) for n in range(start, start + 10)])
    return tmp_path / "events"


_FILTERS: list[tuple[dict[str, Any], int, int]] = [  # the query, its rows, and the row groups that may have some
    ({"at": {"$lt": datetime(2024, 1, 1, 10)}}, 10, 10),  # noqa: DTZ001
    ({"at": datetime(2024, 1, 1, 10)}, 1, 1),  # noqa: DTZ001
    ({"utc": {"$gte": datetime(2024, 1, 5, 0, tzinfo=timezone.utc)}}, 4, 4),
    ({"utc": {"$gte": datetime(2024, 1, 5, 2, tzinfo=timezone(timedelta(hours=2)))}}, 4, 4),
    ({"utc": "2024-01-02T00:00:00Z"}, 1, 1),
    ({"utc": {"$gte": datetime(2024, 1, 5, 1, tzinfo=BERLIN)}}, 4, 100),  # walls and instants may be in another order
    ({"day": "2024-01-02"}, 24, 24),
    ({"clock": {"$lt": time(0, 30)}}, 5, 5),
    ({"color": "red"}, 50, 50),
    ({"color": Color.BLUE}, 50, 50),
    ({"color": {"$in": ["red", "blue"]}}, 100, 100),
    ({"level": 5}, 50, 50),
    ({"level": Level.LOW}, 50, 50),
]


@pytest.mark.parametrize(("where", "rows", "groups"), _FILTERS)
def test_statistics_rule_out_row_groups(
    events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, rows: int, groups: int
) -> None:
    chosen: list[int] = []
    choose = ShardReader._choose_groups

    def record(*arguments: Any) -> Any:
        result = choose(*arguments)
        assert result is not None
        chosen.extend(result[0])
        return result

    monkeypatch.setattr(ShardReader, "_choose_groups", record)
    dataset = open_dataset(events, Event, where=where, cache=tmp_path / "cache")
    assert len(dataset) == rows
    assert len(chosen) == groups


def test_conversion_error_names_the_member_that_does_not_exist() -> None:
    from quire.storage._layout import Layout
    from quire.storage._schema_conversion import conform_fields

    class Row(BaseDocument):
        color: Color

    layout = Layout(Row.document_schema())
    field = pa.field("color", pa.string(), metadata={"ARROW:extension:name": "quire.enum"})
    names = {"id": (pa.field("id", pa.string()), pa.array(["a"])), "color": (field, pa.array(["GREEN"]))}
    with pytest.raises(DecodeError, match="GREEN"):
        conform_fields(layout.codecs, names, layout.schema, None, 1)
