"""Where rows lie in memory: the parts of Arrow data by their addresses, a column of a table for each record batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quire.columns import Validity
from quire.errors import DecodeError
from quire.storage._block_table import Pieces
from quire.storage._memory import fetch, fetch_ranges, read_ahead
from quire.tensors import Framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


_ENDLESS = 1 << 62


class Check(Protocol):
    """Verifies the checksums of a record batch, column by column."""

    def __call__(self, columns: Sequence[int] | None) -> bool:
        """Verify some of the columns of the layout, or all; whether all of them need no other look."""

    def check_piece(self, flag: int) -> None:
        """Verify a piece of a large column."""

    def piece_place(self, flag: int) -> tuple[int, int]:
        """The address and the bytes of a piece."""


class AddressTable:
    """A row for each part of a record batch (a buffer's address, or its size), a column for each record batch.

    A record batch may come with a check, which runs when its rows are first gathered. No lock is needed: `count` grows
    last, and a check that has passed never becomes due again.

    The data of large columns is verified piece by piece, when a row of a piece is first gathered. For each part that
    has pieces in some record batch, `_pieces` has the bytes of a piece and the flag of the first piece, by record
    batch. Where a part has none, its only piece is endless and has the flag 0, which is always set.
    """

    __slots__ = (
        "_checks",
        "_due",
        "_flags",
        "_is_kept",
        "_keep",
        "_passed",
        "_passed_runs",
        "_piece_checks",
        "_pieces",
        "_runs",
        "_table",
        "asked",
        "count",
    )

    def __init__(self, parts: int) -> None:
        self._table = np.zeros((parts, 16), np.int64)
        self._due = np.zeros(16, np.bool_)
        self._keep: list[Any] = []
        self._checks: list[Check | None] = []
        self._piece_checks: dict[int, Check] = {}
        self._passed = 0
        self._pieces: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._runs: list[tuple[int, int]] = []
        self._passed_runs = 0
        self._flags: NDArray[np.uint8] = np.ones(1, np.uint8)
        self._is_kept = True
        self.asked: frozenset[int] = frozenset()  # the parts that whoever reads the rows has read ahead
        self.count = 0

    def remember(self, flags: NDArray[np.uint8], *, keep: bool) -> None:
        """Note which pieces were verified here; unless it is kept, every read verifies again."""
        self._flags, self._is_kept = flags, keep

    def add(
        self, parts: list[int], owner: Any, check: Check | None = None, pieces: Mapping[int, Pieces] | None = None
    ) -> None:
        """Another record batch; its owner keeps the memory there. `pieces` has flags for the pieces of its parts."""
        if self.count == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._due = np.concatenate([self._due, np.zeros_like(self._due)])
            more = len(self._due) // 2
            self._pieces = {
                part: (np.append(sizes, np.full(more, _ENDLESS)), np.append(firsts, np.zeros(more, np.int64)))
                for part, (sizes, firsts) in self._pieces.items()
            }
        for part, (first, end, size) in (pieces or {}).items():
            if part not in self._pieces:
                self._pieces[part] = np.full(len(self._due), _ENDLESS), np.zeros(len(self._due), np.int64)
            sizes, firsts = self._pieces[part]
            sizes[self.count], firsts[self.count] = size, first
            self._runs.append((first, end))
        self._table[:, self.count] = parts
        self._keep.append(owner)
        self._checks.append(check)
        if check is not None and pieces:
            self._piece_checks[self.count] = check
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

    def verify_pieces(
        self, part: int, batches: NDArray[np.int64], begins: NDArray[np.int64], sizes: NDArray[np.int64] | None = None
    ) -> None:
        """Verify the pieces of a part that have the bytes of rows: `sizes` bytes from `begins` on, or whole rows."""
        if self._passed_runs == len(self._runs) or part not in self._pieces:
            return
        of_batches, firsts = self._pieces[part]
        piece_sizes = of_batches[batches]
        numbers = firsts[batches] + begins // piece_sizes
        if sizes is not None:
            counts = np.where(sizes > 0, (begins + sizes - 1) // piece_sizes - begins // piece_sizes + 1, 0)
            inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            numbers, batches = np.repeat(numbers, counts) + inside, np.repeat(batches, counts)
        if self._is_kept:
            self._check_due(numbers, batches, is_asked=part in self.asked)
        else:
            for number, batch in dict(zip(numbers.tolist(), batches.tolist(), strict=True)).items():
                if number:
                    self._piece_checks[batch].check_piece(number)

    def _check_due(self, numbers: NDArray[np.int64], batches: NDArray[np.int64], *, is_asked: bool) -> None:
        """Verify the pieces that were not verified yet, and remember that."""
        marks = self._flags[numbers]
        if 0 not in marks.tobytes():  # which is much faster than marks.all()
            self._pass_runs()
            return
        due = marks == 0
        pieces = dict(zip(numbers[due].tolist(), batches[due].tolist(), strict=True))
        if not is_asked:
            self._read_ahead(pieces)
        for number, batch in pieces.items():
            self._piece_checks[batch].check_piece(number)
            self._flags[number] = 1

    def _read_ahead(self, pieces: Mapping[int, int]) -> None:
        """Ask the disk for all pieces at once. Left to itself, the system reads much more than a piece, one by one."""
        places = [self._piece_checks[batch].piece_place(number) for number, batch in pieces.items()]
        addresses, sizes = np.array(places, np.int64).T
        read_ahead(addresses, sizes)

    def _pass_runs(self) -> None:
        """Count the runs of pieces of which all were verified, up to the first that was not; none becomes due again."""
        passed = self._passed_runs
        while passed < len(self._runs) and self._flags[slice(*self._runs[passed])].all():
            passed += 1
        self._passed_runs = passed

    def row(self, part: int) -> NDArray[np.int64]:
        """One part of every record batch."""
        found: NDArray[np.int64] = self._table[part, : self.count]
        return found


class RowLocations:
    """Rows of a table: the record batch of each, its place there, and the framework of the tensors to make of them.

    Without a framework, tensors are of that which their field is typed with.
    """

    __slots__ = ("addresses", "batches", "framework", "places")

    def __init__(
        self,
        addresses: AddressTable,
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

    def slice(self, rows: slice) -> RowLocations:
        """A run of the rows."""
        return RowLocations(self.addresses, self.batches[rows], self.places[rows], self.framework)

    def part(self, part: int) -> NDArray[np.int64]:
        """One part of the record batch of each row."""
        row = self.addresses.row(part)
        return np.full(len(self), row[0]) if len(row) == 1 else row[self.batches]

    def fixed(self, part: int, width: int) -> NDArray[np.uint8]:
        """The bytes of rows that have so many each, a row each."""
        begins = self.places * width
        self.addresses.verify_pieces(part, self.batches, begins)
        return fetch(self.part(part) + begins, width)

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
            some = RowLocations(self.addresses, self.batches[marked], self.places[marked])
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
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        return self.bytes_at(part, starts, sizes), offsets

    def bytes_at(self, part: int, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
        """The bytes of all rows, concatenated: of the content of each, `sizes` bytes from `starts` on."""
        self.addresses.verify_pieces(part + 2, self.batches, starts, sizes)
        return fetch_ranges(self.part(part + 2) + starts, sizes, self.part(part + 1) - starts, starts)

    def spread(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> RowLocations:
        """The elements of lists: row i has so many of them from its start on."""
        before = np.cumsum(sizes) - sizes
        places = np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()), dtype=np.int64)
        return RowLocations(self.addresses, np.repeat(self.batches, sizes), places, self.framework)
