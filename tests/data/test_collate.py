"""collate_fn: from the class and from an instance, here and in other processes."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset
from quire.errors import ColumnError, DocumentTypeError
from tests.data.sample_students import Graduate, Student, Thesis, embed_title, student, students
from tests.strategies import Node, Tree, laws, nodes, orders, trees

pytestmark = pytest.mark.needs("torch")
Students = MultiModalDataset[Student]


def test_collate_returns_a_batch_unchanged() -> None:
    batch = students(2).stack()
    assert Students.collate_fn(batch) is batch


def test_collate_stacks_documents() -> None:
    docs = students(4)
    dataset = Students(docs)
    for collate in (Students.collate_fn, dataset.collate_fn, MultiModalDataset.collate_fn):
        for documents in (docs, list(docs), list(dataset)):
            batch = collate(documents)
            assert type(batch) is DocumentBatch[Student]
            assert batch.identical(dataset.__getitems__(range(4)))


def test_collate_converts_numbers_and_arrays_to_torch() -> None:
    batch = Students.collate_fn(students(4))
    assert batch.age.dtype == torch.int64
    assert batch.vector.dtype == torch.float32
    assert batch.thesis.pages.tolist() == [0, 1, 2, 3]
    assert batch.validity("grade").tolist() == [True] * 4
    assert type(batch.thesis) is DocumentBatch[Thesis]
    assert type(batch.papers.flat).document_type.__name__ == "Paper"


def test_collate_stacks_documents_changed_by_functions() -> None:
    dataset = Students(students(4), {"thesis.title": embed_title, "name": len, "grade": str, "papers.venue": len})
    batch = Students.collate_fn([dataset[i] for i in range(4)])
    assert batch == dataset.__getitems__(range(4))
    assert str(batch.schema) == str(dataset.__getitems__(range(4)).schema)
    assert batch.thesis.title.shape == (4, 4)
    assert batch.papers.venue.tolist() == [7, 7, 7]


def test_collate_concatenates_batches_and_datasets() -> None:
    dataset = Students(students(4), {"name": len})
    parts = [dataset.__getitems__([0, 1]), dataset.__getitems__([2, 3])]
    assert Students.collate_fn(parts).identical(dataset.__getitems__(range(4)))
    assert Students.collate_fn(dataset[1:3]).age.tolist() == [1, 2]


def test_collate_of_nothing_is_an_empty_batch() -> None:
    batch = Students.collate_fn([])
    assert type(batch) is DocumentBatch[Student]
    assert len(batch) == len(batch.age) == 0


def test_collate_stacks_subclasses() -> None:
    mixed = Students.collate_fn([student(0, Graduate, honours={"a": 1}), student(1)])
    assert type(mixed) is DocumentBatch[Student]
    assert mixed[0].honours == {"a": 1}
    assert type(Students.collate_fn([student(0, Graduate)])) is DocumentBatch[Graduate]


def test_collate_rejects_other_values() -> None:
    with pytest.raises(DocumentTypeError, match="collate_fn takes documents or batches, got int 3"):
        Students.collate_fn([3])
    documents = [student(i, shaped=torch.ones(i + 1)) for i in range(2)]
    with pytest.raises(ColumnError, match="Student.shaped: mixed shapes"):
        Students.collate_fn(documents)
    first, second = Students(students(2), {"name": lambda name: len(name) if name == "name 1" else name})
    with pytest.raises(ColumnError, match=r"Student.name: .* document 1 of the batch \(id id1\) gives int 6"):
        Students.collate_fn([first, second])


def test_collate_pickles_without_the_documents() -> None:
    for collate in (Students.collate_fn, Students(students(1)).collate_fn):
        data = pickle.dumps(collate)
        assert len(data) < 800
        assert pickle.loads(data).document_type is Student


def test_collate_in_another_process() -> None:
    docs = students(3)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        batch = pool.apply(Students.collate_fn, (list(docs),))
    assert batch.identical(Students.collate_fn(docs))


# --- laws


def same_documents(batch: Any, documents: DocumentArray[Any]) -> bool:
    """Whether the rows are these documents, in whatever framework the batch is."""
    return bool(batch.to_framework("numpy").unstack().identical(documents))


@laws
@given(st.data())
def test_batches_are_the_documents_stacked(data: st.DataObject) -> None:
    """For every kind of field, any choice of rows, any framework."""
    docs = DocumentArray[Tree](data.draw(st.lists(trees(rank=1), max_size=4)))
    rows = data.draw(orders(len(docs)))
    framework = data.draw(st.sampled_from(["torch", "numpy"]))
    dataset = MultiModalDataset[Tree](docs, framework=framework, shapes="ragged", missing="mask", allow_empty=True)
    batch = dataset.__getitems__(rows)
    assert same_documents(batch, docs[rows])
    assert same_documents(pickle.loads(pickle.dumps(dataset)).__getitems__(rows), docs[rows])
    if framework == "numpy":
        assert [document.identical(docs[i]) for i, document in enumerate(dataset)] == [True] * len(docs)


@laws
@given(st.lists(trees(rank=1), max_size=3))
def test_functions_that_change_nothing_change_nothing(docs: list[Tree]) -> None:
    documents = DocumentArray[Tree](docs)
    steps = {"branch.leaf.text": str, "branches": lambda branches: branches, "": lambda document: document}
    dataset = MultiModalDataset[Tree](documents, steps, shapes="ragged", missing="mask", allow_empty=True)
    batch = dataset.__getitems__(range(len(docs)))
    assert same_documents(batch, documents)


@laws
@given(st.lists(nodes(), max_size=3))
def test_recursive_documents_are_unchanged(docs: list[Node]) -> None:
    documents = DocumentArray[Node](docs)
    steps = {"children.name": lambda _: None, "parent.name": str}
    dataset = MultiModalDataset[Node](documents, steps, allow_empty=True)
    assert same_documents(dataset.__getitems__(range(len(docs))), documents)
    assert same_documents(MultiModalDataset[Node].collate_fn(documents), documents)


def test_class_without_fields_makes_batches() -> None:
    class Nothing(BaseDocument):
        pass

    dataset = MultiModalDataset[Nothing]([Nothing(), Nothing()])
    assert len(dataset.__getitems__(np.array([0, 1]))) == 2
