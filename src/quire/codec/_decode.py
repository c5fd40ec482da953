"""Messages as values: a function for each kind of value, and documents."""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from pathlib import Path
from typing import Any, get_origin
from uuid import UUID
from zoneinfo import ZoneInfo

from pydantic import ValidationError

from quire import _class_registry
from quire.codec._context import Reader
from quire.codec._errors import below
from quire.codec._match import EXACT, check_exact, match
from quire.codec._tensors import decode_scalar, decode_tensor
from quire.codec._values import VERSION, UnknownMember, document_head
from quire.codec._wire import DELIMITED, FIXED64, VARINT, field_at, fields, from_zigzag, read_text
from quire.errors import DecodeError
from quire.schema import STORED, Field, FieldKind

_DOUBLE = struct.Struct("<d")


def decode_value(reader: Reader, start: int, end: int, hint: Field | None = None) -> Any:
    """The value of a message; the field that it is for tells which classes are meant."""
    if start >= end:
        raise DecodeError(f"the value at byte {start} is missing.")
    number, kind, a, b = field_at(reader.data, start, end)
    if b < end:  # of several kinds, the last counts
        *_, (number, kind, a, b) = fields(reader.data, start, end)
    expected, decode, size = _KINDS.get(number, _UNKNOWN)
    if kind != expected:
        raise DecodeError(f"the value at byte {start} is of a kind ({number}) that this version does not know.")
    reader.charge(size)
    return decode(reader, a, b, hint)


# --- single values


def _plain(make: Callable[[bytes, int, int], Any]) -> Callable[[Reader, int, int, Field | None], Any]:
    return lambda reader, start, end, _: make(reader.data, start, end)


def _parsed(what: str, make: Callable[[Any], Any]) -> Callable[[Reader, int, int, Field | None], Any]:
    def decode(reader: Reader, start: int, end: int, _: Field | None) -> Any:
        content = read_text(reader.data, start, end)
        try:
            return make(content)
        except (ValueError, InvalidOperation, OverflowError) as error:
            raise DecodeError(f"{content[:60]!r} is not a {what}.") from error

    return decode


def _text(reader: Reader, start: int, end: int, _: Field | None) -> str:
    return read_text(reader.data, start, end)


def _blob(reader: Reader, start: int, end: int, hint: Field | None) -> bytes | bytearray:
    blob = reader.data[start:end]
    return bytearray(blob) if hint is not None and hint.type is bytearray else blob


def _path(reader: Reader, start: int, end: int, hint: Field | None) -> Any:
    """A path of the class that the field is typed with."""
    content = read_text(reader.data, start, end)
    field = None if hint is None else _of_kind(hint, FieldKind.PATH)
    try:
        return (Path if field is None or field.kind is not FieldKind.PATH else field.type)(content)
    except (ValueError, NotImplementedError) as error:  # such as a WindowsPath elsewhere
        raise DecodeError(f"{content[:60]!r} is not a path here: {error}.") from error


def _integer(_: Reader, value: int, __: int, hint: Field | None) -> int:
    number = from_zigzag(value)
    return number if hint is None or -EXACT <= number <= EXACT else _check_exact(number, hint)


def _big_integer(reader: Reader, start: int, end: int, hint: Field | None) -> int:
    return _check_exact(int.from_bytes(reader.data[start:end], "little", signed=True), hint)


def _check_exact(value: int, hint: Field | None) -> int:
    """Refuse an integer that the field would round: its type has been changed to float since."""
    return check_exact(value, hint) if hint is not None and _becomes_float(hint) else value


def _becomes_float(hint: Field) -> bool:
    if hint.kind is FieldKind.UNION:
        kinds = [item.type for item in hint.items if item.kind in (FieldKind.SCALAR, FieldKind.ANY)]
        return bool(kinds) and all(item is float or item is complex for item in kinds)
    return hint.kind is FieldKind.SCALAR and issubclass(hint.type, (float, complex))


