"""Remote folders: a store in memory, a real HTTP server, and a store that fails on demand."""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import pytest

from quire.errors import MissingDependencyError, OptionError, StorageError, StorageNotFoundError
from quire.files import Entry, Folder, RemoteOptions, _remote, open_folder, open_seekable
from quire.files._fetch import fetch
from quire.files._http import HttpFile
from quire.files._retry import RemoteCall, retry_pause
from tests.files.faulty_store import FaultyFileSystem, faulty_store
from tests.files.http_server import LoopbackServer, Site, serve_files

pytestmark = pytest.mark.needs("fsspec", "aiohttp")

has_obstore = importlib.util.find_spec("obstore") is not None
_numbers = itertools.count()
CONTENT = bytes(range(250)) * 4


@pytest.fixture
def memory() -> Folder:
    return open_folder(f"memory://folder-{os.getpid()}-{next(_numbers)}/data")


@pytest.fixture
def faulty() -> Iterator[type[FaultyFileSystem]]:
    with faulty_store() as store:
        yield store


@pytest.fixture
def site() -> Iterator[Site]:
    with serve_files({"a.parquet": CONTENT, "b.parquet": b"b", "note.txt": b"note"}) as site:
        yield site


def write(folder: Folder, name: str, content: bytes) -> None:
    with folder.open_for_write(name) as file:
        file.write(content)


# --- a store in memory


