"""The plan of an epoch as pure arithmetic: which rows, in which order, on which rank, in which step.

The row at a position of an epoch is a function of (seed, epoch, position). A rank's batch is a range of positions. So
dividing an epoch among ranks and workers, and resuming it, are additions and divisions: any batch of any rank is known
without computing the ones before, and a state is a few integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.data._bijection import LARGEST, derive_key, permute, unpermute
from quire.errors import OptionError, RowIndexError

Shuffle = Literal["block", "interleaved", "global", False]
Last = Literal["drop", "pad", "keep"]
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]

_UNIT_ORDER, _WINDOW_ORDER, _GLOBAL_ORDER = range(3)  # each permutation of an epoch has a key of its own
_TABLE = 4_096  # the units of a window of up to this size are kept in a table; larger ones are computed each time


# --- the order of the rows


class Order(Protocol):
    """The order of the rows of a dataset in every epoch: `RowOrder`, or `InterleavedOrder`."""

    @property
    def size(self) -> int:
        """The number of rows."""
        ...

    @property
    def seed(self) -> int:
        """The seed of all permutations."""
        ...

    @property
    def shuffle(self) -> str | Literal[False]:
        """The name of the order."""
        ...

    @property
    def block(self) -> int:
        """The rows of a unit of block order; 0 for the interleaved order."""
        ...

    @property
    def window(self) -> int:
        """The units of a window of block order; 0 for the interleaved order."""
        ...

    @property
    def lanes(self) -> int:
        """The number of lanes of the interleaved order; 0 for other orders."""
        ...

    @property
    def identity(self) -> tuple[object, ...]:
        """The values that distinguish orders of one dataset."""
        ...

    @property
    def reach(self) -> int:
        """The number of positions that steps which are gathered together may span."""
        ...

    def rows(self, epoch: int, positions: Rows) -> Rows:
        """Return the numbers of the rows at positions of an epoch."""
        ...

    def deal(self, begin: int, end: int, first: int, last: int) -> Rows:
        """Return the share of a rank of the positions from begin to end: from number `first` to `last` of them.

        They may be in another order than the positions. Positions after the epoch stand for those at its beginning.
        """
        ...

    def runs(self, epoch: int, start: int, stop: int) -> tuple[Rows, Rows]:
        """Return the ranges of rows that the positions from start to stop are drawn from: first rows and ends."""
        ...

    def unshuffled(self) -> Order:
        """Return the order of the dataset itself."""
        ...


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of `size` rows in every epoch: a permutation for each seed and epoch, computed for each position.

    - 'global': any row can be at any position.
    - 'block': units of `block` neighbouring rows are shuffled, and then the rows of each `window` of units among
      themselves. The rows of a batch come from all over the data, but only `block * window` rows are needed at a time.
    - False: the order of the dataset.

    With another size, seed, block or window, the order is another one, and states do not fit.
    """

    size: int
    seed: int = 0
    shuffle: Shuffle = "block"
    block: int = 64
    window: int = 1_024

    def __post_init__(self) -> None:
        check_bounds("size", self.size, 0, LARGEST)
        check_bounds("seed", self.seed, 0, 2**64 - 1)
        check_bounds("block", self.block, 1, LARGEST)
        check_bounds("window", self.window, 1, LARGEST)
        if self.shuffle not in ("global", "block", False):
            raise OptionError(f"shuffle: expected 'global', 'block' or False, got {self.shuffle!r}.")

    @property
    def lanes(self) -> int:
        """0: this order has no lanes."""
        return 0

    @property
    def identity(self) -> tuple[object, ...]:
        """The values that distinguish orders of one dataset."""
        return self.size, self.seed, self.shuffle, self.block, self.window

    @property
    def reach(self) -> int:
        """The number of positions that steps which are gathered together may span: those of a window."""
        return self.block * self.window

    def unshuffled(self) -> RowOrder:
        """Return the order of the dataset itself."""
        return replace(self, shuffle=False)

    def deal(self, begin: int, end: int, first: int, last: int) -> Rows:  # noqa: ARG002 - a method of `Order`
        """Return the share of a rank of the positions from begin to end: from number `first` to `last` of them."""
        return np.arange(begin + first, begin + last, dtype=np.int64)

    def rows(self, epoch: int, positions: Rows) -> Rows:
        """Return the numbers of the rows at positions of an epoch."""
        check_bounds("epoch", epoch, 0, 2**64 - 1)
        positions = np.array(positions, np.int64)
        if positions.size == 0:
            return positions
        first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= self.size:
            raise RowIndexError(f"position {first if first < 0 else last} is not one of [0, {self.size}).")
        if self.shuffle == "global":
            return permute(self.size, derive_key(self.seed, epoch, _GLOBAL_ORDER), positions)
        if self.shuffle == "block":
            return self._shuffle_blocks(epoch, positions, first, last)
        return positions

    def runs(self, epoch: int, start: int, stop: int) -> tuple[Rows, Rows]:
        """Return the ranges of rows that the positions from start to stop are drawn from: their first rows and ends.

        This is what has to be read before these positions are.
        """
        if not 0 <= start <= stop <= self.size:
            raise RowIndexError(f"positions {start} to {stop} are not a part of [0, {self.size}].")
        if self.shuffle == "block" and start < stop:
            begins = _layout(self, epoch).units_between(start, stop) * self.block
            return begins, np.minimum(begins + self.block, self.size)
        run = (0, self.size) if self.shuffle == "global" else (start, stop)
        begins, ends = np.array([run] if start < stop else [], np.int64).reshape(-1, 2).T
        return begins, ends

    def window_at(self, epoch: int, position: int) -> int:
        """Return the number of the window of a position, if rows are shuffled by blocks."""
        return _layout(self, epoch).window_at(position)

    def window_start(self, epoch: int, window: int) -> int:
        """Return the first position of a window."""
        return _layout(self, epoch).begin(window)

    def _shuffle_blocks(self, epoch: int, positions: Rows, first: int, last: int) -> Rows:
        layout = _layout(self, epoch)
        window = layout.window_at(first)
        if window == layout.window_at(last):
            return layout.rows(window, positions)
        rows, windows = np.empty_like(positions), layout.fill_gap(positions) // layout.span
        for window in np.unique(windows).tolist():
            inside = windows == window
            rows[inside] = layout.rows(window, positions[inside])
        return rows


