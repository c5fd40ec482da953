"""Protobuf's wire format by hand.

quire writes and reads its messages itself: a batch is then written and read at the speed of a copy, a document faster
than through generated classes, the bytes are the same under every protobuf runtime, and what a stranger's bytes may
cost is known before it is spent. For every other reader they are ordinary messages of quire.proto, and the tests hold
both against each other.

A length-delimited field is a tag, a length and the bytes. So the large buffers of a message are one repeated field at
its top: they are put behind the small part as they are, and taken out again as views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from quire.errors import DecodeError

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
BUFFERS = 15
"""The number of the field that holds the buffers, in every message that has them."""
ALIGNMENT = 64
_ALIGNED = 1024
"""Buffers of so many bytes are aligned."""

Field = tuple[int, int, int, int]
"""A field as it is read: its number, its wire type, and where its content begins and ends; or its value, twice."""

_SMALL = [bytes([value]) for value in range(128)]


# --- out


def varint(value: int) -> bytes:
    """A number that is not negative in protobuf's variable length."""
    if value < 128:
        return _SMALL[value]
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def tag(number: int, kind: int = DELIMITED) -> bytes:
    """What stands before a field."""
    return varint(number << 3 | kind)


_TAGS = [tag(number) for number in range(32)]


def delimited(number: int, content: bytes) -> bytes:
    """A message, a text or bytes as a field."""
    size = len(content)
    return b"%b%b%b" % (_TAGS[number], _SMALL[size] if size < 128 else varint(size), content)


def text(number: int, value: str) -> bytes:
    """A text as a field; nothing where it is empty, as that is the default."""
    return delimited(number, value.encode()) if value else b""


def uint(number: int, value: int) -> bytes:
    """A number that is not negative as a field; nothing where it is 0."""
    return varint(number << 3) + varint(value) if value else b""


def zigzag(value: int) -> bytes:
    """An integer of 64 bits, in which small ones of both signs are short."""
    return varint((value << 1) ^ (value >> 63))


def packed(number: int, values: Iterable[int]) -> bytes:
    """Numbers as one field; nothing where there are none."""
    content = b"".join(map(varint, values))
    return delimited(number, content) if content else b""


_BUFFER_TAG = tag(BUFFERS)
_PADDING = 1023
"""The number of the field that moves the next buffer to a multiple of 64 bytes."""
_PADDING_TAG = tag(_PADDING)


def join(head: bytes, buffers: Iterable[Any]) -> list[Any]:
    """The parts of a message: its small part, then each buffer with its tag, large ones aligned.

    A buffer is anything with its bytes in one run, or a list of such whose bytes follow one another.
    """
    parts: list[Any] = [head]
    position = len(head)
    for buffer in buffers:
        pieces = buffer if isinstance(buffer, list) else [buffer]
        size = sum(piece.nbytes if hasattr(piece, "nbytes") else len(piece) for piece in pieces)
        start = _BUFFER_TAG + varint(size)
        gap = _gap(position + len(start)) if size >= _ALIGNED else b""
        parts += (gap, start, *pieces)
        position += len(gap) + len(start) + size
    return parts


def _gap(position: int) -> bytes:
    missing = -position % ALIGNMENT
    if not missing:
        return b""
    overhead = len(_PADDING_TAG) + 1
    missing += 0 if missing >= overhead else ALIGNMENT
    return _PADDING_TAG + _SMALL[missing - overhead] + bytes(missing - overhead)


# --- in


def split(data: Any) -> tuple[bytes, list[memoryview]]:
    """The small part of a message and its buffers, which are views of the data."""
    view = memoryview(data).cast("B")
    limit = (1 << 12) + len(view) // 16  # a view takes more memory than an empty buffer has bytes
    buffers: list[memoryview] = []
    small: list[memoryview] = []
    kept = position = 0
    for number, kind, start, end in fields(view, 0, len(view)):
        if kind == DELIMITED and number in (BUFFERS, _PADDING):
            if kept < position:
                small.append(view[kept:position])
            kept = end
            if number == BUFFERS:
                buffers.append(view[start:end])
            if len(buffers) + len(small) > limit:
                raise DecodeError(f"the message has more than {limit} buffers, more than its size allows.")
        position = end
    return b"".join((*small, view[kept:])), buffers


def fields(data: Any, position: int, end: int) -> Iterator[Field]:
    """The fields of a message that lies between two positions: number, wire type, start and end of the content.

    In the place of its start, a number has its value.
    """
    while position < end:
        found = field_at(data, position, end)
        position = found[3]
        yield found


def field_at(data: Any, position: int, end: int) -> Field:
    """The field that begins at a position."""
    key = data[position]
    position += 1
    if key > 0x7F:
        key, position = read_varint(data, position - 1, end)
    kind = key & 7
    if kind == DELIMITED:
        size = data[position] if position < end else 0x80
        position += 1
        if size > 0x7F:
            size, position = read_varint(data, position - 1, end)
        start, position = position, position + size
    elif kind == VARINT:
        start, position = read_varint(data, position, end)
    elif kind in (FIXED64, FIXED32):
        start, position = position, position + (8 if kind == FIXED64 else 4)
    else:
        raise DecodeError(
            f"byte {position} begins a field of type {kind}, which no message of quire has: "
            "these are not the bytes of documents, or they were altered."
        )
    if position > end or key < 8:
        raise DecodeError(f"the message ends inside a field, at byte {end}.")
    return key >> 3, kind, start, position


def read_varint(data: Any, position: int, end: int) -> tuple[int, int]:
    """A number of variable length, and the position behind it."""
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise DecodeError(f"the number at byte {position} is too long.")
    raise DecodeError(f"the message ends inside a number, at byte {end}.")


def read_text(data: bytes, start: int, end: int) -> str:
    """A text that lies between two positions."""
    try:
        return str(data[start:end], "utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError(f"the text at byte {start} is not UTF-8: {error.reason}.") from error


def read_uints(data: bytes, kind: int, start: int, end: int) -> list[int]:
    """The numbers of one field, packed or single."""
    if kind == VARINT:
        return [start]
    found = []
    while start < end:
        value, start = read_varint(data, start, end)
        found.append(value)
    return found


def from_zigzag(value: int) -> int:
    """The integer again."""
    return (value & ((1 << 64) - 1)) >> 1 ^ -(value & 1)
