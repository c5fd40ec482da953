"""Batches and datasets as Arrow data of other libraries, and back."""

from __future__ import annotations

import tracemalloc
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DecodeError, DocumentTypeError, EncodeError
from quire.storage import DatasetWriter, open_dataset, write_dataset
from quire.tensors import DType, Shape
from quire.typing import AnyTensor, NdArray, TorchTensor, bfloat16, complex64, float32, int32, uint8
from tests.codec.round_trips import exact
from tests.storage.sample_documents import Leaf, leaves

pytestmark = pytest.mark.needs("pyarrow")

BERLIN = ZoneInfo("Europe/Berlin")
UTC_DAY = datetime(2024, 5, 1, 12, tzinfo=timezone.utc)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 5


class Shade(Enum):
    DARK = (0, 1)


class Bits(Flag):
    X = 1
    Y = 2


class Inner(BaseDocument):
    name: str
    at: datetime | None = None
    point: NdArray[float32, 2] = [0.0, 0.0]


class Row(BaseDocument):
    number: int
    part: float | None
    flag: bool
    text: str | None
    blob: bytes
    color: Color
    level: Level | None
    shade: Shade
    bits: Bits
    day: date
    clock: time
    span: timedelta
    when: datetime | None
    price: Decimal
    key: UUID
    place: PurePosixPath
    words: list[str]
    grid: list[list[int]]
    tags: frozenset[str]
    colors: list[Color]
    days: tuple[date, ...]
    table: dict[str, float]
    image: NdArray[uint8, 2, 3]
    scalar: Annotated[np.ndarray, Shape(), DType("float32")] | None
    maybe: NdArray[float32, 2] | None
    boxes: NdArray[float32, "n", 4]
    tokens: NdArray[int32]
    inner: Inner
    spare: Inner | None
    many: DocumentArray[Inner]


def inner(n: int) -> Inner:
    return Inner(id=f"i{n}", name=f"inner {n}", at=None if n % 2 else UTC_DAY, point=np.full(2, n, np.float32))


def row(n: int) -> Row:
    return Row(
        id=f"r{n}",
        number=n,
        part=None if n % 2 else n / 4,
        flag=n % 2 == 0,
        text=None if n == 2 else "é" * n,
        blob=bytes([n]) * n,
        color=Color.RED if n % 2 else Color.BLUE,
        level=None if n == 1 else Level.HIGH,
        shade=Shade.DARK,
        bits=Bits.X | Bits.Y,
        day=date(2024, 1, 1 + n),
        clock=time(n, 1, 2, 3),
        span=timedelta(days=-n, microseconds=5),
        when=None if n == 3 else UTC_DAY + timedelta(days=n),
        price=Decimal(n) / 8,
        key=UUID(int=n),
        place=PurePosixPath(f"/a/{n}"),
        words=["w"] * n,
        grid=[[n, 1], []],
        tags=frozenset({"a"}),
        colors=[Color.RED] * n,
        days=(date(2024, 1, 1),) * n,
        table={"a": n / 2},
        image=np.full((2, 3), n, np.uint8),
        scalar=None if n == 1 else np.array(n, np.float32),
        maybe=None if n % 2 else np.full(2, n, np.float32),
        boxes=np.full((n, 4), n, np.float32),
        tokens=np.arange(n, dtype=np.int32),
        inner=inner(n),
        spare=None if n % 2 else inner(n + 10),
        many=DocumentArray[Inner]([inner(k) for k in range(n)]),
    )


def rows(count: int = 4) -> DocumentArray[Row]:
    return DocumentArray[Row]([row(n) for n in range(count)])


