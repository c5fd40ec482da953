"""Values and documents as messages, and back.

A value is encoded by its own type, so the bytes describe themselves: `_ENCODERS`, `_CONTAINERS` and `_BY_BASE` map
types to encoders, and `_DECODERS` maps the numbers of `ValueField` to decoders. The field that a value is for is a
hint: it chooses among classes that share an encoding, such as the classes of paths and of nested documents, and
`check_kind` then rejects values that are not of the field's kind. `KINDS` says what each kind accepts.

Some types have no message of their own and are encoded as another type, as a URL is as text; the type of the field
restores them. In a union another member may accept that encoding, so the values of such unions are read back before
they are written (`check_unions`).
"""

from __future__ import annotations

import dataclasses
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path, PurePath
from typing import Any, NamedTuple, cast, get_origin
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
from pydantic import BaseModel, RootModel, ValidationError, networks
from pydantic_core import MultiHostUrl, Url

from quire import _class_registry
from quire._class_registry import class_name
from quire._equality import is_unchanged
from quire._protocols import ArrayLike, DocumentLike, is_array_type, is_batch_type, is_document_type
from quire.codec._context import MAX_DEPTH, DecodeOptions, Reader, Writer
from quire.codec._errors import prefix_place
from quire.codec._kinds import KINDS
from quire.codec._messages import (
    VERSION_FIELD,
    ArrayField,
    ComplexField,
    DocumentField,
    DurationField,
    EntriesField,
    MemberField,
    MomentField,
    ValueField,
    ValuesField,
    check_version,
)
from quire.codec._tensors import decode_scalar, decode_tensor, encode_scalar, encode_tensor
from quire.codec._wire import (
    DELIMITED,
    FIXED64,
    VARINT,
    Bytes,
    decode_zigzag,
    encode_delimited,
    encode_tag,
    encode_text,
    encode_uint,
    encode_zigzag,
    iter_fields,
    join_buffers,
    read_field,
    read_text,
)
from quire.columns import RaggedColumn, TensorColumn, validate_values
from quire.errors import ColumnError, DecodeError, EncodeError
from quire.schema import STORED, Field, FieldKind, Schema, field_aliases, stored_key, takes_names
from quire.tensors import describe, framework_of

_DOUBLE = struct.Struct("<d")
# Field numbers of inner loops are globals, which Python looks up faster than attributes of a class.
_DOCUMENT_VALUES, _ITEMS = DocumentField.VALUES, ValuesField.VALUES
_KEYS, _ENTRY_VALUES = EntriesField.KEYS, EntriesField.VALUES


class UnknownMember(NamedTuple):
    """A member of an enum whose class is not loaded; it is encoded again as it was."""

    type: str
    name: str
    value: Any


# --- encoding

_Encoder = Callable[[Any, Writer], bytes]


def encode_value(value: object, writer: Writer) -> bytes:
    """Encode a value of any type that has an encoding."""
    encode = _ENCODERS.get(type(value))
    if encode is not None:
        return encode(value, writer)
    if writer.depth > MAX_DEPTH:
        raise EncodeError(f"values are nested more than {MAX_DEPTH} levels deep.")
    writer.depth += 1
    tp = type(value)
    encode = _CONTAINERS.get(tp)
    if encode is None and getattr(tp, "__quire_plain__", False):  # a class like `ImageUrl`, encoded as text or bytes
        encode = next((encode for base, encode in _BY_BASE if issubclass(tp, base)), None)
        if encode is not None:
            _CONTAINERS[tp] = encode
    if encode is not None:
        content = encode(value, writer)
    else:
        try:
            content = _encode_other(value, writer)
        except EncodeError:
            if not writer.allow_pickle:
                raise
            content = encode_delimited(ValueField.PICKLED, pickle.dumps(value, protocol=5))
    writer.depth -= 1
    return content


