"""Encoded images of other tools are read as encoded images, or as pixels, as the class says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quire import BaseDocument, DocumentArray, Image
from quire.data import StreamingDataset
from quire.errors import DecodeError, ShardError
from quire.media import to_image_bytes
from quire.storage import open_dataset
from quire.typing import ImageBytes, ImageUrl, NdArray, TorchTensor, uint8
from tests.media.sample_media import png_with_size

pytestmark = pytest.mark.needs("PIL", "pyarrow", "torch")

PICTURES = [np.full((8, 6, 3), 20 * number, np.uint8) for number in range(6)]
ENCODED = [to_image_bytes(picture) for picture in PICTURES]
PLAIN = pa.array(ENCODED, pa.binary())
COLUMNS = {
    "binary": PLAIN,
    "large binary": pa.array(ENCODED, pa.large_binary()),
    "bytes and path": pa.array([{"bytes": content, "path": f"{i}.png"} for i, content in enumerate(ENCODED)]),
    "bytes alone": pa.array([{"bytes": content} for content in ENCODED]),
}


class Encoded(BaseDocument):
    image: ImageBytes
    label: int


class Rows(BaseDocument):
    image: NdArray[uint8, 8, 6, 3]
    label: int


class AnySize(BaseDocument):
    image: NdArray[uint8, "height", "width", 3]
    label: int


class InFront(BaseDocument):
    image: TorchTensor[uint8, 3, 8, 6]
    label: int


class Whole(BaseDocument):
    image: Image
    label: int


class Optional(BaseDocument):
    image: ImageBytes | None = None


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


def _folder(path: Path, array: Any, labels: bool = True) -> Path:
    path.mkdir(exist_ok=True)
    columns = {"image": array, **({"label": list(range(len(array)))} if labels else {})}
    pq.write_table(pa.table(columns), path / "part-0.parquet")
    return path


@pytest.mark.parametrize("array", COLUMNS.values(), ids=COLUMNS)
def test_encoded_images_stay_encoded_and_load(tmp_path: Path, array: Any) -> None:
    documents = open_dataset(_folder(tmp_path / "rows", array), Encoded)[:].unstack()
    assert all(type(row.image) is ImageBytes for row in documents)
    assert [row.image for row in documents] == ENCODED
    assert all((row.image.load() == picture).all() for row, picture in zip(documents, PICTURES, strict=True))


@pytest.mark.parametrize("array", COLUMNS.values(), ids=COLUMNS)
def test_tensor_field_has_pixels(tmp_path: Path, array: Any) -> None:
    folder = _folder(tmp_path / "rows", array)
    for schema in (Rows, AnySize):
        documents = open_dataset(folder, schema)[:].unstack()
        assert all((row.image == picture).all() for row, picture in zip(documents, PICTURES, strict=True))
    documents = open_dataset(folder, InFront)[:].unstack()
    assert (documents[3].image.permute(1, 2, 0).numpy() == PICTURES[3]).all()


@pytest.mark.parametrize("array", COLUMNS.values(), ids=COLUMNS)
def test_document_field_has_the_bytes(tmp_path: Path, array: Any) -> None:
    documents = open_dataset(_folder(tmp_path / "rows", array), Whole)[:].unstack()
    assert [row.image.bytes_ for row in documents] == ENCODED


@pytest.mark.parametrize("array", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("schema", [Rows, AnySize])
def test_stream_batches_have_stacked_pixels(tmp_path: Path, array: Any, schema: Any) -> None:
    folder = _folder(tmp_path / "rows", array)
    batches = list(StreamingDataset[schema](folder, batch_size=3, shuffle=False))
    assert [tuple(batch.image.shape) for batch in batches] == [(3, 8, 6, 3)] * 2
    assert {str(batch.image.dtype) for batch in batches} == {"torch.uint8"}
    assert (batches[1].image[0].numpy() == PICTURES[3]).all()


def test_rows_without_an_image_are_none(tmp_path: Path) -> None:
    array = pa.array([{"bytes": ENCODED[0], "path": None}, None])
    documents = open_dataset(_folder(tmp_path / "rows", array, labels=False), Optional)[:].unstack()
    assert [row.image for row in documents] == [ENCODED[0], None]


def test_image_at_a_path_is_an_error(tmp_path: Path) -> None:
    array = pa.array([{"bytes": ENCODED[0], "path": "a"}, {"bytes": None, "path": "/etc/passwd"}])
    with pytest.raises(ShardError, match="Optional.image: some files are not in the data"):
        open_dataset(_folder(tmp_path / "rows", array, labels=False), Optional)[:]


def test_decompression_bomb_is_an_error(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "rows", pa.array([png_with_size(60_000, 60_000)]))
    with pytest.raises((ShardError, DecodeError), match="too large to be decoded"):
        open_dataset(folder, AnySize)[:]


def test_stored_media_are_plain_bytes_for_other_tools(tmp_path: Path) -> None:
    rows = DocumentArray[Encoded]([Encoded(image=content, label=0) for content in ENCODED])
    rows.save_parquet(tmp_path / "rows")
    [file] = (tmp_path / "rows").glob("*.parquet")
    assert pq.read_table(file)["image"].type == pa.binary()
    assert DocumentArray[Encoded].load_parquet(tmp_path / "rows") == rows


def test_url_fields_read_text_of_other_writers(tmp_path: Path) -> None:
    class Linked(BaseDocument):
        image: ImageUrl

    for array in (pa.array(["a.png", "b.png"]), pa.array(["a.png", "b.png"]).dictionary_encode()):
        documents = open_dataset(_folder(tmp_path / "rows", array, labels=False), Linked)[:].unstack()
        assert [type(row.image) for row in documents] == [ImageUrl] * 2
        assert [row.image for row in documents] == ["a.png", "b.png"]
