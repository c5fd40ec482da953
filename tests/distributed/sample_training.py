"""Models and data for trainings, importable by ranks in other processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from quire import BaseDocument
from quire.storage import write_dataset
from quire.typing import NdArray, float32


class Point(BaseDocument):
    number: int
    x: NdArray[float32, 3]
    y: float


WEIGHTS = np.array([1.0, -2.0, 0.5], np.float32)


def points(rows: int) -> list[Point]:
    created = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    return [Point(id=f"p{i}", number=i, x=created[i], y=float(created[i] @ WEIGHTS)) for i in range(rows)]


def written(folder: Path, rows: int) -> Path:
    """Write a dataset of points, in shards of ten rows."""
    for start in range(0, rows, 10):
        write_dataset(points(rows)[start : start + 10], folder, Point, mode="append", format="arrow")
    return folder


# --- models


class Counting(nn.Module):
    """A model whose weights count how often each row was trained on."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(rows))

    def forward(self, numbers: Any) -> torch.Tensor:
        return self.seen[numbers]


class CountLoss(nn.Module):
    """Minus the sum: with SGD and a learning rate of 1, every row of a step increases its weight by 1."""

    reduction = "sum"

    def forward(self, output: torch.Tensor, labels: Any) -> torch.Tensor:
        del labels
        return -output.sum()


def count_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def linear(config: Any) -> nn.Module:
    torch.manual_seed(config.get("seed", 0))
    return nn.Linear(3, 1)


class Squeezed(nn.Module):
    """Maps a vector to a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).squeeze(1)


# --- data


class Numbers(Dataset[Any]):
    """Rows by number."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[int, int]:
        return row, row


class Stream(IterableDataset[Any]):
    """An iterable of batches, the same on every rank."""

    def __iter__(self) -> Any:
        return iter([(torch.arange(start, start + 4),) * 2 for start in range(0, 20, 4)])


def stream_creator(config: Any) -> Any:
    del config
    return Stream()


def share_creator(rank: int, world_size: int, config: Any) -> Any:
    """Return the share of a rank; shares differ in the number of batches."""
    numbers = torch.arange(25)[rank::world_size]
    return [(part, part) for part in numbers.split(config["batch_size"])]


def same_creator(rank: int, world_size: int, config: Any) -> Any:
    """A creator that ignores the rank."""
    del rank, world_size, config
    return list(Stream())


def numbers_creator(config: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(Numbers(25), batch_size=config["batch_size"])


# --- failures


class Killer:
    """A callback of rank 0 that kills its process once, after n steps in all; a file records that it did."""

    def __init__(self, flag: Path, after: int) -> None:
        self.flag, self.after, self.steps = flag, after, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        self.steps += 1
        if self.steps == self.after and not self.flag.exists():
            self.flag.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)


class KilledOnRank(Counting):
    """A model that kills one rank once, in its n-th forward pass."""

    def __init__(self, rows: int, flag: Path, rank: int, after: int, by: int = signal.SIGKILL) -> None:
        super().__init__(rows)
        self.flag, self.rank, self.after, self.calls, self.by = flag, rank, after, 0, by

    def forward(self, numbers: Any) -> torch.Tensor:
        self.calls += 1
        mine = torch.distributed.is_initialized() and torch.distributed.get_rank() == self.rank
        if mine and self.calls == self.after and not self.flag.exists():
            self.flag.write_text(str(os.getpid()))
            os.kill(os.getpid(), self.by)
        return super().forward(numbers)


class Failing(nn.Linear):
    """A model that raises on one rank."""

    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise ZeroDivisionError("rank 1 divides by nothing")
        return super().forward(x)


class CallsOut:
    """A callback that cannot reach a server, and logs every attempt."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        with self.log.open("a") as file:
            file.write(f"epoch {epoch}\n")
        raise ConnectionRefusedError(111, "Connection refused")


class LargestError:
    """A metric with torchmetrics' protocol and a state that is not a sum."""

    def __init__(self) -> None:
        self.value = 0.0

    def update(self, output: torch.Tensor, labels: torch.Tensor) -> None:
        self.value = max(self.value, float((output - labels).abs().max()))

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.value)

    def reset(self) -> None:
        self.value = 0.0


def classes(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points in three classes of unequal sizes, in order; some labels are missing (-100)."""
    x = np.random.default_rng(1).normal(size=(rows, 3)).astype(np.float32)
    labels = np.array([i * i * 3 // (rows * rows) for i in range(rows)])
    labels[2::5] = -100
    return x, labels
