"""Large tensors in Arrow files begin at cache lines, whatever is stored before them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument, DocumentBatch
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, float32, uint8

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")


class Frame(BaseDocument):
    name: str
    image: NdArray[uint8, 3, 40, 40]
    note: str | None
    flow: NdArray[float32, 2, 32, 32]


def _frames(sizes: list[int]) -> DocumentBatch[Frame]:
    """Texts of these sizes, so that the columns before the tensors have any length."""
    rows = np.arange(len(sizes), dtype=np.float32)
    return DocumentBatch[Frame].from_columns(
        {
            "name": ["n" * size for size in sizes],
            "image": np.broadcast_to(rows.astype(np.uint8)[:, None, None, None], (len(sizes), 3, 40, 40)).copy(),
            "note": [None if size % 2 else "x" * size for size in sizes],
            "flow": np.broadcast_to(rows[:, None, None, None], (len(sizes), 2, 32, 32)).copy(),
        }
    )


def _places(folder: Path, column: str) -> list[int]:
    """Return where the column of each record batch begins in its file."""
    offsets = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.read_bytes()[:6] == b"ARROW1":
            reader = pa.ipc.open_file(pa.memory_map(str(path)))  # at the begin of a page
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            offsets += [batch.column(column).buffers()[1].address % 64 for batch in batches if len(batch)]
    return offsets


@given(sizes=st.lists(st.integers(0, 90), min_size=1, max_size=40))
def test_large_tensors_are_aligned_to_cache_lines(sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        frames = _frames(sizes)
        write_dataset([frames], Path(folder, "d"), format="arrow", group_bytes=120_000)
        places = _places(Path(folder, "d"), "flow")
        assert places == [0] * len(places)
        back = open_dataset(Path(folder, "d"), Frame).read()
        assert back.name == frames.name
        assert back.note == frames.note
        np.testing.assert_array_equal(back.image, frames.image)
        np.testing.assert_array_equal(back.flow, frames.flow)


def test_large_tensors_are_aligned_in_cached_copies_of_parquet_files(tmp_path: Path) -> None:
    write_dataset([_frames([3, 1, 4, 1, 5])], tmp_path / "d", format="parquet")
    dataset: Any = open_dataset(tmp_path / "d", Frame, cache=tmp_path / "cache")
    assert dataset[2].image[0, 0, 0] == 2
    places = _places(tmp_path / "cache", "flow")
    assert places
    assert set(places) == {0}


def test_small_columns_are_written_without_padding(tmp_path: Path) -> None:
    class Small(BaseDocument):
        number: int

    write_dataset([Small(number=n) for n in range(9)], tmp_path / "d", format="arrow")
    [path] = (tmp_path / "d").rglob("*.arrow")
    assert b"quire.padding" not in path.read_bytes()
