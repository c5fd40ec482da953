"""Statistics of the columns of a dataset, from a sample of its rows where it has many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.columns import Columns, ColumnStatistics, Statistics
from quire.errors import OptionError
from quire.storage._dataset import StoredDataset
from quire.storage._layout import Layout
from quire.storage._manifest import Shard
from quire.storage._select import Paths, chosen_paths
from quire.storage._shards import ShardReader
from quire.tensors import get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCKS = 64
"""A sample is of so many runs of rows, spread over the dataset; of shards that are not mapped, of a quarter of them."""
_ROWS, _BYTES = 8192, 32 << 20
"""So many rows, or bytes, are in memory at a time."""
_MOST_BYTES = 512 << 20
"""About so many bytes are looked at, where rows are large; a thousand rows in any case."""


def column_statistics(
    dataset: StoredDataset[Any],
    columns: Iterable[str] | None = None,
    rows: int = 100_000,
    seed: int = 0,
    bins: int = 20,
) -> dict[str, ColumnStatistics]:
    """What the columns of a dataset hold, by path: missing values, ranges, histograms, lengths, shapes, top values.

    All rows are looked at where there are no more than `rows`; else so many, in runs that are spread over the dataset
    and depend on the seed. Of large rows, such as images, fewer: about 512 MiB are read.
    """
    if rows < 1 or bins < 1:
        raise OptionError(f"rows and bins are at least 1, got rows={rows}, bins={bins}.")
    paths = chosen_paths(dataset.schema, columns)
    found = Statistics(paths, seed)
    for part in _parts(dataset, _sampled(dataset, rows, seed), paths):
        found.add(part)
    return found.to_dict(bins)


def _sampled(dataset: StoredDataset[Any], rows: int, seed: int) -> NDArray[np.int64]:
    """The positions of the rows to look at, in order."""
    total, wanted = len(dataset), min(rows, max(1000, _MOST_BYTES // _row_bytes(dataset)))
    if total <= wanted:
        return np.arange(total)
    blocks = min(_BLOCKS if dataset.is_mapped else _BLOCKS // 4, wanted)
    edges = np.arange(blocks + 1, dtype=np.int64) * total // blocks
    sizes = np.diff(edges * wanted // total)
    free = np.diff(edges) - sizes  # a run begins anywhere in its share of the rows, and ends there
    starts = edges[:-1] + (np.random.default_rng(seed).random(blocks) * (free + 1)).astype(np.int64)
    return np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])


def _row_bytes(dataset: StoredDataset[Any]) -> int:
    return max(1, dataset.nbytes // max(int(dataset.starts[-1]), 1))


def _parts(dataset: StoredDataset[Any], rows: NDArray[np.int64], paths: Paths) -> Iterator[Columns]:
    yield _gathered(dataset, rows[:0], paths)  # so that a dataset without rows tells of its columns
    if dataset.is_mapped:
        size = max(1, min(_ROWS, _BYTES // _row_bytes(dataset)))
        for start in range(0, len(rows), size):
            yield _gathered(dataset, rows[start : start + size], paths)
        return
    layout = Layout(dataset.document_type.document_schema(), paths=dataset._paths if paths is None else paths)
    reader = ShardReader(dataset.folder, layout, dataset.reader.cache, dataset.options.verify)
    stored = dataset._stored(rows)
    numbers = dataset.shards_of(rows)
    for number in np.unique(numbers).tolist():
        yield from _read(reader, dataset.shards[number], stored[numbers == number] - dataset.starts[number])


def _gathered(dataset: StoredDataset[Any], rows: NDArray[np.int64], paths: Paths) -> Columns:
    """The columns of rows of shards that are mapped; no tensor is made of a framework that may not be installed."""
    names = None if paths is None else {path[0] for path in paths}
    with dataset._lock:
        found = dataset._located(dataset._stored(rows))
    found.framework = get_framework("numpy")
    chosen = [number for number, form in enumerate(dataset.layout.forms) if names is None or form.field.name in names]
    found.verify(chosen)
    forms = [dataset.layout.forms[number] for number in chosen]
    return Columns(dataset.schema, {form.field.name: form.gather(found) for form in forms}, len(rows))


def _read(reader: ShardReader, shard: Shard, rows: NDArray[np.int64]) -> Iterator[Columns]:
    """The columns of rows of a shard; only the row groups that they are in are read, a part at a time."""
    sizes = np.array(reader.block_rows(shard) or (shard.rows,), np.int64)
    ends = np.cumsum(sizes)
    inside = np.searchsorted(ends, rows, side="right")
    groups = np.unique(inside)
    before = np.concatenate([[0], np.cumsum(sizes[groups])[:-1]])  # where each begins among those that are read
    wanted = rows - (ends - sizes)[inside] + before[np.searchsorted(groups, inside)]
    start = 0
    for batch in reader.raw(shard, groups.tolist()):
        here = wanted[(wanted >= start) & (wanted < start + len(batch))] - start
        start += len(batch)
        if len(here):
            columns = reader.columns(reader.conformed(batch, shard))
            yield columns if len(here) == len(batch) else columns.take(here)
        if start > wanted[-1]:
            return
