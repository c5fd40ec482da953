"""A progress bar for long work."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

_screen = threading.Lock()
"""Held by the bar that is shown: of work inside work, one bar is enough."""

_PATIENCE = 1.0
"""Work that takes less time, in seconds, gets no bar unless it is asked for."""
_BEAT = 0.1
"""Seconds between two looks at how far the work is."""


def tracked(
    items: Iterable[T],
    what: str,
    total: int | None = None,
    *,
    show: bool | None = None,
    size: Callable[[T], int] = lambda _: 1,
) -> Iterator[T]:
    """The items, with a bar on the standard error stream; by default on a terminal, once the work takes long.

    The bar counts items, or what `size` tells of each; it tells how many there are in a second, and how long the rest
    will take. `QUIRE_PROGRESS=0` in the environment turns bars off that are not asked for.
    """
    if show is False or (show is None and not _is_watched()):
        yield from items
        return
    yield from _tracked(items, what, total, 0.0 if show else _PATIENCE, size)


def _is_watched() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("QUIRE_PROGRESS") != "0"


def _tracked(
    items: Iterable[T], what: str, total: int | None, patience: float, size: Callable[[T], int]
) -> Iterator[T]:
    progress = _bar(total)
    task = progress.add_task(what, total=math.inf if total is None else total)  # older rich has no None here
    done, shown, look = 0, False, time.monotonic() + patience
    try:
        for item in items:
            if time.monotonic() >= look:
                if not shown and _screen.acquire(blocking=False):
                    shown = True
                    progress.start()
                progress.update(task, completed=done)
                look = time.monotonic() + _BEAT
            yield item
            done += size(item)
    finally:
        if shown:
            try:
                progress.update(task, completed=done)
                progress.stop()
            finally:
                _screen.release()


def _bar(total: int | None) -> Progress:
    """Description, bar, count, rate, and the time that is left; or that which has passed, where no one knows."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        """How much, and how fast."""

        def render(self, task: Any) -> Text:
            done = int(task.completed)
            of = "" if total is None else f"/{total:,}"
            elapsed = task.finished_time if task.finished_time is not None else task.elapsed
            rate = f"  {done / elapsed:,.0f}/s" if elapsed else ""
            return Text(f"{done:,}{of}{rate}", style="progress.download")

    unknown = total is None
    bar, left = (SpinnerColumn(), TimeElapsedColumn()) if unknown else (BarColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), bar, Rate(), left, console=Console(stderr=True))
