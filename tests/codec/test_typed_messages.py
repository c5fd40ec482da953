"""Messages of a document's own class: the same bytes as those of the class that protoc generates, both ways."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Flag, IntEnum
from ipaddress import IPv4Address
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, Union
from uuid import UUID

import numpy as np
import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from quire import BaseDocument, DocumentArray
from quire.documents import Document
from quire.errors import DecodeError, EncodeError
from quire.typing import AnyTensor, NdArray, float32
from tests.codec.proto_documents import Degree, Student, Thesis
from tests.codec.protoc import compile_proto, generated_class, stable


class Level(IntEnum):
    LOW = 0
    HIGH = 10


class Rights(Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: int


class Plain(BaseModel):
    when: date


@dataclass
class Pair:
    a: int
    b: set[int]


class Name(str):
    __slots__ = ()


UTC = timezone.utc
NAIVE = datetime(1, 1, 1)  # noqa: DTZ001
HOUR = timezone(timedelta(hours=-1, minutes=-30))
CASES: list[tuple[Any, list[Any]]] = [
    (int, [0, -1, 2**63 - 1, -(2**63)]),
    (float, [0.0, -0.0, float("nan"), float("-inf"), 5e-324]),
    (bool, [False, True]),
    (str, ["", "ä中🎓\0"]),
    (bytes, [b"", b"\0\xff"]),
    (bytearray, [bytearray(b"abc")]),
    (complex, [0j, 1.5 - 2j]),
    (np.float32, [np.float32(0.5)]),
    (np.uint8, [np.uint8(255)]),
    (np.bool_, [np.True_]),
    (Name, [Name("ada")]),
    (Literal["a", "b"], ["b"]),
    (Literal["a", 1] | None, ["a", 1, None]),
    (Degree, list(Degree)),
    (Level, list(Level)),
    (Rights, [Rights.READ, Rights.READ | Rights.WRITE, Rights(0)]),
    (datetime, [NAIVE, datetime(2024, 2, 29, 12, 0, 0, 1, UTC), datetime(2000, 1, 1, tzinfo=HOUR)]),
    (date, [date(1, 1, 1), date(9999, 12, 31)]),
    (time, [time(0), time(23, 59, 59, 999999, UTC)]),
    (timedelta, [timedelta(0), timedelta(days=-1, microseconds=1), timedelta(days=3_000_000)]),
    (UUID, [UUID(int=1)]),
    (Decimal, [Decimal("1.10"), Decimal("-1e50")]),
    (Path, [Path("/a/b")]),
    (PurePosixPath, [PurePosixPath("a")]),
    (Thesis, [Thesis(title="t", handed_in=NAIVE, embedding=[1, 2, 3])]),
    (DocumentArray[Thesis], [DocumentArray[Thesis](), DocumentArray[Thesis]([Thesis(title="t")])]),
    (DocumentArray[Thesis] | None, [None, DocumentArray[Thesis]()]),
    (list[int], [[], [0, -1, 2]]),
    (list, [[1, "a", None]]),
    (list[int] | None, [None, [], [1]]),
    (list[int | None], [[], [None, 0]]),
    (list[list[list[str]]], [[], [[]], [[["a"], []], []]]),
    (list[Thesis], [[Thesis(title="t")]]),
    (list[Degree], [[Degree.MASTER]]),
    (list[datetime], [[NAIVE]]),
    (tuple[int, ...], [(), (1, 2)]),
    (tuple[float, float], [(1.0, 2.0)]),
    (tuple[int, str | None], [(1, None), (0, "")]),
    (Point, [Point(1, 2)]),
    (set[str], [set(), {"a", "b"}]),
    (frozenset[int], [frozenset({1})]),
    (deque[int], [deque([1, 2])]),
    (dict[str, int], [{}, {"a": 0, "b": 1}]),
    (dict[int, str], [{-1: "x"}]),
    (dict[bool, bytes], [{False: b"x"}]),
    (dict[str, Degree], [{"x": Degree.MASTER}]),
    (dict[str, Thesis], [{"x": Thesis(title="t")}]),
    (dict[str, int | None], [{"x": None, "y": 0}]),
    (dict[str, list[int]] | None, [None, {}, {"a": [], "b": [1]}]),
    (dict[str, dict[str, float]], [{"a": {}, "b": {"c": 1.5}}]),
    (dict[date, Degree], [{date(2020, 1, 1): Degree.MASTER}]),
    (dict[Degree, list[int] | None], [{Degree.MASTER: None, Degree.BACHELOR: []}]),
    (dict[str, Any], [{"a": [1, {"b": None}], "c": 1.5}]),
    (dict, [{"a": [1]}]),
    (Counter[str], [Counter("aab")]),
    (int | str, [0, ""]),
    (int | bool | float, [1, True, 1.0]),
    (str | UUID | Path | date, ["2020-01-01", UUID(int=1), Path("a"), date(2020, 1, 1)]),
    (int | list[int] | dict[str, int] | None, [None, [], {}, [1], {"a": 1}, 3]),
    (list[int] | list[str], [[], [1], ["1"]]),
    (set[int] | list[int] | tuple[int, ...], [{1}, [1], (1,)]),
    (list[int | Thesis], [[1, Thesis(title="t")]]),
    (Union[Thesis, Student], [Thesis(title="t"), Student(name="n", thesis={"title": "t"})]),
    (DocumentArray[Thesis] | DocumentArray[Document], [DocumentArray[Document]([Document(text="t")])]),
    (Any, [None, 1, "a", [1, None], {"a": 1.5}, 2**70]),
    (object, ["a"]),
    (IPv4Address, [IPv4Address("1.2.3.4")]),
    (Plain, [Plain(when=date(2020, 1, 1))]),
    (Pair, [Pair(1, {2})]),
    (NdArray, [np.zeros((2, 0, 3)), np.array(1.5), np.arange(6, dtype=">i4").reshape(2, 3).T, np.array([True, False])]),
    (NdArray[float32, 2, "n"], [np.ones((2, 3), np.float32)]),
    (NdArray | None, [None, np.array(["2020-01-01"], "datetime64[D]"), np.array([1 + 2j])]),
    (AnyTensor, [np.arange(3, dtype=np.uint8)]),
    (list[NdArray], [[np.arange(3), np.zeros(())]]),
    (int | NdArray, [3, np.arange(3)]),
]
HOLDERS = [
    type(BaseDocument)(f"Holder{i}", (BaseDocument,), {"__annotations__": {"value": tp}, "__module__": __name__})
    for i, (tp, _) in enumerate(CASES)
]
PARAMETERS = [
    pytest.param(holder, value, id=f"{holder.__name__}-{tp}-{number}")
    for holder, (tp, values) in zip(HOLDERS, CASES, strict=True)
    for number, value in enumerate(values)
]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What protoc makes of all the holders at once."""
    every = {"__annotations__": {f"f{i}": holder for i, holder in enumerate(HOLDERS)}, "__module__": __name__}
    text = type(BaseDocument)("Every", (BaseDocument,), every).to_proto_schema(package="quire_test.every")
    return compile_proto(text, tmp_path_factory.mktemp("protoc"))