def _uuid(data: bytes, start: int, end: int) -> UUID:
    if end - start != 16:
        raise DecodeError(f"a UUID has 16 bytes, not {end - start}.")
    return UUID(bytes=data[start:end])


def _complex(data: bytes, start: int, end: int) -> complex:
    parts = {number: a for number, kind, a, _ in fields(data, start, end) if kind == FIXED64}
    real, imaginary = (_DOUBLE.unpack_from(data, parts[i])[0] if i in parts else 0.0 for i in (1, 2))
    return complex(real, imaginary)


def _moment(make: type[datetime | time]) -> Callable[[Reader, int, int, Field | None], Any]:
    def decode(reader: Reader, start: int, end: int, _: Field | None) -> Any:
        shown = zone = ""
        data = reader.data
        fold = 0
        for number, kind, a, b in fields(data, start, end):
            if kind == DELIMITED and number in (1, 2):
                shown, zone = (read_text(data, a, b), zone) if number == 1 else (shown, read_text(data, a, b))
            elif kind == VARINT and number == 3:
                fold = int(a != 0)
        if zone:
            reader.charge_zone(zone)
        try:
            shown = f"{shown[:-1]}+00:00" if shown.endswith("Z") else shown  # which Python 3.10 does not read
            value = make.fromisoformat(shown).replace(fold=fold)
            return value.replace(tzinfo=ZoneInfo(zone)) if zone else value
        except (ValueError, OverflowError, KeyError, OSError) as error:  # as zones are looked for in files
            raise DecodeError(f"{shown[:60]!r} {zone[:60]!r} is not a {make.__name__}.") from error

    return decode


def _timedelta(data: bytes, start: int, end: int) -> timedelta:
    parts = {number: from_zigzag(a) for number, kind, a, _ in fields(data, start, end) if kind == VARINT and number < 4}
    try:
        return timedelta(parts.get(1, 0), parts.get(2, 0), parts.get(3, 0))
    except OverflowError as error:
        raise DecodeError(f"a timedelta is too long: {error}.") from error


def _member(reader: Reader, start: int, end: int, hint: Field | None) -> Any:
    type_name = name = ""
    value = None
    for number, kind, a, b in fields(reader.data, start, end):
        if kind == DELIMITED and number in (1, 2):
            content = read_text(reader.data, a, b)
            type_name, name = (content, name) if number == 1 else (type_name, content)
        elif kind == DELIMITED and number == 3:
            value = _nested(reader, a, b, None)
    found = hint.type if hint is not None and hint.kind is FieldKind.ENUM else _enum(type_name, hint, reader)
    if found is None:
        return UnknownMember(type_name, name, value)
    try:
        return found[name] if name in found.__members__ else found(value)
    except (ValueError, TypeError) as error:
        raise DecodeError(f"{found.__name__} has no member {name[:60]!r}.") from error


def _enum(name: str, hint: Field | None, reader: Reader) -> type[Enum] | None:
    """The enum of that name among those that the field is typed with, or that the reader was given."""
    todo = [] if hint is None else [hint]
    while todo:
        field = todo.pop()
        if field.kind is FieldKind.ENUM and _class_registry.class_name(field.type) == name:
            found: type[Enum] = field.type
            return found
        todo.extend(field.items)
    given = (tp for tp in reader.options.types if issubclass(tp, Enum))
    return next((tp for tp in given if _class_registry.class_name(tp) == name), None)


def _pickled(reader: Reader, start: int, end: int, _: Field | None) -> Any:
    return unpickle(reader.data[start:end], allow=reader.options.allow_pickle)


def unpickle(data: Any, *, allow: bool) -> Any:
    """What was pickled, for those who trust the source."""
    if not allow:
        raise DecodeError(
            "this is a pickle, and a pickle can run code: pass allow_pickle=True if you trust the source."
        )
    try:
        return pickle.loads(data)  # noqa: S301 - asked for
    except Exception as error:  # whatever the pickle runs
        raise DecodeError(f"the pickle cannot be read: {error}") from error


