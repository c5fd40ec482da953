"""A query means the same in memory, in columns, pushed down into a dataset, and in the viewer."""

from __future__ import annotations

import enum
import shutil
import tempfile
from collections.abc import Callable
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray
from quire.errors import QueryError
from quire.storage import open_dataset, write_dataset
from quire.storage._pages import Pages
from quire.viewer._row_order import find_matching_rows

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")


class Shape(enum.Enum):
    CIRCLE = "circle"
    SQUARE = "square"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Inner(BaseDocument):
    word: str | None = None
    size: int = 0


WORDS = st.sampled_from(["", "a", "b", "ab", "A b", "é"])
INTS = st.integers(-3, 3) | st.sampled_from([2**53 + 1, -(2**63)])
FLOATS = st.sampled_from([0.0, -0.0, 0.5, -1.0, 2.0, float("nan"), float("inf")])
DATES = st.sampled_from([date(2020, 1, day) for day in (1, 2, 3)])
TIMES = st.sampled_from([datetime(2020, 1, day, tzinfo=timezone.utc) for day in (1, 2, 3)])
UUIDS = st.sampled_from([UUID(int=i) for i in range(3)])
DECIMALS = st.sampled_from([Decimal("0.1"), Decimal(1), Decimal("1.0"), Decimal(-2)])
INNERS = st.builds(Inner, id=st.just("i"), word=st.none() | WORDS, size=st.integers(0, 2))
ARRAYS = st.lists(INNERS, max_size=3).map(DocumentArray[Inner])

# an annotation, what a document holds, what a query asks for, and whether there is an order
Kind = tuple[Any, st.SearchStrategy[Any], st.SearchStrategy[Any], bool]
KINDS: dict[str, Kind] = {
    "whole": (int, INTS, INTS | st.sampled_from([1.0, True]), True),
    "number": (float, FLOATS, FLOATS | st.integers(-2, 2), True),
    "flag": (bool, st.booleans(), st.booleans() | st.integers(0, 1), True),
    "word": (str, WORDS, WORDS, True),
    "shape": (Shape, st.sampled_from(Shape), st.sampled_from([*Shape, "circle", "square", "SQUARE"]), False),
    "level": (Level, st.sampled_from(Level), st.sampled_from([*Level, 1, 2]), True),
    "choice": (Literal["x", "y"], st.sampled_from("xy"), st.sampled_from("xy"), True),
    "day": (date, DATES, DATES | DATES.map(str), True),
    "time": (datetime, TIMES, TIMES | TIMES.map(datetime.isoformat), True),
    "key": (UUID, UUIDS, UUIDS | UUIDS.map(str), True),
    "price": (Decimal, DECIMALS, DECIMALS | st.sampled_from([1, 0.1, "0.1"]), True),
    "path": (Path, WORDS.map(Path), WORDS, True),
    "tags": (list[str], st.lists(WORDS, max_size=3), WORDS | st.lists(WORDS, max_size=3), False),
    "counts": (list[int], st.lists(st.integers(0, 3), max_size=3), st.integers(0, 3), True),
    "shapes": (set[Shape], st.sets(st.sampled_from(Shape)), st.sampled_from([*Shape, "circle"]), False),
    "either": (int | str, st.integers(0, 2) | WORDS, st.integers(0, 2) | WORDS, True),
}
SEARCHED = {"word", "tags", "either", "path", "shape", "choice"}


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Kind]:
    """Some fields, each of which may be optional."""
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True))
    fields = {}
    for name in names:
        annotation, values, operands, ordered = KINDS[name]
        if draw(st.booleans()):
            fields[name] = annotation | None, st.none() | values, operands, ordered
        else:
            fields[name] = annotation, values, operands, ordered
    return fields


def conditions(name: str, kind: Kind) -> st.SearchStrategy[dict[str, Any]]:
    operands, ordered = kind[2], kind[3]
    none = st.none() if type(None) in get_args(kind[0]) else st.nothing()  # else None is an error
    strategies: list[st.SearchStrategy[Any]] = [
        operands | none,
        st.builds(lambda op, value: {op: value}, st.sampled_from(["$eq", "$ne"]), operands),
        st.builds(lambda values: {"$in": values}, st.lists(operands | none, max_size=3)),
        st.builds(lambda values: {"$nin": values}, st.lists(operands | st.none(), max_size=3)),
        st.builds(lambda value: {"$exists": value}, st.booleans()),
    ]
    if ordered:
        operators = st.sampled_from(["$lt", "$lte", "$gt", "$gte"])
        bounds = operands.filter(lambda value: value == value)  # NaN has no order, and is an error
        strategies += [
            st.dictionaries(operators, bounds, min_size=1, max_size=2),
            st.builds(lambda op, value: {"$not": {op: value}}, operators, bounds),
        ]
    if name in SEARCHED:
        strategies.append(st.sampled_from(["a", "(?i)^A", "b$", "(a|b)+ ?"]).map(lambda pattern: {"$regex": pattern}))
    return st.one_of(strategies).map(lambda test: {name: test})


