"""The recipe "Add an engine" of CONTRIBUTING.md: any object with the methods of the contract is an engine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.distributed import DocumentShards
from quire.distributed._engine import Frame, Stage
from quire.errors import PartitionError
from quire.storage import open_dataset
from quire.typing import NdArray, float32

pytestmark = pytest.mark.needs("pyarrow", "cloudpickle")

Parts = list[list[pa.RecordBatch]]


class EagerEngine:
    """The smallest engine: runs eagerly in this process; partitions are lists of record batches."""

    name, workers = "eager", 2

    def from_batches(self, partitions: Sequence[Sequence[pa.RecordBatch]], schema: pa.Schema) -> Frame[Parts]:
        return Frame([list(batches) for batches in partitions], schema)

    def from_stage(self, stage: Stage, partitions: int) -> Frame[Parts]:
        return Frame([list(stage(number, iter(()))) for number in range(partitions)], stage.schema)

    def from_native(self, native: Any) -> Frame[Parts]:
        if not isinstance(native, pa.Table):
            raise TypeError(f"an Arrow table, not {type(native).__name__}")
        return Frame([native.to_batches()], native.schema)

    def run(self, frame: Frame[Parts], stage: Stage) -> Frame[Parts]:
        return Frame([list(stage(number, iter(part))) for number, part in enumerate(frame.native)], stage.schema)

    def select(self, frame: Frame[Parts], names: Sequence[str]) -> Frame[Parts]:
        schema = pa.schema([frame.schema.field(name) for name in names], frame.schema.metadata)
        return Frame([[batch.select(list(names)) for batch in part] for part in frame.native], schema)

    def limit(self, frame: Frame[Parts], rows: int) -> Frame[Parts]:
        return Frame([self._table(frame).slice(0, rows).to_batches()], frame.schema)

    def union(self, frames: Sequence[Frame[Parts]]) -> Frame[Parts]:
        return Frame([part for frame in frames for part in frame.native], frames[0].schema)

    def repartition(self, frame: Frame[Parts], partitions: int) -> Frame[Parts]:
        table = self._table(frame)
        edges = [len(table) * number // partitions for number in range(partitions + 1)]
        parts = [table.slice(a, b - a).to_batches() for a, b in pairwise(edges)]
        return Frame(parts, frame.schema)

    def exchange(self, frame: Frame[Parts], name: str, partitions: int) -> Frame[Parts]:
        table = self._table(frame)
        parts = [table.filter(pc.equal(table.column(name), number)).to_batches() for number in range(partitions)]
        return Frame(parts, frame.schema)

    def shuffle(self, frame: Frame[Parts], seed: int) -> Frame[Parts]:
        table = self._table(frame)
        rows = random.Random(seed).sample(range(len(table)), len(table))
        return self.repartition(Frame([table.take(rows).to_batches()], frame.schema), len(frame.native))

    def cache(self, frame: Frame[Parts]) -> Frame[Parts]:
        return frame

    def iter_batches(self, frame: Frame[Parts]) -> Iterator[pa.RecordBatch]:
        return (batch for part in frame.native for batch in part if len(batch))

    def collect(self, frame: Frame[Parts]) -> list[pa.RecordBatch]:
        return list(self.iter_batches(frame))

    def count(self, frame: Frame[Parts]) -> int:
        return sum(map(len, self.iter_batches(frame)))

    def num_partitions(self, frame: Frame[Parts]) -> int:
        return len(frame.native)

    def close(self) -> None:
        pass

    def _table(self, frame: Frame[Parts]) -> pa.Table:
        return pa.Table.from_batches(self.collect(frame), frame.schema)


class Photo(BaseDocument):
    pixels: NdArray[float32, 2, 2]
    place: str
    number: int


class Feature(BaseDocument):
    vector: NdArray[float32, 2]
    number: int


def photos(number: int) -> DocumentArray[Photo]:
    return DocumentArray[Photo](
        Photo(id=f"{i:03d}", pixels=np.full((2, 2), i, np.float32), place=("Bath", "Cork", "Ely")[i % 3], number=i)
        for i in range(number)
    )


def describe(batch: DocumentBatch[Photo]) -> DocumentBatch[Feature]:
    return DocumentBatch[Feature].from_columns(
        {"id": batch.id, "vector": batch.pixels.mean(axis=1), "number": batch.number}
    )


def fail_on_seven(photo: Photo) -> Photo:
    if photo.number == 7:
        raise ValueError("not this one")
    return photo


def shards(engine: Any) -> DocumentShards[Photo]:
    return DocumentShards[Photo].from_documents(photos(60), num_partitions=4, engine=engine)


def test_new_engine_returns_the_same_documents_as_the_local_engine(tmp_path: Path) -> None:
    own, local = shards(EagerEngine()), shards("local")
    assert own.collect().identical(local.collect())
    assert own.map_batch(describe, 16).collect().identical(local.map_batch(describe, 16).collect())
    assert own.filter({"number": {"$gte": 30}}).head(3).identical(local.filter({"number": {"$gte": 30}}).head(3))
    for mine, other in zip(own.split(0.7, 0.3, seed=1), local.split(0.7, 0.3, seed=1), strict=True):
        assert mine.collect().identical(other.collect())
    own.map_batch(describe, 16).write_dataset(tmp_path / "features")
    assert sorted(open_dataset(tmp_path / "features", Feature).read().number.tolist()) == list(range(60))
    again = DocumentShards[Feature].read_parquet(str(tmp_path / "features"), engine=EagerEngine())
    assert len(again) == 60


def test_new_engine_moves_rows_between_partitions() -> None:
    own = shards(EagerEngine())
    assert own.repartition(7).num_partitions() == 7
    assert own.unique("place") == ["Bath", "Cork", "Ely"]
    assert sorted(own.shuffle().collect().number) == list(range(60))
    local = shards("local")
    assert own.shuffle(seed=3).collect().identical(local.shuffle(seed=3).collect())
    for mine, other in zip(_regroup(own), _regroup(local), strict=True):
        assert mine.collect().identical(other.collect())


def _regroup(rows: DocumentShards[Photo]) -> list[DocumentShards[Any]]:
    return [
        rows.partition_by("place", num_partitions=2),
        rows.sort("place", "number", descending=True),
        rows.group_by("place").aggregate(rows="count", top=("number", "max")),
        rows.join(rows.select("id", "number"), "number"),
    ]


def test_errors_name_the_failing_row() -> None:
    own = shards(EagerEngine())
    assert len(own.map(fail_on_seven, on_error="skip")) == 59
    with pytest.raises(PartitionError, match=r"partition 0, document 7 \(id '007'\): ValueError: not this one"):
        own.map(fail_on_seven).collect()