# --- containers


def _nested(reader: Reader, start: int, end: int, hint: Field | None) -> Any:
    """A value inside another."""
    reader.descend()
    value = decode_value(reader, start, end, hint)
    reader.depth -= 1
    return value


def _tuple(reader: Reader, start: int, end: int, hint: Field | None) -> Any:
    """A tuple, or the regular expression with flags that was written as one."""
    items = tuple(_list(reader, start, end, hint))
    if hint is None or list(map(type, items[1:])) != [int]:
        return items
    if not any(map(_is_pattern, hint.items if hint.kind is FieldKind.UNION else (hint,))):
        return items
    try:
        return re.compile(*items)
    except (re.error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DecodeError(f"{items!r:.60} is not a regular expression with flags: {error}.") from error


def _is_pattern(field: Field) -> bool:
    return field.kind is FieldKind.ANY and (get_origin(field.type) or field.type) is re.Pattern


def _list(reader: Reader, start: int, end: int, hint: Field | None) -> list[Any]:
    parts = () if hint is None else _of_kind(hint, FieldKind.LIST).items
    last = len(parts) - 1
    found: list[Any] = []
    for number, kind, a, b in fields(reader.data, start, end):
        if number == 1 and kind == DELIMITED:
            found.append(_nested(reader, a, b, parts[min(len(found), last)] if parts else None))
    reader.charge(8 * len(found))
    return found


def _hashed(make: Callable[[list[Any]], Any], what: str) -> Callable[[Reader, int, int, Field | None], Any]:
    def decode(reader: Reader, start: int, end: int, hint: Field | None) -> Any:
        items = _list(reader, start, end, hint)
        try:
            reader.charge(_table(len(items)))
            reader.charge_hashes(items)
            return make(items)
        except DecodeError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # tensors refuse to be compared
            raise DecodeError(f"a {what} holds what cannot be in one: {error}.") from error

    return decode


def _table(count: int) -> int:
    """The memory of the table of a set of so many values; the first few have room in the set itself."""
    slots = 8
    while 5 * count >= 3 * (slots - 1):
        slots *= 4 if slots < 1 << 16 else 2
    return 16 * slots if slots > 8 else 0


def _dict(reader: Reader, start: int, end: int, hint: Field | None) -> dict[Any, Any]:
    items = () if hint is None else _of_kind(hint, FieldKind.DICT).items
    hints = items if len(items) == 2 else (None, None)
    columns: tuple[list[Any], list[Any]] = ([], [])
    for number, kind, a, b in fields(reader.data, start, end):
        if number in (1, 2) and kind == DELIMITED:
            columns[number - 1].append(_nested(reader, a, b, hints[number - 1]))
    keys, values = columns
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


def _of_kind(hint: Field, *kinds: FieldKind) -> Field:
    """The one part of a union that can hold the value, where there is just one."""
    if hint.kind is not FieldKind.UNION:
        return hint
    found = [item for item in hint.items if item.kind in kinds]
    return found[0] if len(found) == 1 else hint


# --- documents


def _document(reader: Reader, start: int, end: int, hint: Field | None) -> Any:
    expected = _document_type(reader, start, end, hint, FieldKind.DOCUMENT)
    return decode_document(reader, start, end, expected, _members(hint, FieldKind.DOCUMENT))


def _array(reader: Reader, start: int, end: int, hint: Field | None) -> Any:
    expected = _document_type(reader, start, end, hint, FieldKind.DOCUMENTS)
    return decode_array(reader, start, end, expected, _members(hint, FieldKind.DOCUMENTS))


def _members(hint: Field | None, kind: FieldKind) -> tuple[type[Any], ...]:
    """The document classes of the members of a union."""
    if hint is None or hint.kind is not FieldKind.UNION:
        return ()
    return tuple(item.document_type for item in hint.items if item.kind is kind)


def _document_type(reader: Reader, start: int, end: int, hint: Field | None, kind: FieldKind) -> type[Any] | None:
    """The document class that a field is typed with, where it says what its documents hold.

    Of the classes in a union, it is the one that the message names: the registry of classes may know another class of
    that name by now.
    """
    if hint is None:
        return None
    members = [item for item in hint.items if item.kind is kind] if hint.kind is FieldKind.UNION else [hint]
    if len(members) == 1:
        return _closed(members[0].document_type) if members[0].kind is kind else None
    if not members:
        return None
    types = {_class_registry.class_name(item.document_type): item.document_type for item in members}
    parts = fields(reader.data, start, end)
    names = (read_text(reader.data, a, b) for number, wire, a, b in parts if number == 2 and wire == DELIMITED)
    return _closed(types.get(next(names, "")))


def _closed(document_type: type[Any] | None) -> type[Any] | None:
    return None if document_type is None or document_type.document_schema().is_open else document_type


def decode_document(
    reader: Reader, start: int, end: int, expected: type[Any] | None, members: Sequence[type[Any]] = ()
) -> Any:
    """The document of a message: of the expected class, or of a subclass of it that was written and is loaded.

    Where several classes are expected, they are `members`.
    """
    type_name, document_type, content, unknown = decode_fields(reader, start, end, expected, members)
    if document_type is None:
        return _class_registry.make_dynamic(type_name, unknown)
    accepted = document_type.document_schema().accepted
    return build_document(document_type, {accepted[name][1]: value for name, value in content.items()}, unknown, reader)


def decode_fields(
    reader: Reader, start: int, end: int, expected: type[Any] | None, members: Sequence[type[Any]] = ()
) -> tuple[str, Any, dict[str, Any], dict[str, Any]]:
    """The name of a document's class, the class, the values of its fields, and values that it has no fields for."""
    type_name, document_type, names, position = _head(reader, start, end, expected, members)
    accepted = {} if document_type is None else document_type.document_schema().accepted
    reader.charge(700 if document_type is None else 400 + 80 * len(accepted))
    content: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    order = iter(names)
    name = ""
    reader.descend()
    try:
        for number, kind, a, b in fields(reader.data, position, end):
            if number == 4 and kind == DELIMITED:
                name = _next_name(order, names)
                if name in accepted:
                    field = accepted[name][0]
                    content[field.name] = match(field, decode_value(reader, a, b, field))
                else:
                    unknown[name] = decode_value(reader, a, b)
    except DecodeError as error:
        shown = type_name.rpartition(":")[2][:60] if document_type is None else document_type.__name__
        raise DecodeError(below(f"{shown}.{name[:60]}", error)) from error
    if next(order, None) is not None:
        raise DecodeError(f"a document has {len(names)} names and fewer values.")
    reader.depth -= 1
    return type_name, document_type, content, unknown


def _next_name(order: Iterator[str], names: Sequence[str]) -> str:
    name = next(order, None)
    if name is None:
        raise DecodeError(f"a document has {len(names)} names and more values.")
    return name


def _head(
    reader: Reader, start: int, end: int, expected: Any, members: Sequence[type[Any]]
) -> tuple[str, Any, Sequence[str], int]:
    """The name of a document's class, the class, the names of its fields, and where to look for their values."""
    data = reader.data
    if expected is not None:
        known, known_names = document_head(expected.document_schema())
        behind = start + len(known)
        if data.startswith(known, start) and (behind == end or (behind < end and data[behind] != 0x1A)):  # a name
            return expected.__name__, expected, known_names, behind
    type_name = ""
    names: list[str] = []
    for number, kind, a, b in fields(data, start, end):
        if number == 3 and kind == DELIMITED:
            names.append(read_text(data, a, b))
            reader.charge(64)
        elif number == 2 and kind == DELIMITED:
            type_name = read_text(data, a, b)
        elif number == 1 and kind == VARINT:
            check_version(a)
    return type_name, _class_registry.find(type_name, expected, reader.options.types, members), names, start


def decode_array(
    reader: Reader, start: int, end: int, expected: type[Any] | None, members: Sequence[type[Any]] = ()
) -> Any:
    """The array of a message."""
    type_name = ""
    for number, kind, a, b in fields(reader.data, start, end):
        if number == 1 and kind == VARINT:
            check_version(a)
        elif number == 2 and kind == DELIMITED:
            type_name = read_text(reader.data, a, b)
    document_type = _class_registry.find(type_name, expected, reader.options.types, members)
    closed = _closed(document_type)
    documents = [
        decode_document(reader, a, b, closed)
        for number, kind, a, b in fields(reader.data, start, end)
        if number == 3 and kind == DELIMITED
    ]
    return _class_registry.make_array(document_type, documents, type_name)


def check_version(version: int) -> None:
    """Refuse what a later quire wrote in a way that this one would misread."""
    if version > VERSION:
        raise DecodeError(
            f"the bytes have version {version} of the format, this quire reads up to {VERSION}: update quire."
        )


def build_document(document_type: type[Any], content: dict[str, Any], unknown: dict[str, Any], reader: Reader) -> Any:
    """A validated document; what is missing takes its default."""
    extra = document_type.model_config.get("extra") == "allow"
    if unknown and reader.options.unknown == "error" and not extra:
        raise DecodeError(f"{document_type.__name__} has no field {next(iter(unknown))[:60]!r}.")
    document = validated(document_type, {**content, **unknown} if extra else content)
    if unknown and reader.options.unknown == "keep" and not extra:
        object.__setattr__(document, "__pydantic_extra__", unknown)
    return document


def validated(document_type: type[Any], content: Mapping[str, Any]) -> Any:
    """A document, checked by pydantic."""
    try:
        return document_type.__pydantic_validator__.validate_python(content, context=STORED)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in (document_type.__name__, *first["loc"]))
        missing = "; the bytes do not hold it, and it has no default" if first["type"] == "missing" else ""
        raise DecodeError(f"{path}: {first['msg']}{missing}.") from error


