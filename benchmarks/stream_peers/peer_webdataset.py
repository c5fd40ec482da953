"""WebDataset: tar files, a shuffle buffer, its own batching."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import webdataset as wds
from protocol import Columns, Rows, Task, run
from rows import rows_of, stack_rows
from torch.utils.data import default_collate

BUFFER = 5_000
MEMBERS = {"row": "row.cls", "image": "image.npy", "label": "label.cls", "text": "text.txt", "caption": "caption.txt"}
MEMBERS |= {"emb": "emb.npy", "meta": "meta.json", "mask": "mask.npy", "feat": "feat.npy", "y": "y.cls"}


def make(task: Task, batches: Iterable[Columns]) -> None:
    """Write a tar file per shard, with a member per field; a missing mask has no member."""
    pattern = str(task.folder / "%06d.tar")
    with wds.ShardWriter(pattern, maxcount=task.workload.shard_rows, maxsize=1e12, verbose=0) as writer:
        for row in rows_of(batches):
            sample = {MEMBERS[name]: _bytes(value) for name, value in row.items() if value is not None}
            writer.write({"__key__": f"{row['row']:08d}", **sample})


def _bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.save(file, value)
        return file.getvalue()
    return (value if isinstance(value, str) else json.dumps(value)).encode()


# --- read


def read(task: Task) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch: shards in random order, rows through a shuffle buffer."""
    urls = sorted(map(str, task.folder.glob("*.tar")))
    shuffle = len(urls) if task.shuffle else False
    dataset = wds.WebDataset(urls, shardshuffle=shuffle, seed=task.seed, empty_check=False)
    if task.shuffle:
        dataset = dataset.shuffle(BUFFER)
    names = list(next(rows_of(task.workload.batches(1))))
    collate = partial(_stack, names, task.workload.name == "documents")
    dataset = dataset.decode().batched(task.batch, collation_fn=collate)
    for columns in wds.WebLoader(dataset, batch_size=None, num_workers=task.workers):
        if "y" in columns:
            columns["y"] = columns["y"].int()
        yield columns["row"].numpy(), columns


def _stack(names: list[str], documents: bool, samples: list[dict[str, Any]]) -> Columns:  # noqa: FBT001 - of a partial
    rows = [{name: sample.get(MEMBERS[name]) for name in names} for sample in samples]
    return stack_rows(rows) if documents else default_collate(rows)


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
