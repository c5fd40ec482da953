"""WebDataset: tar files by HTTP, which it reads through curl, a shuffle buffer of 1,000 rows. Its cache is off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import webdataset as wds
from remote_protocol import Columns, RemoteTask, Rows, run

# isort: split
from peer_webdataset import _stack as stack
from peer_webdataset import make as make_shards
from rows import rows_of

BUFFER = 1_000


def make(task: RemoteTask, batches: Iterator[Columns]) -> None:
    """Write a tar file per shard."""
    task.folder.mkdir()
    make_shards(task, batches)


# --- read


def open_dataset(task: RemoteTask) -> list[str]:
    """Return the addresses: there is nothing to open."""
    return [f"{task.url}/{number:06d}.tar" for number in range(task.workload.shards)]


def epoch(task: RemoteTask, opened: list[str], number: int) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch: shards in random order, rows through a shuffle buffer."""
    dataset = wds.WebDataset(opened, shardshuffle=len(opened), seed=task.seed + number, empty_check=False)
    names = list(next(rows_of(task.workload.batches(1))))
    collate = partial(stack, names, False)  # noqa: FBT003 - of a partial
    dataset = dataset.shuffle(BUFFER).decode().batched(task.batch, collation_fn=collate)
    for columns in wds.WebLoader(dataset, batch_size=None, num_workers=task.workers):
        yield columns["row"].numpy(), columns


if __name__ == "__main__":
    run(sys.modules[__name__])
