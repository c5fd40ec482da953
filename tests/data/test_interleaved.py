"""The interleaved order: every row once, each block on one node, well mixed, and the same for all ranks and batches."""

from __future__ import annotations

import pickle
import tracemalloc
from itertools import pairwise
from math import ceil, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.data._bijection import derive_key, hash_numbers, permute, permute_each
from quire.data._epoch import Last, RowOrder, Slice
from quire.data._interleaved import (
    MAX_LANES,
    BlockSizes,
    EqualBlocks,
    InterleavedOrder,
    choose_lanes,
    find_blocks,
)
from quire.errors import OptionError, RowIndexError
from tests.strategies import laws

Numbers = NDArray[np.int64]
LASTS: tuple[Last, ...] = ("keep", "drop", "pad")
BITS = 2**64 - 1


def starts_of(sizes: list[int] | Numbers) -> Numbers:
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(np.int64)


def all_rows(order: InterleavedOrder, epoch: int = 0) -> Numbers:
    return order.rows(epoch, np.arange(order.size, dtype=np.int64))


irregular = st.lists(st.integers(0, 12), min_size=1, max_size=60).filter(any)
regular = st.builds(
    lambda count, rows, last: [rows] * count + [min(last, rows)],
    st.integers(0, 40),
    st.integers(1, 12),
    st.integers(1, 12),
)
block_sizes = irregular | regular


@st.composite
def orders(draw: st.DrawFn) -> InterleavedOrder:
    starts = starts_of(draw(block_sizes))
    lanes = 1 << draw(st.integers(0, min(int(starts[-1]).bit_length() - 1, 6)))
    return InterleavedOrder(starts, lanes, draw(st.integers(0, 2**64 - 1)))


# --- the permutation of the rows of a block


def mixed(number: int) -> int:
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & BITS
    return ((number ^ number >> 27) * 0x94D049BB133111EB) & BITS


def permute_in_plain_python(size: int, key: int, position: int) -> int:
    rows = ceil(sqrt(size))
    columns = -(-size // rows)
    while True:
        row, column = divmod(position, columns)
        for number in range(4):
            round_key = key + number * 0x9E3779B97F4A7C15
            if number % 2 == 0:
                row = (row + ((mixed(column + round_key & BITS) >> 32) * rows >> 32)) % rows
            else:
                column = (column + ((mixed(row + round_key & BITS) >> 32) * columns >> 32)) % columns
        position = row * columns + column
        if position < size:
            return position


@laws
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, BITS)), min_size=1, max_size=5))
def test_each_block_has_a_permutation_of_its_own(blocks: list[tuple[int, int]]) -> None:
    sizes = np.concatenate([np.full(size, size) for size, _ in blocks])
    keys = np.concatenate([np.full(size, key, np.uint64) for size, key in blocks])
    positions = np.concatenate([np.arange(size) for size, _ in blocks])
    images = permute_each(sizes, keys, positions)
    plain = [permute_in_plain_python(size, key, position) for size, key in blocks for position in range(size)]
    assert images.tolist() == plain
    for usual, _ in blocks:
        assert permute_each(sizes, keys, positions, usual).tolist() == plain, "whatever the usual size is"
    begin = 0
    for size, key in blocks:
        assert sorted(images[begin : begin + size].tolist()) == list(range(size))
        assert np.array_equal(permute_each(size, np.full(size, key, np.uint64), np.arange(size)), images[begin:][:size])
        begin += size


