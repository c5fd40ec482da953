"""Files of shards: written as blocks, with a block table that has a checksum for every byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from quire.errors import StorageError
from quire.files import Folder, shown
from quire.schema import parse_path
from quire.storage import _block_table
from quire.storage._arrow_codec import read_extension
from quire.storage._block_table import (
    MessageLayout,
    TableBuilder,
    arrow_children,
    checksum,
    footer_start,
    read_message_layout,
    reads_from,
)
from quire.storage._layout import Layout
from quire.storage._manifest import Shard

Format = Literal["parquet", "arrow"]


Packing = Mapping[str, Any]
"""How the columns of Parquet files are packed, as pyarrow takes it."""


class _ChecksummingFile:
    """The file that pyarrow writes to: it notes the checksums of what is written.

    Each write is a region of the block table, which suits Parquet: pages are written one by one. While `collect` is
    active, writes are kept, and the caller decides about regions. While `hold` is active, nothing goes to the file.
    """

    closed = False

    def __init__(self, file: IO[bytes], table: TableBuilder) -> None:
        self._file, self._table = file, table
        self.size = 0
        self._parts: list[Any] | None = None
        self._is_held = False

    def write(self, data: Any) -> int:
        """Take bytes."""
        size = memoryview(data).nbytes
        if self._parts is None:
            self._table.add_region(self.size, data)
        else:
            self._parts.append(data)
        if not self._is_held:
            self._file.write(data)
            self.size += size
        return size

    @contextmanager
    def collect(self, *, hold: bool = False) -> Iterator[list[Any]]:
        """Keep what is written within the context, for the caller."""
        parts: list[Any] = []
        self._parts, self._is_held = parts, hold
        try:
            yield parts
        finally:
            self._parts, self._is_held = None, False

    def tell(self) -> int:
        """The bytes written so far."""
        return self.size

    def flush(self) -> None:
        """Pass everything to the system."""
        self._file.flush()

    def writable(self) -> bool:
        """Always."""
        return True

    def readable(self) -> bool:
        """Never."""
        return False

    seekable = readable

    def close(self) -> None:
        """The file is closed by whoever opened it."""


class BlockFile:
    """Writes record batches to an open file, as Parquet row groups or Arrow record batches, with a block table."""

    def __init__(self, file: IO[bytes], kind: Format, schema: pa.Schema, packing: Packing | None = None) -> None:
        self._kind, self._schema = kind, schema
        if kind == "parquet":
            self.table = TableBuilder(())
            self._output = _ChecksummingFile(file, self.table)
            self._writer: Any = pq.ParquetWriter(self._output, schema, **(packing or {}))
        else:
            nodes = [node for field in schema for node in _arrow_nodes(field, field.name)]
            self._buffer_counts = [_count_buffers(arrow_type) for _, arrow_type in nodes]
            self._widths = [_row_width(arrow_type) for _, arrow_type in nodes]
            self.table = TableBuilder([name for name, _ in nodes])
            self._output = _ChecksummingFile(file, self.table)
            self._writer = AlignedWriter(self._output, schema)
        self._nulls: list[dict[str, int]] = []

    @property
    def size(self) -> int:
        """The bytes written so far."""
        return self._output.size

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a row group, or a record batch."""
        batch = batch.replace_schema_metadata(self._schema.metadata)
        if self._kind == "parquet":
            self._writer.write_batch(batch, len(batch) or None)
            self._nulls.append(
                {name: column.null_count for name, column in zip(batch.schema.names, batch.columns, strict=True)}
            )
            return
        start = self._output.size
        with self._output.collect() as parts:
            self._writer.write_batch(batch)
        self._add_message(start, parts)

    def _add_message(self, start: int, parts: list[Any]) -> None:
        """Note the regions of a record batch message: its metadata, and the buffers of each field node."""
        views = [memoryview(part) for part in parts]
        if not start:  # the magic and the schema come with the first record batch
            head = b"".join(_take(views, 16))
            schema = _take(views, int.from_bytes(head[12:16], "little"))
            self.table.add_region(0, head, *schema)
            start = len(head) + sum(part.nbytes for part in schema)
        head = b"".join(_take(views, 8))
        metadata = head + b"".join(_take(views, int.from_bytes(head[4:8], "little")))
        layout = read_message_layout(metadata)
        self.table.add_region(start, metadata)
        body = start + len(metadata)
        starts, number = list[int](), 0
        for count in self._buffer_counts:
            starts.append(layout.buffers[number][0] if number < len(layout.buffers) else layout.body_bytes)
            number += count
        columns, last_buffer = [], -1
        for node, (first, last) in enumerate(zip(starts, [*starts[1:], layout.body_bytes], strict=True)):
            last_buffer += self._buffer_counts[node]
            for begin, end in pairwise(self._cut(node, layout, last_buffer, first, last)):
                self.table.add_region(body + begin, *_take(views, end - begin))
            columns.append((body + first, last - first))
        place = layout.rows, start, len(metadata) + layout.body_bytes, len(metadata)
        self.table.add_block(place, columns, [nulls for _, nulls in layout.nodes])

    def _cut(self, node: int, layout: MessageLayout, buffer: int, first: int, last: int) -> list[int]:
        """Where the regions of a field node begin in the body of its message, and where the last of them ends.

        The data of a large column is cut into pieces of whole rows, each with a checksum of its own, so that reading
        a few rows verifies a few pieces. Validity and offsets, which are before the data, are one region.
        """
        width = self._widths[node]
        if width is None:
            return [first, last]
        start, size = layout.buffers[buffer]
        piece = _block_table.PIECE // width * width if 0 < width <= _block_table.PIECE else width or _block_table.PIECE
        if size < 2 * piece:
            return [first, last]
        return [first, *range(start, start + size, piece), last][start == first :]

    def close(self) -> tuple[int, int, int]:
        """Write the table and the footer: the offset, length and checksum of the table."""
        with self._output.collect(hold=True) as parts:
            self._writer.close()
        content = b"".join(parts)
        at = footer_start(reads_from(memoryview(content)), len(content), self._kind)
        rest, footer = content[:at], content[at:]
        if self._kind == "parquet":
            self._add_row_groups(footer)
        self._output.write(rest)
        if -self._output.size % 8:
            self._output.write(bytes(-self._output.size % 8))
        offset = self._output.size
        table = self.table.encode(offset, footer)
        with self._output.collect():
            self._output.write(table)
            self._output.write(footer)
        return offset, len(table), checksum(table)

    def abandon(self) -> None:
        """Let go of the writer; the file is of no use."""
        with suppress(Exception):  # the disk may be full
            self._writer.close()

    def _add_row_groups(self, footer: bytes) -> None:
        """Note the blocks and columns of a Parquet file, which its footer describes."""
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self.table.names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        for number, group in enumerate(groups):
            chunks = [group.column(i) for i in range(group.num_columns)]
            starts = [_chunk_start(chunk) for chunk in chunks]
            places = [(start, chunk.total_compressed_size) for start, chunk in zip(starts, chunks, strict=True)]
            size = sum(length for _, length in places)
            known = self._nulls[number] if number < len(self._nulls) else {}
            nulls = [_chunk_nulls(chunk, known) for chunk in chunks]
            self.table.add_block((group.num_rows, min(starts, default=0), size, 0), places, nulls)


