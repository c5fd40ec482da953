"""From a document class to messages, enums and numbered fields of protobuf, and to the text of a `.proto`.

Every field of Python is one field of protobuf, with one number. What a single field of protobuf cannot express (a list
that may be None, a list inside a list, a union) gets a small message of its own.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from quire._protocols import DocumentLike
from quire.codec._kinds import KINDS
from quire.codec._proto_numbers import (
    CLASS_COMMENT,
    MAX_ENUM_NUMBER,
    MAX_FIELD_NUMBER,
    DeclaredType,
    PreviousProto,
    Unnumbered,
    assign_numbers,
    parse_proto,
)
from quire.codec._proto_plan import (
    DURATION,
    EnumPlan,
    Label,
    Message,
    ProtoField,
    ProtoPlan,
    Reserved,
    Role,
    Slot,
    Wire,
)
from quire.errors import SchemaError
from quire.schema import Field, FieldKind, unwrap_annotation
from quire.typing import ProtoNumber

_INT = Field("value", FieldKind.SCALAR, int)
_CONTAINER_KINDS = (FieldKind.LIST, FieldKind.DICT, FieldKind.DOCUMENTS)


# --- names


_MESSAGE_ATTRIBUTES = frozenset({  # attributes of every message class in Python
    *("ByteSize", "Clear", "ClearExtension", "ClearField", "CopyFrom", "DESCRIPTOR", "DiscardUnknownFields"),
    *("Extensions", "FindInitializationErrors", "FromString", "HasExtension", "HasField", "IsInitialized"),
    *("ListFields", "MergeFrom", "MergeFromString", "ParseFromString", "RegisterExtension"),
    *("SerializePartialToString", "SerializeToString", "SetInParent", "UnknownFields", "WhichOneof"),
})  # fmt: skip


def _to_identifier(name: str) -> str:
    """Return a name in ASCII letters, digits and underscores: 'größe' -> 'grosse'; others become their code."""
    plain = unicodedata.normalize("NFKD", name.replace("ß", "ss"))
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    plain = "".join(char if char.isascii() else f"u{ord(char):x}" for char in plain)
    plain = re.sub(r"\W", "_", plain)
    return plain if plain[:1].isalpha() else f"x{plain}"


def to_camel_case(text: str) -> str:
    """'Box[int]' -> 'BoxInt', 'handed_in' -> 'HandedIn'."""
    words = re.split(r"[\W_]+", _to_identifier(text))
    return "".join(word[:1].upper() + word[1:] for word in words)


def _to_snake_case(text: str) -> str:
    """'TorchTensor[3]' -> 'torch_tensor_3'."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", _to_identifier(text))
    return re.sub(r"_+", "_", words).strip("_").lower()


