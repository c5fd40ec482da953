"""What an adapter is and how a round of it is run: a task comes in as JSON, one line of JSON goes out.

An adapter is a file peer_NAME.py, run by NAME's own interpreter: `python peer_NAME.py '{"operation": "read", ...}'`.
It imports its peer at the top, so that imports are not timed, and has some of these functions:

- `make(task, batches)` writes batches of columns into `task.folder` in the peer's format;
- `prepare(task, batches)` brings batches into the form in which a user would have them in hand, before `make` is timed;
- `read(task)` gives an epoch as pairs of row numbers and columns, as tensors or arrays ready for a training step;
- `take(task)` gives a function from row numbers to columns;
- `resume(task, batches)` stops an epoch after so many batches and gives the numbers of the rows seen and the rest.
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
"""Batches before the clock starts, where an epoch has many."""


@dataclass(frozen=True)
class Task:
    """What to do, on which data, and for how long."""

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
    """The clock runs at least so long, over as many epochs as that takes."""
    limit: float = 10.0
    """And at most so long, should the epoch not be over."""
    check: bool = False
    """A round that is not timed: every row is compared, and memory is watched."""
    epochs: int = 0
    """Whole epochs, however long they take."""

    @property
    def workload(self) -> Workload:
        """The data."""
        return WORKLOADS[self.workload_name].scaled(self.scale)


@dataclass
class Clock:
    """Wall and CPU seconds of what it was started for, summed up."""

    wall: float = 0.0
    cpu: float = 0.0
    rows: int = 0

    def start(self) -> None:
        """From here."""
        self._children = children_seconds()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self, rows: int) -> None:
        """To here, with so many rows."""
        self.wall += time.perf_counter() - self._wall
        self.cpu += time.process_time() - self._cpu
        self.cpu += children_seconds() - self._children
        self.rows += rows

    def running(self) -> float:
        """Seconds until now."""
        return self.wall + time.perf_counter() - self._wall

    @property
    def report(self) -> dict[str, Any]:
        """Rows a second, and CPU seconds for a million of them."""
        if not self.rows:
            return {}
        return {
            "rows_per_s": self.rows / self.wall,
            "cpu_s_per_million": 1e6 * self.cpu / self.rows,
            "timed_rows": self.rows,
        }


def run(adapter: ModuleType) -> int:
    """Do what the command line says, and print what came of it as the last line."""
    given = json.loads(sys.argv[1])
    task = Task(**{**given, "folder": Path(given["folder"])})
    _one_thread()
    gc.collect()
    gc.freeze()
    outcome = OPERATIONS[task.operation](adapter, task)
    print("\n" + json.dumps(outcome), flush=True)
    return 0


def _one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


# --- operations


def make(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """The data, once."""
    _clear(task)
    task.folder.mkdir(parents=True)
    prepared = adapter.prepare if hasattr(adapter, "prepare") else lambda _, batches: batches
    adapter.make(task, prepared(task, task.workload.batches()))
    shutil.rmtree(f"{task.folder}.cache", ignore_errors=True)
    return {"bytes": size_of(task.folder), "raw_bytes": task.workload.raw_bytes}


def write(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """The same with all batches in hand, timed to the closing of the last file.

    The first time is not timed: it also takes pages from the system that the others find free.
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
    """Away with the data, and with what a peer keeps beside it on the way, which would spare it work the next time."""
    shutil.rmtree(task.folder, ignore_errors=True)
    shutil.rmtree(f"{task.folder}.cache", ignore_errors=True)


def read(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """Epochs: in a round that checks one whole one, otherwise as many as the seconds ask for."""
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
    """The rows of each batch, the seconds to the first one, what was wrong, and whether the epoch was whole."""
    seen: list[Rows] = []
    wrong: set[str] = set()
    first, counted, whole, skipped = 0.0, 0, True, min(SKIPPED, task.workload.rows // task.batch // 4)
    if not skipped:
        clock.start()
    for rows, columns in batches:
        seen.append(np.array(rows))  # a copy: the memory of a batch may be used again
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
    found: dict[str, Any] = {"rows": len(rows), "order": hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16]}
    found["exactly_once"] = bool(np.array_equal(np.sort(rows), np.arange(task.workload.rows))) if whole else None
    if whole:
        found["repeated"] = len(rows) - len(np.unique(rows))
        found["lost"] = task.workload.rows - len(np.unique(rows))
        found["entropy"] = entropy(seen, task.workload.rows)
        found["ideal_entropy"] = ideal_entropy(seen, task.workload.rows)
    return found


def take(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """Batches of random rows by number, at least ten and otherwise for so many seconds."""
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
            wanted = random.integers(0, rows, task.batch)
            columns = get(wanted)
            batches += 1
            if task.check:
                wrong.update(differences(task.workload, wanted, columns))
        clock.stop(batches * task.batch)
    return {**clock.report, "first_batch_s": first, **memory.report, "wrong_columns": sorted(wrong)}


def start(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """From opening to the first batch, once."""
    clock = Clock()
    clock.start()
    batches = iter(adapter.read(task))
    rows, _ = next(batches)
    clock.stop(len(rows))
    found = {"first_batch_s": clock.wall, "first_batch_cpu_s": clock.cpu, "rows": len(rows)}
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # nobody waits for the rest of the epoch


def resume(adapter: ModuleType, task: Task) -> dict[str, Any]:
    """Stop at 37 %, go on from the state, and see whether the two halves are the whole."""
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
    """The living children of this process, and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def children_seconds() -> float:
    """User and system time of the children, the living and the ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for pid in descendants():
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


class Memory:
    """Watches the proportional set size of the process and its children, twenty times a second."""

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
        """Note what is held after an epoch."""
        self._epochs.append(self._now()["peak_anon_mb"])

    @property
    def report(self) -> dict[str, Any]:
        """The peaks in MB, above what the process held before; growth in MB an epoch, from the third on."""
        found: dict[str, Any] = {}
        if self._watch:
            found = {**self._peak, "base_anon_mb": self._base}
        if len(self._epochs) > 4:
            found["growth_mb"] = float(np.polyfit(range(len(self._epochs) - 2), self._epochs[2:], 1)[0])
        return found

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
