"""What JSON, CSV, dicts and typed messages cannot tell is not written; what they can is read as it was."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from math import inf
from typing import Any, ClassVar, Literal, Union

import pytest
from pydantic import (
    AnyUrl,
    Base64Bytes,
    Base64Str,
    ByteSize,
    Field,
    Json,
    SecretBytes,
    SecretStr,
    SerializeAsAny,
    ValidationError,
    field_serializer,
    model_serializer,
)

from quire import BaseDocument, DocumentArray
from quire.errors import DecodeError, EncodeError
from quire.tensors import describe
from tests.codec.round_trips import assert_round_trips
from tests.codec.test_aliases import FORMS

BINARY = ("bytes", "protobuf", "array bytes", "array message", "batch", "pickle")
TEXT = ("JSON", "array JSON", "NDJSON", "CSV")


class Plain(Enum):
    A = "a"
    B = 2
    EMPTY = ""


class Text(str, Enum):
    A = "a"
    EMPTY = ""


class Mixed(BaseDocument):
    x: Literal[Text.A, "x", 3]


class Members(BaseDocument):
    x: Literal[Plain.A, Plain.B]


class Alike(BaseDocument):
    x: Literal[Plain.A, "a"]


class Parsed(BaseDocument):
    items: Json[list[int]] = []
    text: Json[str] = ""
    any: Json | None = None
    inside: list[Json[dict[str, float]]] = []


class Encoded(BaseDocument):
    blob: Base64Bytes = b""
    text: Base64Str = ""
    inside: Sequence[tuple[Base64Bytes, int]] = []


class Matching(BaseDocument):
    pattern: re.Pattern[str]
    more: list[re.Pattern] = []


class Left(BaseDocument):
    a: int = 0


class Right(BaseDocument):
    a: int = 0


class Either(BaseDocument):
    x: Union[Left, Right]


class Kind(BaseDocument):
    kind: Literal["left"] = "left"
    a: int = 0


class OtherKind(BaseDocument):
    kind: Literal["right"] = "right"
    a: int = 0


class Tagged(BaseDocument):
    x: Union[Kind, OtherKind] = Field(discriminator="kind")


class Secret(BaseDocument):
    word: SecretStr
    blob: SecretBytes = SecretBytes(b"")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "document",
    [Mixed(x=Text.A), Mixed(x="x"), Mixed(x=3), Members(x=Plain.A), Members(x=Plain.B), Alike(x="a")],
)
def test_literals_of_enum_members_round_trip(document: Any, form: str) -> None:
    again = FORMS[form](document)
    assert again.identical(document)
    assert type(again.x) is type(document.x)


@pytest.mark.parametrize("form", TEXT)
def test_a_member_that_looks_like_another_literal_is_not_written_as_text(form: str) -> None:
    document = Alike.model_construct(id="i", x=Plain.A)
    with pytest.raises(EncodeError, match=r"Alike.*x: \w+ would be read back as str 'a'"):
        FORMS[form](document)
    assert FORMS["bytes"](document).x is Plain.A


def test_literals_reject_other_values() -> None:
    with pytest.raises(ValidationError, match=r"Input should be <Plain.A: 'a'> or <Plain.B: 2>"):
        Members(x="b")
    assert Members.model_json_schema()["properties"]["x"]["enum"] == ["a", 2]


@pytest.mark.parametrize("form", FORMS)
def test_json_fields_round_trip(form: str) -> None:
    document = Parsed(items="[1, 2]", text='"[1]"', any='{"a": null}', inside=['{"b": 0.5}'])
    assert FORMS[form](document).identical(document)
    assert document.items == [1, 2]


@pytest.mark.needs("pandas")
def test_json_fields_round_trip_in_data_frames() -> None:
    array = DocumentArray[Parsed]([Parsed(items="[1]", text='"1"', any="null"), Parsed()])
    frame = array.to_dataframe()
    assert frame["items"][0] == "[1]"
    assert type(array).from_dataframe(frame).identical(array)
    assert type(array.stack()).from_dataframe(array.stack().to_dataframe()).unstack().identical(array)


def test_json_fields_accept_and_dump_like_pydantic() -> None:
    assert Parsed(items="[1]").model_dump_json(include={"items"}) == '{"items":[1]}'
    assert Parsed.model_json_schema()["properties"]["items"]["contentMediaType"] == "application/json"
    with pytest.raises(ValidationError, match="JSON input should be string, bytes or bytearray") as caught:
        Parsed(items=[1])
    assert caught.value.errors()[0]["loc"] == ("items",)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("content", [b"", b"~", b"abcd", b"YWJj", b"\xff\x00"])
def test_decoded_base64_is_not_decoded_again(content: bytes, form: str) -> None:
    document = Encoded.model_construct(id="i", blob=content, text=content.decode("latin-1"), inside=[(content, 1)])
    assert FORMS[form](document).identical(document)


@pytest.mark.parametrize("flags", [0, re.IGNORECASE, re.MULTILINE | re.DOTALL, re.ASCII])
@pytest.mark.parametrize("form", BINARY)
def test_patterns_keep_their_flags_in_bytes(form: str, flags: int) -> None:
    document = Matching(pattern=re.compile("a", flags), more=[re.compile("b", flags), re.compile(b"c")])
    again = FORMS[form](document)
    assert again.identical(document)
    assert again.pattern.flags == document.pattern.flags


@pytest.mark.parametrize("form", [*TEXT, "typed protobuf"])
def test_patterns_with_flags_are_not_written_as_text(form: str) -> None:
    with pytest.raises(EncodeError, match=r"re.compile\('a'\)"):
        FORMS[form](Matching(pattern=re.compile("a", re.IGNORECASE)))
    inline = Matching(pattern=re.compile("(?i)a"))
    assert FORMS[form](inline).identical(inline)


@pytest.mark.parametrize("form", [*TEXT, "dict"])
def test_document_that_another_class_would_accept_is_not_written(form: str) -> None:
    with pytest.raises(
        EncodeError, match=r"x: .* would be read back as Left, and not as Right. Distinguish the classes"
    ):
        FORMS[form](Either(x=Right(a=1)))
    first = Either(x=Left(a=1))
    assert FORMS[form](first).identical(first)
    tagged = Tagged(x=OtherKind(a=1))
    assert FORMS[form](tagged).identical(tagged)


@pytest.mark.parametrize("form", [*BINARY, "typed protobuf"])
def test_bytes_distinguish_documents_of_a_union(form: str) -> None:
    document = Either(x=Right(a=1))
    again = FORMS[form](document)
    assert again.identical(document)
    assert type(again.x) is Right


def test_union_finds_its_own_class_if_another_has_the_same_name() -> None:
    document = Either(x=Right(a=1))
    data = document.to_bytes()
    usurper = type("Right", (BaseDocument,), {"__module__": __name__, "__qualname__": "Right"})
    assert type(Either.from_bytes(data).x) is Right
    assert usurper is not Right


@pytest.mark.parametrize("form", [*TEXT, "typed protobuf"])
def test_secrets_are_never_written_masked(form: str) -> None:
    with pytest.raises(EncodeError, match="secret|SecretStr"):
        FORMS[form](Secret(word="s"))


def test_secrets_round_trip_in_pickles_and_dicts() -> None:
    document = Secret(word="s", blob=b"t")
    assert FORMS["dict"](document).identical(document)
    assert FORMS["pickle"](document).identical(document)
    assert Secret.from_bytes(document.to_bytes(allow_pickle=True), allow_pickle=True).identical(document)
    with pytest.raises(EncodeError, match="allow_pickle=True"):
        document.to_bytes()


def test_class_may_serialize_its_secrets() -> None:
    class Revealed(BaseDocument):
        word: SecretStr
        other: Any = (1, 2)

        @field_serializer("word", when_used="json")
        def reveal(self, word: SecretStr) -> str:
            return word.get_secret_value()

    document = Revealed(word="s", other=1)
    assert Revealed.from_json(document.to_json()).identical(document)


@pytest.mark.parametrize(
    "value", [(1, 2), {1, 2}, b"\xff", {1: "a"}, Decimal(1), float("nan"), Left(), 1j, {"a": (1,)}]
)
def test_values_of_any_that_json_would_change_are_not_written(value: Any) -> None:
    class Holds(BaseDocument):
        x: Any = None

    with pytest.raises(EncodeError, match=r"Holds, x: "):
        Holds(x=value).to_json()


@pytest.mark.parametrize("value", [None, 1, 0.5, "a", [1, [None]], {"a": {"b": [True]}}])
def test_values_of_any_that_json_keeps_are_written(value: Any) -> None:
    class Holds(BaseDocument):
        x: Any = 7

    document = Holds(x=value)
    for form in (*TEXT, "dict"):
        assert FORMS[form](document).identical(document)


def test_values_that_pydantic_warns_about_are_not_written_as_json() -> None:
    with pytest.raises(EncodeError, match=r"Bytewise, pattern: Expected `str`"):
        Bytewise(pattern=re.compile(b"a")).to_json()


class Bytewise(BaseDocument):
    pattern: re.Pattern[bytes]


class Blank(BaseDocument):
    blob: bytes | None = None
    text: str | None = None
    member: Text | None = None
    plain: Plain = Plain.A
    filled: bytes = b"filled"
    word: str = "word"


@pytest.mark.parametrize(
    "document",
    [Blank(), Blank(blob=b"", text="", member=Text.EMPTY, plain=Plain.EMPTY, filled=b"", word=""), Blank(text='""')],
    ids=["none", "empty", "marks"],
)
def test_csv_distinguishes_empty_values_from_missing_ones(document: Blank) -> None:
    assert FORMS["CSV"](document).identical(document)


class Hollow(BaseDocument):
    id: ClassVar[None] = None
    a: int | None = None


class Empty(BaseDocument):
    id: ClassVar[None] = None


class Outer(BaseDocument):
    inner: Hollow | None = None
    empty: Empty | None = None


def test_a_document_without_any_cell_is_not_lost_in_csv() -> None:
    present = Outer(inner=Hollow(a=1), empty=Empty())
    assert FORMS["CSV"](present).identical(present)
    assert FORMS["CSV"](Outer()).identical(Outer()) is False  # another id
    with pytest.raises(EncodeError, match=r"Outer, row 0, inner: CSV would be read back as"):
        FORMS["CSV"](Outer(inner=Hollow()))


@pytest.mark.needs("pandas")
def test_a_document_without_any_value_is_not_lost_in_a_data_frame() -> None:
    array = DocumentArray[Outer]([Outer(inner=Hollow())])
    for held in (array, array.stack()):
        with pytest.raises(EncodeError, match="row 0: 'inner' is a document without any value"):
            held.to_dataframe()


@pytest.mark.parametrize("document", [Empty(), Outer(), Outer(empty=Empty())])
def test_classes_without_fields_keep_their_rows(document: Any) -> None:
    assert_round_trips(document)
    for form in FORMS:
        if form == "CSV" and isinstance(document, Empty):
            with pytest.raises(EncodeError, match="Empty has no fields, and a table without columns has no rows"):
                FORMS[form](document)
        else:
            assert FORMS[form](document).identical(document)


@dataclasses.dataclass
class Record:
    size: int


class Loose(BaseDocument):
    address: Union[AnyUrl, str, None] = None
    size: Union[ByteSize, int, None] = None
    record: Union[dict[str, int], Record, None] = None


@pytest.mark.parametrize("form", [*BINARY[:-1], "typed protobuf"])
@pytest.mark.parametrize(
    "document",
    [
        Loose(address=AnyUrl("http://a.b/")),
        Loose.model_construct(id="i", address=None, size=ByteSize(2), record=None),
        Loose(record=Record(size=1)),
    ],
)
def test_union_members_with_the_same_encoding_are_not_written(document: Loose, form: str) -> None:
    try:
        again = FORMS[form](document)
    except EncodeError as error:
        assert "would be read back as" in str(error) or "could not be read back" in str(error)
    else:
        assert again.identical(document)
        assert all(type(again.__dict__[name]) is type(document.__dict__[name]) for name in document.__dict__)
    plain = Loose(address="http://a.b/", size=2, record={"size": 1})
    assert FORMS[form](plain).identical(plain)


class Whole(BaseDocument):
    one: int = 0
    some: list[int] = []
    named: dict[str, int] = {}
    both: tuple[int, str] = (0, "")


class Broken(BaseDocument):
    one: float = 0.0
    some: list[float] = []
    named: dict[str, float] = {}
    both: tuple[float, str] = (0.0, "")


@pytest.mark.parametrize(
    "values",
    [{"one": 2**53 + 1}, {"some": [1, 2**53 + 1]}, {"named": {"a": -(2**53) - 1}}, {"both": (2**63 - 1, "")}],
    ids=str,
)
def test_integer_that_a_float_would_round_raises_an_error(values: dict[str, Any]) -> None:
    document = Whole(**values)
    array = DocumentArray[Whole]([document])
    for read in (
        lambda: Broken.from_bytes(document.to_bytes()),
        lambda: DocumentArray[Broken].from_bytes(array.to_bytes()),
        lambda: DocumentArray[Broken].from_protobuf(array.to_protobuf()),
    ):
        with pytest.raises(DecodeError, match=r"which a float would round, but the field is"):
            read()


def test_integers_that_a_float_holds_are_widened() -> None:
    document = Whole(one=2**60, some=[2**53, -5], named={"a": 2**64}, both=(3, ""))
    again = Broken.from_bytes(document.to_bytes())
    assert (again.one, again.some, again.named, again.both) == (2.0**60, [2.0**53, -5.0], {"a": 2.0**64}, (3.0, ""))


class Wider(Left):
    b: int = 2


class DuckTyped(BaseDocument):
    one: SerializeAsAny[Left]
    several: list[SerializeAsAny[Left]] = []


@pytest.mark.parametrize("form", TEXT)
def test_serialize_as_any_fields_reject_fields_of_subclasses(form: str) -> None:
    plain = DuckTyped(one=Left(), several=[Left()])
    assert FORMS[form](plain) == plain
    for document in (DuckTyped(one=Wider()), DuckTyped(one=Left(), several=[Wider()])):
        with pytest.raises(EncodeError):
            FORMS[form](document)


class Extras(BaseDocument, extra="allow"):
    size: int = Field(0, alias="Size")


class DatedExtras(BaseDocument, extra="allow"):
    __pydantic_extra__: dict[str, date] = Field(init=False)


class HoldsExtras(BaseDocument):
    one: Extras | None = None
    many: DocumentArray[Extras] = []
    listed: list[Extras] = []
    named: dict[str, Extras] = {}
    unions: list[Extras | int] = []


EXTRAS: list[Any] = [
    inf,
    (1, 2),
    {1, 2},
    date(2026, 1, 2),
    b"a",
    b"\xff",
    {1: "a"},
    Decimal(1),
    1j,
    [(1,)],
    Left(id="i"),
]


def holders_of(extras: Extras) -> list[tuple[str, BaseDocument]]:
    """Documents that hold a document with extra fields, each with the path that an error names."""
    return [
        ("x", extras),
        ("one.x", HoldsExtras(one=extras)),
        ("many.1.x", HoldsExtras(many=[Extras(y=1), extras])),
        ("listed.0.x", HoldsExtras(listed=[extras])),
        ("named.k.x", HoldsExtras(named={"k": extras})),
        ("unions.1.x", HoldsExtras(unions=[1, extras])),
    ]


@pytest.mark.parametrize("form", ["JSON", "array JSON", "NDJSON"])
@pytest.mark.parametrize("value", EXTRAS)
def test_extra_fields_that_json_would_change_are_not_written(value: Any, form: str) -> None:
    for path, document in holders_of(Extras(x=value)):
        name = path.partition(".")[0]
        with pytest.raises(EncodeError, match=rf"^{type(document).__name__}(, row 0)?, {name}"):
            FORMS[form](document)


@pytest.mark.parametrize("value", [inf, (1, 2), date(2026, 1, 2)], ids=repr)
def test_error_names_the_extra_field_inside_of_documents(value: Any) -> None:
    for path, document in holders_of(Extras(x=value)):
        message = rf"^\w+, {path}: JSON would be read back as .*, and not as {re.escape(describe(value))}. Add a field"
        with pytest.raises(EncodeError, match=message):
            document.to_json()


@pytest.mark.parametrize("value", [None, 1, 0.5, "a", [1, [None]], {"a": {"b": [True]}}], ids=repr)
def test_extra_fields_that_json_keeps_are_written(value: Any) -> None:
    for _, document in holders_of(Extras(x=value)):
        for form in ("JSON", "array JSON", "NDJSON", "dict"):
            assert FORMS[form](document).identical(document)


@pytest.mark.parametrize("field", ["many", "listed", "named"])
def test_extra_fields_that_a_cell_would_change_are_not_written_as_csv(field: str) -> None:
    held = {"k": Extras(x=(1,))} if field == "named" else [Extras(x=(1,))]
    with pytest.raises(EncodeError, match=rf"^HoldsExtras, row 0, {field}\.\w\.x: CSV would be read back as list"):
        FORMS["CSV"](HoldsExtras(**{field: held}))


def test_documents_in_extra_fields_are_not_written_as_dicts() -> None:
    for value in (Left(), [Left()], {"a": Record(size=1)}):
        for _, document in holders_of(Extras(x=value)):
            with pytest.raises(EncodeError, match="a dict would be read back as"):
                document.to_dict()


@pytest.mark.parametrize("value", [inf, (1, 2), {1, 2}, date(2026, 1, 2), b"a", Decimal(1)], ids=repr)
def test_dicts_keep_extra_fields_of_every_type(value: Any) -> None:
    for _, document in holders_of(Extras(x=value)):
        assert FORMS["dict"](document).identical(document)


def test_extra_fields_with_an_annotation_are_read_back_by_it() -> None:
    document = DatedExtras(x=date(2026, 1, 2))
    assert DatedExtras.from_json(document.to_json()).identical(document)


@pytest.mark.parametrize("form", ["JSON", "dict"])
def test_extra_fields_with_the_alias_of_a_field_are_not_lost(form: str) -> None:
    document = Extras(Size=1)
    document.Size = 2  # type: ignore[attr-defined]
    with pytest.raises(EncodeError, match=r"^Extras, Size: .* would leave out int 2"):
        FORMS[form](document)


def test_extra_fields_of_classes_with_a_serializer_are_not_checked() -> None:
    class Own(BaseDocument, extra="allow"):
        @model_serializer
        def dump(self) -> dict[str, Any]:
            return {"id": self.id, "x": "own"}

    assert Own.from_json(Own(x=(1,)).to_json()).x == "own"  # type: ignore[attr-defined]


class KeptFields(BaseDocument):
    a: int = 0


class HoldsKeptFields(BaseDocument):
    one: KeptFields
    many: DocumentArray[KeptFields] = []


@pytest.mark.parametrize("form", ["JSON", "array JSON", "NDJSON", "dict"])
def test_kept_unknown_fields_are_not_left_out(form: str) -> None:
    kept = KeptFields.from_bytes(Wider(a=1).to_bytes(), unknown="keep")
    assert kept.__pydantic_extra__ == {"b": 2}
    holder = HoldsKeptFields(one=KeptFields(), many=[kept])
    for document, path in ((kept, "b"), (HoldsKeptFields(one=kept), "one.b"), (holder, "many.0.b")):
        with pytest.raises(EncodeError, match=rf", {path}: .* would leave out int 2, because KeptFields has no such"):
            FORMS[form](document)
    kept.__pydantic_extra__ = None
    assert FORMS[form](holder).identical(holder)


class Number(IntEnum):
    TWO = 2


class EitherEnum(BaseDocument):
    x: Union[Literal[Plain.A, Plain.B], Number]


@pytest.mark.parametrize("form", BINARY)
@pytest.mark.parametrize("member", [Plain.B, Number.TWO])
def test_members_of_two_enums_with_equal_values_stay_apart_in_bytes(member: Enum, form: str) -> None:
    assert FORMS[form](EitherEnum(x=member)).x is member


# --- moments


class Moment(BaseDocument):
    when: datetime
    more: list[datetime] = []


class Journey(BaseDocument):
    start: Moment
    stops: DocumentArray[Moment] = DocumentArray[Moment]()


EAST, WEST = timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))
LOCAL_MEAN_TIME = timezone(timedelta(hours=9, minutes=18, seconds=59))  # of Tokyo, before 1888


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("zone", [None, timezone.utc, EAST, WEST], ids=str)
@pytest.mark.parametrize("moment", [datetime.min, datetime.max], ids=str)  # noqa: DTZ901 - the zone is a parameter
def test_first_and_last_moments_round_trip(moment: datetime, zone: timezone | None, form: str) -> None:
    """In other zones than their own, some of them are before year 1 or after year 9999."""
    when = moment.replace(tzinfo=zone)
    document = Journey(start=Moment(when=when, more=[when]), stops=[Moment(when=when)])
    again = FORMS[form](document)
    assert again.identical(document)
    assert again.stops[0].when.utcoffset() == when.utcoffset()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("place", "path"),
    [("start", "start.when"), ("stops", r"stops\.1\.when"), ("more", r"start\.more\.0")],
)
def test_offsets_with_seconds_round_trip_or_raise(place: str, path: str, form: str) -> None:
    usual, odd = datetime(1850, 1, 1, tzinfo=EAST), datetime(1850, 1, 1, tzinfo=LOCAL_MEAN_TIME)
    moments = {"start": usual, "stops": usual, "more": usual} | {place: odd}
    start = Moment(when=moments["start"], more=[moments["more"]])
    document = Journey(start=start, stops=[Moment(when=usual), Moment(when=moments["stops"])])
    if form in TEXT:
        with pytest.raises(EncodeError, match=rf"{path}: (JSON|CSV) has offsets of whole minutes, and 1850"):
            FORMS[form](document)
    else:
        assert FORMS[form](document).identical(document)
