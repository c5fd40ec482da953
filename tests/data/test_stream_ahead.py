"""What is read ahead of a shuffled epoch: the runs of the window, once, and all rows come nevertheless."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument
from quire._lowlevel import addresses
from quire.data import StreamingDataset
from quire.storage import write_dataset
from quire.typing import NdArray, uint8

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")
ROWS, WIDTH = 4_200, 8_192


class Page(BaseDocument):
    number: int
    data: NdArray[uint8, WIDTH]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of about 17 MB, in record batches of 1 MiB."""
    folder = tmp_path_factory.mktemp("ahead") / "d"
    pages = (Page(number=i, data=np.full(WIDTH, i % 251, np.uint8)) for i in range(ROWS))
    write_dataset(pages, folder, document_type=Page, format="arrow", shard_bytes=17 << 20, group_bytes=1 << 20)
    return folder


def cold(folder: Path) -> None:
    """Let the system forget the files, where it can."""
    for path in folder.glob("*.arrow"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_every_row_comes_from_files_outside_the_page_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[Any, Any]]()
    read_ahead = addresses.read_ahead
    monkeypatch.setattr(
        "quire.storage._tensor_codecs.read_ahead", lambda *runs: (asked.append(runs), read_ahead(*runs))
    )
    cold(folder)
    dataset = StreamingDataset[Page](folder, batch_size=64, memory_bytes=8 << 20)
    assert 1 < ROWS / (dataset.order.block * dataset.order.window) < 10, "several windows"
    row_numbers = list[int]()
    for batch in dataset:
        row_numbers += batch.number.tolist()
        assert (batch.data == (batch.number % 251)[:, None]).all()
    assert sorted(row_numbers) == list(range(ROWS))
    sizes = sum(int(sizes.sum()) for _, sizes in asked)
    assert ROWS * WIDTH <= sizes < 1.2 * ROWS * WIDTH, "all that is there, and hardly anything twice"


def test_runs_across_record_batches_are_read_completely(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StreamingDataset[Page](folder, batch_size=64).stored._row_reader
    pages = set[int]()

    def note(addresses: Any, sizes: Any) -> None:
        for start, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
            pages.update(range(start, start + size, WIDTH))

    monkeypatch.setattr("quire.storage._tensor_codecs.read_ahead", note)
    reader.read_ahead(np.array([0, 120, 2_000]), np.array([10, 140, 2_010]))
    data = reader.layout.codecs[2]
    rows = reader.locate(np.r_[0:10, 120:140, 2_000:2_010])
    assert pages == set((rows.part(data.first + 1) + rows.positions * WIDTH).tolist())


def test_missing_shard_raises_when_its_rows_are_read(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "d"
    copy.mkdir()
    for path in folder.rglob("*"):
        target = copy / path.relative_to(folder)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            os.link(path, target)
    dataset = StreamingDataset[Page](copy, batch_size=64, on_error="skip", seed=1)
    sorted(copy.glob("*.arrow"))[1].unlink()
    row_numbers = [number for batch in dataset for number in batch.number.tolist()]
    assert 0 < len(row_numbers) < ROWS
    assert len(dataset.errors) == 1
