"""Any Python object as a partition, on Spark: DataFrames of pickled objects that live as long as the job.

A row holds a piece of an object: for partition `part`, from partition `source`, numbered by `seq`, as no cell of Spark
holds 2 GiB. All rows of a `part` are in one partition of Spark.
"""

from __future__ import annotations

import pickle
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quire._optional import require
from quire.distributed._engine import Frame
from quire.distributed._object_steps import ConcatStep, CountStep, ObjectStep, PairStep, PartitionFailure, TransformStep
from quire.distributed._objects import (
    ALL_PARTITIONS,
    ExchangeNode,
    HeldNode,
    MapNode,
    NativeNode,
    ObjectEngine,
    PlanNode,
    ZipNode,
    fuse_maps,
)
from quire.distributed._spark import SparkEngine, SparkFrame, limit_batches, translate_errors, unpersist
from quire.distributed._spark_transport import arrow_schema, from_spark, spark_arrow_schema

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame


_PIECE_BYTES = 32 << 20
"""The most bytes in a row."""
PIECE_SCHEMA = pa.schema([("part", pa.int32()), ("source", pa.int32()), ("seq", pa.int32()), ("data", pa.binary())])
_SPARK_TYPES = "part int, source int, seq int, data binary"


class SparkObjects(ObjectEngine):
    """Objects in DataFrames of Spark. Each function gets its own, unpickled."""

    name = "spark"
    engine: SparkEngine

    def __init__(self, engine: SparkEngine) -> None:
        self.engine = engine
        self.workers = engine.workers
        self._spark = engine.session

    # --- plans as frames

    def hold(self, values: Sequence[Any]) -> HeldNode:
        batches = [batch for part, value in enumerate(values) for batch in _to_rows(part, part, value)]
        if hasattr(self._spark.range(0), "toArrow"):
            frame = self._spark.createDataFrame(pa.Table.from_batches(batches, PIECE_SCHEMA), _SPARK_TYPES)
        else:  # before Spark 4
            rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
            frame = self._spark.createDataFrame(rows, _SPARK_TYPES)
        return HeldNode(_repartition(frame, len(values)), len(values))

    def _frame(self, node: PlanNode, only: str = "true") -> DataFrame:
        """Return the DataFrame of a plan, or of some of its partitions."""
        if not node.cached:
            return self._make_frame(node, only)
        with node.lock:
            if node.kept is None:
                node.kept = self._make_frame(node, "true").persist()
                weakref.finalize(node, unpersist, node.kept).atexit = False
            return node.kept.where(only)

    def _make_frame(self, node: PlanNode, only: str) -> DataFrame:
        if isinstance(node, HeldNode):
            return node.held.where(only)
        if isinstance(node, NativeNode):
            frames = _ToObjects(spark_arrow_schema(arrow_schema(node.native.schema)), node.schema)
            return node.native.mapInArrow(lambda batches: frames(batches), _SPARK_TYPES)  # noqa: PLW0108 - it asks for a function
        if isinstance(node, ExchangeNode):
            return self._exchange(node, only)
        if isinstance(node, ZipNode):
            return self._zip(node, only)
        assert isinstance(node, MapNode)
        base, transforms = fuse_maps(node.parent)
        return _run_step(self._frame(base, only), TransformStep((*transforms, node.transform), copies=False))

    def _exchange(self, node: ExchangeNode, only: str) -> DataFrame:
        frame = self._frame(node.parent)
        counts = dict(self._fetch(_run_step(frame, CountStep()))) if node.names is None else {}
        return _run_step(_repartition(_run_step(frame, node.make_split(counts)).where(only), node.parts), ConcatStep())

    def _zip(self, node: ZipNode, only: str) -> DataFrame:
        functions: Any = require("pyspark.sql.functions", extra="spark", needed_for="engine='spark'")
        sides = [
            self._frame(side, only).withColumn("source", functions.lit(place)).select(*PIECE_SCHEMA.names)
            for place, side in enumerate(node.nodes)
        ]
        return _run_step(_repartition(sides[0].union(sides[1]), self.num_partitions(node)), PairStep())

    # --- results

    def values(self, node: PlanNode, partitions: slice = ALL_PARTITIONS) -> Iterator[Any]:
        only = "true" if partitions.stop is None else f"part >= {partitions.start or 0} and part < {partitions.stop}"
        return (value for _, value in self._fetch(self._frame(node, only)))

    def _fetch(self, frame: DataFrame) -> list[tuple[int, Any]]:
        """Return the objects in a DataFrame with their partitions; a failure is raised."""
        with translate_errors(), limit_batches(frame.sparkSession, PIECE_SCHEMA):
            if hasattr(frame, "toArrow"):
                batches = frame.toArrow().to_batches()
            else:
                batches = [pa.RecordBatch.from_pylist([row.asDict() for row in frame.collect()], PIECE_SCHEMA)]
        objects = [(part, values[0]) for part, values in _collect_objects(batches)]
        for _, value in objects:
            if isinstance(value, PartitionFailure):
                raise value.to_error()
        return objects

    def counts(self, node: PlanNode) -> list[int]:
        return [count for _, count in self._fetch(_run_step(self._frame(node), CountStep()))]

    def num_partitions(self, node: PlanNode) -> int:
        if isinstance(node, (HeldNode, ExchangeNode)):
            return node.parts
        if isinstance(node, NativeNode):
            return int(self._frame(node).select("part").distinct().count())
        return self.num_partitions(node.parent if isinstance(node, MapNode) else node.nodes[0])  # type: ignore[attr-defined]

    def release(self, node: PlanNode) -> None:
        with node.lock:
            if node.kept is not None:
                node.kept.unpersist()
            node.kept = None

    def native(self, node: PlanNode) -> DataFrame:
        """Return a DataFrame of the rows; the first data frame with rows determines the columns."""
        probe = next((frame for frame in self._probes(node) if len(frame)), None)
        example = next(self.values(node, slice(0, 1))) if probe is None else probe
        return self.arrow_frame(node, pa.Schema.from_pandas(example, preserve_index=False).remove_metadata()).native

    def _probes(self, node: PlanNode) -> Iterator[Any]:
        for part in range(self.num_partitions(node)):
            yield from self.values(node, slice(part, part + 1))

    def from_frame(self, frame: Frame[Any]) -> PlanNode:
        return NativeNode(frame.native, frame.schema)

    def arrow_frame(self, node: PlanNode, schema: pa.Schema) -> SparkFrame:
        """Return a frame of the rows of the tables, or data frames."""
        rows = self.engine._frame_of_columns(lambda: self._frame(node), PIECE_SCHEMA, self.num_partitions(node))
        return self.engine.run(rows, _ToRows(schema))


