"""How record batches travel through Spark, and what runs in its Python workers.

Columns of types that Spark does not have are carried by others: tensors, UUIDs and all other types of a fixed number of
bytes as `binary`, times and durations as numbers. The original Arrow field is stored in the metadata of Spark's field,
at every level, and goes wherever Spark passes metadata on: through files, filters, selections and joins, but not
through aggregates.

Between the driver and stages, record batches travel in packs: rows of Spark whose one column holds a record batch as
bytes. Spark then has few rows to move, and no columns to convert.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from quire._optional import require
from quire.distributed._batches import split_large
from quire.distributed._engine import StageChain
from quire.distributed._failures import run_stages
from quire.distributed._metrics import StageReport, collect_reports, deliver_reports
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

if TYPE_CHECKING:
    from types import ModuleType

    from pyspark.sql.types import DataType, StructField, StructType


TENSOR_KEY = "tensor"
__all__ = ["arrow_schema", "from_spark", "spark_arrow_schema", "spark_schema", "to_spark"]


# --- arrays


def to_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a record batch to the types that Spark has; `schema` holds those. Tensors are not copied."""
    arrays = [convert_array(array, field.type) for array, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def from_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a record batch of Spark back, to the columns and the order of a schema. Tensors are not copied."""
    arrays = [restore_array(batch.column(_find_column(batch.schema, field.name)), field) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _find_column(schema: pa.Schema, name: str) -> int:
    index: int = schema.get_field_index(name)
    if index < 0:
        raise DecodeError(f"{name}: the Spark DataFrame has no such column, or has it twice: {schema.names}.")
    return index


def restore_array(array: pa.Array, field: pa.Field) -> pa.Array:
    """Convert an array of Spark to the type of the original field."""
    try:
        return convert_array(array, field.type)
    except (pa.ArrowException, ValueError) as error:
        raise DecodeError(f"{field.name}: Spark has {array.type}, which is not {field.type}: {error}") from error


# --- schemas


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the Spark schema for columns, with the Arrow field of each in the metadata."""
    types: Any = require("pyspark.sql.types", extra="spark", needed_for="engine='spark'")
    return types.StructType([_spark_field(types, field, nullable=field.nullable) for field in schema])


def _spark_field(types: ModuleType, field: pa.Field, *, nullable: bool = True) -> StructField:
    metadata: dict[str, Any] = {SPARK_FIELD_KEY: field_to_text(field)}
    mark = read_extension(field)
    if mark and mark[0] == "quire.tensor":
        metadata[TENSOR_KEY] = mark[1]
    return types.StructField(field.name, _spark_type(types, field.type), nullable, metadata)


def _spark_type(types: ModuleType, arrow_type: pa.DataType) -> DataType:
    if pa.types.is_struct(arrow_type):
        inner = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        return types.StructType([_spark_field(types, field) for field in inner])
    if is_list_type(arrow_type):
        return types.ArrayType(_spark_type(types, arrow_type.value_type))
    pandas: Any = require("pyspark.sql.pandas.types", extra="spark", needed_for="engine='spark'")
    return pandas.from_arrow_type(spark_type(arrow_type), True)  # noqa: FBT003 - keep timestamps without a zone


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of a Spark DataFrame: the original fields where it has them, else Spark's own."""
    types: Any = require("pyspark.sql.types", extra="spark", needed_for="engine='spark'")
    pandas: Any = require("pyspark.sql.pandas.types", extra="spark", needed_for="engine='spark'")
    arrow_fields = []
    for field in schema.fields:
        text = (field.metadata or {}).get(SPARK_FIELD_KEY)
        original = None if text is None else field_from_text(text).with_name(field.name)
        # Compared without metadata and nullability: an outer join adds nulls.
        spark = "" if original is None else _spark_type(types, original.type).simpleString()
        if original is None or spark != field.dataType.simpleString():
            original = pa.field(field.name, pandas.to_arrow_type(field.dataType))
        arrow_fields.append(original.with_nullable(field.nullable))
    return pa.schema(arrow_fields)


InputKind = Literal["numbers", "packs", "columns"]
"""What a source holds: the numbers of partitions, packs with such numbers, or columns."""
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
    """Runs the stages of a frame in a task: reads the source's form, and writes the requested one."""

    chain: StageChain
    input: InputKind
    output: OutputKind
    first: int | None = 0
    """The number of the first partition in packs; None to give all packs the number 0."""
    reports: Any = None
    """Spark's accumulator of what stages report; None on Spark Connect, which has none."""

    def function(self) -> Callable[[Any], Any]:
        """Return itself as the plain function that `mapInArrow` needs."""
        return lambda batches: self(batches)  # noqa: PLW0108 - Spark needs a plain function

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with collect_reports() as reports:
            for part, data in self._read_input(batches):
                yield from self._convert_output(part, run_stages(self.chain, part, data))
        if self.reports is not None:
            again = int(_task_context().attemptNumber() > 0)
            self.reports.add([StageReport(key, replace(counts, retries=again)) for key, counts in reports])
        _worker.freeze_imports()

    def _read_input(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        schema = self.chain.input_schema
        if self.input == "numbers":
            for batch in batches:
                yield from ((number, iter(())) for number in batch.column(0).to_pylist())
        elif self.input == "packs":
            # A task may hold several partitions, whose packs follow each other in the order of their numbers.
            for part, rows in groupby(_iter_packs(batches), lambda row: row[0]):
                yield part, (batch for _, data in rows if len(batch := pa.ipc.read_record_batch(data, schema)))
        else:
            yield _task_index(), (from_spark(batch, schema) for batch in split_large(batches) if len(batch))

    def _convert_output(self, part: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if self.output == "counts":
            count = sum(map(len, batches))
            yield pa.RecordBatch.from_arrays([pa.array([part], pa.int32()), pa.array([count])], schema=_COUNT_SCHEMA)
        elif self.output == "packs":
            yield from self._packs(part, split_large(batches, PACK_BYTES))
        else:
            carried = spark_arrow_schema(self.chain.schema)
            yield from (to_spark(batch, carried) for batch in split_large(batches, PACK_BYTES))

    def _packs(self, part: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the packs of a partition. An empty one yields an empty pack, so that it keeps its number."""
        number = 0 if self.first is None else self.first + part
        batch = next(batches, None)
        yield pack_batch(number, empty_batch(self.chain.schema) if batch is None else batch)
        yield from (pack_batch(number, batch) for batch in batches)


class _WorkerProcess:
    """The process that tasks run in, one after the other."""

    def __init__(self) -> None:
        self._modules = 0

    def freeze_imports(self) -> None:
        """Exclude imported modules from garbage collection.

        Spark collects garbage after every task, which takes long with a module such as torch loaded. With this, the
        time of a task does not depend on what the worker has imported.
        """
        if len(sys.modules) > self._modules:
            gc.collect()
            gc.freeze()
            self._modules = len(sys.modules)


_worker = _WorkerProcess()


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def pack_batch(part: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a record batch as one row of Spark."""
    # Built from its buffers: an array of `bytes` would copy the record batch.
    data = batch.serialize()
    ends = pa.py_buffer(np.array([0, data.size], np.int32))
    return pa.RecordBatch.from_arrays(
        [pa.array([part], pa.int32()), pa.Array.from_buffers(pa.binary(), 1, [None, ends, data])], schema=PACK_SCHEMA
    )


def unpack_batches(rows: Iterable[Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the record batches in rows that the driver collected, without the empty ones."""
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
    context = _task_context()
    return 0 if context is None else int(context.partitionId())


def _task_context() -> Any:
    pyspark: Any = require("pyspark", extra="spark", needed_for="engine='spark'")
    return pyspark.TaskContext.get()


class ReportParameter:
    """How Spark adds up reports: in a worker as a list; on the driver, they go to the books of the stages."""

    def zero(self, _: object) -> list[StageReport]:
        return []

    def addInPlace(self, before: list[StageReport], more: list[StageReport]) -> list[StageReport]:  # noqa: N802
        rest = deliver_reports(more)
        # On the driver, what belongs to no book is of shards that nobody uses any more.
        return [] if _task_context() is None else [*before, *rest]
