"""Killed and concurrent writers leave datasets of complete shards."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from quire.errors import StorageError
from quire.storage import DatasetWriter, open_dataset, write_dataset
from quire.storage._manifest import encode_line
from tests.storage.sample_documents import Photo, photos

pytestmark = pytest.mark.needs("pyarrow")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


def _numbers(path: Path) -> list[int]:
    dataset = open_dataset(path, Photo)
    dataset.verify()
    return [int(number) for number in dataset.read().number]


@pytest.mark.parametrize(("mode", "kind", "stride"), [("resume", "parquet", 149), ("overwrite", "arrow", 211)])
def test_writer_killed_at_any_step_leaves_complete_shards(tmp_path: Path, mode: str, kind: str, stride: int) -> None:
    command = [sys.executable, "-m", "tests.storage.killed_writer", str(tmp_path), mode, kind, str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["killed"] >= 5


_WRITES = """
import sys
from quire.storage import write_dataset
from tests.storage.sample_documents import Photo, photo
path, mode, start, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def rows():
    print("writing", flush=True)
    sys.stdin.readline()
    for number in range(start, start + count):
        yield photo(number)
write_dataset(rows(), path, document_type=Photo, mode=mode, group_bytes=2000, shard_bytes=4000)
"""


def _writer(path: Path, mode: str, start: int, count: int) -> subprocess.Popen[str]:
    """Start a process that has opened the dataset, and waits for a line of input before it writes."""
    command = [sys.executable, "-c", _WRITES, str(path), mode, str(start), str(count)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_killed_writer_is_resumed_until_all_rows_are_written(tmp_path: Path) -> None:
    chance, before = random.Random(5), 0
    for _ in range(3):
        process = _writer(tmp_path / "d", "resume", 0, 5000)
        _go(process)
        while not list((tmp_path / "d").glob("*.parquet")):
            time.sleep(0.001)
        time.sleep(chance.random() / 10)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        row_numbers = _numbers(tmp_path / "d")
        assert row_numbers == list(range(len(row_numbers)))
        assert len(row_numbers) >= before
        before = len(row_numbers)
    assert 0 < before < 5000
    write_dataset(photos(before + 40), tmp_path / "d", mode="resume")
    assert _numbers(tmp_path / "d") == list(range(before + 40))
    assert sorted(pq.read_table(tmp_path / "d")["number"].to_pylist()) == list(range(before + 40))


def test_concurrent_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    writers = [_writer(tmp_path, "append", start, 150) for start in (0, 1000)]
    for process in writers:
        _go(process)
    for process in writers:
        assert process.communicate()[1] == ""
    row_numbers = _numbers(tmp_path)
    assert [number for number in row_numbers if number < 1000] == list(range(150))
    assert [number for number in row_numbers if number >= 1000] == list(range(1000, 1150))


def test_later_of_two_overwriting_writers_counts(tmp_path: Path) -> None:
    write_dataset(photos(3), tmp_path)
    with (
        DatasetWriter(tmp_path, Photo, mode="overwrite") as first,
        DatasetWriter(tmp_path, Photo, mode="overwrite") as second,
    ):
        first.write(photos(2, 10))
        second.write(photos(2, 20))
    assert _numbers(tmp_path) in ([10, 11], [20, 21])
    assert len(list(tmp_path.glob("*.parquet"))) == 1


def test_writer_of_an_overwritten_dataset_raises_an_error(tmp_path: Path) -> None:
    write_dataset(photos(3), tmp_path)
    writer = DatasetWriter(tmp_path, Photo, mode="append", group_bytes=1, shard_bytes=1)
    writer.write(photos(2, 10))
    write_dataset(photos(2, 20), tmp_path, mode="overwrite")
    writer.write(photos(2, 12))
    with pytest.raises(StorageError, match="another writer has overwritten"):
        writer.close()
    assert _numbers(tmp_path) == [20, 21]


def test_reader_keeps_open_shards_while_the_dataset_is_overwritten(tmp_path: Path) -> None:
    write_dataset(photos(5), tmp_path, format="arrow")
    dataset = open_dataset(tmp_path, Photo)
    assert dataset[3].number == 3
    write_dataset(photos(2, 20), tmp_path, mode="overwrite", format="arrow")
    assert dataset[4].number == 4
    assert _numbers(tmp_path) == [20, 21]


# --- logs


def test_incomplete_log_line_is_ignored(tmp_path: Path) -> None:
    write_dataset(photos(20), tmp_path, group_bytes=2000, shard_bytes=2000)
    [log] = (tmp_path / "_quire").glob("*.jsonl")
    rows = [json.loads(line).get("rows", 0) for line in log.read_text().splitlines()]
    log.write_bytes(log.read_bytes()[:-20])
    assert _numbers(tmp_path) == list(range(20 - rows[-1]))
    write_dataset(photos(20), tmp_path, mode="resume", group_bytes=2000, shard_bytes=2000)
    assert _numbers(tmp_path) == list(range(20))
    assert sorted(pq.read_table(tmp_path)["number"].to_pylist()) == list(range(20))


@pytest.mark.parametrize(
    "line",
    ['{"name": "a.parquet"}', '{"name": 3, "rows": 1, "bytes": 1}', '{"name": "a.parquet", "rows": -1, "bytes": 1}'],
)
def test_log_line_without_a_shard_is_an_error_that_names_the_log(tmp_path: Path, line: str) -> None:
    write_dataset(photos(2), tmp_path)
    [log] = (tmp_path / "_quire").glob("*.jsonl")
    log.write_text(f"{log.read_text()}{encode_line(json.loads(line))}\n")
    with pytest.raises(StorageError, match=log.name):
        open_dataset(tmp_path, Photo)


def test_log_cannot_name_a_file_outside_of_the_folder(tmp_path: Path) -> None:
    write_dataset(photos(2), tmp_path / "d")
    [log] = (tmp_path / "d" / "_quire").glob("*.jsonl")
    head, line = log.read_text().splitlines()
    shard = {**json.loads(line), "name": "../" + json.loads(line)["name"]}
    log.write_text(f"{head}\n{encode_line({name: shard[name] for name in shard if name != 'sum'})}\n")
    with pytest.raises(StorageError, match="not the name of a file"):
        open_dataset(tmp_path / "d", Photo).read()


def test_log_of_a_later_version_is_an_error(tmp_path: Path) -> None:
    write_dataset(photos(2), tmp_path)
    [log] = (tmp_path / "_quire").glob("*.jsonl")
    log.write_text(f"{encode_line({'version': 3})}\n{log.read_text()}")
    with pytest.raises(StorageError, match="update quire"):
        open_dataset(tmp_path, Photo)
