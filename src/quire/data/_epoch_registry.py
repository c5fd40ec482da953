"""Count the passes over a dataset, so that all worker processes of a pass agree on its epoch.

Each iteration over a dataset is a pass, and each pass is the next epoch. A DataLoader may start new worker processes
for every pass. They are copies of the dataset as it was before, and do not know how many passes there were. So the
trainer and its workers share a small file: the first worker of a pass writes down where the pass begins, and the others
read it.

Workers recognise a pass by its id, which follows from the seed that torch draws for each pass. A generator that is
seeded again yields the same id for another pass. Therefore the record lists the workers that have begun: a worker that
begins for the second time begins another pass. With workers that live for several passes (`persistent_workers`), one
may be late and begin when the others are one pass ahead. Each process counts how often it has begun a pass with an id
(its round), and a worker of an earlier round than that of the record does not change it.
"""

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

_NOT_BEGUN = 0
"""The id of a pass that has not begun."""


class PassStart(NamedTuple):
    """Where a pass begins: the epoch, the position in it, and the number of epochs of the pass before it.

    `taken` counts the steps of the pass before this position, which were taken in other runs.
    """

    epoch: int = 0
    position: int = 0
    done: int = 0
    taken: int = 0


@dataclass(frozen=True)
class PassRecord:
    """The last pass, or the next one if it was set and has not begun.

    `begun` are the numbers of the workers that have begun the pass, `round` is their count of passes with this id, and
    `reached` is the last epoch that a pass without end has come to.
    """

    start: PassStart = field(default_factory=PassStart)
    pass_id: int = _NOT_BEGUN
    round: int = 0
    workers: int = 0
    begun: list[int] = field(default_factory=list)
    reached: int = 0
    is_over: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether a pass was begun since its start was set."""
        return self.pass_id != _NOT_BEGUN

    def next_start(self, epochs: int) -> PassStart:
        """Return where the next pass begins, if a pass has this number of epochs."""
        return PassStart(max(self.start.epoch - self.start.done + epochs, self.reached + 1))


class EpochRegistry:
    """The passes over one dataset, and the errors in them, shared with worker processes by files.

    There is one file for each process that has workers, so ranks that were forked with a dataset count for themselves.
    A file is replaced as a whole, under a file lock.
    """

    def __init__(self, record: PassRecord | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="quire-passes-"))
        self._record = record or PassRecord()
        self._rounds: tuple[int, int, dict[int, int]] = (0, _NOT_BEGUN, {})
        weakref.finalize(self, _remove_folder, self.folder, os.getpid())

    def read(self) -> PassRecord:
        """Return the last pass, or the next one if it was set and has not begun."""
        with suppress(FileNotFoundError):  # this process has written none: the record it was created with counts
            values = json.loads(self._path("json").read_bytes())
            self._record = PassRecord(**{**values, "start": PassStart(*values["start"])})
        return self._record

    def current_start(self, epochs: int) -> PassStart:
        """Return where the pass under way began, or where the next one begins."""
        record = self.read()
        return record.next_start(epochs) if record.is_over else record.start

    def set_next(self, start: PassStart) -> None:
        """Set where the next pass begins."""
        with lock_file(self._path("lock")):
            self._write(PassRecord(start))

    def begin(self, worker: Worker, epochs: int) -> PassStart:
        """Begin a pass as one of its workers, and return where it begins: as set, or after the pass before."""
        own_round = self._count_round(worker)
        with lock_file(self._path("lock")):
            record = self.read()
            if record.pass_id == worker.pass_id and worker.number not in record.begun:
                if own_round >= record.round:  # otherwise this worker is late: the others are in a later pass
                    self._write(replace(record, begun=[*record.begun, worker.number]))
                return record.start
            start = record.next_start(epochs) if record.has_begun else record.start
            self._write(PassRecord(start, worker.pass_id, own_round, worker.workers, [worker.number], start.epoch))
        return start

    def resume(self, start: PassStart, worker: Worker) -> None:
        """Continue, as one of its workers, a pass that was begun in another process."""
        own_round = self._count_round(worker)
        with lock_file(self._path("lock")):
            record = self.read()
            is_same = record.pass_id == worker.pass_id and worker.number not in record.begun
            begun = [*record.begun, worker.number] if is_same else [worker.number]
            self._write(PassRecord(start, worker.pass_id, own_round, worker.workers, begun, start.epoch))

    def _count_round(self, worker: Worker) -> int:
        """Count how often this process has begun a pass with this id as this worker, from 0."""
        pid, pass_id, rounds = self._rounds
        if (pid, pass_id) != (os.getpid(), worker.pass_id):
            rounds = {}
            self._rounds = os.getpid(), worker.pass_id, rounds
        rounds[worker.number] = rounds.get(worker.number, -1) + 1
        return rounds[worker.number]

    def reach(self, pass_id: int, epoch: int) -> None:
        """Record that a pass without end has come to an epoch."""
        with lock_file(self._path("lock")):
            record = self.read()
            if record.pass_id == pass_id:
                self._write(replace(record, reached=max(record.reached, epoch)))

    def end(self, pass_id: int) -> None:
        """Record that a pass is over."""
        with lock_file(self._path("lock")):
            record = self.read()
            if record.pass_id == pass_id:
                self._write(replace(record, is_over=True))

    def is_first_time(self, event: str) -> bool:
        """Record an event, and return whether it is the first of its kind in this process and its workers."""
        try:
            self._path(event.replace(" ", "-")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    # --- errors

    def add_error(self, error: str) -> None:
        """Record an error, in any worker."""
        with self._path("errors").open("a") as file:
            file.write(json.dumps(error) + "\n")

    def errors(self) -> list[str]:
        """Return the errors of all workers, each once."""
        try:
            lines = self._path("errors").read_text().splitlines()
        except FileNotFoundError:
            return []
        return list(dict.fromkeys(map(json.loads, lines)))

    # --- files

    def _path(self, suffix: str) -> Path:
        """Return a file of the process that has workers: this one, or the one that this is a worker of."""
        if not self.folder.exists():  # the dataset came from another machine, or from a process that has ended
            self.folder = Path(tempfile.gettempdir(), self.folder.name)
            self.folder.mkdir(exist_ok=True)
        parent = multiprocessing.parent_process() if this_worker() else None
        return self.folder / f"{os.getpid() if parent is None else parent.pid}.{suffix}"

    def _write(self, record: PassRecord) -> None:
        self._record = record
        # A rename is atomic, so that readers need no lock.
        new_file = self._path("new")
        new_file.write_text(json.dumps(record.__dict__))
        new_file.replace(self._path("json"))

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (str(self.folder), self.read(), os.getpid())

    def __deepcopy__(self, memo: dict[int, Any]) -> EpochRegistry:
        return EpochRegistry(self.read())


def _restore(folder: str, record: PassRecord, origin: int) -> EpochRegistry:
    if os.getpid() == origin:  # a copy in the same process counts for itself
        return EpochRegistry(record)
    registry = object.__new__(EpochRegistry)
    registry.folder, registry._record, registry._rounds = Path(folder), record, (0, _NOT_BEGUN, {})
    return registry


def _remove_folder(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked worker
        shutil.rmtree(folder, ignore_errors=True)


# --- workers of torch's DataLoader


class Worker(NamedTuple):
    """A worker of a DataLoader: its number, the number of workers, and the id of the pass that all of them share."""

    number: int
    workers: int
    pass_id: int

    @classmethod
    def alone(cls) -> Worker:
        """Return this process as the only one that takes part in a new pass."""
        return cls(0, 0, secrets.randbits(63) | 1)  # odd, so that it is never the id of a pass that has not begun


def this_worker() -> Worker | None:
    """Return the worker that this process is; None in other processes."""
    if not is_loaded("torch.utils.data"):
        return None
    data: Any = require("torch.utils.data", extra="torch", needed_for="workers")
    info = data.get_worker_info()
    # torch draws a base seed for each pass, and the seed of a worker is the base seed plus its number.
    return None if info is None else Worker(info.id, info.num_workers, (info.seed - info.id) % 2**63 | 1)


def register_with_torch(dataset_type: type[Any]) -> None:
    """Let torch's DataLoader treat a class as an `IterableDataset`, if torch is installed."""
    if is_installed("torch"):
        data: Any = require("torch.utils.data", extra="torch", needed_for="StreamingDataset")
        data.IterableDataset.register(dataset_type)
