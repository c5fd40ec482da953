"""Callbacks: what is told of a training while it goes on."""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Logs = Mapping[str, Any]


class Callback:
    """The base of callbacks: override what is needed. Objects that only have some of these methods will do.

    They are called on rank 0, with copies of themselves if that is another process. `model` is the model that is
    trained; with `stop_training = True` the training ends behind the epoch, on all ranks.
    """

    model: Any = None
    stop_training: bool = False

    def set_model(self, model: Any) -> None:
        """Told once, before the training begins."""
        self.model = model

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Before the first epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Before an epoch."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Behind a step, with the loss of this rank's rows."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Behind an epoch, with the means over all rows."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Behind the last epoch."""


class Callbacks:
    """Several callbacks, told one after the other. A function is told of epochs: `callback(epoch, logs)`."""

    def __init__(self, callbacks: Iterable[Any], model: Any) -> None:
        self._callbacks = [_FunctionCallback(one) if _is_function(one) else one for one in callbacks]
        self._model = model
        for one in self._callbacks:
            if hasattr(one, "set_model"):
                one.set_model(model)
            if hasattr(one, "set_params"):
                one.set_params({})

    def tell(self, event: str, *facts: Any) -> None:
        """Call the method of an event wherever there is one."""
        for one in self._callbacks:
            method = getattr(one, event, None)
            if method is not None:
                method(*facts)

    @property
    def listens_to_steps(self) -> bool:
        """Whether anyone wants to know of steps."""
        return bool(self._callbacks)

    @property
    def stop(self) -> bool:
        """Whether one of them wants the training to end."""
        asked = any(getattr(one, "stop_training", False) for one in self._callbacks)
        return asked or bool(getattr(self._model, "stop_training", False))


def _is_function(callback: Any) -> bool:
    return callable(callback) and not hasattr(callback, "on_epoch_end")


class _FunctionCallback:
    """A function as a callback."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.function(epoch, logs)


_PROGRESS_SECONDS = 0.3
"""So many seconds are between two looks, and between two notes."""


@dataclass
class ProgressFile:
    """How far rank 0 is, in a file."""

    path: Path
    _next: float = field(default=0.0, init=False)

    def step(self, epoch: int, done: int, steps: int | None, loss: float) -> None:
        """Write it down, unless that was done just now."""
        if time.monotonic() < self._next and done != steps:
            return
        self._next = time.monotonic() + _PROGRESS_SECONDS
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"epoch": epoch, "done": done, "steps": steps, "loss": loss}))
        new.replace(self.path)

    def read(self) -> dict[str, Any] | None:
        """What was written last."""
        with suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads(self.path.read_text())
            return found
        return None


@contextmanager
def show_progress(job: Any, folder: Path, show: bool | None) -> Iterator[None]:  # noqa: FBT001 - a keyword of fit
    """Show how far a job is while it runs; by default on a terminal."""
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


def _draw_progress(notes: ProgressFile, ended: threading.Event) -> None:
    from rich.console import Console  # noqa: PLC0415 - it takes a while to import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    words = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*words, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=None)
        last = False
        while not last:
            last = ended.wait(_PROGRESS_SECONDS)
            found = notes.read()
            if found is not None:
                told = f"epoch {found['epoch']}, loss {found['loss']:.4g}"
                progress.update(task, description=told, completed=found["done"], total=found["steps"])
