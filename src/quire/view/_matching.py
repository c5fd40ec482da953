"""Which rows match a filter: columns are looked at as such, and documents only made where that cannot tell."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._paths import parse_path
from quire.columns import Column, Columns, DocumentColumn, ObjectColumn, ScalarColumn
from quire.errors import QueryError
from quire.schema import FieldKind
from quire.storage._pages import Pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": lambda found, wanted: found in wanted,
    "$nin": lambda found, wanted: found not in wanted,
}
_NEGATIVE = ("$ne", "$nin")
_EXACT = 1 << 53


class _UnknownError(Exception):
    """Columns alone do not tell."""


def matching(pages: Pages, where: Mapping[str, Any]) -> NDArray[np.int64]:
    """The positions of the rows that a filter lets through, in order."""
    paths = sorted(_paths(where))
    if not paths:
        return np.arange(len(pages))
    found = [np.zeros(0, np.int64)]
    try:
        for start, columns in pages.narrow(*paths).blocks():
            found.append(start + np.flatnonzero(_mask(columns, where)))
    except _UnknownError:
        return pages.matching(where)
    return np.concatenate(found)


def _paths(where: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for key, value in where.items():
        if key == "$not":
            found |= _paths(value)
        elif key.startswith("$"):
            found |= {path for part in value for path in _paths(part)}
        else:
            found.add(key)
    return found


def _mask(columns: Columns, where: Mapping[str, Any]) -> NDArray[np.bool_]:
    result = np.ones(len(columns), np.bool_)
    for key, value in where.items():
        if key == "$and":
            for part in value:
                result &= _mask(columns, part)
        elif key == "$or":
            result &= np.logical_or.reduce([_mask(columns, part) for part in value])
        elif key == "$not":
            result &= ~_mask(columns, value)
        else:
            result &= _tested(columns, key, value if isinstance(value, Mapping) else {"$eq": value})
    return result


def _tested(columns: Columns, path: str, tests: Mapping[str, Any]) -> NDArray[np.bool_]:
    column, there = _column(columns, path)
    result = np.ones(len(columns), np.bool_)
    for name, wanted in tests.items():
        result &= _test(column, there, name, wanted)
    return result


def _column(columns: Columns, path: str) -> tuple[Column, NDArray[np.bool_]]:
    """The column at a path, and which rows have a value there."""
    there = np.ones(len(columns), np.bool_)
    *above, last = parse_path(path)
    for name in above:
        nested = columns.columns[name]
        if not isinstance(nested, DocumentColumn):
            raise _UnknownError
        columns = nested.columns
        there = there if columns.validity is None else there & columns.validity
    column = columns.columns[last]
    return column, there & column.valid_rows()


def _test(column: Column, there: NDArray[np.bool_], name: str, wanted: Any) -> NDArray[np.bool_]:
    if name == "$exists":
        return there if wanted else ~there
    if name == "$not":
        return ~_all(_test(column, there, key, value) for key, value in wanted.items())
    if name == "$regex":
        return _searched(column, wanted)
    if name not in _COMPARE:
        raise _UnknownError
    if wanted is None:
        return {"$eq": ~there, "$ne": there}.get(name, np.zeros(len(there), np.bool_))
    if isinstance(column, ScalarColumn):
        found = _compared(column, name, wanted)
    elif isinstance(column, ObjectColumn) and column.field.kind in _PLAIN:
        found = _compared_objects(column, name, wanted)
    else:
        raise _UnknownError
    return found | ~there if name in _NEGATIVE else found & there


def _all(parts: Iterable[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    return np.asarray(np.stack(list(parts)).all(axis=0))


_PLAIN = (FieldKind.TEXT, FieldKind.ENUM, FieldKind.DATE, FieldKind.DATETIME, FieldKind.UUID, FieldKind.DECIMAL)


def _compared(column: ScalarColumn, name: str, wanted: Any) -> NDArray[np.bool_]:
    data = column.framework.to_numpy(column.data)
    values = wanted if isinstance(wanted, list) else [wanted]
    if any(value is None or abs(value) >= _EXACT for value in values):
        raise _UnknownError  # numpy would compare others as floats
    if name in ("$in", "$nin"):
        found = np.isin(data, values)
        return ~found if name == "$nin" else found
    result: NDArray[np.bool_] = _COMPARE[name](data, wanted)
    return result


def _compared_objects(column: ObjectColumn, name: str, wanted: Any) -> NDArray[np.bool_]:
    test = _COMPARE[name]
    try:
        found = (value is not None and bool(test(value, wanted)) for value in column.values())
        return np.fromiter(found, np.bool_, len(column))
    except TypeError as error:  # a zone on one side alone, members of enums in an order
        raise QueryError(f"{column.field.name} cannot be compared like this: {error}.") from error


def _searched(column: Column, pattern: str) -> NDArray[np.bool_]:
    if column.field.kind is not FieldKind.TEXT:
        raise _UnknownError
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise QueryError(f"the regular expression cannot be read: {error}.") from error
    found = (value is not None and search(value) is not None for value in column.values())
    return np.fromiter(found, np.bool_, len(column))
