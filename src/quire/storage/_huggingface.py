"""Writing documents as a dataset of Hugging Face: the folder that `datasets.load_from_disk` opens."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Secret, SecretBytes, SecretStr

from quire._protocols import is_array_type, is_document_type
from quire.codec import to_json
from quire.errors import EncodeError
from quire.schema import Field, FieldKind, Schema
from quire.storage._arrow_codec import NumberCodec
from quire.storage._nested_codecs import has_list_codec
from quire.tensors import framework_of

_ROWS = 1000
"""The number of rows of a record batch."""
_ITEMS = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string(), bytes: pa.binary()}
_STATE: dict[str, Any] = {
    "_fingerprint": "quire",
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}


class _Feature(NamedTuple):
    """How a field is stored: its Arrow type, its description in `features`, and a function from values to Arrow's."""

    type: pa.DataType
    description: Any
    convert: Callable[[Any], Any]

    def to_arrow(self, value: Any) -> Any:
        """Return a value as Arrow takes it; None stays None."""
        return None if value is None else self.convert(value)


def write_huggingface(document_type: type[Any], documents: Iterable[Any], folder: Path) -> int:
    """Write documents, and return their number.

    Tensors become nested lists. Values without a type there become text: enums and decimals as they are, dicts and
    unions as JSON.
    """
    schema = document_type.document_schema()
    if not schema.fields:
        raise EncodeError(f"{schema.name} has no fields, and a table without columns has no rows.")
    # An Arrow stream begins with its schema, and the types of tensors and datetimes depend on values: the first rows
    # decide. Later rows that do not fit are errors.
    rows = iter(documents)
    block = list(islice(rows, _ROWS))
    features = {field.name: _feature(field, _present_values(block, field.name)) for field in schema.fields}
    descriptions = {name: feature.description for name, feature in features.items()}
    arrow_schema = pa.schema(
        [pa.field(name, feature.type) for name, feature in features.items()],
        {"huggingface": json.dumps({"info": {"features": descriptions}})},
    )
    file_name, total = "data-00000-of-00001.arrow", 0
    with pa.OSFile(str(folder / file_name), "wb") as file, pa.ipc.new_stream(file, arrow_schema) as writer:
        while block:
            arrays = []
            for name, feature in features.items():
                values = [feature.to_arrow(document.__dict__.get(name)) for document in block]
                try:
                    arrays.append(pa.array(values, feature.type))
                except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                    raise EncodeError(f"rows {total} to {total + len(block) - 1}, {name}: {error}") from error
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=arrow_schema))
            total += len(block)
            block = list(islice(rows, _ROWS))
    info = {"features": descriptions, "citation": "", "description": "", "license": ""}
    state = {**_STATE, "_data_files": [{"filename": file_name}]}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")
    (folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    return total


def _present_values(documents: Sequence[Any], name: str) -> list[Any]:
    return [value for document in documents if (value := document.__dict__.get(name)) is not None]


def _feature(field: Field, sample: list[Any]) -> _Feature:
    """Return the feature of a field; that of tensors and datetimes depends on the first rows."""
    build = _FEATURES.get(field.kind)
    feature = None if build is None else build(field, sample)
    return _value_feature(pa.string(), _to_json_text) if feature is None else feature


def _value_feature(arrow_type: pa.DataType, convert: Callable[[Any], Any]) -> _Feature:
    return _Feature(arrow_type, _describe(arrow_type), convert)


def _describe(arrow_type: pa.DataType) -> dict[str, str]:
    names = {"double": "float64", "float": "float32", "halffloat": "float16", "date32[day]": "date32"}
    return {"dtype": names.get(str(arrow_type), str(arrow_type)), "_type": "Value"}


def _list_feature(field: Field, _: list[Any]) -> _Feature | None:
    if not has_list_codec(field):
        return None
    arrow_type = _ITEMS[field.items[0].type]
    return _Feature(pa.list_(arrow_type), [_describe(arrow_type)], list)


def _datetime_feature(field: Field, sample: list[Any]) -> _Feature:
    """Store times with a time zone in UTC, and others without; the first rows decide which of both a column has.

    If the first rows have both, times become text.
    """
    zoned = {value.utcoffset() is not None for value in sample}
    if len(zoned) > 1:
        return _value_feature(pa.string(), datetime.isoformat)
    has_zone = zoned == {True}
    arrow_type = pa.timestamp("us", "UTC" if has_zone else None)

    def check_zone(value: datetime) -> datetime:
        if (value.utcoffset() is not None) != has_zone:
            first, other = ("a", "none") if has_zone else ("no", "one")
            raise EncodeError(
                f"{field.name}: the first times have {first} time zone, and {value.isoformat()} has {other}. "
                "A column of Hugging Face has one kind of time: give all of them a zone, or none."
            )
        return value

    return _value_feature(arrow_type, check_zone)


def _to_text(value: Any) -> str:
    """Return decimals and paths as text; of an enum, the value if that is a text, as other tools write it."""
    if not isinstance(value, Enum):
        return str(value)
    return value.value if isinstance(value.value, str) else value.name


def _check_no_zone(value: Any) -> Any:
    if getattr(value, "tzinfo", None) is not None:
        raise EncodeError(f"{value!r}: Hugging Face has no times of day with a time zone. Use a datetime, or text.")
    return value


def _to_json_text(value: Any) -> str:
    if is_document_type(type(value)):
        return to_json(value, None, "lists")
    try:
        return json.dumps(value, default=_to_jsonable)
    except (TypeError, ValueError, RecursionError) as error:  # keys that JSON does not have; cycles
        raise EncodeError(f"a {type(value).__name__} cannot be written as JSON: {error}.") from error


def _to_jsonable(value: Any) -> Any:
    """Return what JSON has in place of a value; text for most."""
    if is_document_type(type(value)):
        return json.loads(to_json(value, None, "lists"))
    if is_array_type(type(value)) or isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, re.Pattern) and re.compile(value.pattern).flags == value.flags:
        return value.pattern
    if isinstance(value, (Secret, SecretStr, SecretBytes, re.Pattern)):
        raise EncodeError(f"{value!r} cannot be written as text there without losing what it holds.")
    return str(value)


