"""An ordered, bounded map over threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from quire.parallel._collector import may_wait

T = TypeVar("T")
R = TypeVar("R")


def cpu_count() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int, *, prompt: bool = False) -> Iterator[R]:
    """Results in the order of the items; at most one item a worker, and one more, is taken ahead of the consumer.

    With `prompt`, a result that is ready comes before more is taken: for items that are slow to come.
    """
    if workers < 2:
        yield from map(function, items)
        return
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            while len(waiting) > workers or (prompt and waiting and waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=may_wait(), cancel_futures=True)
