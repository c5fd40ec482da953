"""Columns as messages, from a batch or from documents: names and types once, one contiguous buffer a column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._class_registry import class_name
from quire.codec._context import Writer
from quire.codec._errors import no_document
from quire.codec._tensors import LARGE, encode_elements, encode_lent, encode_tensor, plain_array, tensor_head
from quire.codec._unions import ambiguous_fields, check_values
from quire.codec._values import encode_fields, encode_value
from quire.codec._wire import delimited, text, uint
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    DocumentsColumn,
    ExtraState,
    LentColumn,
    PackedColumn,
    RaggedColumn,
    ScalarColumn,
    StackOptions,
    TensorColumn,
    Validity,
    collect_extra_states,
    gather,
    have_own_attributes,
    pack,
    stack_values,
    validity_of,
)
from quire.errors import EncodeError, TensorError
from quire.schema import Field, FieldKind, Schema
from quire.tensors import Framework, framework_of_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

OFFSETS = np.dtype("<i8")
_GATHERED = 1 << 14
"""Rows of so many bytes are not stacked first: the message is joined from the rows themselves."""


# --- a batch


def encode_columns(columns: Columns, writer: Writer) -> bytes:
    """The message of a batch."""
    head = _head(columns.schema, len(columns), columns.validity, writer)
    for field in ambiguous_fields(columns.schema):
        values = columns.columns[field.name].values()
        _named(columns.schema, field, partial(_check_unions, columns.schema, field, values, writer))
    parts = [
        _named(columns.schema, column.field, partial(_column, column, writer)) for column in columns.columns.values()
    ]
    return b"".join((head, *parts, _encode_extra_states(columns.schema, columns.extra_states, writer)))


def _head(schema: Schema, rows: int, validity: Validity, writer: Writer) -> bytes:
    return b"\x08\x01" + text(2, class_name(schema.document_type)) + uint(3, rows) + uint(4, _marks(validity, writer))


def _named(schema: Schema, field: Field, encode: Callable[[], bytes]) -> bytes:
    try:
        return delimited(5, text(1, field.name) + encode())
    except EncodeError as error:
        raise EncodeError(f"{schema.name}.{field.name}: {error}") from error


def _check_unions(schema: Schema, field: Field, values: list[Any], writer: Writer) -> bytes:
    check_values(schema, field, values, allow_pickle=writer.allow_pickle)
    return b""


def _column(column: Column, writer: Writer) -> bytes:
    if isinstance(column, TensorColumn):
        form = 4 if isinstance(column, ScalarColumn) else 3
        content = delimited(form, _tensor(column, writer))
        shapes = 0 if column.shapes is None else writer.add(np.ascontiguousarray(column.shapes, OFFSETS))
        return uint(2, _marks(column.validity, writer)) + content + uint(11, shapes)
    if isinstance(column, RaggedColumn):
        return _ragged(encode_tensor(column.flat, writer), column.shapes, column.validity, writer)
    if isinstance(column, DocumentColumn):
        return delimited(9, encode_columns(column.columns, writer))
    if isinstance(column, DocumentsColumn):
        return _arrays(encode_columns(column.flat, writer), column.offsets, column.validity, writer)
    if isinstance(column, PackedColumn):
        form = 7 if column.field.kind is FieldKind.BYTES else 6
        return _packed(form, *column.packed(), column.validity, writer)
    return _objects(column.field, column.values(), writer)


def _tensor(column: TensorColumn, writer: Writer) -> bytes:
    lent = column.peek() if isinstance(column, LentColumn) else None
    if lent is None:
        return encode_tensor(column.data, writer)
    return encode_lent(lent, column.framework, writer)


def _marks(validity: Validity, writer: Writer) -> int:
    return 0 if validity is None else writer.add(np.ascontiguousarray(validity, np.uint8))


def _ragged(flat: bytes, shapes: Sequence[tuple[int, ...]], validity: Validity, writer: Writer) -> bytes:
    ranks = np.fromiter(map(len, shapes), np.uint8, len(shapes))
    sizes = np.array([size for shape in shapes for size in shape], OFFSETS)
    content = delimited(1, flat) + uint(2, writer.add(ranks)) + uint(3, writer.add(sizes))
    return uint(2, _marks(validity, writer)) + delimited(5, content)


def _arrays(flat: bytes, offsets: NDArray[np.int64], validity: Validity, writer: Writer) -> bytes:
    content = delimited(1, flat) + uint(2, writer.add(np.ascontiguousarray(offsets, OFFSETS)))
    return uint(2, _marks(validity, writer)) + delimited(10, content)


def _encode_extra_states(schema: Schema, rows: list[ExtraState | None] | None, writer: Writer) -> bytes:
    if rows is None:
        return b""
    contents = [b"" if row is None else _encode_extra_state(schema, row, writer) for row in rows]
    return b"".join(delimited(6, content) for content in contents) if any(contents) else b""


def _encode_extra_state(schema: Schema, row: ExtraState, writer: Writer) -> bytes:
    """What a row holds beyond the columns; nothing for a plain row, whose private attributes are not sent."""
    cls = row.document_type
    declared = (row.private or {}).get("_declared") if isinstance(vars(cls).get("__quire_name__"), property) else None
    if cls is schema.document_type and not row.extra and not declared:
        return b""
    content = {name: row.fields[name] for name in row.fields if name in cls.model_fields}  # no cached properties
    return encode_fields(declared or class_name(cls), {**content, **(row.extra or {})}, writer)


# --- objects


def _objects(field: Field, items: list[Any], writer: Writer) -> bytes:
    types = set(map(type, items))
    plain = types if field.wrapper is None else types - {field.wrapper}
    if field.kind is FieldKind.TEXT and plain <= {str, type(None)}:
        return _strings(6, items, types, writer)
    if field.kind is FieldKind.BYTES and plain <= {bytes, type(None)}:
        return _strings(7, items, types, writer)
    return delimited(8, b"".join([delimited(1, encode_value(item, writer)) for item in items]))


def _strings(form: int, items: list[Any], types: set[type[Any]], writer: Writer) -> bytes:
    validity = None
    if type(None) in types:
        validity = validity_of(items)
        empty: Any = "" if form == 6 else b""
        items = [empty if item is None else item for item in items]
    try:
        data, offsets = pack(items)
    except UnicodeEncodeError as error:
        raise EncodeError("half a character (a lone surrogate) has no form on the wire.") from error
    return _packed(form, data, offsets, validity, writer)


def _packed(form: int, data: Any, offsets: NDArray[np.int64], validity: Validity, writer: Writer) -> bytes:
    content = uint(1, writer.add(data)) + uint(2, writer.add(np.ascontiguousarray(offsets, OFFSETS)))
    return uint(2, _marks(validity, writer)) + delimited(form, content)


# --- documents


def encode_rows(schema: Schema, documents: Sequence[Any], writer: Writer) -> bytes:
    """The message of documents as a batch, made without stacking them; a document that is None is not there."""
    validity = validity_of(documents)
    try:
        rows = [None if document is None else document.__dict__ for document in documents]
    except AttributeError:
        raise no_document(schema, documents) from None
    parts = [_head(schema, len(rows), validity, writer)]
    ambiguous = ambiguous_fields(schema)
    for field in schema.fields:
        values = gather(rows, field.name, f"{schema.name}.{field.name}", validity)
        if field in ambiguous:
            _named(schema, field, partial(_check_unions, schema, field, values, writer))
        parts.append(_named(schema, field, partial(_values, field, values, writer)))
    return b"".join((*parts, _encode_extra_states(schema, collect_extra_states(schema, documents), writer)))


def _values(field: Field, values: list[Any], writer: Writer) -> bytes:
    nested = field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS) and not field.recursive
    if field.kind is FieldKind.TENSOR:
        return _tensors(field, values, writer)
    if field.kind is FieldKind.SCALAR:
        return _column(stack_values(field, values, StackOptions(), field.name), writer)
    if nested and field.kind is FieldKind.DOCUMENT:
        return delimited(9, encode_rows(field.document_type.document_schema(), values, writer))
    if nested and set(map(type, values)) <= {field.type, type(None)} and not have_own_attributes(field.type, values):
        return _array_rows(field, values, writer)
    return _objects(field, values, writer)


def _array_rows(field: Field, values: list[Any], writer: Writer) -> bytes:
    sizes = [0 if array is None else len(array._documents) for array in values]
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    documents = [document for array in values if array is not None for document in array._documents]
    flat = encode_rows(field.document_type.document_schema(), documents, writer)
    return _arrays(flat, offsets, validity_of(values), writer)


def _tensors(field: Field, values: list[Any], writer: Writer) -> bytes:
    validity = validity_of(values)
    present = values if validity is None else [value for value in values if value is not None]
    framework = _one_framework(field, present)
    if framework is None:
        return _objects(field, values, writer)
    shapes = [framework.shape(value) for value in present]
    first = shapes[0]
    if any(shape != first for shape in shapes):
        return _ragged_rows(framework, present, shapes, validity, writer)
    head = tensor_head(framework, present[0], (len(values), *first))
    rows = _row_arrays(framework, present)
    if validity is not None:
        rest, empty = iter(rows), np.zeros(first, rows[0].dtype)
        rows = [next(rest) if there else empty for there in validity.tolist()]
    return uint(2, _marks(validity, writer)) + delimited(3, head + _joined(rows, writer))


def _ragged_rows(
    framework: Framework, present: list[Any], shapes: list[tuple[int, ...]], validity: Validity, writer: Writer
) -> bytes:
    rows = [row.reshape(-1) for row in _row_arrays(framework, present)]
    head = tensor_head(framework, present[0], (sum(map(len, rows)),))
    if validity is not None:
        rest = iter(shapes)
        shapes = [next(rest) if there else (0,) for there in validity.tolist()]
    return _ragged(head + _joined(rows, writer), shapes, validity, writer)


def _one_framework(field: Field, present: list[Any]) -> Framework | None:
    """The framework of tensors that make a column as they are; None where they are written one by one."""
    types = set(map(type, present))
    frameworks = set(map(framework_of_type, types))
    framework = frameworks.pop() if len(frameworks) == 1 else None
    if framework is None or len({value.dtype for value in present}) > 1:
        return None
    wrapped = any(framework.unwrap(value) is not value for value in present[:1]) or len(types) > 1
    if wrapped and field.type.framework is None:  # what a field of any tensor holds comes back as it is
        return None
    for value in present:
        if framework.is_sparse(value) or getattr(value, "requires_grad", False):
            return None
    refused = framework.refuses_some or framework.refusal(present[0]) is not None
    return None if refused or _row_arrays(framework, present[:1])[0].dtype.kind == "O" else framework


def _row_arrays(framework: Framework, present: list[Any]) -> list[NDArray[Any]]:
    try:
        return [framework.to_numpy(value) for value in present]
    except (TypeError, RuntimeError, TensorError) as error:
        raise EncodeError(f"a {framework.name} tensor cannot be written: {error}") from error


def _joined(rows: list[NDArray[Any]], writer: Writer) -> bytes:
    """The elements of rows of one dtype: stacked where they are small, else in one buffer of many pieces."""
    if len(rows) == 1 or rows[0].nbytes < _GATHERED or sum(row.nbytes for row in rows) < LARGE:
        return encode_elements(np.concatenate([row.reshape(-1) for row in rows]), writer)
    return uint(6, writer.add([plain_array(row).reshape(-1).view(np.uint8) for row in rows]))