def test_permutations_of_large_arrays_equal_those_of_their_parts() -> None:
    positions, keys = np.arange(20_000) % 90, hash_numbers(1, np.arange(20_000) // 90)
    parts = [permute_each(90, keys[i : i + 90], positions[i : i + 90]) for i in range(0, 20_000, 90)]
    assert np.array_equal(permute_each(90, keys, positions), np.concatenate(parts))


# --- the order


def order_in_plain_python(sizes: list[int], lanes: int, seed: int, epoch: int) -> list[int]:
    """The same order with lists: the tape, rings of two lanes, and a row of each lane in turn."""
    starts, tape = starts_of(sizes).tolist(), []
    tape_key, block_key = derive_key(seed, epoch, 4), derive_key(seed, epoch, 5)
    for block in permute(len(sizes), tape_key, np.arange(len(sizes))).tolist():
        key = int(hash_numbers(block_key, np.array([block]))[0])
        size = sizes[block]
        tape += [starts[block] + permute_in_plain_python(size, key, offset) for offset in range(size)]
    bits = lanes.bit_length() - 1
    turns = [int(f"{lane:b}".zfill(bits)[::-1], 2) if bits else 0 for lane in range(lanes)]
    lengths = [len(range(turn, len(tape), lanes)) for turn in turns]
    usual = [size for size in sizes if size]
    rows = sizes[0] if isinstance(find_blocks(starts_of(sizes)), EqualBlocks) else int(np.median(usual))
    content: list[list[int]] = []
    if lanes == 1:
        content = [tape]
    else:
        begins = [sum(lengths[:lane]) for lane in range(0, lanes, 2)]
        choices = [[0] * len(begins), [pair * rows // len(begins) for pair in range(len(begins))]]

        def gap(points: list[int]) -> int:
            offsets = sorted((begin + point) % rows for begin, point in zip(begins, points, strict=True))
            return max(after - before for before, after in pairwise([*offsets, offsets[0] + rows]))

        points = min(choices, key=gap)
        for pair, (begin, point) in enumerate(zip(begins, points, strict=True)):
            forward, backward = lengths[2 * pair], lengths[2 * pair + 1]
            ring = tape[begin : begin + forward + backward]
            shift = point % max(len(ring), 1)
            ring = ring[shift:] + ring[:shift]
            content += [ring[:forward], ring[forward:][::-1]]
    by_turn = sorted(range(lanes), key=lambda lane: turns[lane])
    rounds = range(max(lengths))
    return [content[lane][number] for number in rounds for lane in by_turn if number < len(content[lane])]


@laws
@given(block_sizes, st.integers(0, 6), st.integers(0, BITS), st.integers(0, 5))
def test_order_equals_the_one_in_plain_python(sizes: list[int], bits: int, seed: int, epoch: int) -> None:
    lanes = 1 << min(bits, sum(sizes).bit_length() - 1)
    order = InterleavedOrder(starts_of(sizes), lanes, seed)
    assert all_rows(order, epoch).tolist() == order_in_plain_python(sizes, lanes, seed, epoch)


@laws
@given(orders(), st.integers(0, 2**64 - 1))
def test_order_is_a_permutation(order: InterleavedOrder, epoch: int) -> None:
    rows = all_rows(order, epoch)
    assert rows.dtype == np.int64
    assert np.array_equal(np.sort(rows), np.arange(order.size))


@laws
@given(orders(), st.data())
def test_rows_do_not_depend_on_the_positions_around_them(order: InterleavedOrder, data: st.DataObject) -> None:
    rows = all_rows(order, 2)
    some = data.draw(st.lists(st.integers(0, order.size - 1), max_size=20))
    assert order.rows(2, np.array(some, np.int64)).tolist() == rows[some].tolist()


@laws
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), st.integers(0, 5))
def test_equal_blocks_need_no_table_and_have_the_same_order(count: int, rows: int, last: int, bits: int) -> None:
    starts = starts_of([rows] * count + [min(rows, last)])
    blocks = find_blocks(starts)
    assert isinstance(blocks, EqualBlocks)
    assert np.array_equal(blocks.starts, starts)
    table = BlockSizes(starts)
    table.rows = rows  # type: ignore[misc]  # the median of two blocks may be another one
    lanes = 1 << min(bits, int(starts[-1]).bit_length() - 1)
    with_table = InterleavedOrder(table, lanes, 3)
    assert np.array_equal(all_rows(InterleavedOrder(blocks, lanes, 3)), all_rows(with_table))


def test_epochs_and_seeds_have_different_orders() -> None:
    starts = starts_of([10] * 30)
    results = {
        tuple(all_rows(InterleavedOrder(starts, lanes, seed), epoch).tolist())
        for lanes in (1, 4, 8)
        for seed in (0, 1, 2**64 - 1)
        for epoch in (0, 1, 2)
    }
    assert len(results) == 27


def test_epoch_of_one_block_is_shuffled() -> None:
    order = InterleavedOrder(starts_of([500]), 1, 5)
    first, second = all_rows(order, 0), all_rows(order, 1)
    assert not np.array_equal(first, second)
    steps = np.diff(first)
    assert len(np.unique(steps)) > 200, "no regular pattern"


def test_neighbours_of_a_block_are_apart_in_most_epochs() -> None:
    """Without a shuffle of the rows of a block, two neighbours would be in the same batch in half of all epochs."""
    order = InterleavedOrder(starts_of([80] * 64), 32, 5)
    together = 0
    for epoch in range(40):
        batch_of_row = np.empty(order.size, np.int64)
        batch_of_row[all_rows(order, epoch)] = np.arange(order.size) // 64
        together += int((batch_of_row[1000] == batch_of_row[1001]).sum())
    assert together <= 6


def test_rows_equal_golden_values() -> None:
    """A state that was stored is resumed by another version of quire. These never change."""
    even = InterleavedOrder(EqualBlocks(143, 7, 1_000), 8, 7)
    uneven = InterleavedOrder(starts_of([3, 0, 11, 5, 8] * 40), 16, 7)
    large = InterleavedOrder(EqualBlocks(10**10, 100, 10**12), 32_768, 7)
    assert even.rows(3, np.arange(0, 1_000, 125)).tolist() == [744, 459, 15, 902, 227, 882, 223, 100]
    assert uneven.rows(3, np.arange(0, 1_080, 135)).tolist() == [276, 767, 492, 697, 338, 41, 426, 605]
    far = np.array([0, 1, 10**6, 10**12 - 1])
    assert large.rows(3, far).tolist() == [171308667013, 350779121197, 190000494118, 61315583978]


def test_order_of_many_rows_needs_little_memory() -> None:
    tracemalloc.start()
    try:
        order = InterleavedOrder(EqualBlocks(10**10, 100, 10**12), 32_768, 7)
        rows = Slice(order, 4, 0, 4_095, 4_096, 64, "keep").rows(1_000_003)[0]
        size = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(np.unique(rows)) == 64
    assert size < 4 << 20
    assert len(pickle.dumps(order)) < 300


@laws
@given(orders(), st.integers(0, 9))
def test_pickled_order_is_the_same(order: InterleavedOrder, epoch: int) -> None:
    copy = pickle.loads(pickle.dumps(order))
    assert copy.identity == order.identity
    assert np.array_equal(all_rows(copy, epoch), all_rows(order, epoch))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lanes": 0}, "lanes=0: expected a power of two from 1 to the number of rows, which is 100"),
        ({"lanes": 12}, "lanes=12: expected a power of two"),
        ({"lanes": 128}, "lanes=128: expected a power of two from 1 to the number of rows, which is 100"),
        ({"seed": 2**64}, "seed: expected 0 to"),
        ({"blocks": np.array([1, 5])}, "starts: expected the first row of each block"),
        ({"blocks": np.array([0, 5, 3])}, "starts: expected the first row of each block"),
        ({"blocks": np.array([], np.int64)}, "starts: expected the first row of each block"),
    ],
)
def test_invalid_orders_are_rejected(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"blocks": starts_of([10] * 10), "lanes": 4, "seed": 0}
    with pytest.raises(OptionError) as caught:
        InterleavedOrder(**{**arguments, **change})  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_positions_outside_the_epoch_are_rejected() -> None:
    order = InterleavedOrder(starts_of([10] * 10), 4)
    for positions in ([-1, 3], [3, 100]):
        with pytest.raises(RowIndexError, match=r"is not one of \[0, 100\)"):
            order.rows(0, np.array(positions))
    with pytest.raises(OptionError, match="epoch: expected 0"):
        order.rows(-1, np.array([1]))
    assert order.rows(0, np.zeros(0, np.int64)).tolist() == []


