"""Numbers stay: from ProtoNumber, from the previous `.proto`, or the next that is free."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import pytest

from quire import BaseDocument
from quire.errors import SchemaError
from quire.typing import ProtoNumber


def record(**annotations: Any) -> Any:
    """A document class `Record` with these fields and no id."""
    namespace = {"__annotations__": {"id": "ClassVar[None]", **annotations}, "id": None, "__module__": __name__}
    namespace["__annotations__"]["id"] = __import__("typing").ClassVar[None]
    return type(BaseDocument)("Record", (BaseDocument,), namespace)


def body(text: str) -> list[str]:
    """The lines inside of the first message or enum."""
    return [line.strip() for line in text.partition("{\n")[2].partition("}")[0].splitlines()]


def test_fields_are_numbered_in_order() -> None:
    assert body(record(a=int, b=str).to_proto_schema()) == ["int64 a = 1;", "string b = 2;"]


def test_proto_numbers_are_used_and_skipped_by_other_fields() -> None:
    tp = record(a=int, b=Annotated[str, ProtoNumber(1)], c=Annotated[int, ProtoNumber(900)] | None, d=bool)
    assert [line.partition(";")[0] for line in body(tp.to_proto_schema())] == [
        *("int64 a = 2", "string b = 1", "optional int64 c = 900", "bool d = 3")
    ]


def test_fields_keep_their_numbers_and_removed_ones_are_reserved() -> None:
    previous = record(a=int, b=str, c=float, d=int).to_proto_schema()
    text = record(new=bool, d=int, a=int).to_proto_schema(previous)
    assert body(text) == ["reserved 2 to 3;", 'reserved "b", "c";', "bool new = 5;", "int64 d = 4;", "int64 a = 1;"]
    later = record(a=int, newer=bool).to_proto_schema(text)
    assert body(later) == ["reserved 2 to 5;", 'reserved "b", "c", "new", "d";', "int64 a = 1;", "bool newer = 6;"]


def test_reserved_numbers_stay_reserved() -> None:
    previous = 'syntax = "proto3"; message Record { reserved 2, 9 to 11, 40 to max; reserved "old"; int64 a = 1; }'
    text = record(a=int, b=int).to_proto_schema(previous)
    assert body(text) == ["reserved 2, 9 to 11, 40 to max;", 'reserved "old";', "int64 a = 1;", "int64 b = 12;"]
    many = record(a=int, **{f"f{i}": int for i in range(36)})
    with pytest.raises(SchemaError, match="Record: there is no free number left"):
        many.to_proto_schema(previous)
    some = record(a=int, **{f"f{i}": int for i in range(29)})
    assert "int64 f28 = 3;" in some.to_proto_schema(previous)


def test_next_number_skips_the_range_of_protobuf() -> None:
    previous = "message Record { int64 a = 18999; }"
    assert body(record(a=int, b=int).to_proto_schema(previous)) == ["int64 a = 18999;", "int64 b = 20000;"]


@pytest.mark.parametrize("number", [0, -1, 2**29, "3", True, 1.0])
def test_invalid_proto_numbers_are_rejected(number: Any) -> None:
    with pytest.raises(SchemaError, match=r"Record\.a: ProtoNumber\(.*\) must be a whole number from 1 to 536870911"):
        record(a=Annotated[int, ProtoNumber(number)]).to_proto_schema()


@pytest.mark.parametrize("number", [19000, 19999])
def test_numbers_of_protobuf_are_rejected(number: int) -> None:
    with pytest.raises(SchemaError, match=r"Record\.a: protobuf keeps the numbers 19000 to 19999"):
        record(a=Annotated[int, ProtoNumber(number)]).to_proto_schema()


def test_highest_number_is_accepted() -> None:
    assert body(record(a=Annotated[int, ProtoNumber(2**29 - 1)]).to_proto_schema()) == ["int64 a = 536870911;"]


def test_no_two_fields_have_one_number() -> None:
    with pytest.raises(SchemaError, match=r"Record\.b: the number 3 is taken by Record\.a already"):
        record(a=Annotated[int, ProtoNumber(3)], b=Annotated[int, ProtoNumber(3)]).to_proto_schema()
    with pytest.raises(SchemaError, match=r"Record\.a: a field has one number, got ProtoNumber 3 and 4"):
        record(a=Annotated[int, ProtoNumber(3), ProtoNumber(4)]).to_proto_schema()


def test_contradictions_to_the_previous_file_are_rejected() -> None:
    previous = record(a=int, b=str, c=int).to_proto_schema()
    with pytest.raises(SchemaError, match=r"Record\.a: ProtoNumber\(9\) contradicts .* the number is 1"):
        record(a=Annotated[int, ProtoNumber(9)]).to_proto_schema(previous)
    with pytest.raises(SchemaError, match=r"Record\.x: ProtoNumber\(2\) belongs to 'b' in the previous"):
        record(x=Annotated[int, ProtoNumber(2)]).to_proto_schema(previous)
    later = record(a=int).to_proto_schema(previous)
    with pytest.raises(SchemaError, match=r"Record\.x: number 2 is reserved in the previous"):
        record(x=Annotated[str, ProtoNumber(2)]).to_proto_schema(later)
    with pytest.raises(SchemaError, match=r"Record\.b: the name 'b' is reserved in the previous"):
        record(a=int, b=str).to_proto_schema(later)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (int, str, "is int64 .* would now be string"),
        (int, float, "is int64 .* would now be double"),
        (bytes, str, "is bytes .* would now be string"),
        (int, list[int], "is int64 .* would now be repeated int64"),
        (list[int], list[int] | None, "is repeated int64 .* would now be RecordA"),
        (dict[str, int], dict[str, float], "is map<string, int64> .* would now be map<string, double>"),
    ],
)
def test_incompatible_type_is_rejected(before: Any, after: Any, reason: str) -> None:
    with pytest.raises(SchemaError, match=rf"Record\.a: number 1 {reason}"):
        record(a=after).to_proto_schema(record(a=before).to_proto_schema())


def test_compatible_types_may_change() -> None:
    previous = record(a=int, b=str).to_proto_schema()
    assert body(record(a=int | None, b=str).to_proto_schema(previous))[0].startswith("optional int64 a = 1;")
    assert body(record(a=int).to_proto_schema("message Record { uint32 a = 4; }")) == ["int64 a = 4;"]


def test_numbers_of_union_members_and_nested_types_are_kept() -> None:
    previous = record(a=int | str | bytes).to_proto_schema()
    text = record(a=float | bytes | int).to_proto_schema(previous)
    assert "  reserved 2;\n" in text
    assert "    double float = 4;\n    bytes bytes = 3;\n    int64 int = 1;\n" in text
    with pytest.raises(SchemaError, match=r"Record\.a \(RecordAItem\.items\): number 1 is repeated int64"):
        record(a=list[list[str]]).to_proto_schema(record(a=list[list[int]]).to_proto_schema())


def colors(*names: str) -> Any:
    return Enum("Color", list(names), module=__name__)


def test_enum_numbers_are_kept() -> None:
    previous = record(c=colors("RED", "GREEN", "BLUE")).to_proto_schema()
    text = record(c=colors("PINK", "BLUE", "RED")).to_proto_schema(previous)
    enum = text.partition("enum Color {\n")[2]
    assert enum == (
        '  reserved 2;\n  reserved "COLOR_GREEN";\n'
        "  COLOR_UNSPECIFIED = 0;\n  COLOR_PINK = 4;\n  COLOR_BLUE = 3;\n  COLOR_RED = 1;\n}\n"
    )
    with pytest.raises(SchemaError, match=r"Color\.GREEN: the name 'COLOR_GREEN' is reserved"):
        record(c=colors("GREEN")).to_proto_schema(text)


def test_enum_of_a_foreign_file_is_kept() -> None:
    handmade = "message Record { Color c = 1; } enum Color { COLOR_NONE = 0; COLOR_RED = 5; }"
    text = record(c=colors("RED", "BLUE")).to_proto_schema(handmade)
    assert "  COLOR_NONE = 0;\n  COLOR_RED = 5;\n  COLOR_BLUE = 6;\n" in text
    with pytest.raises(SchemaError, match="Color: COLOR_RED is 0 in the previous"):
        record(c=colors("RED")).to_proto_schema("message Record { Color c = 1; } enum Color { COLOR_RED = 0; }")
    with pytest.raises(SchemaError, match="Record is an enum in the previous"):
        record(c=int).to_proto_schema("enum Record { A = 0; }")


def test_a_class_may_move_to_another_module() -> None:
    previous = record(a=list[list[int]], c=colors("RED", "BLUE")).to_proto_schema()
    moved = previous.replace(f"{__name__}:", "somewhere.else:")
    text = record(new=int, c=colors("BLUE"), a=list[list[int]]).to_proto_schema(moved)
    assert body(text) == ["int64 new = 3;", "Color c = 2;", "repeated RecordAItem a = 1;"]
    assert "COLOR_BLUE = 2;" in text


def test_a_renamed_class_is_renamed_in_the_previous_file() -> None:
    previous = record(a=int, b=str).to_proto_schema()
    renamed = type(BaseDocument)("Entry", (BaseDocument,), {"__annotations__": {"b": str}, "__module__": __name__})
    with pytest.raises(SchemaError, match=r"Entry: the previous \.proto has no message Entry"):
        renamed.to_proto_schema(previous)
    text = renamed.to_proto_schema(previous.replace("message Record", "message Entry"))
    assert "message Entry {" in text
    assert "string b = 2;" in text


def test_foreign_proto_files_are_parsed() -> None:
    previous = """
    /* a comment */ syntax = "proto3"; package some.where; import public "x.proto";
    option (my.option) = { a: 1.5, b: [-inf, "}"] };
    extend google.protobuf.FieldOptions { string my = 50000; }
    service Search { rpc Find(Record) returns (stream Record) { option deprecated = true; } }
    message Record {  // the record
      option deprecated = true;
      message Inner { int64 a = 77; enum Kind { option allow_alias = true; K = 0; L = -1; reserved -5 to -3; } }
      oneof which { option x = 1; int64 a = 0x10 [deprecated = true, (my) = "a;b"]; string b = 3; };
      .some.where.Other other = 7; map<string, some.where.Other> others = 010;
    }
    message Other { int64 a = 5; }
    """
    other = type(BaseDocument)("Other", (BaseDocument,), {"__annotations__": {"a": int}, "__module__": __name__})
    text = record(a=int, b=str, other=other, others=dict[str, other], last=int).to_proto_schema(previous)
    numbers = [
        "int64 a = 16;",
        "string b = 3;",
        "Other other = 7;",
        "map<string, Other> others = 8;",
        "int64 last = 17;",
    ]
    assert body(text) == numbers
    assert "package some.where;" in text
    assert "  int64 a = 5;" in text.partition("message Other {")[2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("message Record {\n int64 a = ;\n}", "line 2: expected a number, got ';'"),
        ("message Record {\n int64 a\n}", "line 3: expected '=', got '}'"),
        ("message Record {", "line 1: the text ends"),
        ("message Record { int64 a = 1;", "the text ends"),
        ("message Record {}\nmessage Record {}", "line 2: Record is declared twice"),
        ("message Record { int64 a = 1; string a = 2; }", "Record.a is declared twice"),
        ("message $", "line 1: '\\$' has no meaning here"),
    ],
)
def test_invalid_proto_raises_an_error_with_the_line(text: str, reason: str) -> None:
    with pytest.raises(SchemaError, match=rf"The previous \.proto cannot be read, .*{reason}"):
        record(a=int).to_proto_schema(text)


def test_previous_file_with_a_duplicate_number_is_rejected() -> None:
    with pytest.raises(SchemaError, match=r"Record\.b: the number 1 is taken by Record\.a already"):
        record(a=int, b=int).to_proto_schema("message Record { int64 a = 1; int64 b = 1; }")
