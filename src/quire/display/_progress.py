"""A progress bar for long work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_PATIENCE = 1.0
"""Work that takes less time, in seconds, gets no bar unless it is asked for."""


def tracked(
    items: Iterable[T],
    what: str,
    total: int | None = None,
    *,
    show: bool | None = None,
    size: Callable[[T], int] = lambda _: 1,
) -> Iterator[T]:
    """The items, with a bar on the standard error stream; by default on a terminal, once the work takes long.

    The bar counts items, or what `size` tells of each.
    """
    if show is False or (show is None and not sys.stderr.isatty()):
        yield from items
        return
    yield from _tracked(items, what, total, 0.0 if show else _PATIENCE, size)


def _tracked(
    items: Iterable[T], what: str, total: int | None, patience: float, size: Callable[[T], int]
) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    started, shown, done = time.monotonic(), False, 0
    words = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*words, console=Console(stderr=True))
    task = progress.add_task(what, total=total)
    try:
        for item in items:
            if not shown and time.monotonic() - started >= patience:
                progress.start()
                shown = True
            yield item
            done += size(item)
            if shown:
                progress.update(task, completed=done)
    finally:
        if shown:
            progress.stop()
