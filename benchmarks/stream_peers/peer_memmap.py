"""The lower bound: numpy's gather from a mapped file, without types, texts as bytes of fixed width."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from protocol import Columns, Rows, Task, run


def prepare(_: Task, batches: Iterable[Columns]) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield texts as bytes of fixed width, without lists of texts."""
    for columns in batches:
        yield {name: _flat(values) for name, values in columns.items() if name != "tags"}


def _flat(values: Any) -> np.ndarray[Any, Any]:
    if isinstance(values, np.ndarray):
        return values
    width = 120 if max(map(len, values)) > 64 else 64
    return np.frombuffer(b"".join(value.encode().ljust(width) for value in values), np.uint8).reshape(-1, width)


def make(task: Task, batches: Iterable[dict[str, np.ndarray[Any, Any]]]) -> None:
    """Write a file per column, with dtype and shape in its name; `synced` waits until it is on disk."""
    files: dict[str, Any] = {}
    for columns in batches:
        for name, values in columns.items():
            if name not in files:
                shape = "x".join(map(str, values.shape[1:]))
                files[name] = (task.folder / f"{name}.{values.dtype}.{shape}").open("wb")
            files[name].write(memoryview(np.ascontiguousarray(values)).cast("B"))
    for file in files.values():
        if task.variant == "synced":
            file.flush()
            os.fsync(file.fileno())
        file.close()


# --- read


def _columns(task: Task) -> dict[str, Any]:
    found = {}
    for path in sorted(task.folder.iterdir()):
        name, dtype, shape = path.name.split(".")
        sizes = [int(size) for size in shape.split("x") if size]
        found[name] = np.memmap(path, dtype, "r").reshape(-1, *sizes)
    return found


def take(task: Task) -> Callable[[Rows], Columns]:
    """Gather every column; texts stay encoded, and are not returned."""
    columns = _columns(task)
    texts = [columns.pop(name) for name in ("text", "caption", "source") if name in columns]

    def get(rows: Rows) -> Columns:
        for text in texts:
            text[rows]
        return {name: torch.from_numpy(values[rows]) for name, values in columns.items()}

    return get


def read(task: Task) -> Iterator[tuple[Rows, Columns]]:
    """Yield a permutation, or copies of slices in order."""
    get, rows = take(task), np.arange(task.workload.rows)
    if task.shuffle:
        rows = np.random.default_rng(task.seed).permutation(rows)
    for start in range(0, len(rows), task.batch):
        chosen = rows[start : start + task.batch]
        columns = get(chosen)
        yield columns["row"].numpy(), columns


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
