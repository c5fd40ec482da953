"""XShards on every engine: one program, and the same results from each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from quire import BaseDocument, DocumentArray
from quire.distributed import DocumentShards, PartitionError, XShards
from quire.distributed._row_containers import concat_rows
from quire.errors import OptionError
from quire.typing import NdArray, float16, uint8

pytestmark = [pytest.mark.needs("pandas", "pyarrow", "ray", "pyspark"), pytest.mark.filterwarnings("ignore")]


class Row(BaseDocument):
    place: str
    value: float


def table(rows: int) -> pd.DataFrame:
    places = [None if i % 7 == 6 else f"p{i % 3}" for i in range(rows)]
    return pd.DataFrame({"place": places, "value": np.arange(rows) / 2, "row": range(rows)})


def test_arrays_in_partitions_are_transformed_and_counted(engine: Any) -> None:
    images, labels = np.arange(60, dtype=np.float32).reshape(10, 2, 3), np.arange(10)
    shift = 100

    def in_place(data: Any, factor: int, *, plus: int) -> dict[str, Any]:
        data[0][:] *= factor  # the function has its own copy
        return {"x": data[0] + plus, "y": data[1] + shift}

    shards = XShards.partition([images, labels], 3, engine=engine).transform_shard(in_place, 2, plus=1)
    assert shards.num_partitions() == 3
    assert len(shards) == 10
    whole = concat_rows(shards.collect())
    assert whole["x"].dtype == np.float32
    assert np.array_equal(whole["x"], images * 2 + 1)
    assert whole["y"].tolist() == list(range(100, 110))
    assert whole["x"].flags.writeable
    assert np.array_equal(images, np.arange(60, dtype=np.float32).reshape(10, 2, 3))
    assert shards["y"].head(4).tolist() == [100, 101, 102, 103]


def test_exchanges_are_the_same_on_every_engine(engine: Any) -> None:
    keyed = XShards.partition(table(20), 3, engine=engine).partition_by(["place"], 4)
    here = XShards.partition(table(20), 3).partition_by(["place"], 4).collect()
    there = keyed.collect()
    assert sum(map(len, here)) == 20
    for mine, theirs in zip(here, there, strict=True):
        pd.testing.assert_frame_equal(mine, theirs)
    evened = keyed.repartition(7)
    assert evened.num_partitions() == 7
    assert [len(part) for part in evened.collect()] == [2, 3, 3, 3, 3, 3, 3]
    pd.testing.assert_frame_equal(concat_rows(evened.take(4)), concat_rows(here).iloc[:11])
    assert keyed["row"].unique().tolist() == concat_rows(here)["row"].tolist()


def test_object_engines_accept_empty_partitions(engine: Any) -> None:
    shards = XShards.partition(table(2), 4, engine=engine)
    few = shards.transform_shard(lambda frame: frame[frame["row"] > 0])
    assert len(few) == 1
    assert [len(part) for part in few.collect()] == [0, 0, 0, 1]
    assert few.partition_by("place", 3).repartition(2).head()["row"].tolist() == [1]
    assert few["place"].unique().tolist() == ["p1"]
    assert list(few.first().columns) == ["place", "value", "row"]


class Counting:
    """Knows how often it was called, and where."""

    def __init__(self, start: int) -> None:
        self.calls = start

    def __call__(self, _: Any) -> tuple[int, int]:
        self.calls += 1
        return os.getpid(), self.calls


def test_stateful_object_is_created_once_per_worker(engine: Any) -> None:
    shards = XShards.partition(np.arange(8), 8, engine=engine)
    actual = shards.transform_shard(Counting, 10).collect()
    assert min(calls for _, calls in actual) == 11
    assert max(calls for _, calls in actual) > 11
    assert len({process for process, _ in actual}) <= 8


def test_error_has_partition_function_and_remote_traceback(engine: Any) -> None:
    def picky(part: Any) -> Any:
        if 5 in part:
            raise LookupError("five")
        return part

    shards = XShards.partition(np.arange(9), 3, engine=engine).transform_shard(picky)
    with pytest.raises(PartitionError, match=r"partition 1: .*picky\(\): LookupError: five") as caught:
        shards.transform_shard(np.negative).repartition(2).collect()
    assert caught.value.partition == 1
    assert isinstance(caught.value.__cause__, LookupError)
    assert "in picky" in caught.value.traceback
    assert shards.first().tolist() == [0, 1, 2]


class UnsendableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_unpicklable_error_is_still_reported(engine: Any) -> None:
    def failing(_: Any) -> Any:
        raise UnsendableError(1, 2)

    with pytest.raises(PartitionError, match=r"partition 0: .*failing\(\): UnsendableError: 1 and 2") as caught:
        XShards.partition(np.arange(2), 1, engine=engine).transform_shard(failing).collect()
    assert "in failing" in caught.value.traceback
    assert caught.value.__cause__ is not None


def test_unpicklable_result_is_an_error(start_engine: Callable[[str], Any]) -> None:
    for name in ("processes", "ray", "spark"):
        shards = XShards.partition(np.arange(2), 2, engine=start_engine(name))
        with pytest.raises(PartitionError, match="(?i)pickle|serializ"):
            shards.transform_shard(lambda _: threading.Lock()).collect()


def test_cache_computes_objects_once(engine: Any) -> None:
    drawn = XShards.partition(np.arange(4), 2, engine=engine)
    shards = drawn.transform_shard(lambda part: np.random.default_rng().random(len(part)))
    assert not np.array_equal(concat_rows(shards.collect()), concat_rows(shards.collect()))
    assert shards.cache().is_cached()
    first = concat_rows(shards.collect())
    assert np.array_equal(concat_rows(shards.repartition(1).collect()), first)
    one, other = shards.zip(shards.transform_shard(np.negative)).split()
    assert np.array_equal(concat_rows(one.collect()), -concat_rows(other.collect()))
    assert not shards.uncache().is_cached()
    assert not np.array_equal(concat_rows(shards.collect()), first)


def test_any_object_can_be_a_partition(engine: Any) -> None:
    values = [{1, 2}, "text", None, Row(place="a", value=1.0), {"a": [1, {"b": b"c"}]}]
    assert XShards.from_objects(values, engine=engine).collect() == values
    assert len(XShards.from_objects([1, 2], engine=engine)) == 2


def test_native_rows_round_trip(engine: Any) -> None:
    shards = XShards.partition(table(10), 3, engine=engine)
    native = shards.native
    if engine.name == "ray":
        native = native.sort("row", descending=True)
    elif engine.name == "spark":
        native = native.orderBy(native.row.desc())
    else:
        native = native.sort_values("row", ascending=False)
    back = XShards.from_native(native, engine=engine)
    assert concat_rows(back.collect())["row"].tolist() == list(range(9, -1, -1))
    assert len(back) == 10
    assert back.num_partitions() >= 1
    assert concat_rows(back.repartition(3).select("value").collect())["value"].tolist() == [
        i / 2 for i in range(9, -1, -1)
    ]


def test_zip_rejects_shards_of_two_engines(start_engine: Callable[[str], Any]) -> None:
    ours = XShards.partition(np.arange(2), 2)
    theirs = XShards.partition(np.arange(2), 2, engine=start_engine("ray"))
    with pytest.raises(OptionError, match="on local and ray"):
        ours.zip(theirs)


def test_large_objects_are_sent_in_pieces(start_engine: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of Spark holds less than 2 GiB."""
    from quire.distributed import _spark_objects

    monkeypatch.setattr(_spark_objects, "_PIECE_BYTES", 1000)
    data = np.random.default_rng(0).random(1000)
    shards = XShards.partition(data, 2, engine=start_engine("spark"))
    assert shards._node.held.count() == 10  # type: ignore[attr-defined]
    assert np.array_equal(concat_rows(shards.transform_shard(np.negative).collect()), -data)


