"""Arrow data that is not in the layout of the class: of other writers, or of an earlier version of the class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from importlib import import_module
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
from quire.schema import Field, FieldKind, Schema
from quire.storage._arrow_codec import ArrowCodec, NumberCodec, read_extension
from quire.storage._layout import CLASS_KEY
from quire.storage._nested_codecs import PLACEHOLDER, DocumentCodec, DocumentsCodec
from quire.tensors import DType, Shape, cast_numbers, common_dtype, format_shape, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


Arrays = list[pa.Array]
_RAGGED = StackOptions(shapes="ragged")
_FROM_TENSORS = ("", "quire.tensor", "quire.ragged_tensor")
_WIDER = {int: "iu", float: "iuf", bool: "b"}
"""Which numbers a field takes, by the letter of their kind: what can be told without loss."""


def refuse_unknown_columns(schema: Schema, columns: pa.Schema, extra: Extra, where: str) -> None:
    """Refuse the columns of a file that the class has no field for, if it forbids them, or else the reader does.

    What quire wrote follows the rules of schema evolution, unless the reader forbids unknown columns.
    """
    if extra == "forbid" or CLASS_KEY not in (columns.metadata or {}):
        _refuse_unknown(schema, columns, extra, where, "")


def _refuse_unknown(schema: Schema, fields: Iterable[pa.Field], extra: Extra, where: str, before: str) -> None:
    for column in fields:
        found = schema.accepted.get(column.name)
        if found is None and extra_rule(schema.document_type, extra) == "forbid":
            hint = did_you_mean(column.name, schema.accepted)
            chosen = schema.document_type.__quire_extra__
            way_out = "Or pass extra='ignore'." if chosen is None else f"{schema.name} sets extra={chosen!r}."
            raise StorageError(f"{where}: {schema.name} has no field {before + column.name!r}. {hint} {way_out}")
        kind = column.type.value_type if found is not None and _is_list(column.type) else column.type
        if found is None or not pa.types.is_struct(kind) or found[0].recursive:
            continue
        if found[0].kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
            inner = found[0].document_type.document_schema()
            _refuse_unknown(inner, kind, extra, where, f"{before}{column.name}.")


def conform(codec: ArrowCodec, array: pa.Array, field: pa.Field, schema: Schema) -> pa.Array:
    """The array of an Arrow field in the form that the field of the class has; an error says what it is instead."""
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), codec.type)
    if _is_embedded(codec, array.type):
        array = _embedded(array, codec.path)
        field = field.with_type(array.type)
    if isinstance(codec, DocumentCodec) and pa.types.is_struct(array.type):
        return _struct(codec, array)
    if isinstance(codec, DocumentsCodec) and _is_list(array.type):
        items = conform(codec.item, _flattened(array), array.type.value_field, schema)
        if items.null_count:
            raise DecodeError(f"{codec.path}: a document in an array is null.")
        return codec.array(items, _offsets(array), _validity(array))
    if codec.can_read(field):
        return array
    try:
        return codec.encode(_column(codec, array, field, schema))
    except (QuireError, pa.ArrowException, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DecodeError(
            f"{codec.path}: the data has {_told(field, array)}, the field is {codec.field}: {error}"
        ) from error


def _told(field: pa.Field, array: pa.Array) -> str:
    """What the data has, in the words of schemas where it was written by quire."""
    _, details = read_extension(field) or ("", None)
    if not isinstance(details, dict) or not isinstance(details.get("shape"), list):
        return str(array.type)
    return f"tensors of {details.get('dtype')} {format_shape(tuple(details['shape']))}"


def fits(codec: ArrowCodec, field: pa.Field) -> bool:
    """Whether the data of an Arrow field can be read as it is."""
    if field.nullable and not codec.field.nullable and codec.field.kind is not FieldKind.ANY:
        return False  # whether it has nulls, someone must look
    return _has_form(codec, field)


def _has_form(codec: ArrowCodec, field: pa.Field) -> bool:
    arrow_type = field.type
    if isinstance(codec, DocumentCodec):
        return pa.types.is_struct(arrow_type) and all(
            (at := arrow_type.get_field_index(child.field.name)) >= 0 and _has_form(child, arrow_type.field(at))
            for child in codec.codecs
        )
    if isinstance(codec, DocumentsCodec):
        return pa.types.is_list(arrow_type) and _has_form(codec.item, arrow_type.value_field)
    return codec.can_read(field)


_EMBEDDED = {"bytes", "path"}
"""How Hugging Face's libraries keep an encoded file: its content, and the path that it had."""


