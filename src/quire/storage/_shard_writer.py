"""Writing shards: Parquet or Arrow files whose block table has a checksum for every byte.

`BlockFile` writes record batches to an open file, and collects the regions of the block table (see
`quire.storage._block_table`) on the way. `ShardFile` puts such a file into a folder: complete, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO, Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from quire.errors import StorageError
from quire.files import Folder, display_uri
from quire.schema import parse_path
from quire.storage import _block_table
from quire.storage._arrow_codec import (
    NAIVE,
    ArrowCodec,
    DatetimeCodec,
    array_validity,
    read_extension,
    to_offsets,
)
from quire.storage._block_table import (
    MessageLayout,
    TableBuilder,
    arrow_children,
    checksum,
    footer_start,
    read_from,
    read_message_layout,
)
from quire.storage._layout import Layout
from quire.storage._manifest import Shard
from quire.storage._nested_codecs import DocumentCodec, DocumentsCodec
from quire.storage._sequences import stored_lengths

Format = Literal["parquet", "arrow"]
ParquetOptions = Mapping[str, Any]
"""The keyword arguments of `pyarrow.parquet.ParquetWriter`."""


class _OutputFile:
    """The part of a file object that pyarrow needs besides `write`. The caller that opened the file closes it."""

    closed = False
    size = 0

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def writable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return False."""
        return False

    seekable = readable

    def flush(self) -> None:
        """Do nothing."""

    close = flush


class _ChecksummingFile(_OutputFile):
    """The file object that pyarrow writes to, which records the checksums of what is written.

    Each write becomes a region of the block table, which suits Parquet: pages are written one by one. While `collect`
    is active, writes are kept for the caller, who decides about regions; with `hold`, nothing goes to the file.
    """

    def __init__(self, file: IO[bytes], table: TableBuilder) -> None:
        self._file, self._table = file, table
        self._parts: list[Any] | None = None
        self._is_held = False

    def write(self, data: Any) -> int:
        """Write bytes."""
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
        """Yield a list that receives what is written within the context."""
        parts: list[Any] = []
        self._parts, self._is_held = parts, hold
        try:
            yield parts
        finally:
            self._parts, self._is_held = None, False

    def flush(self) -> None:
        """Pass everything to the system."""
        self._file.flush()


