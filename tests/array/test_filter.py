"""Filters: every operator, on plain fields, nested ones, arrays and tags."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
import pytest

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
    ({"price": {"$regex": "5"}}, []),
    ({"words": {"$size": 2}}, [L]),
    ({"authors": {"$size": 1}}, [R]),
    ({"stock": {"$size": 1}}, []),
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


@pytest.mark.parametrize(("query", "wanted"), QUERIES)
def test_filter(query: Any, wanted: list[str]) -> None:
    books = library()
    assert books.filter(query).title == wanted
    assert books.stack().filter(query).title == wanted
    assert type(books.filter(query)) is DocumentArray[Book]
    assert all(book in books for book in books.filter(query))


BAD: list[tuple[Any, type[Exception], str]] = [
    ({"titel": "x"}, PathError, "Book has no field 'titel'.*Did you mean 'title'"),
    ({"authors.nmae": "x"}, PathError, "Author has no field 'nmae'"),
    ({"title.x": "x"}, PathError, "Book.title is str, which has no fields"),
    ({"$or": [{"titel": "x"}]}, PathError, "titel"),
    ({"price": {"$gtt": 3}}, QueryError, r"'\$gtt' is not an operator. Did you mean '\$gt'"),
    ({"$nott": {}}, QueryError, r"'\$nott' is not an operator here. Did you mean '\$not'"),
    ({"$and": {"price": 1}}, QueryError, r"\$and takes a list of filters"),
    ({"title": {"$in": "Roots"}}, QueryError, r"\$in and \$nin take a list"),
    ({"title": {"$nin": "Roots"}}, QueryError, r"\$in and \$nin take a list"),
    ({"title": {"$regex": "("}}, QueryError, r"\$regex: "),
    ({"title": {"$regex": 3}}, QueryError, r"\$regex: "),
    ({"title": {"$gt": 3}}, QueryError, "cannot compare str with int"),
    ({"vector": {"$gt": 3}}, QueryError, "cannot compare ndarray with int"),
    ({3: "x"}, QueryError, "the keys of a filter are paths and operators, got 3"),
    ("title", QueryError, "a filter is a function or a dict, got str"),
    ({"$and": ["title"]}, QueryError, "a filter is a function or a dict"),
]


@pytest.mark.parametrize(("query", "error", "message"), BAD, ids=[str(query)[:50] for query, _, _ in BAD])
def test_what_is_no_filter(query: Any, error: type[Exception], message: str) -> None:
    for books in (library(), library().stack()):
        with pytest.raises(error, match=message):
            books.filter(query)


def test_arrays_without_a_type_are_filtered_too() -> None:
    docs = DocumentArray([Book(title="a"), Author(name="a", age=3), Text(text="t")])
    assert list(docs.filter({"age": 3})) == [docs[1]]
    assert list(docs.filter({"title": "a"})) == [docs[0]]
    assert list(docs.stack().filter({"age": 3})) == [docs[1]]
    with pytest.raises(PathError):
        DocumentArray([Author(name="a")]).filter({"aeg": 3})


def test_extra_values_are_found() -> None:
    class Loose(BaseDocument, extra="allow"):
        pass

    docs = DocumentArray[Loose]([Loose(color="red"), Loose(color={"dark": True})])
    assert len(docs.filter({"color": "red"})) == 1
    assert len(docs.filter({"color.dark": True})) == 1
    assert len(docs.filter({"shape": None})) == 2