def _chunk_start(chunk: Any) -> int:
    return int(chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset)


def _chunk_nulls(chunk: Any, known: Mapping[str, int]) -> int:
    """The nulls of a column chunk; -1 where they are not known, as of blobs within documents."""
    if chunk.path_in_schema in known:
        return known[chunk.path_in_schema]
    statistics = chunk.statistics if chunk.is_stats_set else None
    return statistics.null_count if statistics is not None and statistics.has_null_count else -1


def _take(views: list[memoryview], size: int) -> list[memoryview]:
    """Views of the next bytes, which are removed from the list."""
    taken = []
    while size:
        view = views[0]
        taken.append(view[:size])
        if view.nbytes <= size:
            views.pop(0)
        else:
            views[0] = view[size:]
        size -= taken[-1].nbytes
    return taken


_BUFFERS: tuple[tuple[Any, int], ...] = (
    (pa.types.is_null, 0),
    (pa.types.is_struct, 1),
    (pa.types.is_fixed_size_list, 1),
    (pa.types.is_list, 2),
    (pa.types.is_string, 3),
    (pa.types.is_binary, 3),
)


def _arrow_nodes(field: pa.Field, path: str) -> Iterator[tuple[str, pa.DataType]]:
    """The field nodes of a column in depth-first order: paths and types."""
    yield path, field.type
    for child in arrow_children(field.type):
        yield from _arrow_nodes(child, f"{path}.{child.name}")


