"""The bounds of every number that an order and a slice take: the last one allowed, and the first one refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.data._bijection import LARGEST, permute, unpermute
from quire.data._epoch import RowOrder, Slice, StepGroup, choose_block
from quire.errors import OptionError, RowIndexError

ORDER: dict[str, Any] = {"size": 10, "seed": 0, "shuffle": "block", "block": 4, "window": 2}
SLICE: dict[str, Any] = {"epoch": 0, "start": 0, "rank": 0, "world_size": 3, "batch_size": 2, "last": "drop"}
LARGEST_SEED = 2**64 - 1


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("size", 0, LARGEST), ("seed", 0, LARGEST_SEED), ("block", 1, LARGEST), ("window", 1, LARGEST)],
)
def test_order_rejects_values_out_of_bounds(name: str, least: int, most: int) -> None:
    for value in (least, most):
        assert getattr(RowOrder(**{**ORDER, name: value}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(OptionError, match=rf"^{name}: expected {least} to {most}, got {value}"):
            RowOrder(**{**ORDER, name: value})


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("epoch", 0, LARGEST_SEED),
        ("start", 0, 10),
        ("rank", 0, 2),
        ("world_size", 1, LARGEST),
        ("batch_size", 1, LARGEST),
    ],
)
def test_slice_rejects_values_out_of_bounds(name: str, least: int, most: int) -> None:
    order = RowOrder(**ORDER)
    for value in (least, most):
        assert getattr(Slice(order, **{**SLICE, name: value}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(OptionError, match=rf"^{name}: expected {least} to {most}.*, got {value}"):
            Slice(order, **{**SLICE, name: value})


def test_step_group_spans_the_positions_of_its_steps() -> None:
    share = Slice(RowOrder(40), **{**SLICE, "rank": 1, "world_size": 2, "batch_size": 3})
    assert StepGroup(share, 0, 0, [1, 2, 4]).span() == range(9, 30)
    assert StepGroup(share, 0, 0, range(2, 3)).span() == range(15, 18)
    padded = Slice(RowOrder(10), **{**SLICE, "world_size": 1, "batch_size": 4, "last": "pad"})
    assert StepGroup(padded, 0, 0, range(1, 3)).span() == range(10)
    empty = Slice(RowOrder(1), **{**SLICE, "rank": 1, "world_size": 2, "last": "keep"})
    assert StepGroup(empty, 0, 0, range(1)).span() == range(0)


@pytest.mark.parametrize("last", ["drop", "pad", "keep"])
def test_step_group_has_the_rows_and_mask_of_each_step(last: Any) -> None:
    share = Slice(RowOrder(**{**ORDER, "size": 40}), **{**SLICE, "rank": 2, "last": last})
    steps = [0, 3, share.steps - 2, share.steps - 1]
    parts = StepGroup(share, 0, 0, steps).rows()
    assert len(parts) == len(steps)
    for (rows, mask), step in zip(parts, steps, strict=True):
        expected_rows, expected_mask = share.rows(step)
        assert rows.tolist() == expected_rows.tolist()
        assert (mask is None) == (expected_mask is None) == (last != "pad")
        assert mask is None or mask.tolist() == expected_mask.tolist()  # type: ignore[union-attr]


def test_worker_steps_reject_workers_out_of_bounds() -> None:
    share = Slice(RowOrder(100), **SLICE)
    assert share.worker_steps(0, 0) == range(share.steps)
    assert share.worker_steps(2, 3) == range(2, share.steps, 3)
    with pytest.raises(OptionError, match=r"^num_workers: expected 0 to"):
        share.worker_steps(0, -1)
    for worker in (-1, 3):
        with pytest.raises(OptionError, match=r"^worker: expected 0 to 2 \(num_workers is 3\)"):
            share.worker_steps(worker, 3)
    with pytest.raises(OptionError, match=r"^worker: expected 0 to 0"):
        share.worker_steps(1, 0)


def test_order_rejects_epochs_and_positions_out_of_bounds() -> None:
    order = RowOrder(**ORDER)
    for epoch in (0, LARGEST_SEED):
        assert sorted(order.rows(epoch, np.arange(10)).tolist()) == list(range(10))
    for epoch in (-1, LARGEST_SEED + 1):
        with pytest.raises(OptionError, match=r"^epoch: expected 0 to"):
            order.rows(epoch, np.arange(10))
        with pytest.raises(OptionError, match=r"^epoch: expected 0 to"):
            order.rows(epoch, np.arange(0))
    for wrong in (-1, 10):
        with pytest.raises(RowIndexError, match=rf"position {wrong} is not one of \[0, 10\)"):
            order.rows(0, np.array([3, wrong]))
    for start, stop in ((-1, 3), (4, 3), (0, 11)):
        with pytest.raises(RowIndexError, match=f"positions {start} to {stop} are not a part"):
            order.runs(0, start, stop)
    for start, stop in ((0, 10), (10, 10), (0, 0), (9, 10)):
        assert all(begin < end for begin, end in zip(*order.runs(0, start, stop), strict=True))


@pytest.mark.parametrize("shuffle", ["global", "block", False])
@pytest.mark.parametrize("size", [1, 9, 10, 11, 40, 41])
def test_runs_contain_the_rows_of_the_positions(shuffle: Any, size: int) -> None:
    order = RowOrder(size, 3, shuffle, 4, 2)
    for start in range(size + 1):
        for stop in range(start, size + 1):
            begins, ends = order.runs(1, start, stop)
            rows = set(order.rows(1, np.arange(start, stop)).tolist())
            held = [row for begin, end in zip(begins.tolist(), ends.tolist(), strict=True) for row in range(begin, end)]
            assert rows <= set(held) <= set(range(size))
            assert len(set(held)) == len(held)
            assert bool(held) == (start < stop)
            if shuffle is False:
                assert rows == set(held), "no more than is needed"
            elif shuffle == "block" and held:
                begin = order.window_start(1, order.window_at(1, start))
                end = order.window_start(1, order.window_at(1, stop - 1) + 1)
                assert set(held) == set(order.rows(1, np.arange(begin, end)).tolist()), "the windows that are touched"


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9, 31, 40, 41])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_windows_are_runs_of_positions_over_whole_units(size: int, epoch: int) -> None:
    order = RowOrder(size, 3, "block", block=4, window=2)
    windows = [order.window_at(epoch, position) for position in range(size)]
    assert windows == sorted(windows)
    assert set(windows) == set(range(windows[-1] + 1)), "no window is left out"
    units: list[int] = []
    for window in range(windows[-1] + 1):
        begin, end = order.window_start(epoch, window), order.window_start(epoch, window + 1)
        assert windows[begin:end] == [window] * (end - begin)
        rows = sorted(order.rows(epoch, np.arange(begin, end)).tolist())
        in_window = sorted({row // 4 for row in rows})
        assert rows == [row for unit in in_window for row in range(unit * 4, min(unit * 4 + 4, size))]
        assert len(in_window) == 2 or window == windows[-1]
        units += in_window
    assert sorted(units) == list(range(-(-size // 4)))
    assert order.window_start(epoch, windows[-1] + 1) == order.window_start(epoch, windows[-1] + 5) == size


# --- the share of a rank

Batches = list[list[int]]
SHARES: list[tuple[int, int, int, str, list[Batches]]] = [
    # size, start, batch_size, last, and for each rank its batches
    (8, 0, 2, "drop", [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    (8, 0, 2, "pad", [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    (8, 0, 2, "keep", [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    (11, 0, 2, "drop", [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    (11, 0, 2, "pad", [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]]),
    (11, 0, 2, "keep", [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]),
    (10, 0, 2, "keep", [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]),
    (9, 0, 2, "pad", [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]),
    (9, 0, 2, "keep", [[[0, 1], [4, 5, 6]], [[2, 3], [7, 8]]]),
    (11, 3, 2, "drop", [[[3, 4], [7, 8]], [[5, 6], [9, 10]]]),
    (11, 4, 2, "drop", [[[4, 5]], [[6, 7]]]),
    (11, 4, 2, "pad", [[[4, 5], [8, 9]], [[6, 7], [10, 0]]]),
    (11, 6, 2, "keep", [[[6, 7, 8]], [[9, 10]]]),
    (11, 9, 2, "drop", [[], []]),
    (11, 9, 3, "pad", [[[9, 10, 0]], [[1, 2, 3]]]),
    (11, 9, 2, "keep", [[[9]], [[10]]]),
    (11, 10, 2, "keep", [[[10]], [[]]]),
    (11, 11, 2, "keep", [[], []]),
    (1, 0, 2, "pad", [[[0, 0]], [[0, 0]]]),
    (1, 0, 2, "keep", [[[0]], [[]]]),
    (0, 0, 2, "pad", [[], []]),
]


@pytest.mark.parametrize(("size", "start", "batch_size", "last", "expected"), SHARES)
def test_two_ranks_get_golden_batches(
    size: int, start: int, batch_size: int, last: Any, expected: list[Batches]
) -> None:
    order = RowOrder(size, shuffle=False)
    for rank, batches in enumerate(expected):
        share = Slice(order, 3, start, rank, 2, batch_size, last)
        assert share.steps == len(batches)
        for step, batch in enumerate(batches):
            positions, real = share.positions(step)
            assert positions.tolist() == batch
            assert positions.dtype == np.int64
            assert share.rows(step)[0].tolist() == batch
            begin = start + step * 2 * batch_size + rank * batch_size
            expected_mask = [begin + place < size for place in range(batch_size)] if last == "pad" else None
            assert (None if real is None else real.tolist()) == expected_mask
            is_last = step == len(batches) - 1
            assert share.after(step) == (size if is_last else start + (step + 1) * 2 * batch_size)
            assert share.state(step) == ((4, 0) if is_last else (3, share.after(step)))
        for step in (-1, len(batches)):
            for method in (share.positions, share.rows, share.after, share.state):
                with pytest.raises(RowIndexError, match=rf"step {step} is not one of \[0, {len(batches)}\)"):
                    method(step)


def test_last_batches_of_three_ranks_differ_by_at_most_one_row() -> None:
    shares = [Slice(RowOrder(14, shuffle=False), 0, 0, rank, 3, 2, "keep") for rank in range(3)]
    assert [share.positions(1)[0].tolist() for share in shares] == [[6, 7, 8], [9, 10, 11], [12, 13]]


@pytest.mark.parametrize("size", [1, 2, 4_096, 4_097, 5_000])
def test_permute_rejects_positions_out_of_bounds(size: int) -> None:
    ends = np.array([0, size - 1])
    assert unpermute(size, 7, permute(size, 7, ends)).tolist() == ends.tolist()
    for wrong in (-1, size):
        for function in (permute, unpermute):
            with pytest.raises(RowIndexError, match=rf"position {wrong} is not one of \[0, {size}\)"):
                function(size, 7, np.array([0, wrong]))
    assert permute(size, 7, np.array([], np.int64)).tolist() == []


@pytest.mark.parametrize("size", [0, -1, LARGEST + 1])
def test_permute_rejects_sizes_out_of_bounds(size: int) -> None:
    with pytest.raises(OptionError, match=f"size: expected 1 to 2\\*\\*62, got {size}"):
        permute(size, 7, np.array([], np.int64))
    assert permute(LARGEST, 7, np.array([0, LARGEST - 1])).shape == (2,)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 100.0), (1, 2_684_354)),
        ((10**6, 0.0, 1), (1, 1)),
        ((10**6, 1.0), (3_906, 68_723)),
        ((10**6, 100.0), (2_621, 1_024)),
        ((10**6, 1_024.0, 32 * 2**20), (64, 512)),
        ((10**6, 10**6), (1, 268)),
        ((10**6, 10**9), (1, 1)),
        ((10**6, 1_000.0, 256 * 2**20, 4_000_000), (1_048, 256)),
        ((100, 10.0), (1, 26_843_545)),
        ((256 * 4, 10.0), (4, 6_710_886)),
    ],
)
def test_choose_block_returns_golden_blocks(arguments: Any, expected: tuple[int, int]) -> None:
    assert choose_block(*arguments) == expected


@pytest.mark.parametrize("arguments", [(-1, 1.0), (1, -1.0), (1, 1.0, 0), (LARGEST + 1, 1.0)])
def test_choose_block_rejects_impossible_sizes(arguments: Any) -> None:
    with pytest.raises(OptionError, match=": expected"):
        choose_block(*arguments)
