"""Values as messages: a function for each type on the way out, one for each kind on the way in."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import PurePath
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
from pydantic import BaseModel, RootModel, networks
from pydantic_core import MultiHostUrl, Url

from quire._class_registry import class_name
from quire._protocols import is_array_type, is_document_type
from quire.codec._context import MAX_DEPTH, Writer
from quire.codec._errors import below
from quire.codec._tensors import encode_elements, encode_tensor
from quire.codec._wire import FIXED64, VARINT, delimited, tag, text, uint, zigzag
from quire.errors import EncodeError
from quire.schema import Schema, field_aliases, takes_names
from quire.tensors import framework_of

_MIN, _MAX = -(1 << 63), (1 << 63) - 1
_DOUBLE = struct.Struct("<d")


class UnknownMember(NamedTuple):
    """A member of an enum whose class is not known here; it is written again as it was."""

    type: str
    name: str
    value: Any


def encode_value(value: Any, writer: Writer) -> bytes:
    """The message of a value of any type that has a form on the wire."""
    encode = _ENCODERS.get(type(value))
    if encode is not None:
        return encode(value, writer)
    if writer.depth > MAX_DEPTH:
        raise EncodeError(f"values lie more than {MAX_DEPTH} levels deep inside each other.")
    writer.depth += 1
    content = _encode_nested(value, writer)
    writer.depth -= 1
    return content


def _encode_nested(value: Any, writer: Writer) -> bytes:
    encode = _CONTAINERS.get(type(value)) or _wrapped(type(value))
    if encode is not None:
        return encode(value, writer)
    try:
        return _encode_other(value, writer)
    except EncodeError:
        if not writer.allow_pickle:
            raise
        return delimited(26, pickle.dumps(value, protocol=5))


def _wrapped(tp: type[Any]) -> _Encoder | None:
    """The encoder of a class like `ImageUrl`, which is a text or bytes on the wire; found once."""
    if not getattr(tp, "__quire_plain__", False):
        return None
    found = next((encode for known, encode in _BY_BASE if issubclass(tp, known)), None)
    if found is not None:
        _CONTAINERS[tp] = found
    return found


def _encode_other(value: Any, writer: Writer) -> bytes:
    tp = type(value)
    if framework_of(value) is not None:
        return delimited(7, encode_tensor(value, writer))
    if is_document_type(tp):
        return delimited(8, encode_document(value, writer))
    if is_array_type(tp):
        return delimited(9, encode_array(value, writer))
    for known, encode in _BY_BASE:
        if isinstance(value, known):
            return encode(value, writer)
    if dataclasses.is_dataclass(value):
        return _dict({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, writer)
    raise EncodeError(
        f"{tp.__module__}.{tp.__qualname__} has no form on the wire. Use a type that has one, or pass "
        "allow_pickle=True on both sides."
    )


# --- documents

VERSION = 1
"""The version of the wire format; a reader refuses a later one."""


def declared_name(document: Any) -> str:
    """The name of a document's class on the wire; a dynamic document keeps the name that it was read with."""
    return getattr(document, "__quire_name__", None) or class_name(type(document))


def encode_document(document: Any, writer: Writer) -> bytes:
    """The message of a document with all that it holds."""
    content, extra = document.__dict__, document.__pydantic_extra__
    schema = type(document).document_schema()
    head, names = document_head(schema)
    if schema.notes.get("ambiguous_unions") != ():
        _check_unions(schema, content, writer)
    if extra is not None or len(names) != len(content) or tuple(content) != names:
        pairs = {name: content[name] for name in names if name in content}
        return encode_fields(declared_name(document), {**pairs, **(extra or {})}, writer)
    return head + _encode_contents(type(document).__name__, content, writer)


