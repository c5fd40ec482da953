"""Features of Hugging Face: the columns and types of its datasets for document classes, and the other way round.

`FeatureEncoder` encodes documents as record batches that `datasets` reads, for the folder of `load_from_disk`
(`write_huggingface`) and for files on the Hub (`quire.storage._hub_writer`). `annotation_from_feature` is the
type of a field for a feature.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Secret, SecretBytes, SecretStr

from quire import _parametrize
from quire._protocols import is_array_type, is_document_type
from quire.codec import to_json
from quire.errors import EncodeError
from quire.schema import Field, FieldKind, Schema
from quire.storage._arrow_codec import NumberCodec, is_list_type
from quire.storage._nested_codecs import has_list_codec
from quire.storage._schema_conversion import (
    JSON_TEXT,
    annotation_from_arrow,
    class_from_arrow,
    is_embedded_type,
    tensor_annotation,
)
from quire.tensors import framework_of
from quire.typing import AudioBytes, ImageBytes, VideoBytes

BLOCK_ROWS = 1000
"""The number of documents that are encoded at a time."""
MEDIA_FEATURES: Mapping[type[Any], str] = {ImageBytes: "Image", AudioBytes: "Audio", VideoBytes: "Video"}
"""The features of encoded media, by the type of the field."""
ARRAY_FEATURES = {2: "Array2D", 3: "Array3D", 4: "Array4D", 5: "Array5D"}
"""The features of tensors of a fixed shape, by the number of axes."""
_ITEMS = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string(), bytes: pa.binary()}
# The state.json of a folder that `Dataset.save_to_disk` writes: `load_from_disk` requires every key.
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
    encode: Callable[[list[Any]], pa.Array] | None = None
    """Encodes all values of a block at once; by default, each is converted."""
    metadata: Mapping[bytes, bytes] | None = None

    def to_field(self, name: str) -> pa.Field:
        """Return the Arrow field of a column."""
        return pa.field(name, self.type, metadata=self.metadata)

    def to_arrow(self, value: Any) -> Any:
        """Return a value as Arrow takes it; None stays None."""
        return None if value is None else self.convert(value)

    def to_array(self, values: list[Any]) -> pa.Array:
        """Return values as an Arrow array."""
        return pa.array(map(self.to_arrow, values), self.type) if self.encode is None else self.encode(values)


class FeatureEncoder:
    """Encodes documents of a class as record batches with the features of Hugging Face.

    Tensors become nested lists, and encoded media structs of bytes and a path, which `datasets` decodes. Whole numbers
    with `json_schema_extra={'names': [...]}` become class labels. Values without a type there become text: enums and
    decimals as they are, dicts and unions as JSON.

    An Arrow schema comes before the data, and the types of tensors and datetimes depend on values: those of the first
    rows, the `sample`, decide. Later rows that do not fit are errors.
    """

    def __init__(self, schema: Schema, sample: Sequence[Any]) -> None:
        if not schema.fields:
            raise EncodeError(f"{schema.name} has no fields, and a table without columns has no rows.")
        self._features = _features_of(schema, sample)
        names = column_names(schema)
        self.descriptions = {names[name]: feature.description for name, feature in self._features.items()}
        """The features, as `datasets` stores them as JSON."""
        self.schema = pa.schema(
            [feature.to_field(names[name]) for name, feature in self._features.items()],
            {"huggingface": json.dumps({"info": {"features": self.descriptions}})},
        )

    def describe(self, descriptions: Mapping[str, Any]) -> None:
        """Describe the columns with other features."""
        self.descriptions = dict(descriptions)
        self.schema = self.schema.with_metadata({"huggingface": json.dumps({"info": {"features": self.descriptions}})})

    def adopt(self, schema: pa.Schema) -> None:
        """Encode columns as a file has them that other documents of the dataset are in.

        The file has the same columns; its numbers may have other sizes, and its features say more.
        """
        stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features")
        if isinstance(stored, dict):
            self.describe({name: stored.get(name, known) for name, known in self.descriptions.items()})
        fields = [field.with_type(storage_type(schema.field(field.name).type)) for field in self.schema]
        self.schema = pa.schema(fields, self.schema.metadata)

    def encode(self, documents: Sequence[Any], first: int) -> pa.RecordBatch:
        """Encode documents; `first` is the number of the first one, for messages."""
        arrays = []
        for (name, feature), column in zip(self._features.items(), self.schema, strict=True):
            try:
                array = feature.to_array([document.__dict__.get(name) for document in documents])
                arrays.append(_cast_exactly(array, column.type))
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                if isinstance(error, EncodeError):
                    raise
                raise EncodeError(f"rows {first} to {first + len(documents) - 1}, {name}: {error}") from error
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def storage_type(arrow_type: pa.DataType) -> pa.DataType:
    """Return the type that values of an extension type are stored as; other types as they are."""
    return arrow_type.storage_type if isinstance(arrow_type, pa.ExtensionType) else arrow_type


def _cast_exactly(array: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    """Cast values to another type, or raise an error if some do not fit."""
    if array.type == arrow_type:
        return array
    # Arrow refuses whole numbers that do not fit, and rounds other numbers silently: cast them back and compare.
    cast = array.cast(arrow_type)
    pairs = zip(_float_leaves(array), _float_leaves(cast.cast(array.type)), strict=True)
    if not all(np.array_equal(one, other, equal_nan=True) for one, other in pairs):
        raise ValueError(f"some numbers have more digits than {arrow_type}, the type that the dataset has")
    return cast


def _float_leaves(array: pa.Array) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the floating-point numbers of an array, also those in lists and structs."""
    if pa.types.is_struct(array.type) or is_list_type(array.type):
        children = array.flatten() if pa.types.is_struct(array.type) else [array.flatten()]
        for child in children:
            yield from _float_leaves(child)
    elif pa.types.is_floating(array.type):
        yield array.to_numpy(zero_copy_only=False)


