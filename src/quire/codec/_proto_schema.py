"""From the plan of a document class to messages, enums and numbered fields of protobuf.

Every field of Python is one field of protobuf, with one number. What a single field of protobuf cannot say (a list that
may be None, a list inside a list, a union) gets a small message of its own.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from quire.codec import _proto_names as names
from quire.codec._proto_numbers import Wanted, assign_numbers
from quire.codec._proto_parse import DeclaredType, Previous, read_proto
from quire.codec._proto_plan import DURATION, EnumPlan, Label, Message, ProtoField, ProtoPlan, Role, Slot, Wire
from quire.codec._proto_values import simple_form
from quire.errors import SchemaError
from quire.schema import Field, FieldKind, _unwrap
from quire.typing import ProtoNumber

_INT = Field("value", FieldKind.SCALAR, int)
_MANY = (FieldKind.LIST, FieldKind.DICT, FieldKind.DOCUMENTS)


def plan_proto(document_type: Any, previous: str | None = None, package: str | None = None) -> ProtoPlan:
    """The messages of a document class, numbered as in the previous `.proto`."""
    known = read_proto(previous)
    planner = _Planner(known, _class_keys(document_type))
    root = planner.document(document_type)
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
    """The messages of several classes, and a message for many documents of some; with the names of both, by class."""
    known, document_types = read_proto(previous), list(dict.fromkeys(document_types))
    planner = _Planner(known, _class_keys(*document_types))
    single = {tp: planner.document(tp) for tp in document_types}
    planner.run()
    many = {tp: planner.array(tp) for tp in dict.fromkeys(arrays)}
    plan = ProtoPlan(
        single[document_types[0]], known.package if package is None else package, planner.messages, planner.enums
    )
    return plan, single, many


def _class_keys(*document_types: Any) -> set[str]:
    """The keys of all the documents and enums that classes lead to."""
    todo, found = list(document_types), {names.class_key(tp) for tp in document_types}
    while todo:
        fields = list(todo.pop().document_schema().fields)
        while fields:
            field = fields.pop()
            fields += field.items
            is_document = field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS)
            tp = field.document_type if is_document else field.type
            if (is_document or field.kind is FieldKind.ENUM) and names.class_key(tp) not in found:
                found.add(names.class_key(tp))
                todo += [tp] if is_document else []
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """A field that is yet to be numbered."""

    name: str
    slot: Slot
    label: Label
    source: str
    where: str
    comment: str = ""
    given: int | None = None


class _Planner:
    def __init__(self, previous: Previous, living: set[str]) -> None:
        self._previous = previous
        self._names = names.TypeNames(previous.names, living)
        self._known: dict[Any, str] = {}
        self._todo: deque[Any] = deque()
        self._value_names: list[str] = []
        self._base = ""
        self.messages: dict[str, Message] = {}
        self.enums: dict[str, EnumPlan] = {}

    def run(self) -> None:
        """Plan the documents one after the other, so that recursion comes to an end."""
        while self._todo:
            self._plan_document(self._todo.popleft())

    def document(self, tp: Any) -> str:
        """The name of a document class's message, which is planned later."""
        if tp not in self._known:
            self._known[tp] = self._names.give(names.class_key(tp), names.camel(tp.__name__))
            self._todo.append(tp)
        return self._known[tp]

    def array(self, tp: Any) -> str:
        """The name of a message for many documents of a class."""
        root, key = self.document(tp), f"quire:Array.{names.class_key(tp)}"
        name = self._names.give(key, f"{root}Array")
        slot = Slot(_INT, root, Wire.MESSAGE, repeated=True)
        part = _Part("documents", slot, "repeated", "documents", f"{name}.documents")
        self._add(name, key, Role.WRAPPER, [part], f"Documents of {root}.")
        return name

    def _plan_document(self, tp: Any) -> None:
        name, key, schema = self._known[tp], names.class_key(tp), tp.document_schema()
        proto_names = names.distinct(names.field_name(field.name) for field in schema.fields)
        parts = []
        self.messages[name] = Message(name, key, Role.DOCUMENT)  # takes its place, before the small ones
        for field, proto_name in zip(schema.fields, proto_names, strict=True):
            info, where = tp.model_fields[field.name], f"{tp.__name__}.{field.name}"
            self._base = f"{key}.{field.name}"
            part = self._part(proto_name, field, self._base, where)
            comment = _field_comment(field, info, part)
            parts.append(replace(part, comment=comment, given=_given_number(info, where)))
        doc = (tp.__dict__.get("__doc__") or "").strip().partition("\n")[0]
        self._add(name, key, Role.DOCUMENT, parts, doc, tp)

    def _part(self, name: str, field: Field, key: str, where: str) -> _Part:
        slot = self._slot(field, key, where)
        label: Label = "repeated" if slot.repeated else ""
        if not slot.many and (field.nullable or not field.required):
            label = "optional"
        return _Part(name, slot, label, field.name, where, slot.comment)

    def _slot(self, field: Field, key: str, where: str) -> Slot:
        """How the value of a field travels in a message that has the field."""
        if field.nullable or field.kind not in _MANY or simple_form(field) or _is_record(field):
            return self._single(field, key, where)
        if field.kind is FieldKind.DOCUMENTS:
            return Slot(field, self.document(field.document_type), Wire.MESSAGE, field, repeated=True)
        if field.kind is FieldKind.LIST:
            item = field.items[0] if field.items else Field(field.name, FieldKind.ANY, Any)
            return replace(self._item(item, f"{key}[]", where), container=field, repeated=True)
        return self._dict(field, key, where)

    def _dict(self, field: Field, key: str, where: str) -> Slot:
        keys, values = field.items if len(field.items) == 2 else (field.items[0], _INT)
        if keys.type in (str, int, bool) and not keys.nullable:
            slot = self._item(values, f"{key}[]", where)
            return replace(slot, container=field, key=self._single(keys, key, where))
        parts = [self._part(n, f, f"{key}.{n}", where) for n, f in (("key", keys), ("value", values))]
        name = self._small(f"{key}{{}}", where, Role.ENTRY, parts, f"One entry of {where}.")
        return Slot(field, name, Wire.MESSAGE, field, repeated=True)

    def _item(self, field: Field, key: str, where: str) -> Slot:
        """How one of many values travels: a value that may be None needs a message around it."""
        if not field.nullable:
            return self._single(field, key, where)
        part = self._part("value", field, f"{key}?", where)
        name = self._small(f"{key}?", where, Role.WRAPPER, [part], f"A value of {where}, or None.")
        return Slot(field, name, Wire.MESSAGE)

    def _single(self, field: Field, key: str, where: str) -> Slot:
        """How a value that is not None travels as one value."""
        form = simple_form(field)
        if form is not None:
            return Slot(field, form.type, encode=form.encode, decode=form.decode, comment=form.comment)
        if field.kind is FieldKind.ENUM:
            return self._enum(field)
        if field.kind is FieldKind.DOCUMENT:
            return Slot(field, self.document(field.type), Wire.MESSAGE)
        if field.kind is FieldKind.UNION:
            return self._union(field, key, where)
        if _is_record(field):
            parts = [self._part(f"item_{i}", f, f"{key}.{i}", where) for i, f in enumerate(field.items, 1)]
            name = self._small(key, where, Role.RECORD, parts, f"The items of {where}.")
            return Slot(field, name, Wire.MESSAGE)
        if field.kind in _MANY:
            inner = replace(field, nullable=False, required=True)
            part = self._part("items", inner, f"{key}~", where)
            name = self._small(key, where, Role.WRAPPER, [part], f"A value of {where}.")
            return Slot(field, name, Wire.MESSAGE)
        return self._fixed(field)

    def _union(self, field: Field, key: str, where: str) -> Slot:
        members = names.distinct((names.snake(str(item)) for item in field.items), ["value"])
        parts = []
        for name, item in zip(members, field.items, strict=True):
            slot = self._item(item, f"{key}.{name}", where)
            parts.append(_Part(name, slot, "", item.name, where, slot.comment))
        name = self._small(key, where, Role.UNION, parts, f"A value of {where}, which is one of these.")
        return Slot(field, name, Wire.MESSAGE)

    def _small(self, key: str, where: str, role: Role, parts: list[_Part], comment: str) -> str:
        """A message for values that are no documents, named after the field they are in."""
        words = {"[]": "_item", "{}": "_entry", "?": "_optional", "~": ""}
        inside = re.sub(r"\[\]|\{\}|\?|~", lambda match: words[match[0]], key.removeprefix(self._base))
        name = self._names.give(key, names.camel(where + inside))
        self._add(name, key, role, parts, comment)
        return name

    def _fixed(self, field: Field) -> Slot:
        """Tensors, complex numbers and durations: messages that are the same for everyone."""
        if field.kind is FieldKind.TIMEDELTA:
            self.messages.setdefault(DURATION, Message(DURATION, "", Role.DURATION))
            return Slot(field, DURATION, Wire.MESSAGE)
        role = Role.TENSOR if field.kind is FieldKind.TENSOR else Role.COMPLEX
        comment = _tensor_comment(field) if role is Role.TENSOR else ""
        if role not in self._known:
            self._known[role] = self._names.give(f"quire:{role.name.title()}", role.name.title())
            parts = [_fixed_part(name, tp, text) for name, tp, text in _FIXED[role]]
            self._add(self._known[role], f"quire:{role.name.title()}", role, parts, _FIXED_COMMENTS[role])
        return Slot(field, self._known[role], Wire.MESSAGE, comment=comment)

    def _enum(self, field: Field) -> Slot:
        tp = field.type
        if tp not in self._known:
            self._known[tp] = self._names.give(names.class_key(tp), names.camel(tp.__name__))
            self._plan_enum(tp, self._known[tp])
        values = self.enums[self._known[tp]].values
        numbers = {member: number for member, (_, number) in zip(tp, values[1:], strict=True)}
        members = {number: member for member, number in numbers.items()}
        return Slot(field, self._known[tp], Wire.ENUM, encode=numbers.__getitem__, decode=members.get)

    def _plan_enum(self, tp: Any, name: str) -> None:
        prefix, old = names.snake(name).upper(), self._previous.types.get(name, DeclaredType(name, is_enum=True))
        zero = next((known.name for known in old.fields.values() if known.number == 0), f"{prefix}_UNSPECIFIED")
        words = [f"{prefix}_{names.identifier(member.name).upper()}" for member in tp]
        if zero in words and zero != f"{prefix}_UNSPECIFIED":
            raise SchemaError(
                f"{tp.__name__}: {zero} is 0 in the previous .proto, but here 0 means that nothing was set."
            )
        spelled = names.distinct([zero, *words], self._value_names)
        self._value_names += spelled
        wanted = [Wanted(spelled[0], f"{tp.__name__} (0)", 0)]
        wanted += [Wanted(word, f"{tp.__name__}.{m.name}") for word, m in zip(spelled[1:], tp, strict=True)]
        numbers, reserved = assign_numbers(wanted, replace(old, is_enum=True))
        values = tuple(zip(spelled, numbers, strict=True))
        self.enums[name] = EnumPlan(name, names.class_key(tp), values, reserved)

    def _add(self, name: str, key: str, role: Role, parts: Iterable[_Part], comment: str, tp: Any = None) -> None:
        parts = list(parts)
        old = self._previous.types.get(name, DeclaredType(name))
        if old.is_enum:
            raise SchemaError(
                f"{name} is an enum in the previous .proto, and would now be a message. Rename the class."
            )
        drafts = [ProtoField(p.name, 0, p.slot, p.label, p.source, p.comment) for p in parts]
        wanted = [
            Wanted(
                d.name,
                p.where if role is Role.DOCUMENT else f"{p.where} ({name}.{d.name})",
                p.given,
                d.type_text,
                d.slot.repeated,
            )
            for d, p in zip(drafts, parts, strict=True)
        ]
        numbers, reserved = assign_numbers(wanted, old)
        fields = tuple(replace(d, number=n) for d, n in zip(drafts, numbers, strict=True))
        self.messages[name] = Message(name, key, role, fields, reserved, comment, tp)


