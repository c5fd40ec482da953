"""Indexes that grow: no capacity to declare, and searches that do not count or read more rows than they return."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.index import IndexBackend
from quire.typing import NdArray, float32

WIDTH = 8
rng = np.random.default_rng(11)


class Item(BaseDocument):
    title: str
    label: int
    embedding: NdArray[float32, WIDTH]


def items(start: int, end: int) -> DocumentArray[Item]:
    vectors = rng.normal(size=(end - start, WIDTH)).astype(np.float32)
    return DocumentArray[Item](
        Item(id=f"i{n}", title=f"word{n}", label=n % 10, embedding=vector)
        for n, vector in zip(range(start, end), vectors, strict=True)
    )


def test_an_index_grows_beyond_its_first_documents_also_after_optimize(new_index: Any) -> None:
    index, documents = new_index(Item), DocumentArray[Item]()
    for start, end in ((0, 1), (1, 10), (10, 200), (200, 3000)):
        block = items(start, end)
        documents += block
        index.upsert(block)
        index.optimize()
        assert len(index) == end
        for n in {0, start, end - 1}:
            assert index.search(documents[n], limit=1).documents[0].identical(documents[n])
    assert len(index.search(np.ones(WIDTH), limit=3000, exact=True).documents) == 3000


class Calls:
    """Counts the calls of an index's engine, the rows of its scans, and the statements and counts behind it."""

    def __init__(self, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        backend = index._backend
        for name in IndexBackend.__abstractmethods__:
            monkeypatch.setattr(backend, name, self._counted(name, getattr(backend, name)))
        if hasattr(backend, "_documents") and hasattr(backend._documents, "count_rows"):
            kind = type(backend._documents)
            monkeypatch.setattr(kind, "count_rows", self._counted("count_rows", kind.count_rows))
        if hasattr(backend, "_psycopg"):
            connection: Any = backend._psycopg.Connection
            execute = connection.execute

            def record(connection: Any, statement: str, *arguments: Any, **options: Any) -> Any:
                unlimited = "count(" in statement and "LIMIT" not in statement
                self.counts["unlimited count" if unlimited else "statement"] += 1
                return execute(connection, statement, *arguments, **options)

            monkeypatch.setattr(connection, "execute", record)

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.counts[name] += 1
            return call(*arguments, **options)

        return counted

    def of(self, call: Any) -> dict[str, int]:
        self.counts.clear()
        call()
        return dict(self.counts)


def test_searches_make_the_same_calls_however_many_rows_there_are(
    new_index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = new_index(Item, items(0, 50))
    query = np.ones(WIDTH)
    searches = [
        lambda: index.search(query),
        lambda: index.search(query, where={"label": 3}),
        lambda: index.search(text="word7"),
        lambda: index.search(query, text="word7", where={"label": 7}),
        lambda: index.search_batch([query, query + 1]),
        lambda: index.get("i3"),
        lambda: "i3" in index,
    ]
    for search in searches:
        search()  # the first search of a text indexes the words
    with monkeypatch.context() as patch:
        calls = Calls(index, patch)
        few = [calls.of(search) for search in searches]
        index.upsert(items(50, 2000))
        many = [calls.of(search) for search in searches]
        assert few == many
        for used in many:
            assert not {"count", "scan", "unlimited count"} & used.keys()
        assert "count_rows" not in many[0]
        assert calls.of(lambda: len(index))["count"] == 1
