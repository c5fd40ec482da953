"""A bar for training, wherever its ranks are: rank 0 writes down how far it is, and the driver shows it."""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PACE = 0.3
"""So many seconds are between two looks, and between two notes."""


@dataclass
class Notes:
    """How far rank 0 is, in a file."""

    path: Path
    _next: float = field(default=0.0, init=False)

    def step(self, epoch: int, done: int, steps: int | None, loss: float) -> None:
        """Write it down, unless that was done just now."""
        if time.monotonic() < self._next and done != steps:
            return
        self._next = time.monotonic() + _PACE
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
def shown_progress(job: Any, folder: Path, show: bool | None) -> Iterator[None]:  # noqa: FBT001 - a keyword of fit
    """Show how far a job is while it runs; by default on a terminal."""
    if show is False or (show is None and not sys.stderr.isatty()):
        yield
        return
    job.progress = Notes(folder / f".progress-{uuid.uuid4().hex}")
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(job.progress, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        job.progress.path.unlink(missing_ok=True)


def _watch(notes: Notes, ended: threading.Event) -> None:
    from rich.console import Console  # noqa: PLC0415 - it takes a while to import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    words = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*words, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=None)
        last = False
        while not last:
            last = ended.wait(_PACE)
            found = notes.read()
            if found is not None:
                told = f"epoch {found['epoch']}, loss {found['loss']:.4g}"
                progress.update(task, description=told, completed=found["done"], total=found["steps"])
