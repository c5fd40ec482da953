"""Reading shards: record batches in the layout of the class, mapped into memory, or from the cache.

A shard that is an Arrow file on this machine, in the layout of the class, is mapped as it is. Every other shard
(Parquet, remote, or in another layout) is converted once, into an Arrow file in the cache, and that copy is mapped.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quire._lowlevel.addresses import advise_random, map_file, read_ranges_ahead
from quire.columns import Columns
from quire.errors import DecodeError, ShardError, StorageError, StorageNotFoundError
from quire.files import Folder, NodeCacheError, display_uri
from quire.schema import Schema
from quire.storage._arrow_codec import ArrowCodec
from quire.storage._block_table import (
    BlockTable,
    checksum,
    count_nodes,
    find_table,
    footer_start,
    hasher,
    parse_table,
    read_from,
)
from quire.storage._cache import ShardCache, cache_key
from quire.storage._layout import CLASSES_KEY, ENUMS_KEY, FINGERPRINT_KEY, Layout, json_schema, layout_fingerprint
from quire.storage._manifest import Shard
from quire.storage._nested_codecs import DocumentCodec
from quire.storage._schema_conversion import conform_batch, stored_class_name, stored_names
from quire.storage._shard_writer import BlockFile
from quire.storage._spark_types import restore_batch, restore_schema
from quire.storage._tensor_codecs import TensorCodec
from quire.storage._verification import BlockCheck, JoinedCheck, Verify

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_ROWS, _MAX_BYTES = 8192, 16 << 20
"""At most this number of rows, and about this number of bytes, of a row group of another writer are read at a time."""
TAIL = 1 << 16
"""The bytes at the end of a remote file that are read first: nearly all footers are shorter."""


class DamagedCopyError(ShardError):
    """A copy of a shard in the cache is damaged; it was removed."""


class Block(NamedTuple):
    """A record batch of an open shard, and the check that verifies it when its rows are first read."""

    batch: pa.RecordBatch
    check: BlockCheck | None = None


class ShardReader:
    """Reads the shards of one folder in one layout."""

    def __init__(self, folder: Folder, layout: Layout, cache: ShardCache, verify: Verify = "first_touch") -> None:
        self.folder, self.layout, self.cache, self.verify = folder, layout, cache, verify
        self.reads_ahead = False
        """Whether the caller asks for what it needs of mapped files, so that the system reads nothing around it."""

    # --- mapped shards

    def open(self, shard: Shard) -> list[Block]:
        """Map the record batches of a shard. Their metadata is verified now, their columns when they are read."""
        with shard_errors(self.folder, shard):
            blocks = self._open_mapped(shard)
            if blocks is None:
                blocks = self._open_cached(shard)
        self._check_rows(shard, sum(len(block.batch) for block in blocks))
        return blocks

    def _open_mapped(self, shard: Shard) -> list[Block] | None:
        """Map the shard itself; None if it must be converted."""
        if shard.sides:
            return self._open_joined(shard)
        path = self.folder.local_path(shard.name)
        if shard.format != "arrow" or path is None:
            return None
        buffer = self._map(path, shard)
        table = self._verified_table(buffer, shard)
        if table is None and self.verify == "always":
            self._check_whole(buffer, shard)
        reader = pa.ipc.open_file(advise_random(buffer) if self.reads_ahead else buffer)
        if not self.is_in_layout(reader.schema):
            return None
        return self._read_blocks(reader, buffer, table, partial(self.altered_error, shard))

    def _open_joined(self, shard: Shard) -> list[Block] | None:
        """Map a shard and its side files, and join the columns of their blocks; None if it must be converted."""
        if shard.format != "arrow" or self.folder.local_path(shard.name) is None:
            return None
        own_codecs = [(file, self._own_codecs(file, shard)) for file in shard.files]
        # The number of blocks is that of the shard, also where all columns that are read are in side files.
        parts = [self._map_part(file, codecs) for file, codecs in own_codecs if codecs or not file.fields]
        if None in parts or len({tuple(len(block.batch) for block in part) for part in parts if part}) != 1:
            return None
        names, blocks = [codec.field.name for codec in self.layout.codecs], []
        for joined in zip(*(part for part in parts if part), strict=True):
            arrays = {name: array for block in joined for name, array in _columns_by_name(block.batch).items()}
            fields = {field.name: field for block in joined for field in block.batch.schema}
            batch = pa.RecordBatch.from_arrays(
                [arrays[name] for name in names], schema=pa.schema([fields[name] for name in names])
            )
            checks = [block.check for block in joined if block.check is not None]
            blocks.append(Block(batch, JoinedCheck(checks) if checks else None))
        return blocks

    def _map_part(self, file: Shard, codecs: Sequence[ArrowCodec]) -> list[Block] | None:
        """Map the columns of some codecs of one of the files of a shard."""
        with shard_errors(self.folder, file), local_file(self.folder, file.name) as path:
            buffer = self._map(path, file)
            table = self._verified_table(buffer, file)
            if table is None and self.verify == "always":
                self._check_whole(buffer, file)
            reader = pa.ipc.open_file(advise_random(buffer) if self.reads_ahead else buffer)
            if not self.is_in_layout(reader.schema, codecs):
                return None
            return self._read_blocks(reader, buffer, table, partial(self.altered_error, file), codecs)

    def _own_codecs(self, file: Shard, shard: Shard) -> Sequence[ArrowCodec]:
        """Return the codecs whose columns one of the files of a shard has, unless the class has renamed the field."""
        others = {name for side in shard.sides for name in side.fields}
        return [
            codec
            for codec in self.layout.codecs
            if (codec.field.name in file.fields if file.fields else codec.field.name not in others)
        ]

    def _open_cached(self, shard: Shard) -> list[Block]:
        """Map the copy of a shard in the cache; a missing or damaged one is written."""
        key = self._cache_key(shard)
        for attempt in range(2):
            with self.cache.open(key, lambda target: self._write_copy(shard, target)) as file:
                content = map_file(file)
            try:
                table = self._verified_copy_table(content)
                make_error = partial(self._damaged_copy_error, shard, key)
                return self._read_blocks(pa.ipc.open_file(content), content, table, make_error)
            except (DecodeError, pa.ArrowException):
                self.cache.remove(key)
                if attempt:  # the new copy is damaged, too: the disk does not keep what is written
                    raise
        raise AssertionError

    def _read_blocks(
        self,
        reader: Any,
        content: pa.Buffer,
        table: BlockTable | None,
        make_error: Callable[[str], ShardError],
        codecs: Sequence[ArrowCodec] | None = None,
    ) -> list[Block]:
        """Return the record batches of a file, with the columns of some codecs, by default all."""
        names = [codec.field.name for codec in (self.layout.codecs if codecs is None else codecs)]
        nodes = [] if table is None else self.layout.field_nodes(reader.schema, codecs)
        blocks = []
        for number in range(reader.num_record_batches):
            batch = select_columns(reader.get_batch(number), names)
            batch.validate()  # that buffers are as long as the number of rows requires
            check = None if table is None else BlockCheck(table, range(number, number + 1), nodes, content, make_error)
            blocks.append(Block(batch, check))
        return blocks

    def is_in_layout(self, schema: pa.Schema, codecs: Sequence[ArrowCodec] | None = None) -> bool:
        """Whether a file has a column for each field that can be read without conversion, and no unexpected nulls.

        `codecs` are those of the fields, by default all.
        """
        for codec in self.layout.codecs if codecs is None else codecs:
            places = schema.get_all_field_indices(codec.field.name)
            if len(places) != 1:
                return False
            field = schema.field(places[0])
            if (field.nullable and not codec.allows_nulls) or not codec.can_read(field):
                return False
        return True

    def _cache_key(self, shard: Shard) -> str:
        """Return the key of the copy."""
        # Copies are shared by all datasets that have the same content in the same layout, wherever it is stored; files
        # of other tools have no checksum that would identify their content.
        where = "" if shard.xxh3 else self.folder.url
        return cache_key("2", where, *shard.identity, *self._conversion(shard))

    def _conversion(self, shard: Shard) -> tuple[str, ...]:
        """Return what identifies the conversion of a shard to the layout.

        Where the shard is in another layout, the aliases and defaults of the class matter as well. A copy of what was
        not verified may hold damaged values with a valid checksum of its own: it is never shared with other readers.
        """
        layout, whole = self.layout, self.layout.schema.document_type.document_schema()
        is_same = shard.layout in (layout.fingerprint, layout_fingerprint(whole))
        unverified = ("unverified",) if self.verify == "never" else ()
        return layout.fingerprint, "" if is_same else json_schema(layout.schema), *unverified

    def conversion(self, shard: Shard) -> str:
        """Return a text that identifies the conversion of a shard to the layout."""
        return cache_key(*self._conversion(shard), str(partition_values(shard.name)))

    def _write_copy(self, shard: Shard, target: Path) -> None:
        """Write a shard as an Arrow file in the layout of the class, with a block table of its own."""
        with target.open("wb") as file:
            copy = BlockFile(file, "arrow", self.layout.arrow_schema)
            for batch in self.read(shard):
                copy.write(batch)
            copy.close()

    # --- verification

    def _map(self, path: Path, shard: Shard) -> pa.Buffer:
        with path.open("rb") as file:
            buffer = map_file(file)
        self.check_size(shard, buffer.size)
        return buffer

    def _verified_table(self, content: pa.Buffer, shard: Shard) -> BlockTable | None:
        """Return the block table of a shard, after all metadata of the file is verified.

        None if the shard has no table (format 1, other writers), or nothing is to be verified.
        """
        if self.verify == "never":
            return None
        view, place = memoryview(content), shard.table
        with self._no_read_around(content):
            if place is None and not shard.xxh3:  # a single file that quire may have written
                place = find_table(read_from(view), len(view), shard.format)
            if place is None:
                return None
            try:
                return self._check_metadata(content, place, shard)
            except DecodeError as error:
                raise self.altered_error(shard, str(error)) from error

    def _verified_copy_table(self, content: pa.Buffer) -> BlockTable | None:
        """Return the block table of a copy in the cache, after all metadata of the file is verified."""
        if self.verify == "never":
            return None
        view = memoryview(content)
        with self._no_read_around(content):
            place = find_table(read_from(view), len(view), "arrow")
            if place is None:
                raise DecodeError("the copy in the cache has no block table")
            return self._check_metadata(content, place, None)

    @staticmethod
    def _check_metadata(content: pa.Buffer, place: tuple[int, int], shard: Shard | None) -> BlockTable:
        """Return the block table of a mapped file after verifying it, and everything in the file but its columns.

        The log has the checksum of the table of a shard; nobody has that of a copy in the cache. The table is followed
        by the footer. Each of the two parts is requested from the disk at once, and not by page faults.
        """
        start, size = place
        read_ranges_ahead([(content.address + start, content.size - start)])
        data = memoryview(content)[start : start + size]
        table = parse_table(data if shard is None else check_table_bytes(data, shard))
        frame = table.regions[table.frame].tolist()
        read_ranges_ahead((content.address + offset, length) for offset, length, _ in frame)
        table.check_frame(memoryview(content))
        return table

    @contextmanager
    def _no_read_around(self, content: pa.Buffer) -> Iterator[None]:
        """Let the system read nothing but the metadata that is accessed within the context.

        There are a few bytes of it before each block, and some at the end of the file. Around a missing page, the
        system reads up to several megabytes, depending on the disk: for all metadata, that can be the whole file.
        """
        advise_random(content)
        try:
            yield
        finally:
            if not self.reads_ahead:
                advise_random(content, on=False)

    def _check_whole(self, content: pa.Buffer, shard: Shard) -> None:
        """Verify a file of format 1 against its only checksum."""
        if shard.xxh3 and shard.table is None and f"{checksum(memoryview(content)):016x}" != shard.xxh3:
            raise self.altered_error(shard, "its checksum differs")

    def check_size(self, shard: Shard, size: int) -> None:
        """Raise an error unless a file has the size that the log says."""
        if size != shard.bytes:
            raise self.altered_error(shard, f"it has {size:,} bytes, and the dataset says {shard.bytes:,}")

    def _check_rows(self, shard: Shard, rows: int) -> None:
        if shard.rows not in (-1, rows):
            raise self.altered_error(shard, f"it has {rows:,} rows, and the dataset says {shard.rows:,}")

    def altered_error(self, shard: Shard, reason: str) -> ShardError:
        """Return the error about a shard that is not what was written."""
        name = display_uri(self.folder.join(shard.name))
        return ShardError(f"{name}: the shard was altered or truncated: {reason}. Write it again.")

    def _damaged_copy_error(self, shard: Shard, key: str, reason: str) -> ShardError:
        """Remove a copy that was damaged after it was opened, and return the error; the next reader copies anew."""
        self.cache.remove(key)
        name = display_uri(self.folder.join(shard.name))
        return DamagedCopyError(
            f"{name}: the copy of the shard in the cache ({self.cache.folder / key}) was damaged: {reason}. It has "
            "been removed: read again, and the shard is copied anew."
        )

    def check(self, shard: Shard) -> None:
        """Read all of a shard, and compare its size, checksums and rows with what was written."""
        # Another reader, because this one does not verify anything if the dataset was opened with verify='never'.
        always = ShardReader(self.folder, self.layout, self.cache, "first_touch")
        for file in shard.files:
            with shard_errors(self.folder, file), self.local_file(file) as path:
                buffer = self._map(path, file)
                table = always._verified_table(buffer, file)
                if table is None:
                    self._check_whole(buffer, file)
                else:
                    try:
                        table.check_all(memoryview(buffer))
                    except DecodeError as error:
                        raise self.altered_error(file, str(error)) from error
        with shard_errors(self.folder, shard), self.local_file(shard) as path:
            rows = 0
            for batch in self._read_file(path, shard):
                batch.validate(full=True)
                rows += len(self.conform(batch, shard))
            self._check_rows(shard, rows)

    # --- shards that are read once, in order

    def read(self, shard: Shard) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of a shard in the layout of the class, whatever its format."""
        rows = 0
        with shard_errors(self.folder, shard):
            for batch in self.read_raw(shard):
                rows += len(batch)
                yield self.conform(batch, shard)
        self._check_rows(shard, rows)

    def read_columns(
        self,
        shard: Shard,
        rows: NDArray[np.int64] | None = None,
        may_match: Callable[[pq.RowGroupMetaData], bool] | None = None,
    ) -> Iterator[tuple[NDArray[np.int64], Columns]]:
        """Yield rows of a shard in order, in parts of about `_MAX_BYTES`: their numbers, and their columns.

        `rows` are ascending numbers, by default all. Row groups and record batches without one of them are not read,
        nor row groups of a Parquet file whose metadata `may_match` rules out. The cache is not used.
        """
        if rows is not None and not len(rows):
            return
        with shard_errors(self.folder, shard), self.local_file(shard) as path:
            groups = self._choose_groups(path, shard, rows, may_match)
            numbers, count = None if groups is None else groups[1], 0
            for batch in self._read_file(path, shard, None if groups is None else groups[0]):
                start, count = count, count + len(batch)
                own = np.arange(start, count) if numbers is None else numbers[start:count]
                positions = np.arange(len(own))
                if rows is not None and len(own):
                    # `own` are the numbers of the rows of this batch, ascending, with gaps where row groups were left
                    # out. Of the rows that are asked for, find those in the batch, and their places in it.
                    inside = rows[slice(*np.searchsorted(rows, [own[0], own[-1] + 1]))]
                    positions = np.searchsorted(own, inside)
                    positions = positions[own[positions] == inside]  # others are in row groups that are not read
                if len(positions):
                    conformed = self.conform(batch, shard)
                    step = max(1, _MAX_BYTES * len(batch) // max(conformed.nbytes, 1))
                    for first in range(0, len(positions), step):
                        part = positions[first : first + step]
                        yield own[part], self.layout.gather(self.layout.locate_rows(conformed, part))
        if numbers is None:
            self._check_rows(shard, count)

    def _choose_groups(
        self,
        path: Path,
        shard: Shard,
        rows: NDArray[np.int64] | None,
        may_match: Callable[[pq.RowGroupMetaData], bool] | None,
    ) -> tuple[list[int], NDArray[np.int64]] | None:
        """Return the row groups or record batches to read, and the numbers of all their rows; None to read all."""
        is_parquet = shard.format == "parquet"
        if rows is None and (may_match is None or not is_parquet):
            return None
        metadata = self._open_parquet(path, shard, ()).metadata if is_parquet else None
        counts = read_block_rows(self.folder, shard) if metadata is None else _group_rows(metadata)
        # Row groups are left out if none of their rows is asked for, or if their statistics rule all of them out.
        sizes: NDArray[np.int64] = np.array(counts, np.int64)
        if sizes.sum() != shard.rows:
            return None  # the rows of record batches are not known, or the shard is damaged, which reading all reports
        starts = np.cumsum(sizes) - sizes
        needed: NDArray[np.bool_] = np.ones(len(sizes), np.bool_)
        if rows is not None:
            needed &= np.searchsorted(rows, starts) < np.searchsorted(rows, starts + sizes)
        if may_match is not None and metadata is not None:
            needed &= [may_match(metadata.row_group(group)) for group in range(len(sizes))]
        groups = np.flatnonzero(needed)
        numbers = [np.arange(starts[group], starts[group] + sizes[group]) for group in groups]
        return groups.tolist(), np.concatenate([np.zeros(0, np.int64), *numbers])

    def read_raw(self, shard: Shard, groups: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of a shard, or of some of its row groups, as they are stored."""
        with shard_errors(self.folder, shard), self.local_file(shard) as path:
            yield from self._read_file(path, shard, groups)

    def read_blocks(self, shard: Shard) -> Iterator[pa.RecordBatch]:
        """Yield the row groups or record batches of a shard, each as one record batch in the layout of the class."""
        blocks = read_block_rows(self.folder, shard)
        with shard_errors(self.folder, shard), self.local_file(shard) as path:
            choices: list[list[int] | None] = [[number] for number in range(len(blocks))]
            for block in choices or [None]:
                batches = [self.conform(batch, shard) for batch in self._read_file(path, shard, block)]
                yield pa.concat_batches(batches) if len(batches) != 1 else batches[0]

    def _read_file(self, path: Path, shard: Shard, groups: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield record batches of a shard as they are stored, joined with the columns of its side files."""
        batches = self._read_part(path, shard, shard, groups)
        with ExitStack() as stack:
            for side in shard.sides:
                # Most readers need some of the columns, which may be in none of the side files.
                if list(_columns_of(self.layout.codecs, self.layout.schema, _named_fields(side.fields), "")):
                    with shard_errors(self.folder, side):
                        place = stack.enter_context(self.local_file(side))
                    batches = _join_batches(batches, self._read_part(place, side, shard, groups))
            yield from batches

    def _read_part(
        self, path: Path, file: Shard, shard: Shard, groups: Sequence[int] | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield record batches of one of the files of a shard."""
        codecs = self._own_codecs(file, shard)
        with shard_errors(self.folder, file):
            yield from self._read_codecs(path, file, codecs, groups)

    def _read_codecs(
        self, path: Path, shard: Shard, codecs: Sequence[ArrowCodec], groups: Sequence[int] | None
    ) -> Iterator[pa.RecordBatch]:
        if shard.format == "parquet":
            file = self._open_parquet(path, shard, groups)
            rows = self._rows_at_once(file.metadata)
            names = self.column_names(file.schema_arrow, shard)
            if names:
                yield from file.iter_batches(rows, groups, names)
            else:  # only the number of rows is needed
                counts = _group_rows(file.metadata)
                yield from (empty_batch(counts[i]) for i in (range(len(counts)) if groups is None else groups))
            return
        buffer = self._map(path, shard)
        table = self._verified_table(buffer, shard)
        # Without a block table there is one checksum for the whole file, which would be read for some blocks of it.
        if table is None and groups is None and self.verify != "never":
            self._check_whole(buffer, shard)
        reader = pa.ipc.open_file(buffer)
        # In the layout of the class, values are checked when rows are gathered, and only its columns are verified.
        in_layout = self.is_in_layout(reader.schema, codecs) and (bool(codecs) or not shard.fields)
        names = [codec.field.name for codec in codecs] if in_layout else reader.schema.names
        nodes: list[list[int]] = []
        if table is not None and in_layout:
            nodes = [own for own in self.layout.field_nodes(reader.schema, codecs) if own]
        elif table is not None:
            nodes = [list(range(sum(count_nodes(field.type) for field in reader.schema)))]
        for number in range(reader.num_record_batches) if groups is None else groups:
            if table is not None:
                make_error = partial(self.altered_error, shard)
                check = BlockCheck(table, range(number, number + 1), nodes, buffer, make_error)
                read_ranges_ahead(check.due_ranges(None))
                check(None)
            batch = select_columns(reader.get_batch(number), names)
            batch.validate(full=not in_layout)
            yield batch

    def _open_parquet(self, path: Path, shard: Shard, groups: Iterable[int] | None = None) -> pq.ParquetFile:
        """Open a Parquet file after the columns that are read of some row groups, or of all, are verified."""
        buffer = self._map(path, shard)
        table = self._verified_table(buffer, shard)
        is_verified = self.verify != "never"
        # A file without a block table is verified as a whole, or else by the checksums that its pages may have.
        if table is None and is_verified and groups is None:
            self._check_whole(buffer, shard)
        source = pa.BufferReader(buffer)
        file = pq.ParquetFile(source, page_checksum_verification=is_verified and table is None)
        if table is not None:
            self._check_groups(table, memoryview(buffer), shard, file, groups)
        return file

    def _rows_at_once(self, metadata: pq.FileMetaData) -> int:
        """Return the number of rows of a Parquet file that have about `_MAX_BYTES`, whatever its row groups are."""
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        # The size of a row group is that of encoded pages: a dictionary page may hold one tensor for many rows.
        tensors = sum(codec.width for codec in self.layout.codecs if isinstance(codec, TensorCodec))
        widest: int = max([tensors, *(group.total_byte_size // max(group.num_rows, 1) for group in groups)])
        return max(1, min(_MAX_ROWS, _MAX_BYTES // max(widest, 1)))

    def check_row_group(self, path: Path, shard: Shard, file: pq.ParquetFile, group: int) -> None:
        """Verify the columns that the layout reads of one row group."""
        if self.verify != "never" and shard.table is not None:
            buffer = self._map(path, shard)
            table = self._verified_table(buffer, shard)
            if table is not None:
                self._check_groups(table, memoryview(buffer), shard, file, (group,))

    def _check_groups(
        self, table: BlockTable, content: memoryview, shard: Shard, file: pq.ParquetFile, groups: Iterable[int] | None
    ) -> None:
        """Verify the columns that the layout reads of some row groups of a Parquet file, or of all."""
        names = self.column_names(file.schema_arrow, shard)
        leaves = [
            number
            for number, path in enumerate(table.names)
            if any(path == name or path.startswith(f"{name}.") for name in names)
        ]
        try:
            for group in range(len(table.blocks)) if groups is None else groups:
                for leaf in leaves:
                    table.check_column(content, group, leaf)
        except DecodeError as error:
            raise self.altered_error(shard, str(error)) from error

    def column_names(self, schema: pa.Schema, shard: Shard) -> list[str]:
        """Return the columns of a Parquet file that the layout reads, under any name that the class accepts."""
        names = [*schema.names, *partition_values(shard.name), *(name for side in shard.sides for name in side.fields)]
        self.layout.schema.check_related(names, stored_class_name(schema, ""))
        return list(_columns_of(self.layout.codecs, self.layout.schema, schema, ""))

    def conform(self, batch: pa.RecordBatch, shard: Shard) -> pa.RecordBatch:
        """Convert a record batch to the layout of the class."""
        in_path = {name: pa.repeat(value, len(batch)) for name, value in partition_values(shard.name).items()}
        self.layout.schema.check_related([*batch.schema.names, *in_path], stored_class_name(batch.schema, ""))
        return conform_batch(self.layout, restore_batch(batch), in_path)

    def local_file(self, shard: Shard) -> AbstractContextManager[Path]:
        """Yield the path of a shard on this machine; a remote one is fetched next to the files of the cache."""
        return local_file(self.folder, shard.name, self.cache.folder)


@contextmanager
def local_file(folder: Folder, name: str, fetch_into: Path | None = None) -> Iterator[Path]:
    """Yield the path of a file on this machine; a remote file is fetched, and removed afterwards.

    `fetch_into` is the folder that it is fetched into, by default that of the system for temporary files.
    """
    path = folder.local_path(name)
    if path is not None:
        if not path.exists():
            raise StorageNotFoundError(f"{path}: there is no such file.")
        yield path
        return
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=fetch_into) as place:
        target = Path(place, "file")
        folder.fetch(name, target)
        yield target


def check_table_bytes(table: memoryview, shard: Shard) -> memoryview:
    """Return the bytes of a block table, after comparing them with the checksum in the log."""
    if shard.table is not None and f"{checksum(table):016x}" != shard.xxh3:
        raise DecodeError("the checksum of its block table differs from what was written")
    return table


def empty_batch(rows: int) -> pa.RecordBatch:
    """Return a record batch that has rows, but no columns."""
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


def select_columns(batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
    """Return some columns of a record batch; without names, one that has only rows."""
    return batch.select(names) if names else empty_batch(len(batch))


def _columns_by_name(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    return dict(zip(batch.schema.names, batch.columns, strict=True))


def _named_fields(names: Iterable[str]) -> list[pa.Field]:
    return [pa.field(name, pa.null()) for name in names]


def _join_batches(left: Iterator[pa.RecordBatch], right: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the columns of both, row by row: the batches of both sides may end at different rows."""
    one, other = empty_batch(0), empty_batch(0)
    while True:
        one = one if len(one) else next((batch for batch in left if len(batch)), one)
        other = other if len(other) else next((batch for batch in right if len(batch)), other)
        count = min(len(one), len(other))
        if not count:
            if len(one) or len(other):
                raise DecodeError("the shard and its side files have different numbers of rows")
            return
        parts = [one.slice(0, count), other.slice(0, count)]
        if not all(part.num_columns for part in parts):
            yield next((part for part in parts if part.num_columns), parts[0])
        else:
            fields = [field for part in parts for field in part.schema]
            arrays = [array for part in parts for array in part.columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=parts[0].schema.metadata))
        one, other = one.slice(count), other.slice(count)


def _group_rows(metadata: pq.FileMetaData) -> list[int]:
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _columns_of(codecs: Sequence[ArrowCodec], schema: Schema, fields: Any, prefix: str) -> Iterator[str]:
    """Yield the columns that hold the fields of codecs; of nested documents, only the fields that are read."""
    types = {field.name: field.type for field in fields}
    names = stored_names(schema, types)
    for codec in codecs:
        name = names.get(codec.field.name)
        if name is None:  # it is filled with the default of the field
            continue
        nested: list[str] = []
        if isinstance(codec, DocumentCodec) and pa.types.is_struct(types[name]) and codec.is_narrow:
            children = [types[name].field(i) for i in range(types[name].num_fields)]
            nested = list(_columns_of(codec.codecs, codec.schema, children, f"{prefix}{name}."))
        yield from nested or [f"{prefix}{name}"]


def partition_values(name: str) -> dict[str, int | str | None]:
    """Return the columns in the path of a file, as Spark and Hive write them: 'year=2024/lang=en/part-0.parquet'."""
    values: dict[str, int | str | None] = {}
    for part in name.split("/")[:-1]:
        key, equals, text = part.partition("=")
        if equals:
            text = unquote(text)
            # Up to 18 digits always fit into 64 bits; longer numbers are rather names.
            is_null, is_int = text == "__HIVE_DEFAULT_PARTITION__", re.fullmatch(r"-?\d{1,18}", text)
            values[unquote(key)] = None if is_null else int(text) if is_int else text
    return values


@contextmanager
def shard_errors(folder: Folder, shard: Shard) -> Iterator[None]:
    """Raise errors within the context as a `ShardError` that names the shard."""
    name = display_uri(folder.join(shard.name))
    try:
        yield
    except (ShardError, NodeCacheError):
        raise
    except StorageNotFoundError as error:
        raise ShardError(
            f"{name}: the shard is missing. If the dataset was written anew in the meantime, open it again; otherwise "
            "verify() finds out whether others are missing."
        ) from error
    except (pa.ArrowException, DecodeError, ValueError, OverflowError, EOFError, MemoryError) as error:
        raise ShardError(f"{name}: the shard cannot be read: {error}") from error
    except StorageError as error:
        raise ShardError(f"{name}: {error}") from error
    except OSError as error:
        raise ShardError(f"{name}: {error.strerror or error}") from error


# --- metadata of shards, read without their data


class RangeReader:
    """A shard as a file object for pyarrow, which reads ranges of it, such as the footer, from any store."""

    closed = False

    def __init__(self, folder: Folder, shard: Shard) -> None:
        self._folder, self._shard, self._position = folder, shard, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Change the position."""
        self._position = offset + (0, self._position, self._shard.bytes)[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def read(self, count: int = -1) -> bytes:
        """Read the next bytes."""
        end = self._shard.bytes if count < 0 else min(self._position + count, self._shard.bytes)
        content = self._folder.read_range(self._shard.name, self._position, end)
        self._position = end
        return content

    def size(self) -> int:
        """Return the size of the file."""
        return self._shard.bytes

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Do nothing: every read is a request of its own."""


def read_table(folder: Folder, shard: Shard) -> BlockTable | None:
    """Read the block table of a shard, in one read of a range; None for format 1 and files of other writers."""
    if shard.table is None:
        return None
    with shard_errors(folder, shard):
        start, size = shard.table
        return parse_table(check_table_bytes(memoryview(folder.read_range(shard.name, start, start + size)), shard))


def read_block_rows(folder: Folder, shard: Shard) -> tuple[int, ...]:
    """Return the number of rows of each row group or record batch of a shard."""
    table = read_table(folder, shard)
    return shard.groups if table is None else table.rows


def read_arrow_schema(folder: Folder, shard: Shard) -> pa.Schema:
    """Read the Arrow schema in the footer of a shard, and in those of its side files."""
    schema = _read_own_schema(folder, shard)
    for side in shard.sides:
        added = _read_own_schema(folder, side)
        # The class is the one that the columns were added for. What the metadata says about single fields is of both.
        metadata = {**(schema.metadata or {}), **(added.metadata or {})}
        for key in (CLASSES_KEY, ENUMS_KEY):
            each = [json.loads(part.metadata[key]) for part in (schema, added) if key in (part.metadata or {})]
            metadata[key] = json.dumps({name: value for known in each for name, value in known.items()}).encode()
        schema = pa.schema([*schema, *added], metadata=metadata)
    return schema


def _read_own_schema(folder: Folder, shard: Shard) -> pa.Schema:
    with shard_errors(folder, shard):
        if shard.table is not None:
            start, size = shard.table
            tail = memoryview(folder.read_range(shard.name, start, shard.bytes))
            try:
                parse_table(check_table_bytes(tail[:size], shard)).check_footer(tail, start)
            except DecodeError as error:
                raise ShardError(f"{display_uri(folder.join(shard.name))}: the shard was altered: {error}.") from error
        with pa.PythonFile(RangeReader(folder, shard), "r") as file:
            return restore_schema(pq.read_schema(file)) if shard.format == "parquet" else pa.ipc.open_file(file).schema


def read_null_count(folder: Folder, shard: Shard, path: str) -> int | None:
    """Return the number of nulls in a column of a shard that quire wrote; None if the metadata does not have it.

    A column of nested documents has a number only where none of the documents around it is missing: in Arrow data,
    values inside a missing document are not nulls of their own.
    """
    table = read_table(folder, shard)
    if table is not None:
        counts = table.null_counts()
    elif shard.format == "parquet":
        with shard_errors(folder, shard), pa.PythonFile(RangeReader(folder, shard), "r") as file:
            counts = footer_null_counts(pq.read_metadata(file))
    else:
        return None
    # Parquet counts a value in a missing document as a null, and Arrow does not. Without missing documents, both agree.
    parts = path.split(".")
    above = [counts.get(".".join(parts[:size]), 0) for size in range(1, len(parts))]
    count = counts.get(path, -1)
    return None if count < 0 or any(above) else count


def footer_null_counts(metadata: pq.FileMetaData) -> dict[str, int]:
    """Return the number of nulls of each column of a Parquet file; -1 if some row group does not have it."""
    counts: dict[str, int] = {}
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            statistics: Any = chunk.statistics if chunk.is_stats_set else None
            is_known = statistics is not None and statistics.has_null_count
            before = counts.get(chunk.path_in_schema, 0)
            counts[chunk.path_in_schema] = before + statistics.null_count if is_known and before >= 0 else -1
    return counts


def count_rows(folder: Folder, shard: Shard, keep_tail: Callable[[Shard, bytes], None] | None = None) -> Shard:
    """Return a shard of another writer with its number of rows, from its footer.

    `keep_tail` gets the shard and the last bytes of a remote Parquet file, so that they need not be read again.
    """
    if shard.rows >= 0:
        return shard
    path = folder.local_path(shard.name)
    with shard_errors(folder, shard):
        # The stamp tells this file from a later one of the same name and size: by the time of a local file; of a
        # remote one, by a checksum of its end, which has the sizes of all its parts.
        if path is not None:
            stamp = str(path.stat().st_mtime_ns)
        else:
            start = max(0, shard.bytes - TAIL)
            tail = folder.read_range(shard.name, start, shard.bytes)
            stamp = f"{checksum(tail):016x}"
        if shard.format == "parquet" and path is None:
            at = footer_start(lambda first, last: tail[first - start : last - start], shard.bytes, "parquet")
            footer = tail[at - start :] if at >= start else folder.read_range(shard.name, at, shard.bytes)
            groups = tuple(_group_rows(parse_footer(footer)))
        else:
            with pa.PythonFile(RangeReader(folder, shard), "r") as file:
                if shard.format == "parquet":
                    groups = tuple(_group_rows(pq.read_metadata(file)))
                else:
                    reader = pa.ipc.open_file(file)
                    groups = tuple(len(reader.get_batch(i)) for i in range(reader.num_record_batches))
        counted = replace(shard, rows=sum(groups), groups=groups, stamp=stamp)
        if path is None and keep_tail is not None:
            keep_tail(counted, tail)
        return counted


def parse_footer(footer: bytes | memoryview) -> pq.FileMetaData:
    """Return the metadata in the footer of a Parquet file, of which these are the last bytes."""
    return pq.read_metadata(pa.BufferReader(b"PAR1" + bytes(footer)))


def recover_shard(folder: Folder, shard: Shard) -> Shard:
    """Return a complete file whose writer was killed before it could log it, with all that a log says about a shard."""
    metadata = read_arrow_schema(folder, shard).metadata or {}
    recovered = replace(count_rows(folder, shard), layout=metadata.get(FINGERPRINT_KEY, b"").decode(), stamp="")
    with shard_errors(folder, shard):
        place = find_table(partial(folder.read_range, shard.name), shard.bytes, shard.format)
        if place is None:  # format 1
            digest = hasher()
            for start in range(0, shard.bytes, _MAX_BYTES):
                digest.update(folder.read_range(shard.name, start, min(start + _MAX_BYTES, shard.bytes)))
            return replace(recovered, xxh3=digest.hexdigest())
        table = folder.read_range(shard.name, place[0], sum(place))
        blocks = len(parse_table(memoryview(table)).blocks)
    return replace(recovered, xxh3=f"{checksum(table):016x}", table=place, blocks=blocks, groups=())
