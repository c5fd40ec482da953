"""A seeded permutation of the numbers below any size, computed for each position: no buffer, no list of rows, no state.

A position is written as (row, column) of a rectangle of about sqrt(size) x sqrt(size) cells. Each round of a Feistel
network adds a hash of the column to the row, modulo the number of rows, or a hash of the row to the column. The summand
depends only on the coordinate that the round leaves unchanged, so a round can be undone by subtracting it, and all
rounds together are a bijection of the rectangle. The rectangle has a few more cells than there are numbers. A position
that lands on one of them goes through the rounds again until it is below the size (cycle walking): since the rounds are
a permutation of the rectangle, following its cycle from a number below the size leads back to one. (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002.)

Small sizes are sorted by hash instead, which makes each of their permutations equally likely.

A training run that has begun is resumed later, elsewhere, with the same order. So the results of these functions are a
file format, and must never change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.errors import OptionError, RowIndexError

Numbers = NDArray[np.uint64]

LARGEST = 2**62  # each side of the rectangle stays below 2**32, and each product below 2**64

_ROUNDS = 6
_ROUNDS_EACH = 4
_SORTED = 4_096  # sizes up to this one are sorted by hash
_CHUNK = 8_192  # positions at a time, so that intermediate results stay in the processor's cache
_BITS = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the constants of splitmix64


def _uint64(value: int) -> Numbers:
    return np.array(
        value & _BITS, np.uint64
    )  # numpy computes with an array without axes twice as fast as with a scalar


_30, _27, _32, _FACTOR, _LAST_FACTOR, _KEY_STEP = map(_uint64, (30, 27, 32, _FIRST, _SECOND, _STEP))


def derive_key(*parts: int) -> int:
    """Derive a key of 64 bits from several numbers, such as a seed and an epoch; their order matters."""
    key = 0
    for part in parts:
        key = _splitmix64(key + part)
    return key


def uniform(key: int, numbers: Numbers) -> NDArray[np.float64]:
    """Return a pseudo-random number in [0, 1) for each number, always the same for a key."""
    hashes = _hash(numbers, _uint64(_splitmix64(key)), np.empty_like(numbers))
    chances: NDArray[np.float64] = (hashes >> np.uint64(11)) / 2**53  # the 53 bits of a float64
    return chances


def permute(size: int, key: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the images of positions under the permutation of [0, size) with a key."""
    positions = _check_positions(size, positions)
    return _sort_by_hash(size, key)[positions] if size <= _SORTED else _apply(_forward, size, key, positions)


