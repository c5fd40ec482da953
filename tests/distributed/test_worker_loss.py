"""Workers lost in the middle of a job: every document is written once. See tests/clusters for Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.worker_loss_job import ROWS

pytestmark = [pytest.mark.needs("pyarrow", "ray", "pyspark"), pytest.mark.filterwarnings("ignore")]


def test_ray_writes_each_row_once_after_losing_a_node(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.worker_loss_job", "ray", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    actual = json.loads((tmp_path / "outcome.json").read_text())
    assert actual["numbers"] == [number + 1000 for number in range(ROWS)]
    assert actual["right"]
    assert actual["not counted"] == 0
    assert actual["strangers"] == []
