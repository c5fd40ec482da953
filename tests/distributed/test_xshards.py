"""XShards on this machine: rows, caching, exchanges and error messages."""

from __future__ import annotations

import datetime as dt
import threading
from collections import Counter, namedtuple
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray
from quire.distributed import PartitionError, XShards, engine
from quire.distributed._object_steps import PartitionFailure, SplitByRowsStep
from quire.distributed._row_containers import (
    assign_partitions,
    concat_rows,
    copy_value,
    count_rows,
    split_rows,
    unique_values,
)
from quire.errors import ColumnError, OptionError, PathError
from tests.strategies import laws

pytestmark = pytest.mark.needs("pandas", "pyarrow", "torch")


class Word(BaseDocument):
    text: str
    number: int = 0


Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - the kind that functions give


def words(count: int) -> DocumentArray[Word]:
    return DocumentArray[Word](Word(text=f"w{i}", number=i) for i in range(count))


def kinds(rows: int) -> dict[str, Any]:
    """Return the same rows in every container that has rows."""
    numbers = np.arange(rows)
    return {
        "array": numbers,
        "matrix": numbers[:, None] * np.ones(3),
        "tensor": torch.arange(rows),
        "frame": pd.DataFrame({"a": numbers, "b": [f"t{i}" for i in numbers]}),
        "series": pd.Series(numbers),
        "table": pa.table({"a": numbers}),
        "list": [f"t{i}" for i in numbers],
        "tuple": tuple(range(rows)),
        "records": [{"a": i, "image": np.full(2, i)} for i in range(rows)],
        "columns": [numbers, numbers * 2.0],
        "named": Pair(numbers, numbers + 1),
        "dict": {"x": [numbers, numbers[:, None]], "y": numbers, "z": list(range(rows))},
        "documents": words(rows),
        "batch": words(rows).stack(),
    }