def test_as_documents_accepts_frames_and_dicts(engine: Any) -> None:
    frame = table(10)[["place", "value"]].fillna({"place": "nowhere"})
    shards = XShards.partition(frame, 3, engine=engine)
    documents = shards.as_documents(Row)
    assert isinstance(documents, DocumentShards[Row])
    assert documents.num_partitions() == 3
    actual = documents.filter(lambda row: row.value >= 3).collect()
    assert [(row.place, row.value) for row in actual] == list(frame.itertuples(index=False, name=None))[6:]
    dicts = shards.transform_shard(lambda part: {"place": part["place"].tolist(), "value": part["value"].to_numpy()})
    assert [row.value for row in dicts.repartition(2).as_documents(Row).collect()] == frame["value"].tolist()
    ids = [row.id for row in documents.collect()]
    assert len(set(ids)) == 10
    assert ids == [row.id for row in documents.collect()]


def test_as_documents_rejects_invalid_rows(engine: Any) -> None:
    shards = XShards.from_objects([[{"place": "a", "value": 1}], [{"place": "b", "value": "much"}]], engine=engine)
    with pytest.raises(PartitionError, match=r"(?s)partition 1: as_documents\(\).*Row\nvalue\n"):
        shards.as_documents(Row).collect()


class Photo(BaseDocument):
    pixels: NdArray[uint8, 2, 2]
    vector: NdArray[float16, "n"]
    name: str | None = None


def test_from_documents_yields_document_arrays(engine: Any) -> None:
    photos = [
        Photo(id=str(i), pixels=np.full((2, 2), i, np.uint8), vector=np.ones(i % 3, np.float16), name=None)
        for i in range(7)
    ]
    shards = XShards.from_documents(DocumentShards[Photo].from_documents(photos, num_partitions=3, engine=engine))
    assert shards.num_partitions() == 3
    assert len(shards) == 7
    whole = concat_rows(shards.collect())
    assert isinstance(whole, DocumentArray[Photo])
    assert list(whole) == photos
    assert whole[5].pixels.dtype == np.uint8
    assert whole[5].vector.dtype == np.float16
    sums = shards.transform_shard(lambda part: int(sum(photo.pixels.sum() for photo in part))).collect()
    assert sum(sums) == 4 * sum(range(7))
    assert concat_rows(shards.as_pandas().collect())["id"].tolist() == [str(i) for i in range(7)]