def _make_distinct(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """Return the names, numbered where two would be the same to protobuf."""
    seen, distinct = {_comparison_key(name) for name in taken}, []
    for name in names:
        free = _first_free(name, seen)
        seen.add(_comparison_key(free))
        distinct.append(free)
    return distinct


def _first_free(name: str, seen: set[str]) -> str:
    """Return the name, or the name with the first number that makes it new."""
    free, number = name, 2
    while _comparison_key(free) in seen:
        free, number = f"{name}_{number}", number + 1
    return free


def _comparison_key(name: str) -> str:
    """Return what protobuf compares of names, whose JSON form has neither underscores nor this case."""
    return name.replace("_", "").lower()


def _class_key(tp: type[Any]) -> str:
    """Return the name of a class in the comment above its message: 'school.models:Student'."""
    origin = getattr(tp, "__pydantic_generic_metadata__", {}).get("origin")
    if origin is not None:
        return f"{origin.__module__}:{tp.__name__}"
    return f"{tp.__module__}:{tp.__qualname__}"


class _TypeNames:
    """Assigns the names of messages and enums: those of the previous file, plain ones, or longer ones."""

    def __init__(self, previous: dict[str, str], current: set[str]) -> None:
        """Take the names that classes have in the previous file, and the keys of the current classes.

        The name of a class that no longer exists is free: it may have moved to another module.
        """
        self._previous = previous
        self._taken: set[str] = set()
        owners = ("quire:", *(f"{key}." for key in current))
        self._held = {key: name for key, name in previous.items() if key in current or key.startswith(owners)}

    def assign(self, key: str, plain: str) -> str:
        """Return a name that no other type has."""
        name = self._previous.get(key)
        if name is None or name in self._taken:
            name = self._choose(key, plain)
        self._taken.add(name)
        return name

    def _choose(self, key: str, plain: str) -> str:
        """Return the plain name; if another class has it, with more and more of the module in front; else a number."""
        parts = [to_camel_case(part) for part in key.partition(":")[0].split(".")]
        longer = ["".join(parts[start:]) + plain for start in reversed(range(len(parts)))]
        others = {name for owner, name in self._held.items() if owner != key}
        for name in (plain, *longer):
            if name not in self._taken and name not in others:
                return name
        return _first_free(plain, {_comparison_key(name) for name in self._taken | others})


# --- plans


def plan_proto(document_type: type[DocumentLike], previous: str | None = None, package: str | None = None) -> ProtoPlan:
    """Plan the messages of a document class, numbered as in the previous `.proto`."""
    known = parse_proto(previous)
    planner = _Planner(known, _collect_class_keys(document_type))
    root = planner.add_document(document_type)
    if previous is not None and root not in known.types:
        raise SchemaError(
            f"{document_type.__name__}: the previous .proto has no message {root}, so no number would stay. "
            "If the class was renamed, rename its message there too: names are not on the wire."
        )
    planner.run()
    return ProtoPlan(root, known.package if package is None else package, planner.messages, planner.enums)


def plan_service(
    document_types: Iterable[Any], arrays: Iterable[Any], previous: str | None = None, package: str | None = None
) -> tuple[ProtoPlan, dict[Any, str], dict[Any, str]]:
    """Plan the messages of several classes, and a message for many documents of some of them.

    Return the plan, and the names of both sorts of messages by class.
    """
    known, document_types = parse_proto(previous), list(dict.fromkeys(document_types))
    planner = _Planner(known, _collect_class_keys(*document_types))
    single = {tp: planner.add_document(tp) for tp in document_types}
    planner.run()
    many = {tp: planner.add_array(tp) for tp in dict.fromkeys(arrays)}
    plan = ProtoPlan(
        single[document_types[0]], known.package if package is None else package, planner.messages, planner.enums
    )
    return plan, single, many


def _collect_class_keys(*document_types: type[Any]) -> set[str]:
    """Return the keys of all documents and enums that classes refer to."""
    todo, keys = list(document_types), {_class_key(tp) for tp in document_types}
    while todo:
        fields = list(todo.pop().document_schema().fields)
        while fields:
            field = fields.pop()
            fields += field.items
            is_document = field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS)
            tp = field.document_type if is_document else field.type
            if (is_document or field.kind is FieldKind.ENUM) and _class_key(tp) not in keys:
                keys.add(_class_key(tp))
                todo += [tp] if is_document else []
    return keys


@dataclass(frozen=True, slots=True)
class _Part:
    """A field without a number yet."""

    name: str
    slot: Slot
    label: Label
    source: str
    where: str
    comment: str = ""
    requested: int | None = None


