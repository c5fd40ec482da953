"""Folders of other tools are read, with and without a class."""

from __future__ import annotations

import io
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quire import BaseDocument, DocumentArray
from quire.errors import ShardError, StorageError
from quire.storage import open_dataset
from quire.tensors import DType, Shape
from quire.typing import AnyTensor, NdArray, float32, uint8

pytestmark = pytest.mark.needs("pyarrow")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


def _write(path: Path, array: Any, name: str = "field", kind: str = "parquet") -> None:
    """Write a folder with one file of one column."""
    path.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: array})
    if kind == "parquet":
        pq.write_table(table, path / "part-0.parquet")
    else:
        with pa.ipc.new_file(path / "part-0.arrow", table.schema) as writer:
            writer.write_table(table)


def _read(path: Path, annotation: Any = None) -> list[Any]:
    if annotation is None:
        return [document.field for document in open_dataset(path)[:].unstack()]
    row = type("Row", (BaseDocument,), {"__annotations__": {"field": annotation}, "__module__": __name__})
    return [document.field for document in open_dataset(path, row)[:].unstack()]


_MOMENT = datetime(2024, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
_COLUMNS: dict[str, tuple[Any, Any, list[Any]]] = {
    # the Arrow array, the type of the field, the values
    "int8": (pa.array([1, -1], pa.int8()), int, [1, -1]),
    "uint16": (pa.array([1, 65535], pa.uint16()), int, [1, 65535]),
    "int32": (pa.array([1, 2], pa.int32()), int, [1, 2]),
    "int32 as float": (pa.array([1, 2], pa.int32()), float, [1.0, 2.0]),
    "uint64": (pa.array([1, 2], pa.uint64()), int, [1, 2]),
    "float16": (pa.array(np.array([0.5, 1], np.float16)), float, [0.5, 1.0]),
    "float32": (pa.array([0.5, 1], pa.float32()), float, [0.5, 1.0]),
    "nulls": (pa.array([1, None], pa.int32()), int | None, [1, None]),
    "bool": (pa.array([True, False]), bool, [True, False]),
    "large_string": (pa.array(["a", "b"], pa.large_string()), str, ["a", "b"]),
    "string_view": (pa.array(["a", "b"], pa.string_view()), str, ["a", "b"]),
    "large_binary": (pa.array([b"a", b"b"], pa.large_binary()), bytes, [b"a", b"b"]),
    "fixed binary": (pa.array([b"a", b"b"], pa.binary(1)), bytes, [b"a", b"b"]),
    "dictionary": (pa.array(["a", "b", "a"]).dictionary_encode(), str, ["a", "b", "a"]),
    "dictionary of numbers": (pa.array([5, 6, 5]).dictionary_encode(), int, [5, 6, 5]),
    "date32": (pa.array([date(2024, 1, 2)]), date, [date(2024, 1, 2)]),
    "date64": (pa.array([date(2024, 1, 2)], pa.date64()), date, [date(2024, 1, 2)]),
    "time32": (pa.array([time(1, 2, 3)], pa.time32("ms")), time, [time(1, 2, 3)]),
    "time64": (pa.array([time(1, 2, 3)], pa.time64("ns")), time, [time(1, 2, 3)]),
    "timestamp s": (pa.array([_MOMENT], pa.timestamp("s", "UTC")), datetime, [_MOMENT]),
    "timestamp ms": (pa.array([_MOMENT], pa.timestamp("ms", "UTC")), datetime, [_MOMENT]),
    "timestamp us": (pa.array([_MOMENT], pa.timestamp("us", "UTC")), datetime, [_MOMENT]),
    "timestamp ns": (pa.array([_MOMENT], pa.timestamp("ns", "UTC")), datetime, [_MOMENT]),
    "naive timestamp": (
        pa.array([_MOMENT.replace(tzinfo=None)], pa.timestamp("ns")),
        datetime,
        [_MOMENT.replace(tzinfo=None)],
    ),
    "timestamp in a zone": (pa.array([_MOMENT], pa.timestamp("us", "Europe/Berlin")), datetime, [_MOMENT]),
    "duration": (pa.array([timedelta(seconds=3)], pa.duration("ns")), timedelta, [timedelta(seconds=3)]),
    "decimal": (pa.array([Decimal("1.50")], pa.decimal128(10, 2)), Decimal, [Decimal("1.50")]),
    "list of text": (pa.array([["a"], [], ["b", "c"]]), list[str], [["a"], [], ["b", "c"]]),
    "map": (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())), dict[str, int], [{"a": 1}, {}]),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(("array", "annotation", "expected"), _COLUMNS.values(), ids=_COLUMNS)
