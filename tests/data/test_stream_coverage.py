"""Every row exactly once, whatever the ranks, workers and batches, and the same number of steps on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.storage import StoredDataset
from tests.data.sample_streams import (
    Sample,
    collect_workers,
    flatten,
    numbers,
    open_samples,
    stream_samples,
    write_samples,
)

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")
LASTS = ["keep", "drop", "pad"]
SHUFFLES: list[Any] = ["block", "global", False]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[int, StoredDataset[Sample]]:
    """Datasets of these sizes, each with only its numbers read."""
    results = {}
    for rows in (0, 1, 7, 1000, 1001):
        folder = write_samples(tmp_path_factory.mktemp("rows") / str(rows), rows or 5, rows_in_shard=130)
        results[rows] = StoredDataset[Sample](folder, ["number"], None if rows else {"number": {"$lt": 0}})
    return results


def check(per_rank: list[list[Any]], rows: int, batch_size: int, last: str) -> None:
    """The batches of each rank hold what was declared."""
    world_size = len(per_rank)
    assert len({len(batches) for batches in per_rank}) == 1, "the same steps on every rank"
    batches = flatten(per_rank)
    seen = flatten(numbers(batches))
    assert len(set(seen)) == len(seen), "no row twice"
    if last == "drop":
        assert len(seen) == rows - rows % (world_size * batch_size)
    else:
        assert sorted(seen) == list(range(rows))
    if last != "keep":
        assert {len(batch) for batch in batches} <= {batch_size}
    if last == "pad":
        assert len(batches) * batch_size - len(seen) < world_size * batch_size


def grid(rows: int, turn: int) -> list[tuple[int, int, int]]:
    """World sizes, workers and batch sizes; for many rows, small batches with fewer of them."""
    return [
        (world, (world + turn + batch_size) % 5, batch_size)
        for world in range(1, 9)
        for batch_size in (1, 3, 64)
        if rows < 10 or (world + turn) % {1: 8, 3: 4, 64: 1}[batch_size] == 0
    ]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("rows", [0, 1, 7, 1000, 1001])
def test_every_row_comes_once(stored: Any, rows: int, last: str, shuffle: Any) -> None:
    for world, workers, batch_size in grid(rows, LASTS.index(last) + 3 * SHUFFLES.index(shuffle)):
        results = []
        for rank in range(world):
            options = {"last": last, "shuffle": shuffle, "rank": rank, "world_size": world, "allow_empty": not rows}
            dataset = stream_samples(stored[rows], batch_size, **options)
            results.append(collect_workers(dataset, workers))
            assert len(results[-1]) == len(dataset)
        check(results, rows, batch_size, last)


@settings(deadline=None, max_examples=40)
@given(
    world=st.integers(1, 8),
    workers=st.integers(0, 4),
    batch_size=st.integers(1, 70),
    last=st.sampled_from(LASTS),
    shuffle=st.sampled_from(SHUFFLES),
    seed=st.integers(0, 2**64 - 1),
)
def test_workers_yield_the_batches_of_one_process(stored: Any, workers: int, batch_size: int, **options: Any) -> None:
    world = options.pop("world")
    dataset = stream_samples(stored[1001], batch_size, rank=world - 1, world_size=world, **options)
    expected = numbers(dataset)
    dataset.set_epoch(0)
    assert numbers(collect_workers(dataset, workers)) == expected


def test_small_blocks_and_windows_cover_all_rows(tmp_path: Path) -> None:
    source = open_samples(write_samples(tmp_path / "d", 300, rows_in_shard=37))
    dataset = stream_samples(source, 16, memory_bytes=2_000)
    assert 1 < dataset.order.window < 300
    for _ in range(3):
        assert sorted(flatten(numbers(dataset))) == list(range(300))


def test_fields_of_a_row_stay_together(tmp_path: Path) -> None:
    dataset = stream_samples(write_samples(tmp_path / "d", 50))
    for batch in dataset:
        assert batch.vector[:, 0].tolist() == batch.number.tolist()
        assert batch.id == [f"id{number}" for number in batch.number.tolist()]
