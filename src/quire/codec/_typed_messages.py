"""Documents as protobuf messages of their own class, built at run time with the numbers of the class's `.proto`.

Unlike the self-describing messages of `quire.proto`, these are meant for other languages: code that protoc generates
from `to_proto_schema()` reads and writes them.
"""

from __future__ import annotations

import math
import struct
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import numpy as np
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from quire._equality import is_unchanged
from quire._optional import require
from quire._protocols import DocumentLike
from quire.codec._messages import ProtobufMessage
from quire.codec._proto_plan import DURATION, Message, ProtoField, ProtoPlan, Role, Slot, Wire
from quire.codec._proto_schema import plan_proto
from quire.errors import DecodeError, EncodeError, TensorError
from quire.schema import STORED, Field, FieldKind
from quire.tensors import DTYPES, common_dtype, describe, format_shape, framework_of

DocumentT = TypeVar("DocumentT", bound=DocumentLike)
_MISSING: Any = object()
_MAX_DURATION = 315_576_000_000
"""The seconds that a Duration of protobuf may have: ten thousand years."""
_CONVERSION_ERRORS = (TypeError, ValueError, ArithmeticError, KeyError, MemoryError, TensorError)


@dataclass(frozen=True, slots=True)
class TypedSchema:
    """A plan and the message class that was built from it."""

    plan: ProtoPlan
    message_class: type[ProtobufMessage]


def typed_schema(document_type: type[DocumentLike], previous: str | None = None) -> TypedSchema:
    """Return the plan and the message class of a document class, built once for each previous `.proto`."""
    schemas: dict[str | None, TypedSchema] = document_type.document_schema().notes.setdefault("typed", {})
    if previous not in schemas:
        plan = plan_proto(document_type, previous)
        pool = _protobuf("descriptor_pool").DescriptorPool()
        if plan.needs_duration:
            pool.AddSerializedFile(_protobuf("duration_pb2").DESCRIPTOR.serialized_pb)
        pool.AddSerializedFile(file_descriptor(plan).SerializeToString())
        descriptor = pool.FindMessageTypeByName(_full_name(plan, plan.root))
        factory = _protobuf("message_factory")
        if hasattr(factory, "GetMessageClass"):  # since 4.22
            message_class = factory.GetMessageClass(descriptor)
        else:
            message_class = factory.MessageFactory(pool).GetPrototype(descriptor)
        schemas[previous] = TypedSchema(plan, message_class)
    return schemas[previous]


def to_typed(document: DocumentLike, previous: str | None = None) -> ProtobufMessage:
    """Return a document as a message of its own class."""
    schema, owner = typed_schema(type(document), previous), type(document).__name__
    plan, message = schema.plan, schema.message_class()
    try:
        _MessageWriter(plan).fill(message, plan.messages[plan.root], document)
    except _ConversionError as error:
        raise EncodeError(error.describe(owner)) from error.__cause__
    except RecursionError:
        raise EncodeError(f"{owner}: the document nests too deep for a message, or contains itself.") from None
    if not any(planned.role is Role.UNION for planned in plan.messages.values()):
        return message
    # A member of a union may be read as another one, so the message is read back.
    try:
        decoded = _read_document(plan, message)
    except DecodeError as error:
        raise EncodeError(f"{owner}: the message could not be read back: {error}") from error
    for name in plan.messages[plan.root].document_type.model_fields:
        value, other = document.__dict__.get(name), decoded.__dict__.get(name)
        if not is_unchanged(value, other):
            raise EncodeError(
                f"{owner}.{name}: {describe(value)} would be read back as {describe(other)}. Use a union of types that "
                "can be distinguished."
            )
    return message


def from_typed(
    document_type: type[DocumentT],
    source: ProtobufMessage | bytes | bytearray | memoryview,
    previous: str | None = None,
) -> DocumentT:
    """Return the document of a message, built here or by generated code, or of its bytes."""
    schema = typed_schema(document_type, previous)
    root = schema.plan.root
    if isinstance(source, schema.message_class):
        return cast("DocumentT", _read_document(schema.plan, source))
    protobuf = _protobuf("message")
    if isinstance(source, (bytes, bytearray, memoryview)):
        content = bytes(source)
    elif not isinstance(source, protobuf.Message):
        raise DecodeError(f"expected a message of {root} or its bytes, got {type(source).__name__}.")
    elif source.DESCRIPTOR.name != root:
        raise DecodeError(f"expected a message of {root}, got one of {source.DESCRIPTOR.full_name}.")
    else:  # made by generated code, whose class differs from the one that is built here
        try:
            content = bytes(source.SerializeToString())
        except (protobuf.EncodeError, ValueError) as error:
            raise DecodeError(f"the message of {root} cannot be read: {error}") from error
    try:
        message = _parse(schema.message_class, content)
    except (protobuf.DecodeError, ValueError, IndexError, TypeError, RuntimeError, struct.error) as error:
        raise DecodeError(f"{len(content)} bytes are not a message of {root}: {error}") from error
    return cast("DocumentT", _read_document(schema.plan, message))


