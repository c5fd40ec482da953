"""Filters of datasets: which rows match, computed once and kept in the cache as row numbers."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from quire.array import Query, compile_filter, find_column, hash_fraction, whole_number
from quire.columns import Columns
from quire.errors import OptionError
from quire.schema import join_path, parse_path
from quire.storage._block_table import checksum
from quire.storage._cache import cache_key
from quire.storage._layout import Layout, Paths, json_schema, layout_fingerprint, paths_within
from quire.storage._live_rows import RowSelection, rows_of_shard
from quire.storage._manifest import Shard
from quire.storage._remote_blocks import read_columns
from quire.storage._shard_reader import ShardReader
from quire.tensors import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Split:
    """One of several parts of a dataset; the hash of a field decides which part a row belongs to.

    `Split('id', (0.9, 0.1), 0)` is about nine tenths of the rows, and `Split('id', (0.9, 0.1), 1)` the others, like the
    parts of `split(0.9, 0.1, by='id')`. A row stays in its part when rows are added, and when the type of the field
    changes as schema evolution allows.
    """

    path: str
    fractions: tuple[float, ...]
    index: int

    def __post_init__(self) -> None:
        fractions: Any = self.fractions
        if not isinstance(fractions, (tuple, list)) or not all(isinstance(part, (int, float)) for part in fractions):
            raise OptionError(f"fractions are the sizes of all parts, as in (0.9, 0.1), got {describe(fractions)}.")
        if min(fractions, default=-1) < 0 or sum(fractions) > 1 + 1e-9:
            raise OptionError(f"fractions are parts of 1, got {fractions}.")
        if not 0 <= whole_number("index", self.index) < len(fractions):
            raise OptionError(f"index is one of the {len(fractions)} fractions, got {self.index}.")

    def rows(self, columns: Columns) -> NDArray[np.int64]:
        """Return the positions of the rows that belong to the part."""
        bounds = list(accumulate(self.fractions))
        values = find_column(columns, self.path).values()
        parts = [bisect_right(bounds, hash_fraction(value)) for value in values]
        return np.flatnonzero(np.array(parts, np.int64) == self.index)


Where = Mapping[str, Any] | Split | Callable[[Any], Any]
"""A query as `DocumentArray.filter` takes it, a part of a split, or a function of documents."""


def matching_rows(
    reader: ShardReader,
    shards: Iterable[Shard],
    where: Where,
    *,
    rows: RowSelection | None = None,
    columns: Paths = None,
) -> NDArray[np.int64]:
    """Return the numbers of the rows that match a filter: of `rows`, by default of all.

    The filter can use `columns`, by default all. Results are cached, except those of functions and of some rows.
    """
    shards = list(shards)
    schema = reader.layout.schema.document_type.document_schema()
    query = where if isinstance(where, Split) else compile_filter(where, schema)
    if isinstance(query, Split):
        schema.resolve(parse_path(query.path))  # raises for a field that does not exist
    query_paths = [parse_path(query.path)] if isinstance(query, Split) else query.paths
    paths = paths_within(schema, query_paths, columns) or columns
    name = _cache_name(where) if rows is None and paths == (query_paths or None) else None
    if name is None:
        return _find_rows(reader, shards, query, paths, rows)
    # Rows are validated when they are read, so the result depends on the aliases and defaults of the class as well.
    parts = [part for shard in shards for part in shard.identity]
    parts += [layout_fingerprint(schema), json_schema(schema)]
    if reader.verify == "never":  # damaged values may have matched: other readers do not use the result
        parts.append("unverified")
    key = cache_key("rows of queries 3", reader.folder.url, name, *parts)
    for _ in range(2):
        with reader.cache.open(
            key, lambda target: _save_rows(target, _find_rows(reader, shards, query, paths))
        ) as file:
            cached = _load_rows(file.read())
        if cached is not None:
            return cached
        reader.cache.remove(key)  # it is damaged, and is computed again
    return _find_rows(reader, shards, query, paths)  # the disk of the cache does not keep what is written


def _save_rows(target: Path, rows: NDArray[np.int64]) -> None:
    """Write row numbers, after their checksum."""
    data = rows.astype("<i8").tobytes()
    target.write_bytes(checksum(data).to_bytes(8, "little") + data)


def _load_rows(content: bytes) -> NDArray[np.int64] | None:
    """Return row numbers; None if the file is damaged."""
    if len(content) % 8 or not content or checksum(content[8:]) != int.from_bytes(content[:8], "little"):
        return None
    return np.frombuffer(content[8:], "<i8").astype(np.int64)


def _cache_name(where: Where) -> str | None:
    """Return a text that identifies a filter; None for functions, and for values that JSON does not have."""
    if isinstance(where, Split):
        return f"{where!r} by canonical value 2"  # earlier versions cached results of other hashes
    try:
        return None if callable(where) else json.dumps(where, sort_keys=True)
    except TypeError:
        return None


def _find_rows(
    reader: ShardReader,
    shards: list[Shard],
    query: Query | Split,
    paths: Paths,
    rows: RowSelection | None = None,
) -> NDArray[np.int64]:
    """Find the matching rows by reading the columns of the query, without row groups that cannot match."""
    # Only the columns of the query are read; a function, whose columns are not known, is called with whole documents.
    layout = Layout(reader.layout.schema.document_type.document_schema(), paths=paths)
    narrow = ShardReader(reader.folder, layout, reader.cache, reader.verify)
    bounds = [] if isinstance(query, Split) else _bounds(query, layout)
    may_match = partial(_may_match, bounds=bounds) if bounds else None
    matches, start = [np.zeros(0, np.int64)], 0
    for shard in shards:
        for numbers, columns in read_columns(narrow, shard, rows_of_shard(rows, start, shard), may_match):
            matches.append(start + numbers[query.rows(columns)])
        start += shard.rows
    return np.concatenate(matches)


# --- statistics of row groups


class _Bound(NamedTuple):
    """A condition of a query: every matching row has one of the values ($in), or compares with the only one."""

    path: str
    operator: str
    values: Sequence[Any]

    def excludes(self, least: Any, most: Any) -> bool:
        """Whether no value from `least` to `most` meets the condition."""
        try:
            if self.operator == "$in":
                return all(value < least or value > most for value in self.values)
            [value] = self.values
            if self.operator in ("$gt", "$gte"):
                return bool(most < value or (self.operator == "$gt" and most == value))
            return bool(least > value or (self.operator == "$lt" and least == value))
        except TypeError:
            return False  # values that cannot be compared raise an error when rows are read


def _bounds(query: Query, layout: Layout) -> list[_Bound]:
    """Return the conditions that the minimum and maximum of a row group can rule out."""
    bounds: list[_Bound] = []
    for path, name, values in query.conditions():
        # Minima and maxima of stored values rule out a condition only if values compare as the stored ones do. Enums
        # that are stored by name do not, for instance.
        codec = layout.find_codec(path)
        if codec is None or not codec.keeps_order:
            continue
        forms = [form for value in values for form in codec.to_statistics(value)]
        if name == "$in" or len(forms) == 1:
            bounds.append(_Bound(join_path(path), name, forms))
    return bounds


def _may_match(group: pq.RowGroupMetaData, bounds: Sequence[_Bound]) -> bool:
    """Whether the minima and maxima of a row group leave a chance that one of its rows matches."""
    paths = {bound.path for bound in bounds}
    for column in map(group.column, range(group.num_columns)):
        statistics = column.statistics if column.path_in_schema in paths else None
        if statistics is not None and statistics.has_min_max:
            own = [bound for bound in bounds if bound.path == column.path_in_schema]
            if any(bound.excludes(statistics.min, statistics.max) for bound in own):
                return False
    return True
