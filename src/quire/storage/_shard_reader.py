"""Opening shards: record batches in the layout of the class, mapped into memory, from the cache where they must be."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quire.columns import Columns
from quire.errors import DecodeError, ShardError, StorageError, StorageNotFoundError
from quire.files import Folder, shown
from quire.schema import Schema
from quire.storage._arrow_codec import ArrowCodec
from quire.storage._block_table import (
    BlockTable,
    checksum,
    count_nodes,
    find_table,
    hasher,
    parse_table,
    reads_from,
)
from quire.storage._cache import ShardCache, cache_key
from quire.storage._layout import FINGERPRINT_KEY, Layout, json_schema, layout_fingerprint
from quire.storage._manifest import Shard
from quire.storage._memory import advise_random, map_file, read_ahead
from quire.storage._nested_codecs import DocumentCodec
from quire.storage._row_locations import RowLocations
from quire.storage._schema_conversion import conform_fields, fits, stored_names
from quire.storage._shard_writer import BlockFile
from quire.storage._spark_types import restore_batch, restore_schema
from quire.storage._tensor_codecs import TensorCodec
from quire.storage._verification import BlockCheck, Verify, layout_nodes

_ROWS, _BYTES = 8192, 16 << 20
"""Of a row group of another writer, so many rows, or bytes, are read at a time."""
_TAIL = 1 << 16


class SpoiledCopyError(ShardError):
    """A copy of a shard in the cache is damaged; it was removed."""


class Block(NamedTuple):
    """A record batch of an open shard, and what verifies it when its rows are first read."""

    batch: pa.RecordBatch
    check: BlockCheck | None = None


class ShardReader:
    """Reads the shards of one folder in one layout."""

    def __init__(self, folder: Folder, layout: Layout, cache: ShardCache, verify: Verify = "first_touch") -> None:
        self.folder, self.layout, self.cache, self.verify = folder, layout, cache, verify
        self.advise_random = False

    def open(self, shard: Shard) -> list[Block]:
        """The record batches of a shard, mapped into memory. Their metadata is verified here, their columns later."""
        with shard_errors(self.folder, shard):
            blocks = self._mapped(shard)
            if blocks is None:
                blocks = self._from_cache(shard)
        self._check_rows(shard, sum(len(block.batch) for block in blocks))
        return blocks

    def _mapped(self, shard: Shard) -> list[Block] | None:
        """The shard itself, if it can be mapped as it is."""
        path = self.folder.local_path(shard.name)
        if shard.format != "arrow" or path is None:
            return None
        buffer = self._buffer(path, shard)
        table = self._checked_table(buffer, shard)
        if table is None and self.verify == "always":
            self._check_whole(buffer, shard)
        reader = pa.ipc.open_file(advise_random(buffer) if self.advise_random else buffer)
        if not self._in_layout(reader.schema):
            return None
        return self._selected(reader, buffer, table, lambda why: self._altered(shard, why))

    def _buffer(self, path: Path, shard: Shard) -> pa.Buffer:
        with path.open("rb") as file:
            buffer = map_file(file)
        self._check_size(shard, buffer.size)
        return buffer

    def _checked_table(self, content: pa.Buffer, shard: Shard) -> BlockTable | None:
        """The block table of a shard, with all metadata of the file verified; None if it has none, or is trusted."""
        if self.verify == "never":
            return None
        view = memoryview(content)
        place = shard.table
        with self._no_read_around(content):
            if place is None and not shard.xxh3:  # a single file that quire may have written
                place = find_table(reads_from(view), len(view), shard.format)
            if place is None:
                return None
            try:
                table = parse_table(_table_bytes(view[place[0] : sum(place)], shard))
                _check_frame(table, content)
            except DecodeError as error:
                raise self._altered(shard, str(error)) from error
        return table

    @contextmanager
    def _no_read_around(self, content: pa.Buffer) -> Iterator[None]:
        """Let the system read nothing but the metadata that is looked at within the context.

        There are a few bytes of it in front of each block, and some at the end of the file. Around a page that is
        missing, the system reads up to several megabytes, depending on the disk: for all of the metadata, that can be
        all of the file.
        """
        advise_random(content)
        try:
            yield
        finally:
            if not self.advise_random:
                advise_random(content, on=False)

    def _check_whole(self, content: pa.Buffer, shard: Shard) -> None:
        """Compare a file of format 1 with its only checksum."""
        if shard.xxh3 and shard.table is None and f"{checksum(memoryview(content)):016x}" != shard.xxh3:
            raise self._altered(shard, "its checksum is another one")

    def _in_layout(self, schema: pa.Schema) -> bool:
        places = [(codec, schema.get_all_field_indices(codec.field.name)) for codec in self.layout.codecs]
        return all(len(found) == 1 and fits(codec, schema.field(found[0])) for codec, found in places)

    def _selected(
        self, reader: Any, content: pa.Buffer, table: BlockTable | None, fail: Callable[[str], ShardError]
    ) -> list[Block]:
        names = [codec.field.name for codec in self.layout.codecs]
        nodes = [] if table is None else layout_nodes(self.layout.codecs, reader.schema)
        blocks = []
        for number in range(reader.num_record_batches):
            batch = _select(reader.get_batch(number), names)
            batch.validate()  # that the buffers are as long as the rows ask for
            check = None if table is None else BlockCheck(table, range(number, number + 1), nodes, content, fail)
            blocks.append(Block(batch, check))
        return blocks

    def _from_cache(self, shard: Shard) -> list[Block]:
        key = self._key(shard)
        for attempt in range(2):
            with self.cache.open(key, lambda target: self._transcode(shard, target)) as file:
                content = map_file(file)
            try:
                return self._copied(content, shard, key)
            except (DecodeError, pa.ArrowException):
                self.cache.remove(key)  # a copy that is damaged is made anew
                if attempt:
                    raise
        raise AssertionError

    def _copied(self, content: pa.Buffer, shard: Shard, key: str) -> list[Block]:
        """The record batches of the copy of a shard in the cache."""
        table = None
        if self.verify != "never":
            view = memoryview(content)
            with self._no_read_around(content):
                place = find_table(reads_from(view), len(view), "arrow")
                if place is None:
                    raise DecodeError("the copy in the cache has no block table")
                table = parse_table(view[place[0] : sum(place)])
                _check_frame(table, content)
        return self._selected(pa.ipc.open_file(content), content, table, lambda why: self._spoiled(shard, key, why))

    def _spoiled(self, shard: Shard, key: str, why: str) -> ShardError:
        """A copy in the cache that was damaged after it was opened; the next one to open the shard makes another."""
        self.cache.remove(key)
        name = shown(self.folder.join(shard.name))
        return SpoiledCopyError(
            f"{name}: the copy of the shard in the cache ({self.cache.folder / key}) was damaged: {why}. It has been "
            "removed: read again, and the shard is copied anew."
        )

    def _key(self, shard: Shard) -> str:
        """What is in the cache depends on the class too where the shard is not in its layout: on aliases, defaults."""
        layout, whole = self.layout, self.layout.schema.document_type.document_schema()
        same = shard.layout in (layout.fingerprint, layout_fingerprint(whole))
        where = "" if shard.xxh3 else self.folder.url
        about = "" if same else json_schema(layout.schema)
        return cache_key("2", where, *shard.identity, layout.fingerprint, about)

    def _transcode(self, shard: Shard, target: Path) -> None:
        """Write a shard anew as Arrow, in the layout of the class, with a block table of its own."""
        with target.open("wb") as file:
            copy = BlockFile(file, "arrow", self.layout.arrow_schema)
            for batch in self.read(shard):
                copy.write(batch)
            copy.close()

    def read(self, shard: Shard) -> Iterator[pa.RecordBatch]:
        """The record batches of a shard in the layout of the class, one at a time, whatever its format."""
        rows = 0
        with shard_errors(self.folder, shard):
            for batch in self.raw(shard):
                rows += len(batch)
                yield self.conformed(batch, shard)
        self._check_rows(shard, rows)

    def raw(self, shard: Shard, groups: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
        """The record batches of a shard as they are; or those of some of its row groups."""
        with shard_errors(self.folder, shard), self.local_file(shard) as path:
            yield from self._batches(path, shard, groups)

    def _batches(self, path: Path, shard: Shard, groups: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
        if shard.format == "parquet":
            file = self._parquet(path, shard, groups)
            rows = _rows_at_once(file.metadata, self.layout)
            names = self._wanted(file.schema_arrow)
            if names:
                yield from file.iter_batches(rows, groups, names)
            else:  # nothing but the number of rows is asked for
                counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                yield from (empty_batch(counts[i]) for i in (range(len(counts)) if groups is None else groups))
            return
        buffer = self._buffer(path, shard)
        table = self._checked_table(buffer, shard)
        if table is None and groups is None and self.verify != "never":
            self._check_whole(buffer, shard)
        reader = pa.ipc.open_file(buffer)
        checked = self._in_layout(reader.schema)  # then each row is looked at when it is gathered
        names = [codec.field.name for codec in self.layout.codecs] if checked else reader.schema.names
        nodes = None if table is None else self._nodes(reader.schema, checked=checked)
        for number in range(reader.num_record_batches) if groups is None else groups:
            if table is not None and nodes is not None:
                fail = partial(self._altered, shard)
                BlockCheck(table, range(number, number + 1), nodes, buffer, fail)(None)
            batch = _select(reader.get_batch(number), names)
            batch.validate(full=not checked)
            yield batch

    def _nodes(self, schema: pa.Schema, *, checked: bool) -> list[list[int]]:
        """The field nodes to verify: those that the layout reads, or all where the file is in another layout."""
        if checked:
            return layout_nodes(self.layout.codecs, schema)
        return [list(range(sum(count_nodes(field.type) for field in schema)))]

    def _parquet(self, path: Path, shard: Shard, groups: Iterable[int] | None = None) -> pq.ParquetFile:
        """An open Parquet file; what is read of some of its row groups, or of all, is verified."""
        buffer = self._buffer(path, shard)
        table = self._checked_table(buffer, shard)
        is_checked = self.verify != "never"
        if table is None and is_checked and groups is None:
            self._check_whole(buffer, shard)
        source = pa.BufferReader(buffer)
        file = pq.ParquetFile(source, page_checksum_verification=is_checked and table is None)
        if table is not None:
            self._check_groups(table, memoryview(buffer), shard, file, groups)
        return file

    def check_row_group(self, path: Path, shard: Shard, file: pq.ParquetFile, group: int) -> None:
        """Verify what the layout reads of one row group."""
        if self.verify != "never" and shard.table is not None:
            buffer = self._buffer(path, shard)
            table = self._checked_table(buffer, shard)
            if table is not None:
                self._check_groups(table, memoryview(buffer), shard, file, (group,))

    def _check_groups(
        self, table: BlockTable, content: memoryview, shard: Shard, file: pq.ParquetFile, groups: Iterable[int] | None
    ) -> None:
        """Verify the columns that the layout reads of some row groups of a Parquet file, or of all."""
        names = self._wanted(file.schema_arrow)
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
            raise self._altered(shard, str(error)) from error

    def groups(self, shard: Shard, wanted: Callable[[Any], bool]) -> Iterator[tuple[int, Columns]]:
        """The row groups of a Parquet shard whose metadata are wanted: the number of the first row, and the columns."""
        with shard_errors(self.folder, shard), self.local_file(shard) as path:
            file = self._parquet(path, shard, ())
            numbers = [i for i in range(file.num_row_groups) if wanted(file.metadata.row_group(i))]
            file = self._parquet(path, shard, numbers)
            rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            for number in numbers:
                table = file.read_row_group(number, columns=self._wanted(file.schema_arrow))
                start = sum(rows[:number])
                for batch in table.to_batches():
                    yield start, self.columns(self.conformed(batch, shard))
                    start += len(batch)

    def read_block_rows(self, shard: Shard) -> tuple[int, ...]:
        """The rows of each row group, or record batch."""
        return read_block_rows(self.folder, shard)

    def columns(self, batch: pa.RecordBatch) -> Columns:
        """The columns of a record batch in the layout of the class, copied."""
        addresses = self.layout.addresses()
        addresses.add(self.layout.locate(batch), batch)
        rows = np.arange(len(batch), dtype=np.int64)
        return self.layout.gather(RowLocations(addresses, np.zeros(len(batch), np.int64), rows))

    def _wanted(self, schema: pa.Schema) -> list[str]:
        """The columns of a Parquet file that the layout asks for, under any name that the class accepts."""
        return list(_columns_of(self.layout.codecs, self.layout.schema, schema, ""))

    def conformed(self, batch: pa.RecordBatch, shard: Shard) -> pa.RecordBatch:
        """A record batch in the layout of the class."""
        batch = restore_batch(batch)
        found = dict(zip(batch.schema.names, zip(batch.schema, batch.columns, strict=True), strict=True))
        for name, value in partition_values(shard.name).items():
            array = pa.repeat(value, len(batch))
            found.setdefault(name, (pa.field(name, array.type), array))
        arrays = conform_fields(self.layout.codecs, found, self.layout.schema, None, len(batch))
        return self.layout.batch(arrays, len(batch))

    def local_file(self, shard: Shard) -> AbstractContextManager[Path]:
        """Yield the path of a shard on this machine; a remote one is fetched next to the files of the cache."""
        return local_file(self.folder, shard.name, self.cache.folder)

    def _check_size(self, shard: Shard, size: int) -> None:
        if size != shard.bytes:
            raise self._altered(shard, f"it has {size:,} bytes, and the dataset says {shard.bytes:,}")

    def _check_rows(self, shard: Shard, rows: int) -> None:
        if shard.rows not in (-1, rows):
            raise self._altered(shard, f"it has {rows:,} rows, and the dataset says {shard.rows:,}")

    def _altered(self, shard: Shard, why: str) -> ShardError:
        """A shard that is not what was written."""
        name = shown(self.folder.join(shard.name))
        return ShardError(f"{name}: the shard was altered or cut off: {why}. Write it again.")

    def check(self, shard: Shard) -> None:
        """Read all of a shard, and compare its size, checksums and rows."""
        whole = ShardReader(self.folder, self.layout, self.cache, "first_touch")
        with shard_errors(self.folder, shard), self.local_file(shard) as path:
            buffer = self._buffer(path, shard)
            table = whole._checked_table(buffer, shard)
            if table is None:
                self._check_whole(buffer, shard)
            else:
                try:
                    table.check_all(memoryview(buffer))
                except DecodeError as error:
                    raise self._altered(shard, str(error)) from error
            rows = 0
            for batch in self._batches(path, shard):
                batch.validate(full=True)
                rows += len(self.conformed(batch, shard))
            self._check_rows(shard, rows)


def _check_frame(table: BlockTable, content: pa.Buffer) -> None:
    """Verify the metadata of a mapped file, all of which is asked for at once."""
    places = table.regions[table.frame, :2].astype(np.int64)
    read_ahead(places[:, 0] + content.address, places[:, 1])
    table.check_frame(memoryview(content))


def _table_bytes(table: memoryview, shard: Shard) -> memoryview:
    """The bytes of a block table, if they are those that the log of the shard means."""
    if shard.table is not None and f"{checksum(table):016x}" != shard.xxh3:
        raise DecodeError("the checksum of its block table differs from what was written")
    return table


def read_table(folder: Folder, shard: Shard) -> BlockTable | None:
    """The block table of a shard, in one read of a part of the file; None for format 1 and other writers' files."""
    if shard.table is None:
        return None
    with shard_errors(folder, shard):
        start, size = shard.table
        return parse_table(_table_bytes(memoryview(folder.read_range(shard.name, start, start + size)), shard))


