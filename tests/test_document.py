"""Documents: ids, names of fields, main values, assignment, copies, subclasses and what else they hold."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any, ClassVar
from uuid import UUID

import numpy as np
import pytest
from pydantic import Field, ValidationError, model_validator

from quire import BaseDocument, Document, DocumentArray, Image, Text
from quire.errors import DocumentTypeError
from quire.typing import ID, NdArray, float32


class Thesis(BaseDocument):
    title: Text
    vector: NdArray[float32, 2] = [0.0, 0.0]


class Dissertation(Thesis):
    pages: int = 0


class Student(BaseDocument):
    name: str
    thesis: Thesis
    papers: DocumentArray[Thesis] = []


class Numbered(BaseDocument):
    id: int
    name: str = ""


class Nameless(BaseDocument):
    id: ClassVar[None] = None
    name: str = ""
    inner: Text | None = None


class Loose(BaseDocument, extra="allow"):
    name: str = ""
    _visits: int = 0
    _cache: dict[str, int] = {}


# --- ids


def test_id_is_random_hex() -> None:
    ids = {Student(name="Ada", thesis=Thesis(title="a")).id for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def test_ids_do_not_depend_on_the_seed() -> None:
    import random

    ids = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        ids.append(BaseDocument().id)
    assert ids[0] != ids[1]


def test_ids_are_strings() -> None:
    key = UUID(int=1)
    assert [BaseDocument(id=value).id for value in ("a", 7, key)] == ["a", "7", str(key)]
    with pytest.raises(ValidationError):
        BaseDocument(id=None)
    with pytest.raises(ValidationError):
        BaseDocument(id=[1])
    assert Student.model_fields["id"].annotation is ID or Student.document_schema().by_name["id"].type is str


def test_class_may_annotate_its_id() -> None:
    document = Numbered(id="3", name="a")
    assert document.id == 3
    with pytest.raises(ValidationError):
        Numbered(name="a")
    docs = DocumentArray[Numbered]([{"id": 2}, document])
    assert docs.by_id(3) is document
    batch = docs.stack()
    assert batch.id.tolist() == [2, 3]
    assert batch.unstack().identical(docs)
    assert not batch.unstack().identical(DocumentArray[Numbered]([{"id": 2}, {"id": 4, "name": "a"}]))


def test_class_may_remove_its_id() -> None:
    document = Nameless(name="a", inner="text")
    assert "id" not in document.model_dump()
    assert document.id is None
    docs = DocumentArray[Nameless]([document, Nameless()])
    batch = docs.stack()
    assert (len(docs), len(batch), batch.name) == (2, 2, ["a", ""])
    assert batch.unstack() == docs
    assert batch[0].identical(document)
    for duplicate in (
        pickle.loads(pickle.dumps(docs)),
        copy.deepcopy(docs),
        pickle.loads(pickle.dumps(batch)).unstack(),
    ):
        assert duplicate == docs
    document.update(name="b")
    assert document.name == "b"
    assert len(docs.merge(docs)) == 2
    assert len(DocumentArray[Nameless]([document, Nameless()], unique_ids=True)) == 2


def test_class_may_have_no_field() -> None:
    class Empty(BaseDocument):
        id: ClassVar[None] = None

    docs = DocumentArray[Empty]([Empty(), Empty()])
    assert (len(docs.stack()), docs.stack().unstack()) == (2, docs)


# --- fields called like methods


NAMES = [
    *("summary", "update", "copy", "json", "dict", "schema", "validate", "construct", "identical", "schema_summary"),
    *("append", "index", "count", "insert", "stack", "filter", "find", "take", "batch", "validity", "column", "flat"),
    *("document_schema", "document_type", "fields", "shape", "values", "items", "schema_json", "parse_obj", "from_orm"),
]


def named_like_methods() -> type[Any]:
    """A class whose fields have the names of methods, made without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return type("Named", (BaseDocument,), {"__annotations__": dict.fromkeys(NAMES, "int"), "__module__": __name__})


