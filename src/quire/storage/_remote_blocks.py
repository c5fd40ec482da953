"""Blocks of remote shards: where they are in the file, and opening them from the node cache.

The *directory* of a shard says where its blocks are. It is at the end of the file: the block table and the footer of a
shard of format 2, the footer of a shard of format 1 and of any other Parquet file. One read of a range fetches it, and
the node cache keeps it.
A block is then one range (of a Parquet row group of which some columns are read, one range for each run of neighbouring
columns), which is downloaded into the node cache (`quire.files`), mapped, and verified by the checksums of the table.
An Arrow block in the layout of the class is used in place. Others are decoded into memory, or into a copy in the node
cache.
"""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quire._lowlevel.addresses import map_file
from quire._lowlevel.forks import no_fork
from quire.columns import Columns
from quire.errors import DecodeError, ShardError
from quire.files import BlockRange, BlockSource, Folder, NodeCache, open_block_source
from quire.storage._block_table import (
    BlockTable,
    checksum,
    count_nodes,
    footer_start,
    parse_table,
    read_footer_blocks,
)
from quire.storage._cache import ShardCache, cache_key
from quire.storage._manifest import Shard
from quire.storage._parquet_pages import plain_values
from quire.storage._shard_reader import (
    TAIL,
    Block,
    DamagedCopyError,
    ShardReader,
    check_table_bytes,
    empty_batch,
    parse_footer,
    select_columns,
    shard_errors,
)
from quire.storage._verification import BlockCheck

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
_GAP = 1 << 16
"""Columns of a row group that are less than this apart are read in one request."""
_MAX_DIRECTORIES = 4_096
"""The number of directories that are kept in memory, of some 10 KB each."""
_MAX_ROOM = 1 << 62
_PART_BYTES = 16 << 20
"""About how much is gathered at a time of blocks that are read in order."""
_FEW_COLUMNS = 4
_BLOCKS_AHEAD = 16
"""The number of blocks that are downloaded before they are needed, if blocks are read in order."""
_CHECKSUM = struct.Struct("<Q")
"""The last bytes of a copy of a decoded block."""
_WORTH_A_COPY = 4
"""Decoding less than this part of a block again costs less than writing and reading a copy of it."""
_DAMAGE = (DecodeError, pa.ArrowException, OSError, ValueError)
"""What reading damaged content raises: pyarrow raises all of these."""


class OpenBlock(NamedTuple):
    """The record batches of a block, the bytes of what was decoded into memory, and of what is mapped."""

    batches: list[Block]
    decoded_bytes: int
    mapped_bytes: int