def read_block_rows(folder: Folder, shard: Shard) -> tuple[int, ...]:
    """The rows of each row group, or record batch, of a shard."""
    table = read_table(folder, shard)
    return shard.groups if table is None else table.rows


def read_null_count(folder: Folder, shard: Shard, path: str) -> int | None:
    """The nulls of a column of a shard that quire wrote, from its metadata; None if that does not say.

    A column of nested documents counts only where none of the documents around it is missing: in Arrow data, values
    inside a missing document are not nulls of their own.
    """
    counts: dict[str, int]
    table = read_table(folder, shard)
    if table is not None:
        sums = np.where((table.nulls < 0).any(axis=0), -1, table.nulls.sum(axis=0)).tolist()
        counts = dict(zip(table.names, sums, strict=True))
    elif shard.format == "parquet":
        with shard_errors(folder, shard), pa.PythonFile(RangeReader(folder, shard), "r") as file:
            counts = _footer_nulls(pq.read_metadata(file))
    else:
        return None
    parts = path.split(".")
    above = [counts.get(".".join(parts[:size]), 0) for size in range(1, len(parts))]
    found = counts.get(path, -1)
    return None if found < 0 or any(above) else found


def _footer_nulls(metadata: pq.FileMetaData) -> dict[str, int]:
    counts: dict[str, int] = {}
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            statistics: Any = chunk.statistics if chunk.is_stats_set else None
            known = statistics is not None and statistics.has_null_count
            before = counts.get(chunk.path_in_schema, 0)
            counts[chunk.path_in_schema] = before + statistics.null_count if known and before >= 0 else -1
    return counts


