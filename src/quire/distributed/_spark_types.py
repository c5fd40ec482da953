"""Arrow data in Spark: columns that Spark has no type for are carried by others, and tell what they were.

Tensors, UUIDs and all else of a fixed number of bytes are carried as `binary`; times and durations as numbers. The
Arrow field of each column stands in the metadata of Spark's own field, at every level, and goes wherever Spark lets
metadata go: through files, filters, selections and joins, not through aggregates.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from quire._optional import require
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
    arrays = [restored(batch.column(_place(batch.schema, field.name)), field) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _place(schema: pa.Schema, name: str) -> int:
    found: int = schema.get_field_index(name)
    if found < 0:
        raise DecodeError(f"{name}: the frame of Spark has no such column, or has it twice: {schema.names}.")
    return found


def restored(array: pa.Array, field: pa.Field) -> pa.Array:
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
        if _bare(_spark_type(types, found.type)) == _bare(field.dataType):
            return found.with_nullable(field.nullable)  # an outer join gives nulls, and says so
    return pa.field(field.name, pandas.to_arrow_type(field.dataType), nullable=field.nullable)


def _bare(data_type: Any) -> str:
    """A type of Spark without metadata and nullability."""
    return str(data_type.simpleString())
