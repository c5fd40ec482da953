"""The class of a dataset: the one that wrote it, or one made from what its files hold."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import ConfigDict, create_model
from pydantic.fields import FieldInfo

from quire import _parametrize
from quire._class_registry import find
from quire.array import DocumentArray
from quire.document import BaseDocument, field_name
from quire.errors import StorageError
from quire.files import Folder, shown
from quire.storage._form import mark_of
from quire.storage._layout import CLASS_KEY
from quire.storage._manifest import Shard
from quire.storage._nested import PLACEHOLDER
from quire.storage._shards import arrow_schema_of, partitions
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
HAS_NULLS = {b"quire.has_nulls": b"true"}
"""The metadata of an Arrow field whose data is known to have nulls: a list of such items is no tensor."""


class Row(BaseDocument):
    """A row of another writer, which has no id unless it says so."""

    id: ClassVar[None] = None  # type: ignore[assignment,misc]


def class_of(folder: Folder, shards: Sequence[Shard]) -> type[Any]:
    """The class of the first shard: loaded, or made."""
    if not shards:
        raise StorageError(
            f"{shown(folder.url)}: no shard is whole that could tell the class. Pass it: schema=Student."
        )
    schema = arrow_schema_of(folder, shards[0])
    for key, value in partitions(shards[0].name).items():
        if key not in schema.names:
            schema = schema.append(pa.field(key, pa.int64() if isinstance(value, int) else pa.string()))
    name = (schema.metadata or {}).get(CLASS_KEY, b"").decode()
    return loaded_class(schema) or class_from_arrow(schema, name.rpartition(":")[2].rpartition(".")[2] or "Row")


def loaded_class(schema: Any) -> type[Any] | None:
    """The class that an Arrow schema names, if it is loaded.

    Classes that were made at run time have names of their own process only: in another process, the same name may be
    that of a class with other fields, which is not meant.
    """
    name = (schema.metadata or {}).get(CLASS_KEY, b"").decode()
    found = find(name, None) if name else None
    if found is None or found.__module__ != _parametrize.__name__:
        return found
    columns = {info.alias or field for field, info in found.model_fields.items()}
    return found if columns - {"id"} == set(schema.names) - {"id", PLACEHOLDER.name} else None


def class_from_arrow(schema: Any, name: str, base: type[Any] | None = None) -> type[Any]:
    """A document class with a field for each of an Arrow schema; a name that no field can have becomes an alias.

    It has an id if the schema has one, or the base does.
    """
    fields: dict[str, Any] = {}
    for field in schema:
        if field.name == PLACEHOLDER.name:
            continue
        annotation = _annotation(field, f"{name}_{field.name}")
        own = field_name(field.name, fields)
        details: dict[str, Any] = {} if own == field.name else {"alias": field.name}
        default = FieldInfo(default=None, **details) if field.nullable else FieldInfo(**details)
        fields[own] = (annotation | None if field.nullable else annotation, default)
    config = ConfigDict(populate_by_name=True, protected_namespaces=())
    base = base or (BaseDocument if "id" in fields else Row)
    made: type[Any] = create_model(name, __base__=base, **fields)
    made.model_config = {**made.model_config, **config}
    made.model_rebuild(force=True)
    return findable(made)


def findable(made: type[Any]) -> type[Any]:
    """A class that was made, so that pickle finds it again: in this process, and in those that are forked from it."""
    made.__module__, made.__qualname__ = _parametrize.__name__, _parametrize.publish(made.__name__)
    _parametrize.register(made)
    return made


def _annotation(field: pa.Field, name: str) -> Any:
    arrow_type = field.type.storage_type if isinstance(field.type, pa.ExtensionType) else field.type
    kind, details = mark_of(field) or ("", None)
    if kind in ("quire.tensor", "quire.ragged_tensor"):
        return _tensor(details)
    if kind == "quire.value":
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
        if inner.value_field.metadata == HAS_NULLS:
            item = arrow_type.value_field
            annotation = _annotation(item, name)
            return list[annotation | None if item.metadata == HAS_NULLS else annotation]  # type: ignore[misc]
        sizes.append(inner.list_size if pa.types.is_fixed_size_list(inner) else ...)
        inner = inner.value_type
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
        return list[_plain(arrow_type.value_type, name)]  # type: ignore[misc]
    if ... in sizes:
        return Annotated[np.ndarray, DType(_dtype(inner))]
    return Annotated[np.ndarray, Shape(*sizes), DType(_dtype(inner))]


def _dtype(arrow_type: pa.DataType) -> str:
    return str(np.dtype(arrow_type.to_pandas_dtype()).name)


def _tensor(details: Any) -> Any:
    shape, dtype = details.get("shape"), details.get("dtype")
    if shape is None:
        return np.ndarray if dtype is None else Annotated[np.ndarray, DType(dtype)]
    return Annotated[np.ndarray, Shape(*shape), DType(dtype)]
