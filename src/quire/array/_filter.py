"""Queries in the manner of MongoDB: `{'price': {'$lt': 5}, 'tags.lang': 'en'}`, compiled once for a schema."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire._equality import equal_values
from quire._paths import FieldPath, parse_path
from quire.errors import QueryError, did_you_mean
from quire.schema import Schema

Predicate = Callable[[Any], bool]


def compile_filter(query: Any, schema: Schema | None) -> Predicate:
    """A predicate on documents; paths are checked against the schema, where there is one."""
    if callable(query):
        return lambda document: bool(query(document))
    if not isinstance(query, Mapping):
        raise QueryError(f"a filter is a function or a dict, got {type(query).__name__}.")
    return _all_of([_compile_entry(key, value, schema) for key, value in query.items()])


def _compile_entry(key: str, value: Any, schema: Schema | None) -> Predicate:
    if key in ("$and", "$or", "$nor"):
        if not isinstance(value, (list, tuple)):
            raise QueryError(f"{key} takes a list of filters.")
        parts = [compile_filter(part, schema) for part in value]
        if key == "$and":
            return _all_of(parts)
        return (lambda doc: any(part(doc) for part in parts)) if key == "$or" else (
            lambda doc: not any(part(doc) for part in parts)
        )
    if key == "$not":
        inner = compile_filter(value, schema)
        return lambda document: not inner(document)
    if key.startswith("$"):
        raise QueryError(f"{key!r} is not an operator here. {did_you_mean(key, ('$and', '$or', '$nor', '$not'))}")
    path = parse_path(key)
    if schema is not None:
        schema.resolve(_known_part(path, schema))
    test = _compile_test(value)
    return lambda document: _matches(document, path, test)


def _known_part(path: FieldPath, schema: Schema) -> FieldPath:
    """The part of a path that the schema can check: below a dict everything goes."""
    for depth in range(1, len(path)):
        if schema.resolve(path[:depth])[-1].kind in ("dict", "any", "union"):
            return path[:depth]
    return path


def _compile_test(value: Any) -> Callable[[Any], bool]:
    """What a value must satisfy: equality, or a dict of operators that must all hold."""
    if not (isinstance(value, Mapping) and value and all(str(key).startswith("$") for key in value)):
        return lambda found: equal_values(found, value)
    tests = []
    for name, argument in value.items():
        if name == "$not":
            inner = _compile_test(argument)
            tests.append(lambda found, inner=inner: not inner(found))
        elif name in _OPERATORS:
            tests.append(_bind(_OPERATORS[name], name, argument))
        else:
            raise QueryError(f"{name!r} is not an operator. {did_you_mean(name, _OPERATORS)}")
    return _all_of(tests)


def _bind(test: Callable[[Any, Any], bool], name: str, argument: Any) -> Predicate:
    if name == "$regex":
        try:
            argument = re.compile(argument)
        except (re.error, TypeError) as error:
            raise QueryError(f"$regex: {error}") from error
    if name in ("$in", "$nin") and not isinstance(argument, (list, tuple, set, frozenset)):
        raise QueryError(f"{name} takes a list of values.")
    return lambda found: test(found, argument)


class _Missing:
    """What is found where a path leads nowhere."""


def _matches(value: Any, path: FieldPath, test: Predicate) -> bool:
    if not path:
        return test(value)
    if hasattr(type(value), "_trusted"):
        return any(_matches(document, path, test) for document in value._documents)
    if isinstance(value, Mapping):
        return _matches(value.get(path[0], _Missing), path[1:], test)
    return _matches(getattr(value, "__dict__", {}).get(path[0], _Missing), path[1:], test)


def _all_of(parts: list[Predicate]) -> Predicate:
    return lambda value: all(part(value) for part in parts)


def _ordered(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], bool]:
    def test(found: Any, wanted: Any) -> bool:
        if found is None or found is _Missing:
            return False
        try:
            return bool(compare(found, wanted))
        except TypeError as error:
            raise QueryError(f"cannot compare {type(found).__name__} with {type(wanted).__name__}.") from error

    return test


def _size(found: Any) -> int | None:
    return len(found) if hasattr(type(found), "__len__") else None


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": lambda found, wanted: equal_values(found, wanted),
    "$ne": lambda found, wanted: not equal_values(found, wanted),
    "$neq": lambda found, wanted: not equal_values(found, wanted),
    "$gt": _ordered(operator.gt),
    "$gte": _ordered(operator.ge),
    "$lt": _ordered(operator.lt),
    "$lte": _ordered(operator.le),
    "$in": lambda found, wanted: any(equal_values(found, item) for item in wanted),
    "$nin": lambda found, wanted: not any(equal_values(found, item) for item in wanted),
    "$regex": lambda found, pattern: isinstance(found, str) and pattern.search(found) is not None,
    "$exists": lambda found, wanted: (found is not _Missing and found is not None) == bool(wanted),
    "$size": lambda found, wanted: _size(found) == wanted,
}