def test_column_of_another_writer_is_converted(
    tmp_path: Path, kind: str, array: Any, annotation: Any, expected: list[Any]
) -> None:
    _write(tmp_path, array, kind=kind)
    for result in (_read(tmp_path, annotation), _read(tmp_path)):
        assert len(result) == len(expected)
        assert result == expected


_LISTS: dict[str, tuple[Any, list[Any]]] = {
    "lists": (pa.array([[1, 2], [3, 4]], pa.list_(pa.float32())), [[1, 2], [3, 4]]),
    "large lists": (pa.array([[1, 2], [3, 4]], pa.large_list(pa.float64())), [[1, 2], [3, 4]]),
    "fixed lists": (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), [[1, 2], [3, 4]]),
    "null lists": (pa.array([[1, 2], None], pa.list_(pa.float32(), 2)), [[1, 2], None]),
    "sliced lists": (pa.array([[9, 9], [1, 2], [3, 4]], pa.list_(pa.float32())).slice(1), [[1, 2], [3, 4]]),
    "integers": (pa.array([[1, 2], [3, 4]], pa.list_(pa.uint8())), [[1, 2], [3, 4]]),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(("array", "expected"), _LISTS.values(), ids=_LISTS)
def test_lists_of_numbers_become_tensors(tmp_path: Path, kind: str, array: Any, expected: list[Any]) -> None:
    _write(tmp_path, array, kind=kind)
    for result in (_read(tmp_path, NdArray[float32, 2] | None), _read(tmp_path, NdArray[float32] | None)):
        assert [None if row is None else (row.dtype.name, row.tolist()) for row in result] == [
            None if row is None else ("float32", row) for row in expected
        ]
    results = _read(tmp_path)
    assert [None if row is None else row.tolist() for row in results] == expected
    assert all(row is None or isinstance(row, np.ndarray) for row in results)


def test_lists_of_different_lengths_become_ragged_tensors(tmp_path: Path) -> None:
    rows = [[1.0], [], [2.0, 3.0]]
    _write(tmp_path / "a", pa.array(rows, pa.list_(pa.float32())))
    for result in (_read(tmp_path / "a", NdArray[float32, "n"]), _read(tmp_path / "a")):
        assert [row.tolist() for row in result] == rows
        assert {row.dtype.name for row in result} == {"float32"}
    nested = [[[1, 2]], [[3, 4], [5, 6]], []]
    _write(tmp_path / "b", pa.array(nested, pa.list_(pa.list_(pa.int64(), 2))))
    result = _read(tmp_path / "b", Annotated[np.ndarray, DType("int64")])
    assert [row.tolist() for row in result] == nested
    _write(tmp_path / "c", pa.array([[[1], [2, 3]]]))
    with pytest.raises(ShardError, match=r"part-0.parquet.*Row.field.*different lengths"):
        _read(tmp_path / "c", Annotated[np.ndarray, DType("int64")])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_arrow_tensors_become_tensors(tmp_path: Path, kind: str) -> None:
    data = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    _write(tmp_path / "a", pa.FixedShapeTensorArray.from_numpy_ndarray(data), kind=kind)
    moved = pa.FixedShapeTensorArray.from_numpy_ndarray(np.transpose(data.copy(), (0, 2, 1)))
    _write(tmp_path / "b", moved, kind=kind)
    for result in (_read(tmp_path / "a", NdArray[float32, 2, 3]), _read(tmp_path / "a")):
        assert [row.tolist() for row in result] == data.tolist()
    assert [row.tolist() for row in _read(tmp_path / "b", NdArray[float32, 3, 2])] == np.transpose(
        data, (0, 2, 1)
    ).tolist()


