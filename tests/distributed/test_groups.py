"""Groups, sorts, joins and shuffles: one result on every engine, equal to that of a few lines of Python."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.distributed import DocumentShards
from quire.distributed import engine as engine_by_name
from quire.errors import OptionError, PartitionError, PathError, SchemaError
from quire.typing import NdArray, uint8
from tests.distributed.sample_documents import Good, goods

pytestmark = [
    pytest.mark.needs("pyarrow", "ray", "pyspark", "xxhash"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),  # each exchange on Ray starts several rounds of tasks
]
ROWS = 40


class Colour(Enum):
    RED = "r"
    BLUE = "b"


class Box(BaseDocument):
    colour: Colour | None = None
    town: str | None = None


class Item(BaseDocument):
    number: int
    weight: float | None = None
    packed: datetime | None = None
    price: Decimal = Decimal(1)
    box: Box | None = None
    picture: NdArray[uint8, 2]


class Town(BaseDocument):
    town: str | None
    people: int
    map: NdArray[uint8, 3]


class PlaceSummary(BaseDocument):
    town: str
    number: int
    top: int


def items(numbers: list[tuple[Any, ...]]) -> DocumentArray[Item]:
    return DocumentArray[Item](
        [
            Item(
                id=f"item {i}",
                number=number,
                weight=weight,
                packed=packed,
                price=price,
                box=None if box is None else Box(id=f"box {i}", colour=box[0], town=box[1]),
                picture=np.full(2, i % 256, np.uint8),
            )
            for i, (number, weight, packed, price, box) in enumerate(numbers)
        ]
    )


MOMENTS = [
    datetime(2020, 1, 1, 12),  # noqa: DTZ001
    datetime(2020, 1, 1, 12, tzinfo=timezone.utc),
    datetime(2020, 1, 1, 14, tzinfo=timezone(timedelta(hours=2))),  # the same instant
    datetime(2019, 1, 1, tzinfo=timezone.utc),
]
TOWNS = ["Bath", "Cork", "Ely", "Ünna", ""]
ROW = st.tuples(
    st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)),
    st.one_of(st.none(), st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf, -math.inf])),
    st.one_of(st.none(), st.sampled_from(MOMENTS)),
    st.sampled_from([Decimal("1.0"), Decimal("1.00"), Decimal(100), Decimal("1E+2"), Decimal(-3)]),
    st.one_of(
        st.none(),
        st.tuples(st.one_of(st.none(), st.sampled_from(Colour)), st.one_of(st.none(), st.sampled_from(TOWNS))),
    ),
)
KEYS: dict[str, Callable[[Item], Any]] = {
    "number": lambda item: item.number,
    "weight": lambda item: "nan" if item.weight is not None and math.isnan(item.weight) else item.weight,
    "packed": lambda item: item.packed,
    "price": lambda item: item.price,
    "box.colour": lambda item: item.box and item.box.colour,
    "box.town": lambda item: item.box and item.box.town,
}


def sort_key(path: str, item: Item) -> tuple[Any, ...]:
    """Return a key that Python sorts as `sort` does: None first, NaN last, naive times before others."""
    value = KEYS[path](item)
    if value is None:
        return (0,)
    if value == "nan":
        return (2,)
    if isinstance(value, datetime):
        return (1, value.tzinfo is not None, value)
    return 1, value


def key_of(paths: list[str], item: Item) -> tuple[Any, ...]:
    return tuple(KEYS[path](item) for path in paths)


def describe_group(group: DocumentArray[Item]) -> list[Item]:
    """Return the first document of a group, with the positions of all of them in a field."""
    return [group[0].model_copy(update={"number": len(group)}), *group[1:2]]


LAW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def shard(documents: DocumentArray[Any], parts: int, engine: Any = "local") -> DocumentShards[Any]:
    document_type = type(documents).document_type
    return DocumentShards[document_type].from_documents(documents, num_partitions=parts, engine=engine)  # type: ignore[valid-type]


# --- laws


@LAW
@given(
    st.lists(ROW, max_size=20), st.lists(st.sampled_from(list(KEYS)), min_size=1, max_size=3, unique=True), st.data()
)
def test_groups_are_those_of_python(rows: list[Any], paths: list[str], data: st.DataObject) -> None:
    documents = items(rows)
    before, after = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    named = {f"key{i}": path for i, path in enumerate(paths)}
    expected: dict[Any, list[str]] = {}
    for item in documents:
        expected.setdefault(key_of(paths, item), []).append(item.id)

    seen = []

    def note(group: DocumentArray[Item]) -> list[Item]:
        seen.append(group.id)
        return []

    grouped = shard(documents, before).group_by(num_partitions=after, **named)
    assert grouped.map_groups(note).collect() == DocumentArray[Item]()
    assert sorted(seen) == sorted(expected.values())
    assert sorted(grouped.count().collect()["count"]) == sorted(map(len, expected.values()))
    firsts = shard(documents, before).distinct(*paths, num_partitions=after).collect()
    assert sorted(firsts.id) == sorted(ids[0] for ids in expected.values())
    assert firsts.id == shard(documents, 1).distinct(*paths, num_partitions=1).collect().id


@LAW
@given(
    st.lists(ROW, max_size=30),
    st.lists(st.sampled_from(["number", "weight", "packed", "box.town"]), min_size=1, max_size=3, unique=True),
    st.data(),
)
def test_sort_is_that_of_python(rows: list[Any], paths: list[str], data: st.DataObject) -> None:
    documents = items(rows)
    down = data.draw(st.lists(st.booleans(), min_size=len(paths), max_size=len(paths)))
    expected = list(documents)
    for path, is_down in reversed(list(zip(paths, down, strict=True))):
        expected.sort(key=lambda item: sort_key(path, item), reverse=is_down)
    shards = shard(documents, data.draw(st.integers(1, 4)))
    actual = shards.sort(*paths, descending=down, num_partitions=data.draw(st.integers(1, 5)))
    assert actual.collect().id == [item.id for item in expected]


@LAW
@given(st.lists(st.tuples(st.one_of(st.none(), st.sampled_from(TOWNS)), st.integers(0, 9)), max_size=9), st.data())
def test_joins_are_those_of_python(rows: list[Any], data: st.DataObject) -> None:
    towns = DocumentArray[Town](
        [Town(id=f"town {i}", town=t, people=n, map=np.full(3, n, np.uint8)) for i, (t, n) in enumerate(rows)]
    )
    documents = items(data.draw(st.lists(ROW, max_size=12)))
    left, right = shard(documents, data.draw(st.integers(1, 3))), shard(towns, data.draw(st.integers(1, 3)))
    pairs = [
        (item, town)
        for item in documents
        for town in towns
        if town.town is not None and KEYS["box.town"](item) == town.town
    ]
    matched, met = {item.id for item, _ in pairs}, {town.id for _, town in pairs}
    inner = Counter((item.id, town.people) for item, town in pairs)
    left_only = Counter((item.id, None) for item in documents if item.id not in matched)
    right_only = Counter((town.id, town.people) for town in towns if town.id not in met)
    expected = {
        "inner": inner,
        "left": inner + left_only,
        "right": inner + right_only,
        "outer": inner + left_only + right_only,
    }
    for how, rows_of_python in expected.items():
        result = left.join(right, on={"box.town": "town"}, how=how, num_partitions=data.draw(st.integers(1, 3)))  # type: ignore[arg-type]
        joined = result.collect()
        assert Counter((row.id, row.people) for row in joined) == rows_of_python
        for row in joined:
            assert row.map is None if row.people is None else row.map.tolist() == [row.people] * 3
            assert row.picture is None if row.id.startswith("town") else row.picture[0] == int(row.id[5:]) % 256
    assert set(left.join(right, {"box.town": "town"}, "semi").collect().id) == matched
    assert set(left.join(right, {"box.town": "town"}, "anti").collect().id) == set(documents.id) - matched


@settings(LAW, max_examples=1)
@given(st.lists(ROW, min_size=1, max_size=25), st.integers(0, 2**63 - 1))
def test_results_are_equal_on_every_engine(start_engine: Callable[[str], Any], rows: list[Any], seed: int) -> None:
    documents = items(rows)
    towns = DocumentArray[Town]([Town(id=t, town=t, people=len(t), map=np.zeros(3, np.uint8)) for t in TOWNS])
    results = {}
    for name, parts in {"local": 1, "ray": 3, "spark": 2}.items():
        engine = start_engine(name)
        shards = shard(documents, parts, engine)
        results[name] = [
            shards.shuffle(seed).collect(),
            shards.sort("weight", "box.town", descending=[True, False], num_partitions=parts).collect(),
            shards.group_by("box.town", "price", num_partitions=3).map_groups(describe_group).collect(),
            shards.group_by("box.colour")
            .aggregate(number="count", mean=("weight", "mean"), last=("packed", "max"), prices=("price", "n_unique"))
            .collect(),
            shards.join(shard(towns, 2, engine), {"box.town": "town"}, "outer", num_partitions=2).collect(),
        ]
    for name in ("ray", "spark"):
        for actual, expected in zip(results[name], results["local"], strict=True):
            assert actual.to_json() == expected.to_json()


# --- on every engine


@pytest.fixture
def shards(engine: Any) -> DocumentShards[Good]:
    return DocumentShards[Good].from_documents(goods(ROWS), num_partitions=3, engine=engine)


def oldest_first(group: DocumentBatch[Good], factor: int, *, remark: str) -> DocumentBatch[Good]:
    prices = [price * factor for price in group.price]
    return DocumentBatch[Good].from_columns(
        {"id": group.id, "name": group.name, "price": prices, "photo": group.photo, "maker": group.maker}
        | {"remark": [remark] * len(group)}
    )


def test_group_by_runs_on_every_engine(shards: DocumentShards[Good], tmp_path: Path) -> None:
    mapped = shards.group_by("maker.town").map_groups(oldest_first, as_batch=True, args=(2,), kwargs={"remark": "x"})
    actual = mapped.collect()
    assert sorted(actual.price) == [2 * i for i in range(ROWS)]
    assert set(actual.remark) == {"x"}
    summary = shards.group_by("maker.town").aggregate(document_type=PlaceSummary, number="count", top=("price", "max"))
    assert type(summary) is DocumentShards[PlaceSummary]
    assert {row.town: (row.number, row.top) for row in summary.collect()} == {
        "Bath": (14, 39),
        "Cork": (13, 37),
        "Ely": (13, 38),
    }
    summary.write_dataset(tmp_path / "out")
    assert len(DocumentShards[PlaceSummary].read_parquet(tmp_path / "out")) == 3


def test_generated_classes_travel_to_workers(shards: DocumentShards[Good]) -> None:
    counts = shards.group_by("name", town="maker.town").count()

    def double(row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        row.count *= 2
        return row

    again = counts.map(double).group_by("town").aggregate(total=("count", "sum"), names=("name", "n_unique"))
    assert sorted((row.town, row.total, row.names) for row in again.collect()) == [
        ("Bath", 28, 5),
        ("Cork", 26, 5),
        ("Ely", 26, 5),
    ]


def test_sort_limit_and_distinct_run_on_every_engine(shards: DocumentShards[Good]) -> None:
    dearest = shards.sort("maker.town", "price", descending=[False, True]).limit(3)
    assert [(good.maker.town, good.price) for good in dearest.collect()] == [("Bath", 39), ("Bath", 36), ("Bath", 33)]
    assert len(dearest) == 3
    assert sorted(shards.distinct("maker.town").collect().price) == [0, 1, 2]


def test_operations_are_lazy(engine: Any, tmp_path: Path) -> None:
    def note(good: Good, log: Path = tmp_path / "log") -> Good:
        with log.open("a") as file:
            file.write(".")
        return good

    noted = DocumentShards[Good].from_documents(goods(6), num_partitions=2, engine=engine).map(note)
    declared = [
        noted.sort("price", descending=True).limit(2).map(lambda good: good),
        noted.group_by("name").count(),
        noted.distinct("name").sort("name"),
        noted.join(noted.select("id", "price"), "price"),
        noted.shuffle(1).repartition(2).cache(),
    ]
    assert not (tmp_path / "log").exists()
    assert declared[0].collect().price == [5, 4]


def test_operations_accept_shards_without_rows(engine: Any) -> None:
    empty = DocumentShards[Good].from_documents([], num_partitions=2, engine=engine)
    assert len(empty.sort("price").collect()) == 0
    assert len(empty.group_by("maker.town").count().collect()) == 0
    assert len(empty.distinct("name").shuffle(1).collect()) == 0
    assert len(empty.join(empty.select("id", "price"), "price", "outer").collect()) == 0


def test_error_of_a_group_names_the_group(shards: DocumentShards[Good]) -> None:
    def fail(group: DocumentArray[Good]) -> DocumentArray[Good]:
        if group[0].maker.town == "Cork":
            raise ValueError("not this one")
        return group

    groups = shards.group_by("maker.town")
    with pytest.raises(PartitionError, match=r"partition \d+, group maker.town='Cork': ValueError: not this one"):
        groups.map_groups(fail).collect()
    assert set(groups.map_groups(fail, on_error="skip").collect().maker.town) == {"Bath", "Ely"}


# --- whole groups, memory


def test_groups_of_any_size_are_whole() -> None:
    """One group of 24 MiB, more than functions get at a time, and many small ones."""

    class Row(BaseDocument):
        key: int
        data: NdArray[uint8, 65536]

    rows = [Row(key=max(0, i - 383), data=np.full(65536, i % 256, np.uint8)) for i in range(420)]
    shards = DocumentShards[Row].from_documents(rows, num_partitions=3)

    def measure(group: DocumentBatch[Row]) -> list[Row]:
        return [Row(key=len(group), data=group.data[-1])]

    actual = shards.group_by("key").map_groups(measure, as_batch=True).collect()
    assert sorted(actual.key) == [1] * 36 + [384]
    assert len(set(actual.id)) == 37
    assert actual.id == shards.repartition(5).group_by("key").map_groups(measure, as_batch=True).collect().id


def test_aggregate_computes_every_function() -> None:
    weights = [1.0, None, 4.0, -2.0, 4.0]
    documents = items([(i, weight, None, Decimal(1), None) for i, weight in enumerate(weights)])
    every = {name: ("weight", name) for name in ("sum", "mean", "std", "min", "max", "n_unique", "first", "last")}
    row = shard(documents, 2).group_by("price").aggregate(count=("weight", "count"), **every).first()
    values = np.array([1.0, 4.0, -2.0, 4.0])
    assert (row.count, row.sum, row.mean, row.min, row.max) == (4, 7.0, 1.75, -2.0, 4.0)
    assert (row.n_unique, row.first, row.last) == (3, 1.0, 4.0)
    assert row.std == pytest.approx(values.std(ddof=1))
    none = shard(documents[1:2], 1).group_by("number").aggregate(**every).first()
    assert (none.sum, none.mean, none.std, none.min, none.n_unique, none.first) == (0.0, None, None, None, 0, None)


def test_sum_that_overflows_is_an_error() -> None:
    documents = items([(2**62, None, None, Decimal(1), None)] * 2)
    with pytest.raises(PartitionError, match="a sum of number exceeds 64 bits"):
        shard(documents, 2).group_by("price").aggregate(total=("number", "sum")).collect()


def test_keys_keep_their_types() -> None:
    documents = items([(1, None, MOMENTS[2], Decimal("1.50"), (Colour.BLUE, "Ely"))])
    row = shard(documents, 1).group_by("packed", "price", "box.colour").aggregate(top=("packed", "max")).first()
    assert (row.packed, row.price, row.colour, row.top) == (MOMENTS[2], Decimal("1.50"), Colour.BLUE, MOMENTS[2])


def test_shuffle_without_ids_depends_on_rows_only() -> None:
    shards = DocumentShards[Good].from_documents(goods(ROWS), num_partitions=3).select("price")
    order = shards.shuffle(1).collect().price
    assert sorted(order) == list(range(ROWS))
    assert order == shards.shuffle(1).collect().price != shards.shuffle(2).collect().price


def test_join_to_a_declared_class() -> None:
    class Priced(BaseDocument):
        name: str
        people: int | None

    towns = shard(DocumentArray[Town]([Town(town="Ely", people=20, map=np.zeros(3, np.uint8))]), 1)
    left = shard(goods(6), 2)
    joined = left.join(towns, {"maker.town": "town"}, "left", document_type=Priced)
    assert type(joined) is DocumentShards[Priced]
    assert {row.id: row.people for row in joined.collect()} == {
        f"good {i:03d}": 20 if i % 3 == 2 else None for i in range(6)
    }

    class Strict(BaseDocument):
        people: int

    with pytest.raises(SchemaError, match=r"Strict.people is stored as int64, but the result is int64 or None"):
        left.join(towns, {"maker.town": "town"}, "left", document_type=Strict)


MEMORY_JOB = """
import sys
import numpy as np
import pyarrow as pa
import pyarrow as pa
from quire import BaseDocument
from quire.distributed import DocumentShards, engine
from quire.distributed._encoding import DocumentLayout
from quire.distributed._shards import DocumentFrame
from quire.typing import NdArray, uint8


