"""Arrow data that is not in the layout of the class: of other writers, or of an earlier version of the class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire.columns import Column, ObjectColumn, ScalarColumn, StackOptions, Validity, stack_values, validate_values
from quire.documents._pillow import decode_frames
from quire.errors import DecodeError, QuireError, TensorError
from quire.schema import Field, FieldKind, Schema
from quire.storage._form import Form, NumberForm
from quire.storage._nested import DocumentForm, DocumentsForm
from quire.tensors import cast_numbers, common_dtype, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

_RAGGED = StackOptions(shapes="ragged")
_WIDER = {int: "iu", float: "iuf", bool: "b"}
"""Which numbers a field takes, by the letter of their kind: what can be told without loss."""


def conform(form: Form, array: pa.Array, schema: Schema) -> pa.Array:
    """An array in the form that the field has; an error says what it is instead."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.type == form.type:
        return array
    if isinstance(form, DocumentForm) and pa.types.is_struct(array.type):
        return _struct(form, array)
    if isinstance(form, DocumentsForm) and _is_list(array.type):
        items = conform(form.item, array.flatten() if array.null_count else _whole(array), schema)
        return form.array(items, _offsets(array), _validity(array))
    try:
        return form.encode(_column(form, array, schema))
    except (QuireError, pa.ArrowException) as error:
        raise DecodeError(f"{form.path}: the data has {array.type}, the field is {form.field}: {error}") from error


def fits(form: Form, arrow_type: pa.DataType) -> bool:
    """Whether an array of that type can be read as it is."""
    if isinstance(form, DocumentForm):
        return pa.types.is_struct(arrow_type) and all(
            (at := arrow_type.get_field_index(child.field.name)) >= 0 and fits(child, arrow_type.field(at).type)
            for child in form.forms
        )
    if isinstance(form, DocumentsForm):
        return pa.types.is_list(arrow_type) and fits(form.item, arrow_type.value_type)
    return bool(arrow_type == form.type)


def conform_fields(forms: Any, found: Any, schema: Schema, length: int, where: str) -> list[pa.Array]:
    """The arrays of forms, from those that the data has by name; what it has not takes its default."""
    names = {field.name: name for name, (field, _) in schema.accepted.items() if name in found}
    names |= {form.field.name: form.field.name for form in forms if form.field.name in found}
    made = []
    for form in forms:
        if form.field.name in names:
            made.append(conform(form, found[names[form.field.name]], schema))
        else:
            made.append(_default(form, schema, length, where))
    return made


def _default(form: Form, schema: Schema, length: int, where: str) -> pa.Array:
    field = form.field
    if field.required:
        raise DecodeError(f"{form.path}: {where} does not hold it, and it has no default.")
    info = schema.document_type.model_fields[field.name]
    try:
        values = [info.get_default(call_default_factory=True, validated_data={}) for _ in range(length)]
        values = validate_values(schema, field, values, form.path, None)
        return form.encode(stack_values(field, values, _RAGGED, form.path))
    except (QuireError, KeyError, TypeError) as error:
        raise DecodeError(f"{form.path}: {where} does not hold it, and its default cannot be made: {error}") from error


def _struct(form: DocumentForm, array: pa.Array) -> pa.Array:
    found = {array.type.field(i).name: array.field(i) for i in range(array.type.num_fields)}
    arrays = conform_fields(form.forms, found, form.schema, len(array), "a nested document in the data")
    validity = _validity(array)
    marks = None if validity is None else pa.py_buffer(np.packbits(validity, bitorder="little"))
    return pa.Array.from_buffers(form.type, len(array), [marks], children=arrays)


def _validity(array: pa.Array) -> Validity:
    return None if not array.null_count else np.asarray(array.is_valid())


def _is_list(arrow_type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type))


def _whole(array: pa.Array) -> pa.Array:
    return array.flatten()


