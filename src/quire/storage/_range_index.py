"""In which of many ranges, one behind the other, each row lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


_FEW = 8
"""Among so few, a comparison with each is faster than anything else."""
_MOST_PASSES, _MOST_STEPS = 4, 16
"""A table is of use while ranges are of like lengths: so few starts are within a step, so few steps are in a range."""


class RangeIndex:
    """The rows that ranges begin with, and the row behind the last one.

    A search takes a branch for every bit of the answer, and the processor guesses half of them wrong. So rows are
    looked up in a table of steps of half a range, and then compared with the next start, mostly once.
    """

    def __init__(self, starts: NDArray[np.int64], end: int) -> None:
        self._starts, self._end = starts, end
        self._ends = np.append(starts[1:], np.iinfo(np.int64).max)
        self._table: NDArray[np.int64] | None = None
        self._shift = self._passes = -1

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the last start that is not behind each row; rows are within the ranges."""
        if len(self._starts) <= _FEW:
            return _compared(self._starts, rows)
        if self._passes < 0 and len(rows) >= len(self._starts):  # so that it is paid for by the rows that it finds
            self._make_table()
        if self._table is None:
            return np.searchsorted(self._starts, rows, side="right") - 1
        found = self._table.take(rows >> self._shift)
        for _ in range(self._passes):
            found += rows >= self._ends.take(found)
        return found

    def _make_table(self) -> None:
        usual = int(np.median(np.diff(self._starts, append=self._end)))
        self._shift = max(usual.bit_length() - 2, 0)
        steps = np.arange(0, self._end, 1 << self._shift)
        table = np.searchsorted(self._starts, steps, side="right") - 1
        self._passes = int(np.diff(table, append=len(self._starts) - 1).max())
        if self._passes <= _MOST_PASSES and len(steps) <= _MOST_STEPS * len(self._starts):
            self._table = table


def _compared(starts: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.zeros(len(rows), np.int64)
    for start in starts[1:].tolist():
        found += rows >= start
    return found
