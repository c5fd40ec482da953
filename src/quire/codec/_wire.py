"""Protobuf's wire format: tags, varints, length-delimited fields, and the large buffers of a message.

quire encodes and decodes its messages itself instead of using generated classes. A batch is then written and read at
the speed of a copy, the bytes are the same under every protobuf runtime, and the cost of untrusted bytes is known
before memory is allocated. Other readers see ordinary messages of `proto/quire.proto`; the tests compare both.

A message is a sequence of fields. Each field starts with a tag, the varint `number << 3 | wire_type`, and the wire type
determines what follows: a varint (0), 8 bytes (1), a length and that many bytes (2), or 4 bytes (5). A varint holds
seven bits per byte, the lowest first, and the high bit of each byte says whether another one follows.

Large arrays are not copied into nested messages. They are elements of one repeated field, `buffers`, of the outermost
message, and the nested messages refer to them by number, starting with 1. A writer can then send the arrays as they
are after the small part of the message, and a reader can return views of the received bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from quire.errors import DecodeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes = bytes | bytearray | memoryview
"""Bytes of a message."""
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
"""Wire types. Groups (3 and 4) are deprecated in protobuf and do not occur."""
BUFFERS = 15
"""The number of the field `buffers`, the same in every message that has it."""
ALIGNMENT = 64
_MIN_ALIGNED_SIZE = 1024
"""Buffers of at least this many bytes are aligned; for smaller ones the padding would cost more than it gains."""

WireField = tuple[int, int, int, int]
"""A field as it is read: number, wire type, and start and end of its content.