class _Planner:
    """Collects messages and enums.

    Small messages are identified by keys that extend the key of the field they are for: `[]` is an item, `{}` an entry,
    `?` a value that may be None, and `~` the list inside of a wrapper. The keys keep their names stable.
    """

    def __init__(self, previous: PreviousProto, current: set[str]) -> None:
        self._previous = previous
        self._names = _TypeNames(previous.names, current)
        self._known: dict[Any, str] = {}
        self._todo: deque[Any] = deque()
        self._value_names: list[str] = []
        self._base = ""
        self.messages: dict[str, Message] = {}
        self.enums: dict[str, EnumPlan] = {}

    def run(self) -> None:
        """Plan the documents one after the other, so that recursion ends."""
        while self._todo:
            self._plan_document(self._todo.popleft())

    def add_document(self, tp: type[Any]) -> str:
        """Return the name of the message of a document class, which is planned later."""
        if tp not in self._known:
            self._known[tp] = self._names.assign(_class_key(tp), to_camel_case(tp.__name__))
            self._todo.append(tp)
        return self._known[tp]

    def add_array(self, tp: type[Any]) -> str:
        """Return the name of a message for many documents of a class."""
        root, key = self.add_document(tp), f"quire:Array.{_class_key(tp)}"
        name = self._names.assign(key, f"{root}Array")
        slot = Slot(_INT, root, Wire.MESSAGE, repeated=True)
        part = _Part("documents", slot, "repeated", "documents", f"{name}.documents")
        self._add_message(name, key, Role.WRAPPER, [part], f"Documents of {root}.")
        return name

    def _plan_document(self, tp: type[Any]) -> None:
        name, key, schema = self._known[tp], _class_key(tp), tp.document_schema()
        plain_names = [_to_identifier(field.name) for field in schema.fields]
        proto_names = _make_distinct(f"{plain}_" if plain in _MESSAGE_ATTRIBUTES else plain for plain in plain_names)
        parts = []
        self.messages[name] = Message(name, key, Role.DOCUMENT)  # reserves its place before the small messages
        for field, proto_name in zip(schema.fields, proto_names, strict=True):
            info, where = tp.model_fields[field.name], f"{tp.__name__}.{field.name}"
            self._base = f"{key}.{field.name}"
            part = self._plan_part(proto_name, field, self._base, where)
            comment = _field_comment(field, info, part)
            parts.append(replace(part, comment=comment, requested=_requested_number(info, where)))
        doc = (tp.__dict__.get("__doc__") or "").strip().partition("\n")[0]
        self._add_message(name, key, Role.DOCUMENT, parts, doc, tp)

    def _plan_part(self, name: str, field: Field, key: str, where: str) -> _Part:
        slot = self._plan_slot(field, key, where)
        label: Label = "repeated" if slot.repeated else ""
        if not slot.many and (field.nullable or not field.required):
            label = "optional"
        return _Part(name, slot, label, field.name, where, slot.comment)

    def _plan_slot(self, field: Field, key: str, where: str) -> Slot:
        """Plan how the value of a field travels in the message of its document."""
        is_scalar = KINDS[field.kind].scalar_form(field) is not None
        if field.nullable or field.kind not in _CONTAINER_KINDS or is_scalar or _is_record(field):
            return self._plan_value(field, key, where)
        if field.kind is FieldKind.DOCUMENTS:
            return Slot(field, self.add_document(field.document_type), Wire.MESSAGE, field, repeated=True)
        if field.kind is FieldKind.LIST:
            item = field.items[0] if field.items else Field(field.name, FieldKind.ANY, Any)
            return replace(self._plan_item(item, f"{key}[]", where), container=field, repeated=True)
        return self._plan_dict(field, key, where)

    def _plan_dict(self, field: Field, key: str, where: str) -> Slot:
        keys, values = field.items if len(field.items) == 2 else (field.items[0], _INT)
        if keys.type in (str, int, bool) and not keys.nullable:
            slot = self._plan_item(values, f"{key}[]", where)
            return replace(slot, container=field, key=self._plan_value(keys, key, where))
        parts = [self._plan_part(n, f, f"{key}.{n}", where) for n, f in (("key", keys), ("value", values))]
        name = self._add_small_message(f"{key}{{}}", where, Role.ENTRY, parts, f"One entry of {where}.")
        return Slot(field, name, Wire.MESSAGE, field, repeated=True)

    def _plan_item(self, field: Field, key: str, where: str) -> Slot:
        """Plan how one of many values travels: a value that may be None needs a message around it."""
        if not field.nullable:
            return self._plan_value(field, key, where)
        part = self._plan_part("value", field, f"{key}?", where)
        name = self._add_small_message(f"{key}?", where, Role.WRAPPER, [part], f"A value of {where}, or None.")
        return Slot(field, name, Wire.MESSAGE)

    def _plan_value(self, field: Field, key: str, where: str) -> Slot:
        """Plan how a value that is not None travels as one value."""
        form = KINDS[field.kind].scalar_form(field)
        if form is not None:
            return Slot(field, form.type, encode=form.encode, decode=form.decode, comment=form.comment)
        return _VALUE_PLANNERS[field.kind](self, field, key, where)

    def _plan_document_value(self, field: Field, _: str, __: str) -> Slot:
        return Slot(field, self.add_document(field.type), Wire.MESSAGE)

    def _plan_record_or_wrapper(self, field: Field, key: str, where: str) -> Slot:
        """Plan a tuple with items of several types, or a list that must be inside of a message."""
        if _is_record(field):
            parts = [self._plan_part(f"item_{i}", f, f"{key}.{i}", where) for i, f in enumerate(field.items, 1)]
            name = self._add_small_message(key, where, Role.RECORD, parts, f"The items of {where}.")
            return Slot(field, name, Wire.MESSAGE)
        inner = replace(field, nullable=False, required=True)
        part = self._plan_part("items", inner, f"{key}~", where)
        name = self._add_small_message(key, where, Role.WRAPPER, [part], f"A value of {where}.")
        return Slot(field, name, Wire.MESSAGE)

    def _plan_union(self, field: Field, key: str, where: str) -> Slot:
        members = _make_distinct((_to_snake_case(str(item)) for item in field.items), ["value"])
        parts = []
        for name, item in zip(members, field.items, strict=True):
            slot = self._plan_item(item, f"{key}.{name}", where)
            parts.append(_Part(name, slot, "", item.name, where, slot.comment))
        name = self._add_small_message(key, where, Role.UNION, parts, f"A value of {where}, which is one of these.")
        return Slot(field, name, Wire.MESSAGE)

    def _plan_timedelta(self, field: Field, _: str, __: str) -> Slot:
        self.messages.setdefault(DURATION, Message(DURATION, "", Role.DURATION))
        return Slot(field, DURATION, Wire.MESSAGE)

    def _plan_tensor(self, field: Field, _: str, __: str) -> Slot:
        comment = f"{field.spec} of {getattr(field.type, '_framework_name', None) or 'any framework, read as numpy'}"
        return replace(self._plan_fixed(field, Role.TENSOR), comment=comment)

    def _plan_complex(self, field: Field, _: str, __: str) -> Slot:
        return self._plan_fixed(field, Role.COMPLEX)

    def _plan_fixed(self, field: Field, role: Role) -> Slot:
        """Plan a value whose message is the same in every `.proto`."""
        if role not in self._known:
            title = role.name.title()
            comment, fields = _FIXED_MESSAGES[role]
            self._known[role] = self._names.assign(f"quire:{title}", title)
            parts = []
            for name, tp, text in fields:
                repeated = tp.startswith("repeated ")
                slot = Slot(_INT, tp.rpartition(" ")[2], repeated=repeated)
                parts.append(_Part(name, slot, "repeated" if repeated else "", name, name, text))
            self._add_message(self._known[role], f"quire:{title}", role, parts, comment)
        return Slot(field, self._known[role], Wire.MESSAGE)

    def _plan_enum(self, field: Field, _: str, __: str) -> Slot:
        tp = field.type
        if tp not in self._known:
            self._known[tp] = self._names.assign(_class_key(tp), to_camel_case(tp.__name__))
            self._add_enum(tp, self._known[tp])
        # Zero comes first and stands for no member: proto3 has it where nothing was set.
        values = self.enums[self._known[tp]].values
        numbers = {member: number for member, (_, number) in zip(tp, values[1:], strict=True)}
        members = {number: member for member, number in numbers.items()}
        return Slot(field, self._known[tp], Wire.ENUM, encode=numbers.__getitem__, decode=members.get)

    def _add_enum(self, tp: type[Enum], name: str) -> None:
        prefix, old = _to_snake_case(name).upper(), self._previous.types.get(name, DeclaredType(name, is_enum=True))
        zero = next((known.name for known in old.fields.values() if known.number == 0), f"{prefix}_UNSPECIFIED")
        words = [f"{prefix}_{_to_identifier(member.name).upper()}" for member in tp]
        if zero in words and zero != f"{prefix}_UNSPECIFIED":
            raise SchemaError(
                f"{tp.__name__}: {zero} is 0 in the previous .proto, but here 0 means that nothing was set."
            )
        spelled = _make_distinct([zero, *words], self._value_names)
        self._value_names += spelled
        fields = [Unnumbered(spelled[0], f"{tp.__name__} (0)", 0)]
        fields += [Unnumbered(word, f"{tp.__name__}.{m.name}") for word, m in zip(spelled[1:], tp, strict=True)]
        numbers, reserved = assign_numbers(fields, replace(old, is_enum=True))
        values = tuple(zip(spelled, numbers, strict=True))
        self.enums[name] = EnumPlan(name, _class_key(tp), values, reserved)

    def _add_small_message(self, key: str, where: str, role: Role, parts: list[_Part], comment: str) -> str:
        """Add a message for values that are no documents, named after the field they are in."""
        words = {"[]": "_item", "{}": "_entry", "?": "_optional", "~": ""}
        inside = re.sub(r"\[\]|\{\}|\?|~", lambda match: words[match[0]], key.removeprefix(self._base))
        name = self._names.assign(key, to_camel_case(where + inside))
        self._add_message(name, key, role, parts, comment)
        return name

    def _add_message(
        self, name: str, key: str, role: Role, parts: list[_Part], comment: str, tp: type[Any] | None = None
    ) -> None:
        old = self._previous.types.get(name, DeclaredType(name))
        if old.is_enum:
            raise SchemaError(
                f"{name} is an enum in the previous .proto, and would now be a message. Rename the class."
            )
        drafts = [ProtoField(p.name, 0, p.slot, p.label, p.source, p.comment) for p in parts]
        unnumbered = [
            Unnumbered(
                draft.name,
                part.where if role is Role.DOCUMENT else f"{part.where} ({name}.{draft.name})",
                part.requested,
                draft.type_text,
                draft.slot.repeated,
            )
            for draft, part in zip(drafts, parts, strict=True)
        ]
        numbers, reserved = assign_numbers(unnumbered, old)
        fields = tuple(replace(draft, number=number) for draft, number in zip(drafts, numbers, strict=True))
        self.messages[name] = Message(name, key, role, fields, reserved, comment, tp)


