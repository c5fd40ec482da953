"""The permutation behind the order of an epoch: its laws, its mixing, and the values that stored states rely on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.data._bijection import LARGEST, derive_key, permute, unpermute
from quire.errors import OptionError, QuireError, RowIndexError
from tests.strategies import laws

Numbers = NDArray[np.int64]
keys = st.integers(0, 2**64 - 1)

BITS = 2**64 - 1


def numbers(*values: int) -> Numbers:
    return np.array(values, np.int64)


# --- laws


@pytest.mark.parametrize("size", [*range(1, 40), 999, 1_000, 4_095, 4_096, 4_097, 4_160, 4_161, 65_536, 100_003])
def test_permute_yields_every_number_once(size: int) -> None:
    everything = np.arange(size, dtype=np.int64)
    for key in (0, 1, 2**63):
        permuted = permute(size, key, everything)
        assert permuted.dtype == np.int64
        assert np.array_equal(np.sort(permuted), everything)
        assert np.array_equal(unpermute(size, key, permuted), everything)


@pytest.mark.parametrize(("size", "key"), [(4_097, 123), (4_097, 137), (4_161, 112), (4_161, 145)])
def test_permute_walks_cycles_until_below_the_size(size: int, key: int) -> None:
    """With these keys, a position is past the size after the first walk, and exactly at it after the second."""
    everything = np.arange(size, dtype=np.int64)
    permuted = permute(size, key, everything)
    assert permuted.max() == size - 1
    assert np.array_equal(np.sort(permuted), everything)


@laws
@given(st.integers(1, 10**13) | st.just(LARGEST), keys, st.data())
def test_unpermute_inverts_permute(size: int, key: int, data: st.DataObject) -> None:
    positions = numbers(*data.draw(st.lists(st.integers(0, size - 1), max_size=50)))
    there = permute(size, key, positions)
    assert ((there >= 0) & (there < size)).all()
    assert np.array_equal(unpermute(size, key, there), positions)
    assert np.array_equal(permute(size, key, unpermute(size, key, positions)), positions)


@laws
@given(st.integers(4_097, 10**13), keys, st.integers(0, 2**32))
def test_permute_of_a_position_is_independent_of_others(size: int, key: int, start: int) -> None:
    positions = (np.arange(start, start + 20_000, dtype=np.int64) * 7_919) % size
    some = np.array([0, 5, 8_191, 8_192, 16_384, 19_999])
    assert np.array_equal(permute(size, key, positions)[some], permute(size, key, positions[some]))


def test_permute_does_not_change_its_argument() -> None:
    for size in (10, 10**6):
        positions = np.arange(10, dtype=np.int64)
        permute(size, 1, positions)
        unpermute(size, 1, positions)
        assert np.array_equal(positions, np.arange(10))


@pytest.mark.parametrize("size", [7, 10**12])
@pytest.mark.parametrize("function", [permute, unpermute])
def test_permute_rejects_positions_outside(size: int, function: Callable[[int, int, Numbers], Numbers]) -> None:
    for wrong in (-1, size):
        with pytest.raises(RowIndexError, match=rf"position {wrong} is not one of \[0, {size}\)"):
            function(size, 0, numbers(0, wrong))


@pytest.mark.parametrize("size", [-1, 0, LARGEST + 1])
def test_permute_rejects_invalid_sizes(size: int) -> None:
    with pytest.raises(OptionError, match=f"size: expected 1 to 2.*got {size}") as caught:
        permute(size, 0, numbers())
    assert isinstance(caught.value, (QuireError, ValueError))


# --- what stored states rely on


def test_permute_equals_golden_values() -> None:
    """An order is resumed by another version of quire, on another machine. These never change."""
    golden = {
        1: [0, 0, 0, 0],
        7: [5, 3, 2, 4],
        4_096: [726, 3387, 1149, 828],
        4_097: [1132, 3785, 851, 2906],
        200_001: [57316, 133566, 182008, 82366],
        10**12: [219230782218, 879356149567, 838009058294, 786399209856],
        10**13: [3981519157433, 6097562146938, 271098692801, 8122089105100],
    }
    result = {size: permute(size, 42, numbers(0, 1, size // 3, size - 1) % size).tolist() for size in golden}
    assert result == golden
    assert derive_key(1, 2, 3) == 7702586659592502839


def mixed(number: int) -> int:
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & BITS
    return ((number ^ number >> 27) * 0x94D049BB133111EB) & BITS


def in_plain_python(size: int, key: int, position: int) -> int:
    """The same permutation in whole numbers of Python, as another language would write it down."""
    start = mixed(key + 0x9E3779B97F4A7C15 & BITS)
    start ^= start >> 31
    if size <= 4_096:
        return sorted(range(size), key=lambda number: mixed(start + number & BITS))[position]
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        row, column = divmod(position, columns)
        for number in range(6):
            around = start + number * 0x9E3779B97F4A7C15
            if number % 2 == 0:
                row = (row + ((mixed(around + column & BITS) >> 32) * rows >> 32)) % rows
            else:
                column = (column + ((mixed(around + row & BITS) >> 32) * columns >> 32)) % columns
        position = row * columns + column
        if position < size:
            return position


@laws
@given(st.integers(1, 5_000) | st.integers(1, 10**13), keys, st.data())
def test_permute_equals_a_plain_python_reference(size: int, key: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, size - 1))
    assert permute(size, key, numbers(position)).tolist() == [in_plain_python(size, key, position)]


# --- mixing


def excess(counts: NDArray[np.int64], expected: float) -> float:
    """Chi squared, in standard deviations from what chance gives."""
    freedom = counts.size - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_small_permutations_are_equally_likely(size: int) -> None:
    every = list(permutations(range(size)))
    seen = Counter(tuple(permute(size, key, np.arange(size)).tolist()) for key in range(50 * len(every)))
    assert excess(np.array([seen[one] for one in every]), 50) < 4


@pytest.mark.parametrize("size", [4_097, 5_000, 10**6, 10**13])
def test_distance_of_positions_does_not_predict_their_images(size: int) -> None:
    """The images of two positions do not depend on their distance: neighbours, one row apart, or with the next key."""
    side = math.isqrt(size - 1) + 1
    firsts = {
        distance: [permute(size, key, numbers(7, 7 + distance)) for key in range(4_000)] for distance in (1, side)
    }
    between = [np.array([pair[1] - pair[0] for pair in pairs]) % size for pairs in firsts.values()]
    places = np.array([pair[0] for pair in firsts[1]])
    for sample in (*between, places, np.diff(places) % size):
        counts = np.bincount((sample * 32.0 / size).astype(int), minlength=32)
        assert excess(counts, len(sample) / 32) < 4


@pytest.mark.parametrize("size", [4_097, 10**6])
def test_permutation_has_no_autocorrelation(size: int) -> None:
    permuted = permute(size, 3, np.arange(size)).astype(float)
    for lag in (1, 2, math.isqrt(size - 1) + 1):
        assert abs(np.corrcoef(permuted[:-lag], permuted[lag:])[0, 1]) < 4 / math.sqrt(size)
    assert abs(np.corrcoef(permuted, np.arange(size))[0, 1]) < 4 / math.sqrt(size)


def test_derived_keys_differ() -> None:
    derived_keys = {derive_key(*parts) for parts in permutations(range(12), 3)}
    assert len(derived_keys) == 12 * 11 * 10
    assert derive_key(1, 2) != derive_key(2, 1) != derive_key(2, 1, 0)
