"""Arrays and batches as fields of pydantic models: validation, error locations, JSON."""

from __future__ import annotations

import json
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from quire import BaseDocument, DocumentArray, DocumentBatch, Text
from quire.typing import NdArray, float32

T = TypeVar("T")


class Author(BaseDocument):
    name: str
    vector: NdArray[float32, 2] | None = None


class Writer(Author):
    pen_name: str = ""


class Cohort(DocumentArray):
    pass


class Shelf(DocumentArray[Author]):
    pass


class Book(BaseDocument):
    authors: DocumentArray[Author]
    shelf: Shelf = []
    cohort: Cohort[Author] = []
    maybe: DocumentArray[Author] | None = None
    untyped: DocumentArray = []


class Stacked(BaseDocument):
    batch: DocumentBatch[Author]
    later: DocumentBatch["Author"] | None = None


def test_array_field_keeps_array() -> None:
    authors = DocumentArray[Author]([Author(name="Ada")])
    assert Book(authors=authors).authors is authors


SOURCES: list[Any] = [
    [{"name": "Ada"}],
    [Author(name="Ada")],
    (Author(name="Ada"),),
    DocumentArray([Author(name="Ada")]),
    DocumentArray[Writer]([Writer(name="Ada")]),
    Cohort[Author]([Author(name="Ada")]).stack(),
]


@pytest.mark.parametrize("source", [*SOURCES, "generator"], ids=lambda source: type(source).__name__)
def test_array_field_accepts_iterables(source: Any) -> None:
    authors = (Author(name=name) for name in ["Ada"]) if source == "generator" else source
    book = Book(authors=authors)
    assert type(book.authors) is DocumentArray[Author]
    assert book.authors.name == ["Ada"]


def test_array_field_keeps_documents() -> None:
    writer = Writer(name="Ada", pen_name="A.")
    book = Book(authors=[writer], shelf=[writer], cohort=[writer], maybe=[writer], untyped=[writer, Text()])
    assert all(getattr(book, name)[0] is writer for name in ("authors", "shelf", "cohort", "maybe", "untyped"))
    assert [type(book.shelf), type(book.cohort), type(book.untyped)] == [Shelf, Cohort[Author], DocumentArray]


def test_assignment_validates_array() -> None:
    book = Book(authors=[])
    book.authors = [{"name": "Ada"}]
    assert type(book.authors) is DocumentArray[Author]
    with pytest.raises(ValidationError):
        book.authors = [{"nmae": "Ada"}]
    assert book.authors.name == ["Ada"]


BAD: list[tuple[Any, tuple[Any, ...], str]] = [
    ([{"name": "Ada"}, {"name": 3}], ("authors", 1, "name"), "string_type"),
    ([{"name": "Ada"}, {}], ("authors", 1, "name"), "missing"),
    ([Author(name="Ada"), Text()], ("authors", 1), "model_type"),
    ([{"name": "a", "vector": [1, 2, 3]}], ("authors", 0, "vector"), "tensor"),
    (3, ("authors",), "list_type"),
    ("Ada", ("authors",), "list_type"),
    ({"name": "Ada"}, ("authors",), "list_type"),
    (Author(name="Ada"), ("authors",), "array"),
    (None, ("authors",), "list_type"),
]


@pytest.mark.parametrize(("value", "location", "kind"), BAD, ids=[str(location) + kind for _, location, kind in BAD])
def test_validation_errors_have_locations(value: Any, location: tuple[Any, ...], kind: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Book(authors=value)
    [problem] = raised.value.errors()
    assert problem["loc"] == location
    assert problem["type"] == kind


def test_untyped_array_field_rejects_mappings() -> None:
    with pytest.raises(ValidationError, match="expected a document, got dict") as raised:
        Book(authors=[], untyped=[{"name": "Ada"}])
    assert raised.value.errors()[0]["loc"] == ("untyped", 0)


def test_array_field_round_trips_json() -> None:
    book = Book(authors=[Author(name="Ada", vector=[1, 2])], shelf=[{"name": "Bob"}], maybe=None)
    text = book.model_dump_json()
    again = Book.model_validate_json(text)
    assert again.identical(book)
    assert [type(again.authors), type(again.shelf)] == [DocumentArray[Author], Shelf]
    assert json.loads(text)["authors"][0]["name"] == "Ada"
    assert book.model_dump()["shelf"] == [book.shelf[0].model_dump()]
    assert Book.model_validate(book.model_dump()).identical(book)


def test_json_of_untyped_array_has_all_fields() -> None:
    book = Book(authors=[], untyped=[Writer(name="Ada", pen_name="A."), Text(text="t")])
    dumped = json.loads(book.model_dump_json())["untyped"]
    assert dumped[0]["pen_name"] == "A."
    assert dumped[1]["text"] == "t"


def test_json_schema_of_array_fields() -> None:
    schema = Book.model_json_schema()
    assert schema["properties"]["authors"]["type"] == "array"
    assert schema["properties"]["authors"]["items"] == {"$ref": "#/$defs/Author"}
    assert schema["properties"]["untyped"]["type"] == "array"
    assert "vector" in schema["$defs"]["Author"]["properties"]
    assert Stacked.model_json_schema()["properties"]["batch"]["type"] == "array"
    assert Book.model_json_schema(mode="serialization")["properties"]["authors"]["type"] == "array"


def test_strict_mode_accepts_arrays_only() -> None:
    adapter = TypeAdapter(DocumentArray[Author])
    authors = DocumentArray[Author]([Author(name="Ada")])
    assert adapter.validate_python(authors, strict=True) is authors
    with pytest.raises(ValidationError, match=r"expected DocumentArray\[Author\]"):
        adapter.validate_python([Author(name="Ada")], strict=True)
    assert adapter.validate_json('[{"name": "Ada"}]', strict=True).name == ["Ada"]
    assert adapter.dump_json(authors) == adapter.dump_json(adapter.validate_json(adapter.dump_json(authors)))


def test_array_fields_of_plain_models_and_unions() -> None:
    class Plain(BaseModel):
        authors: DocumentArray[Author] | int

    class Holder(BaseModel, Generic[T]):
        docs: DocumentArray[T]

    assert Plain(authors=3).authors == 3
    assert type(Plain(authors=[{"name": "Ada"}]).authors) is DocumentArray[Author]
    assert type(Holder[Author](docs=[{"name": "Ada"}]).docs) is DocumentArray[Author]


def test_batch_field_stacks_documents() -> None:
    stacked = Stacked(batch=[{"name": "Ada", "vector": [1, 2]}], later=[{"name": "Bob"}])
    assert type(stacked.batch) is DocumentBatch[Author]
    assert type(stacked.later) is DocumentBatch[Author]
    assert stacked.batch.vector.tolist() == [[1.0, 2.0]]
    assert Stacked(batch=stacked.batch).batch is stacked.batch
    again = Stacked.model_validate_json(stacked.model_dump_json())
    assert again == stacked
    assert again.batch.identical(stacked.batch)
    with pytest.raises(ValidationError) as raised:
        Stacked(batch=[{"name": 3}])
    assert raised.value.errors()[0]["loc"] == ("batch", 0, "name")


def test_documents_with_batch_fields_stack() -> None:
    docs = DocumentArray[Stacked]([Stacked(batch=[{"name": name}]) for name in ("Ada", "Bob")])
    assert docs.stack().unstack().identical(docs)


def test_json_numbers_get_declared_dtype() -> None:
    book = Book(authors=[Author(name="Ada", vector=np.ones(2, np.float32))])
    assert Book.model_validate_json(book.model_dump_json()).authors[0].vector.dtype == np.float32
