"""Images and the functions on them, in a module that workers can import: see distributed_work.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from quire import BaseDocument, DocumentBatch
from quire.storage import write_dataset
from quire.typing import NdArray, float32, uint8

SHAPE = (3, 64, 64)
WIDTH = 3 * 64 * 64
ROWS = 8192
CLASSES = 10


class Picture(BaseDocument):
    """An image of about 12 KiB, a label and a text."""

    image: NdArray[uint8, 3, 64, 64]
    label: int
    text: str


class Predicted(BaseDocument):
    """The scores of a model for an image."""

    scores: NdArray[float32, 10]


def make_data(folder: Path) -> None:
    """Write 100 MB of images as a dataset of eight files."""
    if folder.exists():
        return
    draw = np.random.default_rng(0)

    def pictures() -> Iterator[Picture]:
        for number in range(ROWS):
            image = draw.integers(0, 255, SHAPE, dtype=np.uint8)
            yield Picture(id=f"{number:06d}", image=image, label=number % CLASSES, text=f"picture {number}")

    write_dataset(pictures(), folder, shard_bytes=ROWS * WIDTH // 8, show_progress=False)


def invert_batch(batch: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    """Invert the images of a batch."""
    batch.image = 255 - batch.image
    return batch


def invert(picture: Picture) -> Picture:
    """Invert an image."""
    picture.image = 255 - picture.image
    return picture


def invert_column(batch: Any) -> Any:
    """Invert an Arrow column of fixed-size or variable-size binary values."""
    column = batch.column("image")
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    start = column.offset * WIDTH
    if not pa.types.is_fixed_size_binary(column.type):
        start = int(np.frombuffer(column.buffers()[1], np.int32)[column.offset])
    data = 255 - np.frombuffer(column.buffers()[-1], np.uint8)[start : start + len(column) * WIDTH]
    if pa.types.is_fixed_size_binary(column.type):
        values = pa.Array.from_buffers(column.type, len(column), [None, pa.py_buffer(data)])
    else:
        ends = np.arange(len(column) + 1, dtype=np.int32) * WIDTH
        values = pa.Array.from_buffers(pa.binary(), len(column), [None, pa.py_buffer(ends), pa.py_buffer(data)])
    return batch.set_column(batch.schema.get_field_index("image"), batch.schema.field("image"), values)


class Model:
    """A linear layer."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.layer: Any = torch.nn.Linear(WIDTH, CLASSES)

    def scores(self, images: Any) -> Any:
        """Return the scores of concatenated images."""
        import torch

        with torch.inference_mode():
            return self.layer(torch.from_numpy(images.reshape(-1, WIDTH)).float()).numpy()

    def __call__(self, batch: DocumentBatch[Picture]) -> DocumentBatch[Predicted]:
        """Return the scores of a batch."""
        return DocumentBatch[Predicted].from_columns({"id": batch.id, "scores": self.scores(batch.image)})


class Network(Model):
    """Five layers: pooling, and two linear layers with their activations."""

    def __init__(self) -> None:
        super().__init__()
        from torch import nn

        small = nn.Sequential(nn.Unflatten(1, SHAPE), nn.AvgPool2d(8), nn.Flatten())
        self.layer = nn.Sequential(*small, nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, CLASSES), nn.Softmax(1))


class Scoring:
    """A hand-written `mapInArrow` function that applies a model in batches of 128."""

    def __init__(self, kind: type[Model]) -> None:
        self.kind = kind

    def function(self) -> Any:
        """Return the function for `mapInArrow`."""
        return lambda batches: self.work(batches)  # noqa: PLW0108 - Spark looks for the signature of a function

    def work(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the scores of record batches."""
        model = self.kind()
        for batch in batches:
            column = batch.column("image")
            start = int(np.frombuffer(column.buffers()[1], np.int32)[column.offset])
            images = np.frombuffer(column.buffers()[2], np.uint8)[start : start + len(column) * WIDTH]
            for first in range(0, len(column), 128):
                scores = model.scores(images[first * WIDTH : (first + 128) * WIDTH])
                ends = np.arange(len(scores) + 1, dtype=np.int32) * CLASSES
                yield pa.record_batch({"scores": pa.ListArray.from_arrays(ends, scores.reshape(-1))})
