"""Local folders: names, sizes, ranges, atomic writes, and lines from many processes."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.errors import OptionError, StorageError, StorageExistsError, StorageNotFoundError
from quire.files import Entry, open_folder

APPEND = """
import sys
from quire.files import open_folder
folder, worker, long = open_folder(sys.argv[1]), sys.argv[2], "x" * 5000
for number in range(200):
    folder.append_line("log.jsonl", f'["{worker}", {number}, "{long}"]')
"""
DIE_WRITING = """
import os, signal, sys
from quire.files import open_folder
with open_folder(sys.argv[1]).open_for_write("a.bin") as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_open_folder_accepts_paths_and_file_urls(tmp_path: Path) -> None:
    for url in (tmp_path, str(tmp_path), tmp_path.as_uri(), f"{tmp_path}/"):
        folder = open_folder(url)
        assert folder.url == str(tmp_path)
        assert folder.join("a.bin") == f"{tmp_path}/a.bin"
        assert folder.local_path("a.bin") == tmp_path / "a.bin"


def test_pickled_folder_of_relative_path_names_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = open_folder("data")
    with folder.open_for_write("a.bin") as file:
        file.write(b"abc")
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(folder)).read("a.bin") == b"abc"


def test_list_returns_sorted_visible_files_with_sizes(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.parquet", "year=1/c.parquet", "note.txt", "_SUCCESS", ".a.crc", "_tmp/d.parquet"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
    folder = open_folder(tmp_path)
    assert folder.list([".parquet"]) == [Entry("a.parquet", 9), Entry("b.parquet", 9), Entry("year=1/c.parquet", 16)]
    assert [entry.name for entry in folder.list()] == ["a.parquet", "b.parquet", "note.txt", "year=1/c.parquet"]
    assert len(folder.list(hidden=True)) == 7
    assert open_folder(tmp_path / "nowhere").list() == []


def test_read_and_read_range_return_content(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    assert folder.exists("a.bin")
    assert not folder.exists("b.bin")
    assert folder.size("a.bin") == 100
    assert folder.read("a.bin") == bytes(range(100))
    assert folder.read_range("a.bin", 10, 12) == b"\x0a\x0b"
    assert folder.read_range("a.bin", 100, 100) == b""
    folder.fetch("a.bin", tmp_path / "b.bin")
    assert folder.read("b.bin") == folder.read("a.bin")


def test_read_range_beyond_end_reports_file_size(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    (tmp_path / "a.bin").write_bytes(bytes(100))
    with pytest.raises(StorageError, match=r"a.bin: the file has 100 bytes, and bytes 90 to 101 were asked for"):
        folder.read_range("a.bin", 90, 101)
    with pytest.raises(OptionError, match="start <= stop"):
        folder.read_range("a.bin", 3, 2)


def test_read_ranges_returns_ranges_in_order(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    (tmp_path / "b.bin").write_bytes(b"b")
    assert folder.read_ranges([("a.bin", 3, 5), ("b.bin", 0, 1), ("a.bin", 0, 1)]) == [b"\x03\x04", b"b", b"\x00"]
    assert folder.read_ranges([]) == []
    with pytest.raises(StorageError, match="the file has 1 bytes"):
        folder.read_ranges([("a.bin", 3, 5), ("b.bin", 0, 2)])


def test_create_of_existing_file_raises_error(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.create("sub/a.json", b"one")
    with pytest.raises(StorageExistsError, match="sub/a.json: the file exists already") as caught:
        folder.create("sub/a.json", b"two")
    assert isinstance(caught.value, FileExistsError)
    assert folder.list(hidden=True) == [Entry("sub/a.json", 3)]
    assert folder.read("sub/a.json") == b"one"


def test_create_by_many_threads_succeeds_once(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)

    def create(number: int) -> bool:
        try:
            folder.create("a", str(number).encode())
        except StorageExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        successes = list(pool.map(create, range(50)))
    assert sum(successes) == 1
    assert folder.read("a") == str(successes.index(True)).encode()
    assert folder.list(hidden=True) == [Entry("a", len(folder.read("a")))]


def test_missing_file_error_names_file(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for call in (folder.read, folder.size, lambda name: folder.read_range(name, 0, 1)):
        with pytest.raises(StorageNotFoundError, match=f"^{tmp_path}/sub/a.bin: there is no such file"):
            call("sub/a.bin")
    with pytest.raises(StorageNotFoundError):
        folder.fetch("sub/a.bin", tmp_path / "b.bin")
    assert list(tmp_path.iterdir()) == []
    folder.delete("sub/a.bin")


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "", "a//b", ".", "a\\..\\b", "a\0"])
def test_names_outside_the_folder_are_rejected(tmp_path: Path, name: str) -> None:
    folder = open_folder(tmp_path / "data")
    for call in (folder.read, folder.exists, folder.delete, folder.join, folder.local_path):
        with pytest.raises(StorageError, match="is not the name of a file in this folder"):
            call(name)
    with pytest.raises(StorageError), folder.open_for_write(name):
        pass
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_old_file(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    with folder.open_for_write("sub/a.bin") as file:
        file.write(b"old")
    with pytest.raises(ZeroDivisionError), folder.open_for_write("sub/a.bin") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert folder.list(hidden=True) == [Entry("sub/a.bin", 3)]
    assert folder.read("sub/a.bin") == b"old"


def test_killed_writer_leaves_no_file(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIE_WRITING, str(tmp_path)], check=False)
    assert done.returncode == -9
    folder = open_folder(tmp_path)
    assert not folder.exists("a.bin")
    assert folder.list() == []


def test_append_line_from_many_processes_loses_no_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", APPEND, str(tmp_path)]
    workers = [subprocess.Popen([*command, str(worker)]) for worker in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sorted(row[:2] for row in rows) == [[str(w), n] for w in range(3) for n in range(200)]
    for worker in range(3):
        assert [number for name, number, _ in rows if name == str(worker)] == list(range(200))


def test_append_line_starts_new_line_after_partial_one(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.append_line("log", "one")
    with (tmp_path / "log").open("ab") as file:
        file.write(b"tw")
    folder.append_line("log", "three")
    assert folder.read("log") == b"one\ntw\nthree\n"
    with pytest.raises(OptionError, match="no line break"):
        folder.append_line("log", "a\nb")


def test_local_folder_does_not_import_fsspec(tmp_path: Path) -> None:
    code = """
import sys
from quire.files import open_folder
folder = open_folder(sys.argv[1])
folder.append_line("a", "b")
folder.list(), folder.read("a"), folder.size("a"), folder.delete("a")
assert "fsspec" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_missing_client_error_has_install_command() -> None:
    code = """
import sys
sys.modules["fsspec"] = sys.modules["obstore"] = None
from quire.errors import MissingDependencyError
from quire.files import open_folder
for url in ("s3://user:secret@bucket/data", "hdfs://host/data"):
    try:
        open_folder(url)
    except MissingDependencyError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    client = "obstore" if sys.version_info >= (3, 11) else "fsspec"
    assert done.stdout.splitlines() == [
        f"s3://...@bucket/data needs {client}, which is not installed: pip install 'quire-ml[remote]'",
        "hdfs://host/data needs fsspec, which is not installed: pip install 'quire-ml[parquet]'",
    ]
