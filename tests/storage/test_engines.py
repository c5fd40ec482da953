"""Ray and Spark read what quire wrote, and quire reads what they wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument
from quire.distributed._ray import ray_session
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, float32
from tests.storage.sample_documents import Photo, photos

pytestmark = pytest.mark.needs("ray", "pyspark", "pyarrow")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


class Row(BaseDocument):
    number: int
    text: str
    vector: NdArray[float32, 4]
    words: list[str] = []


def _rows(count: int) -> list[Row]:
    return [Row(number=n, text=f"t{n}", vector=np.full(4, n, np.float32), words=["a"] * (n % 3)) for n in range(count)]


def _check(path: Path, count: int) -> None:
    """Return all rows, in whatever order the engine wrote them."""
    documents = sorted(open_dataset(path, Row)[:].unstack(), key=lambda row: row.number)
    assert [row.number for row in documents] == list(range(count))
    for row, expected in zip(documents, _rows(count), strict=True):
        assert (row.text, row.words, row.vector.tolist()) == (expected.text, expected.words, expected.vector.tolist())


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    there = SparkSession.getActiveSession()
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.shuffle.partitions", "2").config("spark.driver.host", "127.0.0.1").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    if there is None:  # else other tests go on with it
        session.stop()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("storage", ["fixed", "binary", "list"])
def test_spark_reads_a_dataset(tmp_path: Path, spark: Any, storage: Any) -> None:
    write_dataset(_rows(20), tmp_path, tensor_storage=storage, group_bytes=1000, shard_bytes=1000)
    frame = spark.read.parquet(str(tmp_path))
    assert frame.count() == 20
    row = frame.filter("number = 7").collect()[0]
    assert (row.text, row.words) == ("t7", ["a"])
    vector = list(row.vector) if storage == "list" else np.frombuffer(row.vector, np.float32).tolist()
    assert vector == [7.0] * 4


@pytest.mark.filterwarnings("ignore")
def test_spark_reads_nested_documents_and_ragged_tensors(tmp_path: Path, spark: Any) -> None:
    write_dataset(photos(10), tmp_path)
    row = spark.read.parquet(str(tmp_path)).filter("meta.stamp = 50").collect()[0]
    assert (row.number, row.meta.source, row.score) == (5, "camera 5", None)
    assert np.frombuffer(row.boxes.data, np.float32).reshape(row.boxes.shape).tolist() == [[5.0] * 4] * 2


@pytest.mark.filterwarnings("ignore")
def test_dataset_written_by_spark_is_read(tmp_path: Path, spark: Any) -> None:
    write_dataset(_rows(30), tmp_path / "ours", group_bytes=2000, shard_bytes=2000)
    spark.read.parquet(str(tmp_path / "ours")).repartition(3).write.parquet(str(tmp_path / "theirs"))
    _check(tmp_path / "theirs", 30)
    rows = [(n, f"t{n}", [float(n)] * 4, ["a"] * (n % 3)) for n in range(30)]
    frame = spark.createDataFrame(rows, "number int, text string, vector array<float>, words array<string>")
    frame.write.parquet(str(tmp_path / "lists"))
    _check(tmp_path / "lists", 30)
    document = open_dataset(tmp_path / "lists")[0]
    assert document.vector.dtype == np.float32
    frame.withColumn("part", frame.number % 2).write.partitionBy("part").parquet(str(tmp_path / "parted"))
    _check(tmp_path / "parted", 30)
    assert {row.part for row in open_dataset(tmp_path / "parted")[:].unstack()} == {0, 1}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    import ray.data

    there = ray.is_initialized()
    ray_session(num_cpus=1)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    if not there:  # else other tests go on with it
        ray.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_ray_reads_and_writes_a_dataset(tmp_path: Path, ray: Any) -> None:
    write_dataset(_rows(20), tmp_path / "ours", group_bytes=1000, shard_bytes=1000)
    data = ray.data.read_parquet(str(tmp_path / "ours"))
    rows = sorted(data.take_all(), key=lambda row: row["number"])
    assert [row["number"] for row in rows] == list(range(20))
    assert np.frombuffer(rows[7]["vector"], np.float32).tolist() == [7.0] * 4
    data.write_parquet(str(tmp_path / "theirs"))
    _check(tmp_path / "theirs", 20)

    def tensors(batch: dict[str, Any]) -> dict[str, Any]:
        vector = np.stack([np.frombuffer(row, np.float32) for row in batch["vector"]])
        return {"number": batch["number"], "text": batch["text"], "vector": vector}

    data.map_batches(tensors).write_parquet(str(tmp_path / "tensors"))
    result = open_dataset(tmp_path / "tensors", Row)[:]
    assert sorted(map(tuple, result.vector.tolist())) == [(float(n),) * 4 for n in range(20)]


@pytest.mark.filterwarnings("ignore")
def test_ray_reads_nested_documents(tmp_path: Path, ray: Any) -> None:
    write_dataset(photos(6), tmp_path)
    row = next(row for row in ray.data.read_parquet(str(tmp_path)).take_all() if row["number"] == 5)
    assert row["meta"]["source"] == "camera 5"
    assert type(open_dataset(tmp_path)[0]) is Photo
