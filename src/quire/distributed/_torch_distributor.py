"""Functions on several processes of torch.distributed, started by Spark."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from quire._optional import require
from quire.distributed._spark_session import spark_session
from quire.errors import FunctionError, OptionError

R = TypeVar("R")


def torch_distributor(
    function: Callable[..., R],
    *args: Any,
    workers: int = 2,
    local_mode: bool | None = None,
    use_gpu: bool = False,
    **kwargs: Any,
) -> R:
    """Call a function on so many ranks of torch.distributed that Spark starts, and give what rank 0 returns.

    The ranks are connected when the function is called, so a `StreamingDataset` in it gives the rank's own share, and
    `DistributedDataParallel` works. With `local_mode` they are processes of the driver's machine; by default they are
    if Spark runs on it alone, and else tasks of the executors.
    """
    if workers < 1:
        raise OptionError(f"workers={workers}: at least 1.")
    session = spark_session()
    torch: Any = require("pyspark.ml.torch.distributor", extra="spark", needed_for="torch_distributor()")
    cloudpickle: Any = require("cloudpickle", extra="process", needed_for="torch_distributor()")
    alone = session.conf.get("spark.master", "").startswith("local")
    distributor = torch.TorchDistributor(
        num_processes=workers, local_mode=alone if local_mode is None else local_mode, use_gpu=use_gpu
    )
    paths = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109 - of text
    try:
        made: R = distributor.run(_on_rank, paths, cloudpickle.dumps((function, args, kwargs)), use_gpu)
    except Exception as error:
        raise FunctionError(f"a rank failed, its output tells how: {str(error).strip().splitlines()[0]}") from error
    return made


def _on_rank(paths: list[str], packed: bytes, use_gpu: bool) -> Any:  # noqa: FBT001 - Spark calls it by position
    """One rank's part. All give what rank 0 made: Spark returns that of whichever ends last."""
    dist: Any = require("torch.distributed", extra="torch", needed_for="torch_distributor()")
    cloudpickle: Any = require("cloudpickle", extra="process", needed_for="torch_distributor()")
    sys.path += [path for path in paths if path not in sys.path]
    function, args, kwargs = cloudpickle.loads(packed)
    if os.environ.get("MASTER_ADDR", "").startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if use_gpu else "gloo")
    found = [function(*args, **kwargs)]
    if dist.get_rank():
        found = [None]
    dist.broadcast_object_list(found, src=0)
    gc.collect()
    dist.destroy_process_group()
    return found[0]
