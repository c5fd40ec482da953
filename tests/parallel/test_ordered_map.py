from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from quire.parallel import cpu_count, ordered_map


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_ordered_map_yields_results_in_order(workers: int) -> None:
    def slow_at_first(number: int) -> int:
        time.sleep(0.02 if number % 4 == 0 else 0)
        return number * number

    assert list(ordered_map(slow_at_first, range(20), workers)) == [number * number for number in range(20)]


def test_ordered_map_takes_items_lazily() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = ordered_map(lambda number: number, source(), 2)
    assert next(results) == 0
    assert len(taken) <= 4
    results.close()  # type: ignore[attr-defined]
    assert len(taken) <= 4


def test_ordered_map_raises_error_in_order_and_ends_threads() -> None:
    def fail_at_three(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    before = set(threading.enumerate())  # threads of another test may be about to end
    results = ordered_map(fail_at_three, range(10), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)
    assert set(threading.enumerate()) <= before


COLLECTED_IN_A_LOCK = """
import gc, threading
from quire.parallel import parallel_map, ordered_map

for results in (ordered_map(str, range(100), 2), parallel_map(str, range(100), num_workers=2)):
    next(results)
    cycle = [results]
    cycle.append(cycle)
    del results, cycle
    with threading._active_limbo_lock:  # held while a thread starts, which may trigger a collection
        gc.collect()
print("closed")
"""


def test_collection_may_close_map_while_locks_are_held() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECTED_IN_A_LOCK], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "closed\n"


def test_cpu_count_is_positive() -> None:
    assert cpu_count() >= 1
