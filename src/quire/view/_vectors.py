"""Embeddings: the nearest rows of a row, and a map of a sample of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from quire._paths import parse_path
from quire.columns import Column, Columns, ScalarColumn, TensorColumn
from quire.errors import QueryError
from quire.schema import FieldKind
from quire.storage._pages import Pages
from quire.tensors import framework_of
from quire.view._kept import Kept
from quire.view._matching import locate_column

if TYPE_CHECKING:
    from numpy.typing import NDArray

Metric = Literal["cosine", "euclidean"]
_ROWS = 2_000_000
_BYTES = 4 << 30
"""Of more rows or bytes, a sample is compared."""
_BLOCK = 16 << 20
"""Bytes of vectors that are compared at a time."""
_PIECES = 256
_POINTS = 5000
_COLOURS = 10
_KEPT = 16


@dataclass(frozen=True)
class Found:
    """The nearest rows, nearest first; `compared` of `total` rows were looked at."""

    rows: list[int]
    scores: list[float]
    compared: int
    total: int


class Vectors:
    """The embeddings of a dataset."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._maps: Kept[tuple[str, str], dict[str, Any]] = Kept(_KEPT)

    def nearest(self, row: int, path: str, metric: Metric, limit: int) -> Found:
        """The rows nearest to a row, itself left out; exact, unless there are too many to compare all of them."""
        query = self.vector(row, path)
        score = _cosine(query) if metric == "cosine" else _distance(query)
        best = np.zeros(0, np.float64), np.zeros(0, np.int64)
        compared = 0
        for rows, matrix in self._blocks(path, len(query)):
            compared += len(rows)
            keys = np.where(np.isfinite(keys := score(matrix).astype(np.float64)), keys, -np.inf)
            keys[rows == row] = -np.inf
            best = _merged(best, keys, rows, limit)
        keys, found = best
        kept = np.isfinite(keys)
        scores = keys[kept] if metric == "cosine" else -keys[kept]
        return Found(found[kept].tolist(), [float(each) for each in scores], compared, len(self._pages))

    def vector(self, row: int, path: str) -> NDArray[Any]:
        """The embedding of a row."""
        check_vectors(self._pages, path)
        rows, matrix = _matrix(self._pages.narrow(path).columns(np.array([row])), path, None, np.array([row]))
        if not len(rows):
            raise QueryError(f"row {row:,} has no {path}.")
        found: NDArray[Any] = matrix[0]
        return found

    def _blocks(self, path: str, width: int) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """The numbers of rows and their vectors; runs from all over the dataset where it is too large."""
        narrow = self._pages.narrow(path)
        size = max(256, _BLOCK // (4 * width))
        most = min(_ROWS, _BYTES // (4 * width))
        if len(narrow) <= most:
            for start, columns in narrow.blocks(size):
                yield _matrix(columns, path, width, np.arange(start, start + len(columns)))
            return
        for start in np.linspace(0, len(narrow) - most // _PIECES, _PIECES).astype(np.int64).tolist():
            rows = np.arange(start, start + most // _PIECES)
            yield _matrix(narrow.columns(rows), path, width, rows)

    def map(self, path: str, colour: str = "") -> dict[str, Any]:
        """A sample of rows as points: their embeddings on the two axes along which they differ most."""
        return self._maps.get((path, colour), lambda: self._mapped(path, colour))

    def _mapped(self, path: str, colour: str) -> dict[str, Any]:
        check_vectors(self._pages, path)
        sample = self._pages.sample(_POINTS)
        rows, matrix = _matrix(self._pages.narrow(path).columns(sample), path, None, sample)
        if len(rows) < 3:
            raise QueryError(f"{path}: a map needs three rows with a vector at least.")
        points, explained = principal(matrix)
        return {
            "path": path,
            "rows": rows.tolist(),
            "points": np.round(points, 4).tolist(),
            "explained": explained,
            "total": len(self._pages),
            "colour": self._colours(rows, colour) if colour else None,
        }

    def _colours(self, rows: NDArray[np.int64], path: str) -> dict[str, Any]:
        """A number for each row, or the place of its value among the most frequent."""
        column, there = locate_column(self._pages.narrow(path).columns(rows), path)
        if isinstance(column, ScalarColumn) and column.field.type is not bool:
            values = column.framework.to_numpy(column.data).astype(np.float64)
            there = there & np.isfinite(values)
            if len(np.unique(values[there])) > _COLOURS:
                return _shades(values, there)
        return _names(column, there)


def _shades(values: NDArray[np.float64], there: NDArray[np.bool_]) -> dict[str, Any]:
    low, high = np.quantile(values[there], [0.02, 0.98])
    shades = np.clip((values - low) / ((high - low) or 1.0), 0, 1)
    listed = [round(float(each), 3) if known else None for each, known in zip(shades, there.tolist(), strict=True)]
    return {"kind": "number", "values": listed, "low": float(low), "high": float(high)}


def _names(column: Column, there: NDArray[np.bool_]) -> dict[str, Any]:
    texts = [
        str(getattr(value, "name", value))[:60] if known else None
        for value, known in zip(column.values(), there.tolist(), strict=True)
    ]
    counts: dict[str, int] = {}
    for text in texts:
        if text is not None:
            counts[text] = counts.get(text, 0) + 1
    names = sorted(counts, key=lambda name: (-counts[name], name))[:_COLOURS]
    places = {name: place for place, name in enumerate(names)}
    return {"kind": "name", "values": [places.get(t) if t is not None else None for t in texts], "names": names}


def check_vectors(pages: Pages, path: str) -> None:
    """Whether a column has vectors."""
    field = pages.dataset.document_type.document_schema().resolve(parse_path(path))[-1]
    if field.kind is not FieldKind.TENSOR:
        raise QueryError(f"{path} is {field}, and no column of vectors.")


def _matrix(
    columns: Columns, path: str, width: int | None, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The vectors of one width, and the numbers of their rows."""
    column, there = locate_column(columns, path)
    if isinstance(column, TensorColumn):
        data = column.framework.to_numpy(column.data)
        if data.dtype.kind not in "biufV" or data.ndim != 2 or (width is not None and data.shape[1] != width):
            raise QueryError(f"{path}: expected one vector of numbers a row, got {data.dtype.name} {data.shape[1:]}.")
        if not there.all():
            data, rows = data[there], rows[there]
        return rows, data if data.dtype == np.float32 else data.astype(np.float32)
    values = [_vector(value) if known else None for value, known in zip(column.values(), there, strict=True)]
    width = width or next((len(value) for value in values if value is not None), 0)
    kept = [(i, value) for i, value in enumerate(values) if value is not None and len(value) == width]
    if not kept:
        return np.zeros(0, np.int64), np.zeros((0, width), np.float32)
    return rows[np.array([i for i, _ in kept])], np.stack([value for _, value in kept])


def _vector(value: Any) -> NDArray[np.float32] | None:
    """One row of numbers; None for every other tensor."""
    framework = framework_of(value)
    if framework is None or framework.is_sparse(value):
        return None
    array = framework.to_numpy(value)
    return array.astype(np.float32) if array.ndim == 1 and array.size and array.dtype.kind in "biufV" else None


def _cosine(query: NDArray[Any]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    length = float(np.linalg.norm(query)) or 1.0

    def score(matrix: NDArray[Any]) -> NDArray[Any]:
        lengths = np.sqrt(np.einsum("ij,ij->i", matrix, matrix))
        lengths[lengths == 0] = np.inf
        found: NDArray[Any] = (matrix @ (query / length)) / lengths
        return found

    return score


def _distance(query: NDArray[Any]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def score(matrix: NDArray[Any]) -> NDArray[Any]:  # differences, so that near rows keep their precision
        apart = matrix - query
        found: NDArray[Any] = -np.sqrt(np.einsum("ij,ij->i", apart, apart))
        return found

    return score


def _merged(
    best: tuple[NDArray[np.float64], NDArray[np.int64]],
    keys: NDArray[np.float64],
    rows: NDArray[np.int64],
    limit: int,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The greatest keys of those so far and of a block; of equal ones, the earlier rows."""
    if len(keys) > limit:
        edge = np.partition(keys, len(keys) - limit)[len(keys) - limit]
        near = np.flatnonzero(keys >= edge)
        keys, rows = keys[near], rows[near]
    keys, rows = np.concatenate([best[0], keys]), np.concatenate([best[1], rows])
    order = np.lexsort((rows, -keys))[:limit]
    return keys[order], rows[order]


def principal(matrix: NDArray[Any]) -> tuple[NDArray[np.float64], list[float]]:
    """Points between -1 and 1 on the first two principal axes, and the part of the variance on each."""
    data = np.nan_to_num(matrix.astype(np.float64), posinf=0.0, neginf=0.0)
    data -= data.mean(axis=0)
    if data.shape[1] < 2:
        data = np.concatenate([data, np.zeros((len(data), 2 - data.shape[1]))], axis=1)
    if data.shape[1] > len(data):
        left, sizes, _ = np.linalg.svd(data, full_matrices=False)
        points, variance = left[:, :2] * sizes[:2], sizes**2
    else:
        values, axes = np.linalg.eigh(data.T @ data)
        points, variance = data @ axes[:, [-1, -2]], values[::-1].clip(0)
    total = float(variance.sum()) or 1.0
    largest = np.abs(points).max() or 1.0
    return points / largest, [float(each) / total for each in variance[:2]]
