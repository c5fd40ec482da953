"""Which rows are shown, and in which order: filters and sort columns, evaluated once and cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.array import compile_filter
from quire.columns import Column, Columns, DocumentColumn, ScalarColumn
from quire.errors import QueryError
from quire.schema import Field, FieldKind, FieldPath, Schema, join_path, parse_path
from quire.storage import Pages
from quire.viewer._cache import Cache
from quire.viewer._enum_names import EnumNames
from quire.viewer._filter import parse_filter

if TYPE_CHECKING:
    from numpy.typing import NDArray

SORTABLE = (FieldKind.SCALAR, FieldKind.DATE, FieldKind.DATETIME, FieldKind.TIMEDELTA, FieldKind.ENUM, FieldKind.TEXT)
_CACHE_BYTES = 128 << 20
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - compared with datetimes without a zone
_MAX_TEXTS = 2_000_000
"""Texts of more rows are not sorted: all of them must be in memory."""


@dataclass(frozen=True)
class Selection:
    """The rows to show: a filter line, and a column to sort by."""

    where: str = ""
    sort: str = ""
    descending: bool = False


class RowOrders:
    """The rows of a dataset by their position in a selection."""

    def __init__(self, pages: Pages, names: EnumNames | None = None) -> None:
        self._pages, self._names = pages, names
        self._cache: Cache[Selection, NDArray[Any]] = Cache(_CACHE_BYTES, lambda order: order.nbytes)

    def count(self, selection: Selection) -> int:
        """Return the number of selected rows."""
        order = self._order(selection)
        return len(self._pages) if order is None else len(order)

    def rows(self, selection: Selection, start: int, count: int) -> NDArray[np.int64]:
        """Return the numbers of `count` rows from position `start` on."""
        order = self._order(selection)
        total = len(self._pages) if order is None else len(order)
        start, stop = min(max(start, 0), total), min(max(start, 0) + count, total)
        return np.arange(start, stop) if order is None else order[start:stop].astype(np.int64)

    def selected(self, where: str) -> NDArray[np.int64] | None:
        """Return the numbers of the rows that a filter selects; None for all of them."""
        order = self._order(Selection(where))
        return None if order is None else order.astype(np.int64)

    def position(self, selection: Selection, row: int) -> int | None:
        """Return the position of a row; None if the filter excludes it."""
        order = self._order(selection)
        if order is None:
            return row
        positions = np.flatnonzero(order == row)
        return int(positions[0]) if len(positions) else None

    def _order(self, selection: Selection) -> NDArray[Any] | None:
        """Return the numbers of the selected rows in order; None for all rows in the order of the dataset."""
        selection = Selection(selection.where.strip(), selection.sort, selection.descending)
        if not selection.where and not selection.sort:
            return None
        return self._cache.get(selection, lambda: self._compute_order(selection))

    def _compute_order(self, selection: Selection) -> NDArray[Any]:
        pages = self._pages
        # Half the bytes of int64: a cached order of a large dataset takes much of `_CACHE_BYTES`.
        dtype = np.uint32 if len(pages) < 1 << 32 else np.int64
        rows = None
        if selection.where:
            where = parse_filter(selection.where, pages.dataset.document_type.document_schema(), self._names)
            rows = find_matching_rows(pages, where).astype(dtype)
        if not selection.sort:
            assert rows is not None
            return rows
        keys, missing = read_sort_keys(pages, selection.sort)
        if rows is not None:  # sorting the selected rows only is faster than selecting from all sorted rows
            keys, missing = keys[rows], missing[rows]
        order = _sort_stable(keys, missing, descending=selection.descending).astype(dtype)
        return order if rows is None else rows[order]


# --- filters


def find_matching_rows(pages: Pages, where: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the numbers of the rows that match a filter, in order.

    The filter is evaluated on columns, block by block; documents are created only for filters that need them.
    """
    schema = pages.dataset.document_type.document_schema()
    query = compile_filter(where, schema)
    paths = sorted({join_path(_column_path(schema, path)) for path in query.paths})
    if not paths:  # the filter depends on no column: all rows match, or none
        return np.arange(len(pages) if query(None) else 0)
    rows = [np.zeros(0, np.int64)]
    for start, columns in pages.narrow(*paths).blocks():
        mask = query.mask(columns)
        if mask is None:
            return pages.matching(where)
        rows.append(start + np.flatnonzero(mask))
    return np.concatenate(rows)


