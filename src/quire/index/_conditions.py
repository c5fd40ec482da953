"""Queries as conditions on the columns of an index, which engines evaluate before they rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from enum import Enum
from typing import Any

from quire.array import Query, QueryPart, compile_filter
from quire.index._plan import FilterColumn, IndexPlan, encode_moment

_OPERATORS = {"$lt": "<", "$lte": "<=", "$gt": ">", "$gte": ">="}
_ORDER_OR_IN = ("in", *_OPERATORS.values())


@dataclass(frozen=True)
class Condition:
    """A condition on the columns of an index; its SQL has no unknown: NULL satisfies no comparison.

    `name` is 'and', 'or', 'not', 'true' or 'false', 'missing', 'even' or 'in' of a column, or '<', '<=', '>', '>='.
    """

    name: str
    parts: tuple[Condition, ...] = ()
    column: FilterColumn | None = None
    values: tuple[Any, ...] = ()

    def to_sql(self, literal: Callable[[FilterColumn, Any], str]) -> str:
        """Return the condition in SQL. `literal` writes a value, or adds a parameter and returns its placeholder."""
        if self.name in ("true", "false"):
            return "(1 = 1)" if self.name == "true" else "(1 = 0)"
        if self.name == "not":
            return f"(NOT {self.parts[0].to_sql(literal)})"
        if self.name in ("and", "or"):
            if not self.parts:
                return "(1 = 1)" if self.name == "and" else "(1 = 0)"
            return "(" + f" {self.name.upper()} ".join(part.to_sql(literal) for part in self.parts) + ")"
        column = self.column
        assert column is not None
        if self.name == "missing":
            return f"({column.name} IS NULL)"
        if self.name == "even":
            return f"({column.name} IS NOT NULL AND {column.name} - ({column.name} / 2) * 2 = 0)"
        values = [literal(column, value) for value in self.values]
        if self.name == "in":
            return f"({column.name} IS NOT NULL AND {column.name} IN ({', '.join(values)}))"
        test = f"{column.name} IS NOT NULL AND {column.name} {self.name} {values[0]}"
        if column.type == "float" and self.name in (">", ">="):  # for engines, NaN is above all numbers
            test += f" AND {column.name} <= {literal(column, math.inf)}"
        return f"({test})"


TRUE, FALSE = Condition("true"), Condition("false")


@dataclass(frozen=True)
class Selection:
    """The rows that a call is about: a query, and the condition that engines evaluate.

    If the condition is not `exact`, more rows than those of the query satisfy it.
    """

    query: Query | None = None
    condition: Condition | None = None
    exact: bool = True

    @property
    def is_all(self) -> bool:
        """Whether every row is selected."""
        return self.query is None


def select(where: Any, plan: IndexPlan) -> Selection:
    """Compile a filter: a query, or a function of documents."""
    if where is None:
        return Selection()
    query = compile_filter(where, plan.schema)
    condition, exact = _translate(query.describe(), plan)
    return Selection(query, None if condition == TRUE else condition, exact)


def find_other_times(condition: Condition) -> Iterator[tuple[FilterColumn, Condition]]:
    """Yield the columns of datetimes in a condition, with a condition for those that Python cannot compare with it."""
    for part in condition.parts:
        yield from find_other_times(part)
    if condition.name == "and" and condition.parts and condition.parts[-1].name in _ORDER_OR_IN:
        parity, test = condition.parts[0], condition.parts[-1]
        if parity.name == "even" and test.column is not None:
            present = Condition("not", (Condition("missing", column=test.column),))
            yield test.column, Condition("and", (present, Condition("not", (parity,))))
        elif parity.name == "not" and parity.parts[0].name == "even" and test.column is not None:
            yield test.column, parity.parts[0]


def _translate(part: QueryPart, plan: IndexPlan) -> tuple[Condition, bool]:
    """Return a condition that holds for all rows of a part of a query, and whether it holds for no others."""
    if part.name in ("and", "or", "not"):
        translated = [_translate(inner, plan) for inner in part.parts]
        exact = all(is_exact for _, is_exact in translated)
        conditions = tuple(condition for condition, _ in translated)
        if part.name == "not":
            return (Condition("not", conditions), True) if exact else (TRUE, False)
        if part.name == "and":
            conditions = tuple(condition for condition in conditions if condition != TRUE)
            return (Condition("and", conditions) if conditions else TRUE), exact
        if TRUE in conditions:
            return TRUE, exact
        return Condition("or", conditions), exact
    column = plan.by_path.get(part.path)
    if column is None:
        return TRUE, False
    condition = _translate_test(part, column)
    return (TRUE, False) if condition is None else (condition, True)


def _translate_test(part: QueryPart, column: FilterColumn) -> Condition | None:
    """Return one test as a condition; None if only quire evaluates it."""
    missing = Condition("missing", column=column)
    if part.name == "$exists":
        return Condition("not", (missing,))
    if part.name == "$in":
        return _translate_values(part.values, column, missing)
    if part.name not in _OPERATORS or column.type == "bool" or not column.is_ordered:
        return None
    return _translate_order(_OPERATORS[part.name], part.values[0], column)


def _translate_values(  # noqa: C901 - a case for each kind of value that only quire compares
    values: tuple[Any, ...], column: FilterColumn, missing: Condition
) -> Condition | None:
    parts = [missing] if None in values else []
    encoded = []
    for value in values:
        if value is None:
            continue
        if isinstance(value, Enum) is not _holds_members(column):
            if _holds_members(column):
                continue  # the value of a member, which is in the list as well
            return None
        try:
            if column.type == "int" and isinstance(value, float):
                if math.isnan(value):
                    return None
                if not value.is_integer():
                    continue  # equals no whole number
                value = int(value)  # noqa: PLW2901
            if column.type == "float" and (value != value or float(value) != value):
                return None
            encoded.append(column.encode(value))
        except (TypeError, ValueError, OverflowError, AttributeError):
            return None
    test = Condition("in", column=column, values=tuple(encoded))
    if column.field.type is datetime and encoded:
        if len({moment % 2 for moment in encoded}) > 1:
            return None
        test = _with_parity(test, encoded[0])
    if encoded:
        parts.append(test)
    return parts[0] if len(parts) == 1 else Condition("or", tuple(parts))


def _holds_members(column: FilterColumn) -> bool:
    return isinstance(column.field.type, type) and issubclass(column.field.type, Enum)


def _translate_order(name: str, value: Any, column: FilterColumn) -> Condition | None:
    if isinstance(value, datetime) and column.field.type is datetime:
        # Python compares naive datetimes with naive ones, and others with others.
        moment = encode_moment(value)
        return _with_parity(Condition(name, column=column, values=(moment,)), moment)
    try:
        if column.type == "int" and column.field.type is int:
            return _order_whole_numbers(name, value, column)
        if column.type == "float" and float(value) != value:
            return None
        if type(value) is datetime and column.field.type is date:
            return None
        return Condition(name, column=column, values=(column.encode(value),))
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None


def _order_whole_numbers(name: str, value: Any, column: FilterColumn) -> Condition:
    """Compare with any real number: engines would convert whole numbers to floats, and round them."""
    if isinstance(value, float) and math.isinf(value):
        holds = (value > 0) == name.startswith("<")
        bound = None
    else:
        bound = math.ceil(value) if name in ("<", ">=") else math.floor(value)
        holds = (bound > 0) == name.startswith("<")
    if bound is None or not -(1 << 63) <= bound < 1 << 63:
        return Condition("not", (Condition("missing", column=column),)) if holds else FALSE
    return Condition(name, column=column, values=(bound,))


def _with_parity(test: Condition, moment: int) -> Condition:
    """Restrict a test of datetimes to those with a time zone, or to those without one, as its value is."""
    parity = Condition("even", column=test.column)
    return Condition("and", (Condition("not", (parity,)) if moment % 2 else parity, test))
