"""`list_files` and `delete_file`: the files of a store that `push` writes to."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from quire import BaseDocument, DocumentArray
from quire.errors import StorageError, StorageNotFoundError
from quire.files import delete_file, list_files

pytestmark = pytest.mark.needs("fsspec")


class Row(BaseDocument):
    n: int


ROWS = DocumentArray[Row](Row(n=n) for n in range(3))


@pytest.fixture(params=["path", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        return "memory://shelf"
    return str(tmp_path / "shelf") if request.param == "path" else (tmp_path / "shelf").as_uri()


def test_pushed_arrays_are_listed_pulled_and_deleted(store: str) -> None:
    assert list_files(store) == []
    for name in ("b.gz", "deep/a", "a"):
        ROWS.push(f"{store}/{name}")
    ROWS.push(f"{store}/.hidden")
    addresses = list_files(store)
    assert [url.partition("shelf/")[2] for url in addresses] == ["a", "b.gz", "deep/a"]
    assert all(DocumentArray[Row].pull(url) == ROWS for url in addresses)
    assert delete_file(addresses[0]) is True
    assert delete_file(f"{store}/deep/a") is True
    assert list_files(store) == [addresses[1]]


def test_deleting_a_missing_file_is_an_error_or_ignored(store: str) -> None:
    ROWS.push(f"{store}/deep/a")
    for name in ("missing", "deep"):  # a folder is not a file
        with pytest.raises(StorageNotFoundError, match="there is no such file. Pass missing_ok=True"):
            delete_file(f"{store}/{name}")
        assert delete_file(f"{store}/{name}", missing_ok=True) is False
    assert len(list_files(store)) == 1


def test_paths_are_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ROWS.push("rows.bin")
    assert list_files(".") == [os.fspath(tmp_path / "rows.bin")]
    assert delete_file(Path("rows.bin"))
    assert list_files(tmp_path) == []


def test_nothing_is_deleted_from_web_servers() -> None:
    with pytest.raises(StorageError, match="http://127.0.0.1:9/a: nothing is deleted from a web server"):
        delete_file("http://127.0.0.1:9/a")
