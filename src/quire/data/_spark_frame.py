"""A frame of Spark as Parquet files: what Spark is asked to write, and the class of the rows."""

from __future__ import annotations

import os
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from quire._optional import require
from quire.document import BaseDocument
from quire.errors import OptionError, SchemaError, did_you_mean
from quire.files import RemoteOptions, open_folder, scheme_of
from quire.storage._manifest import plain_files
from quire.storage._shard_reader import arrow_schema_of

Floats = Literal["float32", "float64"]
_SHORT = {"float32": "float", "float64": "double"}


@dataclass(frozen=True)
class Written:
    """A frame that lies in a folder: its address, its rows, and what its columns are (None where a class says it)."""

    url: str
    rows: int
    fields: pa.Schema | None


def write_frame(frame: Any, schema: type[BaseDocument] | None, cache: str | None, dtype: Floats | None) -> Written:
    """Let Spark write a frame into a new folder of the cache."""
    chosen = _prepared(_chosen(frame, schema), dtype)
    url = f"{_cache(frame, cache).rstrip('/')}/quire-{uuid.uuid4().hex}"
    chosen.write.option("parquet.block.size", 4 << 20).parquet(_for_spark(url))
    counts = _counts(frame.sparkSession.read.parquet(_for_spark(url)))
    return Written(url, counts["rows"], None if schema else _fields(url, counts))


def _cache(frame: Any, cache: str | None) -> str:
    """The folder for frames: the one that is given, or one of this machine if Spark runs nowhere else."""
    if cache is not None:
        return cache if scheme_of(cache) else str(Path(cache).absolute())
    master = frame.sparkSession.conf.get("spark.master", "")
    if not master.startswith("local"):
        raise OptionError(
            f"Spark runs on {master or 'a cluster'}: pass cache=..., a folder that its executors can write to and that "
            "can be read from here, as in cache='hdfs://host/tmp/quire' or a mounted path."
        )
    return str(Path(tempfile.gettempdir(), f"quire-spark-{os.getuid() if hasattr(os, 'getuid') else 'user'}"))


def _for_spark(url: str) -> str:
    """An address as Spark writes it."""
    if not scheme_of(url):
        return Path(url).as_uri()
    return f"s3a{url[2:]}" if url.startswith("s3://") else url


# --- columns


def _chosen(frame: Any, schema: type[BaseDocument] | None) -> Any:
    """The columns that a class has fields for."""
    if schema is None:
        return frame
    found = schema.document_schema()
    names = [name for name in frame.columns if name in found.accepted]
    held = {found.accepted[name][0].name for name in names}
    for field in found.fields:
        if field.required and field.name not in held:
            raise SchemaError(
                f"{found.name}.{field.name}: the frame has no such column. {did_you_mean(field.name, frame.columns)}"
            )
    return frame.select(*[f"`{name}`" for name in names])


def _prepared(frame: Any, dtype: Floats | None) -> Any:
    """Vectors of Spark ML as arrays, and doubles, where asked for, as floats."""
    columns = [_column(field, dtype) for field in frame.schema.fields]
    return frame.select(*columns)


def _column(field: Any, dtype: Floats | None) -> Any:
    functions: Any = require("pyspark.sql.functions", extra="spark", needed_for="from_spark()")
    column = functions.col(f"`{field.name}`")
    kind = field.dataType.typeName() if not _is_vector(field.dataType) else "vector"
    if kind == "vector":
        ml: Any = require("pyspark.ml.functions", extra="spark", needed_for="a vector of Spark ML")
        return ml.vector_to_array(column, dtype or "float64").alias(field.name)
    wanted = None if dtype is None else _cast(field.dataType, _SHORT[dtype])
    return column if wanted is None else column.cast(wanted).alias(field.name)


def _is_vector(data_type: Any) -> bool:
    return type(data_type).__name__ == "VectorUDT"


def _cast(data_type: Any, short: str) -> str | None:
    """What floats, and arrays of them, are cast to; None for all else."""
    kind = data_type.typeName()
    if kind in ("double", "float"):
        return None if kind == short else short
    if kind != "array":
        return None
    inner = _cast(data_type.elementType, short)
    return None if inner is None else f"array<{inner}>"


# --- what was written


def _counts(frame: Any) -> dict[str, Any]:
    """In one pass: the rows, the nulls of each column, and the shortest and longest of each column of arrays."""
    functions: Any = require("pyspark.sql.functions", extra="spark", needed_for="from_spark()")
    wanted = [functions.count(functions.lit(1)).alias("rows")]
    for number, field in enumerate(frame.schema.fields):
        column = functions.col(f"`{field.name}`")
        wanted.append(functions.count(column).alias(f"held{number}"))
        if field.dataType.typeName() == "array":
            sizes = functions.size(column)
            wanted += [functions.min(sizes).alias(f"least{number}"), functions.max(sizes).alias(f"most{number}")]
    return frame.agg(*wanted).collect()[0].asDict()  # type: ignore[no-any-return]


def _fields(url: str, counts: dict[str, Any]) -> pa.Schema:
    """The columns of the files: without null where there is none, and of one length where all rows have it."""
    folder = open_folder(url, RemoteOptions())
    found = arrow_schema_of(folder, plain_files(folder)[0])
    return pa.schema([_field(field, number, counts) for number, field in enumerate(found)])


def _field(field: pa.Field, number: int, counts: dict[str, Any]) -> pa.Field:
    size, nullable = counts.get(f"least{number}"), counts[f"held{number}"] < counts["rows"]
    if size is None or nullable or size < 1 or size != counts[f"most{number}"] or not _is_number(field.type.value_type):
        return field.with_nullable(nullable).remove_metadata()
    return pa.field(field.name, pa.list_(field.type.value_type, size), nullable=False)


def _is_number(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type))
