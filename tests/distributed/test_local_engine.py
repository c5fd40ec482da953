"""The local engine: threads with bounded prefetch, cancellation, and processes that may die."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from quire import DocumentArray
from quire.distributed import DocumentShards, PartitionError, engine
from quire.distributed._partitions import MAX_PARTITION_BYTES, hold_batches
from quire.distributed._prefetch import prefetch
from quire.errors import OptionError
from tests.distributed.sample_documents import Good, dearer, goods

pytestmark = pytest.mark.needs("pyarrow", "cloudpickle")


def batch(number: int, rows: int = 1) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array([number] * rows, pa.int64())})


# --- threads


def test_partitions_run_in_parallel() -> None:
    both = threading.Barrier(2, timeout=30)

    def met(documents: DocumentArray[Good]) -> DocumentArray[Good]:
        both.wait()
        return documents

    shards = DocumentShards[Good].from_documents(goods(6), num_partitions=2, engine=engine("local", num_workers=2))
    assert shards.transform_shard(met).collect().identical(goods(6))


def test_prefetch_limits_the_bytes_ahead() -> None:
    created = [0, 0]

    def source(number: int) -> Iterator[pa.RecordBatch]:
        for _ in range(100):
            created[number] += 1
            yield batch(number, 128)  # 1 KiB

    actual = prefetch([lambda: source(0), lambda: source(1)], 2, ahead=8 << 10)
    assert next(actual).column("n")[0].as_py() == 0
    for _ in range(1000):
        threading.Event().wait(0.001)
        if created[1] >= 4:
            break
    assert created[0] <= 7  # one was taken, four are queued, and one is being produced
    assert created[1] <= 5
    assert sum(len(one) for one in actual) == 199 * 128


def test_first_error_stops_all_partitions() -> None:
    def endless() -> Iterator[pa.RecordBatch]:
        while True:
            yield batch(0)

    def failing() -> Iterator[pa.RecordBatch]:
        yield batch(1)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(prefetch([endless, failing], 2))


def test_error_does_not_wait_for_other_partitions() -> None:
    """The other partition would take two minutes; it stops after its current row."""
    failed, rows = threading.Event(), list[str]()

    def slow(document: Good) -> Good:
        if document.id == "good 000":
            threading.Event().wait(0.2)
            failed.set()
            raise ValueError("the first row")
        rows.append(document.id)
        threading.Event().wait(1.2)
        return document

    shards = DocumentShards[Good].from_documents(goods(200), num_partitions=2, engine=engine("local", num_workers=2))
    before = threading.active_count()
    with pytest.raises(PartitionError, match="the first row"):
        shards.map(slow).collect()
    while threading.active_count() > before:  # pytest's timeout ends this if the thread goes on
        threading.Event().wait(0.05)
    assert failed.is_set()
    assert len(rows) < 50


INTERRUPTED = """
import os, sys, time
from quire.distributed import DocumentShards, engine
from tests.distributed.sample_documents import Good, goods

def work() -> None:
    with open(os.environ["ROWS_FILE"], "a") as file:
        file.write(".")
    time.sleep(0.1)

def slow(document: Good) -> Good:
    work()
    return document

def fail_first(document: Good) -> Good:
    work()
    if document.id == "good 000":
        while os.path.getsize(os.environ["ROWS_FILE"]) < 2:
            time.sleep(0.01)  # until the other partition has started
        raise ValueError("the first row")
    return document

def slow_test(document: Good) -> bool:
    work()
    return True

if __name__ == "__main__":
    call, folder, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
    shards = DocumentShards[Good].from_documents(goods(2400), num_partitions=2, engine=engine("local", **options))
    if call == "write_dataset":
        shards.map(slow).write_dataset(folder + "/out")
    elif call == "fail_first":
        shards.map(fail_first).write_dataset(folder + "/out")
    elif call == "iter_batches":
        next(shards.map(slow).iter_batches())
    elif call == "shuffle":
        shards.map(slow).shuffle(1).collect()
    elif call == "filter":
        len(shards.filter(slow_test))
    else:
        len(shards.transform_shard(lambda documents: (slow(document) for document in documents)))
