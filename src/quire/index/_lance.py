"""An index in a folder, by LanceDB: a table of documents, and one for each column of elements."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quire._optional import require
from quire.array import Metric
from quire.errors import QuireError, SearchError
from quire.index._backend import Hits, IndexBackend, StoredRow, check_state, split_words
from quire.index._compact import CompactDocuments, CompactRow
from quire.index._conditions import Selection
from quire.index._plan import FilterColumn, IndexPlan, Rows, VectorColumn

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray
else:
    pa: Any = None

T = TypeVar("T")
_ATTEMPTS = 20
"""Attempts of a change that another writer precedes."""
_SMALL = 50_000
"""Up to this many selected rows are compared with the query, instead of searching the graph for them."""
_FEWEST = 5_000
"""Rows that are worth a graph; fewer are compared as fast."""
_RANKED = 1024
"""Rows that are ranked by their words."""
_IDS = 1000
"""Ids in one statement."""
_used_in: int | None = None
"""The process that used LanceDB first. Its threads and locks do not exist in forked children, which would crash."""


class LanceBackend(IndexBackend):
    """Tables in a folder: `name`, `name__v_...` for each column of elements, and `name__state`."""

    returns_columns = True

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name = folder, name
        self._plan: IndexPlan
        self._metric: Metric = "cosine"
        self._database: Any = None

    def open(self, plan: IndexPlan, metric: Metric) -> Mapping[str, str]:
        """Open the database, and create missing tables."""
        global _used_in, pa  # noqa: PLW0603 - of the process
        self._check_process()
        lancedb: Any = require("lancedb", extra="index", needed_for="an index in a folder")
        pa = require("pyarrow", extra="index", needed_for="an index in a folder")
        _used_in = os.getpid()
        self._plan, self._metric = plan, metric
        self._compact = CompactDocuments(plan, unit=metric == "cosine")
        self._read = ["id", "document", *self._compact.columns]
        self._elements = {column.name: column for column in plan.vectors if column.table is not None}
        with self._errors("open"):
            self._database = lancedb.connect(self.folder, read_consistency_interval=timedelta(0))
            states = pa.schema([pa.field("key", pa.string()), pa.field("value", pa.string())])
            self._states = self._create(f"{self.name}__state", states)
            state = {row["key"]: row["value"] for row in self._states.to_arrow().to_pylist()}
            check_state(state, plan, metric)
            self._documents = self._create(self.name, self._document_schema())
            self._tables = {
                name: self._create(f"{self.name}__{name}", self._element_schema(column))
                for name, column in self._elements.items()
            }
        return state

    def _create(self, name: str, schema: pa.Schema) -> Any:
        return self._database.create_table(name, schema=schema, exist_ok=True)

    def _filter_fields(self) -> list[pa.Field]:
        types = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string()}
        return [pa.field(column.name, types[column.type]) for column in self._plan.filters]

    def _document_schema(self) -> pa.Schema:
        vectors = [
            pa.field(column.name, pa.list_(pa.float32(), column.width))
            for column in self._plan.vectors
            if column.table is None
        ]
        key = [pa.field("id", pa.string()), pa.field("digest", pa.int64()), pa.field("document", pa.large_binary())]
        return pa.schema([*key, *self._filter_fields(), *vectors])

    def _element_schema(self, column: VectorColumn) -> pa.Schema:
        vector = pa.field(column.name, pa.list_(pa.float32(), column.width))
        key = [pa.field("id", pa.string()), pa.field("position", pa.int64())]
        return pa.schema([*key, *self._filter_fields(), vector])

    # --- changes

    def write(self, rows: Rows | None, delete: Sequence[str], state: Mapping[str, str]) -> None:
        """Change each table at once, the one of documents last: what a crash leaves out, `sync` detects and repairs."""
        with self._errors("change"):
            for start in range(0, len(delete), _IDS):
                condition = _in_ids(delete[start : start + _IDS])
                for table in (*self._tables.values(), self._documents):
                    self._retry(lambda table=table, condition=condition: table.delete(condition))  # type: ignore[misc]
            if rows is not None and rows.ids:
                for name, column in self._elements.items():
                    self._write_elements(column, self._tables[name], rows)
                self._merge(self._documents, ["id"], self._encode_documents(rows))
            if state:
                values = {"key": list(state), "value": list(state.values())}
                self._merge(self._states, ["key"], pa.table(values, schema=self._states.schema))

    def _merge(self, table: Any, keys: list[str], values: pa.Table, *, replace: str | None = None) -> None:
        def merge() -> None:
            change = table.merge_insert(keys).when_matched_update_all().when_not_matched_insert_all()
            if replace is not None:
                change = change.when_not_matched_by_source_delete(replace)
            # Vectors were checked, and missing ones are nulls, which LanceDB refuses by default in wide columns.
            change.execute(values, on_bad_vectors="null")

        self._retry(merge)

    def _write_elements(self, column: VectorColumn, table: Any, rows: Rows) -> None:
        elements = rows.vectors[column.name]
        values: dict[str, Any] = {
            "id": [rows.ids[owner] for owner in elements.owners],
            "position": elements.positions,
            **{each.name: [rows.filters[each.name][o] for o in elements.owners] for each in self._plan.filters},
            column.name: _fixed_lists(elements.vectors),
        }
        # Elements that a document has no longer are deleted by the same change.
        replace = " OR ".join(_in_ids(rows.ids[start : start + _IDS]) for start in range(0, len(rows.ids), _IDS))
        self._merge(table, ["id", "position"], pa.table(values, schema=table.schema), replace=replace)

    def _encode_documents(self, rows: Rows) -> pa.Table:
        values: dict[str, Any] = {"id": rows.ids, "digest": rows.digests, "document": rows.documents, **rows.filters}
        for column in self._plan.vectors:
            if column.table is None:
                values[column.name] = _spread(rows.vectors[column.name], len(rows.ids))
        return pa.table(values, schema=self._documents.schema)

    def _retry(self, change: Callable[[], object]) -> None:
        """Repeat a change that failed because another writer was first."""
        for attempt in range(_ATTEMPTS):
            try:
                change()
            except (RuntimeError, OSError, ValueError) as error:
                conflict = "conflict" in str(error).lower() or "retry" in str(error).lower()
                if not conflict or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(random.uniform(0, 0.05 * (attempt + 1)))  # noqa: S311 - no secret
            else:
                return

    # --- rows

    def get(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return documents by id."""
        result: dict[str, Any] = {}
        with self._errors("read"):
            for start in range(0, len(ids), _IDS):
                condition = _in_ids(ids[start : start + _IDS])
                table = self._documents.search().where(condition).select(self._read).to_arrow()
                result.update(zip(table["id"].to_pylist(), self._read_documents(table), strict=True))
        return result

    def scan(self, selection: Selection, *, documents: bool) -> Iterator[StoredRow]:
        """Yield the rows of the condition in batches."""
        columns = [*self._read, "digest"] if documents else ["id", "digest"]
        with self._errors("read"):
            reader = self._search(self._documents.search(), selection).select(columns).to_batches(1024)
            for batch in reader:
                contents = self._read_documents(batch) if documents else [None] * len(batch)
                yield from map(StoredRow, batch["id"].to_pylist(), batch["digest"].to_pylist(), contents)

    def count(self, selection: Selection) -> int:
        """Return the number of selected rows."""
        with self._errors("read"):
            return int(self._documents.count_rows(_to_sql(selection)))

    def _read_documents(self, rows: pa.Table | pa.RecordBatch) -> list[CompactRow]:
        names = self._compact.columns
        vectors = {column.name for column in self._compact.vectors}
        columns = [_to_arrays(rows[name]) if name in vectors else rows[name].to_pylist() for name in names]
        values = [dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True)]
        contents = rows["document"].to_pylist()
        return list(map(CompactRow, contents, values or itertools.repeat({})))

    # --- searches

    def nearest(
        self, column: VectorColumn, queries: NDArray[Any], selection: Selection, limit: int, *, exact: bool
    ) -> list[Hits]:
        """Search the graph, or compare the rows that it does not have, and those of a small selection."""
        table = self._documents if column.table is None else self._tables[column.name]
        distance = "l2" if self._metric == "euclidean" else "dot"
        with self._errors("search"):
            if selection.condition is not None and not exact:
                exact = table.count_rows(_to_sql(selection)) <= _SMALL
            # The vectors of all queries are passed at once, and the rows of each have its number.
            search = table.search(list(queries.astype(np.float32)), vector_column_name=column.name)
            search = self._search(search.distance_type(distance), selection)
            if exact:
                search = search.bypass_vector_index()
            else:
                search = search.nprobes(20).refine_factor(4).ef(max(200, 4 * limit))
            key = self._read if column.table is None else ["id", "position"]
            result = search.select([*key, "_distance"]).limit(limit).to_arrow()
        return self._split(result, len(queries), column)

    def _split(self, result: pa.Table, count: int, column: VectorColumn) -> list[Hits]:
        number = result["query_index"].to_numpy() if count > 1 else np.zeros(len(result), np.int64)
        distances = result["_distance"].to_numpy().astype(np.float64)
        scores = np.sqrt(distances.clip(0)) if self._metric == "euclidean" else 1 - distances
        hits = []
        for query in range(count):
            rows = np.flatnonzero(number == query)
            rows = rows[np.argsort(distances[rows], kind="stable")]
            part = result.take(rows)
            documents = [] if column.table else self._read_documents(part)
            positions = part["position"].to_pylist() if column.table else []
            hits.append(Hits(part["id"].to_pylist(), scores[rows].tolist(), documents, positions))
        return hits

    def match_text(self, column: FilterColumn, text: str, selection: Selection, limit: int) -> Hits:
        """Rank by BM25; the index of words is created by the first search."""
        query: Any = require("lancedb.query", extra="index", needed_for="an index in a folder")
        with self._errors("search"):
            self._index_words(column)
            match = query.MatchQuery(" ".join(split_words(text)), column.name)
            search = self._search(self._documents.search(match, query_type="fts"), selection)
            # Which rows of equal scores are found depends on the limit, and pages need one order: many rows are ranked,
            # and the documents of the first ones are read.
            ranked = math.ceil(limit / _RANKED) * _RANKED
            result = search.select(["id", "_score"]).limit(ranked).to_arrow()
            result = result.sort_by([("_score", "descending"), ("id", "ascending")]).slice(0, limit)
        ids = result["id"].to_pylist()
        documents = self.get(ids)
        kept = [(key, score) for key, score in zip(ids, result["_score"].to_pylist(), strict=True) if key in documents]
        return Hits([key for key, _ in kept], [score for _, score in kept], [documents[key] for key, _ in kept])

    def _search(self, search: Any, selection: Selection) -> Any:
        sql = _to_sql(selection)
        return search if sql is None else search.where(sql, prefilter=True)

    def _indexed(self, table: Any) -> set[str]:
        return {name for index in table.list_indices() for name in index.columns}

    def _index_words(self, column: FilterColumn) -> None:
        if column.name not in self._indexed(self._documents):
            config: Any = require("lancedb.index", extra="index", needed_for="an index in a folder")
            words = config.FTS(stem=False, remove_stop_words=False, ascii_folding=False, max_token_length=None)
            self._retry(lambda: self._documents.create_index(column.name, config=words, replace=False))

    def optimize(self) -> None:
        """Compact the tables, index ids, words, and the vectors of tables that are large enough for a graph."""
        config: Any = require("lancedb.index", extra="index", needed_for="an index in a folder")
        with self._errors("optimize"):
            for table in (self._documents, *self._tables.values()):
                if "id" not in self._indexed(table) and table.count_rows():
                    self._retry(lambda table=table: table.create_index("id", config=config.BTree()))  # type: ignore[misc]
            # Graphs of unscaled vectors miss many of the greatest dot products: those are compared with all rows.
            for column in self._plan.vectors if self._metric != "dot" else ():
                table = self._documents if column.table is None else self._tables[column.name]
                if column.name not in self._indexed(table) and table.count_rows() >= _FEWEST:
                    distance = "l2" if self._metric == "euclidean" else "dot"
                    partitions = max(1, round(math.sqrt(table.count_rows()) / 50))
                    graph = config.HnswSq(distance_type=distance, num_partitions=partitions)
                    self._retry(
                        lambda table=table, name=column.name, graph=graph: table.create_index(name, config=graph)  # type: ignore[misc]
                    )
            for table in (self._documents, *self._tables.values(), self._states):
                self._retry(table.optimize)

    def close(self) -> None:
        """Release the tables; LanceDB has no connections to close."""
        self._database = None

    # --- errors

    def _check_process(self) -> None:
        if _used_in is not None and _used_in != os.getpid():
            raise SearchError(
                f"{self.folder}: LanceDB was used in the process {_used_in}, from which this one was forked, and it "
                "would crash here: its threads were not copied. Start the worker by spawn "
                "(multiprocessing.get_context('spawn')), or open the first index in the worker."
            )

    @contextmanager
    def _errors(self, act: str) -> Iterator[None]:
        """Check the process, and convert LanceDB's errors."""
        self._check_process()
        if self._database is None and act != "open":
            raise SearchError(f"{self.folder}: the index is closed.")
        try:
            yield
        except QuireError:
            raise
        except Exception as error:  # LanceDB raises RuntimeError, ValueError, OSError and its own classes
            raise SearchError(f"{self.folder}: LanceDB cannot {act} the index {self.name!r}: {error}") from error


