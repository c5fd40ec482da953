"""The array of `Document`: nested documents, ids and attributes as keys, as in DocArray up to 0.21.

`DocumentArray[Document]` derives from the class here; arrays of other document classes do not. `quire.compat` exports
it under the name that DocArray has.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from weakref import ref

import numpy as np
from typing_extensions import Self, Unpack

from quire.array import DocumentArray, FieldNames, Found, Metric, check_method_typo, vector_field
from quire.document import BaseDocument
from quire.errors import ColumnError, DocumentTypeError, OptionError, PathError, QueryError, did_you_mean
from quire.files import read_uri, sample_paths
from quire.schema import FieldKind
from quire.tensors import describe, framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.documents._document import Document

Distance = Callable[[Any, Any], Any]
"""A metric of one's own: from a matrix of queries and one of vectors to their distances, a row for each query."""

_STEP = re.compile(r"([rcm])(?:\[(-?\d*)(?:(:)(-?\d*))?\])?")
_NESTED = {"c": "chunks", "m": "matches"}
_LINE_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}


class NestedDocumentArray(DocumentArray["Document"]):
    """An array of `Document`s.

    In addition to positions and fields, keys are: the id of a document or a list of ids, `'@c,m'` (the chunks and
    matches of all documents; see `traverse_flat`), `...` (see `flatten`), and a pair of rows and one or several
    attributes: `docs[:, 'text']`, `docs['id', ('text', 'tags.lang')]`. A text that is the name of a field, or a path
    that starts with one, is a column; every other text is an id.
    """

    # _owner: a weak reference to the document whose `chunks` this array is; documents that are added get its id as
    # their `parent_id`.
    __slots__ = ("_owner",)
    _owner: ref[Document] | None

    def __init__(self, documents: Any = None, *, unique_ids: bool = False) -> None:
        """Make an array of documents, of mappings that become documents, or of a single document."""
        if isinstance(documents, (BaseDocument, Mapping)):
            documents = [documents]
        super().__init__(() if documents is None else documents, unique_ids=unique_ids)

    def _restore(self, documents: list[Any], *, unique_ids: bool) -> None:
        super()._restore(documents, unique_ids=unique_ids)
        object.__setattr__(self, "_owner", None)

    # --- keys

    def __getitem__(self, key: Any) -> Any:
        """Get a document by position or id, documents by several of them or by '@c,m', columns, or attributes."""
        if isinstance(key, tuple):
            rows, names = self._split_key(key)
            return self._get_attributes(rows, names)
        if key is Ellipsis:
            return self.flatten()
        if isinstance(key, str):
            if key.startswith("@"):
                return self.traverse_flat(key)
            if self._is_field(key):
                return super().__getitem__(_to_path(key))
            return self.by_id(key)
        if _are_ids(key):
            return self._like([self.by_id(id_) for id_ in key])
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Replace documents by position or id, or set columns or attributes."""
        if isinstance(key, tuple):
            rows, names = self._split_key(key)
            self._set_attributes(rows, names, value)
        elif key is Ellipsis or (isinstance(key, str) and key.startswith("@")):
            raise PathError(
                f"docs[{key!r}] is a new array of nested documents: set their attributes, docs[{key!r}, 'text'] = ..."
            )
        elif isinstance(key, str) and self._is_field(key):
            path = _to_path(key)
            if "." in path:
                self._set_attributes(slice(None), path, value)
            else:
                super().__setitem__(path, value)
        else:
            super().__setitem__(self._to_positions(key), value)
            self._adopt(self._documents)

    def __delitem__(self, key: Any) -> None:
        """Delete documents by position or id, all of them (`...`), nested ones ('@c'), or clear attributes."""
        if isinstance(key, tuple):
            rows, names = self._split_key(key)
            for document in self._select(rows):
                document.pop(*([names] if isinstance(names, str) else names))
        elif key is Ellipsis:
            super().__delitem__(slice(None))
        elif isinstance(key, str) and key.startswith("@"):
            _remove(self, {id(document) for document in self.traverse_flat(key)})
        else:
            super().__delitem__(self._to_positions(key))

    def __contains__(self, value: object) -> bool:
        """Return whether a document has an id, or is equal to a document."""
        if not isinstance(value, str):
            return super().__contains__(value)
        return any(document.id == value for document in self._documents)

    def _split_key(self, key: tuple[Any, ...]) -> tuple[Any, str | Sequence[str]]:
        if len(key) != 2 or not (isinstance(key[1], str) or (key[1] and _are_ids(key[1]))):
            raise PathError(
                f"docs[{', '.join(map(repr, key))}]: a pair of rows and attributes is written as docs[:, 'text'] or "
                "docs[0, ('text', 'tags')]."
            )
        names = [key[1]] if isinstance(key[1], str) else key[1]
        for name in names:
            if not self._is_field(name):
                raise PathError(
                    f"{self._schema.name} has no field {name!r}. {did_you_mean(name, self._schema.by_name)}"
                )
        return key[0], key[1]

    def _is_field(self, key: str) -> bool:
        return re.split(r"\.|__", key, maxsplit=1)[0] in self._schema.by_name

    def _to_positions(self, key: Any) -> Any:
        """Return the positions of ids; other keys as they are."""
        if not (isinstance(key, str) or _are_ids(key)):
            return key
        positions = {document.id: row for row, document in reversed(list(enumerate(self._documents)))}
        for id_ in [key] if isinstance(key, str) else key:
            if id_ not in positions:
                raise PathError(f"no document in {self!r} has the id {id_!r}.")
        return positions[key] if isinstance(key, str) else [positions[id_] for id_ in key]

    def _select(self, rows: Any) -> list[Document]:
        selected: Any = self[rows]
        documents: list[Any] = [selected] if isinstance(selected, BaseDocument) else list(selected)
        return documents

    # --- columns and attributes

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and not self._is_field(name):  # an id is a key only: docs['id']
            check_method_typo(type(self), self._schema, name)
            raise PathError(
                f"{type(self).__name__} has no method {name!r}, and {self._schema.name} no such field. "
                f"{did_you_mean(name, self._schema.by_name)}"
            )
        return super().__getattr__(name)

    def _get_attributes(self, rows: Any, names: str | Sequence[str]) -> Any:
        selected = self[rows]
        if isinstance(selected, BaseDocument):
            values = [_read_path(selected, _to_path(name)) for name in ([names] if isinstance(names, str) else names)]
            return values[0] if isinstance(names, str) else values
        if isinstance(names, str):
            return _stack(selected[names]) if names in ("embedding", "tensor") else selected[names]
        return [selected._get_attributes(slice(None), name) for name in names]

    def _set_attributes(self, rows: Any, names: str | Sequence[str], values: Any) -> None:
        selected = self[rows]
        if isinstance(selected, BaseDocument):
            documents: list[Any] = [selected]
            values = [values] if isinstance(names, str) else [[value] for value in values]
        else:
            documents = list(selected)
        if not isinstance(names, str):
            if len(values) != len(names):
                raise ColumnError(f"{len(names)} attributes, but {len(values)} columns of values.")
            for name, column in zip(names, values, strict=True):
                self._like(documents)._set_attributes(slice(None), name, column)
            return
        path = _to_path(names)
        name, _, below = path.partition(".")
        if not below or self._schema.by_name[name].kind is not FieldKind.DICT:
            DocumentArray.__setitem__(self._like(documents), path, values)
            return
        values = list(values)
        if len(values) != len(documents):
            raise ColumnError(f"{path}: there are {len(documents)} documents, got {len(values)} values.")
        for document, value in zip(documents, values, strict=True):
            target = getattr(document, name)
            *parents, last = below.split(".")
            for parent in parents:
                target = target.setdefault(parent, {})
            target[last] = value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a column; None for `embedding`, `tensor` and the other optional fields clears it."""
        if value is None and name in self._schema.by_name:
            value = [None] * len(self)
        super().__setattr__(name, value)

    @property
    def texts(self) -> list[str | None]:
        """The `text` of each document."""
        return [document.text for document in self._documents]

    @texts.setter
    def texts(self, values: Iterable[str] | None) -> None:
        self.text = values

    @property
    def blobs(self) -> list[bytes | None]:
        """The `blob` of each document."""
        return [document.blob for document in self._documents]

    @blobs.setter
    def blobs(self, values: Iterable[bytes] | None) -> None:
        self.blob = values

    @property
    def contents(self) -> list[Any]:
        """The `content` of each document."""
        return [document.content for document in self._documents]

    @contents.setter
    def contents(self, values: Iterable[Any]) -> None:
        values = list(values)
        if len(values) != len(self):
            raise ColumnError(f"contents: there are {len(self)} documents, got {len(values)} values.")
        for document, value in zip(self._documents, values, strict=True):
            document.content = value

    @property
    def embeddings(self) -> Any:
        """The embeddings as one tensor; None if no document has one, a list if only some have."""
        return _stack([document.embedding for document in self._documents])

    @embeddings.setter
    def embeddings(self, values: Any) -> None:
        self.embedding = values

    @property
    def tensors(self) -> Any:
        """The tensors as one tensor; None if no document has one, a list if only some have."""
        return _stack([document.tensor for document in self._documents])

    @tensors.setter
    def tensors(self, values: Any) -> None:
        self.tensor = values

    # --- chunks know their parent

    def insert(self, index: int, value: Any) -> None:
        """Insert a document before a position."""
        super().insert(index, value)
        self._adopt(self._documents)

    def append(self, value: Any) -> None:
        """Append a document."""
        super().append(value)
        self._adopt(self._documents[-1:])

    def extend(self, values: Iterable[Any]) -> None:
        """Append documents: all of them, or none if one does not fit."""
        before = len(self)
        super().extend(values)
        self._adopt(self._documents[before:])

    def _adopt(self, documents: list[Any]) -> None:
        """Set the `parent_id` of chunks that have none."""
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            for document in documents:
                if document.parent_id is None:
                    document.parent_id = owner.id

    # --- nested documents

    def traverse_flat(self, traversal_paths: str) -> Self:
        """Return nested documents as one array; the documents are not changed or copied.

        A path is a sequence of steps: `r` (the documents themselves), `c` (their chunks) and `m` (their matches), each
        with an optional slice: 'c', 'cm', 'c[:3]', 'r[0]m'. Several paths are separated by commas: 'r,c,m'.
        """
        documents: list[Any] = []
        for path in traversal_paths.removeprefix("@").split(","):
            documents += self._follow(path.strip())
        return self._like(documents)

    def _follow(self, path: str) -> list[Any]:
        steps, end = [], 0
        while (match := _STEP.match(path, end)) is not None and end < len(path):
            steps.append(match)
            end = match.end()
        if not steps or end < len(path):
            raise QueryError(
                f"{path!r} is not a traversal: write r, c and m with optional slices, as '@c,m' or '@r[:5]c'."
            )
        documents = list(self._documents)
        for match in steps:
            rows = _to_slice(match)
            if match[1] == "r":
                documents = documents[rows]
            else:
                name = _NESTED[match[1]]
                documents = [nested for item in documents for nested in item.__dict__[name]._documents[rows]]
        return documents

    def flatten(self) -> Self:
        """Return all documents with all nested chunks and matches as one array, inner ones first.

        The documents are not changed: they keep their chunks and matches.
        """

        def walk(document: Any) -> Iterator[Any]:
            for name in _NESTED.values():
                for nested in document.__dict__[name]._documents:
                    yield from walk(nested)
            yield document

        return self._like([inner for document in self._documents for inner in walk(document)])

    def split_by_tag(self, tag: str) -> dict[Any, Self]:
        """Return an array for each value of a tag; documents without the tag are in none."""
        having = self._like([document for document in self._documents if tag in document.tags])
        return having.split_by(f"tags.{tag}")

    # --- search

    def find(
        self,
        query: Any,
        field: str = "embedding",
        *,
        metric: Metric | Literal["sqeuclidean"] | Distance = "cosine",
        limit: int = 10,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - as in DocArray
        **names: Unpack[FieldNames],
    ) -> Any:
        """Find the nearest documents to a vector or a document, or to each of several (a matrix or an array: a list).

        A metric of your own is a function of a matrix of queries and one of vectors that returns distances. `filter`
        selects the documents to search. A query that is a dict is a filter by itself.
        """
        if isinstance(query, Mapping):
            return self.filter(query)
        field = vector_field(field, names, self._schema, ["filter"])
        candidates = self if filter is None else self.filter(filter)
        framework = framework_of(query)
        several = isinstance(query, DocumentArray) or (framework is not None and len(framework.shape(query)) == 2)
        results = candidates._search(query if several else [query], field, metric, limit)
        return results if several else results[0]

    def match(
        self,
        other: DocumentArray[Any] | None = None,
        *,
        metric: Metric | Literal["sqeuclidean"] | Distance = "cosine",
        metric_name: str | None = None,
        limit: int | None = 20,
        field: str = "embedding",
        exclude_self: bool = False,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - as in DocArray
    ) -> None:
        """Set the `matches` of every document to copies of the nearest documents of another array, nearest first.

        `scores` of a match has its distance under the name of the metric, or `metric_name`: 'cosine' is 1 - cosine, and
        smaller is nearer. `exclude_self` leaves out documents with the same id, and `limit=None` keeps all.
        """
        candidates = self._like(list(self if other is None else other))
        if filter is not None:
            candidates = candidates.filter(filter)
        name = metric_name or (metric if isinstance(metric, str) else getattr(metric, "__name__", "distance"))
        count = len(candidates) if limit is None else limit
        # One more than requested: the document itself may be among them.
        results = candidates._search(self, field, metric, count + exclude_self)
        for document, (nearest, scores) in zip(self._documents, results, strict=True):
            matches = []
            for candidate, score in zip(nearest, scores.tolist(), strict=True):
                if exclude_self and candidate.id == document.id:
                    continue
                distance = 1 - score if metric == "cosine" else -score if metric == "dot" else score
                match = copy.copy(candidate)
                match.__dict__["scores"] = {**candidate.scores, name: distance}
                match.__dict__["matches"] = type(document.matches)._trusted([])
                matches.append(match)
            document.matches = type(document.matches)._trusted(matches[:count])

    def _search(self, queries: Any, field: str, metric: Any, limit: int) -> list[Found[Any]]:
        if metric == "sqeuclidean":
            results = self.find_batch(queries, field, metric="euclidean", limit=limit)
            return [Found(documents, scores**2) for documents, scores in results]
        if not callable(metric):
            return self.find_batch(queries, field, metric=metric, limit=limit)
        rows = [row for row, document in enumerate(self._documents) if _read_path(document, field) is not None]
        vectors = np.stack([_to_numpy(_read_path(self._documents[row], field)) for row in rows])
        targets = [_read_path(query, field) if isinstance(query, BaseDocument) else query for query in queries]
        distances = np.asarray(metric(np.stack([_to_numpy(target) for target in targets]), vectors))
        if distances.shape != (len(targets), len(rows)):
            raise QueryError(
                f"the metric returned distances of shape {distances.shape}: it gets {len(targets)} queries and "
                f"{len(rows)} vectors, so that {(len(targets), len(rows))} is expected."
            )
        orders = np.argsort(distances, axis=1, kind="stable")[:, :limit]
        return [
            Found(self._like([self._documents[rows[i]] for i in order]), distance[order])
            for order, distance in zip(orders.tolist(), distances, strict=True)
        ]

    # --- other sources

    @classmethod
    def from_lines(
        cls,
        lines: Iterable[str] | None = None,
        filepath: str | None = None,
        *,
        line_format: Literal["json", "csv", "text"] | None = None,
        size: int | None = None,
        sampling_rate: float | None = None,
        seed: int | None = None,
    ) -> Self:
        """Make a document of each line: of JSON, of a table, or its text.

        The format is by default that of the suffix of `filepath`, where other suffixes mean text, and JSON for `lines`.
        """
        if (lines is None) == (filepath is None):
            raise OptionError("from_lines() takes either lines or filepath.")
        if line_format is None:
            suffix = "." + filepath.rpartition(".")[2].lower() if filepath is not None else ".json"
            line_format = _LINE_FORMATS.get(suffix, "text")  # type: ignore[assignment]
        if line_format not in ("json", "csv", "text"):
            raise OptionError(f"line_format={line_format!r}: use 'json', 'csv' or 'text'.")
        if lines is None:
            assert filepath is not None
            lines = read_uri(filepath).decode().splitlines()
        rows = [line.rstrip("\r\n") for line in lines]
        header = rows[:1] if line_format == "csv" else []
        rows = sample_paths(rows[len(header) :], size, sampling_rate, seed)
        if line_format == "text":
            return cls({"text": row} for row in rows)
        text = "\n".join([*header, *rows])
        return cls.from_csv(text=text) if line_format == "csv" else cls.from_ndjson(text=text)

    @classmethod
    def from_ndarray(
        cls, array: NDArray[Any], axis: int = 0, *, size: int | None = None, seed: int | None = None
    ) -> Self:
        """Make a document of each part of an array along an axis, as its `tensor`; with `size`, of n random ones."""
        if not np.ndim(array):
            raise DocumentTypeError(f"from_ndarray() takes an array with at least one axis, got {describe(array)}.")
        rows = np.moveaxis(array, axis, 0)
        documents = cls({"tensor": row} for row in rows)
        return documents if size is None else documents.sample(min(size, len(documents)), seed)

    def get_vocabulary(self, min_freq: int = 1, text_attrs: Sequence[str] = ("text",)) -> dict[str, int]:
        """Number the words of all documents that occur at least `min_freq` times, the most frequent first, from 2 on.

        0 is for padding and 1 for unknown words; see `Document.convert_text_to_tensor`.
        """
        counts: Counter[str] = Counter()
        for document in self._documents:
            counts.update(document.get_vocabulary(text_attrs))
        frequent = [word for word, count in counts.most_common() if count >= min_freq]
        return {word: number for number, word in enumerate(frequent, start=2)}


