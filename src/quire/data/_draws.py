"""Random numbers that are a function of a seed, an epoch and a row, and of nothing else.

They are hashes of these numbers (the finalizer of SplitMix64), not the state of a generator. So a row gets the same
numbers after a resume, on any number of ranks and workers, and in batches of any size.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


class Augmentation(NamedTuple):
    """What random augmentations depend on, besides the row: the seed of the dataset, and the epoch of each row."""

    seed: int
    epochs: int | NDArray[np.int64]
    """One epoch for all rows, or that of each row of the batch."""

    def draw(self, seed: int, rows: NDArray[np.int64], owners: NDArray[np.int64], number: int) -> NDArray[np.float64]:
        """Return `number` numbers from 0 to before 1 for each value of a column.

        `rows` are the row numbers in the dataset of the rows of the batch, and value i belongs to row `owners[i]`. The
        values of one row, in an array of documents, get different numbers. `seed` is that of the step.
        """
        values = np.arange(len(owners)) - np.searchsorted(owners, owners)  # the position of a value in its row
        epochs = np.broadcast_to(self.epochs, rows.shape)[owners]
        state = np.full(len(owners), self.seed & 0xFFFFFFFFFFFFFFFF, np.uint64)
        for part in (np.full(len(owners), seed), epochs, rows[owners], values):
            state = _mix(state + _STEP * (part.astype(np.int64).view(np.uint64) + np.uint64(1)))
        bits = _mix(state[:, None] + _STEP * np.arange(1, number + 1, dtype=np.uint64))
        numbers: NDArray[np.float64] = (bits >> np.uint64(11)) * 2.0**-53
        return numbers


class SharedEpoch:
    """An epoch in memory that forked processes share; a process that is started otherwise gets a copy."""

    def __init__(self, epoch: int = 0) -> None:
        self._memory = mmap.mmap(-1, 8)
        self.value = epoch

    @property
    def value(self) -> int:
        """The epoch."""
        return int.from_bytes(self._memory[:8], "little")

    @value.setter
    def value(self, epoch: int) -> None:
        self._memory[:8] = epoch.to_bytes(8, "little")

    def __reduce__(self) -> tuple[type[SharedEpoch], tuple[int]]:
        return SharedEpoch, (self.value,)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed
