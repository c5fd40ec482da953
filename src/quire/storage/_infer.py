"""The class of a dataset: the one that wrote it, or one made from what its files hold."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import create_model

from quire._loaded import find
from quire.array import DocumentArray
from quire.document import BaseDocument
from quire.files import Folder, RemoteOptions
from quire.storage._layout import CLASS_KEY
from quire.storage._manifest import Shard, plain_files, read_manifest
from quire.storage._form import EXTENSION
from quire.storage._shards import Parts, told
from quire.tensors import DType, Shape

_SIMPLE: tuple[tuple[Any, Any], ...] = (
    (pa.types.is_boolean, bool),
    (pa.types.is_integer, int),
    (pa.types.is_floating, float),
    (pa.types.is_string, str),
    (pa.types.is_large_string, str),
    (pa.types.is_binary, bytes),
    (pa.types.is_large_binary, bytes),
    (pa.types.is_fixed_size_binary, bytes),
    (pa.types.is_date, date),
    (pa.types.is_timestamp, datetime),
    (pa.types.is_time, time),
    (pa.types.is_duration, timedelta),
    (pa.types.is_decimal, Decimal),
)


def class_of(folder: Folder, remote: RemoteOptions) -> type[Any]:
    """The class of the first shard: loaded, or made."""
    shards = read_manifest(folder, remote).shards or plain_files(folder)
    schema = arrow_schema_of(folder, shards[0])
    name = (schema.metadata or {}).get(CLASS_KEY, b"").decode()
    loaded = find(name, None) if name else None
    return loaded or class_from_arrow(schema, name.rpartition(":")[2].rpartition(".")[2] or "Row")


def arrow_schema_of(folder: Folder, shard: Shard) -> pa.Schema:
    """The Arrow schema in the footer of a shard."""
    with told(folder, shard), pa.PythonFile(Parts(folder, shard), "r") as file:
        return pq.read_schema(file) if shard.format == "parquet" else pa.ipc.open_file(file).schema


def class_from_arrow(schema: Any, name: str) -> type[Any]:
    """A document class with a field for each of an Arrow schema."""
    fields: dict[str, Any] = {}
    for field in schema:
        annotation = _annotation(field, f"{name}_{field.name}")
        fields[field.name] = (annotation | None, None) if field.nullable else (annotation, ...)
    made: type[Any] = create_model(name, __base__=BaseDocument, **fields)
    return made


def _annotation(field: pa.Field, name: str) -> Any:
    arrow_type = field.type.storage_type if isinstance(field.type, pa.ExtensionType) else field.type
    details = field.metadata or {}
    kind = details.get(EXTENSION.encode())
    if kind in (b"quire.tensor", b"quire.ragged_tensor"):
        return _tensor(json.loads(details[b"ARROW:extension:metadata"]))
    if kind == b"quire.value":
        return Any
    if isinstance(field.type, pa.FixedShapeTensorType):
        return Annotated[np.ndarray, Shape(*field.type.shape), DType(_dtype(field.type.value_type))]
    return _plain(arrow_type, name)


def _plain(arrow_type: pa.DataType, name: str) -> Any:
    if pa.types.is_dictionary(arrow_type):
        return _plain(arrow_type.value_type, name)
    if pa.types.is_struct(arrow_type):
        fields = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        return datetime if [f.name for f in fields] == ["at", "zone"] else class_from_arrow(fields, name)
    if pa.types.is_map(arrow_type):
        return dict[_plain(arrow_type.key_type, name), Any]  # type: ignore[misc]
    if _is_list(arrow_type):
        return _list(arrow_type, name)
    return next((tp for test, tp in _SIMPLE if test(arrow_type)), Any)


def _is_list(arrow_type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type))


def _list(arrow_type: pa.DataType, name: str) -> Any:
    """Documents, a tensor of numbers, or a list of something else."""
    if pa.types.is_struct(arrow_type.value_type):
        return DocumentArray[_plain(arrow_type.value_type, name)]  # type: ignore[misc]
    inner, sizes = arrow_type, []
    while _is_list(inner):
        sizes.append(inner.list_size if pa.types.is_fixed_size_list(inner) else ...)
        inner = inner.value_type
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
        return list[_plain(arrow_type.value_type, name)]  # type: ignore[misc]
    if ... in sizes:
        return Annotated[np.ndarray, DType(_dtype(inner))]
    return Annotated[np.ndarray, Shape(*sizes), DType(_dtype(inner))]


def _dtype(arrow_type: pa.DataType) -> str:
    return np.dtype(arrow_type.to_pandas_dtype()).name


def _tensor(details: dict[str, Any]) -> Any:
    parts = [Shape(*details["shape"])] if details.get("shape") is not None else []
    parts += [DType(details["dtype"])] if details.get("dtype") else []
    return Annotated[(np.ndarray, *parts)] if parts else np.ndarray  # type: ignore[return-value]
