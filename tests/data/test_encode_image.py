"""`encode_image`: in datasets, in shards, and as a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset, decode_image, encode_image
from quire.errors import EncodeError, OptionError, SchemaError
from quire.typing import NdArray, uint8
from tests.data.sample_pictures import MaybePhoto, Photo, photos, pixels

pytestmark = pytest.mark.needs("PIL")


class Pixels(BaseDocument):
    number: int
    image: NdArray[uint8, 3, 24, 32] | None = None


def pixel_rows(count: int) -> list[Pixels]:
    return [Pixels(number=n, image=pixels(32, 24, n).transpose(2, 0, 1)) for n in range(count)]


def test_lossless_formats_round_trip() -> None:
    rows = np.stack([row.image for row in pixel_rows(5)])
    for image_format in ("png", "bmp", "tiff"):
        contents = encode_image(image_format)(rows)
        assert np.array_equal(decode_image((24, 32))(contents, "numpy"), rows)
    last = encode_image("png", layout="HWC")(rows.transpose(0, 2, 3, 1))
    assert np.array_equal(decode_image((24, 32))(last, "numpy"), rows)
    grey = encode_image("jpeg")(rows[:, :1])
    assert decode_image((24, 32), color="L")(grey, "numpy").shape == (5, 1, 24, 32)


def test_quality_trades_size_for_error() -> None:
    rows = np.stack([row.image for row in pixel_rows(3)])
    for image_format in ("jpeg", "webp"):
        low, high = encode_image(image_format, quality=10)(rows), encode_image(image_format, quality=95)(rows)
        assert sum(map(len, low)) < sum(map(len, high))
        errors = [np.abs(decode_image((24, 32))(c, "numpy").astype(int) - rows).mean() for c in (low, high)]
        assert errors[1] < errors[0]


def test_step_of_a_dataset_validates_as_output() -> None:
    documents = pixel_rows(4)
    dataset = MultiModalDataset[Pixels](documents, {"image": encode_image("png")}, output=MaybePhoto)
    batch = dataset.__getitems__(range(4))
    assert batch.document_type is MaybePhoto
    expected = np.stack([document.image for document in documents])
    assert np.array_equal(decode_image((24, 32))(batch.image, "numpy"), expected)
    assert MultiModalDataset[Pixels]([Pixels(number=0)], {"image": encode_image()}).__getitems__([0]).image == [None]


@pytest.mark.needs("pyarrow", "fsspec", "xxhash")
def test_map_batch_of_shards_decodes_and_encodes() -> None:
    from quire.distributed import DocumentShards

    def shrink(batch: DocumentBatch[Photo]) -> DocumentArray[Photo]:
        small = decode_image(16, layout="HWC")(batch.image, "numpy")
        contents = encode_image("png", layout="HWC")(small)
        return DocumentArray[Photo](
            Photo(number=int(number), image=content) for number, content in zip(batch.number, contents, strict=True)
        )

    documents = photos(10)
    shards = DocumentShards[Photo].from_documents(documents, engine="local").map_batch(shrink, 4)
    result = {photo.number: photo.image for photo in shards.collect()}
    expected = decode_image(16)([photo.image for photo in documents], "numpy")
    assert np.array_equal(decode_image(16)([result[n] for n in range(10)], "numpy"), expected)


@pytest.mark.needs("pyarrow", "fsspec", "xxhash")
def test_partitions_encode_into_a_dataset_in_parallel(tmp_path: Path) -> None:
    from quire.distributed import DocumentShards
    from quire.storage import open_dataset

    def shrink(batch: DocumentBatch[Photo]) -> DocumentArray[Photo]:
        contents = encode_image("webp", quality=90, threads=2)(decode_image(16, threads=2)(batch.image, "numpy"))
        return DocumentArray[Photo](
            Photo(number=int(number), image=content) for number, content in zip(batch.number, contents, strict=True)
        )

    documents = photos(12)
    shards = DocumentShards[Photo].from_documents(documents, engine="local").map_batch(shrink, 4)
    shards.write_dataset(tmp_path / "small")
    stored = {photo.number: photo.image for photo in open_dataset(tmp_path / "small", Photo)}
    expected = encode_image("webp", quality=90, threads=1)(decode_image(16)([d.image for d in documents], "numpy"))
    assert [stored[number] for number in range(12)] == expected


def test_errors_name_the_row() -> None:
    images: list[Any] = [np.zeros((3, 8, 8), np.uint8), np.zeros((3, 8, 8), np.float32)]
    with pytest.raises(EncodeError, match=r"encode_image: value 1: an image is uint8.*float32"):
        encode_image()(images)
    with pytest.raises(SchemaError, match="encodes tensors"):
        MultiModalDataset[Photo](photos(1), {"number": encode_image()})
    for options in ({"quality": 0}, {"layout": "WHC"}):
        with pytest.raises(OptionError, match="encode_image"):
            encode_image(**options)
    with pytest.raises(EncodeError, match="not a format"):
        encode_image("mp3")
