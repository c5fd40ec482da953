"""Arrow data in Spark: columns that Spark has no type for are carried by others, and tell what they were.

Tensors, UUIDs and all else of a fixed number of bytes are carried as `binary`; times and durations as numbers. The
Arrow field of each column stands in the metadata of Spark's own field, at every level, and goes wherever Spark lets
metadata go: through files, filters, selections and joins, not through aggregates.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from quire._optional import require
from quire.errors import DecodeError
from quire.storage._form import mark_of

FIELD_KEY, TENSOR_KEY = "quire.arrow", "tensor"
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
"""Types that others hold without loss, and that are cast."""


def carrier(arrow_type: pa.DataType) -> pa.DataType:
    """The Arrow type that Spark takes for another."""
    if _types.is_fixed_size_binary(arrow_type):
        return pa.binary()
    if _types.is_time(arrow_type) or _types.is_duration(arrow_type):
        return pa.int64() if arrow_type.bit_width == 64 else pa.int32()
    if _types.is_timestamp(arrow_type):
        return pa.timestamp("us", "UTC" if arrow_type.tz else None)
    if _types.is_struct(arrow_type):
        return pa.struct([carried_field(arrow_type.field(i)) for i in range(arrow_type.num_fields)])
    if _is_list(arrow_type):
        return pa.list_(carried_field(arrow_type.value_field))
    if isinstance(arrow_type, pa.BaseExtensionType):
        return carrier(arrow_type.storage_type)
    if _types.is_dictionary(arrow_type):
        return carrier(arrow_type.value_type)
    return _WIDER.get(arrow_type, arrow_type)


def carried_field(field: pa.Field) -> pa.Field:
    """A field as Spark has it: it may always be null."""
    return pa.field(field.name, carrier(field.type))


def carried_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as Spark has them."""
    return pa.schema([carried_field(field) for field in schema])


def _is_list(arrow_type: pa.DataType) -> bool:
    return bool(_types.is_list(arrow_type) or _types.is_large_list(arrow_type) or _types.is_fixed_size_list(arrow_type))


# --- arrays


