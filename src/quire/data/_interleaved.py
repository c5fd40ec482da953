"""The interleaved order: an epoch that reads many blocks of a dataset at the same time, and each of them once.

The blocks of a dataset are shuffled and concatenated: the *tape*. The tape is cut into *lanes* of equal length, and an
epoch takes one row of each lane in turn. A batch therefore has rows of many blocks, while only one block of each lane
is needed at a time. This suits an object store: the first batch needs one block for each of its rows, and from then on
blocks are needed one after another, at a steady rate.

    tape:    | block 7 | block 2 | block 5 | block 0 | block 6 | ...
    lanes:   |-------- lane 0 ------->|<------- lane 1 --------| ...
    epoch:   first row of lane 0, of lane 4, of lane 2, ...; second row of lane 0, of lane 4, of lane 2, ...

The lanes are taken in bit-reversed order, so that any range of consecutive positions is spread evenly over the lanes.
The rows of a step are sorted by lane before they are divided among the ranks (`deal`): a rank reads a range of lanes,
and nearly the same range in every step, whatever the number of ranks and the batch size. Each block is then read by one
node only, except for a few at the borders of their ranges.

A border between lanes is usually inside a block. If all lanes ran forward, the end of one lane would need this block at
the end of the epoch, and the start of the next lane at its beginning. So every second lane runs backward: two lanes
that share a block are in it at the same time.

All of this is arithmetic on the prefix sums of the rows of the blocks. The order depends on the blocks, the number of
lanes, the seed and the epoch, and not on ranks, workers or batches. States store positions of it, so it must never
change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from quire.data._bijection import LARGEST, derive_key, hash_numbers, permute, permute_each, unpermute
from quire.data._epoch import RowOrder, Rows, check_bounds
from quire.errors import OptionError, RowIndexError

BUDGET_BYTES = 256 << 20
"""The size of the open blocks of all lanes, from which the number of lanes follows.

