"""Saving and loading arrays and batches as Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quire import DocumentArray, DocumentBatch
from quire.errors import EncodeError, OptionError, StorageError, StorageNotFoundError
from tests.codec.round_trips import exact
from tests.storage.sample_documents import Meta, Photo, photos
from tests.strategies import Leaf

pytestmark = pytest.mark.needs("pyarrow")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("name", ["photos.parquet", "photos"])
@pytest.mark.parametrize("kind", [str, Path], ids=["text", "path"])
def test_arrays_and_batches_round_trip(tmp_path: Path, name: str, kind: Any) -> None:
    documents = photos(20)
    documents.save_parquet(kind(tmp_path / "a" / name))
    assert exact(DocumentArray[Photo].load_parquet(kind(tmp_path / "a" / name)), documents)
    batch = documents.stack(shapes="ragged")
    batch.save_parquet(kind(tmp_path / "b" / name))
    result = DocumentBatch[Photo].load_parquet(kind(tmp_path / "b" / name))
    assert isinstance(result, DocumentBatch[Photo])
    assert exact(result.unstack(), documents)


def test_parquet_suffix_writes_one_plain_file(tmp_path: Path) -> None:
    photos(5).save_parquet(tmp_path / "photos.parquet", group_bytes=500)
    assert list(tmp_path.iterdir()) == [tmp_path / "photos.parquet"]
    assert pq.read_table(tmp_path / "photos.parquet")["number"].to_pylist() == [0, 1, 2, 3, 4]
    assert pq.read_metadata(tmp_path / "photos.parquet").num_row_groups > 1
    photos(2).save_parquet(tmp_path / "photos.parquet")
    assert len(DocumentArray[Photo].load_parquet(tmp_path / "photos.parquet")) == 2


def test_file_name_without_a_folder_is_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    photos(2).save_parquet("photos.parquet")
    assert len(DocumentArray[Photo].load_parquet("photos.parquet")) == 2


def test_path_without_a_suffix_is_a_dataset(tmp_path: Path) -> None:
    photos(5).save_parquet(tmp_path / "d")
    with pytest.raises(StorageError, match="mode="):
        photos(5).save_parquet(tmp_path / "d")
    photos(5, 5).save_parquet(tmp_path / "d", mode="append")
    assert len(DocumentArray[Photo].load_parquet(tmp_path / "d")) == 10


def test_columns_and_rows_are_selected(tmp_path: Path) -> None:
    photos(10).save_parquet(tmp_path / "photos.parquet", compression={"image": "zstd"})
    batch = DocumentBatch[Photo].load_parquet(
        tmp_path / "photos.parquet", columns=["number"], where={"meta.stamp": {"$gt": 70}}
    )
    assert batch.number.tolist() == [8, 9]


def test_untyped_array_has_the_class_of_the_file(tmp_path: Path) -> None:
    DocumentArray(list(photos(3))).save_parquet(tmp_path / "photos.parquet")
    batch = DocumentArray.load_parquet(tmp_path / "photos.parquet")
    assert isinstance(batch, DocumentArray[Photo])
    assert len(batch) == 3


def test_empty_array_round_trips(tmp_path: Path) -> None:
    for name in ("none.parquet", "none"):
        DocumentArray[Meta]([]).save_parquet(tmp_path / name)
        assert len(DocumentArray[Meta].load_parquet(tmp_path / name)) == 0


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "leaves.parquet"
    DocumentArray[Leaf]([Leaf(text="a")]).save_parquet(path)
    before = path.read_bytes()
    with pytest.raises(EncodeError, match="Leaf.number"):
        DocumentArray[Leaf]([Leaf(text="b"), Leaf(text="c", number=2**64)]).save_parquet(path)
    with pytest.raises(OptionError, match="folders"):
        DocumentArray[Leaf]([Leaf(text="b")]).save_parquet(path, mode="append")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageNotFoundError):
        DocumentArray[Leaf].load_parquet(tmp_path / "missing.parquet")
