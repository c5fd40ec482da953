"""Count the missing values of fields in a dataset from the metadata of its files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quire.errors import DecodeError, StorageError
from quire.schema import FieldKind, FieldPath, Schema, join_path
from quire.storage._block_table import BlockTable
from quire.storage._dataset import StoredDataset
from quire.storage._manifest import Shard
from quire.storage._shards import read_table

_MOST_SHARDS = 256
"""The most shards whose metadata is read: it takes about 1 ms each from a disk, and a request each from a store."""
_REQUESTS = 16


class NullCount(NamedTuple):
    """The number of missing values of a field, and of all its values; below an array, those of its documents."""

    missing: int
    total: int

    @property
    def is_partial(self) -> bool:
        """Whether some, but not all, values are missing."""
        return 0 < self.missing < self.total


def null_counts(dataset: StoredDataset[Any], paths: Sequence[FieldPath]) -> dict[FieldPath, NullCount]:
    """Count the missing values at paths over all shards; paths without null counts in the metadata are left out.

    Block tables have null counts, and the footers of files on this machine. Rows that a filter excludes count as well.
    """
    shards = dataset.shards
    if not paths or not shards or len(shards) > _MOST_SHARDS:
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
    table = read_table(dataset.folder, shard)
    counts = {} if table is None else _count_table(table, dataset.schema, paths)
    rest = [path for path in paths if path not in counts]
    file = dataset.folder.local_path(shard.name)
    if rest and file is not None:
        count = _count_parquet if shard.format == "parquet" else _count_arrow
        counts |= count(file, dataset.schema, rest)
    return counts


def _count_table(table: BlockTable, schema: Schema, paths: Sequence[FieldPath]) -> dict[FieldPath, NullCount]:
    sums = np.where((table.nulls < 0).any(axis=0), -1, table.nulls.sum(axis=0)).tolist()
    nulls, rows = dict(zip(table.names, sums, strict=True)), sum(table.rows)
    counts: dict[FieldPath, NullCount] = {}
    for path in paths:
        if _is_listed(schema, path) or nulls.get(join_path(path), -1) < 0:
            continue  # a table has no number of documents in lists
        around = [nulls.get(join_path(path[:size]), 0) for size in range(1, len(path))]
        counts[path] = NullCount(max(nulls[join_path(path)], *around, 0), rows)
    return counts


def _is_listed(schema: Schema, path: FieldPath) -> bool:
    return any(each.kind is FieldKind.DOCUMENTS for each in schema.resolve(path)[:-1])


def _count_arrow(file: Path, schema: Schema, paths: Sequence[FieldPath]) -> dict[FieldPath, NullCount]:
    del schema
    counts: dict[FieldPath, NullCount] = {}
    with pa.memory_map(str(file)) as mapped:
        reader = pa.ipc.open_file(mapped)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            for path in paths:
                array = _array_at(batch, path)
                if array is not None:
                    before = counts.get(path, NullCount(0, 0))
                    counts[path] = NullCount(before.missing + array.null_count, before.total + len(array))
    return counts


def _array_at(batch: pa.RecordBatch, path: FieldPath) -> pa.Array | None:
    """Return the array at a path through structs and lists of structs."""
    places = batch.schema.get_all_field_indices(path[0])
    array = batch.column(places[0]) if len(places) == 1 else None
    for name in path[1:]:
        if array is not None and pa.types.is_list(array.type):
            array = array.values
        if array is None or not pa.types.is_struct(array.type) or array.type.get_field_index(name) < 0:
            return None
        array = array.field(name)
    return array


def _count_parquet(file: Path, schema: Schema, paths: Sequence[FieldPath]) -> dict[FieldPath, NullCount]:
    metadata = pq.read_metadata(file)
    names = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    counts: dict[FieldPath, NullCount] = {}
    for path in paths:
        leaves = [] if _is_listed(schema, path) else _leaves(names, join_path(path))  # empty lists count as nulls
        nulls = [_count_nulls(metadata, leaf) for leaf in leaves]
        known = [number for number in nulls if number is not None]
        if nulls and len(known) == len(nulls):
            counts[path] = NullCount(max(known), metadata.num_rows)
    return counts


def _leaves(names: Sequence[str], path: str) -> list[int]:
    """Return the Parquet columns of a field, without those in lists, whose empty rows count as nulls."""
    inside = [index for index, name in enumerate(names) if name == path or name.startswith(f"{path}.")]
    return [index for index in inside if ".list." not in names[index].removeprefix(path)]


def _count_nulls(metadata: pq.FileMetaData, column: int) -> int | None:
    total = 0
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(column).statistics
        if statistics is None or not statistics.has_null_count:
            return None
        total += statistics.null_count
    return total
