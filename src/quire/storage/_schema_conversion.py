"""Conversion between Arrow schemas and document classes.

`conform_fields` converts Arrow data of another schema to the codecs of a class: data of other tools, or of an earlier
version of the class (schema evolution). Conversions never lose information: what does not fit is an error.
`class_from_arrow` goes the other way, and makes a document class for the columns of an Arrow schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import ConfigDict, create_model
from pydantic.fields import FieldInfo

from quire import _parametrize
from quire._class_registry import find
from quire._extra_fields import Extra, extra_rule
from quire.array import DocumentArray
from quire.codec import check_exact
from quire.columns import Column, ObjectColumn, ScalarColumn, StackOptions, Validity, stack_values, validate_values
from quire.document import BaseDocument, field_name
from quire.errors import DecodeError, QuireError, StorageError, TensorError, did_you_mean
from quire.media import decode_image
from quire.schema import Field, FieldKind, FieldPath, Schema
from quire.storage._arrow_codec import (
    ArrowCodec,
    NumberCodec,
    array_validity,
    arrow_compute,
    is_list_type,
    read_extension,
    to_offsets,
)
from quire.storage._layout import CLASS_KEY, Layout
from quire.storage._nested_codecs import PLACEHOLDER, DocumentCodec, DocumentsCodec
from quire.storage._tensor_codecs import TensorCodec
from quire.tensors import DType, Shape, cast_numbers, common_dtype, format_shape, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


Arrays = Mapping[str, tuple[pa.Field, pa.Array]]
"""Arrays by their names in the data, with their Arrow fields."""
_RAGGED = StackOptions(shapes="ragged")
_TENSOR_EXTENSIONS = ("", "quire.tensor", "quire.ragged_tensor")
_NUMBER_KINDS = {int: "iu", float: "iuf", bool: "b"}
"""The kinds of numbers that a field takes: those that it holds without loss."""
_TEXT_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
"""Tests for types of texts, or of bytes, which some tools write in place of texts."""
_EMBEDDED = {"bytes", "path"}
"""The fields of an encoded file in datasets of Hugging Face: its content, and the path that it had."""


def refuse_unknown_columns(
    schema: Schema, columns: pa.Schema, extra: Extra, where: str, error: type[QuireError] = StorageError
) -> None:
    """Raise an error for columns that the class has no field for, if the class or the reader forbids them.

    Files that quire wrote follow the rules of schema evolution, unless the reader forbids unknown columns.
    """
    if extra == "forbid" or CLASS_KEY not in (columns.metadata or {}):
        _refuse_unknown(schema, columns, extra, where, "", error)


def _refuse_unknown(
    schema: Schema, fields: Iterable[pa.Field], extra: Extra, where: str, prefix: str, error: type[QuireError]
) -> None:
    for column in fields:
        known = schema.accepted.get(column.name)
        if known is None:
            if extra_rule(schema.document_type, extra) == "forbid":
                hint = did_you_mean(column.name, schema.accepted)
                rule = schema.document_type.__quire_extra__
                way_out = "Or pass extra='ignore'." if rule is None else f"{schema.name} sets extra={rule!r}."
                raise error(f"{where}: {schema.name} has no field {prefix + column.name!r}. {hint} {way_out}")
            continue
        field = known[0]
        arrow_type = column.type.value_type if is_list_type(column.type) else column.type
        if not pa.types.is_struct(arrow_type) or field.recursive:
            continue
        if field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
            nested = field.document_type.document_schema()
            _refuse_unknown(nested, arrow_type, extra, where, f"{prefix}{column.name}.", error)


def conform_batch(layout: Layout, batch: pa.RecordBatch, more: Mapping[str, pa.Array] | None = None) -> pa.RecordBatch:
    """Convert a record batch of any origin to a layout; `more` are columns that the batch may lack."""
    arrays = {name: (pa.field(name, array.type), array) for name, array in (more or {}).items()}
    names = batch.schema.names
    arrays |= zip(names, zip(batch.schema, batch.columns, strict=True), strict=True)
    if len(set(names)) != len(names):
        for name in stored_names(layout.schema, names).values():
            if names.count(name) > 1:
                raise DecodeError(f"{layout.schema.document_type.__name__}: the data has {name!r} in several columns.")
    return layout.batch(conform_fields(layout.codecs, arrays, layout.schema, None, len(batch)), len(batch))


def conform_fields(
    codecs: Sequence[ArrowCodec], arrays: Arrays, schema: Schema, present: Validity, length: int
) -> list[pa.Array]:
    """Convert arrays, by name, to the types of codecs; missing ones are filled with the defaults of their fields.

    `present` says which rows are documents at all; in these, a field that is not optional must have a value.
    """
    names = stored_names(schema, arrays)
    conformed = []
    for codec in codecs:
        if codec.field.name not in names:
            conformed.append(_default_array(codec, schema, length))
            continue
        # Extension types of other libraries are read as what they store, except Arrow's tensors, whose type has the
        # shape. Dictionaries are only another encoding of their values.
        field, array = arrays[names[codec.field.name]]
        if isinstance(array, pa.ExtensionArray) and not isinstance(array.type, pa.FixedShapeTensorType):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        conformed.append(_conform(codec, array, field.with_type(array.type), schema))
        if conformed[-1].null_count and not codec.allows_nulls:
            missing = np.asarray(conformed[-1].is_null())
            missing = np.flatnonzero(missing if present is None else missing & present)
            if len(missing):
                raise DecodeError(
                    f"{codec.path}: row {missing[0]} of the record batch has no value, and the field is not optional."
                )
    return conformed


def stored_names(schema: Schema, names: Iterable[str]) -> dict[str, str]:
    """Return the name under which the data has each field: its own, or else another that the class accepts."""
    stored = set(names)
    accepted = {field.name: name for name, (field, _) in schema.accepted.items() if name in stored}
    return accepted | {field.name: field.name for field in schema.fields if field.name in stored}


def _conform(codec: ArrowCodec, array: pa.Array, field: pa.Field, schema: Schema) -> pa.Array:
    """Convert the array of an Arrow field to the type of a codec."""
    if pa.types.is_null(array.type):  # other tools write it for a column in which every value is missing
        return pa.nulls(len(array), codec.type)
    if _is_embedded(codec, array.type):
        array = extract_bytes(
            array, f"{codec.path}: some files are not in the data, but at a path. Embed them, and save anew."
        )
        field = field.with_type(array.type)
    if isinstance(codec, DocumentCodec) and pa.types.is_struct(array.type):
        # Field by field: if the struct differs in one field only, the others need no conversion.
        fields = [array.type.field(i) for i in range(array.type.num_fields)]
        # flatten() sets the fields of missing documents to null; without nulls, field() does not copy.
        nested = array.flatten() if array.null_count else [array.field(i) for i in range(len(fields))]
        arrays = {child.name: (child, part) for child, part in zip(fields, nested, strict=True)}
        present = array_validity(array)
        return codec.from_arrays(
            conform_fields(codec.codecs, arrays, codec.schema, present, len(array)), len(array), present
        )
    if isinstance(codec, DocumentsCodec) and is_list_type(array.type):
        items = _conform(codec.item, _flatten(array), array.type.value_field, schema)
        if items.null_count:
            raise DecodeError(f"{codec.path}: a document in an array is null.")
        sizes = arrow_compute().list_value_length(array).fill_null(0)
        return codec.from_items(items, to_offsets(sizes), array_validity(array))
    if codec.can_read(field):
        return codec.to_own_type(array)
    # From here on, the fastest way that keeps all values: no copy, then one copy, then Python objects row by row.
    if isinstance(codec, TensorCodec) and read_extension(field) is None:
        fixed = codec.from_lists(array)
        if fixed is not None:
            return fixed
    try:
        return codec.encode(_to_column(codec, array, field, schema))
    except (QuireError, pa.ArrowException, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DecodeError(
            f"{codec.path}: the data has {_describe(field, array)}, the field is {codec.field}: {error}"
        ) from error


def _describe(field: pa.Field, array: pa.Array) -> str:
    """Describe the data; tensors that quire wrote in the words of schemas."""
    _, details = read_extension(field) or ("", None)
    if not isinstance(details, dict) or not isinstance(details.get("shape"), list):
        return str(array.type)
    return f"tensors of {details.get('dtype')} {format_shape(tuple(details['shape']))}"


def _is_embedded(codec: ArrowCodec, arrow_type: pa.DataType) -> bool:
    """Whether the data has encoded files, and the field bytes, a tensor, or a document that is made of bytes."""
    if not is_embedded_type(arrow_type) or isinstance(codec, DocumentsCodec):
        return False
    names = {arrow_type.field(place).name for place in range(arrow_type.num_fields)}
    return not (isinstance(codec, DocumentCodec) and names & set(codec.schema.accepted))


def is_embedded_type(arrow_type: pa.DataType) -> bool:
    """Return whether values are encoded files, as Hugging Face stores them: their bytes, and the path that they had."""
    if not pa.types.is_struct(arrow_type):
        return False
    names = {arrow_type.field(place).name for place in range(arrow_type.num_fields)}
    return "bytes" in names and names <= _EMBEDDED


def extract_bytes(array: pa.Array, error: str) -> pa.Array:
    """Return the content of embedded files; raise a DecodeError if some have only a path."""
    content = arrow_compute().struct_field(array, "bytes")
    if content.null_count > array.null_count:
        raise DecodeError(error)
    return content


def _default_array(codec: ArrowCodec, schema: Schema, length: int) -> pa.Array:
    field = codec.field
    if field.required:
        raise DecodeError(f"{codec.path}: the data does not have it, and it has no default.")
    info = schema.document_type.model_fields[field.name]
    try:
        values = [info.get_default(call_default_factory=True, validated_data={}) for _ in range(length)]
        values = validate_values(schema, field, values, codec.path, None, "ignore")
        return codec.encode(stack_values(field, values, _RAGGED, codec.path))
    except (QuireError, KeyError, TypeError) as error:
        raise DecodeError(
            f"{codec.path}: the data does not have it, and its default cannot be created: {error}"
        ) from error


def _flatten(array: pa.Array) -> pa.Array:
    """Return the items of all lists, after checking offsets: Arrow does not check all, and would read other memory."""
    if not pa.types.is_fixed_size_list(array.type):
        offsets, limit = np.asarray(array.offsets), len(array.values)
        if len(offsets) and (offsets.min() < 0 or offsets.max() > limit or (np.diff(offsets) < 0).any()):
            raise DecodeError("the items of a list are outside of the data.")
    return array.flatten()


def _to_column(codec: ArrowCodec, array: pa.Array, stored: pa.Field, schema: Schema) -> Column:
    """Return a column of the field with the values of an array of another type."""
    # Values of quire's extension types are bytes in a format of their own, and no values for another type of field.
    field, extension = codec.field, (read_extension(stored) or ("",))[0]
    if extension not in (_TENSOR_EXTENSIONS if field.kind is FieldKind.TENSOR else ("", "quire.enum")):
        raise DecodeError("data of this kind cannot be converted.")
    if isinstance(codec, NumberCodec) and field.kind is FieldKind.SCALAR:
        return _to_number_column(field, array)
    if field.kind is FieldKind.TENSOR:
        dtype = None if field.spec.dtype is None else common_dtype(field.spec.dtype)
        framework = field.type.framework or get_framework("numpy")
        tensors = [
            None if row is None else framework.from_numpy(row if dtype is None else cast_numbers(row, dtype))
            for row in _to_arrays(codec, array, stored, dtype)
        ]
        return stack_values(field, tensors, _RAGGED, codec.path)
    if field.kind in (FieldKind.TEXT, FieldKind.BYTES) and field.type in (str, bytes):
        if not any(test(array.type) for test in _TEXT_TYPES):
            raise DecodeError("other values are not converted to text.")
        return ObjectColumn(field, array.cast(pa.string() if field.kind is FieldKind.TEXT else pa.binary()).to_pylist())
    if field.kind is FieldKind.ENUM and extension == "quire.enum":
        return ObjectColumn(field, [None if name is None else field.type[name] for name in array.to_pylist()])
    # Everything else becomes Python objects, which pydantic validates: only it knows what a field of the class takes.
    values = _to_objects(array)
    if JSON_TEXT.items() <= (stored.metadata or {}).items():
        values = [None if value is None else json.loads(value) for value in values]
    for value in values:
        _refuse_rounding(field, value)
    values = validate_values(schema, field, values, codec.path, np.asarray(array.is_valid()), "ignore")
    return stack_values(field, values, _RAGGED, codec.path)


def _refuse_rounding(field: Field, value: Any) -> None:
    """Raise an error for an integer that a field of floats, or of lists of them, would round."""
    if isinstance(value, list) and len(field.items) == 1:
        for item in value:
            _refuse_rounding(field.items[0], item)
    elif type(value) is int and field.type in (float, complex):
        check_exact(value, field)


def _to_objects(array: pa.Array) -> list[Any]:
    """Return values as pydantic takes them; times that are finer than the microseconds of Python are errors."""
    arrow_type = array.type
    if _has_maps(arrow_type):
        return [_to_dicts(row, arrow_type) for row in array.to_pylist()]
    if pa.types.is_fixed_size_binary(arrow_type):
        array = array.cast(pa.binary())
    elif pa.types.is_timestamp(arrow_type):
        array = array.cast(pa.timestamp("us", arrow_type.tz))
    elif pa.types.is_duration(arrow_type):
        array = array.cast(pa.duration("us"))
    elif pa.types.is_time64(arrow_type):
        array = array.cast(pa.time64("us"))
    objects: list[Any] = array.to_pylist()
    return objects


def _has_maps(arrow_type: pa.DataType) -> bool:
    if is_list_type(arrow_type):
        return _has_maps(arrow_type.value_type)
    return bool(pa.types.is_map(arrow_type))


def _to_dicts(value: Any, arrow_type: pa.DataType) -> Any:
    """Return the maps of a value, which pyarrow gives as pairs, as dicts, also those in lists and in other maps."""
    if value is None:
        return None
    if pa.types.is_map(arrow_type):
        return {key: _to_dicts(item, arrow_type.item_type) for key, item in value}
    return [_to_dicts(item, arrow_type.value_type) for item in value] if is_list_type(arrow_type) else value


def _to_number_column(field: Field, array: pa.Array) -> Column:
    types = pa.types
    tests = {"b": types.is_boolean, "i": types.is_integer, "f": types.is_floating}
    kind = next((kind for kind, test in tests.items() if test(array.type)), "?")
    if kind not in _NUMBER_KINDS[field.type]:
        raise DecodeError("numbers of another kind are not converted.")
    target, dtype = NumberCodec.types[field.type]
    cast = array.cast(target)  # which raises an error if a number does not fit
    data: NDArray[Any] = np.asarray(cast.fill_null(False if field.type is bool else 0)).astype(dtype)
    return ScalarColumn(field, data, get_framework("numpy"), array_validity(array))


# --- tensors


def _to_arrays(codec: ArrowCodec, array: pa.Array, stored: pa.Field, dtype: np.dtype[Any] | None) -> list[Any]:
    """Return arrays of lists of numbers, of bytes, of encoded images, or of tensors that quire or Arrow wrote."""
    types, arrow_type = pa.types, array.type
    name, details = read_extension(stored) or ("", {})
    written = details.get("dtype") if isinstance(details, dict) else None
    if name and dtype is not None and written is not None and common_dtype(written) != dtype:
        raise TensorError(f"the tensors were written as {written}.")
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        return _from_arrow_tensors(array)
    if name == "quire.tensor":
        return [None if row is None else _read_tensor(row, details) for row in array.to_pylist()]
    # A struct of data and shape is a ragged tensor whose metadata was lost, in a tool that keeps none.
    is_struct = types.is_struct(arrow_type) and min(map(arrow_type.get_field_index, ("data", "shape"))) >= 0
    if name == "quire.ragged_tensor" or is_struct:
        known = details or {"dtype": codec.field.spec.dtype}
        return [None if row is None else _read_tensor(row["data"], {**known, **row}) for row in array.to_pylist()]
    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type) or types.is_fixed_size_binary(arrow_type):
        return [None if row is None else _from_bytes(codec.field, row, dtype, codec.path) for row in array.to_pylist()]
    return _from_lists(array)


def _read_tensor(row: bytes, details: Mapping[str, Any]) -> NDArray[Any]:
    """Return a tensor that was written with another dtype or shape."""
    # A bytearray, because arrays of immutable bytes are read-only, and users change tensors in place.
    array: NDArray[Any] = np.frombuffer(bytearray(row), common_dtype(details["dtype"]))
    shaped: NDArray[Any] = array.reshape(tuple(details["shape"]))
    return shaped


def _from_arrow_tensors(array: pa.Array) -> list[Any]:
    """Return the rows of Arrow's own tensors, whose axes may be stored in another order than they are named."""
    arrow_type, storage = array.type, array.storage
    # A slice shares the values of the whole array, so those before its offset are skipped.
    size = storage.type.list_size
    flat = _to_numbers(storage.values)[storage.offset * size :]
    rows = flat[: len(array) * size].reshape(len(array), *arrow_type.shape)
    order = arrow_type.permutation or range(len(arrow_type.shape))
    transposed = rows.transpose(0, *(axis + 1 for axis in order))
    valid = array.is_valid().to_pylist()
    return [np.ascontiguousarray(row) if ok else None for row, ok in zip(transposed, valid, strict=True)]


