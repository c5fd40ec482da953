"""Counting values as they come: numbers, and which values there are how often. Memory does not grow with the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_NUMBERS = 1 << 20
"""So many numbers are kept for a histogram; of more, a part."""
_MOST_VALUES = 200_000
"""So many different values are counted; of more, those that come often."""


class NumberTally:
    """The least, the greatest, the mean and the deviation of numbers, and some of them for a histogram.

    NaN and infinities are counted in `not_finite`, and left aside everywhere else.
    """

    def __init__(self, seed: int = 0) -> None:
        self.count = self.not_finite = 0
        self.minimum: Any = None
        self.maximum: Any = None
        self.mean = self._squares = 0.0
        self._kept: list[NDArray[np.float64]] = []
        self._room, self._one_in = _MOST_NUMBERS, 1
        self._random = np.random.default_rng(seed)

    def add(self, numbers: NDArray[Any]) -> None:
        """Take numbers of any shape."""
        flat = self._finite(numbers.reshape(-1))
        if not len(flat):
            return
        least, most = flat.min().item(), flat.max().item()
        self.minimum = least if self.minimum is None else min(self.minimum, least)
        self.maximum = most if self.maximum is None else max(self.maximum, most)
        plain = flat.astype(np.float64)
        self._take_moments(plain)
        self._keep(plain)

    def _finite(self, flat: NDArray[Any]) -> NDArray[Any]:
        if flat.dtype.kind in "biu":
            return flat.astype(np.uint8) if flat.dtype.kind == "b" else flat
        if flat.dtype.kind != "f":
            flat = flat.astype(np.float32)  # the short floats and integers of machine learning
        there = np.isfinite(flat)
        found = int(there.sum())
        self.not_finite += len(flat) - found
        return flat if found == len(flat) else flat[there]

    def _take_moments(self, numbers: NDArray[np.float64]) -> None:
        """Join the mean and the sum of squares of both, which loses no digits."""
        with np.errstate(over="ignore", invalid="ignore"):
            mean, count = float(numbers.mean()), len(numbers)
            apart, total = mean - self.mean, self.count + count
            self._squares += float(((numbers - mean) ** 2).sum()) + apart * apart * self.count * count / total
            self.mean += apart * count / total
            self.count = total

    def _keep(self, numbers: NDArray[np.float64]) -> None:
        if self._one_in > 1:
            numbers = numbers[self._random.integers(0, len(numbers), -(-len(numbers) // self._one_in))]
        self._kept.append(numbers)
        self._room -= len(numbers)
        while self._room < 0:
            whole = np.concatenate(self._kept)
            self._kept = [whole[self._random.random(len(whole)) < 0.5]]
            self._room, self._one_in = _MOST_NUMBERS - len(self._kept[0]), self._one_in * 2

    @property
    def deviation(self) -> float | None:
        """The standard deviation of all of them, as numpy has it."""
        return float(np.sqrt(self._squares / self.count)) if self.count else None

    def histogram(self, bins: int) -> tuple[list[float], list[int]] | None:
        """The edges of so many bins, and how many of the numbers kept are in each."""
        if not self.count or not np.isfinite(float(self.maximum) - float(self.minimum)):
            return None
        try:
            counts, edges = np.histogram(np.concatenate(self._kept), bins, (self.minimum, self.maximum))
        except ValueError:  # too many bins for numbers that are so near to each other
            return None
        return edges.tolist(), counts.tolist()


class ValueTally:
    """How often values come, and how many different ones there are."""

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()
        self._whole = True

    def add(self, values: Iterable[Any]) -> None:
        """Take values that have a hash."""
        self._counts.update(values)
        self._prune()

    def add_numbers(self, numbers: NDArray[Any]) -> None:
        """Take numbers."""
        found, counts = np.unique(numbers, return_counts=True)
        for value, count in zip(found.tolist(), counts.tolist(), strict=True):
            self._counts[value] += count
        self._prune()

    def add_texts(self, texts: Iterable[str]) -> None:
        """Take texts; of long ones, the beginning and what tells it from others."""
        self.add(text if len(text) <= _SHORT else (text[:_SHORT], hash(text)) for text in texts)

    def _prune(self) -> None:
        if len(self._counts) > _MOST_VALUES:
            self._counts = Counter(dict(self._counts.most_common(_MOST_VALUES // 2)))
            self._whole = False

    @property
    def distinct(self) -> int | None:
        """How many different values there are; None where there were too many to count."""
        return len(self._counts) if self._whole else None

    def top(self, most: int) -> tuple[tuple[Any, int], ...]:
        """The values that come most often, with their counts."""
        found = sorted(self._counts.most_common(most), key=lambda pair: -pair[1])
        return tuple((f"{value[0]}…" if isinstance(value, tuple) else value, count) for value, count in found)


_SHORT = 200
