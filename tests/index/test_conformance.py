"""What every engine of an index does in the same way."""

# ruff: noqa: DTZ001 - naive times are what is tested

from __future__ import annotations

import asyncio
import threading
from datetime import date, datetime, timedelta, timezone
from enum import Enum
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray
from quire.errors import EncodeError, OptionError, PathError, QueryError, SchemaError
from quire.index import AsyncDocumentIndex, DocumentIndex
from quire.typing import NdArray

rng = np.random.default_rng(7)


class Color(Enum):
    RED = "red"
    BLUE = 2


class Chunk(BaseDocument):
    text: str = ""
    embedding: NdArray[4] | None = None


class Maker(BaseDocument):
    name: str
    vector: NdArray[3] | None = None


class Photo(BaseDocument):
    title: str
    embedding: NdArray[8] | None = None
    label: int | None = None
    price: float = 0.0
    sold: bool = False
    color: Color = Color.RED
    taken: datetime | None = None
    day: date | None = None
    key: UUID | None = None
    path: PurePosixPath | None = None
    tags: list[str] = []
    maker: Maker | None = None
    chunks: DocumentArray[Chunk] = DocumentArray[Chunk]()


def photo(number: int) -> Photo:
    return Photo(
        id=f"p{number}",
        title=f"{'red car' if number % 2 else 'blue boat'} number{number}",
        embedding=rng.normal(size=8) if number % 10 else None,
        label=number if number % 7 else None,
        price=number / 4,
        sold=number % 3 == 0,
        color=Color.BLUE if number % 4 == 0 else Color.RED,
        taken=datetime(2024, 1, 1) + timedelta(days=number),
        day=date(2024, 1, 1) + timedelta(days=number),
        key=UUID(int=number),
        path=PurePosixPath(f"/photos/{number % 5}"),
        tags=["big", "old"] if number % 6 == 0 else ["small"],
        maker=Maker(name=f"m{number % 3}", vector=rng.normal(size=3)) if number % 4 else None,
        chunks=[Chunk(id=f"p{number}c{k}", text="a part", embedding=rng.normal(size=4)) for k in range(number % 4)],
    )


PHOTOS = DocumentArray[Photo]([photo(number) for number in range(60)])
QUERY = rng.normal(size=8)


def expected(where: Any, limit: int = 10, query: Any = QUERY) -> list[str]:
    return list(PHOTOS.filter(where).find(query, limit=limit).documents.id)


# --- documents


def test_documents_come_back_equal_to_what_was_stored(new_index: Any) -> None:
    index = new_index(Photo, PHOTOS)
    assert len(index) == 60
    assert sorted(index, key=lambda each: each.id) == sorted(PHOTOS, key=lambda each: each.id)
    hit = index.search(PHOTOS[3], field="embedding", limit=1).documents[0]
    assert hit == PHOTOS[3]
    assert hit.id == "p3"
    assert hit.embedding.dtype == np.float64


def test_changes_of_a_found_document_do_not_change_the_index(new_index: Any) -> None:
    mine = Photo(id="x", title="mine", embedding=np.ones(8))
    index = new_index(Photo, mine)
    mine.title = "changed"
    index.get("x").title = "changed"
    assert index.get("x").title == "mine"


def test_upsert_replaces_documents_with_the_same_id(new_index: Any) -> None:
    index = new_index(Photo, PHOTOS[:5])
    replaced = Photo(id="p2", title="green train", embedding=QUERY, chunks=[Chunk(embedding=np.ones(4))])
    assert index.upsert([replaced, Photo(id="new", title="x")]) == 2
    assert len(index) == 6
    assert index.get("p2") == replaced
    assert index.search(QUERY, field="embedding", limit=1).documents.id == ["p2"]
    assert index.search(text="green", text_field="title").documents.id == ["p2"]
    assert len(index.search_elements(np.ones(4), field="chunks.embedding", limit=100).elements) == 5


def test_upsert_keeps_the_last_of_documents_with_one_id(new_index: Any) -> None:
    index = new_index(Photo, [Photo(id="x", title="first"), Photo(id="x", title="second")])
    assert (len(index), index.get("x").title) == (1, "second")


