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
from quire.codec._context import MAX_ROWS, Reader, Writer
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
    fill_gaps,
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
        content = encode_delimited(NestedField.FLAT, encode_columns(column.flat, writer))
        content += encode_uint(NestedField.OFFSETS, _add_int64(column.offsets, writer))
        return _encode_form(ColumnField.ARRAYS, content, column.validity, writer)
    if isinstance(column, PackedColumn):
        form = _STRING_FORMS[column.field.kind].form
        return _encode_strings(form, *column.join_rows(), column.validity, writer)
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


def _encode_strings(
    form: int, data: bytes | memoryview, offsets: NDArray[np.int64], validity: Validity, writer: Writer
) -> bytes:
    """Encode texts or blobs: their bytes in one buffer, and where each of them starts and ends."""
    content = encode_uint(StringsField.DATA, writer.add(data))
    content += encode_uint(StringsField.OFFSETS, _add_int64(offsets, writer))
    return _encode_form(form, content, validity, writer)


# --- encoding columns of values


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
    # A subclass of `str` is written as an object of its own, unless the field converts every text to it (`wrapper`).
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
    """Encode tensors as one column, without stacking large ones: the message gets their memory piece by piece."""
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
            shapes = fill_gaps(validity, shapes, (0,))
        return _encode_ragged(head + _encode_row_elements(rows, writer), shapes, validity, writer)
    # A missing row takes the place of a row of zeros, so that row n starts at n times the size of a row.
    head = encode_tensor_head(framework, present[0], (len(values), *first))
    if validity is not None:
        rows = fill_gaps(validity, rows, np.zeros(first, rows[0].dtype))
    marks = encode_uint(ColumnField.VALIDITY, _add_validity(validity, writer))
    return marks + encode_delimited(ColumnField.TENSOR, head + _encode_row_elements(rows, writer))


def _common_framework(field: Field, present: list[Any]) -> Framework | None:
    """Return the framework of tensors that can be one column; None if they must be encoded one by one."""
    types = set(map(type, present))
    frameworks = set(map(framework_of_type, types))
    framework = frameworks.pop() if len(frameworks) == 1 else None
    if framework is None or len({value.dtype for value in present}) > 1:
        return None
    # One column has one class of tensors, one dtype, and neither gradients nor indices. Everything else has its own
    # message for each tensor, which keeps these properties.
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
    # The writer sends the pieces one after the other, so large rows are not copied here at all.
    pieces = [to_wire_array(row).reshape(-1).view(np.uint8) for row in rows]
    return encode_uint(TensorField.BUFFER, writer.add(pieces))


# --- decoding a batch


def decode_columns(
    reader: Reader, start: int, end: int, document_type: type[DocumentLike], *, gaps: bool = False
) -> Columns:
    """Decode a batch as columns of a class; with `gaps`, rows may stand for no document."""
    batch = _EncodedBatch(reader, start, end)
    if not gaps:
        batch.check_no_gaps()
    return batch.decode_columns(document_type.document_schema())


def decode_rows(
    reader: Reader, start: int, end: int, expected: type[DocumentLike] | None, *, gaps: bool = False
) -> list[Any]:
    """Decode a batch as documents of the class that it names, if that is loaded and is or extends the expected one.

    Without an expected class, documents of a class that is not loaded are dynamic. With `gaps`, documents may be None.
    """
    batch = _EncodedBatch(reader, start, end)
    if not gaps:
        batch.check_no_gaps()
    document_type = _class_registry.find(batch.type_name, expected, reader.options.types)
    if document_type is None or document_type.document_schema().is_open:
        return batch.decode_dynamic()
    # Rows may be of subclasses. Documents of one that is not loaded keep all values only as dynamic documents.
    if expected is None and batch.has_extra_states and not batch.are_classes_loaded():
        return batch.decode_dynamic()
    columns = batch.decode_columns(document_type.document_schema())
    reader.charge(batch.rows * (200 + 100 * len(columns.columns)))
    return columns.documents()