def _count_buffers(arrow_type: pa.DataType) -> int:
    """How many buffers a field node of a type has itself."""
    return next((count for applies, count in _BUFFERS if applies(arrow_type)), 2)


def _row_width(arrow_type: pa.DataType) -> int | None:
    """The bytes of a row in the last buffer of a field node; 0 if rows differ, None if that buffer is not cut."""
    if pa.types.is_string(arrow_type) or pa.types.is_binary(arrow_type):
        return 0
    is_fixed = pa.types.is_primitive(arrow_type) or pa.types.is_fixed_size_binary(arrow_type)
    return arrow_type.bit_width // 8 if is_fixed and arrow_type.bit_width % 8 == 0 and arrow_type.bit_width else None


class ShardFile:
    """One shard on its way to the folder; it is there when `finish` returns, or not at all."""

    def __init__(self, folder: Folder, name: str, layout: Layout, packing: Packing, *, durable: bool = True) -> None:
        self._where = shown(folder.join(name))
        self.name, self._layout, self._rows = name, layout, 0
        kind: Format = "parquet" if name.endswith(".parquet") else "arrow"
        with self._named():
            self._target: AbstractContextManager[IO[bytes]] = folder.open_for_write(name, durable=durable)
            file = self._target.__enter__()
        try:
            self._file = BlockFile(file, kind, layout.arrow_schema, packing)
        except BaseException as error:
            self._target.__exit__(type(error), error, error.__traceback__)
            raise

    @property
    def size(self) -> int:
        """The bytes that were written so far."""
        return self._file.size

    def write(self, batch: pa.RecordBatch) -> None:
        """A row group, or a record batch."""
        with self._named():
            self._file.write(batch)
        self._rows += len(batch)

    def finish(self) -> Shard:
        """Write the block table and the footer, and let the file take its name."""
        try:
            with self._named():
                offset, length, digest = self._file.close()
        except BaseException as error:
            self.abandon(error)
            raise
        with self._named():
            self._target.__exit__(None, None, None)
        return Shard(
            self.name,
            self._rows,
            self._file.size,
            blocks=len(self._file.table.blocks),
            table=(offset, length),
            xxh3=f"{digest:016x}",
            layout=self._layout.fingerprint,
        )

    def abandon(self, error: BaseException) -> None:
        """Leave nothing behind."""
        self._file.abandon()
        with suppress(Exception):
            self._target.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the system name the shard that they are about."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self._where}: the shard cannot be written: {error.strerror or error}.") from error


def parquet_options(layout: Layout, compression: Mapping[str, str]) -> Packing:
    """Tensors as they are, which is what makes them fast, and the rest with zstd; or what is said of a field."""
    leaves = [leaf for field in layout.fields for leaf in _leaves(field, (field.name,))]
    blobs = {path for path, field in leaves if _is_blob(field)}
    packed = {
        path: "none" if (read_extension(field) or ("",))[0] == "quire.tensor" else "zstd" for path, field in leaves
    }
    for chosen, how in sorted(compression.items()):  # what is said of a part comes after what is said of all
        layout.schema.resolve(parse_path(chosen))
        packed |= {path: how for path in packed if f"{path}.".startswith(f"{chosen}.")}
    rest = [path for path in packed if path not in blobs]
    return {
        "compression": packed,
        "use_dictionary": rest,
        "write_statistics": rest,
        "store_schema": True,
        "write_page_index": True,
        "write_page_checksum": True,
    }


