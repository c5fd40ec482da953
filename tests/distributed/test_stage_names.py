"""Names of stages in the dashboards of Ray and Spark: those of the user's functions."""

from __future__ import annotations

from typing import Any

import pytest

from quire import DocumentArray
from quire.distributed import DocumentShards
from tests.distributed.sample_documents import Good, goods

pytestmark = [pytest.mark.needs("pyarrow", "cloudpickle"), pytest.mark.filterwarnings("ignore")]


def polish(good: Good) -> Good:
    return good


class Embed:
    def __call__(self, good: Good) -> Good:
        return good


@pytest.mark.needs("ray")
def test_ray_names_operators_after_functions(start_engine: Any) -> None:
    shards = DocumentShards[Good].from_documents(goods(6), num_partitions=2, engine=start_engine("ray"))

    def oldest(group: DocumentArray[Good]) -> list[Good]:
        return [group[0]]

    polished = shards.map(polish).filter({"price": {"$gte": 1}})
    assert len(polished.collect()) == 5
    assert "MapBatches(polish->filter(price))" in polished.native.materialize().stats()
    grouped = polished.map(Embed).group_by("name").map_groups(oldest)
    stats = grouped.native.materialize().stats()
    assert "MapBatches(polish->filter(price)->Embed->ScatterRows)" in stats
    assert "MapBatches(oldest)" in stats


@pytest.mark.needs("pyspark")
def test_spark_describes_jobs_and_stages_by_functions(start_engine: Any) -> None:
    own = start_engine("spark")
    shards = DocumentShards[Good].from_documents(goods(6), num_partitions=2, engine=own)
    context = own.session.sparkContext
    store = context._jsc.sc().statusStore()

    def read_descriptions() -> tuple[set[str], set[str]]:
        """Return the descriptions of jobs and of stages that the Spark UI shows."""
        context._jsc.sc().listenerBus().waitUntilEmpty()
        defaults = [getattr(store, f"stageList$default${number}")() for number in range(2, 6)]
        lists = store.jobsList(None), store.stageList(None, *defaults)
        every = [[items.apply(number).description() for number in range(items.size())] for items in lists]
        jobs, stages = ({text.get() for text in texts if text.isDefined()} for texts in every)
        return jobs, stages

    shards.map(polish).filter({"price": {"$gte": 1}}).collect()
    context.setJobDescription("mine")
    try:
        shards.sort("price").map(Embed).collect()
        assert context.getLocalProperty("spark.job.description") == "mine"
    finally:
        context.setJobDescription(None)
    shards.sort("price").map(Embed).collect()
    jobs, stages = read_descriptions()
    expected = {"mine", "polish->filter(price)", "OrderRows->Embed"}
    assert expected <= jobs
    assert expected <= stages
    assert context.getLocalProperty("spark.job.description") is None
