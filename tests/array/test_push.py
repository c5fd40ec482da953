"""Push and pull to local paths and stores: files are written completely or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.errors import DecodeError, StorageError, StorageNotFoundError
from quire.files import RemoteOptions
from quire.typing import NdArray
from tests.files.faulty_store import FaultyFileSystem, faulty_store

pytestmark = pytest.mark.needs("fsspec")


class Passage(BaseDocument):
    text: str
    embedding: NdArray[4096]


SOON = RemoteOptions(retries=3, timeout=5, deadline=20)


def passages(count: int = 1500) -> Iterator[Passage]:
    rows = np.random.default_rng(0).random((50, 4096), np.float32)
    return (Passage(id=str(i), text=f"passage {i}", embedding=rows[i % 50]) for i in range(count))


@pytest.fixture(scope="module")
def docs() -> DocumentArray[Passage]:
    return DocumentArray[Passage](passages())


@pytest.fixture
def faulty() -> Iterator[type[FaultyFileSystem]]:
    with faulty_store() as store:
        yield store


def broken() -> Iterator[Passage]:
    yield from passages()
    raise LookupError("no more")


@pytest.mark.parametrize("form", ["path", "text", "file://", "memory://"])
def test_push_and_pull_round_trip_every_kind_of_address(
    docs: DocumentArray[Passage], tmp_path: Path, form: str
) -> None:
    path = tmp_path / "new" / "docs.gz"
    url = {"path": path, "text": str(path), "file://": path.as_uri(), "memory://": f"memory:/{path}"}[form]
    few = docs[:200]
    few.push(url)
    assert DocumentArray[Passage].pull(url).identical(few)
    assert [doc.id for doc in DocumentArray[Passage].pull_stream(url)] == few.id
    DocumentArray[Passage].push_stream(iter(few[:7]), url)
    assert DocumentArray.pull(url).identical(few[:7])
    if form != "memory://":
        assert DocumentArray[Passage].load_binary(path).identical(few[:7])


def test_push_accepts_relative_path_and_home(
    docs: DocumentArray[Passage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    docs[:3].push("~/docs")
    assert DocumentArray[Passage].pull("docs").identical(docs[:3])


def test_push_of_failing_source_keeps_old_file(docs: DocumentArray[Passage], tmp_path: Path) -> None:
    for url in (str(tmp_path / "docs"), f"memory:/{tmp_path}/docs"):
        docs[:3].push(url)
        with pytest.raises(LookupError, match="no more"):
            DocumentArray[Passage].push_stream(broken(), url)
        assert DocumentArray[Passage].pull(url).identical(docs[:3])
    assert [path.name for path in tmp_path.iterdir()] == ["docs"]


def test_push_stream_rejects_other_classes(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Passage"):
        DocumentArray[Passage].push_stream(["text"], tmp_path / "docs")  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_push_error_names_path_that_cannot_be_written(docs: DocumentArray[Passage], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        docs[:3].push(tmp_path / "file" / "docs")
    with pytest.raises(StorageError, match="docs"):
        (tmp_path / "docs").mkdir()
        docs[:3].push(tmp_path / "docs")


def test_pull_error_names_missing_or_invalid_file(tmp_path: Path) -> None:
    with pytest.raises(StorageNotFoundError, match="none: there is no such file"):
        DocumentArray[Passage].pull(tmp_path / "none")
    with pytest.raises(StorageNotFoundError, match="memory://none: there is no such file"):
        DocumentArray[Passage].pull("memory://none")
    (tmp_path / "text").write_text("not documents, but a text " * 9)
    with pytest.raises(DecodeError, match="text: this is not a stream"):
        DocumentArray[Passage].pull(tmp_path / "text")
    with pytest.raises(StorageError, match="this is a folder"):
        DocumentArray[Passage]().push("memory://folder/")


# --- a store that fails on request


def files_of(store: type[FaultyFileSystem]) -> list[str]:
    return sorted(store.store)


def test_push_retries_failed_move(docs: DocumentArray[Passage], faulty: type[FaultyFileSystem]) -> None:
    faulty.plan["mv"] = [OSError("not now"), OSError("not now")]
    docs.push("faulty://folder/docs", remote=SOON)
    assert files_of(faulty) == ["faulty://folder/docs"]
    assert DocumentArray[Passage].pull("faulty://folder/docs").identical(docs)


def test_push_survives_lost_answer_of_move(docs: DocumentArray[Passage], faulty: type[FaultyFileSystem]) -> None:
    faulty.after["mv"] = [OSError("the line is dead")]
    DocumentArray[Passage].push_stream(iter(docs), "faulty://folder/docs", remote=SOON)
    assert files_of(faulty) == ["faulty://folder/docs"]
    assert DocumentArray[Passage].pull("faulty://folder/docs").identical(docs)


def test_push_does_not_retry_refusal_and_leaves_no_file(
    docs: DocumentArray[Passage], faulty: type[FaultyFileSystem]
) -> None:
    faulty.plan["mv"] = [PermissionError("not you")]
    with pytest.raises(StorageError, match="faulty://folder/docs: writing the file is not possible .*not you"):
        docs.push("faulty://folder/docs", remote=SOON)
    assert files_of(faulty) == []


def test_push_gives_up_on_failing_store_and_leaves_no_file(
    docs: DocumentArray[Passage], faulty: type[FaultyFileSystem]
) -> None:
    faulty.plan["mv"] = [OSError("not now")] * 9
    with pytest.raises(StorageError, match="tried 3 times"):
        docs[:9].push("faulty://folder/docs", remote=RemoteOptions(retries=2, timeout=5))
    assert files_of(faulty) == []


def test_push_times_out_on_hanging_store(docs: DocumentArray[Passage], faulty: type[FaultyFileSystem]) -> None:
    faulty.hanging["makedirs"] = threading.Event()
    with pytest.raises(StorageError, match="no answer within"):
        docs[:9].push("faulty://folder/docs", remote=RemoteOptions(retries=0, timeout=0.2))
    faulty.hanging.pop("makedirs").set()
    faulty.plan["cat_file"] = [OSError("not now")]
    docs[:9].push("faulty://folder/docs", remote=SOON)
    assert DocumentArray[Passage].pull("faulty://folder/docs", remote=SOON).identical(docs[:9])
