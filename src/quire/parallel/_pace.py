"""Whether threads are worth it: for short calls that hold Python's lock, they may take longer than doing without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from quire.parallel._flight import Chunks, Flight
from quire.parallel._tasks import Function, Outcome


def paced(function: Function, flight: Flight, chunks: Chunks[Any], workers: int) -> Iterator[Outcome]:
    """The outcomes, for a caller that only waits for them: by the workers, or by the caller itself if that is faster.

    Both are tried where items are so short that many go together. Workers that win keep the work; if the caller does,
    they are tried again from time to time.
    """
    budget = 4 * workers
    yield from flight.outcomes(budget)  # tasks find their size
    while flight.more:
        together = _Measured(flight.outcomes(budget if chunks.short else float("inf")))
        yield from together
        alone = _Measured(flight.outcomes_here(function, 4))
        yield from alone
        if together.rate >= alone.rate:
            yield from flight.outcomes()
        else:
            yield from flight.outcomes_here(function, 8 * budget)


class _Measured:
    """Outcomes, and how many results a second they bring."""

    def __init__(self, outcomes: Iterator[Outcome]) -> None:
        self._outcomes, self._results, self._seconds = outcomes, 0, 0.0

    def __iter__(self) -> Iterator[Outcome]:
        while True:
            started = time.perf_counter()
            outcome = next(self._outcomes, None)
            self._seconds += time.perf_counter() - started
            if outcome is None:
                return
            self._results += len(outcome.results)
            yield outcome

    @property
    def rate(self) -> float:
        """Results a second; nothing if there were none."""
        return self._results / max(self._seconds, 1e-9)
