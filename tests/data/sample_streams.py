"""Sample datasets on disk, with their classes at the top level of a module, where spawned workers find them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quire import BaseDocument, DocumentArray
from quire.data import StreamingDataset
from quire.storage import ReadOptions, StoredDataset, write_dataset
from quire.typing import NdArray, TorchTensor, float32


class Sample(BaseDocument):
    number: int
    vector: NdArray[float32, 4]


class Author(BaseDocument):
    name: str = ""
    born: int | None = None


class Page(BaseDocument):
    vector: TorchTensor[float32, 2]


class Article(BaseDocument):
    number: int
    image: TorchTensor[float32, 2, 3]
    sound: TorchTensor | None = None
    words: TorchTensor
    score: float | None = None
    text: str = ""
    author: Author
    editor: Author | None = None
    pages: DocumentArray[Page] = []


class Scaled(BaseDocument):
    number: int
    image: NdArray[float32, 2, 3]


def samples(rows: int) -> Iterator[Sample]:
    """Yield samples whose fields all contain the row number."""
    return (Sample(id=f"id{i}", number=i, vector=np.full(4, i, np.float32)) for i in range(rows))


def article(i: int) -> Article:
    return Article(
        id=f"id{i}",
        number=i,
        image=np.full((2, 3), i, np.float32),
        sound=None if i % 2 else np.full(2, i, np.float32),
        words=np.arange(i % 4 + 1),
        score=None if i % 3 else i / 2,
        text=f"text {i}",
        author=Author(name=f"name {i}", born=None if i % 2 else i),
        editor=Author(name="editor") if i % 5 == 0 else None,
        pages=[Page(vector=np.full(2, j, np.float32)) for j in range(i % 3)],
    )


def write_samples(folder: Path, rows: int = 100, *, format: str = "arrow", rows_in_shard: int = 10) -> Path:  # noqa: A002
    """Write a dataset of samples, in shards of `rows_in_shard` rows."""
    for start in range(0, max(rows, 1), rows_in_shard):
        part = list(samples(rows))[start : start + rows_in_shard]
        write_dataset(part, folder, Sample, mode="append", format=format)
    return folder


def open_samples(folder: Path, **options: Any) -> StoredDataset[Sample]:
    return StoredDataset[Sample](folder, options=ReadOptions(**options))


def stream_samples(source: Any, batch_size: int = 8, **options: Any) -> StreamingDataset[Sample]:
    """Open a stream of samples as numpy arrays, which are the fastest."""
    return StreamingDataset[Sample](source, batch_size, **{"framework": "numpy", **options})


def numbers(batches: Iterable[Any]) -> list[list[int]]:
    """Return the row numbers of each batch, without padding."""
    return [batch.number[batch.mask()].tolist() for batch in batches]


def flatten(lists: Iterable[list[int]]) -> list[int]:
    return [item for items in lists for item in items]


def collect_workers(dataset: StreamingDataset[Any], workers: int, mark: int = 1) -> list[Any]:
    """Return the batches of several workers in the order of a DataLoader."""
    if not workers:
        return list(dataset.batches(0, 0, mark))
    shares = [list(dataset.batches(worker, workers, mark)) for worker in range(workers)]
    return [shares[i % workers][i // workers] for i in range(sum(map(len, shares)))]


# --- functions that workers run


def double(value: Any) -> Any:
    return value * 2


def fail_on_three(number: int) -> int:
    if number == 3:
        raise ValueError("three is not allowed")
    return number


def end_at_three(number: int) -> int:
    """Kill the worker."""
    import os
    import signal

    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number
