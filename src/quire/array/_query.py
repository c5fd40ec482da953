"""Queries with the operators of MongoDB: `{'price': {'$lt': 5}, 'tags.lang': 'en'}`, compiled once for a schema.

Through arrays and lists a path is satisfied if any element satisfies it (all operators of one dict at once); a negation
(`$ne`, `$nin`, `$not`, `{'$exists': False}`) holds if no element satisfies the opposite. A path without a value gives
None.

The values of a query are converted to the form in which documents hold the field's values: a value that the field can
hold, or its text in JSON (a date as '2024-05-01', a UUID, a Decimal, a path). An enum field takes members, values and,
unless a member has that value, names. None stands for a missing value, or for an element of a list. A value or operator
that can never match a field is an error, and so is None where a value is never missing. `$exists`, and None after `$ne`
and `$nin`, are valid for every field: their result is right, also if it is every document or none.

A path in braces refers to another field of the same document, as in DocArray: `{'price': {'$lt': '{cost}'}}`. It does
so only where it cannot be meant as text, because the values of a query may come from users: for fields that hold no
text, and in the comparisons of order for values that the schema does not describe, as those of a dict. `$expr` compares
any two fields, as in MongoDB: `{'$expr': {'$ne': ['$label', '$prediction']}}`.

A compiled query decides about documents, or about the rows of columns at once; both agree.
"""

from __future__ import annotations

import json
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from numbers import Number, Real
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from quire._equality import equal_values
from quire._protocols import is_array_type, is_document_type
from quire.array._regex import compile_regex
from quire.columns import Column, Columns, DocumentColumn, ObjectColumn, ScalarColumn
from quire.document import BaseDocument
from quire.errors import PathError, QueryError, did_you_mean
from quire.schema import Field, FieldKind, FieldPath, Schema, find_main_text, join_path, parse_path
from quire.tensors import describe, framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Predicate = Callable[[Any], bool]
LISTS = (list, tuple, set, frozenset)
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_DEEPEST = 64
"""Levels of `$and`, `$or`, `$nor` and `$not` within each other."""


def compile_filter(query: Any, schema: Schema | None) -> Query:
    """Compile a query, or wrap a function; paths and values are checked against the schema, where there is one."""
    if isinstance(query, Query):
        return query
    if callable(query):
        return Query(_Function(query), is_function=True)
    if isinstance(query, str):
        with suppress(ValueError):  # the error about text that is not JSON is that about other types
            query = json.loads(query)
    return Query(_compile(query, schema, 0))


class Query:
    """A query that decides which documents, or rows of columns, match."""

    def __init__(self, root: Node, *, is_function: bool = False) -> None:
        self.root, self.is_function = root, is_function

    def __call__(self, document: Any) -> bool:
        """Return whether a document matches."""
        if self.is_function:
            return self.root.test(document)
        try:
            return self.root.test(document)
        except RecursionError as error:
            raise QueryError("the values are nested too deeply to be compared.") from error

    @property
    def paths(self) -> list[FieldPath]:
        """The paths of the query's conditions."""
        return list(self.root.paths())

    def mask(self, columns: Columns) -> NDArray[np.bool_] | None:
        """Return for each row whether it matches; None if the columns alone do not decide it."""
        try:
            return None if self.is_function else self.root.mask(columns)
        except (_UndecidedError, QueryError, RecursionError):
            return None  # an error may come from a row that other conditions exclude: evaluate documents

    def rows(self, columns: Columns) -> NDArray[np.int64]:
        """Return the positions of the rows that match."""
        mask = self.mask(columns)
        if mask is not None:
            return np.flatnonzero(mask)
        return np.array([row for row, document in enumerate(columns.iter_documents()) if self(document)], np.int64)

    def conditions(self) -> Iterator[tuple[FieldPath, str, list[Any]]]:
        """Yield conditions that every matching row meets: a path, an operator of `ORDERED`, and its values.

        A row meets a condition if the operator holds for one of the values. Readers skip whole groups of rows whose
        least and greatest value meet none.
        """
        return self.root.conditions()

    def describe(self) -> QueryPart:
        """Return the query as a tree, for engines that evaluate it by themselves."""
        return self.root.describe()


@dataclass(frozen=True)
class QueryPart:
    """A part of a compiled query: what it tests, for engines that evaluate it by themselves.

    `name` is 'and', 'or' or 'not' of other parts; '$exists', or an operator of `ORDERED` that compares the values at a
    path; or another name for what only quire evaluates, such as a function.
    """

    name: str
    parts: tuple[QueryPart, ...] = ()
    path: FieldPath = ()
    values: tuple[Any, ...] = ()


class _UndecidedError(Exception):
    """Raised if the columns alone do not decide a condition."""


# --- the compiled form


