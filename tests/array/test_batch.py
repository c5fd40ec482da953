"""DocumentBatch: rows that are ordinary documents, views and copies of rows, joining, equality."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.columns import ObjectColumn
from quire.errors import ColumnError, DocumentTypeError, PathError
from quire.typing import AnyTensor, NdArray, float32


class Author(BaseDocument):
    name: str = ""
    age: int = 0


class Book(BaseDocument):
    title: str = ""
    pages: int = 0
    price: float | None = None
    cover: NdArray[float32, 2] | None = None
    shaped: NdArray | None = None
    anything: AnyTensor | None = None
    author: Author = Author()
    editor: Author | None = None
    authors: DocumentArray[Author] = []
    tags: dict[str, Any] = {}
    take: int = 0


class Other(BaseDocument):
    title: str = ""


def book(n: int) -> Book:
    return Book(
        title=f"Book {n}",
        pages=n,
        price=n / 2 if n % 2 else None,
        cover=[n, n],
        author=Author(name=f"Author {n}", age=n),
        editor=Author(name=f"Editor {n}") if n % 2 else None,
        authors=[Author(name=f"{n}.{m}") for m in range(n % 3)],
        tags={"n": n},
        take=n,
    )


def books(count: int = 4) -> DocumentArray[Book]:
    return DocumentArray[Book]([book(n) for n in range(count)])


# --- rows


def test_row_is_an_ordinary_document() -> None:
    docs = books()
    batch = docs.stack()
    for row, document in enumerate(docs):
        created = batch[row]
        assert type(created) is Book
        assert created.identical(document)
        assert json.loads(created.model_dump_json()) == json.loads(document.model_dump_json())
        assert created.model_dump_json() != "{}"
        assert created.model_fields_set == set(Book.model_fields)
        assert repr(created) == repr(document)
        assert copy.deepcopy(created).identical(document)
        assert pickle.loads(pickle.dumps(created)).identical(document)
    assert batch[-1].identical(docs[3])
    assert [one.id for one in batch] == docs.id


def test_row_shares_memory_with_columns() -> None:
    batch = books().stack()
    row, other = batch[1], batch[2]
    row.cover[0] = 99
    assert batch.cover[1].tolist() == [99, 1]
    assert np.shares_memory(row.cover, batch.cover)
    assert batch.unstack()[1].cover[0] == 99
    assert next(iter(batch[1:])).cover[0] == 99
    batch.cover[2] = 7
    assert other.cover.tolist() == [7, 7]


def test_setting_a_field_of_a_row_changes_only_that_document() -> None:
    batch = books().stack()
    before = batch.unstack()
    row, sibling = batch[1], batch[1]
    row.cover = [5, 5]
    row.title = "changed"
    row.pages = 1000
    row.author.name = "changed"
    row.author = Author(name="another")
    row.authors.append(Author())
    row.editor.name = "changed"
    del row.tags
    assert batch.unstack().identical(before)
    assert sibling.identical(before[1])
    with pytest.raises(ValueError, match="pages"):
        batch[0].pages = "many"


def test_row_validates_assignments() -> None:
    batch = books().stack()
    first, second = batch[0], batch[1]
    first.title = "x"
    assert second.title == "Book 1"
    assert first.model_fields_set == second.model_fields_set == set(Book.model_fields)


def test_unstack_twice_gives_equal_documents() -> None:
    """Another library empties the batch by unstacking it."""
    docs = books()
    batch = docs.stack()
    first, second = batch.unstack(), batch.unstack()
    assert type(first) is DocumentArray[Book]
    assert first.identical(docs)
    assert second.identical(docs)
    first[0].title = "changed"
    first.pop()
    assert (len(batch), batch.title[0], len(second), second[0].title) == (4, "Book 0", 4, "Book 0")
    assert docs[0].title == "Book 0"
    assert first.stack().unstack().identical(first)


def test_iteration_repeats_and_continues_beyond_a_chunk() -> None:
    batch = books(5).stack()
    assert [document.pages for document in batch] == [document.pages for document in batch] == [0, 1, 2, 3, 4]
    big = DocumentBatch[Author].from_columns({"age": np.arange(3000)})
    assert [document.age for document in big] == list(range(3000))
    assert next(iter(big)).age == 0
    many = DocumentArray[Book]([Book(title=str(n), editor=None if n % 3 else Author(age=n)) for n in range(2500)])
    assert [editor and editor.age for editor in many.stack().editor] == [None if n % 3 else n for n in range(2500)]
    assert list(many.stack()) == list(many)


# --- parts


def test_slices_share_memory() -> None:
    batch = books(6).stack()
    part = batch[1:5:2]
    assert np.shares_memory(part.cover, batch.cover)
    assert np.shares_memory(part.pages, batch.pages)
    part.cover[0] = 50
    batch.author.age[3] = 60
    assert batch.cover[1].tolist() == [50, 50]
    assert part.author.age.tolist() == [1, 60]
    assert np.shares_memory(batch[2:4].authors.flat.age, batch.authors.flat.age)
    assert batch[1:5][1:3].unstack().identical(batch.unstack()[2:4])


def test_setting_a_column_of_a_view_does_not_change_the_batch() -> None:
    batch = books(4).stack()
    part = batch[:2]
    part.title = ["x", "y"]
    part.author.name = ["x", "y"]
    part.authors.flat.name = ["x"]
    assert batch.title[:2] == ["Book 0", "Book 1"]
    assert batch.author.name[:2] == ["Author 0", "Author 1"]
    assert batch.authors.flat.name[0] == "1.0"


@pytest.mark.parametrize("rows", [[0, 2], [True, False, True, False], np.array([-1, 0]), []], ids=str)
def test_selected_rows_are_copies(rows: Any) -> None:
    batch = books(4).stack()
    part = batch[rows]
    assert not np.shares_memory(part.cover, batch.cover)
    assert part.unstack().identical(batch.unstack()[rows])


def test_copy_and_deepcopy_share_or_copy_memory() -> None:
    batch = books().stack()
    shallow, deep = copy.copy(batch), copy.deepcopy(batch)
    assert shallow.identical(batch)
    assert deep.identical(batch)
    assert np.shares_memory(shallow.cover, batch.cover)
    assert not np.shares_memory(deep.cover, batch.cover)
    shallow.title = ["x"] * 4
    shallow.author.name = ["x"] * 4
    assert batch.title[0] == "Book 0"
    assert batch.author.name[0] == "Author 0"


# --- joining


def test_concat_appends_rows() -> None:
    docs = books(6)
    parts = [docs[:2].stack(), docs[2:2].stack(), docs[2:].stack()]
    joined = DocumentBatch[Book].concat(iter(parts))
    assert type(joined) is DocumentBatch[Book]
    assert joined.unstack().identical(docs)
    assert joined.authors.offsets.tolist() == [0, 0, 1, 3, 3, 4, 6]
    assert type(DocumentBatch.concat(parts)) is DocumentBatch[Book]
    assert DocumentBatch.concat(parts) == joined


@pytest.mark.parametrize("index", [0, 1])
def test_concat_result_does_not_share_columns_dict(index: int) -> None:
    batch, empty = books().stack(), DocumentArray[Book]().stack()
    joined = DocumentBatch[Book].concat([batch, empty] if index else [batch])
    joined.title = ["x"] * 4
    joined.author.name = ["x"] * 4
    joined.authors.flat.name = ["x"] * len(joined.authors.flat)
    assert batch.unstack().identical(books_like(batch))


def books_like(batch: DocumentBatch[Book]) -> DocumentArray[Book]:
    """Return the books of a batch of `books()`, with its ids."""
    expected = books(len(batch))
    for document, row in zip(expected, batch, strict=True):
        document.id = row.id
        document.author.id = row.author.id
        for mine, theirs in zip(document.authors, row.authors, strict=True):
            mine.id = theirs.id
        if document.editor is not None:
            document.editor.id = row.editor.id
    return expected


def test_concat_of_mixed_column_forms_restacks() -> None:
    def batch_of(*arrays: Any, **options: Any) -> DocumentBatch[Book]:
        return DocumentArray[Book]([Book(shaped=array) for array in arrays]).stack(**options)

    plain = batch_of(np.zeros((2, 2)))
    padded = batch_of(np.ones((1, 2)), np.ones((2, 1)), shapes="pad")
    ragged = batch_of(np.ones(3), np.ones((1, 1)), shapes="ragged")
    missing = batch_of(None)
    for parts in ([plain, padded], [padded, missing, plain], [ragged, plain], [plain, padded, missing, ragged]):
        joined = DocumentBatch[Book].concat(parts)
        assert joined.unstack() == sum((part.unstack() for part in parts), DocumentArray[Book]())
    assert DocumentBatch[Book].concat([plain, padded]).mask("shaped").sum() == 8
    with pytest.raises(ColumnError, match="Book.shaped: mixed shapes"):
        DocumentBatch[Book].concat([plain, batch_of(np.zeros(3))])
    assert len(DocumentBatch[Book].concat([plain, batch_of(np.zeros(3))], shapes="ragged")) == 2
    with pytest.raises(ColumnError, match="Book.shaped: mixed dtypes: row 0 has float64, row 1 has float32"):
        DocumentBatch[Book].concat([plain, batch_of(np.zeros((2, 2), np.float32))])


def test_concat_of_numbers_and_objects_gives_objects() -> None:
    small = DocumentArray[Author]([Author(age=1)]).stack()
    large = DocumentArray[Author]([Author(age=2**70)]).stack()
    joined = DocumentBatch[Author].concat([small, large])
    assert type(joined.column("age")) is ObjectColumn
    assert joined.age == [1, 2**70]
    narrow = DocumentBatch[Author].from_columns({"age": np.array([3], np.int8)})
    assert DocumentBatch[Author].concat([small, narrow]).age.tolist() == [1, 3]


def test_concat_of_mixed_dtypes_keeps_dtypes() -> None:
    def batch_of(array: Any) -> DocumentBatch[Book]:
        return DocumentArray[Book]([Book(anything=array)]).stack()

    joined = DocumentBatch[Book].concat([batch_of(np.zeros(2, np.int8)), batch_of(np.zeros(2))])
    assert [value.dtype for value in joined.anything] == [np.int8, np.float64]


@pytest.mark.parametrize("bad", [DocumentArray[Other]([Other()]).stack(), books(1), "text", None], ids=repr)
def test_concat_rejects_other_classes(bad: Any) -> None:
    with pytest.raises(
        DocumentTypeError, match=r"DocumentBatch\[Book\].concat: item 1: expected a DocumentBatch\[Book\]"
    ):
        DocumentBatch[Book].concat([books(1).stack(), bad])


# --- equality and the rest


def test_batches_compare_class_and_rows() -> None:
    docs = books()
    batch = docs.stack()
    assert batch == docs.stack()
    assert batch.identical(docs.stack())
    assert batch == books().stack()
    assert not batch.identical(books().stack())
    assert batch != docs[:3].stack()
    assert batch != docs
    assert DocumentBatch[Book]() != DocumentBatch[Other]()
    other = copy.deepcopy(batch)
    other.cover[0, 0] = -1
    assert batch != other
    with pytest.raises(TypeError):
        hash(batch)


def test_batch_of_documents_equals_stack() -> None:
    batch = DocumentBatch[Book]([book(1), {"title": "made"}])
    assert batch.title == ["Book 1", "made"]
    with pytest.raises(DocumentTypeError, match=r"DocumentBatch\[Book\]: item 0: expected a Book, got Other"):
        DocumentBatch[Book]([Other()])
    mixed = DocumentBatch([book(1), Other(title="o")])
    assert [type(document) for document in mixed] == [Book, Other]


def test_unknown_columns_raise_path_errors() -> None:
    batch = books().stack()
    for path, message in {
        "titel": "Did you mean 'title'",
        "author.nmae": "Did you mean 'name'",
        "title.x": "has no fields",
        "authors..x": "is not a path",
    }.items():
        for read in (batch.__getitem__, batch.column, batch.validity, batch.mask):
            with pytest.raises(PathError, match=message):
                read(path)
    assert batch[""] is batch
    with pytest.raises(PathError, match="empty path"):
        batch.column("")
    assert not hasattr(batch, "titel")
    assert not hasattr(batch, "_missing")


def test_methods_take_precedence_over_fields() -> None:
    batch = books().stack()
    assert callable(batch.take)
    assert batch["take"].tolist() == [0, 1, 2, 3]
    batch["take"] = [4, 5, 6, 7]
    assert batch[0].take == 4
    with pytest.raises(
        PathError, match=r"'take' is a method of DocumentBatch\[Book\]: set the column by batch\['take'\]"
    ):
        batch.take = [1, 2, 3, 4]


class Stack(DocumentBatch):
    """A subclass that is subscripted with a document class."""

    def total(self) -> int:
        return int(self.pages.sum())


def test_subclass_of_batch_keeps_its_class() -> None:
    stack = Stack[Book](books())
    assert (type(stack), stack.total(), stack[1:3].total(), stack.take([3]).total()) == (Stack[Book], 6, 3, 3)
    assert type(Stack[Book].concat([stack, stack])) is Stack[Book]
    assert type(pickle.loads(pickle.dumps(stack))) is Stack[Book]
    assert stack == books().stack()


def test_batch_schema_is_the_class_schema() -> None:
    assert books().stack().schema is Book.document_schema()
