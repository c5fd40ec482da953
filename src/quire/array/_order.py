"""Orders of rows: batches, shuffles, samples and splits, as positions. A seed makes each of them repeatable."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import OptionError, RowIndexError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def batches(
    length: int, batch_size: int, *, shuffle: bool, seed: int | None, drop_last: bool
) -> Iterator[NDArray[np.int64]]:
    """Positions, so many at a time."""
    batch_size = check_batch_size(batch_size)
    order = shuffled(length, seed) if shuffle else np.arange(length, dtype=np.int64)
    stop = length - length % batch_size if drop_last else length
    return (order[start : start + batch_size] for start in range(0, stop, batch_size))


def check_batch_size(batch_size: int) -> int:
    """The size, if it is one."""
    batch_size = whole_number("batch_size", batch_size)
    if batch_size < 1:
        raise RowIndexError(f"batch_size={batch_size}: a batch has at least one row.")
    return batch_size


def whole_number(name: str, value: Any) -> int:
    """An option as an int of Python: those of numpy have other limits, and do not load with a checkpoint of torch."""
    try:
        return int(operator.index(value))
    except TypeError as error:
        raise OptionError(f"{name}: expected a whole number, got {value!r} ({type(value).__name__}).") from error


def shuffled(length: int, seed: int | None) -> NDArray[np.int64]:
    """All positions in random order."""
    return np.random.default_rng(seed).permutation(length)


def sampled(length: int, size: int, seed: int | None) -> NDArray[np.int64]:
    """Different positions, chosen at random."""
    size = whole_number("k", size)
    if not 0 <= size <= length:
        raise RowIndexError(f"cannot take {size} different rows out of {length}.")
    return np.random.default_rng(seed).choice(length, size, replace=False)


def split(length: int, parts: Sequence[float], order: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Positions in parts: fractions that add up to 1, or counts that add up to the length."""
    if not parts or any(part < 0 for part in parts):
        raise RowIndexError(f"{parts!r} is not a split: give fractions (0.8, 0.2) or counts.")
    if all(isinstance(part, int) for part in parts) and sum(parts) == length:
        ends = np.cumsum(parts)
    elif abs(sum(parts) - 1) < 1e-9:
        ends = np.round(np.cumsum(parts) * length).astype(np.int64)
    else:
        raise RowIndexError(f"the parts {parts!r} add up to {sum(parts)}: fractions make 1, counts make {length}.")
    return np.split(order, ends[:-1])