"""


@pytest.mark.parametrize(
    ("call", "options"),
    [
        *((call, {"num_workers": 2}) for call in ("write_dataset", "iter_batches", "filter", "shuffle", "len")),
        ("write_dataset", {"num_workers": 1}),
        ("write_dataset", {"num_workers": 2, "backend": "process"}),
    ],
    ids=str,
)
def test_interrupt_stops_after_the_running_row(call: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Two partitions of two minutes each; the bound is generous for a busy machine."""
    program = start_interrupted(call, options, tmp_path)
    rows = tmp_path / "rows"
    while not (rows.exists() and rows.stat().st_size):  # until a row is being worked on
        assert program.poll() is None
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=30)
    assert program.returncode in (-signal.SIGINT, 130, 1), err
    assert "KeyboardInterrupt" in err
    if call == "write_dataset":
        assert not list((tmp_path / "out").glob("*.parquet"))


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "backend": "process"}], ids=str)
def test_failing_first_row_stops_after_the_running_row(options: dict[str, Any], tmp_path: Path) -> None:
    """The other partition would take two minutes."""
    program = start_interrupted("fail_first", options, tmp_path)
    while not (tmp_path / "rows").exists():
        assert program.poll() is None
        time.sleep(0.05)
    _, err = program.communicate(timeout=30)
    assert program.returncode == 1
    assert "PartitionError" in err
    assert "the first row" in err
    assert not list((tmp_path / "out").glob("*.parquet"))


def start_interrupted(call: str, options: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
    """Start the program INTERRUPTED, which appends a byte to the file 'rows' for each row it processes."""
    script = folder / "script.py"
    script.write_text(INTERRUPTED)
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "ROWS_FILE": str(folder / "rows")}
    command = [sys.executable, str(script), call, str(folder), repr(options)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_stopped_iteration_computes_no_more_rows() -> None:
    seen = []

    def noted(document: Good) -> Good:
        seen.append(document.id)
        return document

    shards = DocumentShards[Good].from_documents(
        goods(1000), num_partitions=1000, engine=engine("local", num_workers=2)
    )
    assert shards.map(noted).head(3).identical(goods(3))
    assert seen == ["good 000", "good 001", "good 002"]
    rows = iter(shards.map(noted))
    assert next(rows).id == "good 000"
    rows.close()  # type: ignore[attr-defined]


def test_large_partition_is_processed_in_chunks() -> None:
    """A gigabyte passes through a process that never uses more than a few hundred megabytes."""
    code = """
import resource
import numpy as np
import pyarrow as pa
from quire.distributed import DocumentShards
from quire.distributed._encoding import DocumentLayout
from quire.distributed import engine
from quire.distributed._shards import DocumentFrame
from tests.distributed.sample_documents import Vector

layout = DocumentLayout(Vector)

class Many:
    stateful, schema = False, layout.fields
    def __call__(self, partition, batches):
        for number in range(64):
            rows = [Vector(id=f"{number} {i}", data=np.full(65536, number, np.float32)) for i in range(64)]
            yield layout.encode(rows)  # 16 MiB

local = engine("local", num_workers=2)
shards = DocumentShards[Vector](DocumentFrame(local, local.from_stage(Many(), 1), layout))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
even = shards.map(lambda d: d, document_type=Vector).filter(lambda d: d.data[0] % 2 == 0)
total = sum(map(len, even.iter_batches()))
assert total == 32 * 64, total
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout) < 400 << 10


def test_hold_batches_spools_large_partitions() -> None:
    large = pa.record_batch({"n": pa.array(range(MAX_PARTITION_BYTES // 8), pa.int64())})
    before = pa.total_allocated_bytes()
    actual = hold_batches(iter([large.slice(0, 100), large, large]), large.schema)
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert [len(one) for one in actual] == [100, len(large), len(large)]
    assert actual[2].equals(large)
    assert hold_batches([large.slice(7, 2)], large.schema)[0].get_total_buffer_size() < 1000


def test_small_partitions_share_one_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each partition fits into memory; all of them together do not."""
    monkeypatch.setattr("quire.distributed._partitions.MAX_EXCHANGE_BYTES", 2 << 20)

    class Numbers:
        schema, stateful = pa.schema([("n", pa.int64())]), False

        def __call__(self, partition: int, _: Any) -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"n": pa.array([partition] * (1 << 17), pa.int64())})  # 1 MiB

    local = engine("local", num_workers=2)
    cached = local.cache(local.from_stage(Numbers(), 12))
    before = pa.total_allocated_bytes()
    assert local.count(cached) == 12 << 17
    assert pa.total_allocated_bytes() - before < 4 << 20
    shuffled = list(local.iter_batches(local.shuffle(cached, 1)))
    assert sum(sum(one.column("n").to_pylist()) for one in shuffled) == sum(range(12)) << 17


