"""Datasets in an object store: written, extended by several processes, replaced and read with obstore."""

from __future__ import annotations

import subprocess
import sys
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
from tests.storage.test_object_store import write

options = {"key": "key", "secret": "secret", "endpoint_url": sys.argv[1], "client_kwargs": {"region_name": "us-east-1"}}
for number in range(3):
    write(RemoteOptions(storage_options=options), int(sys.argv[2]) * 1000 + number * 10, 10, mode="append")
"""


def test_processes_append_to_one_dataset(server: S3Server) -> None:
    write(server.options(), 0, 10)
    command = [sys.executable, "-c", APPEND, server.endpoint]
    workers = [subprocess.Popen([*command, str(worker)]) for worker in (1, 2)]
    assert [worker.wait(150) for worker in workers] == [0, 0]
    expected = [*range(10), *range(1000, 1030), *range(2000, 2030)]
    assert read_numbers(server.options()) == expected
