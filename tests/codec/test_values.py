"""Every kind of value comes back as it was: typed, untyped, inside containers, in rows and in columns."""

# ruff: noqa: DTZ001 - datetimes without a zone are values too

from __future__ import annotations

import enum
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, IntFlag
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, NamedTuple, NewType
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    AnyUrl,
    AwareDatetime,
    BaseModel,
    ByteSize,
    Field,
    HttpUrl,
    PostgresDsn,
    SecretStr,
    StrictBytes,
    StrictInt,
    StrictStr,
    StringConstraints,
    create_model,
)
from pydantic_core import core_schema
from typing_extensions import TypedDict

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DecodeError, EncodeError
from quire.typing import ID
from tests.codec.round_trips import assert_round_trips, exact
from tests.strategies import laws

PARIS = ZoneInfo("Europe/Paris")
INDIA = timezone(timedelta(hours=5, minutes=30))


class Hue(Enum):
    RED = "red"
    BLUE = (0, 0, 1)
    ALSO_RED = "red"  # noqa: PIE796 - an alias


class Level(IntEnum):
    LOW = 1
    HIGH = 2**70


class Word(str, Enum):
    A = "a"
    B = "b"


class Permission(Flag):
    READ = 1
    WRITE = 2


class Bits(IntFlag):
    ONE = 1
    FOUR = 4


class Point(NamedTuple):
    x: int
    y: float = 0.0


@dataclass
class Size:
    width: int
    names: list[str]
    inner: Point | None = None


class Plain(BaseModel):
    a: int
    when: datetime | None = None


class Open(BaseModel, extra="allow"):
    a: int = 1


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    bark: int


class Shape(TypedDict, total=False):
    width: int
    label: str


class Nick(str):
    """A text of a class of its own, that pydantic knows how to make."""

    __slots__ = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())


class Nickname(str):
    __slots__ = ()


class Celsius(float):
    pass


def holding(annotation: Any, value: Any) -> BaseDocument:
    """A document with one field of that type."""
    cls: Any = create_model("Holding", __base__=BaseDocument, value=(annotation, ...))
    return cls(value=value)


# --- one value, in a field of its type

