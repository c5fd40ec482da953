"""Protobuf's wire format by hand: exact bytes, every boundary, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.codec import _messages
from quire.codec import _wire as wire
from quire.errors import DecodeError

UNSIGNED = st.integers(0, 2**64 - 1)
SIGNED = st.integers(-(2**63), 2**63 - 1)
VARINTS = {
    0: "00",
    1: "01",
    127: "7f",
    128: "8001",
    129: "8101",
    255: "ff01",
    300: "ac02",
    16_383: "ff7f",
    16_384: "808001",
    2**32: "8080808010",
    2**63: "80808080808080808001",
    2**64 - 1: "ffffffffffffffffff01",
}


@pytest.mark.parametrize(("value", "expected"), VARINTS.items())
def test_varints_have_the_bytes_of_protobuf(value: int, expected: str) -> None:
    data = bytes.fromhex(expected)
    assert wire.encode_varint(value) == data
    assert wire.read_varint(b"\xff" + data + b"\x01", 1, len(data) + 2) == (value, len(data) + 1)


@given(values=st.lists(UNSIGNED, max_size=20))
def test_varints_round_trip(values: list[int]) -> None:
    content = b"".join(map(wire.encode_varint, values))
    assert wire.read_uints(content, wire.DELIMITED, 0, len(content)) == values
    assert wire.encode_packed(3, values) == (wire.encode_delimited(3, content) if values else b"")


@given(value=SIGNED)
def test_zigzag_round_trips(value: int) -> None:
    number, end = wire.read_varint(wire.encode_zigzag(value), 0, 10)
    assert end == len(wire.encode_zigzag(value))
    assert wire.decode_zigzag(number) == value


@pytest.mark.parametrize(("value", "number"), [(0, 0), (-1, 1), (1, 2), (-2, 3), (2, 4), (-(2**63), 2**64 - 1)])
def test_zigzag_has_the_numbers_of_protobuf(value: int, number: int) -> None:
    assert wire.encode_zigzag(value) == wire.encode_varint(number)
    assert wire.decode_zigzag(number) == value
    assert wire.decode_zigzag(number + 2**64) == value, "more than 64 bits are cut off"


def test_fields_have_the_bytes_of_protobuf() -> None:
    assert wire.encode_tag(1) == b"\x0a"
    assert wire.encode_tag(15) == b"\x7a"
    assert wire.encode_tag(16, wire.VARINT) == b"\x80\x01"
    assert wire.encode_delimited(1, b"ab") == b"\x0a\x02ab"
    assert wire.encode_delimited(2, bytes(127)) == b"\x12\x7f" + bytes(127)
    assert wire.encode_delimited(2, bytes(128)) == b"\x12\x80\x01" + bytes(128)
    assert wire.encode_text(3, "é") == b"\x1a\x02\xc3\xa9"
    assert wire.encode_text(3, "") == wire.encode_uint(3, 0) == b""
    assert wire.encode_uint(3, 1) == b"\x18\x01"
    assert wire.encode_uint(16, 300) == b"\x80\x01\xac\x02"


def test_fields_are_read_with_their_positions() -> None:
    data = b"\x08\x96\x01" + b"\x12\x03abc" + b"\x1d1234" + b"\x21" + bytes(8) + wire.encode_delimited(2, bytes(200))
    assert list(wire.iter_fields(data, 0, len(data))) == [
        (1, wire.VARINT, 150, 3),
        (2, wire.DELIMITED, 5, 8),
        (3, wire.FIXED32, 9, 13),
        (4, wire.FIXED64, 14, 22),
        (2, wire.DELIMITED, 25, 225),
    ]
    assert wire.read_field(wire.encode_delimited(31, b"x"), 0, 4) == (31, wire.DELIMITED, 3, 4)
    assert wire.read_field(wire.encode_tag(1023) + b"\x01x", 0, 4) == (1023, wire.DELIMITED, 3, 4)
    assert wire.read_field(wire.encode_uint(16, 300), 0, 4) == (16, wire.VARINT, 300, 4), "its tag begins with 0x80"


@pytest.mark.parametrize("kind", [3, 4, 6, 7])
def test_unknown_wire_types_are_rejected(kind: int) -> None:
    with pytest.raises(DecodeError, match=f"byte 1 begins a field of type {kind}"):
        wire.read_field(bytes([1 << 3 | kind, 0, 0]), 0, 3)


@pytest.mark.parametrize("data", [b"\x00\x01", b"\x02\x00", b"\x05\x00\x00\x00\x00", b"\x07"])
def test_field_number_0_is_rejected(data: bytes) -> None:
    with pytest.raises(DecodeError):
        wire.read_field(data, 0, len(data))


@pytest.mark.parametrize(
    "data", [b"\x0a", b"\x0a\x80", b"\x0a\x02a", b"\x08", b"\x08\x80", b"\x1d123", b"\x21" + bytes(7), b"\x80"]
)
def test_truncated_fields_are_rejected(data: bytes) -> None:
    with pytest.raises(DecodeError, match="ends inside"):
        wire.read_field(data, 0, len(data))
    with pytest.raises(DecodeError, match=rf"the message ends inside a (field|number), at byte {len(data)}"):
        wire.read_field(data + b"\x01" * 20, 0, len(data))


@pytest.mark.parametrize("data", [b"\x0a\x01a", b"\x08\x01", b"\x1d1234", b"\x21" + bytes(8)])
def test_fields_may_end_with_the_message(data: bytes) -> None:
    assert wire.read_field(data, 0, len(data))[3] == len(data)


def test_numbers_have_at_most_ten_bytes() -> None:
    assert wire.read_varint(b"\x80" * 9 + b"\x01", 0, 10) == (2**63, 10)
    with pytest.raises(DecodeError, match="the number at byte 10 is too long"):
        wire.read_varint(b"\x80" * 10 + b"\x01", 0, 11)


def test_a_single_number_is_read_like_packed_ones() -> None:
    assert wire.read_uints(b"", wire.VARINT, 7, 9) == [7]
    assert wire.read_uints(b"\x05\x07", wire.DELIMITED, 0, 2) == [5, 7]
    assert wire.read_uints(b"\x05\x07\x08", wire.DELIMITED, 1, 2) == [7]


def test_invalid_utf_8_is_rejected() -> None:
    assert wire.read_text(b"xaby", 1, 3) == "ab"
    with pytest.raises(DecodeError, match="the text at byte 1 is not UTF-8"):
        wire.read_text(b"x\xffy", 1, 2)


# --- buffers


@pytest.mark.parametrize("size", [0, 1, 127, 128, 1_023, 1_024, 1_025, 5_000])
def test_buffers_round_trip_and_large_ones_are_aligned(size: int) -> None:
    for length in range(140):
        head = wire.encode_delimited(2, bytes(length))
        buffers = [b"x" * size, b"small", [b"y" * size, b"z"]]
        data = b"".join(wire.join_buffers(head, buffers))
        small, parts = wire.split_buffers(data)
        assert small == head
        assert [bytes(buffer) for buffer in parts] == [b"x" * size, b"small", b"y" * size + b"z"]
        for buffer in parts:
            position = data.index(bytes(buffer)) if len(buffer) >= 1_024 else 0
            assert position % 64 == 0, "a large buffer begins at a multiple of 64 bytes"
        padding = (
            len(data) - len(head) - sum(len(buffer) + len(wire.encode_varint(len(buffer))) + 1 for buffer in parts)
        )
        assert 0 <= padding <= 66 * sum(len(buffer) >= 1_024 for buffer in parts)


def test_small_part_keeps_fields_between_buffers() -> None:
    one, other = wire.encode_uint(1, 5), wire.encode_text(2, "x")
    data = one + wire.encode_delimited(15, b"a") + other + wire.encode_delimited(15, b"b") + one
    small, buffers = wire.split_buffers(data)
    assert small == one + other + one
    assert [bytes(buffer) for buffer in buffers] == [b"a", b"b"]
    assert wire.split_buffers(b"") == (b"", [])


def test_the_number_of_buffers_is_bounded() -> None:
    empty = wire.encode_delimited(15, b"")
    for count in (4_096, 4_096 + 585):
        assert len(wire.split_buffers(empty * count)[1]) == count
    with pytest.raises(DecodeError, match="more than 4681 buffers"):
        wire.split_buffers(empty * 4_682)


def test_parts_between_buffers_count_as_buffers() -> None:
    pair = wire.encode_uint(1, 5) + wire.encode_delimited(15, b"")
    assert len(wire.split_buffers(pair * 2_340)[1]) == 2_340
    with pytest.raises(DecodeError, match="more than its size allows"):
        wire.split_buffers(pair * 2_350)


def message_fields() -> list[tuple[str, str, int]]:
    """Return the constants of `quire.codec._messages`: message, field and number."""
    return [
        (owner.removesuffix("Field"), name.lower(), number)
        for owner, constants in vars(_messages).items()
        if isinstance(constants, type) and owner.endswith("Field")
        for name, number in vars(constants).items()
        if name.isupper()
    ]


@pytest.mark.needs("google.protobuf")
@pytest.mark.parametrize(("message", "field", "number"), message_fields())
def test_field_numbers_are_those_of_the_descriptors(message: str, field: str, number: int) -> None:
    descriptor = getattr(_messages.load_generated_messages(), message).DESCRIPTOR
    assert descriptor.fields_by_name[field].number == number