It is not `memory_bytes`: the order must not depend on options that may differ between machines.
"""
MAX_LANES = 1 << 24
_FEW_LANES = 32
_TABLE = 1 << 17  # a permutation of up to this number of blocks is stored: 1 MiB, computed in 3 ms
_TAPE_ORDER, _BLOCK_ORDER = 4, 5  # the permutations of RowOrder and BucketOrder have the numbers 0 to 3


# --- blocks and tapes


class _Tape(Protocol):
    """The blocks in the shuffled order of an epoch. A *place* is the index of a block in this order."""

    def places(self, at: Rows) -> tuple[Rows, Rows]:
        """Return the place at each tape position, and the offset in its block."""
        ...

    def blocks(self, places: Rows) -> Rows:
        """Return the block at each place."""
        ...


@dataclass(frozen=True)
class EqualBlocks:
    """Blocks of `rows` rows, of which only the last may have fewer. There is no table of them."""

    count: int
    rows: int
    size: int

    def begins(self, blocks: Rows) -> Rows:
        """Return the first rows of blocks."""
        return blocks * self.rows

    def lengths(self, blocks: Rows) -> Rows | int:
        """Return the numbers of rows of blocks: one for each, or one for all."""
        missing = self.count * self.rows - self.size
        return self.rows - missing * (blocks == self.count - 1) if missing else self.rows

    def tape(self, key: int) -> _Tape:
        return _EqualTape(self, key)

    @property
    def starts(self) -> Rows:
        """The first rows of all blocks; at the end, the number of rows."""
        return np.minimum(np.arange(self.count + 1, dtype=np.int64) * self.rows, self.size)

    @property
    def filled(self) -> int:
        """The number of blocks that have rows."""
        return self.count


class BlockSizes:
    """Blocks of any number of rows, also none, as a table of their first rows; at its end, the number of rows."""

    def __init__(self, starts: Rows) -> None:
        self.starts = starts
        self.count, self.size = len(starts) - 1, int(starts[-1])

    @cached_property
    def rows(self) -> int:
        """The usual number of rows of blocks that have any: the median."""
        sizes = np.diff(self.starts)
        return int(np.median(sizes[sizes > 0])) if self.size else 1

    @cached_property
    def filled(self) -> int:
        """The number of blocks that have rows."""
        return int(np.count_nonzero(np.diff(self.starts)))

    def begins(self, blocks: Rows) -> Rows:
        """Return the first rows of blocks."""
        return self.starts[blocks]

    def lengths(self, blocks: Rows) -> Rows:
        """Return the numbers of rows of blocks."""
        return self.starts[blocks + 1] - self.starts[blocks]

    def tape(self, key: int) -> _Tape:
        return _TableTape(self, key)


Blocks = EqualBlocks | BlockSizes


class _EqualTape:
    """A tape position divided by the rows of a block is a place, and the permutation gives its block.

    Only a permutation of few blocks is stored, for speed. Positions after the shorter block are moved by the rows that
    it lacks, as if it were complete.
    """

    def __init__(self, blocks: EqualBlocks, key: int) -> None:
        self._count, self._rows, self._key = blocks.count, blocks.rows, key
        self._gap = blocks.count * blocks.rows - blocks.size
        short = int(unpermute(blocks.count, key, np.array([blocks.count - 1]))[0])
        self._edge = (short + 1) * blocks.rows - self._gap
        self._table: Rows | None = None
        if blocks.count <= _TABLE:
            self._table = permute(blocks.count, key, np.arange(blocks.count, dtype=np.int64))

    def places(self, at: Rows) -> tuple[Rows, Rows]:
        if self._gap:
            at = at + self._gap * (at >= self._edge)
        places = at // self._rows
        return places, at - places * self._rows

    def blocks(self, places: Rows) -> Rows:
        return permute(self._count, self._key, places) if self._table is None else self._table[places]


class _TableTape:
    """The first tape position of each place, and its block."""

    def __init__(self, blocks: BlockSizes, key: int) -> None:
        order = np.arange(blocks.count, dtype=np.int64)
        if blocks.count:
            order = permute(blocks.count, key, order)
        self._begins = np.cumsum(np.diff(blocks.starts)[order])
        self._begins = np.concatenate([np.zeros(1, np.int64), self._begins[:-1]])
        self._blocks = order.astype(np.int32) if blocks.count < 2**31 else order

    def places(self, at: Rows) -> tuple[Rows, Rows]:
        # Blocks without rows begin where the next one does: the last of equal begins is the block with rows.
        places = np.searchsorted(self._begins, at, side="right") - 1
        return places, at - self._begins[places]

    def blocks(self, places: Rows) -> Rows:
        return self._blocks[places].astype(np.int64)


def find_blocks(starts: Rows) -> Blocks:
    """Return blocks with these first rows; at the end of `starts` is the number of rows."""
    starts = np.ascontiguousarray(starts, np.int64)
    sizes = np.diff(starts)
    if starts.ndim != 1 or not len(starts) or starts[0] != 0 or (sizes < 0).any():
        raise OptionError("starts: expected the first row of each block, from 0 up, and the number of rows.")
    if len(sizes) and 0 < sizes[-1] <= sizes[0] and (sizes[:-1] == sizes[0]).all():
        return EqualBlocks(len(sizes), int(sizes[0]), int(starts[-1]))
    return BlockSizes(starts)


# --- the order


class InterleavedOrder:
    """The interleaved order of the rows of blocks. `lanes` is a power of two, and at most the number of rows.

    It has the same methods as `RowOrder`. An epoch costs memory only if blocks differ in their numbers of rows: 12
    bytes for each of them.
    """

    shuffle = "interleaved"
    block = window = 0  # those of RowOrder, which states contain

    def __init__(self, blocks: Blocks | Rows, lanes: int, seed: int = 0) -> None:
        self.blocks: Blocks = find_blocks(blocks) if isinstance(blocks, np.ndarray) else blocks
        self.size, self.lanes, self.seed = self.blocks.size, lanes, seed
        check_lanes(lanes, self.size)
        check_bounds("size", self.size, 0, LARGEST)
        check_bounds("seed", seed, 0, 2**64 - 1)
        self._bits = lanes.bit_length() - 1
        self._tapes: dict[int, _Tape] = {}

    @property
    def identity(self) -> tuple[object, ...]:
        """The values that distinguish orders of one dataset."""
        return self.size, self.seed, self.shuffle, self.lanes

    @property
    def reach(self) -> int:
        """The number of positions that steps which are gathered together may span."""
        return max(self.size, 1)

    def unshuffled(self) -> RowOrder:
        """Return the order of the dataset itself."""
        return RowOrder(self.size, self.seed, shuffle=False)

    def regroup(self, starts: Rows) -> InterleavedOrder:
        """Return the order of other items of the same blocks, such as windows of rows, by the first item of each block.

        It has the same number of lanes, or as many as there are items.
        """
        most = 1 << max(int(starts[-1]), 1).bit_length() - 1
        return InterleavedOrder(starts, min(self.lanes, most), self.seed)

    def with_lanes(self, lanes: int) -> InterleavedOrder:
        """Return the order of the same blocks with another number of lanes."""
        return self if lanes == self.lanes else InterleavedOrder(self.blocks, lanes, self.seed)

    def __getstate__(self) -> dict[str, Any]:
        return {"blocks": self.blocks, "lanes": self.lanes, "seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        InterleavedOrder.__init__(self, **state)

    def __repr__(self) -> str:
        return f"InterleavedOrder({self.blocks.count} blocks, {self.size} rows, lanes={self.lanes}, seed={self.seed})"

    # --- rows

    def rows(self, epoch: int, positions: Rows) -> Rows:
        """Return the numbers of the rows at positions of an epoch."""
        check_bounds("epoch", epoch, 0, 2**64 - 1)
        positions = np.asarray(positions, np.int64)
        if positions.size == 0:
            return positions
        self._check_positions(int(positions.min()), int(positions.max()) + 1)
        tape = self._tape(epoch)
        places, offsets = tape.places(self._tape_positions(positions))
        blocks = tape.blocks(places)
        # The rows of a block are shuffled among themselves: otherwise neighbours would meet in every epoch.
        keys = hash_numbers(derive_key(self.seed, epoch, _BLOCK_ORDER), blocks)
        lengths = self.blocks.lengths(blocks)
        return self.blocks.begins(blocks) + permute_each(lengths, keys, offsets, self.blocks.rows)

    def deal(self, begin: int, end: int, first: int, last: int) -> Rows:
        """Return the positions of a step, sorted by lane, from number `first` to `last`: the share of a rank.

        The step has the positions from `begin` to `end`. Those after the epoch stand for positions at its beginning.
        """
        if first == 0 and last == end - begin:
            return np.arange(begin, end, dtype=np.int64)  # nothing to divide
        if first < last and end <= self.size:
            (low, before), (high, _) = self._find_lane(begin, end, first), self._find_lane(begin, end, last - 1)
            if high - low < end - begin:
                # All positions of the lanes from low to high, of which the first `before` belong to another rank.
                rounds = np.arange(begin >> self._bits, (end - 1 >> self._bits) + 1) << self._bits
                positions: Rows = (self._reversed[low : high + 1, None] + rounds).ravel()
                positions = positions[(positions >= begin) & (positions < end)]
                return positions[before : before + last - first]
        positions = np.arange(begin, end, dtype=np.int64)
        by_lane = np.argsort(self.lanes_of(positions % max(self.size, 1)), kind="stable")
        share: Rows = positions[by_lane[first:last]]
        return share

    def lanes_of(self, positions: Rows) -> Rows:
        """Return the lane of each position of an epoch."""
        lanes: Rows = self._reversed[positions & (self.lanes - 1)]
        return lanes

    def _find_lane(self, begin: int, end: int, number: int) -> tuple[int, int]:
        """Find one of the positions from begin to end, by its number among them when they are sorted by lane.

        Return its lane, and how many of the positions before it are in the same lane. The bits of the lane are found
        from the highest on: the first half of the lanes has the even positions, the first quarter every fourth one.
        """
        lane = turn = 0
        for bit in range(self._bits):
            step = 2 << bit
            inside = (end - turn + step - 1) // step - (begin - turn + step - 1) // step  # they are `turn` modulo step
            lane <<= 1
            if number >= inside:
                number -= inside
                lane, turn = lane | 1, turn | 1 << bit
        return lane, number

    # --- lanes on the tape

    @cached_property
    def _reversed(self) -> Rows:
        """The numbers below `lanes` with their bits in reverse order. It is its own inverse."""
        numbers, result = np.arange(self.lanes, dtype=np.int64), np.zeros(self.lanes, np.int64)
        for _ in range(self._bits):
            result = result << 1 | numbers & 1
            numbers >>= 1
        return result

    @cached_property
    def _rings(self) -> _Rings:
        """Two neighbouring lanes are a ring: they begin at one point of it, run apart, and meet at the opposite one.

        The point where a ring begins decides when its lanes come to the end of a block. If all lanes did so at once, a
        loader would need the next blocks of all lanes at once. This happens if the rows of a ring are a multiple of
        those of a block, or nearly so. Then the rings begin at different points, from the first row of the first ring
        to the last row of a block in the last ring. Neighbouring rings have about the same point, so that they are at
        the same time in the block at their border.
        """
        # Lanes differ by a row: those whose turn comes first have the rows of the last round.
        counts = (self.size - self._reversed + self.lanes - 1) >> self._bits
        if self.lanes == 1:
            zero = np.zeros(1, np.int64)
            return _Rings(zero, np.maximum(counts, 1), zero, zero + 1)
        ends = np.cumsum(counts)[1::2]
        lengths = counts[::2] + counts[1::2]
        starts, rows = ends - lengths, self.blocks.rows
        spread = np.arange(len(starts), dtype=np.int64) * rows // len(starts)
        points = min((np.zeros_like(spread), spread), key=lambda points: _largest_gap((starts + points) % rows, rows))
        lanes = self._reversed  # by turn
        signs = 1 - 2 * (lanes & 1)
        offsets = (points % np.maximum(lengths, 1))[lanes >> 1] - (signs < 0)
        return _Rings(starts[lanes >> 1], lengths[lanes >> 1], offsets, signs)

    def _tape_positions(self, positions: Rows) -> Rows:
        rings, turns, rounds = self._rings, positions & (self.lanes - 1), positions >> self._bits
        lengths = rings.lengths[turns]
        along: Rows = rings.offsets[turns] + rings.signs[turns] * rounds
        along -= lengths * (along >= lengths)
        along += lengths * (along < 0)
        along += rings.starts[turns]
        return along

    def _tape(self, epoch: int) -> _Tape:
        tape = self._tapes.get(epoch)
        if tape is None:
            tape = self.blocks.tape(derive_key(self.seed, epoch, _TAPE_ORDER))
            # At most two: the current epoch, and the next one while it is read ahead. Threads may read the old dict.
            self._tapes = dict([*list(self._tapes.items())[-1:], (epoch, tape)])
        return tape

    # --- blocks

    def block_numbers(self, epoch: int, positions: Rows) -> Rows:
        """Return the blocks that positions of an epoch need, each once, in the order of their first use."""
        positions = np.asarray(positions, np.int64)
        tape = self._tape(epoch)
        places, _ = tape.places(self._tape_positions(positions))
        _, first = np.unique(places, return_index=True)
        return tape.blocks(places[np.sort(first)])

    def runs(self, epoch: int, start: int, stop: int, lanes: range | None = None) -> tuple[Rows, Rows]:
        """Return the ranges of rows that the positions from start to stop are drawn from: their first rows and ends.

        They are the blocks that all lanes are in at these positions, or that some lanes are in.
        """
        places = self._places(epoch, start, stop, range(self.lanes) if lanes is None else lanes)
        return self._ranges(self._tape(epoch).blocks(places))

    def new_runs(self, epoch: int, start: int, stop: int, lanes: range) -> tuple[Rows, Rows]:
        """Return the ranges of rows that lanes come to from start to stop, without those they are in at the start."""
        places = self._places(epoch, start, stop, lanes)
        if start:
            before = self._places(epoch, max(0, start - self.lanes), start, lanes)
            places = np.setdiff1d(places, before, assume_unique=True)
        return self._ranges(self._tape(epoch).blocks(places))

    def _ranges(self, blocks: Rows) -> tuple[Rows, Rows]:
        begins, lengths = self.blocks.begins(blocks), self.blocks.lengths(blocks)
        filled = begins + lengths > begins
        return begins[filled], (begins + lengths)[filled]

    def _places(self, epoch: int, start: int, stop: int, own: range) -> Rows:
        """Return the places that lanes are in at the positions from start to stop, ascending."""
        self._check_positions(start, stop)
        if start == stop:
            return np.zeros(0, np.int64)
        turns, bits = self._reversed[own.start : own.stop], self._bits
        # A lane has the rounds r with start <= r * lanes + turn < stop.
        begins, ends = -(turns - start >> bits), -(turns - stop >> bits)
        inside = np.flatnonzero(begins < ends)
        turns, begins, ends = turns[inside], begins[inside], ends[inside]
        rings = self._rings
        starts, lengths = rings.starts[turns], rings.lengths[turns]
        edges = rings.offsets[turns] + rings.signs[turns] * np.stack([begins, ends - 1])
        first, last = edges.min(axis=0), edges.max(axis=0)
        # A lane that passes the end of its ring goes on at its beginning: cut there, and move both parts into the ring.
        parts = [
            (np.maximum(first, shift * lengths), np.minimum(last, (shift + 1) * lengths - 1), shift * lengths)
            for shift in (-1, 0, 1)
        ]
        tape, places = self._tape(epoch), [np.zeros(0, np.int64)]
        for part_first, part_last, moved in parts:
            some = part_first <= part_last
            (lowest, _), (highest, _) = (tape.places((edge - moved + starts)[some]) for edge in (part_first, part_last))
            counts = highest - lowest + 1
            before = np.cumsum(counts) - counts
            places.append(np.repeat(lowest - before, counts) + np.arange(int(counts.sum())))
        return np.unique(np.concatenate(places))

    def _check_positions(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.size:
            wrong = start if start < 0 else stop - 1
            raise RowIndexError(f"position {wrong} is not one of [0, {self.size}).")


class _Rings(NamedTuple):
    """For each turn: where the ring of its lane is on the tape, and how the lane runs along it."""

    starts: Rows
    lengths: Rows
    offsets: Rows
    signs: Rows


def _largest_gap(offsets: Rows, rows: int) -> int:
    """Return the largest distance between neighbours among offsets in a block, the last and the first included."""
    ordered = np.sort(offsets)
    return int(np.diff(ordered, append=ordered[0] + rows).max())


# --- the number of lanes


def choose_lanes(blocks: int, nbytes: int, budget_bytes: int = BUDGET_BYTES) -> int:
    """Choose the number of lanes for a number of blocks with a total size: a power of two.

    One block of each lane is open at a time. Together they stay within the budget, or within 1/300 of the dataset if
    that is more, so that the batches of many ranks are mixed well. With at least four blocks in a lane, few blocks are
    at the borders of lanes. Small datasets have up to 32 lanes all the same, otherwise their batches would have rows of
    a few blocks only.
    """
    if blocks < 1:
        return 1
    within_budget = max(budget_bytes, nbytes // 300) * blocks // max(nbytes, 1)
    most = max(min(within_budget, blocks // 4), min(blocks, _FEW_LANES))
    return min(1 << most.bit_length() - 1, MAX_LANES)


def check_lanes(lanes: int, size: int) -> None:
    """Raise an error for a number of lanes that a dataset with `size` rows cannot have."""
    most = min(MAX_LANES, max(size, 1))
    if not 1 <= lanes <= most or lanes & (lanes - 1):
        raise OptionError(
            f"lanes={lanes}: expected a power of two from 1 to the number of rows, which is {size}"
            f"{f', and at most {MAX_LANES}' if size > MAX_LANES else ''}."
        )
