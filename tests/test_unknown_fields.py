"""Input that a class has no field for: refused with the nearest names, ignored where a reader is asked to."""

from __future__ import annotations

import warnings
from datetime import date
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, computed_field, model_validator

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.document import DynamicDocument
from quire.documents import Document, Image, Text
from quire.errors import DecodeError, DocumentTypeError, OptionError, PathError


class Thesis(BaseDocument):
    title: str = ""


class Paper(BaseDocument):
    name: str = ""


class Row(BaseDocument):
    label: int = 0
    wide: str = Field("", validation_alias="width")
    thesis: Thesis | None = None
    theses: DocumentArray[Thesis] = DocumentArray[Thesis]()
    work: Thesis | Paper | None = None
    several: list[Thesis | Paper] = []
    by_name: dict[str, Thesis] = {}


class Square(BaseDocument):
    side: int = 1

    @computed_field  # type: ignore[prop-decorator]
    @property
    def area(self) -> int:
        return self.side**2

    @computed_field(alias="outline")  # type: ignore[prop-decorator]
    @property
    def edge(self) -> int:
        return 4 * self.side


class StrictSquare(Square):
    model_config = ConfigDict(strict=True)
    day: date = date(2026, 1, 2)


class Squares(BaseDocument):
    one: Square
    many: DocumentArray[Square]
    both: list[Square | Thesis] = []


def problems(function: Any) -> list[tuple[Any, str]]:
    with pytest.raises(ValidationError) as caught:
        function()
    return [(problem["loc"], problem["msg"]) for problem in caught.value.errors()]


# --- documents


def test_unknown_keyword_is_rejected_with_the_nearest_field() -> None:
    message = "Row has no field 'lable'. Did you mean 'label'?"
    assert problems(lambda: Row(lable=1)) == [(("lable",), message)]  # type: ignore[call-arg]
    assert problems(lambda: Row.model_validate({"lable": 1})) == [(("lable",), message)]
    assert problems(lambda: Row.model_validate_json('{"lable": 1}')) == [(("lable",), message)]


def test_aliases_are_suggested() -> None:
    assert problems(lambda: Row(widht=1)) == [  # type: ignore[call-arg]
        (("widht",), "Row has no field 'widht'. Did you mean 'width' or 'wide'?")
    ]


def test_other_problems_are_reported_together_with_unknown_fields() -> None:
    messages = problems(lambda: Row(label="x", wide={}, lable=1))  # type: ignore[call-arg,arg-type]
    assert [place for place, _ in messages] == [("label",), ("wide",), ("lable",)]
    with pytest.raises(ValidationError) as caught:
        Row(label="x", lable=1)  # type: ignore[call-arg,arg-type]
    assert [problem["type"] for problem in caught.value.errors()] == ["int_parsing", "extra_forbidden"]
    assert [problem["input"] for problem in caught.value.errors()] == ["x", 1]
    assert caught.value.title == "Row"


def test_an_error_with_very_many_problems_is_not_rewritten() -> None:
    class Numbers(BaseDocument):
        numbers: list[int] = []

    for count, message in ((999, "Numbers has no field 'nubmers'"), (1000, "Extra inputs are not permitted")):
        messages = problems(lambda count=count: Numbers.model_validate({"numbers": ["x"] * count, "nubmers": 1}))
        assert len(messages) == count + 1
        assert messages[-1][1].startswith(message)