def _offsets(array: pa.Array) -> NDArray[np.int64]:
    sizes = np.asarray(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _column(form: Form, array: pa.Array, schema: Schema) -> Column:
    field = form.field
    if isinstance(form, NumberForm) and field.kind is FieldKind.SCALAR:
        return _numbers(field, array)
    if field.kind is FieldKind.TENSOR:
        return stack_values(field, _tensors(field, array, form.path), _RAGGED, form.path)
    if field.kind in (FieldKind.TEXT, FieldKind.BYTES) and field.type in (str, bytes):
        wanted = pa.string() if field.kind is FieldKind.TEXT else pa.binary()
        return ObjectColumn(field, array.cast(wanted).to_pylist())
    if field.kind is FieldKind.UUID and pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    return stack_values(field, validate_values(schema, field, array.to_pylist(), form.path, None), _RAGGED, form.path)


def _numbers(field: Field, array: pa.Array) -> Column:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = "b" if pa.types.is_boolean(array.type) else _kind(array.type)
    if kind not in _WIDER[field.type]:
        raise DecodeError("a number of another kind is no wider one.")
    target, dtype = NumberForm.types[field.type]
    cast = array.cast(target)  # safely: what does not fit is an error
    data = np.asarray(pc.fill_null(cast, False if field.type is bool else 0)).astype(dtype)
    return ScalarColumn(field, data, get_framework("numpy"), _validity(array))


def _kind(arrow_type: pa.DataType) -> str:
    if pa.types.is_integer(arrow_type):
        return "i"
    return "f" if pa.types.is_floating(arrow_type) else "?"


# --- tensors


def _tensors(field: Field, array: pa.Array, path: str) -> list[Any]:
    """The tensors of lists of numbers, of bytes, or of images in bytes."""
    dtype = None if field.spec.dtype is None else common_dtype(field.spec.dtype)
    framework = field.type.framework or get_framework("numpy")
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type) or _is_fixed_binary(array.type):
        rows = [None if row is None else _from_bytes(field, row, dtype, path) for row in array.to_pylist()]
    else:
        rows = _from_lists(array)
    return [None if row is None else framework.from_numpy(_as_dtype(row, dtype)) for row in rows]


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
            lengths = np.asarray(pc.list_value_length(level))
            if len(lengths) == 0 or (lengths != lengths[0]).any():
                break
            sizes.append(int(lengths[0]))
            level = level.flatten()
        if not _is_list(level.type) and not level.null_count:
            return list(_plain(level).reshape(len(array), *sizes))
    return [None if row.values is None else _row(row.values) for row in array]


def _row(values: pa.Array) -> NDArray[Any]:
    """The array of one row's list; it has the type of the data even where it is empty."""
    if not _is_list(values.type):
        return _plain(values)
    parts = _from_lists(values)
    if not parts:
        return _row(values.flatten())
    if any(part is None or part.shape != parts[0].shape for part in parts):
        raise TensorError("its lists have different lengths, or are null.")
    return np.stack(parts)


def _plain(array: pa.Array) -> NDArray[Any]:
    found = array.to_numpy(zero_copy_only=False)
    if found.dtype.kind not in "biuf":
        raise TensorError(f"{array.type} is not a number.")
    return found.copy()


def _from_bytes(field: Field, row: bytes, dtype: np.dtype[Any] | None, path: str) -> NDArray[Any]:
    """The elements themselves, where their number fits the shape; else an image."""
    shape = field.spec.fixed_shape
    if dtype is not None and shape is not None and len(row) == dtype.itemsize * int(np.prod(shape)):
        return np.frombuffer(bytearray(row), dtype).reshape(shape)
    image = decode_frames(row, path, None, None)[0]
    if field.spec.fits(image.shape, image.dtype.name):
        return image
    channels_first = np.ascontiguousarray(image.transpose(2, 0, 1))
    return channels_first if field.spec.fits(channels_first.shape, image.dtype.name) else image