def _parse(message_class: type[ProtobufMessage], content: bytes) -> ProtobufMessage:
    """Parse a message. For truncated bytes, the C++ runtime only warns and returns what came before."""
    if _protobuf("internal.api_implementation").Type() != "cpp":
        return message_class.FromString(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        message = message_class.FromString(content)
    if caught:
        raise ValueError(str(caught[0].message))
    return message


# --- descriptors


def file_descriptor(plan: ProtoPlan) -> Any:
    """Return the descriptor that protoc would compile from the text of the plan."""
    file = _protobuf("descriptor_pb2").FileDescriptorProto(name="quire.proto", package=plan.package, syntax="proto3")
    if plan.needs_duration:
        file.dependency.append("google/protobuf/duration.proto")
    for message in plan.messages.values():
        if message.role is not Role.DURATION:
            _describe_message(file.message_type.add(), message, plan)
    for enum in plan.enums.values():
        target = file.enum_type.add(name=enum.name)
        for name, number in enum.values:
            target.value.add(name=name, number=number)
    return file


def _describe_message(target: Any, message: Message, plan: ProtoPlan) -> None:
    target.name = message.name
    if message.role is Role.UNION:
        target.oneof_decl.add(name="value")
    for field in message.fields:
        descriptor = target.field.add(name=field.name, number=field.number)
        descriptor.label = descriptor.LABEL_REPEATED if field.slot.many else descriptor.LABEL_OPTIONAL
        if field.slot.key is not None:  # to protoc, a map is a repeated message of entries with a key and a value
            entry = target.nested_type.add(name=field.map_entry)
            entry.options.map_entry = True
            for number, (name, slot) in enumerate((("key", field.slot.key), ("value", field.slot)), 1):
                part = entry.field.add(name=name, number=number, label=descriptor.LABEL_OPTIONAL)
                _describe_type(part, slot, plan)
            descriptor.type = descriptor.TYPE_MESSAGE
            descriptor.type_name = f".{_full_name(plan, target.name)}.{entry.name}"
            continue
        _describe_type(descriptor, field.slot, plan)
        if message.role is Role.UNION:
            descriptor.oneof_index = 0
        elif field.label == "optional":  # in proto3, a oneof of its own with one member
            descriptor.proto3_optional = True
            descriptor.oneof_index = len(target.oneof_decl)
            target.oneof_decl.add(name=f"_{field.name}")


def _describe_type(descriptor: Any, slot: Slot, plan: ProtoPlan) -> None:
    word = slot.type if slot.wire is Wire.SCALAR else slot.wire.value
    descriptor.type = getattr(descriptor, f"TYPE_{word.upper()}")
    if slot.wire is not Wire.SCALAR:
        descriptor.type_name = f".{slot.type if slot.type == DURATION else _full_name(plan, slot.type)}"


def _full_name(plan: ProtoPlan, name: str) -> str:
    return f"{plan.package}.{name}" if plan.package else name


def _protobuf(module: str) -> ModuleType:
    """Return a module of the protobuf runtime, imported on first use."""
    return require(f"google.protobuf.{module}", extra="protobuf", needed_for="A protobuf message")


# --- writing


class _ConversionError(Exception):
    """A value that cannot be converted, and the path to it."""

    def __init__(self, reason: str, *path: str) -> None:
        super().__init__(reason)
        self.path = list(path)

    def describe(self, owner: str) -> str:
        """Return the whole message: 'Student.thesis.title: ...'."""
        return f"{''.join([owner, *self.path])}: {self}"


class _MessageWriter:
    def __init__(self, plan: ProtoPlan) -> None:
        self._plan = plan

    def fill(self, message: ProtobufMessage, shape: Message, value: Any) -> None:
        """Put a value into the message that stands for it."""
        if shape.role is Role.DOCUMENT:
            _check_document(shape, value)
            content = value.__dict__
            for field in shape.fields:
                self._write(message, field, content.get(field.source, _MISSING), f".{field.source}")
        elif shape.role is Role.WRAPPER:
            self._write(message, shape.fields[0], value)
        elif shape.role is Role.UNION:
            self._write(message, _find_member(shape, value), value)
        elif shape.role in (Role.RECORD, Role.ENTRY):
            if len(value) != len(shape.fields):
                raise _ConversionError(f"expected {len(shape.fields)} items, got {len(value)}.")
            for field, item in zip(shape.fields, value, strict=True):
                self._write(message, field, item)
        else:
            _FIXED_MESSAGES[shape.role].write(message, value)

    def _write(self, message: ProtobufMessage, field: ProtoField, value: Any, step: str = "") -> None:
        slot = field.slot
        if value is None and slot.field.nullable and not slot.many:
            return
        if value is _MISSING:
            raise _ConversionError("the document does not have this field; it was made without validation.", step)
        try:
            if not slot.many:
                self._write_one(message, field.name, slot, value)
            elif slot.key is not None:
                self._write_map(getattr(message, field.name), slot, slot.key, value)
            else:
                is_dict = slot.container is not None and slot.container.kind is FieldKind.DICT
                self._write_many(getattr(message, field.name), slot, value.items() if is_dict else value)
        except _ConversionError as error:
            if step:
                error.path.insert(0, step)
            raise
        except (TypeError, ValueError, AttributeError, KeyError, PydanticSerializationError) as error:
            reason = f"{describe(value)} has no form as {field.type_text}: {error}."
            raise _ConversionError(reason, *filter(None, [step])) from error

    def _write_one(self, message: ProtobufMessage, name: str, slot: Slot, value: Any) -> None:
        if slot.wire is Wire.MESSAGE:
            # Without a field that is set, an empty message would count as left out.
            inner = getattr(message, name)
            inner.SetInParent()
            self.fill(inner, self._plan.messages[slot.type], value)
        else:
            setattr(message, name, _encode(slot, value))

    def _write_many(self, container: Any, slot: Slot, values: Iterable[Any]) -> None:
        for index, value in enumerate(values):
            try:
                if slot.wire is Wire.MESSAGE:
                    self.fill(container.add(), self._plan.messages[slot.type], value)
                else:
                    container.append(_encode(slot, value))
            except _ConversionError as error:
                error.path.insert(0, f"[{index}]")
                raise

    def _write_map(self, container: Any, slot: Slot, key_slot: Slot, values: Any) -> None:
        for key, value in values.items():
            try:
                if slot.wire is Wire.MESSAGE:
                    inner = container[_encode(key_slot, key)]
                    inner.SetInParent()
                    self.fill(inner, self._plan.messages[slot.type], value)
                else:
                    container[_encode(key_slot, key)] = _encode(slot, value)
            except _ConversionError as error:
                error.path.insert(0, f"[{key!r}]")
                raise


def _encode(slot: Slot, value: object) -> object:
    if value is None and slot.field.kind is not FieldKind.ANY:
        raise TypeError("None is not a value of this field")
    return value if slot.encode is None else slot.encode(value)


def _check_document(shape: Message, value: Any) -> None:
    """Raise an error for a document of another class, or of a subclass whose additional values would be lost."""
    if not isinstance(value, shape.document_type):
        raise _ConversionError(f"expected {shape.document_type.__name__}, got {describe(value)}.")
    known = {field.source for field in shape.fields}
    more = [name for name in (*value.__dict__, *(value.__pydantic_extra__ or ())) if name not in known]
    if more and type(value) is not shape.document_type:
        raise _ConversionError(
            f"a {type(value).__name__} has more than {shape.document_type.__name__}, whose message has no place for "
            f"{', '.join(more)}. Annotate the field with a union of both classes."
        )
    if more:
        raise _ConversionError(
            f"the message has no place for the extra values {', '.join(more)}. Make them fields of the class."
        )


def _find_member(shape: Message, value: object) -> ProtoField:
    """Return the member of a union for a value: by its exact class, else by a base class."""
    # The exact class first: True is also an int, and in `int | bool` it must not become a number.
    for exact in (True, False):
        for field in shape.fields:
            if _fits(field.slot.field, value, exact=exact):
                return field
    raise _ConversionError(f"{describe(value)} is none of {', '.join(field.name for field in shape.fields)}.")


def _fits(field: Field, value: Any, *, exact: bool) -> bool:
    if value is None and field.nullable:
        return True
    if field.kind is FieldKind.UNION:
        return any(_fits(item, value, exact=exact) for item in field.items)
    if get_origin(field.type) is Literal:  # True == 1, so the types are compared as well
        return any(value == known and type(value) is type(known) for known in get_args(field.type))
    if field.kind is FieldKind.ANY:  # takes what fits no other member exactly
        return not exact
    if field.kind is FieldKind.TENSOR:
        return isinstance(value, field.type)
    if not (type(value) is field.type if exact else isinstance(value, field.type)):
        return False
    if field.kind is FieldKind.DICT and len(field.items) == 2:
        keys, values = field.items
        return all(_fits(keys, k, exact=exact) and _fits(values, v, exact=exact) for k, v in value.items())
    if field.kind is not FieldKind.LIST or not field.items:
        return True
    if len(field.items) > 1:
        return len(field.items) == len(value) and all(
            _fits(item, v, exact=exact) for item, v in zip(field.items, value, strict=True)
        )
    return all(_fits(field.items[0], item, exact=exact) for item in value)


# --- reading


def _read_document(plan: ProtoPlan, message: ProtobufMessage) -> DocumentLike:
    """Return the validated document of a message of the plan's root."""
    root = plan.messages[plan.root]
    try:
        return _MessageReader(plan).read_document(message, root)
    except _ConversionError as error:
        raise DecodeError(error.describe(root.document_type.__name__)) from error.__cause__
    except RecursionError:
        raise DecodeError(f"{root.document_type.__name__}: the message nests too deep.") from None


class _MessageReader:
    def __init__(self, plan: ProtoPlan) -> None:
        self._plan = plan

    def read_document(self, message: ProtobufMessage, shape: Message) -> DocumentLike:
        """Return the document that a message stands for."""
        tp, values = shape.document_type, {}
        accepted = tp.document_schema().accepted
        for field in shape.fields:
            try:
                value = self._read_field(message, field)
            except _ConversionError as error:
                error.path.insert(0, f".{field.source}")
                raise
            if value is not _MISSING:
                values[accepted[field.source][1]] = value
        try:
            document: DocumentLike = tp.model_validate(values, context=STORED)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            path = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]]
            raise _ConversionError(f"{first['msg']}.", *path) from error
        return document

    def _read_message(self, message: ProtobufMessage, shape: Message, slot: Slot) -> object:
        """Return the value that a message stands for."""
        if shape.role is Role.DOCUMENT:
            return self.read_document(message, shape)
        if shape.role is Role.WRAPPER:
            return self._read_required(message, shape.fields[0])
        if shape.role is Role.UNION:
            chosen = message.WhichOneof("value")
            if chosen is None:
                raise _ConversionError("none of the members of the union is set.")
            return self._read_required(message, next(field for field in shape.fields if field.name == chosen))
        if shape.role in (Role.RECORD, Role.ENTRY):
            return tuple(self._read_required(message, field) for field in shape.fields)
        return _FIXED_MESSAGES[shape.role].read(message, slot)

    def _read_required(self, message: ProtobufMessage, field: ProtoField) -> object:
        value = self._read_field(message, field)
        if value is _MISSING:
            raise _ConversionError(f"{field.name} is left out of the message.")
        return value

    def _read_field(self, message: ProtobufMessage, field: ProtoField) -> object:
        """Return the value of a field; None or `_MISSING` if it is left out."""
        slot = field.slot
        if slot.key is not None:
            return self._read_map(getattr(message, field.name), slot, slot.key)
        if slot.repeated:
            return self._read_many(getattr(message, field.name), slot)
        absent = None if slot.field.nullable else _MISSING
        if (field.label == "optional" or slot.wire is Wire.MESSAGE) and not message.HasField(field.name):
            return absent
        value = getattr(message, field.name)
        return absent if slot.wire is Wire.ENUM and value == 0 else self._read_one(value, slot)

    def _read_one(self, value: Any, slot: Slot) -> object:
        if slot.wire is Wire.MESSAGE:
            return self._read_message(value, self._plan.messages[slot.type], slot)
        if slot.decode is None:
            return value
        try:
            decoded = slot.decode(value)
        except _CONVERSION_ERRORS as error:
            text = repr(value)
            text = text if len(text) <= 60 else f"{text[:57]}..."
            expected = slot.comment or slot.field.type.__name__
            raise _ConversionError(f"{text} is not {expected}: {error}") from error
        if decoded is None and slot.wire is Wire.ENUM:
            raise _ConversionError(f"{value} is not a number of the enum {slot.type}.")
        return decoded

    def _read_many(self, values: Any, slot: Slot) -> object:
        items: list[Any] = []
        for index, value in enumerate(values):
            try:
                items.append(self._read_one(value, slot))
            except _ConversionError as error:
                error.path.insert(0, f"[{index}]")
                raise
        container = slot.container
        assert container is not None
        try:  # with the container's own type, by which a union recognizes its member
            if container.kind is FieldKind.DICT:
                return dict(items)
            if container.kind is FieldKind.DOCUMENTS or container.type in (tuple, set, frozenset):
                return container.type(items)
        except _CONVERSION_ERRORS as error:
            raise _ConversionError(f"the items do not make a {container}: {error}") from error
        return items

    def _read_map(self, values: Any, slot: Slot, key_slot: Slot) -> dict[Any, Any]:
        items = {}
        for key in values:
            try:
                items[self._read_one(key, key_slot)] = self._read_one(values[key], slot)
            except _ConversionError as error:
                error.path.insert(0, f"[{key!r}]")
                raise
        return items