@pytest.mark.parametrize("bad", ["shape", "nan", "large", "class"])
def test_upsert_of_a_bad_document_changes_nothing(new_index: Any, bad: str) -> None:
    index = new_index(Photo, PHOTOS[:3])
    wrong: Any = {
        "shape": Photo.model_construct(id="w", title="w", embedding=np.ones(7)),
        "nan": Photo(id="w", title="w", embedding=[np.nan] * 8),
        "large": Photo(id="w", title="w", embedding=[1e300] * 8),
        "class": Chunk(),
    }[bad]
    with pytest.raises(EncodeError, match=r"'w'|documents of Photo"):
        index.upsert([Photo(id="p0", title="changed"), wrong])
    assert (len(index), index.get("p0").title) == (3, PHOTOS[0].title)


def test_delete_by_id_query_and_document(new_index: Any) -> None:
    index = new_index(Photo, PHOTOS[:20])
    assert index.delete("p1") == 1
    assert index.delete("p1") == 0
    assert index.delete(["p2", "nothing"]) == 1
    assert index.delete(PHOTOS[3]) == 1
    assert index.delete({"label": {"$gte": 15}}) == 5
    assert index.delete({"tags": "old"}) == 3
    assert len(index) == 9
    assert "p1" not in index
    assert "p8" in index
    remaining = {each.id for each in index}
    result = index.search_elements(np.ones(4), field="chunks.embedding", limit=100).documents.id
    assert set(result) <= remaining
    with pytest.raises(QueryError, match="clear"):
        index.delete({})
    assert index.clear() == 9
    assert len(index) == 0


def test_get_returns_documents_in_the_order_of_ids(new_index: Any) -> None:
    index = new_index(Photo, PHOTOS[:5])
    assert index.get(["p3", "nothing", "p1"]).id == ["p3", "p1"]
    assert index.get("nothing") is None


ODD_IDS = ["it's", 'a"b', "a;DROP TABLE x;--", "ä\u2603\U0001f600", "\\", "\0\1", "%s", "{x}", "' OR 1=1 --", "a\nb"]


def test_ids_may_have_any_characters(new_index: Any) -> None:
    documents = [Photo(id=key, title=key, embedding=rng.normal(size=8)) for key in ODD_IDS]
    index = new_index(Photo, [*documents, Photo(id="other", title="other")])
    for document in documents:
        assert index.get(document.id) == document
        assert index.count({"id": document.id}) == 1
        assert index.count({"title": {"$in": [document.id]}}) == 1
        assert index.search(document.embedding, field="embedding", limit=1).documents.id == [document.id]
    for document in documents:
        assert index.delete(document.id) == 1
    assert [each.id for each in index] == ["other"]


# --- ranking


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
def test_search_ranks_and_scores_as_find_does(new_index: Any, metric: Any) -> None:
    index = new_index(Photo, PHOTOS, metric=metric)
    result = index.search(QUERY, field="embedding", limit=10)
    documents, scores = PHOTOS.find(QUERY, metric=metric, limit=10)
    assert result.documents.id == documents.id
    np.testing.assert_allclose(result.scores, scores, rtol=1e-5)


def test_zero_vectors_have_the_cosine_zero(new_index: Any) -> None:
    index = new_index(Photo, [Photo(id=str(sign), title="", embedding=np.full(8, sign, float)) for sign in (1, 0, -1)])
    result = index.search(np.ones(8), field="embedding")
    assert result.documents.id == ["1", "0", "-1"]
    np.testing.assert_allclose(result.scores, [1, 0, -1], atol=1e-6)


def test_search_batch_equals_single_searches(new_index: Any) -> None:
    index = new_index(Photo, PHOTOS)
    queries = rng.normal(size=(5, 8))
    many = index.search_batch(queries, field="embedding", where={"sold": False}, limit=4)
    single = [index.search(query, field="embedding", where={"sold": False}, limit=4) for query in queries]
    assert [result.documents.id for result in many] == [result.documents.id for result in single]
    assert index.search_batch([], field="embedding") == []


def test_pages_continue_each_other(new_index: Any) -> None:
    index = new_index(Photo, PHOTOS)
    pages = [index.search(QUERY, field="embedding", limit=7, offset=start).documents.id for start in (0, 7, 14)]
    assert [key for page in pages for key in page] == expected({}, limit=21)
    texts = [index.search(text="car", text_field="title", limit=7, offset=start).documents.id for start in (0, 7)]
    assert len({key for page in texts for key in page}) == 14
    both = [
        index.search(QUERY, field="embedding", text="car", text_field="title", limit=5, offset=start).documents.id
        for start in (0, 5)
    ]
    assert len({key for page in both for key in page}) == 10


def test_limit_above_the_number_of_rows_returns_all(new_index: Any) -> None:
    index = new_index(Photo, PHOTOS[:3])
    assert len(index.search(QUERY, field="embedding", limit=1000).documents) == 2  # one has no vector
    assert len(index.search(QUERY, field="embedding", limit=10, offset=50).documents) == 0
    assert len(index.search(QUERY, field="embedding", limit=0).documents) == 0