def test_remote_folder_supports_all_methods(memory: Folder, tmp_path: Path) -> None:
    assert memory.list() == []
    write(memory, "b.parquet", b"old")
    write(memory, "b.parquet", CONTENT)
    write(memory, "year=1/c.parquet", b"c")
    write(memory, "_manifest.json", b"{}")
    write(memory, "empty.txt", b"")
    assert memory.list([".parquet"]) == [Entry("b.parquet", 1000), Entry("year=1/c.parquet", 1)]
    assert [e.name for e in memory.list(hidden=True)] == [
        "_manifest.json",
        "b.parquet",
        "empty.txt",
        "year=1/c.parquet",
    ]
    assert [memory.exists(name) for name in ("b.parquet", "year=1", "x")] == [True, False, False]
    assert memory.size("b.parquet") == 1000
    assert memory.read("b.parquet") == CONTENT
    assert memory.read_range("b.parquet", 10, 20) == CONTENT[10:20]
    assert memory.read_range("b.parquet", 1000, 1000) == b""
    assert memory.local_path("b.parquet") is None
    memory.fetch("b.parquet", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == CONTENT
    memory.delete("b.parquet")
    memory.delete("b.parquet")
    assert not memory.exists("b.parquet")


def test_append_line_rewrites_remote_file(memory: Folder) -> None:
    for line in ("one", "two", "drei ä"):
        memory.append_line("log", line)
    assert memory.read("log").decode() == "one\ntwo\ndrei ä\n"
    write(memory, "log", b"half")
    memory.append_line("log", "whole")
    assert memory.read("log") == b"half\nwhole\n"


def test_failed_remote_write_keeps_old_file_only(memory: Folder) -> None:
    write(memory, "a", b"old")
    with pytest.raises(ZeroDivisionError), memory.open_for_write("a") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert memory.list(hidden=True) == [Entry("a", 3)]
    assert memory.read("a") == b"old"


def test_large_files_are_read_in_parts(memory: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remote, "_PART", 300)
    write(memory, "a", CONTENT)
    assert memory.read_range("a", 1, 999) == CONTENT[1:999]
    memory.fetch("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_missing_file_error_names_file(memory: Folder, tmp_path: Path) -> None:
    for call in (memory.read, memory.size, lambda name: memory.fetch(name, tmp_path / "a")):
        with pytest.raises(StorageNotFoundError, match=f"^{memory.url}/a.bin: there is no such file"):
            call("a.bin")
    assert list(tmp_path.iterdir()) == []


def test_remote_read_range_beyond_end_raises_error(memory: Folder) -> None:
    write(memory, "a", b"abc")
    with pytest.raises(StorageError, match="/a: the file has 3 bytes, and bytes 1 to 9 were asked for"):
        memory.read_range("a", 1, 9)


def test_remote_folder_pickles_url_and_options_and_hides_secrets() -> None:
    options = RemoteOptions(retries=2, storage_options={"key": "secret"})
    folder = open_folder("memory://pickled", options)
    again = pickle.loads(pickle.dumps(folder))
    assert (again.url, again.options) == (folder.url, options)
    assert "secret" not in repr(folder) + repr(options)
    hash(options)


def test_unknown_scheme_and_missing_package_raise_errors() -> None:
    with pytest.raises(StorageError, match="^nosuch://x/a: reading the file is not possible .*[Pp]rotocol not known"):
        open_folder("nosuch://x").read("a")
    with pytest.raises(MissingDependencyError, match="^quire-missing://x/a: .* is not installed"):
        fsspec.register_implementation("quire-missing", "no_such_package.FileSystem", clobber=True)
        open_folder("quire-missing://x").read("a")


@pytest.mark.parametrize(
    "options", [{"retries": -1}, {"deadline": 0.0}, {"timeout": -1.0}], ids=["retries", "deadline", "timeout"]
)
def test_remote_options_reject_invalid_values(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        RemoteOptions(**options)


@pytest.mark.parametrize(("timeout", "deadline", "expected"), [(10.0, 60.0, 40.0), (10.0, 5.0, 35.0)])
def test_time_of_an_attempt_grows_with_its_size(timeout: float, deadline: float, expected: float) -> None:
    """A request has a second more for each MiB, within the deadline, which grows by as much."""
    seconds: list[float] = []
    call = RemoteCall("reading the file", "s3://bucket/a", size=30 << 20)
    call.run(seconds.append, RemoteOptions(timeout=timeout, deadline=deadline))
    assert seconds == [pytest.approx(expected, abs=0.5)]


def test_pauses_double_with_jitter() -> None:
    for attempt, longest in ((0, 0.1), (1, 0.2), (3, 0.8), (20, 8.0)):
        pauses = [retry_pause(attempt) for _ in range(50)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest


def test_open_seekable_rejects_negative_retries() -> None:
    with pytest.raises(OptionError, match="retries is 0 or more, got -1"), open_seekable("http://a/b", retries=-1):
        pass


# --- faults


def test_temporary_failures_are_retried(faulty: type[FaultyFileSystem], tmp_path: Path) -> None:
    folder = open_folder("faulty://data")
    write(folder, "a", CONTENT)
    for method, call in {
        "cat_file": lambda: folder.read("a"),
        "info": lambda: folder.size("a"),
        "ls": folder.list,
    }.items():
        faulty.plan[method] = [ConnectionResetError("reset"), TimeoutError("slow")]
        faulty.calls.clear()
        call()
        assert faulty.calls.count(method) == 3
    faulty.plan["cat_file"] = [OSError("broken")]
    folder.fetch("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_error_reports_file_attempts_and_last_reason(faulty: type[FaultyFileSystem]) -> None:
    faulty.plan["cat_file"] = [OSError("first"), OSError("second"), OSError("third")]
    folder = open_folder("faulty://data", RemoteOptions(retries=2))
    message = (
        r"^faulty://data/a: reading the file failed, tried 3 times in [\d.]+ seconds. The last reason: OSError: third"
    )
    with pytest.raises(StorageError, match=message) as caught:
        folder.read("a")
    assert str(caught.value.__cause__) == "third"


@pytest.mark.parametrize(
    "error",
    [PermissionError("no"), IsADirectoryError("dir"), NotImplementedError("never"), ValueError("bad")],
    ids=repr,
)
def test_permanent_failures_are_not_retried(faulty: type[FaultyFileSystem], error: Exception) -> None:
    faulty.plan["cat_file"] = [error, OSError("never reached")]
    with pytest.raises(StorageError, match="^faulty://data/a: reading the file is not possible .*access rights"):
        open_folder("faulty://data").read("a")
    assert faulty.calls.count("cat_file") == 1


def test_failed_listing_is_not_an_empty_folder(faulty: type[FaultyFileSystem]) -> None:
    faulty.plan["ls"] = [OSError("down")] * 2
    with pytest.raises(StorageError, match="^faulty://data: listing the files failed, tried 2 times"):
        open_folder("faulty://data", RemoteOptions(retries=1)).list()
    faulty.plan["info"] = [OSError("down")] * 2
    with pytest.raises(StorageError, match="looking for the file failed"):
        open_folder("faulty://data", RemoteOptions(retries=1)).exists("a")


def test_hanging_call_ends_at_deadline(faulty: type[FaultyFileSystem]) -> None:
    faulty.hanging["cat_file"] = threading.Event()
    folder = open_folder("faulty://data", RemoteOptions(retries=100, timeout=0.05, deadline=0.3))
    with pytest.raises(StorageError, match="The last reason: TimeoutError: no answer within"):
        folder.read("a")
    assert faulty.calls.count("cat_file") < 100


def test_write_that_store_rejects_keeps_old_file(faulty: type[FaultyFileSystem]) -> None:
    folder = open_folder("faulty://data", RemoteOptions(retries=1))
    write(folder, "a", b"old")
    for method in ("put_file", "mv"):
        faulty.plan[method] = [OSError("full"), OSError("full")]
        with pytest.raises(StorageError, match="^faulty://data/a: writing the file failed, tried 2 times .* full"):
            write(folder, "a", b"new")
        assert folder.list(hidden=True) == [Entry("a", 3)]
    assert folder.read("a") == b"old"


def test_write_succeeds_when_answer_is_lost(faulty: type[FaultyFileSystem]) -> None:
    folder = open_folder("faulty://data")
    for method in ("put_file", "mv", "makedirs"):
        faulty.after[method] = [ConnectionResetError("the answer is lost")]
        write(folder, method, CONTENT)
        assert folder.read(method) == CONTENT
    assert [entry.name for entry in folder.list(hidden=True)] == ["makedirs", "mv", "put_file"]


def test_delete_succeeds_when_answer_is_lost(faulty: type[FaultyFileSystem]) -> None:
    folder = open_folder("faulty://data")
    write(folder, "a", b"a")
    faulty.after["rm_file"] = [ConnectionResetError("the answer is lost")]
    folder.delete("a")
    assert folder.list(hidden=True) == []


def test_keyboard_interrupt_is_not_retried(faulty: type[FaultyFileSystem]) -> None:
    faulty.plan["cat_file"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        open_folder("faulty://data").read("a")


# --- an HTTP server


def test_http_folder_lists_and_reads_files(site: Site, tmp_path: Path) -> None:
    folder = open_folder(site.url)
    assert folder.list([".parquet"]) == [Entry("a.parquet", 1000), Entry("b.parquet", 1)]
    assert folder.read_range("a.parquet", 5, 9) == CONTENT[5:9]
    assert [folder.exists(name) for name in ("a.parquet", "x")] == [True, False]
    folder.fetch("a.parquet", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert ("GET", "/data/a.parquet", "bytes=5-8") in site.seen
    with pytest.raises(StorageNotFoundError, match="^http://127.0.0.1:.*/data/x: there is no such file"):
        folder.size("x")


def test_server_without_ranges_sends_file_once(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remote, "_PART", 300)
    site.ranges = False
    folder = open_folder(site.url, RemoteOptions(retries=0))
    assert folder.read_range("a.parquet", 10, 700) == CONTENT[10:700]
    folder.fetch("a.parquet", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    # obstore drops the answer to a request with a range, and asks for the file
    assert len([line for line in site.seen if line[0] == "GET" and line[2] is None]) == (2 if has_obstore else 0)
    assert len([line for line in site.seen if line[0] == "GET" and line[2] is not None]) == 2
    with pytest.raises(StorageError, match="the file has 1,000 bytes, and bytes 10 to 1,001 were asked for"):
        folder.read_range("a.parquet", 10, 1001)


def test_server_without_sizes_is_read(site: Site, tmp_path: Path) -> None:
    site.lengths = False
    folder = open_folder(site.url)
    assert folder.size("a.parquet") == 1000
    folder.fetch("a.parquet", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_http_failures_are_retried(site: Site) -> None:
    folder = open_folder(site.url)
    site.failures = 2
    assert folder.read("a.parquet") == CONTENT
    assert len(site.seen) == 3
    site.failures = 4  # one attempt sends HEAD and GET
    assert folder.size("a.parquet") == 1000
    site.cuts = 2
    assert folder.read_range("a.parquet", 0, 1000) == CONTENT


@pytest.mark.parametrize("call", ["read", "exists", "size", "list"])
def test_unavailable_server_is_not_a_missing_file(site: Site, call: str) -> None:
    site.failures = 1000
    folder = open_folder(site.url, RemoteOptions(retries=1))
    method: Callable[..., Any] = getattr(folder, call)
    with pytest.raises(StorageError, match="tried 2 times .*503") as caught:
        method(*[] if call == "list" else ["a.parquet"])
    assert not isinstance(caught.value, FileNotFoundError)


def test_http_403_is_not_retried(site: Site) -> None:
    site.failures, site.status = 1, 403
    with pytest.raises(StorageError, match="is not possible .*403"):
        open_folder(site.url).read("a.parquet")
    assert len(site.seen) == 1


def test_hanging_server_is_abandoned_at_deadline(site: Site) -> None:
    site.hangs = True
    folder = open_folder(site.url, RemoteOptions(timeout=0.2, deadline=0.7))
    with pytest.raises(StorageError, match="^http://.*/a.parquet: reading the file failed.* no answer within"):
        folder.read("a.parquet")
    site.hangs = False
    site.released.set()
    assert folder.read("a.parquet") == CONTENT


def test_missing_server_error_names_file() -> None:
    url = "http://127.0.0.1:9/data"
    with pytest.raises(StorageError, match="^http://127.0.0.1:9/data/a: reading the file failed, tried 2 times"):
        open_folder(url, RemoteOptions(retries=1)).read("a")


def test_http_folder_rejects_writes(site: Site) -> None:
    with pytest.raises(StorageError, match="nothing is written to an http address"):
        write(open_folder(site.url), "a", b"x")
    assert site.seen == []


# --- processes and threads


def _read_in_child(folder: Folder, answers: Any) -> None:
    try:
        answers.put((os.getpid(), folder.read("a.parquet"), folder.size("b.parquet")))
    except BaseException as error:  # noqa: BLE001 - the parent waits for an answer
        answers.put(repr(error))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_connected_folder_works_in_other_processes(site: Site, method: str) -> None:
    folder = open_folder(site.url, RemoteOptions(deadline=20))
    assert folder.read("b.parquet") == b"b"
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    children = [context.Process(target=_read_in_child, args=(folder, answers)) for _ in range(2)]
    for child in children:
        child.start()
    received = [answers.get() for _ in children]
    for child in children:
        child.join()
    assert {answer[1:] for answer in received} == {(CONTENT, 1)}
    assert len({answer[0] for answer in received} | {os.getpid()}) == 3
    assert folder.read("a.parquet") == CONTENT


def test_threads_share_a_folder(site: Site) -> None:
    folder = open_folder(site.url)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda start: folder.read_range("a.parquet", start, start + 10), range(100)))
    assert parts == [CONTENT[start : start + 10] for start in range(100)]


def test_body_of_a_redirect_is_not_read() -> None:
    """A server could send a redirect with a body that never ends; only the file itself counts for `max_bytes`."""
    broken_off = threading.Semaphore(0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/file":
                self.send_response(200)
                self.send_header("Content-Length", "4")
                self.end_headers()
                self.wfile.write(b"file")
                return
            self.send_response(302)
            self.send_header("Location", "/file")
            self.end_headers()
            try:
                for _ in range(1 << 10):  # 1 GiB, far more than the system buffers
                    self.wfile.write(bytes(1 << 20))
            except ConnectionError:
                broken_off.release()

        def log_message(self, *_: object) -> None: ...

    with LoopbackServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/redirect"
        assert b"".join(HttpFile(url, RemoteOptions()).download()) == b"file"
        assert broken_off.acquire(timeout=20)
        assert fetch(url, max_bytes=4) == b"file"
        assert broken_off.acquire(timeout=20)
        with open_seekable(url) as file:
            assert file.read() == b"file"
        assert broken_off.acquire(timeout=20)
        server.shutdown()


def test_credentials_are_sent_to_no_other_server() -> None:
    """A redirect may lead to any server, and only the first one is trusted with a password and the user's headers."""
    received: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append({name.lower(): value for name, value in self.headers.items()})
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path[4:])
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"file")

        def log_message(self, *_: object) -> None: ...

    with ExitStack() as stack:
        servers = [LoopbackServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        for server in servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        own, other = (f"127.0.0.1:{server.server_port}" for server in servers)
        options = RemoteOptions(storage_options={"headers": {"X-Token": "secret"}})
        for target in (f"http://{own}/file", f"http://{other}/file"):
            file = HttpFile(f"http://user:pw@{own}/to/{target}", options)
            assert b"".join(file.download()) == b"file"
    first, same, again, elsewhere = received
    for headers in (first, same, again):
        assert headers["x-token"] == "secret"
        assert headers["authorization"].startswith("Basic ")
    assert not {"x-token", "authorization"} & set(elsewhere)
    assert elsewhere["user-agent"] == "quire"