# --- messages that are the same in every `.proto`


class _TensorMessage:
    def write(self, message: Any, value: Any) -> None:
        framework = framework_of(value)
        if framework is None:
            raise TypeError("it is not a tensor")
        if framework.is_sparse(value):
            raise TypeError(f"its layout is {framework.layout(value)}; make it dense first")
        try:
            array, dtype = framework.to_numpy(value), framework.dtype(value)
        except (TensorError, RuntimeError) as error:
            raise TypeError(str(error)) from error
        if dtype not in DTYPES and array.dtype.kind not in "mM":
            raise TypeError(f"other languages have no dtype {dtype}")
        message.dtype = dtype
        message.shape.extend(array.shape)
        if dtype == "string":
            message.strings.extend(item if isinstance(item, bytes) else str(item).encode() for item in array.flat)
        else:
            order = array.dtype.byteorder
            is_big_endian = order == ">" or (order == "=" and sys.byteorder == "big")
            message.data = (array.byteswap() if is_big_endian else array).tobytes()

    def read(self, message: Any, slot: Slot) -> object:
        try:
            array, framework = self._read_array(message), slot.field.type.framework
            return slot.field.type(array if framework is None else framework.from_numpy(array))
        except (*_CONVERSION_ERRORS, RuntimeError) as error:
            raise _ConversionError(str(error)) from error

    def _read_array(self, message: Any) -> np.ndarray[Any, Any]:
        shape = tuple(int(size) for size in message.shape)
        size, name = math.prod(shape), message.dtype
        if name == "string":
            if len(message.strings) != size:
                raise TensorError(
                    f"a tensor of shape {format_shape(shape)} needs {size} strings, got {len(message.strings)}"
                )
            texts = np.empty(size, dtype=object)
            texts[:] = list(message.strings)
            return texts.reshape(shape)
        if name not in DTYPES and not name.startswith(("datetime64[", "timedelta64[")):
            raise TensorError(f"{name!r} is not a dtype of tensors; known: {', '.join(DTYPES)}")
        dtype = common_dtype(name)
        if len(message.data) != size * dtype.itemsize:
            expected = f"{dtype.name} {format_shape(shape)} needs {size * dtype.itemsize} bytes"
            raise TensorError(f"a tensor of {expected}, got {len(message.data)}")
        array = np.frombuffer(bytearray(message.data), dtype)
        if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
            raise TensorError("a bool is 0 or 1, and the data holds other bytes")
        if sys.byteorder == "big":
            array = array.byteswap()
        return array.reshape(shape)


