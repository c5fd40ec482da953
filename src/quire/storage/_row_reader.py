"""Reading rows of a dataset by number: which shards they are in, which shards are open, and copies of rows.

A row number becomes a memory address in three steps. A `RangeIndex` finds the *unit* that the row is in: what is opened
at a time, which is a shard, or a block of a remote shard. If the unit is not open, it is mapped, and its record batches
are appended to the `AddressTable`: all record batches of open units have consecutive *virtual* row numbers, in the
order in which units were opened. A second `RangeIndex` finds the record batch of a virtual row number, and the codecs
of the layout copy the rows by address (`quire.storage._row_locations`).
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire._lowlevel.forks import at_fork, no_fork
from quire.columns import Columns
from quire.errors import DecodeError, OptionError, ShardError
from quire.files import display_uri
from quire.schema import parse_path
from quire.storage._arrow_codec import NumberCodec
from quire.storage._block_table import Pieces, count_regions
from quire.storage._layout import Layout, layout_fingerprint
from quire.storage._live_rows import LiveRows, RowSelection, count_before, rows_of_shard
from quire.storage._manifest import Shard
from quire.storage._remote_blocks import RemoteBlocks, read_columns
from quire.storage._row_locations import RowLocations, sorted_unique
from quire.storage._sequences import (
    ElementRanges,
    element_dtype,
    find_codec,
    has_lengths,
    lengths_at,
    locate_elements,
)
from quire.storage._shard_reader import (
    Block,
    DamagedCopyError,
    ShardReader,
    read_block_rows,
    read_table,
    shard_errors,
)
from quire.storage._verification import VerifiedBlocks
from quire.tensors import Framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.files import BlockRange

_LARGE = 16 << 20
"""The average size of shards from which on parts of them are read ahead."""
_SLOTS = 64
"""The number of flags for the blocks of a copy in the cache, whose number is not known before it is opened."""
_MAX_OPEN = 16_384
"""Before more shards are opened, all are closed: the system limits the number of mappings of a process."""
_MAX_DECODED = 256 << 20
"""The bytes of decoded blocks of remote shards that are kept in memory. Those that were used last stay."""
_MAX_CLOSED = 64
"""The number of closed blocks, besides as many as are open, after which their memory is given back."""
_FEW = 8
"""Up to this number of ranges, comparing with every start is fastest."""
_MAX_PASSES, _MAX_STEPS = 4, 16
"""A table pays while ranges have similar lengths: few starts within a step, and few steps within a range."""


class RowReader:
    """Copies rows of a dataset by position. A shard is opened when one of its rows is first read.

    This class is for other packages of quire, which get it as `dataset._row_reader`; it is not public. Many threads may
    use one reader. A lock protects the list of open shards; copying rows takes none (see `AddressTable`).

    `shards` are the shards that have rows, in order, and `rows` the ascending numbers of the rows that a filter
    selected, those that were not deleted, or None for all. `verified` are the flags of another reader of the same
    shards and columns.
    """

    _opened: NDArray[np.int64]
    """For each unit, the virtual number of its first row; -1 if it is not open."""
    _batch_starts: NDArray[np.int64]
    """The virtual numbers of the first rows of all open record batches."""
    _virtual_rows: int
    _cached_bytes: int
    """The size of open copies in the cache."""
    _open_units: OrderedDict[int, _OpenUnit]
    """Open blocks of remote shards. The ones that were used last are at the end."""
    _decoded_bytes: int
    _mapped_bytes: int
    _closed: int
    """The number of closed blocks whose memory the address table still holds."""

    def __init__(
        self,
        shard_reader: ShardReader,
        shards: tuple[Shard, ...],
        rows: RowSelection | None = None,
        verified: VerifiedBlocks | None = None,
    ) -> None:
        self.shard_reader, self.shards, self.rows = shard_reader, shards, rows
        self.folder, self.layout = shard_reader.folder, shard_reader.layout
        self.starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum([s.rows for s in shards], dtype=np.int64)])
        """For each shard, the number of its first row; at the end, the number of all stored rows."""
        self._shard_index = RangeIndex(self.starts[:-1], int(self.starts[-1]))
        # Units: shards, or blocks of remote ones. The number of blocks of each shard is known from the log, and their
        # rows when the directory of the shard was read; until then, all its units begin with the shard.
        self._blocks = RemoteBlocks(shard_reader, shards)
        self._has_blocks: NDArray[np.bool_] = np.array([self._blocks.covers(shard) for shard in shards], np.bool_)
        self._is_known = ~self._has_blocks
        counts = [
            max(shard.blocks or len(shard.groups), 1) if covered else 1
            for shard, covered in zip(shards, self._has_blocks.tolist(), strict=True)
        ]
        self._first_units: NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._first_units_list: list[int] = self._first_units.tolist()  # finding one unit is faster in a list
        self._unit_starts: NDArray[np.int64] = np.repeat(self.starts[:-1], counts)
        self._unit_index = self._shard_index
        # Flags of verified data: one per block and column, and one per piece of a mapped shard. `_slots` and
        # `_piece_flags` have the first ones of each shard. Flag 0 of the pieces stands for "nothing to verify".
        tables = [shard.table if self._can_map(shard) else None for shard in shards]
        slots = [_SLOTS if table is None else shard.blocks for shard, table in zip(shards, tables, strict=True)]
        # A block of a remote shard may be downloaded again, so each process verifies it when it opens it.
        slots = [0 if covered else slot for slot, covered in zip(slots, self._has_blocks.tolist(), strict=True)]
        self._slots: NDArray[np.int64] = np.concatenate([[0], np.cumsum(slots, dtype=np.int64)])
        regions = [
            0 if table is None or shard.sides else count_regions(table[1])
            for shard, table in zip(shards, tables, strict=True)
        ]
        self._piece_flags: NDArray[np.int64] = np.cumsum([1, *regions], dtype=np.int64)
        self._data_parts = [part for codec in self.layout.codecs for part in codec.data_parts()]
        self.verified = verified or VerifiedBlocks(int(self._slots[-1]), len(self.layout.codecs), sum(regions))
        self._block_starts: NDArray[np.int64] | None = None
        self._damages = 0  # of copies in the cache that were found so far
        self._lock = threading.RLock()
        self._close_all()
        _alive.add(self)

    def __len__(self) -> int:
        return int(self.starts[-1]) if self.rows is None else len(self.rows)

    @property
    def nbytes(self) -> int:
        """The size of all shards in bytes."""
        return sum(file.bytes for shard in self.shards for file in shard.files)

    def _can_map(self, shard: Shard) -> bool:
        return shard.format == "arrow" and self.folder.local_path(shard.name) is not None

    @property
    def is_mapped(self) -> bool:
        """Whether rows are read from the shards themselves, without a copy in the cache."""
        return not self.shards or self._can_map(self.shards[0])

    @property
    def reads_blocks(self) -> bool:
        """Whether shards are remote, and read by blocks."""
        return bool(self._has_blocks.any())

    # --- rows

    def gather(self, rows: NDArray[np.int64], framework: Framework | None = None) -> Columns:
        """Copy the columns of rows by position, with tensors of `framework`, or of those that fields name."""
        [columns] = self.gather_parts([rows], framework)
        return columns

    def gather_parts(
        self, parts: Sequence[NDArray[np.int64]], framework: Framework | None = None, without: str | None = None
    ) -> Iterator[Columns]:
        """Yield the columns of several parts of rows, each when it is needed; the shards are opened at once.

        The column of the field `without` is left out.
        """
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        locations = self.locate(rows)
        locations.framework = framework
        return self._gather_located(locations, [*map(len, parts)], rows, without)

    def _gather_located(
        self, locations: RowLocations, sizes: Sequence[int], rows: NDArray[np.int64], without: str | None
    ) -> Iterator[Columns]:
        """Yield parts of rows whose shards are open; errors name the shard."""
        while True:
            try:
                yield from self.layout.gather_parts(locations, sizes, without)
            except DamagedCopyError as error:
                # Columns are verified before the first part is yielded. The damaged copy was removed: write another.
                again = self._locate_again(rows, error)
                again.framework, locations = locations.framework, again
            except DecodeError:
                self._find_damaged_shard(rows, lambda part: self.layout.gather(self.locate(rows[part])))
                raise
            else:
                return

    def _locate_again(self, rows: NDArray[np.int64], error: DamagedCopyError) -> RowLocations:
        """Open the shards of rows again after a damaged copy was removed from the cache; raise the error at some point.

        Every copy may be damaged, and one is found at a time. A disk that damages them again and again is an error.
        """
        with self._lock:
            self._damages += 1
            if self._damages > 2 * len(self._unit_starts):
                raise error
            self._close_shards(rows)
            return self.locate(rows)

    def _find_damaged_shard(self, rows: NDArray[np.int64], read: Callable[[NDArray[np.bool_]], object]) -> None:
        """Raise an error that names the damaged shard: codecs do not know which shard a row is in.

        `read` is called for the rows of each shard, of which it reads those that a mask selects.
        """
        numbers = self.shards_of(rows)
        for number in np.unique(numbers).tolist():
            with shard_errors(self.folder, self.shards[number]):
                read(numbers == number)

    def read_parts(self) -> Iterator[Columns]:
        """Yield the columns of all rows in order, in parts of at most about 16 MiB.

        Shards are read from their beginning; row groups and record batches in which a filter matches no row are not.
        The cache is not used, except for blocks of remote shards.
        """
        for start, shard in zip(self.starts.tolist(), self.shards, strict=False):
            for _, columns in read_columns(self.shard_reader, shard, rows_of_shard(self.rows, start, shard)):
                yield columns

    # --- lists and tensors of any length

    def row_lengths(self, path: str) -> NDArray[np.int64]:
        """Return the length of each row at a path: of a list, or of the first axis of a tensor; 0 without a value.

        The block tables of shards of format 2 have the lengths of lists, and of tensors of any shape. Of other shards,
        the column is read. A field of whole numbers has the lengths itself.
        """
        parts = parse_path(path)
        self.layout.schema.resolve(parts)
        codec, _ = find_codec(self.layout, parts)
        if not has_lengths(codec) and not (isinstance(codec, NumberCodec) and codec.number_type is int):
            raise OptionError(
                f"{path!r}: {codec.field} has no length. Lists, tensors with an axis, and whole numbers have one."
            )
        schema = self.layout.schema.document_type.document_schema()
        whole, layout = layout_fingerprint(schema), Layout(schema, paths=[parts])
        reader = ShardReader(self.folder, layout, self.shard_reader.cache, self.shard_reader.verify)
        lengths = [np.zeros(0, np.int64)]
        for shard in self.shards:
            table = read_table(self.folder, shard) if shard.layout == whole else None
            known = None if table is None else table.row_lengths(path)
            lengths += [lengths_at(layout, parts, batch) for batch in reader.read(shard)] if known is None else [known]
        in_shards = np.concatenate(lengths)
        return in_shards if self.rows is None else in_shards[self.stored_rows(np.arange(len(self)))]

    def block_starts(self) -> NDArray[np.int64]:
        """Return the first row of each block (record batch or row group) of all shards; at the end, their number.

        Rows are counted by position: if the dataset is filtered, a block in which no row was selected has none. They
        are read once, from the log, the block tables (one read of a range for each shard) or the footers of shards.
        """
        if self._block_starts is None:
            sizes: list[int] = []
            with self._lock:
                self._learn_units(np.arange(len(self.shards)))
            for number, shard in enumerate(self.shards):
                rows = self._blocks.rows(number) or read_block_rows(self.folder, shard) or (shard.rows,)
                self._check_block_rows(number, rows)
                sizes += rows
            starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
            self._block_starts = self.count_before(starts)
        return self._block_starts

    def block_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of each block of `block_starts`; of a remote one, those that are downloaded."""
        self.block_starts()
        sizes: list[int] = []
        for number, shard in enumerate(self.shards):
            if self._has_blocks[number]:
                units = range(int(self._first_units[number]), int(self._first_units[number + 1]))
                sizes += [self.unit_bytes(unit) for unit in units]
                continue
            table = read_table(self.folder, shard)
            rows = read_block_rows(self.folder, shard) or (shard.rows,)
            known = None if table is None else table.blocks[:, 2].tolist()
            sizes += known or [shard.bytes * count // max(shard.rows, 1) for count in rows]
        return np.array(sizes, np.int64)

    def element_dtype(self, path: str) -> np.dtype[Any]:
        """Return the dtype of the elements of a list of numbers, or of tensors with one axis; else raise an error."""
        return element_dtype(find_codec(self.layout, parse_path(path))[0], path)

    def locate_elements(
        self,
        path: str,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> ElementRanges:
        """Locate `sizes` elements from `starts` on of rows by position, which must have these lengths."""
        codec, column = find_codec(self.layout, parse_path(path))
        locations = self.locate(rows)
        while True:
            try:
                locations.verify([column])
                return locate_elements(codec, locations, starts, sizes, lengths)
            except DamagedCopyError as error:
                locations = self._locate_again(rows, error)
            except DecodeError:
                self._find_damaged_shard(
                    rows,
                    lambda part: locate_elements(
                        codec, self.locate(rows[part]), starts[part], sizes[part], lengths[part]
                    ),
                )
                raise

    def read_ahead(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Let the system read ranges of rows before they are needed, of shards that are mapped as they are.

        After the first such call, the system reads nothing else of shards that are opened but what is asked for. Small
        shards are left alone: all would have to be opened, and there is little in them that is read in vain.
        """
        if self.is_filtered or not self.is_mapped or self.nbytes < _LARGE * len(self.shards) or not len(begins):
            return
        self.shard_reader.reads_ahead, self._addresses.read_ahead_parts = True, self.layout.read_ahead_parts
        with self._lock:
            edges = self.locate(np.concatenate([begins, ends - 1]))  # in one call: another one may close shards
            lengths = np.append(self._batch_starts[1:], self._virtual_rows) - self._batch_starts
        first, last = edges.select(slice(len(begins))), edges.select(slice(len(begins), None))
        # Deleted rows in between are read as well: they are few, and one range is read faster than two.
        spans = self.stored_rows(ends - 1) - self.stored_rows(begins) + 1
        counts = np.minimum(spans, lengths[first.batches] - first.positions)
        self.layout.read_ahead(first, counts)
        across = np.flatnonzero(first.batches != last.batches)  # ranges that end in another record batch
        if len(across):
            rest = RowLocations(edges.addresses, last.batches[across], np.zeros(len(across), np.int64))
            self.layout.read_ahead(rest, last.positions[across] + 1)

    def stored_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers in the shards of rows by position, which differ if rows were deleted or filtered."""
        return rows if self.rows is None else self.rows[rows]

    def count_before(self, stored: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of rows of the dataset before stored rows."""
        return count_before(self.rows, stored)

    @property
    def is_filtered(self) -> bool:
        """Whether a filter selected the rows."""
        return self.rows is not None and not isinstance(self.rows, LiveRows)

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the shards that rows are in."""
        return self._shard_index.find(self.stored_rows(rows))

    def is_open(self, shards: NDArray[np.int64]) -> bool:
        """Return whether all of these shards are open."""
        firsts, ends = self._first_units[shards], self._first_units[shards + 1]
        return all((self._opened[first:end] >= 0).all() for first, end in zip(firsts, ends, strict=True))

    def locate(self, rows: NDArray[np.int64]) -> RowLocations:
        """Return the locations of rows by position; the units that they are in are opened."""
        with self._lock:
            rows = self.stored_rows(rows)
            units = self._find_units(rows)
            if self.reads_blocks:
                self._open_blocks(sorted_unique(units))
            elif not (self._opened[units] >= 0).all():
                self._open_shards(sorted_unique(units))
            # Both subtractions are per row: the row's place in its unit, then its place in its record batch.
            virtual = self._opened[units] + rows - self._unit_starts[units]
            batches = self._batch_index.find(virtual)
            return RowLocations(self._addresses, batches, virtual - self._batch_starts[batches])

    # --- units

    def units_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the units that rows by position are in: shards, or blocks of remote shards."""
        with self._lock:
            return self._find_units(self.stored_rows(rows))

    def _find_units(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._is_known.all():
            shards = self._shard_index.find(rows)
            if not self._is_known[shards].all():
                self._learn_units(sorted_unique(shards))
        return self._unit_index.find(rows)

    def _learn_units(self, shards: NDArray[np.int64]) -> None:
        """Read the directories of shards, which have the rows of their blocks."""
        unknown = shards[~self._is_known[shards]].tolist()
        try:
            self._blocks.load_directories(unknown)
        finally:
            starts = self._unit_starts.copy()
            for number in unknown:
                rows = self._blocks.rows(number)
                if rows is not None:
                    self._check_block_rows(number, rows)
                    first, end = self._first_units[number], self._first_units[number + 1]
                    starts[first:end] = self.starts[number] + np.cumsum(rows) - rows
                    self._is_known[number] = True
            self._unit_starts = starts
            self._unit_index = RangeIndex(starts, int(self.starts[-1]))

    def _check_block_rows(self, number: int, rows: Sequence[int]) -> None:
        shard = self.shards[number]
        if sum(rows) != shard.rows:
            raise ShardError(
                f"{display_uri(self.folder.join(shard.name))}: its blocks have {sum(rows):,} rows, and the log of the "
                f"dataset says {shard.rows:,}."
            )

    def _block_of(self, unit: int) -> tuple[int, int]:
        """Return the shard of a unit, and the number of the block in it."""
        shard = bisect_right(self._first_units_list, unit) - 1
        return shard, unit - self._first_units_list[shard]

    def _unit_ranges(self, unit: int) -> list[BlockRange]:
        shard, block = self._block_of(unit)
        return self._blocks.directory(shard).ranges(block) if self._has_blocks[shard] else []

    def unit_bytes(self, unit: int) -> int:
        """Return the bytes that are downloaded for a block of a remote shard."""
        return sum(each.size for each in self._unit_ranges(unit))

    def request_units(self, units: Sequence[tuple[int, int]]) -> None:
        """Start to download blocks, each with a priority: the position at which it is needed."""
        self._blocks.request([(each, priority) for unit, priority in units for each in self._unit_ranges(unit)])

    def release_units(self, units: Sequence[int]) -> None:
        """Close blocks that this process has passed, and let the node cache remove them."""
        with self._lock:
            for unit in units:
                self._close_unit(unit)
            self._blocks.release([each for unit in units for each in self._unit_ranges(unit)])

    # --- open units

    def _open_shards(self, shards: NDArray[np.int64]) -> None:
        if self._addresses.count + len(shards) > _MAX_OPEN or self._cached_bytes > self.shard_reader.cache.max_bytes:
            self._close_all()  # the disk space of copies that the cache has removed is free once they are closed
        starts = [self._batch_starts]
        try:
            for number in shards[self._opened[shards] < 0].tolist():
                self._open_shard(number, number, starts)
        finally:
            self._batch_starts = np.concatenate(starts)  # those before a shard that cannot be read are open
            self._batch_index = RangeIndex(self._batch_starts, self._virtual_rows)

    def _open_shard(self, number: int, unit: int, starts: list[NDArray[np.int64]]) -> None:
        with no_fork():
            blocks = self.shard_reader.open(self.shards[number])
            parts = [self.layout.locate(block.batch) for block in blocks]
        pieces = self._share_checks(number, blocks, parts)
        self._cached_bytes += 0 if self.is_mapped else sum(block.batch.nbytes for block in blocks)
        self._add_unit(unit, blocks, parts, pieces, starts)

    def _add_unit(
        self,
        unit: int,
        blocks: Sequence[Block],
        parts: Sequence[list[int]],
        pieces: Sequence[dict[int, Pieces]],
        starts: list[NDArray[np.int64]],
    ) -> None:
        self._opened[unit] = self._virtual_rows
        for block, own_parts, own_pieces in zip(blocks, parts, pieces, strict=True):
            self._addresses.add(own_parts, block.batch, block.check, own_pieces)
            starts.append(np.array([self._virtual_rows]))
            self._virtual_rows += len(block.batch)

    def _open_blocks(self, units: NDArray[np.int64]) -> None:
        """Open units of remote shards. All missing blocks are requested at once, and used as they come."""
        missing = units[self._opened[units] < 0].tolist()
        if len(self._open_units) > len(units):
            for unit in units[self._opened[units] >= 0].tolist():
                if unit in self._open_units:
                    self._open_units.move_to_end(unit)
        if not missing:
            return
        if len(missing) > 1:
            self._blocks.fetch([each for unit in missing for each in self._unit_ranges(unit)])
        self._trim(len(units))
        starts = [self._batch_starts]
        try:
            for unit in missing:
                number, block = self._block_of(unit)
                if not self._has_blocks[number]:
                    self._open_shard(number, unit, starts)
                    continue
                blocks, decoded, mapped = self._blocks.open(number, block, _MAX_DECODED - self._decoded_bytes)
                with no_fork():
                    parts = [self.layout.locate(each.batch) for each in blocks]
                self._open_units[unit] = _OpenUnit(blocks, parts, decoded, mapped)
                self._decoded_bytes += decoded
                self._mapped_bytes += mapped
                self._add_unit(unit, blocks, parts, [{}] * len(blocks), starts)
        finally:
            self._batch_starts = np.concatenate(starts)
            self._batch_index = RangeIndex(self._batch_starts, self._virtual_rows)

    def _trim(self, keep: int) -> None:
        """Close the blocks that were used least recently, down to the limits; the last `keep` stay open."""
        # Blocks that the node cache has removed take up the disk while they are mapped.
        limits = _MAX_DECODED, self.shard_reader.cache.max_bytes // 2, _MAX_OPEN // 2

        def exceeds(share: int) -> bool:
            sizes = self._decoded_bytes, self._mapped_bytes, len(self._open_units)
            return any(size > limit // share for size, limit in zip(sizes, limits, strict=True))

        if exceeds(1):
            while len(self._open_units) > keep and exceeds(2):
                self._close_unit(next(iter(self._open_units)))
            self._closed = _MAX_OPEN  # so that their memory is given back now
        if self._closed > len(self._open_units) + _MAX_CLOSED:
            self._renew_addresses()

    def _close_unit(self, unit: int) -> None:
        self._opened[unit] = -1
        closed = self._open_units.pop(unit, None)
        if closed is not None:
            self._decoded_bytes -= closed.decoded_bytes
            self._mapped_bytes -= closed.mapped_bytes
            self._closed += 1

    def _renew_addresses(self) -> None:
        """Make a new address table of the open blocks, which lets go of the memory of those that were closed."""
        units, sizes = self._open_units, (self._decoded_bytes, self._mapped_bytes)
        self._close_all()
        self._open_units, (self._decoded_bytes, self._mapped_bytes) = units, sizes
        starts = [self._batch_starts]
        for unit, open_unit in units.items():
            self._add_unit(unit, open_unit.blocks, open_unit.parts, [{}] * len(open_unit.blocks), starts)
        self._batch_starts = np.concatenate(starts)
        self._batch_index = RangeIndex(self._batch_starts, self._virtual_rows)

    def _share_checks(
        self, number: int, blocks: Sequence[Block], parts: Sequence[list[int]]
    ) -> list[dict[int, Pieces]]:
        """Let the checks of a shard use the flags that processes share, and return the pieces of each block.

        A copy in the cache may have more blocks than flags: then consecutive blocks share one, and are verified
        together. Only shards that are mapped as they are have flags for pieces.
        """
        pieces: list[dict[int, Pieces]] = [{} for _ in blocks]
        first, slots = int(self._slots[number]), int(self._slots[number + 1] - self._slots[number])
        flags, count = self.verified.flags, len(blocks)
        keep = self.shard_reader.verify != "always"
        for place, block in enumerate(blocks):
            if block.check is not None:
                slot, together = place, None
                if count > slots:  # block b has slot b * slots // count: `together` are all blocks of this slot
                    slot = place * slots // count
                    together = range(-(-slot * count // slots), -(-(slot + 1) * count // slots))
                block.check.use_flags(flags[first + slot], keep=keep, blocks=together)
                if self._piece_flags[number] < self._piece_flags[number + 1]:
                    pieces[place] = block.check.split(parts[place], self._data_parts, int(self._piece_flags[number]))
        return pieces

    def _close_shards(self, rows: NDArray[np.int64]) -> None:
        """Let the shards of rows be opened again: damaged copies were removed from the cache."""
        with self._lock:
            for unit in np.unique(self.units_of(rows)).tolist():
                self._close_unit(unit)
            for number in np.unique(self.shards_of(rows)).tolist():
                self.verified.flags[self._slots[number] : self._slots[number + 1]] = 0

    def _close_all(self) -> None:
        """Close all shards; rows that are being gathered keep theirs."""
        self._addresses = self.layout.addresses()
        self._addresses.use_flags(self.verified.pieces, keep=self.shard_reader.verify != "always")
        if self.shard_reader.reads_ahead:
            self._addresses.read_ahead_parts = self.layout.read_ahead_parts
        self._opened = np.full(len(self._unit_starts), -1, np.int64)
        self._open_units = OrderedDict()
        self._decoded_bytes = self._mapped_bytes = self._closed = 0
        self._batch_starts, self._virtual_rows = np.zeros(0, np.int64), 0
        self._batch_index = RangeIndex(self._batch_starts, 0)
        self._cached_bytes = 0


class _OpenUnit(NamedTuple):
    """A block of a remote shard that is open, with the addresses of its record batches."""

    blocks: Sequence[Block]
    parts: Sequence[list[int]]
    decoded_bytes: int
    mapped_bytes: int


_alive: weakref.WeakSet[RowReader] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child, renew the readers whose lock another thread of the parent held: it never releases it here.

    That thread may have been in the middle of opening shards, so all shards of such a reader are closed.
    """
    for reader in list(_alive):
        if reader._lock.acquire(blocking=False):
            reader._lock.release()
        else:
            reader._lock = threading.RLock()
            reader._close_all()


at_fork(after_in_child=_renew_locks)


class RangeIndex:
    """Consecutive ranges, given by the first row of each and the row after the last.

    A binary search takes a branch for every bit of the answer, of which the processor predicts half wrong. Rows are
    therefore looked up in a table with an entry for every 2**shift rows, about half a range: the range of the first row
    of that step. A comparison with the next start, repeated `passes` times, corrects the answer; mostly once is enough.
    """

    def __init__(self, starts: NDArray[np.int64], end: int) -> None:
        self._starts, self._end = starts, end
        self._ends = np.append(starts[1:], np.iinfo(np.int64).max)
        self._table: NDArray[np.int64] | None = None
        self._shift = self._passes = -1

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the range that each row is in."""
        if len(self._starts) <= _FEW:
            ranges = np.zeros(len(rows), np.int64)
            for start in self._starts[1:].tolist():
                ranges += rows >= start
            return ranges
        if self._passes < 0 and len(rows) >= len(self._starts):  # building the table is paid for by these rows
            self._build_table()
        if self._table is None:
            return np.searchsorted(self._starts, rows, side="right") - 1
        ranges = self._table.take(rows >> self._shift)
        for _ in range(self._passes):
            ranges += rows >= self._ends.take(ranges)
        return ranges

    def _build_table(self) -> None:
        median = int(np.median(np.diff(self._starts, append=self._end)))
        self._shift = max(median.bit_length() - 2, 0)
        steps = np.arange(0, self._end, 1 << self._shift)
        table = np.searchsorted(self._starts, steps, side="right") - 1
        self._passes = int(np.diff(table, append=len(self._starts) - 1).max())
        if self._passes <= _MAX_PASSES and len(steps) <= _MAX_STEPS * len(self._starts):
            self._table = table