def to_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A record batch as Spark takes it; `schema` is that of the carriers. Tensors are not copied."""
    arrays = [changed(array, field.type) for array, field in zip(batch.columns, schema, strict=True)]
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
        return changed(array, field.type)
    except (pa.ArrowException, ValueError) as error:
        raise DecodeError(f"{field.name}: Spark has {array.type}, which is no {field.type}: {error}") from error


def changed(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """An array in another type that holds the same: between a type and its carrier, both ways."""
    found = array.type
    if found == wanted:
        return array
    for applies, change in _CHANGES:
        if applies(found, wanted):
            return change(array, wanted)
    return array.cast(wanted)


def _unfixed(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Rows of one width as rows of any: the same bytes, and where each of them ends."""
    width, end = array.type.byte_width, array.offset + len(array)
    validity, data = array.buffers()
    if end * width >= 1 << 31:
        offsets = np.arange(len(array) + 1, dtype=np.int64) * width
        data = data.slice(array.offset * width, len(array) * width)
        bits = _bits(array)
        return pa.Array.from_buffers(wanted, len(array), [bits, pa.py_buffer(offsets.astype(np.int32)), data])
    offsets = np.arange(end + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(wanted, len(array), [validity, pa.py_buffer(offsets), data], -1, array.offset)


def _fixed(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Rows of any width as rows of one, which they must have."""
    if _types.is_large_binary(array.type):
        array = array.cast(pa.binary())
    _, offsets, data = array.buffers()
    width, count = wanted.byte_width, len(array)
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + count + 1] if count else np.zeros(1, np.int32)
    sizes = np.diff(ends)
    if (sizes == width).all():
        held = pa.py_buffer(b"") if data is None else data.slice(int(ends[0]), count * width)
        return pa.Array.from_buffers(wanted, count, [_bits(array), held])
    there = np.asarray(array.is_valid())
    if (sizes[there] != width).any():
        raise ValueError(f"a row has {int(sizes[there][sizes[there] != width][0])} bytes, and not {width}")
    room = np.zeros((count, width), np.uint8)
    room[there] = np.frombuffer(b"".join(array.drop_null().to_pylist()), np.uint8).reshape(-1, width)
    return pa.Array.from_buffers(wanted, count, [_bits(array), pa.py_buffer(room)])


def _bits(array: pa.Array) -> pa.Buffer | None:
    """The validity of an array, from its first row on."""
    if not array.null_count:
        return None
    return pa.py_buffer(np.packbits(np.asarray(array.is_valid()), bitorder="little"))


def _numbers(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    return array.view(wanted)


def _struct(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    fields = [wanted.field(i) for i in range(wanted.num_fields)]
    inner = [changed(array.field(array.type.get_field_index(field.name)), field.type) for field in fields]
    if not inner:
        return array
    return pa.Array.from_buffers(wanted, len(array), [_bits(array)], children=inner)


def _list(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    if not (_types.is_list(array.type) and _types.is_list(wanted)):
        return _other_list(array, wanted)
    validity, offsets = array.buffers()[:2]
    items = changed(array.values, wanted.value_type)
    return pa.Array.from_buffers(wanted, len(array), [validity, offsets], -1, array.offset, children=[items])


def _other_list(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Between lists of one length, long lists and lists; what is in them is cast first."""
    return array.cast(pa.list_(array.type.value_field)).cast(wanted)


def _storage(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    return changed(array.storage, wanted)


def _extended(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    return wanted.wrap_array(changed(array, wanted.storage_type))


def _is_plain(arrow_type: pa.DataType) -> bool:
    return bool(_types.is_integer(arrow_type))


def _is_moment(arrow_type: pa.DataType) -> bool:
    return bool(_types.is_time(arrow_type) or _types.is_duration(arrow_type))


def _is_bytes(arrow_type: pa.DataType) -> bool:
    return bool(_types.is_binary(arrow_type) or _types.is_large_binary(arrow_type))


_Change = tuple[Callable[[pa.DataType, pa.DataType], bool], Callable[[pa.Array, pa.DataType], pa.Array]]
_CHANGES: list[_Change] = [
    (lambda a, _: isinstance(a, pa.BaseExtensionType), _storage),
    (lambda _, b: isinstance(b, pa.BaseExtensionType), _extended),
    (lambda a, b: _types.is_fixed_size_binary(a) and _types.is_binary(b), _unfixed),
    (lambda a, b: _is_bytes(a) and _types.is_fixed_size_binary(b), _fixed),
    (lambda a, b: (_is_moment(a) and _is_plain(b)) or (_is_plain(a) and _is_moment(b)), _numbers),
    (lambda a, b: _types.is_struct(a) and _types.is_struct(b), _struct),
    (lambda a, b: _is_list(a) and _is_list(b), _list),
]


# --- schemas


def spark_schema(schema: pa.Schema) -> Any:
    """The schema of Spark for columns: those of the carriers, each with its Arrow field in the metadata."""
    types: Any = require("pyspark.sql.types", extra="spark", needed_for="engine='spark'")
    return types.StructType([_spark_field(types, field) for field in schema])


def _spark_field(types: Any, field: pa.Field) -> Any:
    written = base64.b64encode(pa.schema([field]).serialize()).decode()
    metadata: dict[str, Any] = {FIELD_KEY: written}
    mark = mark_of(field)
    if mark and mark[0] == "quire.tensor":
        metadata[TENSOR_KEY] = mark[1]
    return types.StructField(field.name, _spark_type(types, field.type), True, metadata)  # noqa: FBT003


def _spark_type(types: Any, arrow_type: pa.DataType) -> Any:
    if _types.is_struct(arrow_type):
        inner = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        return types.StructType([_spark_field(types, field) for field in inner])
    if _is_list(arrow_type):
        return types.ArrayType(_spark_type(types, arrow_type.value_type))
    pandas: Any = require("pyspark.sql.pandas.types", extra="spark", needed_for="engine='spark'")
    return pandas.from_arrow_type(carrier(arrow_type), True)  # noqa: FBT003 - timestamps without a zone are kept so


def arrow_schema(schema: Any) -> pa.Schema:
    """The Arrow schema of a frame of Spark: what its columns say that they were, and else what Spark makes of them."""
    return pa.schema([_arrow_field(field) for field in schema.fields])


def _arrow_field(field: Any) -> pa.Field:
    pandas: Any = require("pyspark.sql.pandas.types", extra="spark", needed_for="engine='spark'")
    told = (field.metadata or {}).get(FIELD_KEY)
    if told is not None:
        found = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(told))).field(0).with_name(field.name)
        types: Any = require("pyspark.sql.types", extra="spark", needed_for="engine='spark'")
        if _bare(_spark_type(types, found.type)) == _bare(field.dataType):
            return found
    return pa.field(field.name, pandas.to_arrow_type(field.dataType), nullable=field.nullable)


def _bare(data_type: Any) -> str:
    """A type of Spark without metadata and nullability."""
    return str(data_type.simpleString())
