"""Which rows of a dataset are meant: a filter, worked out once into the numbers of rows."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from quire.array import Query, compile_filter, find_column
from quire.columns import Columns
from quire.errors import OptionError
from quire.schema import FieldKind, FieldPath, join_path, parse_path
from quire.storage._arrow_codec import ArrowCodec, NumberCodec, TextCodec
from quire.storage._block_table import checksum
from quire.storage._cache import cache_key
from quire.storage._layout import Layout, json_schema, layout_fingerprint
from quire.storage._manifest import Shard
from quire.storage._nested_codecs import DocumentCodec
from quire.storage._shard_reader import ShardReader

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Split:
    """One of several parts of a dataset; the hash of a field decides which part a row belongs to.

    `Split('id', (0.9, 0.1), 0)` are nine tenths of the rows, and `Split('id', (0.9, 0.1), 1)` are the others. A row
    stays in its part when rows are added, and when the type of the field changes as schema evolution allows.
    """

    path: str
    fractions: tuple[float, ...]
    index: int

    def __post_init__(self) -> None:
        if min(self.fractions, default=-1) < 0 or sum(self.fractions) > 1 + 1e-9:
            raise OptionError(f"fractions are parts of 1, got {self.fractions}.")
        if not 0 <= self.index < len(self.fractions):
            raise OptionError(f"index is one of the {len(self.fractions)} fractions, got {self.index}.")

    def rows(self, columns: Columns) -> NDArray[np.int64]:
        """The positions of the rows that fall into the part."""
        bounds = list(accumulate(self.fractions))
        values = find_column(columns, self.path).values()
        parts = [bisect_right(bounds, _fraction(value)) for value in values]
        return np.flatnonzero(np.array(parts, np.int64) == self.index)


def _fraction(value: Any) -> float:
    """Return a number from 0 to 1 for a value."""
    digest = hashlib.blake2b(_canonical_bytes(value), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _canonical_bytes(value: Any) -> bytes:
    """Return the bytes that are hashed: the same for all types that a stored value can be read as.

    A dataset may read `int` as `float`, as `timedelta` or as `datetime`, `str` as `bytes` and as `Decimal`, and back.
    Numbers are therefore written like ints where they are whole, lengths and points of time as seconds, and bytes as
    they are.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, timedelta):
        value = _seconds(value)
    elif isinstance(value, datetime) and value.tzinfo is not None:
        value = _seconds(value - datetime(1970, 1, 1, tzinfo=timezone.utc))
    elif isinstance(value, (float, np.floating)) and float(value).is_integer():
        value = int(value)
    return str(value).encode("utf-8", "surrogatepass")


def _seconds(length: timedelta) -> int | str:
    seconds, rest = divmod(length, timedelta(seconds=1))
    return f"{seconds}.{rest.microseconds:06}" if rest else seconds


Where = Mapping[str, Any] | Split | Callable[[Any], Any]
"""A filter as `DocumentArray.filter` takes it, a part of a split, or a function of documents."""


def matching_rows(reader: ShardReader, shards: Iterable[Shard], where: Where) -> NDArray[np.int64]:
    """The numbers of the rows that a filter lets through; kept in the cache, but for functions, which have no name."""
    shards = list(shards)
    schema = reader.layout.schema.document_type.document_schema()
    query = where if isinstance(where, Split) else compile_filter(where, schema)
    name = _name(where)
    if name is None:
        return _evaluated(reader, shards, query)
    parts = [part for shard in shards for part in shard.identity]
    parts += [layout_fingerprint(schema), json_schema(schema)]  # which tell aliases and defaults

    key = cache_key("rows of queries 2", reader.folder.url, name, *parts)
    for _ in range(2):
        with reader.cache.open(key, lambda target: _save_rows(target, _evaluated(reader, shards, query))) as file:
            found = _load_rows(file.read())
        if found is not None:
            return found
        reader.cache.remove(key)  # it is damaged, and is made anew
    return _evaluated(reader, shards, query)  # the disk of the cache does not keep what is written


