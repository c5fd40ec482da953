"""Queries in the manner of MongoDB: `{'price': {'$lt': 5}, 'tags.lang': 'en'}`, compiled once for a schema.

Through arrays and lists a path is satisfied when any element satisfies it (all operators of one dict at once); what is
negated (`$ne`, `$nin`, `$not`, `{'$exists': False}`) holds when no element satisfies the opposite. A path that leads
nowhere finds None. Values and operators that can never match a field are errors: see `_query_values`.

A compiled query decides about documents, or about the rows of columns at once; both agree.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._equality import equal_values
from quire.array._query_values import (
    LISTS,
    MismatchError,
    equal_forms,
    has_size,
    has_text,
    is_whole,
    ordered_forms,
)
from quire.array._regex import compile_regex
from quire.columns import Column, Columns, DocumentColumn, ObjectColumn, ScalarColumn
from quire.document import BaseDocument
from quire.errors import PathError, QueryError, did_you_mean
from quire.schema import Field, FieldKind, FieldPath, Schema, join_path, parse_path
from quire.tensors import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

Predicate = Callable[[Any], bool]
_DEEPEST = 64
"""Levels of `$and`, `$or`, `$nor` and `$not` within each other."""


def compile_filter(query: Any, schema: Schema | None) -> Query:
    """Compile a query, or wrap a function; paths and values are checked against the schema, where there is one."""
    if isinstance(query, Query):
        return query
    if callable(query):
        return Query(_Function(query), is_function=True)
    return Query(_compile(query, schema, 0))


class Query:
    """A query that decides which documents, or rows of columns, match."""

    def __init__(self, root: Node, *, is_function: bool = False) -> None:
        self.root, self.is_function = root, is_function

    def __call__(self, document: Any) -> bool:
        """Whether a document matches."""
        if self.is_function:
            return self.root.test(document)
        try:
            return self.root.test(document)
        except RecursionError as error:
            raise QueryError("the values are nested too deeply to be compared.") from error

    @property
    def paths(self) -> list[FieldPath]:
        """The paths that the query speaks of."""
        return list(self.root.paths())

    def mask(self, columns: Columns) -> NDArray[np.bool_] | None:
        """Which rows match, worked out from the columns alone; None where that takes documents."""
        try:
            return None if self.is_function else self.root.mask(columns)
        except (_UndecidedError, QueryError, RecursionError):
            return None  # an error may come from a row that other conditions exclude: evaluate documents

    def rows(self, columns: Columns) -> NDArray[np.int64]:
        """The positions of the rows that match."""
        mask = self.mask(columns)
        if mask is not None:
            return np.flatnonzero(mask)
        return np.array([row for row, document in enumerate(columns.iter_documents()) if self(document)], np.int64)

    def conditions(self) -> Iterator[tuple[FieldPath, str, list[Any]]]:
        """Conditions that every matching row meets: a path, an operator of `ORDERED`, and the values, one of which.

        They let whole groups of rows be ruled out by their least and greatest value.
        """
        return self.root.conditions()


class _UndecidedError(Exception):
    """Raised if the columns alone do not decide a condition."""


# --- the compiled form


class Node(ABC):
    """A part of a query."""

    @abstractmethod
    def test(self, value: Any) -> bool:
        """Whether a document satisfies it."""

    @abstractmethod
    def mask(self, columns: Columns) -> NDArray[np.bool_]:
        """Which rows satisfy it."""

    @abstractmethod
    def paths(self) -> Iterator[FieldPath]:
        """The paths in it."""

    def conditions(self) -> Iterator[tuple[FieldPath, str, list[Any]]]:
        """What must hold for it to be satisfied; see `Query.conditions`."""
        return iter(())


@dataclass(frozen=True)
class _Function(Node):
    function: Callable[[Any], Any]

    def test(self, value: Any) -> bool:
        return bool(self.function(value))

    def mask(self, columns: Columns) -> NDArray[np.bool_]:  # noqa: ARG002
        raise _UndecidedError

    def paths(self) -> Iterator[FieldPath]:
        return iter(())


@dataclass(frozen=True)
class _All(Node):
    parts: tuple[Node, ...]

    def test(self, value: Any) -> bool:
        return all(part.test(value) for part in self.parts)

    def mask(self, columns: Columns) -> NDArray[np.bool_]:
        result = np.ones(len(columns), np.bool_)
        for part in self.parts:
            result &= part.mask(columns)
        return result

    def paths(self) -> Iterator[FieldPath]:
        for part in self.parts:
            yield from part.paths()

    def conditions(self) -> Iterator[tuple[FieldPath, str, list[Any]]]:
        for part in self.parts:
            yield from part.conditions()


@dataclass(frozen=True)
class _Any(Node):
    parts: tuple[Node, ...]

    def test(self, value: Any) -> bool:
        return any(part.test(value) for part in self.parts)

    def mask(self, columns: Columns) -> NDArray[np.bool_]:
        result = np.zeros(len(columns), np.bool_)
        for part in self.parts:
            result |= part.mask(columns)
        return result

    def paths(self) -> Iterator[FieldPath]:
        for part in self.parts:
            yield from part.paths()


@dataclass(frozen=True)
class _Not(Node):
    part: Node

    def test(self, value: Any) -> bool:
        return not self.part.test(value)

    def mask(self, columns: Columns) -> NDArray[np.bool_]:
        return ~self.part.mask(columns)

    def paths(self) -> Iterator[FieldPath]:
        return self.part.paths()


@dataclass(frozen=True)
class _Test:
    """One operator with its argument: `holds` decides about a value, or about an element of a list."""

    name: str
    values: list[Any]
    holds: Predicate
    of_elements: bool


@dataclass(frozen=True)
class _Condition(Node):
    """What must hold of the value at a path, or of one of the values that a path through lists leads to."""

    path: FieldPath
    tests: tuple[_Test, ...]

    def test(self, value: Any) -> bool:
        return _matches(value, self.path, self._holds)

    def _holds(self, found: Any) -> bool:
        elements = []
        is_list = isinstance(found, LISTS) or hasattr(type(found), "_trusted")
        for test in self.tests:
            if is_list and test.of_elements:
                elements.append(test.holds)
            elif not test.holds(found):
                return False
        return not elements or any(all(holds(item) for holds in elements) for item in found)

    def mask(self, columns: Columns) -> NDArray[np.bool_]:
        column, present, below = _locate(columns, self.path)
        result = self._compare_numbers(column) if isinstance(column, ScalarColumn) else None
        if result is None:
            result = self._search(column, below)
        if result is None:
            values = column.values()
            result = np.fromiter((_matches(value, below, self._holds) for value in values), np.bool_, len(values))
        if not present.all():
            result[~present] = _matches(None, below, self._holds)
        return result

    def _compare_numbers(self, column: ScalarColumn) -> NDArray[np.bool_] | None:
        """Compare numbers as an array, where numpy compares them as Python does."""
        if any(test.name not in ORDERED or not _are_plain(column.field, test.values) for test in self.tests):
            return None
        data = column.framework.to_numpy(column.data)
        result = np.ones(len(column), np.bool_)
        for test in self.tests:
            result &= np.isin(data, test.values) if test.name == "$in" else ORDERED[test.name](data, test.values[0])
        return result

    def _search(self, column: Column, below: FieldPath) -> NDArray[np.bool_] | None:
        """Search the texts of a column for a pattern, all at once."""
        if below or len(self.tests) != 1 or self.tests[0].name != "$regex" or column.field.kind is not FieldKind.TEXT:
            return None
        return compile_regex(self.tests[0].values[0]).search_all(column.values())

    def paths(self) -> Iterator[FieldPath]:
        yield self.path

    def conditions(self) -> Iterator[tuple[FieldPath, str, list[Any]]]:
        for test in self.tests:
            if test.name in ORDERED and all(value is not None for value in test.values):
                yield self.path, test.name, test.values


ORDERED: dict[str, Callable[[Any, Any], Any]] = {
    "$in": lambda found, wanted: found in wanted,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
"""The operators that compare a value with others; `$eq` is an `$in` of one value."""


def _are_plain(field: Field, values: list[Any]) -> bool:
    """Whether numpy compares the numbers as Python does: integers as such, and floats that are numbers."""
    if field.type is float:
        return all(type(item) in (int, float) and abs(item) < 1 << 53 for item in values)
    return all(type(item) is field.type and -(1 << 63) <= item < 1 << 63 for item in values)


def _locate(columns: Columns, path: FieldPath) -> tuple[Column, NDArray[np.bool_], FieldPath]:
    """The column of a path, which rows have the documents above it, and the rest of the path below its values."""
    present = np.ones(len(columns), np.bool_)
    for depth, name in enumerate(path):
        column = columns.columns.get(name)
        below = path[depth + 1 :]
        if isinstance(column, DocumentColumn) and below:
            columns = column.columns
            present = present if columns.validity is None else present & columns.validity
        elif isinstance(column, ObjectColumn) or (isinstance(column, ScalarColumn) and not below):
            return column, present & column.valid_rows(), below
        else:
            break
    raise _UndecidedError


def _matches(value: Any, path: FieldPath, test: Predicate) -> bool:
    """Whether a test holds at a path below a value, or at one of those that lists on the way lead to."""
    if not path:
        return test(value)
    if hasattr(type(value), "_trusted"):
        value = value._documents
    if isinstance(value, (list, tuple)):
        return any(_matches(item, path, test) for item in value)
    return _matches(_child(value, path[0]), path[1:], test)


def _child(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name)
    content = getattr(value, "__dict__", {})
    if name in content:
        return content[name]
    return (getattr(value, "__pydantic_extra__", None) or {}).get(name)


# --- compilation


def _compile(query: Any, schema: Schema | None, depth: int) -> Node:
    if depth > _DEEPEST:
        raise QueryError(f"the query is nested more than {_DEEPEST} levels deep.")
    if not isinstance(query, Mapping):
        raise QueryError(
            f"a filter is a function or a dict, got {describe(query)}. Write {{'field': value}} or "
            "{'field': {'$gt': value}}."
        )
    return _All(tuple(_compile_entry(key, value, schema, depth) for key, value in query.items()))


def _compile_entry(key: Any, value: Any, schema: Schema | None, depth: int) -> Node:
    if not isinstance(key, str):
        raise QueryError(f"the keys of a filter are paths and operators, got {key!r}.")
    if key in ("$and", "$or", "$nor"):
        if not isinstance(value, (list, tuple)):
            raise QueryError(f"{key} takes a list of filters.")
        parts = tuple(_compile(part, schema, depth + 1) for part in value)
        if key == "$and":
            return _All(parts)
        return _Any(parts) if key == "$or" else _Not(_Any(parts))
    if key == "$not":
        return _Not(_compile(value, schema, depth + 1))
    if key.startswith("$"):
        raise QueryError(f"{key!r} is not an operator here. {did_you_mean(key, ('$and', '$or', '$nor', '$not'))}")
    path = parse_path(key)
    field = None if schema is None else find_field(schema, path)
    where = key if schema is None else f"{schema.name}.{key}"
    return _Target(path, field, where).compile(value, depth)


def find_field(schema: Schema, path: FieldPath) -> Field | None:
    """Return the field at the end of a path; None if the schema does not have it: in untyped dicts and extra values.

    A path that leads nowhere is a PathError.
    """
    fields: list[Field] = []
    for depth in range(len(path)):
        if not depth:  # the schema itself, which may have fewer fields than its class
            below = _fields_of(schema, path[0])
            if below is None:
                return None
            fields = below or list(schema.resolve(path)[:1])
            continue
        found: list[Field] = []
        for field in fields:
            below = _fields_below(field, path[depth])
            if below is None:
                return None
            found += below
        if not found:
            _raise_no_field(schema, path, depth, fields)
        fields = found
    if not fields:
        raise QueryError("the empty path is the whole document: name a field of it.")
    return fields[0] if len(fields) == 1 else Field(path[-1], FieldKind.UNION, Any, nullable=True, items=tuple(fields))


def _fields_below(field: Field, name: str) -> list[Field] | None:
    """The fields of a name in the values of a field; None where values may hold any."""
    if field.kind is FieldKind.DICT:
        return [field.items[1]] if len(field.items) == 2 else None
    if field.kind in (FieldKind.LIST, FieldKind.UNION) and field.items:
        found: list[Field] = []
        for item in field.items:
            below = _fields_below(item, name)
            if below is None:
                return None
            found += below
        return found
    if field.kind in (FieldKind.ANY, FieldKind.LIST):
        return None
    if field.kind not in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
        return []
    return _fields_of(field.document_type.document_schema(), name)


def _fields_of(schema: Schema, name: str) -> list[Field] | None:
    """The field of a name, as a list; None where documents may hold any."""
    if schema.document_type is BaseDocument or schema.is_open:
        return None
    inner = schema.by_name.get(name)
    if inner is None and schema.document_type.model_config.get("extra") == "allow":
        return None
    return [] if inner is None else [inner]


def _raise_no_field(schema: Schema, path: FieldPath, depth: int, fields: list[Field]) -> None:
    names = {name for field in fields for name in _names_below(field)}
    if not names or fields[0].kind not in (FieldKind.LIST, FieldKind.UNION):
        schema.resolve(path)  # which names the nearest fields
    raise PathError(
        f"{schema.name}.{join_path(path[:depth])} is {fields[0]}, and has no field {path[depth]!r}. "
        f"{did_you_mean(path[depth], sorted(names))}"
    )


def _names_below(field: Field) -> set[str]:
    if field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
        return set(field.document_type.document_schema().by_name)
    return {name for item in field.items for name in _names_below(item)}


_OPPOSITES = {"$ne": "$eq", "$neq": "$eq", "$nin": "$in"}
_KNOWN = ("$eq", "$gt", "$gte", "$lt", "$lte", "$in", "$regex", "$exists", "$size", *_OPPOSITES, "$not")
_MEANT = {
    "=": "$eq",
    "==": "$eq",
    "!=": "$ne",
    "<>": "$ne",
    ">": "$gt",
    ">=": "$gte",
    "<": "$lt",
    "<=": "$lte",
    "not in": "$nin",
    "~": "$regex",
    "like": "$regex",
    "match": "$regex",
    "len": "$size",
    "$ge": "$gte",
    "$le": "$lte",
    "$match": "$regex",
    "$contains": "$in",
    "contains": "$in",
    **{name[1:]: name for name in _KNOWN},
}


@dataclass(frozen=True)
class _Target:
    """A path of a query, and its field if the schema has it."""

    path: FieldPath
    field: Field | None
    where: str

    def compile(self, value: Any, depth: int) -> Node:
        """What must hold at the path: equality, or a dict of operators that must all hold."""
        if depth > _DEEPEST:
            raise QueryError(f"the query is nested more than {_DEEPEST} levels deep.")
        if not self._has_operators(value):
            return _Condition(self.path, (self._equal([value]),))
        tests: list[_Test] = []
        refused: list[Node] = []
        for name, argument in value.items():
            if name == "$not":
                refused.append(self.compile(argument, depth + 1))
            elif name in _OPPOSITES:
                refused.append(self.compile({_OPPOSITES[name]: argument}, depth + 1))
            elif name == "$exists" and not self._is_true(argument):
                refused.append(self.compile({"$exists": True}, depth + 1))
            else:
                tests.append(self._test(name, argument))
        parts: list[Node] = [_Not(node) for node in refused]
        if tests:
            parts.append(_Condition(self.path, tuple(tests)))
        return parts[0] if len(parts) == 1 else _All(tuple(parts))

    def _has_operators(self, value: Any) -> bool:
        """Whether a dict is one of operators, and not a value to be equal to."""
        if not isinstance(value, Mapping):
            return False
        wrong = [key for key in value if not (isinstance(key, str) and key.startswith("$"))]
        if value and not wrong:
            return True
        holds_dicts = self.field is None or _may_hold(self.field, (FieldKind.DICT, FieldKind.ANY))
        if holds_dicts and len(wrong) == len(value):
            return False
        nested = self.field is not None and _may_hold(self.field, (FieldKind.DOCUMENT, FieldKind.DOCUMENTS))
        if not value or (nested and all(isinstance(key, str) and key not in _MEANT for key in wrong)):
            return False  # which is no document, and reported as such
        raise QueryError(self._unknown(wrong[0]))

    def _unknown(self, name: Any) -> str:
        meant = _MEANT.get(name) if isinstance(name, str) else None
        hint = f"Did you mean {meant!r}?" if meant else did_you_mean(str(name), _KNOWN)
        place = f"{self.where}: " if self.field is None else f"{self.where} is {self.field}, and "
        return f"{place}{name!r} is not an operator. {hint}"

    def _test(self, name: str, argument: Any) -> _Test:
        if name in ("$eq", "$in"):
            if name == "$in" and not isinstance(argument, LISTS):
                raise QueryError(f"{self.where}: $in and $nin take a list of values, got {describe(argument)}.")
            return self._equal(list(argument) if name == "$in" else [argument])
        if name in ORDERED:
            return self._ordered(name, argument)
        if name == "$regex":
            return self._regex(argument)
        if name == "$exists":
            return _Test(name, [True], lambda found: found is not None, of_elements=False)
        if name == "$size":
            return self._size(argument)
        raise QueryError(self._unknown(name))

    def _is_true(self, argument: Any) -> bool:
        if not isinstance(argument, (bool, int, np.bool_)):
            raise QueryError(f"{self.where}: $exists takes True or False, got {describe(argument)}.")
        return bool(argument)

    def _equal(self, values: list[Any]) -> _Test:
        forms = [form for value in values for form in self._forms(value, equal_forms, "never equals")]
        whole = [form for form in forms if is_whole(self.field, form)]
        elements = [form for form in forms if not is_whole(self.field, form)]
        if whole and elements:  # of a list, itself or an element

            def holds(found: Any) -> bool:
                inside = found if isinstance(found, LISTS) or hasattr(type(found), "_trusted") else [found]
                return _equals_any(found, whole) or any(_equals_any(item, elements) for item in inside)

            return _Test("$in", forms, holds, of_elements=False)
        return _Test("$in", forms, lambda found: _equals_any(found, forms), of_elements=not whole)

    def _ordered(self, name: str, value: Any) -> _Test:
        compare, forms = ORDERED[name], self._forms(value, ordered_forms, "cannot be compared with")
        mixed = self.field is not None and self.field.kind is FieldKind.UNION

        def holds(found: Any) -> bool:
            return found is not None and any(_compare(compare, found, form, self.where, mixed=mixed) for form in forms)

        return _Test(name if len(forms) == 1 else "", forms, holds, of_elements=True)

    def _forms(self, value: Any, forms: Callable[[Field, Any], list[Any]], verb: str) -> list[Any]:
        """A value of the query as the field holds it."""
        if self.field is None:
            return [value.item() if isinstance(value, np.generic) else value]
        try:
            return forms(self.field, value)
        except MismatchError as error:
            hint = f" {error}" if str(error) else ""
            raise QueryError(f"{self.where} is {self.field}, and {verb} {describe(value)}.{hint}") from None

    def _regex(self, pattern: Any) -> _Test:
        if not isinstance(pattern, str):
            raise QueryError(f"{self.where}: $regex: a pattern is a text, got {describe(pattern)}.")
        if self.field is not None and not has_text(self.field):
            raise QueryError(f"{self.where} is {self.field}, which has no text for $regex to search.")
        regex = compile_regex(pattern)

        def holds(found: Any) -> bool:
            found = getattr(found, "value", found)  # of an enum
            text = str(found) if isinstance(found, PurePath) else found
            return isinstance(text, str) and regex.search(text)

        return _Test("$regex", [pattern], holds, of_elements=True)

    def _size(self, size: Any) -> _Test:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise QueryError(f"{self.where}: $size takes a number of elements, got {describe(size)}.")
        if self.field is not None and not has_size(self.field):
            raise QueryError(f"{self.where} is {self.field}, which has no size.")
        return _Test("$size", [size], lambda found: _has_size(found, int(size)), of_elements=False)


def _may_hold(field: Field, kinds: tuple[FieldKind, ...]) -> bool:
    if field.kind in (FieldKind.UNION, FieldKind.LIST):
        return any(_may_hold(item, kinds) for item in field.items) or not field.items
    return field.kind in kinds


def _equals_any(found: Any, values: list[Any]) -> bool:
    for value in values:
        if isinstance(found, datetime) and isinstance(value, datetime):
            _check_zones(found, value)
        if equal_values(found, value):
            return True
    return False


def _check_zones(found: datetime, value: datetime) -> None:
    if (found.utcoffset() is None) != (value.utcoffset() is None):
        with_zone, without = ("documents", "query") if value.utcoffset() is None else ("query", "documents")
        raise QueryError(f"the times of the {with_zone} have a time zone, and those of the {without} have none.")


def _compare(compare: Callable[[Any, Any], Any], found: Any, value: Any, where: str, *, mixed: bool) -> bool:
    try:
        if isinstance(found, datetime) and isinstance(value, datetime):
            _check_zones(found, value)
        return bool(compare(found, value))
    except (TypeError, ValueError, RuntimeError) as error:  # the last two: tensors of more than one element
        if isinstance(error, QueryError):
            raise
        if mixed:  # a union: its other values do not match
            return False
        raise QueryError(f"{where}: cannot compare {type(found).__name__} with {type(value).__name__}.") from error


def _has_size(found: Any, size: int) -> bool:
    try:
        return bool(len(found) == size)
    except TypeError:  # a number, None, a tensor without dimensions
        return False