class RemoteBlocks:
    """The blocks of the shards of a remote folder, in the layout of a class."""

    def __init__(self, reader: ShardReader, shards: Sequence[Shard]) -> None:
        self._reader, self._shards = reader, shards
        self._directories: OrderedDict[int, Directory] = OrderedDict()
        self._rows: dict[int, tuple[int, ...]] = {}
        self._damaged: set[str] = set()
        self._source: tuple[int, BlockSource] | None = None

    def covers(self, shard: Shard) -> bool:
        """Whether a shard is read by blocks: if it is remote, and its directory says where they are.

        The footer of an Arrow file does not have the rows of its blocks: the log has those of a shard of format 1, and
        nothing those of a file of another writer, which is copied.
        """
        if self._reader.folder.local_path(shard.name) is not None or shard.sides:
            return False  # a shard with side files is copied, joined with these
        if shard.table is None and shard.xxh3 and self._reader.verify == "always":
            return False  # format 1 has one checksum for the whole file, which is verified when it is copied
        return shard.table is not None or shard.format == "parquet" or bool(shard.groups)

    def source(self) -> BlockSource:
        """Return where blocks come from; a forked process has its own."""
        if self._source is None or self._source[0] != os.getpid():
            cache = self._reader.cache
            source = open_block_source(self._reader.folder, block_folder(cache), cache.max_bytes)
            source.expect(self._reader.folder, sum(shard.bytes for shard in self._shards))
            self._source = os.getpid(), source
        return self._source[1]

    # --- directories

    def load_directories(self, numbers: Iterable[int]) -> None:
        """Read the directories of shards that are not known yet, all at the same time."""
        missing = [number for number in numbers if number not in self._rows]
        if len(missing) > 1:
            self.fetch([_tail_range(self._reader.folder, self._shards[number]) for number in missing])
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

    def range(self, shard: Shard, start: int, stop: int) -> BlockRange:
        """Return a range of a shard."""
        return _block_range(self._reader.folder, shard, start, stop)

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
                return ParquetDirectory(self, self._reader, shard, table, parse_footer(view[size:]))
            places = [(first, first + length) for _, first, length, _ in table.blocks.tolist()]
            return ArrowDirectory(self, self._reader, shard, _read_schema(shard, tail), table.rows, places, table)

        return self._read_verified(_tail_range(self._reader.folder, shard), shard, parse)

    def _read_footer(self, shard: Shard) -> Directory:
        """Read the footer of a file without a block table."""

        def parse(tail: pa.Buffer) -> int | Directory:
            begin = shard.bytes - tail.size
            view = memoryview(tail)
            start = footer_start(lambda first, last: view[first - begin : last - begin], shard.bytes, shard.format)
            if start < begin:
                return shard.bytes - start
            if shard.format == "arrow":
                places = read_footer_blocks(bytes(view[start - begin :]), start)
                if len(places) != len(shard.groups):
                    raise DecodeError(f"it has {len(places)} blocks, and the dataset says {len(shard.groups)}")
                return ArrowDirectory(self, self._reader, shard, _read_schema(shard, tail), shard.groups, places, None)
            metadata = parse_footer(view[start - begin :])
            groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
            if shard.groups and groups != shard.groups:
                raise DecodeError(f"its row groups have {groups} rows, and the dataset says {shard.groups}")
            return ParquetDirectory(self, self._reader, shard, None, metadata)

        directory = self._read_verified(_tail_range(self._reader.folder, shard), shard, parse)
        if isinstance(directory, int):  # the footer is longer than expected
            directory = self._read_verified(_tail_range(self._reader.folder, shard, directory), shard, parse)
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

    def open(self, number: int, block: int, room: int) -> OpenBlock:
        """Open a block of a shard.

        Columns that were decoded are mapped, too, from a copy of the block in the node cache: it is written if they do
        not fit into `room` bytes of memory, or if other processes read the same blocks and most of it was decoded.
        """
        shard, directory = self._shards[number], self.directory(number)
        ranges, size = directory.ranges(block), directory.decoded_bytes(block)
        stored = sum(each.size for each in ranges)
        has_copy = size > room or (self.source().is_shared and size * _WORTH_A_COPY > stored)
        if has_copy:
            key = cache_key("decoded block", directory.conversion, *(each.key for each in ranges), block)
            copies = self._open_copy(key)
            if copies is not None:
                return OpenBlock(copies, 0, stored)
        with shard_errors(self._reader.folder, shard):
            blocks = self._read(shard, directory, block, ranges)
        if has_copy:
            self._write_copy(key, [each.batch for each in blocks])
            copies = self._open_copy(key)
            if copies is not None:
                return OpenBlock(copies, 0, stored)
        return OpenBlock(blocks, size, stored if directory.is_in_place(block) else 0)

    def read_verified(self, number: int, block: int) -> list[pa.RecordBatch]:
        """Return the record batches of a block after all of its columns were verified."""
        while True:
            blocks = self.open(number, block, _MAX_ROOM).batches
            try:
                for each in blocks:
                    if each.check is not None:
                        each.check(None)
            except DamagedCopyError:  # it was removed; if it is damaged in the store, the next error is another one
                continue
            return [each.batch for each in blocks if len(each.batch)]

    def _read(self, shard: Shard, directory: Directory, block: int, ranges: Sequence[BlockRange]) -> list[Block]:
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

    def _write_copy(self, key: str, batches: Sequence[pa.RecordBatch]) -> None:
        """Write a decoded block: a stream of Arrow messages, and its checksum. Without room, there is no copy."""
        with no_fork():
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            content = sink.getvalue()
        source, size = self.source(), content.size + _CHECKSUM.size
        source.cache.write(
            BlockRange(key, "", 0, size), memoryview(content), _CHECKSUM.pack(checksum(memoryview(content)))
        )
        source.add(key, size)

    def _open_copy(self, key: str) -> list[Block] | None:
        """Map a decoded block; None if there is no copy, or it is damaged."""
        cache = self.source().cache
        try:
            with cache.path(key).open("rb") as file:
                buffer = map_file(file)
        except OSError:
            return None
        view = memoryview(buffer)
        content, end = view[: -_CHECKSUM.size], view[-_CHECKSUM.size :]
        if len(view) <= _CHECKSUM.size or (
            self._reader.verify != "never" and _CHECKSUM.pack(checksum(content)) != bytes(end)
        ):
            cache.remove(key)
            return None
        with no_fork():
            return [Block(batch) for batch in pa.ipc.open_stream(buffer.slice(0, len(content)))]

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