def test_problems_of_validators_keep_their_type_and_context() -> None:
    class Even(BaseDocument):
        n: int = Field(0, multiple_of=2)
        m: int = 0
        image: Thesis | None = None

        @model_validator(mode="before")
        @classmethod
        def check(cls, values: Any) -> Any:
            if values.get("m") == 1:
                raise ValueError("m is 1")
            return values

    with pytest.raises(ValidationError) as caught:
        Even(n=1, x=1)  # type: ignore[call-arg]
    first, second = caught.value.errors()
    assert (first["type"], first["ctx"]) == ("multiple_of", {"multiple_of": 2})
    assert second["msg"] == "Even has no field 'x'. Known: id, n, m, image."
    assert [msg for _, msg in problems(lambda: Even(m=1, x=1))] == ["Value error, m is 1"]  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"thesis": {"titel": ""}}, ("thesis", "titel")),
        ({"theses": [{}, {"titel": ""}]}, ("theses", 1, "titel")),
        ({"by_name": {"a": {"titel": ""}}}, ("by_name", "a", "titel")),
        ({"work": {"titel": ""}}, ("work", "Thesis", "titel")),
        ({"several": [{"titel": ""}]}, ("several", 0, "Thesis", "titel")),
    ],
)
def test_unknown_fields_inside_of_documents_name_the_inner_class(values: Any, place: tuple[Any, ...]) -> None:
    expected = (place, "Thesis has no field 'titel'. Did you mean 'title'?")
    assert expected in problems(lambda: Row(**values))
    assert expected in problems(lambda: Row.model_validate(values))
    with pytest.raises(DecodeError, match=r"Row: Thesis has no field 'titel'. Did you mean 'title'\?"):
        Row.from_dict(values)


def test_hidden_input_stays_hidden() -> None:
    class Secretive(BaseDocument, hide_input_in_errors=True):
        n: int = 0

    with pytest.raises(ValidationError) as caught:
        Secretive(m="the secret")  # type: ignore[call-arg]
    assert "the secret" not in str(caught.value)
    assert "has no field 'm'" in str(caught.value)


def test_arrays_reject_unknown_keys_of_mappings() -> None:
    with pytest.raises(DocumentTypeError, match=r"item 0: .*\n.*\n.*Row has no field 'lable'. Did you mean 'label'\?"):
        DocumentArray[Row]([{"lable": 1}])
    array = DocumentArray[Row]()
    with pytest.raises(DocumentTypeError):
        array.append({"lable": 1})
    assert len(array) == 0


@given(st.text(max_size=8))
def test_keywords_that_are_no_field_or_alias_are_rejected(name: str) -> None:
    known = {"id", "label", "wide", "width", "thesis", "theses", "work", "several", "by_name"}
    if name in known:
        return
    place, message = problems(lambda: Row.model_validate({name: None}))[0]
    assert place == (name,)
    assert message.startswith(f"Row has no field {name!r}. ")
    with pytest.raises(DecodeError, match="Row has no field"):
        Row.from_dict({name: None})
    assert Row.from_dict({name: None, "label": 3}, extra="ignore").label == 3


def test_validator_that_returns_another_document_raises_a_warning() -> None:
    class Other(BaseDocument):
        n: int = 0

        @model_validator(mode="after")
        def replace(self) -> Any:
            return Thesis()

    with pytest.warns(UserWarning, match="other than `self`"):
        Other(n=1)


def test_nested_documents_are_validated_without_init() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Row.__pydantic_custom_init__
        assert str(TypeAdapter(Row).validate_python({"label": 1}).label) == "1"


# --- classes that choose for themselves


class Ignoring(BaseDocument, extra="ignore"):
    n: int = 0


class Keeping(BaseDocument):
    model_config = ConfigDict(extra="allow")
    n: int = 0


class Refusing(BaseDocument, extra="forbid"):
    n: int = 0


class PlainMixin(BaseModel):
    model_config = ConfigDict(extra="allow")


def test_extra_of_a_class_is_respected_and_inherited() -> None:
    class Heir(Ignoring): ...

    class Both(Keeping, Row): ...

    class Mixed(PlainMixin, BaseDocument): ...

    class Again(Keeping, extra="ignore"): ...

    assert Ignoring(m=1).__pydantic_extra__ is None  # type: ignore[call-arg]
    assert Heir(m=1).n == 0  # type: ignore[call-arg]
    assert Both(m=1).m == Mixed(m=1).m == Keeping(m=1).m == 1  # type: ignore[call-arg,attr-defined]
    assert not hasattr(Again(m=1), "m")  # type: ignore[call-arg]
    assert DynamicDocument(m=1).m == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("extra", ["forbid", "ignore"])
