"""Windows of consecutive rows, over row groups and shards: where they begin, and batches of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np

from quire.array import DocumentBatch, find_column, resolve_index
from quire.data._epoch import RowOrder
from quire.data._epoch_registry import Passes, known_to_torch
from quire.data._fetch import Fetch
from quire.data._loader import Loader
from quire.document import BaseDocument
from quire.errors import OptionError
from quire.storage import StoredDataset

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.data._fetch import Part
    from quire.data._streaming import StreamingDataset

DocT = TypeVar("DocT", bound=BaseDocument)
_ROWS = 65_536


class Windows(Generic[DocT]):
    """The windows of a dataset as batches, for a loop or torch's DataLoader (`batch_size=None`).

    Each row is in the place that it has in the data: a batch of n windows has n * length rows, window by window, so
    `batch.image.reshape(-1, length, *batch.image.shape[1:])` has an axis for the windows and one for their rows. The
    windows are shuffled, shared out and resumed as the rows of the dataset are. `windows[i]` is one of them.
    """

    def __init__(self, dataset: StreamingDataset[DocT], starts: NDArray[np.int64], length: int, stride: int) -> None:
        self.length = length
        self._stream: Any = object.__new__(type(dataset))
        self._stream.__dict__.update(dataset.__dict__)
        digest = blake2b(f"{dataset._fingerprint} {length}".encode(), digest_size=8)
        digest.update(starts.tobytes())
        order, passes = dataset.order, Passes()
        changed = {
            "order": RowOrder(len(starts), order.seed, order.shuffle, max(1, order.block // stride), order.window),
            "_passes": passes,
            "_fetch": WindowFetch(dataset._fetch.of_windows(length, passes), starts, length),
            "_ahead": max(1, dataset._ahead // length),
            "_together": max(1, dataset._together // length),
            "_fingerprint": digest.hexdigest(),
            "_state": None,
        }
        self._stream.__dict__.update(changed)
        known_to_torch(type(self))

    @property
    def batch_size(self) -> int:
        """The windows of a batch."""
        size: int = self._stream.batch_size
        return size

    @property
    def num_windows(self) -> int:
        """The windows of the dataset, of all ranks."""
        size: int = self._stream.order.size
        return size

    def __iter__(self) -> Iterator[DocumentBatch[DocT]]:
        """A pass: the batches of this rank, or of this worker of it."""
        batches: Iterator[DocumentBatch[DocT]] = iter(self._stream)
        return batches

    def __len__(self) -> int:
        """The batches of the pass that is under way on this rank, or of the next."""
        return len(self._stream)

    @overload
    def __getitem__(self, key: int) -> DocumentBatch[DocT]: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int]) -> DocumentBatch[DocT]: ...
    def __getitem__(self, key: Any) -> DocumentBatch[DocT]:
        """A window by its number; by slice, list or mask, several, one behind the other."""
        rows = resolve_index(key, self.num_windows)
        chosen = np.array([rows]) if isinstance(rows, int) else np.arange(self.num_windows)[rows]
        [batch] = self._stream._fetch.batches([(chosen, None)])
        return batch  # type: ignore[no-any-return]

    def loader(self, prefetch: int = 4, threads: int = 1) -> Loader[DocT]:
        """The batches of a pass, made ahead by threads of this process."""
        return Loader(self._stream, prefetch, threads)

    # --- where it is

    @property
    def epoch(self) -> int:
        """The epoch that the pass which is under way began with, or the next one will."""
        epoch: int = self._stream.epoch
        return epoch

    @property
    def errors(self) -> list[str]:
        """What went wrong with shards whose windows were skipped."""
        errors: list[str] = self._stream.errors
        return errors

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that epoch."""
        self._stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where it is: behind the last batch that was taken, in this process."""
        state: dict[str, Any] = self._stream.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with any number of ranks and workers."""
        self._stream.load_state_dict(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        known_to_torch(type(self))


class WindowFetch:
    """Makes batches of windows by their numbers."""

    def __init__(self, fetch: Fetch, starts: NDArray[np.int64], length: int) -> None:
        self._fetch, self._starts, self._length = fetch, starts, length
        self.only_copies = fetch.only_copies

    def batches(self, parts: list[Part]) -> Iterator[DocumentBatch[Any]]:
        """A batch of the rows of some windows each."""
        return self._fetch.batches([self._rows(*part) for part in parts])

    def _rows(self, windows: NDArray[np.int64], real: Any) -> Part:
        rows = (self._starts[windows][:, None] + np.arange(self._length)).ravel()
        return rows, None if real is None else np.repeat(real, self._length)


def window_starts(
    stored: StoredDataset[Any], length: int, stride: int, order_by: str | None, max_gap: Any
) -> NDArray[np.int64]:
    """The first row of each window: every so-manieth row of a run that has as many rows behind it.

    A run ends where the values at `order_by` go down, are missing, or are more than `max_gap` apart.
    """
    if length < 1 or stride < 1:
        raise OptionError(f"length and stride are at least 1, got {length} and {stride}.")
    if max_gap is not None and order_by is None:
        raise OptionError("max_gap is about the values of a field: name it with order_by.")
    begins = np.zeros(1, np.int64) if order_by is None else _runs(stored, order_by, max_gap)
    ends = np.append(begins[1:], len(stored))
    counts = np.maximum(0, (ends - begins - length) // stride + 1)
    before = np.cumsum(counts) - counts
    return np.repeat(begins - before * stride, counts) + np.arange(int(counts.sum())) * stride


def _runs(stored: StoredDataset[Any], order_by: str, max_gap: Any) -> NDArray[np.int64]:
    """The row that each run begins with."""
    values = _values(stored, order_by)
    if not len(values):
        return np.zeros(0, np.int64)
    gaps = np.diff(values)
    goes_on = gaps >= np.zeros((), gaps.dtype)  # not so where a value is missing
    if max_gap is not None:
        goes_on &= gaps <= np.asarray(max_gap, gaps.dtype if gaps.dtype.kind == "m" else None)
    return np.concatenate([[0], np.flatnonzero(~goes_on) + 1]).astype(np.int64)


def _values(stored: StoredDataset[Any], path: str) -> Any:
    """The values of a field in all rows: numbers, or points in time."""
    url = stored.folder.join(stored._file) if stored._file else stored.folder.url
    narrow = StoredDataset[stored.document_type](url, [path], None, stored.options)  # type: ignore[name-defined]
    parts: list[Any] = [np.zeros(0, np.int64)]
    for start in range(0, len(stored), _ROWS):
        rows = np.arange(start, min(start + _ROWS, len(stored)))
        columns = narrow.gather(rows if stored.rows is None else stored.rows[rows])
        parts.append(_numbers(find_column(columns, path).values(), path))
    return np.concatenate(parts[1:] or parts)


def _numbers(values: list[Any], path: str) -> Any:
    found = next((value for value in values if value is not None), 0)
    if isinstance(found, (bool, int)) and None not in values:
        return np.array(values, np.int64)
    if isinstance(found, (int, float)):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    try:
        return np.array([None if value is None else _in_utc(value) for value in values], "datetime64[us]")
    except (AttributeError, TypeError, ValueError) as error:
        raise OptionError(f"order_by={path!r}: its values are no numbers and no points in time.") from error


def _in_utc(value: dt.datetime) -> dt.datetime:
    return (value if value.tzinfo is None else value.astimezone(dt.timezone.utc)).replace(tzinfo=None)
