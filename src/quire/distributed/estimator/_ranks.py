"""The ranks of a training: how many there are, which of them this is, and what they tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RankInfo:
    """One rank's place: its number, how many there are, and where each of them can be reached ('host:port').

    `joined` says that the engine has connected the ranks already.
    """

    rank: int = 0
    size: int = 1
    addresses: tuple[str, ...] = ()
    joined: bool = False


class World:
    """The ranks together. This one is a process alone; frameworks bring the others."""

    def __init__(self, seat: RankInfo | None = None) -> None:
        seat = seat or RankInfo()
        self.rank, self.size = seat.rank, seat.size

    def sum(self, values: Any) -> Floats:
        """The sums of numbers over all ranks, the same on each of them."""
        return np.array(values, np.float64)

    def gather(self, value: float) -> list[float]:
        """The number of every rank."""
        places = np.zeros(self.size)
        places[self.rank] = value
        return self.sum(places).tolist()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Leave the others."""