def test_extra_of_a_class_takes_precedence_over_a_reader(extra: Literal["forbid", "ignore"]) -> None:
    values = {"n": 1, "m": 2}
    assert Ignoring.from_dict(values, extra=extra) == Ignoring(n=1)
    assert Keeping.from_json('{"n": 1, "m": 2}', extra=extra) == Keeping(n=1, m=2)  # type: ignore[call-arg]
    with pytest.raises(DecodeError, match=r"^Refusing: Refusing has no field 'm'. Known: id, n.$"):
        Refusing.from_dict(values, extra=extra)
    assert DocumentArray[Ignoring].from_csv(text="n,m\n1,2\n", extra=extra)[0] == Ignoring(n=1)
    assert DocumentArray[Keeping].from_csv(text="n,m\n1,2\n", extra=extra)[0].m == "2"  # type: ignore[attr-defined]
    with pytest.raises(DecodeError, match=r"line 1: Refusing has no column 'm'. .* Refusing sets extra='forbid'.$"):
        DocumentArray[Refusing].from_csv(text="n,m\n1,2\n", extra=extra)


def test_nested_classes_have_their_own_extra() -> None:
    class Outer(BaseDocument):
        inner: Ignoring = Ignoring()
        kept: Keeping = Keeping()
        refused: Refusing = Refusing()

    values = {"inner": {"m": 1}, "kept": {"m": 2}}
    assert Outer.from_dict(values).kept.m == 2  # type: ignore[attr-defined]
    assert Outer.from_dict({**values, "more": 1}, extra="ignore").kept.m == 2  # type: ignore[attr-defined]
    with pytest.raises(DecodeError, match=r"^Outer: Refusing has no field 'm'."):
        Outer.from_dict({"refused": {"m": 1}}, extra="ignore")
    rows = DocumentArray[Outer].from_csv(text="inner.m,kept.m\n1,2\n")
    assert rows[0].kept.m == "2"  # type: ignore[attr-defined]


def test_predefined_documents_keep_working() -> None:
    assert Document(text="a", tags={"any": 1}).tags == {"any": 1}
    assert DocumentArray[Text](["a", {"text": "b"}]).text == ["a", "b"]
    assert Image(url="a.png").url == "a.png"
    with pytest.raises(ValidationError, match=r"Text has no field 'txt'. Did you mean 'text'\?"):
        Text(txt="a")  # type: ignore[call-arg]


# --- readers


@pytest.mark.parametrize("extra", ["allow", "error", None])
def test_unknown_values_of_extra_are_rejected(extra: Any) -> None:
    readers: list[Any] = [
        lambda: Row.from_json("{}", extra=extra),
        lambda: Row.from_dict({}, extra=extra),
        lambda: DocumentArray[Row].from_json("[]", extra=extra),
        lambda: DocumentBatch[Row].from_json("[]", extra=extra),
        lambda: DocumentArray[Row].from_csv(text="label\n", extra=extra),
        lambda: DocumentArray[Row].from_dict([{}], extra=extra),
        lambda: DocumentArray[Row].from_ndjson(text="{}\n", extra=extra),
    ]
    for read in readers:
        with pytest.raises(OptionError, match="is not a rule for unknown fields: use 'forbid' or 'ignore'."):
            read()


def test_json_forbids_and_ignores_on_request() -> None:
    text = '{"label": 1, "lable": 2, "thesis": {"titel": 1}, "theses": [{"titel": 1}], "several": [{"titel": 1}]}'
    with pytest.raises(DecodeError) as caught:
        Row.from_json(text)
    assert "Did you mean 'title'? Or pass extra='ignore'." in str(caught.value)
    expected = Row(label=1, thesis=Thesis(), theses=[{}], several=[Thesis()])  # type: ignore[arg-type]
    assert Row.from_json(text, extra="ignore") == expected
    for array in (DocumentArray[Row], DocumentBatch[Row]):
        with pytest.raises(DecodeError, match="^Row, row 1: Row has no field 'lable'"):
            array.from_json('[{"label": 1}, {"lable": 2}]')
        assert array.from_json(f"[{text}]", extra="ignore")[0] == expected
        assert array.from_dict([{"label": 1, "x": 1}], extra="ignore").label[0] == 1