_Decoder = Callable[[Reader, int, int, Field | None], Any]
_UNKNOWN: tuple[int, _Decoder, int] = (-1, lambda *_: None, 0)
_KINDS: dict[int, tuple[int, _Decoder, int]] = {  # the wire type, what reads it, and what it takes in memory
    1: (VARINT, lambda *_: None, 8),
    2: (VARINT, lambda _, value, *__: value != 0, 8),
    3: (VARINT, _integer, 32),
    4: (FIXED64, _plain(lambda data, start, _: _DOUBLE.unpack_from(data, start)[0]), 32),
    5: (DELIMITED, _text, 60),
    6: (DELIMITED, _blob, 50),
    7: (DELIMITED, lambda reader, start, end, _: decode_tensor(reader, start, end), 200),
    8: (DELIMITED, _document, 0),
    9: (DELIMITED, _array, 200),
    10: (DELIMITED, _list, 72),
    11: (DELIMITED, _tuple, 56),
    12: (DELIMITED, _hashed(set, "set"), 224),
    13: (DELIMITED, _hashed(frozenset, "frozenset"), 224),
    14: (DELIMITED, _dict, 80),
    15: (DELIMITED, _big_integer, 40),
    16: (DELIMITED, _plain(_complex), 40),
    17: (DELIMITED, _moment(datetime), 60),
    18: (DELIMITED, _parsed("date", date.fromisoformat), 40),
    19: (DELIMITED, _moment(time), 60),
    20: (DELIMITED, _plain(_timedelta), 50),
    21: (DELIMITED, _plain(_uuid), 120),
    22: (DELIMITED, _parsed("decimal", Decimal), 120),
    23: (DELIMITED, _path, 400),
    24: (DELIMITED, _member, 100),
    25: (DELIMITED, lambda reader, start, end, _: decode_scalar(reader, start, end), 60),
    26: (DELIMITED, _pickled, 100),
}