def test_fields_have_the_arrow_types_of_other_libraries() -> None:
    table = rows().stack(shapes="ragged").to_arrow()
    table.validate(full=True)
    types = {field.name: str(field.type) for field in table.schema}
    nested = "struct<id: string, name: string, at: timestamp[us, tz=UTC], point: fixed_size_list<item: float>[2]>"
    assert types == {
        "id": "string",
        "number": "int64",
        "part": "double",
        "flag": "bool",
        "text": "string",
        "blob": "binary",
        "color": "string",
        "level": "int64",
        "shade": "string",
        "bits": "int64",
        "day": "date32[day]",
        "clock": "time64[us]",
        "span": "duration[us]",
        "when": "timestamp[us, tz=UTC]",
        "price": "string",
        "key": "fixed_size_binary[16]",
        "place": "string",
        "words": "list<item: string not null>",
        "grid": "list<item: list<item: int64 not null> not null>",
        "tags": "list<item: string not null>",
        "colors": "list<item: string not null>",
        "days": "list<item: date32[day] not null>",
        "table": "map<string, double>",
        "image": "fixed_size_list<item: fixed_size_list<item: uint8>[3]>[2]",
        "scalar": "float",
        "maybe": "fixed_size_list<item: float>[2]",
        "boxes": "list<item: fixed_size_list<item: float>[4]>",
        "tokens": "list<item: int32>",
        "inner": nested,
        "spare": nested,
        "many": f"list<item: {nested} not null>",
    }
    second = table.to_pylist()[1]
    assert second["color"] == "red"
    assert second["level"] is None
    assert second["spare"] is None
    assert second["shade"] == "DARK"  # Arrow has no type for its value
    assert second["table"] == [("a", 0.5)]
    assert [item["name"] for item in second["many"]] == ["inner 0"]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_batch_round_trips_through_a_table(count: int) -> None:
    documents = rows(count)
    batch = documents.stack(shapes="ragged") if count else DocumentBatch[Row]()
    result = DocumentBatch[Row].from_arrow(batch.to_arrow())
    assert exact(list(result.unstack()), list(documents))
    slices = batch.to_arrow().slice(1, 2)
    assert exact(list(DocumentBatch[Row].from_arrow(slices).unstack()), list(documents[1:3]))


@given(st.lists(leaves(), max_size=4))
def test_documents_are_equal_after_a_round_trip_or_refused(documents: list[Leaf]) -> None:
    batch = DocumentArray[Leaf](documents).stack(shapes="ragged")
    try:
        table = batch.to_arrow()
    except EncodeError as error:
        assert "Leaf." in str(error)
        return
    table.validate(full=True)
    assert DocumentBatch[Leaf].from_arrow(table).identical(batch)


# --- memory


def test_numbers_and_tensors_are_not_copied() -> None:
    batch = rows().stack(shapes="ragged")
    table = batch.to_arrow(["number", "image", "boxes", "inner.point"])

    def address(array: pa.Array) -> int:
        while not pa.types.is_primitive(array.type):
            array = array.field("point") if pa.types.is_struct(array.type) else array.values  # noqa: PD011
        return int(array.buffers()[1].address)

    def start(array: np.ndarray[Any, Any]) -> int:
        return int(array.__array_interface__["data"][0])

    assert address(table["number"].chunk(0)) == start(batch.number)
    assert address(table["image"].chunk(0)) == start(batch.image)
    assert address(table["boxes"].chunk(0)) == start(batch.column("boxes").flat)
    assert address(table["inner"].chunk(0)) == start(batch.inner.point)


def test_texts_that_are_packed_are_not_copied(tmp_path: Path) -> None:
    write_dataset(rows(), tmp_path / "rows", format="arrow")
    batch = open_dataset(tmp_path / "rows", Row, cache=tmp_path)[:]
    data: Any = batch.column("id").data  # type: ignore[attr-defined]
    assert batch.to_arrow(["id"])["id"].chunk(0).buffers()[2].address == pa.py_buffer(data).address


@pytest.mark.needs("torch")
def test_torch_tensors_are_not_copied() -> None:
    import torch

    class Point(BaseDocument):
        at: TorchTensor[float32, 3]
        weight: float

    points = DocumentArray[Point]([Point(at=torch.full((3,), float(n)), weight=n) for n in range(5)])
    batch = points.stack(framework="torch")
    table = batch.to_arrow()
    assert table["at"].chunk(0).values.buffers()[1].address == batch.at.data_ptr()
    assert table["weight"].chunk(0).buffers()[1].address == batch.weight.data_ptr()
    assert DocumentBatch[Point].from_arrow(table).identical(batch)


@pytest.mark.needs("polars")
def test_polars_shares_the_memory_of_numbers_and_tensors() -> None:
    import polars as pl

    batch = rows().stack(shapes="ragged")
    frame = pl.DataFrame(batch.to_arrow(["number", "maybe"]))
    array = frame["number"].to_arrow()
    assert array.buffers()[1].address == batch.number.__array_interface__["data"][0]


def test_table_keeps_the_memory_of_its_batch() -> None:
    table = rows().stack(shapes="ragged").to_arrow(["image"])
    assert table["image"].to_pylist()[3] == [[3] * 3] * 2


# --- other libraries


