"""Windows of consecutive rows, across row groups and shards: where they begin, and batches of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from quire.array import DocumentBatch, find_column, resolve_index
from quire.data._derived_stream import DerivedStream
from quire.data._epoch import Order, RowOrder
from quire.data._epoch_registry import EpochRegistry
from quire.data._fetch import Fetch
from quire.data._interleaved import InterleavedOrder
from quire.document import BaseDocument
from quire.errors import OptionError
from quire.storage import StoredDataset

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.data._fetch import FinishBatch, Part
    from quire.data._streaming import StreamingDataset

DocT = TypeVar("DocT", bound=BaseDocument)
_ROWS_AT_A_TIME = 65_536


class Windows(DerivedStream[DocT]):
    """The windows of a dataset as batches, for a loop or torch's DataLoader (`batch_size=None`).

    A batch of n windows has n * length rows, window by window, each window in the order of the data. So
    `batch.image.reshape(-1, length, *batch.image.shape[1:])` has an axis for the windows and one for their rows. The
    windows are shuffled, divided among ranks and resumed like the rows of the dataset. `windows[i]` is one of them.
    """

    def __init__(self, dataset: StreamingDataset[DocT], starts: NDArray[np.int64], length: int, stride: int) -> None:
        self.length = length
        digest = blake2b(f"{dataset._fingerprint} {length}".encode(), digest_size=8)
        digest.update(starts.tobytes())
        registry = EpochRegistry()
        # A copy of the dataset whose rows are the windows: it counts, shuffles and resumes windows, and only the
        # fetching turns the number of a window into those of its rows.
        self._copy_stream(
            dataset,
            order=_order_windows(dataset.order, starts, stride),
            _registry=registry,
            _fetch=WindowFetch(dataset._fetch.for_windows(length, registry), starts, length),
            _group_size=max(1, dataset._group_size // length),
            _group_size_ahead=max(1, dataset._group_size_ahead // length),
            _fingerprint=digest.hexdigest(),
        )

    @property
    def num_windows(self) -> int:
        """The number of windows of the dataset, on all ranks."""
        size: int = self._stream.order.size
        return size

    @overload
    def __getitem__(self, key: int) -> DocumentBatch[DocT]: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int]) -> DocumentBatch[DocT]: ...
    def __getitem__(self, key: Any) -> DocumentBatch[DocT]:
        """Return a window by number, or several windows, concatenated, by slice, list or mask."""
        windows = resolve_index(key, self.num_windows)
        numbers = np.array([windows]) if isinstance(windows, int) else np.arange(self.num_windows)[windows]
        [batch] = self._stream._fetch.batches([(numbers, None)], [0])
        return batch  # type: ignore[no-any-return]

    @property
    def errors(self) -> list[str]:
        """The errors of shards whose windows were skipped."""
        errors: list[str] = self._stream.errors
        return errors


def _order_windows(order: Order, starts: NDArray[np.int64], stride: int) -> Order:
    """Return the order of windows that is like an order of rows. A window belongs to the block of its first row."""
    if isinstance(order, InterleavedOrder):
        return order.regroup(np.searchsorted(starts, order.blocks.starts))
    assert isinstance(order, RowOrder)
    return RowOrder(len(starts), order.seed, order.shuffle, max(1, order.block // stride), order.window)


class WindowFetch:
    """Makes batches of windows by their numbers."""

    def __init__(self, fetch: Fetch, starts: NDArray[np.int64], length: int) -> None:
        self._fetch, self._starts, self._length = fetch, starts, length
        self.only_copies = fetch.only_copies

    def batches(self, parts: Sequence[Part], epochs: Sequence[int]) -> Iterator[DocumentBatch[Any]]:
        """Make a batch of the windows of each part."""
        return self._fetch.batches(self._rows(parts), epochs)

    def gather(self, parts: Sequence[Part], epochs: Sequence[int]) -> Iterator[FinishBatch]:
        """Gather the windows of each part; see `Fetch.gather`."""
        return self._fetch.gather(self._rows(parts), epochs)

    def _rows(self, parts: Sequence[Part]) -> list[Part]:
        offsets = np.arange(self._length)
        return [
            (
                (self._starts[windows][:, None] + offsets).ravel(),
                None if real is None else np.repeat(real, self._length),
            )
            for windows, real in parts
        ]


def find_window_starts(
    stored: StoredDataset[Any], length: int, stride: int, order_by: str | None, max_gap: Any
) -> NDArray[np.int64]:
    """Return the first row of each window: each `stride`-th row of a run with `length` rows from there on.

    A run ends where the values at `order_by` decrease, are missing, or are more than `max_gap` apart.
    """
    if length < 1 or stride < 1:
        raise OptionError(f"length and stride are at least 1, got {length} and {stride}.")
    if max_gap is not None and order_by is None:
        raise OptionError("max_gap is about the values of a field: name it with order_by.")
    begins = np.zeros(1, np.int64) if order_by is None else _find_runs(stored, order_by, max_gap)
    ends = np.append(begins[1:], len(stored))
    counts = np.maximum(0, (ends - begins - length) // stride + 1)  # the windows of each run
    # Window k of all windows is window k - before of its run, and starts at begin + (k - before) * stride.
    before = np.cumsum(counts) - counts
    return np.repeat(begins - before * stride, counts) + np.arange(int(counts.sum())) * stride


def _find_runs(stored: StoredDataset[Any], order_by: str, max_gap: Any) -> NDArray[np.int64]:
    """Return the first row of each run."""
    values = _read_values(stored, order_by)
    if not len(values):
        return np.zeros(0, np.int64)
    gaps = np.diff(values)
    continues = gaps >= np.zeros((), gaps.dtype)  # False where a value is missing (NaN or NaT)
    if max_gap is not None:
        continues &= gaps <= np.asarray(max_gap, gaps.dtype if gaps.dtype.kind == "m" else None)
    return np.concatenate([[0], np.flatnonzero(~continues) + 1]).astype(np.int64)


def _read_values(stored: StoredDataset[Any], path: str) -> NDArray[Any]:
    """Read the values of a field in all rows as numbers or times."""
    narrow = stored.narrow([path])._row_reader
    parts: list[Any] = [np.zeros(0, np.int64)]
    for start in range(0, len(stored), _ROWS_AT_A_TIME):
        rows = np.arange(start, min(start + _ROWS_AT_A_TIME, len(stored)))
        columns = narrow.gather(rows)
        parts.append(_to_array(find_column(columns, path).values(), path))
    return np.concatenate(parts[1:] or parts)


def _to_array(values: list[Any], path: str) -> NDArray[Any]:
    """Convert numbers or times to an array, with NaN or NaT for missing values."""
    first = next((value for value in values if value is not None), 0)
    if isinstance(first, (bool, int)) and None not in values:
        return np.array(values, np.int64)
    if isinstance(first, (int, float)):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    try:
        times = list(values)
        for row, value in enumerate(times):
            if value is not None and value.tzinfo is not None:  # numpy has no time zones
                times[row] = value.astimezone(dt.timezone.utc).replace(tzinfo=None)
        return np.array(times, "datetime64[us]")
    except (AttributeError, TypeError, ValueError) as error:
        raise OptionError(f"order_by={path!r}: its values are no numbers and no points in time.") from error
