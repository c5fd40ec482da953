"""Filters and splits: stable hashes, row groups that are left out, cached results."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.array import compile_filter, hash_fraction
from quire.array._positions import _canonical_bytes
from quire.errors import OptionError, ShardError
from quire.files import open_folder
from quire.storage import Split, StoredDataset, open_dataset, write_dataset
from quire.storage import _where as where_module
from quire.storage._layout import Layout
from quire.storage._shard_reader import read_table
from quire.storage._where import (
    _Bound,
    _bounds,
    _cache_name,
    _load_rows,
    _may_match,
    _save_rows,
    matching_rows,
    rows_of_shard,
)
from quire.typing import ImageUrl
from tests.storage.bitrot import flip_byte

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")


# --- splits


def test_splits_keep_their_golden_fractions() -> None:
    """These values never change: a row stays in its part of a stored dataset."""
    noon = datetime(2024, 5, 1, 12, 30, tzinfo=timezone.utc)
    golden: list[tuple[Any, bytes, float]] = [
        (0, b"0", 0.46044619465600495),
        (-7, b"-7", 0.09447456506941389),
        ("é", b"\xc3\xa9", 0.18398975942886545),
        ("\ud800", b"\xed\xa0\x80", 0.4064558488884985),
        (b"a", b"a", 0.18460693099188663),
        (None, b"None", 0.0014090790990246478),
        (True, b"True", 0.5119458134605599),
        (1.5, b"1.5", 0.20772310420266776),
        (2.0, b"2", 0.4235754008315061),
        (np.float32(0.5), b"0.5", 0.01288717819058448),
        (float("nan"), b"nan", 0.5322997998598564),
        (timedelta(days=1), b"86400", hash_fraction(86400)),
        (timedelta(days=1, microseconds=5), b"86400.000005", 0.41688227219353285),
        (noon, b"1714566600", 0.6038628837264033),
        (noon + timedelta(microseconds=7), b"1714566600.000007", 0.4989935948182532),
        (noon.replace(tzinfo=None), b"2024-05-01 12:30:00", 0.5777813460659998),
        (date(2024, 5, 1), b"2024-05-01", 0.06936043818429034),
    ]
    assert [(_canonical_bytes(value), hash_fraction(value)) for value, _, _ in golden] == [
        entry[1:] for entry in golden
    ]


@pytest.mark.parametrize("fractions", [(1.0,), (0.0, 1.0), (0.1,) * 10, (0.7, 0.2, 0.1), (0.25,), (1 + 1e-9,)])
def test_fractions_sum_to_at_most_1(fractions: tuple[float, ...]) -> None:
    for index in range(len(fractions)):
        assert Split("id", fractions, index).index == index
    for index in (-1, len(fractions)):
        with pytest.raises(OptionError, match=f"index is one of the {len(fractions)} fractions, got {index}"):
            Split("id", fractions, index)


@pytest.mark.parametrize("fractions", [(), (0.5, 0.50001), (2.0,), (-0.1, 0.5), (1.1, -0.1)])
def test_invalid_fractions_are_errors(fractions: tuple[float, ...]) -> None:
    with pytest.raises(OptionError, match="fractions are parts of 1"):
        Split("id", fractions, 0)


class Text(BaseDocument):
    word: str


def test_parts_of_a_split_have_the_rows_of_their_fractions() -> None:
    words = [str(number) for number in range(400)]
    columns = DocumentBatch[Text]([Text(word=word) for word in words])._columns
    parts = [Split("word", (0.5, 0.0, 0.25), index).rows(columns).tolist() for index in range(3)]
    assert parts[0] == [row for row, word in enumerate(words) if hash_fraction(word) < 0.5]
    assert parts[1] == []
    assert parts[2] == [row for row, word in enumerate(words) if 0.5 <= hash_fraction(word) < 0.75]
    assert [len(part) / 400 for part in parts] == pytest.approx([0.5, 0, 0.25], abs=0.08)


# --- statistics of row groups

OPERATORS = {
    "$gt": lambda number, values: number > values[0],
    "$gte": lambda number, values: number >= values[0],
    "$lt": lambda number, values: number < values[0],
    "$lte": lambda number, values: number <= values[0],
    "$in": lambda number, values: number in values,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_row_groups_are_ruled_out_when_no_value_within_their_bounds_matches(name: str) -> None:
    lists = [[first] for first in range(6)]
    if name == "$in":
        lists += [[], [0, 5], [1, 3, 5], [5, 4], [2, 0]]
    for least in range(1, 5):
        for most in range(least, 5):
            for values in lists:
                matches = any(OPERATORS[name](number, values) for number in range(least, most + 1))
                assert _Bound("a", name, values).excludes(least, most) is not matches, (values, least, most)


@pytest.mark.parametrize("name", OPERATORS)
def test_row_groups_are_kept_when_values_do_not_compare(name: str) -> None:
    assert _Bound("a", name, ["a"]).excludes(1, 2) is False


def row_group(*columns: tuple[str, tuple[int, int] | str | None]) -> Any:
    """The metadata of a row group: for each column its path, and its least and greatest value."""
    statistics = {None: None, "empty": SimpleNamespace(has_min_max=False, min=None, max=None)}
    chunks = [
        SimpleNamespace(
            path_in_schema=path,
            statistics=SimpleNamespace(has_min_max=True, min=bounds[0], max=bounds[1])
            if isinstance(bounds, tuple)
            else statistics[bounds],
        )
        for path, bounds in columns
    ]
    return SimpleNamespace(num_columns=len(chunks), column=chunks.__getitem__)


def test_row_groups_match_when_no_condition_is_ruled_out() -> None:
    bounds = [_Bound("a", "$gt", [5]), _Bound("b", "$in", [1, 2]), _Bound("a", "$lt", [9])]
    assert _may_match(row_group(("a", (0, 6)), ("b", (2, 3))), bounds)
    assert _may_match(row_group(("other", (0, 1)), ("b", (2, 3))), bounds)
    assert _may_match(row_group(("a", None), ("b", "empty")), bounds)
    assert _may_match(row_group(), bounds)
    assert _may_match(row_group(("a", (0, 1))), [])


def test_row_groups_do_not_match_when_one_condition_is_ruled_out() -> None:
    bounds = [_Bound("a", "$gt", [5]), _Bound("b", "$in", [1, 2]), _Bound("a", "$lt", [9])]
    for columns in (
        [("a", (0, 5)), ("b", (1, 1))],
        [("a", (9, 12)), ("b", (1, 1))],
        [("a", (6, 7)), ("b", (3, 4))],
        [("other", (0, 1)), ("b", (3, 4))],
        [("a", None), ("b", (3, 4))],
        [("a", "empty"), ("b", (3, 4))],
    ):
        assert not _may_match(row_group(*columns), bounds), columns


class Level(str, Enum):
    LOW = "zz"
    HIGH = "aa"


class Inner(BaseDocument):
    size: int = 0
    word: str = ""
    level: Level = Level.LOW


class Fact(BaseDocument):
    number: int = 0
    part: float | None = None
    flag: bool = False
    text: str = ""
    link: ImageUrl | None = None
    file: Path = Path()
    day: date = date(2024, 1, 1)
    at: datetime = datetime(2024, 1, 1, tzinfo=timezone.utc)
    level: Level = Level.LOW
    words: list[str] = []
    counts: list[int] = []
    inner: Inner | None = None
    many: DocumentArray[Inner] = []
    extra: dict[str, int] = {}


@pytest.mark.parametrize(
    ("path", "value", "is_ordered"),
    [
        ("number", 1, True),
        ("part", 0.5, True),
        ("flag", True, True),
        ("text", "a", True),
        ("day", date(2024, 1, 2), True),
        ("inner.size", 1, True),
        ("inner.word", "a", True),
        ("link", "a", False),
        ("file", "a", False),
        ("at", datetime(2024, 1, 2, tzinfo=timezone.utc), True),
        ("level", Level.LOW, True),
        ("inner.level", Level.LOW, True),
        ("words", "a", False),
        ("counts", 1, False),
        ("many.size", 1, False),
    ],
)
def test_values_stored_in_order_have_bounds(path: str, value: Any, is_ordered: bool) -> None:
    schema = Fact.document_schema()
    query = compile_filter({path: {"$eq": value}}, schema)
    assert [bound[0] for bound in _bounds(query, Layout(schema))] == [path] * is_ordered


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"number": {"$in": [1, 7]}}, [("number", "$in", [1, 7])]),
        ({"number": {"$gt": 1, "$lte": 7}}, [("number", "$gt", [1]), ("number", "$lte", [7])]),
        ({"words": "a", "number": 1, "file": "b", "flag": True}, [("number", "$in", [1]), ("flag", "$in", [True])]),
        ({"level": "aa"}, [("level", "$in", ["aa", "HIGH", "aa", "HIGH"])]),
        ({"level": {"$gt": "aa"}}, []),  # names, which earlier files have, are in another order
        ({"level": {"$gt": "m"}}, []),  # no member
    ],
)
def test_bounds_have_all_forms_of_the_values(query: Any, expected: list[Any]) -> None:
    schema = Fact.document_schema()
    assert _bounds(compile_filter(query, schema), Layout(schema)) == expected


# --- results in the cache


@pytest.mark.parametrize("rows", [[], [0], [5, 2**40, 7]])
def test_rows_are_saved_with_a_checksum(tmp_path: Path, rows: list[int]) -> None:
    _save_rows(tmp_path / "rows", np.array(rows, np.int64))
    content = (tmp_path / "rows").read_bytes()
    assert content[8:] == np.array(rows, "<i8").tobytes()
    loaded = _load_rows(content)
    assert loaded is not None
    assert loaded.tolist() == rows
    assert loaded.dtype == np.int64
    assert loaded.flags.writeable
    for place in range(len(content)):
        assert _load_rows(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]) is None
    for other in (b"", content[:-1], content + b"\0", content + bytes(8)):
        assert _load_rows(other) is None


def test_equal_filters_have_equal_names() -> None:
    assert _cache_name({"a": 1, "b": 2}) == _cache_name({"b": 2, "a": 1}) != _cache_name({"a": 1, "b": 3})
    assert _cache_name({"day": date(2024, 1, 1)}) is None
    assert _cache_name(len) is None
    names = {_cache_name(Split(path, (0.5, 0.5), index)) for path in ("a", "b") for index in (0, 1)}
    assert len(names - {None}) == 4


# --- datasets


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


FACTS = [
    Fact(
        id=str(number),
        number=number,
        text=f"{number:02}",
        inner=Inner(id="i", size=number) if number % 3 else None,
        many=[Inner(id="j", size=number)] * (number % 2),
        extra={"key": number % 10},
    )
    for number in range(40)
]


@pytest.fixture(scope="module", params=["arrow", "parquet"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of three shards, each of several row groups or record batches."""
    path: Path = tmp_path_factory.mktemp("facts") / request.param
    for start, stop in ((0, 15), (15, 17), (17, 40)):
        write_dataset(FACTS[start:stop], path, Fact, mode="append", format=request.param, group_bytes=300)
    return path


