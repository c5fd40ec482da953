"""The bounded map on threads and processes."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import FunctionError, OptionError, QuireError
from quire.parallel import MapOptions, Workers, parallel_map, run_map

BACKENDS = ["thread", "process"]


@pytest.fixture(scope="module", params=BACKENDS)
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with Workers(2, request.param) as pool:
        yield pool


class Source:
    """Numbers, with a count of those taken."""

    def __init__(self, length: int, fail_at: int = -1) -> None:
        self.length, self.fail_at, self.taken = length, fail_at, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            if number == self.fail_at:
                raise OSError("the source is damaged")
            self.taken += 1
            yield number


def square(number: int) -> int:
    return number * number


def slow_at_first(number: int) -> int:
    time.sleep(0.03 if number % 4 == 0 else 0)
    return number * number


def fail_at_three(number: int) -> int:
    if number == 3:
        raise ValueError("three is not welcome")
    return number


class StubbornError(Exception):
    """Cannot be created again from its arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def fail_stubbornly(_: int) -> None:
    raise StubbornError(1, 2)


# --- order and results


def test_mapped_yields_results_in_order(workers: Workers) -> None:
    assert list(parallel_map(slow_at_first, range(20), pool=workers)) == [number * number for number in range(20)]


def test_unordered_map_yields_ready_results_first(workers: Workers) -> None:
    results = list(parallel_map(slow_at_first, range(20), pool=workers, ordered=False))
    assert sorted(results) == [number * number for number in range(20)]
    assert results[0] != 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_mapped_starts_own_workers(backend: Any) -> None:
    assert list(parallel_map(square, range(7), backend=backend, num_workers=2)) == [0, 1, 4, 9, 16, 25, 36]
    assert list(parallel_map(square, [], backend=backend, num_workers=2)) == []


def test_mapped_takes_items_lazily(workers: Workers) -> None:
    source = Source(100)
    results = parallel_map(square, source, pool=workers)
    assert source.taken == 0
    assert next(results) == 0
    assert source.taken <= 4


def test_slow_source_does_not_hold_back_ready_results() -> None:
    """The source waits for the first result, so a map that fills its window first would deadlock."""
    first_is_used = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        time.sleep(0.05)
        yield 1
        assert first_is_used.wait(20)
        yield 2

    results = parallel_map(square, source(), num_workers=4)
    assert next(results) == 0
    first_is_used.set()
    assert list(results) == [1, 4]


def test_workers_run_while_consumer_is_busy() -> None:
    """The consumer of the first result waits for the calls after it, which run meanwhile."""
    began = [threading.Event() for _ in range(4)]

    def job(number: int) -> int:
        began[number].set()
        return number

    results = parallel_map(job, range(4), num_workers=2, window=4)
    for number in results:
        assert number in range(4)
        assert began[min(number + 1, 3)].wait(20)


# --- the window


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_mapped_takes_at_most_window_items_ahead(window: int, ordered: bool, workers: Workers) -> None:
    source = Source(40)
    for consumed, _ in enumerate(parallel_map(square, source, pool=workers, window=window, ordered=ordered)):
        assert source.taken <= consumed + window
    assert source.taken == 40


@pytest.mark.parametrize("window", [1, 5, 16, 1000])
def test_grouped_items_respect_window(window: int) -> None:
    source = Source(3000)
    options = MapOptions(num_workers=2, window=window, task_seconds=0.004)
    for consumed, result in enumerate(run_map(square, source, options)):
        assert source.taken <= consumed + window
        assert result == consumed * consumed


def test_short_calls_are_grouped() -> None:
    source = Source(3000)
    results = run_map(abs, source, MapOptions(num_workers=2, task_seconds=0.004))
    assert [next(results) for _ in range(1500)] == list(range(1500))
    assert source.taken > 1500 + 4  # more than one per task
    assert list(results) == list(range(1500, 3000))


def test_long_calls_are_not_grouped() -> None:
    source = Source(12)
    results = run_map(slow_at_first, source, MapOptions(num_workers=2, task_seconds=1e-9))
    next(results)
    assert source.taken <= 4
    results.close()  # type: ignore[attr-defined]


# --- errors


def test_function_error_names_index_and_keeps_cause(workers: Workers) -> None:
    with pytest.raises(FunctionError, match="^item 3: ValueError: three is not welcome$") as caught:
        list(parallel_map(fail_at_three, range(50), pool=workers))
    assert isinstance(caught.value, QuireError)
    assert isinstance(caught.value, RuntimeError)
    assert type(caught.value.__cause__) is ValueError
    if workers.backend == "process":
        assert "in fail_at_three" in str(caught.value.__cause__.__cause__)


