"""Aliases that are spelled like the names of other fields: values stay with their fields in every form."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AliasChoices, AliasPath, ConfigDict, Field

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DecodeError, EncodeError
from tests.strategies import laws


class Renamed(BaseDocument):
    title: str = ""
    name: str = Field("", validation_alias="title")


class Swapped(BaseDocument):
    a: int = Field(0, alias="b")
    b: int = Field(0, alias="a")


class Shared(BaseDocument):
    """Two fields that are read by one alias."""

    a: int = Field(0, validation_alias="key")
    b: int = Field(0, validation_alias=AliasChoices("key", AliasPath("a", 0)))


class Within(BaseDocument, extra="forbid"):
    """A field that is read from inside of a value under its own name."""

    items: list[list[int]] = Field([], validation_alias=AliasPath("items", 0))


class Nested(BaseDocument):
    one: Renamed
    many: DocumentArray[Swapped] = []
    either: Swapped | Shared | None = None


class OnlyByAlias(BaseDocument):
    model_config = ConfigDict(populate_by_name=False)

    title: str
    name: str = Field(alias="Name")


class OnlyByCollidingAlias(BaseDocument):
    model_config = ConfigDict(populate_by_name=False)

    title: str = ""
    name: str = Field("", alias="title")


def create(document_type: type[Any], **values: Any) -> Any:
    """A document with these values, whatever its aliases mean."""
    document = document_type.model_construct()
    document.__dict__.update(values)
    return document


DOCUMENTS = [
    create(Renamed, title="T", name="N"),
    create(Swapped, a=1, b=2),
    create(Shared, a=1, b=2),
    create(Within, items=[[1], [2]]),
    create(Nested, one=create(Renamed, title="T", name="N"), many=DocumentArray[Swapped]([create(Swapped, a=1, b=2)])),
    create(
        Nested,
        one=create(Renamed, title="T", name="N"),
        either=create(Swapped, a=3, b=4),
        many=DocumentArray[Swapped](),
    ),
]


def _through_array(write: Callable[[Any], Any], read: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def way(document: Any) -> Any:
        array = DocumentArray[type(document)]([document, document])
        again = read(type(array), write(array))
        assert len(again) == 2
        return again[1]

    return way


FORMS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda d: type(d).from_bytes(d.to_bytes()),
    "protobuf": lambda d: type(d).from_protobuf(d.to_protobuf()),
    "typed protobuf": lambda d: type(d).from_typed_protobuf(d.to_typed_protobuf().SerializeToString()),
    "pickle": lambda d: pickle.loads(pickle.dumps(d)),
    "JSON": lambda d: type(d).from_json(d.to_json()),
    "dict": lambda d: type(d).from_dict(d.to_dict()),
    "array bytes": _through_array(lambda a: a.to_bytes(), lambda cls, data: cls.from_bytes(data)),
    "array message": _through_array(lambda a: a.to_protobuf(), lambda cls, data: cls.from_protobuf(data)),
    "batch": _through_array(
        lambda a: a.stack().to_bytes(), lambda cls, data: DocumentBatch[cls.document_type].from_bytes(data).unstack()
    ),
    "array JSON": _through_array(lambda a: a.to_json(), lambda cls, data: cls.from_json(data)),
    "NDJSON": _through_array(lambda a: a.to_ndjson(), lambda cls, data: cls.from_ndjson(text=data)),
    "CSV": _through_array(lambda a: a.to_csv(), lambda cls, data: cls.from_csv(text=data)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
def test_round_trips_keep_values_in_their_fields(document: Any, form: str) -> None:
    assert FORMS[form](document).identical(document)


@pytest.mark.needs("pandas")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
def test_data_frames_keep_values_in_their_fields(document: Any) -> None:
    array = DocumentArray[type(document)]([document])
    assert type(array).from_dataframe(array.to_dataframe())[0].identical(document)


@laws
@given(st.text(max_size=3), st.text(max_size=3), st.sampled_from(sorted(FORMS)))
def test_round_trips_swap_no_values(title: str, name: str, form: str) -> None:
    document = create(Renamed, title=title, name=name)
    assert FORMS[form](document).identical(document)


def test_alias_fills_its_field_if_the_name_is_missing() -> None:
    assert Renamed.model_validate({"title": "T"}).name == "T"
    assert Renamed.from_json('{"title": "T"}').name == "T"
    assert Renamed.from_json('{"title": "T", "name": "N"}').name == "N"


def test_errors_name_the_field_and_not_an_internal_key() -> None:
    with pytest.raises(DecodeError, match=r"Swapped.*: Input should be a valid integer") as caught:
        Swapped.from_json('{"a": "x"}')
    assert "\0" not in str(caught.value)
    with pytest.raises(DecodeError, match=r"OnlyByAlias\.Name: Field required; the bytes do not hold it"):
        OnlyByAlias.from_bytes(create(Renamed, title="T").to_bytes().replace(b"name", b"game"))


def test_class_with_aliases_only_is_read_by_name() -> None:
    document = OnlyByAlias(title="T", Name="N")
    for form in ("bytes", "array bytes", "batch", "typed protobuf", "array message"):
        assert FORMS[form](document).identical(document)


@pytest.mark.parametrize("form", ["JSON", "dict", "NDJSON"])
def test_text_with_a_colliding_alias_is_not_written(form: str) -> None:
    document = create(OnlyByCollidingAlias, title="T", name="N")
    with pytest.raises(EncodeError, match=r"OnlyByCollidingAlias.*could not be read back: .* has no field 'name'"):
        FORMS[form](document)
    assert FORMS["bytes"](document).identical(document)
    assert FORMS["CSV"](document).identical(document)


def test_update_and_assignment_use_names_of_fields() -> None:
    document = create(Renamed, title="T", name="N")
    document.update({"name": "M"})
    assert (document.title, document.name) == ("T", "M")
