"""Statistics of columns match numpy on all rows, and come from a sample if there are many."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from datetime import date, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.columns import _statistics
from quire.columns._statistics import Statistics, to_seconds
from quire.errors import OptionError, PathError
from quire.storage import _statistics as sampling
from quire.storage import column_statistics, open_dataset, write_dataset
from quire.typing import NdArray, float32
from tests.storage.sample_documents import Photo, photos, trees
from tests.strategies import Color, Tree, laws

pytestmark = pytest.mark.needs("pyarrow")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


class Part(BaseDocument):
    name: str
    size: int


class Row(BaseDocument):
    count: int
    weight: float | None = None
    flag: bool = False
    text: str = ""
    blob: bytes = b""
    words: list[str] = []
    marks: list[float] = []
    vector: NdArray[float32, 3]
    shaped: NdArray[float32] | None = None
    color: Color = Color.RED
    day: date | None = None
    at: datetime | None = None
    span: timedelta = timedelta()
    part: Part | None = None
    parts: DocumentArray[Part] = []


_floats = st.floats(-1e6, 1e6, width=32)
_any_floats = st.floats(-1e100, 1e100) | st.sampled_from([float("nan"), float("inf"), -float("inf")])
_parts = st.builds(Part, name=st.text(max_size=3), size=st.integers(-5, 5))
rows = st.builds(
    Row,
    count=st.integers(-(2**63), 2**63 - 1),
    weight=st.none() | _any_floats,
    flag=st.booleans(),
    text=st.text(max_size=4),
    blob=st.binary(max_size=4),
    words=st.lists(st.sampled_from("abc"), max_size=3),
    marks=st.lists(_any_floats, max_size=3),
    vector=st.lists(_floats, min_size=3, max_size=3).map(lambda items: np.array(items, np.float32)),
    shaped=st.none() | st.lists(_floats, max_size=4).map(lambda items: np.array(items, np.float32)),
    color=st.sampled_from(Color),
    day=st.none() | st.dates(),
    at=st.none() | st.datetimes(timezones=st.just(timezone.utc)),
    span=st.timedeltas(timedelta(days=-1000), timedelta(days=1000)),
    part=st.none() | _parts,
    parts=st.lists(_parts, max_size=3).map(DocumentArray[Part]),
)


def _numbers(result: Any, values: Any, bins: int) -> None:
    """Check statistics of numbers against numpy."""
    numbers = np.array(values, np.float64).reshape(-1)
    finite = numbers[np.isfinite(numbers)]
    if not len(numbers):
        assert (result.minimum, result.mean, result.histogram, result.not_finite) == (None, None, None, None)
        return
    assert result.not_finite == len(numbers) - len(finite)
    if not len(finite):
        assert (result.minimum, result.maximum, result.mean, result.deviation) == (None, None, None, None)
        return
    assert (to_seconds(result.minimum), to_seconds(result.maximum)) == (finite.min(), finite.max())
    with np.errstate(over="ignore", invalid="ignore"):
        scale = max(abs(finite.min()), abs(finite.max()))
        np.testing.assert_allclose(result.mean, finite.mean(), rtol=1e-9, atol=1e-9 * scale)
        if np.isfinite(finite.std()):
            np.testing.assert_allclose(result.deviation, finite.std(), rtol=1e-6, atol=1e-9 * scale)
    if result.histogram is not None:
        counts, edges = np.histogram(finite, bins)
        assert result.histogram.counts == tuple(counts.tolist())
        np.testing.assert_allclose(result.histogram.edges, edges, rtol=1e-9)


def _lengths(result: Any, values: list[Any]) -> None:
    sizes = [len(value) for value in values if value is not None]
    if not sizes:
        assert result.lengths is None
        return
    lengths = result.lengths
    assert (lengths.minimum, lengths.maximum) == (min(sizes), max(sizes))
    np.testing.assert_allclose(lengths.mean, np.mean(sizes))
    assert sum(lengths.histogram.counts) == len(sizes)


def _check(result: dict[str, Any], documents: list[Row], bins: int) -> None:
    def of(name: str) -> list[Any]:
        return [value for document in documents if (value := getattr(document, name)) is not None]

    for name in ("count", "weight", "flag", "vector", "shaped", "marks", "span"):
        values = [value.total_seconds() if name == "span" else value for value in of(name)]
        joined = np.concatenate(values) if name in ("shaped", "marks") and values else values
        if name == "flag":
            assert result[name].histogram is None
        _numbers(result[name], joined, bins)
        assert result[name].rows == len(documents)
        assert result[name].missing == len(documents) - len(values)
    for name in ("text", "blob", "words", "marks", "parts"):
        _lengths(result[name], of(name))
    assert result["text"].distinct == (len(set(of("text"))) or None)
    assert dict(result["flag"].top or ()) == Counter(of("flag"))
    assert dict(result["color"].top or ()) == Counter(color.name for color in of("color"))
    assert dict(result["words"].top or ()) == Counter(word for words in of("words") for word in words)
    assert dict(result["shaped"].shapes or ()) == Counter(tensor.shape for tensor in of("shaped"))
    assert dict(result["vector"].dtypes or ()) == ({"float32": len(documents)} if documents else {})
    for name in ("day", "at"):
        assert (result[name].minimum, result[name].maximum) == (
            min(of(name), default=None),
            max(of(name), default=None),
        )
    assert result["part.size"].missing == result["part"].missing == len(documents) - len(of("part"))
    _numbers(result["part.size"], [part.size for part in of("part")], bins)
    inside = [part for parts in of("parts") for part in parts]
    assert result["parts.name"].rows == len(inside)
    _numbers(result["parts.size"], [part.size for part in inside], bins)


@laws
@given(st.lists(rows, max_size=8), st.integers(1, 4), st.integers(1, 7))
def test_column_statistics_match_numpy_on_all_rows(documents: list[Row], parts: int, bins: int) -> None:
    statistics = Statistics()
    cuts = [len(documents) * part // parts for part in range(parts + 1)]
    for start, stop in pairwise(cuts):
        statistics.add(DocumentBatch[Row](documents[start:stop], shapes="ragged")._columns)
    _check(statistics.to_dict(bins), documents, bins)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_dataset_statistics_match_numpy_on_all_rows(form: str, tmp_path: Path) -> None:
    documents = [
        Row(
            count=n * n,
            weight=None if n % 3 == 0 else float("nan") if n % 7 == 0 else n / 4,
            flag=n % 2 == 0,
            text="ä" * (n % 5),
            blob=b"x" * (n % 4),
            words=["a", "b", "c"][: n % 4],
            marks=[n / 2] * (n % 2),
            vector=[n, n + 1, -n],
            shaped=None if n % 5 == 0 else np.full(n % 3, n, np.float32),
            color=Color.BLUE if n % 3 else Color.RED,
            day=date(2020, 1, 1) + timedelta(n),
            at=datetime(2020, 1, 1, tzinfo=timezone.utc) + timedelta(hours=n),
            part=None if n % 4 else Part(name=str(n), size=n),
            parts=[Part(name=str(i), size=i) for i in range(n % 3)],
        )
        for n in range(200)
    ]
    write_dataset(documents, tmp_path, Row, format=form, group_bytes=2000, shard_bytes=8000)
    dataset = open_dataset(tmp_path, Row)
    assert len(dataset.shards) > 2
    _check(column_statistics(dataset, bins=5), documents, 5)


@laws
@given(st.lists(trees(), max_size=3))
def test_statistics_of_any_documents_are_json(documents: list[Tree]) -> None:
    statistics = Statistics()
    statistics.add(DocumentBatch[Tree](documents, shapes="ragged")._columns)
    summary = {path: column.to_dict() for path, column in statistics.to_dict().items()}
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["branch.leaf.text"]["rows"] == len(documents)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("count", [1, 59, 7])
def test_sample_has_the_requested_rows_from_all_parts(form: str, count: int, tmp_path: Path) -> None:
    write_dataset(photos(60), tmp_path, format=form, group_bytes=3000, shard_bytes=6000)
    dataset = open_dataset(tmp_path, Photo)
    statistics = column_statistics(dataset, ["number"], rows=count, seed=3)
    assert statistics.keys() == {"number"}
    assert (statistics["number"].rows, statistics["number"].distinct) == (count, count)
    if count > 2:
        assert statistics["number"].minimum < 20
        assert statistics["number"].maximum > 40
    assert column_statistics(dataset, ["number"], rows=count, seed=3) == statistics
    others = [column_statistics(dataset, ["number"], rows=7, seed=seed)["number"].top for seed in range(5)]
    assert len(set(others)) > 1


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_statistics_are_of_the_rows_that_match_a_filter(form: str, tmp_path: Path) -> None:
    write_dataset(photos(60), tmp_path, format=form, group_bytes=3000, shard_bytes=6000)
    dataset = open_dataset(tmp_path, Photo, where={"number": {"$gte": 50}})
    for rows, expected in ((100, 10), (4, 4)):
        statistics = column_statistics(dataset, ["number", "meta.stamp"], rows=rows)
        assert statistics.keys() == {"number", "meta.stamp"}
        assert statistics["number"].rows == expected
        assert statistics["number"].minimum >= 50
        assert statistics["meta.stamp"].minimum == statistics["number"].minimum * 10


def test_statistics_of_a_dataset_without_rows_name_its_columns(tmp_path: Path) -> None:
    write_dataset([], tmp_path, Photo)
    statistics = column_statistics(open_dataset(tmp_path, Photo))
    assert list(statistics)[:3] == ["id", "number", "image"]
    assert statistics["meta.tags"].to_dict() == {
        **dict.fromkeys(statistics["meta.tags"].to_dict()),
        "path": "meta.tags",
        "kind": "list",
        "type": "list[str]",
        "rows": 0,
        "missing": 0,
    }


def test_invalid_arguments_are_errors(tmp_path: Path) -> None:
    write_dataset(photos(3), tmp_path)
    dataset = open_dataset(tmp_path, Photo)
    with pytest.raises(PathError, match="Did you mean 'number'"):
        column_statistics(dataset, ["numbr"])
    for wrong in ({"rows": 0}, {"bins": 0}):
        with pytest.raises(OptionError, match="at least 1"):
            column_statistics(dataset, **wrong)


def test_fewer_large_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(photos(1500), tmp_path, format="arrow")
    dataset = open_dataset(tmp_path, Photo)
    monkeypatch.setattr(sampling, "_MAX_BYTES", dataset.nbytes // 10)
    assert column_statistics(dataset, ["number"])["number"].rows == 1000


def test_memory_does_not_grow_with_the_rows_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_statistics, "_MAX_NUMBERS", 1000)
    monkeypatch.setattr(_statistics, "_MAX_VALUES", 1000)
    numbers, values = _statistics.NumberTally(), _statistics.ValueTally()
    tracemalloc.start()
    for start in range(200):
        part = np.arange(start * 1000, start * 1000 + 1000)
        numbers.add(part)
        values.add_numbers(np.append(part, [7, 7, 7]))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000
    assert (numbers.count, numbers.minimum, numbers.maximum) == (200_000, 0, 199_999)
    np.testing.assert_allclose((numbers.mean, numbers.deviation), (99_999.5, np.arange(200_000).std()))
    result = numbers.histogram(4)
    assert result is not None
    assert min(result.counts) / max(result.counts) > 0.5  # which of the numbers are kept depends on no order
    assert values.distinct is None
    assert values.top(1) == ((7, 601),)


def test_long_texts_are_distinguished_and_truncated() -> None:
    values = _statistics.ValueTally()
    values.add_texts(["x" * 300, "x" * 301, "x" * 301, "y"])
    assert values.distinct == 3
    assert values.top(1) == (("x" * 200 + "…", 2),)
