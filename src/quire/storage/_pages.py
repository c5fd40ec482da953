"""Rows of a dataset for somebody who looks at a few of them at a time, wherever they are.

Training reads all of a dataset, so shards that cannot be mapped are written anew into the cache. Who looks at a page
of rows needs a row group or two: those are read alone, and the last of them kept.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quire._fork import ForkSafeLock
from quire.array import DocumentBatch
from quire.columns import Columns, concat_columns
from quire.schema import FieldPath
from quire.storage._dataset import StoredDataset
from quire.storage._layout import resolve_columns
from quire.storage._memory import drop_mapped_pages
from quire.storage._previews import preview_columns
from quire.storage._row_locations import RowLocations
from quire.storage._shard_reader import empty_batch, shard_errors
from quire.storage._where import Where, matching_rows
from quire.tensors import get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEPT = 48 << 20
"""Bytes of row groups that are kept, of all columns and of some."""
_LARGE = 48 << 20
"""Row groups of more bytes, as other writers make them, go through the cache."""
_MAPPED = 128 << 20
"""Bytes of mapped files that may be in memory before all are let go of; the system keeps them if it has room."""
_FOOTERS = 64
"""Footers of Parquet files that are kept."""
_APART = 64
"""So many cells of rows that lie apart are gathered at a time: each may map two megabytes around it."""
_MANY = 24
"""Rows of more row groups than this go through the cache, which reads each shard once."""


class Pages:
    """The rows of a dataset by their numbers, without the cache where a few row groups hold them; tensors of numpy."""

    def __init__(self, dataset: StoredDataset[Any]) -> None:
        self.dataset = dataset
        self._least = _mapped_bytes()
        self._columns: tuple[str, ...] = ()
        self._kept: OrderedDict[tuple[tuple[str, ...], int, int], pa.RecordBatch] = OrderedDict()
        self._rows: dict[int, tuple[int, ...]] = {}
        self._footers: OrderedDict[int, tuple[int, pq.FileMetaData]] = OrderedDict()
        self._lock = ForkSafeLock()
        self._narrow: dict[tuple[str, ...], Pages] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def narrow(self, *columns: str) -> Pages:
        """The same rows with some of their columns."""
        with self._lock:
            if columns not in self._narrow:
                pages = Pages(narrowed(self.dataset, columns))
                pages._columns, pages._least = columns, self._least
                pages._kept, pages._lock = self._kept, self._lock  # shared by all narrowed pages
                self._narrow[columns] = pages
            return self._narrow[columns]

    def take(self, rows: NDArray[np.int64]) -> DocumentBatch[Any]:
        """The rows at these positions."""
        document_type = self.dataset.schema.document_type
        return DocumentBatch[document_type]._wrap(self.columns(rows))  # type: ignore[valid-type]

    def columns(self, rows: NDArray[np.int64]) -> Columns:
        """The columns of rows by position, copied."""
        parts = [self.dataset.layout.gather(self._located(some)) for some in self._at_once(rows)]
        return parts[0] if len(parts) == 1 else concat_columns(parts, shapes="ragged")

    def brief(self, rows: NDArray[np.int64], head: int = 512) -> dict[FieldPath, list[Any]]:
        """What a table shows of rows: of what may be large the size and the beginning; see `brief_columns`."""
        parts = []
        for some in self._at_once(rows):
            located = self._located(some)
            located.verify()
            parts.append(preview_columns(self.dataset.layout.codecs, located, head))
        return {path: [value for part in parts for value in part[path]] for path in parts[0]}

    def matching(self, where: Where) -> NDArray[np.int64]:
        """The positions of the rows that a filter lets through."""
        dataset = self.dataset
        found = matching_rows(dataset.reader, dataset.shards, where)
        if dataset.rows is None:
            return found
        return np.flatnonzero(np.isin(dataset.rows, found))

    def blocks(self, rows: int = 65_536) -> Iterator[tuple[int, Columns]]:
        """All rows in order, some at a time: the position of the first, and the columns."""
        if self.dataset.rows is not None or self.dataset.is_mapped:
            for start in range(0, len(self), rows):
                yield start, self.columns(np.arange(start, min(start + rows, len(self))))
            drop_mapped_pages()  # what was looked at from end to end is not what is looked at next
            return
        if not all(map(self._is_read_alone, range(len(self.dataset.shards)))):
            parts = self.dataset._read_parts()
        else:
            parts = (self.dataset.reader.columns(batch) for batch in self._groups())
        start = 0
        for columns in parts:
            yield start, columns
            start += len(columns)

    def sample(self, count: int, seed: int = 0) -> NDArray[np.int64]:
        """Positions of so many rows, in order: any of them; or runs from some row groups, where those must be read."""
        generator = np.random.default_rng(seed)
        if count >= len(self):
            return np.arange(len(self))
        if self.dataset.is_mapped:
            return np.sort(generator.choice(len(self), count, replace=False))
        runs = min(_MANY // 2, count)
        starts = np.sort(generator.choice(max(1, len(self) - count // runs), runs, replace=False))
        return np.unique(np.concatenate([np.arange(start, start + count // runs) for start in starts.tolist()]))

    def _let_go(self) -> None:
        """What was looked at once would stay in memory, column by column."""
        if _mapped_bytes() - self._least > _MAPPED:
            drop_mapped_pages()

    def _at_once(self, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The rows that are gathered at a time: all of them, unless they lie apart in mapped files."""
        codecs = len(self.dataset.layout.codecs)
        if not self.dataset.is_mapped or (np.count_nonzero(np.diff(rows) != 1) + 1) * codecs <= _APART:
            return [rows]
        size = max(1, _APART // max(1, codecs))
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    # --- where rows lie

    def _located(self, rows: NDArray[np.int64]) -> RowLocations:
        self._let_go()
        dataset = self.dataset
        stored = dataset._stored(rows)
        found = self._in_groups(stored)
        if found is None:
            with dataset._lock:
                found = dataset._located(stored)
        found.framework = get_framework("numpy")
        return found

    def _in_groups(self, rows: NDArray[np.int64]) -> RowLocations | None:
        """The rows in row groups that are read alone; None where they are to be found otherwise."""
        dataset = self.dataset
        shards = dataset._shard_starts.find(rows)
        if dataset.is_mapped or not len(rows) or (dataset._opened[shards] >= 0).all():
            return None
        groups, places = np.zeros_like(rows), rows - dataset.starts[shards]
        for number in np.unique(shards).tolist():
            own = shards == number
            if not self._is_read_alone(number):
                return None
            begins = np.concatenate([[0], np.cumsum(self._group_rows(number))])
            groups[own] = np.searchsorted(begins, places[own], side="right") - 1
            places[own] -= begins[groups[own]]
        keys, batches = np.unique(np.stack([shards, groups]), axis=1, return_inverse=True)
        if keys.shape[1] > _MANY:
            return None
        addresses = dataset.layout.addresses()
        for shard_number, group in keys.T.tolist():
            batch = self._group(shard_number, group)
            addresses.add(dataset.layout.locate(batch), batch)
        return RowLocations(addresses, batches.reshape(-1), places)

    def _is_read_alone(self, number: int) -> bool:
        dataset, shard = self.dataset, self.dataset.shards[number]
        local = dataset.folder.local_path(shard.name) is not None
        if not local or shard.format != "parquet":
            return False
        groups = self._group_rows(number)
        return sum(groups) == shard.rows and shard.bytes <= _LARGE * len(groups)

    def _group_rows(self, number: int) -> tuple[int, ...]:
        """The rows of each row group of a shard, kept."""
        if number not in self._rows:
            self._rows[number] = self.dataset.reader.read_block_rows(self.dataset.shards[number])
        return self._rows[number]

    def _groups(self) -> Iterator[pa.RecordBatch]:
        """All row groups, one after the other; none is kept."""
        for number in range(len(self.dataset.shards)):
            for group, rows in enumerate(self._group_rows(number)):
                if rows:
                    yield self._read(number, group)

    def _group(self, number: int, group: int) -> pa.RecordBatch:
        key = self._columns, number, group
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        batch = self._read(number, group)
        with self._lock:
            self._kept[key] = batch
            while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > _KEPT:
                self._kept.popitem(last=False)
        return batch

    def _read(self, number: int, group: int) -> pa.RecordBatch:
        """A row group in the layout of the class, in one read of its bytes: a mapped file is read around each fault."""
        reader, shard = self.dataset.reader, self.dataset.shards[number]
        with shard_errors(reader.folder, shard), reader.local_file(shard) as path:
            with pq.ParquetFile(path, metadata=self._footer(number, path), pre_buffer=True) as file:
                reader.check_row_group(path, shard, file, group)
                names = reader._wanted(file.schema_arrow)
                table = file.read_row_group(group, names, use_threads=False)
            batches = table.to_batches() if names else [empty_batch(self._group_rows(number)[group])]
            parts = [reader.conformed(part, shard) for part in batches]
        [batch] = pa.Table.from_batches(parts).combine_chunks().to_batches()
        return batch

    def _footer(self, number: int, path: Path) -> pq.FileMetaData:
        """What the end of a shard tells of it, kept as long as the file is the same."""
        told_by = path.stat()
        self.dataset.reader._check_size(self.dataset.shards[number], told_by.st_size)
        with self._lock:
            changed, found = self._footers.pop(number, (0, None))
            if found is None or changed != told_by.st_mtime_ns:
                found = pq.read_metadata(path)
            self._footers[number] = told_by.st_mtime_ns, found
            while len(self._footers) > _FOOTERS:
                self._footers.popitem(last=False)
        return found


def _mapped_bytes() -> int:
    """How much of mapped files is in this process's memory; 0 where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0


_STATM = Path("/proc/self/statm")


def narrowed(dataset: StoredDataset[Any], columns: Iterable[str]) -> StoredDataset[Any]:
    """The same rows of the same shards, with some of the columns."""
    state: Mapping[str, Any] = dataset.__getstate__()
    paths = resolve_columns(dataset.document_type.document_schema(), columns)
    made: StoredDataset[Any] = object.__new__(type(dataset))
    made.__setstate__({**state, "_paths": paths, "verified": None})  # which is of other columns
    return made