def _check_unions(schema: Schema, content: Mapping[str, Any], writer: Writer) -> None:
    """Look at unions whose values may be read as others; most classes have none, and note it."""
    unions = importlib.import_module("quire.codec._unions")  # which reads what this module writes
    for field in unions.ambiguous_fields(schema):
        if field.name in content:
            try:
                unions.check_values(schema, field, [content[field.name]], allow_pickle=writer.allow_pickle)
            except EncodeError as error:
                raise EncodeError(below(f"{schema.name}.{field.name}", error)) from error


def document_head(schema: Schema) -> tuple[bytes, tuple[str, ...]]:
    """The first part of every document of a class that holds its fields and no more; and their names."""
    found: tuple[bytes, tuple[str, ...]] | None = schema.notes.get("document_head")
    if found is None:
        names = tuple(schema.by_name)
        found = schema.notes["document_head"] = _head(class_name(schema.document_type), names), names
    return found


def _head(name: str, names: Iterable[str]) -> bytes:
    return b"".join([b"\x08\x01", text(2, name), *(delimited(3, utf8(key)) for key in names)])


def encode_fields(name: str, content: Mapping[str, Any], writer: Writer) -> bytes:
    """The message of a document's fields."""
    return _head(name, content) + _encode_contents(name.rpartition(":")[2], content, writer)


def _encode_contents(name: str, content: Mapping[str, Any], writer: Writer) -> bytes:
    parts: list[bytes] = []
    try:
        for value in content.values():
            parts.append(delimited(4, encode_value(value, writer)))  # noqa: PERF401 - their number tells where it failed
    except EncodeError as error:
        raise EncodeError(below(f"{name}.{list(content)[len(parts)]}", error)) from error
    return b"".join(parts)


def encode_array(array: Any, writer: Writer) -> bytes:
    """The message of an array, document by document."""
    return encode_documents(array._declared or class_name(array.document_type), array._documents, writer)


def encode_documents(name: str, documents: Iterable[Any], writer: Writer) -> bytes:
    """The message of documents one by one, as an array of the class of that name."""
    content = b"".join(delimited(3, encode_document(document, writer)) for document in documents)
    return b"\x08\x01" + text(2, name) + content


# --- single values


