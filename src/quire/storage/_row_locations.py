"""The memory addresses of rows, and gathering rows by address.

Arrow describes a record batch by buffers. `AddressTable` keeps the addresses of the buffers of all open record batches
in one array: a line for each *part* of a layout (the address of a buffer, or the number of its elements), a column for
each record batch. `RowLocations` names rows by record batch and position. The address of a row is then plain
arithmetic on arrays, such as `table[part, batches] + positions * width`, whatever number of files the rows are in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from quire._lowlevel.addresses import open_memory, read_ahead, read_ranges_ahead
from quire.columns import Validity
from quire.errors import DecodeError, ShardError
from quire.storage._block_table import REGION_BYTES, Pieces, digest_function
from quire.tensors import Framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


_NO_PIECES = np.array([[1 << 62], [0], [0]], np.int64)
"""The size, the flag and the entry of the only piece of a record batch that is not verified in pieces."""


def sorted_unique(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the different numbers in ascending order, as np.unique does.

    The first call of np.unique imports numpy.ma, which takes about 9 ms before the first batch of a process.
    """
    numbers = np.sort(numbers)
    is_first = np.ones(len(numbers), bool)
    np.not_equal(numbers[1:], numbers[:-1], out=is_first[1:])
    return numbers[is_first]


class Check(Protocol):
    """Verifies the checksums of a record batch, column by column."""

    def __call__(self, columns: Sequence[int] | None) -> bool:
        """Verify some of the columns of the layout, or all; return whether every column is verified for good."""

    def due_ranges(self, columns: Sequence[int] | None) -> list[tuple[int, int]]:
        """Return the addresses and bytes of what a call would verify."""

    def check_piece(self, flag: int) -> None:
        """Verify a piece of a large column."""

    def piece_range(self, flag: int) -> tuple[int, int]:
        """Return the address and the number of bytes of a piece."""

    def piece_error(self, flag: int) -> ShardError:
        """Return the error about a piece whose checksum is wrong."""


