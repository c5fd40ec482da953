"""Object stores: obstore against stores on loopback, with faults, several processes, and forks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.errors import OptionError, StorageError, StorageExistsError, StorageNotFoundError
from quire.files import Entry, Folder, RemoteOptions, _object_store, _remote, open_folder, open_seekable
from quire.files._fetch import fetch
from quire.files._fsspec import FsspecClient
from quire.files._object_store import ObstoreClient
from quire.files._remote import RemoteFolder
from tests.files.s3_server import Fault, S3Server, run_s3_server

pytestmark = [pytest.mark.needs("obstore", "fsspec", "s3fs"), pytest.mark.timeout(120)]

CONTENT = bytes(range(250)) * 400


@pytest.fixture
def server() -> Iterator[S3Server]:
    with run_s3_server() as server:
        server.objects["/bucket/data/a.bin"] = CONTENT
        yield server


@pytest.fixture
def folder(server: S3Server) -> Folder:
    return open_folder("s3://bucket/data", server.options())


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.files._retry._FIRST_PAUSE", 0.001)


def write(folder: Folder, name: str, content: bytes) -> None:
    with folder.open_for_write(name) as file:
        file.write(content)


# --- methods


def test_folder_in_store_supports_all_methods(server: S3Server, tmp_path: Path) -> None:
    folder = open_folder("s3://bucket/new/folder", server.options())
    assert folder.list() == []
    for name in ("b.parquet", "year=1/c d+e.parquet", "_manifest.json", "ä#%20&?.txt"):
        write(folder, name, name.encode())
    write(folder, "empty.txt", b"")
    server.objects["/bucket/new/folder2/x"] = b"x"
    assert folder.list([".parquet"]) == [Entry("b.parquet", 9), Entry("year=1/c d+e.parquet", 20)]
    assert [entry.name for entry in folder.list(hidden=True)] == [
        "_manifest.json",
        "b.parquet",
        "empty.txt",
        "year=1/c d+e.parquet",
        "ä#%20&?.txt",
    ]
    assert [folder.exists(name) for name in ("b.parquet", "year=1", "x")] == [True, False, False]
    for name in ("b.parquet", "ä#%20&?.txt"):
        assert folder.size(name) == len(name.encode())
        assert folder.read(name) == name.encode()
    assert folder.read_range("b.parquet", 2, 9) == b"parquet"
    assert folder.read_range("b.parquet", 9, 9) == b""
    assert folder.read_buffer("b.parquet", 2, 9) == b"parquet"
    folder.fetch("b.parquet", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"b.parquet"
    folder.delete("b.parquet")
    folder.delete("b.parquet")
    assert not folder.exists("b.parquet")
    with pytest.raises(StorageNotFoundError, match="^s3://bucket/new/folder/b.parquet: there is no such file"):
        folder.read("b.parquet")


def test_store_is_read_without_fsspec(server: S3Server) -> None:
    code = """