@pytest.mark.parametrize(("holder", "value"), PARAMETERS)
def test_typed_values_round_trip(holder: Any, value: Any) -> None:
    document = holder(value=value)
    message = document.to_typed_protobuf()
    for source in (message, message.SerializeToString(), bytearray(message.SerializeToString())):
        result = holder.from_typed_protobuf(source)
        assert result.identical(document)
        assert type(result.value) is type(document.value)


@pytest.mark.needs("grpc_tools")
@pytest.mark.parametrize(("holder", "value"), PARAMETERS)
def test_bytes_equal_those_of_the_generated_class(holder: Any, value: Any, generated: Any) -> None:
    document = holder(value=value)
    content = stable(document.to_typed_protobuf())
    other = getattr(generated, holder.__name__).FromString(content)
    assert stable(other) == content
    assert len(other.DESCRIPTOR.fields) == 2
    assert holder.from_typed_protobuf(other).identical(document)


@pytest.mark.needs("grpc_tools")
def test_messages_of_other_languages_are_read(tmp_path: Path) -> None:
    generated = generated_class(Student, tmp_path)
    message = generated(name="Ada", nicknames={"items": []})
    message.thesis.title = "On Engines"
    message.thesis.handed_in = "1843-09-01T12:00:00Z"
    message.grades["maths"].items.extend([1.0, 1.3])
    message.friends.add(name="Charles", degree=2).thesis.title = "Engines"
    message.contact.thesis.title = "x"
    message.leave.FromTimedelta(timedelta(days=2))
    student = Student.from_typed_protobuf(message)
    assert (student.name, student.degree, student.credits, student.nicknames) == ("Ada", Degree.BACHELOR, 0, [])
    assert student.thesis.handed_in == datetime(1843, 9, 1, 12, tzinfo=UTC)
    assert student.grades == {"maths": [1.0, 1.3]}
    assert student.friends[0].degree is Degree.MASTER
    assert isinstance(student.contact, Thesis)
    assert student.leave == timedelta(days=2)
    assert len(student.id) == 32


