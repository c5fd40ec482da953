"""`torch_distributor` on Spark executors that are processes of their own: writes the rows of each rank to a file.

`python -m tests.distributed.torch_distributor_job folder`
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from quire.data import StreamingDataset
from quire.distributed import torch_distributor
from tests.distributed.sample_training import Point, written
from tests.distributed.worker_loss_job import spark_executors

ROWS = 25


def share(url: str) -> list[Any]:
    """Return the rows of each rank, and its parent process."""
    import torch.distributed as dist

    mine = [number for batch in StreamingDataset[Point](url, batch_size=4).loader() for number in batch.number.tolist()]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (mine, os.getppid()))
    return every


def main(folder: Path) -> None:
    """Run two ranks on two executors."""
    written(folder / "data", ROWS)
    with spark_executors() as (engine, _):
        assert engine.session.sparkContext.master.startswith("local-cluster")
        actual = torch_distributor(share, str(folder / "data"), workers=2, local_mode=False)
    (folder / "outcome.json").write_text(json.dumps({"ranks": actual, "driver": os.getpid()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
