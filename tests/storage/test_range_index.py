"""The range index finds the range of a row, whatever the lengths of ranges are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.storage._row_reader import RangeIndex
from tests.strategies import laws

pytestmark = pytest.mark.needs("pyarrow")

alike = st.integers(1, 40).flatmap(lambda size: st.lists(st.integers(max(1, size // 2), size), min_size=1, max_size=60))
any_lengths = st.lists(st.integers(0, 5) | st.integers(0, 3000), min_size=1, max_size=60).map(lambda sizes: [1, *sizes])


@laws
@given(lengths=alike | any_lengths, seed=st.integers(0, 9), count=st.integers(0, 300))
def test_find_returns_the_last_range_that_begins_before_a_row(lengths: list[int], seed: int, count: int) -> None:
    starts, end = np.cumsum([0, *lengths[:-1]]), sum(lengths)
    rows = np.random.default_rng(seed).integers(0, end, count)
    ranges = RangeIndex(starts, end)
    expected = np.searchsorted(starts, rows, side="right") - 1
    assert np.array_equal(ranges.find(rows), expected)
    assert np.array_equal(ranges.find(rows[:1]), expected[:1])
    everyone = np.arange(end)
    assert np.array_equal(ranges.find(everyone), np.searchsorted(starts, everyone, side="right") - 1)


def test_ranges_of_similar_lengths_use_a_table() -> None:
    lengths = [2000] * 40 + [3] + [2000] * 40 + [7]
    ranges = RangeIndex(np.cumsum([0, *lengths[:-1]]), sum(lengths))
    ranges.find(np.arange(5))
    assert ranges._table is None  # a few rows do not pay for it
    ranges.find(np.arange(sum(lengths)))
    assert ranges._table is not None
    assert ranges._passes == 2
    assert len(ranges._table) < 4 * len(lengths)


@pytest.mark.parametrize(
    "lengths", [[1_000_000, *[1] * 40], [*[1] * 40, 10_000, *[5000] * 60]], ids=["steps", "starts"]
)
def test_ranges_of_different_lengths_use_no_table(lengths: list[int]) -> None:
    ranges = RangeIndex(np.cumsum([0, *lengths[:-1]]), sum(lengths))
    ranges.find(np.arange(sum(lengths)))
    assert ranges._table is None