def _are_ids(key: object) -> bool:
    return isinstance(key, (list, tuple)) and bool(key) and all(isinstance(item, str) for item in key)


def _to_path(key: str) -> str:
    """Return a path; DocArray separates its names by two underscores."""
    return key.replace("__", ".") if "." not in key else key


def _to_slice(match: re.Match[str]) -> slice:
    _, start, colon, stop = match.groups()
    if start is None:
        return slice(None)
    if colon is None:
        if not start:
            raise QueryError(f"{match[0]!r}: the slice is empty.")
        return slice(int(start), int(start) + 1 or None)
    return slice(int(start) if start else None, int(stop) if stop else None)


def _read_path(document: Any, path: str) -> Any:
    """Return the value at a path, which may go through dicts; None where there is none."""
    value = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def _stack(values: list[Any]) -> Any:
    """Return tensors as one, None if all are None, and a list if they make no tensor."""
    if all(value is None for value in values):
        return None
    frameworks = {framework_of(value) for value in values}
    framework = frameworks.pop()
    if framework is None or frameworks or any(framework.is_sparse(value) for value in values):
        return values
    if len({framework.shape(value) for value in values}) > 1:
        return values
    return framework.stack(values)


def _to_numpy(value: Any) -> NDArray[Any]:
    framework = framework_of(value)
    return np.asarray(value) if framework is None else framework.to_numpy(value)


def _remove(documents: DocumentArray[Any], removed: set[int]) -> None:
    """Delete nested documents, by identity, from an array and the chunks and matches in it."""
    kept = [document for document in documents if id(document) not in removed]
    if len(kept) < len(documents):
        documents[:] = kept
    for document in kept:
        for name in _NESTED.values():
            _remove(document.__dict__[name], removed)
