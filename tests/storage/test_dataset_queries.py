"""Stored datasets as collections of documents: iteration, filter, find, map, columns, data frames, arrays."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset, StreamingDataset
from quire.errors import (
    ColumnError,
    DocumentTypeError,
    FunctionError,
    MissingValueError,
    OptionError,
    PathError,
    QueryError,
    ShardError,
    StorageError,
)
from quire.storage import Split, StoredDataset, open_dataset, write_dataset
from quire.storage._layout import Layout
from quire.typing import NdArray, float32, uint8
from tests.codec.round_trips import exact
from tests.storage.sample_documents import Photo, photos
from tests.strategies import laws

pytestmark = pytest.mark.needs("pyarrow", "pandas")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(params=["parquet", "arrow"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_dataset(photos(60), tmp_path / "d", format=request.param, group_bytes=3000, shard_bytes=6000)
    return tmp_path / "d"


# --- laws


class Note(BaseDocument):
    text: str = ""
    stars: int | None = None


class Item(BaseDocument):
    number: int
    score: float | None = None
    embedding: NdArray[float32, 3] | None = None
    shaped: NdArray[float32, "n"]
    note: Note | None = None
    notes: DocumentArray[Note] = DocumentArray[Note]()


_words = st.sampled_from(["", "a", "b", "é"])
_notes = st.builds(Note, text=_words, stars=st.none() | st.integers(0, 3))
_items = st.builds(
    Item,
    number=st.integers(0, 4),
    score=st.none() | st.sampled_from([0.0, -1.0, 0.5]),
    embedding=st.none() | st.lists(st.integers(-2, 2), min_size=3, max_size=3).map(lambda v: np.array(v, np.float32)),
    shaped=st.integers(0, 3).map(lambda size: np.arange(size, dtype=np.float32)),
    note=st.none() | _notes,
    notes=st.lists(_notes, max_size=2).map(DocumentArray[Note]),
)
_columns = st.none() | st.lists(
    st.sampled_from(["number", "score", "embedding", "shaped", "note.text", "note", "notes.stars"]),
    min_size=1,
    max_size=3,
    unique=True,
)
_queries = st.sampled_from(
    [{"number": {"$gte": 2}}, {"score": None}, {"note.text": "a"}, {"$or": [{"number": 1}, {"note.text": {"$ne": ""}}]}]
)


@st.composite
def _datasets(draw: st.DrawFn, make_folder: Callable[[], Path], columns: Any = _columns) -> StoredDataset[Item]:
    """A dataset with any blocks and shards, some of the columns, and maybe only the rows of a filter."""
    path = make_folder()
    write_dataset(
        draw(st.lists(_items, max_size=12)),
        path / "d",
        document_type=Item,
        format=draw(st.sampled_from(["parquet", "arrow"])),
        group_bytes=draw(st.sampled_from([1, 150, 1 << 20])),
        shard_bytes=draw(st.sampled_from([1, 2500, 1 << 20])),
        durable=False,
    )
    where = draw(st.none() | _queries)
    return open_dataset(path / "d", Item, columns=draw(columns), where=where, cache=path / "cache")


@settings(laws, max_examples=40)
@given(data=st.data())
def test_iteration_yields_what_read_returns(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    dataset = data.draw(_datasets(lambda: tmp_path_factory.mktemp("d")))
    documents = list(dataset)
    assert exact(documents, list(dataset.read().unstack()))
    assert exact(documents, [dataset[position] for position in range(len(dataset))])
    assert exact(documents, list(pickle.loads(pickle.dumps(dataset))))
    assert exact(documents, list(DocumentArray[Item](dataset)))
    assert set(map(type, documents)) <= {Item}


@settings(laws, max_examples=40)
@given(data=st.data(), first=_queries, second=_queries)
def test_filter_selects_the_documents_that_python_selects(
    data: st.DataObject, first: Any, second: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dataset = data.draw(_datasets(lambda: tmp_path_factory.mktemp("d"), st.none()))
    documents = DocumentArray[Item](dataset)
    for query in (first, lambda item: item.number % 2 == 0):
        filtered = dataset.filter(query)
        assert isinstance(filtered, StoredDataset)
        assert exact(list(filtered), list(documents.filter(query)))
        assert exact(list(filtered.filter(second)), list(documents.filter(query).filter(second)))
        assert exact(list(filtered[:].unstack()), list(documents.filter(query)))


@settings(laws, max_examples=40)
@given(
    data=st.data(),
    metric=st.sampled_from(["dot", "euclidean"]),
    limit=st.integers(0, 5),
    queries=st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), max_size=3),
)
def test_find_returns_what_a_batch_finds(
    data: st.DataObject, metric: Any, limit: int, queries: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    dataset = data.draw(_datasets(lambda: tmp_path_factory.mktemp("d"), st.none()))
    vectors = [np.array(query, np.float32) for query in queries]
    expected = dataset.read().find_batch(vectors, metric=metric, limit=limit)
    for ours, theirs in zip(dataset.find_batch(vectors, metric=metric, limit=limit), expected, strict=True):
        assert exact(list(ours.documents), list(theirs.documents))
        assert ours.scores.tolist() == theirs.scores.tolist()
        assert ours.scores.dtype == theirs.scores.dtype


@settings(laws, max_examples=40)
@given(data=st.data())
def test_columns_are_those_of_the_batch(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    dataset = data.draw(_datasets(lambda: tmp_path_factory.mktemp("d")))
    batch = dataset.read()
    for name in batch.schema.by_name:
        column = dataset.column(name)
        assert exact(column.values(), batch.column(name).values())
        assert type(column) is type(batch.column(name))
        assert type(dataset[name]) is type(getattr(dataset, name)) is type(batch[name])
    if "note" in batch.schema.by_name:
        assert dataset["note.text"] == batch["note.text"]


@settings(laws, max_examples=20)
@given(data=st.data())
def test_dataframe_is_that_of_the_array(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    import pandas as pd

    dataset = data.draw(_datasets(lambda: tmp_path_factory.mktemp("d"), st.none()))
    expected = DocumentArray[Item](dataset).to_dataframe()
    pd.testing.assert_frame_equal(dataset.to_dataframe(), expected)


# --- iteration


def test_iteration_reads_shards_when_they_are_needed(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    rows = int(dataset.shards[0].rows)
    (folder / dataset.shards[1].name).unlink()
    documents = iter(dataset)
    assert [next(documents).number for _ in range(rows)] == list(range(rows))
    with pytest.raises(ShardError, match=re.escape(dataset.shards[1].name)):
        next(documents)


def test_iteration_keeps_few_blocks_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[Any] = []
    gather = Layout.gather

    def remember(layout: Layout, rows: Any) -> Any:
        columns = gather(layout, rows)
        blocks.append(weakref.ref(columns.columns["image"].data))  # type: ignore[attr-defined]
        return columns

    monkeypatch.setattr(Layout, "gather", remember)
    most = max(sum(block() is not None for block in blocks) for _ in open_dataset(folder, Photo))
    assert len(blocks) > 2 >= most


class Large(BaseDocument):
    pixels: NdArray[uint8, 1 << 20]


def test_large_record_batches_are_read_in_parts(tmp_path: Path) -> None:
    documents = [Large(pixels=np.full(1 << 20, number, np.uint8)) for number in range(40)]
    batch = Layout(Large.document_schema()).encode(DocumentArray[Large](documents).stack()._columns)
    with pa.ipc.new_file(tmp_path / "d.arrow", batch.schema) as file:
        file.write_batch(batch)
    dataset = open_dataset(tmp_path, Large)
    assert len(dataset.shards[0].groups) == 1
    assert [len(part) for part in dataset._row_reader.read_parts()] == [15, 15, 10]
    assert [int(document.pixels[0]) for document in dataset] == list(range(40))


def test_iteration_of_a_filtered_dataset_reads_only_row_groups_with_matches(folder: Path) -> None:
    dataset = open_dataset(folder, Photo, where={"number": {"$in": [0, 59]}})
    for shard in dataset.shards[1:-1]:
        (folder / shard.name).unlink()
    assert [photo.number for photo in dataset] == [0, 59]
    assert dataset.read().number.tolist() == [0, 59]


def test_documents_of_iteration_can_be_changed(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    for photo in dataset:
        photo.image[:] = 0
        photo.number = -1
    assert [photo.number for photo in dataset] == list(range(60))
    assert dataset[7].image.max() == 7


def _flip_a_bit(folder: Path) -> None:
    """Damage the image of photo 40."""
    for path in (*folder.glob("*.parquet"), *folder.glob("*.arrow")):
        content = path.read_bytes()
        place = content.find(bytes([40] * 192))
        if place >= 0:
            path.write_bytes(content[: place + 5] + b"\x29" + content[place + 6 :])


def test_iteration_verifies_the_columns_that_it_reads(folder: Path) -> None:
    _flip_a_bit(folder)
    with pytest.raises(ShardError, match="image"):
        list(open_dataset(folder, Photo))
    with pytest.raises(ShardError, match="image"):
        list(open_dataset(folder, Photo, where={"number": {"$gt": 38}}))
    assert len(list(open_dataset(folder, Photo, columns=["number", "meta"]))) == 60
    assert len(list(open_dataset(folder, Photo, where={"number": 1}))) == 1
    if next(folder.glob("*.arrow"), None):
        assert len(list(open_dataset(folder, Photo, verify="never"))) == 60


# --- filter


def test_filter_reads_only_the_columns_of_the_query(folder: Path) -> None:
    _flip_a_bit(folder)
    dataset = open_dataset(folder, Photo)
    assert len(dataset.filter({"meta.stamp": {"$gte": 400}})) == 20
    with pytest.raises(ShardError, match="image"):
        dataset.filter(lambda photo: photo.number == 1)
    assert len(open_dataset(folder, Photo, columns=["number"]).filter(lambda photo: photo.number == 1)) == 1


def test_filter_evaluates_functions_on_the_rows_of_the_dataset(folder: Path) -> None:
    seen: list[int] = []

    def is_odd(photo: Photo) -> bool:
        seen.append(photo.number)
        return photo.number % 2 == 1

    dataset = open_dataset(folder, Photo, columns=["number"], where={"number": {"$in": [3, 4, 57]}})
    assert [photo.number for photo in dataset.filter(is_odd)] == [3, 57]
    assert seen == [3, 4, 57]


def test_filter_takes_splits(folder: Path) -> None:
    dataset = open_dataset(folder, Photo).filter({"number": {"$lt": 30}})
    parts = [dataset.filter(Split("number", (0.5, 0.5), part)) for part in range(2)]
    assert sorted(photo.number for part in parts for photo in part) == list(range(30))


def test_filter_rejects_fields_that_the_dataset_does_not_read(folder: Path) -> None:
    dataset = open_dataset(folder, Photo, columns=["number", "meta.source"])
    assert len(dataset.filter({"meta.source": "camera 3"})) == 9
    with pytest.raises(PathError) as caught:
        dataset.filter({"meta.stamp": 30})
    assert str(caught.value) == (
        "Photo.meta.stamp is not among the columns that the dataset was opened with: number, meta.source. "
        "Add it to columns= of open_dataset()."
    )
    with pytest.raises(PathError, match="has no field 'colour'"):
        dataset.filter({"colour": 1})
    with pytest.raises(QueryError):
        dataset.filter({"number": {"$big": 1}})


def test_fields_that_were_not_read_are_errors_in_batches_and_documents(folder: Path) -> None:
    batch = open_dataset(folder, Photo, columns=["meta.source"]).read()
    for read in (lambda: batch["meta.tags"], lambda: batch.validity("meta.tags"), lambda: batch.meta.tags):
        with pytest.raises(PathError, match="tags"):
            read()
    documents = batch.unstack()
    for rows in (batch, documents):
        with pytest.raises(QueryError, match="the field 'tags' of Meta was not read"):
            rows.filter({"meta.tags": "x"})
    with pytest.raises(QueryError, match="the field 'number' of Photo was not read"):
        documents.filter({"number": {"$ne": 3}})


def test_filtered_dataset_is_written_as_another(folder: Path, tmp_path: Path) -> None:
    write_dataset(open_dataset(folder, Photo).filter({"number": {"$gte": 50}}), tmp_path / "few")
    few = open_dataset(tmp_path / "few")
    assert few.document_type is Photo
    assert exact(list(few), list(open_dataset(folder, Photo)[50:]))


# --- find


def test_find_by_document_reads_the_vectors_and_the_nearest_rows(folder: Path) -> None:
    class Vector(BaseDocument):
        number: int
        embedding: NdArray[float32, 2] | None = None

    rows = [Vector(number=n, embedding=None if n % 7 == 0 else np.array([n, 1], np.float32)) for n in range(50)]
    write_dataset(rows, folder / "vectors", document_type=Vector, group_bytes=100, shard_bytes=300)
    dataset = open_dataset(folder / "vectors", Vector)
    result = dataset.find(rows[20], metric="euclidean", limit=3)
    assert [document.number for document in result.documents] == [20, 19, 18]
    assert result.scores.tolist() == [0.0, 1.0, 2.0]
    assert dataset.filter({"number": {"$lt": 10}}).find(rows[20], metric="euclidean", limit=1).documents[0].number == 9
    assert len(dataset.filter({"number": -1}).find(rows[20]).documents) == 0
    nearest = dataset.find(rows[20]).documents
    assert np.allclose(dataset.find(rows[20]).scores, dataset.read().find(rows[20]).scores)
    assert {type(document) for document in nearest} == {Vector}
    shutil.rmtree(folder / "vectors")


def test_find_rejects_what_a_batch_rejects(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    for arguments in (([1.0, 2.0],), ([1.0], "boxes.x"), ([1.0], "number", "cosinus")):
        errors = []
        for rows in (dataset, dataset.read()):
            with pytest.raises((PathError, QueryError)) as caught:
                rows.find(arguments[0], *arguments[1:2], **dict(zip(["metric"], arguments[2:], strict=False)))  # type: ignore[attr-defined]
            errors.append(str(caught.value))
        assert errors[0] == errors[1]
    with pytest.raises(PathError, match="not among the columns"):
        open_dataset(folder, Photo, columns=["number"]).find([1.0], "boxes")


# --- map


class Name(BaseDocument):
    text: str


def _name(photo: Photo) -> Name:
    return Name(id=photo.id, text=photo.caption.upper())


def _fail_on_seven(photo: Photo) -> Photo:
    if photo.number == 7:
        raise ValueError("seven")
    return photo


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_map_yields_results_in_order(folder: Path, backend: Any) -> None:
    dataset = open_dataset(folder, Photo).filter({"number": {"$gte": 10}})
    names = DocumentArray[Name](dataset.map(_name, backend=backend, num_workers=2))
    assert names.text == [f"PHOTO {number}" for number in range(10, 60)]
    assert exact(list(names), list(DocumentArray[Photo](dataset).map(_name)))


def test_map_reads_rows_when_they_are_needed(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    (folder / dataset.shards[-1].name).unlink()
    results = dataset.map(_name, num_workers=1, window=1)
    assert next(results).text == "PHOTO 0"
    with pytest.raises(ShardError, match=re.escape(dataset.shards[-1].name)):
        list(results)


def test_map_raises_the_error_of_the_function(folder: Path) -> None:
    with pytest.raises(FunctionError, match="document 7: ValueError: seven"):
        list(open_dataset(folder, Photo).map(_fail_on_seven))
    with pytest.raises(OptionError, match="num_wrokers"):
        open_dataset(folder, Photo).map(_name, num_wrokers=2)  # type: ignore[call-arg]


def _sum_numbers(batch: DocumentBatch[Photo]) -> int:
    return int(batch.number.sum())


def test_map_batch_passes_batches_of_rows(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    assert list(dataset.map_batch(_sum_numbers, 25)) == [300, 925, 545]
    shuffled = list(dataset.map_batch(_sum_numbers, 25, shuffle=True, seed=1))
    assert shuffled == list(dataset.read().map_batch(_sum_numbers, 25, shuffle=True, seed=1))


def test_results_of_map_are_written_as_a_dataset(folder: Path, tmp_path: Path) -> None:
    write_dataset(open_dataset(folder, Photo).map(_name), tmp_path / "names", document_type=Name)
    assert open_dataset(tmp_path / "names", Name).text == [f"PHOTO {number}" for number in range(60)]


# --- columns


def test_columns_are_read_by_attribute_and_path(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    assert dataset.number.tolist() == list(range(60))
    assert dataset["meta.source"][:2] == ["camera 0", "camera 1"]
    assert dataset.meta.stamp.tolist() == list(range(0, 600, 10))
    assert isinstance(dataset.meta, DocumentBatch)
    assert dataset.image.shape == (60, 3, 8, 8)
    assert dataset.column("score").valid_rows().tolist() == [bool(n % 5) for n in range(60)]
    assert dataset[""] is dataset
    assert {"number", "filter"} <= set(dir(dataset))


def test_dir_lists_documented_names_and_fields(folder: Path) -> None:
    methods = {"column", "faults", "filter", "find", "find_batch", "iter_batches", "map", "map_batch", "narrow"}
    methods |= {"null_count", "push_to_hub", "read", "sample", "split", "summary", "take", "to_dataframe", "verify"}
    methods |= {"add_columns", "cleanup", "compact", "delete", "diff", "tag", "untag", "update", "upsert", "versions"}
    attributes = {"document_type", "folder", "nbytes", "options", "schema", "shards", "version"}
    names = {name for name in dir(open_dataset(folder, Photo)) if not name.startswith("_")}
    assert names == methods | attributes | set(Photo.model_fields)


def test_fields_named_like_internal_attributes_are_columns(tmp_path: Path) -> None:
    class Layer(BaseDocument):
        rows: int
        layout: str

    write_dataset([Layer(rows=n, layout="dense") for n in range(3)], tmp_path, document_type=Layer)
    dataset = open_dataset(tmp_path, Layer)
    assert (dataset.rows.tolist(), list(dataset.layout)) == ([0, 1, 2], ["dense"] * 3)


def test_only_the_column_is_read(folder: Path) -> None:
    _flip_a_bit(folder)
    dataset = open_dataset(folder, Photo)
    assert len(dataset.caption) == 60
    with pytest.raises(ShardError, match="image"):
        _ = dataset.image


def test_unknown_columns_are_errors_with_a_suggestion(folder: Path) -> None:
    dataset = open_dataset(folder, Photo, columns=["number", "meta.source"])
    with pytest.raises(PathError, match="Did you mean 'number'"):
        _ = dataset.numbr
    with pytest.raises(PathError, match="has no method 'filtr'.*Did you mean 'filter'"):
        _ = dataset.filtr
    with pytest.raises(PathError, match="not among the columns"):
        _ = dataset.image
    with pytest.raises(PathError, match="not among the columns"):
        dataset.column("meta.stamp")
    with pytest.raises(PathError, match="whole batch"):
        dataset.column("")
    with pytest.raises(AttributeError, match="'StoredDataset\\[Photo\\]' object has no attribute '_nothing'"):
        _ = dataset._nothing
    assert not hasattr(dataset, "colour")


# --- arrays and datasets in memory


class Picture(BaseDocument):
    number: int
    image: NdArray[uint8, 3, 8, 8]


class Titled(Picture):
    title: str = "untitled"


class Priced(Picture):
    price: float


@pytest.fixture
def pictures(tmp_path: Path) -> StoredDataset[Picture]:
    documents = [Picture(number=n, image=np.full((3, 8, 8), n, np.uint8)) for n in range(6)]
    write_dataset(documents, tmp_path / "pictures")
    return open_dataset(tmp_path / "pictures", Picture)


def test_array_takes_a_dataset(pictures: StoredDataset[Picture]) -> None:
    array = DocumentArray[Picture](pictures.filter({"number": {"$lt": 3}}))
    assert type(array) is DocumentArray[Picture]
    assert array.number == [0, 1, 2]
    array.extend(pictures)
    assert len(array + pictures) == 15  # type: ignore[arg-type]
    assert len(DocumentArray(pictures)) == 6
    assert DocumentBatch[Picture](pictures).number.tolist() == list(range(6))


def test_array_of_a_later_version_follows_schema_evolution(pictures: StoredDataset[Picture]) -> None:
    array = DocumentArray[Titled](pictures)
    assert {type(document) for document in array} == {Titled}
    assert array.title == ["untitled"] * 6

    again: Any = type(
        "Picture",
        (BaseDocument,),
        {"__annotations__": {"number": float}, "__module__": __name__, "__qualname__": "Picture"},
    )
    assert DocumentArray[again](pictures.filter({"number": 3})).number == [3.0]  # the class was defined again
    with pytest.raises(ShardError, match="price"):
        DocumentArray[Priced](pictures)


def test_array_keeps_documents_of_subclasses(tmp_path: Path) -> None:
    write_dataset([Titled(number=1, image=np.zeros((3, 8, 8), np.uint8), title="t")], tmp_path / "titled")
    [document] = DocumentArray[Picture](open_dataset(tmp_path / "titled", Titled))
    assert type(document) is Titled
    assert document.title == "t"


def test_other_classes_are_rejected_before_anything_is_read(pictures: StoredDataset[Picture]) -> None:
    (Path(pictures.folder.url) / pictures.shards[0].name).unlink()
    for make in (DocumentArray[Photo], MultiModalDataset[Photo], DocumentBatch[Photo]):
        with pytest.raises(DocumentTypeError) as caught:
            make(pictures)  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"{make.__name__}: the dataset {pictures.folder.url} was opened as Picture, whose documents are not of "
            "Photo. To read its rows as Photo, by the rules of schema evolution, open it with document_type=Photo."
        )
    with pytest.raises(DocumentTypeError, match="was opened as Picture"):
        StreamingDataset[Photo](pictures, 2)  # type: ignore[arg-type]


class Row(BaseDocument):
    number: int


class StrictRow(Row, extra="forbid"):
    pass


def test_columns_that_a_later_version_forbids_are_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"number": [1, 2], "other": ["a", "b"]}), tmp_path / "rows.parquet")
    rows = open_dataset(tmp_path, Row)
    assert DocumentArray[Row](rows).number == [1, 2]
    with pytest.raises(StorageError, match="StrictRow has no field 'other'"):
        DocumentArray[StrictRow](rows)


@pytest.mark.needs("torch")
def test_training_dataset_takes_a_dataset(pictures: StoredDataset[Picture]) -> None:
    dataset = MultiModalDataset[Picture](pictures.filter({"number": {"$ne": 2}}), {"image": lambda image: image // 2})
    assert dataset[[1, 4]].__getitems__([0, 1]).number.tolist() == [1, 5]
    assert int(dataset[4].image.max()) == 2
    assert [document.number for document in MultiModalDataset[Titled](pictures)] == list(range(6))
    narrow = MultiModalDataset[Picture](pictures.narrow(["number"]), framework="numpy")
    assert narrow.__getitems__([5]).number.tolist() == [5]
    with pytest.raises(OptionError, match="has no rows"):
        MultiModalDataset[Picture](pictures.filter({"number": -1}))


@pytest.mark.needs("torch")
def test_training_dataset_of_a_dataset_keeps_its_policies(folder: Path) -> None:
    with pytest.raises(MissingValueError, match="score"):
        MultiModalDataset[Photo](open_dataset(folder, Photo))
    dataset = MultiModalDataset[Photo](open_dataset(folder, Photo), missing={"score": -1.0}, shapes="pad")
    expected = MultiModalDataset[Photo](photos(60), missing={"score": -1.0}, shapes="pad")
    ours, theirs = dataset.__getitems__([3, 5, 58]), expected.__getitems__([3, 5, 58])
    assert ours.score.tolist() == theirs.score.tolist()
    assert ours.boxes.tolist() == theirs.boxes.tolist()
    with pytest.raises(ColumnError):
        MultiModalDataset[Photo](open_dataset(folder, Photo), missing="mask").__getitems__([0, 1, 2])


# --- processes


def _count_rows(dataset: StoredDataset[Photo]) -> list[int]:
    return [photo.number for photo in dataset]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_datasets_are_iterated_in_other_processes(folder: Path, method: str) -> None:
    dataset = open_dataset(folder, Photo, columns=["number"]).filter({"number": {"$gte": 20}})
    parts = [dataset.filter(Split("number", (0.5, 0.5), part)) for part in range(2)]
    assert next(iter(dataset)).number == 20
    with multiprocessing.get_context(method).Pool(2) as pool:  # type: ignore[attr-defined]
        numbers = pool.map(_count_rows, parts)
    assert sorted(number for part in numbers for number in part) == list(range(20, 60))
    assert all(numbers)
