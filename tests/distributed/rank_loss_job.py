"""A training that loses the machine of one of its ranks, run in a process of its own; writes its result to a file.

`python -m tests.distributed.rank_loss_job ray|spark|standalone folder`
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire.data import StreamingDataset
from quire.distributed import Estimator
from tests.distributed.sample_training import Counting, CountLoss, Point, count_optimizer, written
from tests.distributed.worker_loss_job import ray_nodes, spark_executors, spark_standalone

ROWS, AFTER = 40, 7


class OnNode(Counting):
    """A model that kills its Ray node once, unless it is that of the driver."""

    def __init__(self, flag: Path, spared: str) -> None:
        super().__init__(ROWS)
        self.flag, self.spared, self.calls = flag, spared, 0

    def forward(self, numbers: Any) -> torch.Tensor:
        import ray

        self.calls += 1
        if self.calls == AFTER and ray.get_runtime_context().get_node_id() != self.spared and not self.flag.exists():
            self.flag.write_text("lost")
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return super().forward(numbers)


class Waiting(Counting):
    """A model whose rank 1 waits once, until its executor is lost."""

    def __init__(self, flag: Path) -> None:
        super().__init__(ROWS)
        self.flag, self.calls = flag, 0

    def forward(self, numbers: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == AFTER and torch.distributed.get_rank() == 1 and not self.flag.exists():
            self.flag.write_text("lost")
            time.sleep(60)
        return super().forward(numbers)


def trained(model: Counting, engine: Any, folder: Path) -> dict[str, Any]:
    """Train for three epochs; return how often each row was trained on."""
    estimator = Estimator.from_torch(
        model=model,
        optimizer=count_optimizer,
        loss=CountLoss(),
        engine=engine,
        workers=2,
        model_dir=folder / "model",
        checkpoint_every=2,
    )
    history = estimator.fit(StreamingDataset[Point](folder / "data", batch_size=4), epochs=3, feature_cols="number")
    return {"seen": model.seen.tolist(), "losses": [logs["loss"] for logs in history]}


def on_ray(folder: Path) -> dict[str, Any]:
    """Train on three nodes, one of which is lost."""
    with ray_nodes() as (engine, _):
        import ray

        return trained(OnNode(folder / "flag", ray.get_runtime_context().get_node_id()), engine, folder)


def on_spark(folder: Path, cluster: Any) -> dict[str, Any]:
    """Train on two executors, one of which is lost."""
    with cluster as (engine, lose):
        watcher = threading.Thread(target=_when_there, args=(folder / "flag", lose), daemon=True)
        watcher.start()
        return trained(Waiting(folder / "flag"), engine, folder)


def _when_there(flag: Path, then: Callable[[], None]) -> None:
    while not flag.exists():
        time.sleep(0.05)
    then()


def main(kind: str, folder: Path) -> None:
    """Run the training on one of the engines."""
    written(folder / "data", ROWS)
    if kind == "ray":
        actual = on_ray(folder)
    else:
        actual = on_spark(folder, spark_executors() if kind == "spark" else spark_standalone(folder))
    (folder / "outcome.json").write_text(json.dumps({**actual, "lost": (folder / "flag").exists()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
