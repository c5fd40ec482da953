"""The plan of a mix by rows as exact arithmetic: how many rows of each dataset a step takes, and which rows they are.

After n rows of a pass, a dataset of weight w should have given w * n rows, its *ideal*. The plan keeps every count
within one row of its ideal, after every step, for any sequence of step sizes: so a pass may be resumed with another
number of ranks at any step. This is the chairman assignment problem (Tijdeman, 1980). With k datasets and
e = 1 / (2k - 2), row j of a dataset is *released* when its ideal reaches j + e, and *due* when it exceeds j + 1 - e. A
step takes all rows that are due at its end, and fills up with released rows, those with the earliest due date first.
Rows that are released and not due are at most one of each dataset, so a step costs a few operations per dataset,
whatever its size.

Why that is always possible: Tijdeman's theorem says that taking one row at a time, some order meets all due dates
without taking a row before its release. Earliest due date first completes, before any row and for any division into
steps, at least as many rows with a due date up to any b as that order does, because it prefers them to all others.

Ideals are integers in units of 1 / `scale` row, because a state must mean the same rows everywhere and for ever.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire._lowlevel.pool import take_from_pool
from quire.columns import Column, Columns, ShapePolicy, TensorColumn, concat_columns
from quire.data._bijection import LARGEST, derive_key
from quire.data._epoch import Order, RowOrder, Slice
from quire.data._epoch_registry import PassStart
from quire.data._packing import BlockOrder
from quire.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.data._fetch import Part
    from quire.data._packing import BlockPart

    Source = Order | BlockOrder
    """The order of the rows of a dataset, or of its blocks of tokens."""

_SCALE = 2**53
"""The resolution of weights: as many bits as a float64 has."""
_EPOCHS_OF_ENDLESS_PASS = 2**32
"""Epochs that are reserved for a pass that never ends; the next pass begins after them."""
_STATE_VERSION = 1


# --- how many rows of each dataset


def to_units(weights: Sequence[float]) -> list[int]:
    """Return the shares of weights as integers with the sum `_SCALE`."""
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    shares = [share * _SCALE / total for share in exact]
    units = [int(share) for share in shares]
    by_remainder = sorted(range(len(units)), key=lambda number: units[number] - shares[number])
    for number in by_remainder[: _SCALE - sum(units)]:
        units[number] += 1
    return units


class Schedule:
    """The ideal counts of datasets as a function of the rows seen in training: linear between breakpoints.

    `units[s]` are the units that each dataset gains with every row from `starts[s]` to `starts[s + 1]`; each has the
    sum `scale`.
    """

    def __init__(self, starts: Sequence[int], units: Sequence[Sequence[int]], scale: int = _SCALE) -> None:
        self.starts, self.scale = list(starts), scale
        self.units: list[list[int]] = [list(part) for part in zip(*units, strict=True)]  # by dataset, then by segment
        self._bases: list[list[int]] = []  # the ideal at each start
        for part in self.units:
            bases = [0]
            for segment, unit in enumerate(part[:-1]):
                bases.append(bases[-1] + unit * (self.starts[segment + 1] - self.starts[segment]))
            self._bases.append(bases)

    def ideals(self, rows: int) -> list[int]:
        """Return the ideal count of every dataset after a number of rows, in units."""
        segment = bisect_right(self.starts, rows) - 1
        more = rows - self.starts[segment]
        return [bases[segment] + units[segment] * more for bases, units in zip(self._bases, self.units, strict=True)]

    def reach(self, number: int, ideal: int) -> int | None:
        """Return after how many rows the ideal of a dataset is at least this one; None if it never is."""
        segment = bisect_left(self._bases[number], ideal) - 1
        if segment < 0:
            return 0
        unit = self.units[number][segment]
        if not unit:  # only of the last segment: elsewhere, the next base would be this one
            return None
        return self.starts[segment] - (self._bases[number][segment] - ideal) // unit


class MixPass(NamedTuple):
    """A pass over a mix: the rows seen before it, and the epoch and position with which each dataset begins it."""

    number: int
    seen: int
    starts: tuple[tuple[int, int], ...]
    length: int
    """The number of rows; LARGEST if the pass never ends."""

    @property
    def is_endless(self) -> bool:
        """Whether the pass never ends."""
        return self.length == LARGEST


class RowMix:
    """The plan of all passes over datasets of these sizes.

    A pass has `fixed` rows of each dataset. Otherwise `limits` are the rows after which datasets end, None for those
    that never do, and a pass ends before the first dataset would exceed its limit, or (`stops_after_all`) after the
    last one has reached it.
    """

    def __init__(
        self,
        schedule: Schedule,
        sizes: Sequence[int],
        fixed: Sequence[int] | None = None,
        limits: Sequence[int | None] = (),
        *,
        stops_after_all: bool = False,
    ) -> None:
        self._schedule, self._sizes, self._fixed = schedule, list(sizes), fixed
        self._limits, self._stops_after_all = list(limits), stops_after_all
        self._margin = max(2 * len(self._sizes) - 2, 2)  # 1 / e
        first = tuple((0, 0) for _ in self._sizes)
        self._passes = [MixPass(0, 0, first, self._measure(0))]
        content = (schedule.starts, schedule.units, schedule.scale, self._sizes, fixed, self._limits, stops_after_all)
        self.digest = blake2b(repr(content).encode(), digest_size=8).hexdigest()

    def pass_at(self, number: int) -> MixPass:
        """Return a pass by its number, from 0."""
        last = self._passes[-1]
        while last.number < number and last.seen < self._schedule.starts[-1] and not last.is_endless:
            last = self._follow(last, 1)
            self._passes.append(last)
        # From the last breakpoint on, all passes have the same length.
        return self._passes[number] if number <= last.number else self._follow(last, number - last.number)

    def _follow(self, current: MixPass, passes: int) -> MixPass:
        """Return the pass that comes a number of passes later, if all of them are as long as the current one."""
        number = current.number + passes
        if current.is_endless:  # no process knows how far the others have come
            starts = tuple((epoch + passes * _EPOCHS_OF_ENDLESS_PASS, 0) for epoch, _ in current.starts)
            return MixPass(number, 0, starts, current.length)
        if self._fixed is not None:  # the next pass goes on where this one has ended
            moved = [position + passes * n for (_, position), n in zip(current.starts, self._fixed, strict=True)]
            starts = tuple(
                (epoch + rows // size, rows % size)
                for (epoch, _), rows, size in zip(current.starts, moved, self._sizes, strict=True)
            )
        else:  # the next pass begins with the next epoch of every dataset
            _, most = self.bounds(current, current.length)
            starts = tuple(
                (epoch + passes * -(-rows // size), 0)
                for (epoch, _), rows, size in zip(current.starts, most, self._sizes, strict=True)
            )
        seen = current.seen + passes * current.length
        return MixPass(number, seen, starts, self._measure(seen))

    def _measure(self, seen: int) -> int:
        """Return the number of rows of a pass that begins after these rows."""
        if self._fixed is not None:
            return sum(self._fixed)
        schedule, margin = self._schedule, self._margin
        bases = schedule.ideals(seen)
        ends: list[int | None] = []
        for number, limit in enumerate(self._limits):
            if limit is None:
                continue
            # The ideal at which the last row within the limit is due, or the first row beyond it is released.
            ideal = schedule.scale * (limit * margin - 1) // margin + 1
            if not self._stops_after_all:
                ideal = -(-schedule.scale * (limit * margin + 1) // margin)
            ends.append(schedule.reach(number, bases[number] + ideal))
        if self._stops_after_all:
            return min(max(end - seen for end in ends if end is not None), LARGEST)
        return min([LARGEST, *(end - seen - 1 for end in ends if end is not None)])

    def bounds(self, current: MixPass, position: int) -> tuple[list[int], list[int]]:
        """Return the least and the most rows that each dataset may have given after some rows of a pass."""
        schedule, margin = self._schedule, self._margin
        unit = schedule.scale * margin
        bases, ideals = schedule.ideals(current.seen), schedule.ideals(current.seen + position)
        parts = [(ideal - base) * margin for ideal, base in zip(ideals, bases, strict=True)]
        least = [-((unit - schedule.scale - part) // unit) for part in parts]
        return least, [(part + unit - schedule.scale) // unit for part in parts]

    def advance(self, current: MixPass, position: int, counts: Sequence[int], rows: int) -> list[int]:
        """Return the counts of the datasets after a step of a number of rows."""
        least, most = self.bounds(current, position + rows)
        after = [max(count, low) for count, low in zip(counts, least, strict=True)]
        spare = position + rows - sum(after)
        if spare:
            open_ = [number for number, count in enumerate(after) if count < most[number]]
            bases = self._schedule.ideals(current.seen)
            open_.sort(key=lambda number: self._due(number, bases[number], after[number]))
            for number in open_[:spare]:
                after[number] += 1
        return after

    def _due(self, number: int, base: int, row: int) -> float:
        """Return the number of rows of the training after which a row of a dataset is due."""
        ideal = self._schedule.scale * ((row + 1) * self._margin - 1) // self._margin + 1
        rows = self._schedule.reach(number, base + ideal)
        return float("inf") if rows is None else rows

    # --- counts as one number

    def pack(self, current: MixPass, position: int, counts: Sequence[int]) -> int:
        """Return counts as one number: a bit for each dataset that has given more than the least number of rows."""
        least, _ = self.bounds(current, position)
        return sum((count > low) << number for number, (count, low) in enumerate(zip(counts, least, strict=True)))

    def unpack(self, current: MixPass, position: int, bits: int) -> list[int]:
        """Return the counts that `pack` was called with."""
        least, _ = self.bounds(current, position)
        return [low + (bits >> number & 1) for number, low in enumerate(least)]

    def is_possible(self, current: MixPass, position: int, counts: Sequence[int]) -> bool:
        """Return whether datasets can have given these numbers of rows after some rows of a pass."""
        least, most = self.bounds(current, position)
        return sum(counts) == position and all(map(_is_between, least, counts, most))


def _is_between(low: int, number: int, high: int) -> bool:
    return low <= number <= high


# --- which rows


class RowStep(NamedTuple):
    """A step of a pass: its number since the pass was begun or resumed, and the counts before and after it."""

    number: int
    before: Sequence[int]
    after: Sequence[int]


@dataclass(frozen=True)
class RowGroup:
    """Some steps of one rank. `share` divides the rows of the pass; `taken` counts the steps of earlier runs."""

    current: MixPass
    share: Slice
    taken: int
    steps: Sequence[RowStep]

    def find_rows(self, step: RowStep, orders: Sequence[Source], seed: int) -> list[PartRows]:
        """Return the rows of each dataset in the batch of this rank."""
        share = self.share
        full = share.world_size * share.batch_size
        numbers = np.array([after - before for before, after in zip(step.before, step.after, strict=True)])
        ends, rows = np.cumsum(numbers), int(numbers.sum())
        # The rows of the step, sorted by dataset, are dealt to the ranks in turn: so the shares of a dataset on two
        # ranks differ by one row at most. The rank with the first row changes from step to step.
        key = derive_key(seed, self.current.number, share.start + step.number * full)
        slots = np.arange((share.rank - key) % share.world_size, rows, share.world_size)
        real: NDArray[np.bool_] | None = None
        if share.last == "pad":
            # Rows from the beginning of the step fill up the last one.
            slots = np.arange((share.rank - key) % share.world_size, full, share.world_size)
            real, slots = slots < rows, slots % rows
            by_slot = np.argsort(slots, kind="stable")
            real, slots = real[by_slot], slots[by_slot]
        bounds = np.searchsorted(slots, [0, *ends.tolist()])
        parts = []
        for number, order in enumerate(orders):
            chosen = slice(*bounds[number : number + 2].tolist())
            epoch, position = self.current.starts[number]
            first, end = position + step.before[number], int(ends[number])
            begin = end - int(numbers[number])
            places = slots[chosen] - begin + first
            if order.lanes and (real is None or rows == full):
                places = self._deal_by_lane(order, first, begin, end, key % share.world_size)
            parts.append(PartRows.find(order, epoch, places, None if real is None else real[chosen]))
        return parts

    def _deal_by_lane(self, order: Source, first: int, begin: int, end: int, shift: int) -> NDArray[np.int64]:
        """Return the places of this rank of a dataset whose lanes stay with one rank each, from `first` on.

        The slots of a step from begin to end are those of the dataset. Each rank has as many rows as with dealing in
        turn, but the rows of a range of lanes.
        """
        share = self.share
        offsets = (np.arange(share.rank + 1) - shift) % share.world_size
        counts = (end - offsets - 1) // share.world_size - (begin - offsets - 1) // share.world_size
        before = int(counts[:-1].sum())
        return order.deal(first, first + end - begin, before, before + int(counts[-1]))


class PartRows(NamedTuple):
    """The rows of one dataset in a batch, and where they are in the order of the dataset: epochs and positions."""

    size: int
    part: Part | BlockPart
    places: list[tuple[int, NDArray[np.int64]]]
    """Nothing of blocks of tokens."""
    epochs: NDArray[np.int64]
    """The epoch of each row."""

    @classmethod
    def find(cls, order: Source, epoch: int, places: NDArray[np.int64], real: NDArray[np.bool_] | None) -> PartRows:
        """Find the rows at places counted from the beginning of an epoch, which may be in the epochs after it."""
        epochs = places // max(order.size, 1)
        if isinstance(order, BlockOrder):
            blocks = order.find(epoch + epochs, places - epochs * order.size, real)
            return cls(len(places), blocks, [], epoch + epochs)
        rows, by_epoch = np.empty_like(places), []
        for later in np.unique(epochs).tolist():
            inside = epochs == later
            positions = places[inside] - later * order.size
            rows[inside] = order.rows(epoch + later, positions)
            by_epoch.append((epoch + later, positions))
        return cls(len(places), (rows, real), by_epoch, epoch + epochs)


class StepMemory:
    """One piece of memory for each column of a batch, in which the rows of the datasets are gathered side by side.

    Rows of at least 4 KiB are gathered into memory of `take_buffer`. While the rows of a dataset are, its requests are
    answered with parts of one buffer for each column, where the rows of all datasets have room; so nothing is copied
    when they are joined. Which column a request is for follows from its number: the columns of all datasets are
    gathered in the same order. If they are not, or if rows are left out, the parts do not fit together, and the
    columns are concatenated as others are.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = list(rows)
        self._buffers: list[tuple[NDArray[np.uint8], int]] = []  # the memory of a column, and the bytes of a row
        self._requests = [0] * len(self._rows)

    def take(self, part: int, nbytes: int) -> NDArray[np.uint8]:
        """Return memory for the rows of a dataset in its next column."""
        number, rows = self._requests[part], self._rows[part]
        self._requests[part] += 1
        if number == len(self._buffers) and not nbytes % rows:
            self._buffers.append((take_from_pool(nbytes // rows * sum(self._rows)), nbytes // rows))
        if number >= len(self._buffers) or self._buffers[number][1] * rows != nbytes:
            return take_from_pool(nbytes)
        buffer, width = self._buffers[number]
        start = width * sum(self._rows[:part])
        return buffer[start : start + nbytes]

    def join(self, parts: Sequence[Columns], shapes: ShapePolicy) -> Columns:
        """Concatenate columns; those that were gathered side by side are not copied."""
        whole = {name: self._join_column([part.columns[name] for part in parts]) for name in parts[0].columns}
        joined = {name: column for name, column in whole.items() if column is not None}
        rest = [replace(part, columns={n: c for n, c in part.columns.items() if n not in joined}) for part in parts]
        columns = concat_columns(rest, shapes)
        return replace(columns, columns={name: {**columns.columns, **joined}[name] for name in parts[0].columns})

    def _join_column(self, parts: Sequence[Column]) -> Column | None:
        """Return a column over the whole of a buffer; None if the parts are not, in order, all of one."""
        first = parts[0]
        if not all(type(part) is TensorColumn and part.shapes is None for part in parts):
            return None
        addresses = [_find_memory(part) for part in parts]
        for buffer, _ in self._buffers:
            at, end = buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes
            if addresses[0] is None or addresses[0][0] != at:
                continue
            for address in addresses:
                if address is None or address[0] != at:
                    return None
                at += address[1]
            if at != end or len({(part.dtype, part.data.shape[1:]) for part in parts}) > 1:  # type: ignore[attr-defined]
                return None
            assert isinstance(first, TensorColumn)
            shape = (sum(map(len, parts)), *first.data.shape[1:])
            if first.framework.name == "numpy":
                data = buffer.view(first.dtype).reshape(shape)
            else:
                data = first.framework.from_numpy(buffer).view(first.dtype).view(shape)
            is_whole = all(part.validity is None for part in parts)
            validity = None if is_whole else np.concatenate([part.valid_rows() for part in parts])
            return first.with_data(data, validity, None)
        return None


def _find_memory(column: Any) -> tuple[int, int] | None:
    """Return the address and the bytes of a column of numpy or torch that is contiguous in main memory."""
    data = column.data
    if column.framework.name == "numpy":
        return (data.ctypes.data, data.nbytes) if data.flags.c_contiguous else None
    if column.framework.name == "torch" and data.is_cpu and data.is_contiguous():
        return data.data_ptr(), data.nbytes
    return None


# --- states


@dataclass(frozen=True)
class RowState:
    """The position of a mix by rows: `step` steps after the row `start` of a pass, and the rows of each dataset so far.

    A step has `batch_size` rows on each of `world_size` ranks. `taken` counts the steps of the pass in earlier runs.
    `drawn` has the rows of each dataset in the last step on all ranks, and `mix` and `datasets` identify the plan and
    the order of the rows. The field names are a file format: checkpoints contain them.
    """

    epoch: int
    start: int
    step: int
    taken: int
    counts: dict[str, int]
    drawn: dict[str, int]
    world_size: int
    batch_size: int
    last: str
    mix: str
    datasets: dict[str, str]
    version: int = _STATE_VERSION
    own: tuple[int, ...] = ()
    """The rows of each dataset in the batch of this rank, which are not part of the state."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        state = {name: getattr(self, name) for name in _STATE_FIELDS}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}

    def sources(self) -> NDArray[np.int64]:
        """Return the number of the dataset of each row of the batch."""
        return np.repeat(np.arange(len(self.own)), self.own)

    @classmethod
    def from_dict(cls, state: Any) -> RowState:
        """Read a state that `to_dict` returned, also within that of a StatefulDataLoader without workers."""
        if isinstance(state, Mapping):
            state = state.get("dataset_state") or state
        if not isinstance(state, Mapping) or not set(_STATE_FIELDS) <= set(state):
            raise OptionError("this is no state of a MixedDataset with mix='row'.")
        if state["version"] != _STATE_VERSION:
            raise OptionError(f"the state is of version {state['version']!r}, and this quire reads {_STATE_VERSION}.")
        if not all(isinstance(state[name], Mapping) for name in ("counts", "drawn", "datasets")):
            raise OptionError("the state is damaged: counts, drawn and datasets are mappings.")
        result = cls(**{name: state[name] for name in _STATE_FIELDS})
        counts = [result.epoch, result.start, result.step, result.taken, result.world_size, result.batch_size]
        if not all(type(count) is int and count >= 0 for count in [*counts, *result.counts.values()]):
            raise OptionError(f"the state is damaged: {dict(state)}")
        return result

    def divides_like(self, share: Slice) -> bool:
        """Return whether a step of the state has as many rows as a step of a share."""
        return (self.world_size, self.batch_size, self.last) == (share.world_size, share.batch_size, share.last)

    def position(self, length: int) -> int:
        """Return the number of rows of the pass up to here."""
        if self.start > length or not self.world_size * self.batch_size or self.last not in ("keep", "drop", "pad"):
            raise OptionError(f"the state is damaged: a pass has {length:,} rows, and it is {self.to_dict()}")
        order = RowOrder(length, shuffle=False)
        share = Slice(order, self.epoch, self.start, 0, self.world_size, self.batch_size, self.last)  # type: ignore[arg-type]
        # Before the first step, nothing was taken, even if so few rows are left that these ranks would take no step.
        if self.step and self.step >= share.steps:
            return length
        return self.start + self.step * self.world_size * self.batch_size


_STATE_FIELDS = [name for name in RowState.__dataclass_fields__ if name != "own"]


def combine_workers(mix: RowMix, names: Sequence[str], state: Mapping[str, Any]) -> RowState:
    """Combine the states of the workers of a StatefulDataLoader, each of which knows its own position only.

    Worker w of n takes the steps w, w + n, w + 2n, ... and the loader yields them in order. So all steps before the
    smallest next step of any worker were yielded, and some more since the snapshot.
    """
    snapshots = state["_snapshot"]["_worker_snapshots"]
    states = [RowState.from_dict(snapshots[f"worker_{worker}"]) for worker in range(len(snapshots))]
    taken = min(own.step + (worker - own.step) % len(states) for worker, own in enumerate(states))
    taken += state["_steps_since_snapshot"]
    nearest = max((own for own in states if own.step <= taken), key=lambda own: own.step)
    current = mix.pass_at(nearest.epoch)
    counts, rows = [nearest.counts[name] for name in names], nearest.world_size * nearest.batch_size
    for step in range(nearest.step, taken):
        position = nearest.start + step * rows
        if position + rows > current.length:  # the last step, after which counts do not matter
            break
        counts = mix.advance(current, position, counts, rows)
    return replace(nearest, step=taken, counts=dict(zip(names, counts, strict=True)))


def iterate_steps(mix: RowMix, current: MixPass, share: Slice, first: int, counts: Sequence[int]) -> Iterator[RowStep]:
    """Iterate over the steps of a pass from a step on; only counters advance."""
    full, steps = share.world_size * share.batch_size, share.steps
    for number in range(first, steps):
        begin = share.start + number * full
        is_last = number == steps - 1 and share.last != "drop"
        after = mix.advance(current, begin, counts, current.length - begin if is_last else full)
        yield RowStep(number, counts, after)
        counts = after


def find_start(mix: RowMix, state: RowState, names: Sequence[str]) -> PassStart:
    """Return where a mix resumes from a state: in its pass, or at the beginning of the next one."""
    current = mix.pass_at(state.epoch)
    position = state.position(current.length)
    if position == current.length:
        return PassStart(state.epoch + 1)
    counts = [state.counts.get(name, -1) for name in names]
    if not mix.is_possible(current, position, counts):
        raise OptionError(f"the state is damaged: {dict(state.counts)} are no counts after {position:,} rows.")
    # `done` is the count of epochs for a StreamingDataset; here it has the counts of the datasets.
    return PassStart(state.epoch, position, mix.pack(current, position, counts), state.taken + state.step)