class AddressTable:
    """The parts of record batches, and the checks that are still due for them.

    A record batch may come with a check, which runs when its rows are first gathered. Readers take no lock: `count`
    grows last, after everything else about a record batch is in place, and a check that has passed never becomes due
    again.

    The data of large columns is verified piece by piece, when a row of a piece is first gathered. For each part that
    has pieces in some record batch, `_pieces` holds the bytes of a piece, the flag of the first piece, and the address
    of its entry in the block table, by record batch. Where a record batch has none, its only piece is endless and has
    flag 0, which is always set.
    """

    __slots__ = (
        "_checks",
        "_due",
        "_flags",
        "_is_kept",
        "_owners",
        "_passed",
        "_passed_runs",
        "_piece_checks",
        "_pieces",
        "_runs",
        "_table",
        "count",
        "memory",
        "read_ahead_parts",
    )

    def __init__(self, parts: int) -> None:
        self._table = np.zeros((parts, 16), np.int64)
        self._due = np.zeros(16, np.bool_)
        self._owners: list[Any] = []
        self._checks: list[Check | None] = []
        self._piece_checks: dict[int, Check] = {}
        self._passed = 0
        self._pieces: dict[int, NDArray[np.int64]] = {}
        self._runs: list[tuple[int, int]] = []
        self._passed_runs = 0
        self._flags: NDArray[np.uint8] = np.ones(1, np.uint8)
        self._is_kept = True
        self.read_ahead_parts: frozenset[int] = frozenset()  # parts that the reader of the rows has read ahead
        self.memory = open_memory()
        self.count = 0

    def use_flags(self, flags: NDArray[np.uint8], *, keep: bool) -> None:
        """Record in `flags` which pieces were verified; without `keep`, every read verifies again."""
        self._flags, self._is_kept = flags, keep

    def add(
        self, parts: list[int], owner: Any, check: Check | None = None, pieces: Mapping[int, Pieces] | None = None
    ) -> None:
        """Add a record batch. Its owner keeps the memory alive; `pieces` has the flags of the pieces of its parts."""
        # Readers without a lock may hold the old arrays. Tables are therefore replaced by larger copies and never
        # changed in place, except for the columns after `count`, which nobody reads yet.
        if self.count == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._due = np.concatenate([self._due, np.zeros_like(self._due)])
            more = len(self._due) // 2
            self._pieces = {
                part: np.concatenate([table, np.tile(_NO_PIECES, more)], axis=1) for part, table in self._pieces.items()
            }
        for part, (first, end, size, entries) in (pieces or {}).items():
            if part not in self._pieces:
                self._pieces[part] = np.tile(_NO_PIECES, len(self._due))
            self._pieces[part][:, self.count] = size, first, entries.ctypes.data
            self.memory.add_buffer(entries)
            self._runs.append((first, end))
        self._table[:, self.count] = parts
        self._owners.append(owner)
        self.memory.add(owner)
        self._checks.append(check)
        if check is not None and pieces:
            self._piece_checks[self.count] = check
        self._due[self.count] = check is not None
        self.count += 1

    def verify(self, batches: NDArray[np.int64], columns: Sequence[int] | None) -> None:
        """Run the checks of these record batches that are due, for some of the columns of the layout or for all."""
        # The common case must be cheap: after everything was verified once, this is one comparison per call.
        count = self.count
        if self._passed == count:
            return
        due = self._due[batches]
        if not due.any():
            if not self._due[:count].any():
                self._passed = count
            return
        checks = {number: self._checks[number] for number in sorted_unique(batches[due]).tolist()}
        # One request to the disk for everything, instead of a page fault for each page.
        read_ranges_ahead([place for check in checks.values() if check for place in check.due_ranges(columns)])
        for number, check in checks.items():
            if check is not None and check(columns):
                self._due[number] = False

    def verify_pieces(
        self, part: int, batches: NDArray[np.int64], begins: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> None:
        """Verify the pieces of a part that hold the bytes of rows: `sizes` bytes from `begins` on."""
        if self._passed_runs == len(self._runs) or part not in self._pieces:
            return
        piece_sizes, firsts, _ = self._pieces[part][:, batches]
        # A row of `counts` pieces needs flags n, n + 1, ...: repeat n, and add the position within the row.
        counts = np.where(sizes > 0, (begins + sizes - 1) // piece_sizes - begins // piece_sizes + 1, 0)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = np.repeat(firsts + begins // piece_sizes, counts) + within
        self.check_pieces(part, numbers, np.repeat(batches, counts))

    def find_pieces(self, part: int, batches: NDArray[np.int64], begins: NDArray[np.int64]) -> _RowPieces | None:
        """Return the pieces of rows that do not cross from one piece into the next; None if all are verified."""
        if self._passed_runs == len(self._runs) or part not in self._pieces:
            return None
        # The number of a piece within its column is also the number of its entry in the block table.
        sizes, firsts, entries = self._pieces[part][:, batches]
        places = begins // sizes
        numbers = firsts + places
        due = self._find_due(numbers)
        if due is None:
            return None
        regions = self.memory.fetch((entries + places * REGION_BYTES)[due], REGION_BYTES)
        return _RowPieces(numbers, due, regions.view(np.uint64))

    def mark_verified(self, numbers: NDArray[np.int64]) -> None:
        """Set the flags of pieces that were verified by the caller."""
        if self._is_kept:
            self._flags[numbers] = 1

    def piece_error(self, batch: int, number: int) -> ShardError:
        """Return the error about a piece whose checksum is wrong."""
        return self._piece_checks[batch].piece_error(number)

    def _find_due(self, numbers: NDArray[np.int64]) -> NDArray[np.intp] | None:
        """Return the positions of the flags of pieces that are to be verified; None if there are none."""
        if not self._is_kept:
            return np.flatnonzero(numbers) if numbers.any() else None
        marks = self._flags[numbers]
        if 0 not in marks.tobytes():  # which is much faster than marks.all()
            self._count_passed_runs()
            return None
        due: NDArray[np.intp] = (marks == 0).nonzero()[0]
        return due

    def check_pieces(self, part: int, numbers: NDArray[np.int64], batches: NDArray[np.int64]) -> None:
        """Verify the pieces that have these flags and are due."""
        due = self._find_due(numbers)
        if due is None:
            return
        pieces = dict(zip(numbers[due].tolist(), batches[due].tolist(), strict=True))
        if self._is_kept and part not in self.read_ahead_parts:
            # Request all pieces at once: by page faults, the system would read them one by one, and much more of each.
            read_ranges_ahead([self._piece_checks[batch].piece_range(number) for number, batch in pieces.items()])
        for number, batch in pieces.items():
            self._piece_checks[batch].check_piece(number)
            if self._is_kept:
                self._flags[number] = 1

    def _count_passed_runs(self) -> None:
        """Count the leading runs of pieces that are verified completely; none of them becomes due again."""
        # Flags are shared with other processes, and set by any of them. Once all runs have passed, `find_pieces` and
        # `verify_pieces` return after one comparison, without looking at a flag.
        passed = self._passed_runs
        while passed < len(self._runs) and self._flags[slice(*self._runs[passed])].all():
            passed += 1
        self._passed_runs = passed

    def values(self, part: int) -> NDArray[np.int64]:
        """Return one part of every record batch."""
        line: NDArray[np.int64] = self._table[part, : self.count]
        return line


class RowLocations:
    """Rows by record batch and position in it, and the framework of the tensors that are made of them.

    Without a framework, tensors have that of their field's type.
    """

    __slots__ = ("addresses", "batches", "framework", "positions")

    def __init__(
        self,
        addresses: AddressTable,
        batches: NDArray[np.int64],
        positions: NDArray[np.int64],
        framework: Framework | None = None,
    ) -> None:
        self.addresses, self.batches, self.positions, self.framework = addresses, batches, positions, framework

    def __len__(self) -> int:
        return len(self.positions)

    def select(self, rows: slice | NDArray[np.int64]) -> RowLocations:
        """Return some of the rows."""
        return RowLocations(self.addresses, self.batches[rows], self.positions[rows], self.framework)

    def verify(self, columns: Sequence[int] | None = None) -> None:
        """Verify the checksums of some columns of the layout, by number, or of all."""
        self.addresses.verify(self.batches, columns)

    def part(self, part: int) -> NDArray[np.int64]:
        """Return one part of the record batch of each row."""
        values = self.addresses.values(part)
        return np.full(len(self), values[0]) if len(values) == 1 else values[self.batches]

    def gather_fixed(self, part: int, width: int) -> NDArray[np.uint8]:
        """Copy rows of `width` bytes each into an array of shape (rows, width)."""
        return FixedRows(self, part, width).copy(slice(None))

    def gather_bits(self, part: int) -> NDArray[np.bool_]:
        """Copy a bit of each row. The part is the address of the first bit, counted in bits."""
        # Addresses of bits: the byte is `at >> 3`, and the bit in it `at & 7`, the least significant one first.
        at = self.part(part) + self.positions
        shifted = self.addresses.memory.fetch(at >> 3, 1)[:, 0] >> (at & 7).astype(np.uint8)
        return (shifted & 1).astype(np.bool_)

    def validity(self, part: int) -> Validity:
        """Return which rows have a value; None if all have. Record batches without nulls have no bits."""
        if not self.addresses.values(part).any():
            return None
        validity = np.ones(len(self), np.bool_)
        with_bits = np.flatnonzero(self.part(part))
        if len(with_bits):
            validity[with_bits] = self.select(with_bits).gather_bits(part)
        return None if validity.all() else validity

    def read_offsets(self, part: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the content of each row begins, and its size. The part after the offsets is their limit."""
        # Offsets are consecutive int32, so 8 bytes at row i have both offset i and offset i + 1. They come from a file,
        # and are checked before they become addresses: reading outside of mapped memory would crash the process.
        pairs = self.addresses.memory.fetch(self.part(part) + self.positions * 4, 8).view(np.int32).astype(np.int64)
        starts, ends = pairs[:, 0], pairs[:, 1]
        if len(pairs) and ((starts < 0) | (ends < starts) | (ends > self.part(part + 1))).any():
            raise DecodeError("the content of a row is outside of its record batch.")
        return starts, ends - starts

    def gather_bytes(self, part: int) -> tuple[bytes, NDArray[np.int64]]:
        """Copy the bytes of all rows, concatenated, and return them with the offsets of rows.

        The part is that of the offsets; after it come the number of bytes, and the address of the first.
        """
        starts, sizes = self.read_offsets(part)
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        return self.gather_ranges(part, starts, sizes), offsets

    def gather_ranges(self, part: int, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
        """Copy `sizes` bytes from `starts` on of the content of each row, concatenated."""
        self.addresses.verify_pieces(part + 2, self.batches, starts, sizes)
        # `room` is what is left of the buffer after each start: small ranges are copied with more than they need, where
        # there is room for it, because copies of one size are faster.
        room = self.part(part + 1) - starts
        return self.addresses.memory.fetch_ranges(self.part(part + 2) + starts, sizes, room, starts)

    def items(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> RowLocations:
        """Return the locations of the items of lists: `sizes` items from `starts` on of each row."""
        # Item k of all is at starts[row] + (k - items before the row), for every row repeated by its size.
        before = np.cumsum(sizes) - sizes
        positions = np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()), dtype=np.int64)
        return RowLocations(self.addresses, np.repeat(self.batches, sizes), positions, self.framework)


class _RowPieces(NamedTuple):
    """The pieces of rows of one width: the flag of each row, the rows that are due, and their block table entries."""

    numbers: NDArray[np.int64]
    due: NDArray[np.intp]
    entries: NDArray[np.uint64]


class FixedRows:
    """Rows of one width, which are copied and verified a few at a time.

    A piece of several rows is verified before the first of them is copied. If a row is a piece of its own, its copy is
    verified instead. Reading a row twice from memory, for the checksum and for the copy, would take much longer.
    """

    __slots__ = ("_addresses", "_checksums", "_part", "_piece_numbers", "_row_numbers", "_rows", "_width")

    def __init__(self, rows: RowLocations, part: int, width: int) -> None:
        begins = rows.positions * width
        self._rows, self._part, self._width = rows, part, width
        self._addresses = rows.part(part) + begins
        self._checksums: list[int | None] | None = None
        self._piece_numbers: NDArray[np.int64] | None = None
        pieces = rows.addresses.find_pieces(part, rows.batches, begins)
        if pieces is None:
            return
        # A wide row is a piece of its own, and its copy is verified. Others are verified in place before the copy.
        is_row = pieces.entries[:, 1] == width  # not the last piece of a block, if it has padding
        due = pieces.due[is_row]
        # Flags that are due in one of two ways; the others are 0, which is the flag of no piece.
        self._row_numbers = np.zeros_like(pieces.numbers)
        self._row_numbers[due] = pieces.numbers[due]
        if len(due) < len(pieces.due):
            self._piece_numbers = pieces.numbers - self._row_numbers
        if len(due):
            self._checksums = pieces.entries[is_row, 2].tolist()
            if len(due) < len(rows):
                by_row = dict(zip(due.tolist(), self._checksums, strict=True))
                self._checksums = [by_row.get(row) for row in range(len(rows))]
            if part not in rows.addresses.read_ahead_parts:
                read_ahead(self._addresses[due], np.full(len(due), width))

    def copy(self, span: slice) -> NDArray[np.uint8]:
        """Copy some of the rows into an array of shape (rows, width)."""
        table, addresses = self._rows.addresses, self._addresses[span]
        if self._piece_numbers is not None:
            table.check_pieces(self._part, self._piece_numbers[span], self._rows.batches[span])
        if self._checksums is None:
            return table.memory.fetch(addresses, self._width)
        checksums = self._checksums[span]
        rows, damaged = table.memory.fetch_verified(addresses, self._width, checksums, digest_function())
        numbers = self._row_numbers[span]
        if damaged is not None:
            raise table.piece_error(int(self._rows.batches[span][damaged]), int(numbers[damaged]))
        table.mark_verified(numbers)
        return rows
