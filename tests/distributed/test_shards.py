"""DocumentShards: the same calls return the same documents on every engine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from quire import DocumentArray, DocumentBatch
from quire.distributed import DocumentShards
from quire.errors import OptionError, PartitionError, PathError
from tests.distributed.sample_documents import (
    Counting,
    Good,
    Measurement,
    Rated,
    badly_shaped,
    dearer,
    good,
    goods,
    in_columns,
    measurements,
    one_a_group,
    rated,
    rated_without_a_word,
    twice,
)
from tests.distributed.sample_stages import Everything, everything

pytestmark = [pytest.mark.needs("pyarrow", "ray", "pyspark", "ml_dtypes"), pytest.mark.filterwarnings("ignore")]
ROWS = 20
MANY, GROUPS = 320, 7
GROUP_SIZES = sorted(len(range(i, MANY, GROUPS)) for i in range(GROUPS))


@pytest.fixture
def shards(engine: Any) -> DocumentShards[Good]:
    return DocumentShards[Good].from_documents(goods(ROWS), num_partitions=3, engine=engine)


def by_id(documents: Any) -> list[Any]:
    return sorted(documents, key=lambda document: document.id)


# --- rows


def test_collect_returns_the_original_documents(engine: Any) -> None:
    documents = DocumentArray[Everything]([everything(number) for number in range(9)])
    actual = DocumentShards.from_documents(documents, num_partitions=4, engine=engine)
    assert type(actual) is DocumentShards[Everything]
    assert actual.map(lambda document: document).collect().identical(documents)


def test_take_first_and_collect(shards: DocumentShards[Good]) -> None:
    assert shards.first().identical(good(0))
    assert shards.head(9).identical(goods(9))
    assert shards.collect().identical(goods(ROWS))
    assert [document.id for document in shards] == goods(ROWS).id
    assert (len(shards), shards.num_partitions()) == (ROWS, 3)


def test_iter_batches_returns_the_requested_size(shards: DocumentShards[Good]) -> None:
    batches = list(shards.iter_batches(8))
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert np.concatenate([batch.photo for batch in batches]).tolist() == goods(ROWS).stack().photo.tolist()


def test_select_keeps_some_fields(shards: DocumentShards[Good]) -> None:
    few = shards.select("photo", "price")
    assert few.first().__dict__.keys() == {"photo", "price"}
    assert few.map_batch(lambda batch: batch).collect().price == list(range(ROWS))
    towns = shards.select("maker.town", "id").head(4)
    assert towns.maker.town == ["Bath", "Cork", "Ely", "Bath"]
    assert not hasattr(towns[0].maker, "since")


def test_repartition_keeps_documents(shards: DocumentShards[Good]) -> None:
    for other in (shards.repartition(5), shards.repartition(1), shards.shuffle(3)):
        assert DocumentArray[Good](by_id(other.collect())).identical(goods(ROWS))
    assert shards.repartition(5).num_partitions() == 5


def test_partition_by_moves_equal_keys_into_one_partition(shards: DocumentShards[Good]) -> None:
    marked = shards.partition_by("name", 4).transform_shard(_alone)
    places = [(name, place) for document in marked.collect() for name, place in [(document.name, document.remark)]]
    assert len(set(places)) == len({name for name, _ in places}) == 5
    assert marked.num_partitions() == 4


def _alone(documents: DocumentArray[Good]) -> DocumentArray[Good]:
    """Name the partition by its content: there are few rows, so it is one call per partition."""
    for document in documents:
        document.remark = ",".join(sorted(set(documents.name)))
    return documents


def _cut_small(engine: Any) -> Any:
    """Let Ray split blocks at 1 MiB instead of 128 MiB, so that partitions have several."""
    if engine.name != "ray":
        return contextlib.nullcontext()
    _ = engine.workers  # Ray runs
    import ray.data

    return mock.patch.object(ray.data.DataContext.get_current(), "target_max_block_size", 1 << 20)


@pytest.mark.parametrize("key", ["number", "sensor.place"])
def test_function_after_partition_by_sees_whole_groups(key: str) -> None:
    """20 MiB in two partitions: several times what functions otherwise get at a time."""
    shards = DocumentShards[Measurement].from_documents(measurements(MANY, GROUPS), num_partitions=4)
    actual = shards.partition_by(key, 2).map(_copied).transform_shard(one_a_group).collect()
    assert sorted(actual.number) == GROUP_SIZES


def test_groups_stay_whole_on_every_engine_and_in_a_cache(engine: Any) -> None:
    with _cut_small(engine):
        shards = DocumentShards[Measurement].from_documents(measurements(MANY, GROUPS), num_partitions=4, engine=engine)
        grouped = shards.partition_by(["sensor.place", "number"], 2).map(_copied)
        assert sorted(grouped.transform_shard(one_a_group).collect().number) == GROUP_SIZES
        cached = grouped.cache()
        if engine.name == "ray":
            with pytest.raises(OptionError, match=r"by cache\(\) on Ray.*Call partition_by\(\) after it"):
                cached.map_batch(_one_a_group_of_a_batch)
            cached = cached.partition_by("number", 2)
        assert sorted(cached.map_batch(_one_a_group_of_a_batch).collect().number) == GROUP_SIZES


def _copied(document: Measurement) -> Measurement:
    return document


def _one_a_group_of_a_batch(batch: DocumentBatch[Measurement]) -> list[Measurement]:
    return list(one_a_group(batch.unstack()))


def test_operations_that_split_groups_are_rejected() -> None:
    shards = DocumentShards[Good].from_documents(goods(ROWS))
    grouped = shards.partition_by("name", 2)
    with pytest.raises(OptionError, match=r"followed by concat.*Call partition_by\(\) after it"):
        DocumentShards.concat([shards, grouped]).transform_shard(_alone)
    with pytest.raises(OptionError, match="on_error='skip' calls a function that fails for each row alone"):
        grouped.transform_shard(_alone, on_error="skip")
    assert len(grouped.map_batch(lambda batch: batch, 3, on_error="skip")) == ROWS
    assert len(grouped.repartition(3).transform_shard(_alone, on_error="skip")) == ROWS


def test_partition_by_needs_fields_with_one_value_per_row() -> None:
    shards = DocumentShards[Good].from_documents(goods(ROWS))
    for path in ("maker", ""):
        with pytest.raises(OptionError, match="partition_by"):
            shards.partition_by(path)
    with pytest.raises(PathError, match=r"'maker.twon'.*Did you mean 'town'"):
        shards.partition_by("maker.twon")


def test_shuffle_order_follows_the_seed(shards: DocumentShards[Good]) -> None:
    order = shards.shuffle(3).collect().id
    assert order == shards.shuffle(3).collect().id
    assert order != shards.shuffle(4).collect().id
    assert order != goods(ROWS).id


def test_sample_and_split_are_the_same_on_every_engine(shards: DocumentShards[Good]) -> None:
    local = DocumentShards[Good].from_documents(goods(ROWS))
    assert by_id(shards.sample(fraction=0.4, seed=7).collect()) == by_id(local.sample(fraction=0.4, seed=7).collect())
    parts = [part.collect().id for part in shards.repartition(2).split(0.5, 0.3, 0.2, seed=1)]
    assert [sorted(part) for part in parts] == [
        sorted(part.collect().id) for part in local.split(0.5, 0.3, 0.2, seed=1)
    ]
    assert sorted(one for part in parts for one in part) == goods(ROWS).id


def test_shards_accept_large_seeds_or_raise() -> None:
    local = DocumentShards[Good].from_documents(goods(ROWS))
    for seed in (2**64, 2**127, np.int64(5)):
        parts = [part.collect().id for part in local.split(0.5, 0.5, seed=seed)]
        assert sorted(one for part in parts for one in part) == goods(ROWS).id
        assert len(local.sample(3, seed=seed).collect()) == 3
    for seed in (-1, 2**63, 2**127):
        with pytest.raises(OptionError, match=r"at least 0 and below 2\*\*63"):
            local.shuffle(seed)
    for call in (lambda: local.split(0.5, 0.5, seed=2**600), lambda: local.sample(3, seed=2**600)):
        with pytest.raises(OptionError, match="less than 512 bits"):
            call()


def test_unique_returns_each_value_once(shards: DocumentShards[Good]) -> None:
    assert shards.unique("name") == [f"name {i}" for i in range(5)]
    assert shards.unique("maker.town") == ["Bath", "Cork", "Ely"]
    assert shards.unique("remark") == [None, *sorted(f"remark {i}" for i in range(0, ROWS, 4))]


def test_union_appends_shards(engine: Any, shards: DocumentShards[Good]) -> None:
    more = DocumentShards[Good].from_documents(goods(4), num_partitions=2, engine=engine)
    both = DocumentShards.concat([shards, more.map(dearer, 100)])
    assert both.collect().price == [*range(ROWS), 100, 101, 102, 103]
    assert (len(both), both.num_partitions()) == (ROWS + 4, 5)


# --- functions


def test_map_accepts_every_kind_of_function(shards: DocumentShards[Good]) -> None:
    more = 5
    assert shards.map(dearer).collect().price == list(range(1, ROWS + 1))
    assert shards.map(dearer, 3, times=2).collect().price == [2 * i + 3 for i in range(ROWS)]
    assert shards.map(lambda d: dearer(d, more)).collect().price == list(range(5, ROWS + 5))


def test_map_to_another_class_keeps_ids(shards: DocumentShards[Good]) -> None:
    some = shards.filter(lambda document: document.price != 7)
    for created in (some.map(rated), some.map(rated_without_a_word, document_type=Rated)):
        assert type(created) is DocumentShards[Rated]
        actual = created.collect()
        assert actual.id == [i for i in goods(ROWS).id if i != "good 007"]
        assert actual[3].score.dtype == np.float16
        assert actual.stars == [i / 2 for i in range(ROWS) if i != 7]


def test_map_runs_nothing_before_rows_are_requested(engine: Any, tmp_path: Path) -> None:
    def noted(document, log=tmp_path / "log"):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        with log.open("a") as file:
            file.write(f"{document.id}\n")
        return document

    def noted_all(documents, log=tmp_path / "log"):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return [noted(document, log) for document in documents]

    shards = DocumentShards[Good].from_documents(goods(3), num_partitions=1, engine=engine)
    declared = shards.map(noted).map_batch(noted_all, 2).transform_shard(noted_all)
    assert not (tmp_path / "log").exists()
    assert declared.collect().identical(goods(3))
    assert sorted((tmp_path / "log").read_text().split()[1::2]) == sorted(3 * ["000", "001", "002"])


@pytest.mark.parametrize("on_error", ["raise", "skip", "null"])
@pytest.mark.parametrize("call", ["map", "map_batch", "transform_shard"])
def test_undeclared_class_is_an_error_of_the_job(on_error: Any, call: str) -> None:
    shards = DocumentShards[Good].from_documents(goods(3))
    one_by_one = {"map": rated_without_a_word}.get(call, lambda documents: [rated(one) for one in documents])
    created = getattr(shards, call)(one_by_one, on_error=on_error)
    with pytest.raises(PartitionError, match="must return documents of Good, but returned Rated.*document_type=Rated"):
        created.collect()


def test_undeclared_subclass_with_more_fields_is_an_error() -> None:
    class Boxed(Good):
        box: str

    def boxed(document, **more):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN003, ANN202
        return Boxed(**dict(document), **more)

    shards = DocumentShards[Good].from_documents(goods(3))
    with pytest.raises(
        PartitionError, match="returned Boxed, a subclass of Good with more fields.*document_type=Boxed"
    ):
        shards.map(boxed, box="a").collect()
    assert shards.map(boxed, box="a", document_type=Boxed).collect().box == ["a"] * 3


def test_error_on_the_first_row_is_raised(engine: Any) -> None:
    def fail(document):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        raise KeyError(document.name)

    created = DocumentShards[Good].from_documents(goods(3), num_partitions=1, engine=engine).map(fail)
    with pytest.raises(PartitionError, match="document 0 .*KeyError") as caught:
        created.collect()
    assert "in fail" in caught.value.traceback


def test_map_batch_calls_functions_with_batches(shards: DocumentShards[Good]) -> None:
    created = shards.map_batch(in_columns, 3)
    actual = created.collect()
    assert actual.id == goods(ROWS).id
    assert type(actual[0]) is Rated
    assert set(actual.stars) <= {1.0, 2.0, 3.0}
    assert sum(1 / stars for stars in actual.stars) == pytest.approx(
        len([*range(0, 6, 3), *range(0, 7, 3), *range(0, 7, 3)])
    )


def test_transform_shard_returns_any_number_of_documents(shards: DocumentShards[Good]) -> None:
    actual = shards.transform_shard(twice, "!", start=1000).collect()
    assert actual.price == [price for i in range(ROWS) for price in (i, i + 1000)]
    assert actual.id[:4] == ["good 000", "good 000!", "good 001", "good 001!"]


def test_class_is_instantiated_once_per_worker(shards: DocumentShards[Good]) -> None:
    actual = shards.map(Counting, 100).collect()
    calls = {worker: [d.price for d in actual if d.remark == worker] for worker in actual.remark}
    assert sum(map(len, calls.values())) == ROWS
    for numbers in calls.values():
        assert sorted(numbers) == list(range(101, 101 + len(numbers)))


def test_filter_accepts_functions_and_queries(shards: DocumentShards[Good]) -> None:
    expected = [i for i in range(ROWS) if i >= 12]
    assert shards.filter(lambda document: document.price >= 12).collect().price == expected
    assert shards.filter({"price": {"$gte": 12}}).collect().price == expected
    assert shards.filter({"maker.town": "Ely", "price": {"$lt": 9}}).collect().price == [2, 5, 8]
    assert len(shards.filter({"price": -1})) == 0


def test_cache_computes_documents_once(shards: DocumentShards[Good], tmp_path: Path) -> None:
    log = tmp_path / "log"

    def noted(document: Good) -> Good:
        with log.open("a") as file:
            file.write(f"{document.id}\n")
        return document

    kept = shards.map(noted).cache()
    assert not log.exists()
    assert kept.collect().identical(goods(ROWS))
    assert kept.filter({"price": {"$lt": 3}}).collect().price == [0, 1, 2]
    assert sorted(log.read_text().split("\n")[:-1]) == goods(ROWS).id


# --- failing rows


def test_error_names_partition_document_and_cause(shards: DocumentShards[Good]) -> None:
    with pytest.raises(
        PartitionError, match=r"partition 1, document 1 \(id 'good 007'\): ValueError: nobody"
    ) as caught:
        shards.map(rated).collect()
    error = caught.value
    assert (error.partition, error.document, error.id, error.field) == (1, 1, "good 007", None)
    assert "in rated" in error.traceback
    assert "nobody rates a seven" in error.traceback
    assert error.__cause__ is not None


def test_error_names_the_field(shards: DocumentShards[Good]) -> None:
    with pytest.raises(PartitionError, match="good 007.*field 'score'.*got .3,.") as caught:
        shards.map(badly_shaped).collect()
    assert (caught.value.document, caught.value.field) == (1, "score")


def test_on_error_skips_or_nulls_failing_rows(shards: DocumentShards[Good]) -> None:
    for function in (rated, badly_shaped):
        without = shards.map(function, on_error="skip").collect()
        assert without.id == [i for i in goods(ROWS).id if i != "good 007"]
        actual = shards.map(function, on_error="null").collect()
        assert actual.id == goods(ROWS).id
        assert (actual[7].name, actual[7].score, actual[7].stars) == ("name 2", None, None)
        assert actual[6].score is not None


def test_on_error_drops_only_the_failing_rows_of_a_batch(shards: DocumentShards[Good]) -> None:
    actual = shards.transform_shard(_refusing, on_error="skip").collect()
    assert actual.id == [i for i in goods(ROWS).id if i != "good 007"]
    with pytest.raises(
        PartitionError, match=r"partition 1, documents 0 to 6 \(the first has id 'good 006'\): KeyError"
    ):
        shards.transform_shard(_refusing).collect()


def _refusing(documents: DocumentArray[Good]) -> DocumentArray[Good]:
    if 7 in documents.price:
        raise KeyError("seven")
    return documents


# --- empty partitions


def test_empty_partitions_do_no_harm(engine: Any, tmp_path: Path) -> None:
    few = DocumentShards[Good].from_documents(goods(2), num_partitions=4, engine=engine)
    assert few.num_partitions() == 4
    assert few.map(rated).map_batch(lambda batch: batch, 2).collect().id == goods(2).id
    none = few.filter({"price": 100})
    assert len(none.map(dearer).collect()) == 0
    assert none.unique("name") == []
    assert len(none) == 0
    none.write_dataset(tmp_path / "none")
    again = DocumentShards[Good].read_parquet(tmp_path / "none", engine=engine, allow_empty=True)
    assert len(again.collect()) == 0
