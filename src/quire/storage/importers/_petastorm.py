"""Petastorm: Parquet files, whose `_common_metadata` holds a pickled schema."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quire._extra_fields import Extra
from quire.array import DocumentBatch
from quire.errors import DecodeError, OptionError, StorageError
from quire.files import Folder, display_uri, open_folder
from quire.storage._layout import Layout
from quire.storage._shard_reader import local_file
from quire.storage.importers._source import (
    BATCH_ROWS,
    ForeignDataset,
    ImportOptions,
    conform_batch_to,
    document_class,
    field_names,
    name_errors,
    tensor_annotation,
)
from quire.storage.importers._unpickle import Standing, TypeName, load_schema

SCHEMA_KEY = b"dataset-toolkit.unischema.v1"
METADATA = "_common_metadata"
_CODECS = {"ScalarCodec", "NdarrayCodec", "CompressedNdarrayCodec", "CompressedImageCodec"}
_SPARK: dict[str, Any] = {
    **dict.fromkeys(("ByteType", "ShortType", "IntegerType", "LongType"), int),
    **dict.fromkeys(("FloatType", "DoubleType"), float),
    **dict.fromkeys(("TimestampType", "TimestampNTZType"), datetime),
    **dict.fromkeys(("StringType", "VarcharType", "CharType"), str),
    "BinaryType": bytes,
    "BooleanType": bool,
    "DateType": date,
    "DecimalType": Decimal,
}
_TEXTS = {"str_", "unicode_", "string_", "bytes_", "str", "unicode"}


def read_petastorm(source: Any, schema: type[Any] | None, options: ImportOptions) -> ForeignDataset:
    """A Petastorm dataset; its own schema makes the class where none is given, and only then is the pickle read."""
    folder = open_folder(source, options.remote)
    files = [entry.name for entry in folder.list((".parquet",))]
    if not files:
        raise StorageError(f"{display_uri(folder.url)}: there are no Parquet files.")
    layout = Layout((schema or _class_in(folder, options)).document_schema())
    counts = [_count(folder, name) for name in files]

    def rows(first: int) -> Iterator[DocumentBatch[Any]]:
        for name, count in zip(files, counts, strict=True):
            if first < count:
                yield from _batches(folder, name, layout, first, options.extra)
            first = max(0, first - count)

    return ForeignDataset(layout.schema.document_type, rows, sum(counts))


def _count(folder: Folder, name: str) -> int:
    with name_errors(folder.join(name)), local_file(folder, name) as path:
        return int(pq.read_metadata(path).num_rows)


def _batches(folder: Folder, name: str, layout: Layout, first: int, extra: Extra) -> Iterator[DocumentBatch[Any]]:
    where = folder.join(name)
    with name_errors(where), local_file(folder, name) as path:
        file = pq.ParquetFile(path, memory_map=True)
        for batch in file.iter_batches(BATCH_ROWS):
            left = batch.slice(min(first, len(batch)))
            first -= len(batch) - len(left)
            if len(left):
                yield conform_batch_to(layout, _arrays(left, name), len(left), where, extra)


def _arrays(batch: pa.RecordBatch, name: str) -> dict[str, pa.Array]:
    """The columns by their names; those of folders too, as in 'year=2024/part-0.parquet'."""
    found = dict(zip(batch.schema.names, batch.columns, strict=True))
    for part in name.split("/")[:-1]:
        key, equals, value = part.partition("=")
        if equals and key not in found:
            found[key] = pa.array([value] * len(batch))
    return found


# --- the schema


def _class_in(folder: Folder, options: ImportOptions) -> type[Any]:
    where = folder.join(METADATA)
    if not folder.exists(METADATA):
        raise StorageError(
            f"{display_uri(where)}: no such file, so this is no Petastorm dataset. open_dataset() reads any Parquet."
        )
    with name_errors(where):
        metadata = pq.read_schema(io.BytesIO(folder.read(METADATA))).metadata or {}
    if SCHEMA_KEY not in metadata:
        raise DecodeError(
            f"{display_uri(where)}: it holds no schema of Petastorm ({SCHEMA_KEY.decode()}). Pass schema=..."
        )
    if not options.allow_pickle:
        raise OptionError(
            f"{display_uri(where)}: the schema is pickled. Pass allow_pickle=True to read it (no class or function "
            "that it names is run), or schema=... to leave it unread."
        )
    with name_errors(where):
        return _class_of(load_schema(metadata[SCHEMA_KEY]), options)


def _class_of(schema: Any, options: ImportOptions) -> type[Any]:
    fields = getattr(schema, "__dict__", {}).get("_fields")
    if not isinstance(schema, Standing) or schema.kind != "Unischema" or not isinstance(fields, dict):
        raise DecodeError("the pickle holds no Unischema.")
    names = field_names(fields)
    annotations = {names[name]: _annotation(name, field, options) for name, field in fields.items()}
    return document_class(options.name or str(schema.__dict__.get("_name") or "Row"), annotations)


def _annotation(name: str, field: Any, options: ImportOptions) -> Any:
    if not isinstance(field, Standing) or len(field.arguments) < 3:
        raise DecodeError(f"{name}: the pickle holds no UnischemaField.")
    _, dtype, shape, codec, nullable = (*field.arguments, None, False)[:5]
    kind = codec.kind if isinstance(codec, Standing) else None
    if kind is not None and kind not in _CODECS:
        raise DecodeError(f"{name}: {kind} is not a codec of Petastorm's own. Pass schema=...")
    if kind == "CompressedImageCodec" and options.images == "bytes":
        annotation: Any = bytes
    elif kind in ("ScalarCodec", None) and not shape:
        annotation = _scalar(name, dtype, codec)
    else:
        annotation = _tensor(name, dtype, shape)
    return annotation | None if nullable else annotation


def _scalar(name: str, dtype: Any, codec: Any) -> Any:
    spark = getattr(codec, "__dict__", {}).get("_spark_type")
    if isinstance(spark, Standing) and spark.kind in _SPARK:
        return _SPARK[spark.kind]
    found = _type_name(dtype)
    if found in _TEXTS:
        return str
    if found == "Decimal":
        return Decimal
    if found == "datetime64":
        return datetime
    kind = _dtype(name, dtype).kind
    return {"b": bool, "i": int, "u": int, "f": float}.get(kind, Any)


def _tensor(name: str, dtype: Any, shape: Any) -> Any:
    if not isinstance(shape, (tuple, list)) or any(size is not None and not isinstance(size, int) for size in shape):
        raise DecodeError(f"{name}: {shape!r} is not a shape.")
    return tensor_annotation(None if _type_name(dtype) in _TEXTS else _dtype(name, dtype), shape)


def _type_name(dtype: Any) -> str:
    """The name of a type; of a numpy dtype, what it was made from, as in 'f4'."""
    if isinstance(dtype, Standing) and dtype.arguments:
        return _type_name(dtype.arguments[0])
    return dtype.name if isinstance(dtype, TypeName) else str(dtype)


def _dtype(name: str, dtype: Any) -> np.dtype[Any]:
    try:
        found = np.dtype(_type_name(dtype).removesuffix("_"))
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "biufcSUM":
        raise DecodeError(f"{name}: {_type_name(dtype)} is not a type that tensors have. Pass schema=...")
    return found
