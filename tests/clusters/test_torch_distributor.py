"""TorchDistributor with ranks that are tasks of executors, not processes of the driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("torch", "pyarrow", "pyspark"), pytest.mark.filterwarnings("ignore")]


def test_ranks_on_executors_have_each_its_share(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.torch_distributor_job", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    shares, above = zip(*outcome["ranks"], strict=True)
    assert sorted(map(len, shares)) == [12, 13]
    assert sorted(number for share in shares for number in share) == list(range(25))
    assert outcome["driver"] not in above
