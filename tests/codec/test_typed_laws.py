"""Laws of typed messages: decode(encode(x)) is x, and bytes of any kind give a document or a DecodeError."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire import BaseDocument
from quire.errors import DecodeError
from quire.typing import NdArray
from tests.codec.proto_documents import Degree, Student
from tests.strategies import laws

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ZONES = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
LONGEST = timedelta(seconds=315_576_000_000)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


class Scalars(BaseDocument):
    whole: int
    real: float
    truth: bool
    text: str
    raw: bytes
    maybe: int | None
    many: list[int | None]
    table: dict[str, float]
    choice: int | str | bytes | None
    moment: datetime
    day: date
    hour: time
    span: timedelta
    unique: UUID
    exact: Decimal
    degree: Degree
    anything: Any
    array: NdArray


SCALARS = st.builds(
    Scalars,
    whole=INT64,
    real=st.floats(),
    truth=st.booleans(),
    text=TEXT,
    raw=st.binary(max_size=8),
    maybe=st.none() | INT64,
    many=st.lists(st.none() | INT64, max_size=4),
    table=st.dictionaries(TEXT, st.floats(), max_size=4),
    choice=st.none() | INT64 | TEXT | st.binary(max_size=8),
    moment=st.datetimes(timezones=st.none() | ZONES),
    day=st.dates(),
    hour=st.times(timezones=st.none() | ZONES),
    span=st.timedeltas(-LONGEST, LONGEST),
    unique=st.uuids(),
    exact=st.decimals(allow_nan=False, allow_infinity=False),
    degree=st.sampled_from(Degree),
    anything=JSON,
    array=hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)),
)


@laws
@given(SCALARS)
def test_typed_messages_round_trip(document: Scalars) -> None:
    content = document.to_typed_protobuf().SerializeToString()
    assert Scalars.from_typed_protobuf(content).identical(document)


def reads_or_refuses(tp: Any, content: bytes) -> None:
    """Bytes give a document that can be written again, or a DecodeError and nothing else."""
    try:
        copy = tp.from_typed_protobuf(content)
    except DecodeError:
        return
    again = tp.from_typed_protobuf(copy.to_typed_protobuf().SerializeToString())
    assert again.identical(copy)


@laws
@given(st.binary(max_size=200))
def test_random_bytes_raise_only_decode_errors(content: bytes) -> None:
    reads_or_refuses(Scalars, content)
    reads_or_refuses(Student, content)


@laws
@given(SCALARS, st.data())
def test_changed_bytes_raise_only_decode_errors(document: Scalars, data: st.DataObject) -> None:
    content = bytearray(document.to_typed_protobuf().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    reads_or_refuses(Scalars, bytes(content[: data.draw(st.integers(0, len(content)))]))


STUDENT = Student(
    name="Ada",
    thesis={"title": "On Engines", "embedding": [1, 2, 3]},
    friends=[{"name": "Charles", "thesis": {"title": "Engines"}}],
    grades={"maths": [1.0]},
    nicknames=["A"],
    contact="a@b",
    leave=timedelta(days=1),
    tags={"a": [1, None]},
)


@laws
@given(st.data())
def test_changed_message_raises_only_decode_errors(data: st.DataObject) -> None:
    content = bytearray(STUDENT.to_typed_protobuf().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    reads_or_refuses(Student, bytes(content))


def test_truncated_messages_raise_only_decode_errors() -> None:
    content = STUDENT.to_typed_protobuf().SerializeToString()
    for length in range(len(content)):
        reads_or_refuses(Student, content[:length])


def test_deep_nesting_is_rejected() -> None:
    content = b""
    for _ in range(5000):
        size, digits = len(content), bytearray()
        while size > 127:
            digits.append(size & 127 | 128)
            size >>= 7
        content = b"\x22" + bytes([*digits, size]) + content
    with pytest.raises(DecodeError):
        Student.from_typed_protobuf(content)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "degree", 9), r"Student\.degree: 9 is not a number of the enum Degree"),
        (lambda m: setattr(m.thesis, "handed_in", "soon"), r"Student\.thesis\.handed_in: 'soon' is not date and time"),
        (lambda m: m.tags.update({"a": "[1"}), r"Student\.tags\['a'\]: '\[1' is not any value, in JSON"),
        (lambda m: m.tags.update({"a": "NaN"}), "NaN is not a number of JSON"),
        (lambda m: m.tags.update({"a": "1e999"}), "1e999 is not a number of JSON"),
        (lambda m: m.tags.update({"a": "[" * 100_000}), r"Student.*"),
        (lambda m: setattr(m.leave, "nanos", 1), r"Student\.leave: 1 nanoseconds are not whole microseconds"),
        (lambda m: setattr(m.leave, "seconds", 2**62), r"Student\.leave: .* are not a Duration"),
        (lambda m: m.contact.ClearField("str"), r"Student\.contact: none of the members of the union is set"),
        (lambda m: m.ClearField("thesis"), r"Student\.thesis: Field required"),
        (lambda m: m.friends[0].ClearField("thesis"), r"Student\.friends\[0\]\.thesis: Field required"),
    ],
)
def test_invalid_value_raises_an_error_with_its_field(change: Any, reason: str) -> None:
    message = STUDENT.to_typed_protobuf()
    change(message)
    with pytest.raises(DecodeError, match=reason):
        Student.from_typed_protobuf(message.SerializeToString())
