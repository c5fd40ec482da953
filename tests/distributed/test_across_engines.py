"""Moving documents between engines: by datasets, by files, and by native objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quire import BaseDocument, DocumentArray
from quire.distributed import DocumentShards
from quire.errors import PartitionError
from quire.storage import open_dataset
from quire.typing import NdArray, float32, float64, uint8
from tests.distributed.sample_stages import Everything, Sizes, everything

pytestmark = [
    pytest.mark.needs("pyarrow", "ray", "pyspark", "ml_dtypes", "pandas"),
    pytest.mark.filterwarnings("ignore"),
]
NAMES = ("local", "ray", "spark")
ROWS = 12
Start = Callable[[str], Any]


def documents() -> DocumentArray[Everything]:
    return DocumentArray[Everything]([everything(number) for number in range(ROWS)])


def by_number(actual: Any) -> list[Any]:
    return sorted(actual, key=lambda document: document.number)


@pytest.mark.parametrize("writer", NAMES)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_dataset_written_by_one_engine_is_read_by_the_others(
    start_engine: Start, tmp_path: Path, writer: str, kind: Any
) -> None:
    shards = DocumentShards.from_documents(documents(), num_partitions=3, engine=start_engine(writer))
    shards.write_dataset(tmp_path, format=kind)
    for reader in NAMES:
        actual = DocumentShards[Everything].read_parquet(tmp_path, num_partitions=2, engine=start_engine(reader))
        assert actual.collect().identical(documents())


@pytest.mark.parametrize("name", NAMES)
def test_shards_move_between_engines(start_engine: Start, name: str) -> None:
    shards = DocumentShards.from_documents(documents(), num_partitions=2, engine=start_engine(name))
    for native in (shards.to_ray(), shards.to_spark()):
        assert by_number(DocumentShards[Everything].from_native(native).collect()) == list(documents())


class Sensor(BaseDocument):
    number: int
    fixed: NdArray[float32, 2, 2]
    ragged: NdArray[float64, "n"]
    flags: NdArray[uint8, 3] | None = None


def test_ray_tensor_columns_become_tensor_fields(start_engine: Start) -> None:
    start_engine("ray")
    import ray.data

    rows = [
        {"number": n, "fixed": np.full((2, 2), n, np.float32), "ragged": np.full(n % 3, n, np.float64)}
        for n in range(6)
    ]
    actual = by_number(DocumentShards[Sensor].from_ray(ray.data.from_items(rows)).collect())
    assert [document.fixed.tolist() for document in actual] == [row["fixed"].tolist() for row in rows]
    assert [document.ragged.tolist() for document in actual] == [row["ragged"].tolist() for row in rows]
    stacked = ray.data.from_numpy(np.arange(24, dtype=np.uint8).reshape(8, 3))
    created = DocumentShards.from_ray(stacked.rename_columns({"data": "flags"}))
    assert created.first().flags.tolist() == [0, 1, 2]
    assert created.first().flags.dtype == np.uint8


def test_ray_blocks_of_pandas_become_documents(start_engine: Start) -> None:
    start_engine("ray")
    import pandas as pd
    import ray.data

    class Word(BaseDocument):
        number: int
        word: str

    data = ray.data.from_pandas(pd.DataFrame({"number": [1, 2], "word": ["a", "b"]}))
    actual = by_number(DocumentShards[Word].from_ray(data).collect())
    assert [(document.number, document.word) for document in actual] == [(1, "a"), (2, "b")]


def test_native_ray_operations_keep_documents(start_engine: Start) -> None:
    data = DocumentShards.from_documents(documents(), engine=start_engine("ray")).to_ray()
    sorted_again = data.sort("number", descending=True).filter(expr="number >= 4").limit(3)
    actual = DocumentShards[Everything].from_ray(sorted_again).collect()
    assert list(actual) == [everything(11), everything(10), everything(9)]


def test_native_spark_operations_keep_documents(start_engine: Start) -> None:
    engine = start_engine("spark")
    frame = DocumentShards.from_documents(documents(), engine=engine).to_spark()
    assert frame.schema["brain"].metadata["tensor"] == {"dtype": "bfloat16", "shape": [5]}
    few = engine.session.createDataFrame([(number, number * 2) for number in (3, 5, 99)], "number long, twice long")
    joined = frame.join(few, "number").orderBy("number", ascending=False).drop("twice")
    assert list(DocumentShards[Everything].from_spark(joined).collect()) == [everything(5), everything(3)]
    inner = frame.select("number", "inner.*").drop("id")
    assert inner.schema["mask"].metadata["tensor"] == {"dtype": "uint8", "shape": [2, 2]}
    actual = by_number(DocumentShards.from_spark(inner).collect())
    assert (actual[7].mask == everything(7).inner.mask).all()


def test_null_rows_of_an_outer_join_are_rejected(start_engine: Start) -> None:
    engine = start_engine("spark")
    frame = DocumentShards.from_documents(documents(), engine=engine).to_spark()
    more = engine.session.createDataFrame([(99,)], "number long")
    with pytest.raises(PartitionError, match="the field is not optional"):
        DocumentShards[Everything].from_spark(more.join(frame, "number", "left")).collect()


@pytest.mark.parametrize("name", ["ray", "spark"])
def test_files_written_natively_are_read_by_other_engines(start_engine: Start, tmp_path: Path, name: str) -> None:
    native = DocumentShards.from_documents(documents(), num_partitions=2, engine=start_engine(name)).native
    if name == "spark":
        native.write.parquet(str(tmp_path / "files"))
    else:
        native.write_parquet(str(tmp_path / "files"))
    for reader in NAMES:
        actual = DocumentShards[Everything].read_parquet(tmp_path / "files", engine=start_engine(reader))
        assert by_number(actual.collect()) == list(documents())
    assert by_number(open_dataset(tmp_path / "files", Everything)[:].unstack()) == list(documents())
    created = DocumentShards.read_parquet(tmp_path / "files", columns=["image", "half"]).first()
    assert (created.image.shape, created.image.dtype, created.half.dtype) == ((3, 4, 4), np.uint8, np.float16)


def test_spark_ml_vectors_become_tensors(start_engine: Start) -> None:
    from pyspark.ml.linalg import Vectors

    session = start_engine("spark").session
    rows = [(n, Vectors.dense([n, 1.0, 2.0, 3.0]), [float(n)] * (n % 3)) for n in range(4)]
    frame = session.createDataFrame(rows, ["number", "vector", "ragged"])

    class Vector(BaseDocument):
        number: int
        vector: NdArray[float64, 4]
        ragged: NdArray[float64, "n"]

    actual = by_number(DocumentShards[Vector].from_spark(frame).collect())
    assert [document.vector.tolist() for document in actual] == [[float(n), 1.0, 2.0, 3.0] for n in range(4)]
    assert [document.ragged.tolist() for document in actual] == [[float(n)] * (n % 3) for n in range(4)]


def test_spark_limits_the_bytes_of_a_batch(start_engine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.distributed import _spark

    monkeypatch.setattr(_spark, "_BATCH_BYTES", 1 << 20)
    engine = start_engine("spark")
    frame = engine.session.range(0, 64, 1, 2).selectExpr("id", "CAST(repeat('x', 262144) AS binary) AS data")
    actual = engine.collect(engine.run(engine.from_native(frame), Sizes()))
    table = pa.Table.from_batches(actual)
    assert sum(table.column("rows").to_pylist()) == 64
    assert max(table.column("bytes").to_pylist()) < 3 << 20
