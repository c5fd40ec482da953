"""Exact nearest neighbours: every row is compared with every query, in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from quire._protocols import is_document_type
from quire.array._positions import whole_number
from quire.array._query import parse_key
from quire.errors import OptionError, PathError, QueryError, TensorError, check_options, did_you_mean
from quire.schema import Schema, join_path, parse_path
from quire.tensors import describe, framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Metric = Literal["cosine", "dot", "euclidean", "cosine_sim", "euclidean_dist"]
_OLD_METRICS: dict[str, Metric] = {"cosine_sim": "cosine", "euclidean_dist": "euclidean"}
"""The names of DocArray for metrics with the same scores."""
METRICS: tuple[Metric, ...] = ("cosine", "dot", "euclidean")
_QUERIES = 256
"""Queries that are compared with a block of rows at once."""
_BLOCK_BYTES = 4 << 20
"""Bytes of vectors that are compared at a time."""


class FieldNames(TypedDict, total=False):
    """The names of `field` in versions of DocArray, which every `find` takes as well."""

    embedding_field: str
    search_field: str


def vector_field(field: str, names: FieldNames, schema: Schema | None, more: Iterable[str] = ()) -> str:
    """Return the path of the field to search, which was passed as `field` or under one of its old names.

    `more` are further keywords of this `find`.
    """
    check_options("find", names, ["field", "metric", "limit", *more, *FieldNames.__annotations__])
    if len(names) > (field == "embedding"):
        raise OptionError(f"{' and '.join(names)}: other names of field. Pass one of them.")
    key: str = next(iter(names.values()), field)  # type: ignore[assignment]
    return join_path(parse_key(key, schema))


@contextmanager
def explain_vector_field() -> Iterator[None]:
    """Add to the error about an unknown field how a search names its field: the default is 'embedding'."""
    try:
        yield
    except PathError as error:
        raise PathError(f"{error.args[0]} Pass the field that holds the vectors: find(query, 'field').") from None


class NearestRows:
    """Collects the nearest rows to each of many queries from blocks of rows; every search of quire ends here.

    A query is a vector, or a document whose field is the vector. Scores are similarities for 'cosine' and 'dot' (larger
    is nearer) and distances for 'euclidean' (smaller is nearer). Of rows with equal scores, the first ones are kept.
    """

    def __init__(self, queries: Any, field: str, metric: Metric, limit: int) -> None:
        self.metric = check_metric(metric)
        self.limit = whole_number("limit", limit)
        if self.limit < 0:
            raise QueryError(f"limit={limit}: it cannot be negative.")
        self._field = field
        targets = query_matrix(queries, field)
        if np.isnan(targets).any():
            raise QueryError("the queries have NaN in their vectors, which is near to nothing.")
        with np.errstate(invalid="ignore", over="ignore"):
            self._targets = _normalize(targets) if self.metric == "cosine" else targets
        nothing = np.empty(0, np.int64), np.empty(0, targets.dtype)
        self._best: list[tuple[NDArray[np.int64], NDArray[Any]]] = [nothing for _ in targets]

    def add(self, rows: NDArray[np.int64], vectors: Any) -> None:
        """Compare the vectors of some rows, which come after all earlier ones."""
        if not len(rows):
            return
        matrix = _to_matrix(vectors, self._field)
        if len(self._targets) and matrix.shape[1] != self._targets.shape[1]:
            raise QueryError(f"the queries have {self._targets.shape[1]} dimensions, the documents {matrix.shape[1]}.")
        # A block of vectors is still in the cache of the processor when its lengths are computed after its products.
        height = max(256, _BLOCK_BYTES // max(1, matrix.itemsize * matrix.shape[1]))
        with np.errstate(invalid="ignore", over="ignore"):  # infinities make NaN, which sorts last
            for start in range(0, len(matrix), height):
                self._add_block(rows[start : start + height], matrix[start : start + height])

    def _add_block(self, rows: NDArray[np.int64], block: NDArray[Any]) -> None:
        lengths = None
        if self.metric == "cosine":
            lengths = np.sqrt(np.einsum("ij,ij->i", block, block))
            lengths[lengths == 0] = 1  # zero vectors have the score 0
        for start in range(0, len(self._targets), _QUERIES):
            targets = self._targets[start : start + _QUERIES]
            if self.metric == "euclidean":
                # Differences, not the expanded square: close rows keep their precision.
                scores = np.stack([_measure_distances(block, target) for target in targets])
            else:
                scores = targets @ block.T
            if lengths is not None:
                scores /= lengths
            for query, of_query in enumerate(scores, start):
                self._keep_best(query, rows, of_query)

    def _keep_best(self, query: int, rows: NDArray[np.int64], scores: NDArray[Any]) -> None:
        """Merge the scores of a block into the best ones of a query."""
        smallest = self.metric == "euclidean"
        best_rows, best = self._best[query]
        if len(best) == self.limit and len(best) and not np.isnan(best[-1]):
            # Most blocks have few rows that are better than the last one kept; only those are sorted.
            better = np.flatnonzero(scores < best[-1] if smallest else scores > best[-1])
            if not len(better):
                return
            rows, scores = rows[better], scores[better]
        order = _select_best(scores, self.limit, smallest=smallest)
        if len(best):
            rows, scores = np.concatenate([best_rows, rows[order]]), np.concatenate([best, scores[order]])
            order = _select_best(scores, self.limit, smallest=smallest)
        self._best[query] = rows[order], scores[order]

    def results(self) -> list[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Return the rows and scores for each query, best first."""
        return list(self._best)


