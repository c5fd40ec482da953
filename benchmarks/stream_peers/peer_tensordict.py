"""TensorDict: a mapped file for each tensor; without texts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from protocol import Columns, Rows, Task, run
from tensordict import TensorDict


def make(task: Task, batches: Iterable[Columns]) -> None:
    """Expand one row with `memmap_like`, and fill it batch by batch."""
    first = _tensors(next(task.workload.batches(1)))
    mapped = TensorDict(first, batch_size=[1]).expand(task.workload.rows).memmap_like(str(task.folder))
    start = 0
    for columns in batches:
        size = len(columns["row"])
        mapped[start : start + size] = TensorDict(_tensors(columns), batch_size=[size])
        start += size


def _tensors(columns: Columns) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in columns.items() if not isinstance(values, list)}


# --- read


def take(task: Task) -> Callable[[Rows], Columns]:
    """Take rows by index."""
    mapped = TensorDict.load_memmap(str(task.folder))
    return lambda rows: mapped[torch.from_numpy(rows)]


def read(task: Task) -> Iterator[tuple[Rows, Columns]]:
    """Yield a permutation, or copies of slices in order."""
    mapped = TensorDict.load_memmap(str(task.folder))
    order = torch.arange(task.workload.rows)
    if task.shuffle:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(task.seed))
    for rows in order.split(task.batch):
        columns = mapped[rows]
        yield columns["row"].numpy(), columns


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
