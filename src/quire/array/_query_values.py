"""Convert the values of a query to the form in which documents hold a field's values, and reject others.

A value is one that the field can hold, or its text in JSON (a date as '2024-05-01', a UUID, a Decimal, a
path). An enum field takes members, values and, unless a member has that value, names. None stands for a missing value,
and every field takes it. Anything else never matches, which is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from numbers import Number, Real
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np
from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from quire._protocols import is_array_type, is_document_type
from quire.errors import did_you_mean
from quire.schema import Field, FieldKind
from quire.tensors import framework_of

LISTS = (list, tuple, set, frozenset)
_DAY = re.compile(r"\d{4}-\d\d-\d\d")


class MismatchError(Exception):
    """Raised for a value that never matches a field; the message is a hint, or empty."""


def equal_forms(field: Field, value: Any) -> list[Any]:
    """Return the values of a field that equal a value of a query; several if a union leaves the type open."""
    value = _plain(value)
    if value is None:
        return [None]
    if field.choices:
        _check_choice(field, value)
    return _EQUAL[field.kind](field, value)


def ordered_forms(field: Field, value: Any) -> list[Any]:  # noqa: C901 - a case for each kind
    """Return the values that `$gt` and the other comparisons compare a field's values with."""
    value = _plain(value)
    if value is None:
        raise MismatchError("None has no order: use $exists.")
    kind, tp = field.kind, field.type
    if kind is FieldKind.SCALAR and tp is not complex:
        return [_check(value, isinstance(value, Real), _number_hint(value))]
    if kind is FieldKind.DATETIME and type(value) is date:
        return [datetime(value.year, value.month, value.day)]  # noqa: DTZ001 - as naive as the day
    if kind is FieldKind.DATETIME and isinstance(value, str):
        return [_parse(datetime, value)]
    if kind is FieldKind.ENUM:
        return [_ordered_member(field, value)]
    if kind is FieldKind.TENSOR:
        return [_check(value, isinstance(value, Number) or framework_of(value) is not None)]
    if kind is FieldKind.LIST and isinstance(value, LISTS):
        raise MismatchError("Lists have no order: compare their elements.")
    if kind in (FieldKind.UNION, FieldKind.LIST) and field.items:
        return _of_any(field.items, value, ordered_forms)
    if kind in (FieldKind.ANY, FieldKind.LIST):
        return [value]
    if kind in _WITHOUT_ORDER or (kind is FieldKind.SCALAR and tp is complex):
        raise MismatchError("It has no order.")
    return equal_forms(field, value)


def has_text(field: Field) -> bool:
    """Whether a field may hold text for `$regex` to search."""
    if field.kind in (FieldKind.LIST, FieldKind.UNION) and field.items:
        return any(map(has_text, field.items))
    if field.kind is FieldKind.ENUM:
        return any(isinstance(member.value, str) for member in field.type)
    return field.kind in (FieldKind.TEXT, FieldKind.PATH, FieldKind.ANY, FieldKind.UNION, FieldKind.LIST)


def has_size(field: Field) -> bool:
    """Whether a field may hold values with a length for `$size`."""
    if field.kind is FieldKind.UNION:
        return any(map(has_size, field.items))
    sized = (FieldKind.LIST, FieldKind.DOCUMENTS, FieldKind.DICT, FieldKind.TEXT, FieldKind.BYTES)
    return field.kind in (*sized, FieldKind.TENSOR, FieldKind.ANY)


def is_whole(field: Field | None, value: Any) -> bool:
    """Whether a value is meant for a list as a whole; else for its elements."""
    if field is not None and field.kind is FieldKind.LIST and isinstance(value, LISTS) and field.items:
        try:
            _as_list(field, value)
        except MismatchError:
            return False  # [1, 2] is an element of list[list[int]]
        return True
    return value is None or isinstance(value, LISTS) or is_array_type(type(value))


_WITHOUT_ORDER = (FieldKind.DOCUMENT, FieldKind.DOCUMENTS, FieldKind.DICT)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _check(value: Any, holds: bool, hint: str = "") -> Any:  # noqa: FBT001 - a condition
    if not holds:
        raise MismatchError(hint)
    return value


def _check_choice(field: Field, value: Any) -> None:
    """Reject values that a Literal does not list; for an enum, members and values both count."""
    known = [getattr(choice, "value", choice) for choice in field.choices]
    if value not in field.choices and value not in known:
        raise MismatchError(did_you_mean(str(value), map(str, known)))