def rows_of(dataset: StoredDataset[Any], where: Any) -> list[int]:
    rows = matching_rows(dataset._row_reader.shard_reader, iter(dataset.shards), where)
    assert rows.dtype == np.int64
    return rows.tolist()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, list(range(40))),
        ({"number": {"$gte": 13, "$lt": 19}}, list(range(13, 19))),
        ({"text": {"$in": ["03", "16", "39"]}}, [3, 16, 39]),
        ({"inner.size": {"$gt": 30}}, [31, 32, 34, 35, 37, 38]),
        ({"inner": None, "number": {"$gt": 30}}, [33, 36, 39]),
        ({"inner": {"$exists": False}}, list(range(0, 40, 3))),
        ({"many.size": {"$gt": 34}}, [35, 37, 39]),
        ({"extra.key": 5}, [5, 15, 25, 35]),
        ({"number": -1}, []),
        ({"level": {"$gt": "m"}}, list(range(40))),
        (Split("text", (1.0,), 0), list(range(40))),
        (Split("text", (0.0, 1.0), 0), []),
        (Split("number", (0.3, 0.7), 0), [number for number in range(40) if hash_fraction(number) < 0.3]),
        (lambda document: document.number % 9 == 8, [8, 17, 26, 35]),
    ],
)
def test_matching_rows_are_numbered_across_shards(folder: Path, query: Any, expected: list[int]) -> None:
    dataset = open_dataset(folder, Fact)
    assert len(dataset.shards) == 3
    for _ in range(2):
        assert rows_of(dataset, query) == expected


