"""Documents into messages of their own class."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any, Literal, get_args, get_origin

import numpy as np
from pydantic_core import PydanticSerializationError

from quire.codec._proto_plan import Message, ProtoField, ProtoPlan, Role, Slot, Wire
from quire.errors import EncodeError, TensorError
from quire.schema import Field, FieldKind
from quire.tensors import DTYPES, describe, framework_of

_MISSING: Any = object()
LONGEST = 315_576_000_000  # seconds that a Duration of protobuf may have


class Misfit(Exception):  # noqa: N818
    """A value that does not go through, and the way to it."""

    def __init__(self, reason: str, *path: str) -> None:
        super().__init__(reason)
        self.path = list(path)

    def tell(self, owner: str) -> str:
        """The whole message: 'Student.thesis.title: ...'."""
        return f"{''.join([owner, *self.path])}: {self}"


def write_document(plan: ProtoPlan, message: Any, document: Any) -> None:
    """Fill a message of the plan's root with a document."""
    owner = type(document).__name__
    try:
        _Writer(plan).fill(message, plan.messages[plan.root], document)
    except Misfit as error:
        raise EncodeError(error.tell(owner)) from error.__cause__
    except RecursionError:
        raise EncodeError(f"{owner}: the document nests too deep for a message, or contains itself.") from None


class _Writer:
    def __init__(self, plan: ProtoPlan) -> None:
        self._plan = plan

    def fill(self, message: Any, shape: Message, value: Any) -> None:
        """Put a value into the message that stands for it."""
        if shape.role is Role.DOCUMENT:
            _check_document(shape, value)
            content = value.__dict__
            for field in shape.fields:
                self._write(message, field, content.get(field.source, _MISSING), f".{field.source}")
        elif shape.role is Role.WRAPPER:
            self._write(message, shape.fields[0], value)
        elif shape.role is Role.UNION:
            self._write(message, _member(shape, value), value)
        elif shape.role in (Role.RECORD, Role.ENTRY):
            if len(value) != len(shape.fields):
                raise Misfit(f"expected {len(shape.fields)} items, got {len(value)}.")
            for field, item in zip(shape.fields, value, strict=True):
                self._write(message, field, item)
        else:
            _FIXED[shape.role](message, value)

    def _write(self, message: Any, field: ProtoField, value: Any, step: str = "") -> None:
        slot = field.slot
        if value is None and slot.field.nullable and not slot.many:
            return
        if value is _MISSING:
            raise Misfit("the document does not have this field; it was made without validation.", step)
        try:
            if not slot.many:
                self._write_one(message, field.name, slot, value)
            elif slot.key is not None:
                self._write_map(getattr(message, field.name), slot, value)
            else:
                self._write_many(getattr(message, field.name), slot, _items(value, slot))
        except Misfit as error:
            if step:
                error.path.insert(0, step)
            raise
        except (TypeError, ValueError, AttributeError, KeyError, PydanticSerializationError) as error:
            raise Misfit(
                f"{describe(value)} has no form as {field.type_text}: {error}.", *filter(None, [step])
            ) from error

    def _write_one(self, message: Any, name: str, slot: Slot, value: Any) -> None:
        if slot.wire is Wire.MESSAGE:
            inner = getattr(message, name)
            inner.SetInParent()
            self.fill(inner, self._plan.messages[slot.type], value)
        else:
            setattr(message, name, _encode(slot, value))

    def _write_many(self, container: Any, slot: Slot, values: Any) -> None:
        for index, value in enumerate(values):
            try:
                if slot.wire is Wire.MESSAGE:
                    self.fill(container.add(), self._plan.messages[slot.type], value)
                else:
                    container.append(_encode(slot, value))
            except Misfit as error:
                error.path.insert(0, f"[{index}]")
                raise

    def _write_map(self, container: Any, slot: Slot, values: Any) -> None:
        assert slot.key is not None
        for key, value in values.items():
            try:
                if slot.wire is Wire.MESSAGE:
                    inner = container[_encode(slot.key, key)]
                    inner.SetInParent()
                    self.fill(inner, self._plan.messages[slot.type], value)
                else:
                    container[_encode(slot.key, key)] = _encode(slot, value)
            except Misfit as error:
                error.path.insert(0, f"[{key!r}]")
                raise


