"""Static types of arrays and batches: checked by mypy and pyright, and run as tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.typing import Shape


class Student(BaseDocument):
    name: str
    embedding: Annotated[npt.NDArray[np.float32], Shape(2)]


class School(BaseDocument):
    students: DocumentArray[Student]


class Ranked(BaseDocument):
    name: str
    rank: int


def students() -> DocumentArray[Student]:
    return DocumentArray[Student](Student(name=name, embedding=np.ones(2, np.float32)) for name in ("Ada", "Bo"))


def test_array_items_have_document_type() -> None:
    docs = students()
    assert_type(docs, DocumentArray[Student])
    assert_type(docs[0], Student)
    assert_type(docs[0].name, str)
    assert_type(docs[:1], DocumentArray[Student])
    assert_type(docs[[0, 1]], DocumentArray[Student])
    assert_type(docs[np.array([True, False])], DocumentArray[Student])
    assert_type([doc.name for doc in docs], list[str])
    assert_type(docs.by_id(docs[1].id), Student)
    assert_type(School(students=docs).students[0], Student)


def test_slices_and_queries_keep_array_type() -> None:
    docs = students()
    assert_type(docs.shuffle(seed=0), DocumentArray[Student])
    assert_type(docs.sample(1), DocumentArray[Student])
    assert_type(docs.split(0.5, 0.5), list[DocumentArray[Student]])
    assert_type(docs.batch(2), Iterator[DocumentArray[Student]])
    assert_type(docs.filter(lambda doc: doc.name == "Ada"), DocumentArray[Student])
    assert_type(docs.find(docs[0].embedding).documents[0], Student)
    assert_type(docs + docs, DocumentArray[Student])


def test_stack_and_unstack_keep_document_type() -> None:
    batch = students().stack()
    assert_type(batch, DocumentBatch[Student])
    assert_type(batch[0], Student)
    assert_type(batch[:1], DocumentBatch[Student])
    assert_type([doc.name for doc in batch], list[str])
    assert_type(batch.take([0]), DocumentBatch[Student])
    assert_type(batch.apply(lambda tensor: tensor), DocumentBatch[Student])
    assert_type(batch.to("cpu", dtype="float32"), DocumentBatch[Student])
    assert_type(batch.keys(), list[str])
    assert_type(batch.tensors(), dict[str, Any])
    assert_type(batch.unstack(), DocumentArray[Student])
    assert_type(DocumentBatch[Student](students()), DocumentBatch[Student])
    assert_type(DocumentBatch[Student].concat([batch, batch]), DocumentBatch[Student])


def test_with_columns_has_type_of_class() -> None:
    batch = students().stack()
    ranked = batch.with_columns(Ranked, rank=np.arange(2))
    assert_type(ranked, DocumentBatch[Ranked])
    assert_type(ranked[0].rank, int)
    assert_type(batch.with_columns(name=["Cy", "Di"]), DocumentBatch[Student])


def test_decoding_keeps_document_type() -> None:
    docs = students()
    assert_type(docs.to_json(), str)
    assert_type(docs.to_csv(), str)
    assert_type(DocumentArray[Student].from_json(docs.to_json()), DocumentArray[Student])
    assert_type(DocumentArray[Student].from_ndjson(text=docs.to_ndjson()), DocumentArray[Student])
    assert_type(DocumentArray[Student].from_csv(text=docs.to_csv()), DocumentArray[Student])
    assert_type(DocumentBatch[Student].from_dict(docs.to_dict()), DocumentBatch[Student])
    assert_type(Student.from_json(docs[0].to_json()), Student)


if TYPE_CHECKING:

    def mistakes(docs: DocumentArray[Student], school: School, anything: Any) -> None:
        """Each line is an error for both type checkers, which also report unused ignores."""
        docs.stack().with_columns(int, rank=[1])  # type: ignore[type-var]  # pyright: ignore[reportArgumentType, reportCallIssue]
        docs.append(school)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        DocumentArray[int](anything)  # type: ignore[type-var]  # pyright: ignore[reportInvalidTypeArguments]


def test_parallel_methods_return_type_of_function() -> None:
    docs, batch = students(), students().stack()
    assert_type(docs.map(lambda doc: doc.name), Iterator[str])
    assert_type(docs.map_batch(lambda part: part[0], 2), Iterator[Student])
    assert_type(batch.map_batch(len, 1, num_worker=1), Iterator[int])
    assert_type(docs.apply(lambda doc: doc, num_workers=1, backend="thread"), DocumentArray[Student])
    assert_type(docs.apply_batch(lambda part: part, 2, pool=None), DocumentArray[Student])
