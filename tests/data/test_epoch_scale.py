"""The plan at 10**12 rows on 4,096 ranks of 16 workers: any batch at once, at the cost of a small plan."""

from __future__ import annotations

import random
import sys
import tracemalloc
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.data import _bijection, _epoch
from quire.data._epoch import RowOrder, Shuffle, Slice, choose_block

ROWS, RANKS, WORKERS, BATCH = 10**12, 4_096, 16, 64
BLOCK, WINDOW = choose_block(ROWS, 10_000)


def share(rank: int, shuffle: Shuffle = "block", rows: int = ROWS, start: int = 0) -> Slice:
    return Slice(RowOrder(rows, 11, shuffle, BLOCK, WINDOW), 2, start, rank, RANKS, BATCH, "keep")


def sampled(number: int) -> list[tuple[int, int, int]]:
    """Random (rank, worker, step of that worker), with the first and the last of each; no two are the same."""
    dice = random.Random(0)
    ends = {worker: len(share(0).worker_steps(worker, WORKERS)) for worker in range(WORKERS)}
    corners = {(rank, worker, step) for rank in (0, RANKS - 1) for worker in (0, 15) for step in (0, ends[worker] - 1)}
    workers = [dice.randrange(WORKERS) for _ in range(number)]
    return sorted(corners | {(dice.randrange(RANKS), worker, dice.randrange(ends[worker])) for worker in workers})


def batch_of(place: tuple[int, int, int], shuffle: Shuffle = "block", rows: int = ROWS) -> NDArray[np.int64]:
    rank, worker, number = place
    mine = share(rank, shuffle, rows)
    return mine.rows(mine.worker_steps(worker, WORKERS)[number])[0]


@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_sampled_batches_share_no_row(shuffle: Shuffle) -> None:
    batches = [set(batch_of(place, shuffle).tolist()) for place in sampled(200)]
    assert sum(len(batch) == BATCH for batch in batches) > 200
    assert all(0 <= row < ROWS for batch in batches for row in batch)
    assert not any(one & other for one, other in combinations(batches, 2))


def test_all_ranks_of_a_step_share_no_row() -> None:
    for step in (0, 1_000_003, share(0).steps - 1):
        batches = [share(rank).rows(step)[0] for rank in range(RANKS)]
        sizes = {len(batch) for batch in batches}
        assert max(sizes) - min(sizes) <= 1
        rows = np.concatenate(batches)
        assert len(np.unique(rows)) == len(rows)


def test_ranks_and_workers_are_balanced() -> None:
    steps = {share(rank).steps for rank in range(RANKS)}
    assert steps == {ROWS // (RANKS * BATCH) + 1}  # the last one is shared out
    work = [len(share(7).worker_steps(worker, WORKERS)) for worker in range(WORKERS)]
    assert sum(work) == steps.pop()
    assert max(work) - min(work) <= 1


def test_run_resumes_on_other_ranks_where_it_stopped() -> None:
    stopped = share(0).after(2_000_001)
    assert stopped == 2_000_002 * RANKS * BATCH
    order = share(0).order
    others = [Slice(order, 2, stopped, rank, 1_000, 96, "keep") for rank in range(1_000)]
    done = np.concatenate([share(rank).rows(2_000_001)[0] for rank in range(0, RANKS, 8)])
    rest = np.concatenate([other.rows(0)[0] for other in others])
    assert len(np.intersect1d(done, rest)) == 0
    assert np.array_equal(others[0].rows(0)[0], order.rows(2, np.arange(stopped, stopped + 96)))


_CACHES = (
    _bijection._sort_by_hash,
    _bijection._invert_sort,
    _bijection._make_network,
    _epoch._layout,
    _epoch._units_in_window,
)


def forget() -> None:
    for cached in _CACHES:
        cached.cache_clear()


def calls_and_bytes(rows: int) -> tuple[int, int]:
    """Calls of functions, and the peak of memory, for one batch far inside, with nothing known before."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    batch_of((5, 3, 1), rows=rows)
    forget()
    tracemalloc.start()
    sys.setprofile(count)
    try:
        batch_of((RANKS - 1, 15, 0), rows=rows)
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return calls, peak


def test_time_and_memory_do_not_grow_with_the_rows() -> None:
    """Calls are counted, since the work in each is on the batch alone, and seconds depend on the machine."""
    small_calls, small_bytes = calls_and_bytes(10**8)
    large_calls, large_bytes = calls_and_bytes(ROWS)
    assert large_calls <= small_calls + 100  # some positions go round once more
    assert large_bytes <= small_bytes + 20_000
    assert large_bytes < 300_000


# --- the formulas of docs/scale.md


@pytest.mark.parametrize(("nodes", "window"), [(8, 1_024), (64, 256), (64, 1_024)])
def test_fetches_of_a_unit_follow_the_formula(nodes: int, window: int) -> None:
    unit_rows, node_rows = 26, 8 * 64
    order = RowOrder(10**9, 1, "block", unit_rows, window)
    positions = np.arange(max(6, 64 * 64 // window) * unit_rows * window)
    units = order.rows(0, positions) // unit_rows
    node = positions // node_rows % nodes
    fetches = len(np.unique(units * nodes + node)) / len(np.unique(units))
    meeting = min(nodes, unit_rows * window / node_rows)
    assert fetches == pytest.approx(meeting * (1 - (1 - 1 / meeting) ** unit_rows), rel=0.03)


@pytest.mark.parametrize("share_of_data", [0.25, 0.5, 0.75])
def test_hits_of_an_lru_cache_follow_the_formula(share_of_data: float) -> None:
    units, hits = 4_000, 0
    order = RowOrder(4 * units, 1, "block", 4, 256)
    cache = dict.fromkeys((order.runs(0, 0, order.size)[0] // 4).tolist()[-int(share_of_data * units) :])
    for unit in (order.runs(1, 0, order.size)[0] // 4).tolist():
        hits += unit in cache
        cache.pop(unit if unit in cache else next(iter(cache)))  # the oldest is the first
        cache[unit] = None
    left = 1 - share_of_data
    assert hits / units == pytest.approx(share_of_data + left * np.log(left), abs=0.02)