TYPED: list[tuple[Any, Any]] = [
    *((int, value) for value in (0, -1, 2**31, 2**40, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**100, -(10**100))),
    *((float, value) for value in (0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 5e-324)),
    *((bool, value) for value in (True, False)),
    *((complex, value) for value in (0j, complex(-0.0, -0.0), complex("nan+infj"), 1 + 2j)),
    *((str, value) for value in ("", "a", "ä€𝄞", "\0", "x" * 300)),
    *((bytes, value) for value in (b"", b"\0\xff", bytes(5000))),
    (datetime, datetime(2024, 1, 2, 3, 4, 5, 6)),
    (datetime, datetime(1, 1, 1)),
    (datetime, datetime(9999, 12, 31, 23, 59, 59, 999999)),
    (datetime, datetime(2024, 1, 2, tzinfo=timezone.utc)),
    (datetime, datetime(2024, 1, 2, tzinfo=INDIA)),
    (datetime, datetime(2024, 1, 2, tzinfo=timezone(timedelta(seconds=-1)))),
    (datetime, datetime(2024, 10, 27, 2, 30, tzinfo=PARIS)),
    (datetime, datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=PARIS)),
    (datetime, datetime(2024, 10, 27, 2, 30, fold=1)),
    (date, date(1, 1, 1)),
    (date, date(2024, 2, 29)),
    (time, time(1, 2, 3, 4)),
    (time, time(1, 2, tzinfo=INDIA)),
    (time, time(1, 2, fold=1)),
    (time, time(1, 2, tzinfo=PARIS)),
    (timedelta, timedelta.min),
    (timedelta, timedelta.max),
    (timedelta, timedelta(0)),
    (timedelta, timedelta(microseconds=-1)),
    *((Hue, value) for value in Hue),
    *((Level, value) for value in Level),
    *((Word, value) for value in Word),
    *((Permission, value) for value in (Permission.READ, Permission.READ | Permission.WRITE, Permission(0))),
    *((Bits, value) for value in (Bits.ONE, Bits.ONE | Bits.FOUR, Bits(0), Bits(6))),
    (UUID, UUID(int=0)),
    (UUID, UUID(int=2**128 - 1)),
    *((Decimal, Decimal(text)) for text in ("0", "-0", "1.10", "1E+400", "-1e-400")),
    (Path, Path("a/b")),
    (Path, Path("/")),
    (PurePosixPath, PurePosixPath("a/b.txt")),
    (PureWindowsPath, PureWindowsPath("C:/a")),
    (Any, None),
    (type(None), None),
    (int | None, None),
    (int | None, 3),
    (str | None, None),
    (bytes | None, None),
    (float | None, None),
    (Hue | None, None),
    (Hue | None, Hue.BLUE),
    # containers
    (list[int], []),
    (list[int], [1, 2**70]),
    (list[int | None], [None, 1]),
    (list[list[float]], [[], [1.0, float("nan")]]),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2, 3)),
    (tuple[int, ...], ()),
    (tuple[Hue, Level], (Hue.RED, Level.HIGH)),
    (set[int], {1, 2}),
    (set[int], set()),
    (frozenset[str], frozenset({"a", "b"})),
    (set[Hue], {Hue.RED, Hue.BLUE}),
    (set[tuple[int, str]], {(1, "a")}),
    (deque[int], deque([1, 2])),
    (dict[str, int], {"b": 1, "a": 2}),
    (dict[str, int], {}),
    (dict[int, str], {1: "a", -5: "b"}),
    (dict[float, str], {1.5: "a"}),
    (dict[tuple[int, int], str], {(1, 2): "a"}),
    (dict[Hue, Level], {Hue.RED: Level.LOW}),
    (dict[UUID, date], {UUID(int=1): date(2024, 1, 1)}),
    (dict[date, dict[bool, list[Decimal]]], {date(2024, 1, 1): {True: [Decimal("1.0")]}}),
    (dict[str | None, int], {None: 1, "a": 2}),
    (dict[frozenset[int], int], {frozenset({1}): 1}),
    (OrderedDict[str, int], OrderedDict(b=1, a=2)),
    # what has no message of its own, in a field that is typed with it
    (Point, Point(1, 2.5)),
    (list[Point], [Point(1), Point(2)]),
    (dict[str, Point], {"a": Point(1)}),
    (Size, Size(1, ["a"], Point(1, 2.0))),
    (list[Size], [Size(1, [])]),
    (Plain, Plain(a=1, when=datetime(2024, 1, 1))),
    (list[Plain], [Plain(a=1)]),
    (Plain | None, None),
    (Plain | None, Plain(a=1)),
    (Open, Open(a=1, b=2)),
    (HttpUrl, HttpUrl("https://a.b/c?d=e")),
    (AnyUrl, AnyUrl("s3://bucket/key")),
    (list[HttpUrl], [HttpUrl("https://a.b/")]),
    (IPv4Address, IPv4Address("1.2.3.4")),
    (IPv6Address, IPv6Address("::1")),
    (IPv4Interface, IPv4Interface("1.2.3.4/24")),
    (IPv4Network, IPv4Network("1.2.3.0/24")),
    (IPv6Network, IPv6Network("::/64")),
    (re.Pattern, re.compile("a+")),
    (PostgresDsn, PostgresDsn("postgres://u:p@a:1,b:2/c")),
    (Shape, {"width": 1, "label": "a"}),
    (list[Shape], [{"width": 1}]),
    (Annotated[Cat | Dog, Field(discriminator="kind")], Dog(bark=1)),
    (list[Cat | Dog], [Cat(), Dog(bark=1)]),
    (ByteSize, ByteSize(3)),
    (bytearray, bytearray(b"ab")),
    (Sequence[int], [1, 2]),
    (Sequence[int], (1, 2)),
    (Mapping[str, int], {"a": 1}),
    (Counter[str], Counter("aab")),
    (defaultdict[str, list[int]], defaultdict(list, a=[1])),
    (AwareDatetime, datetime(2024, 1, 2, tzinfo=timezone.utc)),
    (StrictInt, 2**70),
    (StrictStr, "a"),
    (StrictBytes, b"a"),
    (Nick, Nick("a")),
    (list[Nick], [Nick("a")]),
    # narrowed fields
    (Literal["a", "b"], "b"),
    (Literal[1, 2], 2),
    (Literal[1, "a"], "a"),
    (Literal[Hue.RED], Hue.RED),
    (Annotated[int, Field(gt=0)], 3),
    (Annotated[str, StringConstraints(pattern="^a")], "ab"),
    (Annotated[list[int], Field(max_length=2)], [1, 2]),
    (NewType("Kilo", int), 3),
    (ID, ID("x")),
    # unions
    (int | str, "1"),
    (int | str, 1),
    (str | int, 1),
    (int | float, 1),
    (int | float, 1.0),
    (bool | int, 1),
    (bool | int, True),
    (str | bytes, b"a"),
    (date | datetime, datetime(2024, 1, 1)),
    (date | datetime, date(2024, 1, 1)),
    (Hue | str, Hue.RED),
    (Hue | str, "red"),
    (list[int] | dict[str, int], {"a": 1}),
    (list[int] | set[int], {1}),
    (list[Hue] | Hue | None, [Hue.RED]),
    (list[Hue] | Hue | None, Hue.BLUE),
    (Decimal | float, Decimal(1)),
    (UUID | str, UUID(int=3)),
    (UUID | str, str(UUID(int=3))),
    (list[int | str] | None, [1, "1"]),
]


@pytest.mark.parametrize(("annotation", "value"), TYPED)
def test_values_round_trip_in_fields_of_their_type(annotation: Any, value: Any) -> None:
    assert_round_trips(holding(annotation, value))