class _FieldNode(NamedTuple):
    """What the writer knows about a field node of Arrow data: one for each column, and for each field nested in it."""

    buffers: int
    """The number of its buffers, without those of nodes nested in it."""
    width: int | None
    """The bytes of a row in its last buffer; 0 if rows differ in size, None if the buffer is never split."""

    @classmethod
    def from_type(cls, arrow_type: pa.DataType) -> _FieldNode:
        """Return the node of an Arrow type. All types that quire writes have a bitmap for validity, except null."""
        types = pa.types
        if types.is_string(arrow_type) or types.is_binary(arrow_type):
            return cls(3, 0)  # validity, offsets, content
        if types.is_null(arrow_type):
            return cls(0, None)
        if types.is_struct(arrow_type) or types.is_fixed_size_list(arrow_type):
            return cls(1, None)
        is_fixed = types.is_primitive(arrow_type) or types.is_fixed_size_binary(arrow_type)
        bits = arrow_type.bit_width if is_fixed else 0
        return cls(2, bits // 8 if bits and bits % 8 == 0 else None)  # the rest: lists, bits, and values of a width

    def find_pieces(self, layout: MessageLayout, buffer: int) -> tuple[int, int, int]:
        """Return the bytes of a piece, and where the pieces begin and end in the body of a message.

        The data of a large column is split into pieces of whole rows, each with a checksum of its own, so that reading
        a few rows verifies a few pieces. Validity and offsets, which are before the data, are one region. So is the
        last piece, which may be shorter, and is followed by padding. A column that is not split has pieces of 0 bytes.
        """
        if self.width is None:
            return 0, 0, 0
        start, size = layout.buffers[buffer]
        piece = _block_table.PIECE
        if self.width:
            piece = self.width if self.width >= _block_table.WIDE_ROW else max(1, piece // self.width) * self.width
        return (piece, start, start + (size - 1) // piece * piece) if size >= 2 * piece else (0, 0, 0)


class BlockFile:
    """Writes record batches to an open file, as Parquet row groups or Arrow record batches, with a block table."""

    def __init__(
        self, file: IO[bytes], kind: Format, schema: pa.Schema, parquet_options: ParquetOptions | None = None
    ) -> None:
        self._kind, self._schema = kind, schema
        if kind == "parquet":
            self.table = TableBuilder(())
            self._output = _ChecksummingFile(file, self.table)
            self._writer: Any = pq.ParquetWriter(self._output, schema, **(parquet_options or {}))
        else:
            nodes = [node for field in schema for node in _arrow_nodes(field, field.name)]
            self._nodes = [_FieldNode.from_type(arrow_type) for _, arrow_type in nodes]
            self.table = TableBuilder([name for name, _ in nodes])
            self._output = _ChecksummingFile(file, self.table)
            self._writer = AlignedWriter(self._output, schema)
        self._nulls: list[dict[str, int]] = []

    @property
    def size(self) -> int:
        """The number of bytes written."""
        return self._output.size

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a row group or a record batch."""
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
        """Add the regions of a record batch message: its metadata, and the buffers of each field node.

        The bytes of a message are its metadata, then a body with the buffers of all field nodes in depth-first order.
        The metadata has the offset of each buffer in the body; those of a node are consecutive.
        """
        views = [memoryview(part) for part in parts]
        if not start:  # the magic and the schema come with the first record batch
            # "ARROW1" and 2 bytes of padding; then the message of the schema: 4 bytes of a marker, 4 bytes of length.
            head = b"".join(_take(views, 16))
            schema = _take(views, int.from_bytes(head[12:16], "little"))
            self.table.add_region(0, head, *schema)
            start = len(head) + sum(part.nbytes for part in schema)
        head = b"".join(_take(views, 8))
        metadata = head + b"".join(_take(views, int.from_bytes(head[4:8], "little")))
        layout = read_message_layout(metadata)
        self.table.add_region(start, metadata)
        body = start + len(metadata)
        # Where the buffers of each node begin. A node without buffers begins where the next one does.
        starts, number = list[int](), 0
        for node in self._nodes:
            starts.append(layout.buffers[number][0] if number < len(layout.buffers) else layout.body_bytes)
            number += node.buffers
        columns, last_buffer = [], -1
        for node, first, last in zip(self._nodes, starts, [*starts[1:], layout.body_bytes], strict=True):
            last_buffer += node.buffers
            piece, start_of_data, end_of_pieces = node.find_pieces(layout, last_buffer)
            if piece:
                self.table.add_region(body + first, *_take(views, start_of_data - first))
                taken = _take(views, end_of_pieces - start_of_data)
                data = taken[0] if len(taken) == 1 else memoryview(b"".join(taken))
                self.table.add_pieces(body + start_of_data, data, piece)
            begin = end_of_pieces if piece else first
            self.table.add_region(body + begin, *_take(views, last - begin))
            columns.append((body + first, last - first))
        place = layout.rows, start, len(metadata) + layout.body_bytes, len(metadata)
        self.table.add_block(place, columns, [nulls for _, nulls in layout.nodes])

    def close(self) -> tuple[int, int, int]:
        """Write the table and the footer, and return the offset, length and checksum of the table."""
        # pyarrow writes the rest of the file and the footer in one go. Both are held back, to put the table between.
        with self._output.collect(hold=True) as parts:
            self._writer.close()
        content = b"".join(parts)
        at = footer_start(read_from(memoryview(content)), len(content), self._kind)
        rest, footer = content[:at], content[at:]
        if self._kind == "parquet":
            self._add_row_groups(footer)
        self._output.write(rest)
        if -self._output.size % 8:  # the sections of the table are read as arrays of 64-bit integers, without a copy
            self._output.write(bytes(-self._output.size % 8))
        offset = self._output.size
        table = self.table.encode(offset, footer)
        with self._output.collect():
            self._output.write(table)
            self._output.write(footer)
        return offset, len(table), checksum(table)

    def abandon(self) -> None:
        """Close the writer of a file that is not needed any more."""
        with suppress(Exception):  # the disk may be full
            self._writer.close()

    def _add_row_groups(self, footer: bytes) -> None:
        """Add the blocks and columns of a Parquet file, which its footer describes."""
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self.table.names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        for number, group in enumerate(groups):
            chunks = [group.column(i) for i in range(group.num_columns)]
            # A column chunk begins with its dictionary page, if it has one: `data_page_offset` is after that.
            starts = [
                int(chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset)
                for chunk in chunks
            ]
            places = [(start, chunk.total_compressed_size) for start, chunk in zip(starts, chunks, strict=True)]
            size = sum(length for _, length in places)
            known = self._nulls[number] if number < len(self._nulls) else {}
            nulls: list[int] = []
            for chunk in chunks:
                count = known.get(chunk.path_in_schema)
                if count is None:  # of a nested field; unknown (-1) for blobs, which have no statistics
                    statistics = chunk.statistics if chunk.is_stats_set else None
                    count = statistics.null_count if statistics is not None and statistics.has_null_count else -1
                nulls.append(count)
            self.table.add_block((group.num_rows, min(starts, default=0), size, 0), places, nulls)


def _take(views: list[memoryview], size: int) -> list[memoryview]:
    """Remove the next `size` bytes from the list, and return views of them."""
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


def _arrow_nodes(field: pa.Field, path: str) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the paths and types of the field nodes of a column, in depth-first order."""
    yield path, field.type
    for child in arrow_children(field.type):
        yield from _arrow_nodes(child, f"{path}.{child.name}")


class ShardFile:
    """A shard that is being written; it appears in the folder when `finish` returns, or not at all."""

    def __init__(
        self,
        folder: Folder,
        name: str,
        layout: Layout,
        compression: Mapping[str, str],
        *,
        fields: pa.Schema | None = None,
        metadata: Mapping[bytes, bytes] | None = None,
        durable: bool = True,
    ) -> None:
        """Open a file for record batches of a layout; `fields` is their schema if it is not that of the layout.

        `metadata` is added to what the schema in the file says about the class.
        """
        self.fields = layout.fields if fields is None else fields
        self._where = display_uri(folder.join(name))
        self.name, self._layout, self._rows = name, layout, 0
        kind: Format = "parquet" if name.endswith(".parquet") else "arrow"
        # Entered by hand, as the file stays open beyond this call: leaving it without an error gives it its name.
        with self._write_errors():
            self._target: AbstractContextManager[IO[bytes]] = folder.open_for_write(name, durable=durable)
            file = self._target.__enter__()
        try:
            schema = self.fields.with_metadata({**layout.arrow_schema.metadata, **(metadata or {})})
            options = parquet_options(layout, self.fields, compression) if kind == "parquet" else None
            self._file = BlockFile(file, kind, schema, options)
        except BaseException as error:
            self._target.__exit__(type(error), error, error.__traceback__)
            raise

    @property
    def size(self) -> int:
        """The number of bytes written."""
        return self._file.size

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a row group or a record batch."""
        with self._write_errors():
            self._file.write(batch)
        for path, lengths in stored_lengths(self._layout.codecs, batch):
            self._file.table.add_lengths(path, lengths)
        self._rows += len(batch)

    def finish(self) -> Shard:
        """Write the block table and the footer, and give the file its name."""
        try:
            with self._write_errors():
                offset, length, digest = self._file.close()
        except BaseException as error:
            self.abandon(error)
            raise
        with self._write_errors():
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
        """Remove the file."""
        self._file.abandon()
        with suppress(Exception):
            self._target.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Raise errors of the system as errors that name the shard."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self._where}: the shard cannot be written: {error.strerror or error}.") from error


def parquet_options(layout: Layout, fields: pa.Schema, compression: Mapping[str, str]) -> ParquetOptions:
    """Return the options of the Parquet writer. Tensors are not compressed, everything else is with zstd.

    `compression` maps paths to other codecs. Uncompressed tensors are read without a copy, which makes them fast.
    """
    leaves = [leaf for field in fields for leaf in _leaves(field, (field.name,))]
    codecs = {path: "none" if (read_extension(f) or ("",))[0] == "quire.tensor" else "zstd" for path, f in leaves}
    for chosen, codec in sorted(compression.items()):  # 'meta.source' comes after 'meta', and overrides it
        layout.schema.resolve(parse_path(chosen))
        codecs |= {path: codec for path in codecs if f"{path}.".startswith(f"{chosen}.")}
    # Of blobs, neither dictionaries nor minima and maxima are of use.
    blobs = {path for path, f in leaves if pa.types.is_binary(f.type) or pa.types.is_fixed_size_binary(f.type)}
    rest = [path for path in codecs if path not in blobs]
    return {
        "compression": codecs,
        "use_dictionary": rest,
        "write_statistics": rest,
        "store_schema": True,
        "write_page_index": True,
        "write_page_checksum": True,
    }


def _leaves(field: pa.Field, path: tuple[str, ...]) -> Iterator[tuple[str, pa.Field]]:
    """Yield the columns of a Parquet file that a field is stored in."""
    arrow_type = field.type
    if pa.types.is_struct(arrow_type):
        for inner in [arrow_type.field(i) for i in range(arrow_type.num_fields)]:
            yield from _leaves(inner, (*path, inner.name))
    elif pa.types.is_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        yield from _leaves(arrow_type.value_field, (*path, "list", "element"))
    else:
        yield ".".join(path), field


# --- alignment of tensors in Arrow files

_LINE = 64
"""The bytes of a cache line."""
_STEP = 8
"""The alignment of buffers in Arrow files: metadata of one more byte moves them by none or by 8."""
_LARGE = 1 << 12
"""Tensors of at least this number of bytes are aligned."""
_PADDING_KEY = "quire.padding"
_MAGIC_BYTES = 8
"""'ARROW1' and two bytes of padding, at the beginning of a file."""


class AlignedWriter:
    """Writes Arrow record batches whose large tensors begin at multiples of 64 bytes, as far as all of them can.

    Arrow aligns buffers to 8 bytes. Copying large rows takes a quarter longer from such a place than from the start of
    a cache line. The metadata of a record batch comes before its buffers, so custom metadata of the right length moves
    all of them. Lengths from 0 to 64 are tried by writing the batch to a file object that only counts bytes.
    """

    def __init__(self, file: Any, schema: pa.Schema) -> None:
        self._writer, self._schema = pa.ipc.new_file(file, schema), schema
        self._file = file
        types = [field.type for field in schema]
        is_large = [pa.types.is_fixed_size_binary(each) and each.byte_width >= _LARGE for each in types]
        self._columns = [place for place, large in enumerate(is_large) if large]
        self._header = _MAGIC_BYTES + schema.serialize().size
        self._padding: int = 0

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write a record batch."""
        if not self._columns or not len(batch):
            self._writer.write_batch(batch)
            return
        # The trial below writes a whole file, with its header, and this batch is written at another place of the file:
        # `start` is the difference. Before the first batch, pyarrow has not written the header yet.
        start = (self._file.tell() or self._header) - self._header
        self._padding = self._choose_padding(batch, start)
        self._writer.write_batch(batch, custom_metadata=_padding_metadata(self._padding))

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()

    def _choose_padding(self, batch: pa.RecordBatch, start: int) -> int:
        """Return the length of metadata that aligns most bytes; that of the last batch, if it aligns all."""
        sizes: dict[int, int] = {}  # by the address of the first row
        for rows in map(batch.column, self._columns):
            width = rows.type.byte_width
            sizes[rows.buffers()[1].address + rows.offset * width] = len(rows) * width
        aligned = dict[int, int]()  # by padding, the bytes of columns that begin at a multiple of 64
        paddings: list[int] = [self._padding, *range(0, _LINE + _STEP, _STEP)]
        for padding in paddings:
            recorder = _PlaceRecorder()
            writer = pa.ipc.new_file(recorder, self._schema)
            writer.write_batch(batch, custom_metadata=_padding_metadata(padding))
            aligned[padding] = sum(size for at, size in sizes.items() if (start + recorder.places[at]) % _LINE == 0)
            if aligned[padding] == sum(sizes.values()):
                return padding
        return max(aligned, key=lambda padding: aligned[padding])


class _PlaceRecorder(_OutputFile):
    """A file object that keeps nothing but the offset that each run of memory is written to, by its address."""

    def __init__(self) -> None:
        self.places: dict[int, int] = {}

    def write(self, data: Any) -> int:
        """Record where the bytes would be."""
        buffer = pa.py_buffer(data)
        self.places[buffer.address] = self.size
        self.size += buffer.size
        return int(buffer.size)


def _padding_metadata(padding: int) -> dict[str, str] | None:
    return {_PADDING_KEY: " " * padding} if padding else None


# --- datetimes as timestamps
#
# The layout of a class stores a datetime as a local time and its zone, because the schema does not say which zones
# there are. Other tools know timestamps. While shards are written, the values decide: a column without zones, or with
# times in UTC only, is stored as timestamps, and `DatetimeCodec` reads both.


class TimestampChooser:
    """Chooses the type of each column of datetimes for the record batches of one writer.

    The first values of a column decide. If later values do not fit, the column has its general type from then on: the
    writer begins a new shard once, and not whenever the kind of the values changes.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self._types = layout, dict[str, pa.DataType]()
        self.applies = _has_datetimes(layout.codecs)
        """Whether the layout has columns of datetimes."""

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a record batch of the layout with timestamps where they lose nothing; large columns are not copied."""
        if not self.applies:
            return batch
        codecs = self._layout.codecs
        arrays = [self._convert(codec, array) for codec, array in zip(codecs, batch.columns, strict=True)]
        return self._layout.batch(arrays, len(batch))

    def _convert(self, codec: ArrowCodec, array: pa.Array) -> pa.Array:
        if isinstance(codec, DatetimeCodec):
            arrow_type = self._choose(codec, array)
            return array if arrow_type == codec.type else codec.narrow(array, arrow_type)
        if isinstance(codec, DocumentCodec) and _has_datetimes(codec.codecs):
            arrays = [self._convert(child, array.field(child.field.name)) for child in codec.codecs]
            validity = array_validity(array)
            return codec.from_arrays(arrays, len(array), validity)
        if isinstance(codec, DocumentsCodec) and _has_datetimes(codec.item.codecs):
            validity = array_validity(array)
            items = self._convert(codec.item, array.flatten())
            return codec.from_items(items, to_offsets(array.value_lengths().fill_null(0)), validity)
        return array

    def _choose(self, codec: DatetimeCodec, array: pa.Array) -> pa.DataType:
        before, narrowest = self._types.get(codec.path), codec.narrowest_type(array)
        if narrowest is None:
            return before or NAIVE
        self._types[codec.path] = narrowest if before in (None, narrowest) else codec.type
        return self._types[codec.path]


def _has_datetimes(codecs: Sequence[ArrowCodec]) -> bool:
    return any(isinstance(codec, DatetimeCodec) or _has_datetimes(codec.children) for codec in codecs)