class _ComplexMessage:
    def write(self, message: Any, value: Any) -> None:
        message.real, message.imaginary = value.real, value.imag

    def read(self, message: Any, slot: Slot) -> object:
        return slot.field.type(complex(message.real, message.imaginary))


class _DurationMessage:
    def write(self, message: Any, value: Any) -> None:
        total = value // timedelta(microseconds=1)
        if abs(total) > _MAX_DURATION * 10**6:
            raise ValueError("a Duration of protobuf has at most ten thousand years")
        # The parts of a Duration have the same sign, while Python's timedelta has only negative days.
        seconds, micros = divmod(abs(total), 10**6)
        sign = -1 if total < 0 else 1
        message.seconds, message.nanos = sign * seconds, sign * micros * 1000

    def read(self, message: Any, _: Slot) -> timedelta:
        micros, rest = divmod(message.nanos, 1000)
        if rest:
            raise _ConversionError(
                f"{message.nanos} nanoseconds are not whole microseconds, which is all that Python's timedelta has."
            )
        if abs(message.seconds) > _MAX_DURATION or abs(message.nanos) >= 10**9 or message.seconds * message.nanos < 0:
            raise _ConversionError(
                f"{message.seconds} seconds and {message.nanos} nanoseconds are not a Duration of protobuf."
            )
        return timedelta(seconds=message.seconds, microseconds=micros)


_FIXED_MESSAGES: dict[Role, _TensorMessage | _ComplexMessage | _DurationMessage] = {
    Role.TENSOR: _TensorMessage(),
    Role.COMPLEX: _ComplexMessage(),
    Role.DURATION: _DurationMessage(),
}
