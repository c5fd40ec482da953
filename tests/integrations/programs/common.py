"""What the training programs share: the data, the record of the rows that were trained on, and the kill."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.typing import NdArray, float32

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
CONFIG = SimpleNamespace(**json.loads(os.environ["QUIRE_TEST_CONFIG"]))  # also in processes that a trainer starts


class Row(BaseDocument):
    number: int
    x: NdArray[float32, 4]
    y: float


def open_rows(**options: Any) -> StreamingDataset[Row]:
    return StreamingDataset[Row](CONFIG.data, batch_size=CONFIG.batch_size, seed=3, **options)


def latest(pattern: str) -> Path | None:
    """Return the checkpoint of the last step, whose name ends with it, as in 'checkpoint-12'."""
    checkpoints = sorted(Path(CONFIG.folder).glob(pattern), key=step_of)
    return checkpoints[-1] if checkpoints else None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.rpartition("-")[2].removeprefix("step="))


def write(rank: int, **entry: Any) -> None:
    with Path(CONFIG.folder, f"rows-{CONFIG.run}-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def resume_from(rank: int, step: int) -> None:
    """Record from which step a run continues: later rows of the run before are not part of the model."""
    write(rank, resumed=step)


def record(rank: int, step: int, numbers: torch.Tensor) -> None:
    """Record the rows of a step, counted from 1; in the step that the test has chosen, the process ends."""
    write(rank, step=step, rows=numbers.tolist())
    if rank == 0 and 0 < CONFIG.kill_at <= step:
        os.kill(os.getpid(), signal.SIGKILL)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch.x).squeeze(1), batch.y.float())


def ranks() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
