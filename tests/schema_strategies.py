"""Hypothesis strategies for random document classes, created at run time, and documents of them.

`document_classes()` draws a class; `Drawn.one` draws documents of it. Classes have colliding aliases, literals with
enums, secrets, constrained types, unions of classes with equal fields, computed fields, generics over generics, no
fields at all, and the less common types of pydantic. Values are those of validated documents, and documents are
created from them without validation, so that a bug in validation cannot hide one in a codec.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, IntFlag
from functools import cached_property
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, NewType, Optional, TypeVar, Union
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pydantic
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import (
    AliasChoices,
    AliasPath,
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    Base64Str,
    Base64UrlBytes,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    FileUrl,
    FiniteFloat,
    HttpUrl,
    InstanceOf,
    Json,
    JsonValue,
    NaiveDatetime,
    PastDate,
    PositiveInt,
    PostgresDsn,
    PrivateAttr,
    RootModel,
    Secret,
    SecretBytes,
    SecretStr,
    SerializeAsAny,
    StrictBytes,
    StrictInt,
    StrictStr,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    computed_field,
    condecimal,
    conint,
    conlist,
    conset,
    constr,
)
from pydantic.alias_generators import to_camel
from typing_extensions import NotRequired, TypeAliasType, TypedDict

from quire import BaseDocument, DocumentArray
from quire.typing import AnyTensor, NdArray, float32, float64, int64, uint8

T = TypeVar("T")
U = TypeVar("U")
_numbers = count()


# --- fixed classes that random ones refer to


class Plain(Enum):
    RED = "red"
    TWO = 2
    EMPTY = ""


class Text(str, Enum):
    A = "a"
    EMPTY = ""


class Number(IntEnum):
    ONE = 1
    TWO = 2


class Bits(Flag):
    R = 1
    W = 2


class IntBits(IntFlag):
    R = 1
    W = 2


class Point(NamedTuple):
    x: int
    y: float


class Options(TypedDict):
    name: str
    size: int


class SomeOptions(TypedDict):
    name: str
    size: NotRequired[int]


class Sizes(RootModel[list[int]]):
    pass


UserNumber = NewType("UserNumber", int)
Names = TypeAliasType("Names", list[str])


@dataclasses.dataclass
class Record:
    name: str
    size: int


@pydantic.dataclasses.dataclass
class CheckedRecord:
    size: int


class PlainModel(BaseModel):
    size: int
    name: str = ""


class AliasedModel(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    size: int = Field(alias="Size")


class ModelByAlias(BaseModel):
    size: int = Field(alias="Size")
    name: str = Field("", validation_alias=AliasChoices("Name", "title"))


class Left(BaseDocument):
    a: int = 0


class Right(BaseDocument):
    a: int = 0


class Empty(BaseDocument):
    id: ClassVar[None] = None


class Hollow(BaseDocument):
    """A document that may have nothing to show in a table."""

    id: ClassVar[None] = None
    a: int | None = None


class Cat(BaseDocument):
    kind: Literal["cat"] = "cat"
    size: int = 0


class Dog(BaseDocument):
    kind: Literal["dog"] = "dog"
    size: int = 0


class Box(BaseDocument, Generic[T]):
    item: T


class Shelf(BaseDocument, Generic[T]):
    boxes: DocumentArray[Box[T]] = []


class Library(BaseDocument, Generic[T, U]):
    shelves: DocumentArray[Shelf[T]] = []
    nested: Optional[DocumentArray[Box[Box[U]]]] = None
    by_name: dict[str, Box[T]] = {}


class Pair(BaseDocument, Generic[T, U]):
    first: T
    rest: list[Box[U]] = []


class Node(BaseDocument):
    name: str = ""
    parent: Optional[Node] = None
    children: DocumentArray[Node] = []


# --- types and their values


class Typed(NamedTuple):
    """An annotation, and a strategy for values of such a field."""

    annotation: Any
    values: st.SearchStrategy[Any]


def fill(document_type: type[Any], values: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> Any:
    """Create a document with these values, without aliases and validators."""
    document = document_type.__new__(document_type)
    content = {name: values[name] for name in document_type.model_fields}
    allows = document_type.model_config.get("extra") == "allow"
    object.__setattr__(document, "__dict__", content)
    object.__setattr__(document, "__pydantic_extra__", dict(extra or {}) if allows else None)
    object.__setattr__(document, "__pydantic_fields_set__", {*content, *(extra or {})})
    private = {name: info.get_default() for name, info in document_type.__private_attributes__.items()}
    object.__setattr__(document, "__pydantic_private__", private or None)
    return document


def _documents(document_type: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    if "id" in document_type.model_fields:
        fields = {"id": st.uuids().map(lambda key: key.hex), **fields}
    return st.fixed_dictionaries(fields).map(lambda values: fill(document_type, values))


texts = st.text(max_size=4) | st.sampled_from(["", '"', '""', "null", "NaN", "a,b\n", "1", "[1]", "None", "é"])
integers = st.integers(-5, 5) | st.sampled_from([2**53 + 1, 2**63 - 1, -(2**63), 2**64, -(2**70)])
zones = st.sampled_from([None, timezone.utc, timezone(timedelta(hours=5, minutes=30)), ZoneInfo("Europe/Paris")])
fixed_zones = st.sampled_from([None, timezone.utc, timezone(timedelta(hours=-3))])
_YEARS = datetime(1900, 1, 1), datetime(2200, 1, 1)  # noqa: DTZ001 - the zone is drawn
moments = st.datetimes(*_YEARS, timezones=zones)
plain_json = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=3,
)
anything = plain_json | st.sampled_from(
    [(1, "a"), {1, 2}, frozenset({3}), b"\xff", 1j, {1: "a"}, {"a": (1,)}, date(2020, 1, 1), Decimal("1.50")]
)
urls = st.sampled_from(["http://a.b/", "https://x.org/y?z=1#q", "ftp://f.g/h"])
web_urls = st.sampled_from(["http://a.b/", "https://x.org/y?z=1"])
flags = st.sampled_from([0, re.IGNORECASE, re.MULTILINE | re.DOTALL])
patterns = st.builds(re.compile, st.sampled_from(["a", "(?i)a", "[b-d]+"]), flags)
aware = st.datetimes(*_YEARS, timezones=st.just(timezone.utc))


def _literals() -> list[Typed]:
    strategies: list[Any] = [
        Literal["a", "b"],
        Literal[1, "x", None],  # noqa: PYI061
        Literal[Plain.RED, Plain.TWO],
        Literal[Text.A, "x"],
        Literal[Plain.RED, "red"],  # alike in JSON
        Literal[Plain.EMPTY, 3],
        Literal[Number.ONE, False, "1"],
        Literal[b"a", "a"],
    ]
    return [Typed(literal, st.sampled_from(literal.__args__)) for literal in strategies]


SCALARS: list[Typed] = [
    Typed(bool, st.booleans()),
    Typed(int, integers),
    Typed(float, st.floats()),
    Typed(complex, st.complex_numbers()),
    Typed(str, texts),
    Typed(bytes, st.binary(max_size=3)),
    Typed(bytearray, st.binary(max_size=3).map(bytearray)),
    Typed(Decimal, st.decimals(allow_nan=False, allow_infinity=False) | st.just(Decimal("1.50"))),
    Typed(UUID, st.uuids()),
    Typed(Path, st.sampled_from([Path("a/b"), Path(), Path("/")])),
    Typed(PurePosixPath, st.sampled_from([PurePosixPath("a/b"), PurePosixPath()])),
    Typed(date, st.dates()),
    Typed(datetime, moments),
    Typed(AwareDatetime, aware),
    Typed(NaiveDatetime, st.datetimes()),
    Typed(time, st.times(timezones=fixed_zones)),
    Typed(timedelta, st.timedeltas()),
    Typed(type(None), st.none()),
]
ENUMS: list[Typed] = [
    Typed(Plain, st.sampled_from(Plain)),
    Typed(Text, st.sampled_from(Text)),
    Typed(Number, st.sampled_from(Number)),
    Typed(Bits, st.sampled_from([Bits.R, Bits.R | Bits.W, Bits(0)])),
    Typed(IntBits, st.sampled_from([IntBits.R, IntBits.R | IntBits.W, IntBits(0)])),
]
SPECIAL: list[Typed] = [
    Typed(conint(ge=0, le=9), st.integers(0, 9)),
    Typed(constr(min_length=1, max_length=3), st.text(min_size=1, max_size=3)),
    Typed(Annotated[str, StringConstraints(pattern="^[ab]*$")], st.sampled_from(["", "ab"])),
    Typed(Annotated[float, Field(gt=0)], st.floats(0.5, 9)),
    Typed(Annotated[list[int], Field(max_length=2)], st.lists(st.integers(0, 3), max_size=2)),
    Typed(PositiveInt, st.integers(1, 9)),
    Typed(StrictInt, st.integers(-3, 3)),
    Typed(StrictStr, texts),
    Typed(StrictBytes, st.binary(max_size=3)),
    Typed(condecimal(max_digits=4, decimal_places=2), st.sampled_from([Decimal("1.50"), Decimal(0)])),
    Typed(conlist(int, min_length=1), st.lists(st.integers(-3, 3), min_size=1, max_size=2)),
    Typed(conset(int, max_length=2), st.sets(st.integers(-3, 3), max_size=2)),
    Typed(PastDate, st.dates(max_value=date(2000, 1, 1))),
    Typed(UserNumber, integers),
    Typed(Names, st.lists(texts, max_size=2)),
    Typed(FiniteFloat, st.floats(allow_nan=False, allow_infinity=False)),
    Typed(SecretStr, texts.map(SecretStr)),
    Typed(SecretBytes, st.binary(max_size=3).map(SecretBytes)),
    Typed(Secret[int], st.integers(-3, 3).map(Secret[int])),
    Typed(Secret[date], st.dates().map(Secret[date])),
    Typed(Json[list[int]], st.lists(st.integers(-3, 3), max_size=2)),
    Typed(Json[str], texts),
    Typed(Json, plain_json),
    Typed(Base64Bytes, st.binary(max_size=4)),
    Typed(Base64Str, st.text(max_size=4)),
    Typed(Base64UrlBytes, st.binary(max_size=4)),
    Typed(re.Pattern, patterns),
    Typed(re.Pattern[str], patterns),
    Typed(re.Pattern[bytes], st.builds(re.compile, st.just(b"a"), st.sampled_from([0, re.IGNORECASE]))),
    Typed(IPv4Address, st.ip_addresses(v=4)),
    Typed(IPv6Address, st.ip_addresses(v=6)),
    Typed(IPv4Network, st.just(IPv4Network("10.0.0.0/30"))),
    Typed(IPv4Interface, st.just(IPv4Interface("10.0.0.1/8"))),
    Typed(AnyUrl, urls.map(AnyUrl)),
    Typed(FileUrl, st.just(FileUrl("file:///a/b"))),
    Typed(PostgresDsn, st.just(PostgresDsn("postgres://user:pass@localhost:5432/app"))),
    Typed(HttpUrl, web_urls.map(HttpUrl)),
    Typed(ByteSize, st.integers(0, 2000).map(ByteSize)),
    Typed(Point, st.builds(Point, st.integers(-3, 3), st.floats(allow_nan=False))),
    Typed(Options, st.fixed_dictionaries({"name": texts, "size": st.integers(-3, 3)})),
    Typed(SomeOptions, st.fixed_dictionaries({"name": texts}, optional={"size": st.integers(-3, 3)})),
    Typed(Sizes, st.lists(st.integers(-3, 3), max_size=2).map(Sizes)),
    Typed(JsonValue, plain_json),
    Typed(Hashable, st.integers(-3, 3) | texts | st.just((1, "a"))),
    Typed(InstanceOf[Decimal], st.just(Decimal("1.50"))),
    Typed(type[int], st.sampled_from([int, bool])),
    Typed(Counter[str], st.dictionaries(texts, st.integers(1, 3), max_size=2).map(Counter)),
    Typed(
        defaultdict[str, list[int]],
        st.dictionaries(texts, st.lists(st.integers(0, 3), max_size=2), max_size=2).map(
            lambda items: defaultdict(list, items)
        ),
    ),
    Typed(Record, st.builds(Record, texts, st.integers(-3, 3))),
    Typed(CheckedRecord, st.builds(CheckedRecord, st.integers(-3, 3))),
    Typed(PlainModel, st.builds(PlainModel, size=st.integers(-3, 3), name=texts)),
    Typed(AliasedModel, st.builds(AliasedModel, size=st.integers(-3, 3))),
    Typed(ModelByAlias, st.builds(lambda size, name: ModelByAlias(Size=size, Name=name), st.integers(-3, 3), texts)),
    Typed(Any, anything),
    *_literals(),
]
TENSORS: list[Typed] = [
    Typed(NdArray[float32, 3], hnp.arrays(np.float32, 3)),
    Typed(NdArray[int64, 2, 2], hnp.arrays(np.int64, (2, 2))),
    Typed(NdArray[float64], hnp.arrays(np.float64, 2)),
    Typed(NdArray, hnp.arrays(np.uint8, (1, 2))),
    Typed(AnyTensor, hnp.arrays(np.float32, 2)),
    Typed(NdArray[uint8, "n"], hnp.arrays(np.uint8, 2)),
    Typed(np.ndarray, hnp.arrays(np.int16, 2)),
]
HASHABLE: list[Typed] = [
    Typed(int, st.integers(-3, 3)),
    Typed(str, texts),
    Typed(bool, st.booleans()),
    Typed(bytes, st.binary(max_size=2)),
    Typed(Plain, st.sampled_from(Plain)),
    Typed(Number, st.sampled_from(Number)),
    Typed(UUID, st.uuids()),
    Typed(date, st.dates()),
    Typed(tuple[int, str], st.tuples(st.integers(-3, 3), texts)),
    Typed(float, st.floats(allow_nan=False)),
    Typed(Decimal, st.sampled_from([Decimal("1.5"), Decimal(2)])),
]
lefts = _documents(Left, a=st.integers(-3, 3))
rights = _documents(Right, a=st.integers(-3, 3))
animals = _documents(Cat, kind=st.just("cat"), size=st.integers(0, 3)) | _documents(
    Dog, kind=st.just("dog"), size=st.integers(0, 3)
)
DOCUMENTS: list[Typed] = [
    Typed(Left, lefts),
    Typed(Empty, _documents(Empty)),
    Typed(Hollow, _documents(Hollow, a=st.none() | st.integers(-3, 3))),
]


def _nodes() -> st.SearchStrategy[Node]:
    ends = _documents(Node, name=texts, parent=st.none(), children=st.builds(DocumentArray[Node]))
    return st.recursive(
        ends,
        lambda inner: _documents(
            Node, name=texts, parent=st.none() | inner, children=st.lists(inner, max_size=2).map(DocumentArray[Node])
        ),
        max_leaves=3,
    )


DOCUMENTS.append(Typed(Node, _nodes()))
UNIONS_OF_DOCUMENTS: list[Typed] = [
    Typed(Union[Left, Right], lefts | rights),
    Typed(list[Union[Right, Left]], st.lists(lefts | rights, max_size=2)),
    Typed(dict[str, Union[Left, Right]], st.dictionaries(texts, lefts | rights, max_size=2)),
    Typed(
        Union[DocumentArray[Left], DocumentArray[Right]],
        st.lists(lefts, max_size=2).map(DocumentArray[Left]) | st.lists(rights, max_size=2).map(DocumentArray[Right]),
    ),
    Typed(Annotated[Union[Cat, Dog], Field(discriminator="kind")], animals),
    Typed(list[Annotated[Union[Cat, Dog], Field(discriminator="kind")]], st.lists(animals, max_size=2)),
    Typed(SerializeAsAny[Left], lefts),
]


def _containers(inner: Typed, draw: Callable[[Any], Any]) -> Typed:
    tp, values = inner
    items = st.lists(values, max_size=2)
    mapping = st.dictionaries(texts, values, max_size=2)
    choices: list[Callable[[], Typed]] = [
        lambda: Typed(list[tp], items),
        lambda: Typed(Sequence[tp], items),
        lambda: Typed(tuple[tp, ...], items.map(tuple)),
        lambda: Typed(tuple[tp, int], st.tuples(values, st.integers(-3, 3))),
        lambda: Typed(deque[tp], items.map(deque)),
        lambda: Typed(dict[str, tp], mapping),
        lambda: Typed(Mapping[str, tp], mapping),
        lambda: Typed(OrderedDict[str, tp], mapping.map(OrderedDict)),
        lambda: Typed(dict[key.annotation, tp], st.dictionaries(key.values, values, max_size=2)),
        lambda: Typed(set[key.annotation], st.sets(key.values, max_size=2)),
        lambda: Typed(frozenset[key.annotation], st.frozensets(key.values, max_size=2)),
        lambda: Typed(list[Optional[tp]], st.lists(st.none() | values, max_size=2)),
    ]
    key = draw(st.sampled_from(HASHABLE))
    return draw(st.sampled_from(choices))()


def _of_documents(inner: Typed, draw: Callable[[Any], Any]) -> Typed:
    tp, values = inner

    def arrays() -> st.SearchStrategy[Any]:
        return st.lists(values, max_size=2).map(DocumentArray[tp])

    def pairs() -> st.SearchStrategy[Any]:
        boxes = st.lists(_documents(Box[int], item=integers), max_size=2)
        return _documents(Pair[tp, int], first=values, rest=boxes)

    choices: list[Callable[[], Typed]] = [
        lambda: inner,
        lambda: Typed(DocumentArray[tp], arrays()),
        lambda: Typed(list[tp], st.lists(values, max_size=2)),
        lambda: Typed(dict[str, tp], st.dictionaries(texts, values, max_size=2)),
        lambda: Typed(Union[tp, Right], values | _documents(Right, a=st.integers(-3, 3))),
        lambda: Typed(Union[tp, int, str], values | st.integers(-3, 3) | texts),
        lambda: Typed(Optional[DocumentArray[tp]], st.none() | arrays()),
        lambda: Typed(Box[tp], _documents(Box[tp], item=values)),
        lambda: Typed(Pair[tp, int], pairs()),
    ]
    return draw(st.sampled_from(choices))()


# --- generic classes


class Template(NamedTuple):
    """An annotation with a type variable: functions from a type to the annotation, its values and an input."""

    annotation: Callable[[Any], Any]
    values: Callable[[Any, st.SearchStrategy[Any]], st.SearchStrategy[Any]]
    wrap: Callable[[Any], Any]


def boxes_of(tp: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return _documents(Box[tp], item=values)


def box_arrays_of(tp: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(boxes_of(tp, values), max_size=2).map(DocumentArray[Box[tp]])


def shelves_of(tp: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return _documents(Shelf[tp], boxes=box_arrays_of(tp, values))


def _libraries_of(tp: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    nested = st.lists(boxes_of(Box[int], boxes_of(int, st.integers(-3, 3))), max_size=2)
    return _documents(
        Library[tp, int],
        shelves=st.lists(shelves_of(tp, values), max_size=2).map(DocumentArray[Shelf[tp]]),
        nested=st.none() | nested.map(DocumentArray[Box[Box[int]]]),
        by_name=st.dictionaries(texts, boxes_of(tp, values), max_size=2),
    )


TEMPLATES: list[Template] = [
    Template(lambda t: t, lambda _, values: values, lambda value: value),
    Template(lambda t: list[t], lambda _, values: st.lists(values, max_size=2), lambda value: [value]),
    Template(
        lambda t: dict[str, t],
        lambda _, values: st.dictionaries(texts, values, max_size=2),
        lambda value: {"k": value},
    ),
    Template(
        lambda t: tuple[t, int],
        lambda _, values: st.tuples(values, st.integers(-3, 3)),
        lambda value: (value, 1),
    ),
    Template(lambda t: Box[t], boxes_of, lambda value: {"item": value}),
    Template(
        lambda t: Box[Box[t]],
        lambda tp, values: boxes_of(Box[tp], boxes_of(tp, values)),
        lambda value: {"item": {"item": value}},
    ),
    Template(
        lambda t: Box[list[t]],
        lambda tp, values: boxes_of(list[tp], st.lists(values, max_size=2)),
        lambda value: {"item": [value]},
    ),
    Template(lambda t: DocumentArray[Box[t]], box_arrays_of, lambda value: [{"item": value}]),
    Template(
        lambda t: Optional[DocumentArray[Box[t]]],
        lambda tp, values: st.none() | box_arrays_of(tp, values),
        lambda value: [{"item": value}],
    ),
    Template(
        lambda t: list[DocumentArray[Box[t]]],
        lambda tp, values: st.lists(box_arrays_of(tp, values), max_size=2),
        lambda value: [[{"item": value}]],
    ),
    Template(
        lambda t: DocumentArray[Box[Box[t]]],
        lambda tp, values: st.lists(boxes_of(Box[tp], boxes_of(tp, values)), max_size=2).map(
            DocumentArray[Box[Box[tp]]]
        ),
        lambda value: [{"item": {"item": value}}],
    ),
    Template(lambda t: Shelf[t], shelves_of, lambda value: {"boxes": [{"item": value}]}),
    Template(
        lambda t: DocumentArray[Shelf[t]],
        lambda tp, values: st.lists(shelves_of(tp, values), max_size=2).map(DocumentArray[Shelf[tp]]),
        lambda value: [{"boxes": [{"item": value}]}],
    ),
    Template(
        lambda t: Library[t, int],
        _libraries_of,
        lambda value: {"shelves": [{"boxes": [{"item": value}]}]},
    ),
]


def generic_class(template: Template, name: str = "content") -> type[Any]:
    """Create a generic class with one field, whose type is the template with a type variable."""
    namespace = {"__annotations__": {name: template.annotation(T)}, "__module__": __name__}
    return _new_class(namespace, (BaseDocument, Generic[T]))


def plain_class(template: Template, tp: Any, name: str = "content") -> type[Any]:
    """Create a class with one field, whose type is the template with a type."""
    return _new_class({"__annotations__": {name: template.annotation(tp)}, "__module__": __name__})


def _generic(inner: Typed, draw: Callable[[Any], Any]) -> Typed:
    """Draw a generic document with a type argument: a fixed class or a new one, which may contain generic documents."""
    template = draw(st.sampled_from(TEMPLATES))
    tp, values = inner
    if draw(st.booleans()):
        return Typed(template.annotation(tp), template.values(tp, values))
    document_type = generic_class(template)[tp]
    return Typed(document_type, _documents(document_type, content=template.values(tp, values)))


@st.composite
def generic_classes(draw: Callable[[Any], Any], depth: int = 2) -> Drawn:
    """Draw a new generic document class with its type argument."""
    inner = draw(field_types(depth - 1))
    template = draw(st.sampled_from(TEMPLATES))
    document_type = generic_class(template)[inner.annotation]
    return Drawn(document_type, _documents(document_type, content=template.values(inner.annotation, inner.values)))


def _unions(first: Typed, second: Typed) -> Typed:
    union = Union[first.annotation, second.annotation]
    # As an item of a list: a union of one model is the model, whose config an adapter must not set.
    adapter = TypeAdapter(list[union], config=ConfigDict(arbitrary_types_allowed=True))

    def is_stable(value: Any) -> bool:
        """Return whether pydantic keeps the value unchanged in a document."""
        try:
            return type(adapter.validate_python([value])[0]) is type(value)
        except ValidationError:
            return True

    return Typed(union, (first.values | second.values).filter(is_stable))


@st.composite
def field_types(draw: Callable[[Any], Any], depth: int = 2) -> Typed:
    """Draw a type for a field."""
    how = draw(st.integers(0, 19))
    if depth == 0 or how < 8:
        field_type = draw(st.sampled_from(draw(st.sampled_from([SCALARS, SPECIAL, SPECIAL, ENUMS, TENSORS]))))
    elif how < 11:
        field_type = _containers(draw(field_types(depth - 1)), draw)
    elif how < 13:
        field_type = _unions(draw(field_types(0)), draw(field_types(0)))
    elif how < 15:
        field_type = _generic(draw(field_types(depth - 1)), draw)
    elif how < 16:
        field_type = _of_documents(draw(st.sampled_from(DOCUMENTS)), draw)
    elif how < 17:
        field_type = draw(st.sampled_from(UNIONS_OF_DOCUMENTS))
    else:
        inner = draw(schemas(depth - 1))
        field_type = _of_documents(Typed(inner.document_type, inner.one), draw)
    if draw(st.integers(0, 4)) == 0:
        return Typed(Optional[field_type.annotation], st.none() | field_type.values)
    return field_type


# --- classes


class Drawn(NamedTuple):
    """A document class, and a strategy for its documents."""

    document_type: type[Any]
    one: st.SearchStrategy[Any]


_NAMES = ["a", "b", "title", "name"]


@st.composite
def schemas(draw: Callable[[Any], Any], depth: int = 2) -> Drawn:
    """Draw a document class with up to four fields."""
    names = _NAMES[: draw(st.integers(0, 4))]
    types_ = {name: draw(field_types(depth)) for name in names}
    config = _config(draw)
    namespace: dict[str, Any] = {
        "__annotations__": {name: field_type.annotation for name, field_type in types_.items()},
        "__module__": __name__,
        "model_config": ConfigDict(**config),
    }
    for name in names:
        namespace[name] = _field(draw, types_[name])
    if draw(st.integers(0, 5)) == 0:
        namespace["__annotations__"] = {"id": ClassVar[None], **namespace["__annotations__"]}
        namespace["id"] = None
    if draw(st.integers(0, 2)) == 0:
        _add_computed_field(draw, namespace, names)
    if draw(st.integers(0, 7)) == 0:
        namespace["_hidden"] = PrivateAttr(3)
        namespace["__annotations__"]["_hidden"] = int
    document_type = _new_class(namespace)
    fields = {name: field_type.values for name, field_type in types_.items()}
    if "id" in document_type.model_fields:
        fields = {"id": st.uuids().map(lambda key: key.hex), **fields}
    extras = st.dictionaries(st.sampled_from(["more", "extra"]), plain_json, max_size=2)
    if config.get("extra") != "allow":
        extras = st.just({})
    values = st.fixed_dictionaries(fields)
    return Drawn(document_type, st.builds(lambda v, e: fill(document_type, v, e), values, extras))


def _add_computed_field(draw: Callable[[Any], Any], namespace: dict[str, Any], names: list[str]) -> None:
    """Add a computed field; its name may be an alias of a field, and its alias the name of one."""
    name = draw(st.sampled_from([name for name in ("double", "other", "title", "name") if name not in names]))
    returned = draw(st.sampled_from([int, str, Any, list[int]]))
    first = names[0] if names else None

    def compute(self: Any) -> Any:
        if returned is Any and first is not None:
            return getattr(self, first)
        return {int: 7, str: "seven", list[int]: [7]}.get(returned)

    compute.__annotations__["return"] = returned
    compute.__name__ = name
    options = {"alias": "title"} if draw(st.integers(0, 3)) == 0 else {}
    wrapper: Any = cached_property(compute) if draw(st.integers(0, 3)) == 0 else property(compute)
    if isinstance(wrapper, cached_property):
        wrapper.__set_name__(None, name)
    namespace[name] = computed_field(wrapper, **options)


def document_classes() -> st.SearchStrategy[Drawn]:
    """Draw a document class; most are plain, some are generic classes with type arguments."""
    return st.one_of(schemas(), schemas(), generic_classes())


def _config(draw: Callable[[Any], Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    extra = draw(st.sampled_from([None, None, "allow", "forbid", "ignore"]))
    if extra is not None:
        config["extra"] = extra
    if draw(st.integers(0, 5)) == 0:
        config["populate_by_name"] = False
    if draw(st.integers(0, 9)) == 0:
        config["alias_generator"] = to_camel
    return config


def _field(draw: Callable[[Any], Any], typed: Typed) -> Any:
    """Draw the declaration of a field: its default and its aliases, some of which are names of other fields."""
    options: dict[str, Any] = {}
    default = draw(st.integers(0, 3))
    if default == 0:
        value = draw(typed.values)
        options["default_factory"] = lambda: value
    elif default == 1:
        options["default"] = draw(typed.values)
    alias = draw(st.sampled_from([None, None, None, "other", "name", "title", "both", "path"]))
    if alias == "both":
        options["validation_alias"] = AliasChoices("other", "a", AliasPath("b", 0))
    elif alias == "path":
        options["validation_alias"] = AliasPath("title", 0)
    elif alias is not None:
        options[draw(st.sampled_from(["alias", "validation_alias"]))] = alias
    return Field(**options)


_ALIVE: deque[str] = deque()


def _new_class(namespace: dict[str, Any], bases: tuple[Any, ...] = (BaseDocument,)) -> type[Any]:
    name = f"Drawn{next(_numbers)}"
    document_type = types.new_class(name, bases, {}, lambda body: body.update(namespace))
    publish(document_type)
    return document_type


def publish(document_type: type[Any]) -> None:
    """Register a class for pickle by its name, until a few hundred others have been created."""
    setattr(sys.modules[__name__], document_type.__name__, document_type)
    _ALIVE.append(document_type.__name__)
    if len(_ALIVE) > 500:
        delattr(sys.modules[__name__], _ALIVE.popleft())
