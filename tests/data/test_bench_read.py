"""`quire bench-read`: as a real process, and the function that it runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import quire
from quire import BaseDocument
from quire.cli import main
from quire.data import StreamingDataset
from quire.data._measure import measure
from quire.errors import OptionError
from quire.storage import write_dataset
from quire.typing import NdArray, uint8

pytestmark = pytest.mark.needs("pyarrow", "torch")
SCHOOL = """
from quire import BaseDocument
from quire.typing import NdArray, uint8

class Picture(BaseDocument):
    image: NdArray[uint8, 4, 4]
    label: int
"""


class Picture(BaseDocument):
    image: NdArray[uint8, 4, 4]
    label: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    (path / "school.py").write_text(SCHOOL)
    rows = [Picture(image=np.full((4, 4), i, np.uint8), label=i) for i in range(100)]
    write_dataset(rows, path / "pictures")
    write_dataset([], path / "empty", Picture)
    return path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-m", "quire", "bench-read", *arguments]
    home = {"PYTHONPATH": str(Path(quire.__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=os.environ | home, capture_output=True, text=True, check=False)


def test_bench_read_prints_a_table(folder: Path) -> None:
    ran = run(folder, "pictures", "--seconds", "0.2", "--batch-size", "10")
    assert (ran.returncode, ran.stderr) == (0, "")
    report = dict(line.rsplit(maxsplit=1) for line in ran.stdout.splitlines())
    assert {"rows per second", "mb per second", "cpu seconds per million rows", "first batch seconds"} <= report.keys()
    assert float(report["peak memory mb"].replace(",", "")) > 1


@pytest.mark.parametrize(
    "more",
    [
        ["--shuffle", "none", "--columns", "label", "--threads", "2"],
        ["--shuffle", "global", "--document", "school:Picture", "--framework", "torch"],
        ["--document", "school:Picture", "--workers", "2"],
    ],
    ids=["threads", "torch", "workers"],
)
def test_bench_read_prints_json(
    more: list[str], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["bench-read", "pictures", "--seconds", "0.2", "--batch-size", "10", "--json", *more]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["rows"] == 10 * numbers["batches"] > 0
    assert numbers["rows_per_second"] == pytest.approx(numbers["rows"] / numbers["seconds"])
    assert numbers["mb_per_second"] == pytest.approx(numbers["bytes"] / 1e6 / numbers["seconds"])
    assert min(numbers["cpu_seconds"], numbers["first_batch_seconds"], numbers["peak_memory_mb"]) > 0


def test_bench_read_counts_bytes_of_selected_columns(folder: Path) -> None:
    whole = StreamingDataset[Picture](folder / "pictures", 10, columns=["image", "label"])
    part = StreamingDataset[Picture](folder / "pictures", 10, columns=["label"])
    images, labels = measure(whole, 0.05), measure(part, 0.05)
    assert (images.bytes / images.rows, labels.bytes / labels.rows) == (16 + 8, 8)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 1, "quire: .*nowhere"),
        (["empty"], 1, "quire: "),
        (["pictures", "--columns", "lable"], 1, "lable.*Did you mean 'label'"),
        (["pictures", "--seconds", "0"], 1, "seconds=0.0"),
        (["pictures", "--shuffle", "some"], 2, "invalid choice: 'some'"),
        ([], 2, "required: url"),
    ],
)
def test_bench_read_rejects_wrong_calls_with_exit_codes(
    arguments: list[str],
    code: int,
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    try:
        exit_code = main(["bench-read", *arguments])
    except SystemExit as ended:
        exit_code = ended.code  # type: ignore[assignment]
    assert exit_code == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err), captured.err


def test_measure_rejects_a_dataset_without_batches(folder: Path) -> None:
    dataset = StreamingDataset[Picture](folder / "pictures", 1000, last="drop")
    with pytest.raises(OptionError, match="not one batch"):
        measure(dataset, 1)
