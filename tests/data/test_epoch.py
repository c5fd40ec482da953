"""The order of an epoch and the shares of its ranks: every row once, however often a run is stopped and resized."""

from __future__ import annotations

import pickle
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.data._epoch import Last, RowOrder, Shuffle, Slice, choose_block
from quire.errors import OptionError, RowIndexError
from tests.strategies import laws

SIZES = (0, 1, 7, 1_000, 1_001)
SHUFFLES: tuple[Shuffle, ...] = ("global", "block", False)
LASTS: tuple[Last, ...] = ("drop", "pad", "keep")

shuffles = st.sampled_from(SHUFFLES)
lasts = st.sampled_from(LASTS)


def all_rows(order: RowOrder, epoch: int = 0) -> NDArray[np.int64]:
    return order.rows(epoch, np.arange(order.size, dtype=np.int64))


# --- the order of the rows


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1_000, 1_001])
@pytest.mark.parametrize("block", [1, 3, 64, 5_000])
@pytest.mark.parametrize("window", [1, 2, 7, 5_000])
def test_every_row_of_a_block_order_comes_once(size: int, block: int, window: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (5, 0)):
        order = RowOrder(size, seed, "block", block, window)
        rows = all_rows(order, epoch)
        assert np.array_equal(np.sort(rows), np.arange(size))
        some = np.random.default_rng(0).integers(0, size, 20)
        assert np.array_equal(order.rows(epoch, some), rows[some])  # in any company
        assert [order.rows(epoch, some[i : i + 1])[0] for i in range(5)] == rows[some[:5]].tolist()


@laws
@given(st.integers(1, 3_000), st.integers(0, 2**64 - 1), shuffles, st.integers(1, 80), st.integers(1, 40))
def test_order_is_a_permutation(size: int, seed: int, shuffle: Shuffle, block: int, window: int) -> None:
    rows = all_rows(RowOrder(size, seed, shuffle, block, window), epoch=seed % 9)
    assert rows.dtype == np.int64
    assert np.array_equal(np.sort(rows), np.arange(size))


@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_every_epoch_and_every_seed_has_its_own_order(shuffle: Shuffle) -> None:
    orders = [RowOrder(1_001, seed, shuffle, 8, 16) for seed in range(6)]
    rows = [all_rows(order, epoch) for order in orders for epoch in range(6)]
    assert len({one.tobytes() for one in rows}) == 36
    same = [np.mean(one == other) for one, other in pairwise(rows)]
    assert max(same) < 0.02
    assert np.array_equal(all_rows(orders[2], 3), all_rows(RowOrder(1_001, 2, shuffle, 8, 16), 3))


def test_order_without_shuffling_is_the_identity() -> None:
    assert np.array_equal(all_rows(RowOrder(1_001, 4, shuffle=False), 3), np.arange(1_001))


def test_window_consists_of_whole_units() -> None:
    """What is touched at a time is bounded, the short unit included, wherever it lands."""
    places = set()
    for epoch in range(40):
        order = RowOrder(1_001, 1, "block", 10, 7)
        rows = all_rows(order, epoch)
        units = rows // 10
        place = int(np.flatnonzero(units == 100)[0]) // 70
        places.add(place)
        ends = [min(70 * (number + 1) - 9 * (number >= place), 1_001) for number in range(15)]
        for number, (begin, end) in enumerate(pairwise([0, *ends])):
            inside = units[begin:end]
            assert len(set(inside.tolist())) == min(7, 101 - 7 * number)
            assert not set(inside.tolist()) & set(units[end:].tolist())
            assert end - begin < 20 or not np.array_equal(rows[begin:end], np.sort(rows[begin:end]))
    assert len(places) > 8


