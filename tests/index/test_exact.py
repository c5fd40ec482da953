"""Exact search over stored datasets, and what an index derives from a class."""

from __future__ import annotations

from datetime import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.array import Metric
from quire.errors import DocumentTypeError, OptionError, QueryError, SchemaError, SearchError
from quire.index import DocumentIndex
from quire.typing import AnyTensor, NdArray, float32, float64, int64

METRICS: list[Metric] = ["cosine", "dot", "euclidean"]
rng = np.random.default_rng(3)


class Chunk(BaseDocument):
    vector: NdArray[float32, 3] | None = None


class Photo(BaseDocument):
    title: str
    label: int
    embedding: NdArray[float32, 6] | None = None
    chunks: DocumentArray[Chunk] = DocumentArray[Chunk]()


PHOTOS = DocumentArray[Photo](
    Photo(
        id=f"p{n}",
        title=f"{'red' if n % 2 else 'blue'} number{n}",
        label=n,
        embedding=rng.normal(size=6).astype("f4") if n % 9 else None,
        chunks=[Chunk(vector=rng.normal(size=3).astype("f4")) for _ in range(n % 3)],
    )
    for n in range(300)
)


@pytest.fixture(params=["parquet", "arrow"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    from quire.storage import open_dataset, write_dataset

    write_dataset(PHOTOS, tmp_path / "photos", document_type=Photo, format=request.param, shard_bytes=20_000)
    return open_dataset(tmp_path / "photos", Photo, cache=tmp_path / "cache")


@pytest.mark.needs("pyarrow", "xxhash")
def test_index_over_a_dataset_equals_one_in_memory(dataset: Any) -> None:
    query, inner = rng.normal(size=6), rng.normal(size=3)
    for metric in METRICS:
        stored = DocumentIndex[Photo](dataset, metric=metric)
        memory = DocumentIndex[Photo](PHOTOS, metric=metric)
        assert len(stored) == len(memory) == 300
        for where in (None, {"label": {"$gte": 250}}, {"title": {"$regex": "red"}}, lambda photo: photo.label < 40):
            calls: list[Any] = [
                lambda index, where=where: index.search(query, field="embedding", where=where, limit=12, offset=3),
                lambda index, where=where: index.search(inner, field="chunks.vector", where=where),
                lambda index, where=where: index.search_elements(inner, field="chunks.vector", where=where),
                lambda index, where=where: index.search(text="red number7 number9", text_field="title", where=where),
                lambda index, where=where: index.search(
                    query, field="embedding", text="number7", text_field="title", where=where
                ),
            ]
            for call in calls:
                result, expected = call(stored), call(memory)
                assert result.documents == expected.documents
                np.testing.assert_allclose(result.scores, expected.scores, rtol=1e-6)
            assert stored.count(where) == memory.count(where)
        assert stored.get(["p7", "x", "p250"]) == DocumentArray[Photo]([PHOTOS[7], PHOTOS[250]])


@pytest.mark.needs("pyarrow", "xxhash")
def test_index_over_a_dataset_refuses_changes(dataset: Any) -> None:
    index = DocumentIndex[Photo](dataset)
    for change in (lambda: index.upsert(PHOTOS[0]), lambda: index.delete("p1"), lambda: index.sync(PHOTOS)):
        with pytest.raises(OptionError, match="change the dataset"):
            change()
    with pytest.raises(DocumentTypeError, match="documents of Photo"):
        DocumentIndex[Chunk](dataset)


@pytest.mark.needs("pyarrow", "xxhash")
def test_sync_makes_an_index_equal_to_a_dataset(dataset: Any, tmp_path: Path) -> None:
    from quire.storage import open_dataset, write_dataset

    index = DocumentIndex[Photo](PHOTOS[:5])
    index.upsert(Photo(id="gone", title="", label=0))
    report = index.sync(dataset)
    assert (report.upserted, report.deleted, report.unchanged) == (295, 1, 5)
    changed = DocumentArray[Photo]([Photo(id="p3", title="changed", label=3), *PHOTOS[10:20]])
    write_dataset(changed, tmp_path / "other", document_type=Photo)
    report = index.sync(open_dataset(tmp_path / "other", Photo, cache=tmp_path / "cache"))
    assert (report.upserted, report.deleted, report.unchanged) == (1, 289, 10)
    assert sorted(index, key=lambda photo: photo.id) == sorted(changed, key=lambda photo: photo.id)


@pytest.mark.needs("pyarrow", "xxhash")
def test_sync_reads_only_the_changes_between_versions(tmp_path: Path) -> None:
    from quire.storage import open_dataset, write_dataset

    write_dataset(PHOTOS[:50], tmp_path / "photos", document_type=Photo)
    index = DocumentIndex[Photo]()

    def sync(**options: Any) -> tuple[int, int, int | None]:
        report = index.sync(open_dataset(tmp_path / "photos", Photo, cache=tmp_path / "cache"), **options)
        return report.upserted, report.deleted, report.unchanged

    def is_equal() -> bool:
        stored = open_dataset(tmp_path / "photos", Photo, cache=tmp_path / "cache")
        return sorted(index, key=lambda photo: photo.id) == sorted(stored, key=lambda photo: photo.id)

    assert sync() == (50, 0, 0)
    dataset = open_dataset(tmp_path / "photos", Photo, cache=tmp_path / "cache")
    dataset.upsert([Photo(id="p1", title="new", label=-1), PHOTOS[60]])
    open_dataset(tmp_path / "photos", Photo, cache=tmp_path / "cache").delete({"label": {"$gte": 45, "$lt": 50}})
    assert sync() == (2, 5, None)  # None: no other rows were read
    assert is_equal()
    assert sync() == (0, 0, None)
    index.delete("p7")
    assert sync() == (0, 0, None)
    assert sync(full=True) == (1, 0, 45)
    assert is_equal()
    index.clear()
    assert sync() == (46, 0, 0)
    part = open_dataset(tmp_path / "photos", Photo, cache=tmp_path / "cache").filter({"label": {"$lt": 10}})
    assert index.sync(part).deleted == 36  # a part of a version is compared as a whole
    assert sync() == (36, 0, 10)


@pytest.mark.needs("pyarrow", "xxhash")
def test_sync_follows_the_versions_of_a_stored_dataset(tmp_path: Path) -> None:
    from datetime import timedelta

    from quire.storage import open_dataset, write_dataset

    def check(upserted: int, deleted: int, source: Any, *, is_whole: bool = False) -> None:
        report = index.sync(source)
        assert (report.upserted, report.deleted, report.unchanged is not None) == (upserted, deleted, is_whole)
        assert sorted(photo.id for photo in index) == sorted(photo.id for photo in source)

    write_dataset(PHOTOS[:50], tmp_path / "photos", document_type=Photo)
    dataset = open_dataset(tmp_path / "photos", Photo, cache=tmp_path / "cache")
    index = DocumentIndex[Photo]()
    check(50, 0, dataset, is_whole=True)
    dataset.delete({"id": {"$in": ["p1", "p2"]}})
    dataset.update({"id": "p3"}, title="changed")
    check(1, 2, dataset)
    dataset.compact()
    write_dataset(PHOTOS[60:63], tmp_path / "photos", document_type=Photo, mode="append")
    check(3, 0, open_dataset(tmp_path / "photos", Photo, cache=tmp_path / "cache"))
    check(0, 0, open_dataset(tmp_path / "photos", Photo, cache=tmp_path / "cache"))
    check(0, 50, dataset.filter({"title": "changed"}).filter(lambda photo: photo.id == "p3"), is_whole=True)
    dataset = open_dataset(tmp_path / "photos", Photo, cache=tmp_path / "cache")
    check(50, 0, dataset, is_whole=True)
    dataset.delete({"id": "p7"})
    dataset.delete({"id": "p8"})
    dataset.cleanup(timedelta(0))
    check(0, 2, dataset, is_whole=True)


# --- what an index derives from a class


class Unsized(BaseDocument):
    embedding: NdArray


class Named(BaseDocument):
    embedding: AnyTensor["d"]


class Matrix(BaseDocument):
    embedding: NdArray[3, 4]


@pytest.mark.parametrize(
    ("document_type", "message"),
    [(Unsized, r"no fixed size: write NdArray\[256\]"), (Named, "no fixed size"), (Matrix, "2 dimensions")],
)
def test_vectors_without_a_size_are_refused_when_the_index_is_opened(document_type: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        DocumentIndex[document_type]()
    with pytest.raises(SchemaError, match=message):
        DocumentIndex[document_type](vectors=["embedding"])


def test_classes_and_places_that_are_none_are_refused() -> None:
    class Keyless(BaseDocument):
        id: ClassVar[None] = None
        embedding: NdArray[3]

    calls: list[tuple[Any, Any, str]] = [
        (DocumentIndex, SchemaError, "documents' class"),
        (DocumentIndex[Keyless], SchemaError, "field 'id'"),
        (lambda: DocumentIndex[Photo](vectors=["title"]), SchemaError, "no tensor"),
        (lambda: DocumentIndex[Photo](vectors="embedding"), OptionError, r"\['embedding'\]"),
        (lambda: DocumentIndex[Photo]("idx"), OptionError, "lance:///folder"),
        (lambda: DocumentIndex[Photo]("lance://"), OptionError, "no folder"),
        (lambda: DocumentIndex[Photo]("mysql://user:secret@host/db"), OptionError, "postgresql://"),
        (lambda: DocumentIndex[Photo]("lance:///x", name='a"; DROP TABLE b'), OptionError, "letters"),
        (lambda: DocumentIndex[Photo](name="x"), OptionError, "in memory"),
        (lambda: DocumentIndex[Photo](timeout=0), OptionError, "above 0"),
        (lambda: DocumentIndex[Photo](metric="manhattan"), QueryError, "is not a metric"),  # type: ignore[arg-type]
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message) as caught:
            call()
        assert "secret" not in str(caught.value)


def test_selected_vectors_are_indexed() -> None:
    class Two(BaseDocument):
        a: NdArray[float64, 3]
        b: NdArray[2]
        free: NdArray | None = None
        at: time | None = None

    index = DocumentIndex[Two]([Two(a=[1, 2, 3], b=[0, 1], at=time(3))], vectors=["b"])
    assert len(index.search([1.0, 1.0]).documents) == 1
    assert index.count({"at": {"$gt": time(2)}}) == 1
    with pytest.raises(QueryError, match="not in vectors="):
        index.search([1.0, 1, 1], field="a")
    both = DocumentIndex[Two]([Two(a=[1, 2, 3], b=[0, 1])])
    with pytest.raises(QueryError, match="pass field=, one of a, b"):
        both.search([1.0, 1, 1])
    with pytest.raises(QueryError, match="no fixed size"):
        both.search([1.0, 1, 1], field="free")


def test_an_index_in_memory_cannot_be_pickled() -> None:
    import pickle

    with pytest.raises(SearchError, match="open it there"):
        pickle.dumps(DocumentIndex[Photo]())


def test_closed_index_is_empty_in_memory() -> None:
    with DocumentIndex[Photo](PHOTOS[:3]) as index:
        assert "p2" in index
    assert len(index) == 0


def test_vectors_without_a_dtype_are_ranked_as_float32_and_kept_as_they_are() -> None:
    class Free(BaseDocument):
        embedding: NdArray[2]

    documents = [Free(id=dtype, embedding=np.array([1, 0.1], dtype)) for dtype in ("f2", "f4", "f8")]
    index = DocumentIndex[Free](documents)
    assert len(index.search([1, 0.1]).documents) == 3
    for document in documents:
        assert index.get(document.id).embedding.dtype == document.embedding.dtype

    class Whole(BaseDocument):
        embedding: NdArray[int64, 2]

    with pytest.raises(SchemaError, match="int64, cannot be ranked as float32"):
        DocumentIndex[Whole]()