@pytest.mark.parametrize(
    "candidates", [[], [0], [14, 15, 16, 17], [16], [39], list(range(0, 40, 7)), list(range(40))], ids=repr
)
@pytest.mark.parametrize(
    "query", [{"number": {"$gte": 15}}, lambda document: document.number % 2 == 0], ids=["query", "function"]
)
def test_matching_rows_are_some_of_the_candidates(folder: Path, candidates: list[int], query: Any) -> None:
    dataset = open_dataset(folder, Fact)
    reader, rows = dataset._row_reader.shard_reader, np.array(candidates, np.int64)
    matches = matching_rows(reader, dataset.shards, query, rows=rows)
    expected = {fact.number for fact in DocumentArray[Fact](FACTS).filter(query)}
    assert matches.tolist() == [number for number in candidates if number in expected]


def test_rows_of_each_shard_are_numbered_from_its_start() -> None:
    shards: list[Any] = [SimpleNamespace(rows=count) for count in (15, 2, 23)]
    rows = np.array([0, 14, 15, 20, 39])
    parts: list[Any] = [rows_of_shard(rows, start, shard) for start, shard in zip((0, 15, 17), shards, strict=True)]
    assert [part.tolist() for part in parts] == [[0, 14], [0], [3, 22]]
    assert rows_of_shard(None, 15, shards[1]) is None


