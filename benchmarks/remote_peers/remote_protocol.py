"""The protocol of the adapters of remote.py: a task comes in as JSON, one line of JSON goes out.

An adapter is a file remote_NAME.py, run by NAME's own interpreter. It implements

- `make(task, batches)`: writes batches of columns into `task.folder`, a folder of the store;
- `open_dataset(task)`: opens what was written through the store, with `task.cache` as the only local folder;
- `epoch(task, opened, number)`: yields an epoch as pairs of row numbers and columns, as a training step takes them;
- `warm_up(task)`, if there is something to start before the clock: imports on first use, a process that fetches.

Imports at the top of an adapter are not timed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "stream_peers")]

from loopback_store import control  # noqa: E402 - from the path above
from protocol import children_seconds  # noqa: E402
from stream_data import WORKLOADS, Columns, Rows, Workload, differences, entropy, ideal_entropy, size_of  # noqa: E402

__all__ = ["Columns", "RemoteTask", "Rows", "run"]

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class RemoteTask:
    """What is written or read, and how."""

    operation: str
    workload_name: str
    folder: Path
    """Where `make` writes: the folder `key` of the store."""
    endpoint: str = ""
    key: str = ""
    """The bucket and the path in it."""
    cache: Path = Path()
    scale: float = 1.0
    variant: str = ""
    batch: int = 64
    seed: int = 0
    workers: int = 0
    rank: int = 0
    world_size: int = 1
    epochs: int = 1
    computing: str = ""
    """What a step of the loop does: nothing, 'sleep' (as with a GPU) or 'busy' (as on the CPU)."""
    step_seconds: float = 0.005
    warm: bool = False
    check: bool = False
    """Whether every value is compared; such a round is not timed."""
    rows_file: str = ""
    """Where the row numbers of the last epoch are written, in the order of reading."""

    @property
    def workload(self) -> Workload:
        """The workload at the scale of the task."""
        return WORKLOADS[self.workload_name].scaled(self.scale)

    @property
    def url(self) -> str:
        """The address by HTTP."""
        return f"{self.endpoint}/{self.key}"


@dataclass
class Pass:
    """One epoch of one process. Bytes and requests are those of the store, from all processes."""

    first_batch_s: float = 0.0
    first_batch_bytes: int = 0
    first_batch_requests: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    bytes: int = 0
    requests: int = 0
    most_in_flight: int = 0
    rows: int = 0
    batches: int = 0
    stall_share: float = 0.0
    """Time that the loop waited for batches after the first one, relative to all time after the first one."""


def run(adapter: ModuleType) -> None:
    """Run the task of the command line, print its outcome as the last line, and end without further waiting."""
    options = json.loads(sys.argv[1])
    task = RemoteTask(**{**options, "folder": Path(options["folder"]), "cache": Path(options.get("cache", ""))})
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    # Processes whose parent has ended become children of this one, so that their CPU time is counted, too.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.collect()
    gc.freeze()
    outcome = {"make": make, "read": read}[task.operation](adapter, task)
    print("\n" + json.dumps(outcome), flush=True)
    os._exit(0)


def make(adapter: ModuleType, task: RemoteTask) -> dict[str, Any]:
    """Write the data once."""
    shutil.rmtree(task.folder, ignore_errors=True)
    task.folder.parent.mkdir(parents=True, exist_ok=True)
    adapter.make(task, task.workload.batches())
    shutil.rmtree(f"{task.folder}.cache", ignore_errors=True)
    return {"bytes": size_of(task.folder)}


def read(adapter: ModuleType, task: RemoteTask) -> dict[str, Any]:
    """Open the dataset and read epochs. With several ranks, only the starter of all of them resets the counters."""
    if task.warm and hasattr(adapter, "warm_up"):
        adapter.warm_up(task)
    is_alone = task.world_size == 1
    if is_alone:
        control(task.endpoint, "reset")
    started = time.perf_counter()
    opened = adapter.open_dataset(task)
    outcome: dict[str, Any] = {"open_s": time.perf_counter() - started, "variant": task.variant}
    counts = control(task.endpoint)
    outcome |= {"open_requests": counts.requests, "open_bytes": counts.body_bytes, "epochs": []}
    seen: list[Rows] = []
    wrong: set[str] = set()
    for number in range(task.epochs):
        if is_alone:
            control(task.endpoint, "reset")
        seen, measured = read_epoch(task, adapter.epoch(task, opened, number), wrong)
        outcome["epochs"].append(asdict(measured))
    rows = np.concatenate(seen) if seen else np.empty(0, np.int64)
    if task.rows_file:
        np.save(task.rows_file, rows)
    outcome |= describe_order(task, seen, rows)
    outcome["first_rows"] = seen[0].tolist() if seen else []
    outcome["wrong_columns"] = sorted(wrong)
    return outcome


def read_epoch(task: RemoteTask, batches: Iterator[tuple[Rows, Columns]], wrong: set[str]) -> tuple[list[Rows], Pass]:
    """Return the row numbers of every batch, and what was measured."""
    seen: list[Rows] = []
    measured, waited, first = Pass(), 0.0, 0.0
    cpu = time.process_time() + children_seconds()
    started = time.perf_counter()
    for rows, columns in timed(batches, waits := list[float]()):
        if not seen:
            first = time.perf_counter()
            measured.first_batch_s = first - started
            counts = control(task.endpoint)
            measured.first_batch_bytes, measured.first_batch_requests = counts.body_bytes, counts.requests
            # The time of the question to the store is not part of the epoch.
            asking = time.perf_counter() - first
            started, first = started + asking, first + asking
        seen.append(np.array(rows))  # a copy: the memory of a batch may be reused
        if task.check:
            wrong.update(differences(task.workload, seen[-1], columns))
        compute(task)
    ended = time.perf_counter()
    measured.seconds = ended - started
    measured.cpu_seconds = time.process_time() + children_seconds() - cpu
    waited = sum(waits[1:])
    measured.stall_share = waited / (ended - first) if seen and ended > first else 0.0
    counts = control(task.endpoint)
    measured.bytes, measured.requests, measured.most_in_flight = (
        counts.body_bytes,
        counts.requests,
        counts.most_in_flight,
    )
    measured.rows, measured.batches = sum(map(len, seen)), len(seen)
    return seen, measured


def timed(batches: Iterator[tuple[Rows, Columns]], waits: list[float]) -> Iterator[tuple[Rows, Columns]]:
    """Yield batches, and record how long each took."""
    batches = iter(batches)
    while True:
        started = time.perf_counter()
        batch = next(batches, None)
        waits.append(time.perf_counter() - started)
        if batch is None:
            return
        yield batch


def compute(task: RemoteTask) -> None:
    """Take the time of a step."""
    if task.computing == "sleep":
        time.sleep(task.step_seconds)
    elif task.computing == "busy":
        end = time.perf_counter() + task.step_seconds
        while time.perf_counter() < end:
            pass


def describe_order(task: RemoteTask, seen: list[Rows], rows: Rows) -> dict[str, Any]:
    """Return how often rows came, and how well they are mixed, for a process that read all of them."""
    if task.world_size > 1 or not len(rows):
        return {}
    size, unique = task.workload.rows, len(np.unique(rows))
    ideal = ideal_entropy(seen, size)
    return {
        "exactly_once": len(rows) == unique == size,
        "repeated": len(rows) - unique,
        "lost": size - unique,
        "mixing": entropy(seen, size) / ideal if ideal else 0.0,
    }