@laws
@given(st.integers(1, 2_000), shuffles, st.integers(1, 50), st.integers(1, 20), st.data())
def test_runs_contain_the_rows_of_their_positions(
    size: int, shuffle: Shuffle, block: int, window: int, data: st.DataObject
) -> None:
    order = RowOrder(size, 3, shuffle, block, window)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    begins, ends = order.runs(2, start, stop)
    assert begins.dtype == ends.dtype == np.int64
    held = np.concatenate([np.arange(0), *map(np.arange, begins.tolist(), ends.tolist())])
    assert (begins < ends).all()
    assert (ends <= size).all()
    assert len(np.unique(held)) == len(held)
    assert set(order.rows(2, np.arange(start, stop)).tolist()) <= set(held.tolist())
    if shuffle == "block":
        assert len(begins) <= window * ((stop - start + block - 1) // (block * window) + 2)


def test_rows_equal_golden_values() -> None:
    """A state that was stored is resumed by another version of quire. These never change."""
    spread, far = np.arange(0, 1_001, 125), np.array([0, 1, 10**6, 10**12 - 1])
    orders = {
        shuffle: (
            RowOrder(1_001, 7, shuffle, 8, 16).rows(3, spread).tolist(),
            RowOrder(10**12, 7, shuffle, 64, 1_024).rows(3, far).tolist(),
        )
        for shuffle in ("global", "block")
    }
    assert orders == {
        "global": (
            [960, 593, 665, 577, 157, 292, 594, 495, 69],
            [273683258996, 458080605486, 934834738100, 529703898447],
        ),
        "block": (
            [458, 794, 837, 362, 867, 217, 775, 845, 710],
            [927184596846, 782471872142, 59392616353, 655906594099],
        ),
    }


def test_large_windows_are_equal_with_and_without_table(monkeypatch: pytest.MonkeyPatch) -> None:
    order = RowOrder(30_001, 7, "block", 3, 2_000)
    looked_up = all_rows(order)
    monkeypatch.setattr("quire.data._epoch._TABLE", 1)
    assert np.array_equal(all_rows(order), looked_up)


def entropy(rows: NDArray[np.int64], size: int) -> float:
    """The entropy of the tenths of the data that the rows of a batch come from, on average over batches of 256."""
    batches = (rows[: len(rows) // 256 * 256] * 10 // size).reshape(-1, 256)
    shares = np.stack([(batches == tenth).mean(1) for tenth in range(10)])
    return float(-(shares * np.log(np.maximum(shares, 1e-9))).sum(0).mean())


@pytest.mark.parametrize("row_bytes", [12, 140, 12_500, 100_000, 1_000_000])
def test_block_order_mixes_like_a_true_permutation(row_bytes: int) -> None:
    size = 200_000
    true = np.mean([entropy(np.random.default_rng(seed).permutation(size), size) for seed in range(3)])
    order = RowOrder(size, 1, "block", *choose_block(size, row_bytes))
    rows = [all_rows(order, epoch) for epoch in range(3)]
    assert np.mean([entropy(one, size) for one in rows]) >= 0.99 * true
    for one in rows:
        assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.02
        assert abs(np.corrcoef(one, np.arange(size))[0, 1]) < 0.1


def test_entropy_distinguishes_bad_orders_from_good_ones() -> None:
    size = 200_000
    good = entropy(all_rows(RowOrder(size, 1, "global")), size)
    assert entropy(all_rows(RowOrder(size, 1, "block", 64, 32)), size) < 0.97 * good


@laws
@given(st.integers(0, 10**13), st.floats(0, 1e9), st.integers(1, 2**40), st.none() | st.integers(1, 2**30))
def test_chosen_window_is_within_budget(size: int, row_bytes: float, budget: int, unit: int | None) -> None:
    block, window = choose_block(size, row_bytes, budget, unit)
    fits = max(row_bytes, 1.0)
    assert block * window * fits <= max(budget, fits)
    assert window >= 256 or block == 1
    assert block <= max(1, size // 256)


def test_chosen_unit_has_minimum_size() -> None:
    mib = 2**20
    assert choose_block(10**9, 12_500) == (21, 1_022)
    assert choose_block(10**9, 140) == (1_872, 1_024)
    for budget, least, most in ((16 * mib, 2**16, 2**16), (256 * mib, 2**18, 2**18), (2**34, mib, mib)):
        block, window = choose_block(10**9, 100, budget)
        assert least - 100 <= block * 100 <= most + 100
        assert window >= 256
    assert choose_block(10**9, 10**5)[0] == 4  # a few rows, though they are more than a 1024th of the budget
    assert choose_block(10**9, 10**6) == (1, 268)  # 256 units before a few rows
    assert choose_block(10**9, 10**9) == (1, 1)
    assert choose_block(10**9, 100, 2**32, 4 * mib) == (41_943, 1_024)
    assert choose_block(1_000, 100)[0] == 3
    assert choose_block(0, 100)[0] == 1


# --- the shares of the ranks


def ranks(order: RowOrder, start: int, world: int, batch: int, last: Last) -> list[Slice]:
    return [Slice(order, 0, start, rank, world, batch, last) for rank in range(world)]


def real_positions(share: Slice, step: int) -> list[int]:
    positions, real = share.positions(step)
    return positions.tolist() if real is None else positions[real].tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_every_row_comes_once_for_any_ranks_and_workers(size: int, last: Last, batch: int) -> None:
    orders = [RowOrder(size, 3, shuffle, 8, 16) for shuffle in SHUFFLES]
    for world in range(1, 9):
        shares = ranks(orders[0], 0, world, batch, last)
        steps = shares[0].steps
        assert {share.steps for share in shares} == {steps}
        for workers in range(5):
            taken = [step for worker in range(max(workers, 1)) for step in shares[0].worker_steps(worker, workers)]
            assert sorted(taken) == list(range(steps))
        seen = [position for step in range(steps) for share in shares for position in real_positions(share, step)]
        whole = size if last != "drop" else size // (world * batch) * world * batch
        assert seen == list(range(whole))  # in order even, step by step and rank by rank
        for order in orders:
            rows = order.rows(0, np.array(seen, np.int64))
            assert len(set(rows.tolist())) == whole
            assert whole < size or np.array_equal(np.sort(rows), np.arange(size))


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("size", SIZES)
def test_rows_of_a_step_match_its_positions(size: int, last: Last, shuffle: Shuffle) -> None:
    order = RowOrder(size, 3, shuffle, 8, 16)
    for world, batch in product((1, 3, 8), (3, 64)):
        shares = [Slice(order, 5, 0, rank, world, batch, last) for rank in range(world)]
        for share, step in product(shares, range(shares[0].steps)):
            positions, mask = share.positions(step)
            rows, same_mask = share.rows(step)
            assert np.array_equal(rows, order.rows(5, positions))
            assert (mask is None) == (same_mask is None) == (last != "pad")
            assert mask is None or np.array_equal(mask, same_mask)


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("size", SIZES)
def test_drop_and_pad_make_full_batches(size: int, batch: int) -> None:
    for world, last in product(range(1, 9), ("drop", "pad")):
        shares = ranks(RowOrder(size), 0, world, batch, last)
        assert all(len(share.positions(step)[0]) == batch for share in shares for step in range(share.steps))


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("size", SIZES)
def test_keep_makes_batches_that_differ_by_at_most_one_row(size: int, batch: int) -> None:
    for world in range(1, 9):
        shares = ranks(RowOrder(size), 0, world, batch, "keep")
        for step in range(shares[0].steps):
            sizes = [len(share.positions(step)[0]) for share in shares]
            assert sizes == sorted(sizes, reverse=True)
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= batch + 1
            assert min(sizes) >= 1 or size < world
            assert step == shares[0].steps - 1 or set(sizes) == {batch}


def test_padding_is_taken_from_the_beginning_and_masked() -> None:
    shares = ranks(RowOrder(3, shuffle=False), 0, 2, 4, "pad")
    results = [share.rows(0) for share in shares]
    assert [rows.tolist() for rows, _ in results] == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert [mask.tolist() for _, mask in results if mask is not None] == [[True, True, True, False], [False] * 4]


def test_full_batches_have_a_mask_with_pad() -> None:
    """So that `values[batch.mask]` means the same in every step."""
    _, mask = Slice(RowOrder(100), 0, 0, 0, 1, 10, "pad").rows(0)
    assert mask is not None
    assert mask.all()


def test_few_remaining_rows_go_to_the_step_before() -> None:
    shares = ranks(RowOrder(26, shuffle=False), 0, 4, 3, "keep")  # two steps of 12, and 2 rows for 4 ranks
    assert [share.steps for share in shares] == [2, 2, 2, 2]
    assert [len(share.positions(1)[0]) for share in shares] == [4, 4, 3, 3]
    shares = ranks(RowOrder(28, shuffle=False), 0, 4, 3, "keep")  # now every rank has one
    assert [share.steps for share in shares] == [3, 3, 3, 3]
    assert [share.positions(2)[0].tolist() for share in shares] == [[24], [25], [26], [27]]


def test_fewer_rows_than_ranks_leave_some_ranks_empty() -> None:
    shares = ranks(RowOrder(3, shuffle=False), 0, 4, 2, "keep")
    assert [share.rows(0)[0].tolist() for share in shares] == [[0], [1], [2], []]
    assert shares[3].rows(0)[0].dtype == np.int64


def test_empty_dataset_has_no_steps() -> None:
    for shuffle, last in product(SHUFFLES, LASTS):
        order = RowOrder(0, 1, shuffle)
        assert [share.steps for share in ranks(order, 0, 3, 4, last)] == [0, 0, 0]
        assert order.rows(0, np.arange(0)).tolist() == []
        assert [run.tolist() for run in order.runs(0, 0, 0)] == [[], []]


# --- resuming


@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("size", [7, 1_000, 1_001])
def test_remaining_rows_come_once_after_a_stop_at_any_step(size: int, last: Last) -> None:
    order = RowOrder(size, 5, "block", 8, 16)
    for first, second in (((3, 7), (5, 4)), ((8, 1), (3, 3)), ((1, 64), (7, 3)), ((2, 3), (1, 64))):
        before = ranks(order, 0, *first, last)
        seen: list[int] = []
        for step in range(before[0].steps):
            seen += [position for share in before for position in real_positions(share, step)]
            epoch, position = before[0].state(step)
            if epoch == 1:
                break
            assert position == len(seen) == before[-1].after(step)
            after = ranks(order, position, *second, last)
            rest = [p for step in range(after[0].steps) for share in after for p in real_positions(share, step)]
            dropped = (size - position) % (second[0] * second[1]) if last == "drop" else 0
            assert seen + rest == list(range(size - dropped))
        assert before[0].steps == 0 or before[0].state(before[0].steps - 1) == (1, 0)


@laws
@given(
    st.sampled_from(SIZES) | st.integers(0, 500),
    shuffles,
    lasts,
    st.lists(st.tuples(st.integers(1, 8), st.sampled_from([1, 3, 64]), st.integers(0, 6)), min_size=1, max_size=8),
)
def test_stops_do_not_change_the_order(
    size: int, shuffle: Shuffle, last: Last, runs: list[tuple[int, int, int]]
) -> None:
    """Runs of other ranks and batches one after the other go through the rows in the order of one run."""
    order = RowOrder(size, 9, shuffle, 8, 16)
    position, seen = 0, np.empty(0, np.int64)
    for number, (world, batch, stop) in enumerate(runs):
        shares = ranks(order, position, world, batch, last)
        for step in range(shares[0].steps if number == len(runs) - 1 else min(stop, shares[0].steps)):
            for share in shares:
                rows, mask = share.rows(step)
                seen = np.append(seen, rows if mask is None else rows[mask])
            position = shares[0].after(step)
            assert {share.after(step) for share in shares} == {position}
    assert np.array_equal(seen, all_rows(order)[: len(seen)])
    assert len(seen) == size or (last == "drop" and size - len(seen) < max(w * b for w, b, _ in runs))


def test_state_at_the_end_of_an_epoch_is_the_next_epoch() -> None:
    for last in LASTS:
        share = Slice(RowOrder(100), 4, 0, 1, 3, 7, last)
        assert share.state(0) == (4, 21)
        assert share.after(share.steps - 1) == 100
        assert share.state(share.steps - 1) == (5, 0)
        assert Slice(RowOrder(100), 4, 100, 1, 3, 7, last).steps == 0


@pytest.mark.parametrize("workers", range(5))
def test_batches_of_workers_equal_those_of_one_process(workers: int) -> None:
    share = Slice(RowOrder(1_001, 3), 0, 0, 1, 2, 3)
    lists = [list(share.worker_steps(worker, workers)) for worker in range(max(workers, 1))]
    assert [lists[step % len(lists)][step // len(lists)] for step in range(share.steps)] == list(range(share.steps))


def test_pickles_of_orders_and_slices_are_small() -> None:
    share = Slice(RowOrder(10**12, 3), 7, 64, 5, 8, 32, "pad")
    share.rows(1_000)
    copy = pickle.loads(pickle.dumps(share))
    assert copy == share
    assert hash(copy) == hash(share)
    assert np.array_equal(copy.rows(9)[0], share.rows(9)[0])
    assert len(pickle.dumps(share)) < 500


# --- errors


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": 4}, r"rank: expected 0 to 3 \(world_size is 4\), got 4"),
        ({"rank": -1}, r"rank: expected 0 to 3 \(world_size is 4\), got -1"),
        ({"world_size": 0}, "world_size: expected 1 to .*, got 0"),
        ({"batch_size": 0}, "batch_size: expected 1 to .*, got 0"),
        ({"start": 101}, "start: expected 0 to 100, got 101"),
        ({"epoch": -1}, "epoch: expected 0 to .*, got -1"),
        ({"last": "repeat"}, "last: expected 'drop', 'pad' or 'keep', got 'repeat'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_slice_rejects_invalid_values(changed: dict[str, object], message: str) -> None:
    options = {"epoch": 0, "start": 0, "rank": 0, "world_size": 4, "batch_size": 8} | changed
    with pytest.raises(OptionError, match=message):
        Slice(RowOrder(100), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": -1}, "size: expected 0 to .*, got -1"),
        ({"seed": -1}, "seed: expected 0 to .*, got -1"),
        ({"shuffle": "rows"}, "shuffle: expected 'global', 'block' or False, got 'rows'"),
        ({"shuffle": True}, "shuffle: expected 'global', 'block' or False, got True"),
        ({"block": 0}, "block: expected 1 to .*, got 0"),
        ({"window": 0}, "window: expected 1 to .*, got 0"),
    ],
    ids=lambda value: "-".join(map(str, next(iter(value.items())))) if isinstance(value, dict) else "",
)
def test_order_rejects_invalid_values(changed: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        RowOrder(**({"size": 100} | changed))  # type: ignore[arg-type]


def test_order_and_slice_reject_positions_outside() -> None:
    share = Slice(RowOrder(100), 0, 0, 0, 2, 8)
    for step in (-1, share.steps):
        for call in (share.positions, share.rows, share.after, share.state):
            with pytest.raises(RowIndexError, match=rf"step {step} is not one of \[0, 6\)"):
                call(step)
    for shuffle in SHUFFLES:
        with pytest.raises(RowIndexError, match=r"position 100 is not one of \[0, 100\)"):
            RowOrder(100, 0, shuffle).rows(0, np.array([5, 100]))
        with pytest.raises(RowIndexError, match=r"position -1 is not one of \[0, 100\)"):
            RowOrder(100, 0, shuffle).rows(0, np.array([-1, 5]))
        with pytest.raises(RowIndexError, match="positions 5 to 101 are not a part"):
            RowOrder(100, 0, shuffle).runs(0, 5, 101)
    with pytest.raises(OptionError, match=r"worker: expected 0 to 1 \(num_workers is 2\), got 2"):
        share.worker_steps(2, 2)
    with pytest.raises(OptionError, match="epoch: expected 0 to"):
        RowOrder(100).rows(-1, np.array([5]))
