"""The engines that tests run on, each started when a test first asks for it, and ended with the last one."""

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
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # it starts sooner
        "spark.sql.codegen.wholeStage": "false",
    },
}


@pytest.fixture(scope="session")
def start_engine() -> Iterator[Callable[[str], Any]]:
    """The engine of a name in OPTIONS."""
    from quire.distributed import engine

    made: dict[str, Any] = {}
    with ExitStack() as stack:

        def start(name: str) -> Any:
            if name not in made:
                made[name] = engine("local" if name == "processes" else name, **OPTIONS[name])
                stack.callback(made[name].close)
            return made[name]

        yield start


@pytest.fixture(params=list(OPTIONS))
def engine(request: pytest.FixtureRequest, start_engine: Callable[[str], Any]) -> Any:
    """Each of the engines in turn."""
    return start_engine(request.param)