def test_order_without_rows_has_no_steps() -> None:
    for starts in ([0], [0, 0, 0]):
        order = InterleavedOrder(np.array(starts), 1)
        assert Slice(order, 0, 0, 0, 1, 4, "keep").steps == 0
        assert len(order.runs(0, 0, 0)[0]) == 0


# --- the shares of ranks


@laws
@given(orders(), st.data())
def test_ranks_get_consecutive_lanes(order: InterleavedOrder, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, order.size))
    end = data.draw(st.integers(begin, order.size + 20))
    positions = np.arange(begin, end)
    dealt = positions[np.argsort(order.lanes_of(positions % order.size), kind="stable")]
    first = data.draw(st.integers(0, end - begin))
    last = data.draw(st.integers(first, end - begin))
    share = order.deal(begin, end, first, last)
    if (first, last) == (0, end - begin):
        assert np.array_equal(share, positions)
    else:
        assert np.array_equal(share, dealt[first:last])


@laws
@given(orders(), st.integers(1, 9), st.integers(1, 20), st.sampled_from(LASTS), st.integers(0, 3), st.data())
def test_each_row_is_on_one_rank_and_worker(
    order: InterleavedOrder, world: int, batch_size: int, last: Last, workers: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, order.size - 1))
    positions, padding = list[int](), 0
    shares = [Slice(order, 1, start, rank, world, batch_size, last) for rank in range(world)]
    for share in shares:
        own = list[tuple[int, list[int]]]()
        for worker in range(max(workers, 1)):
            steps = share.worker_steps(worker, workers)
            for step, (rows, real) in zip(steps, share.parts(steps) if steps else [], strict=True):
                padding += 0 if real is None else int((~real).sum())
                own.append((step, rows.tolist() if real is None else rows[real].tolist()))
                assert np.array_equal(share.rows(step)[0], rows)
        assert [step for step, _ in sorted(own)] == list(range(share.steps)), "the same with any number of workers"
        positions += [row for _, rows in own for row in rows]
    rows = order.rows(1, np.arange(start, order.size))
    whole = len(rows) // (world * batch_size) * world * batch_size
    expected = rows[:whole] if last == "drop" else rows
    assert sorted(positions) == sorted(expected.tolist())
    assert padding == (-len(rows) % (world * batch_size) if last == "pad" else 0)


