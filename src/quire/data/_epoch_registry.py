"""Which epoch a pass over a dataset is: told by a small file, so that every worker process of a pass knows the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import shutil
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from quire._optional import is_installed, is_loaded, require
from quire.storage import lock_file

_NEW = 0
"""The mark of a pass that has not begun."""


class Pass(NamedTuple):
    """Where a pass begins: the epoch, the position in it, and how many epochs of the pass are done."""

    epoch: int = 0
    position: int = 0
    done: int = 0


@dataclass(frozen=True)
class Record:
    """The last pass, or, with no mark, the next one: its mark, and which workers have begun it, and for which time.

    `reached` is the last epoch that a pass without an end has come to.
    """

    start: Pass = field(default_factory=Pass)
    mark: int = _NEW
    turn: int = 0
    workers: int = 0
    begun: list[int] = field(default_factory=list)
    reached: int = 0
    is_over: bool = False

    @property
    def is_new(self) -> bool:
        """Whether the pass has not begun."""
        return self.mark == _NEW

    def following(self, epochs: int) -> Pass:
        """Where the pass behind this one begins."""
        return Pass(max(self.start.epoch - self.start.done + epochs, self.reached + 1))


class Passes:
    """The passes over one dataset, and what went wrong in them.

    Workers that are started for every pass anew do not know how many there were. So the first of a pass to come, which
    it tells by a mark that all of its workers have, writes down the epoch; the others read it. There is one file for
    each process that has workers: ranks that were forked with the dataset in hand count each on their own.
    """

    def __init__(self, record: Record | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="quire-passes-"))
        self._last = record or Record()
        self._turns: tuple[int, int, dict[int, int]] = (0, _NEW, {})
        weakref.finalize(self, _remove, self.folder, os.getpid())

    def set(self, start: Pass) -> None:
        """Say where the next pass begins."""
        with lock_file(self._path("lock")):
            self._write(Record(start))

    def last(self) -> Record:
        """The last pass, or the next one if it was set and has not begun."""
        with suppress(FileNotFoundError):  # of this process, none was written yet: it is as it was given to it
            self._last = _from_json(self._path("json").read_bytes())
        return self._last

    def next(self, epochs: int) -> Pass:
        """Where the pass that is under way has begun; if there is none, where the next one will."""
        record = self.last()
        return record.following(epochs) if record.is_over else record.start

    def begin(self, mark: int, worker: int, workers: int, epochs: int) -> Pass:
        """Where the pass of this mark begins: as was set, or behind the one before.

        A worker that has begun the pass already begins another: workers may live for several passes, and a generator
        that is seeded alike gives those of another pass the same mark.
        """
        turn = self._turn(mark, worker)
        with lock_file(self._path("lock")):
            record = self.last()
            if record.mark == mark and worker not in record.begun:
                if turn >= record.turn:  # else it is late: the others are in a later pass by now
                    self._write(replace(record, begun=[*record.begun, worker]))
                return record.start
            start = record.start if record.is_new else record.following(epochs)
            self._write(Record(start, mark, turn, workers, [worker], start.epoch))
        return start

    def _turn(self, mark: int, worker: int) -> int:
        """How often this process has begun a pass with the mark as that worker."""
        pid, known, turns = self._turns
        if (pid, known) != (os.getpid(), mark):
            turns = {}
            self._turns = os.getpid(), mark, turns
        turns[worker] = turns.get(worker, -1) + 1
        return turns[worker]

    def resume(self, start: Pass, mark: int, worker: int, workers: int) -> None:
        """Say that a worker goes on in a pass that it began in another process."""
        turn = self._turn(mark, worker)
        with lock_file(self._path("lock")):
            record = self.last()
            same = record.mark == mark and worker not in record.begun
            begun = [*record.begun, worker] if same else [worker]
            self._write(Record(start, mark, turn, workers, begun, start.epoch))

    def reach(self, mark: int, epoch: int) -> None:
        """Say that a pass without an end has come to an epoch."""
        with lock_file(self._path("lock")):
            record = self.last()
            if record.mark == mark:
                self._write(replace(record, reached=max(record.reached, epoch)))

    def end(self, mark: int) -> None:
        """Say that the pass is over."""
        with lock_file(self._path("lock")):
            record = self.last()
            if record.mark == mark:
                self._write(replace(record, is_over=True))

    # --- errors

    def note(self, error: str) -> None:
        """Note what went wrong, in any worker."""
        with self._path("errors").open("a") as file:
            file.write(json.dumps(error) + "\n")

    def errors(self) -> list[str]:
        """What went wrong, once each."""
        try:
            lines = self._path("errors").read_text().splitlines()
        except FileNotFoundError:
            return []
        return list(dict.fromkeys(map(json.loads, lines)))

    # --- files

    def _path(self, suffix: str) -> Path:
        """A file of the process that has workers: this one, or the one that this is a worker of."""
        if not self.folder.exists():  # it came from another machine, or from a process that is gone
            self.folder = Path(tempfile.gettempdir(), self.folder.name)
            self.folder.mkdir(exist_ok=True)
        parent = multiprocessing.parent_process() if this_worker() else None
        return self.folder / f"{os.getpid() if parent is None else parent.pid}.{suffix}"

    def _write(self, record: Record) -> None:
        self._last = record
        content = json.dumps({**record.__dict__, "begun": record.begun})
        made = self._path("new")
        made.write_text(content)
        made.replace(self._path("json"))

    def __reduce__(self) -> tuple[object, ...]:
        return _attached, (str(self.folder), self.last(), os.getpid())

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes:
        return Passes(self.last())


def _attached(folder: str, record: Record, origin: int) -> Passes:
    if os.getpid() == origin:  # a copy, which counts for itself
        return Passes(record)
    made = object.__new__(Passes)
    made.folder, made._last, made._turns = Path(folder), record, (0, _NEW, {})
    return made


def _from_json(content: bytes) -> Record:
    values = json.loads(content)
    return Record(**{**values, "start": Pass(*values["start"])})


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not in a worker that was forked
        shutil.rmtree(folder, ignore_errors=True)


def new_mark() -> int:
    """The mark of a pass that no one else takes part in."""
    return secrets.randbits(63) | 1


# --- workers of torch's DataLoader


class Worker(NamedTuple):
    """A worker of a DataLoader: its number, how many there are, and a mark of the pass that all of them have."""

    number: int
    workers: int
    mark: int


def this_worker() -> Worker | None:
    """The worker that this process is; None if it is none."""
    if not is_loaded("torch.utils.data"):
        return None
    data: Any = require("torch.utils.data", extra="torch", needed_for="workers")
    info = data.get_worker_info()
    return None if info is None else Worker(info.id, info.num_workers, (info.seed - info.id) % 2**63 | 1)


def known_to_torch(dataset_type: type[Any]) -> None:
    """Let torch's DataLoader see what it iterates over, once torch is there."""
    if is_installed("torch"):
        data: Any = require("torch.utils.data", extra="torch", needed_for="StreamingDataset")
        data.IterableDataset.register(dataset_type)
