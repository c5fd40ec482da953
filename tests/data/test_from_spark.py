"""Frames of a real Spark, on this machine, as datasets for training."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentBatch
from quire.data import from_spark
from quire.errors import OptionError, SchemaError
from quire.typing import NdArray, float32

pytestmark = pytest.mark.needs("pyspark", "pyarrow", "torch")
ROWS = 50


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    there = SparkSession.getActiveSession()
    builder = SparkSession.builder.master("local[1]").appName("quire")
    for name, value in {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # it starts sooner
        "spark.sql.codegen.wholeStage": "false",
    }.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    if there is None:  # else other tests go on with it
        session.stop()


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """Every kind of column: numbers, texts, vectors of Spark ML, arrays of one and of many lengths, nested, null."""
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import types as sql

    inner = sql.StructType([sql.StructField("x", sql.DoubleType()), sql.StructField("tag", sql.StringType())])
    fields = {
        "number": sql.LongType(),
        "weight": sql.DoubleType(),
        "name": sql.StringType(),
        "vector": VectorUDT(),
        "fixed": sql.ArrayType(sql.DoubleType()),
        "ragged": sql.ArrayType(sql.IntegerType()),
        "where": inner,
        "boxes": sql.ArrayType(inner),
        "day": sql.DateType(),
        "price": sql.DecimalType(10, 2),
        "note": sql.StringType(),
    }
    rows = [
        (
            i,
            i / 4,
            f"row {i}",
            Vectors.sparse(3, {1: float(i)}) if i % 2 else Vectors.dense([i, 0.5, -1]),
            [float(i), 1.5],
            list(range(i % 3)),
            (float(i), f"tag {i}"),
            [(float(k), None) for k in range(i % 3)],
            date(2024, 1, 1 + i % 28),
            Decimal(i) / 4,
            None if i % 2 else "even",
        )
        for i in range(ROWS)
    ]
    schema = sql.StructType([sql.StructField(name, kind) for name, kind in fields.items()])
    return spark.createDataFrame(rows, schema).repartition(2)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frames")


@pytest.fixture(scope="module")
def converter(frame: Any, cache: Path) -> Any:
    return from_spark(frame, cache=cache, dtype="float32")


def test_from_spark_derives_typed_columns(converter: Any) -> None:
    assert len(converter) == ROWS
    described = str(converter.document_type.document_schema())
    for part in (
        "number: int",
        "weight: float",
        "vector: NdArray[float32, 3]",
        "fixed: NdArray[float32, 2]",
        "ragged: NdArray[int32]",
        "where: Row_where",
        "boxes: DocumentArray[Row_boxes]",
        "day: date",
        "price: Decimal",
        "note: str | None",
    ):
        assert part in described, described


def test_every_row_comes_once_with_its_values(converter: Any) -> None:
    seen = set()
    with converter.make_torch_dataloader(batch_size=8, shapes="ragged", workers_count=2) as loader:
        assert len(loader) == 7
        for batch in loader:
            for document in batch:
                i = document.number
                seen.add(i)
                assert (document.weight, document.name) == (i / 4, f"row {i}")
                assert document.vector.tolist() == ([0, i, 0] if i % 2 else [i, 0.5, -1])
                assert document.fixed.tolist() == [i, 1.5]
                assert document.ragged.tolist() == list(range(i % 3))
                assert (document.where.x, document.where.tag) == (i, f"tag {i}")
                assert [box.x for box in document.boxes] == list(range(i % 3))
                assert document.day == date(2024, 1, 1 + i % 28)
                assert document.price == Decimal(i) / 4
                assert document.note == (None if i % 2 else "even")
    assert seen == set(range(ROWS))


def test_batches_have_torch_tensors_and_passes_differ_in_order(converter: Any) -> None:
    import torch

    dataset = converter.dataset(8, columns=["number", "vector"], framework="torch")
    first, second = ([batch.number.tolist() for batch in dataset] for _ in range(2))
    for order in (first, second):
        assert sorted(number for batch in order for number in batch) == list(range(ROWS))
    assert first != second
    batch = next(iter(dataset))
    assert isinstance(batch, DocumentBatch)
    assert batch.vector.dtype == torch.float32
    assert batch.vector.shape == (8, 3)


def test_loader_ends_after_epochs_and_torch_loader_reads_the_dataset(converter: Any) -> None:
    from torch.utils.data import DataLoader

    with converter.make_torch_dataloader(8, num_epochs=3, columns=["number"], last="drop") as loader:
        assert sum(len(batch) for batch in loader) == 3 * 48
    with converter.make_torch_dataloader(
        8, data_loader_fn=lambda dataset: DataLoader(dataset, batch_size=None), columns=["number"]
    ) as loader:
        assert isinstance(loader, DataLoader)
        assert sorted(number for batch in loader for number in batch.number.tolist()) == list(range(ROWS))
    with converter.make_torch_dataloader(8, num_epochs=None, columns=["number"]) as loader:
        batches = iter(loader)
        assert len([next(batches) for _ in range(20)]) == 20
    with pytest.raises(OptionError, match="num_epochs"), converter.make_torch_dataloader(8, epochs=2):
        pass


def test_shards_are_ranks_by_the_names_of_petastorm(converter: Any) -> None:
    numbers: list[int] = []
    for shard in range(2):
        with converter.make_torch_dataloader(8, columns=["number"], cur_shard=shard, shard_count=2) as loader:
            numbers += [number for batch in loader for number in batch.number.tolist()]
    assert sorted(numbers) == list(range(ROWS))
    both = {"cur_shard": 0, "shard_count": 2, "rank": 0, "world_size": 2}
    with pytest.raises(OptionError, match="pass either of them"), converter.make_torch_dataloader(8, **both):
        pass


@pytest.mark.needs("tensorflow")
def test_make_tf_dataset_yields_rows(converter: Any) -> None:
    with converter.make_tf_dataset(
        8, num_epochs=2, columns=["number", "vector"], features="vector", labels="number"
    ) as ds:
        labels_read = [number for _, labels in ds for number in labels.numpy().tolist()]
    assert sorted(labels_read) == sorted([*range(ROWS)] * 2)
    with converter.make_tf_dataset(8, num_epochs=None, columns=["number"], features="number") as ds:
        assert len(list(ds.take(20))) == 20


def test_equal_plans_are_written_once(frame: Any, converter: Any, cache: Path) -> None:
    assert from_spark(frame.select("*"), cache=cache, dtype="float32") is converter
    assert len(list(cache.glob("quire-*"))) == 1
    other = from_spark(frame.where("number < 10").select("number", "fixed"), cache=cache)
    assert other is not converter
    assert len(other) == 10
    assert "fixed: NdArray[float64, 2]" in str(other.document_type.document_schema())
    other.delete()
    other.delete()
    assert len(list(cache.glob("quire-*"))) == 1


def test_class_selects_its_columns(frame: Any, cache: Path) -> None:
    class Point(BaseDocument):
        number: int
        vector: NdArray[float32, 3]
        label: int = 7

    point_converter = from_spark(frame, Point, cache=cache, dtype="float32")
    batch = point_converter.dataset(ROWS, shuffle=False)[[0, 1]]
    assert batch.document_type is Point
    assert batch.label.tolist() == [7, 7]
    point_converter.delete()

    class Missing(Point):
        weigth: float

    with pytest.raises(SchemaError, match="Missing.weigth: the frame has no such column. Did you mean 'weight'"):
        from_spark(frame, Missing, cache=cache)


def test_unpickled_converter_reads_and_keeps_the_files(converter: Any) -> None:
    program = (
        "import pickle, sys\n"
        "made = pickle.load(sys.stdin.buffer)\n"
        "with made.make_torch_dataloader(16, columns=['number', 'vector']) as loader:\n"
        "    print(len(made), sum(int(batch.number.sum()) for batch in loader))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(converter), capture_output=True, check=True
    )
    assert ran.stdout.split() == [b"50", str(sum(range(ROWS))).encode()]
    assert Path(converter.url).is_dir()


def test_files_are_removed_at_the_end_of_the_process(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from quire.data import _spark\n"
        "from quire.data._spark import WrittenFrame\n"
        "import pyarrow as pa, os\n"
        "os.mkdir(sys.argv[1])\n"
        "converter = _spark.SparkConverter(WrittenFrame(sys.argv[1], 0, pa.schema([('x', pa.int64())])))\n"
        "_spark._converters.append((None, (), converter))\n"
        "_spark._remove_files_at_exit()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "quire-x")], check=True)
    assert not (tmp_path / "quire-x").exists()


def test_from_spark_rejects_wrong_calls(frame: Any, cache: Path) -> None:
    with pytest.raises(OptionError, match="takes a DataFrame of Spark, got ndarray"):
        from_spark(np.zeros(3))
    with pytest.raises(OptionError, match="dtype='float16'"):
        from_spark(frame, cache=cache, dtype="float16")  # type: ignore[arg-type]