# --- rows


def _repartition(frame: DataFrame, parts: int) -> DataFrame:
    """Move the rows of partition i into partition i of Spark; before Spark 4.1, only all into one."""
    if hasattr(frame, "repartitionById"):
        return frame.repartitionById(parts, "part")
    return frame.repartition(parts, "part")


def _to_rows(part: int, source: int, value: object) -> Iterator[pa.RecordBatch]:
    cloudpickle: Any = require("pyspark.cloudpickle", extra="spark", needed_for="engine='spark'")
    data = memoryview(cloudpickle.dumps(value, 5))
    for seq, start in enumerate(range(0, len(data), _PIECE_BYTES)):
        columns = [[part], [source], [seq], [data[start : start + _PIECE_BYTES]]]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, PIECE_SCHEMA.types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=PIECE_SCHEMA)


def _collect_objects(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, list[Any]]]:
    """Yield the partitions in rows, in order, each with its objects by source."""
    pieces: dict[int, list[tuple[int, int, Any]]] = defaultdict(list)
    for batch in batches:
        for part, source, seq, data in zip(*(column for column in batch.columns), strict=True):
            pieces[part.as_py()].append((source.as_py(), seq.as_py(), data.as_buffer()))
    for part in sorted(pieces):
        by_source: dict[int, list[Any]] = defaultdict(list)
        for source, _, data in sorted(pieces.pop(part), key=lambda piece: piece[:2]):
            by_source[source].append(data)
        # The rows were pickled by `_to_rows`.
        yield part, [pickle.loads(data[0] if len(data) == 1 else b"".join(data)) for data in by_source.values()]  # noqa: S301


@dataclass
class _StepTask:
    """A step as a function of the rows of a partition."""

    step: ObjectStep

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part, values in _collect_objects(batches):
            result = self.step(part, values)
            for target, value in enumerate(result) if self.step.outputs else [(part, result)]:
                try:
                    rows = list(_to_rows(target, part, value))
                except Exception as error:  # noqa: BLE001 - pickling runs code of the values
                    rows = list(_to_rows(target, part, PartitionFailure.of(part, "its result cannot be sent", error)))
                yield from rows


def _run_step(frame: DataFrame, step: ObjectStep) -> DataFrame:
    task = _StepTask(step)
    return frame.mapInArrow(lambda batches: task(batches), _SPARK_TYPES)  # noqa: PLW0108 - Spark asks for a function


@dataclass
class _ToObjects:
    """Turns the rows of a partition of any DataFrame into one pandas data frame, or into an Arrow table."""

    schema: pa.Schema
    tables: pa.Schema | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pyspark: Any = require("pyspark", extra="spark", needed_for="engine='spark'")
        part = pyspark.TaskContext.get().partitionId()
        held = list(batches)
        if self.tables is not None:
            yield from _to_rows(
                part, part, pa.Table.from_batches([from_spark(b, self.tables) for b in held], self.tables)
            )
        else:
            table = pa.Table.from_batches(held) if held else self.schema.empty_table()
            yield from _to_rows(part, part, table.to_pandas())


@dataclass
class _ToRows:
    """A stage that turns the pieces of data frames or Arrow tables into their rows."""

    schema: pa.Schema
    stateful = False

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        for _, values in _collect_objects(batches):
            if isinstance(values[0], PartitionFailure):
                raise values[0].to_error()
            yield from self._table(values[0]).to_batches()

    def _table(self, value: pa.Table | pd.DataFrame) -> pa.Table:
        return value if isinstance(value, pa.Table) else pa.Table.from_pandas(value, self.schema, preserve_index=False)