For a varint, the third item is the value instead of the start.
"""

_ONE_BYTE_VARINTS = [bytes([value]) for value in range(128)]


# --- writing


def encode_varint(value: int) -> bytes:
    """Encode a non-negative integer with variable length."""
    if value < 128:
        return _ONE_BYTE_VARINTS[value]
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def encode_tag(number: int, wire_type: int = DELIMITED) -> bytes:
    """Encode the tag of a field."""
    return encode_varint(number << 3 | wire_type)


_DELIMITED_TAGS = [encode_tag(number) for number in range(32)]


def encode_delimited(number: int, content: Bytes) -> bytes:
    """Encode a field that holds a message, a text or bytes."""
    size = len(content)
    return b"%b%b%b" % (  # type: ignore[str-format]  # it takes any buffer
        _DELIMITED_TAGS[number],
        _ONE_BYTE_VARINTS[size] if size < 128 else encode_varint(size),
        content,
    )


def encode_text(number: int, value: str) -> bytes:
    """Encode a text field; an empty text is the default of protobuf and is left out."""
    return encode_delimited(number, value.encode()) if value else b""


def encode_uint(number: int, value: int) -> bytes:
    """Encode a field with a non-negative integer; 0 is the default of protobuf and is left out."""
    return encode_varint(number << 3) + encode_varint(value) if value else b""


def encode_zigzag(value: int) -> bytes:
    """Encode a signed 64-bit integer so that small absolute values are short: 0, -1, 1, -2 become 0, 1, 2, 3."""
    return encode_varint((value << 1) ^ (value >> 63))


def encode_packed(number: int, values: Iterable[int]) -> bytes:
    """Encode a repeated field of non-negative integers; an empty one is left out."""
    content = b"".join(map(encode_varint, values))
    return encode_delimited(number, content) if content else b""


_BUFFER_TAG = encode_tag(BUFFERS)
_PADDING = 1023
"""The number of a field without meaning that moves the next buffer to a multiple of `ALIGNMENT`."""
_PADDING_TAG = encode_tag(_PADDING)


def size_of(part: Bytes | NDArray[Any]) -> int:
    """Return the number of bytes of a bytes-like object or an array."""
    return len(part) if isinstance(part, (bytes, bytearray)) else part.nbytes


def join_buffers(head: bytes, buffers: Iterable[Any]) -> list[Any]:
    """Return the parts of a message: its small part, then each buffer after its tag and length.

    A buffer is a contiguous bytes-like object, or a list of such objects that are written one after the other.
    Large buffers start at a multiple of `ALIGNMENT`, counted from the start of the message.
    """
    parts: list[Any] = [head]
    position = len(head)
    for buffer in buffers:
        pieces = buffer if isinstance(buffer, list) else [buffer]
        size = sum(map(size_of, pieces))
        start = _BUFFER_TAG + encode_varint(size)
        padding = _encode_padding(position + len(start)) if size >= _MIN_ALIGNED_SIZE else b""
        parts += (padding, start, *pieces)
        position += len(padding) + len(start) + size
    return parts


def _encode_padding(position: int) -> bytes:
    """Encode the field that moves `position` to the next multiple of `ALIGNMENT`.

    The padding is itself a field: a tag of two bytes, a length of one byte, and zeros. If fewer bytes are missing
    than the tag and the length take, the padding reaches to the multiple after the next.
    """
    missing = -position % ALIGNMENT
    if not missing:
        return b""
    overhead = len(_PADDING_TAG) + 1
    missing += 0 if missing >= overhead else ALIGNMENT
    return _PADDING_TAG + _ONE_BYTE_VARINTS[missing - overhead] + bytes(missing - overhead)


# --- reading


def split_buffers(data: Bytes) -> tuple[bytes, list[memoryview]]:
    """Return the small part of a message, and its buffers as views of the data."""
    view = memoryview(data).cast("B")
    # An empty buffer takes 2 bytes in the message, but more than 100 as a view, so their number is bounded.
    limit = (1 << 12) + len(view) // 16
    buffers: list[memoryview] = []
    small: list[memoryview] = []
    kept = position = 0
    for number, wire_type, start, end in iter_fields(view, 0, len(view)):
        if wire_type == DELIMITED and number in (BUFFERS, _PADDING):
            # The small part is what is between buffers: it ends where this field starts, which is `position`.
            if kept < position:
                small.append(view[kept:position])
            kept = end
            if number == BUFFERS:
                buffers.append(view[start:end])
            if len(buffers) + len(small) > limit:
                raise DecodeError(f"the message has more than {limit} buffers, more than its size allows.")
        position = end
    return b"".join((*small, view[kept:])), buffers


def iter_fields(data: Bytes, position: int, end: int) -> Iterator[WireField]:
    """Yield the fields of the message between two positions."""
    while position < end:
        field = read_field(data, position, end)
        position = field[3]
        yield field


def read_field(data: Bytes, position: int, end: int) -> WireField:
    """Read the field that starts at a position.

    Tags and lengths of one byte are by far the most frequent, so they are read without a call of `read_varint`.
    """
    key = data[position]
    position += 1
    if key > 0x7F:
        key, position = read_varint(data, position - 1, end)
    wire_type = key & 7
    if wire_type == DELIMITED:
        # At the end there is no byte: 0x80 announces another one, which `read_varint` reports as missing.
        size = data[position] if position < end else 0x80
        position += 1
        if size > 0x7F:
            size, position = read_varint(data, position - 1, end)
        start, position = position, position + size
    elif wire_type == VARINT:
        start, position = read_varint(data, position, end)
    elif wire_type in (FIXED64, FIXED32):
        start, position = position, position + (8 if wire_type == FIXED64 else 4)
    else:
        raise DecodeError(
            f"byte {position} begins a field of type {wire_type}, which no message of quire has: "
            "these are not the bytes of documents, or they were altered."
        )
    if position > end or key < 8:  # field number 0 does not exist
        raise DecodeError(f"the message ends inside a field, at byte {end}.")
    return key >> 3, wire_type, start, position


def read_varint(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Read an integer of variable length; return it and the position after it."""
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
    """Read the text between two positions."""
    try:
        return str(data[start:end], "utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError(f"the text at byte {start} is not UTF-8: {error.reason}.") from error


def read_uints(data: bytes, wire_type: int, start: int, end: int) -> list[int]:
    """Read the integers of a repeated field, packed or single."""
    if wire_type == VARINT:
        return [start]
    values = []
    while start < end:
        value, start = read_varint(data, start, end)
        values.append(value)
    return values


def decode_zigzag(value: int) -> int:
    """Return the signed integer of `encode_zigzag`."""
    # A varint of ten bytes can hold 70 bits; protobuf drops those above 64.
    return (value & ((1 << 64) - 1)) >> 1 ^ -(value & 1)
