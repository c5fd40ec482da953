"""Checkpoints: the weights in one folder with where the data goes on, whole or not there at all."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.distributed.estimator._callbacks import Callbacks
from quire.distributed.estimator._feeds import Feed, RankBatch, synchronize_steps
from quire.distributed.estimator._job import Backend, Job, Outcome
from quire.distributed.estimator._ranks import RankInfo, World
from quire.errors import OptionError, StorageError, StorageNotFoundError

_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{9,})")
_STATE_FILE = "place.json"
_MAX_CHECKPOINTS = 2


@dataclass(frozen=True)
class TrainingState:
    """Where a training is: the epoch, the steps behind it, the position of the data in the epoch, and the history.

    `tally` is what was counted in the epoch so far, of all ranks. `run` tells one call of `fit` from another.
    """

    epoch: int = 0
    steps: int = 0
    position: dict[str, Any] | None = None
    tally: list[float] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    run: str = ""


def write_checkpoint(folder: Path, place: TrainingState, save: Callable[[Path], None]) -> Path:
    """Write a checkpoint beside those that are there, of which the last two are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f".new-{uuid.uuid4().hex}"
    made.mkdir()
    try:
        save(made)
        (made / _STATE_FILE).write_text(json.dumps(asdict(place)))
        final = folder / f"checkpoint-{place.steps:09d}"
        if final.exists():  # of the same step, written before a restart
            shutil.rmtree(final)
        made.replace(final)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise StorageError(f"{folder}: the checkpoint cannot be written: {error}") from error
    for old in list_checkpoints(folder)[:-_MAX_CHECKPOINTS]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        path for path in folder.iterdir() if _CHECKPOINT_NAME.fullmatch(path.name) and (path / _STATE_FILE).is_file()
    )


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The last checkpoint in a folder; None if there is none."""
    found = list_checkpoints(Path(folder))
    return str(found[-1]) if found else None


def read_state(checkpoint: Path) -> TrainingState:
    """Where the training was whose checkpoint this is."""
    try:
        return TrainingState(**json.loads((checkpoint / _STATE_FILE).read_text()))
    except FileNotFoundError as error:
        raise StorageNotFoundError(f"{checkpoint}: no checkpoint is there.") from error
    except (OSError, TypeError, ValueError) as error:
        raise StorageError(f"{checkpoint}: the checkpoint cannot be read: {error}") from error


_log = logging.getLogger("quire.distributed")


def run_rank(job: Job, seat: RankInfo) -> Outcome:
    """Do a rank's part of a job."""
    world = job.recipe.world(seat) if seat.size > 1 else World()
    side = job.recipe.side(seat, world, job.chosen)
    if job.task == "fit":
        outcome = Training(job, side, world).run()
        if seat.size > 1 or seat.joined or seat.addresses:
            outcome.state = job.recipe.packed(side) if seat.rank == 0 else None
    elif job.task == "evaluate":
        feed = job.data.open(world, job.reading.in_order())
        outcome = Outcome(logs=evaluate(feed, side, world, job.max_steps))
    else:
        feed = job.data.open(world, job.reading.in_order())
        if world.size > 1 and not feed.planned:
            raise OptionError("the order of these rows is not known: predict with workers=1, or on rows by number.")
        outcome = Outcome(
            predictions=[(_real_places(item), side.predict(item)) for item in _iter_predicted(feed, side)]
        )
    del side
    world.close()
    return outcome


def evaluate(feed: Feed, side: Backend, world: World, max_steps: int | None = None) -> dict[str, float]:
    """The means over all rows of all ranks, each of which counts once."""
    side.begin(training=False)
    for step, item in enumerate(synchronize_steps(feed.items(0), feed, world, "keep")):
        if step == max_steps:
            break
        side.evaluate(item)
    return side.logs(world.sum(side.tally))


def _iter_predicted(feed: Feed, side: Backend) -> Any:
    side.begin(training=False)
    return (item for item in feed.items(0) if item.rows)


def _real_places(item: RankBatch) -> Any:
    return item.places if item.places is None or item.real is None else item.places[item.real]