def _from_lists(array: pa.Array) -> list[Any]:
    """Return nested lists as arrays: all at once if they have the same lengths, else row by row."""
    if not is_list_type(array.type):  # tensors without an axis
        numbers = iter(_to_numbers(array.drop_null()))
        return [np.array(next(numbers)) if is_valid else None for is_valid in array.is_valid().to_pylist()]
    # Without nulls and with one length on each level, the numbers of all rows are one array, in the order of its axes.
    if not array.null_count and len(array):
        sizes: list[int] = []
        level = array
        while is_list_type(level.type) and not level.null_count:
            lengths = np.asarray(arrow_compute().list_value_length(level))
            if len(lengths) == 0 or (lengths != lengths[0]).any():
                break
            sizes.append(int(lengths[0]))
            level = _flatten(level)
        if not is_list_type(level.type) and not level.null_count:
            return list(_to_numbers(level).reshape(len(array), *sizes))
    return [None if row.values is None else _from_list(row.values) for row in array]


def _from_list(values: pa.Array) -> NDArray[Any]:
    """Return one row's list as an array; it has the type of the data even if it is empty."""
    if not is_list_type(values.type):
        return _to_numbers(values)
    parts = _from_lists(values)
    if not parts:
        inner = _from_list(_flatten(values))
        if pa.types.is_fixed_size_list(values.type) and values.type.list_size:
            return inner.reshape(0, values.type.list_size, *inner.shape[1:])  # it is known even without lists
        return inner
    if any(part is None or part.shape != parts[0].shape for part in parts):
        raise TensorError("its lists have different lengths, or are null.")
    return np.stack(parts)


