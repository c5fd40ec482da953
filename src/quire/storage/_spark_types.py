"""Arrow types that Spark does not have: the types that hold them in Spark, and conversion both ways.

Spark has no bytes of a fixed length, no times and no unsigned numbers. Columns of such types are given to Spark in
types that it has. The metadata of each column keeps the original Arrow field, and Spark writes it into its files, so
that quire restores the original types when it reads them.
"""

from __future__ import annotations

import base64
import json
from contextlib import suppress

import numpy as np
import pyarrow as pa

from quire.storage._arrow_codec import array_validity, is_list_type, validity_bitmap

SPARK_FIELD_KEY = "quire.arrow"
"""The key of the original Arrow field in the metadata of a field of Spark."""
_SPARK = b"org.apache.spark.sql.parquet.row.metadata"
_types = pa.types
_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.date64(): pa.date32(),
}
"""Types that are cast to others that hold their values without loss."""


def spark_type(arrow_type: pa.DataType) -> pa.DataType:
    """Return the Arrow type that Spark takes in place of another."""
    if _types.is_fixed_size_binary(arrow_type):
        return pa.binary()
    if _types.is_time(arrow_type) or _types.is_duration(arrow_type):
        return pa.int64() if arrow_type.bit_width == 64 else pa.int32()
    if _types.is_timestamp(arrow_type):  # Spark has microseconds, and one zone for the whole session
        return pa.timestamp("us", "UTC" if arrow_type.tz else None)
    if _types.is_struct(arrow_type):
        return pa.struct([spark_field(arrow_type.field(i)) for i in range(arrow_type.num_fields)])
    if is_list_type(arrow_type):
        return pa.list_(spark_field(arrow_type.value_field))
    if isinstance(arrow_type, pa.BaseExtensionType):
        return spark_type(arrow_type.storage_type)
    if _types.is_dictionary(arrow_type):
        return spark_type(arrow_type.value_type)
    return _WIDER.get(arrow_type, arrow_type)


def spark_field(field: pa.Field) -> pa.Field:
    """Return a field as Spark has it, where it may always be null."""
    return pa.field(field.name, spark_type(field.type))


def spark_arrow_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns as Spark has them."""
    return pa.schema([spark_field(field) for field in schema])


# --- arrays


def convert_array(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert an array between a type and the one that holds it in Spark, either way."""
    source = array.type
    if source == target:
        return array
    if isinstance(source, pa.BaseExtensionType):
        return convert_array(array.storage, target)
    if isinstance(target, pa.BaseExtensionType):
        return target.wrap_array(convert_array(array, target.storage_type))
    if _types.is_fixed_size_binary(source) and _types.is_binary(target):
        return _from_fixed_width(array, target)
    if _types.is_fixed_size_binary(target) and (_types.is_binary(source) or _types.is_large_binary(source)):
        return _to_fixed_width(array, target)
    if _is_time_as_integer(source, target) or _is_time_as_integer(target, source):
        return array.view(target)
    if _types.is_struct(source) and _types.is_struct(target):
        return _convert_struct(array, target)
    if _types.is_list(source) and _types.is_list(target):  # the same offsets, with other items
        validity, offsets = array.buffers()[:2]
        items = convert_array(array.values, target.value_type)
        return pa.Array.from_buffers(target, len(array), [validity, offsets], -1, array.offset, children=[items])
    if is_list_type(source) and is_list_type(target):  # lists of one length, and long lists
        return array.cast(pa.list_(source.value_field)).cast(target)
    return array.cast(target)


def _from_fixed_width(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert rows of one width to rows of any: the same bytes, with offsets."""
    width, end = array.type.byte_width, array.offset + len(array)
    validity, data = array.buffers()
    if end * width >= 1 << 31:  # the offsets of a slice of a larger array would not fit: cut the slice out
        offsets = np.arange(len(array) + 1, dtype=np.int64) * width
        data = data.slice(array.offset * width, len(array) * width)
        buffers = [_own_bitmap(array), pa.py_buffer(offsets.astype(np.int32)), data]
        return pa.Array.from_buffers(target, len(array), buffers)
    offsets = np.arange(end + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(target, len(array), [validity, pa.py_buffer(offsets), data], -1, array.offset)


def _to_fixed_width(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert rows of any width to rows of one, which they must have; rows without a value may have another."""
    if _types.is_large_binary(array.type):
        array = array.cast(pa.binary())
    _, offsets, data = array.buffers()
    width, count = target.byte_width, len(array)
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + count + 1] if count else np.zeros(1, np.int32)
    sizes = np.diff(ends)
    if (sizes == width).all():
        content = pa.py_buffer(b"") if data is None else data.slice(int(ends[0]), count * width)
        return pa.Array.from_buffers(target, count, [_own_bitmap(array), content])
    valid = np.asarray(array.is_valid())
    if (sizes[valid] != width).any():
        raise ValueError(f"a row has {int(sizes[valid][sizes[valid] != width][0])} bytes, and not {width}")
    rows = np.zeros((count, width), np.uint8)
    rows[valid] = np.frombuffer(b"".join(array.drop_null().to_pylist()), np.uint8).reshape(-1, width)
    return pa.Array.from_buffers(target, count, [_own_bitmap(array), pa.py_buffer(rows)])


def _convert_struct(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert the fields of a struct by name: Spark may have some of them, in another order."""
    fields = [target.field(i) for i in range(target.num_fields)]
    places = [array.type.get_field_index(field.name) for field in fields]
    if -1 in places:
        raise ValueError(f"there is no {fields[places.index(-1)].name!r} in it")
    children = [convert_array(array.field(place), field.type) for place, field in zip(places, fields, strict=True)]
    if not children:
        return array
    return pa.Array.from_buffers(target, len(array), [_own_bitmap(array)], children=children)


def _own_bitmap(array: pa.Array) -> pa.Buffer | None:
    """Return the validity of an array, from its first row on."""
    return validity_bitmap(array_validity(array))


def _is_time_as_integer(one: pa.DataType, other: pa.DataType) -> bool:
    return bool((_types.is_time(one) or _types.is_duration(one)) and _types.is_integer(other))


# --- files of Spark


def field_to_text(field: pa.Field) -> str:
    """Return an Arrow field, with its metadata, as text."""
    return base64.b64encode(pa.schema([field]).serialize()).decode()


def field_from_text(text: str) -> pa.Field:
    """Return the Arrow field of a text of `field_to_text`."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))).field(0)


def restore_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns as they were before Spark, if its file says so; else as they are."""
    if _SPARK not in (schema.metadata or {}):
        return schema
    try:
        described = json.loads(schema.metadata[_SPARK])["fields"]
        texts = {f["name"]: f["metadata"][SPARK_FIELD_KEY] for f in described if SPARK_FIELD_KEY in f["metadata"]}
        originals = {name: field_from_text(text) for name, text in texts.items()}
    except (ValueError, KeyError, TypeError, AttributeError, pa.ArrowException):
        return schema  # metadata of another tool
    if not originals:
        return schema
    fields = list(schema)
    for place, field in enumerate(fields):
        # If only a part of a column was read, or it was replaced by another one, it stays as it is.
        if field.name in originals:
            with suppress(ValueError, pa.ArrowException):
                original = originals[field.name].with_name(field.name).with_nullable(True)  # noqa: FBT003 - pyarrow's
                convert_array(pa.array([], field.type), original.type)
                fields[place] = original
    return pa.schema(fields, schema.metadata)


def restore_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a record batch with the columns of `restore_schema`."""
    schema = restore_schema(batch.schema)
    if schema is batch.schema:
        return batch
    arrays = [convert_array(array, field.type) for array, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