class Training:
    """The epochs of a call of `fit` on one rank."""

    def __init__(self, job: Job, side: Backend, world: World) -> None:
        self.job, self.side, self.world = job, side, world
        self.feed = job.data.open(world, job.reading)
        self.validation = None if job.validation is None else job.validation.open(world, job.reading.in_order())
        self.callbacks = Callbacks(job.callbacks if world.rank == 0 else (), side.model)
        self.place = TrainingState(job.epochs.start, job.steps_before, run=job.run)

    def run(self) -> Outcome:
        """Train to the end of the last epoch, from the last checkpoint on if there is one."""
        self._restore()
        tell = self.callbacks.tell
        tell("on_train_begin")
        while self.place.epoch < self.job.epochs.stop and not self._is_enough():
            self._epoch()
            if self.world.sum([self.callbacks.stop])[0]:
                break
        tell("on_train_end")
        return Outcome(history=self.place.history, steps=self.place.steps)

    def _restore(self) -> None:
        """Go on from the last checkpoint of this call of `fit`; with `resume`, of any."""
        folder = self.job.folder
        for found in reversed([] if folder is None else list_checkpoints(folder)):
            place = read_state(found)
            if place.run == self.job.run or self.job.resume:
                self.side.load(found)
                self.place = replace(place, run=self.job.run)
                return

    # --- an epoch

    def _epoch(self) -> None:
        place = self.place
        self.callbacks.tell("on_epoch_begin", place.epoch)
        self.side.begin(training=True)
        if place.tally is not None and self.world.rank == 0:
            self.side.tally = np.array(place.tally)
        steps = self._agreed_steps()
        for done, item in enumerate(self._items(), 1):
            loss = self.side.train(item)
            self.place = replace(self.place, steps=self.place.steps + 1)
            self._stepped(done, steps, loss)
            if self._is_enough():
                break
            if done != steps and self._is_due(item):
                self._checkpoint(item)
        self._close(self.side.logs(self.world.sum(self.side.tally)))

    def _items(self) -> Any:
        items = self.feed.items(self.place.epoch, self.place.position)
        return synchronize_steps(items, self.feed, self.world, self.job.reading.last)

    def _agreed_steps(self) -> int | None:
        """The steps of the epoch; ranks that would not take the same number of them stop before the first one."""
        steps = self.feed.steps(self.place.epoch, self.place.position)
        if not self.feed.planned or self.world.size == 1:
            return steps
        known = {int(number) for number in self.world.gather(-1 if steps is None else steps)}
        if len(known) > 1:
            raise OptionError(f"the ranks see different data: they have {sorted(known)} steps.")
        return steps

    def _stepped(self, done: int, steps: int | None, loss: float) -> None:
        if self.callbacks.listens_to_steps:
            self.callbacks.tell("on_train_batch_end", done - 1, {"loss": loss})
        if self.job.progress is not None and self.world.rank == 0:
            self.job.progress.step(self.place.epoch, done, steps, loss)

    def _is_enough(self) -> bool:
        most = self.job.max_steps
        return most is not None and self.place.steps - self.job.steps_before >= most

    def _close(self, means: dict[str, float]) -> None:
        """The end of an epoch: its means, those of the validation, and a checkpoint."""
        logs: dict[str, Any] = {"epoch": self.place.epoch, **means}
        if self.validation is not None:
            found = evaluate(self.validation, self.side, self.world)
            logs.update({f"val_{name}": value for name, value in found.items()})
        self.side.epoch_done(logs)
        if self.world.rank == 0:
            _log.info("epoch %d: %s", self.place.epoch, means)
        history = [*self.place.history, logs]
        self.place = TrainingState(self.place.epoch + 1, self.place.steps, history=history, run=self.job.run)
        self.callbacks.tell("on_epoch_end", logs["epoch"], {name: logs[name] for name in logs if name != "epoch"})
        self._write(self.place)

    # --- checkpoints

    def _is_due(self, item: RankBatch) -> bool:
        every = self.job.checkpoint_every
        can = self.job.folder is not None and self.feed.resumable and item.position is not None
        return can and every is not None and self.place.steps % every == 0

    def _checkpoint(self, item: RankBatch) -> None:
        position = None if item.position is None else dict(item.position)
        tally = self.world.sum(self.side.tally).tolist()
        self._write(replace(self.place, position=position, tally=tally))

    def _write(self, place: TrainingState) -> None:
        if self.job.folder is not None and self.world.rank == 0:
            write_checkpoint(Path(self.job.folder), place, self.side.save)