class _EncodedBatch:
    """A batch message, of which the columns are not decoded yet; `columns` are positions in the message."""

    __slots__ = ("columns", "has_extra_states", "reader", "rows", "span", "type_name", "validity")

    def __init__(self, reader: Reader, start: int, end: int) -> None:
        self.reader, self.span = reader, (start, end)
        self.type_name, self.rows, validity = "", 0, 0
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
        # A batch may have rows and no columns, so no buffer has to be as long as its number of rows.
        if self.rows >= MAX_ROWS:
            raise DecodeError(f"a batch cannot have {self.rows} rows.")
        reader.charge(16 * self.rows)
        self.validity = _read_validity(validity, self.rows, reader)

    def check_no_gaps(self) -> None:
        """Raise an error if a row stands for no document."""
        if self.validity is not None and not self.validity.all():
            raise DecodeError(f"row {int(np.flatnonzero(~self.validity)[0])} stands for no document.")

    def extra_state_spans(self) -> Iterator[tuple[int, int]]:
        """Yield the positions of the extra states, one for each row; those of plain rows are empty."""
        for number, wire_type, a, b in iter_fields(self.reader.data, *self.span):
            if number == BatchField.REMAINDERS and wire_type == DELIMITED:
                yield a, b

    def are_classes_loaded(self) -> bool:
        """Return whether the classes of all rows that hold more than the columns are loaded."""
        reader = self.reader
        names = {
            read_text(reader.data, a, b)
            for start, end in self.extra_state_spans()
            for number, wire_type, a, b in iter_fields(reader.data, start, end)
            if number == DocumentField.TYPE and wire_type == DELIMITED
        }
        return all(_class_registry.find(name, None, reader.options.types) is not None for name in names)

    def decode_columns(self, schema: Schema) -> Columns:
        """Decode the columns of a class; missing ones have its defaults."""
        reader, allows_extra = self.reader, schema.document_type.model_config.get("extra") == "allow"
        columns: dict[str, Column] = {}
        unknown: dict[str, list[Any]] = {}
        ignored: list[str] = []
        for start, end in self.columns:
            column = _EncodedColumn(reader, start, end, self.rows)
            field, _ = schema.accepted.get(column.name, (None, None))
            if field is not None:
                columns[field.name] = column.decode(schema, field, self.validity)
            elif reader.options.unknown == "keep" or allows_extra:
                unknown[column.name] = column.decode_values()
            elif reader.options.unknown == "error":
                raise DecodeError(f"{schema.name} has no field {column.name[:60]!r}.")
            else:
                ignored.append(column.name)
        if not columns.keys() - {"id"}:
            schema.check_related(ignored, self.type_name)
        # A column of defaults takes memory without any bytes in the message: accounted for before it is made.
        reader.charge(64 * self.rows * (len(schema.fields) - len(columns)))
        columns = {
            field.name: columns[field.name] if field.name in columns else _default_column(schema, field, self.rows)
            for field in schema.fields
        }
        decoded = Columns(schema, columns, self.rows, self.validity, self._decode_extra_states(schema, unknown))
        # Whole documents are validated if the class has validators of its own, and if rows have more than the columns.
        for document in decoded.iter_documents() if schema.checks_rows or self.has_extra_states else ():
            if document is not None:
                accepted = type(document).document_schema().accepted
                content = {accepted[name][1]: value for name, value in vars(document).items() if name in accepted}
                extra = document.__pydantic_extra__ if document.model_config.get("extra") == "allow" else None
                validate_document(type(document), {**content, **(extra or {})})
        return decoded

    def _decode_extra_states(self, schema: Schema, unknown: dict[str, list[Any]]) -> list[ExtraState | None] | None:
        """Decode what rows hold beyond the columns of a class, and add the values of unknown columns to it."""
        states: list[ExtraState | None] | None = None
        if self.has_extra_states:
            states = [self._decode_extra_state(a, b, schema) if a < b else None for a, b in self.extra_state_spans()]
            if len(states) != self.rows:
                raise DecodeError(f"{len(states)} extra states in a batch of {self.rows} rows.")
        if unknown:
            plain = ExtraState(schema.document_type, {}, None, None)
            extras = [dict(zip(unknown, values, strict=True)) for values in zip(*unknown.values(), strict=True)]
            rows = [state or plain for state in states or [None] * self.rows]
            states = [
                row._replace(extra={**(row.extra or {}), **extra}) for row, extra in zip(rows, extras, strict=True)
            ]
        return states

    def _decode_extra_state(self, start: int, end: int, schema: Schema) -> ExtraState:
        reader = self.reader
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

    def decode_dynamic(self) -> list[Any]:
        """Decode documents without a schema: of the class that each row names if it is loaded, or else dynamic ones."""
        reader = self.reader
        names: list[str] = []
        columns: list[list[Any]] = []
        for start, end in self.columns:  # one by one: a column takes more memory before it is decoded than its bytes
            column = _EncodedColumn(reader, start, end, self.rows)
            names.append(column.name)
            columns.append(column.decode_values())
        reader.charge((700 + 80 * len(names)) * self.rows)
        rows = zip(*columns, strict=True) if columns else iter([()] * self.rows)
        contents = [(self.type_name, dict(zip(names, values, strict=True))) for values in rows]
        for row, (a, b) in enumerate(self.extra_state_spans() if self.has_extra_states else ()):
            if a < b and row < len(contents):
                type_name, _, known, more = decode_fields(reader, a, b, None)
                contents[row] = (type_name, {**contents[row][1], **known, **more})
        documents: list[Any] = []
        valid = [True] * self.rows if self.validity is None else self.validity.tolist()
        for (type_name, content), is_valid in zip(contents, valid, strict=True):
            document_type = _class_registry.find(type_name, None, reader.options.types) if is_valid else None
            if not is_valid:
                documents.append(None)
            elif document_type is None:
                documents.append(_class_registry.make_dynamic(type_name, content))
            else:
                accepted = document_type.document_schema().accepted
                known = {accepted[k][1]: check_kind(accepted[k][0], v) for k, v in content.items() if k in accepted}
                unknown = {name: value for name, value in content.items() if name not in accepted}
                documents.append(build_document(document_type, known, unknown, reader, type_name))
        return documents


