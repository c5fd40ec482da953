"""`update` and `merge`: what is taken over, and that bad values change nothing."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import ConfigDict, ValidationError

from quire import BaseDocument, DocumentArray
from quire.errors import DocumentTypeError, PathError, QuireError
from quire.typing import NdArray


class Thesis(BaseDocument):
    title: str = ""
    pages: int = 0


class Dissertation(Thesis):
    year: int = 0


class Student(BaseDocument):
    name: str = ""
    age: int = 0
    thesis: Thesis | None = None
    papers: DocumentArray[Thesis] | None = None
    tags: dict[str, Any] = {}
    words: list[str] = []
    image: NdArray["h", "w"] | None = None
    mask: NdArray["h", "w"] | None = None


def ada() -> Student:
    return Student(
        id="ada",
        name="Ada",
        age=20,
        thesis=Thesis(id="t", title="Notes", pages=3),
        papers=[Thesis(id="p1", title="One"), Thesis(id="p2", title="Two", pages=2)],
        tags={"a": 1, "b": 2},
        words=["x"],
    )


def test_update_takes_only_set_fields_of_a_document() -> None:
    student = ada()
    student.update(Student(id="other", age=21))
    assert (student.id, student.name, student.age) == ("ada", "Ada", 21)
    assert student.thesis.title == "Notes"


def test_update_accepts_mappings_and_keywords() -> None:
    student = ada()
    student.update({"name": "Augusta", "id": "x"}, age=22)
    assert (student.id, student.name, student.age) == ("ada", "Augusta", 22)
    student.update()
    student.update(None, id="x")
    assert student.id == "ada"


def test_update_updates_nested_documents() -> None:
    student = ada()
    thesis = student.thesis
    student.update({"thesis": {"pages": 5, "id": "y"}})
    assert student.thesis is thesis
    assert (thesis.id, thesis.title, thesis.pages) == ("t", "Notes", 5)
    student.update(thesis=Thesis(title="More"))
    assert (student.thesis is thesis, thesis.id, thesis.title, thesis.pages) == (True, "t", "More", 5)
    student.update(thesis=Dissertation(title="Last", year=3))
    assert (type(student.thesis), student.thesis.year) == (Dissertation, 3)
    student.update(thesis=None)
    assert student.thesis is None
    student.update(thesis={"title": "New"})
    assert student.thesis.title == "New"


def test_update_merges_arrays_by_id() -> None:
    student = ada()
    papers = student.papers
    student.update(papers=[Thesis(id="p2", pages=9), Thesis(id="p3", title="Three")])
    assert student.papers is papers
    assert papers.id == ["p1", "p2", "p3"]
    assert (papers[1].title, papers[1].pages) == ("Two", 9)
    student.update(papers=papers)
    assert len(papers) == 3
    student.update(papers=None)
    assert student.papers is None
    student.update(papers=[{"title": "again"}])
    assert type(student.papers) is DocumentArray[Thesis]


def test_update_merges_dicts_and_replaces_other_values() -> None:
    student = ada()
    student.update(tags={"b": 3, "c": 4}, words=["y"])
    assert (student.tags, student.words) == ({"a": 1, "b": 3, "c": 4}, ["y"])


def test_update_accepts_values_that_are_valid_only_together() -> None:
    student = Student(image=np.zeros((2, 3)), mask=np.zeros((2, 3)))
    with pytest.raises(ValidationError, match="from another field"):
        student.update(image=np.zeros((4, 5)))
    assert student.image.shape == (2, 3)
    student.update(image=np.zeros((4, 5)), mask=np.ones((4, 5)), name="both")
    assert (student.image.shape, student.mask.shape, student.mask[0, 0], student.name) == ((4, 5), (4, 5), 1, "both")
    with pytest.raises(ValidationError):
        student.update(image=np.zeros((6, 6)), mask=np.zeros((7, 7)), name="neither")
    assert (student.image.shape, student.name) == ((4, 5), "both")


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": "new", "age": "old"}, ValidationError, "age"),
    ({"name": "new", "thesis": {"title": "new", "pages": "many"}}, ValidationError, "pages"),
    ({"papers": [Thesis(id="p1", title="new"), Thesis(id="p9")], "age": "old"}, ValidationError, "age"),
    ({"papers": [{"id": "p1", "title": "new"}, {"pages": "many"}]}, DocumentTypeError, "item 1"),
    ({"papers": 3}, DocumentTypeError, "takes an iterable of documents"),
    ({"tags": {"a": 2}, "nmae": "new"}, PathError, "Student has no field 'nmae'. Did you mean 'name'"),
    ({"tags": {"a": 2}, "thesis": {"titel": "new"}}, PathError, "Thesis has no field 'titel'. Did you mean 'title'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[message[:20] for _, _, message in BAD])
def test_update_with_invalid_values_changes_nothing(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    student = ada()
    before = copy.deepcopy(student)
    with pytest.raises(error, match=message):
        student.update(changes)
    assert student.identical(before)
    assert student.__pydantic_fields_set__ == before.__pydantic_fields_set__
    student.name = "still validates"


def test_update_rejects_another_class() -> None:
    with pytest.raises(DocumentTypeError, match="Student.update takes a Student or a mapping, got Thesis"):
        ada().update(Thesis())
    student = Thesis(title="a")
    with pytest.raises(PathError, match="Thesis has no field 'year'"):
        student.update(Dissertation(title="b", year=1))
    assert student.title == "a"


def test_update_takes_extra_values() -> None:
    class Loose(BaseDocument, extra="allow"):
        name: str = ""

    loose = Loose(name="a", color="red")
    loose.update(Loose(color="blue", size=3))
    loose.update(shape="round")
    assert loose.model_dump(exclude={"id"}) == {"name": "a", "color": "blue", "size": 3, "shape": "round"}


def test_update_does_not_change_frozen_documents() -> None:
    class Frozen(BaseDocument):
        model_config = ConfigDict(frozen=True)
        a: int = 0
        b: int = 0

    frozen = Frozen()
    with pytest.raises(ValidationError, match="frozen"):
        frozen.update(a=1, b=2)
    assert (frozen.a, frozen.b) == (0, 0)


# --- merge


def test_merge_updates_and_appends() -> None:
    docs = DocumentArray[Thesis]([Thesis(id="1", title="one", pages=1), Thesis(id="2", title="two")])
    first = docs[0]
    other = DocumentArray[Thesis]([Thesis(id="1", title="uno"), Thesis(id="3", title="three")])
    merged = docs.merge(other)
    assert merged is docs
    assert (docs.id, docs.title, docs.pages) == (["1", "2", "3"], ["uno", "two", "three"], [1, 0, 0])
    assert docs[0] is first
    assert docs.by_id("3") is other[1]
    assert other.id == ["1", "3"]


def test_document_in_several_arrays_is_merged_once() -> None:
    """A peer library appends it twice."""
    docs = DocumentArray[Thesis]()
    docs.merge([Thesis(id="1", title="a")]).merge([Thesis(id="2"), Thesis(id="1", pages=2)]).merge([Thesis(id="2")])
    assert docs.id == ["1", "2"]
    assert (docs[0].title, docs[0].pages) == ("a", 2)
    docs.merge([Thesis(id="9", title="x"), Thesis(id="9", pages=7)])
    assert docs.id == ["1", "2", "9"]
    assert (docs[2].title, docs[2].pages) == ("x", 7)


def test_merge_combines_dicts_and_arrays() -> None:
    docs = DocumentArray[Student]([Student(id="1", tags={"a": 1}, papers=[Thesis(id="p")])])
    docs.merge(
        [
            Student(id="1", tags={"b": 2}, papers=[Thesis(id="q")]),
            Student(id="1", tags={"c": 3}, papers=[Thesis(id="q", title="Q")]),
        ]
    )
    assert docs[0].tags == {"a": 1, "b": 2, "c": 3}
    assert docs[0].papers.id == ["p", "q"]
    assert docs[0].papers[1].title == "Q"


def test_merge_with_itself_and_without_ids() -> None:
    class Nameless(BaseDocument):
        id: ClassVar[None] = None
        name: str = ""

    docs = DocumentArray[Nameless]([Nameless(name="a")])
    docs.merge(docs)
    assert len(docs) == 1
    docs.merge([docs[0], Nameless(name="a")])
    assert len(docs) == 2


@pytest.mark.parametrize(
    "others",
    [
        [{"id": "1", "title": "new"}, {"id": "2", "pages": "many"}],
        [Thesis(id="1", title="new"), Thesis(id="3"), Dissertation(id="2", year=3)],
        [Thesis(id="1", title="new"), "no document"],
    ],
)
def test_failed_merge_changes_nothing(others: list[Any]) -> None:
    docs = DocumentArray[Thesis]([Thesis(id="1", title="one"), Thesis(id="2")])
    before, held = copy.deepcopy(docs), list(docs)
    with pytest.raises(QuireError):
        docs.merge(others)
    assert docs.identical(before)
    assert [document is kept for document, kept in zip(docs, held, strict=True)] == [True, True]
