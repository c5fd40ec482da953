"""Document classes compiled: the kind of every field, and paths through them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, NewType, Optional, TypeVar, Union
from uuid import UUID

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import Field as PydanticField
from typing_extensions import TypeAliasType, TypedDict

from quire import BaseDocument, DocumentArray, DocumentBatch, FieldKind, Image, Text
from quire.errors import PathError, SchemaError
from quire.schema import Field
from quire.typing import AnyTensor, DType, NdArray, Shape, TensorSpec, float32

T = TypeVar("T")
UserId = NewType("UserId", int)
Pixels = TypeAliasType("Pixels", Annotated[NDArray[np.float32], Shape(2, 2)])


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Named(TypedDict):
    name: str


class Thesis(BaseDocument):
    title: str


class Cohort(DocumentArray):
    pass


class Everything(BaseDocument):
    number: int
    flag: bool = False
    real: float
    imaginary: complex
    text: str
    blob: bytes
    color: Color
    level: Level
    when: datetime
    day: date
    clock: time
    span: timedelta
    key: UUID
    price: Decimal
    path: Path
    choice: Literal["a", "b"]
    number_choice: Literal[1, 2]
    mixed_choice: Literal["a", 1]
    new: UserId
    bounded: Annotated[int, PydanticField(gt=0)]
    maybe: int | None
    maybe_too: Optional[int] = None
    maybe_bounded: Annotated[int | None, PydanticField(gt=0)] = None
    either: Thesis | Text
    either_too: Union[Thesis, Text, None] = None
    words: list[str]
    pairs: dict[str, int]
    several: tuple[int, ...]
    unique: set[int]
    record: Named
    anything: Any
    nothing: None = None
    tensor: NdArray[float32, 3, "n"]
    annotated: Annotated[NDArray[np.float32], Shape(3)]
    maybe_annotated: Annotated[np.ndarray, Shape(3), DType("int8")] | None = None
    aliased: Pixels
    any_tensor: AnyTensor | None = None
    thesis: Thesis
    maybe_thesis: Thesis | None = None
    theses: DocumentArray[Thesis]
    maybe_theses: DocumentArray[Thesis] | None = None
    cohort: Cohort[Thesis]
    untyped: DocumentArray
    batch: DocumentBatch[Thesis]


KINDS = {
    "id": (FieldKind.TEXT, str),
    "number": (FieldKind.SCALAR, int),
    "flag": (FieldKind.SCALAR, bool),
    "real": (FieldKind.SCALAR, float),
    "imaginary": (FieldKind.SCALAR, complex),
    "text": (FieldKind.TEXT, str),
    "blob": (FieldKind.BYTES, bytes),
    "color": (FieldKind.ENUM, Color),
    "level": (FieldKind.ENUM, Level),
    "when": (FieldKind.DATETIME, datetime),
    "day": (FieldKind.DATE, date),
    "clock": (FieldKind.TIME, time),
    "span": (FieldKind.TIMEDELTA, timedelta),
    "key": (FieldKind.UUID, UUID),
    "price": (FieldKind.DECIMAL, Decimal),
    "path": (FieldKind.PATH, Path),
    "choice": (FieldKind.TEXT, str),
    "number_choice": (FieldKind.SCALAR, int),
    "new": (FieldKind.SCALAR, int),
    "bounded": (FieldKind.SCALAR, int),
    "maybe": (FieldKind.SCALAR, int),
    "maybe_too": (FieldKind.SCALAR, int),
    "maybe_bounded": (FieldKind.SCALAR, int),
    "words": (FieldKind.LIST, list),
    "pairs": (FieldKind.DICT, dict),
    "several": (FieldKind.LIST, tuple),
    "unique": (FieldKind.LIST, set),
    "record": (FieldKind.DICT, Named),
    "anything": (FieldKind.ANY, Any),
    "tensor": (FieldKind.TENSOR, NdArray[float32, 3, "n"]),
    "annotated": (FieldKind.TENSOR, NdArray[float32, 3]),
    "aliased": (FieldKind.TENSOR, NdArray[float32, 2, 2]),
    "any_tensor": (FieldKind.TENSOR, AnyTensor),
    "thesis": (FieldKind.DOCUMENT, Thesis),
    "maybe_thesis": (FieldKind.DOCUMENT, Thesis),
    "theses": (FieldKind.DOCUMENTS, DocumentArray[Thesis]),
    "maybe_theses": (FieldKind.DOCUMENTS, DocumentArray[Thesis]),
    "cohort": (FieldKind.DOCUMENTS, Cohort[Thesis]),
    "untyped": (FieldKind.DOCUMENTS, DocumentArray),
    "batch": (FieldKind.ANY, DocumentBatch[Thesis]),
}


def field(name: str) -> Field:
    return Everything.document_schema().by_name[name]


@pytest.mark.parametrize("name", KINDS)
def test_annotation_determines_kind_and_type(name: str) -> None:
    assert (field(name).kind, field(name).type) == KINDS[name]


def test_fields_are_in_the_order_of_the_class() -> None:
    assert [f.name for f in Everything.document_schema().fields] == list(Everything.model_fields)
    assert Everything.document_schema() is Everything.document_schema()


def test_fields_are_nullable_and_required() -> None:
    fields = Everything.document_schema().fields
    nullable = {f.name for f in fields if f.nullable}
    assert nullable == {
        *("maybe", "maybe_too", "maybe_bounded", "either_too", "nothing", "maybe_annotated", "any_tensor"),
        *("maybe_thesis", "maybe_theses"),
    }
    assert {f.name for f in fields if not f.required} == {
        name for name, info in Everything.model_fields.items() if not info.is_required()
    }
    assert field("maybe").required
    assert not field("maybe_too").required


def test_items_of_unions_lists_and_dicts() -> None:
    assert field("mixed_choice").kind is FieldKind.ANY
    assert [(item.kind, item.type) for item in field("either").items] == [
        (FieldKind.DOCUMENT, Thesis),
        (FieldKind.DOCUMENT, Text),
    ]
    assert field("either_too").kind is FieldKind.UNION
    assert [item.type for item in field("words").items] == [str]
    assert [item.type for item in field("pairs").items] == [str, int]
    assert [item.type for item in field("several").items] == [int]


def test_tensor_fields_have_specs() -> None:
    assert field("tensor").spec == TensorSpec((3, "n"), "float32")
    assert field("maybe_annotated").spec == TensorSpec((3,), "int8")
    assert field("number").spec == TensorSpec()


def test_document_type_of_nested_fields() -> None:
    assert field("theses").document_type is Thesis
    assert field("cohort").document_type is Thesis
    assert field("thesis").document_type is Thesis


def test_fields_are_shown_as_annotations() -> None:
    assert str(Thesis.document_schema()) == "Thesis(id: str, title: str)"
    assert str(field("maybe_theses")) == "DocumentArray[Thesis] | None"
    assert str(field("either_too")) == "Thesis | Text | None"
    assert str(field("pairs")) == "dict[str, int]"
    assert str(field("tensor")) == "NdArray[float32, 3, 'n']"
    assert str(field("nothing")) == "NoneType"


# --- references forward and in circles


class Chain(BaseDocument):
    name: str = ""
    next: Chain | None = None
    links: DocumentArray[Chain] = []
    named: DocumentArray["Chain"] = []
    friends: list[Chain] = []
    own: Thesis | None = None


class Author(BaseDocument):
    books: DocumentArray[Book] = []
    thesis: Thesis | None = None


class Book(BaseDocument):
    author: Author | None = None
    readers: list[Author] = []


class Library(BaseDocument):
    books: DocumentArray[Book]


def test_recursive_document_is_compiled() -> None:
    schema = Chain.document_schema()
    assert {f.name for f in schema.fields if f.recursive} == {"next", "links", "named"}
    assert schema.by_name["named"].type is DocumentArray[Chain]
    assert type(Chain(named=[{"name": "a"}]).named) is DocumentArray[Chain]
    assert schema.resolve(("next", "links", "next", "name"))[-1].type is str


@pytest.mark.parametrize("first", [Author, Book])
def test_mutually_recursive_documents_are_compiled(first: type[BaseDocument], tmp_path: Path, monkeypatch: Any) -> None:
    """Whichever is compiled first: in a module that nobody has used yet."""
    module = f"circle_{first.__name__.lower()}"
    (tmp_path / f"{module}.py").write_text(
        "from __future__ import annotations\nfrom quire import BaseDocument, DocumentArray\n"
        "class Author(BaseDocument):\n    books: DocumentArray[Book] = []\n"
        "class Book(BaseDocument):\n    author: Author | None = None\n    readers: list[Author] = []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loaded = importlib.import_module(module)
    getattr(loaded, first.__name__).document_schema()
    assert loaded.Author.document_schema().by_name["books"].recursive
    assert loaded.Book.document_schema().by_name["author"].recursive
    assert not loaded.Book.document_schema().by_name["readers"].recursive  # a list has no columns, so it ends there


def test_quoted_forward_references_are_resolved(tmp_path: Path, monkeypatch: Any) -> None:
    """In a module whose annotations are evaluated at once."""
    (tmp_path / "in_quotes.py").write_text(
        "from typing import Optional\nfrom quire import BaseDocument, DocumentArray, DocumentBatch\n"
        "class Node(BaseDocument):\n"
        "    up: Optional['Node'] = None\n    also: 'Node | None' = None\n"
        "    kids: DocumentArray['Node'] = []\n    more: Optional[DocumentArray['Node']] = None\n"
        "    listed: list['Node'] = []\n    leaf: 'Optional[Leaf]' = None\n    leaves: DocumentArray['Leaf'] = []\n"
        "    batch: Optional[DocumentBatch['Leaf']] = None\n"
        "class Leaf(BaseDocument):\n    name: str = ''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loaded = importlib.import_module("in_quotes")
    fields = loaded.Node.document_schema().by_name
    assert [fields[name].type for name in ("up", "also", "leaf")] == [loaded.Node, loaded.Node, loaded.Leaf]
    assert [fields[name].type.document_type for name in ("kids", "more", "leaves")] == [
        *(loaded.Node, loaded.Node, loaded.Leaf),
    ]
    assert {name for name, member in fields.items() if member.recursive} == {"up", "also", "kids", "more"}
    node = loaded.Node(kids=[{"kids": [{}]}], leaves=[{"name": "a"}], batch=[{"name": "b"}], leaf={"name": "c"})
    assert [type(node.kids), type(node.leaves), type(node.kids[0].kids)] == [
        *(DocumentArray[loaded.Node], DocumentArray[loaded.Leaf], DocumentArray[loaded.Node]),
    ]
    assert node.batch.name == ["b"]
    docs = DocumentArray[loaded.Node]([node])
    assert docs.stack().unstack().identical(docs)


def test_only_fields_that_lead_back_are_recursive() -> None:
    assert not Library.document_schema().by_name["books"].recursive
    assert not Author.document_schema().by_name["thesis"].recursive
    assert Book.document_schema().by_name["author"].recursive


def test_forward_reference_to_a_local_class_is_resolved() -> None:
    class Parent(BaseDocument):
        child: Child | None = None

    class Child(BaseDocument):
        name: str

    Parent.model_rebuild()
    assert Parent.document_schema().by_name["child"].type is Child
    assert Parent(child={"name": "Ada"}).child == Child(name="Ada")


def test_unknown_forward_reference_raises_an_error_with_its_name() -> None:
    class Lost(BaseDocument):
        other: DocumentArray[Nowhere] = []

    with pytest.raises(SchemaError, match="Lost names a type that is not defined yet: 'Nowhere'"):
        Lost.document_schema()


class Box(BaseDocument, Generic[T]):
    item: T
    items: DocumentArray[T] = []


def test_generic_documents_are_compiled() -> None:
    open_box, box = Box.document_schema(), Box[Thesis].document_schema()
    assert (open_box.by_name["item"].kind, open_box.by_name["items"].type) == (FieldKind.ANY, DocumentArray)
    assert (box.by_name["item"].type, box.by_name["items"].type) == (Thesis, DocumentArray[Thesis])
    instance = Box[Thesis](item={"title": "a"}, items=[{"title": "b"}])
    assert type(instance.items) is DocumentArray[Thesis]
    assert instance.items[0].title == "b"


def test_subclasses_add_to_the_schema() -> None:
    class Dissertation(Thesis):
        year: int

    class Plain(Thesis):
        id: ClassVar[None] = None

    assert [f.name for f in Dissertation.document_schema().fields] == ["id", "title", "year"]
    assert [f.name for f in Plain.document_schema().fields] == ["title"]
    assert [f.name for f in Thesis.document_schema().fields] == ["id", "title"]


def test_keeps_more_is_set_for_extra_values_and_private_attributes() -> None:
    class Loose(Thesis, extra="allow"):
        pass

    class Secretive(Thesis):
        _cache: int = 0

    assert (Loose.document_schema().keeps_more, Secretive.document_schema().keeps_more) == (True, True)
    assert not Thesis.document_schema().keeps_more


# --- paths


class Student(BaseDocument):
    name: str
    thesis: Thesis
    photo: Image | None = None
    papers: DocumentArray[Thesis] = []


def test_resolve_returns_the_fields_of_a_path() -> None:
    schema = Student.document_schema()
    assert [f.name for f in schema.resolve(("papers", "title"))] == ["papers", "title"]
    assert schema.resolve(()) == ()


def bad_paths() -> Iterator[tuple[tuple[str, ...], str]]:
    yield ("nmae",), r"Student has no field 'nmae' \(in the path 'nmae'\). Did you mean 'name'\?"
    yield ("thesis", "titel"), r"Thesis has no field 'titel' \(in the path 'thesis.titel'\). Did you mean 'title'\?"
    yield ("papers", "zzz"), r"Thesis has no field 'zzz'.*Known: id, title\."
    yield ("name", "first"), r"Student.name is str, which has no fields; 'name.first' goes on"


@pytest.mark.parametrize(("path", "message"), list(bad_paths()), ids=lambda case: str(case)[:20])
def test_resolve_raises_an_error_with_the_nearest_names(path: tuple[str, ...], message: str) -> None:
    with pytest.raises(PathError, match=message):
        Student.document_schema().resolve(path)
    with pytest.raises(KeyError):
        Student.document_schema().resolve(path)
    with pytest.raises(AttributeError):
        Student.document_schema().resolve(path)
