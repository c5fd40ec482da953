"""Embeddings: the nearest neighbours of a row, and a two-dimensional map of a sample of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from quire.array import NearestRows
from quire.columns import Columns, ScalarColumn, TensorColumn
from quire.errors import QueryError
from quire.schema import FieldKind, parse_path
from quire.storage import Pages
from quire.tensors import framework_of
from quire.viewer._cache import Cache
from quire.viewer._row_order import locate_column

if TYPE_CHECKING:
    from numpy.typing import NDArray

Metric = Literal["cosine", "euclidean"]
_MAX_ROWS = 2_000_000
_MAX_BYTES = 4 << 30
"""Of larger datasets, a sample is compared."""
_BLOCK_BYTES = 16 << 20
"""Bytes of vectors that are compared at a time."""
_RUNS = 256
"""The sample of a larger dataset consists of this many runs of consecutive rows."""
_MAP_POINTS = 5000
_MAX_NAMES = 10
_CACHED_MAPS = 16


@dataclass(frozen=True)
class Neighbours:
    """The nearest rows, nearest first; `compared` of `total` rows were compared."""

    rows: list[int]
    scores: list[float]
    compared: int
    total: int


class Embeddings:
    """The columns of vectors of a dataset."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._maps: Cache[tuple[str, str], dict[str, Any]] = Cache(_CACHED_MAPS)

    def nearest(self, row: int, path: str, metric: Metric, limit: int) -> Neighbours:
        """Return the nearest rows of a row, without the row itself; exact unless the dataset is too large."""
        query = self._read_vector(row, path)
        search = NearestRows([query], path, metric, limit + 1)  # the row itself is one of them
        compared = 0
        for rows, matrix in self._iter_blocks(path, len(query)):
            compared += len(rows)
            search.add(rows, matrix)
        [(rows, scores)] = search.results()
        kept = np.isfinite(scores) & (rows != row)
        rows, scores = rows[kept][:limit], scores[kept][:limit]
        return Neighbours(rows.tolist(), [float(score) for score in scores], compared, len(self._pages))

    def _read_vector(self, row: int, path: str) -> NDArray[Any]:
        self._check_vectors(path)
        rows, matrix = _read_matrix(self._pages.narrow(path).columns(np.array([row])), path, None, np.array([row]))
        if not len(rows):
            raise QueryError(f"row {row:,} has no {path}.")
        vector: NDArray[Any] = matrix[0]
        return vector

    def _check_vectors(self, path: str) -> None:
        field = self._pages.dataset.document_type.document_schema().resolve(parse_path(path))[-1]
        if field.kind is not FieldKind.TENSOR:
            raise QueryError(f"{path} is {field}, and no column of vectors.")

    def _iter_blocks(self, path: str, width: int) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Yield row numbers and vectors of all rows, or of evenly spaced runs of rows if there are too many."""
        narrow = self._pages.narrow(path)
        size = max(256, _BLOCK_BYTES // (4 * width))
        limit = min(_MAX_ROWS, _MAX_BYTES // (4 * width))
        if len(narrow) <= limit:
            for start, columns in narrow.blocks(size):
                yield _read_matrix(columns, path, width, np.arange(start, start + len(columns)))
            return
        # Runs of rows instead of single ones: rows that are stored together are read and decoded together.
        for start in np.linspace(0, len(narrow) - limit // _RUNS, _RUNS).astype(np.int64).tolist():
            rows = np.arange(start, start + limit // _RUNS)
            yield _read_matrix(narrow.columns(rows), path, width, rows)

    def map(self, path: str, colour: str = "") -> dict[str, Any]:
        """Return a sample of rows as points on the first two principal components, coloured by another column."""
        return self._maps.get((path, colour), lambda: self._compute_map(path, colour))

    def _compute_map(self, path: str, colour: str) -> dict[str, Any]:
        self._check_vectors(path)
        sample = self._pages.sample(_MAP_POINTS)
        rows, matrix = _read_matrix(self._pages.narrow(path).columns(sample), path, None, sample)
        if len(rows) < 3:
            raise QueryError(f"{path}: a map needs at least three rows with a vector.")
        points, explained = project_pca(matrix)
        return {
            "path": path,
            "rows": rows.tolist(),
            "points": np.round(points, 4).tolist(),
            "explained": explained,
            "total": len(self._pages),
            "colour": self._read_colours(rows, colour) if colour else None,
        }

    def _read_colours(self, rows: NDArray[np.int64], path: str) -> dict[str, Any]:
        """Return a shade for each row of a column of numbers, otherwise the index of its name.

        Only the most frequent names have a colour.
        """
        column, present = locate_column(self._pages.narrow(path).columns(rows), path)
        if isinstance(column, ScalarColumn) and column.field.type is not bool:
            values = column.framework.to_numpy(column.data).astype(np.float64)
            present = present & np.isfinite(values)
            if len(np.unique(values[present])) > _MAX_NAMES:
                # Scaled between quantiles, so that outliers do not take the whole range.
                low, high = np.quantile(values[present], [0.02, 0.98])
                shades = np.clip((values - low) / ((high - low) or 1.0), 0, 1).tolist()
                rounded = [round(each, 3) if known else None for each, known in zip(shades, present, strict=True)]
                return {"kind": "number", "values": rounded, "low": float(low), "high": float(high)}
        texts = [
            str(getattr(value, "name", value))[:60] if known else None
            for value, known in zip(column.values(), present, strict=True)
        ]
        counts = Counter(text for text in texts if text is not None)
        names = sorted(counts, key=lambda name: (-counts[name], name))[:_MAX_NAMES]
        indices: dict[str | None, int] = {name: index for index, name in enumerate(names)}
        return {"kind": "name", "values": [indices.get(text) for text in texts], "names": names}


def _read_matrix(
    columns: Columns, path: str, width: int | None, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the vectors of one width as a matrix, and the numbers of their rows; other rows are left out."""
    column, present = locate_column(columns, path)
    if isinstance(column, TensorColumn):
        data = column.framework.to_numpy(column.data)
        if data.dtype.kind not in "biufV" or data.ndim != 2 or (width is not None and data.shape[1] != width):
            raise QueryError(f"{path}: expected one vector of numbers a row, got {data.dtype.name} {data.shape[1:]}.")
        if not present.all():
            data, rows = data[present], rows[present]
        return rows, data if data.dtype == np.float32 else data.astype(np.float32)
    vectors = [_to_vector(value) if known else None for value, known in zip(column.values(), present, strict=True)]
    width = width or next((len(vector) for vector in vectors if vector is not None), 0)
    kept = [(i, vector) for i, vector in enumerate(vectors) if vector is not None and len(vector) == width]
    if not kept:
        return np.zeros(0, np.int64), np.zeros((0, width), np.float32)
    return rows[np.array([i for i, _ in kept])], np.stack([vector for _, vector in kept])


