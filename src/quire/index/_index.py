"""`DocumentIndex`: typed search over documents, whichever engine stores them."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, overload

import numpy as np
from typing_extensions import Self

from quire._parametrize import ParametrizedMeta
from quire._protocols import is_document_type
from quire.array import (
    DocumentArray,
    DocumentBatch,
    Found,
    Metric,
    NearestRows,
    bind,
    check_metric,
    query_matrix,
    whole_number,
)
from quire.document import BaseDocument
from quire.errors import (
    DocumentTypeError,
    OptionError,
    QueryError,
    SchemaError,
    SearchError,
    StorageError,
    did_you_mean,
)
from quire.files import display_uri, scheme_of
from quire.index._backend import FORMAT, Hits, IndexBackend, check_state, split_words
from quire.index._compact import CompactDocuments, CompactRow
from quire.index._conditions import Selection, find_other_times, select
from quire.index._exact import DatasetBackend, MemoryBackend
from quire.index._lance import LanceBackend
from quire.index._plan import IndexPlan, Rows, VectorColumn, build_plan, check_key, follow, iter_elements, scale_to_unit
from quire.index._postgres import PostgresBackend
from quire.tensors import describe

DocT = TypeVar("DocT", bound=BaseDocument)
Where = Mapping[str, Any] | Callable[[Any], Any] | None
_BLOCK = 8192
"""Documents of an iterator that are written at a time."""
_RANK = 60
"""The constant of reciprocal rank fusion, with its usual value."""
_FUSED = 200
"""The least number of rows of each ranking that are fused."""
_SCHEMES: dict[str, str] = {"lance": "lance:///folder", "postgresql": "postgresql://user@host/database"}


class FoundElements(NamedTuple, Generic[DocT]):
    """The nearest documents inside documents, best first, with their scores and the documents that hold them."""

    elements: DocumentArray[Any]
    scores: np.ndarray[Any, Any]
    documents: DocumentArray[DocT]


@dataclass(frozen=True)
class SyncReport:
    """What `DocumentIndex.sync` changed; `unchanged` is None if only the changes of the dataset were read."""

    upserted: int
    deleted: int
    unchanged: int | None
    version: int | None


class DocumentIndex(Generic[DocT], metaclass=ParametrizedMeta):
    """Documents of a class, found by their vectors, their text, and queries.

    `source` is 'lance:///folder' (LanceDB), 'postgresql://...' (PostgreSQL with pgvector), a `StoredDataset` (exact
    search in blocks, larger than memory), documents, or None for an empty index in memory (exact). It may be an
    `IndexBackend` of your own.

    name: of the tables in a folder or a database; by default that of the class.
    metric: 'cosine' and 'dot', for which larger scores are nearer, or 'euclidean'.
    vectors: the fields of vectors; by default all tensors with one dimension of a fixed size, also those of nested
        documents. Engines rank them as float32.
    timeout: seconds for a call of PostgreSQL, in which lost connections are replaced.

    Documents come back as they were stored. Calls may come from several threads.
    """

    document_type: ClassVar[type[Any]] = BaseDocument

    def __init__(
        self,
        source: Any = None,
        *,
        name: str | None = None,
        metric: Metric = "cosine",
        vectors: Sequence[str] | None = None,
        timeout: float = 30.0,
    ) -> None:
        document_type: Any = self.document_type
        if document_type is BaseDocument:
            raise SchemaError("DocumentIndex needs the documents' class: DocumentIndex[Photo](...).")
        if isinstance(vectors, str):
            raise OptionError(f"vectors is a list of fields: [{vectors!r}].")
        if isinstance(timeout, bool) or not timeout > 0:
            raise OptionError(f"timeout is a number of seconds above 0, got {timeout!r}.")
        self.metric = check_metric(metric)
        self._plan: IndexPlan = build_plan(self.document_type, vectors)
        self._compact = CompactDocuments(self._plan, unit=self.metric == "cosine")
        self._url = os.fspath(source) if isinstance(source, (str, os.PathLike)) else None
        self._options = {"name": name, "metric": metric, "vectors": vectors, "timeout": timeout}
        self._backend, documents = self._make_backend(source, name, timeout)
        try:
            state = self._backend.open(self._plan, self.metric)
            check_state(state, self._plan, self.metric)
            if not state and not isinstance(self._backend, DatasetBackend):
                new = {"format": FORMAT, "metric": self.metric, "columns": self._plan.fingerprint}
                self._backend.write(None, [], new)
            if documents is not None:
                self.upsert(documents)
        except BaseException:
            self._backend.close()
            raise

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return bind(cls, parameter)

    def _make_backend(self, source: Any, name: str | None, timeout: float) -> tuple[IndexBackend, Any]:
        """Return the engine, and the documents that the index starts with."""
        if isinstance(source, IndexBackend):
            return source, None
        if self._url is not None:
            # `display_uri` hides passwords.
            scheme = scheme_of(self._url) or self._url.partition(":")[0]
            table = _table_name(name, self.document_type)
            if scheme == "lance":
                folder = self._url.partition("://")[2]
                if not folder:
                    raise OptionError(f"{self._url!r} names no folder: write lance:///folder.")
                return LanceBackend(folder, table), None
            if scheme in ("postgresql", "postgres"):
                return PostgresBackend(self._url, table, timeout), None
            known = " or ".join(_SCHEMES.values())
            raise OptionError(
                f"{display_uri(self._url)!r} is not the address of an index: write {known}. "
                f"{did_you_mean(scheme, _SCHEMES)} A dataset is passed as open_dataset(...)."
            )
        if name is not None:
            raise OptionError("name= is that of tables in a folder or a database: an index in memory has none.")
        if hasattr(source, "shards") and hasattr(source, "find_batch"):
            if not issubclass(type(source).document_type, self.document_type):
                raise DocumentTypeError(
                    f"DocumentIndex[{self.document_type.__name__}]: the dataset holds documents of "
                    f"{type(source).document_type.__name__}."
                )
            return DatasetBackend(source), None
        return MemoryBackend(), source

    # --- searches

    def search(  # noqa: PLR0913 - by name
        self,
        vector: Any = None,
        *,
        field: str | None = None,
        text: str | None = None,
        text_field: str | None = None,
        where: Where = None,
        limit: int = 10,
        offset: int = 0,
        exact: bool = False,
    ) -> Found[DocT]:
        """Find the best documents for a vector, a text, or both.

        vector: a vector, or a document whose field is the vector. A `field` of documents in arrays, such as
            'chunks.embedding', finds the documents that hold them; see `search_elements`.
        text: words; documents that have any of them are ranked by BM25, in PostgreSQL by `ts_rank_cd`. With a vector,
            both rankings are merged by reciprocal rank fusion, whose scores are the sums of 1 / (60 + rank).
        where: a query as `DocumentArray.filter` takes it, or a function. It is applied before ranking: fewer than
            `limit` documents are found only if fewer match.
        offset: how many of the best documents are left out, for pages of results.
        exact: compare all documents, also if the engine has an approximate index.
        """
        limit, offset = _check_page(limit, offset)
        depth = offset + limit
        if vector is None and text is None:
            raise QueryError("search takes vector=, text=, or both. filter(where) returns what matches a query.")
        if vector is None and field is not None:
            raise QueryError(f"field={field!r} is a field of vectors, and no vector was passed.")
        if text is None and text_field is not None:
            raise QueryError(f"text_field={text_field!r}: no text was passed.")
        selection = self._select(where)
        if vector is None:
            return self._found(self._match_text(text, text_field, selection, depth), offset, limit)
        column = self._plan.vector(field)
        queries = self._read_queries([vector], column)
        if text is None:
            return self._found(self._nearest(column, queries, selection, depth, exact=exact)[0], offset, limit)
        wide = max(depth, _FUSED)
        rankings = [
            self._nearest(column, queries, selection, wide, exact=exact)[0],
            self._match_text(text, text_field, selection, wide),
        ]
        return self._found(_fuse(rankings), offset, limit)

    def search_batch(
        self,
        vectors: Any,
        *,
        field: str | None = None,
        where: Where = None,
        limit: int = 10,
        offset: int = 0,
        exact: bool = False,
    ) -> list[Found[DocT]]:
        """Find the best documents for each of many vectors, or documents; see `search`."""
        limit, offset = _check_page(limit, offset)
        column = self._plan.vector(field)
        queries = self._read_queries(vectors, column)
        selection = self._select(where)
        hits = self._nearest(column, queries, selection, offset + limit, exact=exact) if len(queries) else []
        return [self._found(each, offset, limit) for each in hits]

    def search_elements(
        self,
        vector: Any,
        *,
        field: str,
        where: Where = None,
        limit: int = 10,
        offset: int = 0,
        exact: bool = False,
    ) -> FoundElements[DocT]:
        """Find the nearest documents inside documents: the chunks for 'chunks.embedding'.

        `where` is about the documents that hold them. Each element comes with that document.
        """
        limit, offset = _check_page(limit, offset)
        column = self._plan.vector(field)
        if column.table is None:
            raise QueryError(f"{column} is a vector of the documents themselves: use search.")
        queries = self._read_queries([vector], column)
        selection = self._select(where)
        elements, scores, documents = [], [], []
        for position, document, score in self._nearest_elements(
            column, queries, selection, offset + limit, exact=exact
        ):
            inside = list(iter_elements(document, column.path))
            elements.append(inside[position])
            documents.append(document)
            scores.append(score)
        page = slice(offset, offset + limit)
        inner: Any = DocumentArray[self._element_type(column)]  # type: ignore[misc]
        return FoundElements(inner(elements[page]), np.array(scores[page]), self._array(documents[page]))

    def _select(self, where: Where) -> Selection:
        """Compile a filter; comparisons of times with and without a time zone are errors, as in an array."""
        selection = select(where, self._plan)
        if selection.condition is not None and not self._backend.evaluates_queries:
            for column, others in find_other_times(selection.condition):
                if self._backend.count(Selection(selection.query, others)):
                    raise QueryError(
                        f"{column}: times with a time zone cannot be compared with times without one, and either the "
                        "index has both, or the query differs from it."
                    )
        return selection

    def _element_type(self, column: VectorColumn) -> type[Any]:
        element_type: type[Any] = self._plan.schema.resolve(column.path[:-1])[-1].document_type
        return element_type

    def _read_queries(self, vectors: Any, column: VectorColumn) -> np.ndarray[Any, Any]:
        """Return the vectors of queries as the engine compares them."""
        queries = query_matrix(vectors, str(column))
        if len(queries) and queries.shape[1] != column.width:
            raise QueryError(f"the query has {queries.shape[1]} dimensions, and {column} has {column.width}.")
        queries = queries.reshape(-1, column.width).astype(np.float32)
        if not np.isfinite(queries).all():
            raise QueryError("the query has NaN, an infinity or a number above the largest float32.")
        return scale_to_unit(queries) if self.metric == "cosine" else queries

    def _nearest(
        self, column: VectorColumn, queries: Any, selection: Selection, depth: int, *, exact: bool
    ) -> list[Hits]:
        """Return the nearest documents to each query."""
        if not depth:
            return [Hits() for _ in queries]
        if column.table is not None:
            hits = []
            for query in queries:
                best: dict[str, tuple[float, Any]] = {}
                for _, document, score in self._nearest_elements(
                    column, query[None], selection, depth, exact=exact, distinct=True
                ):
                    best.setdefault(str(document.id), (score, document))
                hits.append(Hits(list(best), [s for s, _ in best.values()], [d for _, d in best.values()]))
            return hits
        if self._evaluates(selection):
            return self._backend.nearest(column, queries, selection, depth, exact=exact)
        search = NearestRows(queries, str(column), self.metric, depth)
        rows: dict[int, Any] = {}
        position = 0
        for document in self._scan(selection):
            vector = follow(document, column.path)
            if vector is not None:
                search.add(np.array([position]), [vector])
                rows[position] = document
                position += 1
                if len(rows) > 64 * (depth * len(queries) + 16):
                    kept = {int(row) for result, _ in search.results() for row in result}
                    rows = {row: document for row, document in rows.items() if row in kept}
        return [
            Hits([str(rows[row].id) for row in result.tolist()], scores.tolist(), [rows[r] for r in result.tolist()])
            for result, scores in search.results()
        ]

    def _nearest_elements(
        self,
        column: VectorColumn,
        queries: Any,
        selection: Selection,
        depth: int,
        *,
        exact: bool,
        distinct: bool = False,
    ) -> list[tuple[int, Any, float]]:
        """Return the nearest elements to one query with their documents; `depth` documents if they are `distinct`."""
        if not self._evaluates(selection):
            return self._compare_elements(column, queries, selection)
        size = depth
        while True:
            hits = self._backend.nearest(column, queries, selection, size, exact=exact)[0] if size else Hits()
            stored = hits.documents or [None] * len(hits.ids)
            known = {} if hits.documents else self._backend.get(list(dict.fromkeys(hits.ids)))
            decoded: dict[str, Any] = {}
            result = []
            for key, score, position, document in zip(hits.ids, hits.scores, hits.positions, stored, strict=True):
                data = known.get(key) if document is None else document
                if data is None:
                    continue  # a crash deleted the document, and left its elements
                if key not in decoded:
                    decoded[key] = self._decode(data)
                if position < sum(1 for _ in iter_elements(decoded[key], column.path)):
                    result.append((position, decoded[key], score))
            enough = len(decoded) if distinct else len(result)
            if enough >= depth or len(hits.ids) < size:
                return result
            size *= 4

    def _compare_elements(
        self, column: VectorColumn, queries: Any, selection: Selection
    ) -> list[tuple[int, Any, float]]:
        """Compare the elements of all selected documents, best first."""
        result: list[tuple[int, Any, float]] = []
        for document in self._scan(selection):
            vectors = [element.__dict__.get(column.path[-1]) for element in iter_elements(document, column.path)]
            present = np.array([place for place, vector in enumerate(vectors) if vector is not None], np.int64)
            search = NearestRows(queries, str(column), self.metric, len(present))
            search.add(present, [vectors[place] for place in present])
            [(places, scores)] = search.results()
            result += [(place, document, score) for place, score in zip(places.tolist(), scores.tolist(), strict=True)]
        sign = 1 if self.metric == "euclidean" else -1
        return sorted(result, key=lambda item: sign * item[2])

    def _match_text(self, text: Any, path: str | None, selection: Selection, depth: int) -> Hits:
        column = self._plan.text(path)
        if not isinstance(text, str):
            raise QueryError(f"text is a string of words, got {describe(text)}.")
        if not split_words(text):
            raise QueryError(f"text={text!r} has no word to search for.")
        if not depth:
            return Hits()
        if self._evaluates(selection):
            return self._backend.match_text(column, text, selection, depth)
        # The engine ranks more rows than those of the query, and the others are left out of the result.
        query, superset = selection.query, Selection(selection.query, selection.condition)
        size = 4 * depth
        while True:
            hits = self._backend.match_text(column, text, superset, size)
            documents = [self._decode(data) for data in hits.documents]
            kept = [row for row, document in enumerate(documents) if query is None or query(document)]
            if len(kept) >= depth or len(hits.ids) < size:
                kept = kept[:depth]
                return Hits(
                    [hits.ids[row] for row in kept], [hits.scores[row] for row in kept], [documents[r] for r in kept]
                )
            size *= 4

    def _evaluates(self, selection: Selection) -> bool:
        return selection.exact or self._backend.evaluates_queries

    def _scan(self, selection: Selection) -> Iterator[Any]:
        """Yield the documents of a selection."""
        for row in self._backend.scan(selection, documents=True):
            document = self._decode(row.document)
            if selection.query is None or selection.query(document):
                yield document

    def _decode(self, data: Any) -> Any:
        if isinstance(data, CompactRow):
            return self._compact.decode(data)
        return data if is_document_type(type(data)) else self.document_type.from_bytes(data)

    def _array(self, documents: list[Any]) -> DocumentArray[DocT]:
        array: DocumentArray[DocT] = DocumentArray[self.document_type](documents)  # type: ignore[name-defined]
        return array

    def _found(self, hits: Hits, offset: int, limit: int) -> Found[DocT]:
        page = slice(offset, offset + limit)
        documents = [self._decode(data) for data in hits.documents[page]]
        return Found(self._array(documents), np.array(hits.scores[page], np.float64))

    # --- rows

    def __len__(self) -> int:
        return self._backend.count(Selection())

    def __contains__(self, key: object) -> bool:
        return bool(self._backend.get([check_key(key, self.document_type)]))

    def count(self, where: Where = None) -> int:
        """Return the number of documents, or of those that match a query."""
        selection = self._select(where)
        return self._backend.count(selection) if self._evaluates(selection) else sum(1 for _ in self._scan(selection))

    @overload
    def get(self, ids: str) -> DocT | None: ...
    @overload
    def get(self, ids: list[str] | tuple[str, ...]) -> DocumentArray[DocT]: ...
    def get(self, ids: Any) -> Any:
        """Return the document with an id, or None; for several ids, those that exist, in this order."""
        many = isinstance(ids, Iterable) and not isinstance(ids, (str, bytes))
        keys = [check_key(key, self.document_type) for key in (ids if many else [ids])]
        stored = self._backend.get(keys)
        documents = [self._decode(stored[key]) for key in keys if key in stored]
        if many:
            return self._array(documents)
        return documents[0] if documents else None

    def filter(self, where: Where = None, *, limit: int | None = None, offset: int = 0) -> DocumentArray[DocT]:
        """Return the documents that match a query, without ranking; by default all of them."""
        _, offset = _check_page(0 if limit is None else limit, offset)
        end = None if limit is None else offset + limit
        return self._array(list(islice(self._scan(self._select(where)), offset, end)))

    def __iter__(self) -> Iterator[DocT]:
        return self._scan(Selection())

    # --- changes

    def upsert(self, documents: Any) -> int:
        """Insert documents, or replace those with the same ids; return their number.

        One document, an array, a batch or a list is checked as a whole before anything is written, and is one change
        (in LanceDB, one for each table). Of an iterator or a stored dataset, blocks of documents are.
        """
        if is_document_type(type(documents)):
            documents = [documents]
        if isinstance(documents, DocumentBatch):
            documents = documents.unstack()
        if isinstance(documents, (str, bytes, Mapping)) or not isinstance(documents, Iterable):
            raise DocumentTypeError(
                f"upsert takes documents of {self.document_type.__name__}, got {describe(documents)}."
            )
        if isinstance(documents, (list, tuple, DocumentArray)):
            return self._upsert(list(documents), {})
        count = 0
        for block in _blocks(documents):
            count += self._upsert(block, {})
        return count

    def _upsert(self, documents: Sequence[Any], state: Mapping[str, str]) -> int:
        if documents or state:
            rows = self._encode(documents) if documents else None
            self._backend.write(rows, [], state)
        return len(documents)

    def _encode(self, documents: Sequence[Any]) -> Rows:
        encoder = self._compact if self._backend.returns_columns else None
        return self._plan.encode(documents, unit=self.metric == "cosine", encoder=encoder)

    def delete(self, what: Any) -> int:
        """Delete documents by id, by several ids, by a query or by a function; return how many existed."""
        if isinstance(what, Mapping) or (callable(what) and not is_document_type(type(what))):
            selection = self._select(what)
            if isinstance(what, Mapping) and not what:
                raise QueryError("delete({}) would delete every document: use clear().")
            if self._evaluates(selection):
                keys = [row.id for row in self._backend.scan(selection, documents=False)]
            else:
                keys = [str(document.id) for document in self._scan(selection)]
        else:
            single = isinstance(what, (str, bytes)) or not isinstance(what, Iterable)
            items = [what] if single or is_document_type(type(what)) else what
            ids = [item.id if is_document_type(type(item)) else item for item in items]
            checked = [check_key(key, self.document_type) for key in ids]
            keys = list(self._backend.get(checked))
        if keys:
            self._backend.write(None, keys, {})
        return len(keys)

    def clear(self) -> int:
        """Delete all documents; return their number."""
        keys = [row.id for row in self._backend.scan(Selection(), documents=False)]
        self._backend.write(None, keys, {"dataset": "", "version": ""})
        return len(keys)

    def sync(self, dataset: Any, *, full: bool = False) -> SyncReport:
        """Make the index equal to a dataset: insert, replace and delete what differs.

        If the dataset has versions, and an earlier one was synchronized, only the changes since then are read.
        Otherwise, all rows are read, and compared with checksums of the documents in the index. A synchronization that
        was interrupted is repeated by the next one. `full` reads all rows, also to undo other changes of the index.
        """
        version = _version_of(dataset)
        folder = getattr(dataset, "folder", None)
        url = str(getattr(folder, "url", ""))
        state = self._backend.open(self._plan, self.metric)
        known = json.loads(state.get("version") or "null")
        changes = None
        if version is not None and url and state.get("dataset") == url and isinstance(known, int) and not full:
            with suppress(StorageError):  # the earlier version was cleaned up
                changes = dataset.diff(known, version)
        report = self._reconcile(dataset, version) if changes is None else self._apply_changes(changes, version)
        done = {"dataset": url if version is not None else "", "version": json.dumps(version)}
        self._backend.write(None, [], done)
        return report

    def _apply_changes(self, changes: Any, version: int | None) -> SyncReport:
        """Read the rows that were added and removed between two versions of a dataset."""
        added: set[str] = set()
        for block in _blocks(changes.added):
            added.update(map(self._plan.key_of, block))
            self._upsert(block, {})
        removed = [key for item in changes.removed if (key := _key(item, self.document_type)) not in added]
        if removed:
            self._backend.write(None, removed, {})
        return SyncReport(len(added), len(removed), None, version)

    def _reconcile(self, dataset: Any, version: int | None) -> SyncReport:
        """Compare all rows of a dataset with checksums of the documents in the index."""
        before = {row.id: row.digest for row in self._backend.scan(Selection(), documents=False)}
        upserted = unchanged = 0
        present: set[str] = set()
        for block in _blocks(dataset):
            rows = self._encode(block)
            present.update(rows.ids)
            new = {key for key, value in zip(rows.ids, rows.digests, strict=True) if before.get(key) != value}
            unchanged += len(rows.ids) - len(new)
            changed = [document for document in block if str(document.id) in new]
            upserted += self._upsert(changed, {}) and len(new)
        removed = [key for key in before if key not in present]
        if removed:
            self._backend.write(None, removed, {})
        return SyncReport(upserted, len(removed), unchanged, version)

    def optimize(self) -> Self:
        """Make searches of many documents fast: build or update the approximate indexes and those of words.

        Searches before it are exact in PostgreSQL, and in LanceDB for the rows that were written after the last call.
        """
        self._backend.optimize()
        return self

    # --- life

    def close(self) -> None:
        """Close connections; documents in memory are freed."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._url is None:
            raise SearchError("an index without an address cannot be sent to another process: open it there.")
        return _reopen, (type(self), self._url, self._options)

    def __repr__(self) -> str:
        place = "memory" if self._url is None else display_uri(self._url)
        return f"<{type(self).__name__} in {place}, {self.metric}>"


