"""Where rows lie in memory: the parts of Arrow data by their addresses, a column of a table for each record batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quire.columns import Validity
from quire.errors import DecodeError
from quire.storage._memory import fetch, fetch_texts
from quire.tensors import Framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Check(Protocol):
    """Verifies the checksums of a record batch, column by column."""

    def __call__(self, columns: Sequence[int] | None) -> bool:
        """Verify some of the columns of the layout, or all; whether all of them need no other look."""


class Addresses:
    """A row for each part of a record batch (a buffer's address, or its size), a column for each record batch.

    A record batch may come with a check, which runs when its rows are first gathered. No lock is needed: `count` grows
    last, and a check that has passed never becomes due again.
    """

    __slots__ = ("_checks", "_due", "_keep", "_passed", "_table", "count")

    def __init__(self, parts: int) -> None:
        self._table = np.zeros((parts, 16), np.int64)
        self._due = np.zeros(16, np.bool_)
        self._keep: list[Any] = []
        self._checks: list[Check | None] = []
        self._passed = 0
        self.count = 0

    def add(self, parts: list[int], owner: Any, check: Check | None = None) -> None:
        """Another record batch; its owner keeps the memory there."""
        if self.count == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._due = np.concatenate([self._due, np.zeros_like(self._due)])
        self._table[:, self.count] = parts
        self._keep.append(owner)
        self._checks.append(check)
        self._due[self.count] = check is not None
        self.count += 1

    def verify(self, batches: NDArray[np.int64], columns: Sequence[int] | None) -> None:
        """Run the checks of these record batches that are due, for some of the columns of the layout or for all."""
        count = self.count
        if self._passed == count:
            return
        due = self._due[batches]
        if not due.any():
            if not self._due[:count].any():
                self._passed = count
            return
        for number in np.unique(batches[due]).tolist():
            check = self._checks[number]
            if check is not None and check(columns):
                self._due[number] = False

    def row(self, part: int) -> NDArray[np.int64]:
        """One part of every record batch."""
        found: NDArray[np.int64] = self._table[part, : self.count]
        return found


class Rows:
    """Rows of a table: the record batch of each, its place there, and the framework of the tensors to make of them.

    Without a framework, tensors are of that which their field is typed with.
    """

    __slots__ = ("addresses", "batches", "framework", "places")

    def __init__(
        self,
        addresses: Addresses,
        batches: NDArray[np.int64],
        places: NDArray[np.int64],
        framework: Framework | None = None,
    ) -> None:
        self.addresses, self.batches, self.places, self.framework = addresses, batches, places, framework

    def __len__(self) -> int:
        return len(self.places)

    def verify(self, columns: Sequence[int] | None = None) -> None:
        """Verify what is about to be gathered: some of the columns of the layout, by their number, or all."""
        self.addresses.verify(self.batches, columns)

    def slice(self, rows: slice) -> Rows:
        """A run of the rows."""
        return Rows(self.addresses, self.batches[rows], self.places[rows], self.framework)

    def part(self, part: int) -> NDArray[np.int64]:
        """One part of the record batch of each row."""
        row = self.addresses.row(part)
        return np.full(len(self), row[0]) if len(row) == 1 else row[self.batches]

    def fixed(self, part: int, width: int) -> NDArray[np.uint8]:
        """The bytes of rows that have so many each, a row each."""
        return fetch(self.part(part) + self.places * width, width)

    def spans(self, part: int, width: int, counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where rows of so many bytes begin, and the bytes of so many rows from each on."""
        return self.part(part) + self.places * width, counts * width

    def bits(self, part: int) -> NDArray[np.bool_]:
        """A bit of each row; the part is the address of the first one, counted in bits."""
        at = self.part(part) + self.places
        shifted = fetch(at >> 3, 1)[:, 0] >> (at & 7).astype(np.uint8)
        return (shifted & 1).astype(np.bool_)

    def validity(self, part: int) -> Validity:
        """Which rows have a value; None where all have. A record batch without nulls has no such bits."""
        if not self.addresses.row(part).any():
            return None
        there = np.ones(len(self), np.bool_)
        marked = np.flatnonzero(self.part(part))
        if len(marked):
            some = Rows(self.addresses, self.batches[marked], self.places[marked])
            there[marked] = some.bits(part)
        return None if there.all() else there

    def content(self, part: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the content of each row begins, and its size; behind the part of the offsets is that of their limit."""
        pairs = fetch(self.part(part) + self.places * 4, 8).view(np.int32).astype(np.int64)
        starts, ends = pairs[:, 0], pairs[:, 1]
        if len(pairs) and ((starts < 0) | (ends < starts) | (ends > self.part(part + 1))).any():
            raise DecodeError("a row's content lies outside of its record batch.")
        return starts, ends - starts

    def texts(self, part: int) -> tuple[bytes, NDArray[np.int64]]:
        """The bytes of all rows one behind the other, and where each begins and ends.

        The part is that of the offsets; behind it are how many bytes there are, and the address of the first.
        """
        starts, sizes = self.content(part)
        room = self.part(part + 1) - starts
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        return fetch_texts(self.part(part + 2) + starts, sizes, room, starts), offsets

    def spread(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Rows:
        """The elements of lists: row i has so many of them from its start on."""
        before = np.cumsum(sizes) - sizes
        places = np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()), dtype=np.int64)
        return Rows(self.addresses, np.repeat(self.batches, sizes), places, self.framework)