def _block_range(folder: Folder, shard: Shard, start: int, stop: int) -> BlockRange:
    """Return a range of a shard. Its key identifies the content, wherever the shard is stored."""
    where = "" if shard.xxh3 else folder.url
    return BlockRange(cache_key("block", where, *shard.identity, start, stop), shard.name, start, stop)


def _read_schema(shard: Shard, tail: pa.Buffer) -> pa.Schema:
    """Return the schema of an Arrow file from its last bytes, which have the footer."""
    file = SparseFile(shard.bytes, [(shard.bytes - tail.size, tail)])
    return pa.ipc.open_file(pa.PythonFile(file, "r")).schema


def _tail_range(folder: Folder, shard: Shard, size: int = TAIL) -> BlockRange:
    """Return the range of the directory of a shard; of a file without a block table, the last bytes."""
    start = shard.table[0] if shard.table is not None else max(0, shard.bytes - size)
    block = _block_range(folder, shard, start, shard.bytes)
    return block._replace(key=f"{0:08x}{block.key[8:]}")  # keys that begin with zeros are removed last


def keep_tail(folder: Folder, cache: ShardCache, shard: Shard, tail: bytes) -> None:
    """Put the last bytes of a Parquet file, which were read to count its rows, into the node cache."""
    if shard.format == "parquet" and shard.table is None:
        NodeCache(block_folder(cache)).write(_tail_range(folder, shard), tail)


class NodeTailCache:
    """The ends of Parquet files in the node cache, for files whose stamp identifies their content."""

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache

    def load(self, folder: Folder, shard: Shard) -> bytes | None:
        """Return the last bytes of a file; None if they are not in the cache."""
        block = _tail_range(folder, shard)
        try:
            tail = NodeCache(block_folder(self._cache)).path(block.key).read_bytes()
        except OSError:
            return None
        return tail if len(tail) == block.stop - block.start else None

    def keep(self, folder: Folder, shard: Shard, tail: bytes) -> None:
        """Keep the last bytes of a file."""
        keep_tail(folder, self._cache, shard, tail)


def block_folder(cache: ShardCache) -> Path:
    """Return the folder of the node cache."""
    return cache.folder / "blocks"


# --- reading in order