def _default_column(schema: Schema, field: Field, rows: int) -> Column:
    try:
        return default_column(schema, field, rows)
    except ColumnError as error:
        why = "it has no default" if field.required else "its default is made from other fields"
        raise DecodeError(f"{schema.name}.{field.name}: the bytes do not hold it, and {why}.") from error


# --- decoding columns

_PLAIN_TYPES = (str, bytes, bool, int, float, complex)
_DTYPE_KINDS = {bool: "b", int: "iu", float: "fiu", complex: "cfiu"}
"""The dtypes that a field of numbers accepts, its own first; the others are widened."""


class _EncodedColumn:
    """A column message; `start` and `end` are the position of the content of its form."""

    __slots__ = ("end", "form", "name", "reader", "rows", "shapes", "start", "validity")

    def __init__(self, reader: Reader, start: int, end: int, rows: int) -> None:
        self.reader, self.name, self.form, self.shapes, self.rows = reader, "", 0, 0, rows
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

    def decode(self, schema: Schema, field: Field, rows: Validity) -> Column:
        """Decode the column of a field; `rows` are the rows that stand for a document."""
        where = f"{schema.name}.{self.name}"
        form = _FORMS.get(self.form)
        if form is None:
            raise DecodeError(f"{where}: the column is empty, or of a form that this version does not know.")
        is_mixed = field.kind in (FieldKind.ANY, FieldKind.UNION)
        self.reader.descend()
        try:
            column: Column
            if is_mixed and self.form != ColumnField.OBJECTS:
                column = ObjectColumn(field, self._decode_by_form())  # values of a more specific field
            else:
                column = form.decode(self, field)
            self._check_length(column)
            are_objects = isinstance(column, ObjectColumn) and not isinstance(column, PackedColumn)
            if not field.nullable and not is_mixed and (are_objects or column.validity is not None):
                _check_no_missing(column, rows)
            # The other forms show that their values are valid, except for a class like `class Name(str)`, which may
            # reject some of the values that it has the form of.
            is_subclass = (
                field.kind in (FieldKind.TEXT, FieldKind.BYTES, FieldKind.SCALAR)
                and field.type not in _PLAIN_TYPES
                and field.wrapper is None
            )
            if are_objects or field.constrained or is_subclass:
                validity = rows if rows is None or not rows.all() else None
                path = f"{schema.name}.{field.name}"
                values = validate_values(schema, field, column.values(), path, validity, "ignore", stored=True)
                column = ObjectColumn(field, values) if isinstance(column, ObjectColumn) else column
        except (DecodeError, ColumnError, TensorError) as error:
            raise DecodeError(f"{where}: {error}") from error
        self.reader.depth -= 1
        return column

    def decode_values(self) -> list[Any]:
        """Decode the values of a column that no field describes."""
        self.reader.descend()
        try:
            values = self._decode_by_form()
            self._check_length(values)
        except DecodeError as error:
            raise DecodeError(f"{self.name[:60]}: {error}") from error
        self.reader.depth -= 1
        return values

    def _check_length(self, values: Column | list[Any]) -> None:
        if len(values) != self.rows:
            raise DecodeError(f"{len(values)} values in a batch of {self.rows} rows.")

    def _decode_by_form(self) -> list[Any]:
        """Decode values by the form of their column alone."""
        reader = self.reader
        if self.form == ColumnField.DOCUMENTS:
            return decode_rows(reader, self.start, self.end, None, gaps=True)
        if self.form == ColumnField.ARRAYS:
            start, end, offsets_buffer = self._read_nested()
            documents = decode_rows(reader, start, end, None)
            offsets = _read_offsets(reader.buffer(offsets_buffer), self.rows, len(documents)).tolist()
            name = _EncodedBatch(reader, start, end).type_name
            document_type = _class_registry.find(name, None, reader.options.types)
            arrays = [_class_registry.make_array(document_type, documents[a:b], name) for a, b in pairwise(offsets)]
            valid = [True] * self.rows if self.validity is None else self.validity.tolist()
            return [array if is_valid else None for array, is_valid in zip(arrays, valid, strict=True)]
        form = _FORMS.get(self.form)
        if form is None:
            raise DecodeError("the column is empty, or of a form that this version does not know.")
        tp = form.type
        # The form of numbers does not say which Python type they had: the dtype does.
        if self.form == ColumnField.SCALARS:
            dtype = describe(decode_tensor(reader, self.start, self.end))
            named_types = ((bool, "bool"), (complex, "complex"), (float, "float"))
            tp = next((number for number, name in named_types if name in dtype), int)
        reader.charge(form.row_size * self.rows)
        return form.decode(self, Field(self.name, form.kind, tp, nullable=True)).values()

    # --- the forms of columns

    def decode_tensors(self, field: Field) -> Column:
        parts = TensorParts(self.reader, self.start, self.end)
        lent = decode_lent_tensor(self.reader, parts) if self.reader.options.lend else None
        if lent is None:
            data, framework, shape = _unwrap_tensor(decode_tensor_parts(self.reader, parts))
            dtype = framework.dtype(data)
        else:
            data, framework = lent
            shape, dtype = data.shape, parts.dtype
        if field.kind is not FieldKind.TENSOR or not shape or (lent is None and framework.is_sparse(data)):
            raise DecodeError(f"the bytes hold a column of tensors, but the field is {field}.")
        shapes = None
        if self.shapes:  # the rows are padded, and these are their own shapes
            sizes = _read_int64(self.reader.buffer(self.shapes))
            if len(sizes) != self.rows * (len(shape) - 1):
                raise DecodeError("the shapes of padded rows do not fit the column.")
            shapes = sizes.reshape(self.rows, len(shape) - 1)
            if (shapes < 0).any() or (shapes > np.array(shape[1:], np.int64)).any():
                raise DecodeError("a padded row is larger than the column.")
        for row in {shape[1:]} if shapes is None else set(map(tuple, shapes.tolist())):
            if len(data) and not field.spec.fits(row, dtype):
                raise DecodeError(f"expected tensors of {field.spec}, got {dtype} {format_shape(row)}.")
        column = TensorColumn(field, data, framework, self.validity, shapes)
        return column if lent is None else LentColumn.lend(column)

    def decode_scalars(self, field: Field) -> Column:
        data, framework, shape = _unwrap_tensor(decode_tensor(self.reader, self.start, self.end))
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
        return ScalarColumn(field, data, framework, self.validity)

    def decode_ragged(self, field: Field) -> Column:
        start = end = ranks_buffer = sizes_buffer = 0
        for number, wire_type, a, b in iter_fields(self.reader.data, self.start, self.end):
            if wire_type == DELIMITED and number == RaggedField.FLAT:
                start, end = a, b
            elif wire_type == VARINT and number == RaggedField.RANKS:
                ranks_buffer = a
            elif wire_type == VARINT and number == RaggedField.SIZES:
                sizes_buffer = a
        flat, framework, shape = _unwrap_tensor(decode_tensor(self.reader, start, end))
        if field.kind is not FieldKind.TENSOR or len(shape) != 1 or framework.is_sparse(flat):
            raise DecodeError(f"the bytes hold a ragged column, but the field is {field}.")
        # `sizes` has the sizes of all axes of all rows, and `ranks` says how many of them belong to each row.
        ranks = np.frombuffer(self.reader.buffer(ranks_buffer), np.uint8)
        sizes = _read_int64(self.reader.buffer(sizes_buffer))
        total_rank = int(ranks.sum(dtype=np.int64))
        if len(ranks) != self.rows or total_rank != len(sizes) or (ranks > MAX_AXES).any() or (sizes < 0).any():
            raise DecodeError("the shapes of ragged rows do not fit the column.")
        self.reader.charge(100 * self.rows + 40 * len(sizes))
        ends, numbers = [0, *np.cumsum(ranks, dtype=np.int64).tolist()], sizes.tolist()
        shapes = [tuple(numbers[a:b]) for a, b in pairwise(ends)]
        if sum(int(np.prod(row, dtype=object)) for row in shapes) != shape[0]:
            raise DecodeError(f"the rows have other than the {shape[0]} elements of the column.")
        column = RaggedColumn(field, flat, framework, shapes, self.validity)
        dtype = framework.dtype(flat)
        for row in np.flatnonzero(column.valid_rows()).tolist():
            if not field.spec.fits(shapes[row], dtype):
                raise DecodeError(f"row {row}: expected {field.spec}, got {dtype} {format_shape(shapes[row])}.")
        return column

    def decode_strings(self, field: Field) -> Column:
        reader = self.reader
        buffers = {
            number: a
            for number, wire_type, a, _ in iter_fields(reader.data, self.start, self.end)
            if wire_type == VARINT and number in (StringsField.DATA, StringsField.OFFSETS)
        }
        data = reader.buffer(buffers.get(StringsField.DATA, 0))
        reader.charge(2 * len(data) + 80 * self.rows)  # when the column is cut into values
        offsets = _read_offsets(reader.buffer(buffers.get(StringsField.OFFSETS, 0)), self.rows, len(data))
        strings = _STRING_FORMS.get(field.kind)
        if strings is None or strings.form != self.form:
            what = "texts" if self.form == ColumnField.TEXT else "blobs"
            raise DecodeError(f"the bytes hold a column of {what}, but the field is {field}.")
        if self.form == ColumnField.TEXT:
            # If the whole buffer is UTF-8, then each text is, unless an offset points into a character: to a byte
            # 10xxxxxx. This is checked once for all texts, which are decoded only when they are read.
            try:
                characters = len(str(data, "utf-8"))
            except UnicodeDecodeError as error:
                raise DecodeError(f"the text is not UTF-8: {error.reason}.") from error
            if characters != len(data):
                starts = np.frombuffer(data, np.uint8)[offsets[offsets < len(data)]]
                if ((starts & 0xC0) == 0x80).any():
                    raise DecodeError("a text begins inside a character.")
        return PackedColumn.from_offsets(field, bytes(data) if reader.options.copy else data, offsets, self.validity)

    def decode_objects(self, field: Field) -> Column:
        reader = self.reader
        budget = reader.left
        values = [
            decode_value(reader, a, b, field)
            for number, wire_type, a, b in iter_fields(reader.data, self.start, self.end)
            if wire_type == DELIMITED and number == ValuesField.VALUES
        ]
        reader.charge(24 * len(values) + (budget - reader.left))  # twice: pydantic copies lists and dicts
        return ObjectColumn(field, [value if value is None else check_kind(field, value) for value in values])

    def decode_documents(self, field: Field) -> Column:
        if field.kind is not FieldKind.DOCUMENT:
            raise DecodeError(f"the bytes hold a column of documents, but the field is {field}.")
        return DocumentColumn(field, decode_columns(self.reader, self.start, self.end, field.document_type, gaps=True))

    def decode_arrays(self, field: Field) -> Column:
        if field.kind is not FieldKind.DOCUMENTS:
            raise DecodeError(f"the bytes hold a column of arrays, but the field is {field}.")
        start, end, offsets_buffer = self._read_nested()
        flat = decode_columns(self.reader, start, end, field.document_type)
        offsets = _read_offsets(self.reader.buffer(offsets_buffer), self.rows, len(flat))
        return DocumentsColumn(field, flat, offsets, self.validity)

    def _read_nested(self) -> tuple[int, int, int]:
        """Return the position of the batch of a column of arrays, and the number of the buffer of its offsets."""
        start = end = offsets = 0
        for number, wire_type, a, b in iter_fields(self.reader.data, self.start, self.end):
            if wire_type == DELIMITED and number == NestedField.FLAT:
                start, end = a, b
            elif wire_type == VARINT and number == NestedField.OFFSETS:
                offsets = a
        return start, end, offsets


