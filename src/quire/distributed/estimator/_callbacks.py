"""Callbacks of a training, and its progress bar: rank 0 writes its progress to a file, and the driver shows it."""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.distributed.estimator._job import Job


Logs = Mapping[str, Any]


class Callback:
    """The base class of callbacks: override what is needed. Any object with some of these methods will do.

    Callbacks are called on rank 0; if that is another process, on copies of them. `model` is the model that is trained;
    with `stop_training = True` the training ends after the epoch, on all ranks.
    """

    model: Any = None
    stop_training: bool = False

    def set_model(self, model: Any) -> None:
        """Called once, before the training begins."""
        self.model = model

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Called before the first epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Called before an epoch."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Called after a step, with the loss of this rank's rows."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Called after an epoch, with the means over all rows."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Called after the last epoch."""


class Callbacks:
    """Several callbacks, called in order. A function is called after each epoch: `callback(epoch, logs)`."""

    def __init__(self, callbacks: Iterable[Any], model: Any) -> None:
        self._callbacks = [
            _FunctionCallback(one) if callable(one) and not hasattr(one, "on_epoch_end") else one for one in callbacks
        ]
        self._model = model
        for one in self._callbacks:
            if hasattr(one, "set_model"):
                one.set_model(model)
            if hasattr(one, "set_params"):
                one.set_params({})

    def notify(self, event: str, *arguments: Any) -> None:
        """Call the method of an event on every callback that has it."""
        for one in self._callbacks:
            method = getattr(one, event, None)
            if method is not None:
                method(*arguments)

    @property
    def listens_to_steps(self) -> bool:
        """Whether there is anyone to notify of steps."""
        return bool(self._callbacks)

    @property
    def stop(self) -> bool:
        """Whether a callback has requested that the training ends."""
        requested = any(getattr(one, "stop_training", False) for one in self._callbacks)
        return requested or bool(getattr(self._model, "stop_training", False))


class _FunctionCallback:
    """A function as a callback."""

    def __init__(self, function: Callable[[int, Logs | None], object]) -> None:
        self.function = function

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.function(epoch, logs)


_PROGRESS_SECONDS = 0.3
"""The interval between two writes, and between two updates of the bar."""


@dataclass
class ProgressFile:
    """The progress of rank 0, in a file."""

    path: Path
    _next: float = field(default=0.0, init=False)

    def step(self, epoch: int, done: int, steps: int | None, loss: float) -> None:
        """Write the progress, unless that was done just now."""
        if time.monotonic() < self._next and done != steps:
            return
        self._next = time.monotonic() + _PROGRESS_SECONDS
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"epoch": epoch, "done": done, "steps": steps, "loss": loss}))
        new.replace(self.path)

    def read(self) -> dict[str, Any] | None:
        """Return the progress that was written last."""
        with suppress(FileNotFoundError):
            progress: dict[str, Any] = json.loads(self.path.read_text())
            return progress
        return None


@contextmanager
def show_progress(job: Job, folder: Path, show: bool | None) -> Iterator[None]:  # noqa: FBT001 - a keyword of fit
    """Show the progress of a job while it runs; by default on a terminal."""
    if show is False or (show is None and not sys.stderr.isatty()):
        yield
        return
    job.progress = ProgressFile(folder / f".progress-{uuid.uuid4().hex}")
    ended = threading.Event()
    watcher = threading.Thread(target=_draw_progress, args=(job.progress, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        job.progress.path.unlink(missing_ok=True)


def _draw_progress(file: ProgressFile, ended: threading.Event) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=None)
        last = False
        while not last:
            last = ended.wait(_PROGRESS_SECONDS)
            current = file.read()
            if current is not None:
                description = f"epoch {current['epoch']}, loss {current['loss']:.4g}"
                progress.update(task, description=description, completed=current["done"], total=current["steps"])
