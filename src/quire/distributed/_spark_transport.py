"""Arrow data in Spark: columns that Spark has no type for are carried by others, and tell what they were.

Tensors, UUIDs and all else of a fixed number of bytes are carried as `binary`; times and durations as numbers. The
Arrow field of each column stands in the metadata of Spark's own field, at every level, and goes wherever Spark lets
metadata go: through files, filters, selections and joins, not through aggregates.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from quire._optional import require
from quire.distributed._batches import split_large
from quire.distributed._engine import StageChain
from quire.distributed._failures import run_stages
from quire.errors import DecodeError
from quire.storage import (
    SPARK_FIELD_KEY,
    convert_array,
    field_from_text,
    field_to_text,
    is_list_type,
    read_extension,
    spark_arrow_schema,
    spark_type,
)

TENSOR_KEY = "tensor"


__all__ = ["arrow_schema", "from_spark", "spark_arrow_schema", "spark_schema", "to_spark"]


# --- arrays
def to_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A record batch as Spark takes it; `schema` is that of the carriers. Tensors are not copied."""
    arrays = [convert_array(array, field.type) for array, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def from_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A record batch of Spark as it was, in the columns and the order of a schema. Tensors are not copied."""
    arrays = [restore_array(batch.column(_find_column(batch.schema, field.name)), field) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _find_column(schema: pa.Schema, name: str) -> int:
    found: int = schema.get_field_index(name)
    if found < 0:
        raise DecodeError(f"{name}: the frame of Spark has no such column, or has it twice: {schema.names}.")
    return found


def restore_array(array: pa.Array, field: pa.Field) -> pa.Array:
    """The array of a field, from that of its carrier."""
    try:
        return convert_array(array, field.type)
    except (pa.ArrowException, ValueError) as error:
        raise DecodeError(f"{field.name}: Spark has {array.type}, which is no {field.type}: {error}") from error


# --- schemas
def spark_schema(schema: pa.Schema) -> Any:
    """The schema of Spark for columns: those of the carriers, each with its Arrow field in the metadata."""
    types: Any = require("pyspark.sql.types", extra="spark", needed_for="engine='spark'")
    return types.StructType([_spark_field(types, field, nullable=field.nullable) for field in schema])


def _spark_field(types: Any, field: pa.Field, *, nullable: bool = True) -> Any:
    metadata: dict[str, Any] = {SPARK_FIELD_KEY: field_to_text(field)}
    mark = read_extension(field)
    if mark and mark[0] == "quire.tensor":
        metadata[TENSOR_KEY] = mark[1]
    return types.StructField(field.name, _spark_type(types, field.type), nullable, metadata)


def _spark_type(types: Any, arrow_type: pa.DataType) -> Any:
    if pa.types.is_struct(arrow_type):
        inner = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        return types.StructType([_spark_field(types, field) for field in inner])
    if is_list_type(arrow_type):
        return types.ArrayType(_spark_type(types, arrow_type.value_type))
    pandas: Any = require("pyspark.sql.pandas.types", extra="spark", needed_for="engine='spark'")
    return pandas.from_arrow_type(spark_type(arrow_type), True)  # noqa: FBT003 - timestamps without a zone are kept so


def arrow_schema(schema: Any) -> pa.Schema:
    """The Arrow schema of a frame of Spark: what its columns say that they were, and else what Spark makes of them."""
    return pa.schema([_arrow_field(field) for field in schema.fields])


def _arrow_field(field: Any) -> pa.Field:
    pandas: Any = require("pyspark.sql.pandas.types", extra="spark", needed_for="engine='spark'")
    told = (field.metadata or {}).get(SPARK_FIELD_KEY)
    if told is not None:
        found = field_from_text(told).with_name(field.name)
        types: Any = require("pyspark.sql.types", extra="spark", needed_for="engine='spark'")
        if _bare_type(_spark_type(types, found.type)) == _bare_type(field.dataType):
            return found.with_nullable(field.nullable)  # an outer join gives nulls, and says so
    return pa.field(field.name, pandas.to_arrow_type(field.dataType), nullable=field.nullable)


def _bare_type(data_type: Any) -> str:
    """A type of Spark without metadata and nullability."""
    return str(data_type.simpleString())


InputKind = Literal["numbers", "packs", "columns"]
"""What a source has: the numbers of partitions, packs with such numbers, or columns."""


OutputKind = Literal["packs", "columns", "counts"]


PACK_BYTES = 16 << 20
"""The most bytes of a record batch between Python and Spark, unless one row has more."""


NUMBER_COLUMN, PART_COLUMN, PACK_COLUMN = "id", "part", "pack"


PACK_SCHEMA = pa.schema([pa.field(PART_COLUMN, pa.int32()), pa.field(PACK_COLUMN, pa.binary())])


SPARK_PACK_TYPES = f"{PART_COLUMN} int, {PACK_COLUMN} binary"


SPARK_COUNT_TYPES = f"{PART_COLUMN} int, count bigint"


_COUNT_SCHEMA = pa.schema([pa.field(PART_COLUMN, pa.int32()), pa.field("count", pa.int64())])


@dataclass(frozen=True)
class SparkWork:
    """The stages of a frame, between what its source has and what is asked for."""

    chain: StageChain
    takes: InputKind
    gives: OutputKind
    first: int | None = 0
    """The number of the first partition in packs; None if all packs are to be of one."""

    def function(self) -> Callable[[Any], Any]:
        """As `mapInArrow` takes it."""
        return lambda batches: self(batches)  # noqa: PLW0108 - Spark looks for the signature of a function

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches of one task of Spark."""
        for part, data in self._parts(batches):
            yield from self._given(part, run_stages(self.chain, part, data))
        _worker.settle()

    def _parts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        schema = self.chain.takes
        if self.takes == "numbers":
            for batch in batches:
                yield from ((number, iter(())) for number in batch.column(0).to_pylist())
        elif self.takes == "packs":
            for part, rows in groupby(_iter_packs(batches), lambda row: row[0]):
                yield part, (batch for _, data in rows if len(batch := pa.ipc.read_record_batch(data, schema)))
        else:
            yield _task_index(), (from_spark(batch, schema) for batch in split_large(batches) if len(batch))

    def _given(self, part: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if self.gives == "counts":
            count = sum(map(len, batches))
            yield pa.RecordBatch.from_arrays([pa.array([part], pa.int32()), pa.array([count])], schema=_COUNT_SCHEMA)
        elif self.gives == "packs":
            yield from self._packs(part, split_large(batches, PACK_BYTES))
        else:
            carried = spark_arrow_schema(self.chain.schema)
            yield from (to_spark(batch, carried) for batch in split_large(batches, PACK_BYTES))

    def _packs(self, part: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A partition without rows has a pack, too, and so is not forgotten."""
        number = 0 if self.first is None else self.first + part
        batch = next(batches, None)
        yield pack_batch(number, empty_batch(self.chain.schema) if batch is None else batch)
        yield from (pack_batch(number, batch) for batch in batches)


class _WorkerProcess:
    """The process that tasks run in, one after the other."""

    def __init__(self) -> None:
        self._modules = 0

    def settle(self) -> None:
        """Keep what tasks have imported from the collector: Spark calls it behind every task, and torch alone is large.

        So the time of a task does not depend on what the worker has loaded.
        """
        if len(sys.modules) > self._modules:
            gc.collect()
            gc.freeze()
            self._modules = len(sys.modules)


_worker = _WorkerProcess()


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """No rows."""
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def pack_batch(part: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    """A record batch as a row."""
    data = batch.serialize()
    ends = pa.py_buffer(np.array([0, data.size], np.int32))
    return pa.RecordBatch.from_arrays(
        [pa.array([part], pa.int32()), pa.Array.from_buffers(pa.binary(), 1, [None, ends, data])], schema=PACK_SCHEMA
    )


def unpack_batches(rows: Iterable[Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The record batches of rows that Spark gave to the driver; those without rows are left out."""
    for row in rows:
        batch = pa.ipc.read_record_batch(pa.py_buffer(row[1]), schema)
        if len(batch):
            yield batch


def _iter_packs(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.Buffer]]:
    for batch in batches:
        parts, packs = batch.columns
        for row in range(len(batch)):
            yield parts[row].as_py(), packs[row].as_buffer()


def _task_index() -> int:
    pyspark: Any = require("pyspark", extra="spark", needed_for="engine='spark'")
    context = pyspark.TaskContext.get()
    return 0 if context is None else int(context.partitionId())
