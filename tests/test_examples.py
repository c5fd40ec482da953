"""The quick examples run as they are, each in a process of its own; `nox -s examples` runs all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import node_environment

FOLDER = Path(__file__).parents[1] / "examples"
NODE = ("grpc", "node:@grpc/grpc-js", "node:@grpc/proto-loader")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        pytest.param("demo", "rows and columns agree: 400", marks=pytest.mark.needs("torch")),
        pytest.param("contrastive", "new pictures that find their caption", marks=pytest.mark.needs("torch")),
        pytest.param("ddp", "the error over 2,003 rows", marks=pytest.mark.needs("torch", "pyarrow")),
        pytest.param("larger_than_memory --rows 6000", "row once: True", marks=pytest.mark.needs("torch", "pyarrow")),
        pytest.param("one_million_images --images 4000", "read: 4,000 images"),
        pytest.param("two_services", "a photo of snow: nearest to snow", marks=pytest.mark.needs(*NODE)),
    ],
    ids=lambda value: value.split()[0],
)
def test_the_example_runs_and_warns_of_nothing(command: str, said: str, tmp_path: Path) -> None:
    name, *options = command.split()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FOLDER / f"{name}.py"), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=tmp_path,
        env={**node_environment(), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
    assert list(tmp_path.iterdir()) == []  # what it makes, it takes away