class _Layout(NamedTuple):
    """The arrangement of units in one epoch.

    The epoch has one slot for each unit, and slot s has the unit permute(s). All units have `block` rows, except for
    the last unit of the data, which may be shorter by `gap` rows. It can be in any slot, `short_slot`, and all
    positions after it are `gap` rows too early for a plain division by the block. So positions after the short unit are
    moved by the gap first: then slot = position // block, row in the unit = position % block, and the missing rows of
    the short unit are positions that do not occur.
    """

    block: int
    window: int
    units: int
    short_slot: int
    gap: int
    unit_key: int
    row_key: int

    @property
    def span(self) -> int:
        return self.block * self.window

    @property
    def edge(self) -> int:
        """The first position after the short unit."""
        return (self.short_slot + 1) * self.block - self.gap

    def window_at(self, position: int) -> int:
        return (position + self.gap * (position >= self.edge)) // self.span

    def fill_gap(self, positions: Rows) -> Rows:
        """Return the positions as they would be if the short unit had all rows."""
        return positions + self.gap * (positions >= self.edge) if self.gap else positions

    def begin(self, window: int) -> int:
        """Return the first position of a window."""
        slot = min(window * self.window, self.units)
        return slot * self.block - self.gap * (slot > self.short_slot)

    def rows(self, window: int, positions: Rows) -> Rows:
        """Return the rows at positions that are all in one window.

        The positions of the window are shuffled among themselves; the result is in some slot, and the unit of that slot
        is (unit - slot) * block rows away in the data.
        """
        begin, end = self.begin(window), self.begin(window + 1)
        shuffled = self.fill_gap(permute(end - begin, self.row_key + window, positions - begin) + begin)
        slots = shuffled // self.block
        return shuffled + (self._units(window, slots) - slots) * self.block

    def units_between(self, start: int, stop: int) -> Rows:
        """Return the units of all windows that the positions from start to stop are in."""
        first, last = self.window_at(start), self.window_at(stop - 1)
        slots = np.arange(first * self.window, min((last + 1) * self.window, self.units), dtype=np.int64)
        return permute(self.units, self.unit_key, slots)

    def _units(self, window: int, slots: Rows) -> Rows:
        if self.window > _TABLE:
            return permute(self.units, self.unit_key, slots)
        return _units_in_window(self.units, self.unit_key, self.window, window)[slots - window * self.window]


