"""Filters: every operator, on plain fields, nested ones, arrays and tags."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AnyUrl

from quire import BaseDocument, DocumentArray, Text
from quire.errors import PathError, QueryError
from quire.typing import NdArray


class Author(BaseDocument):
    name: str
    age: int = 0


class Book(BaseDocument):
    title: str
    price: float = 0.0
    stock: int | None = None
    day: date | None = None
    words: list[str] = []
    tags: dict[str, Any] = {}
    vector: NdArray | None = None
    blurb: Text | None = None
    authors: DocumentArray[Author] = []
    notes: list[Author] = []
    other: Author | Text | None = None


def library() -> DocumentArray[Book]:
    return DocumentArray[Book](
        [
            Book(
                title="Leaves",
                price=5,
                stock=3,
                day=date(2020, 1, 1),
                words=["a", "b"],
                tags={"lang": "en", "deep": {"level": 2}},
                vector=np.zeros(2),
                blurb="Fine leaves",
                authors=[Author(name="Ada", age=30), Author(name="Bob", age=50)],
                notes=[Author(name="N")],
                other=Author(name="O", age=1),
            ),
            Book(
                title="Roots",
                price=7.5,
                stock=0,
                day=date(2021, 1, 1),
                tags={"lang": "de"},
                vector=np.ones(2),
                blurb=Text(),
                authors=[Author(name="Cyd", age=40)],
                other="text",
            ),
            Book(title="Bark"),
        ]
    )


L, R, B = "Leaves", "Roots", "Bark"
QUERIES: list[tuple[Any, list[str]]] = [
    ({}, [L, R, B]),
    ({"title": "Roots"}, [R]),
    ({"price": 5}, [L]),
    ({"price": 5.0, "stock": 3}, [L]),
    ({"price": 5.0, "stock": 4}, []),
    ({"title": {"$eq": "Roots"}}, [R]),
    ({"title": {"$ne": "Roots"}}, [L, B]),
    ({"title": {"$neq": "Roots"}}, [L, B]),
    ({"price": {"$gt": 5}}, [R]),
    ({"price": {"$gte": 5}}, [L, R]),
    ({"price": {"$lt": 5}}, [B]),
    ({"price": {"$lte": 5}}, [L, B]),
    ({"price": {"$gt": 1, "$lt": 7}}, [L]),
    ({"day": {"$gt": date(2020, 6, 1)}}, [R]),
    ({"stock": {"$lt": 5}}, [L, R]),
    ({"stock": None}, [B]),
    ({"stock": {"$exists": True}}, [L, R]),
    ({"stock": {"$exists": False}}, [B]),
    ({"stock": {"$exists": 0}}, [B]),
    ({"title": {"$in": ["Roots", "Bark"]}}, [R, B]),
    ({"price": {"$in": (5, 0)}}, [L, B]),
    ({"title": {"$nin": ["Roots"]}}, [L, B]),
    ({"title": {"$nin": {"Roots", "Bark"}}}, [L]),
    ({"title": {"$regex": "^R"}}, [R]),
    ({"title": {"$regex": "(?i)^r|k$"}}, [R, B]),
    ({"words": {"$size": 2}}, [L]),
    ({"authors": {"$size": 1}}, [R]),
    ({"words": ["a", "b"]}, [L]),
    ({"vector": np.ones(2)}, [R]),
    ({"vector": {"$size": 2}}, [L, R]),
    ({"price": {"$not": {"$gt": 5}}}, [L, B]),
    ({"title": {"$not": "Roots"}}, [L, B]),
    ({"$not": {"title": "Roots"}}, [L, B]),
    ({"$and": [{"price": {"$gt": 1}}, {"stock": 0}]}, [R]),
    ({"$and": []}, [L, R, B]),
    ({"$or": [{"title": "Bark"}, {"stock": 0}]}, [R, B]),
    ({"$or": []}, []),
    ({"$nor": [{"title": "Bark"}, {"stock": 0}]}, [L]),
    ({"$or": [{"$and": [{"price": 5}, {"stock": 3}]}, {"$not": {"price": {"$gt": 0}}}]}, [L, B]),
    # nested documents, where one may be missing
    ({"blurb.text": "Fine leaves"}, [L]),
    ({"blurb.text": None}, [R, B]),
    ({"blurb.text": {"$exists": False}}, [R, B]),
    ({"blurb": {"$exists": True}}, [L, R]),
    # arrays: any element
    ({"authors.name": "Bob"}, [L]),
    ({"authors.age": {"$gt": 35}}, [L, R]),
    ({"authors.age": {"$gt": 35, "$lt": 45}}, [R]),
    ({"authors.name": {"$in": ["Ada", "Cyd"]}}, [L, R]),
    ({"authors.name": {"$ne": "Ada"}}, [R, B]),
    ({"authors.name": {"$nin": ["Ada", "Cyd"]}}, [B]),
    ({"authors.age": {"$not": {"$gt": 35}}}, [B]),
    ({"authors.name": {"$exists": False}}, [B]),
    ({"notes.name": "N"}, [L]),
    # dicts and unions: paths that the schema does not know
    ({"tags.lang": "en"}, [L]),
    ({"tags.lang": {"$ne": "en"}}, [R, B]),
    ({"tags.deep.level": {"$gte": 2}}, [L]),
    ({"tags.deep": {"level": 2}}, [L]),
    ({"tags.lang": {"$exists": False}}, [B]),
    ({"tags": {}}, [B]),
    ({"other.age": 1}, [L]),
    ({"other.text": "text"}, [R]),
    # functions
    (lambda book: book.price > 5, [R]),
    (lambda book: book.words, [L]),
]


@pytest.mark.parametrize(("query", "expected"), QUERIES)
def test_filter_selects_documents(query: Any, expected: list[str]) -> None:
    books = library()
    assert books.filter(query).title == expected
    assert books.stack().filter(query).title == expected
    assert type(books.filter(query)) is DocumentArray[Book]
    assert all(book in books for book in books.filter(query))


BAD: list[tuple[Any, type[Exception], str]] = [
    ({"titel": "x"}, PathError, "Book has no field 'titel'.*Did you mean 'title'"),
    ({"authors.nmae": "x"}, PathError, "Author has no field 'nmae'"),
    ({"title.x": "x"}, PathError, "Book.title is str, which has no fields"),
    ({"$or": [{"titel": "x"}]}, PathError, "titel"),
    ({"price": {"$gtt": 3}}, QueryError, r"^Book.price is float, and '\$gtt' is not an operator. Did you mean '\$gt'"),
    ({"$nott": {}}, QueryError, r"'\$nott' is not an operator here. Did you mean '\$not'"),
    ({"$and": "price"}, QueryError, r"\$and takes a list of filters, or a dict of conditions"),
    ({"title": {"$in": "Roots"}}, QueryError, r"\$in and \$nin take a list"),
    ({"title": {"$nin": "Roots"}}, QueryError, r"\$in and \$nin take a list"),
    ({"title": {"$regex": "("}}, QueryError, r"\$regex: "),
    ({"title": {"$regex": 3}}, QueryError, r"\$regex: "),
    ({"title": {"$gt": 3}}, QueryError, r"^Book.title is str, and cannot be compared with int 3. Did you mean '3'\?$"),
    ({"vector": {"$gt": 3}}, QueryError, "cannot compare ndarray with int"),
    ({3: "x"}, QueryError, "the keys of a filter are paths and operators, got 3"),
    ("title", QueryError, "a filter is a function or a dict, got str"),
    ({"": 1}, QueryError, "the empty path is the whole document"),
    ({"price": {"$regex": "5"}}, QueryError, r"^Book.price is float, which has no text for \$regex to search.$"),
    ({"stock": {"$size": 1}}, QueryError, r"^Book.stock is int \| None, which has no size.$"),
    ({"words": {"$size": "2"}}, QueryError, r"\$size takes a number of elements, got str '2'"),
    ({"stock": {"$exists": "no"}}, QueryError, r"\$exists takes True or False, got str 'no'"),
    ({"notes.nmae": "x"}, PathError, r"Book.notes is list\[Author\], and has no field 'nmae'. Did you mean 'name'"),
    ({"other.agee": 1}, PathError, "has no field 'agee'. Did you mean 'age'"),
    ({"$and": ["title"]}, QueryError, "a filter is a function or a dict"),
]


@pytest.mark.parametrize(("query", "error", "message"), BAD, ids=[str(query)[:50] for query, _, _ in BAD])
def test_filter_rejects_invalid_queries(query: Any, error: type[Exception], message: str) -> None:
    for books in (library(), library().stack()):
        with pytest.raises(error, match=message):
            books.filter(query)


def test_filter_of_untyped_array() -> None:
    docs = DocumentArray([Book(title="a"), Author(name="a", age=3), Text(text="t")])
    assert list(docs.filter({"age": 3})) == [docs[1]]
    assert list(docs.filter({"title": "a"})) == [docs[0]]
    assert list(docs.stack().filter({"age": 3})) == [docs[1]]
    with pytest.raises(PathError):
        DocumentArray([Author(name="a")]).filter({"aeg": 3})


def test_filter_finds_extra_fields() -> None:
    class Loose(BaseDocument, extra="allow"):
        pass

    docs = DocumentArray[Loose]([Loose(color="red"), Loose(color={"dark": True})])
    assert len(docs.filter({"color": "red"})) == 1
    assert len(docs.filter({"color.dark": True})) == 1
    assert len(docs.filter({"shape": None})) == 2


# --- values and operators that can never match


class Shape(enum.Enum):
    CIRCLE = "circle"
    SQUARE = "square"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Plain(enum.Enum):
    ONE = 1
    TWO = 2


class Row(BaseDocument):
    label: int = 0
    score: float = 0.0
    flag: bool = False
    name: str = ""
    kind: Shape = Shape.CIRCLE
    level: Level = Level.LOW
    plain: Plain | None = None
    mode: Literal["train", "test"] = "train"
    tags: list[str] = []
    seen: set[int] = set()
    pair: tuple[int, str] = (0, "")
    grid: list[list[int]] = []
    mixed: list[int | list[str]] = []
    counts: dict[str, int] = {}
    day: date | None = None
    at: datetime | None = None
    key: UUID | None = None
    price: Decimal | None = None
    place: Path | None = None
    raw: bytes = b""
    url: AnyUrl | None = None
    either: int | str | None = None
    inner: Author | None = None
    people: dict[str, Author] = {}
    vector: NdArray | None = None
    anything: Any = None


AT = datetime(2024, 5, 1, 12, 30)  # noqa: DTZ001
KEY = UUID("12345678-1234-5678-1234-567812345678")
ROW = Row(
    label=1,
    score=0.5,
    flag=True,
    name="a",
    kind=Shape.SQUARE,
    level=Level.HIGH,
    plain=Plain.TWO,
    mode="test",
    tags=["hard", "new"],
    seen={1, 2},
    pair=(1, "x"),
    grid=[[1, 2], [3]],
    mixed=[1, ["x"]],
    counts={"a": 1},
    day=date(2024, 5, 1),
    at=AT,
    key=KEY,
    price=Decimal("0.1"),
    place=Path("a/b"),
    raw=b"x",
    url="https://example.com/a",
    either="x",
    inner=Author(name="Ada", age=3),
    vector=np.ones(2),
    anything=[1, {"a": [2]}],
)

TYPED: list[dict[str, Any]] = [
    {"label": 1.0},
    {"label": np.int64(1)},
    {"label": {"$gt": 0.5}},
    {"score": {"$lt": 1, "$gt": 0}},
    {"flag": 1},
    {"kind": Shape.SQUARE},
    {"kind": "square"},
    {"kind": "SQUARE"},
    {"kind": {"$in": [Shape.SQUARE, "square"]}},
    {"kind": {"$regex": "^sq"}},
    {"level": 2},
    {"level": {"$gt": 1}},
    {"plain": 2},
    {"plain": {"$nin": [Plain.ONE, None]}},
    {"mode": "test"},
    {"tags": "hard"},
    {"tags": ["hard", "new"]},
    {"tags": ("hard", "new")},
    {"tags": {"$in": ["new", "old"]}},
    {"tags": {"$in": [["hard", "new"], "old"]}},
    {"tags": {"$nin": ["old"], "$size": 2}},
    {"tags": {"$ne": "old", "$in": ["hard"]}},
    {"tags": {"$regex": "^n"}},
    {"seen": 2},
    {"seen": [1, 2]},
    {"seen": {"$gt": 1}},
    {"seen": {"$not": {"$gt": 2}, "$gt": 1}},
    {"pair": [1, "x"]},
    {"pair": "x"},
    {"grid": [[1, 2], [3]]},
    {"grid": [3]},
    {"mixed": 1},
    {"counts": {"a": 1}},
    {"counts.a": {"$gte": 1}},
    {"day": "2024-05-01"},
    {"day": {"$gte": "2024-04-30"}},
    {"at": "2024-05-01T12:30:00"},
    {"at": "2024-05-01 12:30"},
    {"at": {"$gte": "2024-05-01", "$lt": date(2024, 5, 2)}},
    {"key": str(KEY)},
    {"price": "0.10"},
    {"price": 0.1},
    {"price": {"$lte": 1}},
    {"place": "a/b"},
    {"place": {"$regex": "b$"}},
    {"raw": b"x"},
    {"url": "https://example.com/a"},
    {"either": "x"},
    {"either": {"$gt": "a"}},
    {"inner": Author(id="ada", name="Ada", age=3)},
    {"vector": np.ones(2)},
    {"anything": 1},
    {"anything.a": 2},
    {"label": {"$exists": True}, "plain": {"$ne": None}},
]


@pytest.mark.parametrize("query", TYPED)
def test_query_values_are_converted_to_field_type(query: dict[str, Any]) -> None:
    rows = DocumentArray[Row]([ROW, Row()])
    assert list(rows.filter(query)) == [ROW]
    assert list(rows.stack().filter(query)) == [ROW]


NEVER: list[tuple[dict[str, Any], str]] = [
    ({"label": "1"}, "Row.label is int, and never equals str '1'. Did you mean 1?"),
    ({"label": {"$ne": "1"}}, "Row.label is int, and never equals str '1'. Did you mean 1?"),
    ({"label": {"$in": [1, "2"]}}, "Row.label is int, and never equals str '2'. Did you mean 2?"),
    ({"label": None}, "Row.label is int, and never equals NoneType None. It is never missing: leave the condition out, or declare it as 'int | None' if it may be."),  # noqa: E501
    ({"label": {"$in": [1, None]}}, "Row.label is int, and never equals NoneType None. It is never missing: "),
    ({"label": {"$not": {"$eq": None}}}, "Row.label is int, and never equals NoneType None. It is never missing: "),
    ({"label": 1.5}, "Row.label is int, and never equals float 1.5. It holds whole numbers."),
    ({"label": float("nan")}, "Row.label is int, and never equals float nan. It holds whole numbers."),
    ({"label": {"$gt": "1"}}, "Row.label is int, and cannot be compared with str '1'. Did you mean 1?"),
    ({"label": {"$gt": None}}, "Row.label is int, and cannot be compared with NoneType None. None has no order: use $exists."),  # noqa: E501
    ({"label": {">": 1}}, "Row.label is int, and '>' is not an operator. Did you mean '$gt'?"),
    ({"label": {"gte": 1}}, "Row.label is int, and 'gte' is not an operator. Did you mean '$gte'?"),
    ({"label": {"$gt": 1, "lt": 3}}, "Row.label is int, and 'lt' is not an operator. Did you mean '$lt'?"),
    ({"label": {}}, "Row.label is int, and never equals dict."),
    ({"counts": {"$gt": 1, "a": 3}}, "Row.counts is dict[str, int], and 'a' is not an operator. "),
    ({"score": "0.5"}, "Row.score is float, and never equals str '0.5'. Did you mean 0.5?"),
    ({"flag": "true"}, "Row.flag is bool, and never equals str 'true'. Did you mean True?"),
    ({"flag": 2}, "Row.flag is bool, and never equals int 2."),
    ({"name": 1}, "Row.name is str, and never equals int 1. Did you mean '1'?"),
    ({"kind": "circel"}, "Row.kind is Shape, and never equals str 'circel'. Did you mean 'circle'?"),
    ({"kind": Level.LOW}, "Row.kind is Shape, and never equals Level <Level.LOW: 1>. It is a member of Level."),
    ({"kind": {"$gt": "a"}}, "Row.kind is Shape, and cannot be compared with str 'a'. Its members have no order."),
    ({"mode": "tset"}, "Row.mode is str, and never equals str 'tset'. Did you mean 'test'?"),
    ({"tags": 1}, "Row.tags is list[str], and never equals int 1. Did you mean '1'?"),
    ({"tags": [1]}, "Row.tags is list[str], and never equals list. Did you mean '1'?"),
    ({"tags": {"hard", "new"}}, "Row.tags is list[str], and never equals set. A set has no order: write a list."),
    ({"tags": {"$gt": ["a"]}}, "Row.tags is list[str], and cannot be compared with list. Lists have no order: compare their elements."),  # noqa: E501
    ({"tags": None}, "Row.tags is list[str], and never equals NoneType None. It is never missing: "),
    ({"tags": ["a", None]}, "Row.tags is list[str], and never equals list. It is never missing: "),
    ({"grid": None}, "Row.grid is list[list[int]], and never equals NoneType None. It is never missing: "),
    ({"counts": None}, "Row.counts is dict[str, int], and never equals NoneType None. It is never missing: "),
    ({"mode": None}, "Row.mode is str, and never equals NoneType None. It is never missing: "),
    ({"pair": [1]}, "Row.pair is tuple[int, str], and never equals list. It holds 2 values."),
    ({"counts": 1}, "Row.counts is dict[str, int], and never equals int 1. Compare one of its values: 'counts.<key>'."),
    ({"counts.a": "1"}, "Row.counts.a is int | None, and never equals str '1'. Did you mean 1?"),
    ({"day": "May"}, "Row.day is date | None, and never equals str 'May'. Write a date, or a text like '2024-05-01'."),
    ({"day": "0"}, "Row.day is date | None, and never equals str '0'. Write a date, or a text like '2024-05-01'."),
    ({"day": AT}, "Row.day is date | None, and never equals datetime. Write a date, or a text like '2024-05-01'."),
    ({"at": "2024-05-01"}, "Row.at is datetime | None, and never equals str '2024-05-01'. A day is a range of times: use $gte with it and $lt with the next."),  # noqa: E501
    ({"key": "x"}, "Row.key is UUID | None, and never equals str 'x'. Write a UUID, or its text."),
    ({"price": "x"}, "Row.price is Decimal | None, and never equals str 'x'. Write a Decimal, a number, or its text."),
    ({"raw": "x"}, "Row.raw is bytes, and never equals str 'x'. Text is not bytes: write b'...'."),
    ({"either": 1.5}, "Row.either is int | str | None, and never equals float 1.5. It holds whole numbers."),
    ({"inner": {"name": "Ada"}}, "Row.inner is Author | None, and never equals dict. Compare its fields: 'inner.<field>'."),  # noqa: E501
    ({"people.ada": {"name": "Ada"}}, "Row.people.ada is Author | None, and never equals dict. Compare its fields: 'people.ada.<field>'."),  # noqa: E501
    ({"inner": {">": 1}}, "Row.inner is Author | None, and '>' is not an operator. Did you mean '$gt'?"),
    ({"grid": 1}, "Row.grid is list[list[int]], and never equals int 1. Its elements are lists."),
    ({"grid": {"$in": [[1], 2]}}, "Row.grid is list[list[int]], and never equals int 2. Its elements are lists."),
    ({"grid": {"$gt": 1}}, "Row.grid is list[list[int]], and cannot be compared with int 1. Its elements are lists."),
    ({"mixed": "x"}, "Row.mixed is list[int | list[str]], and never equals str 'x'."),
    ({"mixed": {"$regex": "x"}}, "Row.mixed is list[int | list[str]], which has no text for $regex to search."),
    ({"score": {"$gt": float("nan")}}, "Row.score is float, and cannot be compared with float nan. NaN has no order."),
    ({"price": {"$lt": Decimal("nan")}}, "Row.price is Decimal | None, and cannot be compared with Decimal. NaN has no order."),  # noqa: E501
    ({"vector": [1, 1]}, "Row.vector is NdArray | None, and never equals list. Compare it with a tensor of numpy, or filter by a function."),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("query", "message"), NEVER, ids=[f"{next(iter(q))}-{i}" for i, (q, _) in enumerate(NEVER)])
def test_filter_rejects_query_that_never_matches(query: dict[str, Any], message: str) -> None:
    for rows in (DocumentArray[Row](), DocumentArray[Row]([ROW]), DocumentArray[Row]([ROW]).stack()):
        with pytest.raises(QueryError) as error:
            rows.filter(query)
        assert str(error.value).startswith(message) if message.endswith(" ") else str(error.value) == message


class Sparse(BaseDocument):
    required: int
    unvalidated_default: int = None  # type: ignore[assignment]
    url: AnyUrl = AnyUrl("https://example.com")
    one_of: Literal["x", None] = "x"  # noqa: PYI061 - None as a choice of the Literal
    either: Author | int = 0
    documents: list[Author] = []
    elements: list[int | None] = []
    rows: list[list[int] | None] = []
    plain_list: list = []  # type: ignore[type-arg]
    values: dict[str, int] = {}
    optional: Author | None = None
    nested: Author = Author(name="Ada", age=1)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("unvalidated_default", [True, False]),
        ("one_of", [False, True]),
        ("either.age", [True, False]),
        ("elements", [False, True]),
        ("rows", [False, True]),
        ("plain_list", [False, True]),
        ("values.a", [True, False]),
        ("optional", [True, False]),
        ("optional.age", [True, False]),
    ],
)
def test_filter_by_none_matches_where_values_may_be_missing(path: str, expected: list[bool]) -> None:
    full = Sparse(
        required=1,
        unvalidated_default=1,
        one_of=None,
        either=Author(name="Bob", age=1),
        elements=[1, None],
        rows=[None],
        plain_list=[None],
        values={"a": 1},
        optional=Author(name="Cyd", age=1),
    )
    rows = DocumentArray[Sparse]([Sparse(required=0), full])
    for query, matches in (
        ({path: None}, expected),
        ({path: {"$in": [None]}}, expected),
        ({path: {"$ne": None}}, [not match for match in expected]),
        ({path: {"$nin": [None]}}, [not match for match in expected]),
    ):
        assert [row in rows.filter(query) for row in rows] == matches, query
        assert [row.id in rows.stack(shapes="ragged").filter(query).id for row in rows] == matches, query


@pytest.mark.parametrize("path", ["required", "url", "either", "documents", "documents.age", "nested", "nested.age"])
def test_fields_that_are_never_missing_take_none_in_negations_only(path: str) -> None:
    rows = DocumentArray[Sparse]([Sparse(required=0, documents=[Author(name="Ada", age=2)])])
    for documents in (rows, rows.stack(shapes="ragged")):
        for condition in (None, {"$eq": None}, {"$in": [None]}):
            with pytest.raises(
                QueryError, match=rf"^Sparse.{path} is .*never equals NoneType None. It is never missing"
            ):
                documents.filter({path: condition})
        for negation in ({"$ne": None}, {"$nin": [None]}, {"$exists": True}):
            assert len(documents.filter({path: negation})) == 1
        assert len(documents.filter({path: {"$exists": False}})) == 0


def test_filter_rejects_mix_of_naive_and_aware_times() -> None:
    rows = DocumentArray[Row]([ROW])
    for query in ({"at": AT.replace(tzinfo=timezone.utc)}, {"at": {"$lt": "2024-05-01T12:30:00Z"}}):
        with pytest.raises(
            QueryError, match="the times of the query have a time zone, and those of the documents have"
        ):
            rows.filter(query)
        with pytest.raises(QueryError, match="the times of the query have a time zone"):
            rows.stack().filter(query)


def test_filter_matches_enums_held_as_values() -> None:
    class Loose(BaseDocument, use_enum_values=True):
        kind: Shape

    rows = DocumentArray[Loose]([Loose(kind="circle"), Loose(kind="square")])
    assert len(rows.filter({"kind": Shape.SQUARE})) == len(rows.filter({"kind": "square"})) == 1


# --- nesting


def nested(operator: str, depth: int) -> dict[str, Any]:
    query: dict[str, Any] = {"price": 5}
    for _ in range(depth):
        query = {operator: query if operator == "$not" else [query]}
    return query


@pytest.mark.parametrize("operator", ["$not", "$and", "$or", "$nor"])
def test_filter_rejects_deep_nesting(operator: str) -> None:
    assert len(library().filter(nested(operator, 60))) in (1, 2)
    for depth in (65, 900, 5000):
        with pytest.raises(QueryError, match="nested more than 64 levels deep"):
            library().filter(nested(operator, depth))


def test_filter_rejects_deep_nesting_of_operators() -> None:
    test: dict[str, Any] = {"$gt": 5}
    for _ in range(900):
        test = {"$not": test}
    with pytest.raises(QueryError, match="nested more than 64 levels deep"):
        library().filter({"price": test})


def test_filter_rejects_deeply_nested_values() -> None:
    def deep() -> Any:
        value: Any = []
        for _ in range(100_000):
            value = [value]
        return value

    held, expected = deep(), deep()
    rows = DocumentArray[Row]([Row.model_construct(anything=held)])
    with pytest.raises(QueryError, match="nested too deeply"):
        rows.filter({"anything": expected})
    for value in (held, expected):
        while value:
            value = value.pop()  # noqa: PLW2901 - or freeing them would recurse


def test_filter_of_dataclass_field_matches_equal_values_only() -> None:
    @dataclass
    class Point:
        x: int = 1

    class Marker(BaseDocument):
        point: Point = Point()

    markers = DocumentArray[Marker]([Marker(), Marker(point=Point(2))])
    assert [marker.point.x for marker in markers.filter({"point": Point(2)})] == [2]
    assert [marker.point.x for marker in markers.filter({"point": {"$eq": {"x": 1}}})] == [1]
    with pytest.raises(QueryError, match=r"point"):
        markers.filter({"point": 3})


# --- other fields in braces


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"price": {"$gt": "{stock}"}}, lambda book: book.stock is not None and book.price > book.stock),
        ({"stock": {"$lte": "{authors.age}"}}, lambda b: any((b.stock or 0) <= a.age for a in b.authors)),
        ({"stock": "{tags.deep.level}"}, lambda book: book.stock == book.tags.get("deep", {}).get("level")),
        ({"stock": {"$ne": "{stock}"}}, lambda _: False),
        ({"tags.deep.level": {"$lt": "{tags__deep__level}"}}, lambda _: False),
        ({"tags.deep.level": {"$lt": "{stock}", "$gte": 1}}, lambda b: "deep" in b.tags and (b.stock or 0) > 2),
        ({"$not": {"price": {"$gte": "{price}"}}}, lambda _: False),
    ],
)
def test_path_in_braces_is_another_field_of_the_document(query: Any, expected: Any) -> None:
    books = library()
    assert books.filter(query).title == [book.title for book in books if expected(book)]
    assert books.stack().filter(query).title == books.filter(query).title


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"$expr": {"$gt": ["$price", "$stock"]}}, lambda book: book.stock is not None and book.price > book.stock),
        ({"$expr": {"$eq": ["$title", "$title"]}}, lambda _: True),
        ({"$expr": {"$ne": ["$title", "$tags.a"]}}, lambda book: book.title != book.tags.get("a")),
        ({"$expr": {"$ne": ["$stock", "$stock"]}}, lambda _: False),
        ({"$not": {"$expr": {"$lte": ["$price", "$stock"]}}}, lambda b: b.stock is None or b.price > b.stock),
    ],
)
def test_expression_compares_two_fields_of_a_document(query: Any, expected: Any) -> None:
    books = library()
    assert books.filter(query).title == [book.title for book in books if expected(book)]
    assert books.stack().filter(query).title == books.filter(query).title


class Labelled(BaseDocument):
    label: str | None = None
    prediction: str | None = None
    count: int = 0
    limit: int = 0
    share: float | None = None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", None]),
            st.sampled_from(["a", "b", None]),
            st.integers(-2, 2),
            st.integers(-2, 2),
            st.sampled_from([None, 1.0, 2.5, float("nan")]),
        ),
        max_size=12,
    ),
    st.sampled_from(["$eq", "$ne", "$lt", "$lte", "$gt", "$gte"]),
    st.sampled_from([("label", "prediction"), ("count", "limit"), ("count", "share"), ("share", "share")]),
)
def test_expression_selects_the_same_rows_of_columns_as_of_documents(
    rows: list[tuple[Any, ...]], name: str, paths: tuple[str, str]
) -> None:
    names = ("label", "prediction", "count", "limit", "share")
    documents = DocumentArray[Labelled](Labelled(**dict(zip(names, row, strict=True))) for row in rows)
    query = {"$expr": {name: [f"${path}" for path in paths]}}
    if rows:
        assert documents.stack().filter(query).id == documents.filter(query).id


def test_expression_that_compares_nothing_is_refused() -> None:
    books = library()
    for wrong, message in [
        ({"$eq": ["$title", "$stock"]}, "Book.title is str, which is never compared with stock"),
        ({"$eq": ["title", "$title"]}, "with a dollar sign in front of each path"),
        ({"$regex": ["$title", "$title"]}, "compares no two fields"),
        ({"$eq": ["$title"]}, "compares two fields"),
        (3, "compares two fields"),
    ]:
        with pytest.raises(QueryError, match=re.escape(message)):
            books.filter({"$expr": wrong})
    with pytest.raises(PathError, match="Did you mean 'title'"):
        books.filter({"$expr": {"$eq": ["$titel", "$title"]}})


def test_text_in_braces_is_text_for_fields_that_hold_text() -> None:
    books = DocumentArray[Book]([Book(title="{price}", tags={"a": "{title}"}), Book(title="b", tags={"a": "b"})])
    assert len(books.filter({"title": "{price}"})) == 1
    assert len(books.filter({"title": {"$ne": "{title}"}})) == 2
    assert len(books.filter({"title": {"$gte": "{nothing}"}})) == 1
    assert len(books.filter({"tags.a": "{title}"})) == 1
    assert len(books.filter({"title": {"$in": ["{price}", "b"]}})) == 2


def test_path_in_braces_must_exist_and_be_comparable() -> None:
    books = library()
    with pytest.raises(PathError, match="Did you mean 'stock'"):
        books.filter({"price": {"$gt": "{stok}"}})
    with pytest.raises(QueryError, match=r"Book\.price: cannot compare float with str"):
        books.filter({"price": {"$gt": "{title}"}})
    with pytest.raises(QueryError, match="cannot be compared with str"):
        books.filter({"price": {"$gt": "{stock} "}})