@pytest.mark.needs("grpc_tools")
def test_messages_use_numbers_of_the_previous_file(tmp_path: Path) -> None:
    previous = "message Thesis { string title = 40; int64 pages = 2; string handed_in = 9; }"
    thesis = Thesis(title="t", embedding=[1, 2, 3])
    message = generated_class(Thesis, tmp_path, previous).FromString(
        thesis.to_typed_protobuf(previous).SerializeToString()
    )
    assert message.title == "t"
    assert {field.name: field.number for field in message.DESCRIPTOR.fields} == {
        "id": 41, "title": 40, "handed_in": 9, "embedding": 42,
    }  # fmt: skip
    assert Thesis.from_typed_protobuf(message, previous).identical(thesis)
    assert type(thesis.to_typed_protobuf(previous)) is type(thesis.to_typed_protobuf(previous))
    assert type(thesis.to_typed_protobuf(previous)) is not type(thesis.to_typed_protobuf())


def test_later_fields_have_their_default() -> None:
    class Old(BaseDocument):
        name: str

    class New(BaseDocument):
        name: str
        score: float = 1.5
        degree: Degree = Degree.MASTER
        note: str | None = "none"

    content = Old(name="a").to_typed_protobuf().SerializeToString()
    new = New.from_typed_protobuf(content)
    assert (new.score, new.degree, new.note) == (1.5, Degree.MASTER, None)
    assert Old.from_typed_protobuf(new.to_typed_protobuf().SerializeToString()).name == "a"


def test_validators_and_aliases_are_respected() -> None:
    def even(number: int) -> int:
        if number % 2:
            raise ValueError("must be even")
        return number

    class Checked(BaseDocument):
        model_config = ConfigDict(strict=True)
        number: Annotated[int, AfterValidator(even)] = Field(alias="theNumber")
        words: tuple[str, ...] = ()

    class Loose(BaseDocument):
        number: int

    checked = Checked(theNumber=2, words=("a",))
    assert Checked.from_typed_protobuf(checked.to_typed_protobuf()).identical(checked)
    with pytest.raises(DecodeError, match=r"^Checked\..*: Value error, must be even"):
        Checked.from_typed_protobuf(Loose(number=3).to_typed_protobuf().SerializeToString())


