"""Messages as columns, or as documents where their class is not loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from quire import _class_registry
from quire.codec._context import Reader
from quire.codec._decode import build_document, check_version, decode_fields, validated
from quire.codec._forms import (
    ColumnParts,
    blobs_form,
    objects_form,
    ragged_form,
    read_offsets,
    read_validity,
    scalars_form,
    tensor_form,
    text_form,
)
from quire.codec._match import match
from quire.codec._tensors import decode_tensor
from quire.codec._wire import DELIMITED, VARINT, fields, read_text
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    DocumentsColumn,
    ExtraState,
    ObjectColumn,
    PackedColumn,
    Validity,
    default_column,
    validate_values,
)
from quire.errors import ColumnError, DecodeError, TensorError
from quire.schema import Field, FieldKind, Schema
from quire.tensors import AnyTensor, describe


class _Batch:
    """The fields of a batch message; its columns and extra_states are where they are."""

    __slots__ = ("columns", "extra_states", "rows", "there", "type_name")

    def __init__(self, reader: Reader, start: int, end: int) -> None:
        self.type_name, self.rows, marks = "", 0, 0
        self.columns: list[tuple[int, int]] = []
        self.extra_states = False
        for number, kind, a, b in fields(reader.data, start, end):
            if kind == VARINT:
                if number == 1:
                    check_version(a)
                elif number == 3:
                    self.rows = a
                elif number == 4:
                    marks = a
            elif number == 2:
                self.type_name = read_text(reader.data, a, b)
            elif number == 5:
                reader.charge(300)
                self.columns.append((a, b))
            elif number == 6:
                self.extra_states = True
        if self.rows >= 1 << 48:
            raise DecodeError(f"a batch cannot have {self.rows} rows.")
        reader.charge(16 * self.rows)
        self.there = read_validity(marks, self.rows, reader)

    def refuse_gaps(self) -> None:
        """Every row must stand for a document."""
        if self.there is not None and not self.there.all():
            raise DecodeError(f"row {int(np.flatnonzero(~self.there)[0])} stands for no document.")


def decode_columns(reader: Reader, start: int, end: int, document_type: type[Any], *, gaps: bool = False) -> Columns:
    """The columns of a batch message, as those of the class; with gaps, rows may stand for no document."""
    batch = _Batch(reader, start, end)
    if not gaps:
        batch.refuse_gaps()
    return _typed_columns(reader, batch, document_type.document_schema(), (start, end))


def decode_rows(reader: Reader, start: int, end: int, expected: type[Any] | None, *, gaps: bool = False) -> list[Any]:
    """The documents of a batch message: of the class that it names, if that is loaded and the expected one or below it.

    Without an expected class, those of a class that is not loaded are dynamic. With gaps, rows may stand for none.
    """
    batch = _Batch(reader, start, end)
    if not gaps:
        batch.refuse_gaps()
    document_type = _class_registry.find(batch.type_name, expected, reader.options.types)
    if document_type is None or document_type.document_schema().is_open:
        return _dynamic_documents(reader, batch, (start, end))
    if expected is None and batch.extra_states and not _all_loaded(reader, (start, end)):
        return _dynamic_documents(reader, batch, (start, end))
    columns = _typed_columns(reader, batch, document_type.document_schema(), (start, end))
    reader.charge(batch.rows * (200 + 100 * len(columns.columns)))
    return columns.documents()


def _typed_columns(reader: Reader, batch: _Batch, schema: Schema, span: tuple[int, int]) -> Columns:
    found: dict[str, Column] = {}
    unknown: dict[str, list[Any]] = {}
    for start, end in batch.columns:
        part = ColumnParts(reader, start, end, batch.rows)
        field, _ = schema.accepted.get(part.name, (None, None))
        if field is not None:
            found[field.name] = _decode_column(reader, part, schema, field, batch.there)
        elif reader.options.unknown == "keep" or schema.document_type.model_config.get("extra") == "allow":
            unknown[part.name] = _any_values(reader, part)
        elif reader.options.unknown == "error":
            raise DecodeError(f"{schema.name} has no field {part.name[:60]!r}.")
    reader.charge(64 * batch.rows * (len(schema.fields) - len(found)))
    for field in schema.fields:
        if field.name not in found:
            found[field.name] = _missing(schema, field, batch.rows)
    made = {field.name: found[field.name] for field in schema.fields}
    extra_states = _decode_extra_states(reader, batch, schema, span) if batch.extra_states else None
    if unknown:
        extra_states = _with_unknown(schema, extra_states, unknown, batch.rows)
    columns = Columns(schema, made, batch.rows, batch.there, extra_states)
    if schema.checks_rows or batch.extra_states:
        _check_rows(columns)
    return columns


def _missing(schema: Schema, field: Field, rows: int) -> Column:
    try:
        return default_column(schema, field, rows)
    except ColumnError as error:
        why = "it has no default" if field.required else "its default is made from other fields"
        raise DecodeError(f"{schema.name}.{field.name}: the bytes do not hold it, and {why}.") from error


def _check_rows(columns: Columns) -> None:
    """Let pydantic look at whole documents."""
    for document in columns.iter_documents():
        if document is not None:
            accepted = type(document).document_schema().accepted
            content = {accepted[name][1]: value for name, value in document.__dict__.items() if name in accepted}
            extra = document.__pydantic_extra__ if document.model_config.get("extra") == "allow" else None
            validated(type(document), {**content, **(extra or {})})


# --- columns


def _decode_column(reader: Reader, part: ColumnParts, schema: Schema, field: Field, there: Validity) -> Column:
    where = f"{schema.name}.{part.name}"
    decode = _FORMS.get(part.form)
    if decode is None:
        raise DecodeError(f"{where}: the column is empty, or of a form that this version does not know.")
    reader.descend()
    try:
        if part.form != 8 and field.kind in (FieldKind.ANY, FieldKind.UNION):  # it takes what any other field had
            column: Column = ObjectColumn(field, _values_of_form(reader, part))
        else:
            column = decode(reader, part, field)
        _check_length(column, part)
        _check_nulls(column, field, there)
        column = _checked(column, schema, field, there)
    except (DecodeError, ColumnError, TensorError) as error:
        raise DecodeError(f"{where}: {error}") from error
    reader.depth -= 1
    return column


def _check_length(values: Any, part: ColumnParts) -> None:
    if len(values) != part.rows:
        raise DecodeError(f"{len(values)} values in a batch of {part.rows} rows.")


def _check_nulls(column: Column, field: Field, there: Validity) -> None:
    """A field that takes no None has a value in every row that stands for a document."""
    if field.nullable or field.kind in (FieldKind.ANY, FieldKind.UNION):
        return
    if column.validity is None and (isinstance(column, PackedColumn) or not isinstance(column, ObjectColumn)):
        return
    missing = ~column.valid_rows() & (True if there is None else there)
    if missing.any():
        raise DecodeError(f"row {int(np.flatnonzero(missing)[0])} has no value, and the field takes no None.")


def _checked(column: Column, schema: Schema, field: Field, there: Validity) -> Column:
    """The column with its values as pydantic takes them, where the form alone does not say that they are good."""
    objects = isinstance(column, ObjectColumn) and not isinstance(column, PackedColumn)
    if not objects and not (field.constrained or _is_special(field)):
        return column
    rows = there if there is None or not there.all() else None
    path = f"{schema.name}.{field.name}"
    values = validate_values(schema, field, column.values(), path, rows, "ignore", stored=True)
    return ObjectColumn(field, values) if isinstance(column, ObjectColumn) else column


def _is_special(field: Field) -> bool:
    """Whether values are of a class that was made from the plain one, and may refuse some of its values."""
    plain = field.type in _PLAIN or field.wrapper is not None
    return field.kind in (FieldKind.TEXT, FieldKind.BYTES, FieldKind.SCALAR) and not plain


_PLAIN = (str, bytes, bool, int, float, complex)


def _documents(reader: Reader, part: ColumnParts, field: Field) -> Column:
    if field.kind is not FieldKind.DOCUMENT:
        raise DecodeError(f"the bytes hold a column of documents, but the field is {field}.")
    return DocumentColumn(field, decode_columns(reader, part.start, part.end, field.document_type, gaps=True))


def _arrays(reader: Reader, part: ColumnParts, field: Field) -> Column:
    if field.kind is not FieldKind.DOCUMENTS:
        raise DecodeError(f"the bytes hold a column of arrays, but the field is {field}.")
    start, end, offsets = _nested_parts(reader, part)
    flat = decode_columns(reader, start, end, field.document_type)
    return DocumentsColumn(field, flat, read_offsets(reader.buffer(offsets), part.rows, len(flat)), part.validity)


def _nested_parts(reader: Reader, part: ColumnParts) -> tuple[int, int, int]:
    start = end = offsets = 0
    for number, kind, a, b in fields(reader.data, part.start, part.end):
        if kind == DELIMITED and number == 1:
            start, end = a, b
        elif kind == VARINT and number == 2:
            offsets = a
    return start, end, offsets


_FORMS: dict[int, Callable[[Reader, ColumnParts, Field], Column]] = {
    3: tensor_form,
    4: scalars_form,
    5: ragged_form,
    6: text_form,
    7: blobs_form,
    8: objects_form,
    9: _documents,
    10: _arrays,
}


# --- what rows hold beyond their class


def _decode_extra_states(
    reader: Reader, batch: _Batch, schema: Schema, span: tuple[int, int]
) -> list[ExtraState | None] | None:
    rows = [_decode_extra_state(reader, a, b, schema) if a < b else None for a, b in _spans(reader, span)]
    if len(rows) != batch.rows:
        raise DecodeError(f"{len(rows)} extra_states in a batch of {batch.rows} rows.")
    return rows


def _decode_extra_state(reader: Reader, start: int, end: int, schema: Schema) -> ExtraState:
    _, document_type, content, unknown = decode_fields(reader, start, end, schema.document_type)
    known = document_type.document_schema().by_name
    values = {name: value for name, value in content.items() if name not in schema.by_name}
    for name in known.keys() - values.keys() - schema.by_name.keys():
        values[name] = _missing(document_type.document_schema(), known[name], 1).values()[0]
    keeps = reader.options.unknown == "keep" or document_type.model_config.get("extra") == "allow"
    if unknown and not keeps and reader.options.unknown == "error":
        raise DecodeError(f"{document_type.__name__} has no field {next(iter(unknown))[:60]!r}.")
    allows = document_type.model_config.get("extra") == "allow"
    return ExtraState(document_type, values, unknown if keeps and (unknown or allows) else None, None)


def _with_unknown(
    schema: Schema, extra_states: list[ExtraState | None] | None, unknown: dict[str, list[Any]], rows: int
) -> list[ExtraState | None]:
    plain = ExtraState(schema.document_type, {}, None, None)
    before = [row or plain for row in extra_states or [None] * rows]
    names = tuple(unknown)
    extras = [dict(zip(names, values, strict=True)) for values in zip(*unknown.values(), strict=True)]
    return [row._replace(extra={**(row.extra or {}), **extra}) for row, extra in zip(before, extras, strict=True)]


# --- classes that are not loaded


def _dynamic_documents(reader: Reader, batch: _Batch, span: tuple[int, int]) -> list[Any]:
    names: list[str] = []
    columns: list[list[Any]] = []
    for start, end in batch.columns:
        part = ColumnParts(reader, start, end, batch.rows)
        names.append(part.name)
        columns.append(_any_values(reader, part))
    reader.charge((700 + 80 * len(names)) * batch.rows)
    rows = zip(*columns, strict=True) if columns else iter([()] * batch.rows)
    contents = [(batch.type_name, dict(zip(names, values, strict=True))) for values in rows]
    for row, (a, b) in enumerate(_spans(reader, span) if batch.extra_states else ()):
        if a < b and row < len(contents):
            type_name, _, known, more = decode_fields(reader, a, b, None)
            contents[row] = (type_name, {**contents[row][1], **known, **more})
    there = [True] * batch.rows if batch.there is None else batch.there.tolist()
    return [
        _any_document(reader, *content) if is_there else None for content, is_there in zip(contents, there, strict=True)
    ]


def _any_document(reader: Reader, type_name: str, content: dict[str, Any]) -> Any:
    """A document of the class of that name, which may be loaded."""
    found = _class_registry.find(type_name, None, reader.options.types)
    if found is None:
        return _class_registry.make_dynamic(type_name, content)
    accepted = found.document_schema().accepted
    known = {accepted[name][1]: match(accepted[name][0], content[name]) for name in content if name in accepted}
    return build_document(found, known, {name: content[name] for name in content if name not in accepted}, reader)


def _all_loaded(reader: Reader, span: tuple[int, int]) -> bool:
    """Whether the classes of all rows that hold more than the columns are loaded."""
    names = {
        read_text(reader.data, a, b)
        for start, end in _spans(reader, span)
        for number, kind, a, b in fields(reader.data, start, end)
        if number == 2 and kind == DELIMITED
    }
    return all(_class_registry.find(name, None, reader.options.types) is not None for name in names)


def _spans(reader: Reader, span: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Where the extra_states of a batch message lie."""
    return ((a, b) for number, kind, a, b in fields(reader.data, *span) if number == 6 and kind == DELIMITED)


