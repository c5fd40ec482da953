"""Which logs a dataset has: those that are listed, or those of the index where nothing can be listed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import StorageError, StorageNotFoundError
from quire.storage._manifest import _log_names

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")
INDEX = json.dumps({"version": 1, "logs": ["indexed.jsonl"]}).encode()


class FakeFolder:
    """A folder of logs that may refuse to list, and may have no index."""

    def __init__(self, listed: list[str] | None, index: bytes | None) -> None:
        self.listed, self.index = listed, index

    def list(self, _suffixes: Any) -> list[Any]:
        if self.listed is None:
            raise StorageError("this server lists nothing")
        return [SimpleNamespace(name=name) for name in self.listed]

    def read(self, _name: str) -> bytes:
        if self.index is None:
            raise StorageNotFoundError("there is no index")
        return self.index

    def join(self, name: str) -> str:
        return f"folder/{name}"


def names(listed: list[str] | None, index: bytes | None) -> list[str]:
    return _log_names(FakeFolder(listed, index))  # type: ignore[arg-type]


def test_logs_that_are_listed_are_taken() -> None:
    assert names(["a.jsonl", "b.jsonl"], INDEX) == ["a.jsonl", "b.jsonl"]
    assert names(["a.jsonl"], None) == ["a.jsonl"]


def test_the_index_is_read_where_nothing_is_listed() -> None:
    assert names(None, INDEX) == ["indexed.jsonl"]
    assert names([], INDEX) == ["indexed.jsonl"]


def test_a_folder_that_can_neither_be_listed_nor_has_an_index_is_an_error() -> None:
    with pytest.raises(StorageError, match="this server lists nothing"):
        names(None, None)
    with pytest.raises(StorageError, match="this server lists nothing"):
        names(None, json.dumps({"version": 1, "logs": []}).encode())
    assert names([], None) == []


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"logs": 5, "version": 1}', b"\xff"])
def test_a_damaged_index_is_an_error(index: bytes) -> None:
    with pytest.raises(StorageError, match="not the index of a dataset"):
        names([], index)
