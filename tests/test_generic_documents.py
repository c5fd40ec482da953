"""Type variables of generic documents, wherever they stand in an annotation."""

from __future__ import annotations

import pickle
from typing import Annotated, Any, Generic, Optional, TypeVar

import pytest
from pydantic import Field, ValidationError

from quire import BaseDocument, DocumentArray, DocumentBatch

T = TypeVar("T")
U = TypeVar("U")


class Box(BaseDocument, Generic[T]):
    content: T


class Shelf(BaseDocument, Generic[T]):
    boxes: DocumentArray[Box[T]] = DocumentArray[Box]()  # type: ignore[type-arg]


class Store(BaseDocument, Generic[U]):
    boxes: DocumentArray[Box[U]] | None = None
    optional: Optional[DocumentArray[Box[U]]] = None
    several: list[DocumentArray[Box[U]]] = []
    by_name: dict[str, DocumentArray[Box[U]]] = {}
    annotated: Annotated[DocumentArray[Box[U]] | None, Field(description="more boxes")] = None
    batch: DocumentBatch[Box[U]] | None = None
    nested: DocumentArray[Box[Box[U]]] | None = None
    shelves: DocumentArray[Shelf[U]] | None = None
    one: Shelf[U] | None = None


class Plain(BaseDocument, Generic[T]):
    several: list[DocumentArray[T]] = []  # type: ignore[type-var]
    optional: DocumentArray[T] | None = None  # type: ignore[type-var]


GOOD: Any = [{"content": 3}]
BAD: Any = [{"content": "not an int"}]


def test_type_variables_are_substituted_inside_of_arrays() -> None:
    with pytest.raises(ValidationError, match="boxes.0.content"):
        Shelf[int](boxes=BAD)
    shelf = Shelf[int](boxes=GOOD)
    assert type(shelf.boxes) is DocumentArray[Box[int]]
    assert Shelf[str](boxes=BAD).boxes[0].content == "not an int"
    assert Shelf(boxes=BAD).boxes[0].content == "not an int"
    with pytest.raises(ValidationError):
        Shelf[int](boxes=DocumentArray[Box[str]]([Box[str](content="x")]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("boxes", lambda boxes: boxes),
        ("optional", lambda boxes: boxes),
        ("several", lambda boxes: [boxes]),
        ("by_name", lambda boxes: {"a": boxes}),
        ("annotated", lambda boxes: boxes),
        ("batch", lambda boxes: boxes),
        ("nested", lambda boxes: [{"content": box} for box in boxes]),
        ("shelves", lambda boxes: [{"boxes": boxes}]),
        ("one", lambda boxes: {"boxes": boxes}),
    ],
)
def test_type_variables_are_substituted_everywhere(name: str, wrap: Any) -> None:
    with pytest.raises(ValidationError, match="content"):
        Store[int](**{name: wrap(BAD)})
    document = Store[int](**{name: wrap(GOOD)})
    if name != "batch":  # a batch inside of a document has no form in bytes
        assert Store[int].from_bytes(document.to_bytes()) == document
    assert Store[int].from_json(document.to_json()) == document
    assert pickle.loads(pickle.dumps(document)) == document
    assert "~" not in str(Store[int].document_schema())


def test_a_type_variable_alone_is_substituted_inside_of_arrays() -> None:
    with pytest.raises(ValidationError, match="several.0.0.content"):
        Plain[Box[int]](several=[BAD])
    with pytest.raises(ValidationError, match="optional.0.content"):
        Plain[Box[int]](optional=BAD)
    assert type(Plain[Box[int]](optional=GOOD).optional) is DocumentArray[Box[int]]


def test_a_subclass_of_a_generic_document_keeps_its_types() -> None:
    class IntegerShelf(Shelf[int]):
        name: str = ""

    with pytest.raises(ValidationError, match="boxes.0.content"):
        IntegerShelf(boxes=BAD)
    assert DocumentArray[IntegerShelf]([IntegerShelf(boxes=GOOD)]).stack().boxes.content.tolist() == [3]
