"""Nearest neighbours equal a brute-force search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire import BaseDocument, DocumentArray, Text
from quire.errors import PathError, QueryError
from quire.typing import AnyTensor, NdArray
from tests.strategies import laws


class Item(BaseDocument):
    embedding: AnyTensor | None = None
    other: NdArray | None = None
    title: Text | None = None
    texts: DocumentArray[Text] = []


def items(vectors: Any) -> DocumentArray[Item]:
    return DocumentArray[Item]([Item(embedding=vector) for vector in vectors])


def brute_force(rows: Any, query: Any, metric: str) -> list[tuple[float, int]]:
    """Return scores and positions in plain Python, best first, ties by position."""
    scored = []
    for position, row in enumerate(np.asarray(rows, np.float64)):
        dot = float(sum(a * b for a, b in zip(row, query, strict=True)))
        if metric == "euclidean":
            score = float(sum((a - b) ** 2 for a, b in zip(row, query, strict=True))) ** 0.5
        elif metric == "cosine":
            lengths = float(np.sqrt(np.sum(row**2)) * np.sqrt(np.sum(np.square(query))))
            score = dot / lengths if lengths else 0.0
        else:
            score = dot
        scored.append((score if metric == "euclidean" else -score, position))
    return [(abs(key) if metric == "euclidean" else -key, position) for key, position in sorted(scored)]


numbers = st.integers(-4, 4).map(float)
METRICS = ["cosine", "dot", "euclidean"]


@laws
@given(
    hnp.arrays(np.float64, st.tuples(st.integers(0, 12), st.just(3)), elements=numbers),
    hnp.arrays(np.float64, st.tuples(st.integers(0, 4), st.just(3)), elements=numbers),
    st.sampled_from(METRICS),
    st.integers(0, 15),
)
def test_find_equals_brute_force(rows: Any, queries: Any, metric: Any, limit: int) -> None:
    docs = items(rows)
    for found_in in (docs, docs.stack()):
        result = found_in.find_batch(queries, metric=metric, limit=limit)
        assert len(result) == len(queries)
        for query, (documents, scores) in zip(queries, result, strict=True):
            expected = brute_force(rows, query, metric)[:limit]
            np.testing.assert_allclose(scores, [score for score, _ in expected], atol=1e-12)
            if metric != "cosine":  # exact numbers, so that ties are ties
                assert documents.id == [docs[position].id for _, position in expected]


def test_find_returns_documents_and_scores() -> None:
    docs = items(np.eye(3))
    result = docs.find([0, 1, 0.5])
    assert type(result.documents) is DocumentArray[Item]
    assert result.documents[0] is docs[1]
    assert [len(result.documents), result.scores.shape] == [3, (3,)]
    documents, scores = docs.stack().find([0, 1, 0.5], limit=1)
    assert (documents.id, scores.shape) == ([docs[1].id], (1,))


def test_find_breaks_ties_by_position() -> None:
    docs = items([[float(row % 3), 0.0] for row in range(300)])  # more than a sort of few does in order by chance
    expected = sorted(range(300), key=lambda row: -(row % 3))
    for limit in (1, 2, 150, 299, 300, 400):
        result = docs.find([1.0, 0.0], metric="dot", limit=limit).documents
        assert result.id == [docs[row].id for row in expected[:limit]]


def test_find_skips_rows_without_vector() -> None:
    docs = items([None, [1.0, 0.0], None, [0.0, 1.0]])
    for rows in (docs, docs.stack()):
        result = rows.find([0.0, 1.0], limit=10)
        assert result.documents.id == [docs[3].id, docs[1].id]
    nothing = items([None, None])
    for rows in (nothing, nothing.stack(), DocumentArray[Item](), DocumentArray[Item]().stack()):
        result = rows.find([0.0, 1.0])
        assert (len(result.documents), result.scores.shape) == (0, (0,))


@pytest.mark.parametrize("metric", METRICS)
def test_find_sorts_nan_last(metric: Any) -> None:
    docs = items([[np.nan, 1.0], [1.0, 1.0], [np.nan, np.nan], [-1.0, -1.0]])
    assert docs.find([1.0, 1.0], metric=metric, limit=2).documents.id == [docs[1].id, docs[3].id]
    assert len(docs.find([1.0, 1.0], metric=metric, limit=2).documents) == 2


@pytest.mark.parametrize("metric", METRICS)
def test_find_with_infinities_does_not_warn(metric: Any) -> None:
    docs = items([[np.inf, 1.0], [1.0, 1.0], [1e308, 1e308], [-np.inf, np.inf]])
    assert len(docs.find([np.inf, 1e308], metric=metric, limit=4).documents) == 4
    assert len(docs.find([1.0, 1.0], metric=metric, limit=4).documents) == 4


def test_find_scores_zero_vectors_zero() -> None:
    result = items([[0.0, 0.0], [1.0, 0.0]]).find([1.0, 0.0])
    assert result.scores.tolist() == [1.0, 0.0]


def test_find_accepts_documents_as_queries() -> None:
    docs = items(np.eye(3))
    assert docs.find(docs[2]).documents[0] is docs[2]
    result = docs.find_batch(docs)
    assert [one.documents[0] is docs[row] for row, one in enumerate(result)] == [True] * 3
    assert [one.documents.id[0] for one in docs.stack().find_batch(docs)] == docs.id
    assert docs.find_batch([]) == []
    with pytest.raises(QueryError, match="the query is a Item without a value for 'embedding'"):
        docs.find(Item())


def test_find_searches_named_and_nested_fields() -> None:
    docs = DocumentArray[Item](
        [
            Item(other=[1.0, 0.0], title=Text(embedding=np.array([0.0, 1.0]))),
            Item(other=[0.0, 1.0], title=None),
            Item(other=[0.5, 0.5], title=Text(embedding=np.array([1.0, 0.0]))),
        ]
    )
    for rows in (docs, docs.stack()):
        assert rows.find([0.0, 1.0], "other", limit=1).documents.id == [docs[1].id]
        assert rows.find([0.0, 1.0], "title.embedding").documents.id == [docs[0].id, docs[2].id]
        assert rows.find(docs[2], "title.embedding", limit=1).documents.id == [docs[2].id]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "int64", "float16", "float32", "float64"])
def test_find_accepts_numeric_dtypes(dtype: str) -> None:
    docs = items(np.eye(3).astype(dtype))
    result = docs.find(np.eye(3, dtype=dtype)[1], metric="euclidean", limit=2)
    assert result.documents[0] is docs[1]
    np.testing.assert_allclose(result.scores, [0, 2**0.5], rtol=1e-6)


def test_find_keeps_precision_of_close_rows() -> None:
    docs = items(np.array([[10000.0, 0.001], [10000.0, 0.002]]))
    result = docs.find([10000.0, 0.0], metric="euclidean")
    np.testing.assert_allclose(result.scores, [0.001, 0.002], rtol=1e-6)


@pytest.mark.needs("torch")
def test_find_accepts_torch_vectors() -> None:
    import torch

    docs = items(torch.eye(3))
    for rows in (docs, docs.stack()):
        assert rows.find(torch.tensor([0.0, 1.0, 0.0]), limit=1).documents.id == [docs[1].id]
        assert [one.documents.id[0] for one in rows.find_batch(torch.eye(3))] == docs.id
        assert rows.find([0, 1, 0], limit=1).documents.id == [docs[1].id]
    half = items(torch.eye(3, dtype=torch.bfloat16))
    assert half.find(torch.eye(3, dtype=torch.bfloat16)[2]).documents[0] is half[2]


BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([1.0, 0.0], {}, QueryError, "the queries have 2 dimensions, the documents 3"),
    ([[1.0, 0.0, 0.0]], {}, QueryError, "queries: expected vectors"),
    ("abc", {}, QueryError, "queries: expected vectors"),
    (None, {}, QueryError, "queries: expected vectors"),
    ([np.nan, 0.0, 0.0], {}, QueryError, "the queries have NaN"),
    ([1.0, 0.0, 0.0], {"metric": "cosin"}, QueryError, "'cosin' is not a metric. Did you mean 'cosine'"),
    ([1.0, 0.0, 0.0], {"limit": -1}, QueryError, "limit=-1"),
    ([1.0, 0.0, 0.0], {"field": "embeding"}, PathError, "Did you mean 'embedding'"),
    ([1.0, 0.0, 0.0], {"field": "texts.embedding"}, QueryError, "texts.embedding"),
    ([1.0, 0.0, 0.0], {"field": "title"}, QueryError, "title"),
]


@pytest.mark.parametrize(("query", "options", "error", "message"), BAD, ids=[message[:30] for *_, message in BAD])
def test_find_rejects_bad_queries_and_options(
    query: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    docs = DocumentArray[Item](
        [Item(embedding=vector, title="t", texts=[Text(embedding=vector)] * 2) for vector in np.eye(3)]
    )
    for rows in (docs, docs.stack()):
        with pytest.raises(error, match=message):
            rows.find(query, **options)


def test_find_rejects_vectors_of_different_lengths() -> None:
    with pytest.raises(QueryError, match="embedding: the vectors have different lengths"):
        items([[1.0], [1.0, 2.0]]).find([1.0])
    with pytest.raises(QueryError, match="queries: the vectors have different lengths"):
        items([[1.0, 2.0]]).find_batch([[1.0], [1.0, 2.0]])
