"""Which blocks of an open dataset were verified: remembered, and shared with the processes that read it."""

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

from quire.errors import DecodeError, OptionError, ShardError
from quire.storage._arrow_codec import ArrowCodec
from quire.storage._block_table import BlockTable, Pieces, count_nodes, digest_function
from quire.storage._memory import SharedMemory, read_ahead
from quire.storage._nested_codecs import DocumentCodec, DocumentsCodec

if TYPE_CHECKING:
    from numpy.typing import NDArray

Verify = Literal["first_touch", "always", "never"]
"""When data is compared with its checksums: when it is first read, at every read, or never."""
_LARGE = 1 << 16
"""Bytes of a region that is worth a call to read it ahead."""


def check_verify(verify: str) -> None:
    """Whether it is a value of the option `verify`."""
    if verify not in ("first_touch", "always", "never"):
        raise OptionError(f"verify={verify!r}: use 'first_touch', 'always' or 'never'.")


class VerifiedBlocks:
    """What was verified, in memory that is shared with forked and spawned processes.

    `flags` has a byte for each column of each block, without the pieces of large columns. `pieces` has a byte for each
    region of each block table, of which those of pieces are used; its first byte is that of no region, and is set.

    The memory is anonymous at first, which forked processes share. When the object is pickled, a temporary file takes
    its place at the same address, which the other process maps too. The file is removed with the object that made it.
    No descriptor stays open.
    """

    def __init__(self, slots: int, columns: int, regions: int = 0, shared: str | None = None) -> None:
        self._shape, self._path = (slots, columns, regions), None if shared is None else Path(shared)
        self._memory = SharedMemory(1 + regions + slots * columns, self._path)
        if not self._memory.is_file:
            self._path = None
        self.pieces: NDArray[np.uint8] = self._memory.array[: 1 + regions]
        self.pieces[0] = 1
        self.flags: NDArray[np.uint8] = self._memory.array[1 + regions :].reshape(slots, columns)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is None:
            with suppress(OSError):  # then the other process verifies for itself
                handle, name = tempfile.mkstemp(prefix="quire-verified-")
                os.close(handle)
                self._path = Path(name)
                weakref.finalize(self, _remove, self._path, os.getpid())
                self._memory.move_to(self._path)
        return VerifiedBlocks, (*self._shape, None if self._path is None else str(self._path))


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that was forked
        path.unlink(missing_ok=True)


class BlockCheck:
    """Verifies some blocks of a mapped file, each column of the layout when it is first needed.

    After `split`, the pieces of large columns are left out, and verified one by one by `check_piece`.
    """

    def __init__(
        self,
        table: BlockTable,
        blocks: range,
        nodes: Sequence[Sequence[int]],
        content: pa.Buffer,
        fail: Callable[[str], ShardError],
    ) -> None:
        self._table, self._blocks, self._nodes, self._fail = table, blocks, nodes, fail
        self._buffer, self._view = content, memoryview(content)
        self._flags: Any = np.zeros(len(nodes), np.uint8)
        self._is_kept = True
        self._pieces: dict[int, int] = {}
        self._first_flag = 0
        self._digest = digest_function()

    def split(self, parts: Sequence[int], data: Sequence[tuple[int, int]], first_flag: int) -> dict[int, Pieces]:
        """Leave out the pieces of columns from now on: for each part of the layout that has some, which flags they use.

        `parts` are the addresses of the block, as the layout locates them; `data` are the parts that are read piece by
        piece, and the bytes of a row of each; `first_flag` is the flag of the first region of the file.
        """
        flags, self._first_flag = {}, first_flag
        for part, width in data:
            pieces = self._table.pieces_at(parts[part] - self._buffer.address, width)
            if pieces is not None:
                self._pieces[pieces.end] = pieces.first
                flags[part] = Pieces(pieces.first + first_flag, pieces.end + first_flag, pieces.size)
        return flags

    def check_piece(self, flag: int) -> None:
        """Verify the piece that has a flag."""
        region = flag - self._first_flag
        offset, size, expected = self._table.region_list[region]
        if self._digest(self._view[offset : offset + size]) != expected:
            raise self._fail(self._table.describe(region))

    def piece_place(self, flag: int) -> tuple[int, int]:
        """The address and the bytes of the piece that has a flag."""
        offset, size, _ = self._table.region_list[flag - self._first_flag]
        return self._buffer.address + offset, size

    def widen(self, blocks: range) -> None:
        """Verify more blocks, which are remembered as one."""
        self._blocks = blocks

    def remember(self, flags: NDArray[np.uint8], *, keep: bool) -> None:
        """Note what was verified here; unless it is kept, every read verifies again."""
        self._flags, self._is_kept = flags, keep

    def __call__(self, columns: Sequence[int] | None) -> bool:
        for column in range(len(self._nodes)) if columns is None else columns:
            if self._is_kept and self._flags[column]:
                continue
            for block in self._blocks:
                self._check(block, self._nodes[column])
            self._flags[column] = 1
        return self._is_kept and bool(self._flags.all())

    def _check(self, block: int, nodes: Sequence[int]) -> None:
        large = self._table.large_columns(block, nodes, _LARGE, self._pieces)
        if large:  # one request to the disk, also where pages are only read as they are asked for
            places = self._table.columns[block, large].astype(np.int64)
            read_ahead(places[:, 0] + self._buffer.address, places[:, 1])
        try:
            for node in nodes:
                self._table.check_column(self._view, block, node, self._pieces)
        except DecodeError as error:
            raise self._fail(str(error)) from error


def layout_nodes(codecs: Sequence[ArrowCodec], schema: pa.Schema) -> list[list[int]]:
    """The field nodes of an Arrow file that each form of a layout reads."""
    fields = list(schema)
    return [_nodes_of(codec, *_find(codec, fields, 0)) for codec in codecs]


def _find(codec: ArrowCodec, fields: Sequence[pa.Field], first: int) -> tuple[pa.DataType, int]:
    """The type of the field of a form, and the number of its first node."""
    for field in fields:
        if field.name == codec.field.name:
            return field.type, first
        first += count_nodes(field.type)
    raise DecodeError(f"{codec.path}: the file has no column for it")


def _nodes_of(codec: ArrowCodec, arrow_type: pa.DataType, first: int) -> list[int]:
    if isinstance(codec, DocumentsCodec):
        return [first, *_nodes_of(codec.item, arrow_type.value_type, first + 1)]
    if isinstance(codec, DocumentCodec):
        children = [arrow_type.field(i) for i in range(arrow_type.num_fields)]
        inner = [_nodes_of(child, *_find(child, children, first + 1)) for child in codec.codecs]
        return [first, *(node for nodes in inner for node in nodes)]
    return list(range(first, first + count_nodes(arrow_type)))