@pytest.mark.needs("polars")
def test_polars_takes_and_returns_batches() -> None:
    import polars as pl

    batch = rows().stack(shapes="ragged")
    frame = pl.DataFrame(batch)
    assert frame.filter(pl.col("color") == "red")["number"].to_list() == [1, 3]
    assert frame["image"].dtype == pl.Array(pl.UInt8, (2, 3))
    assert frame.select(pl.col("when").max()).item() == UTC_DAY + timedelta(days=2)
    assert DocumentBatch[Row].from_arrow(frame).identical(batch)


@pytest.mark.needs("duckdb")
def test_duckdb_takes_and_returns_batches() -> None:
    import duckdb

    batch = rows().stack(shapes="ragged")
    query = "select color, sum(number) as total, list(image[1][2]) as pixels from batch group by color order by color"
    assert duckdb.sql(query).fetchall() == [("blue", 2, [0, 2]), ("red", 4, [1, 3])]
    relation = duckdb.from_arrow(
        batch.to_arrow(
            [
                name for name in Row.model_fields if name not in ("shade", "span")
            ]  # DuckDB returns durations as intervals
        )
    )

    class Plain(Row):
        shade: Shade = Shade.DARK
        span: timedelta = timedelta()

    result = DocumentBatch[Plain].from_arrow(relation)
    assert [document.id for document in result] == ["r0", "r1", "r2", "r3"]
    assert exact(result.unstack()[3].boxes, row(3).boxes)
    assert result.unstack()[2].many == row(2).many
    assert result.unstack().when == rows().when


@pytest.mark.needs("pandas")
def test_pandas_takes_batches() -> None:
    import pandas as pd

    if not hasattr(pd.DataFrame, "from_arrow"):
        pytest.skip("pandas before version 3 has no DataFrame.from_arrow")
    frame = pd.DataFrame.from_arrow(rows().stack(shapes="ragged"))
    assert frame["number"].tolist() == [0, 1, 2, 3]
    assert str(frame["when"].dtype) == "datetime64[us, UTC]"
    assert DocumentBatch[Inner].from_arrow(pa.Table.from_pandas(frame[["id"]].assign(name="x"))).name == ["x"] * 4


def test_record_batches_and_readers_are_read() -> None:
    batch = rows().stack(shapes="ragged")
    [part] = batch.to_arrow().to_batches()
    assert DocumentBatch[Row].from_arrow(part).identical(batch)
    reader = pa.RecordBatchReader.from_batches(part.schema, [part.slice(0, 1), part.slice(1)])
    assert DocumentBatch[Row].from_arrow(reader).identical(batch)


def test_arrow_tensors_are_read() -> None:
    class Vector(BaseDocument):
        point: NdArray[float32, 2, 3]

    data = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(data)
    batch = DocumentBatch[Vector].from_arrow(pa.table({"point": tensors}))
    assert (batch.point == data).all()
    lists = pa.array([None, [[0, 1, 2], [3, 4, 5]]], pa.list_(pa.list_(pa.float32(), 3), 2))

    class Maybe(BaseDocument):
        point: NdArray[float32, 2, 3] | None

    assert exact(DocumentBatch[Maybe].from_arrow(pa.table({"point": lists})).unstack().point, [None, data[0]])


# --- columns that are unknown, missing or wrong


class Small(BaseDocument):
    number: Annotated[int, Field(ge=0)]
    name: str = "x"


def test_missing_columns_take_their_defaults_and_others_are_ignored() -> None:
    table = pa.table({"number": [1, 2], "colour": ["red", "blue"]})
    batch = DocumentBatch[Small].from_arrow(table)
    assert batch.name == ["x", "x"]
    assert len(set(batch.id)) == 2
    with pytest.raises(DecodeError, match="has no field 'colour'"):
        DocumentBatch[Small].from_arrow(table, extra="forbid")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": ["a"]}, r"Small\.number: the data does not have it"),
        ({"number": [-1]}, r"Small\.number, row 0: Input should be greater than or equal to 0"),
        ({"number": [1, None]}, r"Small\.number: row 1 of the record batch has no value"),
        ({"number": ["1"]}, r"Small\.number: the data has string"),
        ({"number": [1], "name": [2]}, r"Small\.name: the data has int64"),
    ],
)
def test_values_that_do_not_fit_are_errors(table: Any, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        DocumentBatch[Small].from_arrow(pa.table(table))


def test_two_columns_of_one_name_are_an_error() -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["number", "number"])
    with pytest.raises(DecodeError, match="two columns 'number'"):
        DocumentBatch[Small].from_arrow(table)