import sys
sys.modules["fsspec"] = sys.modules["boto3"] = None
from quire.files import RemoteOptions, open_folder
options = RemoteOptions(storage_options={"endpoint_url": sys.argv[1], "anon": True})
assert len(open_folder("s3://bucket/data", options).read("a.bin")) == 100_000
"""
    subprocess.run([sys.executable, "-c", code, server.endpoint], check=True, timeout=60)
    assert "authorization" not in server.headers[0]


def test_folder_marker_is_not_a_file(server: S3Server, folder: Folder) -> None:
    server.objects["/bucket/data/sub/"] = b""
    server.objects["/bucket/data/sub/b.bin"] = b"b"
    assert [entry.name for entry in folder.list()] == ["a.bin", "sub/b.bin"]


def test_read_range_beyond_end_reports_file_size(server: S3Server, folder: Folder) -> None:
    for start in (99_990, 100_000, 200_000):
        message = f"a.bin: the file has 100,000 bytes, and bytes {start:,} to 300,000 were asked for"
        with pytest.raises(StorageError, match=message):
            folder.read_range("a.bin", start, 300_000)
    assert server.methods() == ["GET", "HEAD"] * 3


def test_fetch_and_seekable_file_read_from_store(server: S3Server) -> None:
    options = server.options().storage_options
    assert fetch("s3://bucket/data/a.bin", storage_options=options) == CONTENT
    with open_seekable("s3://bucket/data/a.bin", storage_options=options) as file:
        file.seek(-10, os.SEEK_END)
        assert file.read() == CONTENT[-10:]
        file.seek(5)
        assert file.read(7) == CONTENT[5:12]
    with (
        pytest.raises(FileNotFoundError, match="s3://bucket/data/b.bin: there is no such file"),
        open_seekable("s3://bucket/data/b.bin", storage_options=options),
    ):
        pass


# --- concurrent reads


def test_read_ranges_sends_requests_at_the_same_time(server: S3Server, folder: Folder) -> None:
    barrier = threading.Barrier(8)
    server.gate = lambda: barrier.wait(60) and None  # each request waits for seven others
    requests = [("a.bin", start, start + 10) for start in range(0, 16_000, 1000)]
    expected = [CONTENT[start:stop] for _, start, stop in requests]
    assert folder.read_ranges(requests, concurrency=8) == expected


def test_read_ranges_sends_at_most_that_many_requests_at_once(server: S3Server, folder: Folder) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def count() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    server.gate = count
    folder.read_ranges([("a.bin", 0, 10)] * 30, concurrency=3)
    assert most <= 3


def test_large_file_is_read_in_parallel_parts(
    server: S3Server, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_remote, "_PART", 20_000)
    barrier = threading.Barrier(4)
    folder.fetch("a.bin", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert server.methods() == ["HEAD"] + ["GET"] * 5
    first = threading.Event()

    def wait_for_others() -> None:
        if first.is_set():
            barrier.wait(60)
        first.set()

    server.gate = wait_for_others  # the parts after the first one wait for each other
    assert folder.read_range("a.bin", 0, 100_000) == CONTENT


def test_threads_share_a_folder(server: S3Server, folder: Folder) -> None:
    server.faults = [Fault("GET", kind) for kind in (503, "cut", 429, 500)]
    with ThreadPoolExecutor(16) as pool:
        parts = list(pool.map(lambda start: folder.read_range("a.bin", start, start + 100), range(200)))
    assert parts == [CONTENT[start : start + 100] for start in range(200)]


# --- faults


@pytest.mark.parametrize("kind", [500, 503, 429, 408, "cut", "lost"])
def test_temporary_fault_is_retried(server: S3Server, folder: Folder, kind: int | str) -> None:
    server.faults = [Fault("GET", kind)] * 2
    assert folder.read_range("a.bin", 10, 5000) == CONTENT[10:5000]
    assert server.methods() == ["GET"] * 3
    server.faults = [Fault("GET", kind)]
    assert folder.read("a.bin") == CONTENT
    if kind != "cut":
        server.faults = [Fault("HEAD", kind)]
        assert folder.size("a.bin") == len(CONTENT)
    server.faults = [Fault("GET", kind)]
    assert folder.list() == [Entry("a.bin", len(CONTENT))]


@pytest.mark.parametrize("kind", ["shifted", "short", "whole"])
def test_answer_with_another_range_is_not_used(server: S3Server, folder: Folder, kind: str) -> None:
    server.faults = [Fault("GET", kind)]
    assert folder.read_range("a.bin", 10, 5000) == CONTENT[10:5000]
    server.faults = [Fault("GET", kind)] * 20
    if kind == "whole":  # a server without support for ranges
        assert folder.read_range("a.bin", 10, 5000) == CONTENT[10:5000]
        return
    once = open_folder("s3://bucket/data", server.options(retries=1))
    with pytest.raises(StorageError, match="a.bin: reading bytes 10 to 5,000 failed, tried 2 times"):
        once.read_range("a.bin", 10, 5000)


@pytest.mark.parametrize("kind", ["stall", "hang"])
def test_stalled_answer_is_requested_again(server: S3Server, kind: str) -> None:
    folder = open_folder("s3://bucket/data", server.options(timeout=0.3))
    first = threading.Event()
    if kind == "stall":
        server.faults = [Fault("GET", "stall")]
    else:

        def hang_once() -> None:
            if not first.is_set():
                first.set()
                server.released.wait()

        server.gate = hang_once
    assert folder.read_range("a.bin", 10, 5000) == CONTENT[10:5000]
    assert server.methods() == ["GET"] * 2


def test_permanent_stall_ends_at_deadline(server: S3Server) -> None:
    server.gate = lambda: server.released.wait() and None
    folder = open_folder("s3://bucket/data", server.options(timeout=0.1, deadline=0.5))
    with pytest.raises(StorageError, match="a.bin: reading bytes 0 to 10 failed, .* no answer within") as caught:
        folder.read_range("a.bin", 0, 10)
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_error_reports_attempts_status_and_code(server: S3Server) -> None:
    server.faults = [Fault("GET", 503)] * 3
    folder = open_folder("s3://bucket/data", server.options(retries=2))
    message = (
        r"^s3://bucket/data/a.bin: reading bytes 0 to 10 failed, tried 3 times in [\d.]+ seconds. The last reason: "
        "ObjectStoreError: the store answered 503 Service Unavailable: Injected: about Injected. Try again later"
    )
    with pytest.raises(StorageError, match=message):
        folder.read_range("a.bin", 0, 10)


@pytest.mark.parametrize("status", [400, 401, 403])
def test_refusal_is_not_retried(server: S3Server, folder: Folder, status: int) -> None:
    server.faults = [Fault("GET", status)]
    with pytest.raises(StorageError, match=f"reading the file is not possible .*{status}.*Injected.*access rights"):
        folder.read("a.bin")
    assert server.methods() == ["GET"]


def test_missing_server_error_has_reason() -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "anon": True}
    folder = open_folder("s3://bucket/data", RemoteOptions(retries=1, storage_options=options))
    with pytest.raises(StorageError, match=r"tried 2 times .* no connection \(Connection refused\)"):
        folder.read("a.bin")


def test_throttling_is_reported(server: S3Server, folder: Folder) -> None:
    from quire.files._throttling import watch_throttling

    reports: list[float] = []
    server.faults = [Fault("GET", 429), Fault("GET", 500), Fault("GET", 503)]
    with watch_throttling(reports.append):
        assert folder.read("a.bin") == CONTENT
    assert len(reports) == 2


def test_keyboard_interrupt_ends_a_stalled_read(server: S3Server) -> None:
    code = """
