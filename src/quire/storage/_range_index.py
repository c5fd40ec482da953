"""Finding the range that a row number falls into, among many consecutive ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FEW = 8
"""Up to this number of ranges, comparing with every start is fastest."""
_MAX_PASSES, _MAX_STEPS = 4, 16
"""A table pays while ranges have similar lengths: few starts within a step, and few steps within a range."""


class RangeIndex:
    """Consecutive ranges, given by the first row of each and the row after the last.

    A binary search takes a branch for every bit of the answer, of which the processor predicts half wrong. Rows are
    therefore looked up in a table with an entry for every 2**shift rows, about half a range: the range of the first row
    of that step. A comparison with the next start, repeated `passes` times, corrects the answer; mostly once is enough.
    """

    def __init__(self, starts: NDArray[np.int64], end: int) -> None:
        self._starts, self._end = starts, end
        self._ends = np.append(starts[1:], np.iinfo(np.int64).max)
        self._table: NDArray[np.int64] | None = None
        self._shift = self._passes = -1

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the range that each row is in."""
        if len(self._starts) <= _FEW:
            ranges = np.zeros(len(rows), np.int64)
            for start in self._starts[1:].tolist():
                ranges += rows >= start
            return ranges
        if self._passes < 0 and len(rows) >= len(self._starts):  # building the table is paid for by these rows
            self._build_table()
        if self._table is None:
            return np.searchsorted(self._starts, rows, side="right") - 1
        ranges = self._table.take(rows >> self._shift)
        for _ in range(self._passes):
            ranges += rows >= self._ends.take(ranges)
        return ranges

    def _build_table(self) -> None:
        median = int(np.median(np.diff(self._starts, append=self._end)))
        self._shift = max(median.bit_length() - 2, 0)
        steps = np.arange(0, self._end, 1 << self._shift)
        table = np.searchsorted(self._starts, steps, side="right") - 1
        self._passes = int(np.diff(table, append=len(self._starts) - 1).max())
        if self._passes <= _MAX_PASSES and len(steps) <= _MAX_STEPS * len(self._starts):
            self._table = table
