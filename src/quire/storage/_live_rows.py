"""Which rows of the shards belong to a dataset: all but the deleted ones, or those that a filter selected.

Positions in a dataset count its own rows, and stored rows count those in the shards. Deleted rows are few, so
`LiveRows` keeps their numbers, and computes the others. A filter may select few rows, so it keeps an array of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from quire.storage._manifest import Shard


class LiveRows:
    """The rows from 0 to `size` without the deleted ones, which ascend."""

    __slots__ = ("_gaps", "deleted", "size")

    def __init__(self, size: int, deleted: NDArray[np.int64]) -> None:
        self.size, self.deleted = size, deleted
        # The live rows before deleted row number k are deleted[k] - k. A position p is therefore after all deleted rows
        # with deleted[k] - k <= p, and that many rows further on in the shards.
        self._gaps = deleted - np.arange(len(deleted))

    def __len__(self) -> int:
        return self.size - len(self.deleted)

    def __reduce__(self) -> tuple[type[LiveRows], tuple[int, NDArray[np.int64]]]:
        return LiveRows, (self.size, self.deleted)

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the stored rows at positions."""
        return positions + np.searchsorted(self._gaps, positions, side="right")

    def count_before(self, stored: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of live rows before stored rows, of which the last may be the number of all."""
        return stored - np.searchsorted(self.deleted, stored)

    def between(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the live rows from one stored row to another; None if these are all."""
        first, last = np.searchsorted(self.deleted, [start, stop])
        if first == last:
            return None
        return np.delete(np.arange(start, stop), self.deleted[first:last] - start)


RowSelection: TypeAlias = "NDArray[np.int64] | LiveRows"
"""Ascending stored rows, or all rows that were not deleted."""


def count_before(rows: RowSelection | None, stored: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of selected rows before stored rows."""
    if rows is None:
        return stored
    return rows.count_before(stored) if isinstance(rows, LiveRows) else np.searchsorted(rows, stored)


def rows_of_shard(rows: RowSelection | None, start: int, shard: Shard) -> NDArray[np.int64] | None:
    """Return the selected rows of a shard that begins at a stored row, counted in the shard; None if these are all."""
    if rows is None:
        return None
    if isinstance(rows, LiveRows):
        live = rows.between(start, start + shard.rows)
        return None if live is None else live - start
    return rows[slice(*np.searchsorted(rows, [start, start + shard.rows]))] - start