@laws
@given(
    orders(),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 3, 16]), st.integers(0, 6)), max_size=8),
    st.sampled_from(["keep", "pad"]),
)
def test_each_row_comes_once_while_ranks_and_batches_change(
    order: InterleavedOrder, phases: list[tuple[int, int, int]], last: Last
) -> None:
    epoch, position, seen = 0, 0, list[int]()
    for world, batch_size, steps in [*phases, (2, 5, order.size)]:
        shares = [Slice(order, epoch, position, rank, world, batch_size, last) for rank in range(world)]
        for step in range(min(steps, shares[0].steps)):
            for share in shares:
                rows, real = share.rows(step)
                seen += (rows if real is None else rows[real]).tolist()
            epoch, position = shares[0].state(step)
        if epoch:
            break
    assert sorted(seen) == list(range(order.size))


# --- the blocks that are read


def count_fetches(order: InterleavedOrder | RowOrder, starts: Numbers, nodes: int, batch_size: int) -> int:
    """Count the blocks that nodes fetch in an epoch, if each drops a block when none of its lanes is in it anymore."""
    fetches = 0
    lanes = order.lanes or 1
    patience = -(-2 * lanes // (nodes * batch_size)) + 1  # a lane has a row in this number of steps
    for node in range(nodes):
        share, last_use = Slice(order, 0, 0, node, nodes, batch_size, "keep"), dict[int, int]()
        for step in range(share.steps):
            blocks = np.unique(np.searchsorted(starts, share.rows(step)[0], side="right") - 1).tolist()
            fetches += sum(step - last_use.get(block, -patience - 1) > patience for block in blocks)
            last_use.update(dict.fromkeys(blocks, step))
    return fetches


@pytest.mark.parametrize("batch_size", [7, 50, 64, 100])
@pytest.mark.parametrize("kind", ["equal", "aligned", "random"])
def test_each_block_is_fetched_once_by_all_nodes(batch_size: int, kind: str) -> None:
    """The size of the data of benchmarks/remote.py: 197 MB in blocks of 1 MiB."""
    sizes = {
        "equal": np.full(189, 40),
        "aligned": np.full(192, 40),
        "random": np.random.default_rng(1).integers(20, 60, 189),
    }[kind]
    starts = starts_of(sizes)
    order = InterleavedOrder(starts, choose_lanes(len(sizes), len(sizes) << 20), 1)
    assert order.lanes == 32
    assert count_fetches(order, starts, 1, batch_size) == len(sizes)
    for nodes in (2, 4):
        # A block at the border of two nodes is on both of them.
        assert count_fetches(order, starts, nodes, batch_size) <= len(sizes) + (nodes - 1) * 2
    if batch_size >= 50:
        # Nodes whose number is no power of two share a lane at each border, and more lanes if a step has few rows.
        assert count_fetches(order, starts, 3, batch_size) <= 1.1 * len(sizes)


def test_more_lanes_keep_blocks_on_one_of_many_nodes() -> None:
    sizes = np.full(4_000, 16)
    starts = starts_of(sizes)
    order = InterleavedOrder(starts, 512, 1)
    for nodes, most in ((2, 1.001), (3, 1.01), (5, 1.02), (16, 1.004), (48, 1.09)):
        assert count_fetches(order, starts, nodes, 128) <= most * len(sizes)
    block = RowOrder(int(starts[-1]), 1, "block", 16, 512)
    assert count_fetches(block, starts, 16, 24) > 8 * len(sizes)


@pytest.mark.parametrize("count", [192, 189, 200, 256])
def test_lanes_do_not_change_blocks_all_at_once(count: int) -> None:
    starts = np.arange(count + 1) * 64
    order = InterleavedOrder(starts, 32, 3)
    # In the time of an eighth of a block, an eighth of the lanes should come to a new block.
    window = 32 * 64 // 8
    steps = [(at, min(at + window, order.size)) for at in range(window, order.size, window)]
    numbers = [len(order.new_runs(0, *step, range(32))[0]) for step in steps]
    assert max(numbers) <= 12
    assert sum(numbers) >= count - 2 * 32


@laws
@given(orders(), st.data())
def test_runs_are_the_blocks_of_their_positions(order: InterleavedOrder, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, order.size))
    stop = data.draw(st.integers(start, order.size))
    starts = order.blocks.starts
    rows = order.rows(4, np.arange(start, stop))
    needed = set((np.searchsorted(starts, rows, side="right") - 1).tolist())
    begins, ends = order.runs(4, start, stop)
    blocks = (np.searchsorted(starts, begins, side="right") - 1).tolist()
    assert set(blocks) == needed
    assert len(blocks) == len(needed)
    assert ends.tolist() == [int(starts[block + 1]) for block in blocks]
    numbers = order.block_numbers(4, np.arange(start, stop)).tolist()
    in_order = list(dict.fromkeys((np.searchsorted(starts, rows, side="right") - 1).tolist()))
    assert numbers == in_order, "by their first use"


