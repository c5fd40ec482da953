"""Functions marked `batched`, which get a whole column."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch

from quire import DocumentBatch, Text
from quire.data import MultiModalDataset, batched
from quire.data._preprocessing import Step
from quire.errors import FunctionError
from tests.data.sample_students import (
    Paper,
    Student,
    Thesis,
    add_to,
    double_all,
    incomplete_students,
    student,
    students,
)

pytestmark = pytest.mark.needs("torch")


def prepared(path: Any, function: Any, documents: Any = None, *, mark: bool = True, **options: Any) -> Any:
    """The batch after one batched function; the source is as it was."""
    documents = students(4) if documents is None else documents
    before = copy.deepcopy(documents)
    ds = MultiModalDataset[Student](documents, {path: batched(function) if mark else function}, **options)
    batch = ds.__getitems__(range(4))
    assert ds.__getitems__(range(4)) == batch
    assert documents.identical(before)
    return batch


def test_batched_function_replaces_a_tensor_column() -> None:
    assert prepared("photo", double_all, mark=False).photo[:, 0, 0].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert prepared("photo", lambda photo: photo.flatten(1)).photo.shape == (4, 6)
    assert str(prepared("photo", lambda photo: photo.flatten(1)).schema.by_name["photo"]) == "TorchTensor"


def test_batched_function_gets_the_framework_of_the_batch() -> None:
    batch = prepared("vector", lambda vector: vector * 2)
    assert batch.vector[0].tolist() == [2.0, 4.0, 6.0]
    assert isinstance(prepared("vector", lambda vector: vector.numpy() * 2).vector, torch.Tensor)


def test_batched_function_gets_numbers_as_tensor() -> None:
    assert prepared("age", lambda age: age + 1).age.tolist() == [1, 2, 3, 4]
    halves = prepared("age", lambda age: age / 2)
    assert halves.age.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert str(halves.schema.by_name["age"]) == "float"
    assert prepared("age", lambda age: torch.nn.functional.one_hot(age, 4)).age.shape == (4, 4)


def test_batched_function_gets_texts_as_list() -> None:
    assert prepared("name", lambda names: [name.upper() for name in names]).name[0] == "NAME 0"
    assert prepared("name", lambda names: [len(name) for name in names]).name.tolist() == [6] * 4
    assert prepared("name", lambda names: torch.ones(len(names), 2)).name.shape == (4, 2)
    assert prepared("name", lambda names: (name for name in names)).name == students(4).name


def test_batched_function_gets_nested_documents_as_batch() -> None:
    assert prepared("thesis", lambda thesis: thesis.title).thesis.text[0] == "title 0"
    assert prepared("thesis", lambda thesis: thesis.pages).thesis.tolist() == [0, 1, 2, 3]
    texts = prepared("name", lambda names: DocumentBatch[Text](Text(text=name) for name in names))
    assert texts.name.text == students(4).name
    assert prepared("thesis", list).thesis.pages.tolist() == [0, 1, 2, 3]


def test_batched_function_gets_the_whole_batch() -> None:
    assert type(prepared("", lambda batch: batch.thesis)) is DocumentBatch[Thesis]
    assert prepared("", lambda batch: batch.take([3, 2, 1, 0])).age.tolist() == [3, 2, 1, 0]
    assert prepared("", lambda batch: list(batch)[::-1]).age.tolist() == [3, 2, 1, 0]


def test_batched_function_changes_a_batch_in_place() -> None:
    def whole(batch: Any) -> None:
        batch.age = batch.age + 1
        batch.photo.zero_()
        batch.tags[0]["new"] = True
        batch.thesis.pages = [9, 9, 9, 9]

    def first(names: list[Any]) -> None:
        names[0] = "changed"

    def first_tag(tags: list[Any]) -> None:
        tags[0]["new"] = True

    batch = prepared("", whole)
    assert batch.age.tolist() == [1, 2, 3, 4]
    assert batch.photo.sum() == 0
    assert batch.tags[0] == {"numbers": [0], "new": True}
    assert batch.thesis.pages.tolist() == [9] * 4
    assert prepared("name", first).name[:2] == ["changed", "name 1"]
    assert prepared("tags", first_tag).tags[0] == {"numbers": [0], "new": True}


def test_batched_function_changes_tensors_in_place() -> None:
    def darken(photo: torch.Tensor) -> None:
        photo *= 0.5

    assert prepared("photo", darken).photo[:, 0, 0].tolist() == [0.0, 0.5, 1.0, 1.5]


def test_batched_function_gets_elements_of_arrays_as_one_column() -> None:
    assert prepared("papers.vector", lambda vectors: vectors + 1).papers.vector.tolist() == [[1, 1], [1, 1], [2, 2]]
    assert prepared("papers", lambda papers: papers).papers.offsets.tolist() == [0, 0, 1, 3, 3]

    def move(papers: Any) -> None:
        papers.vector = papers.vector + 1

    assert prepared("papers", move).papers.vector.tolist() == [[1, 1], [1, 1], [2, 2]]
    assert prepared(Paper, lambda papers: papers.take([2, 1, 0])).papers.vector.tolist() == [[1, 1], [0, 0], [0, 0]]


def test_batched_results_of_missing_rows_are_dropped() -> None:
    source = incomplete_students(4)
    batch = prepared("grade", lambda grades: grades + 1, source, missing="mask")
    assert batch.validity("grade").tolist() == [True, False, True, False]
    assert [document.grade for document in batch] == [1.0, None, 2.0, None]
    assert batch.grade.tolist() == [1.0, 0.0, 2.0, 0.0]
    batch = prepared("spare", lambda spare: torch.ones(len(spare), 2), source, missing="mask")
    assert batch.validity("spare").tolist() == [True, False, False, True]
    assert str(batch.schema.by_name["spare"]) == "TorchTensor | None"
    for function in (lambda grades: grades.tolist(), lambda grades: [f"{grade}" for grade in grades.tolist()]):
        listed = prepared("grade", function, source, missing="mask")
        assert listed.validity("grade").tolist() == [True, False, True, False]


def test_batched_function_gets_mixed_shapes_by_policy() -> None:
    documents = [student(i, shaped=torch.ones(i + 1)) for i in range(3)]
    shapes: list[Any] = []

    @batched
    def look(shaped: torch.Tensor) -> None:
        shapes.append(shaped.shape)

    @batched
    def look_at_all(batch: Any) -> None:
        shapes.append(batch.shaped.shape)

    for steps in ({"shaped": look}, {"": look_at_all}):
        assert MultiModalDataset[Student](documents, steps, shapes="pad").__getitems__([0, 2]).shaped.shape == (2, 3)
        with pytest.raises(FunctionError, match="mixed shapes"):
            MultiModalDataset[Student](documents, steps).__getitems__([0, 2])
    assert shapes == [(2, 3), (2, 3)]
    one_shape = {"shaped": [torch.sum, look]}
    assert MultiModalDataset[Student](documents, one_shape).__getitems__([0, 2]).shaped.tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("path", "function", "message"),
    [
        ("name", lambda names: names[:2], "Student.name: the batch has 4 rows, and the function gave 2"),
        ("photo", lambda photo: photo[:3], "Student.photo: the batch has 4 rows, and the function gave 3"),
        ("thesis", lambda thesis: thesis[:1], "Student.thesis: the batch has 4 rows, and the function gave 1"),
        ("name", lambda _: "abcd", "a batched function gives a tensor, a batch or a list, not str 'abcd'"),
        ("age", lambda _: 4, "a batched function gives a tensor, a batch or a list, not int 4"),
        ("name", lambda _: [1, "2", 3, 4], "Student.name: .* row 1 of the batch gives str '2'"),
        ("tree.children.name", lambda names: names, "held as objects, and has no columns for a batched function"),
        ("", lambda batch: batch.age, "must give documents"),
        ("name", lambda _: 1 // 0, "failed on the batch of documents 3, 0, 1, 2: ZeroDivisionError"),
    ],
    ids=["short list", "short tensor", "short batch", "text", "number", "mixed", "recursive", "whole", "fails"],
)
def test_wrong_results_of_batched_functions_raise(path: str, function: Any, message: str) -> None:
    ds = MultiModalDataset[Student](students(4), {path: batched(function)})
    with pytest.raises(FunctionError, match=message):
        ds.__getitems__([3, 0, 1, 2])


def test_batched_marks_functions_partials_and_methods() -> None:
    partial = batched(functools.partial(add_to, number=1.0))
    for function in (partial, batched(torch.nn.Flatten(1)), batched(torch.sigmoid), batched(torch.ones(1).add)):
        assert Step(("photo",), (function,)).is_batched
        assert len(MultiModalDataset[Student](students(4), {"photo": function}).__getitems__(range(4)).photo) == 4
    copied = pickle.loads(pickle.dumps(batched(torch.sigmoid)))
    ds = MultiModalDataset[Student](students(2), {"photo": copied})
    assert ds[0].photo[0, 0] == 0.5
    assert batched(double_all) is double_all
    ds = MultiModalDataset[Student](students(2), {"photo": functools.partial(double_all)})
    assert ds[1].photo[0, 0] == 2.0