def _is_embedded(codec: ArrowCodec, arrow_type: pa.DataType) -> bool:
    """Whether the data has encoded files where the field has bytes, a tensor, or a document that is made of bytes."""
    if not pa.types.is_struct(arrow_type) or isinstance(codec, DocumentsCodec):
        return False
    names = {arrow_type.field(place).name for place in range(arrow_type.num_fields)}
    known = isinstance(codec, DocumentCodec) and names & set(codec.schema.accepted)
    return "bytes" in names and names <= _EMBEDDED and not known


def _embedded(array: pa.Array, path: str) -> pa.Array:
    """The bytes of files; one that is elsewhere is not looked for."""
    content = _compute().struct_field(array, "bytes")
    if content.null_count > array.null_count:
        raise DecodeError(f"{path}: some files are not in the data, but at a path. Embed them, and save anew.")
    return content


Found = Mapping[str, tuple[pa.Field, pa.Array]]
"""Arrays by their names in the data, with their Arrow fields."""


def conform_fields(
    codecs: Sequence[ArrowCodec], found: Found, schema: Schema, present: Validity, length: int
) -> Arrays:
    """The arrays of forms, from those that the data has by name; what it has not takes its default.

    `present` tells which rows are documents at all; there, a field that is not optional must have a value.
    """
    names = stored_names(schema, found)
    made = []
    for codec in codecs:
        if codec.field.name not in names:
            made.append(_default(codec, schema, length))
            continue
        field, array = found[names[codec.field.name]]
        array = _plain_array(array)
        made.append(conform(codec, array, field.with_type(array.type), schema))
        _check_values(codec, made[-1], present)
    return made


def _plain_array(array: pa.Array) -> pa.Array:
    """Without the dictionaries and extensions that say no more than what is in them."""
    if isinstance(array, pa.ExtensionArray) and not isinstance(array.type, pa.FixedShapeTensorType):
        array = array.storage
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def stored_names(schema: Schema, found: Iterable[str]) -> dict[str, str]:
    """Under which name the data has each field: its own, or else another that the class accepts."""
    there = set(found)
    names = {field.name: name for name, (field, _) in schema.accepted.items() if name in there}
    return names | {field.name: field.name for field in schema.fields if field.name in there}


def _check_values(codec: ArrowCodec, array: pa.Array, present: Validity) -> None:
    if codec.field.nullable or codec.field.kind is FieldKind.ANY or not array.null_count:
        return
    missing = np.asarray(array.is_null())
    if present is not None:
        missing &= present
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        raise DecodeError(f"{codec.path}: row {row} of the record batch has no value, and the field is not optional.")


def _default(codec: ArrowCodec, schema: Schema, length: int) -> pa.Array:
    field = codec.field
    if field.required:
        raise DecodeError(f"{codec.path}: the data does not hold it, and it has no default.")
    info = schema.document_type.model_fields[field.name]
    try:
        values = [info.get_default(call_default_factory=True, validated_data={}) for _ in range(length)]
        values = validate_values(schema, field, values, codec.path, None, "ignore")
        return codec.encode(stack_values(field, values, _RAGGED, codec.path))
    except (QuireError, KeyError, TypeError) as error:
        raise DecodeError(
            f"{codec.path}: the data does not hold it, and its default cannot be made: {error}"
        ) from error


def _struct(codec: DocumentCodec, array: pa.Array) -> pa.Array:
    fields = [array.type.field(i) for i in range(array.type.num_fields)]
    parts = array.flatten() if array.null_count else [array.field(i) for i in range(len(fields))]
    found = {field.name: (field, part) for field, part in zip(fields, parts, strict=True)}  # null where none is there
    present = _validity(array)
    arrays = conform_fields(codec.codecs, found, codec.schema, present, len(array))
    return codec.array(arrays, len(array), present)


def _validity(array: pa.Array) -> Validity:
    return None if not array.null_count else np.asarray(array.is_valid())


def _is_list(arrow_type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type))