class Node(ABC):
    """A part of a query."""

    @abstractmethod
    def test(self, value: Any) -> bool:
        """Return whether a document satisfies it."""

    @abstractmethod
    def mask(self, columns: Columns) -> NDArray[np.bool_]:
        """Return for each row whether it satisfies it."""

    @abstractmethod
    def paths(self) -> Iterator[FieldPath]:
        """Yield the paths in it."""

    def conditions(self) -> Iterator[tuple[FieldPath, str, list[Any]]]:
        """Yield conditions that hold if it is satisfied; see `Query.conditions`."""
        return iter(())

    def describe(self) -> QueryPart:
        """Return the node as a part of a tree; see `Query.describe`."""
        return QueryPart("other")


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

    def describe(self) -> QueryPart:
        return QueryPart("and", tuple(part.describe() for part in self.parts))


# `_Any` and `_Not` have no conditions: if one of several parts holds, or a part does not, nothing follows for a row.


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

    def describe(self) -> QueryPart:
        return QueryPart("or", tuple(part.describe() for part in self.parts))


@dataclass(frozen=True)
class _Not(Node):
    part: Node

    def test(self, value: Any) -> bool:
        return not self.part.test(value)

    def mask(self, columns: Columns) -> NDArray[np.bool_]:
        return ~self.part.mask(columns)

    def paths(self) -> Iterator[FieldPath]:
        return self.part.paths()

    def describe(self) -> QueryPart:
        return QueryPart("not", (self.part.describe(),))


@dataclass(frozen=True)
class _Test:
    """One operator with its argument: `holds` decides about a value, or about an element of a list."""

    name: str
    values: list[Any]
    holds: Predicate
    of_elements: bool


@dataclass(frozen=True)
class _Condition(Node):
    """Tests of the value at a path; through lists, one of the values must pass all of them."""

    path: FieldPath
    tests: tuple[_Test, ...]

    def test(self, value: Any) -> bool:
        return _matches(value, self.path, self._holds)

    def _holds(self, value: Any) -> bool:
        # As in MongoDB, `{'$gt': 1, '$lt': 5}` on a list means one element between 1 and 5, and not one above 1 and
        # another below 5. So the tests of elements are collected, and applied together.
        elements = []
        is_list = isinstance(value, LISTS) or hasattr(type(value), "_trusted")
        for test in self.tests:
            if is_list and test.of_elements:
                elements.append(test.holds)
            elif not test.holds(value):
                return False
        return not elements or any(all(holds(item) for holds in elements) for item in value)

    def mask(self, columns: Columns) -> NDArray[np.bool_]:
        # By the fastest way that gives the results of `test`: numbers as an array, texts by one search for a pattern,
        # else value by value.
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

    def describe(self) -> QueryPart:
        parts = (QueryPart(test.name, path=self.path, values=tuple(test.values)) for test in self.tests)
        return QueryPart("and", tuple(parts))


@dataclass(frozen=True)
class _Comparison(Node):
    """A comparison of two fields of a document; through lists, one pair of values must satisfy it."""

    path: FieldPath
    name: str
    other: FieldPath
    where: str

    def test(self, value: Any) -> bool:
        def holds(left: Any) -> bool:
            return _matches(value, self.other, lambda right: self._compare_elements(left, right))

        return _matches(value, self.path, holds)

    def _compare_elements(self, left: Any, right: Any) -> bool:
        lefts = left if isinstance(left, LISTS) else [left]
        rights = right if isinstance(right, LISTS) else [right]
        if self.name == "$eq":
            return equal_values(left, right) or any(equal_values(a, b) for a in lefts for b in rights)
        return any(
            _compare(ORDERED[self.name], a, b, self.where, mixed=False)
            for a in lefts
            for b in rights
            if a is not None and b is not None
        )

    def mask(self, columns: Columns) -> NDArray[np.bool_]:
        left, right = _plain_values(columns, self.path), _plain_values(columns, self.other)
        if isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and left.dtype == right.dtype:
            compare = operator.eq if self.name == "$eq" else ORDERED[self.name]
            mask: NDArray[np.bool_] = compare(left, right)
            return mask
        pairs = zip(left.tolist() if isinstance(left, np.ndarray) else left, list(right), strict=True)
        return np.fromiter((self._compare_elements(a, b) for a, b in pairs), np.bool_, len(columns))

    def paths(self) -> Iterator[FieldPath]:
        yield self.path
        yield self.other


