"""Messages of a document's own class back into documents."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
from pydantic import ValidationError

from quire.codec._proto_plan import Message, ProtoField, ProtoPlan, Role, Slot, Wire
from quire.codec._typed_write import LONGEST, Misfit
from quire.errors import DecodeError, TensorError
from quire.schema import STORED, FieldKind
from quire.tensors import DTYPES, common_dtype, format_shape

_LEFT_OUT: Any = object()
_BAD = (TypeError, ValueError, ArithmeticError, KeyError, MemoryError, TensorError)


def read_document(plan: ProtoPlan, message: Any) -> Any:
    """The document in a message of the plan's root, validated."""
    root = plan.messages[plan.root]
    try:
        return _Reader(plan).read(message, root, Slot(None, root.name, Wire.MESSAGE))  # type: ignore[arg-type]
    except Misfit as error:
        raise DecodeError(error.tell(root.document_type.__name__)) from error.__cause__
    except RecursionError:
        raise DecodeError(f"{root.document_type.__name__}: the message nests too deep.") from None


class _Reader:
    def __init__(self, plan: ProtoPlan) -> None:
        self._plan = plan

    def read(self, message: Any, shape: Message, slot: Slot) -> Any:
        """The value that a message stands for."""
        if shape.role is Role.DOCUMENT:
            return self._document(message, shape)
        if shape.role is Role.WRAPPER:
            return self._present(message, shape.fields[0])
        if shape.role is Role.UNION:
            return self._union(message, shape)
        if shape.role in (Role.RECORD, Role.ENTRY):
            return tuple(self._present(message, field) for field in shape.fields)
        return _FIXED[shape.role](message, slot)

    def _document(self, message: Any, shape: Message) -> Any:
        tp, values = shape.document_type, {}
        accepted = tp.document_schema().accepted
        for field in shape.fields:
            try:
                value = self._field(message, field)
            except Misfit as error:
                error.path.insert(0, f".{field.source}")
                raise
            if value is not _LEFT_OUT:
                values[accepted[field.source][1]] = value
        try:
            return tp.model_validate(values, context=STORED)
        except ValidationError as error:
            raise _explain(error) from error

    def _present(self, message: Any, field: ProtoField) -> Any:
        value = self._field(message, field)
        if value is _LEFT_OUT:
            raise Misfit(f"{field.name} is left out of the message.")
        return value

    def _union(self, message: Any, shape: Message) -> Any:
        chosen = message.WhichOneof("value")
        if chosen is None:
            raise Misfit("none of the members of the union is set.")
        return self._present(message, next(field for field in shape.fields if field.name == chosen))

    def _field(self, message: Any, field: ProtoField) -> Any:
        """The value of a field; None or nothing where it is left out."""
        slot = field.slot
        if slot.key is not None:
            return self._map(getattr(message, field.name), slot)
        if slot.repeated:
            return self._many(getattr(message, field.name), slot)
        absent = None if slot.field.nullable else _LEFT_OUT
        if (field.label == "optional" or slot.wire is Wire.MESSAGE) and not message.HasField(field.name):
            return absent
        value = getattr(message, field.name)
        return absent if slot.wire is Wire.ENUM and value == 0 else self._one(value, slot)

    def _one(self, value: Any, slot: Slot) -> Any:
        if slot.wire is Wire.MESSAGE:
            return self.read(value, self._plan.messages[slot.type], slot)
        if slot.decode is None:
            return value
        try:
            found = slot.decode(value)
        except _BAD as error:
            raise Misfit(f"{_glimpse(value)} is not {slot.comment or slot.field.type.__name__}: {error}") from error
        if found is None and slot.wire is Wire.ENUM:
            raise Misfit(f"{value} is not a number of the enum {slot.type}.")
        return found

    def _many(self, values: Any, slot: Slot) -> Any:
        found = []
        for index, value in enumerate(values):
            try:
                found.append(self._one(value, slot))
            except Misfit as error:
                error.path.insert(0, f"[{index}]")
                raise
        try:
            return _collect(found, slot)
        except _BAD as error:
            raise Misfit(f"the items do not make a {slot.container}: {error}") from error

    def _map(self, values: Any, slot: Slot) -> dict[Any, Any]:
        assert slot.key is not None
        found = {}
        for key in values:
            try:
                found[self._one(key, slot.key)] = self._one(values[key], slot)
            except Misfit as error:
                error.path.insert(0, f"[{key!r}]")
                raise
        return found


def _collect(found: list[Any], slot: Slot) -> Any:
    """The items as the field has them: a union must see its member's own type."""
    assert slot.container is not None
    if slot.container.kind is FieldKind.DICT:
        return dict(found)
    if slot.container.kind is FieldKind.DOCUMENTS or slot.container.type in (tuple, set, frozenset):
        return slot.container.type(found)
    return found


def _explain(error: ValidationError) -> Misfit:
    """The first of pydantic's complaints, with its place."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]]
    return Misfit(f"{first['msg']}.", *path)


def _glimpse(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_tensor(message: Any, slot: Slot) -> Any:
    try:
        array, framework = _array(message), slot.field.type.framework
        return slot.field.type(array if framework is None else framework.from_numpy(array))
    except (*_BAD, RuntimeError) as error:
        raise Misfit(str(error)) from error


def _array(message: Any) -> np.ndarray[Any, Any]:
    shape = tuple(int(size) for size in message.shape)
    size = math.prod(shape)
    if message.dtype == "string":
        if len(message.strings) != size:
            raise TensorError(
                f"a tensor of shape {format_shape(shape)} needs {size} strings, got {len(message.strings)}"
            )
        texts = np.empty(size, dtype=object)
        texts[:] = list(message.strings)
        return texts.reshape(shape)
    dtype = _dtype(message.dtype)
    if len(message.data) != size * dtype.itemsize:
        wanted = f"{dtype.name} {format_shape(shape)} needs {size * dtype.itemsize} bytes"
        raise TensorError(f"a tensor of {wanted}, got {len(message.data)}")
    array = np.frombuffer(bytearray(message.data), dtype)
    if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        raise TensorError("a bool is 0 or 1, and the data holds other bytes")
    if sys.byteorder == "big":
        array = array.byteswap()
    return array.reshape(shape)


def _dtype(name: str) -> np.dtype[Any]:
    if name not in DTYPES and not name.startswith(("datetime64[", "timedelta64[")):
        raise TensorError(f"{name!r} is not a dtype of tensors; known: {', '.join(DTYPES)}")
    return common_dtype(name)


def _read_complex(message: Any, slot: Slot) -> Any:
    return slot.field.type(complex(message.real, message.imaginary))


def _read_duration(message: Any, _: Slot) -> timedelta:
    micros, rest = divmod(message.nanos, 1000)
    if rest:
        raise Misfit(
            f"{message.nanos} nanoseconds are not whole microseconds, which is all that Python's timedelta has."
        )
    if abs(message.seconds) > LONGEST or abs(message.nanos) >= 10**9 or message.seconds * message.nanos < 0:
        raise Misfit(f"{message.seconds} seconds and {message.nanos} nanoseconds are not a Duration of protobuf.")
    return timedelta(seconds=message.seconds, microseconds=micros)


_FIXED: dict[Role, Callable[[Any, Slot], Any]] = {
    Role.TENSOR: _read_tensor,
    Role.COMPLEX: _read_complex,
    Role.DURATION: _read_duration,
}
