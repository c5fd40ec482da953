"""What shards say about themselves: their plan, what their stages have done, and how far a job is."""

from __future__ import annotations

import gc
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from quire import BaseDocument
from quire.distributed import DocumentShards, StageStats
from quire.distributed._metrics import StageReport
from quire.distributed._ray import _ReportCollector
from quire.errors import PartitionError
from quire.storage import open_dataset
from tests.distributed.sample_documents import Good, goods

pytestmark = [
    pytest.mark.needs("pyarrow", "ray", "pyspark", "xxhash"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
ROWS = 40


class Name(BaseDocument):
    name: str


class Label(BaseDocument):
    name: str
    label: int


def name_of(good: Good) -> Name:
    return Name(name=good.name)


def as_it_is(part: Any) -> Any:
    return part


@pytest.fixture
def shards(engine: Any) -> DocumentShards[Good]:
    return DocumentShards[Good].from_documents(goods(ROWS), num_partitions=4, engine=engine)


def by_name(shards: DocumentShards[Any]) -> dict[str, Any]:
    return {stats.name: stats for stats in shards.stats()}


# --- plans


def test_explain_shows_operations_above_those_that_they_get_rows_from() -> None:
    shards = DocumentShards[Good].from_documents(goods(ROWS), num_partitions=4)
    labels = DocumentShards[Label].from_documents([Label(name="a", label=1)], num_partitions=1)
    planned = shards.map(name_of).join(labels, on="name", num_partitions=3).sort("label", num_partitions=2).limit(5)
    assert planned.explain() == textwrap.dedent(
        """\
        DocumentShards[NameLabel] on local
          limit(5)
            sort('label')  [moves all rows, 2 partitions]
              join('name', how='inner')  [-> NameLabel, moves all rows, 3 partitions]
                map(name_of)  [-> Name]
                  from_documents()  [4 partitions, 40 documents]
                from_documents()  [1 partitions, 1 documents]"""
    )


def test_explain_knows_every_operation(tmp_path: Path) -> None:
    goods(ROWS).to_ndjson(tmp_path / "goods.jsonl")
    shards = DocumentShards[Good].read_json(tmp_path / "goods.jsonl")
    many = DocumentShards.concat([shards, shards]).repartition(3).partition_by("name").shuffle(3).shuffle()
    many = many.sample(fraction=0.5, seed=1).split(0.5, 0.5)[0].select("name", "price").distinct("name").cache()
    many = (
        many.dedupe("name", near="minhash")
        .filter({"price": {"$gt": 1}})
        .map_batch(as_it_is, 8)
        .transform_shard(as_it_is)
    )
    lines = [line.strip().partition("(")[0] for line in many.explain().splitlines()[1:]]
    expected = "transform_shard map_batch filter dedupe cache distinct select split sample shuffle shuffle partition_by"
    assert lines == [*expected.split(), "repartition", "concat", "read_json", "read_json"]
    assert "group_by('name').aggregate(n)" in shards.group_by("name").aggregate(n="count").explain()
    assert "group_by('name').map_groups(as_it_is)" in shards.group_by("name").map_groups(as_it_is).explain()


def test_explain_runs_nothing() -> None:
    def fails(good: Good) -> Good:
        raise AssertionError(f"it runs on {good.id}")

    shards = DocumentShards[Good].from_documents(goods(ROWS)).map(fails).sort("name")
    assert "map(fails)" in shards.explain()
    assert [stats.calls for stats in shards.stats()] == [0, 0, 0]


# --- counts


def test_stats_count_rows_and_bytes_of_each_stage_on_every_engine(shards: DocumentShards[Good]) -> None:
    def cheap(good: Good) -> bool:
        return good.price < 10

    expected = [name_of(good) for good in goods(ROWS) if cheap(good)]
    kept = shards.filter(cheap).map(name_of).distinct("name")
    distinct = len({document.name for document in expected})
    assert [stats.calls for stats in kept.stats()] == [0, 0, 0, 0]
    assert len(kept.collect()) == distinct
    stats = by_name(kept)
    assert list(stats) == ["filter(cheap)", "name_of", "ScatterRows", "DistinctRows"]
    assert [(one.rows_in, one.rows_out) for one in stats.values()] == [
        (ROWS, len(expected)),
        (len(expected), len(expected)),
        (len(expected), len(expected)),
        (len(expected), distinct),
    ]
    assert all(one.bytes_out > 0 and one.seconds >= 0 and one.retries == 0 for one in stats.values())
    assert stats["name_of"].calls == 4
    head, *table = str(kept.stats()).splitlines()
    assert " ".join(head.split()) == "stage calls rows in rows out MB out seconds retries"
    assert len(table) == 4


def test_stats_of_several_jobs_add_up() -> None:
    shards = DocumentShards[Good].from_documents(goods(ROWS), num_partitions=4).map(name_of)
    shards.collect()
    other = shards.filter({"name": "none"})
    assert len(other) == 0
    assert by_name(shards)["name_of"].rows_out == 2 * ROWS
    assert by_name(other)["name_of"].rows_out == 2 * ROWS
    assert by_name(other)["filter(name)"].rows_in == ROWS
    cached = shards.cache()
    assert [len(cached.collect()), len(cached.collect())] == [ROWS, ROWS]
    assert by_name(cached)["name_of"].rows_out == 3 * ROWS


def test_stats_count_what_a_failed_job_has_done() -> None:
    def fails_late(good: Good) -> Good:
        if good.id == goods(ROWS)[-1].id:
            raise ValueError("the last one")
        return good

    shards = DocumentShards[Good].from_documents(goods(ROWS), num_partitions=1).map(fails_late)
    with pytest.raises(PartitionError):
        shards.collect()
    assert by_name(shards)["fails_late"].rows_in == ROWS


def dies_once(good: Good, marker: str) -> Good:
    if good.id == goods(ROWS)[5].id and not Path(marker).exists():
        Path(marker).touch()
        os._exit(1)
    return good


@pytest.mark.parametrize("name", ["processes", "ray"])
def test_stats_count_retries(start_engine: Any, name: str, tmp_path: Path) -> None:
    shards = DocumentShards[Good].from_documents(goods(ROWS), num_partitions=4, engine=start_engine(name))
    mapped = shards.map(dies_once, str(tmp_path / "marker"))
    assert len(mapped.collect()) == ROWS
    stats = by_name(mapped)["dies_once"]
    assert stats.retries == 1
    assert stats.rows_out >= ROWS


def test_reports_that_nobody_asks_for_are_added_up() -> None:
    collector = _ReportCollector()
    for task in range(150_000):
        collector.begin(f"task {task}", ["key"])
        collector.add([StageReport("key", StageStats("", 1, 2, 3, 4, 0.5))])
    collector.begin("task 149999", ["key", "other"])
    assert len(collector._begun) <= 100_000
    assert collector.take() == [StageReport("key", StageStats("", 150_000, 300_000, 450_000, 600_000, 75_000.0, 1))]
    assert collector.take() == []


def test_stats_count_rows_that_were_written(shards: DocumentShards[Good], tmp_path: Path) -> None:
    named = shards.map(name_of)
    named.write_dataset(tmp_path / "names")
    gc.collect()  # the frame of the writing job is gone
    assert by_name(named)["name_of"].rows_out == ROWS


# --- progress


def test_long_work_shows_progress_on_every_engine(
    shards: DocumentShards[Good], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def slowly(good: Good) -> Good:
        import time

        time.sleep(0.05)
        return good

    shards.map(slowly).write_dataset(tmp_path / "goods", show_progress=True)
    assert "writing" in capfd.readouterr().err
    assert len(open_dataset(tmp_path / "goods", Good)) == ROWS
    assert len(shards.map(slowly).collect(show_progress=True)) == ROWS
    assert "collecting" in capfd.readouterr().err
    shards.map(slowly).collect(show_progress=False)
    assert capfd.readouterr().err == ""
