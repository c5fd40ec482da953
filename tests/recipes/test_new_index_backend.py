"""The recipe "Add an index backend" of CONTRIBUTING.md: any subclass of `IndexBackend` stores an index."""

# ruff: noqa: ARG001, ARG002 - the smallest backend does not use all that it is passed

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from quire import BaseDocument, DocumentArray
from quire.array import Metric, NearestRows
from quire.index import (
    DocumentIndex,
    FilterColumn,
    Hits,
    IndexBackend,
    IndexPlan,
    Rows,
    Selection,
    StoredRow,
    VectorColumn,
)
from quire.typing import NdArray


class SqliteBackend(IndexBackend):
    """A database in memory, which filters by SQL; vectors are compared by quire's own scoring."""

    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:", check_same_thread=False)

    def open(self, plan: IndexPlan, metric: Metric) -> Mapping[str, str]:
        self.plan, self.metric = plan, metric
        filters = "".join(f", {column.name}" for column in plan.filters)
        self.database.execute(f"CREATE TABLE IF NOT EXISTS documents (id PRIMARY KEY, digest, document{filters})")
        for vector in plan.vectors:
            self.database.execute(f"CREATE TABLE IF NOT EXISTS {vector.name} (id, position, vector)")
        return {}

    def write(self, rows: Rows | None, delete: Sequence[str], state: Mapping[str, str]) -> None:
        with self.database:
            keys = [(key,) for key in [*delete, *(rows.ids if rows else [])]]
            for table in ("documents", *(vector.name for vector in self.plan.vectors)):
                self.database.executemany(f"DELETE FROM {table} WHERE id = ?", keys)
            if rows is None:
                return
            columns = [rows.ids, rows.digests, rows.documents, *(rows.filters[each.name] for each in self.plan.filters)]
            marks = ", ".join("?" * len(columns))
            self.database.executemany(f"INSERT INTO documents VALUES ({marks})", zip(*columns, strict=True))
            for name, vectors in rows.vectors.items():
                owners = [rows.ids[owner] for owner in vectors.owners]
                data = [vector.tobytes() for vector in vectors.vectors]
                values = zip(owners, vectors.positions.tolist(), data, strict=True)
                self.database.executemany(f"INSERT INTO {name} VALUES (?, ?, ?)", values)

    def _where(self, selection: Selection) -> tuple[str, list[Any]]:
        values: list[Any] = []

        def literal(column: FilterColumn, value: Any) -> str:
            values.append(value)
            return "?"

        return ("1" if selection.condition is None else selection.condition.to_sql(literal)), values

    def get(self, ids: Sequence[str]) -> dict[str, Any]:
        return {row.id: row.document for row in self.scan(Selection(), documents=True) if row.id in ids}

    def scan(self, selection: Selection, *, documents: bool) -> Iterator[StoredRow]:
        where, values = self._where(selection)
        return map(
            StoredRow._make, self.database.execute(f"SELECT id, digest, document FROM documents WHERE {where}", values)
        )

    def count(self, selection: Selection) -> int:
        return sum(1 for _ in self.scan(selection, documents=False))

    def nearest(
        self, column: VectorColumn, queries: Any, selection: Selection, limit: int, *, exact: bool
    ) -> list[Hits]:
        selected = {row.id: row.document for row in self.scan(selection, documents=True)}
        rows = [row for row in self.database.execute(f"SELECT * FROM {column.name}") if row[0] in selected]
        search = NearestRows(queries, str(column), "dot" if self.metric == "cosine" else self.metric, limit)
        search.add(np.arange(len(rows)), [np.frombuffer(row[2], np.float32) for row in rows])
        hits = []
        for places, scores in search.results():
            ids, positions = [rows[place][0] for place in places], [rows[place][1] for place in places]
            hits.append(Hits(ids, scores.tolist(), [selected[key] for key in ids], positions))
        return hits

    def match_text(self, column: FilterColumn, text: str, selection: Selection, limit: int) -> Hits:
        raise NotImplementedError

    def optimize(self) -> None:
        pass

    def close(self) -> None:
        self.database.close()


class Chunk(BaseDocument):
    embedding: NdArray[2]


class Photo(BaseDocument):
    title: str
    label: int
    embedding: NdArray[3]
    chunks: DocumentArray[Chunk]


def test_a_backend_of_nine_methods_stores_an_index() -> None:
    rng = np.random.default_rng(0)
    photos = DocumentArray[Photo](
        Photo(
            id=f"p{n}",
            title=f"photo {n}",
            label=n,
            embedding=rng.normal(size=3),
            chunks=[Chunk(embedding=rng.normal(size=2)) for _ in range(n % 3)],
        )
        for n in range(50)
    )
    assert len(IndexBackend.__abstractmethods__) == 9
    index, memory = DocumentIndex[Photo](SqliteBackend()), DocumentIndex[Photo](photos)
    index.upsert(photos)
    query = np.ones(3)
    for where in (None, {"label": {"$lt": 20}}, {"title": {"$regex": "4$"}}, {"chunks": {"$size": 2}}):
        result, expected = (each.search(query, field="embedding", where=where) for each in (index, memory))
        assert result.documents == expected.documents
        np.testing.assert_allclose(result.scores, expected.scores, rtol=1e-5)
        elements = [each.search_elements([1, 2], field="chunks.embedding", where=where) for each in (index, memory)]
        assert elements[0].elements == elements[1].elements
    assert index.delete({"label": {"$gte": 10}}) == 40
    assert index.sync(photos).upserted == 40
    assert len(index) == 50
    index.close()