def _equal_scalar(field: Field, value: Any) -> list[Any]:
    if field.type is bool:
        return [bool(_check(value, isinstance(value, Real) and value in (0, 1), _number_hint(value)))]
    numeric = isinstance(value, Number) if field.type is complex else isinstance(value, Real)
    _check(value, numeric, _number_hint(value))
    whole = field.type is not int or value == int(value) if _is_finite(value) else field.type is not int
    return [_check(value, whole, "It holds whole numbers.")]


def _is_finite(value: Any) -> bool:
    return bool(value == value) and abs(value) != float("inf")


def _number_hint(value: Any) -> str:
    """Suggest a number for a number in quotes."""
    if isinstance(value, str):
        for read in (int, float):
            try:
                return f"Did you mean {read(value)!r}?"
            except ValueError:
                continue
        if value.lower() in ("true", "false"):
            return f"Did you mean {value.lower() == 'true'}?"
    return ""


def _equal_text(_: Field, value: Any) -> list[Any]:
    hint = f"Did you mean {str(value)!r}?" if isinstance(value, (int, float, UUID, PurePath)) else ""
    return [_check(value, isinstance(value, str), hint)]


def _equal_bytes(_: Field, value: Any) -> list[Any]:
    hint = "Text is not bytes: write b'...'." if isinstance(value, str) else ""
    return [bytes(_check(value, isinstance(value, (bytes, bytearray, memoryview)), hint))]


def _member(field: Field, value: Any) -> Any:
    tp: Any = field.type
    if isinstance(value, Enum) and not isinstance(value, tp):
        raise MismatchError(f"It is a member of {type(value).__name__}.")
    try:
        return tp(value)
    except (ValueError, TypeError, KeyError):
        pass
    if isinstance(value, str) and value in tp.__members__:
        return tp[value]
    raise MismatchError(did_you_mean(str(value), [str(member.value) for member in tp]))


def _equal_enum(field: Field, value: Any) -> list[Any]:
    member = _member(field, value)
    return [member, member.value]  # which a class with use_enum_values holds


def _ordered_member(field: Field, value: Any) -> Any:
    if not issubclass(field.type, (int, float, str)):
        raise MismatchError("Its members have no order.")
    if issubclass(field.type, str):
        return _check(value, isinstance(value, str))
    return _check(value, isinstance(value, Real), _number_hint(value))


def _parse(tp: Any, text: str) -> Any:
    """Parse a text as JSON would; a bare number, which pydantic takes for seconds, is rejected."""
    try:
        if not re.fullmatch(r"\s*[+-]?[\d.]+\s*", text):
            return TypeAdapter(tp).validate_python(text)
    except ValidationError:
        pass
    raise MismatchError(_EXAMPLES[tp])


_EXAMPLES: dict[Any, str] = {
    datetime: "Write a datetime, or a text like '2024-05-01T12:30:00'.",
    date: "Write a date, or a text like '2024-05-01'.",
    time: "Write a time, or a text like '12:30:00'.",
    timedelta: "Write a timedelta, or a text like 'PT1H30M'.",
}


def _equal_datetime(_: Field, value: Any) -> list[Any]:
    is_day = type(value) is date or (isinstance(value, str) and _DAY.fullmatch(value.strip()) is not None)
    if is_day:
        raise MismatchError("A day is a range of times: use $gte with it and $lt with the next.")
    if isinstance(value, str):
        return [_parse(datetime, value)]
    return [_check(value, isinstance(value, datetime), _EXAMPLES[datetime])]