def test_row_groups_that_cannot_match_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(FACTS, tmp_path, Fact, format="parquet", group_bytes=300)
    sizes: list[int] = []
    read = where_module.read_columns

    def counted(*arguments: Any) -> Any:
        for numbers, columns in read(*arguments):
            sizes.append(len(numbers))
            yield numbers, columns

    monkeypatch.setattr(where_module, "read_columns", counted)
    dataset = open_dataset(tmp_path, Fact)
    assert rows_of(dataset, {"number": 39}) == [39]
    assert sum(sizes) < 10
    sizes.clear()
    assert rows_of(dataset, {"extra.key": 9}) == [9, 19, 29, 39]
    assert sum(sizes) == 40


@pytest.mark.parametrize("query", [{"inner.size": {"$gt": 3}}, Split("inner.size", (0.5, 0.5), 0)], ids=repr)
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_queries_do_not_read_other_columns_of_a_nested_document(tmp_path: Path, kind: Any, query: Any) -> None:
    write_dataset(FACTS, tmp_path, Fact, format=kind)
    expected = rows_of(open_dataset(tmp_path, Fact, cache=tmp_path / "first"), query)
    assert 0 < len(expected) < len(FACTS)
    dataset = open_dataset(tmp_path, Fact, cache=tmp_path / "second")
    table = read_table(open_folder(tmp_path), dataset.shards[0])
    offset, size = table.columns[0, table.names.index("inner.id")].tolist()
    flip_byte(tmp_path / dataset.shards[0].name, offset + size // 2, 0x10)
    assert rows_of(dataset, query) == expected
    with pytest.raises(ShardError, match="'inner.id'"):
        rows_of(dataset, {"inner.id": "i"})


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The queries that were evaluated, not read from the cache."""
    calls: list[Any] = []
    evaluate = where_module._find_rows

    def counted(reader: Any, shards: Any, query: Any, *more: Any) -> Any:
        calls.append(query)
        return evaluate(reader, shards, query, *more)

    monkeypatch.setattr(where_module, "_find_rows", counted)
    return calls


def test_queries_and_splits_are_evaluated_once(folder: Path, evaluations: list[Any]) -> None:
    dataset = open_dataset(folder, Fact)
    for query in ({"number": {"$gt": 30}, "flag": False}, Split("number", (0.3, 0.7), 1)):
        evaluations.clear()
        first = rows_of(dataset, query)
        assert rows_of(open_dataset(folder, Fact), query) == first
        assert len(evaluations) == 1
    rows_of(dataset, {"flag": False, "number": {"$gt": 30}})
    assert len(evaluations) == 1, "the order of conditions does not count"


def test_functions_and_values_without_json_are_evaluated_every_time(folder: Path, evaluations: list[Any]) -> None:
    dataset = open_dataset(folder, Fact)
    for query in (lambda document: document.flag, {"day": date(2024, 1, 2)}):
        evaluations.clear()
        assert rows_of(dataset, query) == rows_of(dataset, query) == []
        assert len(evaluations) == 2


def test_cached_rows_depend_on_shards_and_class(folder: Path, evaluations: list[Any]) -> None:
    class Other(BaseDocument):
        number: int = 5

    query = {"number": {"$lt": 20}}
    dataset = open_dataset(folder, Fact)
    assert rows_of(dataset, query) == list(range(20))
    assert matching_rows(dataset._row_reader.shard_reader, dataset.shards[1:], query).tolist() == [0, 1, 2, 3, 4]
    assert rows_of(open_dataset(folder, Other), query) == list(range(20))
    assert len(evaluations) == 3


@pytest.mark.parametrize("damaged", [b"", b"x", b"12345678", b"1234567812345678"], ids=repr)
def test_damaged_result_in_the_cache_is_replaced(folder: Path, evaluations: list[Any], damaged: bytes) -> None:
    dataset = open_dataset(folder, Fact)
    assert rows_of(dataset, {"number": 7}) == [7]
    [file] = [
        path
        for path in dataset._row_reader.shard_reader.cache.folder.iterdir()
        if path.is_file() and path.suffix != ".lock"
    ]
    file.write_bytes(damaged)
    assert rows_of(dataset, {"number": 7}) == [7]
    assert len(evaluations) == 2
    assert rows_of(dataset, {"number": 7}) == [7]
    assert len(evaluations) == 2


def test_rows_are_evaluated_when_the_cache_loses_them(
    folder: Path, evaluations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where_module, "_save_rows", lambda target, _: target.write_bytes(b"lost"))
    dataset = open_dataset(folder, Fact)
    assert rows_of(dataset, {"number": 7}) == [7]
    assert len(evaluations) == 3
    assert not [
        path for path in dataset._row_reader.shard_reader.cache.folder.iterdir() if path.read_bytes() == b"lost"
    ]
