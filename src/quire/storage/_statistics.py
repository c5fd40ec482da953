"""Statistics of the columns of a dataset, and counts of missing values from the metadata of its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quire.columns import Columns, ColumnStatistics, Statistics
from quire.errors import DecodeError, OptionError, StorageError
from quire.schema import FieldKind, FieldPath, Schema, join_path
from quire.storage._dataset import StoredDataset
from quire.storage._layout import Layout, Paths, resolve_columns
from quire.storage._live_rows import LiveRows
from quire.storage._manifest import Shard
from quire.storage._shard_reader import ShardReader, footer_null_counts, read_block_rows, read_table
from quire.tensors import get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


_RUNS = 64
"""The number of runs of rows in a sample, spread over the dataset; a quarter of it if shards are not mapped."""
_MAX_ROWS, _MAX_PART_BYTES = 8192, 32 << 20
"""The number of rows and bytes that are in memory at a time."""
_MAX_BYTES = 512 << 20
"""About this number of bytes is read if rows are large, but at least a thousand rows."""


def column_statistics(
    dataset: StoredDataset[Any],
    columns: Iterable[str] | None = None,
    rows: int = 100_000,
    seed: int = 0,
    bins: int = 20,
) -> dict[str, ColumnStatistics]:
    """Return statistics of columns by path: missing values, ranges, histograms, lengths, shapes, top values.

    If the dataset has more than `rows` rows, a sample of that size is read, in runs that are spread over the dataset
    and depend on the seed. Of large rows, such as images, fewer are read: about 512 MiB.
    """
    if rows < 1 or bins < 1:
        raise OptionError(f"rows and bins are at least 1, got rows={rows}, bins={bins}.")
    paths = resolve_columns(dataset.schema, columns)
    statistics = Statistics(paths, seed)
    for part in _read_sample(dataset, _sample_rows(dataset, rows, seed), paths):
        statistics.add(part)
    return statistics.to_dict(bins)


def _sample_rows(dataset: StoredDataset[Any], rows: int, seed: int) -> NDArray[np.int64]:
    """Return the positions of the rows of the sample, in order."""
    total, count = len(dataset), min(rows, max(1000, _MAX_BYTES // _row_bytes(dataset)))
    if total <= count:
        return np.arange(total)
    # The dataset is divided into equal shares. A run begins anywhere in its share, and ends there.
    runs = min(_RUNS if dataset._row_reader.is_mapped else _RUNS // 4, count)
    edges = np.arange(runs + 1, dtype=np.int64) * total // runs
    sizes = np.diff(edges * count // total)
    free = np.diff(edges) - sizes
    starts = edges[:-1] + (np.random.default_rng(seed).random(runs) * (free + 1)).astype(np.int64)
    return np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])


def _row_bytes(dataset: StoredDataset[Any]) -> int:
    return max(1, dataset.nbytes // max(int(dataset._row_reader.starts[-1]), 1))


def _read_sample(dataset: StoredDataset[Any], rows: NDArray[np.int64], paths: Paths) -> Iterator[Columns]:
    yield _gather(dataset, rows[:0], paths)  # so that a dataset without rows has statistics of its columns
    rows_reader = dataset._row_reader
    if rows_reader.is_mapped:
        size = max(1, min(_MAX_ROWS, _MAX_PART_BYTES // _row_bytes(dataset)))
        for start in range(0, len(rows), size):
            yield _gather(dataset, rows[start : start + size], paths)
        return
    layout = Layout(dataset.document_type.document_schema(), paths=dataset._paths if paths is None else paths)
    reader = ShardReader(dataset.folder, layout, rows_reader.shard_reader.cache, dataset.options.verify)
    stored, numbers = rows_reader.stored_rows(rows), rows_reader.shards_of(rows)
    for number in np.unique(numbers).tolist():
        yield from _read_rows(reader, dataset.shards[number], stored[numbers == number] - rows_reader.starts[number])


def _gather(dataset: StoredDataset[Any], rows: NDArray[np.int64], paths: Paths) -> Columns:
    """Copy columns of rows of mapped shards, with tensors of numpy: other frameworks may not be installed."""
    locations = dataset._row_reader.locate(rows)
    locations.framework = get_framework("numpy")
    names = None if paths is None else {path[0] for path in paths}
    codecs = {
        number: codec
        for number, codec in enumerate(dataset._row_reader.layout.codecs)
        if names is None or codec.field.name in names
    }
    locations.verify([*codecs])
    columns = {codec.field.name: codec.gather(locations) for codec in codecs.values()}
    return Columns(dataset.schema, columns, len(rows))


def _read_rows(reader: ShardReader, shard: Shard, rows: NDArray[np.int64]) -> Iterator[Columns]:
    """Yield the columns of rows of a shard in parts, reading only the row groups that they are in."""
    # `rows` are numbers in the shard. Only the row groups that have some are read, as if they were concatenated:
    # `positions` are the numbers of the rows among these.
    sizes = np.array(read_block_rows(reader.folder, shard) or (shard.rows,), np.int64)
    ends = np.cumsum(sizes)
    group_of_row = np.searchsorted(ends, rows, side="right")
    groups = np.unique(group_of_row)
    begins = np.concatenate([[0], np.cumsum(sizes[groups])[:-1]])  # among the row groups that are read
    positions = rows - (ends - sizes)[group_of_row] + begins[np.searchsorted(groups, group_of_row)]
    start = 0
    for batch in reader.read_raw(shard, groups.tolist()):
        here = positions[(positions >= start) & (positions < start + len(batch))] - start
        start += len(batch)
        if len(here):
            columns = reader.layout.decode(reader.conform(batch, shard))
            yield columns if len(here) == len(batch) else columns.take(here)
        if start > positions[-1]:
            return


# --- null counts

_MAX_SHARDS = 256
"""The number of shards whose metadata is read: each takes about 1 ms from a disk, and a request to a remote store."""
_REQUESTS = 16


class NullCount(NamedTuple):
    """The number of missing values of a field, and of its rows; in an array of documents, of all of these."""

    missing: int
    total: int

    @property
    def is_partial(self) -> bool:
        """Whether some, but not all, values are missing."""
        return 0 < self.missing < self.total


def null_counts(dataset: StoredDataset[Any], paths: Sequence[FieldPath]) -> dict[FieldPath, NullCount]:
    """Count the missing values at paths over all shards; paths without null counts in the metadata are left out.

    Block tables have null counts, and so have the footers of local files. Rows that a filter excludes count as well. If
    rows were deleted, there are no counts: the metadata does not say what these rows had.
    """
    shards = dataset.shards
    has_deleted = isinstance(dataset._row_reader.rows, LiveRows)
    if not paths or not shards or len(shards) > _MAX_SHARDS or has_deleted:
        return {}
    try:
        if dataset.folder.local_path(shards[0].name) is None:
            with ThreadPoolExecutor(_REQUESTS) as pool:
                counts = list(pool.map(lambda shard: _count(dataset, shard, paths), shards))
        else:
            counts = [_count(dataset, shard, paths) for shard in shards]
    except (StorageError, DecodeError, OSError, pa.ArrowException):
        return {}  # reading the rows raises the error
    return {
        path: NullCount(sum(each[path].missing for each in counts), sum(each[path].total for each in counts))
        for path in paths
        if all(path in each for each in counts)
    }


def _count(dataset: StoredDataset[Any], shard: Shard, paths: Sequence[FieldPath]) -> dict[FieldPath, NullCount]:
    """Count the missing values in one shard."""
    counts: dict[FieldPath, NullCount] = {}
    table = read_table(dataset.folder, shard)
    if table is not None:
        nulls, rows = table.null_counts(), sum(table.rows)
        for path in paths:
            # A table has no number of documents in lists, which would be the total. A value in a missing document is
            # missing as well, and is not counted as a null of its own.
            if not _is_listed(dataset.schema, path) and nulls.get(join_path(path), -1) >= 0:
                counts[path] = NullCount(max(nulls.get(join_path(path[: n + 1]), 0) for n in range(len(path))), rows)
    rest = [path for path in paths if path not in counts]
    file = dataset.folder.local_path(shard.name)
    if rest and file is not None:
        is_parquet = shard.format == "parquet"
        counts |= _count_parquet(file, dataset.schema, rest) if is_parquet else _count_arrow(file, rest)
    return counts


def _is_listed(schema: Schema, path: FieldPath) -> bool:
    return any(each.kind is FieldKind.DOCUMENTS for each in schema.resolve(path)[:-1])


def _count_arrow(file: Path, paths: Sequence[FieldPath]) -> dict[FieldPath, NullCount]:
    counts: dict[FieldPath, NullCount] = {}
    with pa.memory_map(str(file)) as mapped:
        reader = pa.ipc.open_file(mapped)
        for number in range(reader.num_record_batches):
            # A struct, so that the first name of a path is found like the others. Names may be ambiguous (-1).
            rows = reader.get_batch(number).to_struct_array()
            for path in paths:
                array: Any = rows
                for name in path:
                    if pa.types.is_list(array.type):
                        array = array.values
                    if not pa.types.is_struct(array.type) or array.type.get_field_index(name) < 0:
                        break
                    array = array.field(name)
                else:
                    before = counts.get(path, NullCount(0, 0))
                    counts[path] = NullCount(before.missing + array.null_count, before.total + len(array))
    return counts


def _count_parquet(file: Path, schema: Schema, paths: Sequence[FieldPath]) -> dict[FieldPath, NullCount]:
    metadata = pq.read_metadata(file)
    nulls = footer_null_counts(metadata)
    counts: dict[FieldPath, NullCount] = {}
    for path in paths:
        if _is_listed(schema, path):
            continue
        name = join_path(path)
        leaves = [leaf for leaf in nulls if leaf == name or leaf.startswith(f"{name}.")]
        # An empty list counts as a null of its items, so columns in lists say nothing about the field.
        known = [nulls[leaf] for leaf in leaves if ".list." not in leaf.removeprefix(name)]
        if known and min(known) >= 0:
            counts[path] = NullCount(max(known), metadata.num_rows)
    return counts