def _to_numbers(array: pa.Array) -> NDArray[Any]:
    numbers: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind not in "biuf":
        raise TensorError(f"{array.type} is not a number.")
    copied: NDArray[Any] = numbers.copy()  # memory of Arrow is read-only, and users change tensors in place
    return copied


def _from_bytes(field: Field, row: bytes, dtype: np.dtype[Any] | None, path: str) -> NDArray[Any]:
    """Return the elements of a tensor if their number fits the shape; otherwise, decode an image."""
    shape = field.spec.fixed_shape
    if dtype is not None and shape is not None and len(row) == dtype.itemsize * int(np.prod(shape)):
        elements: NDArray[Any] = np.frombuffer(bytearray(row), dtype)
        return elements.reshape(shape)
    # Images have their channels last. A field that declares them first, as torch does, gets them first.
    image = decode_image(row, path)
    if field.spec.fits(image.shape, image.dtype.name):
        return image
    channels_first = np.ascontiguousarray(image.transpose(2, 0, 1))
    return channels_first if field.spec.fits(channels_first.shape, image.dtype.name) else image


# --- classes for Arrow schemas

_SIMPLE_TYPES: tuple[tuple[Any, Any], ...] = (
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
JSON_TEXT = {b"quire.json": b"true"}
"""The metadata of an Arrow field of JSON texts: values for which the format that quire wrote has no type."""
HAS_NULLS = {b"quire.has_nulls": b"true"}
"""The metadata of an Arrow field whose data is known to have nulls: a list of such items is not a tensor."""


class Row(BaseDocument):
    """The base of classes for data without an id."""

    id: ClassVar[None] = None  # type: ignore[assignment,misc]


def narrow_class(schema: Schema, paths: Iterable[FieldPath]) -> type[Any]:
    """Make a class with the fields at some paths, for a copy of these columns; nested classes are narrowed as well."""
    below: dict[str, list[FieldPath]] = {}
    for name, *rest in paths:
        below.setdefault(name, []).append(tuple(rest))
    document_type = schema.document_type
    fields: dict[str, Any] = {}
    for field in schema.fields:
        if field.name not in below:
            continue
        info = document_type.model_fields[field.name]
        annotation = info.annotation
        if () not in below[field.name] and not field.recursive:  # a field that is not nested has no paths below it
            annotation = narrow_class(field.document_type.document_schema(), below[field.name])
            if field.kind is FieldKind.DOCUMENTS:
                annotation = field.type._origin[annotation]
            if field.nullable:
                annotation = annotation | None
        fields[field.name] = annotation, info
    base = BaseDocument if "id" in fields else Row
    return register_class(create_model(document_type.__name__, __base__=base, **fields))


def loaded_class(schema: pa.Schema) -> type[Any] | None:
    """Return the class that an Arrow schema names, if it is loaded.

    The names of classes that were made at run time are those of their process: in another process, the same name may
    be that of a class with other fields.
    """
    name = (schema.metadata or {}).get(CLASS_KEY, b"").decode()
    document_type = find(name, None) if name else None
    if document_type is None or document_type.__module__ != _parametrize.__name__:
        return document_type
    columns = {info.alias or field for field, info in document_type.model_fields.items()}
    return document_type if columns - {"id"} == set(schema.names) - {"id", PLACEHOLDER.name} else None


def stored_class_name(schema: pa.Schema, default: str = "Row") -> str:
    """Return the name of the class that an Arrow schema names, without its module; the default if it names none."""
    name = (schema.metadata or {}).get(CLASS_KEY, b"").decode()
    return name.rpartition(":")[2].rpartition(".")[2] or default


def class_from_arrow(
    schema: Iterable[pa.Field],
    name: str,
    base: type[Any] | None = None,
    known: Mapping[str, tuple[Any, dict[str, Any] | None]] | None = None,
) -> type[Any]:
    """Make a document class with a field for each of an Arrow schema; a name that no field can have becomes an alias.

    The class has an id if the schema or the base has one. `known` has the annotations of fields, and what else their
    JSON schema says, where that is known better than from Arrow.
    """
    fields: dict[str, Any] = {}
    for field in schema:
        if field.name == PLACEHOLDER.name:
            continue
        annotation, extra = (known or {}).get(field.name) or (
            annotation_from_arrow(field, f"{name}_{field.name}"),
            None,
        )
        own = field_name(field.name, fields)
        details: dict[str, Any] = {} if own == field.name else {"alias": field.name}
        details |= {} if extra is None else {"json_schema_extra": extra}
        default = FieldInfo(default=None, **details) if field.nullable else FieldInfo(**details)
        fields[own] = (annotation | None if field.nullable else annotation, default)
    # create_model() takes a base or a config, and not both: the config is set afterwards.
    config = ConfigDict(populate_by_name=True, protected_namespaces=())
    base = base or (BaseDocument if "id" in fields else Row)
    document_type: type[Any] = create_model(name, __base__=base, **fields)
    document_type.model_config = {**document_type.model_config, **config}
    document_type.model_rebuild(force=True)
    return register_class(document_type)


def register_class(document_type: type[Any]) -> type[Any]:
    """Register a class that was made at run time, so that pickle finds it in this process and its forked children."""
    name = _parametrize.publish(document_type.__name__)
    document_type.__module__, document_type.__qualname__ = _parametrize.__name__, name
    _parametrize.register(document_type)
    return document_type


def annotation_from_arrow(field: pa.Field, name: str) -> Any:
    """Return the annotation for an Arrow field; `name` is that of the class of a nested document."""
    arrow_type = field.type.storage_type if isinstance(field.type, pa.ExtensionType) else field.type
    extension, details = read_extension(field) or ("", {})
    if extension in ("quire.tensor", "quire.ragged_tensor"):
        return tensor_annotation(details.get("dtype"), details.get("shape"))
    if extension == "quire.value":
        return Any
    if isinstance(field.type, pa.FixedShapeTensorType):
        return tensor_annotation(_dtype_name(field.type.value_type), field.type.shape)
    return _plain_annotation(arrow_type, name)


def _plain_annotation(arrow_type: pa.DataType, name: str) -> Any:
    if pa.types.is_dictionary(arrow_type):
        return _plain_annotation(arrow_type.value_type, name)
    if pa.types.is_struct(arrow_type):
        fields = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        is_datetime = [f.name for f in fields] == ["at", "zone"]  # as `DatetimeCodec` stores them
        return datetime if is_datetime else class_from_arrow(fields, name)
    if pa.types.is_map(arrow_type):
        return dict[_plain_annotation(arrow_type.key_type, name), Any]  # type: ignore[misc]
    if is_list_type(arrow_type):
        return _list_annotation(arrow_type, name)
    return next((annotation for test, annotation in _SIMPLE_TYPES if test(arrow_type)), Any)


def _list_annotation(arrow_type: pa.DataType, name: str) -> Any:
    """Return the annotation of a list: an array of documents, a tensor of numbers, or a list of something else."""
    if pa.types.is_struct(arrow_type.value_type):
        return DocumentArray[_plain_annotation(arrow_type.value_type, name)]  # type: ignore[misc]
    inner, sizes = arrow_type, []
    while is_list_type(inner):
        if inner.value_field.metadata == HAS_NULLS:
            item = arrow_type.value_field
            annotation = annotation_from_arrow(item, name)
            return list[annotation | None if item.metadata == HAS_NULLS else annotation]  # type: ignore[misc]
        sizes.append(inner.list_size if pa.types.is_fixed_size_list(inner) else None)
        inner = inner.value_type
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
        return list[_plain_annotation(arrow_type.value_type, name)]  # type: ignore[misc]
    return tensor_annotation(_dtype_name(inner), None if None in sizes else sizes)


def _dtype_name(arrow_type: pa.DataType) -> str:
    return str(np.dtype(arrow_type.to_pandas_dtype()).name)


def tensor_annotation(dtype: str | None, shape: Iterable[Any] | None) -> Any:
    """Return the annotation of a numpy tensor."""
    if shape is not None:
        return Annotated[np.ndarray, Shape(*shape), DType(str(dtype))]
    return np.ndarray if dtype is None else Annotated[np.ndarray, DType(dtype)]
