"""The ranks of a training: this one's number, the addresses of all, and sums over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RankInfo:
    """The number of a rank, the number of all ranks, and the address of each ('host:port').

    `joined` says that the engine has connected the ranks already.
    """

    rank: int = 0
    size: int = 1
    addresses: tuple[str, ...] = ()
    joined: bool = False


class World:
    """All ranks together. This class is for a single process; frameworks connect several."""

    def __init__(self, rank_info: RankInfo | None = None) -> None:
        rank_info = rank_info or RankInfo()
        self.rank, self.size = rank_info.rank, rank_info.size

    def sum(self, values: ArrayLike) -> Floats:
        """Return the sums of numbers over all ranks, the same on each of them."""
        return np.array(values, np.float64)

    def gather(self, value: float) -> list[float]:
        """Return the number of every rank."""
        indices = np.zeros(self.size)
        indices[self.rank] = value
        return self.sum(indices).tolist()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Disconnect from the other ranks."""