def test_function_error_in_grouped_task_names_index(workers: Workers) -> None:
    def fail_at_a_thousand(number: int) -> int:
        if number == 1000:
            raise KeyError("thousand")
        return number

    with pytest.raises(FunctionError, match="^item 1000: KeyError: 'thousand'$"):
        list(run_map(fail_at_a_thousand, range(3000), MapOptions(pool=workers, task_seconds=0.004)))


def test_function_error_stops_map(workers: Workers) -> None:
    source = Source(1000)
    with pytest.raises(FunctionError):
        list(parallel_map(fail_at_three, source, pool=workers))
    assert source.taken <= 4 + 4


def test_closed_map_stops_threads_after_current_item() -> None:
    """Short items are grouped into tasks; a closed map skips the rest of a task."""
    seen: list[int] = []

    def slow_in_the_end(number: int) -> int:
        seen.append(number)
        time.sleep(0.02 * (number >= 500))
        return number

    results = run_map(slow_in_the_end, range(5000), MapOptions(num_workers=2, task_seconds=1000))
    for _ in range(450):
        next(results)
    before = len(seen)
    results.close()  # type: ignore[attr-defined]
    assert len(seen) - before <= 20


def test_function_error_is_raised_before_earlier_results() -> None:
    release = threading.Event()

    def job(number: int) -> None:
        if number == 1:
            release.set()
            raise ValueError("one")
        assert release.wait(20)
        time.sleep(0.1)

    with pytest.raises(FunctionError, match="item 1"):
        list(parallel_map(job, range(2), num_workers=2))


def test_unpicklable_error_is_reported_as_text() -> None:
    with pytest.raises(FunctionError, match="item 0: StubbornError: 1 and 2") as caught:
        list(parallel_map(fail_stubbornly, range(3), backend="process", num_workers=1))
    assert "in fail_stubbornly" in str(caught.value.__cause__)


def test_source_error_is_raised_after_earlier_results(workers: Workers) -> None:
    results = parallel_map(square, Source(10, fail_at=5), pool=workers)
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    with pytest.raises(OSError, match="the source is damaged"):
        next(results)


def test_function_error_can_be_pickled() -> None:
    restored = pickle.loads(pickle.dumps(FunctionError("item 3: ValueError: no")))
    assert type(restored) is FunctionError
    assert str(restored) == "item 3: ValueError: no"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "thraed"}, "backend='thraed': use 'thread' or 'process'"),
        ({"num_workers": 0}, "num_workers=0: at least one is needed"),
        ({"window": 0}, "window=0: at least one item"),
        ({"pool": 4}, "pool=4: use quire.parallel.Workers"),
    ],
)
def test_invalid_options_raise_at_call(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parallel_map(square, [], **options)


# --- closing


def test_early_close_ends_threads() -> None:
    before = threading.active_count()
    source = Source(1000)
    results = parallel_map(square, source, num_workers=3)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert source.taken <= 6


def test_early_close_terminates_busy_processes() -> None:
    results = parallel_map(sleep_after_first, range(4), backend="process", num_workers=2)
    pid = next(results)
    assert is_alive(pid)
    results.close()  # type: ignore[attr-defined]
    assert not is_alive(pid)


def sleep_after_first(number: int) -> int:
    time.sleep(3600 if number else 0)  # pytest's timeout fails a close that waits for it
    return os.getpid()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class ClosingQueue:
    """A queue of orders that closes the workers, in another thread, before the first order is put."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.orders = workers, workers._orders
        self.closing = threading.Thread(target=workers.close)

    def put(self, order: Any) -> None:
        if order is not None and self.closing.ident is None:
            self.closing.start()
            self.closing.join(0.5)  # a close that does not wait for the order ends now
        self.orders.put(order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.orders, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_submit_during_close_raises_an_error(backend: Any) -> None:
    workers = Workers(1, backend)
    queue: Any = ClosingQueue(workers)
    workers._orders = queue
    results: list[BaseException] = []

    def run() -> None:
        try:
            list(parallel_map(square, range(4), pool=workers))
        except QuireError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the map waits for an order that nobody runs"
    queue.closing.join()
    assert "closed" in str(results[0]) or isinstance(results[0], FunctionError)
