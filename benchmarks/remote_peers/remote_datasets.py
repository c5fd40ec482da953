"""Hugging Face datasets: Parquet files by HTTP, `streaming=True`, its shuffle buffer of 1,000 rows. It has no cache."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import datasets
import torch
from datasets import Features
from remote_protocol import Columns, RemoteTask, Rows, run
from torch.utils.data import DataLoader

# isort: split
from peer_datasets import FEATURES
from rows import rows_of

BUFFER = 1_000
NAMES = ("row", "image", "label", "text")


def make(task: RemoteTask, batches: Iterable[Columns]) -> None:
    """Write as many Parquet files as the workload has shards, in row groups of the default size."""
    workload = task.workload
    features = Features({name: FEATURES[name] for name in NAMES})
    whole = datasets.Dataset.from_generator(
        rows_of, gen_kwargs={"batches": list(batches)}, features=features, cache_dir=f"{task.folder}.cache"
    )
    task.folder.mkdir()
    for number in range(workload.shards):
        part = whole.shard(workload.shards, number, contiguous=True)
        part.to_parquet(str(task.folder / f"train-{number:05d}.parquet"))


# --- read


def open_dataset(task: RemoteTask) -> Any:
    """Open the files without downloading them."""
    files = [f"{task.url}/train-{number:05d}.parquet" for number in range(task.workload.shards)]
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(task.cache))


def epoch(task: RemoteTask, opened: Any, number: int) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch."""
    dataset = opened.shuffle(seed=task.seed, buffer_size=BUFFER).with_format("torch")
    dataset.set_epoch(number)
    for columns in DataLoader(dataset, batch_size=task.batch, num_workers=task.workers):
        columns["image"] = columns["image"].to(torch.uint8)  # its torch format makes every integer int64
        yield columns["row"].numpy(), columns


if __name__ == "__main__":
    run(sys.modules[__name__])