def equal(a: Any, b: Any) -> bool:
    """Whether two objects have the same rows in the same container."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (pd.DataFrame, pd.Series, pa.Table)):
        return bool(a.equals(b))
    if isinstance(a, (DocumentArray, type(words(1).stack()))):
        return bool(a == b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(np.array_equal(a, b)) if hasattr(a, "shape") else bool(a == b)


KINDS = sorted(kinds(1))


# --- rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_split_and_concat_rows_round_trip(kind: str, rows: int) -> None:
    data = kinds(rows)[kind]
    parts = split_rows(data, 4)
    assert [count_rows(part) for part in parts] == [rows * (i + 1) // 4 - rows * i // 4 for i in range(4)]
    assert equal(concat_rows(parts), data)


@pytest.mark.parametrize("kind", KINDS)
def test_len_counts_rows_and_not_columns(kind: str) -> None:
    shards = XShards.partition(kinds(7)[kind], 3)
    assert shards.num_partitions() == 3
    assert len(shards) == 7
    assert len(shards.repartition(5)) == 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_empty_partitions_do_no_harm(kind: str, rows: int) -> None:
    data = kinds(rows)[kind] if rows else split_rows(kinds(1)[kind], 2)[0]
    shards = XShards.partition(data, 4)
    assert len(shards) == rows
    assert equal(concat_rows(shards.repartition(3).repartition(1).collect()), data)
    assert equal(shards.head(), data)


def test_empty_lists_join_with_frames() -> None:
    frame = pd.DataFrame({"a": [1, 2]})
    shards = XShards.from_objects([[], frame, {}])
    assert len(shards) == 2
    assert shards["a"].unique().tolist() == [1, 2]
    assert len(shards.select("a").partition_by("a", 2)) == 2
    assert shards.head()["a"].tolist() == [1, 2]


def test_an_object_without_rows_counts_as_one() -> None:
    shards = XShards.partition(np.arange(10), 3).transform_shard(lambda part: {"sum": int(part.sum())})
    assert shards.collect() == [{"sum": 3}, {"sum": 12}, {"sum": 30}]
    assert len(shards) == 3
    with pytest.raises(PartitionError, match=r"partition 0: .*needs rows, and a dict has none"):
        shards.repartition(2).collect()


def test_columns_of_different_lengths_are_named() -> None:
    with pytest.raises(ColumnError, match="'x': 3, 'y': 4"):
        XShards.partition({"x": np.zeros(3), "y": np.zeros(4)})
    with pytest.raises(ColumnError, match=r"rows in \['x'\] and none in \['epoch'\]"):
        count_rows({"x": np.zeros(3), "epoch": 3})
    with pytest.raises(ColumnError, match="a str has none"):
        XShards.partition("text")
    with pytest.raises(ColumnError, match="DataFrame and ndarray"):
        concat_rows([pd.DataFrame({"a": [1]}), np.zeros(1)])
    with pytest.raises(ColumnError, match="rows of one shape"):
        concat_rows([np.zeros((1, 2)), np.zeros((1, 3))])


def test_default_partitions_are_one_per_worker_and_not_empty() -> None:
    four = engine("local", num_workers=4)
    assert XShards.partition(np.arange(100), engine=four).num_partitions() == 4
    assert XShards.partition(np.arange(2), engine=four).num_partitions() == 2
    assert XShards.partition([], engine=four).num_partitions() == 1


@pytest.mark.parametrize("number", [0, -1])
def test_partition_counts_must_be_positive(number: int) -> None:
    shards = XShards.partition(np.arange(4))
    with pytest.raises(OptionError, match="at least one"):
        XShards.partition(np.arange(4), number)
    with pytest.raises(OptionError, match="at least one"):
        shards.repartition(number)
    with pytest.raises(OptionError, match="at least one"):
        shards.partition_by("a", number)


# --- exchanging rows

rows = st.lists(st.tuples(st.integers(-3, 3), st.sampled_from(["a", "b", "ü", ""])), max_size=30)


@laws
@given(rows, st.integers(1, 6), st.integers(1, 6))
def test_repartition_keeps_rows_and_their_order(data: list[Any], before: int, after: int) -> None:
    shards = XShards.partition(data, before).repartition(after)
    parts = shards.collect()
    assert [row for part in parts for row in part] == data
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert len(shards) == len(data)


@laws
@given(rows, st.integers(1, 5), st.integers(1, 5), st.sampled_from([["n"], ["t"], ["n", "t"]]))
def test_partition_by_joins_equal_keys(data: list[Any], before: int, after: int, cols: list[str]) -> None:
    frame = pd.DataFrame({"n": [n for n, _ in data], "t": [t for _, t in data], "row": range(len(data))})
    parts = XShards.partition(frame, before).partition_by(cols, after).collect()
    assert len(parts) == after
    actual = [row for part in parts for row in part.row.tolist()] if data else []
    assert sorted(actual) == list(range(len(data)))
    homes = Counter(key for part in parts for key in set(part[cols].itertuples(index=False)))
    assert set(homes.values()) <= {1}
    for part in parts:
        assert part.row.tolist() == sorted(part.row.tolist())


def test_partition_by_joins_equal_keys_of_different_types() -> None:
    """One file may have integers where another has fractions, or texts next to numbers."""
    moment = dt.datetime(2024, 5, 17, 12, 30)  # noqa: DTZ001 - as tables have them
    same = [
        [1, 1.0, True, np.int8(1), np.float32(1), np.uint64(1)],
        [None, float("nan"), pd.NA, pd.NaT, np.float64("nan"), np.datetime64("NaT")],
        [moment, pd.Timestamp(moment), np.datetime64(moment), np.datetime64(moment, "ns")],
        [moment.replace(tzinfo=dt.timezone.utc), pd.Timestamp(moment, tz="UTC").tz_convert("Asia/Tokyo")],
        [2.5, np.float64(2.5)],
        [Decimal("1.50"), Decimal("1.5")],
    ]
    for group in same:
        forms = [np.fromiter([value], object, 1) for value in group]
        forms += [np.asarray([value]) for value in group if isinstance(value, (int, float, np.generic))]
        assert len({int(assign_partitions({"k": form}, ["k"], 1 << 62)[0]) for form in forms}) == 1, group
    differ = [0, 1, -1, 2, 0.5, -0.5, "", "1", "a", b"a", 1e300, 1 << 70, dt.date(2024, 1, 1), (1, 2), None]
    actual = assign_partitions({"k": np.fromiter(differ, object, len(differ))}, ["k"], 1 << 62)
    assert len(set(actual.tolist())) == len(differ)


def test_assign_partitions_is_stable() -> None:
    """Files that were partitioned by one process are joined by another."""
    keys = {"n": np.arange(8), "t": np.array(list("abcdefgh"), object)}
    assert assign_partitions(keys, ["n"], 4).tolist() == PLACES["n"]
    assert assign_partitions(keys, ["t"], 4).tolist() == PLACES["t"]
    assert assign_partitions(keys, ["n", "t"], 4).tolist() == PLACES["both"]


PLACES = {"n": [0, 1, 2, 0, 0, 0, 0, 0], "t": [0, 0, 0, 0, 1, 1, 0, 0], "both": [2, 2, 0, 2, 1, 2, 0, 3]}


def test_partition_by_rejects_unusable_keys() -> None:
    shards = XShards.partition(pd.DataFrame({"a": [[1], [2]], "b": [object(), object()]}), 2)
    with pytest.raises(PartitionError, match=r"partition_by\(\).*got a list"):
        shards.partition_by("a", 2).collect()
    with pytest.raises(PartitionError, match="got a object"):
        shards.partition_by("b", 2).collect()
    with pytest.raises(PartitionError, match="has no 'c'"):
        shards.partition_by("c", 2).collect()
    with pytest.raises(PartitionError, match="rows of shape"):
        XShards.partition({"a": np.zeros((4, 2))}, 2).partition_by("a").collect()


def test_unique_returns_values_once_in_order() -> None:
    frame = pd.DataFrame({"place": ["b", None, "a", "b", "c", None], "n": [3, 1, 3, 2, 1, 1], "x": [1.5, None] * 3})
    shards = XShards.partition(frame, 3)
    assert [None if value != value else value for value in shards["place"].unique()] == ["b", None, "a", "c"]
    assert shards["n"].unique().tolist() == [3, 1, 2]
    assert np.array_equal(shards["x"].unique(), [1.5, np.nan], equal_nan=True)
    assert XShards.partition({"a": np.array([2, 2, 1])}, 3)["a"].unique().tolist() == [2, 1]
    assert unique_values(["b", "a", "b"]).tolist() == ["b", "a"]


# --- functions


def test_function_may_change_its_object() -> None:
    argument = pd.DataFrame({"value": [1, 2, 3, 4], "items": [[1], [2], [3], [4]]})
    array = np.arange(4)

    def spoil(frame: Any) -> Any:
        frame["value"] *= -1
        for items in frame["items"]:
            items.append(0)
        return frame

    def spoil_array(part: Any) -> Any:
        part += 10
        return part

    shards = XShards.partition(argument, 2).transform_shard(spoil)
    first, again = shards.collect(), shards.collect()
    assert all(map(pd.DataFrame.equals, first, again))
    assert concat_rows(first)["items"].tolist() == [[1, 0], [2, 0], [3, 0], [4, 0]]
    assert argument["value"].tolist() == [1, 2, 3, 4]
    assert argument["items"].tolist() == [[1], [2], [3], [4]]
    arrays = XShards.partition(array, 2).transform_shard(spoil_array)
    assert concat_rows(arrays.repartition(1).collect()).tolist() == [10, 11, 12, 13]
    kept = XShards.partition(array, 2).cache()
    kept.collect()[0][:] = -1
    kept.transform_shard(spoil_array).collect()
    assert concat_rows(kept.collect()).tolist() == array.tolist() == [0, 1, 2, 3]


def test_copy_value_is_deep_and_shares_the_uncopyable() -> None:
    lock = threading.Lock()
    argument = {"a": [np.zeros(2), {"b": [1]}], "lock": lock, "o": np.array([[1], "x"], object)}
    created = copy_value(argument)
    created["a"][0][:] = 1
    created["a"][1]["b"].append(2)
    created["o"][0].append(2)
    assert created["lock"] is lock
    assert argument["a"][0].tolist() == [0, 0]
    assert argument["a"][1] == {"b": [1]}
    assert argument["o"][0] == [1]


class Scaled:
    """Counts its calls."""

    created: list[Scaled] = []

    def __init__(self, factor: int, *, plus: int = 0) -> None:
        self.factor, self.plus = factor, plus
        self.calls = 0
        self.created.append(self)

    def __call__(self, part: Any) -> Any:
        self.calls += 1
        return part * self.factor + self.plus


def test_class_has_one_instance_per_worker() -> None:
    Scaled.created.clear()
    shards = XShards.partition(np.arange(12), 6, engine=engine("local", num_workers=2))
    assert concat_rows(shards.transform_shard(Scaled, 2, plus=1).collect()).tolist() == list(range(1, 25, 2))
    assert 1 <= len(Scaled.created) <= 2
    assert sum(scaled.calls for scaled in Scaled.created) == 6
    assert shards.transform_shard(Scaled(3)).first().tolist() == [0, 3]
    assert shards.transform_shard(list).first() == [0, 1]
    assert shards.transform_shard(pd.DataFrame).first().shape == (2, 1)


def test_transform_shard_passes_arguments() -> None:
    def scaled(part: Any, factor: int, *, plus: int) -> Any:
        return part * factor + plus

    shards = XShards.partition(np.arange(4), 2).transform_shard(scaled, 10, plus=1)
    assert concat_rows(shards.collect()).tolist() == [1, 11, 21, 31]
    with pytest.raises(OptionError, match="function"):
        shards.transform_shard("scaled")  # type: ignore[arg-type]


def test_error_names_partition_and_function() -> None:
    def picky(part: Any) -> Any:
        if 5 in part:
            raise LookupError("five")
        return part

    shards = XShards.partition(np.arange(8), 4).transform_shard(picky).transform_shard(lambda part: part + 1)
    with pytest.raises(PartitionError, match=r"partition 2: .*picky\(\): LookupError: five") as caught:
        shards.collect()
    assert caught.value.partition == 2
    assert isinstance(caught.value.__cause__, LookupError)
    assert 'raise LookupError("five")' in caught.value.traceback
    for act in (len, XShards.collect, lambda s: s.repartition(2).collect(), lambda s: s.cache().first()):
        with pytest.raises(PartitionError, match="five"):
            act(shards)
    shards.uncache()
    assert [part.tolist() for part in shards.take(2)] == [[1, 2], [3, 4]]


def test_repartition_detects_changing_rows() -> None:
    """Engines that keep nothing compute the rows once to count them, and again to move them."""
    created = SplitByRowsStep({0: 3, 1: 2}, outputs=2)(1, [[1, 2, 3]])
    assert len(created) == 2
    assert all(isinstance(piece, PartitionFailure) for piece in created)
    assert "had 2 rows when they were counted, and has 3 now" in created[0].message
    assert "cache()" in created[0].message


# --- laziness and caching


def test_transforms_run_lazily_and_again_each_time() -> None:
    calls: list[int] = []

    def note(part: Any) -> Any:
        calls.append(int(part[0]))
        return part

    shards = XShards.partition(np.arange(6), 3, engine=engine("local", num_workers=1)).transform_shard(note)
    later = shards.transform_shard(np.negative).repartition(2)
    assert calls == []
    assert shards.first().tolist() == [0, 1]
    assert calls == [0]
    assert len(later) == 6
    assert calls == [0, 0, 2, 4]
    calls.clear()
    assert shards.cache() is shards
    assert shards.is_cached()
    assert not later.is_cached()
    assert calls == []
    later.collect()
    shards.collect()
    assert calls == [0, 2, 4]
    shards.uncache().collect()
    assert calls == [0, 2, 4] * 2


def test_iter_shards_prefetches_a_few_partitions() -> None:
    seen: list[int] = []

    def note(part: Any) -> Any:
        seen.append(int(part[0]))
        return part

    shards = XShards.partition(np.arange(50), 50, engine=engine("local", num_workers=2)).transform_shard(note)
    stream = shards.iter_shards()
    assert next(stream).tolist() == [0]
    assert len(seen) < 10
    stream.close()  # type: ignore[attr-defined]


def test_split_and_zip_round_trip() -> None:
    shards = XShards.partition((np.arange(5), np.arange(5) * 2.0), 2)
    one, other = shards.split()
    assert concat_rows(other.collect()).tolist() == [0, 2, 4, 6, 8]
    assert all(map(equal, one.zip(other).collect(), shards.collect()))
    assert len(one.zip(other)) == 5
    with pytest.raises(OptionError, match="2 and 3: use repartition"):
        one.zip(other.repartition(3))
    with pytest.raises(OptionError, match="is a ndarray"):
        one.split()
    uneven = XShards.from_objects([(1, 2), (1, 2, 3)])
    with pytest.raises(PartitionError, match="partition 1: .*2 items in every partition.* got 3"):
        uneven.split()[0].collect()


def test_select_and_sample_work_on_frames_and_dicts() -> None:
    frame = pd.DataFrame({"a": range(100), "b": range(100), "c": range(100)})
    for data in (frame, {"a": np.arange(100), "b": np.arange(100), "c": np.arange(100)}):
        shards = XShards.partition(data, 4)
        assert list(shards.select(["c", "a"]).first()) == ["c", "a"]
        assert list(shards.select("b").first()) == ["b"]
        half = shards.sample(0.5, random_state=3)
        actual = concat_rows(half.collect())["a"].tolist()
        assert 20 < len(actual) < 80
        assert actual == sorted(set(actual)) == concat_rows(half.collect())["a"].tolist()
        assert actual != concat_rows(shards.sample(0.5, random_state=4).collect())["a"].tolist()
        assert len(shards.sample(0)) == 0
        assert len(shards.sample(1)) == 100
        with pytest.raises(PartitionError, match="has no"):
            shards.select("d").first()
    with pytest.raises(OptionError, match="between 0 and 1"):
        XShards.partition(frame).sample(2)


def test_head_returns_rows_and_take_returns_partitions() -> None:
    shards = XShards.partition(pd.DataFrame({"a": range(10)}), 5)
    assert shards.head()["a"].tolist() == [0, 1, 2, 3, 4]
    assert shards.head(100)["a"].tolist() == list(range(10))
    assert [part["a"].tolist() for part in shards.take(2)] == [[0, 1], [2, 3]]
    assert shards.take(0) == []
    assert len(shards.take(9)) == 5


def test_iterating_shards_is_an_error() -> None:
    shards = XShards.partition(np.arange(4))
    with pytest.raises(TypeError, match="not iterable"):
        iter(shards)  # type: ignore[call-overload]
    assert bool(XShards.partition([]))
    assert repr(shards) == "XShards(engine='local')"


@pytest.mark.parametrize("name", ["sort_values", "group_by", "merge", "save_pickle", "to_spark_df", "deduplicates"])
def test_missing_orca_methods_name_alternatives(name: str) -> None:
    shards = XShards.partition(np.arange(4))
    with pytest.raises(PathError, match=f"no '{name}'. Instead: "):
        getattr(shards, name)
    assert not hasattr(shards, name)
    with pytest.raises(AttributeError, match="no 'nonsense'.$"):
        _ = shards.nonsense


# --- conversion


def test_as_pandas_accepts_every_table() -> None:
    expected = [0, 1, 2]
    assert concat_rows(XShards.partition(words(3), 2).as_pandas().collect())["number"].tolist() == expected
    assert concat_rows(XShards.partition(words(3).stack(), 2).as_pandas().collect())["number"].tolist() == expected
    for data in ({"a": np.arange(3)}, {"a": torch.arange(3)}, pa.table({"a": [0, 1, 2]}), [{"a": i} for i in range(3)]):
        assert concat_rows(XShards.partition(data, 2).as_pandas().collect())["a"].tolist() == expected
    images = concat_rows(XShards.partition({"a": np.ones((3, 2))}, 2).as_pandas().collect())
    assert [cell.tolist() for cell in images["a"]] == [[1, 1]] * 3
    assert (
        concat_rows(XShards.partition(pd.Series([0, 1, 2], name="a"), 2).as_pandas().collect())["a"].tolist()
        == expected
    )
    assert concat_rows(XShards.partition(np.arange(3), 2).as_pandas().collect())[0].tolist() == expected
    with pytest.raises(PartitionError, match="a set cannot be converted to a data frame"):
        XShards.from_objects([{1}]).as_pandas().first()


def test_local_native_is_one_data_frame() -> None:
    frame = pd.DataFrame({"a": [3, 1, 2], "b": list("xyz")})
    native = XShards.partition(frame, 2).native
    assert native.sort_values("a")["b"].tolist() == ["y", "z", "x"]
    assert XShards.from_native(native).repartition(3).first()["a"].tolist() == [3]