@laws
@given(orders(), st.lists(st.integers(0, 900), max_size=6), st.data())
def test_new_runs_are_all_blocks_of_a_rank(order: InterleavedOrder, cuts: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, order.lanes - 1))
    lanes = range(first, data.draw(st.integers(first + 1, order.lanes)))
    cuts = sorted({0, order.size, *(cut for cut in cuts if cut < order.size)})
    begins = [order.new_runs(2, *pair, lanes)[0] for pair in pairwise(cuts)]
    positions = np.arange(order.size)
    own = np.isin(order.lanes_of(positions), lanes)
    rows = order.rows(2, positions)[own]
    needed = set((np.searchsorted(order.blocks.starts, rows, side="right") - 1).tolist())
    reached = np.searchsorted(order.blocks.starts, np.concatenate([np.zeros(0, np.int64), *begins]), side="right") - 1
    assert set(reached.tolist()) == needed


# --- how well batches are mixed


def mixing_entropy(order: InterleavedOrder | RowOrder, batch: int) -> float:
    """Return the entropy of the tenths of the data that rows of a batch come from, relative to the largest one."""
    batches = order.rows(0, np.arange(order.size // batch * batch)).reshape(-1, batch)
    counts = np.stack([(batches * 10 // order.size == tenth).sum(axis=1) for tenth in range(10)], axis=1)
    shares = counts / batch
    entropy = -np.sum(np.where(shares > 0, shares * np.log(np.maximum(shares, 1e-9)), 0), axis=1)
    return float(entropy.mean() / np.log(10))


def test_batches_are_mixed_like_those_of_a_random_permutation() -> None:
    rows, blocks = 200_000, 2_000
    order = InterleavedOrder(np.arange(blocks + 1) * 100, choose_lanes(blocks, blocks << 20), 1)
    assert order.lanes == 256
    best = mixing_entropy(RowOrder(rows, 1, "global"), 256)
    assert mixing_entropy(order, 256) > 0.985 * best
    assert mixing_entropy(RowOrder(rows, 1, "block", 100, 16), 256) < 0.92 * best, "a small window is worse"


def test_batch_has_rows_of_as_many_blocks_as_there_are_lanes() -> None:
    order = InterleavedOrder(np.arange(190) * 85, 32, 1)
    batches = order.rows(0, np.arange(order.size // 64 * 64)).reshape(-1, 64) // 85
    numbers = [len(np.unique(batch)) for batch in batches]
    assert min(numbers) >= 16, "two lanes may share a block where they begin"
    assert np.mean(numbers) > 28


# --- the number of lanes


@pytest.mark.parametrize(
    ("blocks", "nbytes", "lanes"),
    [
        (0, 0, 1),
        (1, 100, 1),
        (3, 3 << 20, 2),
        (20, 20 << 20, 16),
        (40, 40 << 20, 32),
        (189, 197_000_000, 32),
        (2_000, 2_000 << 20, 256),
        (100_000, 100_000 << 20, 256),
        (10**7, 10**13, 32_768),
        (10**12, 10**18, MAX_LANES),
    ],
)
def test_lanes_follow_from_the_size_of_a_dataset(blocks: int, nbytes: int, lanes: int) -> None:
    assert choose_lanes(blocks, nbytes) == lanes


@laws
@given(st.integers(1, 10**9), st.integers(1, 2**30))
def test_open_blocks_are_within_the_budget(blocks: int, block_bytes: int) -> None:
    nbytes = blocks * block_bytes
    lanes = choose_lanes(blocks, nbytes)
    assert lanes & (lanes - 1) == 0
    assert 1 <= lanes <= blocks
    assert lanes <= 32 or lanes * block_bytes <= max(256 << 20, nbytes // 300)
