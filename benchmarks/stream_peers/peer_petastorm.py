"""Petastorm: plain Parquet with its batch reader and its two shuffling torch loaders; numbers and lists of numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from petastorm import make_batch_reader
from petastorm.pytorch import BatchedDataLoader, DataLoader
from protocol import Columns, Rows, Task, run

BUFFER = 20_000
ROW_GROUP = 8_192


def make(task: Task, batches: Iterable[Columns]) -> None:
    """Write Parquet files as pyarrow or Spark would."""
    shard, held = 0, []
    for columns in batches:
        held.append(_table(columns))
        if sum(map(len, held)) >= task.workload.shard_rows:
            _write(task, shard, held)
            shard, held = shard + 1, []
    if held:
        _write(task, shard, held)


def _write(task: Task, shard: int, held: list[pa.Table]) -> None:
    pq.write_table(pa.concat_tables(held), task.folder / f"part-{shard:05d}.parquet", row_group_size=ROW_GROUP)


def _table(columns: Columns) -> pa.Table:
    feat = columns["feat"]
    offsets = np.arange(0, feat.size + 1, feat.shape[1], dtype=np.int32)
    lists = pa.ListArray.from_arrays(offsets, feat.reshape(-1))
    return pa.table({"row": columns["row"], "feat": lists, "y": columns["y"]})


# --- read


def read(task: Task) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch, in the variant `batched` or `rows`."""
    torch.manual_seed(task.seed)
    kind = DataLoader if task.variant == "rows" else BatchedDataLoader
    reader = make_batch_reader(
        task.folder.absolute().as_uri(),
        workers_count=max(1, task.workers),
        num_epochs=1,
        shuffle_row_groups=task.shuffle,
        seed=task.seed,
    )
    with kind(reader, batch_size=task.batch, shuffling_queue_capacity=BUFFER if task.shuffle else 0) as loader:
        for columns in loader:
            yield columns["row"].numpy(), columns


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
