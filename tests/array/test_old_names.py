"""Keywords and metrics under the names of DocArray, where they mean the same."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.compat import Document
from quire.errors import DecodeError, OptionError, PathError, QueryError, UnknownOptionError
from quire.storage import open_dataset, write_dataset
from quire.typing import AnyTensor, NdArray, TorchTensor

pytestmark = pytest.mark.needs("pandas", "pyarrow", "torch")


class Passage(BaseDocument):
    vector: NdArray
    other: AnyTensor | None = None


class Part(BaseDocument):
    number: int = 0
    name: str = ""


class Book(BaseDocument):
    title: str
    part: Part = Part()


class Page(BaseDocument):
    passage: Passage
    vector__of__page: NdArray | None = None


def framework_of(batch: DocumentBatch[Passage], field: str) -> str:
    column: Any = batch.column(field)
    return str(column.framework.name)


def passages() -> DocumentArray[Passage]:
    return DocumentArray[Passage](Passage(id=f"p{i}", vector=np.eye(3)[i], other=np.ones(2)) for i in range(3))


def test_tensor_type_of_an_array_is_the_default_of_stack() -> None:
    docs = DocumentArray[Passage](passages(), tensor_type=TorchTensor)
    for array in (docs, docs[1:], docs.copy(), pickle.loads(pickle.dumps(docs))):
        assert framework_of(array.stack(), "other") == "torch"
        assert framework_of(array.stack("numpy"), "other") == "numpy"
    assert docs == passages()
    assert framework_of(passages().stack(), "other") == "numpy"


def test_tensor_type_of_stack_and_of_a_batch_is_a_framework() -> None:
    docs = passages()
    for batch in (docs.stack(tensor_type=TorchTensor), DocumentBatch[Passage](docs, tensor_type=TorchTensor)):
        assert framework_of(batch, "vector") == "torch"
    assert framework_of(docs.stack(tensor_type=AnyTensor), "vector") == "numpy"
    with pytest.raises(OptionError, match="two names of one option"):
        docs.stack("torch", tensor_type=TorchTensor)
    with pytest.raises(OptionError, match="such as TorchTensor, got str"):
        DocumentArray[Passage](docs, tensor_type="torch")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["array", "batch", "dataset"])
def test_find_takes_the_old_names_of_field_and_metric(kind: str, tmp_path: Path) -> None:
    docs: Any = passages()
    if kind == "batch":
        docs = docs.stack()
    elif kind == "dataset":
        write_dataset(docs, tmp_path / "docs")
        docs = open_dataset(tmp_path / "docs", Passage)
    query = np.array([0.1, 2.0, 0.0])
    for name in ("field", "embedding_field", "search_field"):
        for metric, old in (("cosine", "cosine_sim"), ("euclidean", "euclidean_dist")):
            expected = docs.find(query, "vector", metric=metric, limit=2)
            result = docs.find(query, **{name: "vector"}, metric=old, limit=2)
            assert result.documents.id == expected.documents.id == ["p1", "p0"]
            assert result.scores.tolist() == expected.scores.tolist()
            [result] = docs.find_batch(query[None], **{name: "vector"}, metric=old, limit=2)
            assert result.documents.id == ["p1", "p0"]
    with pytest.raises(OptionError, match="embedding_field and search_field: other names of field"):
        docs.find(query, embedding_field="vector", search_field="vector")
    with pytest.raises(OptionError, match="Pass one of them"):
        docs.find(query, "vector", search_field="vector")
    with pytest.raises(UnknownOptionError, match="Did you mean 'search_field'"):
        docs.find(query, search_feild="vector")
    with pytest.raises(QueryError, match="'sqeuclidean_dist' is not a metric"):
        docs.find(query, "vector", metric="sqeuclidean_dist")


def test_find_of_documents_takes_the_old_names_of_field() -> None:
    docs: Any = DocumentArray[Document]([Document(id=str(i), tensor=np.eye(3)[i]) for i in range(3)])
    assert docs.find(np.eye(3)[2], search_field="tensor", limit=1).documents.id == ["2"]
    assert [result.documents.id for result in docs.find(np.eye(3), embedding_field="tensor", limit=1)] == [
        ["0"],
        ["1"],
        ["2"],
    ]


@pytest.mark.parametrize("kind", ["array", "batch", "dataset"])
def test_find_takes_the_path_of_a_nested_field_as_in_docarray(kind: str, tmp_path: Path) -> None:
    pages = DocumentArray[Page](
        Page(id=passage.id, passage=passage, vector__of__page=np.eye(3)[2 - row])
        for row, passage in enumerate(passages())
    )
    docs: Any = pages
    if kind == "batch":
        docs = pages.stack()
    elif kind == "dataset":
        write_dataset(pages, tmp_path / "pages")
        docs = open_dataset(tmp_path / "pages", Page)
    for field in ("passage.vector", "passage__vector"):
        assert docs.find(np.eye(3)[2], field, limit=1).documents.id == ["p2"]
        assert docs.find(np.eye(3)[2], search_field=field, limit=1).documents.id == ["p2"]
    # A field of this name is that field.
    assert docs.find(np.eye(3)[2], "vector__of__page", limit=1).documents.id == ["p0"]
    with pytest.raises(PathError, match="has no field 'vectr'"):
        docs.find(np.eye(3)[2], "passage__vectr")


def test_error_about_a_keyword_of_find_names_the_filter_of_documents() -> None:
    docs: Any = DocumentArray[Document]([Document(embedding=np.eye(3)[0])])
    with pytest.raises(UnknownOptionError, match="Did you mean 'filter'"):
        docs.find(np.eye(3)[0], filters={"text": "a"})


def test_columns_of_tables_have_the_paths_of_docarray() -> None:
    rows = [("t", 1, "x"), ("u", 2, "y")]
    header = ("title", "part__number", "part__name")
    text = "\n".join([",".join(header), *(f"{title},{number},{name}" for title, number, name in rows)]) + "\n"
    frame = pd.DataFrame(rows, columns=list(header))
    expected = Book(title="u", part=Part(number=2, name="y"))
    for docs in (
        DocumentArray[Book].from_csv(text=text),
        DocumentArray[Book].from_csv(text=text, extra="ignore"),
        DocumentArray[Book].from_dataframe(frame),
        DocumentBatch[Book].from_csv(text=text).unstack(),
        DocumentBatch[Book].from_dataframe(frame).unstack(),
    ):
        assert docs[1] == expected
    with pytest.raises(DecodeError, match="has no column 'part__nmae'. Did you mean 'part.name'"):
        DocumentArray[Book].from_csv(text="title,part__nmae\na,b\n")
    with pytest.raises(DecodeError, match="the column 'part.name' is there twice"):
        DocumentArray[Book].from_csv(text="title,part__name,part.name\na,b,c\n")


def test_unknown_columns_that_a_class_collects_keep_their_names() -> None:
    [document] = DocumentArray[Document].from_csv(text="text,part__name\na,b\n")
    assert document.tags == {"part__name": "b"}