def test_empty_index_finds_nothing(new_index: Any) -> None:
    index = new_index(Photo)
    assert len(index) == 0
    assert len(index.search(QUERY, field="embedding").documents) == 0
    assert len(index.search(text="car", text_field="title").documents) == 0
    assert len(index.search_elements(np.ones(4), field="chunks.embedding").elements) == 0
    assert index.delete({"label": 3}) == 0
    index.optimize()


def test_rows_are_found_at_once_also_after_optimize(new_index: Any) -> None:
    index = new_index(Photo, PHOTOS[:30]).optimize()
    index.search(text="car", text_field="title")
    index.upsert([Photo(id="new", title="zebra car", embedding=QUERY)])
    assert index.search(QUERY, field="embedding", limit=1).documents.id == ["new"]
    assert index.search(text="zebra", text_field="title").documents.id == ["new"]
    index.delete("new")
    assert "new" not in index.search(QUERY, field="embedding", limit=5).documents.id


# --- filters

WHERES: list[Any] = [
    {"label": {"$lt": 20}},
    {"label": {"$lt": 20.5}},
    {"label": {"$gt": -float("inf")}},
    {"label": None},
    {"label": {"$ne": None}},
    {"label": {"$exists": False}},
    {"label": {"$in": [3, 5, None]}},
    {"label": {"$nin": [3, 5]}},
    {"label": 2**70},
    {"price": {"$gte": 2.5, "$lte": 7}},
    {"price": {"$gt": 1e300}},
    {"sold": True, "label": {"$not": {"$gt": 30}}},
    {"$or": [{"sold": True}, {"title": "red car number5"}]},
    {"$nor": [{"sold": True}, {"price": {"$gt": 10}}]},
    {"$or": []},
    {"color": Color.BLUE},
    {"color": "red"},
    {"color": {"$in": [2, "red"]}},
    {"taken": {"$gte": datetime(2024, 1, 10), "$lt": datetime(2024, 2, 1, 12)}},
    {"day": {"$lte": date(2024, 1, 20)}},
    {"day": "2024-01-20"},
    {"key": UUID(int=9)},
    {"path": "/photos/3"},
    {"title": {"$gt": "red"}},
    {"title": {"$regex": "number[12]"}},
    {"tags": "old"},
    {"tags": {"$size": 2}, "label": {"$gt": 10}},
    {"$or": [{"tags": "old"}, {"label": 5}]},
    {"maker.name": "m1"},
    {"maker.name": {"$ne": "m1"}},
    {"maker": None},
    {"chunks": {"$size": 3}},
    {"chunks.id": "p7c1"},
    {"label": {"$gt": "{price}"}},
    lambda photo: photo.price > 9,
]


@pytest.fixture
def photos(new_index: Any) -> Any:
    return new_index(Photo, PHOTOS)


def test_filters_are_applied_before_ranking(photos: Any) -> None:
    for where in WHERES:
        result = photos.search(QUERY, field="embedding", where=where, limit=10).documents.id
        assert result == expected(where), where
        assert photos.count(where) == len(PHOTOS.filter(where)), where
        assert sorted(photos.filter(where).id) == sorted(PHOTOS.filter(where).id), where


conditions = st.one_of(
    st.tuples(
        st.sampled_from(["label", "price"]),
        st.sampled_from(["$lt", "$lte", "$gt", "$gte", "$eq", "$ne"]),
        st.one_of(st.integers(-2, 60), st.floats(-2, 60, width=16)),
    )
    .filter(lambda parts: parts[0] != "label" or parts[1] not in ("$eq", "$ne") or parts[2] == int(parts[2]))
    .map(lambda parts: {parts[0]: {parts[1]: parts[2]}}),
    st.sampled_from([{"sold": True}, {"tags": "old"}, {"maker.name": "m2"}, {"label": None}, {"color": Color.RED}]),
)
queries = st.recursive(
    conditions,
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3).map(lambda some: {"$and": some}),
        st.lists(parts, min_size=1, max_size=3).map(lambda some: {"$or": some}),
        parts.map(lambda part: {"$not": part}),
    ),
    max_leaves=6,
)


def test_any_query_selects_what_it_selects_in_an_array(photos: Any) -> None:
    @settings(max_examples=25, deadline=None, database=None)
    @given(queries)
    def check(where: Any) -> None:
        assert sorted(photos.filter(where).id) == sorted(PHOTOS.filter(where).id)
        assert photos.search(QUERY, field="embedding", where=where, limit=5).documents.id == expected(where, 5)

    check()


