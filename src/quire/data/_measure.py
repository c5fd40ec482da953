"""Measure how fast a dataset is read: rows and bytes per second, CPU time, the time to the first batch, and memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

from quire._optional import require
from quire.data._streaming import StreamingDataset
from quire.errors import OptionError

MB = 1_000_000


@dataclass(frozen=True)
class Measurement:
    """What was measured from the first batch on; `first_batch_seconds` is the time before it.

    CPU time includes all threads, and all that worker processes did.
    """

    rows: int
    batches: int
    seconds: float
    cpu_seconds: float
    bytes: int
    first_batch_seconds: float
    peak_memory_mb: float | None

    @property
    def rows_per_second(self) -> float:
        """The rows read in a second."""
        return self.rows / self.seconds

    @property
    def mb_per_second(self) -> float:
        """The size of the batches read in a second, in millions of bytes."""
        return self.bytes / MB / self.seconds

    @property
    def cpu_seconds_per_million_rows(self) -> float:
        """The seconds of CPU time for a million rows."""
        return self.cpu_seconds / max(self.rows, 1) * 1e6

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers by name."""
        names = ("rows_per_second", "mb_per_second", "cpu_seconds_per_million_rows")
        return {**{name: getattr(self, name) for name in names}, **asdict(self)}


def measure(dataset: StreamingDataset[Any], seconds: float, threads: int = 1, workers: int = 0) -> Measurement:
    """Read a dataset for some seconds, pass after pass, with a loader or with the workers of a DataLoader."""
    if seconds <= 0:
        raise OptionError(f"seconds={seconds}: more than none.")
    if not len(dataset):
        raise OptionError(f"{dataset!r}: there is not one batch to read.")
    started = time.perf_counter()
    batches = _read_passes(dataset, threads, workers)
    next(batches)
    first = time.perf_counter()
    cpu, rows, size, number, now = _cpu_seconds(), 0, 0, 0, first
    while now - first < seconds:
        batch = next(batches)
        rows, size, number = rows + len(batch), size + batch._columns.nbytes, number + 1
        now = time.perf_counter()
    batches.close()  # ends the workers: the system counts the CPU time of processes that have ended
    return Measurement(rows, number, now - first, _cpu_seconds() - cpu, size, first - started, _peak_memory_mb())


def _read_passes(dataset: StreamingDataset[Any], threads: int, workers: int) -> Generator[Any]:
    if workers:
        data: Any = require("torch.utils.data", extra="torch", needed_for="workers")
        loader: Any = data.DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)
    else:
        loader = dataset.loader(threads=threads)
    while True:
        yield from loader


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak_memory_mb() -> float | None:
    """Return the peak memory of this process, without its workers; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 - does not exist on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MB if sys.platform == "darwin" else peak * 1024 / MB
