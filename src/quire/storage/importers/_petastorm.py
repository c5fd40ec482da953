"""Petastorm: Parquet files, and a pickled schema in the file `_common_metadata`."""

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
    document_class,
    field_names,
    source_errors,
    tensor_annotation,
    to_batch,
)
from quire.storage.importers._unpickle import PickledObject, PickledType, load_schema

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


def read_petastorm(source: Any, document_type: type[Any] | None, options: ImportOptions) -> ForeignDataset:
    """Read a Petastorm dataset. Without a class, one is made of its pickled schema, which is read only then."""
    folder = open_folder(source, options.remote)
    files = [entry.name for entry in folder.list((".parquet",))]
    if not files:
        raise StorageError(f"{display_uri(folder.url)}: there are no Parquet files.")
    layout = Layout((document_type or _read_class(folder, options)).document_schema())
    counts: list[int] = []
    for name in files:
        with source_errors(folder.join(name)), local_file(folder, name) as path:
            counts.append(pq.read_metadata(path).num_rows)

    def rows(first: int) -> Iterator[DocumentBatch[Any]]:
        for name, count in zip(files, counts, strict=True):
            if first < count:
                yield from _read_batches(folder, name, layout, first, options.extra)
            first = max(0, first - count)

    return ForeignDataset(layout.schema.document_type, rows, sum(counts))


def _read_batches(folder: Folder, name: str, layout: Layout, first: int, extra: Extra) -> Iterator[DocumentBatch[Any]]:
    where = folder.join(name)
    with source_errors(where), local_file(folder, name) as path:
        file = pq.ParquetFile(path, memory_map=True)
        for batch in file.iter_batches(BATCH_ROWS):
            left = batch.slice(min(first, len(batch)))
            first -= len(batch) - len(left)
            if not len(left):
                continue
            arrays = dict(zip(left.schema.names, left.columns, strict=True))
            for part in name.split("/")[:-1]:  # columns in the path of the file, as in 'year=2024/part-0.parquet'
                key, equals, value = part.partition("=")
                if equals and key not in arrays:
                    arrays[key] = pa.array([value] * len(left))
            yield to_batch(layout, arrays, len(left), where, extra)


# --- the pickled schema


def _read_class(folder: Folder, options: ImportOptions) -> type[Any]:
    where = folder.join(METADATA)
    if not folder.exists(METADATA):
        raise StorageError(
            f"{display_uri(where)}: no such file, so this is not a Petastorm dataset. open_dataset() reads "
            "any Parquet files."
        )
    with source_errors(where):
        metadata = pq.read_schema(io.BytesIO(folder.read(METADATA))).metadata or {}
    if SCHEMA_KEY not in metadata:
        raise DecodeError(
            f"{display_uri(where)}: it has no schema of Petastorm ({SCHEMA_KEY.decode()}). Pass document_type=..."
        )
    if not options.allow_pickle:
        raise OptionError(
            f"{display_uri(where)}: the schema is pickled. Pass allow_pickle=True to read it (no class or function "
            "that it names is run), or document_type=... to leave it unread."
        )
    with source_errors(where):
        schema = load_schema(metadata[SCHEMA_KEY])
        fields = getattr(schema, "__dict__", {}).get("_fields")
        if not isinstance(schema, PickledObject) or schema.kind != "Unischema" or not isinstance(fields, dict):
            raise DecodeError("the pickle is not a Unischema.")
        names = field_names(fields)
        annotations = {names[name]: _annotation(name, field, options) for name, field in fields.items()}
        return document_class(options.name or str(schema.__dict__.get("_name") or "Row"), annotations)


def _annotation(name: str, field: Any, options: ImportOptions) -> Any:
    if not isinstance(field, PickledObject) or len(field.arguments) < 3:
        raise DecodeError(f"{name}: the pickle is not a UnischemaField.")
    # The fields of petastorm's named tuple; older versions have no codec, or no nullable.
    _, dtype, shape, codec, nullable = (*field.arguments, None, False)[:5]
    kind = codec.kind if isinstance(codec, PickledObject) else None
    if kind is not None and kind not in _CODECS:
        raise DecodeError(f"{name}: {kind} is not a codec of Petastorm's own. Pass document_type=...")
    if kind == "CompressedImageCodec" and options.images == "bytes":
        annotation: Any = bytes
    elif kind in ("ScalarCodec", None) and not shape:
        annotation = _scalar_annotation(name, dtype, codec)
    elif not isinstance(shape, (tuple, list)) or not all(size is None or isinstance(size, int) for size in shape):
        raise DecodeError(f"{name}: {shape!r} is not a shape.")
    else:
        annotation = tensor_annotation(None if _type_name(dtype) in _TEXTS else _dtype(name, dtype), shape)
    return annotation | None if nullable else annotation


def _scalar_annotation(name: str, dtype: Any, codec: Any) -> Any:
    spark = getattr(codec, "__dict__", {}).get("_spark_type")
    if isinstance(spark, PickledObject) and spark.kind in _SPARK:
        return _SPARK[spark.kind]
    type_name = _type_name(dtype)
    if type_name in _TEXTS:
        return str
    if type_name == "Decimal":
        return Decimal
    if type_name == "datetime64":
        return datetime
    kind = _dtype(name, dtype).kind
    return {"b": bool, "i": int, "u": int, "f": float}.get(kind, Any)


def _type_name(dtype: Any) -> str:
    """Return the name of a type; of a numpy dtype, its argument, such as 'f4'."""
    if isinstance(dtype, PickledObject) and dtype.arguments:
        return _type_name(dtype.arguments[0])
    return dtype.name if isinstance(dtype, PickledType) else str(dtype)


def _dtype(name: str, dtype: Any) -> np.dtype[Any]:
    try:
        numpy_dtype = np.dtype(_type_name(dtype).removesuffix("_"))
    except TypeError:
        numpy_dtype = np.dtype(object)
    if numpy_dtype.kind not in "biufcSUM":
        raise DecodeError(f"{name}: {_type_name(dtype)} is not a type that tensors have. Pass document_type=...")
    return numpy_dtype