import signal, sys
from quire.files import RemoteOptions, open_folder
options = RemoteOptions(storage_options={"endpoint_url": sys.argv[1], "anon": True}, timeout=3600, deadline=3600)
try:
    open_folder("s3://bucket/data", options).read("a.bin")
except KeyboardInterrupt:
    print("interrupted")
"""
    has_begun = threading.Event()

    def stall() -> None:
        has_begun.set()
        server.released.wait()

    server.gate = stall
    child = subprocess.Popen([sys.executable, "-c", code, server.endpoint], stdout=subprocess.PIPE, text=True)
    assert has_begun.wait(60)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[0] == "interrupted\n"
    assert child.returncode == 0


# --- writing


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_object_store, "PART", 5 << 20)


@pytest.mark.usefixtures("small_parts")
def test_large_file_is_written_in_parts(server: S3Server, folder: Folder) -> None:
    content = os.urandom(1 << 20) * 17
    write(folder, "b.bin", content)
    assert server.objects["/bucket/data/b.bin"] == content
    assert sum("partNumber" in query for _, _, query in server.seen) == 4
    assert server.uploads == {}


@pytest.mark.usefixtures("small_parts")
def test_parts_are_sent_at_the_same_time(server: S3Server, folder: Folder) -> None:
    together, is_passed = threading.Barrier(4), threading.Event()

    def wait_for_others() -> None:
        if any("partNumber" in query for _, _, query in server.seen) and not is_passed.is_set():
            together.wait(60)  # an upload of one part after the other breaks the barrier
            is_passed.set()

    server.gate = wait_for_others
    write(folder, "b.bin", bytes(17 << 20))
    assert is_passed.is_set()
    assert len(server.objects["/bucket/data/b.bin"]) == 17 << 20


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", [503, 500, "lost"])
def test_failed_part_is_sent_again_alone(server: S3Server, folder: Folder, kind: int | str) -> None:
    server.faults = [Fault("PUT", kind, "partNumber=2")]
    write(folder, "b.bin", bytes(17 << 20))
    numbers = sorted(query.partition("&")[0] for _, _, query in server.seen if "partNumber" in query)
    assert numbers == [f"partNumber={number}" for number in (1, 2, 2, 3, 4)]
    assert len(server.objects["/bucket/data/b.bin"]) == 17 << 20


@pytest.mark.usefixtures("small_parts")
def test_refused_part_leaves_old_file_and_no_upload(server: S3Server, folder: Folder) -> None:
    server.faults = [Fault("PUT", 403, "partNumber=2")]
    with pytest.raises(StorageError, match="a.bin: writing the file is not possible .*403"):
        write(folder, "a.bin", bytes(17 << 20))
    assert server.objects["/bucket/data/a.bin"] == CONTENT
    assert server.uploads == {}


@pytest.mark.usefixtures("small_parts")
def test_upload_that_keeps_failing_reports_its_attempts(server: S3Server) -> None:
    server.faults = [Fault("PUT", 503)] * 3
    folder = open_folder("s3://bucket/data", server.options(retries=2))
    with pytest.raises(StorageError, match="b.bin: writing the file failed, tried 3 times .*503"):
        write(folder, "b.bin", b"b")
    assert server.faults == []
    assert "/bucket/data/b.bin" not in server.objects


def test_failed_block_writes_nothing(server: S3Server, folder: Folder) -> None:
    with pytest.raises(ZeroDivisionError), folder.open_for_write("a.bin") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert server.seen == []


def test_create_of_existing_file_raises_error(server: S3Server, folder: Folder) -> None:
    folder.create("log/1.json", b"one")
    with pytest.raises(StorageExistsError, match="^s3://bucket/data/log/1.json: the file exists already"):
        folder.create("log/1.json", b"one")
    assert server.objects["/bucket/data/log/1.json"] == b"one"


def test_create_succeeds_when_answer_is_lost(server: S3Server, folder: Folder) -> None:
    server.faults = [Fault("PUT", "lost")]
    folder.create("1.json", b"one")
    assert server.objects["/bucket/data/1.json"] == b"one"
    assert server.methods() == ["PUT", "PUT", "GET"]
    server.faults = [Fault("PUT", 503)]  # not written, and another process is faster
    server.objects["/bucket/data/2.json"] = b"other"
    with pytest.raises(StorageExistsError):
        folder.create("2.json", b"two")


def test_append_line_reads_and_replaces_version(server: S3Server, folder: Folder) -> None:
    for line in ("one", "two", "drei ä"):
        folder.append_line("log", line)
    assert server.objects["/bucket/data/log"].decode() == "one\ntwo\ndrei ä\n"
    server.objects["/bucket/data/log"] = b"half"
    folder.append_line("log", "whole")
    assert server.objects["/bucket/data/log"] == b"half\nwhole\n"
    with pytest.raises(OptionError, match="no line break"):
        folder.append_line("log", "a\nb")


def test_append_line_keeps_line_of_other_writer(server: S3Server, folder: Folder) -> None:
    folder.append_line("log", "one")
    added = threading.Event()

    def add_between() -> None:
        if server.seen[-1][0] == "PUT" and not added.is_set():
            added.set()
            server.objects["/bucket/data/log"] += b"other\n"

    server.gate = add_between
    folder.append_line("log", "two")
    assert server.objects["/bucket/data/log"] == b"one\nother\ntwo\n"


@pytest.mark.parametrize("kind", ["lost", 503])
def test_append_line_adds_line_once_when_answer_is_lost(server: S3Server, folder: Folder, kind: int | str) -> None:
    folder.append_line("log", "one")
    server.faults = [Fault("PUT", kind)]
    folder.append_line("log", "two")
    assert server.objects["/bucket/data/log"] == b"one\ntwo\n"


APPEND = """
import sys
from quire.files import RemoteOptions, open_folder
options = RemoteOptions(storage_options={"endpoint_url": sys.argv[1], "anon": True}, deadline=100, timeout=100)
folder = open_folder("s3://bucket/data", options)
created = 0
for number in range(25):
    folder.append_line("log", f"{sys.argv[2]} {number}")
    try:
        folder.create(f"entry-{number}", sys.argv[2].encode())
        created += 1
    except FileExistsError:
        pass