def _moment(tp: Any) -> Callable[[Field, Any], list[Any]]:
    def forms(_: Field, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [_parse(tp, value)]
        fits = isinstance(value, tp) and not (tp is date and isinstance(value, datetime))
        return [_check(value, fits, _EXAMPLES[tp])]

    return forms


def _equal_uuid(_: Field, value: Any) -> list[Any]:
    try:
        return [UUID(value) if isinstance(value, str) else _check(value, isinstance(value, UUID))]
    except ValueError:
        raise MismatchError("Write a UUID, or its text.") from None


def _equal_decimal(_: Field, value: Any) -> list[Any]:
    """Convert a value to a Decimal; a float is the decimal that it is written as: 0.1 is Decimal('0.1')."""
    try:
        if isinstance(value, (str, float)):
            return [Decimal(repr(value) if isinstance(value, float) else value)]
    except InvalidOperation:
        raise MismatchError("Write a Decimal, a number, or its text.") from None
    return [_check(value, isinstance(value, (int, Decimal)))]


def _equal_path(field: Field, value: Any) -> list[Any]:
    return [field.type(_check(value, isinstance(value, (str, PurePath))))]


def _equal_tensor(field: Field, value: Any) -> list[Any]:
    framework = framework_of(value)
    expected = getattr(field.type, "_framework_name", None)
    if framework is None or (expected is not None and framework.name != expected):
        raise MismatchError(
            f"Compare it with a tensor{f' of {expected}' if expected else ''}, or filter by a function."
        )
    return [value]


def _equal_document(field: Field, value: Any) -> list[Any]:
    hint = f"Compare its fields: '{field.name}.<field>'."
    return [_check(value, is_document_type(type(value)) and isinstance(value, field.document_type), hint)]


def _equal_documents(field: Field, value: Any) -> list[Any]:
    if is_document_type(type(value)):
        return _equal_document(field, value)
    hint = f"Compare the fields of its documents: '{field.name}.<field>'."
    same = is_array_type(type(value)) and value.document_type is field.document_type
    return [_check(value, same, hint)]


def _equal_list(field: Field, value: Any) -> list[Any]:
    if isinstance(value, LISTS):
        try:
            return [_as_list(field, value)]
        except MismatchError:
            if not any(item.kind in (FieldKind.LIST, FieldKind.UNION, FieldKind.ANY) for item in field.items):
                raise
    return _of_any(field.items, value, equal_forms) if field.items else [value]


def _as_list(field: Field, value: Any) -> Any:
    """Convert a list of a query to the field's own kind of list."""
    unordered = isinstance(value, (set, frozenset))
    tp = field.type if field.type in LISTS else tuple if isinstance(value, tuple) else list
    if unordered and tp not in (set, frozenset):
        raise MismatchError("A set has no order: write a list.")
    if not field.items:
        return tp(value)
    positional = field.type is tuple and len(field.items) > 1
    if positional and len(value) != len(field.items):
        raise MismatchError(f"It holds {len(field.items)} values.")
    parts: Iterable[tuple[Field, Any]] = (
        zip(field.items, value, strict=True) if positional else ((field.items[0], item) for item in value)
    )
    return tp(_held_form(item, part) for item, part in parts)


def _held_form(field: Field, value: Any) -> Any:
    """Convert a value inside a list or dict; here, an element does not stand for a list that contains it."""
    _check(value, field.kind is not FieldKind.LIST or value is None or isinstance(value, LISTS))
    return equal_forms(field, value)[0]


def _equal_dict(field: Field, value: Any) -> list[Any]:
    _check(value, isinstance(value, Mapping), f"Compare one of its values: '{field.name}.<key>'.")
    if len(field.items) != 2:
        return [value]
    keys, values = field.items
    return [{_held_form(keys, key): _held_form(values, item) for key, item in value.items()}]


def _equal_union(field: Field, value: Any) -> list[Any]:
    return _of_any(field.items, value, equal_forms)


def _of_any(fields: Iterable[Field], value: Any, forms: Callable[[Field, Any], list[Any]]) -> list[Any]:
    """Return the forms that a value has for several types; an error if no type accepts it."""
    values: list[Any] = []
    hints: list[str] = []
    for field in fields:
        try:
            values += forms(field, value)
        except MismatchError as error:
            hints.append(str(error))
    if not values:
        raise MismatchError(next(filter(None, hints), ""))
    return values


def _equal_any(field: Field, value: Any) -> list[Any]:
    """Return the value and, for a type that only pydantic knows, such as a URL, the value that it parses to."""
    if field.type is Any or field.choices or not isinstance(field.type, type) or isinstance(value, field.type):
        return [value]
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(field.type)
    except PydanticSchemaGenerationError:
        adapter = TypeAdapter(field.type, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return [value, adapter.validate_python(value)]
    except ValidationError as error:
        raise MismatchError(f"{error.errors(include_url=False)[0]['msg']}.") from None


_EQUAL: dict[FieldKind, Callable[[Field, Any], list[Any]]] = {
    FieldKind.SCALAR: _equal_scalar,
    FieldKind.TEXT: _equal_text,
    FieldKind.BYTES: _equal_bytes,
    FieldKind.ENUM: _equal_enum,
    FieldKind.DATETIME: _equal_datetime,
    FieldKind.DATE: _moment(date),
    FieldKind.TIME: _moment(time),
    FieldKind.TIMEDELTA: _moment(timedelta),
    FieldKind.UUID: _equal_uuid,
    FieldKind.DECIMAL: _equal_decimal,
    FieldKind.PATH: _equal_path,
    FieldKind.TENSOR: _equal_tensor,
    FieldKind.DOCUMENT: _equal_document,
    FieldKind.DOCUMENTS: _equal_documents,
    FieldKind.LIST: _equal_list,
    FieldKind.DICT: _equal_dict,
    FieldKind.UNION: _equal_union,
    FieldKind.ANY: _equal_any,
}