def unpermute(size: int, key: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions that `permute` maps to these: its inverse."""
    positions = _check_positions(size, positions)
    return _invert_sort(size, key)[positions] if size <= _SORTED else _apply(_backward, size, key, positions)


def permute_each(
    sizes: NDArray[np.int64] | int, keys: Numbers, positions: NDArray[np.int64], usual: int = 0
) -> NDArray[np.int64]:
    """Return the image of each position under a permutation of its own: of [0, size) with a key.

    `sizes` are one number for each position, or one for all, and `usual` is the size of most of them, which is faster
    then. Positions must be below their sizes, which is not checked. There are fewer rounds than in `permute`: this is
    for the rows of a block, which few of these permutations order.
    """
    results = np.empty_like(positions)
    for begin in range(0, len(positions), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        if isinstance(sizes, int):
            results[part] = _permute_each(sizes, keys[part], positions[part])
            continue
        own_sizes, own_keys, own = sizes[part], keys[part], positions[part]
        others = np.flatnonzero(own_sizes != usual)
        if 2 * len(others) > len(own):
            results[part] = _permute_each(own_sizes, own_keys, own)
            continue
        if len(others):
            own, all_positions = own.copy(), own
            own[others] = 0  # a valid position for the usual size, too
        results[part] = _permute_each(usual, own_keys, own)
        if len(others):
            results[begin + others] = _permute_each(own_sizes[others], own_keys[others], all_positions[others])
    return results


def _permute_each(sizes: NDArray[np.int64] | int, keys: Numbers, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    rows, columns, limits = _find_sides(sizes) if isinstance(sizes, int) else _compute_sides(sizes)
    results = _mix_each(positions.view(np.uint64), rows, columns, keys)
    outside = np.flatnonzero(results >= limits)
    while outside.size:  # cycle walking, as in `_walk_cycles`
        own_rows, own_columns, own_limits = (
            side if side.ndim == 0 else side[outside] for side in (rows, columns, limits)
        )
        results[outside] = again = _mix_each(results[outside], own_rows, own_columns, keys[outside])
        outside = outside[again >= own_limits]
    return results.view(np.int64)


@lru_cache(maxsize=32)
def _find_sides(size: int) -> tuple[Numbers, Numbers, Numbers]:
    rows, columns, limits = (np.array(side) for side in _compute_sides(np.array(size)))
    return rows, columns, limits


def _compute_sides(sizes: NDArray[np.int64]) -> tuple[Numbers, Numbers, Numbers]:
    """Return the sides of the rectangle of each position, about as in `_make_network`, and the sizes."""
    limits = sizes.astype(np.uint64)
    rows = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    return rows, (limits + rows - np.uint64(1)) // rows, limits


def _mix_each(numbers: Numbers, rows: Numbers, columns: Numbers, keys: Numbers) -> Numbers:
    row = numbers // columns
    column = numbers - row * columns
    spare, keys = np.empty_like(row), keys.copy()
    for _ in range(_ROUNDS_EACH // 2):
        _add_modulo(row, _hash_below(rows, column, keys, spare), rows)
        np.add(keys, _KEY_STEP, keys)
        _add_modulo(column, _hash_below(columns, row, keys, spare), columns)
        np.add(keys, _KEY_STEP, keys)
    return row * columns + column


def hash_numbers(key: int, numbers: NDArray[np.int64]) -> Numbers:
    """Return a key of 64 bits for each number, derived from another key."""
    unsigned = numbers.view(np.uint64)
    return _hash(unsigned, _uint64(_splitmix64(key)), np.empty_like(unsigned))


def _check_positions(size: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    positions = np.asarray(positions, np.int64)
    if not 1 <= size <= LARGEST:
        raise OptionError(f"size: expected 1 to 2**62, got {size}. There is nothing to permute, or too much.")
    if positions.size and int(positions.view(np.uint64).max()) >= size:  # a negative number is huge without its sign
        wrong = positions[(positions < 0) | (positions >= size)][0]
        raise RowIndexError(f"position {wrong} is not one of [0, {size}).")
    return positions


# --- small sizes


@lru_cache(maxsize=32)
def _sort_by_hash(size: int, key: int) -> NDArray[np.int64]:
    """Return the whole permutation: the numbers in the order of their hashes."""
    hashes = _hash(np.arange(size, dtype=np.uint64), _uint64(_splitmix64(key)), np.empty(size, np.uint64))
    return np.argsort(hashes, kind="stable").astype(np.int64, copy=False)


@lru_cache(maxsize=32)
def _invert_sort(size: int, key: int) -> NDArray[np.int64]:
    return np.argsort(_sort_by_hash(size, key)).astype(np.int64, copy=False)


# --- large sizes


class _Network(NamedTuple):
    """The rectangle that contains [0, size), and the keys of the rounds."""

    size: Numbers
    rows: Numbers
    columns: Numbers
    keys: tuple[Numbers, ...]


Rounds = Callable[[Numbers, _Network], Numbers]


@lru_cache(maxsize=256)
def _make_network(size: int, key: int) -> _Network:
    rows = isqrt(size - 1) + 1
    start = _splitmix64(key)
    keys = tuple(_uint64(start + number * _STEP) for number in range(_ROUNDS))
    return _Network(_uint64(size), _uint64(rows), _uint64(-(-size // rows)), keys)


def _apply(rounds: Rounds, size: int, key: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    numbers, network = positions.view(np.uint64), _make_network(size, key)
    if numbers.size <= _CHUNK:
        return _walk_cycles(rounds, numbers, network).view(np.int64)
    results = np.empty_like(positions)
    for begin in range(0, numbers.size, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        results[part] = _walk_cycles(rounds, numbers[part], network).view(np.int64)
    return results


def _walk_cycles(rounds: Rounds, numbers: Numbers, network: _Network) -> Numbers:
    """Apply the rounds, and again to the results that are not below the size."""
    results = rounds(numbers, network)
    outside = np.flatnonzero(results >= network.size)
    while outside.size:
        results[outside] = again = rounds(results[outside], network)
        outside = outside[again >= network.size]
    return results


def _forward(numbers: Numbers, network: _Network) -> Numbers:
    row = numbers // network.columns
    column = numbers - row * network.columns
    spare = np.empty_like(row)
    for number in range(0, _ROUNDS, 2):
        _add_modulo(row, _hash_below(network.rows, column, network.keys[number], spare), network.rows)
        _add_modulo(column, _hash_below(network.columns, row, network.keys[number + 1], spare), network.columns)
    return row * network.columns + column


def _backward(numbers: Numbers, network: _Network) -> Numbers:
    row = numbers // network.columns
    column = numbers - row * network.columns
    spare = np.empty_like(row)
    for number in range(_ROUNDS - 2, -1, -2):
        _subtract_modulo(column, _hash_below(network.columns, row, network.keys[number + 1], spare), network.columns)
        _subtract_modulo(row, _hash_below(network.rows, column, network.keys[number], spare), network.rows)
    return row * network.columns + column


# Both operands of the next two functions are below `side`, so the sum is below twice the side, and at most one side has
# to be subtracted. numpy's `%` is slow. Instead both candidates, with and without the side, are computed: the one that
# is negative wraps around to a huge number, and the minimum of the two is the result. `summand` is overwritten.


def _add_modulo(numbers: Numbers, summand: Numbers, side: Numbers) -> None:
    """Compute (numbers + summand) % side in place."""
    np.add(numbers, summand, numbers)
    np.subtract(numbers, side, summand)
    np.minimum(numbers, summand, out=numbers)


def _subtract_modulo(numbers: Numbers, summand: Numbers, side: Numbers) -> None:
    """Compute (numbers - summand) % side in place."""
    np.subtract(numbers, summand, numbers)
    np.add(numbers, side, summand)
    np.minimum(numbers, summand, out=numbers)


def _hash_below(side: Numbers, numbers: Numbers, key: Numbers, spare: Numbers) -> Numbers:
    """Return a number below `side` for each number: the upper 32 bits of its hash, scaled."""
    hashes = _hash(numbers, key, spare)
    np.right_shift(hashes, _32, hashes)
    np.multiply(hashes, side, hashes)
    np.right_shift(hashes, _32, hashes)
    return hashes


def _hash(numbers: Numbers, key: Numbers, spare: Numbers) -> Numbers:
    """Return splitmix64 of numbers + key, without its last step, which only improves the lower bits.

    Each step can be undone, so different numbers have different hashes. `spare` is memory for intermediate results.
    """
    hashes = numbers + key
    np.right_shift(hashes, _30, spare)
    np.bitwise_xor(hashes, spare, hashes)
    np.multiply(hashes, _FACTOR, hashes)
    np.right_shift(hashes, _27, spare)
    np.bitwise_xor(hashes, spare, hashes)
    np.multiply(hashes, _LAST_FACTOR, hashes)
    return hashes


def _splitmix64(number: int) -> int:
    number = (number + _STEP) & _BITS
    number = (number ^ number >> 30) * _FIRST & _BITS
    number = (number ^ number >> 27) * _SECOND & _BITS
    return number ^ number >> 31