def _flattened(array: pa.Array) -> pa.Array:
    """The items of all lists. Offsets beyond them, which Arrow lets pass where lists are empty, end the process."""
    if not pa.types.is_fixed_size_list(array.type):
        offsets, limit = np.asarray(array.offsets), len(array.values)
        if len(offsets) and (offsets.min() < 0 or offsets.max() > limit or (np.diff(offsets) < 0).any()):
            raise DecodeError("the items of a list lie outside of the data.")
    return array.flatten()


def _offsets(array: pa.Array) -> NDArray[np.int64]:
    sizes = np.asarray(_compute().list_value_length(array).fill_null(0)).astype(np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _column(codec: ArrowCodec, array: pa.Array, stored: pa.Field, schema: Schema) -> Column:
    field, mark = codec.field, (read_extension(stored) or ("",))[0]
    if mark not in (_FROM_TENSORS if field.kind is FieldKind.TENSOR else ("", "quire.enum")):
        raise DecodeError("what was written so can be read as nothing else.")
    if isinstance(codec, NumberCodec) and field.kind is FieldKind.SCALAR:
        return _numbers(field, array)
    if field.kind is FieldKind.TENSOR:
        return stack_values(field, _tensors(codec, array, stored), _RAGGED, codec.path)
    if field.kind in (FieldKind.TEXT, FieldKind.BYTES) and field.type in (str, bytes):
        if not _is_text(array.type):
            raise DecodeError("values are not turned into texts.")
        wanted = pa.string() if field.kind is FieldKind.TEXT else pa.binary()
        return ObjectColumn(field, array.cast(wanted).to_pylist())
    values = _objects(array)
    for value in values:
        _refuse_rounding(field, value)
    values = validate_values(schema, field, values, codec.path, np.asarray(array.is_valid()), "ignore")
    return stack_values(field, values, _RAGGED, codec.path)


def _refuse_rounding(field: Field, value: Any) -> None:
    """Refuse an integer that a field of floats, or of lists of them, would round."""
    if isinstance(value, list) and len(field.items) == 1:
        for item in value:
            _refuse_rounding(field.items[0], item)
    elif type(value) is int and field.type in (float, complex):
        check_exact(value, field)


def _is_text(arrow_type: pa.DataType) -> bool:
    """Whether rows are texts, or bytes, which some tools write in place of texts."""
    types = pa.types
    views = types.is_string_view(arrow_type) or types.is_binary_view(arrow_type)
    long = types.is_large_string(arrow_type) or types.is_large_binary(arrow_type)
    fixed = types.is_fixed_size_binary(arrow_type)
    return bool(views or long or fixed or types.is_string(arrow_type) or types.is_binary(arrow_type))


def _objects(array: pa.Array) -> list[Any]:
    """Values as pydantic takes them."""
    if pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    if pa.types.is_map(array.type):
        return [None if row is None else dict(row) for row in array.to_pylist()]
    objects: list[Any] = _micros(array).to_pylist()
    return objects


def _micros(array: pa.Array) -> pa.Array:
    """Moments and durations in the microseconds that Python has; what is finer is an error."""
    arrow_type = array.type
    if pa.types.is_timestamp(arrow_type):
        return array.cast(pa.timestamp("us", arrow_type.tz))
    if pa.types.is_duration(arrow_type):
        return array.cast(pa.duration("us"))
    return array.cast(pa.time64("us")) if pa.types.is_time64(arrow_type) else array


def _numbers(field: Field, array: pa.Array) -> Column:
    kind = "b" if pa.types.is_boolean(array.type) else _kind(array.type)
    if kind not in _WIDER[field.type]:
        raise DecodeError("a number of another kind is no wider one.")
    target, dtype = NumberCodec.types[field.type]
    cast = array.cast(target)  # safely: what does not fit is an error
    data: NDArray[Any] = np.asarray(cast.fill_null(False if field.type is bool else 0)).astype(dtype)
    return ScalarColumn(field, data, get_framework("numpy"), _validity(array))


def _kind(arrow_type: pa.DataType) -> str:
    if pa.types.is_integer(arrow_type):
        return "i"
    return "f" if pa.types.is_floating(arrow_type) else "?"


# --- tensors


def _tensors(codec: ArrowCodec, array: pa.Array, stored: pa.Field) -> list[Any]:
    """The tensors of lists of numbers, of bytes, of images in bytes, or of another dtype."""
    field = codec.field
    dtype = None if field.spec.dtype is None else common_dtype(field.spec.dtype)
    framework = field.type.framework or get_framework("numpy")
    rows = _arrays(codec, array, stored, dtype)
    return [None if row is None else framework.from_numpy(_as_dtype(row, dtype)) for row in rows]


def _arrays(codec: ArrowCodec, array: pa.Array, stored: pa.Field, dtype: np.dtype[Any] | None) -> list[Any]:
    name, details = read_extension(stored) or ("", {})
    written = details.get("dtype") if isinstance(details, dict) else None
    if name and dtype is not None and written is not None and common_dtype(written) != dtype:
        raise TensorError(f"the tensors were written as {written}.")
    if isinstance(array.type, pa.FixedShapeTensorType):
        return _from_tensors(array)
    if name == "quire.tensor":
        return [None if row is None else _elements(row, details) for row in array.to_pylist()]
    if name == "quire.ragged_tensor" or _is_ragged(array.type):
        known = details or {"dtype": codec.field.spec.dtype}
        return [None if row is None else _elements(row["data"], {**known, **row}) for row in array.to_pylist()]
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type) or _is_fixed_binary(array.type):
        return [None if row is None else _from_bytes(codec.field, row, dtype, codec.path) for row in array.to_pylist()]
    return _from_lists(array)


