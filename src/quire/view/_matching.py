"""Which rows match a filter: columns are looked at as such, and documents only made where that cannot tell."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
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
_NEGATIVE = {"$ne": "$eq", "$nin": "$in"}
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
        return _tried(column, _search(wanted))
    if name not in _COMPARE:
        raise _UnknownError
    if wanted is None:
        return {"$eq": ~there, "$ne": there}.get(name, np.zeros(len(there), np.bool_))
    if isinstance(column, ScalarColumn):
        found = _compared(column, name, wanted)
    elif name in _NEGATIVE:
        return ~_test(column, there, _NEGATIVE[name], wanted)
    else:
        found = _tried(column, partial(_apply, _COMPARE[name], wanted))
    return found | ~there if name in _NEGATIVE else found & there


def _all(parts: Iterable[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    return np.asarray(np.stack(list(parts)).all(axis=0))


_PLAIN = (
    FieldKind.TEXT,
    FieldKind.ENUM,
    FieldKind.DATE,
    FieldKind.DATETIME,
    FieldKind.UUID,
    FieldKind.DECIMAL,
    FieldKind.SCALAR,  # in lists
)


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


def _apply(test: Callable[[Any, Any], Any], wanted: Any, found: Any) -> bool:
    return bool(test(found, wanted))


def _search(pattern: str) -> Callable[[Any], bool]:
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise QueryError(f"the regular expression cannot be read: {error}.") from error
    return lambda found: search(found) is not None


def _tried(column: Column, test: Callable[[Any], bool]) -> NDArray[np.bool_]:
    """Which values pass a test; of lists, those with an item that does."""
    field = column.field
    in_list = field.kind is FieldKind.LIST and len(field.items) == 1
    if not isinstance(column, ObjectColumn) or (field.items[0] if in_list else field).kind not in _PLAIN:
        raise _UnknownError
    values = column.values()
    try:
        if in_list:
            found = (value is not None and any(test(item) for item in value if item is not None) for value in values)
        else:
            found = (value is not None and test(value) for value in values)
        return np.fromiter(found, np.bool_, len(values))
    except TypeError as error:  # a zone on one side alone, members of enums in an order
        raise QueryError(f"{field.name} cannot be compared like this: {error}.") from error
