"""Training that loses a machine: a node of Ray, an executor of Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("torch", "pyarrow", "ray", "pyspark"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("kind", ["ray", "spark", "standalone"])
def test_each_row_counts_once_an_epoch_behind_the_final_weights(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.rank_loss_job", kind, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["lost"]
    assert outcome["seen"] == [3.0] * 40
    assert outcome["losses"] == [0.0, -1.0, -2.0]
