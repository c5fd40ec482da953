"""`Document` and its array with the keywords, keys and methods of DocArray 0.21."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.compat import Document, DocumentArray
from quire.errors import ColumnError, DocumentTypeError, OptionError, PathError, QueryError


@pytest.fixture
def docs() -> Any:
    first = Document(
        id="a",
        text="first",
        tags={"lang": "en", "n": {"x": 1}},
        chunks=[Document(id="a1", text="c", chunks=[Document(id="a11")]), Document(id="a2")],
        matches=[Document(id="am")],
    )
    second = Document(id="b", text="second", tags={"lang": "de"}, chunks=[Document(id="b1")])
    return DocumentArray([first, second, Document(id="c", text="third")])


# --- documents


def test_content_fills_the_field_of_its_type() -> None:
    assert Document(content="hello").text == "hello"
    assert Document(content=b"x").blob == b"x"
    assert Document(content=np.ones(2)).tensor.tolist() == [1, 1]
    assert Document(content=None).content is None
    with pytest.raises(ValueError, match="content= and text= exclude each other"):
        Document(content="a", text="b")


def test_unknown_keywords_are_tags() -> None:
    assert Document(title="x", year=3, tags={"a": 1}).tags == {"a": 1, "title": "x", "year": 3}
    assert Document(chunks=[{"title": "x"}]).chunks[0].tags == {"title": "x"}
    assert Document.from_json('{"text": "a", "title": "x"}').tags == {"title": "x"}
    assert Document.from_dict({"title": "x"}).tags == {"title": "x"}


def test_subclass_keeps_its_own_rules_for_unknown_keywords() -> None:
    class Strict(Document, extra="forbid"):
        pass

    class Titled(Document):
        title: str = ""

    with pytest.raises(ValueError, match="Strict has no field 'titel'"):
        Strict(titel="x")
    assert (Titled(title="x", more=1).title, Titled(title="x", more=1).tags) == ("x", {"more": 1})
    assert isinstance(quire.DocumentArray[Titled]([Titled(title="x", id="i")])["i"], Titled)


def test_mime_type_follows_from_the_uri() -> None:
    assert Document(uri="a/b.png").mime_type == "image/png"
    assert Document(uri="a/b.png", mime_type="x/y").mime_type == "x/y"
    assert Document(uri="a/b.unknown-suffix").mime_type is None


def test_document_is_made_of_another_document_or_a_mapping() -> None:
    source = Document(id="s", text="a", tags={"x": [1]})
    shared = Document(source)
    assert shared.identical(source)
    assert shared.tags["x"] is source.tags["x"]
    assert Document(source, copy=True).tags["x"] is not source.tags["x"]
    assert (Document(source, text="b").text, source.text) == ("b", "a")
    assert Document({"text": "a", "k": 1}).tags == {"k": 1}
    assert Document(None).text is None
    with pytest.raises(DocumentTypeError, match="takes a document or a mapping without a name, got str 'hello'"):
        Document("hello")  # type: ignore[arg-type]


def test_chunks_have_the_id_of_their_parent(docs: Any) -> None:
    assert docs[0].chunks.parent_id == ["a", "a"]
    docs[0].chunks.append(Document())
    docs[0].chunks.extend([Document(), {"text": "x"}])
    docs[0].chunks.insert(0, Document())
    assert docs[0].chunks.parent_id == ["a"] * 6
    docs[0].chunks[0] = Document()
    assert docs[0].chunks[0].parent_id == "a"
    assert docs[0].matches.parent_id == [None]
    kept = Document(parent_id="other")
    docs[0].chunks.append(kept)
    assert kept.parent_id == "other"
    loose = docs[0].chunks[1:]
    loose.append(Document())
    assert loose[-1].parent_id is None


def test_assigned_chunks_have_the_id_of_their_parent() -> None:
    parent = Document(id="p")
    parent.chunks = [Document(), Document(parent_id="q")]
    assert parent.chunks.parent_id == ["p", "q"]
    parent.chunks = DocumentArray([Document(text="a")])
    assert parent.chunks.parent_id == ["p"]
    parent.chunks += [Document()]
    assert parent.chunks.parent_id == ["p", "p"]


def test_parents_are_not_kept_alive_or_copied_by_chunks(docs: Any) -> None:
    chunks = Document(chunks=[Document()]).chunks
    chunks.append(Document())  # the parent is gone
    assert chunks[-1].parent_id is None
    assert copy.deepcopy(docs) == docs
    assert pickle.loads(pickle.dumps(docs)).identical(docs)


def test_fields_are_listed_and_reset() -> None:
    document = Document(id="i", text="a", title="x", weight=0.5)
    assert document.non_empty_fields == ("text", "tags", "weight")
    document.pop("text", "weight")
    assert document.non_empty_fields == ("tags",)
    with pytest.raises(PathError, match="Document has no field 'txt'. Did you mean 'text'"):
        document.pop("txt")
    document.clear()
    assert (document.id, document.tags, document.non_empty_fields) == ("i", {}, ())
    assert "chunks" in Document(chunks=[Document()]).non_empty_fields


# --- the class of the array


def test_array_of_documents_is_the_array_of_the_compatibility_module() -> None:
    assert DocumentArray is quire.DocumentArray[Document]
    assert isinstance(Document().chunks, DocumentArray)
    assert not hasattr(quire.DocumentArray[quire.Text], "flatten")
    assert not hasattr(quire.DocumentArray, "flatten")


def test_array_is_made_of_documents_mappings_or_one_of_them() -> None:
    assert len(DocumentArray()) == len(DocumentArray(None)) == 0
    assert len(DocumentArray(Document())) == len(DocumentArray({"text": "a"})) == 1
    assert DocumentArray().text == []
    assert DocumentArray().embeddings is None


def test_array_survives_every_form(docs: Any, tmp_path: Path) -> None:
    docs.save_binary(tmp_path / "docs.bin")
    forms = (
        DocumentArray.from_bytes(docs.to_bytes()),
        quire.DocumentArray.from_bytes(docs.to_bytes()),
        DocumentArray.load_binary(tmp_path / "docs.bin"),
        DocumentArray.from_json(docs.to_json()),
        DocumentArray.from_ndjson(text=docs.to_ndjson()),
        DocumentArray.from_protobuf(docs.to_protobuf()),
        docs.stack().unstack(),
    )
    for form in forms:
        assert type(form) is DocumentArray
        assert form.identical(docs)
        assert form["@c"].id == ["a1", "a2", "b1"]


# --- keys


def test_documents_are_found_by_id(docs: Any) -> None:
    assert docs["b"] is docs[1]
    assert docs[["c", "a"]].id == ["c", "a"]
    assert "b" in docs
    assert "x" not in docs
    assert docs[1] in docs
    with pytest.raises(PathError, match="has the id 'x'"):
        docs["x"]


def test_unknown_method_is_not_taken_for_an_id(docs: Any) -> None:
    with pytest.raises(PathError, match="has no method 'reduce_all', and Document no such field"):
        docs.reduce_all([docs])
    with pytest.raises(PathError, match="Did you mean 'traverse_flat'"):
        docs.traverse_flatt("c")
    assert not hasattr(docs, "a")  # an id, which is a key: docs['a']
    assert docs.tags__lang == docs["tags.lang"]


def test_attributes_are_read_by_rows_and_names(docs: Any) -> None:
    assert docs[:, "text"] == ["first", "second", "third"]
    assert docs[:, ("id", "text")] == [["a", "b", "c"], ["first", "second", "third"]]
    assert docs[0, "text"] == docs["a", "text"] == "first"
    assert docs["a", ["id", "tags.lang"]] == ["a", "en"]
    assert docs[["c", "a"], "id"] == ["c", "a"]
    assert docs[1:, "id"] == ["b", "c"]
    assert docs["@c", "id"] == ["a1", "a2", "b1"]
    assert docs[[True, False, True], "id"] == ["a", "c"]
    with pytest.raises(PathError, match="Document has no field 'txt'. Did you mean 'text'"):
        docs[:, "txt"]
    with pytest.raises(PathError, match="a pair of rows and attributes is written as"):
        docs[0, 1, 2]


def test_columns_go_on_inside_tags(docs: Any) -> None:
    assert docs["tags.lang"] == docs["tags__lang"] == docs[:, "tags__lang"] == ["en", "de", None]
    assert docs["tags.n.x"] == [1, None, None]
    assert {key: part.id for key, part in docs.split_by("tags.lang").items()} == {"en": ["a"], "de": ["b"], None: ["c"]}
    assert {key: part.id for key, part in docs.split_by_tag("lang").items()} == {"en": ["a"], "de": ["b"]}
    assert docs.filter({"tags__lang": "de"}).id == docs.find({"tags.lang": "de"}).id == ["b"]


def test_attributes_are_set_by_rows_and_names(docs: Any) -> None:
    docs[0, "text"] = "x"
    docs["b", "tags.lang"] = "fr"
    docs[["c"], "text"] = ["z"]
    assert (docs.text, docs["tags.lang"]) == (["x", "second", "z"], ["en", "fr", None])
    docs[:, ("text", "tags__n__x")] = [["1", "2", "3"], [4, 5, 6]]
    assert (docs.text, docs["tags.n.x"]) == (["1", "2", "3"], [4, 5, 6])
    docs["@c", "text"] = ["p", "q", "r"]
    assert docs["@c"].text == ["p", "q", "r"]
    docs["tags.k"] = [1, 2, 3]
    assert docs["tags.k"] == [1, 2, 3]
    docs["a", ("text", "weight")] = ["y", 0.5]
    assert (docs[0].text, docs[0].weight) == ("y", 0.5)


@pytest.mark.parametrize(("key", "values"), [("text", ["x"]), ("tags.k", [1]), (("text", "uri"), [["x"] * 3])])
def test_values_that_do_not_fit_the_rows_are_an_error(docs: Any, key: Any, values: Any) -> None:
    with pytest.raises(ColumnError, match="1 values|1 columns"):
        docs[:, key] = values
    assert docs.text == ["first", "second", "third"]


def test_documents_are_replaced_and_deleted_by_id(docs: Any) -> None:
    docs["b"] = Document(id="new")
    assert docs.id == ["a", "new", "c"]
    docs[["a", "c"]] = [Document(id="x"), Document(id="y")]
    assert docs.id == ["x", "new", "y"]
    del docs["new"]
    assert docs.id == ["x", "y"]
    del docs[["x", "y"]]
    assert len(docs) == 0
    with pytest.raises(PathError, match="has the id 'x'"):
        del docs["x"]


def test_nested_documents_and_attributes_are_deleted(docs: Any) -> None:
    del docs["@c"]
    assert docs["@c,m"].id == ["am"]
    del docs[0, "text"]
    del docs[:, ("text", "tags")]
    assert (docs.text, docs.tags) == ([None] * 3, [{}] * 3)
    del docs[...]
    assert len(docs) == 0


def test_traversals_cannot_be_replaced(docs: Any) -> None:
    for key in (..., "@c"):
        with pytest.raises(PathError, match="is a new array of nested documents: set their attributes"):
            docs[key] = []


# --- nested documents


@pytest.mark.parametrize(
    ("path", "ids"),
    [
        ("@r", "a b c"),
        ("@c", "a1 a2 b1"),
        ("c", "a1 a2 b1"),
        ("@m", "am"),
        ("@c,m", "a1 a2 b1 am"),
        ("@r, c", "a b c a1 a2 b1"),
        ("@cc", "a11"),
        ("@c[:1]", "a1 b1"),
        ("@c[-1]", "a2 b1"),
        ("@c[1]", "a2"),
        ("@r[1:]c", "b1"),
        ("@r[0]c[0]c", "a11"),
    ],
)
def test_traversals_collect_nested_documents(docs: Any, path: str, ids: str) -> None:
    assert docs.traverse_flat(path).id == ids.split()
    if path.startswith("@"):
        assert docs[path].id == ids.split()


@pytest.mark.parametrize("path", ["@", "@x", "@c,", "@c[]", "@c[1", "@rx"])
def test_text_that_is_no_traversal_is_an_error(docs: Any, path: str) -> None:
    with pytest.raises(QueryError, match="is not a traversal|the slice is empty"):
        docs[path]


def test_flatten_keeps_the_documents_as_they_are(docs: Any) -> None:
    assert docs.flatten().id == docs[...].id == ["a11", "a1", "a2", "am", "a", "b1", "b", "c"]
    assert docs["@c"].id == ["a1", "a2", "b1"]
    assert docs.flatten()[0] is docs[0].chunks[0].chunks[0]


# --- columns by the names of DocArray


def test_columns_have_the_names_of_docarray(docs: Any) -> None:
    assert docs.texts == docs.contents == ["first", "second", "third"]
    docs.texts = ["x", "y", "z"]
    docs.embeddings = np.eye(3)
    docs.tensors = np.ones((3, 2, 2))
    assert (docs.text, docs.embeddings.shape, docs[:, "tensor"].shape) == (["x", "y", "z"], (3, 3), (3, 2, 2))
    docs.embeddings = None
    assert docs.embeddings is None
    docs[0].embedding = np.ones(2)
    assert len(docs.embeddings) == 3  # a list: only one document has one
    docs.contents = ["p", b"q", "r"]
    assert docs.blobs == [None, b"q", None]
    with pytest.raises(ColumnError, match="3 documents, got 1 values"):
        docs.contents = ["p"]


# --- search


@pytest.fixture
def vectors() -> Any:
    return DocumentArray(Document(id=str(i), embedding=np.eye(4)[i] + i / 10, tags={"n": i}) for i in range(4))


def test_match_fills_matches_with_distances(vectors: Any) -> None:
    queries = DocumentArray(Document(id=str(i), embedding=np.eye(4)[i]) for i in range(2))
    queries.match(vectors, limit=2)
    for query in queries:
        expected = vectors.find(query.embedding, limit=2)
        assert query.matches.id == expected.documents.id
        assert query.matches["scores.cosine"] == pytest.approx(1 - expected.scores)
    assert vectors[0].scores == {}  # matches are copies
    assert queries["@m"].id == [*queries[0].matches.id, *queries[1].matches.id]


@pytest.mark.parametrize("metric", ["cosine", "euclidean", "sqeuclidean", "dot"])
def test_matches_are_ordered_by_distance(vectors: Any, metric: Any) -> None:
    vectors.match(metric=metric, metric_name="d", limit=None, exclude_self=True)
    for document in vectors:
        distances = document.matches["scores.d"]
        assert len(distances) == 3
        assert distances == sorted(distances)
        assert document.id not in document.matches.id


@pytest.mark.needs("scipy")
def test_search_of_sparse_embeddings_is_an_error_that_says_so() -> None:
    from scipy.sparse import csr_matrix

    docs: Any = DocumentArray.empty(3)
    docs.embeddings = csr_matrix(np.eye(3))
    with pytest.raises(QueryError, match=r"search needs dense vectors, got .*toarray\(\)"):
        docs.match(docs)
    with pytest.raises(QueryError, match="search needs dense vectors"):
        docs.find(np.ones(3))


def test_match_takes_a_filter_and_a_function(vectors: Any) -> None:
    def manhattan(queries: Any, rows: Any) -> Any:
        return np.abs(queries[:, None] - rows[None]).sum(-1)

    vectors.match(vectors, metric=manhattan, filter={"tags.n": {"$gte": 2}}, limit=1)
    assert vectors["@m"].id == ["2", "2", "2", "3"]
    assert vectors[2].matches[0].scores == {"manhattan": 0}
    with pytest.raises(QueryError, match=r"returned distances of shape \(4,\): it gets 4 queries and 4 vectors"):
        vectors.match(metric=lambda queries, rows: np.zeros(len(queries)))  # noqa: ARG005


def test_find_takes_several_queries_and_a_filter(vectors: Any) -> None:
    several = vectors.find(np.eye(4)[:2], limit=1)
    assert [result.documents.id for result in several] == [["0"], ["1"]]
    assert [result.documents.id for result in vectors.find(vectors[:2], limit=1)] == [["0"], ["1"]]
    assert vectors.find(vectors[3], limit=1).documents.id == ["3"]
    assert vectors.find(np.eye(4)[0], filter={"tags.n": {"$gt": 2}}).documents.id == ["3"]
    assert vectors.find([1.0, 0, 0, 0], metric="sqeuclidean", limit=1).scores == pytest.approx([0])


# --- other sources


def test_tags_are_compared_with_other_tags() -> None:
    docs: Any = DocumentArray([Document(id="a", h=3, w=2), Document(id="b", h=1, w=2), Document(id="c", h=1)])
    assert docs.find({"tags__h": {"$gt": "{tags__w}"}}).id == ["a"]
    assert docs.filter({"weight": "{tags.none}"}).id == ["a", "b", "c"]


def test_lines_become_documents(tmp_path: Path) -> None:
    assert DocumentArray.from_lines(["a", "b\n"], line_format="text").text == ["a", "b"]
    assert DocumentArray.from_lines(['{"text": "a", "k": 1}']).tags == [{"k": 1}]
    for name, content in {
        "a.txt": "x\ny\n",
        "a.csv": "text\nx\ny\n",
        "a.jsonl": '{"text":"x"}\n{"text":"y"}\n',
    }.items():
        (tmp_path / name).write_text(content)
        assert DocumentArray.from_lines(filepath=str(tmp_path / name)).text == ["x", "y"]
        assert DocumentArray.from_lines(filepath=str(tmp_path / name), size=1).text == ["x"]
    with pytest.raises(OptionError, match="either lines or filepath"):
        DocumentArray.from_lines()
    with pytest.raises(OptionError, match="line_format='xml'"):
        DocumentArray.from_lines(["a"], line_format="xml")  # type: ignore[arg-type]


def test_arrays_become_documents() -> None:
    assert DocumentArray.from_ndarray(np.arange(6).reshape(3, 2)).tensors.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert DocumentArray.from_ndarray(np.arange(6).reshape(3, 2), axis=1).tensors.shape == (2, 3)
    assert len(DocumentArray.from_ndarray(np.ones((9, 2)), size=4, seed=1)) == 4
    with pytest.raises(DocumentTypeError, match="an array with at least one axis"):
        DocumentArray.from_ndarray(np.array(3))


def test_unknown_columns_of_tables_are_tags() -> None:
    assert DocumentArray.from_csv(text="text,label\na,1\n").tags == [{"label": "1"}]
    documents = DocumentArray.from_ndjson(text='{"text": "a", "label": 1}\n{"text": "b"}')
    assert documents.tags == [{"label": 1}, {}]
    assert DocumentArray.from_dict([{"text": "a", "label": 1}]).tags == [{"label": 1}]


@pytest.mark.needs("pandas")
def test_unknown_columns_of_data_frames_are_tags() -> None:
    import pandas as pd

    assert DocumentArray.from_dataframe(pd.DataFrame({"text": ["a"], "label": [1]})).tags == [{"label": 1}]


def test_vocabulary_counts_the_words_of_all_documents() -> None:
    documents = DocumentArray([Document(text="a b a"), Document(text="b c a")])
    assert documents.get_vocabulary() == {"a": 2, "b": 3, "c": 4}
    assert documents.get_vocabulary(min_freq=2) == {"a": 2, "b": 3}