def empty_batch(rows: int) -> pa.RecordBatch:
    """A record batch without columns, which has rows all the same."""
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


def _select(batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
    return batch.select(names) if names else empty_batch(len(batch))


def _rows_at_once(metadata: pq.FileMetaData, layout: Layout) -> int:
    """How many rows of a Parquet file are read at a time: about so many bytes, whatever its row groups are."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    tensors = sum(
        codec.width for codec in layout.codecs if isinstance(codec, TensorCodec)
    )  # a page may hold one many times
    widest: int = max([tensors, *(group.total_byte_size // max(group.num_rows, 1) for group in groups)])
    return max(1, min(_ROWS, _BYTES // max(widest, 1)))


def _columns_of(codecs: Sequence[ArrowCodec], schema: Schema, fields: Any, before: str) -> Iterator[str]:
    """The columns that hold what forms ask for; of nested documents, only the parts that are read."""
    found = {field.name: field.type for field in fields}
    names = stored_names(schema, found)
    for codec in codecs:
        name = names.get(codec.field.name)
        if name is None:
            continue
        inner = found[name]
        parts: list[str] = []
        if isinstance(codec, DocumentCodec) and pa.types.is_struct(inner) and codec.is_narrow:
            children = [inner.field(i) for i in range(inner.num_fields)]
            parts = list(_columns_of(codec.codecs, codec.schema, children, f"{before}{name}."))
        yield from parts or [f"{before}{name}"]


def partition_values(name: str) -> dict[str, int | str | None]:
    """The columns that the folders of a file tell, as Spark and Hive name them: 'year=2024/lang=en/part-0.parquet'."""
    parts = [part.partition("=") for part in name.split("/")[:-1] if "=" in part]
    return {unquote(key): _partition_value(unquote(value)) for key, _, value in parts}


def _partition_value(text: str) -> int | str | None:
    if text == "__HIVE_DEFAULT_PARTITION__":
        return None
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text


@contextmanager
def local_file(folder: Folder, name: str, fetch_into: Path | None = None) -> Iterator[Path]:
    """Yield the path of a file of a folder on this machine; a remote file is fetched, and removed afterwards.

    `fetch_into` is the folder that it is fetched into; by default, that of the system for temporary files.
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


@contextmanager
def shard_errors(folder: Folder, shard: Shard) -> Iterator[None]:
    """Raise what goes wrong with a shard as a `ShardError` that names it."""
    name = shown(folder.join(shard.name))
    try:
        yield
    except ShardError:
        raise
    except StorageNotFoundError as error:
        raise ShardError(
            f"{name}: the shard is missing. If the dataset was written anew meanwhile, open it again; else verify() "
            "tells whether others are."
        ) from error
    except (pa.ArrowException, DecodeError, ValueError, OverflowError, EOFError, MemoryError) as error:
        raise ShardError(f"{name}: the shard cannot be read: {error}") from error
    except StorageError as error:
        raise ShardError(f"{name}: {error}") from error
    except OSError as error:
        raise ShardError(f"{name}: {error.strerror or error}") from error


def count_rows(folder: Folder, shard: Shard) -> Shard:
    """A shard of another writer with its rows, which its footer tells."""
    if shard.rows >= 0:
        return shard
    with shard_errors(folder, shard), pa.PythonFile(RangeReader(folder, shard), "r") as file:
        if shard.format == "parquet":
            metadata = pq.read_metadata(file)
            groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        else:
            opened = pa.ipc.open_file(file)
            groups = tuple(len(opened.get_batch(i)) for i in range(opened.num_record_batches))
        return replace(shard, rows=sum(groups), groups=groups, stamp=_stamp(folder, shard))


def _stamp(folder: Folder, shard: Shard) -> str:
    """The time of a local file; of a remote one, a checksum of its end, where the sizes of all of its parts are."""
    path = folder.local_path(shard.name)
    if path is not None:
        return str(path.stat().st_mtime_ns)
    return f"{checksum(folder.read_range(shard.name, max(0, shard.bytes - _TAIL), shard.bytes)):016x}"


def recover_shard(folder: Folder, shard: Shard) -> Shard:
    """A whole file whose writer was killed before it could log it, with everything that a log says of a shard."""
    counted_shard = count_rows(folder, shard)
    metadata = read_arrow_schema(folder, shard).metadata or {}
    found = replace(counted_shard, layout=metadata.get(FINGERPRINT_KEY, b"").decode(), stamp="")
    with shard_errors(folder, shard):
        place = find_table(partial(folder.read_range, shard.name), shard.bytes, shard.format)
        if place is None:  # format 1
            total = hasher()
            for start in range(0, shard.bytes, _BYTES):
                total.update(folder.read_range(shard.name, start, min(start + _BYTES, shard.bytes)))
            return replace(found, xxh3=total.hexdigest())
        table = folder.read_range(shard.name, place[0], sum(place))
        blocks = len(parse_table(memoryview(table)).blocks)
    return replace(found, xxh3=f"{checksum(table):016x}", table=place, blocks=blocks, groups=())


def read_arrow_schema(folder: Folder, shard: Shard) -> pa.Schema:
    """The Arrow schema in the footer of a shard."""
    with shard_errors(folder, shard):
        if shard.table is not None:
            start, size = shard.table
            tail = memoryview(folder.read_range(shard.name, start, shard.bytes))
            try:
                parse_table(_table_bytes(tail[:size], shard)).check_footer(tail, start)
            except DecodeError as error:
                raise ShardError(f"{shown(folder.join(shard.name))}: the shard was altered: {error}.") from error
        with pa.PythonFile(RangeReader(folder, shard), "r") as file:
            return restore_schema(pq.read_schema(file)) if shard.format == "parquet" else pa.ipc.open_file(file).schema


class RangeReader:
    """A file of a folder that is read in parts, for its footer."""

    closed = False

    def __init__(self, folder: Folder, shard: Shard) -> None:
        self._folder, self._shard, self._at = folder, shard, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place."""
        self._at = offset + (0, self._at, self._shard.bytes)[whence]
        return self._at

    def tell(self) -> int:
        """Where it is."""
        return self._at

    def read(self, count: int = -1) -> bytes:
        """The next bytes."""
        end = self._shard.bytes if count < 0 else min(self._at + count, self._shard.bytes)
        content = self._folder.read_range(self._shard.name, self._at, end)
        self._at = end
        return content

    def size(self) -> int:
        """All of its bytes."""
        return self._shard.bytes

    def readable(self) -> bool:
        """It is for nothing else."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """There is nothing to close."""
