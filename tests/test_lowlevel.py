"""Memory reuse and memory by address, with their replacements (`QUIRE_SAFE=1`)."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire._lowlevel import collector, is_safe
from quire._lowlevel.pool import MemoryPool

SIZE = 1 << 18
SOURCES = Path(__file__).parents[1] / "src" / "quire"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the techniques themselves, also if the tests run with `QUIRE_SAFE=1`."""
    monkeypatch.setenv("QUIRE_SAFE", "0")
    _forget_settings()
    yield
    monkeypatch.undo()
    _forget_settings()


@pytest.fixture(params=[False, True], ids=["fast", "safe"])
def safe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("QUIRE_SAFE", "1" if request.param else "0")
    _forget_settings()
    return bool(request.param)


def _forget_settings() -> None:
    is_safe.cache_clear()
    if "quire._lowlevel.addresses" in sys.modules:
        sys.modules["quire._lowlevel.addresses"]._has_libc.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["", "0", None])
def test_safe_mode_is_off_by_default(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_SAFE", raising=False)
    if value is not None:
        monkeypatch.setenv("QUIRE_SAFE", value)
    is_safe.cache_clear()
    assert not is_safe()
    is_safe.cache_clear()


# --- the pool


def test_pool_reuses_memory_of_freed_arrays_unless_safe(safe: bool) -> None:
    pool = MemoryPool()
    first = pool.take(SIZE)
    assert first.nbytes == SIZE
    place = first.ctypes.data
    del first
    assert len(pool._free) == (0 if safe else 1)
    if not safe:
        assert place % 64 == 0
        assert pool.take(SIZE).ctypes.data == place
        assert pool.take(SIZE + 64).ctypes.data != place


@pytest.mark.parametrize(
    "hold",
    [lambda array: array[5:9], lambda array: array.view(np.int16).reshape(2, -1)[1], memoryview, np.asarray],
    ids=["slice", "view", "memoryview", "asarray"],
)
def test_pool_keeps_memory_that_is_referred_to(hold: Any) -> None:
    pool = MemoryPool()
    array = pool.take(SIZE)
    held = hold(array)
    del array
    gc.collect()
    assert not pool._free
    del held
    assert len(pool._free) == 1


def test_pool_limits_free_memory() -> None:
    pool = MemoryPool()
    arrays = [pool.take(SIZE) for _ in range(20)]
    arrays.clear()
    assert len(pool._free) == 8
    arrays = [pool.take(SIZE + 64 * number) for number in range(1, 100)]
    arrays.clear()
    assert len(pool._free) == 64
    arrays = [pool.take((40 << 20) + 64 * number) for number in range(6)]
    while arrays:
        arrays.pop(0)
    assert [piece.size for piece in pool._free.values()] == [(40 << 20) + 64 * number for number in range(2, 6)]


def test_pool_releases_memory_of_sizes_that_are_not_used_any_more() -> None:
    pool = MemoryPool()
    for number in range(200):  # one array at a time, each of another size
        pool.take(SIZE + 64 * number)
    assert len(pool._free) <= 64 + 1  # and the one that came back last
    assert len(pool._returned) <= 5
    for number in range(8):
        pool.take((40 << 20) + 64 * number)
    assert sum(piece.size for piece in pool._free.values()) <= (128 << 20) + 2 * (41 << 20)


def test_pool_hands_out_arrays_of_a_dtype() -> None:
    pool = MemoryPool()
    first = pool.take_array((4, SIZE // 32), np.dtype(np.int64), SIZE)
    place = first.ctypes.data
    assert (first.shape, first.dtype) == ((4, SIZE // 32), np.int64)
    held = first[1:, 5]
    del first
    assert pool.take_array((SIZE // 4,), np.dtype(np.float32), SIZE).ctypes.data != place
    del held
    assert place in {pool.take_array((SIZE // 4,), np.dtype(np.float32), SIZE).ctypes.data for _ in range(3)}


def test_free_memory_goes_with_the_pool() -> None:
    pool = MemoryPool()
    held, freed = pool.take(SIZE), pool.take(SIZE)
    del freed
    [piece] = pool._free.values()
    memory = weakref.ref(piece.memory)
    del piece
    assert memory() is not None
    del pool
    assert memory() is None
    held[:] = 1
    del held  # its finalizer finds no pool


def test_threads_never_share_memory_of_a_pool() -> None:
    pool, problems = MemoryPool(), list[str]()

    def work(number: int) -> None:
        for _ in range(300):
            array = pool.take(SIZE)
            array[:: SIZE // 8] = number
            if (array[:: SIZE // 8] != number).any():
                problems.append(f"thread {number} read what another has written")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


# --- addresses


@pytest.mark.needs("pyarrow")
def test_rows_are_gathered_by_address(safe: bool) -> None:
    import pyarrow as pa

    from quire._lowlevel.addresses import CheckedMemory, open_memory

    batches = [pa.record_batch({"x": pa.array(range(100 * n, 100 * n + 100), pa.int64())}) for n in range(3)]
    memory = open_memory()
    assert isinstance(memory, CheckedMemory) is safe
    for batch in batches:
        memory.add(batch)
    starts = np.array([batch.column(0).buffers()[1].address for batch in batches], np.int64)
    rows = memory.fetch(starts[[2, 0, 1]] + 8 * np.array([99, 0, 7]), 8).view(np.int64)
    assert rows.ravel().tolist() == [299, 0, 107]
    sizes, none = np.array([16, 0, 8], np.int64), np.zeros(3, np.int64)
    ranges = memory.fetch_ranges(starts, sizes, sizes, none)
    assert np.frombuffer(ranges, np.int64).tolist() == [0, 1, 200]
    assert memory.fetch(starts, 0).shape == (3, 0)


@pytest.mark.needs("pyarrow")
def test_checked_memory_rejects_addresses_outside_of_buffers() -> None:
    import pyarrow as pa

    from quire._lowlevel.addresses import CheckedMemory

    memory = CheckedMemory()
    with pytest.raises(IndexError, match="are in no buffer"):
        memory.fetch(np.array([1 << 20]), 8)
    batch = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})
    memory.add(batch)
    buffer = batch.column(0).buffers()[1]
    for address in (buffer.address - 1, buffer.address + buffer.size - 7, buffer.address + buffer.size):
        with pytest.raises(IndexError, match="are in no buffer"):
            memory.fetch(np.array([address]), 8)


@pytest.mark.usefixtures("safe")
@pytest.mark.needs("pyarrow")
def test_files_are_mapped(tmp_path: Path) -> None:
    from quire._lowlevel.addresses import advise_random, drop_mapped_pages, map_file, read_ahead

    for content in (b"content", b""):
        (tmp_path / "file").write_bytes(content)
        with (tmp_path / "file").open("rb") as file:
            buffer = map_file(file)
        (tmp_path / "file").unlink()
        read_ahead(np.array([buffer.address] if content else [], np.int64), np.array([7] if content else [], np.int64))
        assert advise_random(buffer).to_pybytes() == content
        drop_mapped_pages()
        assert buffer.to_pybytes() == content


@pytest.mark.needs("pyarrow")
def test_shared_memory_moves_to_a_file(safe: bool, tmp_path: Path) -> None:
    from quire._lowlevel.addresses import SharedMemory

    path = tmp_path / "shared"
    path.touch()
    memory = SharedMemory(100_000)
    assert not memory.array.any()
    memory.array[[3, 99_999]] = 1, 2
    memory.move_to(path)
    other = SharedMemory(100_000, path)
    assert other.is_file
    assert np.flatnonzero(other.array).tolist() == [3, 99_999]
    memory.array[5] = 1
    assert other.array[5] == (0 if safe else 1)
    assert not SharedMemory(10, path).is_file  # another size


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.usefixtures("safe")
@pytest.mark.needs("pyarrow")
def test_forked_processes_share_memory() -> None:
    from quire._lowlevel.addresses import SharedMemory

    memory = SharedMemory(10)
    child = os.fork()
    if child == 0:
        memory.array[4] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.array[4] == 7


# --- the garbage collector


def test_running_collection_is_detected() -> None:
    answers = []

    class Probe:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            answers.append((collector.is_collecting(), collector.may_wait()))

    assert (collector.is_collecting(), collector.may_wait()) == (False, True)
    Probe()
    gc.collect()
    assert answers == [(True, False)]
    gc.disable()
    try:
        assert not collector.is_collecting()
    finally:
        gc.enable()


# --- one place


TECHNIQUES = re.compile(
    r"\bctypes\b(?!\.data)|getrefcount|_storage_Use_Count|from_address|madvise|mincore|memfd_create|register_at_fork"
    r"|gc\.callbacks|__class__\s*=[^=]|__array_interface__|/dev/shm"
)


def test_techniques_are_used_in_one_package() -> None:
    used = {
        str(path.relative_to(SOURCES)): TECHNIQUES.findall(path.read_text())
        for path in SOURCES.rglob("*.py")
        if "_lowlevel" not in path.parts and TECHNIQUES.search(path.read_text())
    }
    assert used == {}


READ = """
import sys
import torch
from torch.utils.data import DataLoader
from quire import BaseDocument
from quire._lowlevel import is_safe
from quire.data import MultiModalDataset, StreamingDataset
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, TorchTensor

class Row(BaseDocument):
    image: TorchTensor[3, 64, 64]
    vector: NdArray[4] | None = None
    text: str | None = None
    numbers: list[int] = []

def show(batch):
    print(batch.id, batch.image.sum(dim=(1, 2, 3)).tolist(), [row.text for row in batch], [row.vector for row in batch])

rows = [
    Row(id=f"{i}", image=torch.full((3, 64, 64), float(i)), text="x" * i if i % 5 else None, numbers=list(range(i)),
        vector=None if i % 3 else [i, 1, 2, 3])
    for i in range(40)
]
for format in ("arrow", "parquet"):
    write_dataset(rows, f"{sys.argv[1]}/{format}", format=format)
    kept = list(StreamingDataset[Row](f"{sys.argv[1]}/{format}", batch_size=8, seed=3, missing="mask"))
    for batch in kept:
        show(batch)
    show(open_dataset(f"{sys.argv[1]}/{format}", Row)[[39, 0, 7]])
dataset = MultiModalDataset[Row](rows, {"image": torch.neg}, missing="mask")
for workers in (0, 1):
    loader = DataLoader(dataset, 8, collate_fn=dataset.collate_fn, num_workers=workers)
    for batch in list(loader):
        show(batch)
print(is_safe(), file=sys.stderr)
"""


@pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash")
def test_safe_mode_reads_the_same_rows(tmp_path: Path) -> None:
    results = []
    for value in ("0", "1"):
        environment = {**os.environ, "QUIRE_SAFE": value, "QUIRE_CACHE": str(tmp_path / f"cache-{value}")}
        command = [sys.executable, "-c", READ, str(tmp_path / value)]
        results.append(subprocess.run(command, capture_output=True, text=True, check=False, env=environment))
    assert [done.returncode for done in results] == [0, 0], results
    assert [done.stderr.split()[-1] for done in results] == ["False", "True"]
    assert results[0].stdout == results[1].stdout
    assert results[0].stdout.count("\n") == 2 * (5 + 1) + 2 * 5