def _save_rows(target: Path, rows: NDArray[np.int64]) -> None:
    """Write the numbers of rows, after their checksum."""
    data = rows.astype("<i8").tobytes()
    target.write_bytes(checksum(data).to_bytes(8, "little") + data)


def _load_rows(content: bytes) -> NDArray[np.int64] | None:
    """The numbers of rows; None if the file is damaged."""
    if len(content) % 8 or not content or checksum(content[8:]) != int.from_bytes(content[:8], "little"):
        return None
    return np.frombuffer(content[8:], "<i8").astype(np.int64)


def _name(where: Where) -> str | None:
    if isinstance(where, Split):
        return f"{where!r} by canonical value"  # results that were cached under another name used another hash
    try:
        return None if callable(where) else json.dumps(where, sort_keys=True)
    except TypeError:
        return None


def _evaluated(reader: ShardReader, shards: list[Shard], query: Query | Split) -> NDArray[np.int64]:
    """Find the matching rows in the columns that the query names, without the row groups that cannot have any."""
    schema = reader.layout.schema.document_type.document_schema()
    paths = [parse_path(query.path)] if isinstance(query, Split) else query.paths
    layout = Layout(schema, paths=[path[:1] for path in paths] or None)
    narrow = ShardReader(reader.folder, layout, reader.cache, reader.verify)
    bounds = [] if isinstance(query, Split) else _bounds(query, narrow.layout)
    found, start = [np.zeros(0, np.int64)], 0
    for shard in shards:
        for first, columns in _parts(narrow, shard, bounds):
            found.append(start + first + query.rows(columns))
        start += shard.rows
    return np.concatenate(found)


def _parts(reader: ShardReader, shard: Shard, bounds: Sequence[Bound]) -> Iterator[tuple[int, Columns]]:
    """The rows of a shard, part by part, with the number of the first; parts that cannot match are left out."""
    if shard.format == "parquet" and bounds:
        yield from reader.groups(shard, lambda group: _may_match(group, bounds))
        return
    first = 0
    for batch in reader.read(shard):
        yield first, reader.columns(batch)
        first += len(batch)


# --- statistics of row groups

Bound = tuple[str, str, Sequence[Any]]
"""A dotted path, an operator, and values: every matching row holds one of them, or compares with one of them."""


def _bounds(query: Query, layout: Layout) -> list[Bound]:
    """The conditions that the least and the greatest value of a row group can rule out."""
    return [(join_path(path), name, values) for path, name, values in query.conditions() if _is_ordered(layout, path)]


def _is_ordered(layout: Layout, path: FieldPath) -> bool:
    """Whether values at a path are stored as they are, so that their order is that of the file."""
    codecs: Sequence[ArrowCodec] = layout.codecs
    found: ArrowCodec | None = None
    for name in path:
        found = next((codec for codec in codecs if codec.field.name == name), None)
        codecs = found.codecs if isinstance(found, DocumentCodec) else ()
    plain = isinstance(found, TextCodec) and found.field.type is str
    return plain or isinstance(found, NumberCodec) or (found is not None and found.field.kind is FieldKind.DATE)


def _may_match(group: pq.RowGroupMetaData, bounds: Sequence[Bound]) -> bool:
    paths = {path for path, _, _ in bounds}
    for index in range(group.num_columns):
        column = group.column(index)
        statistics = column.statistics if column.path_in_schema in paths else None
        if statistics is None or not statistics.has_min_max:
            continue
        least, most = statistics.min, statistics.max
        own = [(name, values) for path, name, values in bounds if path == column.path_in_schema]
        if any(_ruled_out(name, values, least, most) for name, values in own):
            return False
    return True


def _ruled_out(name: str, values: Sequence[Any], least: Any, most: Any) -> bool:
    try:
        if name == "$in":
            return all(value < least or value > most for value in values)
        [value] = values
        if name in ("$gt", "$gte"):
            return bool(most < value or (name == "$gt" and most == value))
        return bool(least > value or (name == "$lt" and least == value))
    except TypeError:
        return False  # values that do not compare are reported when rows are looked at