Named = named_like_methods()


@pytest.mark.parametrize("name", NAMES)
def test_field_may_have_the_name_of_a_method(name: str) -> None:
    values = {field: number for number, field in enumerate(NAMES)}
    with pytest.raises(ValidationError, match="Field required"):
        Named(**{field: value for field, value in values.items() if field != name})
    document = Named(**values)
    assert getattr(document, name) == values[name]
    setattr(document, name, 100)
    assert getattr(document, name) == 100
    docs = DocumentArray[Named]([document])
    assert docs[name] == [100]
    docs[name] = [101]
    assert docs.stack()[name].tolist() == [101]


def test_quire_calls_no_methods_that_a_field_may_hide() -> None:
    document = Named(**{field: number for number, field in enumerate(NAMES)})
    docs = DocumentArray[Named]([document])
    batch = docs.stack()
    batch["take"] = [7]
    assert batch[0].take == 7
    assert batch[:1].unstack() != docs
    BaseDocument.update(document, {"update": 5})
    assert document.update == 5
    for duplicate in (copy.copy(document), copy.deepcopy(document), pickle.loads(pickle.dumps(document))):
        assert BaseDocument.identical(duplicate, document)
    assert "update=5" in repr(document)
    assert "<th>update</th><td>5</td>" in document._repr_html_()
    assert len(docs.filter({"update": 5}).merge([document])) == 1


def test_defaults_are_used() -> None:
    class Hidden(BaseDocument):
        copy: str = "c"
        index: int = Field(default=3)

    assert (Hidden().copy, Hidden().index, Hidden(copy="d").copy) == ("c", 3, "d")


# --- main values


def test_main_value_becomes_a_document() -> None:
    thesis = Thesis(title="abc")
    assert isinstance(thesis.title, Text)
    assert (thesis.title.text, thesis.title.id != Thesis(title="abc").title.id) == ("abc", True)
    thesis.title = "def"
    assert thesis.title == Text(text="def")
    assert Thesis(title=b"raw").title.bytes_ == b"raw"
    assert Thesis(title=Text(text="x")).title == Thesis(title={"text": "x"}).title
    assert DocumentArray[Text](["a", "b"]).text == ["a", "b"]
    assert Text.model_validate("a") == Text(text="a")
    with pytest.raises(ValidationError):
        Thesis(title=3)


def test_main_value_of_an_image_selects_the_field() -> None:
    class Page(BaseDocument):
        image: Image | None = None

    pixels = np.zeros((2, 2, 3), np.uint8)
    assert Page(image="https://quire/a.png").image.url == "https://quire/a.png"
    assert Page(image=pixels).image.tensor is pixels
    assert Page(image=b"png").image.bytes_ == b"png"
    assert Page(image=None).image is None


