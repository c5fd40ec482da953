"""Keywords and metrics under the names of DocArray, where they mean the same."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.compat import Document
from quire.errors import OptionError, QueryError, UnknownOptionError
from quire.storage import open_dataset, write_dataset
from quire.typing import AnyTensor, NdArray, TorchTensor

pytestmark = pytest.mark.needs("pyarrow", "torch")


class Passage(BaseDocument):
    vector: NdArray
    other: AnyTensor | None = None


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