def test_text_enums_round_trip() -> None:
    base = getattr(enum, "StrEnum", None)  # since Python 3.11
    if base is not None:
        tone = base("Tone", ["LOW", "HIGH"])
        assert_round_trips(holding(tone, tone.HIGH))


def test_a_fixed_offset_is_kept_and_its_name_is_not() -> None:
    got = Anything.from_bytes(Anything(value=datetime(2024, 1, 2, tzinfo=timezone(timedelta(hours=1), "X"))).to_bytes())
    assert exact(got.value, datetime(2024, 1, 2, tzinfo=timezone(timedelta(hours=1))))


# --- values that say themselves what they are

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**64), 2**64)
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.datetimes(timezones=st.none() | st.just(timezone.utc) | st.timezones(), allow_imaginary=True)
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.sampled_from([Path("a"), np.float32(1.5), np.int8(-1), np.bool_(True), np.datetime64("2024-01-01", "ns")])
)
keys = st.recursive(
    scalars.filter(lambda value: bool(value == value)),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
    ),
    max_leaves=8,
)


class Anything(BaseDocument):
    value: Any = None
    values: list[Any] = []
    named: dict[Any, Any] = {}
    bare: list = []  # type: ignore[type-arg]


@given(anything)
@laws
def test_values_round_trip_in_fields_of_any(value: Any) -> None:
    assert_round_trips(Anything(value=value))


@given(st.lists(anything, max_size=3), st.dictionaries(keys, anything, max_size=3))
@laws
def test_values_round_trip_in_containers_of_any(values: list[Any], named: dict[Any, Any]) -> None:
    assert_round_trips(Anything(values=values, named=named, bare=values))


@given(st.lists(anything, min_size=1, max_size=4))
@laws
def test_columns_of_mixed_values_round_trip(values: list[Any]) -> None:
    docs = DocumentArray[Anything]([Anything(value=value) for value in values])
    assert exact(DocumentArray[Anything].from_bytes(docs.to_bytes()), docs)
    assert exact(DocumentBatch[Anything].from_bytes(docs.stack().to_bytes()).unstack(), docs)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float32", "complex64", "M8[ms]", "m8[s]"])
def test_numpy_scalars_keep_their_dtype(dtype: str) -> None:
    assert_round_trips(Anything(value=np.zeros(1, dtype)[0]))


def test_numpy_strings_round_trip_as_scalars() -> None:
    assert_round_trips(Anything(value=np.str_("ä")))
    assert_round_trips(Anything(value=np.bytes_(b"a")))


def test_text_subclasses_are_read_as_str_without_a_typed_field() -> None:
    assert exact(Anything.from_bytes(Anything(value=Nickname("x")).to_bytes()).value, "x")
    assert exact(Anything.from_bytes(Anything(value=Celsius(1.5)).to_bytes()).value, 1.5)


@pytest.mark.parametrize("value", [object(), lambda: None, print, iter([1]), type])
def test_values_without_an_encoding_raise_an_error_with_the_field(value: Any) -> None:
    for send in (Anything(value=value).to_bytes, DocumentArray[Anything]([Anything(value=[value])]).to_bytes):
        with pytest.raises(EncodeError, match=r"Anything\.value.*has no form on the wire"):
            send()


def test_lone_surrogate_raises_an_error_with_the_field() -> None:
    class Said(BaseDocument):
        text: str

    said = Said.model_construct(id="1", text="\ud800")
    for send in (said.to_bytes, DocumentArray[Said]([said]).to_bytes, DocumentArray[Said]([said]).stack().to_bytes):
        with pytest.raises(EncodeError, match=r"Said\.text: half a character"):
            send()


def test_values_without_an_encoding_are_pickled_if_both_sides_allow_it() -> None:
    data = Anything(value=SecretStr("a")).to_bytes(allow_pickle=True)
    assert Anything.from_bytes(data, allow_pickle=True).value == SecretStr("a")
    with pytest.raises(DecodeError, match=r"Anything\.value: .*allow_pickle=True"):
        Anything.from_bytes(data)


def test_values_that_contain_themselves_raise_an_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(EncodeError, match="deep"):
        Anything.model_construct(id=ID("1"), value=loop, values=[], named={}, bare=[]).to_bytes()


def test_nesting_beyond_the_limit_raises_an_error() -> None:
    value: Any = 1
    for _ in range(80):
        value = [value]
    assert Anything.from_bytes(Anything(value=value).to_bytes()).value == value
    for _ in range(40):
        value = [value]
    with pytest.raises(EncodeError, match="levels deep"):
        Anything(value=value).to_bytes()


class Branch(BaseDocument):
    branches: DocumentArray[Branch] = []


def test_error_about_deep_documents_is_short() -> None:
    tree = Branch()
    for _ in range(120):
        tree = Branch(branches=[tree])
    with pytest.raises(
        EncodeError, match=r"^Branch\.branches: \.\.\. (Branch\.branches: ){3}values are nested more than"
    ):
        tree.to_bytes()