_VALUE_PLANNERS: dict[FieldKind, Callable[[_Planner, Field, str, str], Slot]] = {
    FieldKind.TENSOR: _Planner._plan_tensor,
    FieldKind.SCALAR: _Planner._plan_complex,
    FieldKind.ENUM: _Planner._plan_enum,
    FieldKind.TIMEDELTA: _Planner._plan_timedelta,
    FieldKind.DOCUMENT: _Planner._plan_document_value,
    FieldKind.DOCUMENTS: _Planner._plan_record_or_wrapper,
    FieldKind.LIST: _Planner._plan_record_or_wrapper,
    FieldKind.DICT: _Planner._plan_record_or_wrapper,
    FieldKind.UNION: _Planner._plan_union,
}
"""Planners of values that are no single scalar; `KINDS` has the scalar forms."""

_FIXED_MESSAGES: dict[Role, tuple[str, tuple[tuple[str, str, str], ...]]] = {  # comment; name, type, comment of fields
    Role.TENSOR: (
        "A dense tensor.",
        (
            ("dtype", "string", "'uint8', 'float32', 'bfloat16', 'bool', ...; 'string' has its values in strings"),
            ("shape", "repeated uint64", ""),
            ("data", "bytes", "the values row by row (C order), little endian"),
            ("strings", "repeated bytes", "the values of dtype 'string'"),
        ),
    ),
    Role.COMPLEX: ("A complex number.", (("real", "double", ""), ("imaginary", "double", ""))),
}


