"""Verifying the blocks of open shards against their checksums, once, for all processes that read a dataset.

Opening a shard verifies its frame (`quire.storage._block_table`). The columns of a block are verified when one of its
rows is first read, by a `BlockCheck`; the pieces of large columns one by one. `VerifiedBlocks` remembers what was
verified in shared memory, so the workers of a data loader do not verify the same data again.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from quire._lowlevel.addresses import SharedMemory
from quire.errors import DecodeError, OptionError, ShardError
from quire.storage._block_table import BlockTable, Pieces, digest_function

if TYPE_CHECKING:
    from numpy.typing import NDArray

Verify = Literal["first_touch", "always", "never"]
"""When data is compared with its checksums: when it is first read, at every read, or never."""


def check_verify(verify: str) -> None:
    """Raise an error unless this is a value of the option `verify`."""
    if verify not in ("first_touch", "always", "never"):
        raise OptionError(f"verify={verify!r}: use 'first_touch', 'always' or 'never'.")


class VerifiedBlocks:
    """Flags of what was verified, in memory that is shared with forked and spawned processes.

    `flags` has a byte for each column of each block, without the pieces of large columns. `pieces` has a byte for each
    region of each block table, of which only those of pieces are used; byte 0 belongs to no region, and is set. Bytes
    only ever change from 0 to 1, so processes need no lock: at worst, two of them verify the same data.

    The memory is anonymous at first, which forked processes share. When the object is pickled, for a spawned process,
    a temporary file replaces it at the same address, and the other process maps that file. The object that created the
    file removes it. No descriptor stays open.
    """

    def __init__(self, slots: int, columns: int, regions: int = 0, shared: str | None = None) -> None:
        self._shape, self._path = (slots, columns, regions), None if shared is None else Path(shared)
        self._memory = SharedMemory(1 + regions + slots * columns, self._path)
        if not self._memory.is_file:
            self._path = None
        self.pieces: NDArray[np.uint8] = self._memory.array[: 1 + regions]
        self.pieces[0] = 1  # the flag of rows that have no piece to verify
        self.flags: NDArray[np.uint8] = self._memory.array[1 + regions :].reshape(slots, columns)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is None:
            with suppress(OSError):  # without a file, the other process verifies for itself
                # Forked children have this object, too. Only the process that created the file removes it.
                handle, name = tempfile.mkstemp(prefix="quire-verified-")
                os.close(handle)
                self._path = Path(name)
                weakref.finalize(self, _remove, self._path, os.getpid())
                self._memory.move_to(self._path)
        return VerifiedBlocks, (*self._shape, None if self._path is None else str(self._path))


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process
        path.unlink(missing_ok=True)


class BlockCheck:
    """Verifies blocks of a mapped file, each column of the layout when it is first needed.

    `nodes` are the Arrow field nodes of each column of the layout. After `split`, the pieces of large columns are left
    out, and `check_piece` verifies them one by one. `make_error` returns the error for a reason. `content` are the
    bytes of the file from the offset `base` on.
    """

    def __init__(
        self,
        table: BlockTable,
        blocks: range,
        nodes: Sequence[Sequence[int]],
        content: pa.Buffer,
        make_error: Callable[[str], ShardError],
        base: int = 0,
    ) -> None:
        self._table, self._blocks, self._nodes, self._make_error = table, blocks, nodes, make_error
        self._buffer, self._view, self._base = content, memoryview(content), base
        self._address = content.address - base  # of the first byte of the file
        self._flags: Any = np.zeros(len(nodes), np.uint8)
        self._is_kept = True
        self._pieces: dict[int, int] = {}
        self._first_flag = 0
        self._digest = digest_function()

    def split(self, parts: Sequence[int], data: Sequence[tuple[int, int]], first_flag: int) -> dict[int, Pieces]:
        """Leave out the pieces of columns from now on, and return their flags for each part that has some.

        `parts` are the addresses of the block, as the layout locates them; `data` are the parts that may be read piece
        by piece, and the bytes of a row of each; `first_flag` is the flag of the first region of the file.
        """
        # A column is known by the address of its data, which is the offset in the file plus that of the mapping. Its
        # regions end at `pieces.end`: that is how `BlockTable.check_column` finds what to leave out.
        flags, self._first_flag = {}, first_flag
        for part, width in data:
            pieces = self._table.pieces_at(parts[part] - self._address, width)
            if pieces is not None:
                self._pieces[pieces.end] = pieces.first
                flags[part] = pieces._replace(first=pieces.first + first_flag, end=pieces.end + first_flag)
        return flags

    def check_piece(self, flag: int) -> None:
        """Verify the piece that has a flag."""
        offset, size, expected = self._table.regions[flag - self._first_flag].tolist()
        begin = offset - self._base
        if self._digest(self._view[begin : begin + size]) != expected:
            raise self.piece_error(flag)

    def piece_error(self, flag: int) -> ShardError:
        """Return the error about a piece whose checksum is wrong."""
        return self._make_error(self._table.describe(flag - self._first_flag))

    def piece_range(self, flag: int) -> tuple[int, int]:
        """Return the address and the number of bytes of the piece that has a flag."""
        offset, size, _ = self._table.regions[flag - self._first_flag].tolist()
        return self._address + offset, size

    def use_flags(self, flags: NDArray[np.uint8], *, keep: bool, blocks: range | None = None) -> None:
        """Record in `flags` which columns were verified; without `keep`, every read verifies again.

        `blocks` are all blocks that share these flags, and are verified together.
        """
        self._flags, self._is_kept, self._blocks = flags, keep, self._blocks if blocks is None else blocks

    def new_flags(self) -> NDArray[np.uint8]:
        """Return flags of this block alone, none of which is set."""
        return np.zeros(len(self._nodes), np.uint8)

    def __call__(self, columns: Sequence[int] | None) -> bool:
        # The flag is set after all blocks and nodes of the column: if one of them is damaged, the next read fails, too.
        try:
            for column in self._due_columns(columns):
                for block in self._blocks:
                    for node in self._nodes[column]:
                        self._table.check_column(self._view, block, node, self._pieces, self._base)
                self._flags[column] = 1
        except DecodeError as error:
            raise self._make_error(str(error)) from error
        return self._is_kept and bool(self._flags.all())

    def due_ranges(self, columns: Sequence[int] | None) -> list[tuple[int, int]]:
        """Return the addresses and bytes of what a call would verify."""
        # The caller requests all of them from the disk at once. Otherwise each page would be read when it is touched.
        nodes = [node for column in self._due_columns(columns) for node in self._nodes[column]]
        ranges = [
            place
            for block in self._blocks
            for place in self._table.column_ranges(block, nodes, self._pieces)
            if place[1]
        ]
        return [(self._address + offset, size) for offset, size in ranges]

    def _due_columns(self, columns: Sequence[int] | None) -> list[int]:
        every = range(len(self._nodes)) if columns is None else columns
        return [column for column in every if not (self._is_kept and self._flags[column])]


class JoinedCheck(BlockCheck):
    """Verifies a block whose columns are in several files: those of a shard, and of its side files.

    The check of each file has no nodes for the columns of the others.
    """

    def __init__(self, checks: Sequence[BlockCheck]) -> None:
        self._checks, self._nodes, self._is_kept = checks, checks[0]._nodes, True
        self.use_flags(self.new_flags(), keep=True)

    def use_flags(self, flags: NDArray[np.uint8], *, keep: bool, blocks: range | None = None) -> None:
        # The flag of a column says that all files were looked at, so no file may keep flags of its own.
        self._flags, self._is_kept = flags, keep
        for check in self._checks:
            check.use_flags(check.new_flags(), keep=False, blocks=blocks)

    def split(self, parts: Sequence[int], data: Sequence[tuple[int, int]], first_flag: int) -> dict[int, Pieces]:
        return {}  # every column is verified as a whole

    def __call__(self, columns: Sequence[int] | None) -> bool:
        for column in self._due_columns(columns):
            for check in self._checks:
                check([column])
            self._flags[column] = 1
        return self._is_kept and bool(self._flags.all())

    def due_ranges(self, columns: Sequence[int] | None) -> list[tuple[int, int]]:
        due = self._due_columns(columns)
        return [place for check in self._checks for place in check.due_ranges(due)] if due else []
