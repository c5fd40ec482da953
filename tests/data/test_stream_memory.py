"""What a stream holds: memory within a budget, files that are opened late, and locks that survive a fork."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.errors import OptionError
from quire.storage import write_dataset
from quire.typing import NdArray, float32
from tests.data.sample_streams import flatten, numbers, open_samples, stream_samples, write_samples

pytestmark = pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash")
ROWS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("stream") / "d", ROWS, rows_in_shard=40)


class Held:
    """Counts the batches that someone holds."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def watch(self, dataset: Any) -> None:
        finish = dataset._fetch._finish

        def watching(*arguments: Any) -> Any:
            batch = finish(*arguments)
            with self._lock:
                self.now += 1
                self.most = max(self.most, self.now)
            weakref.finalize(batch._columns.columns["vector"].data, self._gone)
            return batch

        dataset._fetch._finish = watching

    def _gone(self) -> None:
        with self._lock:
            self.now -= 1


class Large(BaseDocument):
    vector: NdArray[float32, 2000]


@pytest.mark.parametrize("batches", [4, 8])
def test_loader_stays_within_its_memory_budget(tmp_path: Path, batches: int) -> None:
    write_dataset([Large(vector=np.zeros(2000, np.float32)) for _ in range(200)], tmp_path / "d", format="arrow")
    dataset, held = StreamingDataset[Large](tmp_path / "d", 5, memory_bytes=5 * 8200 * batches), Held()
    held.watch(dataset)
    for at, _ in enumerate(dataset.loader(prefetch=1000, threads=2)):
        if at % 8 == 0:
            time.sleep(0.02)  # so that others could be made ahead
    assert 1 < held.most <= batches + 1, "and the one that the loop has"
    del _
    gc.collect()
    assert held.now == 0


def test_loader_prefetches_the_requested_number(folder: Path) -> None:
    dataset, held = stream_samples(folder, 10), Held()
    dataset._group_size_ahead = 1
    held.watch(dataset)
    batches = iter(dataset.loader(prefetch=3))
    taken = [next(batches) for _ in range(2)]
    time.sleep(0.2)
    assert held.now == 2 + 3
    assert numbers(taken) == numbers(stream_samples(folder, 10))[:2]
    del batches, taken


