"""Columns of a batch: assignment, from_columns, conversion, devices and shared memory."""

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


def test_set_column_from_list() -> None:
    created = batch()
    created.title = ["C", "D"]
    created["pages"] = (5, 6)
    created.price = [None, 1]
    created.tags = [{"a": 1}, {}]
    assert (created.title, created.pages.tolist(), created.pages.dtype) == (["C", "D"], [5, 6], np.int64)
    assert (created[0].price, created[1].price, type(created[1].price)) == (None, 1.0, float)
    assert [document.title for document in created.unstack()] == ["C", "D"]
    assert created[0].tags == {"a": 1}


def test_set_column_from_tensor() -> None:
    created = batch()
    cover = np.full((2, 2, 4), 5, np.float32)
    created.cover = cover
    assert created.cover is cover
    created.pages = np.array([7, 8], np.int32)
    assert created.pages.dtype == np.int32
    assert [type(document.pages) for document in created] == [int, int]
    created.sold = np.array([True, False])
    created.price = np.array([0.5, 1.5], np.float32)
    assert [document.price for document in created] == [0.5, 1.5]
    created.shaped = np.zeros((2, 0))
    created.anything = np.zeros((2, 3), np.int8)
    assert created[0].anything.dtype == np.int8
    created.cover = [[[1, 2], [3, 4]], None]
    assert created.validity("cover").tolist() == [True, False]


def test_set_nested_column_changes_the_batch() -> None:
    created = batch()
    created.author.name = ["p", "q"]
    created["author.age"] = [1, 2]
    assert (created[0].author.name, created[1].author.age) == ("p", 2)
    created.authors.name = ["r", "s"]
    created["authors.age"] = np.array([3, 4])
    assert created.unstack()[0].authors.name == ["r", "s"]
    assert created[0].authors.age == [3, 4]
    created.authors.flat.vector = np.ones((2, 2), np.float32)
    assert created[0].authors[1].vector.tolist() == [1, 1]


def test_set_column_of_optional_documents() -> None:
    created = batch()
    created.editor.name = [None, "f"]
    assert (created[0].editor, created[1].editor.name) == (None, "f")
    created.editor.name = created.editor.name
    created.editor.age = np.array([5, 6])
    assert (created[0].editor, created[1].editor.age, created.validity("editor.age").tolist()) == (
        None,
        6,
        [False, True],
    )
    with pytest.raises(ColumnError, match="Author.name, row 0: there is no document to hold the value; pass None"):
        created.editor.name = ["g", "h"]
    with pytest.raises(ColumnError, match="Author.name, row 1: Input should be a valid string"):
        created.editor.name = [None, None]
    assert created.editor.name == [None, "f"]


def test_set_column_of_documents_and_arrays() -> None:
    created, other = batch(), batch()
    created.author = [{"name": "n"}, Author(name="m")]
    assert created.author.name == ["n", "m"]
    created.author = other.author
    assert created.author.name == ["a", ""]
    created.author.name = ["changed", "changed"]
    assert other.author.name == ["a", ""]
    created.editor = other.author
    assert created.validity("editor").tolist() == [True, True]
    created.authors = [[], [{"name": "k"}]]
    assert created.authors.offsets.tolist() == [0, 0, 1]
    created.authors = other.authors
    assert created[0].authors.name == ["x", "y"]
    created.authors.flat.name = ["changed", "changed"]
    assert other.authors.flat.name == ["x", "y"]
    created.readers = other.readers
    assert (created[0].readers, len(created[1].readers)) == (None, 0)


@pytest.mark.parametrize("name", ["title", "pages", "sold", "cover", "author", "editor", "authors", "readers", "tags"])
def test_set_column_to_itself_keeps_values(name: str) -> None:
    created = batch()
    before = copy.deepcopy(created)
    created[name] = created[name]
    assert created.identical(before)


def test_set_from_column_object_keeps_validity_and_padding() -> None:
    docs = [Book(price=1.5, shaped=np.ones(1)), Book(shaped=np.ones(2)), Book()]
    padded = DocumentArray[Book](docs).stack(shapes="pad")
    created = DocumentArray[Book]([Book(), Book(), Book()]).stack()
    for name in ("price", "shaped", "id", "author", "readers"):
        created[name] = padded.column(name)
    assert created.identical(padded)
    assert created.mask("shaped").tolist() == padded.mask("shaped").tolist()
    created.price = created.price  # a bare vector has no word for what is missing
    assert created[1].price == 0.0


