"""Queries in the manner of MongoDB: `{'price': {'$lt': 5}, 'tags.lang': 'en'}`, compiled once for a schema.

Through arrays and lists a path is satisfied when any element satisfies it (all operators of one dict at once); what is
negated (`$ne`, `$nin`, `$not`, `{'$exists': False}`) holds when no element satisfies the opposite. A path that leads
nowhere finds None.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire._equality import equal_values
from quire._paths import FieldPath, parse_path
from quire.document import BaseDocument
from quire.errors import QueryError, did_you_mean
from quire.schema import FieldKind, Schema

Predicate = Callable[[Any], bool]
_OPEN_KINDS = (FieldKind.DICT, FieldKind.LIST, FieldKind.UNION, FieldKind.ANY)


def compile_filter(query: Any, schema: Schema | None) -> Predicate:
    """A predicate on documents; paths are checked against the schema, where there is one."""
    if callable(query):
        return lambda document: bool(query(document))
    if not isinstance(query, Mapping):
        raise QueryError(f"a filter is a function or a dict, got {type(query).__name__}.")
    return _all_of([_compile_entry(key, value, schema) for key, value in query.items()])


def _compile_entry(key: Any, value: Any, schema: Schema | None) -> Predicate:
    if not isinstance(key, str):
        raise QueryError(f"the keys of a filter are paths and operators, got {key!r}.")
    if key in ("$and", "$or", "$nor"):
        return _compile_list(key, value, schema)
    if key == "$not":
        return _not(compile_filter(value, schema))
    if key.startswith("$"):
        raise QueryError(f"{key!r} is not an operator here. {did_you_mean(key, ('$and', '$or', '$nor', '$not'))}")
    path = parse_path(key)
    if schema is not None:
        _check_path(path, schema)
    return _compile_test(path, value)


def _compile_list(key: str, value: Any, schema: Schema | None) -> Predicate:
    if not isinstance(value, (list, tuple)):
        raise QueryError(f"{key} takes a list of filters.")
    parts = [compile_filter(part, schema) for part in value]
    if key == "$and":
        return _all_of(parts)
    return _any_of(parts) if key == "$or" else _not(_any_of(parts))


def _check_path(path: FieldPath, schema: Schema) -> None:
    """Refuse a path that leads nowhere; below a dict or a list, and among extra values, everything goes."""
    here = schema
    for name in path:
        field = here.by_name.get(name)
        if field is None and here.document_type.model_config.get("extra") == "allow":
            return
        if field is None or field.kind not in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
            if field is not None and field.kind in _OPEN_KINDS:
                return
            break
        here = field.document_type.document_schema()
        if here.document_type is BaseDocument:
            return
    schema.resolve(path)


def _compile_test(path: FieldPath, value: Any) -> Predicate:
    """What must hold at a path: equality, or a dict of operators that must all hold."""
    if not (isinstance(value, Mapping) and value and all(str(key).startswith("$") for key in value)):
        return lambda document: _matches(document, path, lambda found: _equal(found, value))
    tests: list[Predicate] = []
    refused: list[Predicate] = []
    for name, argument in value.items():
        if name == "$not":
            refused.append(_compile_test(path, argument))
        elif name in _OPPOSITES:
            refused.append(_compile_test(path, {_OPPOSITES[name]: argument}))
        elif name == "$exists" and not argument:
            refused.append(_compile_test(path, {"$exists": True}))
        elif name in _OPERATORS:
            tests.append(_bind(_OPERATORS[name], name, argument))
        else:
            known = (*_OPERATORS, *_OPPOSITES, "$not")
            raise QueryError(f"{name!r} is not an operator. {did_you_mean(str(name), known)}")
    refuses, holds = _any_of(refused), _all_of(tests)
    return lambda document: not refuses(document) and (not tests or _matches(document, path, holds))


def _bind(test: Callable[[Any, Any], bool], name: str, argument: Any) -> Predicate:
    if name == "$regex":
        try:
            argument = re.compile(argument)
        except (re.error, TypeError) as error:
            raise QueryError(f"$regex: {error}") from error
    if name == "$in" and not isinstance(argument, (list, tuple, set, frozenset)):
        raise QueryError("$in and $nin take a list of values.")
    return lambda found: test(found, argument)


class _Missing:
    """What is found where a path leads nowhere."""


def _matches(value: Any, path: FieldPath, test: Predicate) -> bool:
    if not path:
        return test(value)
    if hasattr(type(value), "_trusted"):
        value = value._documents
    if isinstance(value, (list, tuple)):
        return any(_matches(item, path, test) for item in value)
    return _matches(_child(value, path[0]), path[1:], test)


def _child(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name, _Missing)
    content = getattr(value, "__dict__", {})
    if name in content:
        return content[name]
    return (getattr(value, "__pydantic_extra__", None) or {}).get(name, _Missing)


def _all_of(parts: list[Predicate]) -> Predicate:
    return lambda value: all(part(value) for part in parts)


def _any_of(parts: list[Predicate]) -> Predicate:
    return lambda value: any(part(value) for part in parts)


def _not(part: Predicate) -> Predicate:
    return lambda value: not part(value)


def _equal(found: Any, wanted: Any) -> bool:
    return equal_values(None if found is _Missing else found, wanted)


def _ordered(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], bool]:
    def test(found: Any, wanted: Any) -> bool:
        if found is None or found is _Missing:
            return False
        try:
            return bool(compare(found, wanted))
        except (TypeError, ValueError, RuntimeError) as error:  # the last two: tensors of more than one element
            raise QueryError(f"cannot compare {type(found).__name__} with {type(wanted).__name__}.") from error

    return test


def _has_size(found: Any, wanted: Any) -> bool:
    try:
        return bool(len(found) == wanted)
    except TypeError:  # a number, None, a tensor without dimensions
        return False


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": _equal,
    "$gt": _ordered(operator.gt),
    "$gte": _ordered(operator.ge),
    "$lt": _ordered(operator.lt),
    "$lte": _ordered(operator.le),
    "$in": lambda found, wanted: any(_equal(found, item) for item in wanted),
    "$regex": lambda found, pattern: isinstance(found, str) and pattern.search(found) is not None,
    "$exists": lambda found, _: found is not _Missing and found is not None,
    "$size": _has_size,
}
_OPPOSITES = {"$ne": "$eq", "$neq": "$eq", "$nin": "$in"}
