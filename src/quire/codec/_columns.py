"""Batches as messages: names and types once, and one contiguous buffer for each column.

A column has one of the forms of `ColumnField`: a tensor, a vector of numbers, ragged tensors, texts, blobs, nested
documents, nested arrays, or objects, which are encoded one by one. `_encode_column` chooses the form by the class of
the column. Documents are stacked first, but their tensors and texts stay lists (`ListColumn`) and are copied once, into
the buffer of the message. Decoders are in the table `_FORMS`; a column of another form than its field expects is an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire import _class_registry
from quire._class_registry import class_name
from quire._protocols import DocumentLike
from quire.codec._context import Reader, Writer
from quire.codec._messages import (
    VERSION_FIELD,
    BatchField,
    ColumnField,
    DocumentField,
    NestedField,
    RaggedField,
    StringsField,
    TensorField,
    ValuesField,
    check_version,
)
from quire.codec._tensors import (
    MAX_AXES,
    MIN_BUFFER_SIZE,
    TensorParts,
    decode_lent_tensor,
    decode_tensor,
    decode_tensor_parts,
    encode_elements,
    encode_lent_tensor,
    encode_tensor,
    encode_tensor_head,
    to_wire_array,
)
from quire.codec._values import (
    EXACT_INTEGERS,
    ambiguous_fields,
    build_document,
    check_exact,
    check_kind,
    check_unions,
    decode_fields,
    decode_value,
    encode_fields,
    encode_items,
    validate_document,
)
from quire.codec._wire import (
    DELIMITED,
    VARINT,
    encode_delimited,
    encode_text,
    encode_uint,
    iter_fields,
    read_text,
)
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    DocumentsColumn,
    ExtraState,
    LentColumn,
    ListColumn,
    ObjectColumn,
    PackedColumn,
    RaggedColumn,
    ScalarColumn,
    StackOptions,
    TensorColumn,
    Validity,
    default_column,
    pack,
    stack,
    validate_values,
    validity_of,
)
from quire.errors import ColumnError, DecodeError, EncodeError, TensorError
from quire.schema import Field, FieldKind, Schema
from quire.tensors import AnyTensor, Framework, describe, format_shape, framework_of, framework_of_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INT64 = np.dtype("<i8")
_AS_LISTS = StackOptions(lists=True)
_MIN_GATHERED_SIZE = 1 << 14
"""Rows of at least this many bytes are not stacked first: the buffer is joined from the rows themselves."""


# --- encoding a batch


def encode_columns(columns: Columns, writer: Writer) -> bytes:
    """Encode a batch."""
    schema = columns.schema
    ambiguous = ambiguous_fields(schema)
    parts = [
        VERSION_FIELD
        + encode_text(BatchField.TYPE, class_name(schema.document_type))
        + encode_uint(BatchField.ROWS, len(columns))
        + encode_uint(BatchField.VALIDITY, _add_validity(columns.validity, writer))
    ]
    for name, column in columns.columns.items():
        try:
            if column.field in ambiguous:
                check_unions(schema, column.field, column.values(), allow_pickle=writer.allow_pickle)
            content = encode_text(ColumnField.NAME, name) + _encode_column(column, writer)
        except EncodeError as error:
            raise EncodeError(f"{schema.name}.{name}: {error}") from error
        parts.append(encode_delimited(BatchField.COLUMNS, content))
    if columns.extra_states is not None:
        states = [b"" if row is None else _encode_extra_state(schema, row, writer) for row in columns.extra_states]
        parts += [encode_delimited(BatchField.REMAINDERS, state) for state in states] if any(states) else []
    return b"".join(parts)


def encode_rows(schema: Schema, documents: Sequence[DocumentLike], writer: Writer) -> bytes:
    """Encode documents as a batch."""
    return encode_columns(stack(schema, documents, _AS_LISTS), writer)


def _encode_extra_state(schema: Schema, row: ExtraState, writer: Writer) -> bytes:
    """Encode what a row holds beyond the columns, except private attributes; nothing for a plain row."""
    cls = row.document_type
    declared = (row.private or {}).get("_declared") if isinstance(vars(cls).get("__quire_name__"), property) else None
    if cls is schema.document_type and not row.extra and not declared:
        return b""
    content = {name: row.fields[name] for name in row.fields if name in cls.model_fields}  # no cached properties
    return encode_fields(declared or class_name(cls), {**content, **(row.extra or {})}, writer)


# --- encoding columns


def _encode_column(column: Column, writer: Writer) -> bytes:
    if isinstance(column, TensorColumn):
        form = ColumnField.SCALARS if isinstance(column, ScalarColumn) else ColumnField.TENSOR
        lent = column.peek() if isinstance(column, LentColumn) else None
        if lent is None:
            content = encode_tensor(column.data, writer)
        else:
            content = encode_lent_tensor(lent, column.framework, writer)
        shapes = 0 if column.shapes is None else _add_int64(column.shapes, writer)
        form_content = _encode_form(form, content, column.validity, writer)
        return form_content + encode_uint(ColumnField.SHAPES, shapes)
    if isinstance(column, RaggedColumn):
        return _encode_ragged(encode_tensor(column.flat, writer), column.shapes, column.validity, writer)
    if isinstance(column, DocumentColumn):
        return encode_delimited(ColumnField.DOCUMENTS, encode_columns(column.columns, writer))
    if isinstance(column, DocumentsColumn):
        return _encode_arrays(encode_columns(column.flat, writer), column.offsets, column.validity, writer)
    if isinstance(column, PackedColumn):
        form = _STRING_FORMS[column.field.kind].form
        return _encode_strings(form, *column.packed(), column.validity, writer)
    if isinstance(column, ListColumn) and column.field.kind is FieldKind.TENSOR:
        return _encode_tensors(column.field, column.values(), writer)
    return _encode_objects(column.field, column.values(), writer)


def _encode_form(form: int, content: bytes, validity: Validity, writer: Writer) -> bytes:
    return encode_uint(ColumnField.VALIDITY, _add_validity(validity, writer)) + encode_delimited(form, content)


def _add_validity(validity: Validity, writer: Writer) -> int:
    return 0 if validity is None else writer.add(np.ascontiguousarray(validity, np.uint8))


def _add_int64(numbers: NDArray[Any], writer: Writer) -> int:
    return writer.add(np.ascontiguousarray(numbers, _INT64))


def _encode_ragged(flat: bytes, shapes: Sequence[tuple[int, ...]], validity: Validity, writer: Writer) -> bytes:
    """Encode tensors of mixed shapes: all elements in one vector, the rank of each row, and the sizes of all axes."""
    ranks = np.fromiter(map(len, shapes), np.uint8, len(shapes))
    sizes = np.array([size for shape in shapes for size in shape], _INT64)
    content = encode_delimited(RaggedField.FLAT, flat) + encode_uint(RaggedField.RANKS, writer.add(ranks))
    return _encode_form(
        ColumnField.RAGGED, content + encode_uint(RaggedField.SIZES, writer.add(sizes)), validity, writer
    )


def _encode_arrays(flat: bytes, offsets: NDArray[np.int64], validity: Validity, writer: Writer) -> bytes:
    """Encode arrays of documents: all documents in one batch, and where the array of each row starts and ends."""
    content = encode_delimited(NestedField.FLAT, flat) + encode_uint(NestedField.OFFSETS, _add_int64(offsets, writer))
    return _encode_form(ColumnField.ARRAYS, content, validity, writer)


def _encode_strings(form: int, data: Any, offsets: NDArray[np.int64], validity: Validity, writer: Writer) -> bytes:
    """Encode texts or blobs: their bytes in one buffer, and where each of them starts and ends."""
    content = encode_uint(StringsField.DATA, writer.add(data))
    content += encode_uint(StringsField.OFFSETS, _add_int64(offsets, writer))
    return _encode_form(form, content, validity, writer)


# --- encoding the values of documents, by the kind of their field


class _StringForm(NamedTuple):
    form: int
    type: type[Any]
    empty: Any


_STRING_FORMS = {
    FieldKind.TEXT: _StringForm(ColumnField.TEXT, str, ""),
    FieldKind.BYTES: _StringForm(ColumnField.BLOBS, bytes, b""),
}


def _encode_objects(field: Field, items: list[Any], writer: Writer) -> bytes:
    """Encode values one by one, except texts and blobs, which share a buffer."""
    strings = _STRING_FORMS.get(field.kind)
    types = set(map(type, items))
    if strings is None or not types - {field.wrapper} <= {strings.type, type(None)}:
        return encode_delimited(ColumnField.OBJECTS, encode_items(items, writer))
    validity = None
    if type(None) in types:
        validity = validity_of(items)
        items = [strings.empty if item is None else item for item in items]
    try:
        data, offsets = pack(items)
    except UnicodeEncodeError as error:
        raise EncodeError("half a character (a lone surrogate) has no form on the wire.") from error
    return _encode_strings(strings.form, data, offsets, validity, writer)


def _encode_tensors(field: Field, values: list[Any], writer: Writer) -> bytes:
    validity = validity_of(values)
    present = values if validity is None else [value for value in values if value is not None]
    framework = _common_framework(field, present)
    if framework is None:
        return _encode_objects(field, values, writer)
    shapes = [framework.shape(value) for value in present]
    rows = _to_arrays(framework, present)
    first = shapes[0]
    if any(shape != first for shape in shapes):
        rows = [row.reshape(-1) for row in rows]
        head = encode_tensor_head(framework, present[0], (sum(map(len, rows)),))
        if validity is not None:
            shapes_left = iter(shapes)
            shapes = [next(shapes_left) if valid else (0,) for valid in validity.tolist()]
        return _encode_ragged(head + _encode_row_elements(rows, writer), shapes, validity, writer)
    head = encode_tensor_head(framework, present[0], (len(values), *first))
    if validity is not None:
        rows_left, empty = iter(rows), np.zeros(first, rows[0].dtype)
        rows = [next(rows_left) if valid else empty for valid in validity.tolist()]
    marks = encode_uint(ColumnField.VALIDITY, _add_validity(validity, writer))
    return marks + encode_delimited(ColumnField.TENSOR, head + _encode_row_elements(rows, writer))


def _common_framework(field: Field, present: list[Any]) -> Framework | None:
    """Return the framework of tensors that can be one column; None if they must be encoded one by one."""
    types = set(map(type, present))
    frameworks = set(map(framework_of_type, types))
    framework = frameworks.pop() if len(frameworks) == 1 else None
    if framework is None or len({value.dtype for value in present}) > 1:
        return None
    wrapped = any(framework.unwrap(value) is not value for value in present[:1]) or len(types) > 1
    if wrapped and field.type.framework is None:  # a field of any tensor keeps the wrapper
        return None
    for value in present:
        if framework.is_sparse(value) or getattr(value, "requires_grad", False):
            return None
    refused = framework.refuses_some or framework.refusal(present[0]) is not None
    return None if refused or _to_arrays(framework, present[:1])[0].dtype.kind == "O" else framework


def _to_arrays(framework: Framework, present: list[Any]) -> list[NDArray[Any]]:
    try:
        return [framework.to_numpy(value) for value in present]
    except (TypeError, RuntimeError, TensorError) as error:
        raise EncodeError(f"a {framework.name} tensor cannot be written: {error}") from error


def _encode_row_elements(rows: list[NDArray[Any]], writer: Writer) -> bytes:
    """Encode the elements of rows of one dtype: stacked if they are small, else as one buffer of many pieces."""
    if len(rows) == 1 or rows[0].nbytes < _MIN_GATHERED_SIZE or sum(row.nbytes for row in rows) < MIN_BUFFER_SIZE:
        return encode_elements(np.concatenate([row.reshape(-1) for row in rows]), writer)
    pieces = [to_wire_array(row).reshape(-1).view(np.uint8) for row in rows]
    return encode_uint(TensorField.BUFFER, writer.add(pieces))


# --- decoding a batch


class _BatchParts:
    """The fields of a batch message; `columns` are positions in the message."""

    __slots__ = ("columns", "has_extra_states", "rows", "span", "type_name", "validity")

    def __init__(self, reader: Reader, start: int, end: int) -> None:
        self.type_name, self.rows, validity = "", 0, 0
        self.span = start, end
        self.columns: list[tuple[int, int]] = []
        self.has_extra_states = False
        for number, wire_type, a, b in iter_fields(reader.data, start, end):
            if wire_type == VARINT:
                if number == BatchField.VERSION:
                    check_version(a)
                elif number == BatchField.ROWS:
                    self.rows = a
                elif number == BatchField.VALIDITY:
                    validity = a
            elif number == BatchField.TYPE:
                self.type_name = read_text(reader.data, a, b)
            elif number == BatchField.COLUMNS:
                reader.charge(300)
                self.columns.append((a, b))
            elif number == BatchField.REMAINDERS:
                self.has_extra_states = True
        if self.rows >= 1 << 48:
            raise DecodeError(f"a batch cannot have {self.rows} rows.")
        reader.charge(16 * self.rows)
        self.validity = _read_validity(validity, self.rows, reader)

    def check_no_gaps(self) -> None:
        """Raise an error if a row stands for no document."""
        if self.validity is not None and not self.validity.all():
            raise DecodeError(f"row {int(np.flatnonzero(~self.validity)[0])} stands for no document.")

    def extra_state_spans(self, reader: Reader) -> Iterator[tuple[int, int]]:
        """Yield the positions of the extra states, one for each row; those of plain rows are empty."""
        for number, wire_type, a, b in iter_fields(reader.data, *self.span):
            if number == BatchField.REMAINDERS and wire_type == DELIMITED:
                yield a, b


def decode_columns(reader: Reader, start: int, end: int, document_type: type[Any], *, gaps: bool = False) -> Columns:
    """Decode a batch as columns of a class; with `gaps`, rows may stand for no document."""
    batch = _BatchParts(reader, start, end)
    if not gaps:
        batch.check_no_gaps()
    return _decode_typed_columns(reader, batch, document_type.document_schema())


def decode_rows(reader: Reader, start: int, end: int, expected: type[Any] | None, *, gaps: bool = False) -> list[Any]:
    """Decode a batch as documents of the class that it names, if that is loaded and is or extends the expected one.

    Without an expected class, documents of a class that is not loaded are dynamic. With `gaps`, documents may be None.
    """
    batch = _BatchParts(reader, start, end)
    if not gaps:
        batch.check_no_gaps()
    document_type = _class_registry.find(batch.type_name, expected, reader.options.types)
    if document_type is None or document_type.document_schema().is_open:
        return _decode_dynamic_documents(reader, batch)
    if expected is None and batch.has_extra_states and not _are_classes_loaded(reader, batch):
        return _decode_dynamic_documents(reader, batch)
    columns = _decode_typed_columns(reader, batch, document_type.document_schema())
    reader.charge(batch.rows * (200 + 100 * len(columns.columns)))
    return columns.documents()


def _decode_typed_columns(reader: Reader, batch: _BatchParts, schema: Schema) -> Columns:
    columns: dict[str, Column] = {}
    unknown: dict[str, list[Any]] = {}
    for start, end in batch.columns:
        part = _ColumnParts(reader, start, end, batch.rows)
        field, _ = schema.accepted.get(part.name, (None, None))
        if field is not None:
            columns[field.name] = _decode_column(reader, part, schema, field, batch.validity)
        elif reader.options.unknown == "keep" or schema.document_type.model_config.get("extra") == "allow":
            unknown[part.name] = _decode_unknown_column(reader, part)
        elif reader.options.unknown == "error":
            raise DecodeError(f"{schema.name} has no field {part.name[:60]!r}.")
    reader.charge(64 * batch.rows * (len(schema.fields) - len(columns)))
    columns = {
        field.name: columns[field.name] if field.name in columns else _default_column(schema, field, batch.rows)
        for field in schema.fields
    }
    extra_states = _decode_extra_states(reader, batch, schema) if batch.has_extra_states else None
    if unknown:
        extra_states = _add_unknown(schema, extra_states, unknown, batch.rows)
    decoded = Columns(schema, columns, batch.rows, batch.validity, extra_states)
    if schema.checks_rows or batch.has_extra_states:
        _validate_rows(decoded)
    return decoded


def _default_column(schema: Schema, field: Field, rows: int) -> Column:
    try:
        return default_column(schema, field, rows)
    except ColumnError as error:
        why = "it has no default" if field.required else "its default is made from other fields"
        raise DecodeError(f"{schema.name}.{field.name}: the bytes do not hold it, and {why}.") from error


def _validate_rows(columns: Columns) -> None:
    """Validate whole documents, for classes with validators of their own and rows with more than the columns."""
    for document in columns.iter_documents():
        if document is not None:
            accepted = type(document).document_schema().accepted
            content = {accepted[name][1]: value for name, value in document.__dict__.items() if name in accepted}
            extra = document.__pydantic_extra__ if document.model_config.get("extra") == "allow" else None
            validate_document(type(document), {**content, **(extra or {})})


# --- decoding extra states


def _decode_extra_states(reader: Reader, batch: _BatchParts, schema: Schema) -> list[ExtraState | None] | None:
    rows = [_decode_extra_state(reader, a, b, schema) if a < b else None for a, b in batch.extra_state_spans(reader)]
    if len(rows) != batch.rows:
        raise DecodeError(f"{len(rows)} extra states in a batch of {batch.rows} rows.")
    return rows


def _decode_extra_state(reader: Reader, start: int, end: int, schema: Schema) -> ExtraState:
    _, document_type, content, unknown = decode_fields(reader, start, end, schema.document_type)
    row_schema = document_type.document_schema()
    values = {name: value for name, value in content.items() if name not in schema.by_name}
    for name in row_schema.by_name.keys() - values.keys() - schema.by_name.keys():
        values[name] = _default_column(row_schema, row_schema.by_name[name], 1).values()[0]
    allows = document_type.model_config.get("extra") == "allow"
    keeps = allows or reader.options.unknown == "keep"
    if unknown and not keeps and reader.options.unknown == "error":
        raise DecodeError(f"{document_type.__name__} has no field {next(iter(unknown))[:60]!r}.")
    return ExtraState(document_type, values, unknown if keeps and (unknown or allows) else None, None)


def _add_unknown(
    schema: Schema, extra_states: list[ExtraState | None] | None, unknown: dict[str, list[Any]], rows: int
) -> list[ExtraState | None]:
    """Add the values of unknown columns to the extra fields of the rows."""
    plain = ExtraState(schema.document_type, {}, None, None)
    states = [row or plain for row in extra_states or [None] * rows]
    extras = [dict(zip(unknown, values, strict=True)) for values in zip(*unknown.values(), strict=True)]
    return [row._replace(extra={**(row.extra or {}), **extra}) for row, extra in zip(states, extras, strict=True)]


# --- decoding documents of classes that are not loaded


def _decode_dynamic_documents(reader: Reader, batch: _BatchParts) -> list[Any]:
    names: list[str] = []
    columns: list[list[Any]] = []
    for start, end in batch.columns:
        part = _ColumnParts(reader, start, end, batch.rows)
        names.append(part.name)
        columns.append(_decode_unknown_column(reader, part))
    reader.charge((700 + 80 * len(names)) * batch.rows)
    rows = zip(*columns, strict=True) if columns else iter([()] * batch.rows)
    contents = [(batch.type_name, dict(zip(names, values, strict=True))) for values in rows]
    for row, (a, b) in enumerate(batch.extra_state_spans(reader) if batch.has_extra_states else ()):
        if a < b and row < len(contents):
            type_name, _, known, more = decode_fields(reader, a, b, None)
            contents[row] = (type_name, {**contents[row][1], **known, **more})
    valid = [True] * batch.rows if batch.validity is None else batch.validity.tolist()
    return [
        _build_any_document(reader, *content) if is_valid else None
        for content, is_valid in zip(contents, valid, strict=True)
    ]


def _build_any_document(reader: Reader, type_name: str, content: dict[str, Any]) -> Any:
    """Create a document of the class of that name, if it is loaded, or else a dynamic one."""
    document_type = _class_registry.find(type_name, None, reader.options.types)
    if document_type is None:
        return _class_registry.make_dynamic(type_name, content)
    accepted = document_type.document_schema().accepted
    known = {accepted[name][1]: check_kind(accepted[name][0], content[name]) for name in content if name in accepted}
    unknown = {name: content[name] for name in content if name not in accepted}
    return build_document(document_type, known, unknown, reader)


def _are_classes_loaded(reader: Reader, batch: _BatchParts) -> bool:
    """Return whether the classes of all rows that hold more than the columns are loaded."""
    names = {
        read_text(reader.data, a, b)
        for start, end in batch.extra_state_spans(reader)
        for number, wire_type, a, b in iter_fields(reader.data, start, end)
        if number == DocumentField.TYPE and wire_type == DELIMITED
    }
    return all(_class_registry.find(name, None, reader.options.types) is not None for name in names)


def _decode_unknown_column(reader: Reader, part: _ColumnParts) -> list[Any]:
    """Decode the values of a column that no field describes."""
    reader.descend()
    try:
        values = _decode_any_values(reader, part)
        part.check_length(values)
    except DecodeError as error:
        raise DecodeError(f"{part.name[:60]}: {error}") from error
    reader.depth -= 1
    return values


def _decode_any_values(reader: Reader, part: _ColumnParts) -> list[Any]:
    """Decode values by the form of their column alone."""
    if part.form == ColumnField.DOCUMENTS:
        return decode_rows(reader, part.start, part.end, None, gaps=True)
    if part.form == ColumnField.ARRAYS:
        return _decode_any_arrays(reader, part)
    form = _FORMS.get(part.form)
    if form is None:
        raise DecodeError("the column is empty, or of a form that this version does not know.")
    tp = form.type
    if part.form == ColumnField.SCALARS:
        dtype = describe(decode_tensor(reader, part.start, part.end))
        named_types = ((bool, "bool"), (complex, "complex"), (float, "float"))
        tp = next((number for number, name in named_types if name in dtype), int)
    reader.charge(form.row_size * part.rows)
    return form.decode(reader, part, Field(part.name, form.kind, tp, nullable=True)).values()


def _decode_any_arrays(reader: Reader, part: _ColumnParts) -> list[Any]:
    start, end, offsets_buffer = _read_nested(reader, part)
    documents = decode_rows(reader, start, end, None)
    offsets = _read_offsets(reader.buffer(offsets_buffer), part.rows, len(documents)).tolist()
    name = _BatchParts(reader, start, end).type_name
    document_type = _class_registry.find(name, None, reader.options.types)
    arrays = [_class_registry.make_array(document_type, documents[a:b], name) for a, b in pairwise(offsets)]
    if part.validity is None:
        return arrays
    return [array if valid else None for array, valid in zip(arrays, part.validity.tolist(), strict=True)]


# --- decoding columns


class _ColumnParts:
    """The fields of a column message; `start` and `end` are the position of the content of its form."""

    __slots__ = ("end", "form", "name", "rows", "shapes", "start", "validity")

    def __init__(self, reader: Reader, start: int, end: int, rows: int) -> None:
        self.name, self.form, self.shapes, self.rows = "", 0, 0, rows
        self.start = self.end = validity = 0
        for number, wire_type, a, b in iter_fields(reader.data, start, end):
            if wire_type == DELIMITED and number == ColumnField.NAME:
                self.name = read_text(reader.data, a, b)
            elif wire_type == DELIMITED and ColumnField.TENSOR <= number <= ColumnField.ARRAYS:
                self.form, self.start, self.end = number, a, b
            elif wire_type == VARINT and number == ColumnField.VALIDITY:
                validity = a
            elif wire_type == VARINT and number == ColumnField.SHAPES:
                self.shapes = a
        self.validity = _read_validity(validity, rows, reader)

    def check_length(self, values: Column | list[Any]) -> None:
        """Raise an error if a column has not one value for each row."""
        if len(values) != self.rows:
            raise DecodeError(f"{len(values)} values in a batch of {self.rows} rows.")


def _decode_column(reader: Reader, part: _ColumnParts, schema: Schema, field: Field, rows: Validity) -> Column:
    """Decode a column for a field; `rows` are the rows that stand for a document."""
    where = f"{schema.name}.{part.name}"
    form = _FORMS.get(part.form)
    if form is None:
        raise DecodeError(f"{where}: the column is empty, or of a form that this version does not know.")
    reader.descend()
    try:
        if part.form != ColumnField.OBJECTS and field.kind in (FieldKind.ANY, FieldKind.UNION):
            column: Column = ObjectColumn(field, _decode_any_values(reader, part))  # values of a more specific field
        else:
            column = form.decode(reader, part, field)
        part.check_length(column)
        _check_nulls(column, field, rows)
        column = _validate_column(column, schema, field, rows)
    except (DecodeError, ColumnError, TensorError) as error:
        raise DecodeError(f"{where}: {error}") from error
    reader.depth -= 1
    return column


def _check_nulls(column: Column, field: Field, rows: Validity) -> None:
    """Raise an error if a row that stands for a document has no value in a field that does not accept None."""
    if field.nullable or field.kind in (FieldKind.ANY, FieldKind.UNION):
        return
    if column.validity is None and (isinstance(column, PackedColumn) or not isinstance(column, ObjectColumn)):
        return
    missing = ~column.valid_rows() & (True if rows is None else rows)
    if missing.any():
        raise DecodeError(f"row {int(np.flatnonzero(missing)[0])} has no value, and the field takes no None.")


_PLAIN_TYPES = (str, bytes, bool, int, float, complex)


def _validate_column(column: Column, schema: Schema, field: Field, rows: Validity) -> Column:
    """Validate the values of a column with pydantic, unless the form of the column shows that they are valid.

    A subclass of `str` or `int`, for example, may reject some of their values.
    """
    objects = isinstance(column, ObjectColumn) and not isinstance(column, PackedColumn)
    is_subclass = (
        field.kind in (FieldKind.TEXT, FieldKind.BYTES, FieldKind.SCALAR)
        and field.type not in _PLAIN_TYPES
        and field.wrapper is None
    )
    if not objects and not field.constrained and not is_subclass:
        return column
    validity = rows if rows is None or not rows.all() else None
    path = f"{schema.name}.{field.name}"
    values = validate_values(schema, field, column.values(), path, validity, "ignore", stored=True)
    return ObjectColumn(field, values) if isinstance(column, ObjectColumn) else column


# --- decoding the forms of columns


def _decode_tensor_column(reader: Reader, part: _ColumnParts, field: Field) -> Column:
    parts = TensorParts(reader, part.start, part.end)
    lent = decode_lent_tensor(reader, parts) if reader.options.lend else None
    if lent is None:
        data, framework, shape = _unwrap_tensor(decode_tensor_parts(reader, parts))
        dtype = framework.dtype(data)
    else:
        data, framework = lent
        shape, dtype = data.shape, parts.dtype
    if field.kind is not FieldKind.TENSOR or not shape or (lent is None and framework.is_sparse(data)):
        raise DecodeError(f"the bytes hold a column of tensors, but the field is {field}.")
    shapes = _read_padded_shapes(reader, part, shape) if part.shapes else None
    for row in {shape[1:]} if shapes is None else set(map(tuple, shapes.tolist())):
        if len(data) and not field.spec.fits(row, dtype):
            raise DecodeError(f"expected tensors of {field.spec}, got {dtype} {format_shape(row)}.")
    column = TensorColumn(field, data, framework, part.validity, shapes)
    return column if lent is None else LentColumn.lend(column)


def _unwrap_tensor(data: Any) -> tuple[Any, Framework, tuple[int, ...]]:
    framework = framework_of(data)
    assert framework is not None
    data = framework.unwrap(data)
    return data, framework, framework.shape(data)


def _read_padded_shapes(reader: Reader, part: _ColumnParts, shape: tuple[int, ...]) -> NDArray[np.int64]:
    sizes = _read_int64(reader.buffer(part.shapes))
    if len(sizes) != part.rows * (len(shape) - 1):
        raise DecodeError("the shapes of padded rows do not fit the column.")
    shapes = sizes.reshape(part.rows, len(shape) - 1)
    if (shapes < 0).any() or (shapes > np.array(shape[1:], np.int64)).any():
        raise DecodeError("a padded row is larger than the column.")
    return shapes


_DTYPE_KINDS = {bool: "b", int: "iu", float: "fiu", complex: "cfiu"}
"""The dtypes that a field of numbers accepts, its own first; the others are widened."""


def _decode_scalar_column(reader: Reader, part: _ColumnParts, field: Field) -> Column:
    data, framework, shape = _unwrap_tensor(decode_tensor(reader, part.start, part.end))
    kind = framework.to_numpy(data).dtype.kind
    is_scalar = field.kind is FieldKind.SCALAR
    base = next((base for base in _DTYPE_KINDS if is_scalar and issubclass(field.type, base)), None)
    if len(shape) != 1 or base is None or kind not in _DTYPE_KINDS[base]:
        raise DecodeError(f"the bytes hold a column of {framework.dtype(data)}, but the field is {field}.")
    if kind != _DTYPE_KINDS[base][0] and base in (float, complex):
        numbers = framework.to_numpy(data)
        if kind in "iu" and len(numbers) and max(int(numbers.max()), -int(numbers.min())) > EXACT_INTEGERS:
            for number in numbers.tolist():
                check_exact(number, field)
        data = framework.from_numpy(numbers.astype(np.float64 if base is float else np.complex128))
    return ScalarColumn(field, data, framework, part.validity)


def _decode_ragged_column(reader: Reader, part: _ColumnParts, field: Field) -> Column:
    start = end = ranks = sizes = 0
    for number, wire_type, a, b in iter_fields(reader.data, part.start, part.end):
        if wire_type == DELIMITED and number == RaggedField.FLAT:
            start, end = a, b
        elif wire_type == VARINT and number == RaggedField.RANKS:
            ranks = a
        elif wire_type == VARINT and number == RaggedField.SIZES:
            sizes = a
    flat, framework, shape = _unwrap_tensor(decode_tensor(reader, start, end))
    if field.kind is not FieldKind.TENSOR or len(shape) != 1 or framework.is_sparse(flat):
        raise DecodeError(f"the bytes hold a ragged column, but the field is {field}.")
    shapes = _read_ragged_shapes(reader, ranks, sizes, part.rows, shape[0])
    column = RaggedColumn(field, flat, framework, shapes, part.validity)
    dtype = framework.dtype(flat)
    for row in np.flatnonzero(column.valid_rows()).tolist():
        if not field.spec.fits(shapes[row], dtype):
            raise DecodeError(f"row {row}: expected {field.spec}, got {dtype} {format_shape(shapes[row])}.")
    return column


def _read_ragged_shapes(reader: Reader, ranks: int, sizes: int, rows: int, elements: int) -> list[tuple[int, ...]]:
    """Read the shapes of ragged rows: `sizes` has the sizes of all axes, and `ranks` how many belong to each row."""
    row_ranks = np.frombuffer(reader.buffer(ranks), np.uint8)
    all_sizes = _read_int64(reader.buffer(sizes))
    total_rank = int(row_ranks.sum(dtype=np.int64))
    if len(row_ranks) != rows or total_rank != len(all_sizes) or (row_ranks > MAX_AXES).any() or (all_sizes < 0).any():
        raise DecodeError("the shapes of ragged rows do not fit the column.")
    reader.charge(100 * rows + 40 * len(all_sizes))
    ends = [0, *np.cumsum(row_ranks, dtype=np.int64).tolist()]
    numbers = all_sizes.tolist()
    shapes = [tuple(numbers[a:b]) for a, b in pairwise(ends)]
    if sum(int(np.prod(shape, dtype=object)) for shape in shapes) != elements:
        raise DecodeError(f"the rows have other than the {elements} elements of the column.")
    return shapes


def _decode_string_column(reader: Reader, part: _ColumnParts, field: Field) -> Column:
    data, offsets = _read_strings(reader, part)
    strings = _STRING_FORMS.get(field.kind)
    if strings is None or strings.form != part.form:
        what = "texts" if part.form == ColumnField.TEXT else "blobs"
        raise DecodeError(f"the bytes hold a column of {what}, but the field is {field}.")
    if part.form == ColumnField.TEXT:
        _check_utf8(data, offsets)
    return PackedColumn.from_offsets(field, bytes(data) if reader.options.copy else data, offsets, part.validity)


def _check_utf8(data: memoryview, offsets: NDArray[np.int64]) -> None:
    """Raise an error if a text is not UTF-8.

    If the whole buffer is, then each text is, unless an offset points into a character: to a byte 10xxxxxx.
    """
    try:
        characters = len(str(data, "utf-8"))
    except UnicodeDecodeError as error:
        raise DecodeError(f"the text is not UTF-8: {error.reason}.") from error
    if characters != len(data):
        starts = np.frombuffer(data, np.uint8)[offsets[offsets < len(data)]]
        if ((starts & 0xC0) == 0x80).any():
            raise DecodeError("a text begins inside a character.")


def _read_strings(reader: Reader, part: _ColumnParts) -> tuple[memoryview, NDArray[np.int64]]:
    buffers = {
        number: a
        for number, wire_type, a, _ in iter_fields(reader.data, part.start, part.end)
        if wire_type == VARINT and number in (StringsField.DATA, StringsField.OFFSETS)
    }
    data = reader.buffer(buffers.get(StringsField.DATA, 0))
    reader.charge(2 * len(data) + 80 * part.rows)  # when the column is cut into values
    return data, _read_offsets(reader.buffer(buffers.get(StringsField.OFFSETS, 0)), part.rows, len(data))


def _decode_object_column(reader: Reader, part: _ColumnParts, field: Field) -> Column:
    budget = reader.left
    values = [
        decode_value(reader, a, b, field)
        for number, wire_type, a, b in iter_fields(reader.data, part.start, part.end)
        if wire_type == DELIMITED and number == ValuesField.VALUES
    ]
    reader.charge(24 * len(values) + (budget - reader.left))  # twice: pydantic copies lists and dicts
    return ObjectColumn(field, [value if value is None else check_kind(field, value) for value in values])


def _decode_document_column(reader: Reader, part: _ColumnParts, field: Field) -> Column:
    if field.kind is not FieldKind.DOCUMENT:
        raise DecodeError(f"the bytes hold a column of documents, but the field is {field}.")
    return DocumentColumn(field, decode_columns(reader, part.start, part.end, field.document_type, gaps=True))


def _decode_array_column(reader: Reader, part: _ColumnParts, field: Field) -> Column:
    if field.kind is not FieldKind.DOCUMENTS:
        raise DecodeError(f"the bytes hold a column of arrays, but the field is {field}.")
    start, end, offsets = _read_nested(reader, part)
    flat = decode_columns(reader, start, end, field.document_type)
    return DocumentsColumn(field, flat, _read_offsets(reader.buffer(offsets), part.rows, len(flat)), part.validity)


def _read_nested(reader: Reader, part: _ColumnParts) -> tuple[int, int, int]:
    """Return the position of the batch of a column of arrays, and the number of the buffer of its offsets."""
    start = end = offsets = 0
    for number, wire_type, a, b in iter_fields(reader.data, part.start, part.end):
        if wire_type == DELIMITED and number == NestedField.FLAT:
            start, end = a, b
        elif wire_type == VARINT and number == NestedField.OFFSETS:
            offsets = a
    return start, end, offsets


class _Form(NamedTuple):
    decode: Callable[[Reader, _ColumnParts, Field], Column]
    kind: FieldKind
    type: Any
    """The kind and the type of a field for the values of an unknown column."""
    row_size: int = 8
    """The approximate memory of a value beyond its bytes, if the decoder does not account for it."""


_FORMS: dict[int, _Form] = {
    ColumnField.TENSOR: _Form(_decode_tensor_column, FieldKind.TENSOR, AnyTensor, 120),
    ColumnField.SCALARS: _Form(_decode_scalar_column, FieldKind.SCALAR, int, 40),
    ColumnField.RAGGED: _Form(_decode_ragged_column, FieldKind.TENSOR, AnyTensor, 120),
    ColumnField.TEXT: _Form(_decode_string_column, FieldKind.TEXT, str),
    ColumnField.BLOBS: _Form(_decode_string_column, FieldKind.BYTES, bytes),
    ColumnField.OBJECTS: _Form(_decode_object_column, FieldKind.ANY, Any),
    ColumnField.DOCUMENTS: _Form(_decode_document_column, FieldKind.DOCUMENT, None),
    ColumnField.ARRAYS: _Form(_decode_array_column, FieldKind.DOCUMENTS, None),
}


# --- reading buffers of numbers


def _read_validity(number: int, rows: int, reader: Reader) -> Validity:
    """Read which rows have a value, from the buffer of that number; None if all have one."""
    if not number:
        return None
    marks = np.frombuffer(reader.buffer(number), np.uint8)
    if len(marks) != rows:
        raise DecodeError(f"{rows} rows have {len(marks)} marks of validity.")
    return marks.astype(np.bool_)


def _read_offsets(buffer: memoryview, rows: int, end: int) -> NDArray[np.int64]:
    """Read where the data of each row starts and ends: row n from `offsets[n]` to `offsets[n + 1]`.

    The offsets must start at 0, not decrease and end at the end of the data, so that every slice is within it.
    """
    if len(buffer) != 8 * (rows + 1):
        raise DecodeError(f"{rows} rows have {8 * (rows + 1)} bytes of offsets, but {len(buffer)} are there.")
    offsets = _read_int64(buffer)
    if offsets[0] != 0 or offsets[-1] != end or (offsets[1:] < offsets[:-1]).any():
        raise DecodeError("the offsets of a column do not fit its data.")
    return offsets


def _read_int64(buffer: memoryview) -> NDArray[np.int64]:
    if len(buffer) % 8:
        raise DecodeError(f"{len(buffer)} bytes are no whole number of int64.")
    return np.frombuffer(buffer, _INT64).astype(np.int64)