def _is_ragged(arrow_type: pa.DataType) -> bool:
    """Whether it looks like tensors of any shape whose mark got lost, in a tool that keeps none."""
    return bool(pa.types.is_struct(arrow_type)) and min(map(arrow_type.get_field_index, ("data", "shape"))) >= 0


def _elements(row: bytes, details: Mapping[str, Any]) -> NDArray[Any]:
    """A tensor that was written with another dtype or shape."""
    array: NDArray[Any] = np.frombuffer(bytearray(row), common_dtype(details["dtype"]))
    shaped: NDArray[Any] = array.reshape(tuple(details["shape"]))
    return shaped


def _from_tensors(array: pa.Array) -> list[Any]:
    """Arrow's own tensors; their axes may lie in another order than they are told."""
    kind, there = array.type, array.is_valid().to_pylist()
    order = kind.permutation or range(len(kind.shape))
    flat = _plain(array.storage.values)[array.storage.offset * array.storage.type.list_size :]
    rows = flat[: len(array) * array.storage.type.list_size].reshape(len(array), *kind.shape)
    moved = rows.transpose(0, *(axis + 1 for axis in order))
    return [np.ascontiguousarray(row) if ok else None for row, ok in zip(moved, there, strict=True)]


def _is_fixed_binary(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_binary(arrow_type))


def _as_dtype(row: NDArray[Any], dtype: np.dtype[Any] | None) -> NDArray[Any]:
    return row if dtype is None else cast_numbers(row, dtype)


def _from_lists(array: pa.Array) -> list[Any]:
    """Nested lists as arrays: all at once where they have one length, else row by row."""
    validity = _validity(array)
    if validity is None and len(array):
        sizes: list[int] = []
        level = array
        while _is_list(level.type) and not level.null_count:
            lengths = np.asarray(_compute().list_value_length(level))
            if len(lengths) == 0 or (lengths != lengths[0]).any():
                break
            sizes.append(int(lengths[0]))
            level = _flattened(level)
        if not _is_list(level.type) and not level.null_count:
            return list(_plain(level).reshape(len(array), *sizes))
    return [None if row.values is None else _row(row.values) for row in array]


def _row(values: pa.Array) -> NDArray[Any]:
    """The array of one row's list; it has the type of the data even where it is empty."""
    if not _is_list(values.type):
        return _plain(values)
    parts = _from_lists(values)
    if not parts:
        return _row(_flattened(values))
    if any(part is None or part.shape != parts[0].shape for part in parts):
        raise TensorError("its lists have different lengths, or are null.")
    return np.stack(parts)


def _plain(array: pa.Array) -> NDArray[Any]:
    found: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    if found.dtype.kind not in "biuf":
        raise TensorError(f"{array.type} is not a number.")
    copied: NDArray[Any] = found.copy()
    return copied


