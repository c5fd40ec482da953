"""Shards and frames of engines as datasets that workers can read: written once, by the engine, where workers see it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.data import from_spark
from quire.distributed._shards import DocumentShards
from quire.distributed.estimator._items import Feed, Reading
from quire.distributed.estimator._planned import DEFAULT_BATCH
from quire.distributed.estimator._predictions import is_made
from quire.distributed.estimator._sources import Source, StoredSource, source_of
from quire.distributed.estimator._streams import StreamFeed
from quire.distributed.estimator._world import World


@dataclass(frozen=True)
class FrameSource:
    """A frame of Spark that lies in a folder as Parquet."""

    converter: Any

    def open(self, world: World, reading: Reading) -> Feed:
        """The share of a rank."""
        framework = "torch" if reading.framework == "torch" else "numpy"
        shuffle = "block" if reading.shuffle is not False else False
        size = reading.batch_size or DEFAULT_BATCH
        dataset = self.converter.dataset(
            size, seed=reading.seed, framework=framework, shuffle=shuffle, missing=reading.missing
        )
        return StreamFeed(dataset, world, reading)


def source_for(data: Any, reading: Reading, folder: Path) -> Source:
    """The source of data; what belongs to an engine is written to a folder first, by that engine."""
    if is_spark_frame(data):
        return FrameSource(from_spark(data, cache=folder / "frames"))
    if is_ray_dataset(data):
        data = DocumentShards.from_ray(data)
    if isinstance(data, DocumentShards):
        return _written(data, folder / f"shards-{uuid.uuid4().hex}")
    return source_of(data, reading)


def _written(shards: DocumentShards[Any], folder: Path) -> Source:
    shards.write_dataset(folder, format="arrow")
    return StoredSource(str(folder), None if is_made(shards.document_type) else shards.document_type)


def is_spark_frame(data: Any) -> bool:
    """Whether it is a DataFrame of Spark."""
    return type(data).__module__.startswith("pyspark.sql") and hasattr(data, "mapInArrow")


def is_ray_dataset(data: Any) -> bool:
    """Whether it is a Dataset of Ray."""
    return type(data).__module__.startswith("ray.data") and hasattr(data, "iter_batches")