def test_set_ragged_column() -> None:
    docs = [Book(shaped=array) for array in (np.ones(1), np.ones(2))]
    ragged = DocumentArray[Book](docs).stack(shapes="ragged")
    created = batch()
    created.shaped = ragged.shaped
    assert [document.shaped.shape for document in created] == [(1,), (2,)]
    with pytest.raises(ColumnError, match=r"Book.cover, row 0: expected float32 \(2, n\), got float64 \(1,\)"):
        created.cover = ragged.shaped


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
def test_rejected_column_changes_nothing(path: str, values: Any, message: str) -> None:
    created = batch()
    before = copy.deepcopy(created)
    with pytest.raises(ColumnError, match=message):
        created[path] = values
    assert created.identical(before)


def test_set_column_rejects_missing_documents_in_required_field() -> None:
    created = batch()
    with pytest.raises(ColumnError, match="Book.author, row 0: there is no value, and the field takes no None"):
        created.author = created.editor
    with pytest.raises(ColumnError, match="Book.authors, row 0: there is no value"):
        created.authors = created.readers
    with pytest.raises(ColumnError, match="the batch has 2 rows, got 1 values"):
        created.author = created.author[:1]


@pytest.mark.parametrize("path", ["titel", "author.nmae", "title.x", ""])
def test_set_column_rejects_unknown_paths(path: str) -> None:
    with pytest.raises(PathError):
        batch()[path] = ["a", "b"]
    if "." not in path and path:
        with pytest.raises(PathError, match="Did you mean"):
            setattr(batch(), path, ["a", "b"])


# --- from columns


def test_from_columns_makes_batch() -> None:
    cover = np.ones((3, 2, 5), np.float32)
    created = DocumentBatch[Book].from_columns(
        {"cover": cover, "title": ["a", "b", "c"], "author": [{"name": "n"}] * 3}
    )
    assert (len(created), created.cover is cover, created.title) == (3, True, ["a", "b", "c"])
    assert (created.pages.tolist(), created[2].author.name, len(set(created.id))) == ([0, 0, 0], "n", 3)
    assert created.unstack().stack().identical(created)
    rebuilt = DocumentBatch[Book].from_columns({name: created.column(name) for name in Book.model_fields})
    assert rebuilt.identical(created)


def test_from_columns_fills_defaults_like_documents() -> None:
    class Full(BaseDocument):
        number: int
        vector: NdArray[float32] = [1, 2]
        tensor: NdArray = np.arange(3)
        authors: DocumentArray[Author] = [{"name": "a"}]
        words: list[str] = []
        odd: int = None  # type: ignore[assignment]

    created = DocumentBatch[Full].from_columns({"number": [1, 2]})
    assert created.unstack() == DocumentArray[Full]([Full(number=1), Full(number=2)])
    assert created.vector.dtype == np.float32
    assert type(created[0].authors) is DocumentArray[Author]
    created[0].words.append("x")
    created[0].tensor[0] = 9
    assert (created[1].words, created[1].tensor[0], Full(number=1).words, Full(number=1).tensor[0]) == ([], 0, [], 0)


def test_from_columns_sets_defaults_of_private_attributes() -> None:
    class Private(BaseDocument):
        name: str = ""
        _cache: list[int] = PrivateAttr(default_factory=list)
        _unset: int

    class Holder(BaseDocument):
        private: Private | None = None

    created = DocumentBatch[Private].from_columns({"name": ["a", "b"]})
    first, second = created
    first._cache.append(1)
    assert (first._cache, second._cache, hasattr(first, "_unset")) == ([1], [], False)
    stacked = DocumentArray[Private]([first]).stack()
    assert stacked[0]._cache == [1]
    joined = DocumentBatch[Private].concat([stacked, created])
    assert [document._cache for document in joined] == [[1], [], []]
    holders = DocumentArray[Holder]([Holder(), Holder(private=first)])
    assert [holder.private and holder.private._cache for holder in holders.stack()] == [None, [1]]


def test_from_columns_without_columns_is_empty() -> None:
    assert DocumentBatch[Book].from_columns({}) == DocumentBatch[Book]()
    assert len(DocumentBatch[Book].from_columns({"cover": np.zeros((0, 2, 3), np.float32)})) == 0


def test_from_columns_rejects_bad_columns() -> None:
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


def test_to_device_keeps_numpy_columns() -> None:
    created = batch()
    for same in (created.to("cpu"), created.pin_memory(), created.share_memory_(), created.to_framework("numpy")):
        assert same.identical(created)
        assert np.shares_memory(same.cover, created.cover)
    assert created.share_memory_() is created
    with pytest.raises(ColumnError, match="scipy has sparse matrices only"):
        created.to_framework("scipy")


def test_set_column_rejects_path_below_tensor() -> None:
    with pytest.raises(PathError, match="field") as caught:
        batch()["cover.size"] = [1]
    assert "objects" not in str(caught.value)
