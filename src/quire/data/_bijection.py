"""A seeded permutation of the numbers below any size, position by position: no buffer, no list of all rows, no state.

A position is a place in a rectangle of about sqrt(size) x sqrt(size). Each round moves it along one side, by a hash of
where it stands on the other. A round can be undone, so all of them together are a bijection. What lands in the few
places of the rectangle past the size goes round again. (Black and Rogaway 2002: a Feistel network over Z_a x Z_b with
cycle walking.) Small sizes are sorted by hash, which makes every one of their permutations equally likely.

An order that was begun is resumed later, elsewhere: what these functions give is a format, and never changes.
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
_SORTED = 4_096  # sizes up to this one are sorted by hash
_CHUNK = 8_192  # positions at a time, so that what is in the making stays in the cache
_BITS = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's


def _number(value: int) -> Numbers:
    return np.array(value & _BITS, np.uint64)  # numpy takes it in half the time that a scalar needs


_30, _27, _32, _FACTOR, _LAST_FACTOR = map(_number, (30, 27, 32, _FIRST, _SECOND))


def key_of(*parts: int) -> int:
    """One key of 64 bits from several numbers, such as a seed and an epoch; their order counts."""
    key = 0
    for part in parts:
        key = _mixed(key + part)
    return key


def permute(size: int, key: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the permutation of [0, size) with that key takes each position."""
    positions = _checked(size, positions)
    return _sorted(size, key)[positions] if size <= _SORTED else _walked(size, key, positions, _forward)


def unpermute(size: int, key: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions that `permute` takes to these: its inverse."""
    positions = _checked(size, positions)
    return _unsorted(size, key)[positions] if size <= _SORTED else _walked(size, key, positions, _backward)


def _checked(size: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    positions = np.asarray(positions, np.int64)
    if not 1 <= size <= LARGEST:
        raise OptionError(f"size: expected 1 to 2**62, got {size}. There is nothing to permute, or too much.")
    if positions.size and int(positions.view(np.uint64).max()) >= size:  # what is below 0 is huge without a sign
        wrong = positions[(positions < 0) | (positions >= size)][0]
        raise RowIndexError(f"position {wrong} is not one of [0, {size}).")
    return positions


# --- small sizes


@lru_cache(maxsize=32)
def _sorted(size: int, key: int) -> NDArray[np.int64]:
    """The whole permutation: the numbers in the order of their hashes."""
    hashes = _hash(np.arange(size, dtype=np.uint64), _number(_mixed(key)), np.empty(size, np.uint64))
    return np.argsort(hashes, kind="stable").astype(np.int64, copy=False)


@lru_cache(maxsize=32)
def _unsorted(size: int, key: int) -> NDArray[np.int64]:
    return np.argsort(_sorted(size, key)).astype(np.int64, copy=False)


# --- large sizes


class _Walk(NamedTuple):
    """A rectangle that holds [0, size), and the keys of the rounds."""

    size: Numbers
    rows: Numbers
    columns: Numbers
    keys: tuple[Numbers, ...]


Rounds = Callable[[Numbers, _Walk], Numbers]


@lru_cache(maxsize=256)
def _walk(size: int, key: int) -> _Walk:
    rows = isqrt(size - 1) + 1
    start = _mixed(key)
    keys = tuple(_number(start + number * _STEP) for number in range(_ROUNDS))
    return _Walk(_number(size), _number(rows), _number(-(-size // rows)), keys)


def _walked(size: int, key: int, positions: NDArray[np.int64], rounds: Rounds) -> NDArray[np.int64]:
    given, walk = positions.view(np.uint64), _walk(size, key)
    if given.size <= _CHUNK:
        return _inside(given, walk, rounds).view(np.int64)
    made = np.empty_like(positions)
    for begin in range(0, given.size, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        made[part] = _inside(given[part], walk, rounds).view(np.int64)
    return made


def _inside(given: Numbers, walk: _Walk, rounds: Rounds) -> Numbers:
    """Rounds, and more rounds for those that are past the size."""
    made = rounds(given, walk)
    outside = np.flatnonzero(made >= walk.size)
    while outside.size:
        made[outside] = again = rounds(made[outside], walk)
        outside = outside[again >= walk.size]
    return made


def _forward(given: Numbers, walk: _Walk) -> Numbers:
    row = given // walk.columns
    column = given - row * walk.columns
    spare = np.empty_like(row)
    for number in range(0, _ROUNDS, 2):
        _advance(row, _below(walk.rows, column, walk.keys[number], spare), walk.rows)
        _advance(column, _below(walk.columns, row, walk.keys[number + 1], spare), walk.columns)
    return row * walk.columns + column


def _backward(given: Numbers, walk: _Walk) -> Numbers:
    row = given // walk.columns
    column = given - row * walk.columns
    spare = np.empty_like(row)
    for number in range(_ROUNDS - 2, -1, -2):
        _retreat(column, _below(walk.columns, row, walk.keys[number + 1], spare), walk.columns)
        _retreat(row, _below(walk.rows, column, walk.keys[number], spare), walk.rows)
    return row * walk.columns + column


def _advance(numbers: Numbers, by: Numbers, side: Numbers) -> None:
    """(numbers + by) % side, in place: what is below 0 wraps round to a huge number, so the smaller one is right."""
    np.add(numbers, by, numbers)
    np.subtract(numbers, side, by)
    np.minimum(numbers, by, out=numbers)


def _retreat(numbers: Numbers, by: Numbers, side: Numbers) -> None:
    """(numbers - by) % side, in place."""
    np.subtract(numbers, by, numbers)
    np.add(numbers, side, by)
    np.minimum(numbers, by, out=numbers)


def _below(side: Numbers, numbers: Numbers, key: Numbers, spare: Numbers) -> Numbers:
    """A number below the side for each number: the upper half of its hash, scaled."""
    hashes = _hash(numbers, key, spare)
    np.right_shift(hashes, _32, hashes)
    np.multiply(hashes, side, hashes)
    np.right_shift(hashes, _32, hashes)
    return hashes


def _hash(numbers: Numbers, key: Numbers, spare: Numbers) -> Numbers:
    """splitmix64 of numbers + key, without its last step, which is for the lower half. No two numbers have one hash."""
    made = numbers + key
    np.right_shift(made, _30, spare)
    np.bitwise_xor(made, spare, made)
    np.multiply(made, _FACTOR, made)
    np.right_shift(made, _27, spare)
    np.bitwise_xor(made, spare, made)
    np.multiply(made, _LAST_FACTOR, made)
    return made


def _mixed(number: int) -> int:
    """splitmix64 of a number."""
    number = (number + _STEP) & _BITS
    number = (number ^ number >> 30) * _FIRST & _BITS
    number = (number ^ number >> 27) * _SECOND & _BITS
    return number ^ number >> 31
