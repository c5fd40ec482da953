"""Engines attach to a running session, or start one on loopback only."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.distributed.process_tree import listening, strangers
from tests.distributed.sample_stages import LAYOUT, partitions

pytestmark = [
    pytest.mark.needs("pyarrow", "ray", "pyspark", "ml_dtypes"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("name", ["ray", "spark"])
def test_started_engines_listen_on_loopback_only(start_engine: Any, name: str) -> None:
    engine = start_engine(name)
    frame = engine.repartition(engine.from_batches(partitions(4, 4), LAYOUT.fields), 2)
    assert engine.count(frame) == 8
    assert listening(os.getpid())
    assert strangers(os.getpid()) == []


def test_running_ray_is_used_and_not_stopped(start_engine: Any) -> None:
    from quire.distributed import engine
    from quire.distributed._ray import ray_session

    first = start_engine("ray")
    assert first.workers == 2
    ray = ray_session(num_cpus=7)
    assert ray.cluster_resources()["CPU"] == 2
    other = engine("ray", num_cpus=7)
    assert other.workers == 2
    other.close()
    assert ray.is_initialized()


def test_active_spark_session_is_used_and_not_stopped(start_engine: Any) -> None:
    from quire.distributed import engine
    from quire.distributed._spark import is_open, spark_session

    first = start_engine("spark")
    session = spark_session(master="local[7]")
    assert session is first.session
    other = engine("spark", master="local[7]")
    assert (other.session, other.workers) == (session, 2)
    other.close()
    assert is_open(session)


def test_spark_settings_are_restored_after_a_job(start_engine: Any) -> None:
    engine = start_engine("spark")
    name = "spark.sql.execution.arrow.maxBytesPerBatch"
    engine.session.conf.set(name, "12345")
    try:
        assert engine.count(engine.from_native(engine.session.range(5))) == 5
        assert engine.session.conf.get(name) == "12345"
        engine.session.conf.unset("spark.sql.execution.arrow.localRelationThreshold")
        engine.collect(engine.from_batches(partitions(1), LAYOUT.fields))
        assert engine.session.conf.get("spark.sql.execution.arrow.localRelationThreshold", None) is None
    finally:
        engine.session.conf.set(name, str(32 << 20))


def test_import_loads_no_engine() -> None:
    code = (
        "import quire.distributed, sys; print([m for m in ('ray', 'pyspark', 'torch', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_engine_package_names_the_extra() -> None:
    code = """
import sys
sys.modules["ray"] = sys.modules["pyspark.sql"] = sys.modules["pyspark"] = None
from quire.distributed import engine
for name in ("ray", "spark"):
    try:
        engine(name).workers
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'quire-ml[ray]'" in done.stdout
    assert "pip install 'quire-ml[spark]'" in done.stdout