def test_filter_limits_and_skips(photos: Any) -> None:
    where = {"label": {"$gte": 0}}
    everything = photos.filter(where).id
    assert len(everything) == 51
    assert photos.filter(where, limit=7, offset=3).id == everything[3:10]


def test_floats_that_are_not_numbers_satisfy_no_comparison(new_index: Any) -> None:
    values = [float("nan"), float("inf"), -float("inf"), -0.0, 1.0]
    documents = DocumentArray[Photo]([Photo(id=str(n), title="", price=value) for n, value in enumerate(values)])
    index = new_index(Photo, documents)
    for where in ({"price": {"$gt": 0}}, {"price": {"$lte": 5}}, {"price": {"$gte": 0.0}}, {"price": 0.0}):
        assert sorted(index.filter(where).id) == sorted(documents.filter(where).id), where


def test_aware_and_naive_datetimes_are_not_mixed(new_index: Any) -> None:
    aware = datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=2)))
    index = new_index(Photo, [Photo(id="a", title="", taken=aware)])
    assert index.filter({"taken": datetime(2023, 12, 31, 22, tzinfo=timezone.utc)}).id == ["a"]
    for where in ({"taken": datetime(2024, 1, 1)}, {"taken": {"$lt": datetime(2024, 1, 1)}}):
        with pytest.raises(QueryError, match="time zone"):
            index.filter(where)
    assert index.filter({"taken": {"$lt": datetime(2024, 1, 1, tzinfo=timezone.utc)}}).id == ["a"]


# --- text


def test_text_finds_documents_with_any_word(photos: Any) -> None:
    result = photos.search(text="Number7, CAR!", text_field="title", limit=100)
    assert result.documents.id[0] == "p7"
    assert set(result.documents.id) == {f"p{n}" for n in range(1, 60, 2)}
    assert all(np.diff(result.scores) <= 0)
    assert len(photos.search(text="nothing", text_field="title").documents) == 0
    filtered = photos.search(text="car", text_field="title", where={"label": {"$lt": 6}}).documents.id
    assert sorted(filtered) == ["p1", "p3", "p5"]
    slow = photos.search(text="car", text_field="title", where={"tags": "small", "label": {"$lt": 6}}).documents.id
    assert sorted(slow) == ["p1", "p3", "p5"]


def test_text_of_nested_documents(photos: Any) -> None:
    assert {each.maker.name for each in photos.search(text="m2", text_field="maker.name", limit=50).documents} == {"m2"}


def test_hybrid_search_fuses_both_rankings(photos: Any) -> None:
    result = photos.search(PHOTOS[8].embedding, field="embedding", text="number7", text_field="title", limit=60)
    assert set(result.documents.id[:2]) == {"p8", "p7"}
    assert result.scores[0] <= 2 / 61
    where = {"label": {"$in": [5, 9]}}
    result = photos.search(PHOTOS[8].embedding, field="embedding", text="number5", text_field="title", where=where)
    assert result.documents.id == ["p5", "p9"]


# --- nested documents and elements


def test_vectors_of_nested_documents(photos: Any) -> None:
    assert photos.search(PHOTOS[5].maker.vector, field="maker.vector", limit=1).documents.id == ["p5"]


def test_elements_find_their_parents_or_themselves(photos: Any) -> None:
    query = PHOTOS[7].chunks[2].embedding
    assert photos.search(query, field="chunks.embedding", limit=1).documents == PHOTOS[7:8]
    result = photos.search_elements(query, field="chunks.embedding", limit=5)
    assert result.elements[0] == PHOTOS[7].chunks[2]
    assert result.elements[0].id == "p7c2"
    assert type(result.elements) is DocumentArray[Chunk]
    assert len(result.elements) == len(result.scores) == len(result.documents) == 5
    flat = DocumentArray[Chunk]([chunk for each in PHOTOS for chunk in each.chunks])
    assert result.elements.id == flat.find(query, limit=5).documents.id


def test_parents_are_distinct_and_as_many_as_asked(photos: Any) -> None:
    result = photos.search(np.ones(4), field="chunks.embedding", limit=30)
    assert len(result.documents) == len(set(result.documents.id)) == 30
    best = [max(float(chunk.embedding @ np.ones(4)) / np.linalg.norm(chunk.embedding) / 2 for chunk in each.chunks)
            for each in result.documents]  # fmt: skip
    np.testing.assert_allclose(result.scores, best, rtol=1e-5)


