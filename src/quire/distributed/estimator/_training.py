"""The training of a rank: epochs of steps, checkpoints, and the sums over all ranks.

`Training` is what the loops of all frameworks have in common: `LightningTraining` for torch, `KerasTraining` for Keras.

A checkpoint is a folder with the weights and the position of the training. It is complete or does not exist.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.distributed.estimator._callbacks import Callbacks
from quire.distributed.estimator._feeds import Feed, RankBatch, synchronize_steps
from quire.distributed.estimator._job import Backend, Job, RankOutcome
from quire.distributed.estimator._ranks import RankInfo, World
from quire.errors import OptionError, StorageError, StorageNotFoundError

_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{9,})")
_STATE_FILE = "place.json"
_MAX_CHECKPOINTS = 2


@dataclass(frozen=True)
class TrainingState:
    """The position of a training: epoch, steps so far, position of the data in the epoch, and history.

    `tally` holds the sums of the epoch so far, of all ranks. `run` distinguishes one call of `fit` from another.
    """

    epoch: int = 0
    steps: int = 0
    position: dict[str, Any] | None = None
    tally: list[float] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    run: str = ""


def write_checkpoint(folder: Path, state: TrainingState, save: Callable[[Path], None]) -> Path:
    """Write a checkpoint next to the existing ones, of which the last two are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".new-{uuid.uuid4().hex}"
    new.mkdir()
    try:
        save(new)
        (new / _STATE_FILE).write_text(json.dumps(asdict(state)))
        final = folder / f"checkpoint-{state.steps:09d}"
        if final.exists():  # of the same step, before a restart
            shutil.rmtree(final)
        new.replace(final)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise StorageError(f"{folder}: the checkpoint cannot be written: {error}") from error
    for old in list_checkpoints(folder)[:-_MAX_CHECKPOINTS]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        path for path in folder.iterdir() if _CHECKPOINT_NAME.fullmatch(path.name) and (path / _STATE_FILE).is_file()
    )


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the last checkpoint in a folder; None if there is none."""
    existing = list_checkpoints(Path(folder))
    return str(existing[-1]) if existing else None


def read_state(checkpoint: Path) -> TrainingState:
    """Read the state of the training from a checkpoint."""
    try:
        return TrainingState(**json.loads((checkpoint / _STATE_FILE).read_text()))
    except FileNotFoundError as error:
        raise StorageNotFoundError(f"{checkpoint}: there is no checkpoint.") from error
    except (OSError, TypeError, ValueError) as error:
        raise StorageError(f"{checkpoint}: the checkpoint cannot be read: {error}") from error


_log = logging.getLogger("quire.distributed")


def run_rank(job: Job, rank_info: RankInfo) -> RankOutcome:
    """Do a rank's part of a job."""
    world = job.recipe.world(rank_info) if rank_info.size > 1 else World()
    backend = job.recipe.backend(rank_info, world, job.selection)
    if job.task == "fit":
        outcome = job.recipe.training(job, backend, world).run()
        if rank_info.size > 1 or rank_info.joined or rank_info.addresses:
            outcome.state = job.recipe.dump_state(backend) if rank_info.rank == 0 else None
    elif job.task == "evaluate":
        outcome = RankOutcome(logs=job.recipe.evaluate(job, backend, world))
    else:
        feed = job.data.open(world, job.feed_options.in_order())
        if world.size > 1 and not feed.planned:
            raise OptionError("the order of these rows is unknown: predict with workers=1, or on rows by number.")
        backend.begin(training=False)
        outcome = RankOutcome()
        for batch in feed.batches(0):
            indices = batch.indices
            if indices is not None and batch.valid is not None:
                indices = indices[batch.valid]
            if batch.rows:
                outcome.predictions.append((indices, backend.predict(batch)))
    del backend  # its tensors must be gone before the ranks disconnect
    world.close()
    return outcome


def evaluate(feed: Feed, backend: Backend, world: World, max_steps: int | None = None) -> dict[str, float]:
    """Return the means over all rows of all ranks, each of which counts once."""
    backend.begin(training=False)
    for step, batch in enumerate(synchronize_steps(feed.batches(0), feed, world, "keep")):
        if step == max_steps:
            break
        backend.evaluate(batch)
    return backend.logs(world.sum(backend.tally))


def evaluate_job(job: Job, backend: Backend, world: World) -> dict[str, float]:
    """Return the means over all rows of the data of a job."""
    return evaluate(job.data.open(world, job.feed_options.in_order()), backend, world, job.max_steps)


