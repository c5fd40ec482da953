"""Reading a few rows of a dataset at a time, wherever they are stored, as a viewer does.

Training reads all of a dataset, so shards that cannot be mapped are converted into the cache. A page of rows needs a
row group or two: those are read directly, and the last ones are kept in memory. A table shows previews of values, for
which only the bytes that are shown are read.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quire._lowlevel.addresses import drop_mapped_pages
from quire._lowlevel.forks import ForkSafeLock
from quire.array import DocumentBatch
from quire.columns import Columns, Validity, concat_columns
from quire.schema import FieldPath
from quire.storage._arrow_codec import ArrowCodec, BytesCodec, MessageCodec, TextCodec, mask_missing
from quire.storage._dataset import StoredDataset
from quire.storage._nested_codecs import DocumentCodec, DocumentsCodec, ListCodec
from quire.storage._row_locations import RowLocations
from quire.storage._shard_reader import empty_batch, read_block_rows, shard_errors
from quire.storage._tensor_codecs import ComplexCodec, RaggedTensorCodec, TensorCodec
from quire.storage._where import Where, matching_rows
from quire.tensors import get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STATM = Path("/proc/self/statm")
_KEPT = 48 << 20
"""The total size of row groups that are kept, in bytes."""
_LARGE = 48 << 20
"""Larger row groups, which other writers make, are read through the cache."""
_MAPPED = 128 << 20
"""The bytes of mapped files that may be in memory before they are dropped; the system may keep them in its cache."""
_MAX_FOOTERS = 64
"""The number of footers of Parquet files that are kept."""
_APART = 64
"""The number of cells of scattered rows that are gathered at a time: each may map two megabytes around it."""
_MANY = 24
"""Rows of more row groups than this are read through the cache, which reads each shard once."""


class Pages:
    """Reads the rows of a dataset by number, without the cache if a few row groups hold them; tensors are of numpy."""

    def __init__(self, dataset: StoredDataset[Any]) -> None:
        self.dataset, self._reader = dataset, dataset._row_reader
        self._mapped_before = _count_mapped_bytes()
        self._columns: tuple[str, ...] = ()
        self._kept: OrderedDict[tuple[tuple[str, ...], int, int], pa.RecordBatch] = OrderedDict()
        self._rows: dict[int, tuple[int, ...]] = {}
        self._footers: OrderedDict[int, tuple[int, pq.FileMetaData]] = OrderedDict()
        self._lock = ForkSafeLock()
        self._narrow: dict[tuple[str, ...], Pages] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def narrow(self, *columns: str) -> Pages:
        """Return pages of the same rows with some of their columns."""
        with self._lock:
            if columns not in self._narrow:
                pages = Pages(self.dataset.narrow(columns))
                pages._columns, pages._mapped_before = columns, self._mapped_before
                pages._kept, pages._lock = self._kept, self._lock  # shared by all narrowed pages
                self._narrow[columns] = pages
            return self._narrow[columns]

    def take(self, rows: NDArray[np.int64]) -> DocumentBatch[Any]:
        """Return the rows at these positions as a batch."""
        document_type = self.dataset.schema.document_type
        return DocumentBatch[document_type]._wrap(self.columns(rows))  # type: ignore[valid-type]

    def columns(self, rows: NDArray[np.int64]) -> Columns:
        """Copy the columns of rows by position."""
        parts = [self._reader.layout.gather(self._locate(some)) for some in self._split(rows)]
        return parts[0] if len(parts) == 1 else concat_columns(parts, shapes="ragged")

    def preview(self, rows: NDArray[np.int64], head: int = 512) -> dict[FieldPath, list[Any]]:
        """Return what a table shows of rows: of large values, the size and the first `head` bytes.

        See `preview_columns`.
        """
        parts = []
        for some in self._split(rows):
            locations = self._locate(some)
            locations.verify()
            parts.append(preview_columns(self._reader.layout.codecs, locations, head))
        return {path: [value for part in parts for value in part[path]] for path in parts[0]}

    def matching(self, where: Where) -> NDArray[np.int64]:
        """Return the positions of the rows that match a filter."""
        reader = self._reader
        return reader.count_before(matching_rows(reader.shard_reader, reader.shards, where, rows=reader.rows))

    def blocks(self, rows: int = 65_536) -> Iterator[tuple[int, Columns]]:
        """Yield all rows in order, some at a time: the position of the first, and the columns."""
        reader = self._reader
        if reader.rows is not None or reader.is_mapped:
            for start in range(0, len(self), rows):
                yield start, self.columns(np.arange(start, min(start + rows, len(self))))
            drop_mapped_pages()  # a whole column was read once, and is not needed next
            return
        parts: Iterator[Columns]
        if all(map(self._is_read_directly, range(len(reader.shards)))):
            parts = (reader.layout.decode(batch) for batch in self._read_all_groups())
        else:
            parts = reader.read_parts()
        start = 0
        for columns in parts:
            yield start, columns
            start += len(columns)

    def sample(self, count: int, seed: int = 0) -> NDArray[np.int64]:
        """Return the positions of `count` random rows, in order; runs of rows if whole row groups must be read."""
        generator = np.random.default_rng(seed)
        if count >= len(self):
            return np.arange(len(self))
        if self._reader.is_mapped:
            return np.sort(generator.choice(len(self), count, replace=False))
        # Random rows would be in as many row groups. Runs are in few of them: in one each, or two.
        runs = min(_MANY // 2, count)
        starts = np.sort(generator.choice(max(1, len(self) - count // runs), runs, replace=False))
        return np.unique(np.concatenate([np.arange(start, start + count // runs) for start in starts.tolist()]))

    def _split(self, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the parts of rows that are gathered at a time: one, unless they are scattered over mapped files."""
        codecs = len(self._reader.layout.codecs)
        if not self._reader.is_mapped or (np.count_nonzero(np.diff(rows) != 1) + 1) * codecs <= _APART:
            return [rows]
        size = max(1, _APART // max(1, codecs))
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    # --- locations of rows

    def _locate(self, rows: NDArray[np.int64]) -> RowLocations:
        if _count_mapped_bytes() - self._mapped_before > _MAPPED:
            drop_mapped_pages()  # otherwise everything that was viewed once would stay in memory
        locations = self._locate_in_groups(rows)
        if locations is None:
            locations = self._reader.locate(rows)
        locations.framework = get_framework("numpy")
        return locations

    def _locate_in_groups(self, rows: NDArray[np.int64]) -> RowLocations | None:
        """Return the locations of rows in row groups that are read directly; None to read them through the cache."""
        reader = self._reader
        shards = reader.shards_of(rows)
        if reader.is_mapped or not len(rows) or reader.is_open(shards):
            return None
        groups, positions = np.zeros_like(rows), reader.stored_rows(rows) - reader.starts[shards]
        for number in np.unique(shards).tolist():
            own = shards == number
            if not self._is_read_directly(number):
                return None
            begins = np.concatenate([[0], np.cumsum(self._group_rows(number))])
            groups[own] = np.searchsorted(begins, positions[own], side="right") - 1
            positions[own] -= begins[groups[own]]
        # Each pair of shard and row group becomes a record batch; `batches` has its number for each row.
        keys, batches = np.unique(np.stack([shards, groups]), axis=1, return_inverse=True)
        if keys.shape[1] > _MANY:
            return None
        addresses = reader.layout.addresses()
        for shard_number, group in keys.T.tolist():
            batch = self._load_group(shard_number, group)
            addresses.add(reader.layout.locate(batch), batch)
        return RowLocations(addresses, batches.reshape(-1), positions)

    # --- row groups

    def _is_read_directly(self, number: int) -> bool:
        shard = self._reader.shards[number]
        if self._reader.folder.local_path(shard.name) is None or shard.format != "parquet" or shard.sides:
            return False
        groups = self._group_rows(number)
        return sum(groups) == shard.rows and shard.bytes <= _LARGE * len(groups)

    def _group_rows(self, number: int) -> tuple[int, ...]:
        """Return the number of rows of each row group of a shard, and keep it."""
        if number not in self._rows:
            self._rows[number] = read_block_rows(self._reader.folder, self._reader.shards[number])
        return self._rows[number]

    def _read_all_groups(self) -> Iterator[pa.RecordBatch]:
        """Yield all row groups in order, without keeping them."""
        for number in range(len(self._reader.shards)):
            for group, rows in enumerate(self._group_rows(number)):
                if rows:
                    yield self._read_group(number, group)

    def _load_group(self, number: int, group: int) -> pa.RecordBatch:
        """Return a row group that was kept, or read and keep it."""
        key = self._columns, number, group
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        # Reading takes long, so it is done without the lock: at worst, two threads read the same row group.
        batch = self._read_group(number, group)
        with self._lock:
            self._kept[key] = batch
            while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > _KEPT:
                self._kept.popitem(last=False)
        return batch

    def _read_group(self, number: int, group: int) -> pa.RecordBatch:
        """Read a row group in the layout of the class, in one read: a mapped file would be read around each fault."""
        reader, shard = self._reader.shard_reader, self._reader.shards[number]
        with shard_errors(reader.folder, shard), reader.local_file(shard) as path:
            with pq.ParquetFile(path, metadata=self._load_footer(number, path), pre_buffer=True) as file:
                reader.check_row_group(path, shard, file, group)
                names = reader.column_names(file.schema_arrow, shard)
                table = file.read_row_group(group, names, use_threads=False)
            batches = table.to_batches() if names else [empty_batch(self._group_rows(number)[group])]
            parts = [reader.conform(part, shard) for part in batches]
        [batch] = pa.Table.from_batches(parts).combine_chunks().to_batches()
        return batch

    def _load_footer(self, number: int, path: Path) -> pq.FileMetaData:
        """Return the footer of a shard, which is kept as long as the file does not change."""
        status = path.stat()
        self._reader.shard_reader.check_size(self._reader.shards[number], status.st_size)
        with self._lock:
            changed, footer = self._footers.pop(number, (0, None))
            if footer is None or changed != status.st_mtime_ns:
                footer = pq.read_metadata(path)
            self._footers[number] = status.st_mtime_ns, footer
            while len(self._footers) > _MAX_FOOTERS:
                self._footers.popitem(last=False)
        return footer


def _count_mapped_bytes() -> int:
    """Return how much of mapped files is in the memory of this process; 0 if the system does not say."""
    try:
        return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0


# --- previews: small values as they are; of large ones, the size and the beginning

_MAX_VECTOR = 4096
"""Vectors of at most this number of elements are shown with their values."""
_MAX_ITEMS = 64
"""Lists of at most this number of items are shown with their values."""
_MAX_MESSAGE = 1 << 14
"""Values that are stored as messages are shown if these have at most this number of bytes."""


class BytesPreview(NamedTuple):
    """The beginning of a text or a blob, and the number of bytes of all of it."""

    content: bytes
    size: int


class ItemCount(NamedTuple):
    """The number of items of a list, or of documents of an array."""

    items: int


class TensorPreview(NamedTuple):
    """The shape and dtype of a tensor, and the tensor itself if it is a small vector."""

    shape: tuple[int, ...]
    dtype: str
    values: NDArray[Any] | None = None


def preview_columns(codecs: Sequence[ArrowCodec], rows: RowLocations, head: int) -> dict[FieldPath, list[Any]]:
    """Return the columns of rows, nested ones by their path: lists of values, or of one of the classes above."""
    return dict(_preview_fields(codecs, rows, head, (), None))


def _preview_fields(
    codecs: Sequence[ArrowCodec], rows: RowLocations, head: int, above: FieldPath, validity: Validity
) -> Iterator[tuple[FieldPath, list[Any]]]:
    for codec in codecs:
        path = (*above, codec.field.name)
        own = rows.validity(codec.first)
        if validity is not None:
            own = validity if own is None else own & validity
        # Fields of a missing document have values of some kind in the data; they are shown as missing.
        if isinstance(codec, DocumentCodec):
            yield from _preview_fields(codec.codecs, rows, head, path, own)
        else:
            yield path, mask_missing(_preview_values(codec, rows, head), own)


def _preview_values(codec: ArrowCodec, rows: RowLocations, head: int) -> list[Any]:
    """Return the values of rows, or what a table shows of them; only the bytes that are shown are read."""
    if isinstance(codec, (TextCodec, BytesCodec)):
        starts, sizes = rows.read_offsets(codec.first + 1)
        short = np.minimum(sizes, head)
        data = rows.gather_ranges(codec.first + 1, starts, short)
        ends = np.cumsum(short).tolist()
        heads = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return [BytesPreview(content, size) for content, size in zip(heads, sizes.tolist(), strict=True)]
    if isinstance(codec, TensorCodec) and not isinstance(codec, ComplexCodec):
        name = codec.dtype.name
        if len(codec.shape) != 1 or prod(codec.shape) > _MAX_VECTOR:
            return [TensorPreview(codec.shape, name)] * len(rows)
        vectors = rows.gather_fixed(codec.first + 1, codec.width).view(codec.dtype)
        return [TensorPreview(codec.shape, name, vector) for vector in vectors]
    if isinstance(codec, RaggedTensorCodec):
        shapes = codec.gather_shapes(rows)
        dtypes = [codec.dtype or ""] * len(rows) if codec.dtypes is None else codec.dtypes.gather(rows).values()
        previews = [TensorPreview(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        is_vector = [len(shape) == 1 and 0 < shape[0] <= _MAX_VECTOR for shape in shapes]
        for i, value in _gather_some(codec, rows, np.flatnonzero(is_vector)):
            if value is not None:
                previews[i] = previews[i]._replace(values=np.asarray(value))
        return previews
    if isinstance(codec, DocumentsCodec):
        return [ItemCount(size) for size in rows.read_offsets(codec.first + 1)[1].tolist()]
    if isinstance(codec, (ListCodec, MessageCodec)):
        sizes = rows.read_offsets(codec.first + 1)[1]
        is_list = isinstance(codec, ListCodec)
        values: list[Any] = [ItemCount(size) if is_list else BytesPreview(b"", size) for size in sizes.tolist()]
        for i, value in _gather_some(codec, rows, np.flatnonzero(sizes <= (_MAX_ITEMS if is_list else _MAX_MESSAGE))):
            values[i] = value
        return values
    return codec.gather(rows).values()


def _gather_some(codec: ArrowCodec, rows: RowLocations, positions: NDArray[np.intp]) -> Iterator[tuple[int, Any]]:
    """Yield the values of some of the rows, with their positions."""
    if len(positions):
        yield from zip(positions.tolist(), codec.gather(rows.select(positions)).values(), strict=True)
