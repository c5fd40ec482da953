"""The protocol of adapters: a task comes in as JSON, one line of JSON goes out.

An adapter is a file peer_NAME.py, run by NAME's own interpreter: `python peer_NAME.py '{"operation": "read", ...}'`.
It imports its peer at the top, so that imports are not timed, and implements some of these functions:

- `make(task, batches)` writes batches of columns into `task.folder` in the peer's format;
- `prepare(task, batches)` converts batches to the form in which a user has them in memory, before `make` is timed;
- `read(task)` yields an epoch as pairs of row numbers and columns, as tensors or arrays ready for a training step;
- `take(task)` returns a function from row numbers to columns;
- `resume(task, batches)` stops an epoch after a number of batches, and returns the row numbers before and after.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self

sys.path.append(str(Path(__file__).parent.parent))

from stream_data import WORKLOADS, Columns, Rows, Workload, differences, entropy, ideal_entropy, size_of

__all__ = ["Columns", "Rows", "Task", "run"]

SKIPPED = 5
"""Batches before the clock starts, if an epoch is long enough."""


@dataclass(frozen=True)
class Task:
    """An operation, its data and its duration."""

    operation: str
    workload_name: str
    folder: Path
    scale: float = 1.0
    variant: str = ""
    batch: int = 256
    shuffle: bool = True
    seed: int = 0
    workers: int = 0
    seconds: float = 1.0
    """The minimum duration; epochs are repeated until it is over."""
    limit: float = 10.0
    """The maximum duration, even if the epoch is not complete."""
    check: bool = False
    """Whether the round is not timed, but compares every row and records the memory."""
    epochs: int = 0
    """The minimum number of complete epochs."""

    @property
    def workload(self) -> Workload:
        """The workload at the scale of the task."""
        return WORKLOADS[self.workload_name].scaled(self.scale)


@dataclass
class Clock:
    """Sums wall and CPU seconds between `start` and `stop`."""

    wall: float = 0.0
    cpu: float = 0.0
    rows: int = 0

    def start(self) -> None:
        """Start measuring."""
        self._children = children_seconds()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self, rows: int) -> None:
        """Stop measuring, and add the rows that were processed."""
        self.wall += time.perf_counter() - self._wall
        self.cpu += time.process_time() - self._cpu
        self.cpu += children_seconds() - self._children
        self.rows += rows

    def running(self) -> float:
        """Return the seconds until now."""
        return self.wall + time.perf_counter() - self._wall

    @property
    def report(self) -> dict[str, Any]:
        """Rows per second, and CPU seconds per million rows."""
        if not self.rows:
            return {}
        return {
            "rows_per_s": self.rows / self.wall,
            "cpu_s_per_million": 1e6 * self.cpu / self.rows,
            "timed_rows": self.rows,
        }


def run(adapter: ModuleType) -> int:
    """Run the task of the command line, and print its outcome as the last line."""
    options = json.loads(sys.argv[1])
    task = Task(**{**options, "folder": Path(options["folder"])})
    _set_threads()
    gc.collect()
    gc.freeze()
    outcome = OPERATIONS[task.operation](adapter, task)
    print("\n" + json.dumps(outcome), flush=True)
    return 0


def _set_threads() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


# --- operations


def make(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """Write the data once."""
    _clear(task)
    task.folder.mkdir(parents=True)
    prepared = adapter.prepare if hasattr(adapter, "prepare") else lambda _, batches: batches
    adapter.make(task, prepared(task, task.workload.batches()))
    shutil.rmtree(f"{task.folder}.cache", ignore_errors=True)
    return {"bytes": size_of(task.folder), "raw_bytes": task.workload.raw_bytes}


def write(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """Write batches that are in memory; the time includes closing the last file.

    The first write is not timed: it also allocates pages that later writes reuse.
    """
    batches: Any = list(task.workload.batches())
    batches = list(adapter.prepare(task, batches)) if hasattr(adapter, "prepare") else batches
    clock, times, size = Clock(), 0, 0
    while times < 2 or (clock.wall < task.seconds and not task.check):
        _clear(task)
        task.folder.mkdir(parents=True)
        os.sync()
        running = clock if times else Clock()
        running.start()
        adapter.make(task, batches)
        running.stop(task.workload.rows)
        times, size = times + 1, size_of(task.folder)
    _clear(task)
    raw = task.workload.raw_bytes
    speed = raw * (times - 1) / 1e6 / clock.wall
    return {**clock.report, "mb_per_s": speed, "bytes": size, "raw_bytes": raw, "size": size / raw}


def _clear(task: Task) -> None:
    """Delete the data and the cache of a peer, which would save it work the next time."""
    shutil.rmtree(task.folder, ignore_errors=True)
    shutil.rmtree(f"{task.folder}.cache", ignore_errors=True)


def read(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """Read one epoch in a checked round, otherwise as many as the minimum duration needs."""
    with Memory(watch=task.check) as memory:
        clock, first, seen, wrong = Clock(), 0.0, [], set[str]()
        for epoch in range(10_000):
            started = time.perf_counter()
            batches = adapter.read(_replace(task, seed=task.seed + epoch))
            seen, seconds, faults, whole = _epoch(task, batches, clock, started)
            wrong |= faults
            first = first or seconds
            memory.epoch()
            if task.check or not whole or (clock.wall >= task.seconds and epoch + 1 >= task.epochs):
                break
    outcome = {**clock.report, "first_batch_s": first, **memory.report, **_order(task, seen, whole=whole)}
    outcome["wrong_columns"] = sorted(wrong) if task.check else None
    return outcome


def _epoch(task: Task, batches: Any, clock: Clock, started: float) -> tuple[list[Rows], float, set[str], bool]:
    """Return the rows of each batch, the seconds to the first one, wrong columns, and whether the epoch is complete."""
    seen: list[Rows] = []
    wrong: set[str] = set()
    first, counted, whole, skipped = 0.0, 0, True, min(SKIPPED, task.workload.rows // task.batch // 4)
    if not skipped:
        clock.start()
    for rows, columns in batches:
        seen.append(np.array(rows))  # a copy: the memory of a batch may be reused
        if task.check:
            wrong.update(differences(task.workload, seen[-1], columns))
        first = first or time.perf_counter() - started
        if len(seen) == skipped:
            clock.start()
        elif len(seen) > skipped:
            counted += len(seen[-1])
            if not task.check and not task.epochs and clock.running() > task.limit:
                whole = False
                break
    clock.stop(counted)
    return seen, first, wrong, whole


def _order(task: Task, seen: list[Rows], *, whole: bool) -> dict[str, Any]:
    if not seen:
        return {"rows": 0}
    rows = np.concatenate(seen)
    order: dict[str, Any] = {"rows": len(rows), "order": hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16]}
    order["exactly_once"] = bool(np.array_equal(np.sort(rows), np.arange(task.workload.rows))) if whole else None
    if whole:
        order["repeated"] = len(rows) - len(np.unique(rows))
        order["lost"] = task.workload.rows - len(np.unique(rows))
        order["entropy"] = entropy(seen, task.workload.rows)
        order["ideal_entropy"] = ideal_entropy(seen, task.workload.rows)
    return order


def take(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """Take batches of random rows by number, at least ten, and for the minimum duration."""
    random = np.random.default_rng(task.seed)
    rows = task.workload.rows
    wrong: set[str] = set()
    with Memory(watch=task.check) as memory:
        started = time.perf_counter()
        get = adapter.take(task)
        columns = get(random.integers(0, rows, task.batch))
        first, clock, batches = time.perf_counter() - started, Clock(), 0
        for _ in range(SKIPPED - 1):
            get(random.integers(0, rows, task.batch))
        clock.start()
        while batches < 10 or clock.running() < task.seconds:
            numbers = random.integers(0, rows, task.batch)
            columns = get(numbers)
            batches += 1
            if task.check:
                wrong.update(differences(task.workload, numbers, columns))
        clock.stop(batches * task.batch)
    return {**clock.report, "first_batch_s": first, **memory.report, "wrong_columns": sorted(wrong)}


def start(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """Measure the time from opening to the first batch."""
    clock = Clock()
    clock.start()
    batches = iter(adapter.read(task))
    rows, _ = next(batches)
    clock.stop(len(rows))
    outcome = {"first_batch_s": clock.wall, "first_batch_cpu_s": clock.cpu, "rows": len(rows)}
    print("\n" + json.dumps(outcome), flush=True)
    os._exit(0)  # without waiting for the rest of the epoch


def resume(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """Stop at 37 %, resume from the state, and check that both parts together are the epoch."""
    stop = max(1, task.workload.rows * 37 // 100 // task.batch)
    before, after, seconds, state = adapter.resume(task, stop)
    both = np.sort(np.concatenate([*before, *after]))
    exact = bool(np.array_equal(both, np.arange(task.workload.rows)))
    return {"first_batch_s": seconds, "exactly_once": exact, "state_bytes": len(json.dumps(state, default=str))}


OPERATIONS = {"make": make, "write": write, "read": read, "take": take, "start": start, "resume": resume}


def _replace(task: Task, **changes: Any) -> Task:
    return Task(**{**vars(task), **changes})


# --- the process and its children


def descendants() -> list[int]:
    """Return the living descendants of this process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    pids, waiting = [], [os.getpid()]
    while waiting:
        children = parents.get(waiting.pop(), [])
        pids += children
        waiting += children
    return pids