def write_huggingface(document_type: type[Any], documents: Iterable[Any], folder: Path) -> int:
    """Write documents as a folder that `datasets.load_from_disk` opens, and return their number."""
    rows = iter(documents)
    block = list(islice(rows, BLOCK_ROWS))
    encoder = FeatureEncoder(document_type.document_schema(), block)
    encoder.describe(_without_arrays(encoder.descriptions))
    file_name, total = "data-00000-of-00001.arrow", 0
    with pa.OSFile(str(folder / file_name), "wb") as file, pa.ipc.new_stream(file, encoder.schema) as writer:
        while block:
            writer.write_batch(encoder.encode(block, total))
            total += len(block)
            block = list(islice(rows, BLOCK_ROWS))
    info = {"features": encoder.descriptions, "citation": "", "description": "", "license": ""}
    state = {**_STATE, "_data_files": [{"filename": file_name}]}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")
    (folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    return total


def _without_arrays(feature: Any) -> Any:
    """Return a feature, or several, in which tensors of a fixed shape are nested lists.

    `load_from_disk` reads such tensors only from its own extension type of Arrow, and refuses lists.
    """
    if isinstance(feature, list):
        return [_without_arrays(item) for item in feature]
    if not isinstance(feature, Mapping):
        return feature
    if feature.get("_type") not in ARRAY_FEATURES.values():
        return {name: _without_arrays(item) for name, item in feature.items()}
    lists: Any = {"dtype": feature["dtype"], "_type": "Value"}
    for _axis in feature["shape"]:
        lists = [lists]
    return lists


def column_names(schema: Schema) -> dict[str, str]:
    """Return the name of the column of each field: its own, or that in the file that a class was made from."""
    document_type = schema.document_type
    if document_type.__module__ != _parametrize.__name__:
        return {field.name: field.name for field in schema.fields}
    return {field.name: document_type.model_fields[field.name].alias or field.name for field in schema.fields}


def _features_of(schema: Schema, documents: Sequence[Any]) -> dict[str, _Feature]:
    """Return the features of all fields of a class; `documents` are the first of them."""
    features = {}
    for field in schema.fields:
        info = schema.document_type.model_fields.get(field.name)
        extra = info.json_schema_extra if info is not None else None
        details = extra if isinstance(extra, Mapping) else {}
        labels, media = details.get("names"), details.get("huggingface")
        kind = MEDIA_FEATURES.get(field.type) if isinstance(field.type, type) else None
        if field.type is int and isinstance(labels, list) and labels:
            features[field.name] = _label_feature(field.name, labels)
        elif kind is not None:
            # `media` is the description that a dataset of the Hub had: it may say more, such as the sampling rate.
            features[field.name] = _Feature(
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
                dict(media) if isinstance(media, Mapping) and media.get("_type") == kind else {"_type": kind},
                lambda value: {"bytes": bytes(value), "path": None},
            )
        else:
            build = _FEATURES.get(field.kind)
            values = (document.__dict__.get(field.name) for document in documents)
            feature = build and build(field, [value for value in values if value is not None])
            features[field.name] = feature or _value_feature(pa.string(), _to_json_text)._replace(metadata=JSON_TEXT)
    return features


def _label_feature(name: str, labels: list[Any]) -> _Feature:
    """Return the feature of class labels: whole numbers that have names."""

    def check_label(value: int) -> int:
        if not -1 <= value < len(labels):  # -1 is a missing label
            raise EncodeError(f"{name}: {value} is not a label: there are {len(labels)} names, from 0 on.")
        return value

    return _Feature(pa.int64(), {"names": [str(label) for label in labels], "_type": "ClassLabel"}, check_label)


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


def _tensor_feature(field: Field, sample: list[Any]) -> _Feature:
    arrays = [_to_numpy(value) for value in sample]
    depths, dtypes = {array.ndim for array in arrays}, {array.dtype for array in arrays}
    if len(depths) > 1 or len(dtypes) > 1:
        return _value_feature(pa.string(), lambda value: json.dumps(_to_numpy(value).tolist()))
    shape = field.spec.fixed_shape
    depth = (depths or {1 if shape is None else len(shape)}).pop()
    dtype = (dtypes or {np.dtype(np.float32)}).pop()
    item_type = pa.from_numpy_dtype(dtype)
    arrow_type = item_type
    description: Any = _describe(item_type)
    for _axis in range(depth):
        arrow_type, description = pa.list_(arrow_type), [description]
    if shape is not None and depth in ARRAY_FEATURES:
        description = {"shape": list(shape), "dtype": _describe(item_type)["dtype"], "_type": ARRAY_FEATURES[depth]}
    return _Feature(
        arrow_type,
        description,
        lambda value: _to_numpy(value).tolist(),
        lambda values: _to_lists([None if value is None else _to_numpy(value) for value in values], dtype, depth),
    )


def _to_lists(arrays: list[np.ndarray[Any, Any] | None], dtype: np.dtype[Any], depth: int) -> pa.Array:
    """Return arrays as nested lists, without a Python object for each number."""
    present = [array for array in arrays if array is not None]
    for array in present:
        if array.ndim != depth or array.dtype != dtype:
            raise ValueError(
                f"the first tensors have {depth} axes of {dtype}, and one of {array.dtype} has the shape "
                f"{array.shape}. A column of Hugging Face has one type."
            )
    flat = [np.ascontiguousarray(array).reshape(-1) for array in present]
    values = pa.array(np.concatenate([np.zeros(0, dtype), *flat]))
    if depth == 0:
        numbers = iter(values.to_pylist())
        return pa.array([None if array is None else next(numbers) for array in arrays], values.type)
    # Each axis is a level of lists, built from the innermost one outwards: axis k of a tensor has as many lists as the
    # axes before it have elements. The outermost level has one list for each row, also for a row without a value.
    for axis in reversed(range(depth)):
        if axis:
            counts = [math.prod(array.shape[:axis]) for array in present]
            lengths = np.repeat([array.shape[axis] for array in present], counts)
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        else:
            ends = np.cumsum([0, *(0 if array is None else array.shape[0] for array in arrays)])
            missing = np.array([*(array is None for array in arrays), False])
            offsets = pa.array(ends.astype(np.int32), mask=missing)  # a null offset makes a list that is null
        values = pa.ListArray.from_arrays(offsets, values)
    return values


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
    features, names = _features_of(schema, documents), column_names(schema)
    arrow_type = pa.struct([feature.to_field(names[name]) for name, feature in features.items()])
    description = {names[name]: feature.description for name, feature in features.items()}

    def convert(document: Any) -> dict[str, Any]:
        return {names[name]: feature.to_arrow(document.__dict__.get(name)) for name, feature in features.items()}

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


# --- classes for features


NullCounts = Mapping[str, int]
"""The number of nulls of each leaf of a Parquet schema, by path; -1 if it is not known."""


def class_from_features(fields: Iterable[pa.Field], features: Any, counts: NullCounts, name: str) -> type[Any]:
    """Make a document class for the columns of a dataset; fields without nulls are required.

    Class labels are whole numbers whose names are in `json_schema_extra`, and images, audio and video are `ImageBytes`,
    `AudioBytes` and `VideoBytes`.
    """
    described = features if isinstance(features, Mapping) else {}
    return _class_of(fields, described, counts, name, "")


def _class_of(
    fields: Iterable[pa.Field], features: Mapping[str, Any], counts: NullCounts, name: str, prefix: str
) -> type[Any]:
    own, known = [], {}
    for field in fields:
        path = f"{prefix}{field.name}"
        feature = features.get(field.name)
        annotation = _annotation(field, feature, counts, f"{name}_{field.name}", path)
        # What a type does not say goes into `json_schema_extra`: the names of class labels, and how media are decoded.
        extra: dict[str, Any] | None = None
        if isinstance(feature, Mapping):
            if feature.get("_type") == "ClassLabel":
                extra = {"names": list(feature.get("names") or [])}
            elif feature.get("_type") in MEDIA_FEATURES.values() and len(feature) > 1:
                extra = {"huggingface": dict(feature)}
        known[field.name] = annotation, extra
        own.append(field.with_nullable(_may_be_null(field, counts, path)))
    return class_from_arrow(own, name, known=known)


def _annotation(field: pa.Field, feature: Any, counts: NullCounts, name: str, path: str) -> Any:
    """Return the annotation of a column, apart from None."""
    arrow_type = field.type.storage_type if isinstance(field.type, pa.ExtensionType) else field.type
    kind = feature.get("_type") if isinstance(feature, Mapping) else None
    if kind in ARRAY_FEATURES.values() and feature.get("shape"):
        sizes = [f"dim{axis}" if size is None else size for axis, size in enumerate(feature["shape"])]
        return tensor_annotation(feature["dtype"], sizes)
    if kind == "ClassLabel":
        return int
    if is_embedded_type(arrow_type) and isinstance(kind, str):
        return next((media for media, known in MEDIA_FEATURES.items() if known == kind), bytes)
    if pa.types.is_struct(arrow_type) and not isinstance(kind, str):
        parts = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        described = feature if isinstance(feature, Mapping) else {}
        return _class_of(parts, described, counts, name, f"{path}.")
    return annotation_from_arrow(field, name)


def _may_be_null(field: pa.Field, counts: NullCounts, path: str) -> bool:
    """Return whether some row of a column may be null, by the number of nulls in its leaves.

    A row is not null if one of its leaves is not. A list without items counts as a null, so columns of lists, some of
    which are empty, are optional.
    """
    if is_embedded_type(field.type) and f"{path}.bytes" in counts:
        return counts[f"{path}.bytes"] != 0
    leaves = [count for leaf, count in counts.items() if leaf == path or leaf.startswith(f"{path}.")]
    return field.nullable and all(leaves)