def test_bytes_of_the_right_size_become_a_tensor(tmp_path: Path) -> None:
    data = np.arange(12, dtype=np.uint8).reshape(2, 6)
    for name, kind in (("a", pa.binary(6)), ("b", pa.binary())):
        _write(tmp_path / name, pa.array([row.tobytes() for row in data], kind))
        assert [row.tolist() for row in _read(tmp_path / name, NdArray[uint8, 2, 3])] == data.reshape(2, 2, 3).tolist()


def test_ragged_tensors_are_read_without_their_metadata(tmp_path: Path) -> None:
    rows = [{"data": np.ones(2 * n, np.float32).tobytes(), "shape": [n, 2]} for n in range(3)]
    _write(tmp_path / "a", pa.array(rows))
    assert [row.tolist() for row in _read(tmp_path / "a", NdArray[float32])] == [[[1.0, 1.0]] * n for n in range(3)]
    _write(tmp_path / "b", pa.array([{**row, "dtype": "float32", "framework": "numpy"} for row in rows]))
    assert [row.shape for row in _read(tmp_path / "b", AnyTensor)] == [(0, 2), (1, 2), (2, 2)]
    _write(tmp_path / "c", pa.array([{**rows[0], "shape": [3]}]))
    with pytest.raises(ShardError, match="part-0.parquet.*Row.field"):
        _read(tmp_path / "c", NdArray[float32])


@pytest.mark.needs("PIL")
@pytest.mark.parametrize("how", ["PNG", "JPEG"])
def test_encoded_images_become_tensors(tmp_path: Path, how: str) -> None:
    from PIL import Image

    pixels = np.zeros((8, 6, 3), np.uint8)
    pixels[:, :3] = 250
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, how)
    _write(tmp_path, pa.array([file.getvalue()] * 2))
    for annotation, shape in ((NdArray[uint8, 8, 6, 3], (8, 6, 3)), (NdArray[uint8, 3, "h", "w"], (3, 8, 6))):
        result = _read(tmp_path, annotation)[1]
        assert result.shape == shape
        spread = result if shape[-1] == 3 else result.transpose(1, 2, 0)
        assert np.abs(spread.astype(int) - pixels).max() < 40
    with pytest.raises(ShardError, match="part-0.parquet.*Row.field"):
        _read(tmp_path, NdArray[uint8, 5, 5])
    _write(tmp_path / "bad", pa.array([b"no image"]))
    with pytest.raises(ShardError, match="part-0.parquet.*Row.field"):
        _read(tmp_path / "bad", NdArray[uint8, 5, 5])


def test_times_finer_than_a_microsecond_are_errors(tmp_path: Path) -> None:
    _write(tmp_path, pa.array([1], pa.int64()).cast(pa.timestamp("ns")))
    with pytest.raises(ShardError, match="part-0.parquet.*Row.field"):
        _read(tmp_path, datetime)


class Author(BaseDocument):
    name: str
    age: int | None = None


class Level(str, Enum):
    LOW = "low"
    HIGH = "high"


class Paper(BaseDocument):
    title: str
    first: Author
    authors: DocumentArray[Author] = []
    level: Level = Level.LOW