@pytest.mark.parametrize("where", [{"label": {"$lt": 10}}, {"tags": "small", "label": {"$lt": 10}}])
def test_filters_of_elements_are_about_their_parents(photos: Any, where: Any) -> None:
    parents = {each.id for each in PHOTOS.filter(where) if len(each.chunks)}
    result = photos.search_elements(np.ones(4), field="chunks.embedding", where=where, limit=100)
    assert set(result.documents.id) == parents
    assert set(photos.search(np.ones(4), field="chunks.embedding", where=where, limit=100).documents.id) == parents


# --- errors


def test_wrong_calls_are_errors(photos: Any) -> None:
    calls: list[tuple[Any, Any, str]] = [
        (photos.search, QueryError, "vector=, text="),
        (lambda: photos.search(QUERY, field="embeding"), PathError, "embedding"),
        (lambda: photos.search(QUERY, field="title"), PathError, "not a vector"),
        (lambda: photos.search(QUERY[:3], field="embedding"), QueryError, "3 dimensions"),
        (lambda: photos.search([np.nan] * 8, field="embedding"), QueryError, "NaN"),
        (lambda: photos.search(QUERY, field="embedding", limit=-1), QueryError, "negative"),
        (lambda: photos.search(QUERY, field="embedding", offset=-1), QueryError, "negative"),
        (lambda: photos.search(QUERY, field="embedding", where={"lable": 3}), PathError, "label"),
        (lambda: photos.search(QUERY, field="embedding", where={"label": {"$in": 3}}), QueryError, "list"),
        (lambda: photos.search(text="..."), QueryError, "text_field"),
        (lambda: photos.search(text="...", text_field="title"), QueryError, "no word"),
        (lambda: photos.search(text="car", text_field="label"), PathError, "not a text"),
        (lambda: photos.search(text="car", field="embedding"), QueryError, "no vector"),
        (lambda: photos.search_elements(QUERY, field="embedding"), QueryError, "use search"),
        (lambda: photos.upsert("p1"), TypeError, "documents of Photo"),
        (lambda: photos.upsert(Photo.model_construct(id=None, title="")), EncodeError, "id"),
    ]  # fmt: skip
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    assert len(photos) == 60


def test_other_metric_or_fields_are_refused_for_an_existing_index(engine: str, place: Any) -> None:
    if engine == "memory":
        return

    class Thing(BaseDocument):
        embedding: NdArray[4]

    class Other(BaseDocument):
        embedding: NdArray[5]

    where = place()
    DocumentIndex[Thing](**where).close()
    with pytest.raises(OptionError, match="metric='cosine'"):
        DocumentIndex[Thing](**where, metric="dot")
    with pytest.raises(SchemaError, match="embedding:4"):
        DocumentIndex[Other](**where)


# --- life


def test_an_index_keeps_its_documents(engine: str, place: Any) -> None:
    if engine == "memory":
        return
    where = place()
    with DocumentIndex[Photo](**where) as index:
        index.upsert(PHOTOS[:10])
    with DocumentIndex[Photo](**where) as index, DocumentIndex[Photo](**where) as other:
        assert len(index) == 10
        index.delete("p1")
        other.upsert(PHOTOS[10:12])
        assert len(index) == len(other) == 11


def test_async_calls_equal_the_others(new_index: Any) -> None:
    async def use() -> Any:
        index = AsyncDocumentIndex(new_index(Photo))
        await index.upsert(PHOTOS)
        many = [index.search(QUERY, field="embedding", limit=3) for _ in range(8)]
        results = await asyncio.gather(*many)
        assert len({tuple(result.documents.id) for result in results}) == 1
        assert (await index.get("p1")) == PHOTOS[1]
        assert await index.count({"sold": True}) == 20
        assert len(await index.filter({"sold": True}, limit=3)) == 3
        assert len((await index.search_elements(np.ones(4), field="chunks.embedding")).elements) == 10
        assert len(await index.search_batch([QUERY, QUERY], field="embedding")) == 2
        assert await index.delete("p1") == 1
        assert (await index.sync(PHOTOS)).upserted == 1
        await index.optimize()
        return results[0].documents.id

    assert asyncio.run(use()) == expected({}, 3)


def test_threads_search_while_others_write(new_index: Any) -> None:
    index = new_index(Photo, PHOTOS[:20])
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(5):
                result = index.search(QUERY, field="embedding", limit=5)
                assert len(result.documents) == 5
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(20, 26):
        index.upsert(PHOTOS[number])
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(index) == 26
