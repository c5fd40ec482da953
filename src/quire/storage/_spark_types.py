"""Arrow data as other tools carry it: a type that a tool has not is carried by another, and can be told back.

Spark has no bytes of a fixed number, no times and no unsigned numbers. What quire gives to Spark is carried by types
that Spark has, and each column says in its metadata what it was; Spark writes that into its files.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

SPARK_FIELD_KEY = "quire.arrow"
"""Under this name, the metadata of a field of Spark has the Arrow field that it carries."""
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
"""Types that others hold without loss, and that are cast."""


def spark_type(arrow_type: pa.DataType) -> pa.DataType:
    """The Arrow type that Spark takes for another."""
    if _types.is_fixed_size_binary(arrow_type):
        return pa.binary()
    if _types.is_time(arrow_type) or _types.is_duration(arrow_type):
        return pa.int64() if arrow_type.bit_width == 64 else pa.int32()
    if _types.is_timestamp(arrow_type):
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
    """A field as Spark has it: it may always be null."""
    return pa.field(field.name, spark_type(field.type))


def spark_arrow_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as Spark has them."""
    return pa.schema([spark_field(field) for field in schema])


def is_list_type(arrow_type: pa.DataType) -> bool:
    """Whether it is one of the kinds of lists."""
    return bool(
        _types.is_list(arrow_type) or _types.is_large_list(arrow_type) or _types.is_fixed_size_list(arrow_type)
    )


# --- arrays


def convert_array(array: pa.Array, wanted: pa.DataType) -> pa.Array:
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
    places = [array.type.get_field_index(field.name) for field in fields]
    if -1 in places:
        raise ValueError(f"there is no {fields[places.index(-1)].name!r} in it")
    inner = [convert_array(array.field(place), field.type) for place, field in zip(places, fields, strict=True)]
    if not inner:
        return array
    return pa.Array.from_buffers(wanted, len(array), [_bits(array)], children=inner)


def _list(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    if not (_types.is_list(array.type) and _types.is_list(wanted)):
        return _other_list(array, wanted)
    validity, offsets = array.buffers()[:2]
    items = convert_array(array.values, wanted.value_type)
    return pa.Array.from_buffers(wanted, len(array), [validity, offsets], -1, array.offset, children=[items])


def _other_list(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Between lists of one length, long lists and lists; what is in them is cast first."""
    return array.cast(pa.list_(array.type.value_field)).cast(wanted)


def _storage(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    return convert_array(array.storage, wanted)


def _extended(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    return wanted.wrap_array(convert_array(array, wanted.storage_type))


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
    (lambda a, b: is_list_type(a) and is_list_type(b), _list),
]


# --- what a file of Spark tells of its columns


def field_to_text(field: pa.Field) -> str:
    """An Arrow field, all of it, as text."""
    return base64.b64encode(pa.schema([field]).serialize()).decode()


def field_from_text(text: str) -> pa.Field:
    """The Arrow field that `field_to_text` was given."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))).field(0)


def restore_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as they were before Spark carried them, where its file tells it; else as they are."""
    told = _told(schema.metadata)
    if not told:
        return schema
    return pa.schema([_restored_field(field, told.get(field.name)) for field in schema], schema.metadata)


def restore_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A record batch in the columns of `told_schema`."""
    schema = restore_schema(batch.schema)
    if schema is batch.schema:
        return batch
    arrays = [convert_array(array, field.type) for array, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _told(metadata: Mapping[bytes, bytes] | None) -> dict[str, pa.Field]:
    if metadata is None or _SPARK not in metadata:
        return {}
    try:
        fields = json.loads(metadata[_SPARK])["fields"]
        texts = {
            field["name"]: field["metadata"][SPARK_FIELD_KEY]
            for field in fields
            if SPARK_FIELD_KEY in field["metadata"]
        }
        return {name: field_from_text(text) for name, text in texts.items()}
    except (ValueError, KeyError, TypeError, AttributeError, pa.ArrowException):
        return {}  # some other tool's


def _restored_field(field: pa.Field, told: pa.Field | None) -> pa.Field:
    if told is None:
        return field
    try:
        convert_array(pa.array([], field.type), told.type)
    except (ValueError, pa.ArrowException):
        return field  # only a part of it was read, or it was made anew
    return told.with_name(field.name).with_nullable(True)  # noqa: FBT003 - pyarrow's signature
