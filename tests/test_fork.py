"""Locks in forked processes: a child must never block on a lock that a thread of its parent holds."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire._lowlevel import forks
from quire._lowlevel.forks import ForkSafeCondition, ForkSafeLock
from quire.codec import _csv
from quire.columns import LentColumn, TensorColumn, _column
from quire.schema import Field, FieldKind
from quire.tensors import get_framework
from quire.typing import NdArray

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Point(BaseDocument):
    number: int


@contextlib.contextmanager
def held_by_another_thread(lock: Any) -> Iterator[None]:
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        yield
    finally:
        may_end.set()
        thread.join()


def succeeds_in_child(function: Callable[[], Any]) -> bool:
    """Call a function in a forked child; a child that blocks is ended by a signal."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            function()
        except BaseException:  # noqa: BLE001 - whatever it is, the child must not return into the tests
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def enter(lock: Any) -> None:
    with lock:
        pass


def test_child_takes_a_lock_that_another_thread_of_the_parent_holds() -> None:
    lock = ForkSafeLock()
    with held_by_another_thread(lock):
        assert succeeds_in_child(lambda: enter(lock))
        assert succeeds_in_child(lambda: succeeds_in_child(lambda: enter(lock)) or os._exit(2))
    assert succeeds_in_child(lambda: enter(lock))


def test_lock_that_the_forking_thread_holds_is_still_held_in_the_child() -> None:
    lock, entered = ForkSafeLock(), threading.Event()

    def enter_elsewhere() -> None:
        with lock:
            entered.set()

    def check() -> None:
        thread = threading.Thread(target=enter_elsewhere, daemon=True)
        thread.start()
        assert not entered.wait(0.2)
        lock.__exit__()
        assert entered.wait(30)

    with lock:
        assert succeeds_in_child(check)


def test_lock_excludes_other_threads() -> None:
    lock, entered = ForkSafeLock(), threading.Event()
    thread = threading.Thread(target=lambda: (lock.__enter__(), entered.set(), lock.__exit__()))
    with lock, lock:  # reentrant
        thread.start()
        assert not entered.wait(0.1)
    thread.join()
    assert entered.is_set()


def test_child_uses_a_condition_that_another_thread_of_the_parent_holds() -> None:
    condition = ForkSafeCondition()

    def use() -> None:
        with condition:
            assert not condition.wait(0.01)
            condition.notify_all()
            assert condition.wait_for(lambda: True)

    with held_by_another_thread(condition):
        assert succeeds_in_child(use)
    use()


def test_condition_wakes_waiting_threads() -> None:
    condition, numbers = ForkSafeCondition(), list[int]()

    def wait() -> None:
        with condition:
            assert condition.wait_for(lambda: numbers, 30)
            numbers.append(2)

    thread = threading.Thread(target=wait)
    thread.start()
    with condition:
        numbers.append(1)
        condition.notify_all()
    thread.join()
    assert numbers == [1, 2]


def test_fork_holds_locks_and_waits_for_busy_threads() -> None:
    """A thread that must not be copied takes a lock that forks hold: the fork waits for it, and does not deadlock."""
    lock, order = threading.Lock(), list[str]()
    forks.hold_during_forks(lock)
    began = threading.Event()

    def open_shard() -> None:
        with forks.no_fork():
            began.set()
            threading.Event().wait(0.2)
            with lock:
                order.append("opened")

    try:
        thread = threading.Thread(target=open_shard)
        thread.start()
        began.wait()
        assert succeeds_in_child(lambda: enter(lock))
        order.append("forked")
        thread.join()
        enter(lock)
    finally:
        forks._held_locks.remove(lock)
    assert order == ["opened", "forked"]


def test_child_parametrizes_a_class_while_another_thread_does() -> None:
    from quire import _parametrize

    class Local(BaseDocument):
        number: int

    with held_by_another_thread(_parametrize._making):
        assert succeeds_in_child(lambda: DocumentArray[Local]([Local(number=1)]))


def test_child_starts_processes_while_another_thread_does() -> None:
    from quire.parallel import Workers, _process, parallel_map

    def work() -> None:
        with Workers(1, "process", context="fork") as workers:
            assert list(parallel_map(len, ["ab"], pool=workers)) == [2]

    with held_by_another_thread(_process._starting):
        assert succeeds_in_child(work)


def test_forked_child_leaves_the_processes_of_its_parent_alone() -> None:
    from quire.parallel import Workers, _workers, parallel_map

    with Workers(1, "process") as workers:
        assert list(parallel_map(len, ["ab"], pool=workers)) == [2]
        assert succeeds_in_child(_workers._close_processes)
        assert list(parallel_map(len, ["abc"], pool=workers)) == [3]


@pytest.mark.needs("pyarrow", "fsspec", "xxhash")
def test_child_makes_an_exchange_that_another_thread_makes() -> None:
    from quire.distributed._partitions import Exchange

    exchange = Exchange(lambda: [[]])
    with held_by_another_thread(exchange._lock):
        assert succeeds_in_child(exchange.partitions)


def test_child_abandons_a_queue_that_another_thread_fills() -> None:
    from quire.files._transfer import PieceQueue

    queue = PieceQueue(10)
    with held_by_another_thread(queue._changed):
        assert succeeds_in_child(queue.abandon)


def test_child_reads_a_lent_column_while_another_thread_copies_one() -> None:
    numpy = get_framework("numpy")
    field = Field("vector", FieldKind.TENSOR, NdArray)
    column = LentColumn.lend(TensorColumn(field, np.arange(6.0).reshape(3, 2), numpy))
    with held_by_another_thread(_column._copying):
        assert succeeds_in_child(lambda: np.testing.assert_array_equal(column.data, np.arange(6.0).reshape(3, 2)))


def test_child_reads_csv_while_another_thread_does(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("id,number\na,1\n")
    with held_by_another_thread(_csv._size_limit_lock):
        assert succeeds_in_child(lambda: DocumentArray[Point].from_csv(path)[0].number)


@pytest.mark.needs("pyarrow")
def test_child_maps_files_while_another_thread_does(tmp_path: Path) -> None:
    from quire._lowlevel import addresses

    path = tmp_path / "file"
    path.write_bytes(b"content")

    def read() -> None:
        with path.open("rb") as file:
            assert addresses.map_file(file).to_pybytes() == b"content"
        addresses.drop_mapped_pages()

    with held_by_another_thread(addresses._mapped_lock):
        assert succeeds_in_child(read)


@pytest.mark.needs("pyarrow", "fsspec", "xxhash")
def test_child_reads_pages_while_another_thread_does(tmp_path: Path) -> None:
    from quire.storage import Pages, open_dataset, write_dataset

    write_dataset([Point(id=f"{i}", number=i) for i in range(10)], tmp_path / "d", Point, format="parquet")
    pages = Pages(open_dataset(tmp_path / "d", Point))
    pages.take(np.array([1]))  # Arrow's threads and caches belong to the parent

    def read() -> None:
        assert pages.take(np.array([3, 4])).number.tolist() == [3, 4]
        assert pages.narrow("number").take(np.array([5])).number.tolist() == [5]

    with held_by_another_thread(pages._lock):
        assert succeeds_in_child(read)


@pytest.mark.needs("pyarrow", "fsspec", "xxhash")
def test_child_deletes_a_spark_converter_while_another_thread_makes_one(tmp_path: Path) -> None:
    from quire.data import _spark

    converter = _spark.SparkConverter(_spark.WrittenFrame(str(tmp_path / "missing"), 0, None), Point)
    with held_by_another_thread(_spark._lock):
        assert succeeds_in_child(converter.delete)
