"""Which rows of a dataset are meant: a filter, worked out once into the numbers of rows."""

from __future__ import annotations

import hashlib
import json
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from quire._paths import FieldPath, parse_path
from quire.array._columns_view import find_column, matching
from quire.array._filter import compile_filter
from quire.columns import Columns, ScalarColumn
from quire.errors import OptionError
from quire.schema import FieldKind
from quire.storage._cache import cache_key
from quire.storage._form import Form, NumberForm
from quire.storage._layout import Layout, json_schema, layout_fingerprint
from quire.storage._manifest import Shard
from quire.storage._nested import DocumentForm
from quire.storage._objects import TextForm
from quire.storage._shards import ShardReader

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Split:
    """One of several parts that rows fall into by the hash of a field: the same part wherever and whenever it is read.

    `Split('id', (0.9, 0.1), 0)` are nine tenths of the rows, and `Split('id', (0.9, 0.1), 1)` are the others.
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
    """A number from 0 to 1 for a value, from its text."""
    digest = hashlib.blake2b(str(value).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


Where = Mapping[str, Any] | Split | Callable[[Any], Any]
"""A filter as `DocumentArray.filter` takes it, a part of a split, or a function of documents."""


def matching_rows(reader: ShardReader, shards: Iterable[Shard], where: Where) -> NDArray[np.int64]:
    """The numbers of the rows that a filter lets through; kept in the cache, but for functions, which have no name."""
    shards = list(shards)
    schema = reader.layout.schema.document_type.document_schema()
    if not isinstance(where, Split):
        compile_filter(where, schema)  # complains of what it does not know
    name = _name(where)
    if name is None:
        return _evaluated(reader, shards, where)
    parts = [part for shard in shards for part in shard.identity]
    parts += [layout_fingerprint(schema), json_schema(schema)]  # which tell aliases and defaults

    def make(target: Any) -> None:
        with open(target, "wb") as file:  # noqa: PTH123 - as numpy's own call would add a suffix
            np.save(file, _evaluated(reader, shards, where))

    with reader.cache.open(cache_key("rows", reader.folder.url, name, *parts), make) as file:
        found: NDArray[np.int64] = np.load(file)
    return found


def _name(where: Where) -> str | None:
    if isinstance(where, Split):
        return repr(where)
    try:
        return None if callable(where) else json.dumps(where, sort_keys=True)
    except TypeError:
        return None


def _evaluated(reader: ShardReader, shards: list[Shard], where: Where) -> NDArray[np.int64]:
    schema = reader.layout.schema.document_type.document_schema()
    paths: Any = None if callable(where) else [(path[0],) for path in _paths(where)]
    narrow = ShardReader(reader.folder, Layout(schema, paths=paths or None), reader.cache)
    bounds = {} if callable(where) or isinstance(where, Split) else dict(_bounds(where, narrow.layout))
    found, start = [np.zeros(0, np.int64)], 0
    for shard in shards:
        for first, columns in _parts(narrow, shard, bounds):
            found.append(start + first + _matching(columns, where))
        start += shard.rows
    return np.concatenate(found)


def _parts(reader: ShardReader, shard: Shard, bounds: Mapping[str, Any]) -> Iterator[tuple[int, Columns]]:
    """The rows of a shard, part by part, with the number of the first; parts that cannot match are left out."""
    if shard.format == "parquet" and bounds:
        yield from reader.groups(shard, lambda group: _may_match(group, bounds))
        return
    first = 0
    for batch in reader.read(shard):
        yield first, reader.columns(batch)
        first += len(batch)


def _matching(columns: Columns, where: Where) -> NDArray[np.int64]:
    if isinstance(where, Split):
        return where.rows(columns)
    quick = None if callable(where) else _compared(columns, where)
    return matching(columns, where) if quick is None else np.flatnonzero(quick)


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": lambda data, wanted: np.isin(data, list(wanted)),
}


def _compared(columns: Columns, query: Mapping[str, Any]) -> NDArray[np.bool_] | None:
    """Which rows match, all at once; None where that is not known of every part of the query."""
    result = np.ones(len(columns), np.bool_)
    for path, tests in _conditions(query):
        column = columns.columns.get(path)
        if not isinstance(column, ScalarColumn) or any(not _is_plain(column, value) for value in tests.values()):
            return None
        if not tests.keys() <= _COMPARE.keys():
            return None
        data = column.framework.to_numpy(column.data)
        for name, value in tests.items():
            result &= _COMPARE[name](data, value)
        result &= column.valid_rows()
    return None if any(key.startswith("$") for key in query) else result


def _is_plain(column: ScalarColumn, value: Any) -> bool:
    """Whether numpy compares the numbers as Python does: integers as such, and floats that are numbers."""
    items = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    if column.field.type is float:
        return all(type(item) in (int, float) and abs(item) < 1 << 53 for item in items)
    return all(type(item) is column.field.type and -(1 << 63) <= item < 1 << 63 for item in items)


def _conditions(query: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The paths of a query, and what must hold there."""
    for path, value in query.items():
        if not path.startswith("$"):
            tests = isinstance(value, Mapping) and value and all(str(name).startswith("$") for name in value)
            yield path, dict(value) if tests else {"$eq": value}


def _paths(query: Any) -> list[FieldPath]:
    """The paths that a query speaks of."""
    if isinstance(query, Split):
        return [parse_path(query.path)]
    found: list[FieldPath] = []
    for key, value in query.items():
        if key in ("$and", "$or", "$nor"):
            found += [path for part in value for path in _paths(part)]
        elif key == "$not":
            found += _paths(value)
        else:
            found.append(parse_path(key))
    return found


# --- what statistics tell


def _bounds(query: Mapping[str, Any], layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """The conditions that the least and the greatest value of a row group can rule out."""
    for path, tests in _conditions(query):
        kept = {name: value for name, value in tests.items() if name in _COMPARE and value is not None}
        if kept and _is_ordered(layout, parse_path(path)):
            yield path, kept
    for part in query.get("$and", ()):
        yield from _bounds(part, layout)


def _is_ordered(layout: Layout, path: FieldPath) -> bool:
    """Whether values at a path are stored as they are, so that their order is that of the file."""
    forms: Sequence[Form] = layout.forms
    found: Form | None = None
    for name in path:
        found = next((form for form in forms if form.field.name == name), None)
        forms = found.forms if isinstance(found, DocumentForm) else ()
    plain = isinstance(found, TextForm) and found.field.type is str
    return plain or isinstance(found, NumberForm) or (found is not None and found.field.kind is FieldKind.DATE)


def _may_match(group: pq.RowGroupMetaData, bounds: Mapping[str, Any]) -> bool:
    for index in range(group.num_columns):
        column = group.column(index)
        statistics = column.statistics if column.path_in_schema in bounds else None
        if statistics is None or not statistics.has_min_max:
            continue
        least, most = statistics.min, statistics.max
        if any(_ruled_out(name, value, least, most) for name, value in bounds[column.path_in_schema].items()):
            return False
    return True


def _ruled_out(name: str, value: Any, least: Any, most: Any) -> bool:
    try:
        if name in ("$eq", "$in"):
            values = [value] if name == "$eq" else value
            return all(item < least or item > most for item in values)
        if name in ("$gt", "$gte"):
            return bool(most < value or (name == "$gt" and most == value))
        return bool(least > value or (name == "$lt" and least == value))
    except TypeError:
        return False  # values that do not compare are told of when rows are looked at
