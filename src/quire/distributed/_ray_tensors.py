"""Ray Data's tensor columns converted to quire's: Ray's Arrow extension types are its own."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa

from quire.errors import OptionError
from quire.storage import EXTENSION_METADATA, EXTENSION_NAME

_SHAPE_TYPE = pa.list_(pa.field("item", pa.int64(), nullable=False))
_RAGGED_TYPE = pa.struct([pa.field("data", pa.binary()), pa.field("shape", _SHAPE_TYPE)])


def arrow_schema(dataset: Any) -> pa.Schema:
    """Return the schema of a Ray Dataset, with tensors as quire describes them; may run its first rows."""
    schema = dataset.schema(fetch_if_missing=True)
    base = getattr(schema, "base_schema", None)
    if schema is None:
        raise OptionError("the Ray Dataset has no rows and no schema.")
    if not isinstance(base, pa.Schema):  # its blocks are pandas frames
        base = dataset.limit(1).take_batch(1, batch_format="pyarrow").schema
    return pa.schema([_convert_field(field) for field in base])


def convert_tensors(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert the tensors of a record batch to the types of a schema of `arrow_schema`.

    Tensors of one shape are not copied. If shapes differ in the dataset, a single block may still have one shape.
    """
    if not any(_tensor_kind(field.type) for field in batch.schema):
        return batch
    fields = [schema.field(field.name) if _tensor_kind(field.type) else field for field in batch.schema]
    arrays = [_convert_array(array, field.type) for array, field in zip(batch.columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _tensor_kind(arrow_type: pa.DataType) -> str:
    """Return 'fixed' or 'ragged' for tensor types, '' for all others."""
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        return "" if arrow_type.permutation else "fixed"
    name = getattr(arrow_type, "extension_name", "")
    if name.startswith("ray.data.arrow_tensor"):
        return "fixed"
    return "ragged" if name.startswith("ray.data.arrow_variable_shaped_tensor") else ""


def _convert_field(field: pa.Field) -> pa.Field:
    kind, arrow_type = _tensor_kind(field.type), field.type
    if not kind:
        return field
    dtype = _dtype(arrow_type)
    if kind == "ragged":
        marks = {EXTENSION_NAME: "quire.ragged_tensor", EXTENSION_METADATA: json.dumps({"dtype": dtype.name})}
        return pa.field(field.name, _RAGGED_TYPE, nullable=field.nullable, metadata=marks)
    shape = list(arrow_type.shape)
    marks = {EXTENSION_NAME: "quire.tensor", EXTENSION_METADATA: json.dumps({"dtype": dtype.name, "shape": shape})}
    width = dtype.itemsize * math.prod(shape)
    return pa.field(field.name, pa.binary(width), nullable=field.nullable, metadata=marks)


def _dtype(arrow_type: Any) -> np.dtype[Any]:
    storage = arrow_type.storage_type
    storage = storage.field("data").type if pa.types.is_struct(storage) else storage
    dtype: np.dtype[Any] = np.dtype(storage.value_type.to_pandas_dtype())
    return dtype


def _convert_array(array: pa.Array, target: pa.DataType) -> pa.Array:
    kind = _tensor_kind(array.type)
    if not kind:
        return array
    if kind == "ragged":
        return _convert_ragged(array.storage, _dtype(array.type))
    if pa.types.is_struct(target):
        return _fixed_to_ragged(array, target)
    storage, size = array.storage, math.prod(array.type.shape)
    if storage.null_count:
        rows = [None if row is None else np.asarray(row, _dtype(array.type)).tobytes() for row in storage.to_pylist()]
        return pa.array(rows, target)
    first = storage.offset * size if pa.types.is_fixed_size_list(storage.type) else _first_offset(storage)
    values = _to_numpy(storage.values.slice(first, len(storage) * size))
    return pa.Array.from_buffers(target, len(storage), [None, pa.py_buffer(values)])


def _fixed_to_ragged(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert tensors of one shape in a column whose shapes differ elsewhere."""
    dtype, shape = _dtype(array.type), list(array.type.shape)
    rows = [
        None if row is None else {"data": np.asarray(row, dtype).tobytes(), "shape": shape}
        for row in array.storage.to_pylist()
    ]
    return pa.array(rows, target)


def _first_offset(lists: pa.Array) -> int:
    """Return where the items of the first list begin."""
    return lists.offsets[0].as_py() if len(lists) else 0


def _to_numpy(values: pa.Array) -> Any:
    """Return the elements as numpy stores them; bits become bytes."""
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False))


def _convert_ragged(storage: pa.Array, dtype: np.dtype[Any]) -> pa.Array:
    rows = [
        None
        if row is None
        else {"data": np.asarray(row["data"], dtype).tobytes(), "shape": [int(size) for size in row["shape"]]}
        for row in storage.to_pylist()
    ]
    return pa.array(rows, _RAGGED_TYPE)
