"""Schemas change: what an older or a newer class makes of bytes, in documents, rows, columns and inside others."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, IntEnum
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import AliasChoices, ConfigDict, Field, create_model

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.codec._messages import VERSION
from quire.errors import DecodeError
from quire.typing import NdArray, float32
from tests.codec.round_trips import exact


def make(name: str, base: Any = BaseDocument, /, **fields: Any) -> Any:
    """A document class; the one of that name that came before is an older version of it."""
    return create_model(name, __base__=base, __module__=__name__, **fields)


def readings(old: Any, new: Any, **reading: Any) -> Iterator[Any]:
    """A document of one version as the other reads it, on every way."""
    cls = type(old)
    docs = DocumentArray[cls]([old, old])
    yield new.from_bytes(old.to_bytes(), **reading)
    yield new.from_protobuf(old.to_protobuf(), **reading)
    for data in (docs.to_bytes(), docs.to_protobuf().SerializeToString(), docs.stack(shapes="ragged").to_bytes()):
        yield DocumentArray[new].from_bytes(data, **reading)[1]
        yield DocumentBatch[new].from_bytes(data, **reading).unstack()[1]


def all_fail(old: Any, new: Any, message: str, **reading: Any) -> None:
    """Fail unless every way is refused with the message."""
    cls = type(old)
    docs = DocumentArray[cls]([old, old])
    pairs: list[tuple[Any, bytes]] = [(new, old.to_bytes())]
    for data in (docs.to_bytes(), docs.to_protobuf().SerializeToString(), docs.stack(shapes="ragged").to_bytes()):
        pairs += [(DocumentArray[new], data), (DocumentBatch[new], data)]
    for target, data in pairs:
        with pytest.raises(DecodeError, match=f"(?s){message}"):
            target.from_bytes(data, **reading)


# --- fields that came and went


def test_new_fields_have_their_defaults() -> None:
    old = make("Grown", a=(int, ...))(a=1)
    new = make(
        "Grown",
        a=(int, ...),
        number=(int, 7),
        text=(str, "x"),
        maybe=(float | None, None),
        made=(list[int], Field(default_factory=lambda: [1, 2])),
        vector=(NdArray[float32, 2], [1.0, 2.0]),
        inner=(BaseDocument | None, None),
    )
    for got in readings(old, new):
        assert type(got) is new
        assert (got.id, got.a, got.number, got.text, got.maybe, got.made) == (old.id, 1, 7, "x", None, [1, 2])
        assert exact(got.vector, np.array([1, 2], np.float32))


def test_defaults_are_not_shared_between_rows() -> None:
    old = make("Apart")
    new = make("Apart", words=(list[str], []))
    got = DocumentArray[new].from_bytes(DocumentArray[old]([old(), old()]).to_bytes())
    got[0].words.append("x")
    assert got[1].words == []


def test_new_field_without_a_default_raises_an_error() -> None:
    old = make("Strict", a=(int, 1))()
    new = make("Strict", a=(int, 1), b=(int, ...))
    all_fail(old, new, r"Strict\.b: .*not hold it, and it has no default")


def test_unknown_fields_are_dropped() -> None:
    new = make("Shrunk", a=(int, 1), b=(str, "x"), c=(NdArray, np.ones(3)))()
    old = make("Shrunk", a=(int, 1))
    for got in readings(new, old):
        assert type(got) is old
        assert got.a == 1
        assert not hasattr(got, "b")
        assert got.__pydantic_extra__ is None
    for got in readings(new, old, unknown="drop"):
        assert not hasattr(got, "b")


def test_unknown_fields_are_rejected_on_request() -> None:
    new = make("Refusing", a=(int, 1), b=(str, "x"))()
    old = make("Refusing", a=(int, 1))
    all_fail(new, old, "Refusing has no field 'b'", unknown="error")


def test_unknown_fields_are_kept_and_written_again_on_request() -> None:
    inner = make("KeptInner", x=(int, 1))
    newer = make(
        "Kept", a=(int, 1), b=(str, "x"), c=(NdArray, np.ones(3)), d=(inner, inner(id="i")), e=(Any, {1: (2,)})
    )
    new = newer()
    old = make("Kept", a=(int, 1))
    for got in readings(new, old, unknown="keep"):
        assert type(got) is old
        assert got.__pydantic_extra__.keys() == {"b", "c", "d", "e"}
        back = newer.from_bytes(got.to_bytes())
        assert exact(back, new)
        rows = DocumentArray[newer].from_bytes(DocumentArray[old]([got, got]).to_bytes())
        assert exact(list(rows), [new, new])
        batch = DocumentArray[newer].from_bytes(DocumentArray[old]([got, got]).stack().to_bytes())
        assert exact(list(batch), [new, new])


def test_class_that_allows_extra_values_keeps_unknown_fields() -> None:
    new = make("Taking", a=(int, 1), b=(str, "x"))()

    class Taking(BaseDocument):
        model_config = ConfigDict(extra="allow")
        a: int = 1

    for got in readings(new, Taking):
        assert got.__pydantic_extra__ == {"b": "x"}


def test_class_that_forbids_extra_values_drops_unknown_fields() -> None:
    new = make("Forbidding", a=(int, 1), b=(str, "x"))()

    class Forbidding(BaseDocument, extra="forbid"):
        a: int = 1

    for got in readings(new, Forbidding):
        assert got.a == 1


def test_nested_documents_evolve() -> None:
    inner_new = make("Inner", x=(int, 1), y=(str, "new"))
    outer_new = make(
        "Outer", one=(inner_new, ...), many=(DocumentArray[inner_new], ...), maybe=(inner_new | None, None)
    )
    inner_old = make("Inner", x=(int, 1), z=(float, 0.5))
    outer_old = make(
        "Outer", one=(inner_old, ...), many=(DocumentArray[inner_old], ...), maybe=(inner_old | None, None)
    )
    new = outer_new(one=inner_new(x=2), many=[inner_new(x=3)])
    for got in readings(new, outer_old):
        assert type(got.one) is inner_old
        assert (got.one.x, got.one.z, got.many[0].x, got.many[0].z) == (2, 0.5, 3, 0.5)
    all_fail(new, outer_old, "Outer.one.*Inner has no field 'y'", unknown="error")
    for got in readings(new, outer_old, unknown="keep"):
        assert exact(outer_new.from_bytes(got.to_bytes()), new)


def test_rows_of_a_subclass_evolve() -> None:
    base = make("Base", a=(int, 1))
    sub_new = make("Sub", base, b=(int, 2), c=(int, 3))
    data = DocumentArray[base]([base(), sub_new(b=5)]).to_bytes()
    del sub_new
    sub_old = make("Sub", base, b=(int, 2), d=(str, "d"))
    got = DocumentArray[base].from_bytes(data)
    assert type(got[1]) is sub_old
    assert (got[1].b, got[1].d) == (5, "d")
    with pytest.raises(DecodeError, match="Sub has no field 'c'"):
        DocumentArray[base].from_bytes(data, unknown="error")
    kept = DocumentArray[base].from_bytes(data, unknown="keep")
    assert kept[1].__pydantic_extra__ == {"c": 3}


def test_columns_may_be_in_any_order() -> None:
    old = make("Ordered", a=(int, 1), b=(str, "b"), c=(float, 0.5))(a=4, b="x", c=1.5)
    new = make("Ordered", c=(float, 0.5), b=(str, "b"), a=(int, 1))
    for got in readings(old, new):
        assert (got.a, got.b, got.c) == (4, "x", 1.5)
        assert [name for name in got.__dict__ if name != "id"] == ["c", "b", "a"]


# --- renames


def test_renamed_field_is_read_by_its_alias() -> None:
    old = make("Moved", title=(str, ...))(title="a")
    for field in (
        Field(alias="title"),
        Field(validation_alias="title"),
        Field(validation_alias=AliasChoices("name", "title")),
        Field(validation_alias=AliasChoices("title", "x")),
    ):
        new = make("Moved", name=(str, field))
        for got in readings(old, new):
            assert got.name == "a"
        fresh = new.from_bytes(old.to_bytes())
        for again in readings(fresh, new):
            assert again.identical(fresh)


def test_renamed_field_of_nested_documents_is_read_by_its_alias() -> None:
    inner_old = make("Piece", title=(str, ...))
    old = make("Whole", piece=(inner_old, ...), pieces=(DocumentArray[inner_old], ...))
    inner_new = make("Piece", name=(str, Field(validation_alias=AliasChoices("name", "title"))))
    new = make("Whole", part=(inner_new, Field(alias="piece")), pieces=(DocumentArray[inner_new], ...))
    for got in readings(old(piece=inner_old(title="a"), pieces=[inner_old(title="b")]), new):
        assert (got.part.name, got.pieces[0].name) == ("a", "b")


def test_renamed_class_is_read_as_the_requested_class() -> None:
    old = make("Before", a=(int, 1))(a=3)
    new = make("After", a=(int, 1))
    for got in readings(old, new):
        assert type(got) is new
        assert got.a == 3


# --- changed types

CHANGES: list[tuple[Any, Any, Any]] = [
    (int, 1, str),
    (str, "1", int),
    (float, 1.0, int),
    (bool, True, int),
    (int, 1, bool),
    (str, "a", bytes),
    (bytes, b"a", str),
    (str, "a", list[str]),
    (list[int], [1], int),
    (list[str], ["a"], list[int]),
    (dict[str, int], {"a": 1}, list[int]),
    (int, 1, NdArray),
    (NdArray, np.ones(2), int),
    (NdArray, np.ones(2), NdArray[3]),
    (NdArray, np.ones(2), NdArray[float32, 2]),
    (int | None, None, int),
    (str | None, None, str),
    (NdArray | None, None, NdArray),
    (Literal["a", "b"], "b", Literal["a"]),
    (str, "x", BaseDocument),
    (complex, 1j, float),
]


@pytest.mark.parametrize(("before", "value", "after"), CHANGES, ids=str)
def test_changed_type_raises_an_error_with_the_field(before: Any, value: Any, after: Any) -> None:
    old = make("Changed", x=(before, ...))(x=value)
    new = make("Changed", x=(after, ...))
    all_fail(old, new, r"Changed\.x")
    inner_old, inner_new = type(old), new
    outer_old = make("Around", inner=(inner_old, ...), inners=(DocumentArray[inner_old], []))
    outer_new = make("Around", inner=(inner_new, ...), inners=(DocumentArray[inner_new], []))
    all_fail(outer_old(inner=old), outer_new, r"Around\.inner.*Changed\.x|Around\.inner.*x")


def test_document_in_place_of_another_kind_raises_an_error() -> None:
    first, second = make("First", a=(int, ...)), make("Second", b=(int, ...))
    old = make("Holding", x=(first, ...))(x=first(a=1))
    all_fail(old, make("Holding", x=(second, ...)), r"Holding\.x.*Second\.b|Holding\.x.*b: ")
    all_fail(old, make("Holding", x=(int, ...)), r"Holding\.x: the bytes hold")
    all_fail(old, make("Holding", x=(DocumentArray[first], ...)), r"Holding\.x")


def test_a_number_may_be_widened() -> None:
    for before, value, after in ((int, 3, float), (int, 3, complex), (float, 0.5, complex), (int, 3, float | None)):
        old = make("Wide", x=(before, ...))(x=value)
        new = make("Wide", x=(after, ...))
        for got in readings(old, new):
            assert got.x == value
            assert type(got.x) is (complex if after is complex else float)


def test_big_integers_for_float_fields_raise_an_error() -> None:
    old = make("Huge", x=(int, ...))(x=10**400)
    new = make("Huge", x=(float, ...))
    all_fail(old, new, r"Huge\.x")
    all_fail(old, make("Huge", x=(complex, ...)), r"Huge\.x")


def test_fields_may_accept_more_types_than_before() -> None:
    for before, value, after in (
        (int, 1, int | str),
        (str, "a", int | str),
        (int, 1, Any),
        (int, 1, int | None),
        (list[int], [1], list[int | str]),
        (NdArray[float32, 2], [1.0, 2.0], NdArray),
        (list[int], [1], Any),
        (int, 1, list[int] | int),
    ):
        old = make("Opened", x=(before, ...))(x=value)
        new = make("Opened", x=(after, ...))
        for got in readings(old, new):
            assert exact(got.x, old.x)


# --- enums


def test_moved_or_renamed_enum_is_read_by_its_members() -> None:
    first = Enum("First", {"RED": 1, "BLUE": 2}, module=__name__)
    second = Enum("Second", {"RED": 10, "GREEN": 2}, module="elsewhere")
    old = make("Colored", x=(first, ...), xs=(list[first], ...), maybe=(first | None, None))
    new = make("Colored", x=(second, ...), xs=(list[second], ...), maybe=(second | None, None))
    for got in readings(old(x=first.RED, xs=[first.BLUE], maybe=first.RED), new):
        assert (got.x, got.xs, got.maybe) == (second.RED, [second.GREEN], second.RED)


def test_removed_member_raises_an_error() -> None:
    first = Enum("Kind", {"A": 1, "B": 2}, module=__name__)
    second = Enum("Kind", {"A": 1}, module=__name__)
    old = make("Kinded", x=(first, ...))(x=first.B)
    all_fail(old, make("Kinded", x=(second, ...)), r"Kinded\.x.*Kind has no member 'B'")


def test_enum_is_not_read_as_text_or_number() -> None:
    word = Enum("Word", {"A": "a"}, type=str, module=__name__)
    level = IntEnum("Level", {"LOW": 1}, module=__name__)
    old = make("Loosened", x=(word, ...), y=(level, ...))(x=word.A, y=level.LOW)
    all_fail(old, make("Loosened", x=(str, ...), y=(int, ...)), r"Loosened\.[xy]")


def test_text_is_not_read_as_enum() -> None:
    word = Enum("Word", {"A": "a"}, module=__name__)
    old = make("Tightened", x=(str, ...))(x="a")
    all_fail(old, make("Tightened", x=(word, ...)), r"Tightened\.x")


# --- the format itself


def test_later_version_of_the_format_is_rejected() -> None:
    cls = make("Versioned", a=(int, 1))
    document = cls()
    docs = DocumentArray[cls]([document])
    later = bytes([8, VERSION + 1])
    for target, data in (
        (cls, document.to_bytes()),
        (BaseDocument, document.to_bytes()),
        (DocumentArray[cls], docs.to_protobuf().SerializeToString()),
        (DocumentBatch[cls], docs.stack().to_bytes()),
        (DocumentArray[cls], docs.stack().to_bytes()),
    ):
        assert data.startswith(bytes([8, VERSION]))
        assert target.from_bytes(data) is not None
        with pytest.raises(DecodeError, match=f"version {VERSION + 1} of the format.*update quire"):
            target.from_bytes(later + data[2:])


def test_later_version_inside_a_message_is_rejected() -> None:
    inner = make("Within", a=(int, 1))
    outer = make("Without", x=(inner, ...))
    data = outer(x=inner()).to_bytes()
    name = b"\x12" + bytes([len(f"{__name__}:Within")]) + f"{__name__}:Within".encode()
    assert data.count(b"\x08\x01" + name) == 1
    with pytest.raises(DecodeError, match="version 2"):
        outer.from_bytes(data.replace(b"\x08\x01" + name, b"\x08\x02" + name))