def test_validators_of_the_class_are_called() -> None:
    class Even(BaseDocument):
        number: int

        @field_validator("number")
        @classmethod
        def check(cls, number: int) -> int:
            if number % 2:
                raise ValueError("odd")
            return number

    assert DocumentBatch[Even].from_arrow(pa.table({"number": [2, 4]})).number.tolist() == [2, 4]
    with pytest.raises(DecodeError, match=r"row 1.*odd"):
        DocumentBatch[Even].from_arrow(pa.table({"number": [2, 3]}))


def test_objects_without_arrow_data_are_an_error() -> None:
    with pytest.raises(DocumentTypeError, match=r"__arrow_c_stream__.*got"):
        DocumentBatch[Small].from_arrow([1, 2])


# --- what Arrow has no type for


class Unusual(BaseDocument):
    anything: Any = None
    either: int | str = 0
    wave: complex = 0
    pair: tuple[int, str] = (1, "a")
    loose: dict = {}
    short: NdArray[bfloat16, 2] | None = None
    spectrum: NdArray[complex64, 2] | None = None
    tensor: AnyTensor | None = None
    when: datetime | None = None
    boxes: NdArray[float32] | None = None


@pytest.mark.parametrize("name", ["anything", "either", "wave", "pair", "loose", "short", "spectrum"])
def test_fields_without_an_arrow_type_are_errors_that_name_them(name: str) -> None:
    batch = DocumentBatch[Unusual]([Unusual()])
    with pytest.raises(EncodeError, match=rf"Unusual\.{name}: Arrow has no type for"):
        batch.to_arrow([name])
    with pytest.raises(EncodeError, match=r"Unusual\.\w+: Arrow has no type for"):
        batch.__arrow_c_stream__()
    assert batch.to_arrow(["id"]).num_rows == 1


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("when", [UTC_DAY, UTC_DAY.replace(tzinfo=None)], "the first times have a time zone, and .* has none"),
        ("when", [UTC_DAY.replace(tzinfo=None), UTC_DAY], "the first times have no time zone, and .* has one"),
        ("when", [datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))], "outside of the years"),
        ("tensor", [np.zeros(2), np.zeros((2, 2))], "different numbers of axes"),
        ("tensor", [np.zeros(2), np.zeros(2, np.int8)], "several dtypes: float64, int8"),
        ("tensor", [np.zeros(2, complex)], "no numbers of the dtype complex128"),
        ("boxes", [np.zeros((0, 4), np.float32), np.zeros((1, 4), np.float32)], r"such as \(0, 4\) would be lost"),
    ],
)
def test_values_without_an_arrow_type_are_errors(name: str, values: list[Any], message: str) -> None:
    batch = DocumentArray[Unusual]([Unusual(**{name: value}) for value in values]).stack(shapes="ragged")
    with pytest.raises(EncodeError, match=rf"Unusual\.{name}: .*{message}"):
        batch.to_arrow([name])


def test_documents_with_more_fields_are_an_error() -> None:
    class More(Small):
        other: int = 0

    with pytest.raises(EncodeError, match="subclass"):
        DocumentArray[Small]([Small(number=1), More(number=2)]).stack().to_arrow()


@pytest.mark.parametrize(
    ("times", "zone"),
    [
        ([datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold) for fold in (0, 1)], "Europe/Berlin"),
        ([datetime(2024, 5, 1, tzinfo=timezone(timedelta(hours=-3)))], "-03:00"),
        ([UTC_DAY, datetime(2024, 5, 1, tzinfo=BERLIN)], "UTC"),
        ([datetime(1, 1, 1), datetime.max], None),  # noqa: DTZ001, DTZ901
        ([datetime(2024, 5, 1, tzinfo=timezone(timedelta(seconds=30)))], "UTC"),
    ],
)
def test_timestamps_have_the_zone_of_all_times_or_utc(times: list[datetime], zone: str | None) -> None:
    batch = DocumentArray[Unusual]([Unusual(when=when) for when in [*times, None]]).stack()
    table = batch.to_arrow(["when"])
    assert table.schema.field("when").type == pa.timestamp("us", zone)
    result = DocumentBatch[Unusual].from_arrow(table).when
    assert result[-1] is None
    for one, other in zip(result, times, strict=False):
        assert one.replace(tzinfo=None) - (one.utcoffset() or timedelta()) == (
            other.replace(tzinfo=None) - (other.utcoffset() or timedelta())
        )