print(created)
"""


def test_processes_append_and_create_without_loss(server: S3Server) -> None:
    command = [sys.executable, "-c", APPEND, server.endpoint]
    workers = [subprocess.Popen([*command, str(worker)], stdout=subprocess.PIPE) for worker in range(2)]
    outputs = [worker.communicate(timeout=100)[0] for worker in workers]
    lines = server.objects["/bucket/data/log"].decode().splitlines()
    assert sorted(lines) == sorted(f"{worker} {number}" for worker in range(2) for number in range(25))
    for worker in range(2):
        assert [line for line in lines if line[0] == str(worker)] == [f"{worker} {number}" for number in range(25)]
    assert sum(map(int, outputs)) == 25


# --- processes


def _read_in_child(folder: Folder, answers: Any) -> None:
    try:
        answers.put((folder.read_range("a.bin", 0, 10), type(folder._client()).__name__))  # type: ignore[attr-defined]
    except BaseException as error:  # noqa: BLE001 - the parent waits for an answer
        answers.put(repr(error))


def _run_child(method: str, folder: Folder) -> Any:
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    child = context.Process(target=_read_in_child, args=(folder, answers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    return answers.get()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_used_folder_works_in_new_process(folder: Folder, method: str) -> None:
    assert folder.read_range("a.bin", 0, 10) == CONTENT[:10]
    assert _run_child(method, folder) == (CONTENT[:10], "ObstoreClient")


def test_forked_child_reads_with_fsspec_after_use_in_parent(folder: Folder) -> None:
    assert folder.read_range("a.bin", 0, 10) == CONTENT[:10]
    assert _run_child("fork", folder) == (CONTENT[:10], "FsspecClient")
    assert folder.read_range("a.bin", 0, 10) == CONTENT[:10]


def test_forked_child_without_fsspec_package_raises_error(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder.read_range("a.bin", 0, 10) == CONTENT[:10]
    monkeypatch.setattr(_remote, "filesystem_class", lambda _: None)
    answer = _run_child("fork", folder)
    assert "StorageError" in answer
    assert "s3://bucket/data: obstore was used before this process was forked" in answer
    assert "multiprocessing_context='forkserver'" in answer
    assert "pip install 's3fs'" in answer


def test_fork_before_first_use_works(server: S3Server) -> None:
    code = """