def children_seconds() -> float:
    """Return the user and system time of all descendants, living and ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for pid in descendants():
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


class Memory:
    """Polls the proportional set size of the process and its descendants, twenty times per second."""

    def __init__(self, *, watch: bool) -> None:
        self._watch, self._done = watch, threading.Event()
        self._peak = {"peak_pss_mb": 0.0, "peak_anon_mb": 0.0}
        self._epochs: list[float] = []
        self._base = self._now()["peak_anon_mb"]

    def __enter__(self) -> Self:
        if self._watch:
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._watch:
            self._thread.join()
            self._note()

    def epoch(self) -> None:
        """Record the memory after an epoch."""
        self._epochs.append(self._now()["peak_anon_mb"])

    @property
    def report(self) -> dict[str, Any]:
        """The peaks and the base in MB, and the growth in MB per epoch from the third epoch on."""
        report: dict[str, Any] = {}
        if self._watch:
            report = {**self._peak, "base_anon_mb": self._base}
        if len(self._epochs) > 4:
            report["growth_mb"] = float(np.polyfit(range(len(self._epochs) - 2), self._epochs[2:], 1)[0])
        return report

    def _look(self) -> None:
        while not self._done.wait(0.05):
            self._note()

    def _note(self) -> None:
        for name, value in self._now().items():
            self._peak[name] = max(self._peak[name], value)

    def _now(self) -> dict[str, float]:
        pss = anonymous = 0
        for pid in [os.getpid(), *descendants()]:
            with contextlib.suppress(OSError):
                for line in _rollup(pid):
                    name, _, value = line.partition(":")
                    pss += int(value.split()[0]) if name == "Pss" else 0
                    anonymous += int(value.split()[0]) if name in {"Pss_Anon", "Pss_Shmem"} else 0
        return {"peak_pss_mb": pss / 1024, "peak_anon_mb": anonymous / 1024}


def _rollup(pid: int) -> Iterator[str]:
    yield from Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
