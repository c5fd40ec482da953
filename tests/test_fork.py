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
from quire._fork import ForkSafeLock
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
    from quire.storage import _memory

    path = tmp_path / "file"
    path.write_bytes(b"content")

    def read() -> None:
        with path.open("rb") as file:
            assert _memory.map_file(file).to_pybytes() == b"content"
        _memory.drop_mapped_pages()

    with held_by_another_thread(_memory._mapped_lock):
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