def test_numbers_beyond_a_numpy_scalar_are_rejected() -> None:
    for tp, wide, value in ((np.uint8, int, 256), (np.uint8, int, -1), (np.float32, float, 1e300)):
        content = holder_of(wide)(value=value).to_typed_protobuf().SerializeToString()
        with pytest.raises(DecodeError, match=rf"Holder\.value: .* is not {tp.__name__}"):
            holder_of(tp).from_typed_protobuf(content)


def holder_of(tp: Any) -> Any:
    return type(BaseDocument)("Holder", (BaseDocument,), {"__annotations__": {"value": tp}, "__module__": __name__})


@pytest.mark.parametrize(
    ("tp", "value", "reason"),
    [
        (int, 2**63, r"Holder\.value: int 9223372036854775808 has no form as int64"),
        (list[int], [0, 2**63], r"Holder\.value: .* has no form as int64"),
        (str, "\ud800", r"Holder\.value: .* has no form as string"),
        (Any, (1, 2), r"Holder\.value: .*JSON has no tuple"),
        (Any, {"a": {1: 2}}, r"Holder\.value: .*JSON has only strings as keys"),
        (Any, float("nan"), r"Holder\.value: .*not JSON compliant"),
        (dict[str, Any], {"a": b""}, r"Holder\.value.*JSON has no bytes"),
        (timedelta, timedelta.max, r"Holder\.value: .* at most ten thousand years"),
        (NdArray, np.array(["a"]), r"Holder\.value: .*other languages have no dtype str32"),
        (NdArray, np.array([object()]), r"Holder\.value: .*other languages have no dtype object"),
    ],
)
def test_value_without_a_form_raises_an_error_with_its_field(tp: Any, value: Any, reason: str) -> None:
    document = holder_of(tp).model_construct(value=value)
    with pytest.raises(EncodeError, match=reason):
        document.model_copy(update={"id": "x"}).to_typed_protobuf()


def test_fields_of_subclasses_are_not_dropped_silently() -> None:
    class Printed(Thesis):
        pages: int

    class Same(Thesis):
        pass

    class Open(BaseDocument):
        model_config = ConfigDict(extra="allow")

    student = Student(name="n", thesis=Printed(title="t", pages=3))
    with pytest.raises(EncodeError, match=r"Student\.thesis: a Printed has more than Thesis, .* no place for pages"):
        student.to_typed_protobuf()
    student.friends = [Student(name="m", thesis=Printed(title="t", pages=3))]
    student.thesis = Same(title="t")
    with pytest.raises(EncodeError, match=r"Student\.friends\[0\]\.thesis: a Printed"):
        student.to_typed_protobuf()
    with pytest.raises(EncodeError, match=r"Open: the message has no place for the extra values more"):
        Open(more=1).to_typed_protobuf()


def test_document_that_contains_itself_raises_an_error() -> None:
    student = Student(name="n", thesis={"title": "t"})
    student.friends.append(student)
    with pytest.raises(EncodeError, match="Student: the document nests too deep"):
        student.to_typed_protobuf()


@pytest.mark.parametrize("source", [3, "text", None])
def test_other_types_than_message_and_bytes_are_rejected(source: Any) -> None:
    with pytest.raises(DecodeError, match="expected a message of Thesis or its bytes, got"):
        Thesis.from_typed_protobuf(source)


def test_message_of_another_class_is_rejected() -> None:
    message = Student(name="n", thesis={"title": "t"}).to_typed_protobuf()
    with pytest.raises(DecodeError, match=r"expected a message of Thesis, got one of Student\."):
        Thesis.from_typed_protobuf(message)


def test_fields_may_have_names_of_message_methods() -> None:
    class Clash(BaseDocument):
        to_typed_protobuf: int
        WhichOneof: str

    clash = Clash(to_typed_protobuf=3, WhichOneof="x")
    message = BaseDocument.to_typed_protobuf(clash)
    assert (message.to_typed_protobuf, message.WhichOneof_) == (3, "x")
    assert Clash.from_typed_protobuf(message).identical(clash)
