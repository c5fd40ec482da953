"""Datasets in an object store: written, extended by several processes, replaced and read with obstore."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire import BaseDocument
from quire.errors import StorageError
from quire.files import RemoteOptions
from quire.storage import ReadOptions, WriteOptions, open_dataset, write_dataset
from tests.files.s3_server import Fault, S3Server, run_s3_server

pytestmark = [pytest.mark.needs("pyarrow", "fsspec", "obstore"), pytest.mark.timeout(180)]


class Row(BaseDocument):
    number: int
    text: str


@pytest.fixture
def server() -> Iterator[S3Server]:
    with run_s3_server() as server:
        yield server


def rows(start: int, count: int) -> Iterator[Row]:
    return (Row(number=number, text=f"row {number}") for number in range(start, start + count))


def keys(endpoint: str) -> dict[str, Any]:
    """Return the storage options of the server, for another process."""
    region = {"client_kwargs": {"region_name": "us-east-1"}}
    return {"key": "key", "secret": "secret", "endpoint_url": endpoint, **region}


def write(remote: RemoteOptions, start: int, count: int, **options: Any) -> None:
    write_dataset(rows(start, count), "s3://bucket/data", Row, WriteOptions(remote=remote, **options))


def read_numbers(remote: RemoteOptions) -> list[int]:
    dataset = open_dataset("s3://bucket/data", Row, options=ReadOptions(remote=remote))
    dataset.verify()
    return sorted(row.number for row in dataset)


@pytest.mark.parametrize("format_", ["arrow", "parquet"])
def test_dataset_is_written_extended_and_replaced(server: S3Server, format_: Any) -> None:
    remote = server.options()
    write(remote, 0, 100, format=format_)
    assert read_numbers(remote) == list(range(100))
    write(remote, 100, 50, mode="append", format=format_)
    assert read_numbers(remote) == list(range(150))
    write(remote, 1000, 10, mode="overwrite", format=format_)
    assert read_numbers(remote) == list(range(1000, 1010))
    assert server.uploads == {}


def test_dataset_is_written_and_read_despite_faults(server: S3Server) -> None:
    remote = server.options(retries=8)
    server.faults = [Fault("PUT", kind) for kind in (503, "lost", 429, "lost", 500)]
    write(remote, 0, 100)
    server.faults += [Fault("GET", kind) for kind in (503, "cut", "lost", 429)]
    assert read_numbers(remote) == list(range(100))


def test_refused_write_leaves_no_dataset(server: S3Server) -> None:
    server.faults = [Fault("PUT", 403)] * 100
    with pytest.raises(StorageError, match="is not possible .*403"):
        write(server.options(), 0, 100)
    assert server.objects == {}


APPEND = """
import sys
from quire.files import RemoteOptions
from quire.storage import WriteOptions
from tests.storage.test_object_store import keys, write

for number in range(3):
    write(RemoteOptions(storage_options=keys(sys.argv[1])), int(sys.argv[2]) * 1000 + number * 10, 10, mode="append")
"""


def test_processes_append_to_one_dataset(server: S3Server) -> None:
    write(server.options(), 0, 10)
    command = [sys.executable, "-c", APPEND, server.endpoint]
    workers = [subprocess.Popen([*command, str(worker)]) for worker in (1, 2)]
    assert [worker.wait(150) for worker in workers] == [0, 0]
    expected = [*range(10), *range(1000, 1030), *range(2000, 2030)]
    assert read_numbers(server.options()) == expected


# --- a writer that is killed


def write_large(endpoint: str, mode: Any) -> None:
    """Write 3 shards of about 18 MB, each uploaded in 3 parts."""
    documents = (Row(number=number, text=f"row {number}".ljust(100_000)) for number in range(540))
    options = WriteOptions(
        remote=RemoteOptions(storage_options=keys(endpoint)), mode=mode, format="arrow", shard_bytes=18_000_000
    )
    write_dataset(documents, "s3://bucket/data", Row, options)


WRITE_LARGE = """
import sys
from tests.storage.test_object_store import write_large

write_large(sys.argv[1], "create")
"""


@pytest.mark.parametrize(
    ("method", "query", "name", "number"),
    [
        ("PUT", "partNumber", ".arrow", 5),  # in the middle of the second shard
        ("POST", "uploadId", ".arrow", 2),  # when it is completed: the request arrives, and its answer is lost
        ("PUT", "", ".jsonl", 2),  # when the first shard is added to the log
    ],
    ids=["part", "completion", "log"],
)
def test_writer_that_is_killed_is_resumed_by_writing_the_missing_shards(
    server: S3Server, method: str, query: str, name: str, number: int
) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITE_LARGE, server.endpoint])

    def kill_writer() -> None:
        matching = [each for each in server.seen if each[0] == method and query in each[2] and each[1].endswith(name)]
        if len(matching) >= number:
            writer.kill()

    server.gate = kill_writer
    assert writer.wait(150) == -signal.SIGKILL
    server.gate = None
    time.sleep(0.5)  # requests that had arrived before are carried out
    shards = {path: content for path, content in server.objects.items() if path.endswith(".arrow")}
    orphans = dict(server.uploads)
    assert len(shards) < 3
    server.seen.clear()
    write_large(server.endpoint, "resume")
    assert read_numbers(server.options()) == list(range(540))
    after = {path: content for path, content in server.objects.items() if path.endswith(".arrow")}
    assert len(after) == 3
    assert shards.items() <= after.items()
    completed = {path for kind, path, asked in server.seen if kind == "POST" and "uploadId" in asked}
    assert completed == after.keys() - shards.keys(), "complete shards are not written again"
    # Parts of an upload that was never completed are no object: they stay until a rule of the bucket removes them.
    assert server.uploads == orphans
    assert bool(orphans) == (query == "partNumber")