def _to_vector(value: Any) -> NDArray[np.float32] | None:
    """Convert a tensor with one axis of numbers; return None for every other value."""
    framework = framework_of(value)
    if framework is None or framework.is_sparse(value):
        return None
    array = framework.to_numpy(value)
    return array.astype(np.float32) if array.ndim == 1 and array.size and array.dtype.kind in "biufV" else None


def project_pca(matrix: NDArray[Any]) -> tuple[NDArray[np.float64], list[float]]:
    """Project rows on the first two principal components.

    Return points between -1 and 1, and the fraction of the variance that each component explains.
    """
    data = np.nan_to_num(matrix.astype(np.float64), posinf=0.0, neginf=0.0)
    data -= data.mean(axis=0)
    if data.shape[1] < 2:
        data = np.concatenate([data, np.zeros((len(data), 2 - data.shape[1]))], axis=1)
    if data.shape[1] > len(data):  # decompose the smaller of the two: the rows, or the covariance of the columns
        left, sizes, _ = np.linalg.svd(data, full_matrices=False)
        points, variance = left[:, :2] * sizes[:2], sizes**2
    else:
        values, axes = np.linalg.eigh(data.T @ data)
        points, variance = data @ axes[:, [-1, -2]], values[::-1].clip(0)
    total = float(variance.sum()) or 1.0
    largest = np.abs(points).max() or 1.0
    return points / largest, [float(each) / total for each in variance[:2]]
