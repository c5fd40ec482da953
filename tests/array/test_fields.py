"""Columns of arrays: reading and setting one field of every document."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, Text
from quire.array import NestedColumn
from quire.errors import ColumnError, PathError
from quire.typing import NdArray, float32


class Author(BaseDocument):
    name: str = ""
    age: int = 0


class Thesis(BaseDocument):
    title: str = ""
    authors: DocumentArray[Author] = []


class Student(BaseDocument):
    name: str = ""
    score: float = 0.0
    active: bool = False
    vector: NdArray[float32, 2] | None = None
    words: list[float] = []
    anything: Any = None
    thesis: Thesis = Thesis()
    spare: Thesis | None = None
    papers: DocumentArray[Thesis] = []
    drafts: DocumentArray[Thesis] | None = None
    append: int = 0
    index: int = 0
    label: Text | None = None


def thesis(title: str, *names: str) -> Thesis:
    return Thesis(title=title, authors=[Author(name=name) for name in names])


def students() -> DocumentArray[Student]:
    return DocumentArray[Student](
        [
            Student(name="Ada", thesis=thesis("A", "x"), papers=[thesis("P", "p", "q"), thesis("Q")]),
            Student(name="Bob", thesis=thesis("B"), spare=thesis("S", "s"), drafts=[thesis("D", "d")]),
        ]
    )


# --- reading


def test_attribute_and_path_read_the_same_column() -> None:
    docs = students()
    assert docs.name == docs["name"] == ["Ada", "Bob"]
    assert docs.thesis.title == docs["thesis.title"] == docs["thesis"]["title"] == ["A", "B"]
    assert docs[""] is docs


def test_column_of_nested_documents_is_an_array() -> None:
    docs = students()
    assert type(docs.thesis) is DocumentArray[Thesis]
    assert docs.thesis[0] is docs[0].thesis


def test_column_of_optional_documents_has_columns() -> None:
    """In another library, a column of an optional document is a plain list."""
    docs = students()
    assert isinstance(docs.spare, NestedColumn)
    assert docs.spare.title == [None, "S"]
    assert docs.spare.authors.name == docs["spare.authors.name"] == [None, ["s"]]
    assert list(docs.spare) == [None, docs[1].spare]
    assert (len(docs.spare), docs.spare[1] is docs[1].spare) == (2, True)
    full = docs[1:]
    assert isinstance(full.spare, NestedColumn)


def test_column_of_arrays_has_a_list_for_each_row() -> None:
    docs = students()
    assert docs.papers.title == [["P", "Q"], []]
    assert docs.papers.authors.name == docs["papers.authors.name"] == [[["p", "q"], []], []]
    assert docs.drafts.title == [None, ["D"]]
    assert docs.drafts.authors.name == [None, [["d"]]]
    assert docs.thesis.authors.name == [["x"], []]
    assert docs.papers[0] is docs[0].papers


def test_columns_of_empty_array_are_empty() -> None:
    docs = DocumentArray[Student]()
    assert (docs.name, docs.thesis.title, docs.spare.title, docs.papers.authors.name) == ([], [], [], [])


def test_methods_take_precedence_over_fields() -> None:
    docs = students()
    docs.append(Student(name="Cyd", append=7, index=8))
    assert callable(docs.index)
    assert docs["append"] == [0, 0, 7]
    docs["append"] = [1, 2, 3]
    assert [doc.append for doc in docs] == [1, 2, 3]
    with pytest.raises(
        PathError, match=r"'append' is a method of DocumentArray\[Student\]: set the column by docs\['append'\]"
    ):
        docs.append = [1, 2, 3]
    docs["index"] = [5, 6, 7]
    assert docs.index(docs[1]) == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nmae", "Student has no field 'nmae'.*Did you mean 'name'"),
        ("thesis.titel", "Thesis has no field 'titel'.*Did you mean 'title'"),
        ("papers.authors.nme", "Author has no field 'nme'"),
        ("name.first", "Student.name is str, which has no fields"),
        ("thesis..title", "is not a path: a name is empty"),
        (".", "is not a path"),
    ],
)
def test_unknown_path_raises_path_error(path: str, message: str) -> None:
    docs = students()
    before = copy.deepcopy(docs)
    with pytest.raises(PathError, match=message):
        docs[path]
    with pytest.raises(PathError, match=message):
        docs[path] = ["a", "b"]
    assert docs.identical(before)


def test_unknown_attribute_raises_path_error() -> None:
    docs = students()
    assert not hasattr(docs, "nmae")
    assert not hasattr(docs, "_private")
    assert not hasattr(docs.spare, "titel")
    with pytest.raises(AttributeError):
        docs.spare.titel  # noqa: B018


def test_nested_column_copies_and_pickles() -> None:
    column = students().spare
    for created in (copy.copy(column), copy.deepcopy(column), pickle.loads(pickle.dumps(column))):
        assert created == column
        assert created.title == [None, "S"]
    assert column == [None, column[1]]
    assert column != [None, None]
    assert repr(column) == "<spare: 2 x Thesis | None>"


# --- setting


def test_set_column_of_plain_field() -> None:
    docs = students()
    docs.name = ["Eve", "Fay"]
    docs["score"] = iter([1, 2.5])
    docs.active = (True, "yes")
    assert (docs.name, docs.score, docs.active) == (["Eve", "Fay"], [1.0, 2.5], [True, True])
    assert type(docs[0].score) is float
    assert "score" in docs[0].model_fields_set


def test_set_column_of_nested_field() -> None:
    docs = students()
    docs.thesis.title = ["X", "Y"]
    assert docs["thesis.title"] == ["X", "Y"]
    docs["thesis.title"] = ["Z", "W"]
    assert [doc.thesis.title for doc in docs] == ["Z", "W"]
    docs.spare.title = [None, "T"]
    assert docs.spare.title == [None, "T"]
    docs["spare.authors.name"] = [None, ["u"]]
    assert docs[1].spare.authors[0].name == "u"


def test_set_column_through_arrays() -> None:
    docs = students()
    docs.papers.title = [["X", "Y"], []]
    assert [paper.title for paper in docs[0].papers] == ["X", "Y"]
    docs["papers.authors.age"] = [[[30, 40], []], []]
    assert docs.papers.authors.age == [[[30, 40], []], []]
    docs.thesis.authors.name = [["k"], []]
    assert docs[0].thesis.authors[0].name == "k"


def test_set_column_of_documents_and_arrays() -> None:
    docs = students()
    new = thesis("N")
    docs.thesis = [new, {"title": "M"}]
    assert docs[0].thesis is new
    assert docs[1].thesis.title == "M"
    docs.papers = [[thesis("K")], DocumentArray[Thesis]()]
    assert type(docs[0].papers) is DocumentArray[Thesis]
    docs.spare = [None, None]
    assert docs.spare.title == [None, None]
    docs.label = ["a", None]
    assert docs.label.text == ["a", None]


def test_set_column_from_numpy() -> None:
    docs = students()
    docs.score = np.array([1, 2], np.float32)
    docs.active = np.array([True, False])
    docs["append"] = np.array([3, 4], np.int8)
    docs.name = np.array(["Gil", "Hal"])
    assert (docs.score, docs.active, docs["append"], docs.name) == ([1.0, 2.0], [True, False], [3, 4], ["Gil", "Hal"])
    assert {type(value) for name in ("score", "active", "append", "name") for value in docs[name]} == {
        *(float, bool, int, str),
    }
    matrix = np.arange(4, dtype=np.float32).reshape(2, 2)
    docs.vector = matrix
    matrix[0, 0] = 9
    assert docs[0].vector.tolist() == [9, 1]  # a row of the matrix, not a copy
    docs.words = np.ones((2, 3))
    assert docs.words == [[1.0] * 3] * 2
    docs.anything = np.ones((2, 3))
    assert docs[0].anything.shape == (3,)
    docs["papers.authors.age"] = [[np.array([1, 2]), []], []]
    assert docs.papers.authors.age == [[[1, 2], []], []]


@pytest.mark.needs("torch")
def test_set_column_from_torch() -> None:
    import torch

    docs = students()
    docs.score = torch.tensor([0.5, 1.5])
    docs["append"] = torch.tensor([1, 2])
    docs.vector = torch.ones(2, 2)
    assert (docs.score, docs["append"]) == ([0.5, 1.5], [1, 2])
    assert {type(value) for value in [*docs.score, *docs["append"]]} == {float, int}
    assert isinstance(docs[0].vector, np.ndarray)


BAD = [
    ("name", ["only one"], "Student.name: there are 2 documents, got 1 values"),
    ("name", ["a", "b", "c"], "there are 2 documents, got 3 values"),
    ("name", "ab", "a column is set from a sequence"),
    ("name", 3, "a column is set from a sequence"),
    ("name", {"a": 1, "b": 2}, "a column is set from a sequence"),
    ("score", np.float64(3), "a column is set from a sequence"),
    ("name", ["a", 3], "Student.name, row 1: Input should be a valid string"),
    ("score", [1.0, "high"], "Student.score, row 1: "),
    ("vector", np.zeros((2, 3), np.float32), r"row 0: expected NdArray float32 \(2,\), got float32 \(3,\)"),
    ("vector", np.zeros((2, 2)), r"row 0: expected NdArray float32 \(2,\), got float64"),
    ("vector", np.zeros((3, 2), np.float32), "there are 2 documents, got 3 values"),
    ("thesis", [thesis("x"), Author()], "Student.thesis, row 1"),
    ("papers", [[thesis("x")], [Author()]], "Student.papers, row 1"),
    ("spare.title", ["a", "b"], "row 0: there is no document to hold the value; pass None in this row"),
    ("papers.title", [["a"], []], "row 0: there are 2 documents, got 1 values"),
    ("papers.title", [["a", "b"], None], "row 1: a column is set from a sequence"),
    ("papers.authors.name", [[["a", 3], []], []], "row 1: Input should be a valid string"),
]


@pytest.mark.parametrize(("path", "values", "message"), BAD, ids=[f"{path}-{i}" for i, (path, _, _) in enumerate(BAD)])
def test_rejected_column_changes_nothing(path: str, values: Any, message: str) -> None:
    docs = students()
    before = copy.deepcopy(docs)
    with pytest.raises(ColumnError, match=message) as raised:
        docs[path] = values
    assert isinstance(raised.value, ValueError)
    assert docs.identical(before)


def test_set_column_rejects_empty_path() -> None:
    with pytest.raises(PathError, match="the empty path"):
        students()[""] = [Student(), Student()]


def test_set_column_of_empty_array() -> None:
    docs = DocumentArray[Student]()
    docs.name = []
    docs.vector = np.zeros((0, 2), np.float32)
    with pytest.raises(ColumnError):
        docs.name = ["a"]
