"""Push and pull of batches: the same files that arrays write and read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DocumentTypeError, StorageNotFoundError
from quire.files import RemoteOptions
from quire.typing import NdArray
from tests.files.upload_server import UploadServer, run_upload_server


class Passage(BaseDocument):
    text: str
    embedding: NdArray[4096]


class Other(BaseDocument):
    text: str


def passages(count: int = 1500, start: int = 0) -> DocumentBatch[Passage]:
    rows = np.random.default_rng(0).random((50, 4096), np.float32)
    places = range(start, start + count)
    names = {"id": [str(i) for i in places], "text": [f"passage {i}" for i in places]}
    return DocumentBatch[Passage].from_columns({**names, "embedding": rows[[i % 50 for i in places]]})


@pytest.fixture
def site() -> Iterator[UploadServer]:
    with run_upload_server() as site:
        yield site


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["plain", "packed.protobuf.gz"])
def test_push_writes_the_file_of_save_binary(site: UploadServer, tmp_path: Path, name: str, workers: int) -> None:
    batch = passages(700)
    batch.push(f"{site.url}/{name}", num_workers=workers)
    batch.save_binary(tmp_path / name)
    assert site.files[f"/data/{name}"] == (tmp_path / name).read_bytes()
    assert DocumentBatch[Passage].pull(f"{site.url}/{name}").identical(batch)
    assert DocumentBatch.pull(f"{site.url}/{name}").identical(batch)


@pytest.mark.needs("fsspec")
@pytest.mark.parametrize("form", ["path", "memory://"])
def test_batches_and_arrays_read_files_of_each_other(tmp_path: Path, form: str) -> None:
    url = str(tmp_path / "docs") if form == "path" else f"memory:/{tmp_path}/docs"
    batch = passages(300)
    batch.push(url)
    assert DocumentArray[Passage].pull(url).identical(batch.unstack())
    batch.unstack().push(url)
    assert DocumentBatch[Passage].pull(url).identical(batch)


def test_push_stream_and_pull_stream_transfer_block_by_block(site: UploadServer) -> None:
    taken: list[int] = []

    def parts() -> Iterator[DocumentBatch[Passage]]:
        for start in range(0, 3000, 1000):
            taken.append(start)
            yield passages(1000, start)

    DocumentBatch[Passage].push_stream(parts(), f"{site.url}/docs", num_workers=2)
    result = list(DocumentBatch[Passage].pull_stream(f"{site.url}/docs"))
    assert taken == [0, 1000, 2000]
    assert len(result) > 3
    assert DocumentBatch[Passage].concat(result).identical(passages(3000))


def test_push_stream_restarts_after_busy_server(site: UploadServer) -> None:
    site.failures, site.status = 2, 503
    parts = (passages(500, start) for start in (0, 500))
    DocumentBatch[Passage].push_stream(parts, f"{site.url}/docs", remote=RemoteOptions(retries=3, timeout=5))
    assert DocumentBatch[Passage].pull(f"{site.url}/docs").identical(passages(1000))


def test_push_of_empty_batch_writes_a_file(tmp_path: Path) -> None:
    passages(0).push(tmp_path / "docs")
    assert len(DocumentBatch[Passage].pull(tmp_path / "docs")) == 0
    DocumentBatch[Passage].push_stream([], tmp_path / "docs")
    assert list(DocumentBatch[Passage].pull_stream(tmp_path / "docs")) == []


def test_push_stream_rejects_other_batches(tmp_path: Path) -> None:
    other = DocumentBatch[Other].from_columns({"text": ["a"]})
    with pytest.raises(DocumentTypeError, match=r"expected DocumentBatch\[Passage\], got DocumentBatch\[Other\]"):
        DocumentBatch[Passage].push_stream([passages(2), other], tmp_path / "docs")  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="push has no option 'worker'"):
        passages(2).push(tmp_path / "docs", worker=3)  # type: ignore[call-arg]
    with pytest.raises(StorageNotFoundError, match="none: there is no such file"):
        DocumentBatch[Passage].pull(tmp_path / "none")
