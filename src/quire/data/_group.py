"""Steps that are taken together: what is done for one batch costs hardly less than for several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.data._epoch import Slice

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Group:
    """Some steps of one rank in an epoch; `done` are the epochs of the pass behind it, `before` the steps in them."""

    share: Slice
    done: int
    before: int
    steps: Sequence[int]

    def span(self) -> range:
        """From the first position in the epoch to the last."""
        found = np.concatenate([self.share.positions(step)[0] for step in (self.steps[0], self.steps[-1])])
        return range(int(found.min()), int(found.max()) + 1) if len(found) else range(0)

    def rows(self) -> list[tuple[NDArray[np.int64], NDArray[np.bool_] | None]]:
        """The rows of each step, and which of them are real."""
        share = self.share
        parts = [share.positions(step) for step in self.steps]
        rows = share.order.rows(share.epoch, np.concatenate([positions for positions, _ in parts]))
        bounds = np.cumsum([len(positions) for positions, _ in parts])[:-1]
        return [(part, real) for part, (_, real) in zip(np.split(rows, bounds), parts, strict=True)]
