"""The quick examples run, each in its own process; `nox -s examples` runs all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import node_environment

FOLDER = Path(__file__).parents[1] / "examples"
NODE = ("grpc", "node:@grpc/grpc-js", "node:@grpc/proto-loader")


@pytest.mark.parametrize(
    ("command", "output"),
    [
        pytest.param("contrastive", "new pictures with the right caption", marks=pytest.mark.needs("torch")),
        pytest.param("ddp", "error over 2,003 rows", marks=pytest.mark.needs("torch", "pyarrow")),
        pytest.param("larger_than_memory --rows 6000", "row once: True", marks=pytest.mark.needs("torch", "pyarrow")),
        pytest.param("one_million_images --images 4000", "read: 4,000 images"),
        pytest.param(
            "search_service", "3 photos of snow: snow", marks=pytest.mark.needs("lancedb", "grpc", "fastapi", "uvicorn")
        ),
        pytest.param("two_services", "a photo of snow: nearest to snow", marks=pytest.mark.needs(*NODE)),
    ],
    ids=lambda value: value.split()[0],
)
def test_example_runs_without_warnings(command: str, output: str, tmp_path: Path) -> None:
    assert output in run(command, tmp_path)
    assert list(tmp_path.iterdir()) == []  # it deletes its files


@pytest.mark.needs("torch", "pyarrow", "PIL", "grpc")
def test_demo_trains_serves_and_keeps_a_dataset(tmp_path: Path) -> None:
    from quire.storage import open_dataset

    output = run("demo", tmp_path)
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", output)]
    accuracies = [float(value) for value in re.findall(r"accuracy ([\d.]+)%$", output, re.MULTILINE)]
    assert losses == sorted(losses, reverse=True)
    assert accuracies[0] < 90 < accuracies[-1]
    assert "600 documents" in output and "equal after loading" in output
    predictions = re.findall(r"^a (\w+), picture \d+ +-> (\w+) ", output, re.MULTILINE)
    assert len(predictions) == 6 and all(caption == kind for caption, kind in predictions)
    assert "ms (median of 20 calls)" in output
    last = output.splitlines()[-1]
    assert last.startswith("Look at the data: ") and " -m quire view " in last
    assert len(open_dataset(tmp_path / last.split()[-1])) == 600
    assert [path.name for path in tmp_path.iterdir()] == ["quire-demo"]


def run(command: str, folder: Path) -> str:
    """Return the output of an example that is run in the folder; it must succeed without warnings."""
    name, *options = command.split()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FOLDER / f"{name}.py"), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=folder,
        env={**node_environment(), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout
