"""Jobs with resources on clusters that declare GPUs, run in a process of their own; prints what workers got.

`python -m tests.distributed.resources_job ray|spark folder`
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.distributed import DocumentShards, Resources, engine
from quire.errors import OptionError

JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # starts faster


class Row(BaseDocument):
    number: int
    worker: str = ""
    gpus: str = ""


def rows(number: int) -> list[Row]:
    return [Row(id=str(i), number=i) for i in range(number)]


class OnRay:
    """Notes the GPUs that Ray has assigned to the actor."""

    def __init__(self, factor: int, *, resources: str) -> None:
        import ray

        self.factor, self.resources = factor, resources
        context = ray.get_runtime_context()
        self.actor, self.gpus = context.get_actor_id() or "", ",".join(context.get_accelerator_ids()["GPU"])

    def __call__(self, batch: DocumentBatch[Row]) -> list[Row]:
        return [
            Row(id=row.id, number=row.number * self.factor, worker=f"{self.resources} {self.actor}", gpus=self.gpus)
            for row in batch
        ]


def note_task(batch: DocumentBatch[Row]) -> list[Row]:
    import ray

    context = ray.get_runtime_context()
    assigned = context.get_assigned_resources()
    described = {name: assigned.get(name, 0) for name in ("CPU", "GPU", "memory")}
    return [Row(id=row.id, number=row.number, worker=json.dumps(described)) for row in batch]


def whole(part: DocumentArray[Row]) -> list[Row]:
    return [Row(id=part[0].id, number=len(part))]


def run_on_ray() -> dict[str, Any]:
    own = engine("ray", num_cpus=3, num_gpus=2, object_store_memory=200 << 20)
    shards = DocumentShards[Row].from_documents(rows(40), num_partitions=8, engine=own)
    half = Resources(cpus=0.5, gpus=0.5, concurrency=(2, 4))
    actors = shards.map_batch(OnRay, 5, args=(2,), kwargs={"resources": "mine"}, resources=half)
    tasks = shards.map_batch(note_task, resources=Resources(cpus=2, gpus=1, memory="50MB"))
    grouped = shards.map(lambda row: row).partition_by("id", 3).transform_shard(whole, resources=Resources(gpus=1))
    both = shards.map(lambda row: row, resources=Resources(cpus=2)).map_batch(note_task, resources=Resources(gpus=1))
    refused = []
    for requested in (Resources(gpus=3), Resources(gpus=1, concurrency=(3, 3)), Resources(memory="900TB")):
        try:
            shards.map(whole, resources=requested)
        except OptionError as error:
            refused.append(str(error))
    result = {
        "actors": [(row.number, row.worker, row.gpus) for row in actors.collect()],
        "tasks": sorted({row.worker for row in tasks.collect()}),
        "grouped": sorted(row.number for row in grouped.collect()),
        "both": sorted({row.worker for row in both.collect()}),
        "refused": refused,
    }
    own.close()
    return result


def note_spark_task(batch: DocumentBatch[Row]) -> list[Row]:
    from pyspark import TaskContext

    task: Any = TaskContext.get()
    gpus = ",".join(address for resource in task.resources().values() for address in resource.addresses)
    return [Row(id=row.id, number=task.cpus(), worker="", gpus=gpus) for row in batch]


def run_on_spark(folder: Path) -> dict[str, Any]:
    import pyspark

    script = folder / "gpus.sh"
    script.write_text('echo \'{"name": "gpu", "addresses": ["7"]}\'\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    os.environ["SPARK_HOME"] = os.path.dirname(pyspark.__file__)  # noqa: PTH120
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "1",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": JAVA,
        "spark.executor.extraJavaOptions": JAVA,
    }
    own = engine("spark", master="local-cluster[1,2,512]", **settings)
    shards = DocumentShards[Row].from_documents(rows(8), num_partitions=2, engine=own)
    refused = []
    for requested in (Resources(concurrency=2), Resources(cpus=0.5), Resources(memory="1GB")):
        try:
            shards.map(whole, resources=requested)
        except OptionError as error:
            refused.append(str(error))
    try:
        shards.map(whole, resources=Resources(cpus=1)).map(whole, resources=Resources(cpus=2))
    except OptionError as error:
        refused.append(str(error))
    plain = shards.map_batch(note_spark_task)
    reserved = shards.map_batch(note_spark_task, resources=Resources(cpus=2, gpus=1))
    result = {
        "plain": [(row.number, row.gpus) for row in plain.collect()],
        "reserved": [(row.number, row.gpus) for row in reserved.collect()],
        "grouped": sorted(
            {
                row.number
                for row in shards.group_by("number")
                .map_groups(note_spark_task, as_batch=True, resources=Resources(cpus=2))
                .collect()
            }
        ),
        "refused": refused,
    }
    own.close()
    return result


if __name__ == "__main__":
    target = Path(sys.argv[2])
    outcome = run_on_ray() if sys.argv[1] == "ray" else run_on_spark(target)
    (target / "outcome.json").write_text(json.dumps(outcome))