class Picture(BaseDocument):
    key: int
    pixels: NdArray[uint8, 65536]


layout = DocumentLayout(Picture)


class Source:  # 320 MiB
    stateful, schema = False, layout.fields

    def __call__(self, partition, batches):
        for start in range(0, 1280, 64):
            numbers = range(partition * 1280 + start, partition * 1280 + start + 64)
            rows = [Picture(id=str(i), key=-i, pixels=np.full(65536, i % 256, np.uint8)) for i in numbers]
            yield layout.encode(rows)


local = engine("local", num_workers=2, memory=32 << 20)
shards = DocumentShards[Picture](DocumentFrame(local, local.from_stage(Source(), 4), layout))
warm = shards.limit(10).sort("key").collect()

small = shards.select("id", "key")
result = {
    "sort": lambda: shards.sort("key"),
    "shuffle": lambda: shards.shuffle(1),
    "join": lambda: shards.join(small, "key"),
    "group": lambda: shards.group_by("key").map_groups(lambda group: group),
}[sys.argv[1]]()
rows, keys = 0, []
for batch in result.iter_batches():
    assert (batch.pixels[:, 0] == -np.asarray(batch.key) % 256).all()
    keys += list(batch.key)
assert sorted(keys) == list(range(-5119, 1)), len(keys)
assert sys.argv[1] != "sort" or keys == sorted(keys)
print(pa.default_memory_pool().max_memory())
"""


@pytest.mark.parametrize("call", ["sort", "shuffle", "join", "group"])
def test_local_engine_spills_within_its_memory(call: str, tmp_path: Path) -> None:
    """320 MiB of rows pass through a process in which Arrow holds less than 160 MiB at any time."""
    script = tmp_path / "job.py"
    script.write_text(MEMORY_JOB)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), call], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 160 << 20


# --- errors


def test_wrong_keys_and_options_are_errors() -> None:
    shards = shard(goods(6), 2)
    with pytest.raises(OptionError, match=r"sort\(\) needs the names or paths of fields"):
        shards.sort()
    with pytest.raises(OptionError, match=r"distinct\('photo'\): a field with one plain value a row is needed"):
        shards.distinct("photo")
    with pytest.raises(PathError, match=r"'maker.twon'.*Did you mean 'town'"):
        shards.group_by("maker.twon")
    with pytest.raises(OptionError, match=r"descending=\[True\]"):
        shards.sort("name", "price", descending=[True])
    with pytest.raises(OptionError, match=r"sort\('box.colour'\).*has no order"):
        shard(items([]), 1).sort("box.colour")
    with pytest.raises(OptionError, match=r"two keys would be called 'id'.*group_by\(id_of='maker.id'\)"):
        shards.group_by("id", "maker.id")
    with pytest.raises(OptionError, match=r"there is no function 'avg'.*mean"):
        shards.group_by("name").aggregate(price=("price", "avg"))
    with pytest.raises(OptionError, match=r"write price=\('field', 'mean'\)"):
        shards.group_by("name").aggregate(price="mean")
    with pytest.raises(OptionError, match="mean needs a field of numbers"):
        shards.group_by("name").aggregate(mean=("maker.town", "mean"))
    with pytest.raises(OptionError, match="'name' is the name of a key"):
        shards.group_by("name").aggregate(name="count")
    with pytest.raises(OptionError, match="use 'raise' or 'skip'"):
        shards.group_by("name").map_groups(describe_group, on_error="null")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="no column for PlaceSummary.top"):
        shards.group_by("maker.town").aggregate(document_type=PlaceSummary, number="count")
    with pytest.raises(OptionError, match="memory=-1"):
        engine_by_name("local", memory=-1)


def test_wrong_joins_are_errors() -> None:
    shards = shard(goods(6), 2)
    with pytest.raises(OptionError, match=r"how='iner'.*Did you mean 'inner'"):
        shards.join(shards, "name", "iner")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match=r"both sides have a field 'price'. Pass suffix='_right'"):
        shards.join(shards, "name")
    assert shards.join(shards, "name", suffix="_2").first().price_2 is not None
    with pytest.raises(OptionError, match=r"the left side has str, and the right side int"):
        shards.join(shards, {"name": "price"})
    with pytest.raises(OptionError, match=r"join\(\) takes shards of one engine"):
        shards.join(shard(goods(6), 2, engine_by_name("local", num_workers=1)), "name")
    with pytest.raises(SchemaError, match="documents of the left side need their ids"):
        shards.select("name").join(shards.select("name", "price"), "name")


def test_packs_are_read_without_a_copy() -> None:
    from quire.distributed._exchange import _pack_buffers

    packs = [bytes([number]) * 64 for number in range(5)]
    batch = pa.record_batch({"pack": pa.array(packs, pa.large_binary())})
    data = batch.column("pack").buffers()[2]
    for rows in (batch, batch.slice(2, 2), batch.slice(5)):
        buffers = list(_pack_buffers(rows))
        assert [buffer.to_pybytes() for buffer in buffers] == rows.column("pack").to_pylist()
        assert all(data.address <= buffer.address < data.address + data.size for buffer in buffers)
