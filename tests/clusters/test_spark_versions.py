"""Shards on whatever Spark is installed, from 3.4 on: `nox -s spark_old` runs it on those before 4."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.distributed import DocumentShards, engine
from quire.errors import PartitionError
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, float16, uint8
from tests.distributed.sample_stages import Everything, everything

pytestmark = [pytest.mark.needs("pyarrow", "pyspark", "ml_dtypes"), pytest.mark.filterwarnings("ignore")]
ROWS = 20


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    spark_engine = engine("spark", master="local[2]", **{"spark.sql.shuffle.partitions": "2"})
    yield spark_engine
    spark_engine.close()


@pytest.fixture
def documents() -> DocumentArray[Everything]:
    return DocumentArray[Everything]([everything(number) for number in range(ROWS)])


def by_number(documents: Any) -> list[Any]:
    return sorted(documents, key=lambda document: document.number)


def doubled(document: Everything) -> Everything:
    document.number *= 2
    document.image = document.image + 1
    return document


def test_documents_come_back(spark: Any, documents: DocumentArray[Everything]) -> None:
    shards = DocumentShards.from_documents(documents, num_partitions=3, engine=spark)
    assert (len(shards), shards.num_partitions()) == (ROWS, 3)
    assert shards.collect().identical(documents)
    assert shards.head(5).identical(documents[:5])


def test_a_dataset_is_read_mapped_and_written(spark: Any, documents: DocumentArray[Everything], tmp_path: Path) -> None:
    write_dataset(documents, tmp_path / "source", group_bytes=2000, shard_bytes=4000)
    shards = DocumentShards[Everything].read_parquet(tmp_path / "source", num_partitions=4, engine=spark)
    shards.map(doubled).filter(lambda document: document.number < 30).write_dataset(tmp_path / "target")
    rows_read = open_dataset(tmp_path / "target", Everything)[:].unstack()
    assert [document.number for document in rows_read] == [2 * number for number in range(15)]
    assert (rows_read[3].image == everything(3).image + 1).all()


class Flat(BaseDocument):
    """Without documents inside, which Spark 3.4 cannot move."""

    number: int
    image: NdArray[uint8, 2, 2]
    half: NdArray[float16, 3] | None
    text: str | None
    key: UUID
    span: timedelta
    anything: Any


def flat(number: int) -> Flat:
    half = None if number % 3 == 0 else np.full(3, number, np.float16)
    image, text = np.full((2, 2), number, np.uint8), None if number % 4 == 0 else f"text {number % 7}"
    key, span = UUID(int=number), timedelta(seconds=number)
    return Flat(
        id=f"{number}", number=number, image=image, half=half, text=text, key=key, span=span, anything={"x": [number]}
    )


@pytest.fixture
def flats() -> DocumentArray[Flat]:
    return DocumentArray[Flat]([flat(number) for number in range(ROWS)])


def test_frames_go_both_ways(spark: Any, flats: DocumentArray[Flat]) -> None:
    frame = DocumentShards.from_documents(flats, engine=spark).to_spark()
    assert frame.schema["image"].metadata["tensor"] == {"dtype": "uint8", "shape": [2, 2]}
    half = frame.filter("number >= 10").repartition(3)
    back = DocumentShards[Flat].from_spark(half)
    assert by_number(back.collect()) == list(flats[10:])
    assert back.num_partitions() == 3


def test_rows_move(spark: Any, flats: DocumentArray[Flat]) -> None:
    shards = DocumentShards.from_documents(flats, num_partitions=3, engine=spark)
    assert by_number(shards.repartition(2).collect()) == list(flats)
    assert by_number(shards.shuffle(1).collect()) == list(flats)
    assert by_number(shards.partition_by("text", 2).collect()) == list(flats)


def test_rows_are_kept_and_joined(spark: Any, documents: DocumentArray[Everything]) -> None:
    shards = DocumentShards.from_documents(documents, num_partitions=3, engine=spark)
    both = DocumentShards.concat([shards.cache(), shards])
    assert list(both.collect()) == [*documents, *documents]
    assert both.unique("number") == list(range(ROWS))


def test_an_error_tells_where_it_was(spark: Any, documents: DocumentArray[Everything]) -> None:
    def fails(document: Everything) -> Everything:
        if document.number == 13:
            raise ValueError("unlucky")
        return document

    shards = DocumentShards.from_documents(documents, num_partitions=2, engine=spark)
    with pytest.raises(PartitionError, match="unlucky") as info:
        shards.map(fails).collect()
    assert (info.value.partition, info.value.document, info.value.id) == (1, 3, "id 0013")
    assert "ValueError: unlucky" in info.value.traceback
