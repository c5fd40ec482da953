"""Columns of a batch: set whole and checked first, made from data, converted, moved and shared."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from pydantic import Field, PrivateAttr

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import ColumnError, PathError
from quire.typing import AnyTensor, NdArray, float32


class Author(BaseDocument):
    name: str = ""
    age: int = 0
    vector: NdArray[float32, 2] | None = None


class Book(BaseDocument):
    title: str = ""
    pages: int = Field(default=0, ge=0)
    price: float | None = None
    sold: bool = False
    cover: NdArray[float32, 2, "n"] | None = None
    shaped: NdArray | None = None
    anything: AnyTensor | None = None
    author: Author = Author()
    editor: Author | None = None
    authors: DocumentArray[Author] = []
    readers: DocumentArray[Author] | None = None
    tags: dict[str, int] = {}


def batch() -> DocumentBatch[Book]:
    docs = [
        Book(
            title="A",
            cover=np.zeros((2, 3), np.float32),
            author=Author(name="a"),
            authors=[Author(name="x"), Author(name="y")],
        ),
        Book(title="B", pages=3, cover=np.ones((2, 3), np.float32), editor=Author(name="e"), readers=[]),
    ]
    return DocumentArray[Book](docs).stack()


# --- setting


def test_set_from_lists() -> None:
    made = batch()
    made.title = ["C", "D"]
    made["pages"] = (5, 6)
    made.price = [None, 1]
    made.tags = [{"a": 1}, {}]
    assert (made.title, made.pages.tolist(), made.pages.dtype) == (["C", "D"], [5, 6], np.int64)
    assert (made[0].price, made[1].price, type(made[1].price)) == (None, 1.0, float)
    assert [document.title for document in made.unstack()] == ["C", "D"]
    assert made[0].tags == {"a": 1}


def test_set_from_tensors() -> None:
    made = batch()
    cover = np.full((2, 2, 4), 5, np.float32)
    made.cover = cover
    assert made.cover is cover
    made.pages = np.array([7, 8], np.int32)
    assert made.pages.dtype == np.int32
    assert [type(document.pages) for document in made] == [int, int]
    made.sold = np.array([True, False])
    made.price = np.array([0.5, 1.5], np.float32)
    assert [document.price for document in made] == [0.5, 1.5]
    made.shaped = np.zeros((2, 0))
    made.anything = np.zeros((2, 3), np.int8)
    assert made[0].anything.dtype == np.int8
    made.cover = [[[1, 2], [3, 4]], None]
    assert made.validity("cover").tolist() == [True, False]


def test_set_nested_columns_writes_through() -> None:
    made = batch()
    made.author.name = ["p", "q"]
    made["author.age"] = [1, 2]
    assert (made[0].author.name, made[1].author.age) == ("p", 2)
    made.authors.name = ["r", "s"]
    made["authors.age"] = np.array([3, 4])
    assert made.unstack()[0].authors.name == ["r", "s"]
    assert made[0].authors.age == [3, 4]
    made.authors.flat.vector = np.ones((2, 2), np.float32)
    assert made[0].authors[1].vector.tolist() == [1, 1]


def test_set_columns_of_documents_that_may_be_missing() -> None:
    made = batch()
    made.editor.name = [None, "f"]
    assert (made[0].editor, made[1].editor.name) == (None, "f")
    made.editor.name = made.editor.name
    made.editor.age = np.array([5, 6])
    assert (made[0].editor, made[1].editor.age, made.validity("editor.age").tolist()) == (None, 6, [False, True])
    with pytest.raises(ColumnError, match="Author.name, row 0: there is no document to hold the value; pass None"):
        made.editor.name = ["g", "h"]
    with pytest.raises(ColumnError, match="Author.name, row 1: Input should be a valid string"):
        made.editor.name = [None, None]
    assert made.editor.name == [None, "f"]


def test_set_documents_and_arrays() -> None:
    made, other = batch(), batch()
    made.author = [{"name": "n"}, Author(name="m")]
    assert made.author.name == ["n", "m"]
    made.author = other.author
    assert made.author.name == ["a", ""]
    made.author.name = ["changed", "changed"]
    assert other.author.name == ["a", ""]
    made.editor = other.author
    assert made.validity("editor").tolist() == [True, True]
    made.authors = [[], [{"name": "k"}]]
    assert made.authors.offsets.tolist() == [0, 0, 1]
    made.authors = other.authors
    assert made[0].authors.name == ["x", "y"]
    made.authors.flat.name = ["changed", "changed"]
    assert other.authors.flat.name == ["x", "y"]
    made.readers = other.readers
    assert (made[0].readers, len(made[1].readers)) == (None, 0)


@pytest.mark.parametrize("name", ["title", "pages", "sold", "cover", "author", "editor", "authors", "readers", "tags"])
def test_a_column_may_be_set_to_itself(name: str) -> None:
    made = batch()
    before = copy.deepcopy(made)
    made[name] = made[name]
    assert made.identical(before)


def test_a_column_object_carries_what_is_missing_and_padded() -> None:
    docs = [Book(price=1.5, shaped=np.ones(1)), Book(shaped=np.ones(2)), Book()]
    padded = DocumentArray[Book](docs).stack(shapes="pad")
    made = DocumentArray[Book]([Book(), Book(), Book()]).stack()
    for name in ("price", "shaped", "id", "author", "readers"):
        made[name] = padded.column(name)
    assert made.identical(padded)
    assert made.mask("shaped").tolist() == padded.mask("shaped").tolist()
    made.price = made.price  # a bare vector has no word for what is missing
    assert made[1].price == 0.0


def test_ragged_columns_may_be_set() -> None:
    docs = [Book(shaped=array) for array in (np.ones(1), np.ones(2))]
    ragged = DocumentArray[Book](docs).stack(shapes="ragged")
    made = batch()
    made.shaped = ragged.shaped
    assert [document.shaped.shape for document in made] == [(1,), (2,)]
    with pytest.raises(ColumnError, match=r"Book.cover, row 0: expected float32 \(2, n\), got float64 \(1,\)"):
        made.cover = ragged.shaped


BAD = [
    ("title", ["one"], "Book.title: the batch has 2 rows, got 1 values"),
    ("title", ["a", "b", "c"], "the batch has 2 rows, got 3 values"),
    ("title", "ab", "a column is made from a tensor or a sequence of values, got str 'ab'"),
    ("title", 3, "a column is made from a tensor or a sequence of values, got int 3"),
    ("title", {"a": 1, "b": 2}, "a column is made from"),
    ("title", ["a", 3], "Book.title, row 1: Input should be a valid string"),
    ("pages", [1, -1], "Book.pages, row 1: Input should be greater than or equal to 0"),
    ("pages", [1, 2.5], "Book.pages, row 1: "),
    ("pages", np.array([1.0, 2.0]), r"Book.pages: expected a vector of int, got float64 \(2,\) of numpy"),
    ("pages", np.array([[1], [2]]), "expected a vector of int"),
    ("pages", np.array([1, 2, 3]), "the batch has 2 rows, got 3 values"),
    ("price", np.array([1, 2]), "expected a vector of float"),
    ("sold", np.array([0, 1]), "expected a vector of bool"),
    (
        "cover",
        np.zeros((2, 3, 3), np.float32),
        r"Book.cover: expected rows of float32 \(2, n\), got .* rows are \(3, 3\)",
    ),
    ("cover", np.zeros((2, 2, 3)), r"expected rows of float32 \(2, n\), got float64 \(2, 2, 3\) of numpy"),
    ("cover", np.zeros((3, 2, 3), np.float32), "the batch has 2 rows, got 3 values"),
    ("cover", np.array(1, np.float32), "whose rows are none"),
    ("cover", np.float32(1), "a column is made from a tensor or a sequence of values, got float32"),
    ("cover", [np.zeros((2, 1), np.float32), np.zeros((2, 2), np.float32)], "Book.cover: mixed shapes"),
    ("shaped", [np.zeros(2), np.zeros(2, np.int8)], "Book.shaped: mixed dtypes"),
    ("author", [Author(), Book()], "Book.author, row 1"),
    ("author", [Author(), None], "Book.author, row 1"),
    ("authors", [[], [Book()]], "Book.authors, row 1"),
    ("author.name", ["a"], "Author.name: the batch has 2 rows, got 1 values"),
    ("authors.name", ["a"], "Author.name: the batch has 2 rows, got 1 values"),
]


@pytest.mark.parametrize(("path", "values", "message"), BAD, ids=[f"{path}-{i}" for i, (path, _, _) in enumerate(BAD)])
def test_bad_columns_change_nothing(path: str, values: Any, message: str) -> None:
    made = batch()
    before = copy.deepcopy(made)
    with pytest.raises(ColumnError, match=message):
        made[path] = values
    assert made.identical(before)


def test_missing_documents_do_not_fit_where_none_may_be() -> None:
    made = batch()
    with pytest.raises(ColumnError, match="Book.author, row 0: there is no value, and the field takes no None"):
        made.author = made.editor
    with pytest.raises(ColumnError, match="Book.authors, row 0: there is no value"):
        made.authors = made.readers
    with pytest.raises(ColumnError, match="the batch has 2 rows, got 1 values"):
        made.author = made.author[:1]


@pytest.mark.parametrize("path", ["titel", "author.nmae", "title.x", ""])
def test_unknown_paths_are_not_set(path: str) -> None:
    with pytest.raises(PathError):
        batch()[path] = ["a", "b"]
    if "." not in path and path:
        with pytest.raises(PathError, match="Did you mean"):
            setattr(batch(), path, ["a", "b"])


# --- from columns


def test_from_columns() -> None:
    cover = np.ones((3, 2, 5), np.float32)
    made = DocumentBatch[Book].from_columns({"cover": cover, "title": ["a", "b", "c"], "author": [{"name": "n"}] * 3})
    assert (len(made), made.cover is cover, made.title) == (3, True, ["a", "b", "c"])
    assert (made.pages.tolist(), made[2].author.name, len(set(made.id))) == ([0, 0, 0], "n", 3)
    assert made.unstack().stack().identical(made)
    rebuilt = DocumentBatch[Book].from_columns({name: made.column(name) for name in Book.model_fields})
    assert rebuilt.identical(made)


def test_from_columns_takes_defaults_as_documents_do() -> None:
    class Full(BaseDocument):
        number: int
        vector: NdArray[float32] = [1, 2]
        tensor: NdArray = np.arange(3)
        authors: DocumentArray[Author] = [{"name": "a"}]
        words: list[str] = []
        odd: int = None  # type: ignore[assignment]

    made = DocumentBatch[Full].from_columns({"number": [1, 2]})
    assert made.unstack() == DocumentArray[Full]([Full(number=1), Full(number=2)])
    assert made.vector.dtype == np.float32
    assert type(made[0].authors) is DocumentArray[Author]
    made[0].words.append("x")
    made[0].tensor[0] = 9
    assert (made[1].words, made[1].tensor[0], Full(number=1).words, Full(number=1).tensor[0]) == ([], 0, [], 0)


def test_from_columns_gives_private_attributes_their_defaults() -> None:
    class Private(BaseDocument):
        name: str = ""
        _cache: list[int] = PrivateAttr(default_factory=list)
        _unset: int

    class Holder(BaseDocument):
        private: Private | None = None

    made = DocumentBatch[Private].from_columns({"name": ["a", "b"]})
    first, second = made
    first._cache.append(1)
    assert (first._cache, second._cache, hasattr(first, "_unset")) == ([1], [], False)
    stacked = DocumentArray[Private]([first]).stack()
    assert stacked[0]._cache == [1]
    joined = DocumentBatch[Private].concat([stacked, made])
    assert [document._cache for document in joined] == [[1], [], []]
    holders = DocumentArray[Holder]([Holder(), Holder(private=first)])
    assert [holder.private and holder.private._cache for holder in holders.stack()] == [None, [1]]


def test_from_columns_of_nothing() -> None:
    assert DocumentBatch[Book].from_columns({}) == DocumentBatch[Book]()
    assert len(DocumentBatch[Book].from_columns({"cover": np.zeros((0, 2, 3), np.float32)})) == 0


def test_from_columns_refuses() -> None:
    class Strict(BaseDocument):
        name: str
        age: int = 0

    with pytest.raises(ColumnError, match="Strict.name has no default; give a column for it"):
        DocumentBatch[Strict].from_columns({"age": [1]})
    with pytest.raises(ColumnError, match="Strict: columns of different lengths: {'name': 1, 'age': 2}"):
        DocumentBatch[Strict].from_columns({"name": ["a"], "age": [1, 2]})
    with pytest.raises(PathError, match="Strict has no field 'nmae'"):
        DocumentBatch[Strict].from_columns({"nmae": ["a"]})
    with pytest.raises(ColumnError, match="Book.shaped: mixed shapes"):
        DocumentBatch[Book].from_columns({"shaped": [np.zeros(1), np.zeros(2)]})
    padded = DocumentBatch[Book].from_columns({"shaped": [np.zeros(1), np.zeros(2)]}, shapes="pad")
    assert padded.mask("shaped").tolist() == [[True, False], [True, True]]


# --- without a framework


def test_numpy_stays_where_it_is() -> None:
    made = batch()
    for same in (made.to("cpu"), made.pin_memory(), made.share_memory_(), made.to_framework("numpy")):
        assert same.identical(made)
        assert np.shares_memory(same.cover, made.cover)
    assert made.share_memory_() is made
    with pytest.raises(ColumnError, match="scipy has sparse matrices only"):
        made.to_framework("scipy")


def test_what_lies_below_a_tensor_is_no_column_to_set() -> None:
    with pytest.raises(PathError, match="field") as caught:
        batch()["cover.size"] = [1]
    assert "objects" not in str(caught.value)
