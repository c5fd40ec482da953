"""Kill writers at every step, in a process without threads. Run as a script.

Arguments: the folder to work in, the mode ('resume' or 'overwrite'), the format, and the number of steps from one kill
to the next. It prints a line of JSON: how many writers were killed, and how many had finished before.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from quire.errors import StorageError
from quire.storage import open_dataset, write_dataset
from tests.storage.sample_documents import Photo, photos

_STEPS = ("_dataset_writer.py", "_shard_writer.py", "_manifest.py", "_folder.py", "_open.py")
"""The modules whose function calls and returns are steps."""
ROWS = 12


def write(path: Path, mode: Any, kind: Any, start: int = 0) -> None:
    """Write a dataset of a few shards."""
    write_dataset(photos(ROWS, start), path, mode=mode, format=kind, group_bytes=900, shard_bytes=2500)


def killed_at(step: int, run: Callable[[], None]) -> bool:
    """Run a function in a child that kills itself at a step, and return whether it got there."""
    child = os.fork()
    if child == 0:
        left = step

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal left
            if event in ("call", "return") and frame.f_code.co_filename.endswith(_STEPS):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        assert os.WEXITSTATUS(status) == 0, f"the writer failed at step {step}"
    return os.WIFSIGNALED(status)


def numbers(path: Path) -> list[int]:
    """Return the rows of the dataset, after checking that all are as written."""
    dataset = open_dataset(path, Photo, cache=path.parent / "cache")
    dataset.verify()
    return [int(number) for number in dataset.read().number]


def plain_numbers(path: Path, kind: str) -> list[int]:
    """Return the rows that other tools see."""
    return sorted(pq.read_table(path)["number"].to_pylist()) if kind == "parquet" else sorted(numbers(path))


def check_resume(path: Path, kind: str) -> None:
    try:
        row_numbers = numbers(path)
    except StorageError:
        row_numbers = []
        assert not list(path.glob(f"*.{kind}")), "there are shards, and no dataset"
    assert row_numbers == list(range(len(row_numbers))), row_numbers
    write(path, "resume", kind)
    assert numbers(path) == plain_numbers(path, kind) == list(range(ROWS))


def check_overwrite(path: Path, kind: str) -> None:
    row_numbers = numbers(path)
    assert row_numbers in (list(range(ROWS)), list(range(100, 100 + ROWS))), row_numbers
    write(path, "overwrite", kind, 200)
    assert numbers(path) == plain_numbers(path, kind) == list(range(200, 200 + ROWS))
    assert len(list((path / "_quire").glob("*.jsonl"))) == 1


def main(folder: Path, mode: str, kind: str, stride: int) -> None:
    killed, step = 0, 0
    while True:
        path = folder / f"{step}"
        if mode == "overwrite":
            write(path, "create", kind)
        dies = killed_at(step, lambda at=path: write(at, mode, kind, 100 if mode == "overwrite" else 0))  # type: ignore[misc]
        (check_overwrite if mode == "overwrite" else check_resume)(path, kind)
        shutil.rmtree(path)
        if not dies:
            break
        killed, step = killed + 1, step + stride
    print(json.dumps({"killed": killed}))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
