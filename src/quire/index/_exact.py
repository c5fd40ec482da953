"""Exact search: over documents in memory, and over a stored dataset that may be larger than memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._lowlevel.forks import ForkSafeLock
from quire.array import Metric, NearestRows
from quire.errors import OptionError
from quire.index._backend import Hits, IndexBackend, StoredRow, split_words
from quire.index._conditions import Selection
from quire.index._plan import FilterColumn, IndexPlan, Rows, VectorColumn, digest, follow, iter_elements
from quire.schema import join_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.storage import StoredDataset

_BLOCK = 1024
"""Documents that are read at a time."""


class MemoryBackend(IndexBackend):
    """Documents in memory; every search compares all of them."""

    evaluates_queries = True

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._plan: IndexPlan
        self._metric: Metric = "cosine"
        self._state: dict[str, str] = {}
        self._documents: dict[str, Any] = {}
        self._digests: dict[str, int] = {}
        self._matrices: dict[str, tuple[list[str], list[int], NDArray[np.float32]]] = {}

    def open(self, plan: IndexPlan, metric: Metric) -> Mapping[str, str]:
        """Start empty."""
        self._plan, self._metric = plan, metric
        return self._state

    def write(self, rows: Rows | None, delete: Sequence[str], state: Mapping[str, str]) -> None:
        """Replace the dicts by changed copies, so that running searches see one state."""
        added = {}
        if rows is not None:
            read = self._plan.document_type.from_bytes  # copies, which nobody else changes
            added = {key: read(data) for key, data in zip(rows.ids, rows.documents, strict=True)}
        with self._lock:
            documents, digests = dict(self._documents), dict(self._digests)
            for key in delete:
                documents.pop(key, None)
                digests.pop(key, None)
            if rows is not None:
                documents.update(added)
                digests.update(zip(rows.ids, rows.digests, strict=True))
            self._documents, self._digests, self._matrices = documents, digests, {}
            self._state.update(state)

    def get(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return documents as bytes, so that callers get copies."""
        documents = self._documents
        return {key: documents[key].to_bytes() for key in ids if key in documents}

    def scan(self, selection: Selection, *, documents: bool) -> Iterator[StoredRow]:
        """Yield the selected rows."""
        stored, digests = self._documents, self._digests
        for key, document in stored.items():
            if selection.query is None or selection.query(document):
                yield StoredRow(key, digests.get(key, 0), document.to_bytes() if documents else None)

    def count(self, selection: Selection) -> int:
        """Return the number of selected rows."""
        documents = self._documents
        if selection.query is None:
            return len(documents)
        return sum(map(selection.query, documents.values()))

    def nearest(
        self, column: VectorColumn, queries: NDArray[Any], selection: Selection, limit: int, *, exact: bool
    ) -> list[Hits]:
        """Compare all selected rows."""
        del exact
        documents, (keys, positions, matrix) = self._documents, self._matrix(column)
        rows = np.arange(len(keys))
        if selection.query is not None:
            chosen = {key for key in set(keys) if selection.query(documents[key])}
            rows = np.array([row for row, key in enumerate(keys) if key in chosen], np.int64)
        search = NearestRows(queries, str(column), self._metric, limit)
        search.add(rows, matrix if len(rows) == len(matrix) else matrix[rows])
        return [
            Hits(
                [keys[row] for row in result],
                scores.tolist(),
                [documents[keys[row]].to_bytes() for row in result],
                [positions[row] for row in result] if column.table else [],
            )
            for result, scores in search.results()
        ]

    def _matrix(self, column: VectorColumn) -> tuple[list[str], list[int], NDArray[np.float32]]:
        """Return ids, positions of elements and vectors of a column, which are gathered after each change."""
        with self._lock:
            if column.name not in self._matrices:
                documents = list(self._documents.values())
                rows = self._plan.encode_vectors(column, documents)
                keys = list(self._documents)
                owners = [keys[owner] for owner in rows.owners]
                self._matrices[column.name] = owners, rows.positions.tolist(), rows.vectors
            return self._matrices[column.name]

    def match_text(self, column: FilterColumn, text: str, selection: Selection, limit: int) -> Hits:
        """Rank the selected rows by BM25."""
        documents = self._documents
        ranking = TextRanking(text)
        for key, document in documents.items():
            if selection.query is None or selection.query(document):
                ranking.add(key, follow(document, column.path))
        best = ranking.best(limit)
        return Hits([key for key, _ in best], [score for _, score in best], [documents[k].to_bytes() for k, _ in best])

    def optimize(self) -> None:
        """Do nothing: every search compares all rows."""

    def close(self) -> None:
        """Free the documents."""
        self._documents, self._digests, self._matrices = {}, {}, {}