class _Clock:
    """A clock on which a batch takes a second to be made."""

    def __init__(self, dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.names, finish = 0.0, list[str](), dataset._fetch._finish

        def watching(*arguments: Any) -> Any:
            self.now += 1
            self.names.append(threading.current_thread().name)
            return finish(*arguments)

        dataset._fetch._finish = watching
        monkeypatch.setattr("quire.data._loader.perf_counter", lambda: self.now)


def test_fast_loop_makes_its_batches_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, dataset = numbers(stream_samples(folder, 4)), stream_samples(folder, 4)
    dataset._group_size_ahead = 2
    clock = _Clock(dataset, monkeypatch)
    assert numbers(dataset.loader(prefetch=2)) == expected
    assert clock.names[0].startswith("quire-loader")
    assert set(clock.names[-50:]) == {threading.current_thread().name}


def test_threads_make_batches_for_a_slow_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = stream_samples(folder, 10)
    dataset._group_size_ahead = 2
    clock = _Clock(dataset, monkeypatch)
    for _ in dataset.loader(threads=2):
        clock.now += 10
    assert all(name.startswith("quire-loader") for name in clock.names)


def test_threads_make_preprocessed_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = stream_samples(folder, 4, preprocessing={"number": lambda number: number + 1})
    dataset._group_size_ahead = 2
    clock = _Clock(dataset, monkeypatch)
    list(dataset.loader(threads=2))
    assert all(name.startswith("quire-loader") for name in clock.names)


def test_interrupted_loader_ends_its_threads(folder: Path) -> None:
    for _ in range(3):
        for _ in stream_samples(folder).loader(threads=3):
            break
    gc.collect()
    deadline = time.monotonic() + 30
    while any(thread.name.startswith("quire-loader") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("wrong", [{"prefetch": 0}, {"threads": 0}], ids=str)
def test_loader_rejects_zero_threads_or_batches(folder: Path, wrong: Any) -> None:
    with pytest.raises(OptionError, match="at least 1"):
        stream_samples(folder).loader(**wrong)


def test_loader_raises_errors_of_its_threads(folder: Path) -> None:
    dataset = stream_samples(folder, preprocessing={"number": _refuse})
    with pytest.raises(RuntimeError, match="not today"):
        list(dataset.loader(threads=2))


def _refuse(number: int) -> int:
    raise ValueError(f"not today, {number}")


GROWTH = """
import gc, os, sys, tracemalloc
from tests.data.sample_streams import stream_samples

def anonymous():
    gc.collect()
    lines = open(f"/proc/{os.getpid()}/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))

dataset = stream_samples(sys.argv[1], 16)
way = dataset.loader(threads=2) if sys.argv[2] == "loader" else dataset
tracemalloc.start()
for _ in range(40):  # as many as the plan remembers
    for batch in way: pass
before, traced = anonymous(), tracemalloc.get_traced_memory()[0]
for _ in range(20):
    for batch in way: pass
gc.collect()
print(anonymous() - before, tracemalloc.get_traced_memory()[0] - traced)
"""


@pytest.mark.parametrize("way", ["dataset", "loader"])
def test_twenty_epochs_take_no_more_memory_than_one(folder: Path, way: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = [sys.executable, "-c", GROWTH, str(folder), way]
    output = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout
    kilobytes, traced = map(int, output.split())
    assert kilobytes < 2_000
    assert traced < 50_000


# --- files and locks


def open_shards(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def test_shards_are_opened_when_their_rows_are_read(folder: Path) -> None:
    dataset = stream_samples(folder, 20, shuffle=False)
    assert open_shards(folder) == 0
    dataset[0]
    assert open_shards(folder) == 1
    list(dataset)
    assert open_shards(folder) == 10
    del dataset
    gc.collect()
    assert open_shards(folder) == 0


def test_no_file_stays_open(folder: Path) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    dataset = stream_samples(folder)
    list(dataset)
    list(dataset.loader())
    assert len([*Path("/proc/self/fd").iterdir()]) <= before


def test_nothing_is_left_in_the_temporary_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dataset = stream_samples(folder)
    list(DataLoader(dataset, batch_size=None, num_workers=1))
    assert len(list(tmp_path.iterdir())) == 1
    del dataset
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_start_from_a_dataset_that_was_used(folder: Path, method: str) -> None:
    dataset = stream_samples(folder)
    list(dataset)
    dataset.set_epoch(0)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
    assert sorted(flatten(numbers(loader))) == list(range(ROWS))


def test_child_forked_while_a_thread_opens_shards_does_not_block(folder: Path) -> None:
    source = open_samples(folder)
    held, stop = threading.Event(), threading.Event()

    def hold() -> None:
        with source._row_reader._lock:
            source._row_reader._opened[:] = 0  # as if it were in the middle of opening them
            held.set()
            stop.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        loader = DataLoader(stream_samples(source), batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert sorted(flatten(numbers(loader))) == list(range(ROWS))
    finally:
        stop.set()
        thread.join()


def test_many_threads_read_one_dataset(folder: Path) -> None:
    dataset = stream_samples(folder)
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(flatten(numbers(dataset)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(rows) for rows in results] == [list(range(ROWS))] * 4
    assert len(set(map(tuple, results))) == 4, "each has an epoch of its own"


def test_loader_threads_yield_batches_in_order(folder: Path) -> None:
    expected = numbers(stream_samples(folder))
    for threads in (1, 2, 8):
        assert numbers(stream_samples(folder).loader(prefetch=20, threads=threads)) == expected
