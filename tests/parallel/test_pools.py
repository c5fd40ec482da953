"""Pools and executors of the caller, which are used and left open."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest

from quire import BaseDocument
from quire.errors import FunctionError
from quire.parallel import Workers, backend_of, parallel_map

SPAWN = multiprocessing.get_context("spawn")
POOLS: dict[str, tuple[Callable[[], Any], str]] = {
    "ThreadPoolExecutor": (lambda: ThreadPoolExecutor(2), "thread"),
    "ProcessPoolExecutor": (lambda: ProcessPoolExecutor(2, SPAWN), "process"),
    "ThreadPool": (lambda: ThreadPool(2), "thread"),
    "Pool": (lambda: SPAWN.Pool(2), "process"),
    "Workers": (lambda: Workers(2, "process"), "process"),
}


@pytest.fixture(scope="module", params=POOLS)
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    with POOLS[request.param][0]() as opened:
        assert backend_of(opened) == POOLS[request.param][1]
        yield opened


def fail_at_three(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


def test_pool_is_used_and_left_open(pool: Any) -> None:
    class Local(BaseDocument):
        number: int

    offset = 5
    for _ in range(2):
        results = list(parallel_map(lambda number: Local(number=number + offset), range(10), pool=pool))
        assert [type(each) for each in results] == [Local] * 10
        assert [each.number for each in results] == list(range(5, 15))


def test_function_error_names_index_and_leaves_pool_open(pool: Any) -> None:
    with pytest.raises(FunctionError, match="item 3: ValueError: three") as caught:
        list(parallel_map(fail_at_three, range(20), pool=pool))
    assert type(caught.value.__cause__) is ValueError
    assert list(parallel_map(abs, [-1], pool=pool)) == [1]


def test_early_close_leaves_pool_open(pool: Any) -> None:
    results = parallel_map(abs, range(100), pool=pool)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert list(parallel_map(abs, [-1], pool=pool)) == [1]


@pytest.mark.parametrize("name", ["ProcessPoolExecutor", "Pool"])
def test_killed_process_raises(name: str) -> None:
    with POOLS[name][0]() as pool, pytest.raises(FunctionError, match="ended|terminated"):
        list(parallel_map(kill_itself_at_three, range(20), pool=pool))


def kill_itself_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_processes_replaced_by_pool_do_not_raise() -> None:
    with SPAWN.Pool(1, maxtasksperchild=2) as pool:
        assert list(parallel_map(abs, range(7), pool=pool)) == list(range(7))


class Inline(Executor):
    """An executor of an unknown class."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments, **keywords))
        return future


def test_any_executor_is_accepted() -> None:
    assert list(parallel_map(lambda number: -number, range(3), pool=Inline())) == [0, -1, -2]
    with pytest.raises(FunctionError, match="item 3"):
        list(parallel_map(fail_at_three, range(5), pool=Inline()))
