"""Run one program on three engines: `python examples/shards.py local`, `... ray`, `... spark`."""

from __future__ import annotations

import sys
import tempfile

import numpy as np

from quire import BaseDocument, DocumentBatch
from quire.distributed import DocumentShards
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, float16, uint8


class Photo(BaseDocument):
    """An image and its place."""

    pixels: NdArray[uint8, 32, 32, 3]
    place: str


class Feature(BaseDocument):
    """The output of a model."""

    place: str
    vector: NdArray[float16, 3]


def photos(number: int) -> list[Photo]:
    """Create random photos."""
    random = np.random.default_rng(0)
    shots = random.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8)
    return [Photo(id=f"{i:04d}", pixels=shot, place=("Bath", "Cork", "Ely")[i % 3]) for i, shot in enumerate(shots)]


def describe(batch: DocumentBatch[Photo], scale: float) -> DocumentBatch[Feature]:
    """Return the mean colour of each photo, computed on columns."""
    vectors = (batch.pixels.mean(axis=(1, 2)) / scale).astype(np.float16)
    return DocumentBatch[Feature].from_columns({"id": batch.id, "place": batch.place, "vector": vectors})


def main(engine: str, folder: str) -> dict[str, int]:
    """Read, filter, compute and write; return a checksum per document."""
    write_dataset(photos(600), f"{folder}/photos", document_type=Photo)
    shards = DocumentShards[Photo].read_parquet(f"{folder}/photos", num_partitions=4, engine=engine)
    features = shards.filter(lambda photo: photo.pixels[0, 0, 0] < 128).map_batch(describe, 64, scale=255.0)
    train, test = features.split(0.8, 0.2)
    train.write_dataset(f"{folder}/train")
    print(f"{engine}: {len(train)} documents for training, {len(test)} for testing, places {test.unique('place')}")
    rows = open_dataset(f"{folder}/train", Feature).read()
    return dict(zip(rows.id, rows.vector.view(np.uint16).sum(axis=1).tolist(), strict=True))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(sys.argv[1] if len(sys.argv) > 1 else "local", place)
