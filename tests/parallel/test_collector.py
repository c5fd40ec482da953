"""Iterators closed by the garbage collector do not wait: its thread may hold locks that workers need."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.parallel import ordered_map, parallel_map

Map = Callable[[Callable[[int], int], Any], Iterator[int]]


@pytest.mark.parametrize(
    "run",
    [lambda f, items: parallel_map(f, items, num_workers=2), lambda f, items: ordered_map(f, items, 2)],
    ids=["m", "o"],
)
def test_collected_iterator_does_not_wait_for_threads(run: Map) -> None:
    release, released, lock = threading.Event(), [], threading.Lock()

    def slow(number: int) -> int:
        if number:
            with lock:
                released.append(release.wait(20))
        return number

    results = run(slow, range(3))
    assert next(results) == 0
    cycle: list[Any] = [results]
    cycle.append(cycle)
    del results, cycle
    gc.collect()
    release.set()
    with lock:
        assert all(released)


@pytest.mark.parametrize(
    "run",
    [lambda f, items: parallel_map(f, items, num_workers=2), lambda f, items: ordered_map(f, items, 2)],
    ids=["m", "o"],
)
def test_closed_iterator_waits_for_threads(run: Map) -> None:
    busy, began = set(), threading.Event()

    def slow(number: int) -> int:
        if number:
            busy.add(number)
            began.set()
            threading.Event().wait(0.2)
            busy.discard(number)
        return number

    results = run(slow, range(9))
    assert next(results) == 0
    assert began.wait(20)
    results.close()  # type: ignore[attr-defined]
    assert not busy