def read_columns(
    reader: ShardReader,
    shard: Shard,
    rows: NDArray[np.int64] | None = None,
    may_match: Callable[[pq.RowGroupMetaData], bool] | None = None,
) -> Iterator[tuple[NDArray[np.int64], Columns]]:
    """Yield rows of a shard in order, as `ShardReader.read_columns` does; a remote shard is read by blocks.

    Blocks without one of the rows are not downloaded, nor row groups that `may_match` rules out.
    """
    blocks = RemoteBlocks(reader, (shard,))
    # All of an Arrow shard of format 1 is read at once, because only its whole content can be verified.
    is_verified_whole = shard.table is None and shard.format == "arrow" and rows is None
    if is_verified_whole or not blocks.covers(shard):
        yield from reader.read_columns(shard, rows, may_match)
        return
    if rows is not None and not len(rows):
        return
    directory = blocks.directory(0)
    ends = np.cumsum(directory.rows)
    if shard.rows not in (-1, int(ends[-1]) if len(ends) else 0):
        raise reader.altered_error(
            shard, f"its blocks have {int(ends[-1]):,} rows, and the dataset says {shard.rows:,}"
        )
    needed = [
        block
        for block, end in enumerate(ends.tolist())
        if (rows is None or np.searchsorted(rows, end - directory.rows[block]) < np.searchsorted(rows, end))
        and (may_match is None or directory.may_match(block, may_match))
    ]
    for place, block in enumerate(needed):
        if place % _BLOCKS_AHEAD == 0:  # what is used next, and as much after it
            ahead = needed[place : place + 2 * _BLOCKS_AHEAD]
            blocks.fetch([each for number in ahead for each in directory.ranges(number)])
        start = int(ends[block]) - directory.rows[block]
        for batch in blocks.read_verified(0, block):
            own = np.arange(start, start + len(batch))
            start += len(batch)
            positions = np.arange(len(batch))
            if rows is not None:
                positions = rows[slice(*np.searchsorted(rows, [own[0], own[-1] + 1]))] - own[0]
            # Decoded blocks of other writers may be large: parts have about 16 MiB.
            step = max(1, _PART_BYTES * len(batch) // max(batch.nbytes, 1))
            for first in range(0, len(positions), step):
                part = positions[first : first + step]
                with shard_errors(reader.folder, shard):
                    columns = reader.layout.gather(reader.layout.locate_rows(batch, part))
                yield own[part], columns


# --- directories


class Directory(ABC):
    """Where the blocks of a shard are, and how they are read."""

    rows: tuple[int, ...]
    """The number of rows of each block."""

    def __init__(self, blocks: RemoteBlocks, reader: ShardReader, shard: Shard) -> None:
        self._blocks, self._reader, self._shard = blocks, reader, shard
        self.conversion = reader.conversion(shard)
        """Identifies what decoding a block results in."""
        self._ranges: dict[int, list[BlockRange]] = {}

    def ranges(self, block: int) -> list[BlockRange]:
        """Return the ranges of a block that are read."""
        if block not in self._ranges:
            self._ranges[block] = [self._blocks.range(self._shard, *bounds) for bounds in self._bounds(block)]
        return self._ranges[block]

    @abstractmethod
    def _bounds(self, block: int) -> list[tuple[int, int]]: ...

    def may_match(self, block: int, test: Callable[[pq.RowGroupMetaData], bool]) -> bool:
        """Return whether the statistics of a block leave a chance; Arrow files have none."""
        return True

    @abstractmethod
    def decoded_bytes(self, block: int) -> int:
        """Return about how much memory the decoded columns of a block take; 0 if all are used in place."""

    @abstractmethod
    def is_in_place(self, block: int) -> bool:
        """Return whether some columns of a block are used in place, where it is mapped."""

    @abstractmethod
    def read(self, block: int, ranges: Sequence[BlockRange], buffers: Sequence[pa.Buffer]) -> list[Block]:
        """Return the record batches of a block, in the layout of the class."""


class ArrowDirectory(Directory):
    """The record batches of an Arrow file, with a block table or, in format 1, without.

    `places` are where they begin and end. Without a table, nothing but the structure of a block can be verified.
    """

    def __init__(
        self,
        blocks: RemoteBlocks,
        reader: ShardReader,
        shard: Shard,
        schema: pa.Schema,
        rows: tuple[int, ...],
        places: Sequence[tuple[int, int]],
        table: BlockTable | None,
    ) -> None:
        super().__init__(blocks, reader, shard)
        self._schema, self.rows, self._places, self._table = schema, rows, places, table
        self._in_layout = reader.is_in_layout(schema)
        self._names = [codec.field.name for codec in reader.layout.codecs]
        self._nodes: list[list[int]] = (
            reader.layout.field_nodes(schema)
            if self._in_layout
            else [list(range(sum(count_nodes(field.type) for field in schema)))]
        )

    def decoded_bytes(self, block: int) -> int:
        start, stop = self._places[block]
        return 0 if self._in_layout else stop - start

    def is_in_place(self, block: int) -> bool:
        return self._in_layout

    def _bounds(self, block: int) -> list[tuple[int, int]]:
        return [self._places[block]]

    def read(self, block: int, ranges: Sequence[BlockRange], buffers: Sequence[pa.Buffer]) -> list[Block]:
        [buffer], [place] = buffers, ranges
        check = None
        if self._table is not None and self._reader.verify != "never":
            self._table.check_block_metadata(memoryview(buffer), block)
            make_error = partial(self._blocks.damaged, self._shard, ranges)
            check = BlockCheck(self._table, range(block, block + 1), self._nodes, buffer, make_error, place.start)
            if self._reader.verify == "always":
                check.use_flags(check.new_flags(), keep=False)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(buffer), self._schema)
        if len(batch) != self.rows[block]:
            raise DecodeError(f"block {block} has {len(batch)} rows, and the dataset says {self.rows[block]}")
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
        self._schema = schema = metadata.schema.to_arrow_schema()
        self._names = reader.column_names(schema, shard)
        self._in_layout = reader.is_in_layout(schema)
        self._layout_names = [codec.field.name for codec in reader.layout.codecs]
        self._layout_schema = (
            pa.schema([schema.field(name) for name in self._layout_names]) if self._in_layout else None
        )
        paths = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
        self._leaves = [
            leaf
            for leaf, path in enumerate(paths)
            if any(path == name or path.startswith(f"{name}.") for name in self._names)
        ]
        # Tensors of a fixed size may be used in place; the checksums of pages without a block table are not verified
        # there.
        self._fixed = {} if table is None else {leaf: paths[leaf] for leaf in self._leaves if self._is_fixed(leaf)}
        self._plain: dict[int, list[int]] = {}

    def _is_fixed(self, leaf: int) -> bool:
        """Return whether a column has a value of the same size in every row."""
        column = self._metadata.schema.column(leaf)
        return (
            column.path in self._names
            and column.path in self._schema.names
            and column.max_definition_level == column.max_repetition_level == 0
            and pa.types.is_fixed_size_binary(self._schema.field(column.path).type)
            and column.length > 0
        )

    def _plain_leaves(self, block: int) -> list[int]:
        """Return the columns of a row group whose values are in the file as they are in memory."""
        if block not in self._plain:
            group = self._metadata.row_group(block)
            chunks = {leaf: group.column(leaf) for leaf in self._fixed}
            self._plain[block] = [
                leaf
                for leaf, chunk in chunks.items()
                if chunk.compression == "UNCOMPRESSED" and set(chunk.encodings) <= {"PLAIN", "RLE"}
            ]
        return self._plain[block]

    def is_in_place(self, block: int) -> bool:
        return bool(self._plain_leaves(block))

    def may_match(self, block: int, test: Callable[[pq.RowGroupMetaData], bool]) -> bool:
        return test(self._metadata.row_group(block))

    def decoded_bytes(self, block: int) -> int:
        group, plain = self._metadata.row_group(block), self._plain_leaves(block)
        return sum(group.column(leaf).total_uncompressed_size for leaf in self._leaves if leaf not in plain)

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
        if self._table is not None and self._reader.verify != "never":
            for leaf in self._leaves:
                self._table.check_column(
                    memoryview(self._find_chunk(block, leaf, places)), block, leaf, base=self._chunk(block, leaf)[0]
                )
        columns: dict[str, list[pa.Array]] = {}  # the chunks of each column
        for leaf in self._plain_leaves(block):
            field_type = self._schema.field(self._fixed[leaf]).type
            width = field_type.byte_width
            pages = plain_values(self._find_chunk(block, leaf, places), width, self.rows[block])
            if pages is not None:
                columns[self._fixed[leaf]] = [
                    pa.FixedSizeBinaryArray.from_buffers(field_type, page.size // width, [None, page]) for page in pages
                ]
        decoded = self._decode(block, [name for name in self._names if name not in columns], places)
        fields = {field.name: field for field in (*decoded.schema, *map(self._schema.field, columns))}
        columns |= {name: decoded.column(name).chunks for name in decoded.schema.names}
        if self._in_layout and all(len(columns[name]) == 1 for name in self._layout_names):
            arrays = [columns[name][0] for name in self._layout_names]
            return [Block(pa.RecordBatch.from_arrays(arrays, schema=self._layout_schema))]
        table = pa.table(
            [pa.chunked_array(columns[name], field.type) for name, field in fields.items()], pa.schema(fields.values())
        )
        return [Block(self._reader.conform(batch, self._shard)) for batch in table.to_batches()]

    def _find_chunk(self, block: int, leaf: int, places: Sequence[tuple[int, pa.Buffer]]) -> pa.Buffer:
        """Return the bytes of a column of a row group."""
        start, size = self._chunk(block, leaf)
        for base, content in places:
            if size and base <= start <= start + size <= base + content.size:
                return content.slice(start - base, size)
        return pa.py_buffer(b"")

    def _decode(self, block: int, names: list[str], places: Sequence[tuple[int, pa.Buffer]]) -> pa.Table:
        """Decode columns of a row group, each into one chunk."""
        if not names:
            return pa.table({})
        file = pq.ParquetFile(
            pa.PythonFile(SparseFile(self._shard.bytes, places), "r"),
            metadata=self._metadata,
            # Each read of a Python file waits for the interpreter. Reading all columns in one go takes another thread,
            # which costs more than reading a few columns.
            pre_buffer=len(names) > _FEW_COLUMNS,
            page_checksum_verification=self._reader.verify != "never" and self._table is None,
        )
        decoded = file.read_row_group(block, names, use_threads=False)
        if len(decoded) != self.rows[block]:
            raise DecodeError(f"row group {block} has {len(decoded)} rows, and its footer says {self.rows[block]}")
        return decoded.combine_chunks()


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
