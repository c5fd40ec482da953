"""Rows of a dataset by number, by column and by filter, in many threads and processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import (
    OptionError,
    PathError,
    QueryError,
    RowIndexError,
    SchemaError,
    ShardError,
    StorageError,
    StorageNotFoundError,
)
from quire.storage import Split, StoredDataset, open_dataset, write_dataset
from tests.codec.round_trips import exact
from tests.storage.sample_documents import Photo, photos
from tests.strategies import laws

pytestmark = pytest.mark.needs("pyarrow")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(params=["parquet", "arrow"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_dataset(photos(60), tmp_path / "d", format=request.param, group_bytes=3000, shard_bytes=6000)
    return tmp_path / "d"


def _documents(result: Any) -> list[int]:
    return [int(number) for number in result.number]


# --- rows


def test_indexing_matches_that_of_a_list(folder: Path) -> None:
    dataset, numbers = open_dataset(folder, Photo), list(range(60))
    assert len(dataset.shards) > 2
    assert dataset[7].number == 7
    assert dataset[-1].number == 59
    assert isinstance(dataset[3:5], DocumentBatch)
    for part in (slice(None), slice(5, 50, 7), slice(None, None, -1), slice(50, 5), slice(-3, None)):
        assert _documents(dataset[part]) == numbers[part]
    assert _documents(dataset[[59, 0, 0, -2]]) == [59, 0, 0, 58]
    mask = np.arange(60) % 7 == 0
    assert _documents(dataset[mask]) == [n for n in numbers if n % 7 == 0]
    assert _documents(dataset[np.array([4, 3], np.uint8)]) == [4, 3]
    assert len(dataset[[]]) == 0
    for wrong in (60, -61, [60]):
        with pytest.raises(RowIndexError):
            dataset[wrong]


def test_iter_batches_yields_all_rows_in_order(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    assert [len(batch) for batch in dataset.iter_batches(25)] == [25, 25, 10]
    assert [n for batch in dataset.iter_batches(7) for n in _documents(batch)] == list(range(60))


def test_read_returns_all_rows_as_written(tmp_path: Path) -> None:
    documents = photos(60)
    for kind in ("parquet", "arrow"):
        write_dataset(documents, tmp_path / kind, format=kind, group_bytes=3000, shard_bytes=6000)  # type: ignore[arg-type]
        dataset = open_dataset(tmp_path / kind, Photo)
        assert exact(list(dataset.read().unstack()), list(documents))
        assert exact([dataset[n] for n in range(0, 60, 13)], list(documents)[::13])


def test_dataset_describes_itself(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    assert repr(dataset) == f"<StoredDataset[Photo] of 60 in {len(dataset.shards)} shards>"
    assert dataset.nbytes == sum((folder / shard.name).stat().st_size for shard in dataset.shards)
    assert dataset._row_reader.is_mapped == (dataset.shards[0].format == "arrow")
    with pytest.raises(SchemaError, match="Student"):
        StoredDataset(folder)


def test_missing_dataset_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StorageNotFoundError, match="no dataset here"):
            open_dataset(path)


# --- classes

_OPENS = """
import json, sys
from quire.storage import open_dataset
dataset = open_dataset(sys.argv[1])
row = dataset[5]
print(json.dumps([type(row).__name__, type(row).__module__, row.image.tolist(), row.meta.tags, row.boxes.shape,
                  row.boxes.dtype.name, str(row.score), [len(dataset), int(dataset[:].number.sum())]]))
