"""Exact nearest neighbours: every row is compared with every query, in blocks of bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from quire.errors import QueryError, TensorError, did_you_mean
from quire.tensors import framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Metric = Literal["cosine", "dot", "euclidean"]
_BLOCK = 256


def as_matrix(values: Any, what: str) -> NDArray[Any]:
    """Vectors as a floating matrix, a row each."""
    framework = framework_of(values)
    if framework is not None:
        array = framework.to_numpy(values)
    else:
        try:
            array = np.array([_to_numpy(value) for value in values])
        except ValueError as error:
            raise QueryError(f"{what}: the vectors have different lengths.") from error
    if array.ndim != 2 or array.dtype.kind not in "biufV":
        raise QueryError(f"{what}: expected vectors (rows, dimensions), got {array.dtype.name} {array.shape}.")
    return (
        array
        if array.dtype in (np.float32, np.float64)
        else array.astype(np.float32 if array.itemsize < 8 else np.float64)
    )


def _to_numpy(value: Any) -> NDArray[Any]:
    framework = framework_of(value)
    try:
        return np.asarray(value) if framework is None else framework.to_numpy(value)
    except (ValueError, TensorError) as error:
        raise QueryError(f"a vector cannot be read: {error}") from error


def nearest(
    rows: NDArray[Any], queries: NDArray[Any], metric: Metric, limit: int
) -> list[tuple[NDArray[np.int64], NDArray[Any]]]:
    """For each query the positions of the nearest rows and their scores, best first.

    Scores are similarities for 'cosine' and 'dot' (larger is nearer) and distances for 'euclidean' (smaller is nearer).
    """
    if metric not in ("cosine", "dot", "euclidean"):
        raise QueryError(f"{metric!r} is not a metric. {did_you_mean(str(metric), ('cosine', 'dot', 'euclidean'))}")
    if limit < 0:
        raise QueryError(f"limit={limit}: it cannot be negative.")
    if len(rows) and len(queries) and rows.shape[1] != queries.shape[1]:
        raise QueryError(f"the queries have {queries.shape[1]} dimensions, the documents {rows.shape[1]}.")
    with np.errstate(invalid="ignore", over="ignore"):  # infinities make NaN, which comes last
        if metric == "cosine":
            rows, queries = _normalised(rows), _normalised(queries)
        blocks = (queries[start : start + _BLOCK] for start in range(0, len(queries), _BLOCK))
        return [
            _best(row, limit, smallest=metric == "euclidean")
            for block in blocks
            for row in _scores(rows, block, metric)
        ]


def _scores(rows: NDArray[Any], block: NDArray[Any], metric: Metric) -> NDArray[Any]:
    if not len(rows):
        return np.zeros((len(block), 0), block.dtype)
    if metric == "euclidean":  # differences rather than the expanded square: near rows keep their precision
        return np.stack([np.linalg.norm(rows - query, axis=1) for query in block])
    made: NDArray[Any] = block @ rows.T
    return made


def _normalised(vectors: NDArray[Any]) -> NDArray[Any]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    made: NDArray[Any] = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return made


def _best(scores: NDArray[Any], limit: int, *, smallest: bool) -> tuple[NDArray[np.int64], NDArray[Any]]:
    keys = scores if smallest else -scores
    keys = np.where(np.isnan(keys), np.inf, keys)  # what cannot be compared comes last
    limit = min(limit, len(keys))
    if limit < len(keys):
        # all rows as good as the last one taken, so that ties go to the earlier row
        edge = np.partition(keys, limit - 1)[limit - 1] if limit else None
        candidates = np.flatnonzero(keys <= edge) if limit else np.empty(0, np.int64)
    else:
        candidates = np.arange(len(keys))
    order = candidates[np.argsort(keys[candidates], kind="stable")][:limit]
    return order.astype(np.int64), scores[order]