def _leaves(field: pa.Field, path: tuple[str, ...]) -> Iterator[tuple[str, pa.Field]]:
    """The columns of a Parquet file that a field makes."""
    arrow_type = field.type
    if pa.types.is_struct(arrow_type):
        for inner in [arrow_type.field(i) for i in range(arrow_type.num_fields)]:
            yield from _leaves(inner, (*path, inner.name))
    elif pa.types.is_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        yield from _leaves(arrow_type.value_field, (*path, "list", "element"))
    else:
        yield ".".join(path), field


def _is_blob(field: pa.Field) -> bool:
    """Whether the least and the greatest value tell nothing."""
    return bool(pa.types.is_binary(field.type) or pa.types.is_fixed_size_binary(field.type))


_LINE = 64
_STEP = 8
_LARGE = 1 << 12
_KEY = "quire.padding"
_MAGIC = 8


class AlignedWriter:
    """Writes record batches such that their large tensors begin with a line, as far as they can all at once."""

    def __init__(self, file: Any, schema: pa.Schema) -> None:
        self._writer, self._schema = pa.ipc.new_file(file, schema), schema
        self._file = file
        self._columns = [place for place, field in enumerate(schema) if _is_large(field.type)]
        self._header = _MAGIC + schema.serialize().size
        self._padding: int = 0

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write a record batch."""
        if not self._columns or not len(batch):
            self._writer.write_batch(batch)
            return
        start = (self._file.tell() or self._header) - self._header
        self._padding = self._best(batch, start)
        self._writer.write_batch(batch, custom_metadata=_told(self._padding))

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()

    def _best(self, batch: pa.RecordBatch, start: int) -> int:
        """The length of what is told that lets most bytes begin with a line; that of the last time, if it will do."""
        sizes: dict[int, int] = dict(_span(batch.column(place)) for place in self._columns)
        aligned = dict[int, int]()
        tries: list[int] = [self._padding, *range(0, _LINE + _STEP, _STEP)]
        for padding in tries:
            places = self._places(batch, padding)
            aligned[padding] = sum(size for at, size in sizes.items() if (start + places[at]) % _LINE == 0)
            if aligned[padding] == sum(sizes.values()):
                return padding
        return max(aligned, key=lambda padding: aligned[padding])

    def _places(self, batch: pa.RecordBatch, padding: int) -> dict[int, int]:
        """Where each run of memory would lie in a file of this batch alone."""
        nowhere = _Nowhere()
        pa.ipc.new_file(nowhere, self._schema).write_batch(batch, custom_metadata=_told(padding))
        return nowhere.places


class _Nowhere:
    """A file that keeps nothing but where each run of memory would lie."""

    closed = False

    def __init__(self) -> None:
        self._size, self.places = 0, dict[int, int]()

    def write(self, data: Any) -> int:
        """Take bytes, and forget them."""
        buffer = pa.py_buffer(data)
        self.places[buffer.address] = self._size
        self._size += buffer.size
        return int(buffer.size)

    def tell(self) -> int:
        """How many bytes there were."""
        return self._size

    def writable(self) -> bool:
        """It is for nothing else."""
        return True

    def readable(self) -> bool:
        """It is not."""
        return False

    seekable = readable

    def flush(self) -> None:
        """There is nothing to do."""

    close = flush


def _is_large(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_binary(arrow_type)) and arrow_type.byte_width >= _LARGE


def _span(rows: pa.Array) -> tuple[int, int]:
    """Where the bytes of rows of one width begin in memory, and how many they are."""
    width = rows.type.byte_width
    return rows.buffers()[1].address + rows.offset * width, len(rows) * width


def _told(padding: int) -> dict[str, str] | None:
    return {_KEY: " " * padding} if padding else None
