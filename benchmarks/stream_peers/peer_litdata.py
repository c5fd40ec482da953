"""LitData: optimized chunks, its StreamingDataset and StreamingDataLoader.

By default it shuffles windows of 256 rows, which it decodes at once; `full` shuffles each chunk whole, row by row.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import litdata
import numpy as np
from protocol import Columns, Rows, Task, run
from rows import MASK, rows_of, stack_rows
from torch.utils.data import default_collate

_batches: list[Columns] = []


def _rows(position: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch in the memory of the forked worker, without None and lists, which LitData rejects."""
    for row in rows_of([_batches[position]]):
        if "meta" in row:
            row["mask"] = b"" if row["mask"] is None else row["mask"].tobytes()
            row["meta"]["tags"] = json.dumps(row["meta"]["tags"])
        yield row


def make(task: Task, batches: Iterable[Columns]) -> None:
    """Write with `optimize` in one worker, in chunks of 64 MB as documented, or of the rows of a shard."""
    _batches[:] = batches
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(task.folder) + ".cache"
    many = task.workload.name == "shards"
    litdata.optimize(
        fn=_rows,
        inputs=list(range(len(_batches))),
        output_dir=str(task.folder),
        num_workers=1,
        start_method="fork",
        keep_data_ordered=True,
        verbose=False,
        **({"chunk_size": task.workload.shard_rows} if many else {"chunk_bytes": "64MB"}),
    )


# --- read


def _dataset(task: Task) -> litdata.StreamingDataset:
    options = {"item_shuffle_window": "full", "batch_decode": False} if task.variant == "full" else {}
    return litdata.StreamingDataset(
        str(task.folder), shuffle=task.shuffle, seed=task.seed, drop_last=False, max_cache_size="100GB", **options
    )


def collate(task: Task) -> Callable[[list[dict[str, Any]]], Columns]:
    """Collate rows to a batch."""
    return _documents if task.workload.name == "documents" else default_collate


def _documents(rows: list[dict[str, Any]]) -> Columns:
    for row in rows:
        row["mask"] = np.frombuffer(row["mask"], np.uint8).reshape(MASK) if row["mask"] else None
        row["meta"]["tags"] = json.loads(row["meta"]["tags"])
    return stack_rows(rows)


def _loader(task: Task) -> litdata.StreamingDataLoader:
    return litdata.StreamingDataLoader(
        _dataset(task), batch_size=task.batch, num_workers=task.workers, collate_fn=collate(task), drop_last=False
    )


def read(task: Task) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch."""
    for columns in _loader(task):
        if "y" in columns:
            columns["y"] = columns["y"].int()
        yield columns["row"].numpy(), columns


def take(task: Task) -> Callable[[Rows], Columns]:
    """Take rows one by one."""
    dataset, stack = _dataset(task), collate(task)
    return lambda rows: stack([dataset[row] for row in rows.tolist()])


def resume(task: Task, stop: int) -> tuple[list[Rows], list[Rows], float, Any]:
    """Resume with the state of its loader."""
    loader = _loader(task)
    batches = iter(loader)
    before = [np.asarray(next(batches)["row"]) for _ in range(stop)]
    state = loader.state_dict()
    started = time.perf_counter()
    loader = _loader(task)
    loader.load_state_dict(state)
    batches = iter(loader)
    after = [np.asarray(next(batches)["row"])]
    seconds = time.perf_counter() - started
    return before, after + [np.asarray(columns["row"]) for columns in batches], seconds, state


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