ORDERED: dict[str, Callable[[Any, Any], Any]] = {
    "$in": lambda value, options: value in options,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
"""The operators that compare a value with others; `$eq` is an `$in` of one value."""


def _are_plain(field: Field, values: list[Any]) -> bool:
    """Return whether numpy compares the numbers exactly as Python does."""
    # numpy converts both sides to one dtype first. From 2**53 on, whole numbers are rounded when they become float64,
    # and Python compares an int with a float exactly.
    if field.type is float:
        return all(type(item) in (int, float) and abs(item) < 1 << 53 for item in values)
    return all(type(item) is field.type and -(1 << 63) <= item < 1 << 63 for item in values)


def _locate(columns: Columns, path: FieldPath) -> tuple[Column, NDArray[np.bool_], FieldPath]:
    """Return the column of a path, which rows have a value there, and the rest of the path inside its values."""
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


_PLAIN_KINDS = (
    *(FieldKind.TEXT, FieldKind.ENUM, FieldKind.DATE, FieldKind.DATETIME, FieldKind.TIME, FieldKind.TIMEDELTA),
    *(FieldKind.UUID, FieldKind.DECIMAL, FieldKind.PATH),
)
"""Kinds of fields whose values are neither containers nor documents."""


def _plain_values(columns: Columns, path: FieldPath) -> NDArray[Any] | list[Any]:
    """Return the values of a column, None for missing ones; integers of which none is missing as an array."""
    column, present, below = _locate(columns, path)
    if below:
        raise _UndecidedError
    if isinstance(column, ScalarColumn):
        numbers = column.framework.to_numpy(column.data)
        if present.all() and numbers.dtype.kind == "i":
            return numbers
        return [value if is_present else None for value, is_present in zip(column.values(), present, strict=True)]
    if not isinstance(column, ObjectColumn) or column.field.kind not in _PLAIN_KINDS:
        raise _UndecidedError
    return [value if is_present else None for value, is_present in zip(column.values(), present, strict=True)]


def _matches(value: Any, path: FieldPath, test: Predicate) -> bool:
    """Return whether a test holds for the value at a path inside a value; through lists, for any of the values."""
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
    if name in getattr(type(value), "model_fields", ()):
        raise QueryError(
            f"the field {name!r} of {type(value).__name__} was not read, so that a query cannot compare it. Add it to "
            "columns= of the dataset."
        )
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
        if isinstance(value, Mapping):  # each of its entries, as in DocArray
            value = [{name: condition} for name, condition in value.items()]
        if not isinstance(value, (list, tuple)):
            raise QueryError(f"{key} takes a list of filters, or a dict of conditions.")
        parts = tuple(_compile(part, schema, depth + 1) for part in value)
        if key == "$and":
            return _All(parts)
        return _Any(parts) if key == "$or" else _Not(_Any(parts))
    if key == "$not":
        return _Not(_compile(value, schema, depth + 1))
    if key == "$expr":
        return _compile_expression(value, schema)
    if key.startswith("$"):
        known = ("$and", "$or", "$nor", "$not", "$expr")
        raise QueryError(f"{key!r} is not an operator here. {did_you_mean(key, known)}")
    path = parse_key(key, schema)
    field = None if schema is None else find_field(schema, path)
    where = key if schema is None else f"{schema.name}.{key}"
    return _Target(path, field, where, schema).compile(value, depth)


def _compile_expression(value: Any, schema: Schema | None) -> Node:
    """Compile the comparison of two fields: `{'$ne': ['$label', '$prediction']}`."""
    usage = "$expr compares two fields, as in {'$expr': {'$ne': ['$label', '$prediction']}}"
    if not isinstance(value, Mapping) or len(value) != 1:
        raise QueryError(f"{usage}; got {describe(value)}.")
    [(name, operands)] = value.items()
    if name not in ("$eq", "$ne", *ORDERED) or name == "$in":
        known = ("$eq", "$ne", "$lt", "$lte", "$gt", "$gte")
        raise QueryError(f"{usage}; {name!r} compares no two fields. {did_you_mean(str(name), known)}")
    is_pair = isinstance(operands, (list, tuple)) and len(operands) == 2
    if not is_pair or not all(isinstance(each, str) and each.startswith("$") for each in operands):
        raise QueryError(f"{usage}, with a dollar sign in front of each path; got {operands!r}.")
    paths = [parse_key(each[1:], schema) for each in operands]
    where = join_path(paths[0]) if schema is None else f"{schema.name}.{join_path(paths[0])}"
    if schema is not None:
        one, other = (find_field(schema, path) for path in paths)
        if one is not None and other is not None and not _are_comparable(one, other):
            raise QueryError(f"{where} is {one}, which is never compared with {join_path(paths[1])}: that is {other}.")
    node = _Comparison(paths[0], "$eq" if name == "$ne" else name, paths[1], where)
    return _Not(node) if name == "$ne" else node


def _are_comparable(one: Field, other: Field) -> bool:
    """Return whether values of two fields may be equal; the kinds that hold values of others are not looked into."""
    open_kinds = (FieldKind.ANY, FieldKind.UNION, FieldKind.LIST, FieldKind.DICT)
    if one.kind in open_kinds or other.kind in open_kinds:
        return True
    if FieldKind.ENUM in (one.kind, other.kind):
        return one.type is other.type
    numbers = (FieldKind.SCALAR, FieldKind.DECIMAL)
    return one.kind is other.kind or (one.kind in numbers and other.kind in numbers)


def parse_key(key: str, schema: Schema | None) -> FieldPath:
    """Return the path that a key names: `thesis.title`, or `thesis__title` as in DocArray."""
    path = parse_path(key)
    if schema is not None and "__" in key and len(path) == 1 and key not in schema.by_name:
        path = parse_path(key.replace("__", "."))  # the paths of DocArray; no field has this name
    return path


def find_field(schema: Schema, path: FieldPath) -> Field | None:
    """Return the field at the end of a path; None if the schema does not have it: in untyped dicts and extra values.

    It is nullable if the path may lead to no value: through an optional document, a dict, or a union. A path that the
    schema does not have is a PathError.
    """
    if not path:
        raise QueryError("the empty path is the whole document: name a field of it.")
    below = _fields_of(schema, path[0])  # of the schema itself, which may have fewer fields than its class
    if below is None:
        return None
    field = below[0] if below else schema.resolve(path)[0]
    for depth, name in enumerate(path[1:], 1):
        below = _fields_below(field, name)
        if below is None:
            return None
        if not below:
            _raise_no_field(schema, path, depth, field)
        nullable = any(member.nullable for member in below)
        field = below[0] if len(below) == 1 else Field(name, FieldKind.UNION, Any, nullable, items=tuple(below))
    return field


def _fields_below(field: Field, name: str) -> list[Field] | None:
    """Return the fields of a name in the values of a field; None if the values may have any."""
    may_be_missing = field.nullable or field.kind is FieldKind.DICT
    if field.kind is FieldKind.DICT:
        below = [field.items[1]] if len(field.items) == 2 else None
    elif field.kind in (FieldKind.LIST, FieldKind.UNION) and field.items:
        parts = [_fields_below(item, name) for item in field.items]
        may_be_missing = may_be_missing or not all(parts)  # some members have the field, others do not
        below = None if None in parts else [member for part in parts for member in part or ()]
    elif field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
        below = _fields_of(field.document_type.document_schema(), name)
    else:
        below = None if field.kind in (FieldKind.ANY, FieldKind.LIST) else []
    return [replace(member, nullable=True) for member in below] if below and may_be_missing else below


def _fields_of(schema: Schema, name: str) -> list[Field] | None:
    """Return the field of a name, as a list; None if the documents may have any."""
    if schema.document_type is BaseDocument or schema.is_open:
        return None
    inner = schema.by_name.get(name)
    if inner is None:
        return None if schema.document_type.model_config.get("extra") == "allow" else []
    info = schema.document_type.model_fields[name]
    # Pydantic does not validate defaults, so that `size: int = None` holds None.
    return [replace(inner, nullable=True)] if not inner.required and info.default is None else [inner]


def _raise_no_field(schema: Schema, path: FieldPath, depth: int, field: Field) -> None:
    names = _names_below(field)
    if not names or field.kind not in (FieldKind.LIST, FieldKind.UNION):
        schema.resolve(path)  # raises an error with the nearest fields
    raise PathError(
        f"{schema.name}.{join_path(path[:depth])} is {field}, and has no field {path[depth]!r}. "
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
    """A path of a query, and its field if the schema has it.

    A path to documents that stand for a text, as `Text`, compares that text if the query has one.
    """

    path: FieldPath
    field: Field | None
    where: str
    schema: Schema | None = None
    """The schema of the documents, for paths in braces."""
    takes_none: bool = False
    """Whether None is valid for every field: after `$ne`, where it is no mistake, but asks for rows with a value."""

    def compile(self, value: Any, depth: int) -> Node:
        """Compile a value that the path must equal, or a dict of operators that must all hold."""
        if depth > _DEEPEST:
            raise QueryError(f"the query is nested more than {_DEEPEST} levels deep.")
        if not self._has_operators(value):
            if isinstance(value, str) and (main := self._main_text()) is not None:
                return main.compile(value, depth)
            if (other := self._placeholder("$eq", value)) is not None:
                return _Comparison(self.path, "$eq", other, self.where)
            return _Condition(self.path, (self._equal([value]),))
        of_text = {name: argument for name, argument in value.items() if self._is_about_text(name, argument)}
        main = self._main_text() if of_text else None
        if main is not None:
            rest = {name: argument for name, argument in value.items() if name not in of_text}
            node = main.compile(of_text, depth)
            return _All((node, self.compile(rest, depth))) if rest else node
        return self._compile_operators(value, depth)

    def _compile_operators(self, value: Mapping[str, Any], depth: int) -> Node:
        """Compile operators that must all hold."""
        tests: list[_Test] = []
        negated: list[Node] = []
        parts: list[Node] = []
        for name, argument in value.items():
            if name == "$not":
                negated.append(self.compile(argument, depth + 1))
            elif name in _OPPOSITES:
                negated.append(replace(self, takes_none=True).compile({_OPPOSITES[name]: argument}, depth + 1))
            elif name == "$exists" and not self._is_true(argument):
                negated.append(self.compile({"$exists": True}, depth + 1))
            elif (other := self._placeholder(name, argument)) is not None:
                parts.append(_Comparison(self.path, name, other, self.where))
            else:
                tests.append(self._test(name, argument))
        parts += [_Not(node) for node in negated]
        if tests:
            parts.append(_Condition(self.path, tuple(tests)))
        return parts[0] if len(parts) == 1 else _All(tuple(parts))

    def _placeholder(self, name: str, value: Any) -> FieldPath | None:
        """Return the path of the field that a text in braces refers to; None for other values, and for text."""
        match = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
        if match is None or not (name == "$eq" or (name in ORDERED and name != "$in")):
            return None
        is_open = self.field is None or self.field.kind is FieldKind.ANY
        if (name == "$eq") if is_open else has_text(self.field):  # type: ignore[arg-type]
            return None
        path = parse_key(match[1], self.schema)
        if self.schema is not None:
            find_field(self.schema, path)  # raises an error with the nearest fields
        return path

    def _main_text(self) -> _Target | None:
        """Return the target of the text that documents of the field stand for, as that of `Text`; None for others."""
        if self.field is None or self.field.kind not in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
            return None
        document_type = self.field.document_type
        name = find_main_text(document_type)
        if name is None:
            return None
        return _Target((*self.path, name), document_type.document_schema().by_name[name], f"{self.where}.{name}")

    @staticmethod
    def _is_about_text(name: str, argument: Any) -> bool:
        """Return whether an operator compares with texts."""
        if name in ("$in", "$nin"):
            return isinstance(argument, LISTS) and bool(argument) and all(isinstance(item, str) for item in argument)
        return name not in ("$not", "$exists", "$size") and isinstance(argument, str)

    def _has_operators(self, value: Any) -> bool:
        """Return whether a value is a dict of operators, and not a dict to compare with."""
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
            return False  # `_equal` reports that it is not a document
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
            return _Test(name, [True], lambda value: value is not None, of_elements=False)
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

            def holds(value: Any) -> bool:
                inside = value if isinstance(value, LISTS) or hasattr(type(value), "_trusted") else [value]
                return _equals_any(value, whole) or any(_equals_any(item, elements) for item in inside)

            return _Test("$in", forms, holds, of_elements=False)
        return _Test("$in", forms, lambda value: _equals_any(value, forms), of_elements=not whole)

    def _ordered(self, name: str, value: Any) -> _Test:
        compare, forms = ORDERED[name], self._forms(value, ordered_forms, "cannot be compared with")
        mixed = self.field is not None and self.field.kind is FieldKind.UNION

        def holds(value: Any) -> bool:
            return value is not None and any(_compare(compare, value, form, self.where, mixed=mixed) for form in forms)

        return _Test(name if len(forms) == 1 else "", forms, holds, of_elements=True)

    def _forms(self, value: Any, forms: Callable[[Field, Any], list[Any]], verb: str) -> list[Any]:
        """Convert a value of the query to the form in which the field holds it."""
        if self.field is None or (self.takes_none and value is None):
            return [value.item() if isinstance(value, np.generic) else value]
        try:
            return forms(self.field, value)
        except MismatchError as error:
            hint = f" {error}".replace("<path>", join_path(self.path)) if str(error) else ""
            raise QueryError(f"{self.where} is {self.field}, and {verb} {describe(value)}.{hint}") from None

    def _regex(self, pattern: Any) -> _Test:
        if not isinstance(pattern, str):
            raise QueryError(f"{self.where}: $regex: a pattern is a text, got {describe(pattern)}.")
        if self.field is not None and not has_text(self.field):
            raise QueryError(f"{self.where} is {self.field}, which has no text for $regex to search.")
        regex = compile_regex(pattern)

        def holds(value: Any) -> bool:
            value = getattr(value, "value", value)  # of an enum
            text = str(value) if isinstance(value, PurePath) else value
            return isinstance(text, str) and regex.search(text)

        return _Test("$regex", [pattern], holds, of_elements=True)

    def _size(self, size: Any) -> _Test:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise QueryError(f"{self.where}: $size takes a number of elements, got {describe(size)}.")
        if self.field is not None and not has_size(self.field):
            raise QueryError(f"{self.where} is {self.field}, which has no size.")
        return _Test("$size", [size], lambda value: _has_length(value, int(size)), of_elements=False)


def _may_hold(field: Field, kinds: tuple[FieldKind, ...]) -> bool:
    if field.kind in (FieldKind.UNION, FieldKind.LIST):
        return any(_may_hold(item, kinds) for item in field.items) or not field.items
    return field.kind in kinds


def _equals_any(value: Any, options: list[Any]) -> bool:
    for option in options:
        if isinstance(value, datetime) and isinstance(option, datetime):
            _check_zones(value, option)
        if equal_values(value, option):
            return True
    return False


def _check_zones(value: datetime, option: datetime) -> None:
    if (value.utcoffset() is None) != (option.utcoffset() is None):
        with_zone, without = ("documents", "query") if option.utcoffset() is None else ("query", "documents")
        raise QueryError(f"the times of the {with_zone} have a time zone, and those of the {without} have none.")


def _compare(compare: Callable[[Any, Any], Any], value: Any, limit: Any, where: str, *, mixed: bool) -> bool:
    try:
        if isinstance(value, datetime) and isinstance(limit, datetime):
            _check_zones(value, limit)
        return bool(compare(value, limit))
    except (TypeError, ValueError, RuntimeError) as error:  # the last two: tensors of more than one element
        if isinstance(error, QueryError):
            raise
        if mixed:  # a union: its other values do not match
            return False
        raise QueryError(f"{where}: cannot compare {type(value).__name__} with {type(limit).__name__}.") from error


def _has_length(value: Any, size: int) -> bool:
    try:
        return bool(len(value) == size)
    except TypeError:  # a number, None, a tensor without dimensions
        return False


# --- values of a query in the form of a field


class MismatchError(Exception):
    """Raised for a value that never matches a field; the message is a hint, with '<path>' for the path, or empty."""


def equal_forms(field: Field, value: Any) -> list[Any]:
    """Return the values of a field that equal a value of a query; several if a union leaves the type open."""
    value = _plain(value)
    if value is None:
        if not _takes_none(field):
            raise MismatchError(
                f"It is never missing: leave the condition out, or declare it as '{field} | None' if it may be."
            )
        return [None]
    if field.choices:  # of a Literal; for an enum, members and values both count
        known = [getattr(choice, "value", choice) for choice in field.choices]
        if value not in field.choices and value not in known:
            raise MismatchError(did_you_mean(str(value), map(str, known)))
    return _EQUAL[field.kind](field, value)


def ordered_forms(field: Field, value: Any) -> list[Any]:  # noqa: C901 - a case for each kind
    """Return the values that `$gt` and the other comparisons compare a field's values with."""
    value = _plain(value)
    if value is None:
        raise MismatchError("None has no order: use $exists.")
    kind, tp = field.kind, field.type
    if isinstance(value, (float, Decimal)) and value != value:
        raise MismatchError("NaN has no order.")
    if kind is FieldKind.SCALAR and tp is not complex:
        return [_check(value, isinstance(value, Real), _number_hint(value))]
    if kind is FieldKind.DATETIME and type(value) is date:
        return [datetime(value.year, value.month, value.day)]  # noqa: DTZ001 - as naive as the day
    if kind is FieldKind.DATETIME and isinstance(value, str):
        return [_parse(datetime, value)]
    if kind is FieldKind.ENUM:
        return [_ordered_member(field, value)]
    if kind is FieldKind.TENSOR:
        return [_check(value, isinstance(value, Number) or framework_of(value) is not None)]
    if kind is FieldKind.LIST and isinstance(value, LISTS):
        raise MismatchError("Lists have no order: compare their elements.")
    if kind is FieldKind.UNION and field.items:
        return _of_any(field.items, value, ordered_forms)
    if kind is FieldKind.LIST and field.items:
        return _of_elements(field, value, ordered_forms)
    if kind in (FieldKind.ANY, FieldKind.LIST):
        return [value]
    if kind in _WITHOUT_ORDER or (kind is FieldKind.SCALAR and tp is complex):
        raise MismatchError("It has no order.")
    return equal_forms(field, value)


def has_text(field: Field) -> bool:
    """Whether a field may hold text for `$regex` to search."""
    if field.kind is FieldKind.UNION and field.items:
        return any(map(has_text, field.items))
    if field.kind is FieldKind.LIST and field.items:
        return any(map(has_text, _single_elements(field)))
    if field.kind is FieldKind.ENUM:
        return any(isinstance(member.value, str) for member in field.type)
    return field.kind in (FieldKind.TEXT, FieldKind.PATH, FieldKind.ANY, FieldKind.UNION, FieldKind.LIST)


def has_size(field: Field) -> bool:
    """Whether a field may hold values with a length for `$size`."""
    if field.kind is FieldKind.UNION:
        return any(map(has_size, field.items))
    sized = (FieldKind.LIST, FieldKind.DOCUMENTS, FieldKind.DICT, FieldKind.TEXT, FieldKind.BYTES)
    return field.kind in (*sized, FieldKind.TENSOR, FieldKind.ANY)


def is_whole(field: Field | None, value: Any) -> bool:
    """Whether a value is meant for a list as a whole; else for its elements."""
    if field is not None and field.kind is FieldKind.LIST and isinstance(value, LISTS) and field.items:
        try:
            _as_list(field, value)
        except MismatchError:
            return False  # [1, 2] is an element of list[list[int]]
        return True
    return isinstance(value, LISTS) or is_array_type(type(value))


_WITHOUT_ORDER = (FieldKind.DOCUMENT, FieldKind.DOCUMENTS, FieldKind.DICT)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _takes_none(field: Field) -> bool:
    """Return whether the value of a field, or an element of its lists, may be None."""
    if field.nullable or None in field.choices:
        return True
    if field.kind is FieldKind.LIST:
        single = _single_elements(field)
        return not field.items or any(item.nullable for item in field.items) or any(map(_takes_none, single))
    if field.kind is FieldKind.UNION:
        return any(map(_takes_none, field.items))
    if field.kind is FieldKind.ANY:
        with suppress(MismatchError):
            return bool(_equal_any(field, None))
    return False


def _check(value: Any, holds: bool, hint: str = "") -> Any:  # noqa: FBT001 - a condition
    if not holds:
        raise MismatchError(hint)
    return value


def _equal_scalar(field: Field, value: Any) -> list[Any]:
    if field.type is bool:
        return [bool(_check(value, isinstance(value, Real) and value in (0, 1), _number_hint(value)))]
    numeric = isinstance(value, Number) if field.type is complex else isinstance(value, Real)
    _check(value, numeric, _number_hint(value))
    is_finite = bool(value == value) and abs(value) != float("inf")
    is_whole_number = field.type is not int or (is_finite and value == int(value))
    return [_check(value, is_whole_number, "It holds whole numbers.")]


def _number_hint(value: Any) -> str:
    """Suggest a number for a number in quotes."""
    if isinstance(value, str):
        for read in (int, float):
            try:
                return f"Did you mean {read(value)!r}?"
            except ValueError:
                continue
        if value.lower() in ("true", "false"):
            return f"Did you mean {value.lower() == 'true'}?"
    return ""


def _equal_text(_: Field, value: Any) -> list[Any]:
    hint = f"Did you mean {str(value)!r}?" if isinstance(value, (int, float, UUID, PurePath)) else ""
    return [_check(value, isinstance(value, str), hint)]


def _equal_bytes(_: Field, value: Any) -> list[Any]:
    hint = "Text is not bytes: write b'...'." if isinstance(value, str) else ""
    return [bytes(_check(value, isinstance(value, (bytes, bytearray, memoryview)), hint))]


def _equal_enum(field: Field, value: Any) -> list[Any]:
    tp: Any = field.type
    if isinstance(value, Enum) and not isinstance(value, tp):
        raise MismatchError(f"It is a member of {type(value).__name__}.")
    try:
        member = tp(value)
    except (ValueError, TypeError, KeyError):
        if not (isinstance(value, str) and value in tp.__members__):
            known = [str(member.value) for member in tp]
            raise MismatchError(did_you_mean(str(value), known)) from None
        member = tp[value]
    return [member, member.value]  # documents of a class with use_enum_values hold the value


def _ordered_member(field: Field, value: Any) -> Any:
    if not issubclass(field.type, (int, float, str)):
        raise MismatchError("Its members have no order.")
    if issubclass(field.type, str):
        return _check(value, isinstance(value, str))
    return _check(value, isinstance(value, Real), _number_hint(value))


def _parse(tp: Any, text: str) -> Any:
    """Parse a text as JSON would; a bare number, which pydantic takes for seconds, is rejected."""
    try:
        if not re.fullmatch(r"\s*[+-]?[\d.]+\s*", text):
            return TypeAdapter(tp).validate_python(text)
    except ValidationError:
        pass
    raise MismatchError(_EXAMPLES[tp])


_EXAMPLES: dict[Any, str] = {
    datetime: "Write a datetime, or a text like '2024-05-01T12:30:00'.",
    date: "Write a date, or a text like '2024-05-01'.",
    time: "Write a time, or a text like '12:30:00'.",
    timedelta: "Write a timedelta, or a text like 'PT1H30M'.",
}


def _equal_datetime(_: Field, value: Any) -> list[Any]:
    is_day = type(value) is date or (isinstance(value, str) and _DAY.fullmatch(value.strip()) is not None)
    if is_day:
        raise MismatchError("A day is a range of times: use $gte with it and $lt with the next.")
    if isinstance(value, str):
        return [_parse(datetime, value)]
    return [_check(value, isinstance(value, datetime), _EXAMPLES[datetime])]


def _moment(tp: Any) -> Callable[[Field, Any], list[Any]]:
    def forms(_: Field, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [_parse(tp, value)]
        fits = isinstance(value, tp) and not (tp is date and isinstance(value, datetime))
        return [_check(value, fits, _EXAMPLES[tp])]

    return forms


def _equal_uuid(_: Field, value: Any) -> list[Any]:
    try:
        return [UUID(value) if isinstance(value, str) else _check(value, isinstance(value, UUID))]
    except ValueError:
        raise MismatchError("Write a UUID, or its text.") from None


def _equal_decimal(_: Field, value: Any) -> list[Any]:
    """Convert a value to a Decimal; a float is the decimal that it is written as: 0.1 is Decimal('0.1')."""
    try:
        if isinstance(value, (str, float)):
            return [Decimal(repr(value) if isinstance(value, float) else value)]
    except InvalidOperation:
        raise MismatchError("Write a Decimal, a number, or its text.") from None
    return [_check(value, isinstance(value, (int, Decimal)))]


def _equal_tensor(field: Field, value: Any) -> list[Any]:
    framework = framework_of(value)
    expected = getattr(field.type, "_framework_name", None)
    if framework is None or (expected is not None and framework.name != expected):
        raise MismatchError(
            f"Compare it with a tensor{f' of {expected}' if expected else ''}, or filter by a function."
        )
    return [value]


def _equal_document(field: Field, value: Any) -> list[Any]:
    hint = "Compare its fields: '<path>.<field>'."
    return [_check(value, is_document_type(type(value)) and isinstance(value, field.document_type), hint)]


def _equal_documents(field: Field, value: Any) -> list[Any]:
    if is_document_type(type(value)):
        return _equal_document(field, value)
    hint = "Compare the fields of its documents: '<path>.<field>'."
    same = is_array_type(type(value)) and value.document_type is field.document_type
    return [_check(value, same, hint)]


def _equal_list(field: Field, value: Any) -> list[Any]:
    if isinstance(value, LISTS):
        try:
            return [_as_list(field, value)]
        except MismatchError:
            if not any(item.kind in (FieldKind.LIST, FieldKind.UNION, FieldKind.ANY) for item in field.items):
                raise
    return _of_elements(field, value, equal_forms) if field.items else [value]


def _as_list(field: Field, value: Any) -> Any:
    """Convert a list of a query to the field's own kind of list."""
    unordered = isinstance(value, (set, frozenset))
    tp = field.type if field.type in LISTS else tuple if isinstance(value, tuple) else list
    if unordered and tp not in (set, frozenset):
        raise MismatchError("A set has no order: write a list.")
    if not field.items:
        return tp(value)
    positional = field.type is tuple and len(field.items) > 1
    if positional and len(value) != len(field.items):
        raise MismatchError(f"It holds {len(field.items)} values.")
    parts: Iterable[tuple[Field, Any]] = (
        zip(field.items, value, strict=True) if positional else ((field.items[0], item) for item in value)
    )
    return tp(_held_form(item, part) for item, part in parts)


def _held_form(field: Field, value: Any) -> Any:
    """Convert a value inside a list or dict; here, an element does not stand for a list that contains it."""
    _check(value, field.kind is not FieldKind.LIST or value is None or isinstance(value, LISTS))
    return equal_forms(field, value)[0]


def _equal_dict(field: Field, value: Any) -> list[Any]:
    _check(value, isinstance(value, Mapping), "Compare one of its values: '<path>.<key>'.")
    if len(field.items) != 2:
        return [value]
    keys, values = field.items
    return [{_held_form(keys, key): _held_form(values, item) for key, item in value.items()}]


def _of_any(fields: Iterable[Field], value: Any, forms: Callable[[Field, Any], list[Any]]) -> list[Any]:
    """Return the forms that a value has for several types; an error if no type accepts it."""
    values: list[Any] = []
    hints: list[str] = []
    for field in fields:
        try:
            values += forms(field, value)
        except MismatchError as error:
            hints.append(str(error))
    if not values:
        raise MismatchError(next(filter(None, hints), ""))
    return values


def _single_elements(field: Field) -> list[Field]:
    """Return the types of a list's elements that are not lists or arrays themselves."""
    members = [part for item in field.items for part in (item.items if item.kind is FieldKind.UNION else (item,))]
    return [member for member in members if member.kind not in (FieldKind.LIST, FieldKind.DOCUMENTS)]


def _of_elements(field: Field, value: Any, forms: Callable[[Field, Any], list[Any]]) -> list[Any]:
    """Return the forms of an element of a list; a single value does not look into the lists in a list of lists."""
    if isinstance(value, LISTS) or is_array_type(type(value)):
        return _of_any(field.items, value, forms)
    single = _single_elements(field)
    if not single:
        raise MismatchError("Its elements are lists.")
    return _of_any(single, value, forms)


def _equal_any(field: Field, value: Any) -> list[Any]:
    """Return the value and, for a type that only pydantic knows, such as a URL, the value that it parses to."""
    if field.type is Any or field.choices or not isinstance(field.type, type) or isinstance(value, field.type):
        return [value]
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(field.type)
    except PydanticSchemaGenerationError:
        adapter = TypeAdapter(field.type, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return [value, adapter.validate_python(value)]
    except ValidationError as error:
        raise MismatchError(f"{error.errors(include_url=False)[0]['msg']}.") from None


_EQUAL: dict[FieldKind, Callable[[Field, Any], list[Any]]] = {
    FieldKind.SCALAR: _equal_scalar,
    FieldKind.TEXT: _equal_text,
    FieldKind.BYTES: _equal_bytes,
    FieldKind.ENUM: _equal_enum,
    FieldKind.DATETIME: _equal_datetime,
    FieldKind.DATE: _moment(date),
    FieldKind.TIME: _moment(time),
    FieldKind.TIMEDELTA: _moment(timedelta),
    FieldKind.UUID: _equal_uuid,
    FieldKind.DECIMAL: _equal_decimal,
    FieldKind.PATH: lambda field, value: [field.type(_check(value, isinstance(value, (str, PurePath))))],
    FieldKind.TENSOR: _equal_tensor,
    FieldKind.DOCUMENT: _equal_document,
    FieldKind.DOCUMENTS: _equal_documents,
    FieldKind.LIST: _equal_list,
    FieldKind.DICT: _equal_dict,
    FieldKind.UNION: lambda field, value: _of_any(field.items, value, equal_forms),
    FieldKind.ANY: _equal_any,
}
