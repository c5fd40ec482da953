"""Documents as a dataset of Hugging Face: the folder that its `load_from_disk` opens."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Secret, SecretBytes, SecretStr

from quire._protocols import is_array_type, is_document_type
from quire.codec._json import to_json
from quire.errors import EncodeError
from quire.schema import Field, FieldKind, Schema
from quire.storage._arrow_codec import NumberCodec
from quire.storage._nested_codecs import has_list_codec
from quire.tensors import framework_of

_ROWS = 1000
"""So many rows are in a record batch."""
_MOMENTS = {FieldKind.DATE: pa.date32(), FieldKind.TIME: pa.time64("us"), FieldKind.TIMEDELTA: pa.duration("us")}
_PLAIN = {FieldKind.TEXT: (pa.string(), str), FieldKind.BYTES: (pa.binary(), bytes), FieldKind.UUID: (pa.string(), str)}
_ITEMS = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string(), bytes: pa.binary()}


class _FeatureCodec(NamedTuple):
    """How a field lies in Arrow there: its type, what Hugging Face calls it, and values as Arrow takes them."""

    type: pa.DataType
    feature: Any
    value: Callable[[Any], Any]


def write_huggingface(document_type: type[Any], documents: Iterable[Any], folder: Path) -> int:
    """Write documents as they come, and give their number.

    Tensors are nested lists. What has no type there is text: enums and decimals, and dicts and unions as JSON.
    """
    schema = document_type.document_schema()
    if not schema.fields:
        raise EncodeError(f"{schema.name} has no fields, and a table without columns has no rows.")
    rows = iter(documents)
    first = list(islice(rows, _ROWS))
    codecs = {field.name: _field_codec(field, _column(first, field.name)) for field in schema.fields}
    features = {name: codec.feature for name, codec in codecs.items()}
    arrow_schema = pa.schema(
        [pa.field(name, codec.type) for name, codec in codecs.items()],
        {"huggingface": json.dumps({"info": {"features": features}})},
    )
    name, total = "data-00000-of-00001.arrow", 0
    with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, arrow_schema) as writer:
        for block in _blocks(first, rows):
            writer.write_batch(_batch(block, codecs, arrow_schema, total))
            total += len(block)
    _write_json(folder / "dataset_info.json", {"features": features, "citation": "", "description": "", "license": ""})
    _write_json(folder / "state.json", {**_STATE, "_data_files": [{"filename": name}]})
    return total


_STATE: dict[str, Any] = {
    "_fingerprint": "quire",
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _blocks(first: list[Any], rest: Iterator[Any]) -> Iterator[list[Any]]:
    block = first
    while block:
        yield block
        block = list(islice(rest, _ROWS))


def _column(documents: Sequence[Any], name: str) -> list[Any]:
    return [value for document in documents if (value := document.__dict__.get(name)) is not None]


def _batch(block: list[Any], codecs: dict[str, _FeatureCodec], schema: pa.Schema, first: int) -> pa.RecordBatch:
    arrays = []
    for name, codec in codecs.items():
        values = [_value(codec, document.__dict__.get(name)) for document in block]
        try:
            arrays.append(pa.array(values, codec.type))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise EncodeError(f"rows {first} to {first + len(block) - 1}, {name}: {error}") from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _value(codec: _FeatureCodec, value: Any) -> Any:
    return None if value is None else codec.value(value)


def _field_codec(field: Field, sample: list[Any]) -> _FeatureCodec:
    """The form of a field; of tensors, what the first rows have."""
    kind = field.kind
    if kind is FieldKind.SCALAR and field.type in NumberCodec.types:
        arrow_type = NumberCodec.types[field.type][0]
        return _FeatureCodec(arrow_type, _named(arrow_type), field.type)
    if kind in _PLAIN:
        arrow_type, value = _PLAIN[kind]
        return _FeatureCodec(arrow_type, _named(arrow_type), value)
    if kind in _MOMENTS:
        return _FeatureCodec(_MOMENTS[kind], _named(_MOMENTS[kind]), _without_zone)
    if kind is FieldKind.DATETIME:
        return _datetime(field, sample)
    if kind is FieldKind.TENSOR:
        return _tensor(sample)
    if has_list_codec(field):
        arrow_type = _ITEMS[field.items[0].type]
        return _FeatureCodec(pa.list_(arrow_type), [_named(arrow_type)], list)
    if kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS) and not field.recursive:
        return _documents(field, sample)
    text = pa.string()
    return _FeatureCodec(
        text, _named(text), _name if kind in (FieldKind.ENUM, FieldKind.DECIMAL, FieldKind.PATH) else _json
    )


def _named(arrow_type: pa.DataType) -> dict[str, str]:
    known = {"double": "float64", "float": "float32", "halffloat": "float16", "date32[day]": "date32"}
    return {"dtype": known.get(str(arrow_type), str(arrow_type)), "_type": "Value"}


def _datetime(field: Field, sample: list[Any]) -> _FeatureCodec:
    """Times with a zone are in UTC, and those without stay without; a column has one kind, as the first rows have it.

    Where the first rows have both, times are texts.
    """
    zoned = {value.utcoffset() is not None for value in sample}
    if len(zoned) > 1:
        return _FeatureCodec(pa.string(), _named(pa.string()), datetime.isoformat)
    has_zone = zoned == {True}
    arrow_type = pa.timestamp("us", "UTC" if has_zone else None)

    def value_of(value: datetime) -> datetime:
        if (value.utcoffset() is not None) != has_zone:
            held, other = ("a", "none") if has_zone else ("no", "one")
            raise EncodeError(
                f"{field.name}: the first times have {held} time zone, and {value.isoformat()} has {other}. "
                "A column of Hugging Face has one kind of time: give all of them a zone, or none."
            )
        return value

    return _FeatureCodec(arrow_type, _named(arrow_type), value_of)


def _name(value: Any) -> str:
    """Decimals and paths as text; of an enum, the value where that is a text, as other writers have it."""
    if not isinstance(value, Enum):
        return str(value)
    return value.value if isinstance(value.value, str) else value.name


def _without_zone(value: Any) -> Any:
    if getattr(value, "tzinfo", None) is not None:
        raise EncodeError(f"{value!r}: Hugging Face has no times of day with a zone. Use a datetime, or text.")
    return value


def _json(value: Any) -> str:
    if is_document_type(type(value)):
        return to_json(value, None, "lists")
    try:
        return json.dumps(value, default=_jsonable)
    except (TypeError, ValueError, RecursionError) as error:  # keys that JSON does not have; cycles
        raise EncodeError(f"a {type(value).__name__} has no form in JSON: {error}.") from error


def _jsonable(value: Any) -> Any:
    """What JSON has in place of a value inside of others; most have a text."""
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


def _tensor(sample: list[Any]) -> _FeatureCodec:
    arrays = [_numpy(value) for value in sample]
    depths, dtypes = {array.ndim for array in arrays}, {array.dtype for array in arrays}
    if len(depths) > 1 or len(dtypes) > 1:
        return _FeatureCodec(pa.string(), _named(pa.string()), lambda value: json.dumps(_numpy(value).tolist()))
    depth, dtype = (depths or {1}).pop(), (dtypes or {np.dtype(np.float32)}).pop()
    arrow_type = pa.from_numpy_dtype(dtype)
    feature: Any = _named(arrow_type)
    for _ in range(depth):
        arrow_type, feature = pa.list_(arrow_type), [feature]
    return _FeatureCodec(arrow_type, feature, lambda value: _numpy(value).tolist())


def _numpy(value: Any) -> np.ndarray[Any, Any]:
    framework = framework_of(value)
    if framework is None or framework.is_sparse(value):
        raise EncodeError(f"a {type(value).__name__} has no form as lists of numbers.")
    array = framework.to_numpy(value)
    return array if array.dtype.kind in "biuf" else array.astype(np.float32)


def _documents(field: Field, sample: list[Any]) -> _FeatureCodec:
    inner: Schema = field.document_type.document_schema()
    if not inner.fields:
        raise EncodeError(f"{field.name}: {inner.name} has no fields, and Hugging Face has no documents without them.")
    many = field.kind is FieldKind.DOCUMENTS
    found = [document for value in sample for document in value] if many else sample
    codecs = {part.name: _field_codec(part, _column(found, part.name)) for part in inner.fields}
    arrow_type = pa.struct([pa.field(name, codec.type) for name, codec in codecs.items()])
    feature = {name: codec.feature for name, codec in codecs.items()}

    def one(document: Any) -> dict[str, Any]:
        return {name: _value(codec, document.__dict__.get(name)) for name, codec in codecs.items()}

    if many:
        return _FeatureCodec(
            pa.list_(arrow_type), [feature], lambda documents: [one(document) for document in documents]
        )
    return _FeatureCodec(arrow_type, feature, one)