def test_structs_become_documents(tmp_path: Path) -> None:
    rows = [
        {"title": "a", "first": {"name": "x", "age": 3}, "authors": [{"name": "y", "age": None}], "level": "high"},
        {"title": "b", "first": {"name": "z", "age": None}, "authors": [], "level": "low"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "one.parquet")
    one, two = open_dataset(tmp_path, Paper)[:].unstack()
    assert (one.first.age, one.authors[0].name, one.level) == (3, "y", Level.HIGH)
    assert (two.first.name, len(two.authors), two.level) == ("z", 0, Level.LOW)
    document = open_dataset(tmp_path)[0]
    assert (document.first.name, document.authors[0].name, document.level) == ("x", "y", "high")
    assert len(open_dataset(tmp_path, Paper, where={"level": "high"})) == 1
    assert len(open_dataset(tmp_path, Paper, where={"first.name": "z"}, columns=["first.name"])) == 1


def test_null_in_a_required_field_is_an_error(tmp_path: Path) -> None:
    for name, rows in {
        "a": [{"title": None, "first": {"name": "x"}}],
        "b": [{"title": "a", "first": {"name": None}}],
        "c": [{"title": "a", "first": None}],
        "d": [{"title": "a", "first": {"name": "x"}, "authors": [None]}],
    }.items():
        schema = pa.schema(
            [
                ("title", pa.string()),
                ("first", pa.struct([("name", pa.string())])),
                ("authors", pa.list_(pa.struct([("name", pa.string())]))),
            ]
        )
        (tmp_path / name).mkdir()
        filled = [{"authors": [], **row} for row in rows]
        pq.write_table(pa.Table.from_pylist(filled, schema), tmp_path / name / "one.parquet")
        with pytest.raises(ShardError, match="one.parquet.*Paper"):
            open_dataset(tmp_path / name, Paper).read()


@pytest.mark.needs("pandas")
def test_pandas_frame_with_an_index_and_unusual_names_is_read(tmp_path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame(
        {
            "a b": [1, 2],
            "class": ["x", "y"],
            "_c0": [0.5, None],
            "json": [True, False],
            "when": pd.to_datetime(["2024-01-01", None]),
        },
        index=["r", "s"],
    )
    frame.to_parquet(tmp_path / "frame.parquet")
    dataset = open_dataset(tmp_path)
    one, two = dataset[:].unstack()
    assert (one.a_b, one.column_class, one.c0, one.column_json) == (1, "x", 0.5, True)
    assert (two.c0, two.when, two.index_level_0__) == (None, None, "s")
    assert one.when == datetime(2024, 1, 1)  # noqa: DTZ001 - as pandas has it


@pytest.mark.needs("pandas")
def test_partition_folders_become_columns(tmp_path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame({"number": range(4), "year": [2023, 2023, 2024, 2024], "lang": ["en", "de", "en", "en"]})
    frame.to_parquet(tmp_path, partition_cols=["year", "lang"])

    class Row(BaseDocument):
        number: int
        year: int
        lang: str

    for dataset in (open_dataset(tmp_path), open_dataset(tmp_path, Row)):
        rows = {(row.number, row.year, row.lang) for row in dataset[:].unstack()}
        assert rows == {(0, 2023, "en"), (1, 2023, "de"), (2, 2024, "en"), (3, 2024, "en")}
    assert len(open_dataset(tmp_path, Row, where={"year": 2024})) == 2


def test_replaced_file_is_read_again(tmp_path: Path) -> None:
    _write(tmp_path, pa.array([1, 2]))
    assert _read(tmp_path, int) == [1, 2]
    _write(tmp_path, pa.array([3, 4]))
    assert _read(tmp_path, int) == [3, 4]


def test_hidden_files_are_not_read(tmp_path: Path) -> None:
    _write(tmp_path, pa.array([1]))
    _write(tmp_path / "_temporary", pa.array([2]))
    (tmp_path / "_SUCCESS").write_text("")
    assert _read(tmp_path, int) == [1]


def test_invalid_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    _write(tmp_path, pa.array([1]))
    (tmp_path / "zz.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(StorageError, match=r"zz\.parquet"):
        _read(tmp_path, int)


def test_large_row_groups_are_read_in_parts(tmp_path: Path) -> None:
    data = np.zeros((6, 8 << 20), np.uint8)
    pq.write_table(pa.table({"field": pa.array([row.tobytes() for row in data])}), tmp_path / "one.parquet")

    class Row(BaseDocument):
        field: Annotated[np.ndarray, Shape(8 << 20), DType("uint8")]

    dataset = open_dataset(tmp_path, Row)
    assert [len(batch) for batch in dataset._row_reader.shard_reader.read(dataset.shards[0])] == [2, 2, 2]
    assert dataset[5].field.sum() == 0


def test_inferred_class_of_another_process_is_not_confused_with_one_of_the_same_name() -> None:
    from quire.storage._layout import CLASS_KEY
    from quire.storage._schema_conversion import class_from_arrow, loaded_class

    schema = pa.schema([pa.field("x", pa.int64()), pa.field("y", pa.string())])
    document_type = class_from_arrow(schema, "Made")
    name = f"{document_type.__module__}:{document_type.__qualname__}".encode()
    assert loaded_class(schema.with_metadata({CLASS_KEY: name})) is document_type
    assert loaded_class(pa.schema([pa.field("z", pa.int64())]).with_metadata({CLASS_KEY: name})) is None
