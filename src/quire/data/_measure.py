"""How fast a dataset is read: rows and bytes in a second, CPU time, the time to the first batch, and memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from quire._optional import require
from quire.data._loader import batch_bytes
from quire.data._streaming import StreamingDataset
from quire.errors import OptionError

MB = 1_000_000


@dataclass(frozen=True)
class Measured:
    """What was measured from the first batch on, for so many seconds; `first_batch_seconds` is what came before it.

    CPU time is that of all threads, and of worker processes with all that they did.
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
        """Rows that came in a second."""
        return self.rows / self.seconds

    @property
    def mb_per_second(self) -> float:
        """Millions of bytes of batches that came in a second."""
        return self.bytes / MB / self.seconds

    @property
    def cpu_seconds_per_million_rows(self) -> float:
        """Seconds of CPU time that a million rows cost."""
        return self.cpu_seconds / max(self.rows, 1) * 1e6

    def to_dict(self) -> dict[str, Any]:
        """All numbers by their names."""
        names = ("rows_per_second", "mb_per_second", "cpu_seconds_per_million_rows")
        return {**{name: getattr(self, name) for name in names}, **asdict(self)}


def measure(dataset: StreamingDataset[Any], seconds: float, threads: int = 1, workers: int = 0) -> Measured:
    """Read a dataset for so many seconds, over and over: in our own loop, or with the workers of a DataLoader."""
    if seconds <= 0:
        raise OptionError(f"seconds={seconds}: more than none.")
    if not len(dataset):
        raise OptionError(f"{dataset!r}: there is not one batch to read.")
    started = time.perf_counter()
    batches = _passes(dataset, threads, workers)
    next(batches)
    first = time.perf_counter()
    cpu, rows, size, number, now = _cpu(), 0, 0, 0, first
    while now - first < seconds:
        batch = next(batches)
        rows, size, number = rows + len(batch), size + batch_bytes(batch._columns), number + 1
        now = time.perf_counter()
    batches.close()  # type: ignore[attr-defined]  # workers end, and then their CPU time is known
    return Measured(rows, number, now - first, _cpu() - cpu, size, first - started, _peak())


def _passes(dataset: StreamingDataset[Any], threads: int, workers: int) -> Iterator[Any]:
    """The batches of one pass after the other."""
    if workers:
        data: Any = require("torch.utils.data", extra="torch", needed_for="workers")
        loader: Any = data.DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)
    else:
        loader = dataset.loader(threads=threads)
    while True:
        yield from loader


def _cpu() -> float:
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


def _peak() -> float | None:
    """The most memory that this process had, in MB; workers have their own."""
    if sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 - there is none on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / MB if sys.platform == "darwin" else most * 1024 / MB