def _any_values(reader: Reader, part: ColumnParts) -> list[Any]:
    """The values of a column that no field describes."""
    reader.descend()
    try:
        values = _values_of_form(reader, part)
        _check_length(values, part)
    except DecodeError as error:
        raise DecodeError(f"{part.name[:60]}: {error}") from error
    reader.depth -= 1
    return values


def _values_of_form(reader: Reader, part: ColumnParts) -> list[Any]:
    if part.form == 9:
        return decode_rows(reader, part.start, part.end, None, gaps=True)
    if part.form == 10:
        return _any_arrays(reader, part)
    if part.form not in _FORMS:
        raise DecodeError("the column is empty, or of a form that this version does not know.")
    kind, tp = _FIELDS[part.form]
    if part.form == 4:
        data = decode_tensor(reader, part.start, part.end)
        name = describe(data)
        tp = next(
            (known for known, word in ((bool, "bool"), (complex, "complex"), (float, "float")) if word in name), int
        )
    reader.charge(_ROW_COSTS.get(part.form, 8) * part.rows)
    return _FORMS[part.form](reader, part, Field(part.name, kind, tp, nullable=True)).values()


_FIELDS: dict[int, tuple[FieldKind, Any]] = {
    3: (FieldKind.TENSOR, AnyTensor),
    4: (FieldKind.SCALAR, int),
    5: (FieldKind.TENSOR, AnyTensor),
    6: (FieldKind.TEXT, str),
    7: (FieldKind.BYTES, bytes),
    8: (FieldKind.ANY, Any),
}


_ROW_COSTS = {3: 120, 4: 40, 5: 120}
"""What a value takes in memory beyond its bytes; the other forms count for themselves."""


def _any_arrays(reader: Reader, part: ColumnParts) -> list[Any]:
    start, end, number = _nested_parts(reader, part)
    documents = decode_rows(reader, start, end, None)
    offsets = read_offsets(reader.buffer(number), part.rows, len(documents)).tolist()
    name = _Batch(reader, start, end).type_name
    document_type = _class_registry.find(name, None, reader.options.types)
    arrays = [_class_registry.make_array(document_type, documents[a:b], name) for a, b in pairwise(offsets)]
    if part.validity is None:
        return arrays
    return [array if there else None for array, there in zip(arrays, part.validity.tolist(), strict=True)]