import os, signal, sys
from quire.files import RemoteOptions, open_folder
import obstore
folder = open_folder("s3://bucket/data", RemoteOptions(storage_options={"endpoint_url": sys.argv[1], "anon": True}))
child = os.fork()
if child == 0:
    signal.alarm(60)
    content = folder.read_range("a.bin", 0, 10)
    os._exit(0 if len(content) == 10 and type(folder._client()).__name__ == "ObstoreClient" else 1)
assert os.waitpid(child, 0)[1] == 0
assert len(folder.read_range("a.bin", 0, 10)) == 10
"""
    subprocess.run([sys.executable, "-c", code, server.endpoint], check=True, timeout=90)


def test_pickled_folder_has_options_and_no_store(folder: Folder) -> None:
    assert folder.read_range("a.bin", 0, 10) == CONTENT[:10]
    assert b"obstore" not in pickle.dumps(folder)
    again = pickle.loads(pickle.dumps(folder))
    assert again.read_range("a.bin", 0, 10) == CONTENT[:10]
    assert "secret" not in repr(again) + repr(again.options)


# --- the choice of the client


def test_store_is_read_with_fsspec_where_obstore_is_missing(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_remote, "is_installed", lambda name: name != "obstore")
    folder = open_folder("s3://bucket/data", server.options())
    assert isinstance(folder, RemoteFolder)
    assert isinstance(folder._client(), FsspecClient)
    assert folder.read_range("a.bin", 3, 9) == CONTENT[3:9]
    assert folder.read_ranges([("a.bin", 3, 9), ("a.bin", 0, 1)]) == [CONTENT[3:9], CONTENT[:1]]
    folder.fetch("a.bin", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    folder.create("b", b"b")
    with pytest.raises(StorageExistsError):
        folder.create("b", b"c")
    folder.append_line("log", "one")
    folder.append_line("log", "two")
    assert folder.read("log") == b"one\ntwo\n"


def test_option_of_fsspec_alone_selects_fsspec(server: S3Server) -> None:
    options = {**server.options().storage_options, "s3_additional_kwargs": {}}
    folder = open_folder("s3://bucket/data", RemoteOptions(storage_options=options))
    assert isinstance(folder, RemoteFolder)
    assert isinstance(folder._client(), FsspecClient)
    assert folder.read("a.bin") == CONTENT
    other = open_folder("s3://bucket//data", server.options())  # obstore has no empty names
    assert isinstance(other, RemoteFolder)
    assert isinstance(other._client(), FsspecClient)


def test_caching_options_of_fsspec_keep_obstore(server: S3Server) -> None:
    options = {**server.options().storage_options, "default_block_size": 1 << 20, "use_listings_cache": False}
    folder = open_folder("s3://bucket/data", RemoteOptions(storage_options=options))
    assert isinstance(folder, RemoteFolder)
    assert isinstance(folder._client(), ObstoreClient)
