"""Simple values on the wire: what stands for a date, a path or a number with no type of its own in protobuf."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import date, datetime, time
from enum import Flag
from functools import cache
from typing import Any, NamedTuple, NoReturn

import numpy as np
from pydantic import ConfigDict, Json, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from quire._extra_fields import build_tolerant_validator
from quire.codec._readback import is_unchanged
from quire.schema import Field, FieldKind
from quire.tensors import cast_numbers


class Simple(NamedTuple):
    """A type of protobuf, both ways of a value, and what to tell the reader of the `.proto`."""

    type: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    comment: str = ""


def simple_form(field: Field) -> Simple | None:
    """The form of a value that is a single scalar in protobuf; None for everything else."""
    if field.kind is FieldKind.SCALAR:
        return _number(field.type)
    if field.kind is FieldKind.ENUM:
        return Simple("int64", lambda v: int(v.value), field.type, "the bits") if issubclass(field.type, Flag) else None
    if field.kind in _MAKERS:
        return _MAKERS[field.kind](field.type)
    if field.kind is FieldKind.LIST and field.type in (bytearray, memoryview):
        return Simple("bytes", bytes, field.type)
    if isinstance(field.type, type) and issubclass(field.type, np.generic):
        return _numpy_scalar(field.type)
    if field.kind is FieldKind.ANY or (field.kind is FieldKind.DICT and len(field.items) not in (1, 2)):
        return _json(field.type)
    return None


def _number(tp: Any) -> Simple | None:
    if issubclass(tp, bool):
        return Simple("bool", bool, bool)
    if issubclass(tp, int):
        return Simple("int64", int, tp)
    return Simple("double", float, tp) if issubclass(tp, float) else None


def _numpy_scalar(tp: Any) -> Simple:
    for known, name, plain in ((np.bool_, "bool", bool), (np.integer, "int64", int), (np.floating, "double", float)):
        if issubclass(tp, known):
            return Simple(name, plain, lambda value: cast_numbers(np.array(value), np.dtype(tp))[()])
    return _json(tp)


def _iso(tp: Any, parse: Callable[[str], Any], comment: str) -> Simple:
    """Dates and times in the words of ISO 8601; what Python alone does not understand is left to pydantic."""

    def decode(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            return _adapter(tp).validate_strings(text)

    return Simple("string", lambda value: value.isoformat(), decode, comment)


_MAKERS: dict[FieldKind, Callable[[Any], Simple]] = {
    FieldKind.TEXT: lambda tp: Simple("string", str if tp is str else _text, tp),
    FieldKind.BYTES: lambda tp: Simple("bytes", bytes, tp),
    FieldKind.DATETIME: lambda tp: _iso(
        datetime, tp.fromisoformat, "date and time in ISO 8601, with the offset if known"
    ),
    FieldKind.DATE: lambda tp: _iso(date, tp.fromisoformat, "date in ISO 8601"),
    FieldKind.TIME: lambda tp: _iso(time, tp.fromisoformat, "time of day in ISO 8601"),
    FieldKind.UUID: lambda tp: Simple("string", str, tp, "UUID, 8-4-4-4-12 hexadecimal digits"),
    FieldKind.DECIMAL: lambda tp: Simple("string", str, tp, "decimal number"),
    FieldKind.PATH: lambda tp: Simple("string", str, tp, "path"),
}


def _text(value: str) -> str:
    return str.__str__(value)


def _json(tp: Any) -> Simple:
    """Values that have no type here travel as JSON: what JSON has, and what pydantic turns into it and back."""
    if (
        tp is Any
        or tp is object
        or tp is Json
        or (isinstance(tp, type) and issubclass(tp, dict) and not hasattr(tp, "__total__"))
    ):
        return Simple("string", _dump_json, _load_json, "any value, in JSON")
    if tp in (None, type(None)):
        return Simple("string", _dump_json, _load_json, "null, in JSON")
    name = getattr(tp, "__name__", str(tp))

    def encode(value: Any) -> str:
        text = _adapter(tp).dump_json(value, warnings="error")
        try:
            again = _adapter(tp).validate_json(text)
        except ValidationError as error:
            raise TypeError(f"its JSON cannot be read back as {name}") from error
        if not is_unchanged(value, again):
            raise TypeError(f"its JSON would be read back as {again!r:.60}")
        return text.decode()

    return Simple("string", encode, lambda text: _reader(tp).validate_json(text), f"{name}, in JSON")


@cache
def _adapter(tp: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(tp)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return TypeAdapter(tp, config=ConfigDict(arbitrary_types_allowed=True))


@cache
def _reader(tp: Any) -> SchemaValidator:
    """Return a validator that follows the rules of schema evolution: unknown fields are ignored."""
    return build_tolerant_validator(_adapter(tp).core_schema)


def _dump_json(value: Any) -> str:
    _check_json(value)
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _check_json(value: Any) -> None:
    """Refuse what JSON would silently make something else of."""
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"JSON has only strings as keys, and {key!r} is {type(key).__name__}")
            _check_json(item)
    elif type(value) is list:
        for item in value:
            _check_json(item)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"JSON has no {type(value).__name__}; annotate the field with the type that it holds")


def _load_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse_constant(digits)


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON")
