"""Clusters of several processes that lose a node during a sort, a join, a group-by or a search for duplicates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.worker_loss_job import ROWS

pytestmark = [pytest.mark.needs("pyarrow", "ray", "pyspark", "xxhash"), pytest.mark.filterwarnings("ignore")]


def expected(operation: str) -> list[Any]:
    """Return the result of an operation on the numbers of the pictures."""
    if operation == "groups":
        return [[tens, sum(range(tens * 10, tens * 10 + 10)), 10] for tens in range(ROWS // 10)]
    if operation == "join":
        return [[number, True, "red" if number % 2 else "blue"] for number in range(0, ROWS, 3)]
    numbers = range(ROWS - 1, -1, -1) if operation == "sort" else range(0, ROWS, 10)
    return [[number, True, None] for number in numbers]


@pytest.mark.parametrize("operation", ["sort", "join", "groups", "dedupe"])
@pytest.mark.parametrize("kind", ["ray", "standalone"])
def test_each_row_is_written_once_after_losing_a_node(tmp_path: Path, kind: str, operation: str) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.distributed.worker_loss_job",
        kind,
        str(tmp_path),
        operation,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "outcome.json").read_text()) == expected(operation)