def utf8(value: str) -> bytes:
    """A text as bytes."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(f"half a character (a lone surrogate) has no form on the wire: {value[:40]!r}.") from error


def _integer(value: int) -> bytes:
    if _MIN <= value <= _MAX:
        return b"\x18" + zigzag(value)
    return delimited(15, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _moment(number: int, value: datetime | time) -> bytes:
    zone = value.tzinfo
    if zone is not None and value.utcoffset() is None and isinstance(value, datetime):
        raise EncodeError(f"the zone of {value!r} knows no offset.")
    name = zone.key if isinstance(zone, ZoneInfo) else ""
    shown = value.replace(tzinfo=None) if name else value
    return delimited(number, text(1, shown.isoformat()) + text(2, name) + uint(3, value.fold))


def _timedelta(value: timedelta) -> bytes:
    parts = (value.days, value.seconds, value.microseconds)
    return delimited(20, b"".join(tag(i, VARINT) + zigzag(part) for i, part in enumerate(parts, 1) if part))


def _complex(value: complex) -> bytes:
    content = tag(1, FIXED64) + _DOUBLE.pack(value.real) + tag(2, FIXED64) + _DOUBLE.pack(value.imag)
    return delimited(16, content)


def _member(value: Enum, writer: Writer) -> bytes:
    return _member_parts(class_name(type(value)), value.name or "", value.value, writer)


def _member_parts(type_name: str, name: str, value: Any, writer: Writer) -> bytes:
    return delimited(24, text(1, type_name) + text(2, name) + delimited(3, encode_value(value, writer)))


def _scalar(value: np.generic, writer: Writer) -> bytes:
    array = np.asarray(value)
    return delimited(25, text(1, array.dtype.name) + encode_elements(array, writer))


# --- containers


def _items(number: int) -> Callable[[Any, Writer], bytes]:
    def encode(items: Any, writer: Writer) -> bytes:
        return delimited(number, b"".join([delimited(1, encode_value(item, writer)) for item in items]))

    return encode


def _dict(value: Mapping[Any, Any], writer: Writer) -> bytes:
    keys = [delimited(1, encode_value(key, writer)) for key in value]
    return delimited(14, b"".join(keys + [delimited(2, encode_value(item, writer)) for item in value.values()]))


_list, _tuple, _set, _frozen_set = map(_items, (10, 11, 12, 13))


def _model_content(model: BaseModel) -> dict[str, Any]:
    """The values of a pydantic model that is no document, by the names that the model takes them by."""
    fields, content = type(model).model_fields, model.__dict__  # which may also hold cached properties
    keys = {name: name for name in fields}
    if not takes_names(type(model)):
        keys = {name: next(iter(field_aliases(info)), name) for name, info in fields.items()}
    return {**{keys[name]: content[name] for name in fields if name in content}, **(model.__pydantic_extra__ or {})}


def _pattern(value: re.Pattern[Any], writer: Writer) -> bytes:
    """A regular expression as its text; with its flags, where the text alone would be compiled with others."""
    if re.compile(value.pattern).flags == value.flags:
        return encode_value(value.pattern, writer)
    return _tuple((value.pattern, value.flags), writer)


_Encoder = Callable[[Any, Writer], bytes]
_ENCODERS: dict[type[Any], _Encoder] = {
    type(None): lambda _, __: b"\x08\x00",
    bool: lambda value, _: b"\x10\x01" if value else b"\x10\x00",
    int: lambda value, _: _integer(value),
    float: lambda value, _: b"\x21" + _DOUBLE.pack(value),
    str: lambda value, _: delimited(5, utf8(value)),
    bytes: lambda value, _: delimited(6, value),
    bytearray: lambda value, _: delimited(6, bytes(value)),
    complex: lambda value, _: _complex(value),
    datetime: lambda value, _: _moment(17, value),
    date: lambda value, _: delimited(18, value.isoformat().encode()),
    time: lambda value, _: _moment(19, value),
    timedelta: lambda value, _: _timedelta(value),
    UUID: lambda value, _: delimited(21, value.bytes),
    Decimal: lambda value, _: delimited(22, str(value).encode()),
}
_CONTAINERS: dict[type[Any], _Encoder] = {
    list: _list,
    tuple: _tuple,
    set: _set,
    frozenset: _frozen_set,
    dict: _dict,
    UnknownMember: lambda value, writer: _member_parts(value.type, value.name, value.value, writer),
}
# What has no message of its own takes the form of another; a field that is typed with it makes it again.
_URLS = (Url, MultiHostUrl, getattr(networks, "_BaseUrl", Url), getattr(networks, "_BaseMultiHostUrl", Url))
_AS_TEXT = (*_URLS, IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network)
_BY_BASE: tuple[tuple[Any, _Encoder], ...] = (
    (Enum, _member),
    (np.generic, _scalar),
    (PurePath, lambda value, _: delimited(23, utf8(str(value)))),
    (RootModel, lambda value, writer: encode_value(value.root, writer)),
    (BaseModel, lambda value, writer: _dict(_model_content(value), writer)),
    (str, lambda value, _: delimited(5, utf8(str.__str__(value)))),
    (int, lambda value, _: _integer(int(value))),
    (float, lambda value, _: b"\x21" + _DOUBLE.pack(value)),
    (bytes, lambda value, _: delimited(6, bytes(value))),
    (datetime, lambda value, _: _moment(17, value)),
    (Decimal, lambda value, _: delimited(22, str(value).encode())),
    (_AS_TEXT, lambda value, _: delimited(5, str(value).encode())),
    (re.Pattern, _pattern),
    (Mapping, _dict),
    (tuple, _tuple),
    (frozenset, _frozen_set),
    (AbstractSet, _set),
    (Sequence, _list),
)
