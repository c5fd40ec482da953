"""Documents that stand for a text, as `Text`: comparison, `in`, filters and sorting by that text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument, Document, DocumentArray, Image, Mesh3D, Text
from quire.errors import DocumentTypeError, OptionError, PathError, QueryError


class Page(BaseDocument):
    title: Text
    number: int = 0
    cover: Image | None = None
    notes: DocumentArray[Text] = []


class Plain(BaseDocument):
    name: str = ""


PAGES = DocumentArray[Page](
    Page(title=title, number=number, cover=f"{title}.png", notes=[title.upper(), "x"])
    for number, title in enumerate(["cat", "ant", "bee"])
)


def test_main_value_is_passed_without_a_name() -> None:
    assert (Text("hi").text, Image("a.png").url, Mesh3D("a.obj").url) == ("hi", "a.png", "a.obj")
    assert np.array_equal(Image(np.ones((2, 2, 3))).tensor, np.ones((2, 2, 3)))
    assert Text(b"hi").bytes_ == b"hi"


def test_documents_equal_their_main_text() -> None:
    assert Text("hi") == "hi"
    assert Text("hi", embedding=np.ones(2)) == "hi"
    assert Text("hi") != "ho"
    assert Image("a.png") == "a.png"
    assert Image(np.ones((1, 1, 3))) != "a.png"
    assert Text() != ""
    assert Plain(name="hi") != "hi"


def test_documents_have_no_hash() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Text("hi"))


def test_in_searches_the_main_text() -> None:
    assert "h" in Text("hi")
    assert "x" not in Text("hi")
    assert "x" not in Text()
    with pytest.raises(DocumentTypeError, match="searches the text of a Text for text, got 3"):
        assert 3 in Text("hi")
    assert ("name", "a") in Plain(name="a")


@given(st.lists(st.text(max_size=3)))
def test_texts_sort_like_their_strings(texts: list[str]) -> None:
    documents = [Text(text) for text in texts]
    assert [document.text for document in sorted(documents)] == sorted(texts)
    for left in documents:
        for right in texts:
            assert ((left == right), (left < right), (left >= right)) == (
                left.text == right,
                str(left.text) < right,
                str(left.text) >= right,
            )


def test_documents_without_text_do_not_compare() -> None:
    with pytest.raises(TypeError, match="not supported between instances"):
        assert Plain(name="a") < Plain(name="b")
    with pytest.raises(TypeError, match="not supported between instances"):
        assert Text() < "a"


def test_arrays_of_texts_contain_strings() -> None:
    assert "ant" in PAGES.title
    assert "dog" not in PAGES.title
    assert PAGES.title.index("bee") == 2
    assert "a" not in DocumentArray[Plain]()


def test_text_in_an_array_of_other_documents_is_an_error() -> None:
    with pytest.raises(QueryError, match="holds documents, never the text 'a'. For an id, write 'a' in docs.id."):
        assert "a" in DocumentArray[Plain]([Plain(name="a")])


QUERIES: list[tuple[Any, list[int]]] = [
    ({"title": "ant"}, [1]),
    ({"title": {"$eq": "ant"}}, [1]),
    ({"title": {"$ne": "ant"}}, [0, 2]),
    ({"title": {"$in": ["ant", "bee"]}}, [1, 2]),
    ({"title": {"$nin": ["ant", "bee"]}}, [0]),
    ({"title": {"$gt": "ant", "$lt": "c"}}, [2]),
    ({"title": {"$regex": "^b"}}, [2]),
    ({"title": {"$not": {"$regex": "^b"}}}, [0, 1]),
    ({"title": {"$exists": True, "$eq": "cat"}}, [0]),
    ({"title": Text("cat")}, [0]),
    ({"cover": "bee.png"}, [2]),
    ({"notes": "ANT"}, [1]),
    ({"title__text": "ant"}, [1]),
    ({"title.text": "ant"}, [1]),
    ('{"title": {"$in": ["cat"]}}', [0]),
    ({"$or": {"title": "cat", "number": 2}}, [0, 2]),
    ({"$and": {"title": "cat", "number": 2}}, []),
]


@pytest.mark.parametrize(("query", "rows"), QUERIES)
def test_filters_compare_the_main_text(query: Any, rows: list[int]) -> None:
    assert PAGES.filter(query).number == rows
    assert PAGES.stack().filter(query).number.tolist() == rows


@pytest.mark.needs("pyarrow")
def test_stored_datasets_compare_the_main_text(tmp_path: Path) -> None:
    from quire.storage import open_dataset, write_dataset

    write_dataset(PAGES, tmp_path / "pages")
    for query, rows in QUERIES:
        if not isinstance(query, str):
            assert [page.number for page in open_dataset(tmp_path / "pages", Page, where=query)] == rows, query


def test_numbers_are_still_no_text() -> None:
    with pytest.raises(QueryError, match="Page.title is Text, and never equals int 3"):
        PAGES.filter({"title": 3})


# --- arrays without a type


def test_arrays_without_a_type_equal_typed_ones_of_the_same_documents() -> None:
    for documents in ([Text("a"), Text("b")], [Document(text="a")], [Text("a"), Plain()], []):
        array: DocumentArray[Any] = DocumentArray(documents)
        assert DocumentArray.from_bytes(array.to_bytes()) == array
    assert DocumentArray([Text("a")]) == DocumentArray[Text](["a"])
    assert DocumentArray([Text("a")]) != DocumentArray([Plain()])
    assert DocumentArray[Text]() != DocumentArray[Plain]()


def test_array_loaded_from_a_file_equals_the_array_without_a_type(tmp_path: Path) -> None:
    array = DocumentArray([Text("a")])
    array.save_binary(tmp_path / "a.bin")
    assert DocumentArray.load_binary(tmp_path / "a.bin", show_progress=False) == array


def test_column_of_an_empty_array_without_a_type_is_an_error_that_says_so() -> None:
    with pytest.raises(PathError, match=r"without a type and without documents has no column 'text'. Make it with"):
        DocumentArray().text  # noqa: B018
    assert DocumentArray[Text]().text == []


def test_columns_go_on_inside_dicts() -> None:
    class Row(BaseDocument):
        tags: dict[str, Any] = {}

    class Group(BaseDocument):
        rows: DocumentArray[Row]

    rows = DocumentArray[Row]([Row(tags={"a": {"b": 1}}), Row(tags={"a": 2}), Row()])
    assert rows["tags.a"] == [{"b": 1}, 2, None]
    assert rows["tags.a.b"] == [1, None, None]
    assert [len(part) for part in rows[1:].split_by("tags.a").values()] == [1, 1]
    assert DocumentArray[Group]([Group(rows=rows)])["rows.tags.a"] == [[{"b": 1}, 2, None]]
    with pytest.raises(PathError, match="Row has no field 'tag'"):
        rows["tag.a"]


# --- options


def test_limit_must_be_a_whole_number() -> None:
    documents = DocumentArray([Document(embedding=np.ones(2))])
    with pytest.raises(OptionError, match="limit: expected a whole number, got 3.0"):
        documents.find(np.ones(2), limit=3.0)  # type: ignore[arg-type]


@pytest.mark.needs("scipy")
def test_sparse_matrix_sets_a_column_row_by_row() -> None:
    from scipy import sparse

    documents = DocumentArray([Document(), Document()])
    documents.embedding = sparse.coo_matrix(np.eye(2))
    assert documents[1].embedding.toarray().tolist() == [[0, 1]]


@pytest.mark.parametrize("protocol", ["protobuf-array", "pickle-array"])
def test_protocols_of_docarray_mean_those_of_quire(protocol: str) -> None:
    array = DocumentArray[Text](["a", "b"])
    data = array.to_bytes(protocol=protocol)
    assert data == array.to_bytes(protocol=protocol.removesuffix("-array"))
    assert DocumentArray[Text].from_bytes(data, protocol=protocol, allow_pickle=True) == array