def _version_of(dataset: Any) -> int | None:
    """Return the version of a dataset whose changes can be read; None if it has none, or is a part of its rows."""
    if not hasattr(type(dataset), "diff"):
        return None
    try:
        version: int = dataset.version
    except StorageError:
        return None  # of files that quire did not write
    rows = {each.number: each.rows for each in dataset.versions()}
    return version if rows.get(version) == len(dataset) else None


def _reopen(index_type: Any, url: str, options: dict[str, Any]) -> Any:
    return index_type(url, **options)


def _table_name(name: str | None, document_type: type[Any]) -> str:
    if name is None:
        return re.sub(r"[^a-z0-9_]", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", document_type.__name__).lower())[:24]
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,23}", name) is None:
        raise OptionError(f"name={name!r}: a name has at most 24 letters, digits and underscores, a letter first.")
    return name


def _check_page(limit: Any, offset: Any) -> tuple[int, int]:
    limit, offset = whole_number("limit", limit), whole_number("offset", offset)
    if limit < 0 or offset < 0:
        raise QueryError(f"limit={limit}, offset={offset}: they cannot be negative.")
    return limit, offset


def _blocks(documents: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(documents)
    while block := list(islice(iterator, _BLOCK)):
        yield block


def _key(item: Any, document_type: type[Any]) -> str:
    return check_key(item.id if is_document_type(type(item)) else item, document_type)


def _fuse(rankings: Sequence[Hits]) -> Hits:
    """Merge rankings by reciprocal rank fusion."""
    scores: dict[str, float] = {}
    documents: dict[str, Any] = {}
    for hits in rankings:
        for rank, (key, document) in enumerate(zip(hits.ids, hits.documents, strict=True), 1):
            scores[key] = scores.get(key, 0.0) + 1 / (_RANK + rank)
            documents.setdefault(key, document)
    best = sorted(scores, key=lambda key: -scores[key])
    return Hits(best, [scores[key] for key in best], [documents[key] for key in best])


class AsyncDocumentIndex(Generic[DocT]):
    """The calls of an index for asyncio; each runs in a thread, so that the event loop goes on."""

    def __init__(self, index: DocumentIndex[DocT]) -> None:
        self.index = index

    async def search(self, vector: Any = None, **options: Any) -> Found[DocT]:
        """See `DocumentIndex.search`."""
        return await asyncio.to_thread(self.index.search, vector, **options)

    async def search_batch(self, vectors: Any, **options: Any) -> list[Found[DocT]]:
        """See `DocumentIndex.search_batch`."""
        return await asyncio.to_thread(self.index.search_batch, vectors, **options)

    async def search_elements(self, vector: Any, **options: Any) -> FoundElements[DocT]:
        """See `DocumentIndex.search_elements`."""
        return await asyncio.to_thread(self.index.search_elements, vector, **options)

    async def get(self, ids: Any) -> Any:
        """See `DocumentIndex.get`."""
        return await asyncio.to_thread(self.index.get, ids)

    async def filter(self, where: Where = None, **options: Any) -> DocumentArray[DocT]:
        """See `DocumentIndex.filter`."""
        return await asyncio.to_thread(self.index.filter, where, **options)

    async def count(self, where: Where = None) -> int:
        """See `DocumentIndex.count`."""
        return await asyncio.to_thread(self.index.count, where)

    async def upsert(self, documents: Any) -> int:
        """See `DocumentIndex.upsert`."""
        return await asyncio.to_thread(self.index.upsert, documents)

    async def delete(self, what: Any) -> int:
        """See `DocumentIndex.delete`."""
        return await asyncio.to_thread(self.index.delete, what)

    async def sync(self, dataset: Any, *, full: bool = False) -> SyncReport:
        """See `DocumentIndex.sync`."""
        return await asyncio.to_thread(self.index.sync, dataset, full=full)

    async def optimize(self) -> None:
        """See `DocumentIndex.optimize`."""
        await asyncio.to_thread(self.index.optimize)
