"""What a document class is in protobuf: messages, enums and numbered fields.

The plan is made by `_proto_schema`, written by `_proto_text`, and turned into message classes by `_typed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from quire.schema import Field

Label = Literal["", "optional", "repeated"]


class Wire(Enum):
    """What one value is on the wire."""

    SCALAR = "scalar"
    ENUM = "enum"
    MESSAGE = "message"


class Role(Enum):
    """What a message stands for in Python."""

    DOCUMENT = "document"
    WRAPPER = "wrapper"  # one field, which is the value: a list inside a list, a list that may be None
    UNION = "union"
    RECORD = "record"  # the fields are the items: tuple[int, str]
    ENTRY = "entry"  # a key and a value of a dict
    TENSOR = "tensor"
    COMPLEX = "complex"
    DURATION = "duration"


@dataclass(frozen=True, slots=True)
class Slot:
    """How a Python value travels: as one value, as a repeated one, or as a map.

    `field` is what one value is in Python, and `container` the list, dict or array that holds many.
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
        """The type as it is written."""
        return self.slot.type if self.slot.key is None else f"map<{self.slot.key.type}, {self.slot.type}>"

    @property
    def map_entry(self) -> str:
        """The name that protobuf gives to the message behind a map."""
        words = self.name.split("_")
        return "".join(word[:1].upper() + word[1:] for word in words) + "Entry"


@dataclass(frozen=True, slots=True)
class Reserved:
    """Numbers (from, to) and names that were in use once."""

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
    """One enum: names and numbers of its values, the zero first."""

    name: str
    key: str
    values: tuple[tuple[str, int], ...]
    reserved: Reserved = Reserved()


@dataclass(frozen=True, slots=True)
class ProtoPlan:
    """Everything that a document class needs."""

    root: str
    package: str
    messages: dict[str, Message]
    enums: dict[str, EnumPlan]

    @property
    def needs_duration(self) -> bool:
        """Whether google/protobuf/duration.proto is imported."""
        return any(field.slot.type == DURATION for message in self.messages.values() for field in message.fields)


DURATION = "google.protobuf.Duration"
