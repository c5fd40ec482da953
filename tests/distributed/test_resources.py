"""Resources of functions: honoured by the engines, or refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire.distributed import DocumentShards, Resources
from quire.distributed import engine as engine_by_name
from quire.errors import OptionError
from tests.distributed.sample_documents import Good, goods

pytestmark = [pytest.mark.needs("pyarrow", "cloudpickle"), pytest.mark.filterwarnings("ignore")]


def note_time(good: Good, log: Path) -> Good:
    began = time.monotonic()
    time.sleep(0.2)
    with log.open("a") as file:
        file.write(f"{began} {time.monotonic()}\n")
    return good


def count_at_a_time(log: Path) -> int:
    """Return the most calls that ran at the same time."""
    spans = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    return max(sum(began <= at < ended for began, ended in spans) for at, _ in spans)


@pytest.mark.parametrize("name", ["local", "processes", "ray"])
@pytest.mark.needs("ray")
def test_concurrency_limits_the_calls_at_a_time(name: str, start_engine: Any, tmp_path: Path) -> None:
    own = engine_by_name("local", num_workers=2) if name == "local" else start_engine(name)
    shards = DocumentShards[Good].from_documents(goods(6), num_partitions=6, engine=own)
    for number, requested in enumerate([None, Resources(concurrency=1), Resources(cpus=2)]):
        log = tmp_path / str(number)
        assert len(shards.map(note_time, args=(log,), resources=requested).collect()) == 6
        # Without a limit, workers of Ray that start one after the other may not meet.
        expected = (1, 2) if name == "ray" else (2,)
        assert count_at_a_time(log) in (expected if requested is None else (1,)), requested


def name_good(good: Good, *values: int, resources: str = "", args: str = "") -> Good:
    return good.model_copy(update={"name": f"{values} {resources} {args}"})


def test_arguments_of_the_function_do_not_collide_with_those_of_the_method() -> None:
    shards = DocumentShards[Good].from_documents(goods(2), num_partitions=1)
    named = shards.map(name_good, 1, args=(2, 3), kwargs={"resources": "r", "args": "a"}, resources=Resources(cpus=1))
    assert named.first().name == "(1, 2, 3) r a"
    with pytest.raises(OptionError, match="flavour: passed as a keyword and in kwargs= as well"):
        shards.map(name_good, flavour=1, kwargs={"flavour": 2})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cpus": -1}, "cpus=-1"),
        ({"gpus": 1.5}, "gpus=1.5.*a part of one GPU or a whole number"),
        ({"gpus": True}, "gpus=True"),
        ({"memory": "2 gold bars"}, "memory='2 gold bars'.*such as '2GB'"),
        ({"memory": 0}, "memory=0"),
        ({"concurrency": (4, 2)}, r"concurrency=\(4, 2\).*such as \(1, 8\)"),
        ({"concurrency": 0}, "concurrency=0"),
    ],
)
def test_wrong_resources_are_errors(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Resources(**wrong)


def test_memory_is_parsed() -> None:
    texts = ["2GB", "512MiB", "1.5 gb", "100", 2048]
    assert [Resources(memory=text).memory_bytes for text in texts] == [2 * 10**9, 512 << 20, 1_500_000_000, 100, 2048]


def test_local_engine_refuses_what_it_cannot_provide() -> None:
    own = engine_by_name("local", num_workers=2)
    shards = DocumentShards[Good].from_documents(goods(2), num_partitions=1, engine=own)
    for requested, message in [
        (Resources(gpus=1), "assigns no GPUs"),
        (Resources(memory="1GB"), "share the memory of this machine"),
        (Resources(cpus=3), "has 2 workers, with one CPU each"),
        (Resources(concurrency=(3, 8)), r"engine\('local', num_workers=3\)"),
    ]:
        with pytest.raises(OptionError, match=message):
            shards.map_batch(name_good, resources=requested)
        with pytest.raises(OptionError, match=message):
            shards.group_by("name").map_groups(name_good, resources=requested)
    with pytest.raises(OptionError, match=r"write resources=Resources\("):
        shards.map(name_good, resources={"cpus": 1})  # type: ignore[arg-type]


def test_spark_on_one_machine_refuses_resources(start_engine: Any) -> None:
    shards = DocumentShards[Good].from_documents(goods(2), num_partitions=1, engine=start_engine("spark"))
    with pytest.raises(OptionError, match=r"Resources\(cpus=1\): Spark on one machine \(local\[2\]\) has no profiles"):
        shards.map(name_good, resources=Resources(cpus=1))


def run_job(kind: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.resources_job", kind, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    return outcome


@pytest.mark.needs("ray")
def test_ray_assigns_gpus_to_actors_and_tasks(tmp_path: Path) -> None:
    actual = run_job("ray", tmp_path)
    assert [number for number, _, _ in actual["actors"]] == [2 * i for i in range(40)]
    workers = {worker for _, worker, _ in actual["actors"]}
    assert 2 <= len(workers) <= 4
    assert all(worker.startswith("mine ") and worker.split()[1] for worker in workers)
    assert {gpus for _, _, gpus in actual["actors"]} <= {"0", "1"}
    assert actual["tasks"] == [json.dumps({"CPU": 2.0, "GPU": 1.0, "memory": 50e6})]
    assert sum(actual["grouped"]) == 40
    assert len(actual["grouped"]) <= 3  # called once for a partition
    assert {json.loads(text)["GPU"] for text in actual["both"]} == {1.0}
    assert len(actual["refused"]) == 3
    assert actual["refused"][0].startswith("Resources(gpus=3): the Ray cluster has no room for 1 such workers.")
    assert "no room for 3 such workers. The most that one of its 1 nodes has is GPU: 2." in actual["refused"][1]


@pytest.mark.needs("pyspark")
def test_spark_reserves_cpus_and_gpus_by_resource_profiles(tmp_path: Path) -> None:
    actual = run_job("spark", tmp_path)
    assert actual["plain"] == [[1, ""]] * 8
    assert actual["reserved"] == [[2, "7"]] * 8
    assert actual["grouped"] == [2]
    for message, expected in zip(
        actual["refused"],
        ["Leave out concurrency=", "whole number of CPUs", "spark.dynamicAllocation", "Call repartition() between"],
        strict=True,
    ):
        assert expected in message
