"""quire: shards with blocks of 1 MiB, read by `StreamingDataset`.

A variant is 'format/shuffle', as in 'arrow/block'; with '/loader' after it, `loader()` prepares batches in a thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from remote_protocol import Columns, RemoteTask, Rows, run

# isort: split
from peer_quire import Picture, prepare
from torch.utils.data import DataLoader

from quire.data import StreamingDataset
from quire.storage import ReadOptions, write_dataset

SMALL = 64
"""Rows of a second dataset, with which `warm_up` starts whatever has to be started."""


def make(task: RemoteTask, batches: Iterable[Columns]) -> None:
    """Write the dataset, and a small one next to it."""
    options: Any = {"document_type": Picture, "format": task.variant.split("/")[0], "group_bytes": 1 << 20}
    batches = list(batches)
    write_dataset(prepare(task, batches), task.folder, **options)  # type: ignore[arg-type]
    first = {name: values[:SMALL] for name, values in batches[0].items()}
    write_dataset(prepare(task, [first]), f"{task.folder}-small", mode="overwrite", **options)  # type: ignore[arg-type]


# --- read


def open_dataset(task: RemoteTask) -> StreamingDataset[Picture]:
    """Open it by HTTP."""
    options: Any = {"shuffle": task.variant.split("/")[1], "seed": task.seed, "framework": "torch"}
    options |= {"rank": task.rank, "world_size": task.world_size, "storage": ReadOptions(cache=task.cache)}
    return StreamingDataset[Picture](task.url, batch_size=task.batch, **options)


def warm_up(task: RemoteTask) -> None:
    """Read another dataset through the same cache folder."""
    small = replace(task, key=f"{task.key}-small", rank=0, world_size=1, batch=SMALL)
    for _ in epoch(small, open_dataset(small), 0):
        pass


def epoch(task: RemoteTask, opened: StreamingDataset[Picture], _: int) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch; each pass is the next one."""
    batches: Any = opened
    if task.variant.endswith("/loader"):
        batches = opened.loader(prefetch=4)
    elif task.workers:
        batches = DataLoader(opened, batch_size=None, num_workers=task.workers)
    for batch in batches:
        columns = {name: batch[name] for name in ("row", "image", "label", "text")}
        yield columns["row"].numpy(), columns


if __name__ == "__main__":
    run(sys.modules[__name__])