def _is_record(field: Field) -> bool:
    """Return whether a field is a tuple with items of several types, each in its place."""
    return field.kind is FieldKind.LIST and len(set(map(repr, field.items))) > 1


def _requested_number(info: FieldInfo, where: str) -> int | None:
    """Return the ProtoNumber in a field's annotation, also inside of `| None`."""
    annotation, metadata = unwrap_annotation(info.annotation, tuple(info.metadata))
    for member in get_args(annotation):
        if type(None) in get_args(annotation):
            metadata += unwrap_annotation(member, ())[1]
    numbers = {item.number for item in metadata if isinstance(item, ProtoNumber)}
    if len(numbers) > 1:
        raise SchemaError(
            f"{where}: a field has one number, got ProtoNumber {' and '.join(map(str, sorted(numbers)))}."
        )
    return numbers.pop() if numbers else None


def _field_comment(field: Field, info: FieldInfo, part: _Part) -> str:
    """Return what a reader of the `.proto` must know: meaning, encoding, and what it means to leave the field out."""
    pieces = [" ".join((info.description or "").split()), part.comment]
    default = info.default
    if field.nullable:
        pieces.append("None when left out")
    elif part.label == "optional":
        text = repr(default) if type(default) in (bool, int, float, str) else "the default"
        text = "made anew" if default is PydanticUndefined else default.name if isinstance(default, Enum) else text
        pieces.append(f"when left out: {text}")
    return "; ".join(piece for piece in pieces if piece)