def _from_bytes(field: Field, row: bytes, dtype: np.dtype[Any] | None, path: str) -> NDArray[Any]:
    """The elements themselves, where their number fits the shape; else an image."""
    shape = field.spec.fixed_shape
    if dtype is not None and shape is not None and len(row) == dtype.itemsize * int(np.prod(shape)):
        elements: NDArray[Any] = np.frombuffer(bytearray(row), dtype)
        return elements.reshape(shape)
    image = decode_image(row, path)
    if field.spec.fits(image.shape, image.dtype.name):
        return image
    channels_first = np.ascontiguousarray(image.transpose(2, 0, 1))
    return channels_first if field.spec.fits(channels_first.shape, image.dtype.name) else image


def _compute() -> Any:
    """Arrow's functions, which take longer to import than quire's own files need to be opened."""
    return import_module("pyarrow.compute")


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
        annotation = annotation_from_arrow(field, f"{name}_{field.name}")
        own = field_name(field.name, fields)
        details: dict[str, Any] = {} if own == field.name else {"alias": field.name}
        default = FieldInfo(default=None, **details) if field.nullable else FieldInfo(**details)
        fields[own] = (annotation | None if field.nullable else annotation, default)
    config = ConfigDict(populate_by_name=True, protected_namespaces=())
    base = base or (BaseDocument if "id" in fields else Row)
    made: type[Any] = create_model(name, __base__=base, **fields)
    made.model_config = {**made.model_config, **config}
    made.model_rebuild(force=True)
    return register_class(made)


def register_class(made: type[Any]) -> type[Any]:
    """A class that was made, so that pickle finds it again: in this process, and in those that are forked from it."""
    made.__module__, made.__qualname__ = _parametrize.__name__, _parametrize.publish(made.__name__)
    _parametrize.register(made)
    return made


def annotation_from_arrow(field: pa.Field, name: str) -> Any:
    arrow_type = field.type.storage_type if isinstance(field.type, pa.ExtensionType) else field.type
    kind, details = read_extension(field) or ("", None)
    if kind in ("quire.tensor", "quire.ragged_tensor"):
        return _tensor_annotation(details)
    if kind == "quire.value":
        return Any
    if isinstance(field.type, pa.FixedShapeTensorType):
        return Annotated[np.ndarray, Shape(*field.type.shape), DType(_dtype_name(field.type.value_type))]
    return _plain_annotation(arrow_type, name)


def _plain_annotation(arrow_type: pa.DataType, name: str) -> Any:
    if pa.types.is_dictionary(arrow_type):
        return _plain_annotation(arrow_type.value_type, name)
    if pa.types.is_struct(arrow_type):
        fields = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        return datetime if [f.name for f in fields] == ["at", "zone"] else class_from_arrow(fields, name)
    if pa.types.is_map(arrow_type):
        return dict[_plain_annotation(arrow_type.key_type, name), Any]  # type: ignore[misc]
    if _is_list(arrow_type):
        return _list_annotation(arrow_type, name)
    return next((tp for test, tp in _SIMPLE if test(arrow_type)), Any)


def _list_annotation(arrow_type: pa.DataType, name: str) -> Any:
    """Documents, a tensor of numbers, or a list of something else."""
    if pa.types.is_struct(arrow_type.value_type):
        return DocumentArray[_plain_annotation(arrow_type.value_type, name)]  # type: ignore[misc]
    inner, sizes = arrow_type, []
    while _is_list(inner):
        if inner.value_field.metadata == HAS_NULLS:
            item = arrow_type.value_field
            annotation = annotation_from_arrow(item, name)
            return list[annotation | None if item.metadata == HAS_NULLS else annotation]  # type: ignore[misc]
        sizes.append(inner.list_size if pa.types.is_fixed_size_list(inner) else ...)
        inner = inner.value_type
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
        return list[_plain_annotation(arrow_type.value_type, name)]  # type: ignore[misc]
    if ... in sizes:
        return Annotated[np.ndarray, DType(_dtype_name(inner))]
    return Annotated[np.ndarray, Shape(*sizes), DType(_dtype_name(inner))]


def _dtype_name(arrow_type: pa.DataType) -> str:
    return str(np.dtype(arrow_type.to_pandas_dtype()).name)


def _tensor_annotation(details: Any) -> Any:
    shape, dtype = details.get("shape"), details.get("dtype")
    if shape is None:
        return np.ndarray if dtype is None else Annotated[np.ndarray, DType(dtype)]
    return Annotated[np.ndarray, Shape(*shape), DType(dtype)]