def check_metric(metric: Metric) -> Metric:
    """Return the current name of a metric; one that is unknown is an error."""
    metric = _OLD_METRICS.get(metric, metric)
    if metric not in METRICS:
        raise QueryError(f"{metric!r} is not a metric. {did_you_mean(str(metric), METRICS)}")
    return metric


def _measure_distances(rows: NDArray[Any], target: NDArray[Any]) -> NDArray[Any]:
    differences = rows - target
    distances: NDArray[Any] = np.sqrt(np.einsum("ij,ij->i", differences, differences))
    return distances


def query_matrix(queries: Any, field: str) -> NDArray[Any]:
    """Return the vectors of queries as a matrix with a row for each: vectors, or documents with the field."""
    if framework_of(queries) is not None:
        return _to_matrix(queries, "queries")
    vectors = [_query_vector(query, field) for query in queries]
    return _to_matrix(vectors, "queries") if vectors else np.empty((0, 0))


def _query_vector(query: Any, field: str) -> Any:
    if not is_document_type(type(query)):
        return query
    value = query
    for name in parse_path(field):
        value = getattr(value, "__dict__", {}).get(name)
    if value is None:
        raise QueryError(f"the query is a {type(query).__name__} without a value for {field!r}.")
    return value


def _to_matrix(values: Any, what: str) -> NDArray[Any]:
    """Convert vectors to a matrix of floats with a row for each."""
    framework = framework_of(values)
    if framework is not None:
        array = framework.to_numpy(values)
    else:
        vectors = [_to_numpy(value) for value in values]
        try:
            array = np.array(vectors)
        except ValueError as error:
            raise QueryError(f"{what}: the vectors have different lengths.") from error
    if array.ndim != 2 or array.dtype.kind not in "biufV":
        raise QueryError(f"{what}: expected vectors (rows, dimensions), got {array.dtype.name} {array.shape}.")
    if array.dtype in (np.float32, np.float64):
        return array
    return array.astype(np.float32 if array.itemsize < 8 else np.float64)


def _to_numpy(value: Any) -> NDArray[Any]:
    framework = framework_of(value)
    if framework is not None and framework.is_sparse(value):
        raise QueryError(f"search needs dense vectors, got {describe(value)}: convert it first, as by toarray().")
    try:
        return np.asarray(value) if framework is None else framework.to_numpy(value)
    except (ValueError, TensorError) as error:
        raise QueryError(f"a vector cannot be read: {error}") from error


def _normalize(vectors: NDArray[Any]) -> NDArray[Any]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    # Zero vectors stay zero. Those with NaN stay NaN, so that they sort last: a 0 would be before negative scores.
    unit: NDArray[Any] = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths != 0)
    return unit


def _select_best(scores: NDArray[Any], limit: int, *, smallest: bool) -> NDArray[np.int64]:
    """Return the positions of the best scores, best first."""
    # `partition` finds the limit-th best score in linear time; only the candidates are sorted.
    keys = scores if smallest else -scores
    keys = np.where(np.isnan(keys), np.inf, keys)  # NaN sorts last
    limit = min(limit, len(keys))
    if limit < len(keys):
        # All rows as good as the last one taken are candidates, so that of equal rows the first ones are taken.
        edge = np.partition(keys, limit - 1)[limit - 1] if limit else None
        candidates = np.flatnonzero(keys <= edge) if limit else np.empty(0, np.int64)
    else:
        candidates = np.arange(len(keys))
    return candidates[np.argsort(keys[candidates], kind="stable")][:limit].astype(np.int64)