def _column_path(schema: Schema, path: FieldPath) -> FieldPath:
    """Return the part of a path that leads to a column; the rest leads into its values, like the key of a dict."""
    for depth, name in enumerate(path):
        field = schema.by_name.get(name)
        if field is None or field.kind not in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
            return path[: depth + 1]
        schema = field.document_type.document_schema()
    return path


def locate_column(columns: Columns, path: str) -> tuple[Column, NDArray[np.bool_]]:
    """Return the column at a path, and a mask of the rows that have a value."""
    present = np.ones(len(columns), np.bool_)
    *above, last = parse_path(path)
    for name in above:
        nested = columns.columns[name]
        if not isinstance(nested, DocumentColumn):
            raise QueryError(f"{path}: {name} has several documents in a row, or none of its own columns.")
        columns = nested.columns
        present = present if columns.validity is None else present & columns.validity
    column = columns.columns[last]
    return column, present & column.valid_rows()


# --- sorting


def read_sort_keys(pages: Pages, path: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return a sort key for each row, and a mask of the rows without a value."""
    field = pages.dataset.document_type.document_schema().resolve(parse_path(path))[-1]
    if field.kind not in SORTABLE or field.type is complex:
        raise QueryError(f"{path} is {field}, which has no order: sort by numbers, dates, names or texts.")
    if field.kind is FieldKind.TEXT and len(pages) > _MAX_TEXTS:
        raise QueryError(f"{path}: texts of more than {_MAX_TEXTS:,} rows are not sorted; sort by a number.")
    parts, gaps = [], []
    for _, columns in pages.narrow(path).blocks():
        column, present = locate_column(columns, path)
        keys = _sort_keys(column, field)
        parts.append(keys)
        gaps.append(~present | (keys != keys))  # NaN counts as missing
    if not parts:
        return np.zeros(0, np.float64), np.zeros(0, np.bool_)
    return np.concatenate(parts), np.concatenate(gaps)


def _sort_keys(column: Column, field: Field) -> NDArray[Any]:
    if isinstance(column, ScalarColumn):
        return column.framework.to_numpy(column.data)
    values = column.values()
    if field.kind is FieldKind.DATETIME:
        # `timestamp()` converts datetimes without a zone by the rules of the machine, which fails for the first and the
        # last years, and a float of seconds cannot tell apart microseconds that are far from 1970.
        starts = {True: _EPOCH, False: _EPOCH.replace(tzinfo=timezone.utc)}
        microsecond = timedelta(microseconds=1)
        ages = [0 if value is None else (value - starts[value.tzinfo is None]) // microsecond for value in values]
        return np.array(ages, np.int64)
    if field.kind is FieldKind.DATE:
        return np.array([0 if value is None else value.toordinal() for value in values], np.int64)
    if field.kind is FieldKind.TIMEDELTA:
        return np.array([0.0 if value is None else value.total_seconds() for value in values], np.float64)
    names = ["" if value is None else getattr(value, "name", value) for value in values]
    return np.array(names, np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else np.array(names, object)


def _sort_stable(keys: NDArray[Any], missing: NDArray[np.bool_], *, descending: bool) -> NDArray[np.int64]:
    """Return positions in the order of their keys, equal keys in their original order, missing ones last.

    A stable descending order is an ascending order of the reversed keys, reversed.
    """
    present = np.flatnonzero(~missing) if missing.any() else None
    if present is not None:
        keys = keys[present]
    order = np.argsort(keys[::-1] if descending else keys, kind="stable")
    if descending:
        order = np.subtract(len(keys) - 1, order, out=order)[::-1]
    return order if present is None else np.concatenate([present[order], np.flatnonzero(missing)])