def _encode_other(value: Any, writer: Writer) -> bytes:
    tp = type(value)
    if framework_of(value) is not None:
        return encode_delimited(ValueField.TENSOR, encode_tensor(value, writer))
    if is_document_type(tp):
        return encode_delimited(ValueField.DOCUMENT, encode_document(value, writer))
    if is_array_type(tp):
        return encode_delimited(ValueField.ARRAY, encode_array(value, writer))
    if is_batch_type(tp):
        return encode_delimited(ValueField.ARRAY, _encode_batch(value, writer))
    for base, encode in _BY_BASE:
        if isinstance(value, base):
            return encode(value, writer)
    if dataclasses.is_dataclass(value):
        return _encode_dict({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, writer)
    raise EncodeError(
        f"{tp.__module__}.{tp.__qualname__} has no form on the wire. Use a type that has one, or pass "
        "allow_pickle=True on both sides."
    )


# --- encoding documents


def encode_document(document: DocumentLike, writer: Writer) -> bytes:
    """Encode a document and everything in it."""
    content, extra = document.__dict__, document.__pydantic_extra__
    schema = type(document).document_schema()
    head, names, ambiguous = document_head(schema)
    for field in ambiguous:
        if field.name in content:
            try:
                check_unions(schema, field, [content[field.name]], allow_pickle=writer.allow_pickle)
            except EncodeError as error:
                raise EncodeError(prefix_place(f"{schema.name}.{field.name}", error)) from error
    if extra is not None or len(names) != len(content) or tuple(content) != names:
        # A dynamic document keeps the name that it was read with.
        declared = getattr(document, "__quire_name__", None) or class_name(type(document))
        fields = {name: content[name] for name in names if name in content}
        return encode_fields(declared, {**fields, **(extra or {})}, writer)
    return head + _encode_contents(type(document).__name__, content, writer)


def document_head(schema: Schema) -> tuple[bytes, tuple[str, ...], tuple[Field, ...]]:
    """Return the encoded start of documents that have exactly the fields of a class.

    With it come the names of these fields, and the fields whose unions are ambiguous.
    """
    entry: tuple[bytes, tuple[str, ...], tuple[Field, ...]] | None = schema.notes.get("document_head")
    if entry is None:
        names = tuple(schema.by_name)
        head = _encode_head(class_name(schema.document_type), names)
        entry = schema.notes["document_head"] = head, names, ambiguous_fields(schema)
    return entry


def _encode_head(name: str, names: Iterable[str]) -> bytes:
    keys = [encode_delimited(DocumentField.NAMES, encode_utf8(key)) for key in names]
    return b"".join([VERSION_FIELD, encode_text(DocumentField.TYPE, name), *keys])


def encode_fields(name: str, content: Mapping[str, Any], writer: Writer) -> bytes:
    """Encode a document of the class of that name with the given fields."""
    return _encode_head(name, content) + _encode_contents(name.rpartition(":")[2], content, writer)


def encode_partial(document: DocumentLike, names: Sequence[str], writer: Writer) -> bytes:
    """Encode some fields of a document, which `decode_partial` reads with the values of the others."""
    content, schema = document.__dict__, type(document).document_schema()
    for field in document_head(schema)[2]:
        if field.name in names:
            check_unions(schema, field, [content[field.name]], allow_pickle=writer.allow_pickle)
    return encode_fields(class_name(type(document)), {name: content[name] for name in names}, writer)


def _encode_contents(name: str, content: Mapping[str, Any], writer: Writer) -> bytes:
    parts: list[bytes] = []
    try:
        for value in content.values():  # not a comprehension: the number of parts tells which field failed
            parts.append(encode_delimited(_DOCUMENT_VALUES, encode_value(value, writer)))  # noqa: PERF401
    except EncodeError as error:
        raise EncodeError(prefix_place(f"{name}.{list(content)[len(parts)]}", error)) from error
    return b"".join(parts)


def encode_array(array: ArrayLike, writer: Writer) -> bytes:
    """Encode an array, document by document."""
    return encode_documents(array._declared or class_name(array.document_type), array._documents, writer)


def encode_documents(name: str, documents: Iterable[Any], writer: Writer) -> bytes:
    """Encode documents one by one, as an array of the class of that name."""
    contents = [encode_delimited(ArrayField.DOCUMENTS, encode_document(document, writer)) for document in documents]
    return b"".join([VERSION_FIELD, encode_text(ArrayField.TYPE, name), *contents])


_BATCH_NAME = re.compile(r"DocumentBatch\[(.*)\]", re.DOTALL)
"""The class of an array that was a batch: the reader stacks its documents again."""


def _encode_batch(batch: Any, writer: Writer) -> bytes:
    """Encode a batch in a field as an array of its rows; the class of the array says that it was a batch."""
    columns = batch._columns
    mixed = [
        leaf
        for leaf in columns.leaves()
        if isinstance(leaf, RaggedColumn) or (isinstance(leaf, TensorColumn) and leaf.shapes is not None)
    ]
    if mixed:
        raise EncodeError(
            f"a batch in a field travels as its rows, and {columns.schema.name}.{mixed[0].field.name} has tensors of "
            "mixed shapes, which rows do not stack to again. Annotate the field as DocumentArray."
        )
    name = f"DocumentBatch[{class_name(batch.document_type)}]"
    return encode_documents(name, columns.iter_documents(), writer)


# --- encoding single values

_NULL = encode_tag(ValueField.NULL, VARINT) + b"\0"
_TRUE, _FALSE = (encode_tag(ValueField.BOOLEAN, VARINT) + bit for bit in (b"\1", b"\0"))
_INTEGER_TAG = encode_tag(ValueField.INTEGER, VARINT)
_NUMBER_TAG = encode_tag(ValueField.NUMBER, FIXED64)
_MIN_INT64, _MAX_INT64 = -(1 << 63), (1 << 63) - 1


def encode_utf8(value: str) -> bytes:
    """Encode a text as UTF-8."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(f"half a character (a lone surrogate) has no form on the wire: {value[:40]!r}.") from error


def _encode_as(number: int, convert: Callable[[Any], bytes]) -> _Encoder:
    return lambda value, _: encode_delimited(number, convert(value))


def _encode_integer(value: int, _: Writer) -> bytes:
    if _MIN_INT64 <= value <= _MAX_INT64:
        return _INTEGER_TAG + encode_zigzag(value)
    # One bit more than `bit_length`, for the sign of two's complement.
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return encode_delimited(ValueField.BIG_INTEGER, content)


def _encode_number(value: float, _: Writer) -> bytes:
    return _NUMBER_TAG + _DOUBLE.pack(value)


def _encode_complex(value: complex, _: Writer) -> bytes:
    real, imaginary = encode_tag(ComplexField.REAL, FIXED64), encode_tag(ComplexField.IMAGINARY, FIXED64)
    content = real + _DOUBLE.pack(value.real) + imaginary + _DOUBLE.pack(value.imag)
    return encode_delimited(ValueField.COMPLEX, content)


def _encode_moment(number: int, value: datetime | time) -> bytes:
    zone = value.tzinfo
    if zone is not None and value.utcoffset() is None and isinstance(value, datetime):
        raise EncodeError(f"the zone of {value!r} knows no offset.")
    # A zone with a name is written as the local time and the name, because its offset depends on the rules of the zone
    # where the bytes are read. `fold` tells which of two equal local times is meant when clocks are set back.
    name = zone.key if isinstance(zone, ZoneInfo) else ""
    moment = value.replace(tzinfo=None) if name else value
    content = encode_text(MomentField.TEXT, moment.isoformat()) + encode_text(MomentField.ZONE, name)
    return encode_delimited(number, content + encode_uint(MomentField.FOLD, value.fold))


def _encode_datetime(value: datetime, _: Writer) -> bytes:
    return _encode_moment(ValueField.DATETIME, value)


def _encode_timedelta(value: timedelta, _: Writer) -> bytes:
    parts = (
        (DurationField.DAYS, value.days),
        (DurationField.SECONDS, value.seconds),
        (DurationField.MICROSECONDS, value.microseconds),
    )
    content = b"".join(encode_tag(number, VARINT) + encode_zigzag(part) for number, part in parts if part)
    return encode_delimited(ValueField.TIMEDELTA, content)


def _encode_member(type_name: str, name: str, value: object, writer: Writer) -> bytes:
    content = encode_text(MemberField.TYPE, type_name) + encode_text(MemberField.NAME, name)
    content += encode_delimited(MemberField.VALUE, encode_value(value, writer))
    return encode_delimited(ValueField.ENUM, content)


def _encode_pattern(value: re.Pattern[Any], writer: Writer) -> bytes:
    """Encode a regular expression as its text, or with its flags if the text alone would be compiled with others."""
    if re.compile(value.pattern).flags == value.flags:
        return encode_value(value.pattern, writer)
    return _encode_tuple((value.pattern, value.flags), writer)


# --- encoding containers


def encode_items(items: Iterable[Any], writer: Writer) -> bytes:
    """Encode values as a message `Values`."""
    return b"".join([encode_delimited(_ITEMS, encode_value(item, writer)) for item in items])


def _encode_items_as(number: int) -> _Encoder:
    def encode(items: Iterable[Any], writer: Writer) -> bytes:
        return encode_delimited(
            number, b"".join([encode_delimited(_ITEMS, encode_value(item, writer)) for item in items])
        )

    return encode


_encode_list, _encode_tuple = _encode_items_as(ValueField.LIST), _encode_items_as(ValueField.TUPLE)
_encode_set, _encode_frozen_set = _encode_items_as(ValueField.SET), _encode_items_as(ValueField.FROZEN_SET)


def _encode_dict(value: Mapping[Any, Any], writer: Writer) -> bytes:
    keys = [encode_delimited(_KEYS, encode_value(key, writer)) for key in value]
    values = [encode_delimited(_ENTRY_VALUES, encode_value(item, writer)) for item in value.values()]
    return encode_delimited(ValueField.DICT, b"".join(keys + values))


def _encode_model(model: BaseModel, writer: Writer) -> bytes:
    """Encode a pydantic model that is no document as a dict, with the keys by which the model accepts its fields."""
    fields, content = type(model).model_fields, model.__dict__  # which may also hold cached properties
    keys = {name: name for name in fields}
    if not takes_names(type(model)):
        keys = {name: next(iter(field_aliases(info)), name) for name, info in fields.items()}
    values = {keys[name]: content[name] for name in fields if name in content}
    return _encode_dict({**values, **(model.__pydantic_extra__ or {})}, writer)


_ENCODERS: dict[type[Any], _Encoder] = {
    type(None): lambda _, __: _NULL,
    bool: lambda value, _: _TRUE if value else _FALSE,
    int: _encode_integer,
    float: _encode_number,
    str: _encode_as(ValueField.TEXT, encode_utf8),
    bytes: _encode_as(ValueField.BLOB, bytes),
    bytearray: _encode_as(ValueField.BLOB, bytes),
    complex: _encode_complex,
    datetime: _encode_datetime,
    date: _encode_as(ValueField.DATE, lambda value: value.isoformat().encode()),
    time: lambda value, _: _encode_moment(ValueField.TIME, value),
    timedelta: _encode_timedelta,
    UUID: _encode_as(ValueField.UUID, lambda value: value.bytes),
    Decimal: _encode_as(ValueField.DECIMAL, lambda value: str(value).encode()),
}
"""Encoders of types that hold no other values."""
_CONTAINERS: dict[type[Any], _Encoder] = {
    list: _encode_list,
    tuple: _encode_tuple,
    set: _encode_set,
    frozenset: _encode_frozen_set,
    dict: _encode_dict,
    UnknownMember: lambda value, writer: _encode_member(value.type, value.name, value.value, writer),
}
"""Encoders of types that hold other values, which count as one level of nesting."""
_URLS = (Url, MultiHostUrl, getattr(networks, "_BaseUrl", Url), getattr(networks, "_BaseMultiHostUrl", Url))
_ENCODED_AS_TEXT = (*_URLS, IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network)
_BY_BASE: tuple[tuple[Any, _Encoder], ...] = (
    (Enum, lambda value, writer: _encode_member(class_name(type(value)), value.name or "", value.value, writer)),
    (np.generic, lambda value, writer: encode_delimited(ValueField.SCALAR, encode_scalar(value, writer))),
    (PurePath, _encode_as(ValueField.PATH, lambda value: encode_utf8(str(value)))),
    (RootModel, lambda value, writer: encode_value(value.root, writer)),
    (BaseModel, _encode_model),
    (str, _encode_as(ValueField.TEXT, lambda value: encode_utf8(str.__str__(value)))),
    (int, lambda value, writer: _encode_integer(int(value), writer)),
    (float, _encode_number),
    (bytes, _encode_as(ValueField.BLOB, bytes)),
    (datetime, _encode_datetime),
    (Decimal, _encode_as(ValueField.DECIMAL, lambda value: str(value).encode())),
    (_ENCODED_AS_TEXT, _encode_as(ValueField.TEXT, lambda value: str(value).encode())),
    (re.Pattern, _encode_pattern),
    (Mapping, _encode_dict),
    (tuple, _encode_tuple),
    (frozenset, _encode_frozen_set),
    (AbstractSet, _encode_set),
    (Sequence, _encode_list),
)
"""Encoders of subclasses and abstract types; the first that matches is used."""


# --- what a kind of field means on the wire

EXACT_INTEGERS = 2**53
"""A float holds every integer up to this absolute value."""


def check_kind(field: Field, value: Any) -> Any:
    """Return a decoded value if it is of the field's kind: a changed type is an error and not a guess."""
    if type(value) is field.type or (value is None and field.nullable):
        return value
    if isinstance(value, UnknownMember) and field.kind is FieldKind.ENUM:
        return value.value  # the enum was renamed or moved; its members are known by their values
    if KINDS[field.kind].accepts(field, value):
        if field.type is not complex:
            return value
        try:
            return complex(value)  # which pydantic does only since 2.9
        except OverflowError as error:
            raise DecodeError("the bytes hold an integer that is too large for the field.") from error
    if field.type is bytearray and type(value) is bytes:
        return bytearray(value)
    raise DecodeError(f"the bytes hold {describe(value)}, but the field is {field}.")


def check_exact(value: int, field: Field) -> int:
    """Return an integer for a field that has become a float, if a float holds it without rounding."""
    try:
        exact = int(float(value)) == value
    except OverflowError:
        exact = False
    if not exact:
        raise DecodeError(f"the data holds the integer {value}, which a float would round, but the field is {field}.")
    return value


# --- unions whose members share an encoding


def ambiguous_fields(schema: Schema) -> tuple[Field, ...]:
    """Return the fields with a union, also inside lists and dicts, in which a member is encoded as another type."""
    fields: tuple[Field, ...] | None = schema.notes.get("ambiguous_unions")
    if fields is None:
        fields = schema.notes["ambiguous_unions"] = tuple(filter(has_ambiguous_union, schema.fields))
    return fields


def has_ambiguous_union(field: Field) -> bool:
    """Return whether a field is or contains a union in which a member is encoded as another type.

    All classes of paths are encoded alike, so a union with several of them, or with one and `Any`, is ambiguous, too.
    """
    if field.kind is FieldKind.UNION:
        paths = [item for item in field.items if item.kind in (FieldKind.PATH, FieldKind.ANY)]
        if len(paths) > 1 or any(map(_is_encoded_as_other_type, field.items)):
            return True
    return any(map(has_ambiguous_union, field.items))


def _is_encoded_as_other_type(field: Field) -> bool:
    types = KINDS[field.kind].self_describing
    plain = (types is None or field.type in types) and field.wrapper is None
    return not plain or field.decodes_input or any(map(_is_encoded_as_other_type, field.items))


def check_unions(schema: Schema, field: Field, values: list[Any], *, allow_pickle: bool) -> None:
    """Raise an error for the first value of an ambiguous field that would be read back as another one."""
    options = DecodeOptions(allow_pickle=allow_pickle)
    for value in values:
        if value is None:
            continue
        # Which member of a union wins depends on all of them and on pydantic, so the value is really read back.
        message = value_message(value, allow_pickle=allow_pickle)
        try:
            decoded = value_from_message(message, field, options)
            [decoded] = validate_values(schema, field, [decoded], field.name, None, stored=True)
        except (DecodeError, ColumnError) as error:
            raise EncodeError(f"{describe(value)} could not be read back as {field}: {error}") from error
        if not is_unchanged(value, decoded):
            raise EncodeError(
                f"{describe(value)} would be read back as {describe(decoded)}: they look alike on the wire, and the "
                f"field is {field}. Use a union of types that can be distinguished."
            )


def value_message(value: object, *, allow_pickle: bool = False) -> bytes:
    """Encode one value as a message of its own: a `Document` without a class and without names."""
    writer = Writer(allow_pickle)
    head = encode_delimited(DocumentField.VALUES, encode_value(value, writer))
    return b"".join(join_buffers(head, writer.buffers)) if writer.buffers else head


def value_from_message(data: Bytes, field: Field, options: DecodeOptions) -> Any:
    """Decode the value of `value_message` for a field."""
    reader = Reader(memoryview(data), options)
    for number, wire_type, start, end in iter_fields(reader.data, 0, len(reader.data)):
        if number == DocumentField.VALUES and wire_type == DELIMITED:
            return check_kind(field, decode_value(reader, start, end, field))
    raise DecodeError("the message of a value holds none.")


# --- decoding


def decode_value(reader: Reader, start: int, end: int, hint: Field | None = None) -> object:
    """Decode a value; the field that it is for, the hint, chooses among classes with the same encoding."""
    if start >= end:
        raise DecodeError(f"the value at byte {start} is missing.")
    number, wire_type, a, b = read_field(reader.data, start, end)
    if b < end:  # of several kinds, the last one counts, as protobuf specifies for a oneof
        *_, (number, wire_type, a, b) = iter_fields(reader.data, start, end)
    expected, decode, size = _DECODERS.get(number, _UNKNOWN_KIND)
    if wire_type != expected:
        raise DecodeError(f"the value at byte {start} is of a kind ({number}) that this version does not know.")
    reader.charge(size)
    return decode(reader, a, b, hint)


def _decode_nested(reader: Reader, start: int, end: int, hint: Field | None) -> object:
    """Decode a value inside of another."""
    reader.descend()
    value = decode_value(reader, start, end, hint)
    reader.depth -= 1
    return value


# --- decoding single values

_Decoder = Callable[[Reader, int, int, Field | None], object]


def _without_hint(decode: Callable[[bytes, int, int], Any]) -> _Decoder:
    return lambda reader, start, end, _: decode(reader.data, start, end)


def _parse_with(what: str, parse: Callable[[str], Any]) -> _Decoder:
    def decode(reader: Reader, start: int, end: int, _: Field | None) -> object:
        content = read_text(reader.data, start, end)
        try:
            return parse(content)
        except (ValueError, InvalidOperation, OverflowError) as error:
            raise DecodeError(f"{content[:60]!r} is not a {what}.") from error

    return decode


def _decode_blob(reader: Reader, start: int, end: int, hint: Field | None) -> bytes | bytearray:
    blob = reader.data[start:end]
    return bytearray(blob) if hint is not None and hint.type is bytearray else blob


def _decode_path(reader: Reader, start: int, end: int, hint: Field | None) -> PurePath:
    """Decode a path of the class that the field is typed with."""
    content = read_text(reader.data, start, end)
    field = None if hint is None else _single_member(hint, FieldKind.PATH)
    try:
        return (Path if field is None or field.kind is not FieldKind.PATH else field.type)(content)
    except (ValueError, NotImplementedError) as error:  # such as a WindowsPath on another system
        raise DecodeError(f"{content[:60]!r} is not a path here: {error}.") from error


def _decode_integer(_: Reader, value: int, __: int, hint: Field | None) -> int:
    number = decode_zigzag(value)
    return number if hint is None or -EXACT_INTEGERS <= number <= EXACT_INTEGERS else _check_rounding(number, hint)


def _check_rounding(value: int, hint: Field | None) -> int:
    """Reject an integer that the field would round, because its type has been changed to float."""
    if hint is None:
        return value
    if hint.kind is FieldKind.UNION:
        types = [item.type for item in hint.items if item.kind in (FieldKind.SCALAR, FieldKind.ANY)]
        becomes_float = bool(types) and all(item is float or item is complex for item in types)
    else:
        becomes_float = hint.kind is FieldKind.SCALAR and issubclass(hint.type, (float, complex))
    return check_exact(value, hint) if becomes_float else value


def _decode_uuid(data: bytes, start: int, end: int) -> UUID:
    if end - start != 16:
        raise DecodeError(f"a UUID has 16 bytes, not {end - start}.")
    return UUID(bytes=data[start:end])


def _decode_complex(data: bytes, start: int, end: int) -> complex:
    starts = {number: a for number, wire_type, a, _ in iter_fields(data, start, end) if wire_type == FIXED64}
    real, imaginary = (
        _DOUBLE.unpack_from(data, starts[number])[0] if number in starts else 0.0
        for number in (ComplexField.REAL, ComplexField.IMAGINARY)
    )
    return complex(real, imaginary)


def _decode_moment(tp: type[datetime | time]) -> _Decoder:
    def decode(reader: Reader, start: int, end: int, _: Field | None) -> datetime | time:
        data, text, zone, fold = reader.data, "", "", 0
        for number, wire_type, a, b in iter_fields(data, start, end):
            if wire_type == DELIMITED and number == MomentField.TEXT:
                text = read_text(data, a, b)
            elif wire_type == DELIMITED and number == MomentField.ZONE:
                zone = read_text(data, a, b)
            elif wire_type == VARINT and number == MomentField.FOLD:
                fold = int(a != 0)
        if zone:
            reader.charge_zone(zone)
        try:
            text = f"{text[:-1]}+00:00" if text.endswith("Z") else text  # which Python 3.10 does not parse
            value = tp.fromisoformat(text).replace(fold=fold)
            return value.replace(tzinfo=ZoneInfo(zone)) if zone else value
        except (ValueError, OverflowError, KeyError, OSError) as error:  # zones are files
            raise DecodeError(f"{text[:60]!r} {zone[:60]!r} is not a {tp.__name__}.") from error

    return decode


def _decode_timedelta(data: bytes, start: int, end: int) -> timedelta:
    parts = {
        number: decode_zigzag(a)
        for number, wire_type, a, _ in iter_fields(data, start, end)
        if wire_type == VARINT and number <= DurationField.MICROSECONDS
    }
    numbers = (DurationField.DAYS, DurationField.SECONDS, DurationField.MICROSECONDS)
    try:
        return timedelta(*(parts.get(number, 0) for number in numbers))
    except OverflowError as error:
        raise DecodeError(f"a timedelta is too long: {error}.") from error


def _decode_member(reader: Reader, start: int, end: int, hint: Field | None) -> Enum | UnknownMember:
    """Decode a member of an enum by its name, or by its value if the member was renamed."""
    type_name = name = ""
    value = None
    for number, wire_type, a, b in iter_fields(reader.data, start, end):
        if wire_type != DELIMITED:
            continue
        if number == MemberField.TYPE:
            type_name = read_text(reader.data, a, b)
        elif number == MemberField.NAME:
            name = read_text(reader.data, a, b)
        elif number == MemberField.VALUE:
            value = _decode_nested(reader, a, b, None)
    enum = hint.type if hint is not None and hint.kind is FieldKind.ENUM else _find_enum(type_name, hint, reader)
    if enum is None:
        return UnknownMember(type_name, name, value)
    try:
        return enum[name] if name in enum.__members__ else enum(value)
    except (ValueError, TypeError) as error:
        raise DecodeError(f"{enum.__name__} has no member {name[:60]!r}.") from error


def _find_enum(name: str, hint: Field | None, reader: Reader) -> type[Enum] | None:
    """Return the enum of that name among those of the field's type and of the option `types`."""
    todo = [] if hint is None else [hint]
    while todo:
        field = todo.pop()
        if field.kind is FieldKind.ENUM and class_name(field.type) == name:
            enum: type[Enum] = field.type
            return enum
        todo.extend(field.items)
    enums = (tp for tp in reader.options.types if issubclass(tp, Enum))
    return next((tp for tp in enums if class_name(tp) == name), None)


def unpickle(data: Bytes, *, allow: bool) -> Any:
    """Load a pickle, if the caller trusts the source."""
    if not allow:
        raise DecodeError(
            "this is a pickle, and a pickle can run code: pass allow_pickle=True if you trust the source."
        )
    try:
        return pickle.loads(data)  # noqa: S301 - the caller allows it
    except Exception as error:  # a pickle can raise anything
        raise DecodeError(f"the pickle cannot be read: {error}") from error


# --- decoding containers


def _decode_list(reader: Reader, start: int, end: int, hint: Field | None) -> list[Any]:
    hints = () if hint is None else _single_member(hint, FieldKind.LIST).items
    last = len(hints) - 1
    items: list[Any] = []
    for number, wire_type, a, b in iter_fields(reader.data, start, end):
        if number == _ITEMS and wire_type == DELIMITED:
            items.append(_decode_nested(reader, a, b, hints[min(len(items), last)] if hints else None))
    reader.charge(8 * len(items))
    return items


def _decode_tuple(reader: Reader, start: int, end: int, hint: Field | None) -> tuple[Any, ...] | re.Pattern[Any]:
    """Decode a tuple, or the regular expression with flags that was encoded as one."""
    items = tuple(_decode_list(reader, start, end, hint))
    if hint is None or list(map(type, items[1:])) != [int]:
        return items
    fields = hint.items if hint.kind is FieldKind.UNION else (hint,)
    if not any(f.kind is FieldKind.ANY and (get_origin(f.type) or f.type) is re.Pattern for f in fields):
        return items
    try:
        return re.compile(*items)
    except (re.error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DecodeError(f"{items!r:.60} is not a regular expression with flags: {error}.") from error


def _decode_set(make: type[set[Any] | frozenset[Any]]) -> _Decoder:
    def decode(reader: Reader, start: int, end: int, hint: Field | None) -> set[Any] | frozenset[Any]:
        items = _decode_list(reader, start, end, hint)
        try:
            reader.charge(_hash_table_size(len(items)))
            reader.charge_hashes(items)
            return make(items)
        except DecodeError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # tensors cannot be compared
            raise DecodeError(f"a {make.__name__} holds what cannot be in one: {error}.") from error

    return decode


def _hash_table_size(count: int) -> int:
    """Return the memory of the table of a set, which CPython keeps at most 60 % full; 8 slots are part of the set."""
    # This follows set_add_entry and set_table_resize of CPython's setobject.c.
    slots = 8
    while 5 * count >= 3 * (slots - 1):
        slots *= 4 if slots < 1 << 16 else 2
    return 16 * slots if slots > 8 else 0


def _decode_dict(reader: Reader, start: int, end: int, hint: Field | None) -> dict[Any, Any]:
    items = () if hint is None else _single_member(hint, FieldKind.DICT).items
    key_hint, value_hint = items if len(items) == 2 else (None, None)
    keys: list[Any] = []
    values: list[Any] = []
    for number, wire_type, a, b in iter_fields(reader.data, start, end):
        if number == _KEYS and wire_type == DELIMITED:
            keys.append(_decode_nested(reader, a, b, key_hint))
        elif number == _ENTRY_VALUES and wire_type == DELIMITED:
            values.append(_decode_nested(reader, a, b, value_hint))
    if len(keys) != len(values):
        raise DecodeError(f"a dict has {len(keys)} keys and {len(values)} values.")
    try:
        reader.charge(120 * len(keys))
        reader.charge_hashes(keys)
        return dict(zip(keys, values, strict=True))
    except DecodeError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise DecodeError(f"a dict has a key that cannot be one: {error}.") from error


def _single_member(hint: Field, kind: FieldKind) -> Field:
    """Return the member of a union with that kind if there is exactly one; else the field itself."""
    if hint.kind is not FieldKind.UNION:
        return hint
    members = [item for item in hint.items if item.kind is kind]
    return members[0] if len(members) == 1 else hint


# --- decoding documents


def _decode_nested_documents(kind: FieldKind, decode: Callable[..., object]) -> _Decoder:
    return lambda reader, start, end, hint: decode(reader, start, end, *_expected_type(reader, start, end, hint, kind))


def _expected_type(
    reader: Reader, start: int, end: int, hint: Field | None, kind: FieldKind
) -> tuple[type[Any] | None, tuple[type[Any], ...]]:
    """Return the document class that a field is typed with, if it determines the fields, and those of a union.

    Of the classes in a union, it is the one that the message names: the class registry may know another class of that
    name by now.
    """
    if hint is None:
        return None, ()
    if is_batch_type(hint.type):
        return _closed_type(hint.type.document_type), ()
    if hint.kind is not FieldKind.UNION:
        return _closed_type(hint.document_type) if hint.kind is kind else None, ()
    members = tuple(item.document_type for item in hint.items if item.kind is kind)
    if len(members) < 2:
        return _closed_type(members[0]) if members else None, members
    types = {class_name(member): member for member in members}
    names = (
        read_text(reader.data, a, b)
        for number, wire_type, a, b in iter_fields(reader.data, start, end)
        if number == DocumentField.TYPE and wire_type == DELIMITED
    )
    return _closed_type(types.get(next(names, ""))), members


def _closed_type(document_type: type[Any] | None) -> type[Any] | None:
    """Return a document class if it determines the fields of its documents; else None."""
    return None if document_type is None or document_type.document_schema().is_open else document_type


def decode_document(
    reader: Reader, start: int, end: int, expected: type[Any] | None, members: Sequence[type[Any]] = ()
) -> DocumentLike:
    """Decode a document of the expected class, or of a loaded subclass of it that was written.

    Where a union expects one of several classes, they are `members`.
    """
    type_name, document_type, content, unknown = decode_fields(reader, start, end, expected, members)
    if document_type is None:
        return cast("DocumentLike", _class_registry.make_dynamic(type_name, unknown))
    accepted = document_type.document_schema().accepted
    known = {accepted[name][1]: value for name, value in content.items()}
    return build_document(document_type, known, unknown, reader, type_name)


def decode_partial(
    reader: Reader, start: int, end: int, document_type: type[Any], others: Mapping[str, Any]
) -> DocumentLike:
    """Decode a document of `encode_partial`; `others` are the values of the fields that it left out."""
    type_name, _, content, unknown = decode_fields(reader, start, end, document_type)
    accepted = document_type.document_schema().accepted
    known = {accepted[name][1]: value for name, value in {**content, **others}.items()}
    return build_document(document_type, known, unknown, reader, type_name)


def decode_fields(
    reader: Reader, start: int, end: int, expected: type[Any] | None, members: Sequence[type[Any]] = ()
) -> tuple[str, Any, dict[str, Any], dict[str, Any]]:
    """Return the class name of a document, its class, the values of its fields, and values without a field."""
    type_name, document_type, names, position = _decode_head(reader, start, end, expected, members)
    accepted = {} if document_type is None else document_type.document_schema().accepted
    reader.charge(700 if document_type is None else 400 + 80 * len(accepted))
    content: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    order = iter(names)
    name = ""
    reader.descend()
    try:
        for number, wire_type, a, b in iter_fields(reader.data, position, end):
            if number == _DOCUMENT_VALUES and wire_type == DELIMITED:
                name = _next_name(order, names)
                if name in accepted:
                    field = accepted[name][0]
                    content[field.name] = check_kind(field, decode_value(reader, a, b, field))
                else:
                    unknown[name] = decode_value(reader, a, b)
    except DecodeError as error:
        shown = type_name.rpartition(":")[2][:60] if document_type is None else document_type.__name__
        raise DecodeError(prefix_place(f"{shown}.{name[:60]}", error)) from error
    if next(order, None) is not None:
        raise DecodeError(f"a document has {len(names)} names and fewer values.")
    reader.depth -= 1
    return type_name, document_type, content, unknown


def _next_name(order: Iterator[str], names: Sequence[str]) -> str:
    name = next(order, None)
    if name is None:
        raise DecodeError(f"a document has {len(names)} names and more values.")
    return name


_NAMES_TAG = encode_tag(DocumentField.NAMES)[0]


def _decode_head(
    reader: Reader, start: int, end: int, expected: type[Any] | None, members: Sequence[type[Any]]
) -> tuple[str, Any, Sequence[str], int]:
    """Return the class name of a document, its class, the names of its fields, and where to look for their values.

    Documents of one class start with the same bytes unless they have extra or missing fields. These bytes are compared
    as a whole, which is several times faster than parsing them; the byte after them must not start another name.
    """
    data = reader.data
    if expected is not None:
        head, head_names, _ = document_head(expected.document_schema())
        position = start + len(head)
        if data.startswith(head, start) and (position == end or (position < end and data[position] != _NAMES_TAG)):
            return expected.__name__, expected, head_names, position
    type_name = ""
    names: list[str] = []
    for number, wire_type, a, b in iter_fields(data, start, end):
        if number == DocumentField.NAMES and wire_type == DELIMITED:
            names.append(read_text(data, a, b))
            reader.charge(64)
        elif number == DocumentField.TYPE and wire_type == DELIMITED:
            type_name = read_text(data, a, b)
        elif number == DocumentField.VERSION and wire_type == VARINT:
            check_version(a)
    return type_name, _class_registry.find(type_name, expected, reader.options.types, members), names, start


def decode_array(
    reader: Reader, start: int, end: int, expected: type[Any] | None, members: Sequence[type[Any]] = ()
) -> ArrayLike:
    """Decode an array, document by document."""
    # In two passes: the fields of a message may come in any order, and documents can only be decoded with their class.
    type_name = ""
    for number, wire_type, a, b in iter_fields(reader.data, start, end):
        if number == ArrayField.VERSION and wire_type == VARINT:
            check_version(a)
        elif number == ArrayField.TYPE and wire_type == DELIMITED:
            type_name = read_text(reader.data, a, b)
    batch_name = _BATCH_NAME.fullmatch(type_name)
    type_name = batch_name[1] if batch_name else type_name
    document_type = _class_registry.find(type_name, expected, reader.options.types, members)
    closed = _closed_type(document_type)
    documents = [
        decode_document(reader, a, b, closed)
        for number, wire_type, a, b in iter_fields(reader.data, start, end)
        if number == ArrayField.DOCUMENTS and wire_type == DELIMITED
    ]
    if batch_name and closed is not None:
        return cast("ArrayLike", _class_registry.make_batch(closed, documents))
    return cast("ArrayLike", _class_registry.make_array(document_type, documents, type_name))


_ID_KEYS = {"id", stored_key("id")}


def build_document(
    document_type: type[Any], content: dict[str, Any], unknown: dict[str, Any], reader: Reader, type_name: str
) -> DocumentLike:
    """Create a validated document; missing fields take their defaults. `type_name` is the class in the data."""
    extra = document_type.model_config.get("extra") == "allow"
    if unknown and reader.options.unknown == "error" and not extra:
        raise DecodeError(f"{document_type.__name__} has no field {next(iter(unknown))[:60]!r}.")
    if unknown and reader.options.unknown == "drop" and content.keys() <= _ID_KEYS:
        document_type.document_schema().check_related(unknown, type_name)
    # A class without extra='allow' would reject unknown fields, so they are set after validation.
    document = validate_document(document_type, {**content, **unknown} if extra else content)
    if unknown and reader.options.unknown == "keep" and not extra:
        object.__setattr__(document, "__pydantic_extra__", unknown)
    return document


def validate_document(document_type: type[Any], content: Mapping[str, Any]) -> DocumentLike:
    """Create a document of decoded values with pydantic's validation."""
    try:
        document: DocumentLike = document_type.__pydantic_validator__.validate_python(content, context=STORED)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in (document_type.__name__, *first["loc"]))
        missing = "; the bytes do not hold it, and it has no default" if first["type"] == "missing" else ""
        raise DecodeError(f"{path}: {first['msg']}{missing}.") from error
    return document


_UNKNOWN_KIND: tuple[int, _Decoder, int] = (-1, lambda *_: None, 0)
_DECODERS: dict[int, tuple[int, _Decoder, int]] = {  # wire type, decoder, approximate memory of a value
    ValueField.NULL: (VARINT, lambda *_: None, 8),
    ValueField.BOOLEAN: (VARINT, lambda _, value, *__: value != 0, 8),
    ValueField.INTEGER: (VARINT, _decode_integer, 32),
    ValueField.NUMBER: (FIXED64, _without_hint(lambda data, start, _: _DOUBLE.unpack_from(data, start)[0]), 32),
    ValueField.TEXT: (DELIMITED, _without_hint(read_text), 60),
    ValueField.BLOB: (DELIMITED, _decode_blob, 50),
    ValueField.TENSOR: (DELIMITED, lambda reader, start, end, _: decode_tensor(reader, start, end), 200),
    ValueField.DOCUMENT: (DELIMITED, _decode_nested_documents(FieldKind.DOCUMENT, decode_document), 0),
    ValueField.ARRAY: (DELIMITED, _decode_nested_documents(FieldKind.DOCUMENTS, decode_array), 200),
    ValueField.LIST: (DELIMITED, _decode_list, 72),
    ValueField.TUPLE: (DELIMITED, _decode_tuple, 56),
    ValueField.SET: (DELIMITED, _decode_set(set), 224),
    ValueField.FROZEN_SET: (DELIMITED, _decode_set(frozenset), 224),
    ValueField.DICT: (DELIMITED, _decode_dict, 80),
    ValueField.BIG_INTEGER: (
        DELIMITED,
        lambda r, a, b, hint: _check_rounding(int.from_bytes(r.data[a:b], "little", signed=True), hint),
        40,
    ),
    ValueField.COMPLEX: (DELIMITED, _without_hint(_decode_complex), 40),
    ValueField.DATETIME: (DELIMITED, _decode_moment(datetime), 60),
    ValueField.DATE: (DELIMITED, _parse_with("date", date.fromisoformat), 40),
    ValueField.TIME: (DELIMITED, _decode_moment(time), 60),
    ValueField.TIMEDELTA: (DELIMITED, _without_hint(_decode_timedelta), 50),
    ValueField.UUID: (DELIMITED, _without_hint(_decode_uuid), 120),
    ValueField.DECIMAL: (DELIMITED, _parse_with("decimal", Decimal), 120),
    ValueField.PATH: (DELIMITED, _decode_path, 400),
    ValueField.ENUM: (DELIMITED, _decode_member, 100),
    ValueField.SCALAR: (DELIMITED, lambda reader, start, end, _: decode_scalar(reader, start, end), 60),
    ValueField.PICKLED: (DELIMITED, lambda r, a, b, _: unpickle(r.data[a:b], allow=r.options.allow_pickle), 100),
}
