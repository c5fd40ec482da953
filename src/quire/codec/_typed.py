"""Messages of a document's own class: built at run time, with the numbers of its `.proto`."""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass
from typing import Any

from quire._optional import require
from quire.codec._proto_plan import DURATION, EnumPlan, Message, ProtoField, ProtoPlan, Role, Wire
from quire.codec._proto_schema import plan_proto
from quire.codec._readback import is_unchanged
from quire.codec._typed_read import read_document
from quire.codec._typed_write import write_document
from quire.errors import DecodeError, EncodeError
from quire.tensors import describe

_BYTES = (bytes, bytearray, memoryview)


@dataclass(frozen=True, slots=True)
class TypedSchema:
    """A plan and the message class that was built from it."""

    plan: ProtoPlan
    message_class: Any


def typed_schema(document_type: Any, previous: str | None = None) -> TypedSchema:
    """The plan and the message class of a document class, made once for each previous `.proto`."""
    known: dict[str | None, TypedSchema] = document_type.document_schema().notes.setdefault("typed", {})
    if previous not in known:
        plan = plan_proto(document_type, previous)
        known[previous] = TypedSchema(plan, _message_class(plan))
    return known[previous]


def to_typed(document: Any, previous: str | None = None) -> Any:
    """The document as a message of its own class."""
    typed = typed_schema(type(document), previous)
    message = typed.message_class()
    write_document(typed.plan, message, document)
    if any(planned.role is Role.UNION for planned in typed.plan.messages.values()):
        _check_unions(document, typed.plan, message)
    return message


def _check_unions(document: Any, plan: ProtoPlan, message: Any) -> None:
    """Refuse a message whose members of unions would be read as others."""
    owner = type(document).__name__
    try:
        again = read_document(plan, message)
    except DecodeError as error:
        raise EncodeError(f"{owner}: the message could not be read back: {error}") from error
    for name in type(document).model_fields:
        value, other = document.__dict__.get(name), again.__dict__.get(name)
        if not is_unchanged(value, other):
            raise EncodeError(
                f"{owner}.{name}: {describe(value)} would be read back as {describe(other)}. Use a union of types that "
                "can be distinguished."
            )


def from_typed(document_type: Any, source: Any, previous: str | None = None) -> Any:
    """The document in a message, of this runtime or of generated code, or in its bytes."""
    typed = typed_schema(document_type, previous)
    if isinstance(source, typed.message_class):
        return read_document(typed.plan, source)
    content = bytes(source) if isinstance(source, _BYTES) else _content(source, typed.plan.root)
    return read_document(typed.plan, _parse(typed, content))


def _content(source: Any, root: str) -> bytes:
    """The bytes of a message that generated code has made."""
    message = _protobuf("message")
    if not isinstance(source, message.Message):
        raise DecodeError(f"expected a message of {root} or its bytes, got {type(source).__name__}.")
    if source.DESCRIPTOR.name != root:
        raise DecodeError(f"expected a message of {root}, got one of {source.DESCRIPTOR.full_name}.")
    try:
        return bytes(source.SerializeToString())
    except (message.EncodeError, ValueError) as error:
        raise DecodeError(f"the message of {root} cannot be read: {error}") from error


def _parse(typed: TypedSchema, content: bytes) -> Any:
    try:
        return _parse_whole(typed.message_class, content)
    except (_protobuf("message").DecodeError, ValueError, IndexError, TypeError, RuntimeError, struct.error) as error:
        raise DecodeError(f"{len(content)} bytes are not a message of {typed.plan.root}: {error}") from error


def _parse_whole(message_class: Any, content: bytes) -> Any:
    """The message in the bytes. The runtime in C++ only warns of an end in the middle, and gives what came before."""
    if _protobuf("internal.api_implementation").Type() != "cpp":
        return message_class.FromString(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        message = message_class.FromString(content)
    if caught:
        raise ValueError(str(caught[0].message))
    return message


def _message_class(plan: ProtoPlan) -> Any:
    pool = _protobuf("descriptor_pool").DescriptorPool()
    if plan.needs_duration:
        pool.AddSerializedFile(_protobuf("duration_pb2").DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file_descriptor(plan).SerializeToString())
    descriptor = pool.FindMessageTypeByName(_full_name(plan, plan.root))
    factory = _protobuf("message_factory")
    if hasattr(factory, "GetMessageClass"):  # since 4.22
        return factory.GetMessageClass(descriptor)
    return factory.MessageFactory(pool).GetPrototype(descriptor)


def file_descriptor(plan: ProtoPlan) -> Any:
    """What protoc would make of the plan's text."""
    file = _protobuf("descriptor_pb2").FileDescriptorProto(name="quire.proto", package=plan.package, syntax="proto3")
    if plan.needs_duration:
        file.dependency.append("google/protobuf/duration.proto")
    for message in plan.messages.values():
        if message.role is not Role.DURATION:
            _describe_message(file.message_type.add(), message, plan)
    for enum in plan.enums.values():
        _describe_enum(file.enum_type.add(), enum)
    return file


def _describe_enum(target: Any, enum: EnumPlan) -> None:
    target.name = enum.name
    for name, number in enum.values:
        target.value.add(name=name, number=number)


def _describe_message(target: Any, message: Message, plan: ProtoPlan) -> None:
    target.name = message.name
    if message.role is Role.UNION:
        target.oneof_decl.add(name="value")
    for field in message.fields:
        described = target.field.add(name=field.name, number=field.number)
        if field.slot.key is not None:
            _describe_map(target, described, field, plan)
            continue
        _describe_type(described, field.slot.type, field.slot.wire, plan)
        described.label = described.LABEL_REPEATED if field.slot.repeated else described.LABEL_OPTIONAL
        if message.role is Role.UNION:
            described.oneof_index = 0
        elif field.label == "optional":
            described.proto3_optional = True
            described.oneof_index = len(target.oneof_decl)
            target.oneof_decl.add(name=f"_{field.name}")


def _describe_map(target: Any, described: Any, field: ProtoField, plan: ProtoPlan) -> None:
    assert field.slot.key is not None
    entry = target.nested_type.add(name=field.map_entry)
    entry.options.map_entry = True
    for number, (name, slot) in enumerate((("key", field.slot.key), ("value", field.slot)), 1):
        part = entry.field.add(name=name, number=number, label=described.LABEL_OPTIONAL)
        _describe_type(part, slot.type, slot.wire, plan)
    described.label = described.LABEL_REPEATED
    described.type = described.TYPE_MESSAGE
    described.type_name = f".{_full_name(plan, target.name)}.{entry.name}"


def _describe_type(described: Any, name: str, wire: Wire, plan: ProtoPlan) -> None:
    word = name if wire is Wire.SCALAR else wire.value
    described.type = getattr(described, f"TYPE_{word.upper()}")
    if wire is not Wire.SCALAR:
        described.type_name = f".{name if name == DURATION else _full_name(plan, name)}"


def _full_name(plan: ProtoPlan, name: str) -> str:
    return f"{plan.package}.{name}" if plan.package else name


def _protobuf(module: str) -> Any:
    """A module of the protobuf runtime, imported when it is first needed."""
    return require(f"google.protobuf.{module}", extra="protobuf", needed_for="A protobuf message")
