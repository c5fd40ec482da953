"""The plan of protobuf messages for a document class: messages, enums, fields, and how values travel in them.

`_proto_schema` makes a plan and writes it as a `.proto`; `_typed_messages` builds message classes from it and converts
documents. `ScalarForm` is a value that is a single scalar of protobuf; `KINDS` has the forms of each kind of field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Json, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from quire._equality import is_unchanged
from quire._extra_fields import build_tolerant_validator
from quire.schema import Field
from quire.tensors import cast_numbers

Label = Literal["", "optional", "repeated"]
DURATION = "google.protobuf.Duration"


class Wire(Enum):
    """The sort of type that a value has in protobuf."""

    SCALAR = "scalar"
    ENUM = "enum"
    MESSAGE = "message"


class Role(Enum):
    """What a message stands for in Python."""

    DOCUMENT = "document"
    WRAPPER = "wrapper"  # its one field is the value: a list inside a list, a list that may be None
    UNION = "union"
    RECORD = "record"  # the fields are the items: tuple[int, str]
    ENTRY = "entry"  # a key and a value of a dict
    TENSOR = "tensor"
    COMPLEX = "complex"
    DURATION = "duration"


@dataclass(frozen=True, slots=True)
class Slot:
    """How a Python value travels: as one value, as a repeated one, or as a map.

    `field` is one value in Python, and `container` the list, dict or array that holds many.
    """

    field: Field
    type: str
    wire: Wire = Wire.SCALAR
    container: Field | None = None
    repeated: bool = False
    key: Slot | None = None
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None
    comment: str = ""

    @property
    def many(self) -> bool:
        """Whether the slot holds any number of values."""
        return self.repeated or self.key is not None


@dataclass(frozen=True, slots=True)
class ProtoField:
    """One field of a message; `source` is its name in Python."""

    name: str
    number: int
    slot: Slot
    label: Label
    source: str
    comment: str = ""

    @property
    def type_text(self) -> str:
        """The type as it is written in a `.proto`."""
        return self.slot.type if self.slot.key is None else f"map<{self.slot.key.type}, {self.slot.type}>"

    @property
    def map_entry(self) -> str:
        """The name that protobuf gives to the entries of a map."""
        words = self.name.split("_")
        return "".join(word[:1].upper() + word[1:] for word in words) + "Entry"


@dataclass(frozen=True, slots=True)
class Reserved:
    """Numbers (from, to) and names of removed fields."""

    numbers: tuple[tuple[int, int], ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """One message, and what it stands for."""

    name: str
    key: str
    role: Role
    fields: tuple[ProtoField, ...] = ()
    reserved: Reserved = Reserved()
    comment: str = ""
    document_type: Any = None


@dataclass(frozen=True, slots=True)
class EnumPlan:
    """One enum: names and numbers of its values, zero first."""

    name: str
    key: str
    values: tuple[tuple[str, int], ...]
    reserved: Reserved = Reserved()


@dataclass(frozen=True, slots=True)
class ProtoPlan:
    """All messages and enums of a document class."""

    root: str
    package: str
    messages: dict[str, Message]
    enums: dict[str, EnumPlan]

    @property
    def needs_duration(self) -> bool:
        """Whether google/protobuf/duration.proto is imported."""
        return any(field.slot.type == DURATION for message in self.messages.values() for field in message.fields)


# --- values that are a single scalar in protobuf


class ScalarForm(NamedTuple):
    """A scalar type of protobuf, the conversions of a value, and a comment for the `.proto`."""

    type: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    comment: str = ""


def number_form(field: Field) -> ScalarForm | None:
    if issubclass(field.type, bool):
        return ScalarForm("bool", bool, bool)
    if issubclass(field.type, int):
        return ScalarForm("int64", int, field.type)
    return ScalarForm("double", float, field.type) if issubclass(field.type, float) else None


def flag_form(field: Field) -> ScalarForm | None:
    """Return the form of flags; other enums are enums of protobuf."""
    if not issubclass(field.type, Flag):
        return None
    return ScalarForm("int64", lambda value: int(value.value), field.type, "the bits")


def iso_form(base: Any, comment: str) -> Callable[[Field], ScalarForm]:
    """Return the form of dates and times: ISO 8601; what Python alone does not parse is left to pydantic."""

    def make(field: Field) -> ScalarForm:
        def decode(text: str) -> object:
            try:
                return field.type.fromisoformat(text)
            except ValueError:
                return _adapter(base).validate_strings(text)

        return ScalarForm("string", lambda value: value.isoformat(), decode, comment)

    return make


def string_form(field: Field) -> ScalarForm:
    """Return the form of texts; that of a subclass of `str` is its content, whatever its `__str__` returns."""
    return ScalarForm("string", str if field.type is str else str.__str__, field.type)


def text_form(comment: str) -> Callable[[Field], ScalarForm]:
    return lambda field: ScalarForm("string", str, field.type, comment)


def list_form(field: Field) -> ScalarForm | None:
    return ScalarForm("bytes", bytes, field.type) if field.type in (bytearray, memoryview) else None


def dict_form(field: Field) -> ScalarForm | None:
    """Return the form of a dict whose annotation has no types of keys and values."""
    return None if len(field.items) in (1, 2) else _json_form(field.type)


def any_form(field: Field) -> ScalarForm:
    """Return the form of values without a kind: a number for a numpy scalar, JSON for everything else."""
    tp = field.type
    if isinstance(tp, type) and issubclass(tp, np.generic):
        for base, name, plain in ((np.bool_, "bool", bool), (np.integer, "int64", int), (np.floating, "double", float)):
            if issubclass(tp, base):
                return ScalarForm(name, plain, lambda value: cast_numbers(np.array(value), np.dtype(tp))[()])
    return _json_form(tp)


def _json_form(tp: Any) -> ScalarForm:
    """Return the form of values without a type in protobuf: JSON, with what pydantic converts to it and back."""
    is_plain_dict = isinstance(tp, type) and issubclass(tp, dict) and not hasattr(tp, "__total__")
    if tp is Any or tp is object or tp is Json or is_plain_dict:
        return ScalarForm("string", _dump_json, _load_json, "any value, in JSON")
    if tp in (None, type(None)):
        return ScalarForm("string", _dump_json, _load_json, "null, in JSON")
    name = getattr(tp, "__name__", str(tp))

    def encode(value: Any) -> str:
        text = _adapter(tp).dump_json(value, warnings="error")
        try:
            decoded = _adapter(tp).validate_json(text)
        except ValidationError as error:
            raise TypeError(f"its JSON cannot be read back as {name}") from error
        if not is_unchanged(value, decoded):
            raise TypeError(f"its JSON would be read back as {decoded!r:.60}")
        return text.decode()

    return ScalarForm("string", encode, lambda text: _tolerant_validator(tp).validate_json(text), f"{name}, in JSON")


@cache
def _adapter(tp: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(tp)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return TypeAdapter(tp, config=ConfigDict(arbitrary_types_allowed=True))


@cache
def _tolerant_validator(tp: Any) -> SchemaValidator:
    """Return a validator that follows the rules of schema evolution: unknown fields are ignored."""
    return build_tolerant_validator(_adapter(tp).core_schema)


def _dump_json(value: object) -> str:
    _check_json(value)
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _check_json(value: object) -> None:
    """Raise an error for values that JSON would silently change."""
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
    def parse_finite(digits: str) -> float:  # also refuses NaN and Infinity, which Python's json module would accept
        number = float(digits)
        if not math.isfinite(number):
            raise ValueError(f"{digits} is not a number of JSON")
        return number

    return json.loads(text, parse_constant=parse_finite, parse_float=parse_finite)