def test_unknown_field_is_reported_before_a_missing_one() -> None:
    class Needy(BaseDocument):
        label: int

    message = r"^Needy in the text, line 1: Needy has no field 'lable'. Did you mean 'label'\? .* And 1 more.$"
    with pytest.raises(DecodeError, match=message):
        DocumentArray[Needy].from_ndjson(text='{"lable": 1}\n')


def test_ndjson_forbids_and_ignores_on_request(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    path.write_text('{"label": 1}\n{"label": 2, "more": {}}\n')
    with pytest.raises(DecodeError, match=r"rows.ndjson, line 2: Row has no field 'more'. Known: id, label, .*wide"):
        DocumentArray[Row].from_ndjson(path)
    assert DocumentArray[Row].from_ndjson(path, extra="ignore").label == [1, 2]


def test_cells_of_json_follow_the_rule_of_their_table() -> None:
    table = 'label,thesis,several\n1,"{""titel"": 1}","[{""titel"": 1}]"\n'
    with pytest.raises(DecodeError, match="line 2: Thesis has no field 'titel'"):
        DocumentArray[Row].from_csv(text=table)
    assert DocumentArray[Row].from_csv(text=table, extra="ignore")[0].several == [Thesis()]


# --- computed fields


@pytest.mark.parametrize("document", [Square(side=3), StrictSquare(side=2)])
def test_class_with_computed_fields_reads_its_own_output(document: Any) -> None:
    cls = type(document)
    array = DocumentArray[cls]([document, document])
    assert '"area"' in document.to_json()
    for got in (
        cls.from_json(document.to_json()),
        cls.from_dict(document.to_dict()),
        cls.model_validate(document.model_dump()),
        cls(**document.model_dump(by_alias=True)),
        cls.from_bytes(document.to_bytes()),
        DocumentArray[cls].from_json(array.to_json())[1],
        DocumentArray[cls].from_ndjson(text=array.to_ndjson())[1],
        DocumentArray[cls].from_csv(text=array.to_csv())[1],
        cls.from_json(document.to_json(), extra="ignore"),
    ):
        assert got.identical(document) or got == document
        assert got.__pydantic_extra__ is None
        assert got.__pydantic_fields_set__ <= set(cls.model_fields)


def test_nested_documents_with_computed_fields_read_their_own_output() -> None:
    document = Squares(one=Square(side=2), many=[Square(side=5)], both=[Square(), Thesis(title="a")])  # type: ignore[arg-type]
    assert Squares.from_json(document.to_json()) == document
    assert Squares.from_dict(document.to_dict()) == document
    assert DocumentArray[Squares].from_csv(text=DocumentArray([document]).to_csv())[0] == document


def test_computed_fields_do_not_allow_other_names() -> None:
    assert problems(lambda: Square(side=1, aera=1)) == [  # type: ignore[call-arg]
        (("aera",), "Square has no field 'aera'. Known: id, side.")
    ]
    messages = problems(lambda: Squares.model_validate({"one": {"area": 1, "sied": 1}, "many": []}))
    assert messages == [(("one", "sied"), "Square has no field 'sied'. Did you mean 'side' or 'id'?")]


def test_extra_values_do_not_contain_computed_fields() -> None:
    class Open(Square, extra="allow"): ...

    document = Open(side=2, more=1)  # type: ignore[call-arg]
    got = Open.from_json(document.to_json())
    assert got == document
    assert got.__pydantic_extra__ == {"more": 1}


def test_computed_fields_are_written_once() -> None:
    square = Square(side=2)
    assert square.model_dump(exclude={"id"}) == {"side": 2, "area": 4, "edge": 8}
    square.side = 3
    assert square.area == 9
    assert "area" not in Square.model_json_schema()["properties"]


# --- copies


def test_model_copy_rejects_unknown_names() -> None:
    with pytest.raises(PathError, match=r"Row has no field 'lable'. Did you mean 'label'\?"):
        Row().model_copy(update={"lable": 1})
    assert Row().model_copy(update={"label": 2}).label == 2
    assert Keeping().model_copy(update={"m": 1}).m == 1  # type: ignore[attr-defined]
