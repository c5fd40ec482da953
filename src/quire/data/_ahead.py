"""The rows of several steps worked out at once: what is done for one batch costs as much as for many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quire.data._epoch import Slice

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS = 4096


class Ahead:
    """The rows of the steps around the last one that was asked for."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: tuple[Slice, int, list[NDArray[np.int64]]] | None = None

    def rows(self, share: Slice, step: int) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """The rows of a step, and which of them are real."""
        count = max(1, _ROWS // share.batch_size)
        first = step - step % count
        if first + count >= share.steps:  # the last steps may have other sizes
            return share.rows(step)
        known = self._known
        if known is None or known[1] != first or (known[0] is not share and known[0] != share):
            known = self._known = share, first, _rows(share, first, count)
        return known[2][step - first], np.ones(share.batch_size, np.bool_) if share.last == "pad" else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Ahead, ()


def _rows(share: Slice, first: int, count: int) -> list[NDArray[np.int64]]:
    positions = np.concatenate([share.positions(step)[0] for step in range(first, first + count)])
    return list(share.order.rows(share.epoch, positions).reshape(count, share.batch_size))