def test_main_value_may_be_passed_without_its_name() -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    assert Text("hello") == Text(text="hello")
    assert Text("hello", embedding=[1.0]).embedding.tolist() == [1.0]
    assert Text(b"raw").bytes_ == b"raw"
    assert Image("a.png").url == "a.png"
    assert Image(pixels, id="a").tensor is pixels

    class Note(Text):
        author: str = ""

    assert (Note("hello", author="Ada").text, Note("hello", author="Ada").author) == ("hello", "Ada")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Text(3), "Text takes the value of text or bytes_ without a name; int fits none of them"),
        (lambda: Text({"text": "a"}), r"dict fits none of them. Name the field, or use Text.model_validate\(\)"),
        (lambda: Text("a", "b"), "Text takes one value, that of a main field, without a name, got 2"),
        (lambda: Text("a", text="b"), "Text got 'text' twice"),
        (lambda: Student("Ada"), "Student takes no values without a name, got 1"),
    ],
)
def test_values_without_a_name_that_are_no_main_values_are_rejected(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(DocumentTypeError, match=message):
        make()


def test_main_value_is_accepted_in_json() -> None:
    assert Thesis.model_validate_json('{"title": "abc"}').title.text == "abc"
    assert Thesis.model_validate_json(Thesis(title="abc").model_dump_json()).title.text == "abc"


# --- assignment


@pytest.mark.parametrize(
    ("name", "value"),
    [("name", 3), ("name", None), ("thesis", 3), ("thesis", Text()), ("papers", [Text()]), ("id", None)],
)
def test_failed_assignment_changes_nothing(name: str, value: Any) -> None:
    student = Student(name="Ada", thesis=Thesis(title="a"), papers=[Thesis(title="b")])
    before = copy.deepcopy(student)
    held = dict(student.__dict__)
    with pytest.raises(ValidationError, match=name):
        setattr(student, name, value)
    assert student.identical(before)
    assert all(student.__dict__[field] is held[field] for field in held)


class Ranged(BaseDocument):
    low: int = 0
    high: int = 10
    _set: int = 0

    @model_validator(mode="after")
    def in_order(self) -> Ranged:
        if self.low > self.high:
            raise ValueError("out of order")
        return self


class Wider(Ranged, extra="allow"):
    pass


@pytest.mark.parametrize("document_type", [Ranged, Wider])
def test_model_validator_rejects_an_assignment(document_type: type[Ranged]) -> None:
    """pydantic alone raises, and keeps the bad value."""
    document = document_type(low=1)
    with pytest.raises(ValidationError, match="out of order"):
        document.low = 11
    assert (document.low, document.model_fields_set) == (1, {"low"})
    document.high = 5
    document._set = 3
    assert (document.high, document._set, document.model_fields_set) == (5, 3, {"low", "high"})
    docs = DocumentArray[document_type]([document])
    with pytest.raises(ValueError, match="out of order"):
        docs.low = [6]
    with pytest.raises(ValidationError):
        document.update(low=20)
    assert document.low == 1
    document.update(low=20, high=30)
    assert (document.low, document.high) == (20, 30)
    assert pickle.loads(pickle.dumps(document)).identical(document)


def test_assignment_converts_values() -> None:
    thesis = Thesis(title="a")
    thesis.vector = [1, 2]
    assert (thesis.vector.dtype, thesis.vector.tolist()) == (np.float32, [1.0, 2.0])
    with pytest.raises(ValidationError, match=r"expected NdArray float32 \(2,\), got float64 \(2,\) of numpy"):
        thesis.vector = np.zeros(2)
    assert thesis.vector.tolist() == [1.0, 2.0]


def test_unknown_field_is_rejected() -> None:
    with pytest.raises(ValueError, match="titel"):
        Thesis(title="a").titel = "b"


def test_defaults_are_not_shared() -> None:
    a, b = Student(name="a", thesis={"title": "t"}), Student(name="b", thesis={"title": "t"})
    a.papers.append(Thesis(title="x"))
    a.thesis.vector[0] = 5
    assert (len(b.papers), b.thesis.vector[0], Thesis(title="t").vector[0]) == (0, 0, 0)
    assert type(a.papers) is DocumentArray[Thesis]


# --- copies

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "model_copy": lambda document: document.model_copy(deep=True),
    "pickle": lambda document: pickle.loads(pickle.dumps(document)),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_deep_copies_are_independent(make: Callable[[Any], Any]) -> None:
    student = Student(name="Ada", thesis=Dissertation(title="a", pages=3), papers=[Dissertation(title="b", pages=4)])
    duplicate = make(student)
    assert duplicate.identical(student)
    assert [type(duplicate.thesis), type(duplicate.papers[0]), duplicate.papers[0].pages] == [
        Dissertation,
        Dissertation,
        4,
    ]
    duplicate.thesis.vector[0] = 9
    duplicate.papers.append(Thesis(title="c"))
    duplicate.name = "Grace"
    assert (student.thesis.vector[0], len(student.papers), student.name) == (0, 1, "Ada")


@pytest.mark.parametrize("make", [copy.copy, lambda document: document.model_copy()], ids=["copy", "model_copy"])
def test_shallow_copies_share_values(make: Callable[[Any], Any]) -> None:
    student = Student(name="Ada", thesis=Thesis(title="a"))
    duplicate = make(student)
    duplicate.name = "Grace"
    assert (student.name, duplicate.thesis is student.thesis) == ("Ada", True)


def test_deep_copy_preserves_identity_of_shared_values() -> None:
    thesis = Thesis(title="a")
    shared: list[Any] = [thesis]
    document = Document(tags={"a": shared, "b": shared, "c": (shared, thesis)})
    document.tags["self"] = document.tags
    duplicate = copy.deepcopy(document)
    assert duplicate.tags["a"] is duplicate.tags["b"] is duplicate.tags["c"][0]
    assert duplicate.tags["a"][0] is duplicate.tags["c"][1] is not thesis
    assert duplicate.tags["self"] is duplicate.tags


# --- subclasses, extra values, private attributes


def test_subclasses_keep_their_fields() -> None:
    student = Student(name="Ada", thesis=Dissertation(title="a", pages=3))
    assert student.thesis.pages == 3
    docs = DocumentArray[Thesis]([Thesis(title="a"), Dissertation(title="b", pages=4)])
    for duplicate in (docs.stack().unstack(), docs[:], pickle.loads(pickle.dumps(docs)), copy.deepcopy(docs)):
        assert duplicate.identical(docs)
        assert [type(document) for document in duplicate] == [Thesis, Dissertation]
        assert duplicate[1].pages == 4
    assert docs.stack()[1].pages == 4
    assert docs.stack().take([1, 1, 0])[1].pages == 4


@pytest.mark.parametrize(
    "way",
    [
        lambda docs: docs.stack().unstack(),
        lambda docs: docs.stack()[[0]].unstack(),
        lambda docs: [docs.stack()[0]],
        lambda docs: pickle.loads(pickle.dumps(docs)),
        lambda docs: pickle.loads(pickle.dumps(docs.stack())).unstack(),
        copy.deepcopy,
    ],
    ids=["stack", "take", "row", "pickle", "pickled batch", "deepcopy"],
)
def test_copies_keep_extra_values_and_private_attributes(way: Callable[[Any], Any]) -> None:
    document = Loose(name="a", color="red", vector=np.ones(2))
    document._visits = 3
    duplicate = way(DocumentArray[Loose]([document]))[0]
    assert duplicate.identical(document)
    assert (duplicate.color, duplicate._visits, duplicate.model_extra.keys()) == ("red", 3, {"color", "vector"})
    duplicate.color = "blue"
    duplicate._visits = 4
    duplicate._cache["a"] = 1
    assert (document.color, document._visits) == ("red", 3)
    assert Loose()._cache == {}


def test_arrays_of_the_base_keep_extra_values_of_subclasses() -> None:
    class Tagged(Thesis, extra="allow"):
        _seen: bool = False

    tagged = Tagged(title="a", color="red")
    tagged._seen = True
    duplicate = DocumentArray[Thesis]([Thesis(title="b"), tagged]).stack().unstack()
    assert (type(duplicate[1]), duplicate[1].color, duplicate[1]._seen, type(duplicate[0])) == (
        Tagged,
        "red",
        True,
        Thesis,
    )


# --- short looks


def test_repr_is_short() -> None:
    document = Document(
        text="x" * 1000,
        tensor=np.zeros((100, 100)),
        tags={"long": "y" * 1000, "tensor": np.zeros(1000), "deep": {"list": ["z" * 1000]}},
        chunks=[Document() for _ in range(100)],
        location=[0.5] * 100,
        blob=b"b" * 1000,
    )
    text = repr(document)
    assert "\n" not in text
    assert len(text) < 900
    assert "tensor=<numpy float64[100, 100]>" in text
    assert "chunks=<DocumentArray[Document] of 100>" in text
    assert "location=<list of 100>" in text
    assert "(1000)" in text
    assert repr(Nameless(name="a")) == "Nameless(name='a', inner=None)"