def _items(value: Any, slot: Slot) -> Any:
    is_dict = slot.container is not None and slot.container.kind is FieldKind.DICT
    return value.items() if is_dict else value


def _encode(slot: Slot, value: Any) -> Any:
    if value is None and slot.field.kind is not FieldKind.ANY:
        raise TypeError("None is not a value of this field")
    return value if slot.encode is None else slot.encode(value)


def _check_document(shape: Message, value: Any) -> None:
    """A document of a subclass may come in the place of its parent's only if nothing would be lost."""
    if not isinstance(value, shape.document_type):
        raise Misfit(f"expected {shape.document_type.__name__}, got {describe(value)}.")
    known = {field.source for field in shape.fields}
    more = [name for name in (*value.__dict__, *(value.__pydantic_extra__ or ())) if name not in known]
    if more and type(value) is not shape.document_type:
        raise Misfit(
            f"a {type(value).__name__} has more than {shape.document_type.__name__}, whose message has no place for "
            f"{', '.join(more)}. Annotate the field with a union of both classes."
        )
    if more:
        raise Misfit(f"the message has no place for the extra values {', '.join(more)}. Make them fields of the class.")


def _member(shape: Message, value: Any) -> ProtoField:
    """The member of a union that a value belongs to: by its very class, else by what it is an instance of."""
    for exact in (True, False):
        for field in shape.fields:
            if _fits(field.slot.field, value, exact=exact):
                return field
    raise Misfit(f"{describe(value)} is none of {', '.join(field.name for field in shape.fields)}.")


def _fits(field: Field, value: Any, *, exact: bool) -> bool:
    if value is None and field.nullable:
        return True
    if field.kind is FieldKind.UNION:
        return any(_fits(item, value, exact=exact) for item in field.items)
    if get_origin(field.type) is Literal:
        return any(value == known and type(value) is type(known) for known in get_args(field.type))
    if field.kind is FieldKind.ANY:
        return not exact
    if field.kind is FieldKind.TENSOR:
        return isinstance(value, field.type)
    if not (type(value) is field.type if exact else isinstance(value, field.type)):
        return False
    return _items_fit(field, value, exact=exact)


def _items_fit(field: Field, value: Any, *, exact: bool) -> bool:
    if field.kind is FieldKind.DICT and len(field.items) == 2:
        keys, values = field.items
        return all(_fits(keys, k, exact=exact) and _fits(values, v, exact=exact) for k, v in value.items())
    if field.kind is not FieldKind.LIST or not field.items:
        return True
    if len(field.items) > 1:
        return len(field.items) == len(value) and all(map(lambda f, v: _fits(f, v, exact=exact), field.items, value))
    return all(_fits(field.items[0], item, exact=exact) for item in value)


def _write_tensor(message: Any, value: Any) -> None:
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
        message.data = _little(array).tobytes()


def _little(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array with the low byte of each value first."""
    order = array.dtype.byteorder
    foreign = order == ">" or (order == "=" and sys.byteorder == "big")
    return array.byteswap() if foreign else array


def _write_complex(message: Any, value: Any) -> None:
    message.real, message.imaginary = value.real, value.imag


def _write_duration(message: Any, value: timedelta) -> None:
    total = value // timedelta(microseconds=1)
    if abs(total) > LONGEST * 10**6:
        raise ValueError("a Duration of protobuf has at most ten thousand years")
    seconds, micros = divmod(abs(total), 10**6)
    sign = -1 if total < 0 else 1
    message.seconds, message.nanos = sign * seconds, sign * micros * 1000


_FIXED = {Role.TENSOR: _write_tensor, Role.COMPLEX: _write_complex, Role.DURATION: _write_duration}
