"""The fetcher process: started by its first client, shared, replaced when it is killed, and ended when not needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import pytest

from quire.errors import StorageError, StorageNotFoundError
from quire.files import RemoteOptions, open_folder
from quire.files import _block_sources as sources
from quire.files._block_sources import FetcherClient, lock_path
from quire.files._folder import Folder
from quire.files._node_cache import BlockRange, NodeCacheError
from tests.files.http_server import Site, serve_files

pytestmark = [
    pytest.mark.needs("aiohttp", "fsspec"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform == "win32", reason="no Unix sockets"),
]
SIZE, BLOCKS = 1000, 40
CONTENT = b"".join(bytes([number]) * SIZE for number in range(BLOCKS))
OPTIONS = RemoteOptions(retries=3, deadline=10.0, timeout=5.0)


@pytest.fixture
def site() -> Iterator[Site]:
    with serve_files({"file": CONTENT}) as running:
        yield running


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "blocks"
    with suppress(OSError, ValueError):
        os.kill(fetcher_of(tmp_path / "blocks"), signal.SIGKILL)


def fetcher_of(place: Path) -> int:
    return int(lock_path(place).read_text())


def block(number: int, size: int = SIZE) -> BlockRange:
    key = blake2b(f"{number}".encode(), digest_size=20).hexdigest()
    return BlockRange(key, "file", number * SIZE, number * SIZE + size)


def read(client: FetcherClient, folder: Folder, number: int) -> bytes:
    with client.open(folder, block(number)) as file:
        return file.read()


def blocks_sent(site: Site) -> int:
    return sum(command == "GET" for command, _, _ in site.seen)


def test_clients_share_a_fetcher_and_its_downloads(site: Site, place: Path) -> None:
    folder = open_folder(site.url, OPTIONS)
    clients = [FetcherClient(place, 10**6) for _ in range(3)]
    for client in clients:
        client.request(folder, [(block(number), number) for number in range(BLOCKS)])
    fetcher = fetcher_of(place)
    for client in clients:
        assert [read(client, folder, number) for number in range(BLOCKS)] == [
            bytes([number]) * SIZE for number in range(BLOCKS)
        ]
    assert fetcher_of(place) == fetcher
    assert blocks_sent(site) == BLOCKS


def test_killed_fetcher_is_replaced_by_the_client_that_waits(site: Site, place: Path) -> None:
    folder, client = open_folder(site.url, OPTIONS), FetcherClient(place, 10**6)
    assert read(client, folder, 0) == bytes(SIZE)
    first = fetcher_of(place)
    site.hangs = True
    results: list[bytes] = []
    waiting = threading.Thread(target=lambda: results.append(read(client, folder, 1)))
    waiting.start()
    while blocks_sent(site) < 2:
        time.sleep(0.01)
    os.kill(first, signal.SIGKILL)
    site.hangs = False
    site.released.set()
    waiting.join(60)
    assert results == [b"\x01" * SIZE]
    assert fetcher_of(place) != first


def test_errors_have_the_class_and_the_message_of_the_fetcher(site: Site, place: Path) -> None:
    folder, client = open_folder(site.url, OPTIONS), FetcherClient(place, 10**6)
    with pytest.raises(StorageNotFoundError, match=r"/data/other: there is no such file"):
        client.open(folder, BlockRange("a" * 40, "other", 0, 10))
    with pytest.raises(StorageError, match=r"/data/file"):
        client.open(folder, BlockRange("b" * 40, "file", 0, len(CONTENT) + 5))
    small = FetcherClient(place, 500)
    with pytest.raises(NodeCacheError, match="does not fit into a cache of 500 bytes"):
        small.open(folder, block(3))


def test_fetcher_ends_when_it_has_no_clients(site: Site, place: Path) -> None:
    program = (
        "import sys; from quire.files import open_folder; from tests.files.test_fetcher import *; "
        "client = FetcherClient(Path(sys.argv[2]), 10**6); "
        "assert read(client, open_folder(sys.argv[1], OPTIONS), 2) == bytes([2]) * SIZE"
    )
    subprocess.run([sys.executable, "-c", program, site.url, str(place)], check=True, timeout=60)
    fetcher = fetcher_of(place)
    with suppress(ProcessLookupError):
        while True:
            os.kill(fetcher, 0)
            time.sleep(0.05)
    assert sorted(path.suffix for path in place.iterdir()) == [".block", ".lock", ".lock", ".log"]


def test_long_paths_have_a_socket(site: Site, tmp_path: Path) -> None:
    place = tmp_path / ("x" * 120)
    client = FetcherClient(place, 10**6)
    try:
        assert read(client, open_folder(site.url, OPTIONS), 4) == bytes([4]) * SIZE
    finally:
        os.kill(fetcher_of(place), signal.SIGKILL)


def test_fetcher_does_not_import_heavy_packages() -> None:
    program = (
        "import sys, quire.files._fetcher; print(*sorted({'numpy', 'pyarrow', 'pydantic', 'torch'} & {*sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert not result.stdout.strip()


def test_processes_that_are_not_alone_use_the_fetcher(site: Site, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(site.url, OPTIONS)
    monkeypatch.setattr(sources, "_clients", {})
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not isinstance(sources.open_block_source(folder, place, 10**6), FetcherClient)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert isinstance(sources.open_block_source(folder, place, 10**6), FetcherClient)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not isinstance(sources.open_block_source(folder, place, 10**6), FetcherClient)
