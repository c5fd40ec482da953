"""Blocks of remote shards: where they are in the file, and opening them from the node cache.

The *directory* of a shard says where its blocks are. It is at the end of the file: the block table and the footer of a
shard of format 2, the footer of any other Parquet file. One read of a range fetches it, and the node cache keeps it.
A block is then one range (of a Parquet row group of which some columns are read, one range for each run of neighbouring
columns), which is downloaded into the node cache (`quire.files`), mapped, and verified by the checksums of the table.
An Arrow block in the layout of the class is used in place. Others are decoded into memory.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from quire._lowlevel.addresses import map_file
from quire._lowlevel.forks import no_fork
from quire.errors import DecodeError, ShardError
from quire.files import BlockRange, BlockSource, open_block_source
from quire.storage._block_table import BlockTable, count_nodes, footer_start, parse_table
from quire.storage._cache import cache_key
from quire.storage._manifest import Shard
from quire.storage._shard_reader import (
    Block,
    DamagedCopyError,
    ShardReader,
    check_table_bytes,
    empty_batch,
    select_columns,
    shard_errors,
)
from quire.storage._verification import BlockCheck

T = TypeVar("T")
_TAIL = 1 << 16
"""The bytes at the end of a Parquet file that are read first: nearly all footers are shorter."""
_GAP = 1 << 16
"""Columns of a row group that are less than this apart are read in one request."""
_MAX_DIRECTORIES = 4_096
"""The number of directories that are kept in memory, of some 10 KB each."""
_DAMAGE = (DecodeError, pa.ArrowException, OSError, ValueError)
"""What reading damaged content raises: pyarrow raises all of these."""


class RemoteBlocks:
    """The blocks of the shards of a remote folder, in the layout of a class."""

    def __init__(self, reader: ShardReader, shards: Sequence[Shard]) -> None:
        self._reader, self._shards = reader, shards
        self._directories: OrderedDict[int, Directory] = OrderedDict()
        self._rows: dict[int, tuple[int, ...]] = {}
        self._damaged: set[str] = set()
        self._source: tuple[int, BlockSource] | None = None

    def covers(self, shard: Shard) -> bool:
        """Whether a shard is read by blocks: if it is remote, and its directory says where they are."""
        return self._reader.folder.local_path(shard.name) is None and (
            shard.table is not None or shard.format == "parquet"
        )

    def source(self) -> BlockSource:
        """Return where blocks come from; a forked process has its own."""
        if self._source is None or self._source[0] != os.getpid():
            cache = self._reader.cache
            source = open_block_source(self._reader.folder, cache.folder / "blocks", cache.max_bytes)
            source.expect(self._reader.folder, sum(shard.bytes for shard in self._shards))
            self._source = os.getpid(), source
        return self._source[1]

    # --- directories

    def load_directories(self, numbers: Iterable[int]) -> None:
        """Read the directories of shards that are not known yet, all at the same time."""
        missing = [number for number in numbers if number not in self._rows]
        if len(missing) > 1:
            self.fetch([self._tail(self._shards[number]) for number in missing])
        for number in missing:
            self.directory(number)

    def directory(self, number: int) -> Directory:
        """Return the directory of a shard. Those that were used last are kept; others are in the node cache."""
        directory = self._directories.get(number)
        if directory is None:
            shard = self._shards[number]
            with shard_errors(self._reader.folder, shard):
                directory = self._directories[number] = self._read_directory(shard)
            self._rows[number] = directory.rows
            if len(self._directories) > _MAX_DIRECTORIES:
                self._directories.popitem(last=False)
        return directory

    def rows(self, number: int) -> tuple[int, ...] | None:
        """Return the rows of the blocks of a shard; None if its directory was not loaded."""
        return self._rows.get(number)

    def _tail(self, shard: Shard, size: int = _TAIL) -> BlockRange:
        """Return the range of the directory; of a Parquet file of another writer, the last bytes."""
        start = shard.table[0] if shard.table is not None else max(0, shard.bytes - size)
        block = self.range(shard, start, shard.bytes)
        return block._replace(key=f"{0:08x}{block.key[8:]}")  # keys that begin with zeros are removed last

    def range(self, shard: Shard, start: int, stop: int) -> BlockRange:
        """Return a range of a shard. Its key identifies the content, wherever the shard is stored."""
        where = "" if shard.xxh3 else self._reader.folder.url
        return BlockRange(cache_key("block", where, *shard.identity, start, stop), shard.name, start, stop)

    def _read_directory(self, shard: Shard) -> Directory:
        if shard.table is None:
            return self._read_footer(shard)
        start, size = shard.table

        def parse(tail: pa.Buffer) -> Directory:
            view = memoryview(tail)
            table = parse_table(check_table_bytes(view[:size], shard))
            table.check_footer(view, start)
            if len(table.blocks) != shard.blocks:
                raise DecodeError(f"it has {len(table.blocks)} blocks, and the dataset says {shard.blocks}")
            if shard.format == "parquet":
                return ParquetDirectory(self, self._reader, shard, table, _parse_footer(view[size:]))
            file = SparseFile(shard.bytes, [(start, tail)])
            return ArrowDirectory(self, self._reader, shard, table, pa.ipc.open_file(pa.PythonFile(file, "r")).schema)

        return self._read_verified(self._tail(shard), shard, parse)

    def _read_footer(self, shard: Shard) -> Directory:
        """Read the footer of a Parquet file without a block table."""

        def parse(tail: pa.Buffer) -> int | Directory:
            begin = shard.bytes - tail.size
            view = memoryview(tail)
            start = footer_start(lambda first, last: view[first - begin : last - begin], shard.bytes, "parquet")
            if start < begin:
                return shard.bytes - start
            metadata = _parse_footer(view[start - begin :])
            groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
            if shard.groups and groups != shard.groups:
                raise DecodeError(f"its row groups have {groups} rows, and the dataset says {shard.groups}")
            return ParquetDirectory(self, self._reader, shard, None, metadata)

        directory = self._read_verified(self._tail(shard), shard, parse)
        if isinstance(directory, int):  # the footer is longer than expected
            directory = self._read_verified(self._tail(shard, directory), shard, parse)
        if isinstance(directory, int):
            raise DecodeError("its footer is damaged")
        return directory

    # --- blocks

    def request(self, blocks: Sequence[tuple[BlockRange, int]]) -> None:
        """Start to download blocks, each with a priority."""
        if blocks:
            self.source().request(self._reader.folder, blocks)

    def fetch(self, blocks: Sequence[BlockRange]) -> None:
        """Start to download blocks that are opened next, several at a time, unless they are in the cache."""
        source = self.source()
        missing = [block for block in blocks if not source.cache.path(block.key).exists()]
        if len(missing) > 1:
            source.fetch(self._reader.folder, missing)

    def release(self, blocks: Sequence[BlockRange]) -> None:
        """Let blocks be removed from the node cache: this process has passed them."""
        if blocks:
            self.source().release(blocks)

    def map(self, block: BlockRange) -> pa.Buffer:
        """Map a block, after it is downloaded if it is missing."""
        with self.source().open(self._reader.folder, block) as file:
            return map_file(file)

    def open(self, number: int, block: int) -> list[Block]:
        """Open a block of a shard."""
        shard, directory = self._shards[number], self.directory(number)
        ranges = directory.ranges(block)
        with shard_errors(self._reader.folder, shard):
            for attempt in range(2):
                buffers = [self.map(each) for each in ranges]
                try:
                    with no_fork():
                        return directory.read(block, ranges, buffers)
                except DamagedCopyError:
                    if attempt:
                        raise
                except _DAMAGE as error:
                    failure = self.damaged(shard, ranges, str(error))
                    if not isinstance(failure, DamagedCopyError):
                        raise failure from error
        raise AssertionError

    def damaged(self, shard: Shard, ranges: Sequence[BlockRange], reason: str) -> ShardError:
        """Remove damaged blocks from the node cache, and return the error; the next reader downloads them again.

        A block that is damaged after it was downloaded again is damaged in the store.
        """
        keys = {each.key for each in ranges}
        for key in keys:
            self.source().cache.remove(key)
        if keys & self._damaged:
            return self._reader.altered_error(shard, reason)
        self._damaged |= keys
        name = self._reader.folder.join(shard.name)
        return DamagedCopyError(
            f"{name}: a block in the cache ({self.source().cache.place}) was damaged: {reason}. It has been removed: "
            "read again, and it is downloaded anew."
        )

    def _read_verified(self, block: BlockRange, shard: Shard, parse: Callable[[pa.Buffer], T]) -> T:
        """Return what `parse` makes of a range; if it raises an error, the range is downloaded once more."""
        for attempt in range(2):
            with self.source().open(self._reader.folder, block) as file:
                content = pa.py_buffer(file.read())  # not mapped: the system limits the number of mappings
            try:
                return parse(content)
            except _DAMAGE as error:
                self.source().cache.remove(block.key)
                if attempt:
                    raise self._reader.altered_error(shard, str(error)) from error
        raise AssertionError


def _parse_footer(footer: memoryview) -> pq.FileMetaData:
    """Return the metadata in the footer of a Parquet file, of which these are the last bytes."""
    return pq.read_metadata(pa.BufferReader(b"PAR1" + bytes(footer)))


class Directory(ABC):
    """Where the blocks of a shard are, and how they are read."""

    rows: tuple[int, ...]
    """The number of rows of each block."""

    def __init__(self, blocks: RemoteBlocks, reader: ShardReader, shard: Shard) -> None:
        self._blocks, self._reader, self._shard = blocks, reader, shard
        self._ranges: dict[int, list[BlockRange]] = {}

    def ranges(self, block: int) -> list[BlockRange]:
        """Return the ranges of a block that are read."""
        if block not in self._ranges:
            self._ranges[block] = [self._blocks.range(self._shard, *bounds) for bounds in self._bounds(block)]
        return self._ranges[block]

    @abstractmethod
    def _bounds(self, block: int) -> list[tuple[int, int]]: ...

    @abstractmethod
    def read(self, block: int, ranges: Sequence[BlockRange], buffers: Sequence[pa.Buffer]) -> list[Block]:
        """Return the record batches of a block, in the layout of the class."""


class ArrowDirectory(Directory):
    """The record batches of an Arrow file of format 2."""

    def __init__(
        self, blocks: RemoteBlocks, reader: ShardReader, shard: Shard, table: BlockTable, schema: pa.Schema
    ) -> None:
        super().__init__(blocks, reader, shard)
        self._table, self._schema, self.rows = table, schema, table.rows
        self._in_layout = reader.is_in_layout(schema)
        self._names = [codec.field.name for codec in reader.layout.codecs]
        self._nodes: list[list[int]] = (
            reader.layout.field_nodes(schema)
            if self._in_layout
            else [list(range(sum(count_nodes(field.type) for field in schema)))]
        )

    def _bounds(self, block: int) -> list[tuple[int, int]]:
        _, start, size, _ = self._table.blocks[block].tolist()
        return [(start, start + size)]

    def read(self, block: int, ranges: Sequence[BlockRange], buffers: Sequence[pa.Buffer]) -> list[Block]:
        [buffer], [place] = buffers, ranges
        check = None
        if self._reader.verify != "never":
            self._table.check_block_metadata(memoryview(buffer), block)
            make_error = partial(self._blocks.damaged, self._shard, ranges)
            check = BlockCheck(self._table, range(block, block + 1), self._nodes, buffer, make_error, place.start)
            if self._reader.verify == "always":
                check.use_flags(check.new_flags(), keep=False)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(buffer), self._schema)
        if self._in_layout:
            batch = select_columns(batch, self._names)
            batch.validate()  # that buffers are as long as the number of rows requires
            return [Block(batch, check)]
        if check is not None:
            check(None)
        batch.validate(full=True)
        return [Block(self._reader.conform(batch, self._shard))]


class ParquetDirectory(Directory):
    """The row groups of a Parquet file, with a block table or without."""

    def __init__(
        self,
        blocks: RemoteBlocks,
        reader: ShardReader,
        shard: Shard,
        table: BlockTable | None,
        metadata: pq.FileMetaData,
    ) -> None:
        super().__init__(blocks, reader, shard)
        self._table, self._metadata = table, metadata
        self.rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._names = reader.column_names(metadata.schema.to_arrow_schema())
        paths = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
        self._leaves = [
            leaf
            for leaf, path in enumerate(paths)
            if any(path == name or path.startswith(f"{name}.") for name in self._names)
        ]

    def _chunk(self, group: int, leaf: int) -> tuple[int, int]:
        """Return the offset and the bytes of a column of a row group."""
        chunk = self._metadata.row_group(group).column(leaf)
        start: int = chunk.data_page_offset
        if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
            start = chunk.dictionary_page_offset
        return start, chunk.total_compressed_size

    def _bounds(self, block: int) -> list[tuple[int, int]]:
        chunks = sorted(self._chunk(block, leaf) for leaf in self._leaves)
        spans = [(start, start + size) for start, size in chunks if size]
        if not spans:
            return []
        cuts = [place for place, (left, right) in enumerate(pairwise(spans), 1) if right[0] - left[1] > _GAP]
        runs = [spans[first:last] for first, last in pairwise([0, *cuts, len(spans)])]
        return [(run[0][0], max(stop for _, stop in run)) for run in runs]

    def read(self, block: int, ranges: Sequence[BlockRange], buffers: Sequence[pa.Buffer]) -> list[Block]:
        if not self._names:  # only the number of rows is needed
            return [Block(self._reader.conform(empty_batch(self.rows[block]), self._shard))]
        places = [(each.start, buffer) for each, buffer in zip(ranges, buffers, strict=True)]
        is_verified = self._reader.verify != "never"
        if self._table is not None and is_verified:
            for leaf in self._leaves:
                start, size = self._chunk(block, leaf)
                [(base, content)] = [(b, c) for b, c in places if size and b <= start < b + c.size] or [(0, b"")]
                self._table.check_column(memoryview(content), block, leaf, base=base)
        file = pq.ParquetFile(
            pa.PythonFile(SparseFile(self._shard.bytes, places), "r"),
            metadata=self._metadata,
            page_checksum_verification=is_verified and self._table is None,
        )
        decoded = file.read_row_group(block, self._names, use_threads=False)
        if len(decoded) != self.rows[block]:
            raise DecodeError(f"row group {block} has {len(decoded)} rows, and its footer says {self.rows[block]}")
        batches = decoded.combine_chunks().to_batches()
        return [Block(self._reader.conform(batch, self._shard)) for batch in batches]


class SparseFile:
    """Some ranges of a file as a file object for pyarrow; `places` are their offsets and contents."""

    closed = False

    def __init__(self, size: int, places: Sequence[tuple[int, pa.Buffer]]) -> None:
        self._size, self._places, self._position = size, places, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Change the position."""
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def read_buffer(self, count: int = -1) -> Any:
        """Return the next bytes without a copy."""
        start = self._position
        stop = self._size if count < 0 else min(start + count, self._size)
        for base, content in self._places:
            if base <= start <= stop <= base + content.size:
                self._position = stop
                return content.slice(start - base, stop - start)
        raise OSError(f"bytes {start:,} to {stop:,} are outside of the columns that were read")

    def read(self, count: int = -1) -> bytes:
        """Return the next bytes."""
        content: bytes = self.read_buffer(count).to_pybytes()
        return content

    def size(self) -> int:
        """Return the size of the file."""
        return self._size

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Do nothing: the caller keeps the ranges."""
