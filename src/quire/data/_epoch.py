"""The plan of an epoch, as arithmetic: which rows, in which order, on which rank, in which step.

The order of an epoch is a function of (seed, epoch, position). A rank's batch is a run of positions, so ranks, workers
and resuming are additions and divisions: any batch of any rank is known at once, and a state is two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.data._bijection import LARGEST, key_of, permute, unpermute
from quire.errors import OptionError, RowIndexError

Shuffle = Literal["global", "block", False]
Last = Literal["drop", "pad", "keep"]
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]

_UNIT_ROWS, _WINDOW_ROWS, _ALL_ROWS = range(3)  # a key of its own for each use of a seed and an epoch
_TABLE = 4_096  # a window of up to this many units is looked up, a larger one is computed


# --- the order of the rows


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of `size` rows in every epoch: a permutation for each seed and epoch, known position by position.

    - 'global': any row can stand anywhere.
    - 'block': units of `block` neighbouring rows are shuffled, and then the rows of each `window` of units among
      themselves. The rows of a batch come from all over the data, and from `block * window` rows at a time.
    - False: as they lie.

    An order is one dataset's for good: with another size, seed, block or window it is another order.
    """

    size: int
    seed: int = 0
    shuffle: Shuffle = "block"
    block: int = 64
    window: int = 1_024

    def __post_init__(self) -> None:
        _check_range("size", self.size, 0, LARGEST)
        _check_range("seed", self.seed, 0, 2**64 - 1)
        _check_range("block", self.block, 1, LARGEST)
        _check_range("window", self.window, 1, LARGEST)
        if self.shuffle not in ("global", "block", False):
            raise OptionError(f"shuffle: expected 'global', 'block' or False, got {self.shuffle!r}.")

    def rows(self, epoch: int, positions: Rows) -> Rows:
        """The numbers of the rows at these positions of the epoch."""
        _check_range("epoch", epoch, 0, 2**64 - 1)
        positions = np.array(positions, np.int64)
        if positions.size == 0:
            return positions
        first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= self.size:
            raise RowIndexError(f"position {first if first < 0 else last} is not one of [0, {self.size}).")
        if self.shuffle == "global":
            return permute(self.size, key_of(self.seed, epoch, _ALL_ROWS), positions)
        if self.shuffle == "block":
            return self._blocked(epoch, positions, first, last)
        return positions

    def runs(self, epoch: int, start: int, stop: int) -> tuple[Rows, Rows]:
        """The runs of rows that the positions from start to stop are drawn from: where each begins and ends.

        This is what to fetch before these positions are read, and what to let go of after them.
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
        """The number of the window that a position of the epoch is in, where rows are shuffled by blocks."""
        return _layout(self, epoch).window_at(position)

    def begin_of(self, epoch: int, window: int) -> int:
        """The first position of a window."""
        return _layout(self, epoch).begin(window)

    def _blocked(self, epoch: int, positions: Rows, first: int, last: int) -> Rows:
        layout = _layout(self, epoch)
        window = layout.window_at(first)
        if window == layout.window_at(last):
            return layout.rows(window, positions)
        made, windows = np.empty_like(positions), layout.spread(positions) // layout.span
        for window in np.unique(windows).tolist():
            mine = windows == window
            made[mine] = layout.rows(window, positions[mine])
        return made


class _Layout(NamedTuple):
    """Where the units of one epoch lie. A slot is a place for a unit; the last unit may be short, in any slot."""

    block: int
    window: int
    units: int
    short_slot: int  # where the last unit is
    gap: int  # how many rows it is short of a whole one
    unit_key: int
    row_key: int

    @property
    def span(self) -> int:
        return self.block * self.window

    @property
    def edge(self) -> int:
        """The position behind the last unit: from here on, all lie `gap` rows further on than their slot says."""
        return (self.short_slot + 1) * self.block - self.gap

    def window_at(self, position: int) -> int:
        return (position + self.gap * (position >= self.edge)) // self.span

    def spread(self, positions: Rows) -> Rows:
        """Positions as if every unit were whole, so that the slot is a division away."""
        return positions + self.gap * (positions >= self.edge) if self.gap else positions

    def begin(self, window: int) -> int:
        """The first position of a window."""
        slot = min(window * self.window, self.units)
        return slot * self.block - self.gap * (slot > self.short_slot)

    def rows(self, window: int, positions: Rows) -> Rows:
        """The rows at positions that are all in one window."""
        begin, end = self.begin(window), self.begin(window + 1)
        places = self.spread(permute(end - begin, self.row_key + window, positions - begin) + begin)
        slots = places // self.block
        return places + (self._units(window, slots) - slots) * self.block

    def units_between(self, start: int, stop: int) -> Rows:
        """The units of all windows that the positions from start to stop are in."""
        first, last = self.window_at(start), self.window_at(stop - 1)
        slots = np.arange(first * self.window, min((last + 1) * self.window, self.units), dtype=np.int64)
        return permute(self.units, self.unit_key, slots)

    def _units(self, window: int, slots: Rows) -> Rows:
        if self.window > _TABLE:
            return permute(self.units, self.unit_key, slots)
        return _units_of(self.units, self.unit_key, self.window, window)[slots - window * self.window]


@lru_cache(maxsize=32)
def _layout(order: RowOrder, epoch: int) -> _Layout:
    units = -(-order.size // order.block)
    unit_key, row_key = (key_of(order.seed, epoch, use) for use in (_UNIT_ROWS, _WINDOW_ROWS))
    short_slot = int(unpermute(units, unit_key, np.array([units - 1]))[0])
    return _Layout(order.block, order.window, units, short_slot, units * order.block - order.size, unit_key, row_key)


@lru_cache(maxsize=32)
def _units_of(units: int, key: int, length: int, window: int) -> Rows:
    """The units in the slots of a window."""
    slots = np.arange(window * length, min((window + 1) * length, units), dtype=np.int64)
    return permute(units, key, slots)


def choose_block(
    rows: int, row_bytes: float, budget_bytes: int = 256 * 2**20, unit_bytes: int | None = None
) -> tuple[int, int]:
    """The block and the window for rows of that size: (rows of a unit, units of a window).

    A window stays within the budget, and has 256 units or more where the budget holds 256 rows: a batch of 256 is
    then mixed as well as by a true permutation, but for a hundredth of its entropy. Unless it is given, a unit has a
    1024th of the budget, from 64 KiB to 1 MiB and at least 4 rows. Give `unit_bytes` where reading less does not
    pay, such as the size of a row group in an object store.
    """
    _check_range("rows", rows, 0, LARGEST)
    _check_range("row_bytes", row_bytes, 0, LARGEST)
    _check_range("budget_bytes", budget_bytes, 1, LARGEST)
    row_bytes = max(row_bytes, 1.0)
    wanted = min(max(budget_bytes // 1_024, 2**16), 2**20) if unit_bytes is None else unit_bytes
    block = max(round(wanted / row_bytes), 4)
    block = max(min(block, int(budget_bytes / row_bytes) // 256, rows // 256), 1)
    return block, max(int(budget_bytes / row_bytes) // block, 1)


# --- the share of a rank


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's share of an epoch, from a position of the whole epoch on, in steps of a batch for each rank.

    `last` tells what becomes of the rows that do not fill a batch on every rank. The number of steps is the same on
    every rank, whatever it says:

    - 'drop': they are left out.
    - 'pad': batches are filled up with rows from the beginning of the epoch; a mask is False at these.
    - 'keep': every row comes once. The last step is shared out evenly, to within one row. Rows too few for one on
      each rank go to the step before. Where there is none, so fewer rows than ranks altogether, some ranks get an
      empty batch.
    """

    order: RowOrder
    epoch: int
    start: int
    rank: int
    world_size: int
    batch_size: int
    last: Last = "drop"

    def __post_init__(self) -> None:
        _check_range("epoch", self.epoch, 0, 2**64 - 1)
        _check_range("start", self.start, 0, self.order.size)
        _check_range("world_size", self.world_size, 1, LARGEST)
        _check_range("rank", self.rank, 0, self.world_size - 1, f" (world_size is {self.world_size})")
        _check_range("batch_size", self.batch_size, 1, LARGEST)
        if self.last not in ("drop", "pad", "keep"):
            raise OptionError(f"last: expected 'drop', 'pad' or 'keep', got {self.last!r}.")

    @property
    def steps(self) -> int:
        """How many steps every rank takes to the end of the epoch."""
        whole, rest = divmod(self.order.size - self.start, self.world_size * self.batch_size)
        if self.last == "drop" or rest == 0:
            return whole
        if self.last == "pad":
            return whole + 1
        return whole + (rest >= self.world_size or whole == 0)

    def worker_steps(self, worker: int, num_workers: int) -> range:
        """The steps that a worker of this rank takes: every `num_workers`-th one. With no workers, all."""
        _check_range("num_workers", num_workers, 0, LARGEST)
        _check_range("worker", worker, 0, max(num_workers, 1) - 1, f" (num_workers is {num_workers})")
        return range(worker, self.steps, max(num_workers, 1))

    def positions(self, step: int) -> tuple[Rows, Mask | None]:
        """The positions of this rank's batch, and, where batches are padded, which of them are real."""
        begin, end = self._bounds(step)
        positions = np.arange(begin, end, dtype=np.int64)
        if self.last != "pad":
            return positions, None
        real = positions < self.order.size
        return (positions if end <= self.order.size else positions % self.order.size), real

    def rows(self, step: int) -> tuple[Rows, Mask | None]:
        """The numbers of the rows of this rank's batch, and, where batches are padded, which of them are real."""
        positions, real = self.positions(step)
        return self.order.rows(self.epoch, positions), real

    def after(self, step: int) -> int:
        """How many positions of the epoch are done, by all ranks, after the step; all of them after the last one."""
        done = self._check_step(step) + 1
        return self.order.size if done == self.steps else self.start + done * self.world_size * self.batch_size

    def state(self, step: int) -> tuple[int, int]:
        """The (epoch, position) to go on from after the step, with any number of ranks and workers."""
        position = self.after(step)
        return (self.epoch + 1, 0) if position == self.order.size else (self.epoch, position)

    def _bounds(self, step: int) -> tuple[int, int]:
        begin = self.start + self._check_step(step) * self.world_size * self.batch_size
        if self.last != "keep" or step < self.steps - 1:
            begin += self.rank * self.batch_size
            return begin, begin + self.batch_size
        share, more = divmod(self.order.size - begin, self.world_size)
        begin += self.rank * share + min(self.rank, more)
        return begin, begin + share + (self.rank < more)

    def _check_step(self, step: int) -> int:
        if not 0 <= step < self.steps:
            raise RowIndexError(f"step {step} is not one of [0, {self.steps}): epoch {self.epoch} has no such step.")
        return step


def _check_range(name: str, value: float, least: int, most: int, why: str = "") -> None:
    if not least <= value <= most:
        raise OptionError(f"{name}: expected {least} to {most}{why}, got {value}.")


@dataclass(frozen=True)
class Group:
    """Some steps of one rank in an epoch; `done` are the epochs of the pass behind it, `before` the steps in them."""

    share: Slice
    done: int
    before: int
    steps: Sequence[int]

    def span(self) -> range:
        """From the first position in the epoch to the last."""
        found = np.concatenate([self.share.positions(step)[0] for step in (self.steps[0], self.steps[-1])])
        return range(int(found.min()), int(found.max()) + 1) if len(found) else range(0)

    def rows(self) -> list[tuple[NDArray[np.int64], NDArray[np.bool_] | None]]:
        """The rows of each step, and which of them are real."""
        share = self.share
        parts = [share.positions(step) for step in self.steps]
        rows = share.order.rows(share.epoch, np.concatenate([positions for positions, _ in parts]))
        bounds = np.cumsum([len(positions) for positions, _ in parts])[:-1]
        return [(part, real) for part, (_, real) in zip(np.split(rows, bounds), parts, strict=True)]