def test_shards_are_picklable() -> None:
    shards = DocumentShards[Good].from_documents(goods(9), num_partitions=3).map(dearer).cache()
    for other in (shards, shards.shuffle(1), shards.filter({"price": {"$lt": 4}})):
        back = pickle.loads(pickle.dumps(other))
        assert type(back) is DocumentShards[Good]
        assert back.collect().identical(other.collect())


# --- processes


def test_partition_is_retried_after_its_process_dies(start_engine: Any, tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")

    def deadly(document: Good) -> Good:
        if document.price == 7 and not os.path.exists(mark):  # noqa: PTH110
            open(mark, "w").close()  # noqa: PTH123
            os.kill(os.getpid(), signal.SIGKILL)
        return document

    shards = DocumentShards[Good].from_documents(goods(20), num_partitions=5, engine=start_engine("processes"))
    assert shards.map(deadly).collect().identical(goods(20))
    assert Path(mark).exists()


def test_partition_that_kills_every_process_is_an_error(start_engine: Any) -> None:
    def deadly(document: Good) -> Good:
        if document.price == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return document

    shards = DocumentShards[Good].from_documents(goods(20), num_partitions=5, engine=start_engine("processes"))
    with pytest.raises(PartitionError, match="partition 1.*SIGKILL"):
        shards.map(deadly).collect()
    assert shards.map(dearer).first().price == 1  # the engine still works


def test_process_backend_removes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = engine("local", backend="process", num_workers=1)
    try:
        shards = DocumentShards[Good].from_documents(goods(9), num_partitions=3, engine=own)
        assert shards.map(dearer).repartition(2).collect().price == list(range(1, 10))
        assert next(iter(shards.map(dearer))).price == 1
    finally:
        own.close()
    assert list(tmp_path.iterdir()) == []


def test_engine_rejects_wrong_options() -> None:
    with pytest.raises(OptionError, match="backend='fork'"):
        engine("local", backend="fork")
    with pytest.raises(OptionError, match=r"engine='rai': there is no such engine. Did you mean 'ray'"):
        engine("rai")
    assert engine("local") is engine() is engine(engine())
    with pytest.raises(OptionError, match="options need the name of an engine"):
        engine(engine(), num_workers=2)


def test_local_engine_imports_no_framework() -> None:
    code = """
import sys
import quire.distributed
assert not {"pyarrow", "ray", "pyspark", "torch", "tensorflow", "pandas"} & sys.modules.keys()
from quire.distributed import DocumentShards
from tests.distributed.sample_documents import Good, dearer, goods
assert DocumentShards[Good].from_documents(goods(5)).map(dearer).collect().price == [1, 2, 3, 4, 5]
assert not {"ray", "pyspark", "torch", "tensorflow"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_from_native_accepts_arrow_tables() -> None:
    table = pa.table({"id": ["a", "b"], "name": ["x", "y"]})
    shards = DocumentShards.from_native(table)
    assert [(d.id, d.name) for d in shards.collect()] == [("a", "x"), ("b", "y")]
    with pytest.raises(TypeError, match="takes an Arrow table, got dict"):
        DocumentShards.from_native({}, engine="local")
    with pytest.raises(OptionError, match="a dict belongs to no engine"):
        DocumentShards.from_native({})


@pytest.mark.parametrize("path", ["photo", "maker"])
def test_unique_rejects_fields_without_plain_values(path: str) -> None:
    shards = DocumentShards[Good].from_documents(goods(4), num_partitions=2)
    with pytest.raises(OptionError, match=rf"unique\('{path}'\): a field with one plain value a row is needed, it is"):
        shards.unique(path)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5])
def test_iter_batches_rejects_wrong_batch_sizes(batch_size: Any) -> None:
    shards = DocumentShards[Good].from_documents(goods(3))
    with pytest.raises(OptionError, match="batch_size"):
        shards.iter_batches(batch_size)


@pytest.mark.parametrize("method", ["read_parquet", "read_csv", "read_json", "read_binary"])
def test_readers_reject_values_that_are_no_paths(method: str) -> None:
    with pytest.raises(OptionError, match="got NoneType"):
        getattr(DocumentShards[Good], method)(None)