# --- stored datasets


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_stored_dataset_is_a_stream(tmp_path: Path, kind: Any) -> None:
    documents = rows(6)
    write_dataset(documents, tmp_path / "rows", format=kind, group_bytes=500)
    dataset = open_dataset(tmp_path / "rows", Row, cache=tmp_path / "cache")
    table = pa.RecordBatchReader.from_stream(dataset).read_all()
    table.validate(full=True)
    assert table.equals(documents.stack(shapes="ragged").to_arrow())
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_stream_has_the_selected_columns_and_rows(tmp_path: Path, kind: Any) -> None:
    write_dataset(rows(6), tmp_path / "rows", format=kind, group_bytes=500)
    options: Any = {"columns": ["number", "inner.name"], "where": {"number": {"$gte": 3}}, "cache": tmp_path}
    dataset = open_dataset(tmp_path / "rows", Row, **options)
    table = pa.RecordBatchReader.from_stream(dataset).read_all()
    assert table.to_pylist() == [{"number": n, "inner": {"name": f"inner {n}"}} for n in (3, 4, 5)]
    assert dataset[:].to_arrow().to_pylist() == table.to_pylist()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_stream_types_do_not_depend_on_blocks_without_values(tmp_path: Path, kind: Any) -> None:
    blocks = [[None, None], [UTC_DAY, None], [datetime(2024, 5, 1, tzinfo=BERLIN)]]
    with DatasetWriter(tmp_path / "rows", Unusual, format=kind, group_bytes=1) as writer:
        for block in blocks:
            writer.write([Unusual(when=when, tensor=when and np.ones(2, np.float32)) for when in block])
    dataset = open_dataset(tmp_path / "rows", Unusual, columns=["when", "tensor"], cache=tmp_path)
    table = pa.RecordBatchReader.from_stream(dataset).read_all()
    assert table.schema.field("when").type == pa.timestamp("us", "UTC")
    assert table["when"].to_pylist() == [when for block in blocks for when in block]
    assert table["tensor"].to_pylist() == [None, None, [1.0, 1.0], None, [1.0, 1.0]]


def test_stream_of_a_dataset_without_rows_has_its_columns(tmp_path: Path) -> None:
    write_dataset([], tmp_path / "rows", Row)
    table = pa.RecordBatchReader.from_stream(open_dataset(tmp_path / "rows", Row, cache=tmp_path)).read_all()
    assert table.num_rows == 0
    assert table.column_names == list(Row.model_fields)


@pytest.mark.needs("polars", "duckdb")
def test_polars_and_duckdb_read_stored_datasets(tmp_path: Path) -> None:
    import duckdb
    import polars as pl

    write_dataset(rows(6), tmp_path / "rows", format="arrow", group_bytes=500)
    dataset = open_dataset(tmp_path / "rows", Row, columns=["number", "color", "when"], cache=tmp_path)
    assert pl.DataFrame(dataset).group_by("color").agg(pl.col("number").sum()).sort("color").rows() == [
        ("blue", 6),
        ("red", 9),
    ]
    assert duckdb.sql("select color, count(*) from dataset group by color order by color").fetchall() == [
        ("blue", 3),
        ("red", 3),
    ]


@pytest.mark.needs("polars", "duckdb")
def test_other_tools_read_the_shards_of_a_dataset(tmp_path: Path) -> None:
    import duckdb
    import polars as pl

    write_dataset(rows(6), tmp_path / "rows")
    [file] = map(str, (tmp_path / "rows").glob("*.parquet"))
    frame = pl.read_parquet(file, columns=["number", "color", "level", "when"])
    assert frame.dtypes == [pl.Int64, pl.String, pl.Int64, pl.Datetime("us", "UTC")]
    query = f"select count(*) from '{file}' where color = 'red' and \"when\" > timestamp '2024-05-02 12:00:00'"
    assert duckdb.sql(query).fetchall() == [(1,)]


def test_stream_reads_a_few_blocks_at_a_time(tmp_path: Path) -> None:
    class Wide(BaseDocument):
        data: NdArray[uint8, 100_000]

    with DatasetWriter(tmp_path / "rows", Wide, format="arrow") as writer:
        for _ in range(16):
            columns = {"data": np.zeros((64, 100_000), np.uint8)}
            writer.write(DocumentBatch[Wide].from_columns(columns))
    reader = pa.RecordBatchReader.from_stream(open_dataset(tmp_path / "rows", Wide, cache=tmp_path))
    tracemalloc.start()
    try:
        total = sum(len(batch) for batch in reader)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == 1024
    assert peak < 50_000_000  # of 102 MB
