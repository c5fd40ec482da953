"""The plan of protobuf messages as the text of a `.proto` file."""

from __future__ import annotations

from typing import Any

from quire.codec._proto_parse import KEY
from quire.codec._proto_plan import EnumPlan, Message, ProtoField, ProtoPlan, Reserved, Role
from quire.codec._proto_schema import plan_proto
from quire.errors import SchemaError

_HEAD = """\
// Written by quire from {key}.
// Keep this file: given as the previous one, it holds every number in its place.

syntax = "proto3";
"""


def proto_schema(document_type: Any, previous: str | None = None, package: str | None = None) -> str:
    """The `.proto` of a document class."""
    check_package(package)
    return write_proto(plan_proto(document_type, previous, package))


def check_package(package: str | None) -> None:
    """Refuse what protobuf does not take as the name of a package."""
    if package and not all(part.isidentifier() and part.isascii() for part in package.split(".")):
        raise SchemaError(
            f"{package!r} is not a package of protobuf: write names with dots between, as 'school.records'."
        )


def write_proto(plan: ProtoPlan) -> str:
    """The text of a plan."""
    blocks = [_HEAD.format(key=plan.messages[plan.root].key)]
    if plan.package:
        blocks.append(f"package {plan.package};\n")
    if plan.needs_duration:
        blocks.append('import "google/protobuf/duration.proto";\n')
    blocks += [_message(m, plan) for m in plan.messages.values() if m.role is not Role.DURATION]
    blocks += [_enum(enum) for enum in plan.enums.values()]
    return "\n".join(blocks)


def _message(message: Message, plan: ProtoPlan) -> str:
    lines = _reserved(message.reserved, 2**29 - 1)
    shadowed = {field.map_entry for field in message.fields if field.slot.key is not None}
    fields = [_field(field, plan, shadowed) for field in message.fields]
    if message.role is Role.UNION:
        fields = ["  oneof value {", *(f"  {line}" for line in fields), "  }"]
    return _block("message", message.name, message.key, [*lines, *fields], message.comment)


def _field(field: ProtoField, plan: ProtoPlan, shadowed: set[str]) -> str:
    tp, label = field.type_text, f"{field.label} " if field.label else ""
    if field.slot.type in shadowed:  # inside of the message, the map's own entry has that name
        path = ".".join(["", *filter(None, [plan.package]), field.slot.type])
        tp = tp.replace(field.slot.type, path)
    return f"  {label}{tp} {field.name} = {field.number};{_comment(field.comment)}"


def _enum(enum: EnumPlan) -> str:
    lines = _reserved(enum.reserved, 2**31 - 1)
    return _block("enum", enum.name, enum.key, [*lines, *(f"  {name} = {number};" for name, number in enum.values)], "")


def _block(word: str, name: str, key: str, lines: list[str], comment: str) -> str:
    head = ([f"// {comment}"] if comment else []) + [f"// {KEY}{key}"]
    return "\n".join([*head, f"{word} {name} {{", *lines, "}\n"])


def _reserved(reserved: Reserved, top: int) -> list[str]:
    lines = []
    if reserved.numbers:
        lines.append(f"  reserved {', '.join(_range(start, end, top) for start, end in reserved.numbers)};")
    if reserved.names:
        quoted = ", ".join(f'"{name}"' for name in reserved.names)
        lines.append(f"  reserved {quoted};")
    return lines


def _range(start: int, end: int, top: int) -> str:
    if start == end:
        return str(start)
    return f"{start} to {'max' if end == top else end}"


def _comment(text: str) -> str:
    return f"  // {text}" if text else ""
