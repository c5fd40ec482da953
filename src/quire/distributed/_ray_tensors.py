"""Ray Data's tensor columns converted to quire's: Ray's Arrow extension types are its own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from quire.errors import OptionError
from quire.storage import EXTENSION_METADATA, EXTENSION_NAME

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from ray.data import Dataset


_SHAPE_TYPE = pa.list_(pa.field("item", pa.int64(), nullable=False))
_RAGGED_TYPE = pa.struct([pa.field("data", pa.binary()), pa.field("shape", _SHAPE_TYPE)])


def arrow_schema(dataset: Dataset) -> pa.Schema:
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


def _dtype(arrow_type: pa.DataType) -> np.dtype[Any]:
    storage = arrow_type.storage_type
    storage = storage.field("data").type if pa.types.is_struct(storage) else storage
    dtype: np.dtype[Any] = np.dtype(storage.value_type.to_pandas_dtype())
    return dtype


def _convert_array(array: pa.Array, target: pa.DataType) -> pa.Array:
    kind = _tensor_kind(array.type)
    if not kind:
        return array
    storage, dtype = array.storage, _dtype(array.type)
    if kind == "ragged":
        rows = [row and _ragged_cell(row["data"], dtype, row["shape"]) for row in storage.to_pylist()]
        return pa.array(rows, _RAGGED_TYPE)
    if pa.types.is_struct(target):  # of one shape in this block, and of others elsewhere in the column
        shape = array.type.shape
        rows = [None if row is None else _ragged_cell(row, dtype, shape) for row in storage.to_pylist()]
        return pa.array(rows, target)
    if storage.null_count:
        rows = [None if row is None else np.asarray(row, dtype).tobytes() for row in storage.to_pylist()]
        return pa.array(rows, target)
    # The elements are stored without gaps: the buffer becomes that of a fixed-size binary column.
    size = math.prod(array.type.shape)
    if pa.types.is_fixed_size_list(storage.type):
        first = storage.offset * size
    else:
        first = storage.offsets[0].as_py() if len(storage) else 0
    elements = storage.values.slice(first, len(storage) * size).to_numpy(zero_copy_only=False)  # bits become bytes
    return pa.Array.from_buffers(target, len(storage), [None, pa.py_buffer(np.ascontiguousarray(elements))])


def _ragged_cell(elements: ArrayLike, dtype: np.dtype[Any], shape: Iterable[int]) -> dict[str, Any]:
    return {"data": np.asarray(elements, dtype).tobytes(), "shape": [int(size) for size in shape]}
