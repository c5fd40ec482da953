"""Exact nearest neighbours: every row is compared with every query, in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from quire._protocols import is_document_type
from quire.array._positions import whole_number
from quire.errors import OptionError, PathError, QueryError, TensorError, check_options, did_you_mean
from quire.schema import parse_path
from quire.tensors import describe, framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Metric = Literal["cosine", "dot", "euclidean", "cosine_sim", "euclidean_dist"]
_OLD_METRICS: dict[str, Metric] = {"cosine_sim": "cosine", "euclidean_dist": "euclidean"}
"""The names of DocArray for metrics with the same scores."""
_BLOCK = 256
"""Queries that are compared with all rows at once."""


class FieldNames(TypedDict, total=False):
    """The names of `field` in versions of DocArray, which every `find` takes as well."""

    embedding_field: str
    search_field: str


def vector_field(field: str, names: FieldNames) -> str:
    """Return the field to search, which was passed as `field` or under one of its old names."""
    check_options("find", names, ["field", "metric", "limit", *FieldNames.__annotations__])
    if len(names) > (field == "embedding"):
        raise OptionError(f"{' and '.join(names)}: other names of field. Pass one of them.")
    return next(iter(names.values()), field)  # type: ignore[return-value]


@contextmanager
def explain_vector_field() -> Iterator[None]:
    """Add to the error about an unknown field how a search names its field: the default is 'embedding'."""
    try:
        yield
    except PathError as error:
        raise PathError(f"{error.args[0]} Pass the field that holds the vectors: find(query, 'field').") from None


def find_nearest(
    vectors: Any, rows: NDArray[np.int64], queries: Any, field: str, metric: Metric, limit: int
) -> list[tuple[NDArray[np.int64], NDArray[Any]]]:
    """Return the positions and scores of the nearest rows for each query, best first.

    `vectors` are those of `rows`, which are the positions of the rows that have one. A query is a vector, or a document
    whose field is the vector. Scores are similarities for 'cosine' and 'dot' (larger is nearer) and distances for
    'euclidean' (smaller is nearer).
    """
    metric = _OLD_METRICS.get(metric, metric)
    if metric not in ("cosine", "dot", "euclidean"):
        raise QueryError(f"{metric!r} is not a metric. {did_you_mean(str(metric), ('cosine', 'dot', 'euclidean'))}")
    limit = whole_number("limit", limit)
    if limit < 0:
        raise QueryError(f"limit={limit}: it cannot be negative.")
    targets = _query_matrix(queries, field)
    if np.isnan(targets).any():
        raise QueryError("the queries have NaN in their vectors, which is near to nothing.")
    matrix = _to_matrix(vectors, field) if len(rows) else targets[:0]
    if len(matrix) and len(targets) and matrix.shape[1] != targets.shape[1]:
        raise QueryError(f"the queries have {targets.shape[1]} dimensions, the documents {matrix.shape[1]}.")
    results = []
    with np.errstate(invalid="ignore", over="ignore"):  # infinities make NaN, which sorts last
        if metric == "cosine":
            matrix, targets = _normalize(matrix), _normalize(targets)
        for start in range(0, len(targets), _BLOCK):
            for scores in _compute_scores(matrix, targets[start : start + _BLOCK], metric):
                order = _select_best(scores, limit, smallest=metric == "euclidean")
                results.append((rows[order], scores[order]))
    return results


def merge_nearest(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[Any]]], metric: Metric, limit: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the best of the rows that `find_nearest` found in several blocks, which are in the order of the rows."""
    rows, scores = (np.concatenate(values) for values in zip(*parts, strict=True))
    order = _select_best(scores, limit, smallest=_OLD_METRICS.get(metric, metric) == "euclidean")
    return rows[order], scores[order]


def _query_matrix(queries: Any, field: str) -> NDArray[Any]:
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


def _compute_scores(rows: NDArray[Any], block: NDArray[Any], metric: Metric) -> NDArray[Any]:
    if not len(rows):
        return np.zeros((len(block), 0), block.dtype)
    if metric == "euclidean":  # differences, not the expanded square: close rows keep their precision
        return np.stack([np.linalg.norm(rows - query, axis=1) for query in block])
    scores: NDArray[Any] = block @ rows.T
    return scores


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
