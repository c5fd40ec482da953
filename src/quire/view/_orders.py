"""Which rows are shown, and in which order: worked out once for a filter and a column, and kept while it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._paths import parse_path
from quire.columns import Column, ScalarColumn
from quire.errors import QueryError
from quire.schema import Field, FieldKind
from quire.storage._pages import Pages
from quire.view._filter import parse_filter
from quire.view._kept import Kept
from quire.view._matching import locate_column, matching

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEPT = 128 << 20
"""Bytes of orders that are kept."""
_TEXTS = 2_000_000
"""So many texts are sorted at most: they must all be in memory."""
SORTED = (FieldKind.SCALAR, FieldKind.DATE, FieldKind.DATETIME, FieldKind.TIMEDELTA, FieldKind.ENUM, FieldKind.TEXT)


@dataclass(frozen=True)
class Wanted:
    """What is to be seen: the line of the filter, and the column to sort by."""

    where: str = ""
    sort: str = ""
    descending: bool = False


class Orders:
    """The orders of the rows of a dataset."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._kept: Kept[Wanted, NDArray[Any]] = Kept(_KEPT, lambda order: order.nbytes)

    def count(self, wanted: Wanted) -> int:
        """How many rows are shown."""
        found = self._order(wanted)
        return len(self._pages) if found is None else len(found)

    def rows(self, wanted: Wanted, start: int, count: int) -> NDArray[np.int64]:
        """The numbers of the rows from a place on."""
        found = self._order(wanted)
        total = len(self._pages) if found is None else len(found)
        start, stop = min(max(start, 0), total), min(max(start, 0) + count, total)
        return np.arange(start, stop) if found is None else found[start:stop].astype(np.int64)

    def place(self, wanted: Wanted, row: int) -> int | None:
        """Where a row is shown."""
        found = self._order(wanted)
        if found is None:
            return row
        places = np.flatnonzero(found == row)
        return int(places[0]) if len(places) else None

    def _order(self, wanted: Wanted) -> NDArray[Any] | None:
        """The numbers of the rows in order; None for all of them as they are."""
        wanted = Wanted(wanted.where.strip(), wanted.sort, wanted.descending)
        if not wanted.where and not wanted.sort:
            return None
        return self._kept.get(wanted, lambda: self._made(wanted))

    def _made(self, wanted: Wanted) -> NDArray[Any]:
        pages = self._pages
        small = np.uint32 if len(pages) < 1 << 32 else np.int64
        rows = None
        if wanted.where:
            where = parse_filter(wanted.where, pages.dataset.document_type.document_schema())
            rows = matching(pages, where).astype(small)
        if not wanted.sort:
            assert rows is not None
            return rows
        keys, missing = sort_keys(pages, wanted.sort)
        if rows is not None:
            keys, missing = keys[rows], missing[rows]
        order = _sorted(keys, missing, descending=wanted.descending).astype(small)
        return order if rows is None else rows[order]


def _sorted(keys: NDArray[Any], missing: NDArray[np.bool_], *, descending: bool) -> NDArray[np.int64]:
    """Places in order of their keys, those of equal keys as they were; what is missing comes last either way."""
    there = np.flatnonzero(~missing) if missing.any() else None
    if there is not None:
        keys = keys[there]
    order = np.argsort(keys[::-1] if descending else keys, kind="stable")
    if descending:
        order = np.subtract(len(keys) - 1, order, out=order)[::-1]
    return order if there is None else np.concatenate([there[order], np.flatnonzero(missing)])


def sort_keys(pages: Pages, path: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Something to sort the rows by, and which of them have no value."""
    field = pages.dataset.document_type.document_schema().resolve(parse_path(path))[-1]
    if field.kind not in SORTED or field.type is complex:
        raise QueryError(f"{path} is {field}, which has no order: sort by numbers, dates, names or texts.")
    if field.kind is FieldKind.TEXT and len(pages) > _TEXTS:
        raise QueryError(f"{path}: texts of more than {_TEXTS:,} rows are not sorted; sort by a number.")
    parts, gaps = [], []
    for _, columns in pages.narrow(path).blocks():
        column, there = locate_column(columns, path)
        keys = _keys(column, field)
        parts.append(keys)
        gaps.append(~there | (keys != keys))
    empty = np.zeros(0, np.float64), np.zeros(0, np.bool_)
    return (np.concatenate(parts), np.concatenate(gaps)) if parts else empty


def _keys(column: Column, field: Field) -> NDArray[Any]:
    if isinstance(column, ScalarColumn):
        return column.framework.to_numpy(column.data)
    values = column.values()
    if field.kind is FieldKind.DATETIME:
        return np.array([np.nan if value is None else value.timestamp() for value in values], np.float64)
    if field.kind is FieldKind.DATE:
        return np.array([0 if value is None else value.toordinal() for value in values], np.int64)
    if field.kind is FieldKind.TIMEDELTA:
        return np.array([0.0 if value is None else value.total_seconds() for value in values], np.float64)
    names = ["" if value is None else getattr(value, "name", value) for value in values]
    return np.array(names, np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else np.array(names, object)