"""


def test_dataset_without_its_class_opens_with_an_inferred_one(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _OPENS, str(folder)], capture_output=True, text=True, check=True)
    name, module, image, tags, shape, dtype, score, totals = json.loads(done.stdout)
    assert name == "Photo"
    assert module != "tests.storage.sample_documents"
    expected = photos(6)[5]
    assert (image, tags, shape) == (expected.image.tolist(), expected.meta.tags, list(expected.boxes.shape))
    assert (dtype, score, totals) == ("float32", "None", [60, sum(range(60))])


# --- columns


def test_only_selected_columns_are_read(folder: Path) -> None:
    batch = open_dataset(folder, Photo, columns=["number", "meta.source"])[[3, 9]]
    assert _documents(batch) == [3, 9]
    assert list(batch.meta.source) == ["camera 3", "camera 2"]
    assert set(batch._columns.columns) == {"number", "meta"}
    assert set(batch._columns.columns["meta"].columns.columns) == {"source"}  # type: ignore[attr-defined]
    assert set(open_dataset(folder, Photo, columns=["meta"]).read()._columns.columns) == {"meta"}


def test_unknown_columns_are_errors(folder: Path) -> None:
    with pytest.raises(PathError, match="colour"):
        open_dataset(folder, Photo, columns=["colour"])
    with pytest.raises(OptionError, match="list of paths"):
        open_dataset(folder, Photo, columns="number")


def test_damage_in_other_columns_is_not_noticed(tmp_path: Path) -> None:
    write_dataset(photos(20), tmp_path, compression={"image": "zstd"})
    [file] = tmp_path.glob("*.parquet")
    _damage(file, 0, "image")
    assert _documents(open_dataset(tmp_path, Photo, columns=["number"])[:]) == list(range(20))
    with pytest.raises(ShardError, match=file.name):
        open_dataset(tmp_path, Photo, columns=["image"]).read()


def _damage(file: Path, group: int, name: str) -> None:
    """Overwrite the pages of one column of a row group."""
    row_group = pq.read_metadata(file).row_group(group)
    column = next(c for c in map(row_group.column, range(row_group.num_columns)) if c.path_in_schema == name)
    start = column.data_page_offset if not column.has_dictionary_page else column.dictionary_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(content)


# --- filters


class Level(str, Enum):
    LOW = "zz"
    HIGH = "aa"


class Fact(BaseDocument):
    number: int
    maybe: int | None = None
    part: float = 0.0
    flag: bool = False
    text: str = ""
    day: date = date(2024, 1, 1)
    level: Level = Level.LOW
    words: list[str] = []


_facts = st.builds(
    Fact,
    number=st.integers(-3, 3) | st.sampled_from([2**53, 2**53 + 1, 2**63 - 1, -(2**63)]),
    maybe=st.none() | st.integers(0, 3),
    part=st.sampled_from([0.0, -0.0, 0.5, 1.0, float("nan"), float("inf"), float(2**53)]),
    flag=st.booleans(),
    text=st.sampled_from(["", "a", "b", "é", "\uffff", "\U00010000"]),
    day=st.dates(date(2024, 1, 1), date(2024, 1, 4)),
    level=st.sampled_from(Level),
    words=st.lists(st.sampled_from(["a", "b"]), max_size=2),
)
_operators = st.sampled_from(["$eq", "$ne", "$gt", "$gte", "$lt", "$lte"])
_values = {
    "number": st.integers(-4, 4) | st.sampled_from([2**53, 2**53 + 1, float(2**53), 0.5, True, 2**70]),
    "maybe": st.none() | st.integers(0, 3),
    "part": st.sampled_from([0, 0.0, 0.5, 1, float("nan"), float("inf"), 2**53, 2**53 + 1]),
    "flag": st.booleans() | st.sampled_from([0, 1]),
    "text": st.sampled_from(["", "a", "c", "é", "\uffff"]),
    "day": st.dates(date(2024, 1, 1), date(2024, 1, 4)),
    "level": st.sampled_from([*Level, "zz", "aa", "LOW"]),
    "words": st.sampled_from(["a", "c"]),
}


@st.composite
def _queries(draw: Any) -> dict[str, Any]:
    query: dict[str, Any] = {}
    for path in draw(st.lists(st.sampled_from(sorted(_values)), min_size=1, max_size=2, unique=True)):
        plain, many = _values[path], st.lists(_values[path], max_size=3)
        tests = st.dictionaries(_operators, plain, min_size=1, max_size=2)
        within = st.fixed_dictionaries({"$in": many}) | st.fixed_dictionaries({"$nin": many})
        query[path] = draw(plain | tests | within)
    if draw(st.booleans()):
        query = {draw(st.sampled_from(["$and", "$or", "$nor"])): [query, {"flag": draw(st.booleans())}]}
    return query


@settings(laws, max_examples=30)
@given(facts=st.lists(_facts, max_size=8), query=_queries())
def test_filter_matches_the_rows_that_documents_match(
    tmp_path_factory: pytest.TempPathFactory, facts: list[Fact], query: dict[str, Any]
) -> None:
    try:
        expected = [document.id for document in DocumentArray[Fact](facts).filter(query)]
    except QueryError:  # values that do not compare
        return
    for kind in ("parquet", "arrow"):
        path = tmp_path_factory.mktemp("facts")
        write_dataset(facts, path, document_type=Fact, format=kind, group_bytes=1)  # type: ignore[arg-type]
        dataset = open_dataset(path, Fact, where=query, cache=path / "cache")
        assert [document.id for document in dataset[:].unstack()] == expected, kind
        shutil.rmtree(path)


def test_rows_are_selected_by_query_function_or_split(folder: Path) -> None:
    dataset = open_dataset(folder, Photo, where={"meta.stamp": {"$gte": 500}, "score": {"$ne": None}})
    assert _documents(dataset[:]) == [n for n in range(50, 60) if n % 5]
    assert dataset[-1].number == 59
    assert _documents(dataset.read()) == _documents(dataset[:])
    by_function = open_dataset(folder, Photo, where=lambda document: document.number % 9 == 0, columns=["number"])
    assert _documents(by_function[:]) == list(range(0, 60, 9))
    nothing = open_dataset(folder, Photo, where={"number": -1})
    assert len(nothing) == len(nothing[:]) == len(nothing.read()) == 0
    with pytest.raises(RowIndexError):
        nothing[0]
    with pytest.raises((PathError, QueryError)):
        open_dataset(folder, Photo, where={"colour": 1})


def test_split_is_the_same_everywhere(folder: Path, tmp_path: Path) -> None:
    fractions = (0.7, 0.2, 0.1)
    parts = [_documents(open_dataset(folder, Photo, where=Split("number", fractions, n))[:]) for n in range(3)]
    assert sorted(number for part in parts for number in part) == list(range(60))
    assert len(parts[0]) > len(parts[1]) > len(parts[2])
    write_dataset(photos(60)[::-1], tmp_path / "other", format="arrow")
    again = open_dataset(tmp_path / "other", Photo, where=Split("number", fractions, 1))
    assert sorted(_documents(again[:])) == parts[1]
    for wrong in (((0.5, 0.6), 0), ((0.5,), 1), ((-0.1, 0.5), 0), ((), 0)):
        with pytest.raises(OptionError):
            Split("number", *wrong)


def test_row_groups_ruled_out_by_statistics_are_not_read(tmp_path: Path) -> None:
    write_dataset(photos(80), tmp_path, group_bytes=4000)
    [file] = tmp_path.glob("*.parquet")
    groups = [pq.read_metadata(file).row_group(n).num_rows for n in range(pq.read_metadata(file).num_row_groups)]
    assert len(groups) > 3
    for name in ("number", "meta.stamp", "caption"):
        _damage(file, 2, name)
    start, end = sum(groups[:2]), sum(groups[:3])

    def matching_rows(query: dict[str, Any]) -> list[int]:
        rows = open_dataset(tmp_path, Photo, where=query)._row_reader.rows
        assert rows is not None
        return rows.tolist()

    assert matching_rows({"number": {"$lt": start}}) == list(range(start))
    assert matching_rows({"meta.stamp": {"$gte": end * 10}}) == list(range(end, 80))
    assert matching_rows({"number": {"$in": [1, end]}}) == [1, end]
    assert matching_rows({"$and": [{"number": 3}, {"caption": "photo 3"}]}) == [3]
    with pytest.raises(ShardError, match=file.name):
        matching_rows({"number": {"$lte": start}})


def test_rows_of_a_query_are_computed_once(folder: Path) -> None:
    query = {"number": {"$gt": 50}}
    assert len(open_dataset(folder, Photo, where=query)) == 9
    for file in (*folder.glob("*.parquet"), *folder.glob("*.arrow")):
        file.unlink()
    assert len(open_dataset(folder, Photo, where=query)) == 9
    with pytest.raises(ShardError):
        open_dataset(folder, Photo, where={"number": {"$gt": 51}})


def test_added_rows_are_filtered(folder: Path) -> None:
    query = {"number": {"$gt": 50}}
    assert len(open_dataset(folder, Photo, where=query)) == 9
    write_dataset(photos(5, 60), folder, mode="append")
    assert len(open_dataset(folder, Photo, where=query)) == 14


# --- threads and processes


def _read_some(dataset: StoredDataset[Photo], rows: list[int]) -> list[int]:
    return _documents(dataset[rows])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_pickled_dataset_is_read_in_other_processes(folder: Path, method: str) -> None:
    dataset = open_dataset(folder, Photo, columns=["number", "meta.tags"], where={"number": {"$gte": 10}})
    assert dataset[0].number == 10
    context: Any = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert pool.apply(_read_some, (dataset, [5, 0, -1])) == [15, 10, 59]


class Hue(Enum):
    RED = 1


class Painted(BaseDocument):
    hue: Hue
    number: int


def test_pickled_dataset_is_small_and_opens_nothing(tmp_path: Path) -> None:
    write_dataset([Painted(hue=Hue.RED, number=n) for n in range(50)], tmp_path, format="arrow")
    dataset = open_dataset(tmp_path, Painted)
    assert dataset[2].hue is Hue.RED
    content = pickle.dumps(dataset)
    assert len(content) < 2000
    assert pickle.loads(content)[3].hue is Hue.RED


def test_many_threads_read_one_dataset(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)

    def some(seed: int) -> bool:
        rows = np.random.default_rng(seed).integers(0, 60, 20)
        return _documents(dataset[rows]) == rows.tolist()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(some, range(60)))


def test_shards_are_closed_when_too_many_are_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.storage._row_reader._MAX_OPEN", 3)
    dataset = open_dataset(folder, Photo)

    def some(seed: int) -> bool:
        rows = np.random.default_rng(seed).integers(0, 60, 3)
        return _documents(dataset[rows]) == rows.tolist()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(some, range(60)))


def test_forked_child_reads_while_threads_of_the_parent_read(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            dataset[np.arange(60)]

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if _documents(dataset[[59, 1]]) == [59, 1] else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()


def test_lock_held_during_a_fork_does_not_block_the_child(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with dataset._row_reader._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if dataset[5].number == 5 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done.set()
    thread.join()


def test_fork_waits_for_a_shard_being_opened(folder: Path) -> None:
    dataset = open_dataset(folder, Photo)
    begun, order = threading.Event(), list[str]()
    really_open = dataset._row_reader.shard_reader.open

    def slowly(shard: Any) -> Any:
        begun.set()
        time.sleep(0.3)  # for a fork that does not wait
        order.append("opened")
        return really_open(shard)

    dataset._row_reader.shard_reader.open = slowly  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: dataset[[0]])
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if order else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- one file


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "one.parquet"
    pq.write_table(pa.table({"number": [1, 2, 3]}), path)
    yield path


def test_single_file_is_a_dataset(table: Path) -> None:
    pq.write_table(pa.table({"other": [1]}), table.parent / "two.parquet")
    dataset = open_dataset(table)
    assert dataset[:].number.tolist() == [1, 2, 3]
    assert open_dataset(str(table), where={"number": {"$gt": 1}})[0].number == 2
    with pytest.raises(StorageError):
        open_dataset(table.parent / "three.parquet")


def test_reading_a_replaced_dataset_asks_to_open_it_again(tmp_path: Path) -> None:
    write_dataset(photos(3), tmp_path / "photos")
    dataset = open_dataset(tmp_path / "photos", Photo)
    write_dataset(photos(5), tmp_path / "photos", mode="overwrite")
    with pytest.raises(ShardError, match="written anew in the meantime, open it again"):
        dataset.read()
    assert len(open_dataset(tmp_path / "photos", Photo).read()) == 5
