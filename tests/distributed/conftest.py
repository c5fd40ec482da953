"""The engines that tests run on, each started on first use and stopped after the last test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

OPTIONS: dict[str, dict[str, Any]] = {
    "local": {},
    "processes": {"backend": "process", "num_workers": 2},
    "ray": {"num_cpus": 2, "object_store_memory": 200 << 20},
    "spark": {
        "master": "local[2]",
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # starts faster
        "spark.sql.codegen.wholeStage": "false",
    },
}


@pytest.fixture(scope="session")
def start_engine() -> Iterator[Callable[[str], Any]]:
    """Return the engine of a name in OPTIONS."""
    from quire.distributed import engine
    from quire.distributed._ray import ray_is_running

    created: dict[str, Any] = {}
    with ExitStack() as stack:

        def start(name: str) -> Any:
            if name not in created or (name == "ray" and not ray_is_running()):  # other tests shut Ray down
                created[name] = engine("local" if name == "processes" else name, **OPTIONS[name])
                stack.callback(created[name].close)
            return created[name]

        yield start


@pytest.fixture(params=list(OPTIONS))
def engine(request: pytest.FixtureRequest, start_engine: Callable[[str], Any]) -> Any:
    """Run a test on each engine."""
    return start_engine(request.param)