class DatasetBackend(IndexBackend):
    """The rows of a stored dataset, which are read in blocks for each search; changes are made to the dataset."""

    evaluates_queries = True

    def __init__(self, dataset: StoredDataset[Any]) -> None:
        self._dataset = dataset
        self._plan: IndexPlan
        self._metric: Metric = "cosine"

    def open(self, plan: IndexPlan, metric: Metric) -> Mapping[str, str]:
        """Return no state: the dataset is the index."""
        self._plan, self._metric = plan, metric
        return {}

    def write(self, rows: Rows | None, delete: Sequence[str], state: Mapping[str, str]) -> None:
        """Refuse: an index over a dataset has its rows."""
        del rows, delete, state
        raise OptionError(
            "an index over a stored dataset has the rows of the dataset: change the dataset, or open an index with a "
            "place of its own, DocumentIndex[...]('lance://...'), and sync(dataset)."
        )

    def _selected(self, selection: Selection) -> StoredDataset[Any]:
        return self._dataset if selection.query is None else self._dataset.filter(selection.query)

    def get(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return documents by id, found by reading the column of ids."""
        keys = set(ids)
        values = self._dataset["id"] if len(self._dataset) else []
        rows = [row for row, key in enumerate(values) if str(key) in keys]
        return {str(document.id): document for document in self._dataset.take(rows).unstack()} if rows else {}

    def scan(self, selection: Selection, *, documents: bool) -> Iterator[StoredRow]:
        """Yield the selected rows in order."""
        for document in self._selected(selection):
            data = document.to_bytes()
            yield StoredRow(str(document.id), digest(data), data if documents else None)

    def count(self, selection: Selection) -> int:
        """Return the number of selected rows."""
        return len(self._selected(selection))

    def nearest(
        self, column: VectorColumn, queries: NDArray[Any], selection: Selection, limit: int, *, exact: bool
    ) -> list[Hits]:
        """Read the column of vectors in blocks, and then the nearest rows."""
        del exact
        dataset = self._selected(selection)
        if column.table is None:
            results = dataset.find_batch(queries, str(column), metric=self._metric, limit=limit)
            return [
                Hits([str(document.id) for document in documents], scores.tolist(), list(documents))
                for documents, scores in results
            ]
        search = NearestRows(queries, str(column), self._metric, limit)
        owners: list[int] = []
        positions: list[int] = []
        for row, document in _read_column(dataset, column):
            vectors = [element.__dict__.get(column.path[-1]) for element in iter_elements(document, column.path)]
            present = [position for position, vector in enumerate(vectors) if vector is not None]
            search.add(np.arange(len(owners), len(owners) + len(present)), [vectors[at] for at in present])
            owners += [row] * len(present)
            positions += present
        hits = []
        for result, scores in search.results():
            documents = [dataset[owners[place]] for place in result]
            ids = [str(document.id) for document in documents]
            hits.append(Hits(ids, scores.tolist(), documents, [positions[place] for place in result]))
        return hits

    def match_text(self, column: FilterColumn, text: str, selection: Selection, limit: int) -> Hits:
        """Read the column of texts in blocks, and then the most relevant rows."""
        dataset = self._selected(selection)
        ranking = TextRanking(text)
        for row, document in _read_column(dataset, column):
            ranking.add(row, follow(document, column.path))
        best = ranking.best(limit)
        documents = [dataset[row] for row, _ in best]
        return Hits([str(document.id) for document in documents], [score for _, score in best], documents)

    def optimize(self) -> None:
        """Do nothing: every search compares all rows."""

    def close(self) -> None:
        """Do nothing: the dataset belongs to the caller."""


def _read_column(dataset: StoredDataset[Any], column: FilterColumn | VectorColumn) -> Iterator[tuple[int, Any]]:
    """Yield row numbers and documents that have one column."""
    narrow = dataset.narrow([join_path(column.path)])
    for start in range(0, len(narrow), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(narrow)))
        yield from enumerate(narrow.take(rows).unstack(), start)


class TextRanking:
    """Ranks texts by BM25: words that are rare in all of them count more, and long texts less."""

    _SATURATION, _LENGTH = 1.2, 0.75
    """The parameters k1 and b of BM25, with their usual values."""

    def __init__(self, query: str) -> None:
        self._query = sorted(set(split_words(query)))
        self._texts: list[tuple[Any, int, dict[str, int]]] = []
        self._count, self._length = 0, 0
        self._frequency: Counter[str] = Counter()

    def add(self, key: Any, text: str | None) -> None:
        """Count the words of the query in a text."""
        if text is None:
            return
        words = split_words(text)
        self._count += 1
        self._length += len(words)
        counts = Counter(word for word in words if word in self._query)
        self._frequency.update(counts.keys())
        if counts:
            self._texts.append((key, len(words), dict(counts)))

    def best(self, limit: int) -> list[tuple[Any, float]]:
        """Return the keys and scores of the most relevant texts that have a word of the query."""
        average = self._length / max(1, self._count)
        weights = {
            word: math.log(1 + (self._count - count + 0.5) / (count + 0.5)) for word, count in self._frequency.items()
        }
        scored = [(key, self._score(length / average, counts, weights)) for key, length, counts in self._texts]
        return sorted(scored, key=lambda item: -item[1])[:limit]

    def _score(self, length: float, counts: Mapping[str, int], weights: Mapping[str, float]) -> float:
        damping = self._SATURATION * (1 - self._LENGTH + self._LENGTH * length)
        parts: Iterable[float] = (
            weights[word] * count * (self._SATURATION + 1) / (count + damping) for word, count in counts.items()
        )
        return sum(parts)