# --- the text of a `.proto`

_FILE_COMMENT = """\
// Written by quire from {key}.
// Keep this file: given as the previous one, it holds every number in its place.

syntax = "proto3";
"""


def proto_schema(document_type: type[DocumentLike], previous: str | None = None, package: str | None = None) -> str:
    """Return the `.proto` of a document class."""
    check_package(package)
    return write_proto(plan_proto(document_type, previous, package))


def check_package(package: str | None) -> None:
    """Raise an error for a name that protobuf does not accept as a package."""
    if package and not all(part.isidentifier() and part.isascii() for part in package.split(".")):
        raise SchemaError(
            f"{package!r} is not a package of protobuf: write names with dots between, as 'school.records'."
        )


def write_proto(plan: ProtoPlan) -> str:
    """Return the text of a plan."""
    blocks = [_FILE_COMMENT.format(key=plan.messages[plan.root].key)]
    if plan.package:
        blocks.append(f"package {plan.package};\n")
    if plan.needs_duration:
        blocks.append('import "google/protobuf/duration.proto";\n')
    blocks += [_write_message(m, plan) for m in plan.messages.values() if m.role is not Role.DURATION]
    for enum in plan.enums.values():
        values = [f"  {name} = {number};" for name, number in enum.values]
        lines = [*_write_reserved(enum.reserved, MAX_ENUM_NUMBER), *values]
        blocks.append(_write_block("enum", enum.name, enum.key, lines, ""))
    return "\n".join(blocks)


def _write_message(message: Message, plan: ProtoPlan) -> str:
    shadowed = {field.map_entry for field in message.fields if field.slot.key is not None}
    fields = []
    for field in message.fields:
        tp, label = field.type_text, f"{field.label} " if field.label else ""
        if field.slot.type in shadowed:  # inside of the message, the entry of a map has that name
            path = ".".join(["", *filter(None, [plan.package]), field.slot.type])
            tp = tp.replace(field.slot.type, path)
        comment = f"  // {field.comment}" if field.comment else ""
        fields.append(f"  {label}{tp} {field.name} = {field.number};{comment}")
    if message.role is Role.UNION:
        fields = ["  oneof value {", *(f"  {line}" for line in fields), "  }"]
    lines = [*_write_reserved(message.reserved, MAX_FIELD_NUMBER), *fields]
    return _write_block("message", message.name, message.key, lines, message.comment)


def _write_block(word: str, name: str, key: str, lines: list[str], comment: str) -> str:
    head = ([f"// {comment}"] if comment else []) + [f"// {CLASS_COMMENT}{key}"]
    return "\n".join([*head, f"{word} {name} {{", *lines, "}\n"])


def _write_reserved(reserved: Reserved, max_number: int) -> list[str]:
    lines = []
    if reserved.numbers:
        ranges = [
            str(start) if start == end else f"{start} to {'max' if end == max_number else end}"
            for start, end in reserved.numbers
        ]
        lines.append(f"  reserved {', '.join(ranges)};")
    if reserved.names:
        quoted = ", ".join(f'"{name}"' for name in reserved.names)
        lines.append(f"  reserved {quoted};")
    return lines
