"""Ranks as tasks of a barrier stage of Spark, each with a process of its own.

Spark does not start a barrier stage again when a task is lost: that is done here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from quire._optional import require
from quire.distributed._spark_session import spark_session
from quire.distributed.estimator._attempts import Attempt, LostRanksError, lost
from quire.distributed.estimator._child import start_rank
from quire.distributed.estimator._job import Outcome
from quire.distributed.estimator._launcher import Launch
from quire.distributed.estimator._local_ranks import end, free_addresses
from quire.distributed.estimator._world import Seat
from quire.errors import OptionError


def launch_spark(launch: Launch, attempt: Attempt) -> list[Outcome]:
    """Run a barrier stage of so many tasks, and wait for what they make."""
    session = spark_session()
    _check_room(session, launch)
    work = partial(spark_rank, job=str(launch.job), attempt=str(attempt.folder))
    try:
        session.range(0, launch.size, 1, launch.size).mapInArrow(work, "rank long", barrier=True).collect()
    except Exception as error:
        attempt.raise_error()
        raise describe_loss(error) from error
    return attempt.outcomes(launch.size)


def _check_room(session: Any, launch: Launch) -> None:
    """Spark would wait ten minutes for room for all tasks, and executors elsewhere do not see a folder of here."""
    context: Any = None
    with suppress(Exception):  # Spark Connect has none
        context = session.sparkContext
    if context is None:
        return
    if not launch.shared and not context.master.startswith("local"):
        raise OptionError(f"Spark runs on {context.master}: pass model_dir=..., a folder that all of its machines see.")
    slots = context.defaultParallelism
    if slots < launch.size:
        raise OptionError(f"workers={launch.size}, and Spark has room for {slots} tasks at a time: use fewer workers.")


def describe_loss(error: Exception) -> LostRanksError:
    """Return the error about a task of Spark that failed: with the message of `spark_rank`, if its traceback has it."""
    ended = re.search(r"rank (\d+) was lost: (its process ended with -?\d+)", str(error))
    if ended is not None:
        return lost(ended[1], ended[2])
    return lost("of Spark", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def spark_rank(batches: Iterator[pa.RecordBatch], job: str, attempt: str) -> Iterator[pa.RecordBatch]:
    """A task's part: it starts a process for the rank, and lives as long as that."""
    for _ in batches:
        pass
    pyspark: Any = require("pyspark", extra="spark", needed_for="engine='spark'")
    context = pyspark.BarrierTaskContext.get()
    rank, tasks = context.partitionId(), context.getTaskInfos()
    host = tasks[rank].address.rpartition(":")[0] or tasks[rank].address
    addresses = tuple(context.allGather(free_addresses(host, 1)[0]))
    process = start_rank(Path(job), Path(attempt), Seat(rank, len(addresses), addresses))
    try:
        while process.poll() is None:
            time.sleep(0.02)
    finally:
        end(process)
    if process.returncode:
        raise RuntimeError(f"rank {rank} was lost: its process ended with {process.returncode}")
    yield pa.RecordBatch.from_arrays([pa.array([rank], pa.int64())], names=["rank"])