@lru_cache(maxsize=32)
def _layout(order: RowOrder, epoch: int) -> _Layout:
    units = -(-order.size // order.block)
    unit_key, row_key = (derive_key(order.seed, epoch, use) for use in (_UNIT_ORDER, _WINDOW_ORDER))
    short_slot = int(unpermute(units, unit_key, np.array([units - 1]))[0])
    return _Layout(order.block, order.window, units, short_slot, units * order.block - order.size, unit_key, row_key)


@lru_cache(maxsize=32)
def _units_in_window(units: int, key: int, length: int, window: int) -> Rows:
    slots = np.arange(window * length, min((window + 1) * length, units), dtype=np.int64)
    return permute(units, key, slots)


def choose_block(
    rows: int, row_bytes: float, budget_bytes: int = 256 * 2**20, unit_bytes: int | None = None
) -> tuple[int, int]:
    """Choose the block and the window for rows of a size: (rows of a unit, units of a window).

    A window stays within the budget. It has at least 256 units if the budget holds 256 rows: a batch of 256 rows is
    then mixed as well as by a true permutation, up to a hundredth of its entropy. By default, a unit has a 1024th of
    the budget, from 64 KiB to 1 MiB, and at least 4 rows. Pass `unit_bytes` if reading less than that does not pay,
    such as the size of a row group in an object store.
    """
    check_bounds("rows", rows, 0, LARGEST)
    check_bounds("row_bytes", row_bytes, 0, LARGEST)
    check_bounds("budget_bytes", budget_bytes, 1, LARGEST)
    row_bytes = max(row_bytes, 1.0)
    size = min(max(budget_bytes // 1_024, 2**16), 2**20) if unit_bytes is None else unit_bytes
    block = max(round(size / row_bytes), 4)
    block = max(min(block, int(budget_bytes / row_bytes) // 256, rows // 256), 1)
    return block, max(int(budget_bytes / row_bytes) // block, 1)


# --- the share of a rank


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's share of an epoch from a position on, in steps of one batch for each rank.

    `last` says what to do with the rows that do not fill a batch on every rank. Every rank has the same number of steps
    in any case:

    - 'drop': leave them out.
    - 'pad': fill the batches with rows from the beginning of the epoch, for which the mask is False.
    - 'keep': use every row once. The rows of the last step are divided evenly, up to one row. If there are fewer rows
      than ranks, they are added to the step before. If there is no such step either, some ranks get an empty batch.
    """

    order: Order
    epoch: int
    start: int
    rank: int
    world_size: int
    batch_size: int
    last: Last | Literal["split"] = "drop"

    def __post_init__(self) -> None:
        check_bounds("epoch", self.epoch, 0, 2**64 - 1)
        check_bounds("start", self.start, 0, self.order.size)
        check_bounds("world_size", self.world_size, 1, LARGEST)
        check_bounds("rank", self.rank, 0, self.world_size - 1, f" (world_size is {self.world_size})")
        check_bounds("batch_size", self.batch_size, 1, LARGEST)
        if self.last not in ("drop", "pad", "keep", "split"):  # 'split' is 'keep' for batches of `max_tokens`
            raise OptionError(f"last: expected 'drop', 'pad' or 'keep', got {self.last!r}.")

    @property
    def steps(self) -> int:
        """The number of steps that every rank takes to the end of the epoch."""
        whole, rest = divmod(self.order.size - self.start, self.world_size * self.batch_size)
        if self.last == "drop" or rest == 0:
            return whole
        if self.last in ("pad", "split"):
            return whole + 1
        return whole + (rest >= self.world_size or whole == 0)

    def worker_steps(self, worker: int, num_workers: int) -> range:
        """Return the steps of a worker of this rank: each `num_workers`-th one; all if there are no workers."""
        check_bounds("num_workers", num_workers, 0, LARGEST)
        check_bounds("worker", worker, 0, max(num_workers, 1) - 1, f" (num_workers is {num_workers})")
        return range(worker, self.steps, max(num_workers, 1))

    def positions(self, step: int) -> tuple[Rows, Mask | None]:
        """Return the positions of this rank's batch and, if batches are padded, which of them are not padding."""
        begin, end, first, last = self._bounds(step)
        positions = self.order.deal(begin, end, first, last)
        if self.last != "pad":
            return positions, None
        real = positions < self.order.size
        return (positions if end <= self.order.size else positions % self.order.size), real

    def rows(self, step: int) -> tuple[Rows, Mask | None]:
        """Return the row numbers of this rank's batch and, if batches are padded, which of them are not padding."""
        positions, real = self.positions(step)
        return self.order.rows(self.epoch, positions), real

    def parts(self, steps: Sequence[int]) -> list[tuple[Rows, Mask | None]]:
        """Return the rows of each of some steps, and which of them are not padding."""
        parts = [self.positions(step) for step in steps]
        rows = self.order.rows(self.epoch, np.concatenate([positions for positions, _ in parts]))
        bounds = np.cumsum([len(positions) for positions, _ in parts])[:-1]
        return [(part, real) for part, (_, real) in zip(np.split(rows, bounds), parts, strict=True)]

    def after(self, step: int) -> int:
        """Return the number of positions of the epoch that all ranks have taken after a step."""
        done = self._check_step(step) + 1
        return self.order.size if done == self.steps else self.start + done * self.world_size * self.batch_size

    def state(self, step: int) -> tuple[int, int]:
        """Return the (epoch, position) to continue from after a step, with any number of ranks and workers."""
        position = self.after(step)
        return (self.epoch + 1, 0) if position == self.order.size else (self.epoch, position)

    def _bounds(self, step: int) -> tuple[int, int, int, int]:
        """Return the first position of a step on all ranks and its end, and the part of them that is of this rank."""
        begin = self.start + self._check_step(step) * self.world_size * self.batch_size
        if self.last != "keep" or step < self.steps - 1:
            first = self.rank * self.batch_size
            return begin, begin + self.world_size * self.batch_size, first, first + self.batch_size
        # The last step of 'keep': the first `extra` ranks have one row more than the others.
        share, extra = divmod(self.order.size - begin, self.world_size)
        first = self.rank * share + min(self.rank, extra)
        return begin, self.order.size, first, first + share + (self.rank < extra)

    def _check_step(self, step: int) -> int:
        if not 0 <= step < self.steps:
            raise RowIndexError(f"step {step} is not one of [0, {self.steps}): epoch {self.epoch} has no such step.")
        return step


def check_bounds(name: str, value: float, least: int, most: int, why: str = "") -> None:
    if not least <= value <= most:
        raise OptionError(f"{name}: expected {least} to {most}{why}, got {value}.")


@dataclass(frozen=True)
class StepGroup:
    """Some steps of one rank in an epoch: gathering several batches at once costs hardly more than one.

    `done` counts the epochs of the pass before this one, `before` the steps of the pass in them, and `taken` the steps
    of the pass in earlier runs, from which it was resumed.
    """

    share: Slice
    done: int
    before: int
    steps: Sequence[int]
    taken: int = 0

    def span(self) -> range:
        """Return the range of positions in the epoch."""
        ends = np.concatenate([self.share.positions(step)[0] for step in (self.steps[0], self.steps[-1])])
        return range(int(ends.min()), int(ends.max()) + 1) if len(ends) else range(0)

    def rows(self) -> list[tuple[Rows, Mask | None]]:
        """Return the rows of each step, and which of them are not padding."""
        return self.share.parts(self.steps)
