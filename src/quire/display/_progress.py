"""A progress bar for long work."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress, Task

T = TypeVar("T")

_screen = threading.Lock()
"""Held by the visible bar: nested or concurrent work shows one bar only."""

_DELAY = 1.0
"""Seconds of work before a bar appears that was not requested."""
_INTERVAL = 0.1
"""Seconds between two updates."""


def track(
    items: Iterable[T],
    what: str,
    total: int | None = None,
    *,
    show: bool | None = None,
    size: Callable[[T], int] = lambda _: 1,
) -> Iterator[T]:
    """Yield the items and show a progress bar on the standard error stream.

    By default the bar appears on a terminal once the work takes longer than a second. It counts items, or the sum of
    `size(item)`, and shows the rate and the remaining time. `QUIRE_PROGRESS=0` in the environment turns off bars that
    were not requested by `show=True`.
    """
    if not is_shown(show):
        yield from items
        return
    progress = _create_bar(total)
    task = progress.add_task(what, total=math.inf if total is None else total)  # older rich does not accept None
    done, shown, next_update = 0, False, time.monotonic() + (0.0 if show else _DELAY)
    # Not updated for every item: an update of rich may take longer than an item.
    try:
        for item in items:
            if time.monotonic() >= next_update:
                if not shown and _screen.acquire(blocking=False):
                    shown = True
                    progress.start()
                progress.update(task, completed=done)
                next_update = time.monotonic() + _INTERVAL
            yield item
            done += size(item)  # after the consumer has finished with it
    finally:
        if shown:
            try:
                progress.update(task, completed=done)
                progress.stop()
            finally:
                _screen.release()


def is_shown(show: bool | None) -> bool:  # noqa: FBT001
    """Whether a progress bar is to be shown: if it is requested, or on a terminal."""
    is_watched = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("QUIRE_PROGRESS") != "0"
    return is_watched if show is None else show


def _create_bar(total: int | None) -> Progress:
    """Build a bar with description, count, rate and remaining time; elapsed time if the total is unknown."""
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

    class CountAndRate(ProgressColumn):
        """The count and the rate."""

        def render(self, task: Task) -> Text:
            done = int(task.completed)
            of = "" if total is None else f"/{total:,}"
            elapsed = task.finished_time if task.finished_time is not None else task.elapsed
            rate = f"  {done / elapsed:,.0f}/s" if elapsed else ""
            return Text(f"{done:,}{of}{rate}", style="progress.download")

    unknown = total is None
    bar, clock = (SpinnerColumn(), TimeElapsedColumn()) if unknown else (BarColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), bar, CountAndRate(), clock, console=Console(stderr=True))