def _tensor_feature(_: Field, sample: list[Any]) -> _Feature:
    arrays = [_to_numpy(value) for value in sample]
    depths, dtypes = {array.ndim for array in arrays}, {array.dtype for array in arrays}
    if len(depths) > 1 or len(dtypes) > 1:
        return _value_feature(pa.string(), lambda value: json.dumps(_to_numpy(value).tolist()))
    depth, dtype = (depths or {1}).pop(), (dtypes or {np.dtype(np.float32)}).pop()
    arrow_type = pa.from_numpy_dtype(dtype)
    description: Any = _describe(arrow_type)
    for _axis in range(depth):
        arrow_type, description = pa.list_(arrow_type), [description]
    return _Feature(arrow_type, description, lambda value: _to_numpy(value).tolist())


def _to_numpy(value: Any) -> np.ndarray[Any, Any]:
    framework = framework_of(value)
    if framework is None or framework.is_sparse(value):
        raise EncodeError(f"a {type(value).__name__} cannot be written as lists of numbers.")
    array = framework.to_numpy(value)
    return array if array.dtype.kind in "biuf" else array.astype(np.float32)


def _document_feature(field: Field, sample: list[Any]) -> _Feature | None:
    if field.recursive:
        return None
    schema: Schema = field.document_type.document_schema()
    if not schema.fields:
        raise EncodeError(f"{field.name}: {schema.name} has no fields, and Hugging Face has no documents without them.")
    is_array = field.kind is FieldKind.DOCUMENTS
    documents = [document for value in sample for document in value] if is_array else sample
    features = {part.name: _feature(part, _present_values(documents, part.name)) for part in schema.fields}
    arrow_type = pa.struct([pa.field(name, feature.type) for name, feature in features.items()])
    description = {name: feature.description for name, feature in features.items()}

    def convert(document: Any) -> dict[str, Any]:
        return {name: feature.to_arrow(document.__dict__.get(name)) for name, feature in features.items()}

    if is_array:
        return _Feature(pa.list_(arrow_type), [description], lambda documents: list(map(convert, documents)))
    return _Feature(arrow_type, description, convert)


_Build = Callable[[Field, list[Any]], _Feature | None]
_FEATURES: Mapping[FieldKind, _Build] = {
    FieldKind.SCALAR: lambda field, _: (
        _value_feature(NumberCodec.types[field.type][0], field.type) if field.type in NumberCodec.types else None
    ),
    FieldKind.TEXT: lambda *_: _value_feature(pa.string(), str),
    FieldKind.BYTES: lambda *_: _value_feature(pa.binary(), bytes),
    FieldKind.UUID: lambda *_: _value_feature(pa.string(), str),
    FieldKind.DATE: lambda *_: _value_feature(pa.date32(), _check_no_zone),
    FieldKind.TIME: lambda *_: _value_feature(pa.time64("us"), _check_no_zone),
    FieldKind.TIMEDELTA: lambda *_: _value_feature(pa.duration("us"), _check_no_zone),
    FieldKind.DATETIME: _datetime_feature,
    FieldKind.ENUM: lambda *_: _value_feature(pa.string(), _to_text),
    FieldKind.DECIMAL: lambda *_: _value_feature(pa.string(), _to_text),
    FieldKind.PATH: lambda *_: _value_feature(pa.string(), _to_text),
    FieldKind.LIST: _list_feature,
    FieldKind.TENSOR: _tensor_feature,
    FieldKind.DOCUMENT: _document_feature,
    FieldKind.DOCUMENTS: _document_feature,
}
"""The feature of each kind of field. Fields of other kinds, and where an entry returns None, become JSON text."""