class Training(ABC):
    """A call of `fit` on one rank. Subclasses run its epochs."""

    def __init__(self, job: Job, backend: Any, world: World) -> None:
        self.job, self.backend, self.world = job, backend, world
        self.feed = job.data.open(world, job.feed_options)
        self.validation = None if job.validation is None else job.validation.open(world, job.feed_options.in_order())
        self.callbacks = Callbacks(self._observers() if world.rank == 0 else (), backend.model)
        self.state = TrainingState(job.epochs.start, job.steps_before, run=job.run)
        self._planned_steps: tuple[int, int | None] | None = None

    @abstractmethod
    def run_epochs(self) -> None:
        """Train from the epoch of the state to the last one."""

    def run(self) -> RankOutcome:
        """Train to the end of the last epoch, from the last checkpoint on if there is one."""
        self._restore()
        self.callbacks.notify("on_train_begin")
        if self.state.epoch < self.job.epochs.stop and not self._is_done():
            self.run_epochs()
        self.callbacks.notify("on_train_end")
        return RankOutcome(history=self.state.history, steps=self.state.steps)

    def _observers(self) -> Sequence[Any]:
        """Return the callbacks that are called on rank 0."""
        return self.job.callbacks

    def _restore(self) -> None:
        """Resume from the last checkpoint of this call of `fit`; with `resume`, of any."""
        folder = self.job.folder
        for checkpoint in reversed([] if folder is None else list_checkpoints(folder)):
            state = read_state(checkpoint)
            if state.run == self.job.run or self.job.resume:
                self.backend.load(checkpoint)
                self.state = replace(state, run=self.job.run)
                return

    # --- an epoch

    def begin_epoch(self) -> None:
        """Begin an epoch, or continue it after a restart."""
        self.callbacks.notify("on_epoch_begin", self.state.epoch)
        self.backend.begin(training=True)
        if self.state.tally is not None and self.world.rank == 0:  # the sums of all ranks, to be counted once
            self.backend.tally = np.array(self.state.tally)

    def batches(self) -> Iterator[RankBatch]:
        """Yield the batches of the epoch, from the position of the state on."""
        batches = self.feed.batches(self.state.epoch, self.state.position)
        return synchronize_steps(batches, self.feed, self.world, self.job.feed_options.last)

    def count_batches(self) -> int | None:
        """Return the batches of the epoch; raise if the ranks would not take the same number."""
        if self._planned_steps is None or self._planned_steps[0] != self.state.epoch:
            self._planned_steps = self.state.epoch, self._count_batches()
        return self._planned_steps[1]

    def _count_batches(self) -> int | None:
        steps = self.feed.steps(self.state.epoch, self.state.position)
        if not self.feed.planned or self.world.size == 1:
            return steps
        known = {int(number) for number in self.world.gather(-1 if steps is None else steps)}
        if len(known) > 1:
            raise OptionError(f"the ranks see different data: their numbers of steps are {sorted(known)}.")
        return steps

    def end_batch(self, batch: RankBatch, done: int, steps: int, loss: float) -> None:
        """Report a batch, after which the optimizer has taken a number of steps, and write a checkpoint if it is due.

        `done` is the number of batches in this epoch so far, since the last restart.
        """
        has_stepped = steps > self.state.steps
        self.state = replace(self.state, steps=steps)
        total = self.count_batches()
        if self.callbacks.listens_to_steps:
            self.callbacks.notify("on_train_batch_end", done - 1, {"loss": loss})
        if self.job.progress is not None and self.world.rank == 0:
            self.job.progress.step(self.state.epoch, done, total, loss)
        every = self.job.checkpoint_every
        possible = self.job.folder is not None and self.feed.resumable and batch.position is not None
        due = every is not None and has_stepped and steps % every == 0
        if possible and due and done != total and not self._is_done():
            position = None if batch.position is None else dict(batch.position)
            tally = self.world.sum(self.backend.tally).tolist()
            self.write_checkpoint(replace(self.state, position=position, tally=tally), within_epoch=True)

    def _is_done(self) -> bool:
        most = self.job.max_steps
        return most is not None and self.state.steps - self.job.steps_before >= most

    def end_epoch(self, means: dict[str, float], means_of_validation: Mapping[str, float]) -> bool:
        """Record the means of an epoch; return whether a callback has requested that the training ends."""
        logs: dict[str, Any] = {"epoch": self.state.epoch, **means}
        logs.update({f"val_{name}": value for name, value in means_of_validation.items()})
        if self.world.rank == 0:
            _log.info("epoch %d: %s", self.state.epoch, means)
        history = [*self.state.history, logs]
        self.state = TrainingState(self.state.epoch + 1, self.state.steps, history=history, run=self.job.run)
        self.callbacks.notify("on_epoch_end", logs["epoch"], {name: logs[name] for name in logs if name != "epoch"})
        return bool(self.world.sum([self.callbacks.stop])[0])  # only rank 0 has callbacks, and all ranks must stop

    def write_checkpoint(self, state: TrainingState, *, within_epoch: bool = False) -> None:
        """Write a checkpoint, if there is a folder for them. Called on all ranks."""
        del within_epoch
        if self.job.folder is not None and self.world.rank == 0:
            write_checkpoint(Path(self.job.folder), state, self.backend.save)
