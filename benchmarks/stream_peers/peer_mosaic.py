"""MosaicML Streaming: MDS shards, py1e shuffle, torch's DataLoader as documented."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from protocol import Columns, Rows, Task, run
from rows import MASK, rows_of, stack_rows
from torch.utils.data import DataLoader, default_collate

# streaming imports torchvision, whose operators a torch without CUDA may not find; nothing here uses them.
torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402 - see above
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

ENCODINGS = {
    "pictures": {"row": "int", "image": "ndarray:uint8:3,64,64", "label": "int", "text": "str"},
    "tensors": {"row": "int", "image": "ndarray:uint8:3,64,64", "label": "int"},
    "documents": {
        "row": "int",
        "image": "ndarray:uint8:3,32,32",
        "emb": "ndarray:float32:128",
        "caption": "str",
        "label": "int",
        "meta": "json",
        "mask": "bytes",
    },
    "table": {"row": "int", "feat": "ndarray:float32:32", "y": "int32"},
}
ENCODINGS.update(pictures_60k=ENCODINGS["pictures"], large=ENCODINGS["pictures"], shards=ENCODINGS["table"])


def make(task: Task, batches: Iterable[Columns]) -> None:
    """Write shards of the default 64 MB, or of the rows of a shard if the workload has many."""
    limit = {"size_limit": task.workload.shard_rows * 160} if task.workload.name == "shards" else {}
    with MDSWriter(out=str(task.folder), columns=ENCODINGS[task.workload.name], **limit) as writer:
        for row in rows_of(batches):
            if "mask" in row:
                row["mask"] = b"" if row["mask"] is None else row["mask"].tobytes()
            elif "y" in row:
                row["y"] = np.int32(row["y"])
            writer.write(row)


# --- read


def _dataset(task: Task) -> StreamingDataset:
    clean_stale_shared_memory()
    return StreamingDataset(local=str(task.folder), batch_size=task.batch, shuffle=task.shuffle, shuffle_seed=task.seed)


def collate(task: Task) -> Callable[[list[dict[str, Any]]], Columns]:
    """Collate rows to a batch."""
    return _documents if task.workload.name == "documents" else default_collate


def _documents(rows: list[dict[str, Any]]) -> Columns:
    for row in rows:
        row["mask"] = np.frombuffer(row["mask"], np.uint8).reshape(MASK) if row["mask"] else None
    return stack_rows(rows)


def read(task: Task) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch."""
    loader = DataLoader(_dataset(task), batch_size=task.batch, num_workers=task.workers, collate_fn=collate(task))
    for columns in loader:
        yield columns["row"].numpy(), columns


def take(task: Task) -> Callable[[Rows], Columns]:
    """Take rows one by one: there is no batch call."""
    dataset, stack = _dataset(task), collate(task)
    return lambda rows: stack([dataset[row] for row in rows.tolist()])


def _counting(task: Task) -> StreamingDataLoader:
    return StreamingDataLoader(
        _dataset(task), batch_size=task.batch, num_workers=task.workers, collate_fn=collate(task)
    )


def resume(task: Task, stop: int) -> tuple[list[Rows], list[Rows], float, Any]:
    """Resume with its loader, which counts the samples."""
    loader = _counting(task)
    batches = iter(loader)
    before = [next(batches)["row"].numpy() for _ in range(stop)]
    state = json.loads(json.dumps(loader.state_dict()))
    del batches, loader
    started = time.perf_counter()
    loader = _counting(task)
    loader.load_state_dict(state)
    batches = iter(loader)
    after = [next(batches)["row"].numpy()]
    seconds = time.perf_counter() - started
    return before, after + [columns["row"].numpy() for columns in batches], seconds, state


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
