"""Spark that loses an executor, in its own cluster mode and on a cluster that was started for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.worker_loss_job import ROWS

pytestmark = [pytest.mark.needs("pyarrow", "ray", "pyspark"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("kind", ["spark", "standalone"])
def test_spark_loses_an_executor_and_nothing_else(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.worker_loss_job", kind, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["numbers"] == [number + 1000 for number in range(ROWS)]
    assert outcome["right"]
    assert outcome["not counted"] == 0
    assert outcome["strangers"] == []