def _literal(column: FilterColumn, value: Any) -> str:
    """Write a value in SQL: LanceDB has no parameters. Texts end at a quote that is not doubled, and nowhere else."""
    if column.type == "text":
        return _quote(value)
    if column.type == "bool":
        return "true" if value else "false"
    if column.type == "int":
        return f"CAST('{int(value)}' AS BIGINT)"
    return f"CAST('{float(value)!r}' AS DOUBLE)"


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _in_ids(ids: Sequence[str]) -> str:
    return f"id IN ({', '.join(map(_quote, ids))})"


def _to_sql(selection: Selection) -> str | None:
    return None if selection.condition is None else selection.condition.to_sql(_literal)


def _fixed_lists(vectors: NDArray[np.float32]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])


def _spread(vectors: Any, count: int) -> pa.Array:
    """Return vectors as a column with nulls for the rows that have none."""
    if len(vectors.owners) == count:
        return _fixed_lists(vectors.vectors)
    places = np.zeros(count, np.int64)
    places[vectors.owners] = np.arange(len(vectors.owners))
    missing = np.ones(count, np.bool_)
    missing[vectors.owners] = False
    return _fixed_lists(vectors.vectors).take(pa.array(places, mask=missing))


def _to_arrays(column: pa.Array | pa.ChunkedArray) -> list[NDArray[np.float32] | None]:
    """Return the vectors of a column, each in memory of its own."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    result: list[NDArray[np.float32] | None] = []
    for chunk in chunks:
        rows = iter(chunk.flatten().to_numpy().reshape(-1, chunk.type.list_size))
        result += [next(rows).copy() if valid else None for valid in chunk.is_valid().to_pylist()]
    return result