NESTED = st.sampled_from(
    [
        {"inner.word": "a"},
        {"inner.word": None},
        {"inner.size": {"$gte": 1}},
        {"inner": {"$exists": False}},
        {"many.word": {"$in": ["a", "b"]}},
        {"many.size": {"$gt": 0, "$lt": 2}},
        {"many.word": {"$ne": "a"}},
        {"many": {"$size": 1}},
        {"extra.key": 1},
        {"extra.key": {"$exists": True}},
    ]
)


def queries(schema: dict[str, Kind]) -> st.SearchStrategy[dict[str, Any]]:
    leaf = st.one_of(*(conditions(name, kind) for name, kind in schema.items()), NESTED)
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.builds(
                lambda op, parts: {op: parts}, st.sampled_from(["$and", "$or", "$nor"]), st.lists(inner, max_size=3)
            ),
            st.builds(lambda part: {"$not": part}, inner),
            st.lists(inner, min_size=2, max_size=2).map(lambda parts: {**parts[0], **parts[1]}),
        ),
        max_leaves=4,
    )


@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # each example writes files: shrinking would take minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_all_ways_to_filter_find_the_same_rows(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    annotations = {name: kind[0] for name, kind in schema.items()}
    annotations |= {"inner": Inner | None, "many": DocumentArray[Inner], "extra": dict[str, int]}
    row_type: Any = type("Row", (BaseDocument,), {"__annotations__": annotations, "__module__": __name__})
    values = {name: kind[1] for name, kind in schema.items()}
    values |= {"inner": st.none() | INNERS, "many": ARRAYS, "extra": st.sampled_from([{}, {"key": 1}, {"key": 2}])}
    rows = data.draw(st.lists(st.fixed_dictionaries(values), min_size=1, max_size=12))
    docs: Any = DocumentArray[row_type]([row_type(id=str(i), **row) for i, row in enumerate(rows)])
    stored = []
    folder = Path(tempfile.mkdtemp())
    try:
        for form in ("arrow", "parquet"):
            write_dataset(docs, folder / form, row_type, format=form, group_bytes=200, durable=False)
            stored.append(folder / form)
        for _ in range(4):
            query = data.draw(queries(schema))
            expected = docs.filter(query).id
            assert docs.stack(shapes="ragged").filter(query).id == expected
            for place in stored:
                assert open_dataset(place, row_type, where=query, cache=folder / "cache").read().id == expected
            pages = Pages(open_dataset(stored[1], row_type, cache=folder / "cache"))
            assert find_matching_rows(pages, query).tolist() == list(map(int, expected))
    finally:
        shutil.rmtree(folder)


ORACLE: list[tuple[str, Callable[[Any, Any], bool]]] = [
    ("$eq", lambda result, operand: result == operand),
    ("$ne", lambda result, operand: result != operand),
    ("$lt", lambda result, operand: result < operand),
    ("$gte", lambda result, operand: result >= operand),
]


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(["whole", "number", "word", "day", "time", "key", "price", "level", "choice"]),
    operator=st.sampled_from(ORACLE),
    data=st.data(),
)
def test_plain_fields_compare_like_python_values(name: str, operator: Any, data: st.DataObject) -> None:
    values = KINDS[name][1].filter(lambda value: value == value)
    row_type: Any = type("Row", (BaseDocument,), {"__annotations__": {"field": KINDS[name][0]}, "__module__": __name__})
    held, operand = data.draw(st.lists(values, max_size=8)), data.draw(values)
    docs: Any = DocumentArray[row_type]([row_type(field=value) for value in held])
    expected = [value for value in held if operator[1](value, operand)]
    assert docs.filter({"field": {operator[0]: operand}}).field == expected
    assert [document.field for document in docs.stack().filter({"field": {operator[0]: operand}})] == expected


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_value_of_another_kind_is_an_error_or_matches(data: st.DataObject) -> None:
    """Any value of a query is an error, or one that some document of the class can equal."""
    name = data.draw(st.sampled_from(sorted(KINDS)))
    other = data.draw(st.sampled_from(sorted(KINDS)))
    value = data.draw(KINDS[other][1])
    row_type: Any = type("Row", (BaseDocument,), {"__annotations__": {"field": KINDS[name][0]}, "__module__": __name__})
    empty: Any = DocumentArray[row_type]()
    try:
        empty.filter({"field": value})
    except QueryError as error:
        assert str(error).startswith("Row.field is ")
        assert name != other
    try:
        empty.filter({"field": {"$gt": value}})
    except QueryError as error:
        assert str(error).startswith("Row.field is ")