_FIXED: dict[Role, tuple[tuple[str, str, str], ...]] = {
    Role.TENSOR: (
        ("dtype", "string", "'uint8', 'float32', 'bfloat16', 'bool', ...; 'string' has its values in strings"),
        ("shape", "repeated uint64", ""),
        ("data", "bytes", "the values row by row (C order), little endian"),
        ("strings", "repeated bytes", "the values of dtype 'string'"),
    ),
    Role.COMPLEX: (("real", "double", ""), ("imaginary", "double", "")),
}
_FIXED_COMMENTS = {Role.TENSOR: "A dense tensor.", Role.COMPLEX: "A complex number."}


def _fixed_part(name: str, tp: str, comment: str) -> _Part:
    repeated = tp.startswith("repeated ")
    slot = Slot(_INT, tp.rpartition(" ")[2], repeated=repeated)
    return _Part(name, slot, "repeated" if repeated else "", name, name, comment)


def _is_record(field: Field) -> bool:
    """Whether a tuple has items of several types, each in its place."""
    return field.kind is FieldKind.LIST and len(set(map(repr, field.items))) > 1


def _given_number(info: FieldInfo, where: str) -> int | None:
    """The ProtoNumber in a field's annotation, also inside of `| None`."""
    annotation, metadata = _unwrap(info.annotation, tuple(info.metadata))
    for member in get_args(annotation):
        if type(None) in get_args(annotation):
            metadata += _unwrap(member, ())[1]
    found = {extra.number for extra in metadata if isinstance(extra, ProtoNumber)}
    if len(found) > 1:
        raise SchemaError(f"{where}: a field has one number, got ProtoNumber {' and '.join(map(str, sorted(found)))}.")
    return found.pop() if found else None


def _tensor_comment(field: Field) -> str:
    return f"{field.spec} of {getattr(field.type, '_framework_name', None) or 'any framework, read as numpy'}"


def _field_comment(field: Field, info: FieldInfo, part: _Part) -> str:
    """What a reader of the `.proto` must know: meaning, encoding, and what it means to leave the field out."""
    pieces = [" ".join((info.description or "").split()), part.comment]
    if field.nullable:
        pieces.append("None when left out")
    elif part.label == "optional":
        pieces.append("when left out: " + _default_text(info))
    return "; ".join(piece for piece in pieces if piece)


def _default_text(info: FieldInfo) -> str:
    default = info.default
    if default is PydanticUndefined:
        return "made anew"
    if isinstance(default, Enum):
        return str(default.name)
    return (
        repr(default)
        if isinstance(default, (bool, int, float, str)) and type(default).__name__ in _PLAIN
        else "the default"
    )


_PLAIN = ("bool", "int", "float", "str")
