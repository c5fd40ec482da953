"""Batches of rows of similar lengths, so that padding them to one length adds little: `bucket_by` and `max_tokens`.

With `bucket_by`, the rows of some batches, which follow each other in the order of an epoch, are sorted by length, cut
into batches of `batch_size` rows, and the batches are shuffled. It is a permutation of the positions of an epoch, so
ranks, workers and states work as with any other order.

With `max_tokens`, batches have different numbers of rows. Those of a dataset and a seed are computed once, from rows
that are neighbours in the data, and are shuffled and divided like rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.data._bijection import derive_key, permute, uniform
from quire.data._epoch import Order, RowOrder, Slice
from quire.data._lengths import LengthIndex, open_arrays
from quire.errors import OptionError
from quire.storage import StoredDataset

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.data._stream_options import StreamOptions

    Numbers = NDArray[np.int64]
    Mask = NDArray[np.bool_]

_BATCHES = 128
"""The number of batches whose rows are sorted together."""
_ROWS = 65_536
"""The number of rows, neighbours in the data, that are divided into batches of at most `max_tokens` together."""
_KEPT_SPANS = 8
_BUCKET_ORDER = 3  # the key of the permutation of batches; 0 to 2 are those of `RowOrder`


@dataclass(frozen=True, slots=True)
class BucketOrder(RowOrder):
    """An order in which each batch of `batch_size` rows has rows of similar lengths.

    The positions of the row order are divided into spans of 128 batches. Within a span, the batches are cut from the
    sorted rows, so a row of a batch is at most as long as the shortest one of the next batch. The padding of all
    batches of a span, each padded to its longest row, is therefore at most `batch_size` times the longest row.
    """

    index: Any = None
    batch_size: int = 1

    def rows(self, epoch: int, positions: Numbers) -> Numbers:
        """Return the numbers of the rows at positions of an epoch."""
        RowOrder.rows(self, epoch, positions[:1])  # checks the epoch
        positions = np.asarray(positions, np.int64)
        rows = np.empty_like(positions)
        spans = positions // (_BATCHES * self.batch_size)
        for span in np.unique(spans).tolist():
            inside = spans == span
            table = self._span(epoch, span)
            rows[inside] = table[positions[inside] - span * _BATCHES * self.batch_size]
        return rows

    def _span(self, epoch: int, span: int) -> Numbers:
        """Return the rows of a span; those of the last few spans are kept."""
        kept = self.index.kept
        table: Numbers | None = kept.get((epoch, span))
        if table is None:
            table = _sort_span(self, epoch, span)
            # A new dict, because other threads may be reading the old one.
            self.index.kept = dict([*list(kept.items())[1 - _KEPT_SPANS :], ((epoch, span), table)])
        return table

    def runs(self, epoch: int, start: int, stop: int) -> tuple[Numbers, Numbers]:
        """Return the ranges of rows that the positions from start to stop are drawn from."""
        size = _BATCHES * self.batch_size
        return RowOrder.runs(self, epoch, start - start % size, min(-(-stop // size) * size, self.size))


def _sort_span(order: BucketOrder, epoch: int, span: int) -> Numbers:
    """Return the rows of a span, sorted by length and cut into batches, which are shuffled.

    Only the last span of an epoch may have a batch that is not full, and it is the last one: all others begin at a
    multiple of the batch size.
    """
    size = order.batch_size
    first = span * _BATCHES * size
    positions = np.arange(first, min(first + _BATCHES * size, order.size))
    rows = RowOrder.rows(order, epoch, positions)
    rows = rows[np.argsort(order.index.lengths(rows), kind="stable")]
    full = len(rows) // size
    if full < 2:
        return rows
    batches = permute(full, derive_key(order.seed, epoch, _BUCKET_ORDER, span), np.arange(full))
    return np.concatenate([rows[: full * size].reshape(full, size)[batches].ravel(), rows[full * size :]])


class TokenBatches:
    """Batches of rows whose padded size is at most `max_tokens`, computed once for a dataset and a seed."""

    def __init__(self, index: LengthIndex, max_tokens: int, max_rows: int, seed: int) -> None:
        self._arguments = index, max_tokens, max_rows, seed
        name = f"batches {index.key} {max_tokens} {max_rows} {seed} {_ROWS}"
        self._offsets, self._rows = open_arrays(
            index.cache, name, lambda: cut_batches(index, max_tokens, max_rows, seed)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def rows(self, number: int) -> Numbers:
        """Return the rows of a batch."""
        rows: Numbers = self._rows[self._offsets[number] : self._offsets[number + 1]]
        return rows


def cut_batches(index: LengthIndex, max_tokens: int, max_rows: int, seed: int) -> list[Numbers]:
    """Divide rows into batches: where each begins in the list of rows and the last one ends, and the rows.

    The longest of the remaining rows of a window begins the next batch, so the batch has as many rows as fit with its
    length. Rows of one length are in an order that follows from the seed.
    """
    counts, rows = [0], [np.zeros(0, np.int64)]
    for start in range(0, len(index), _ROWS):
        stop = min(start + _ROWS, len(index))
        lengths = index.between(start, stop)
        if len(lengths) and int(lengths.max()) > max_tokens:
            row = start + int(np.argmax(lengths > max_tokens))
            raise OptionError(
                f"max_tokens={max_tokens}: row {row} has the length {int(lengths[row - start])} at {index.path!r}, and "
                "fits into no batch. Pass a larger max_tokens, or leave out such rows with where=."
            )
        ties = uniform(derive_key(seed, start), np.arange(stop - start, dtype=np.uint64))
        order = np.lexsort((ties, -lengths))
        rows.append(start + order)
        most = np.minimum(max_tokens // np.maximum(lengths[order], 1), max_rows).tolist()
        place = 0
        while place < len(most):
            counts.append(min(most[place], len(most) - place))
            place += counts[-1]
    return [np.cumsum(np.array(counts, np.int64)), np.concatenate(rows)]


@dataclass(frozen=True, slots=True)
class BatchSlice(Slice):
    """One rank's share of batches that are there already: each step takes one for each rank.

    With `last='keep'`, the batches of the last step, which may be fewer than ranks, are split: a part of a batch needs
    no more padding than the batch. If they have fewer rows than there are ranks, some ranks get an empty batch.
    """

    batches: Any = None

    def __post_init__(self) -> None:
        Slice.__post_init__(self)
        object.__setattr__(self, "batch_size", 1)  # positions are batches
        if self.last == "keep":
            object.__setattr__(self, "last", "split")

    def parts(self, steps: Sequence[int]) -> list[Any]:
        """Return the rows of each step, and which of them are not padding."""
        return [self._part(step) for step in steps]

    def positions(self, step: int) -> tuple[Numbers, Mask | None]:
        """Return the position of the batch of a step."""
        rest = self.order.size - self.start - step * self.world_size
        if self.last == "split" and rest < self.world_size:
            return np.array([self._split(step)[0]]), None
        return Slice.positions(self, step)

    def _split(self, step: int) -> tuple[int, int, int]:
        """Return the position of the batch that this rank shares with others, its number among them, and theirs."""
        first = self.start + step * self.world_size
        rest = self.order.size - first
        owners = np.arange(self.world_size) * rest // self.world_size
        own = int(owners[self.rank])
        ranks = np.flatnonzero(owners == own)
        return first + own, self.rank - int(ranks[0]), len(ranks)

    def _part(self, step: int) -> tuple[Numbers, Mask | None]:
        self._check_step(step)
        [position], real = self.positions(step)
        rows = self.batches.rows(int(self.order.rows(self.epoch, np.array([position]))[0]))
        if self.last == "split" and self.order.size - self.start - step * self.world_size < self.world_size:
            _, number, count = self._split(step)
            rows = np.array_split(rows, count)[number]
        return np.array(rows), None if real is None else np.full(len(rows), bool(real[0]))


def choose_buckets(
    stored: StoredDataset[Any], order: Order, options: StreamOptions, batch_size: int, fingerprint: str
) -> tuple[Order, Callable[..., Slice], str]:
    """Return the order, the class of shares, and the fingerprint of a dataset with `bucket_by`."""
    assert options.bucket_by is not None
    assert isinstance(order, RowOrder)
    index = LengthIndex(stored, options.bucket_by, fingerprint)
    identity = f"{fingerprint} {options.bucket_by} {batch_size} {options.max_tokens}"
    fingerprint = blake2b(identity.encode(), digest_size=8).hexdigest()
    if options.max_tokens is None:
        fields = order.size, order.seed, order.shuffle, order.block, order.window
        return BucketOrder(*fields, index, batch_size), Slice, fingerprint
    batches = TokenBatches(index, options.max_tokens, batch_size, options.seed)
    block = max(1, order.block * len(batches) // max(order.size, 1))
    window = min(order.window, max(1, -(-len(batches) // block)))
    positions = RowOrder(len(batches), order.seed, order.shuffle, block, window)
    return positions, partial(BatchSlice, batches=batches), fingerprint