def _check_no_missing(column: Column, rows: Validity) -> None:
    """Raise an error if a row that stands for a document has no value."""
    missing = ~column.valid_rows() & (True if rows is None else rows)
    if missing.any():
        raise DecodeError(f"row {int(np.flatnonzero(missing)[0])} has no value, and the field takes no None.")


def _unwrap_tensor(data: object) -> tuple[Any, Framework, tuple[int, ...]]:
    framework = framework_of(data)
    assert framework is not None
    tensor = framework.unwrap(data)
    return tensor, framework, framework.shape(tensor)


class _Form(NamedTuple):
    decode: Callable[[_EncodedColumn, Field], Column]
    kind: FieldKind
    type: Any
    """The kind and the type of a field for the values of an unknown column."""
    row_size: int = 8
    """The approximate memory of a value beyond its bytes, if the decoder does not account for it."""


_FORMS: dict[int, _Form] = {
    ColumnField.TENSOR: _Form(_EncodedColumn.decode_tensors, FieldKind.TENSOR, AnyTensor, 120),
    ColumnField.SCALARS: _Form(_EncodedColumn.decode_scalars, FieldKind.SCALAR, int, 40),
    ColumnField.RAGGED: _Form(_EncodedColumn.decode_ragged, FieldKind.TENSOR, AnyTensor, 120),
    ColumnField.TEXT: _Form(_EncodedColumn.decode_strings, FieldKind.TEXT, str),
    ColumnField.BLOBS: _Form(_EncodedColumn.decode_strings, FieldKind.BYTES, bytes),
    ColumnField.OBJECTS: _Form(_EncodedColumn.decode_objects, FieldKind.ANY, Any),
    ColumnField.DOCUMENTS: _Form(_EncodedColumn.decode_documents, FieldKind.DOCUMENT, None),
    ColumnField.ARRAYS: _Form(_EncodedColumn.decode_arrays, FieldKind.DOCUMENTS, None),
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
