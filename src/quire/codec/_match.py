"""Whether a value that was read is of the kind that its field has: a changed type is an error, not a guess."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from quire._protocols import is_array_type, is_document_type
from quire.codec._values import UnknownMember
from quire.errors import DecodeError
from quire.schema import Field, FieldKind
from quire.tensors import describe, framework_of

_TYPES: dict[FieldKind, tuple[type[Any], ...]] = {
    FieldKind.TEXT: (str,),
    FieldKind.BYTES: (bytes,),
    FieldKind.DATETIME: (datetime,),
    FieldKind.TIME: (time,),
    FieldKind.TIMEDELTA: (timedelta,),
    FieldKind.UUID: (UUID,),
    FieldKind.DECIMAL: (Decimal,),
    FieldKind.PATH: (PurePath,),
    FieldKind.ENUM: (Enum,),
    FieldKind.LIST: (list, tuple, set, frozenset),
    FieldKind.DICT: (Mapping,),
}
_NUMBERS: dict[type[Any], tuple[type[Any], ...]] = {  # a number may have been widened since
    bool: (bool,),
    int: (int,),
    float: (float, int),
    complex: (complex, float, int),
}


EXACT = 2**53
"""A float holds every integer up to here."""


def check_exact(value: int, field: Field) -> int:
    """The integer, if a float holds it: a field of `int` that became one of `float` has the same values, or none."""
    try:
        exact = int(float(value)) == value
    except OverflowError:
        exact = False
    if not exact:
        raise DecodeError(f"the data holds the integer {value}, which a float would round, but the field is {field}.")
    return value


def match(field: Field, value: Any) -> Any:
    """The value, if it is of the field's kind."""
    if type(value) is field.type:
        return value
    if (value is None and field.nullable) or field.kind in (FieldKind.ANY, FieldKind.UNION):
        return value
    if isinstance(value, UnknownMember) and field.kind is FieldKind.ENUM:
        return value.value  # an enum that was renamed or moved: its value tells
    if _fits(field, value):
        return _widened(value) if field.type is complex else value
    if field.type is bytearray and type(value) is bytes:
        return bytearray(value)
    raise DecodeError(f"the bytes hold {describe(value)}, but the field is {field}.")


def _widened(value: float) -> complex:
    try:
        return complex(value)  # which pydantic does only since 2.9
    except OverflowError as error:
        raise DecodeError("the bytes hold an integer that is too large for the field.") from error


def _fits(field: Field, value: Any) -> bool:
    kind = field.kind
    if kind is FieldKind.SCALAR:
        known = next((base for base in _NUMBERS if issubclass(field.type, base)), field.type)
        return isinstance(value, _NUMBERS.get(known, (known,))) and isinstance(value, bool) == (known is bool)
    if kind is FieldKind.TENSOR:
        return framework_of(value) is not None
    if kind is FieldKind.DOCUMENT:
        return is_document_type(type(value))
    if kind is FieldKind.DOCUMENTS:
        return is_array_type(type(value))
    if kind is FieldKind.DATE:
        return isinstance(value, date) and not isinstance(value, datetime)
    return isinstance(value, _TYPES[kind])
