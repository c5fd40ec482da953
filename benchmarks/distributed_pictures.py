"""Pictures, and what is done to them, in a module that workers find: see distributed_work.py."""

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
    """About 12 KiB."""

    image: NdArray[uint8, 3, 64, 64]
    label: int
    text: str


class Predicted(BaseDocument):
    """What a model says of a picture."""

    scores: NdArray[float32, 10]


def make_data(folder: Path) -> None:
    """100 MB of pictures, as a dataset in eight files."""
    if folder.exists():
        return
    draw = np.random.default_rng(0)

    def pictures() -> Iterator[Picture]:
        for number in range(ROWS):
            image = draw.integers(0, 255, SHAPE, dtype=np.uint8)
            yield Picture(id=f"{number:06d}", image=image, label=number % CLASSES, text=f"picture {number}")

    write_dataset(pictures(), folder, shard_bytes=ROWS * WIDTH // 8, show_progress=False)


def inverted(batch: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    """The negatives."""
    batch.image = 255 - batch.image
    return batch


def inverted_one(picture: Picture) -> Picture:
    """The negative."""
    picture.image = 255 - picture.image
    return picture


def inverted_column(batch: Any) -> Any:
    """The same, by hand, on Arrow data: binary, of one size or of any."""
    column = batch.column("image")
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    start = column.offset * WIDTH
    if not pa.types.is_fixed_size_binary(column.type):
        start = int(np.frombuffer(column.buffers()[1], np.int32)[column.offset])
    data = 255 - np.frombuffer(column.buffers()[-1], np.uint8)[start : start + len(column) * WIDTH]
    if pa.types.is_fixed_size_binary(column.type):
        made = pa.Array.from_buffers(column.type, len(column), [None, pa.py_buffer(data)])
    else:
        ends = np.arange(len(column) + 1, dtype=np.int32) * WIDTH
        made = pa.Array.from_buffers(pa.binary(), len(column), [None, pa.py_buffer(ends), pa.py_buffer(data)])
    return batch.set_column(batch.schema.get_field_index("image"), batch.schema.field("image"), made)


class Model:
    """A linear layer."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.layer: Any = torch.nn.Linear(WIDTH, CLASSES)

    def scores(self, images: Any) -> Any:
        """Of pictures, one behind the other."""
        import torch

        with torch.inference_mode():
            return self.layer(torch.from_numpy(images.reshape(-1, WIDTH)).float()).numpy()

    def __call__(self, batch: DocumentBatch[Picture]) -> DocumentBatch[Predicted]:
        """The scores of a batch."""
        return DocumentBatch[Predicted].from_columns({"id": batch.id, "scores": self.scores(batch.image)})


class Network(Model):
    """Five layers: the picture made small, and two of neurons."""

    def __init__(self) -> None:
        super().__init__()
        from torch import nn

        small = nn.Sequential(nn.Unflatten(1, SHAPE), nn.AvgPool2d(8), nn.Flatten())
        self.layer = nn.Sequential(*small, nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, CLASSES), nn.Softmax(1))


class Scoring:
    """A model by hand, on what `mapInArrow` gives: binary, in batches of 128."""

    def __init__(self, kind: type[Model]) -> None:
        self.kind = kind

    def function(self) -> Any:
        """As `mapInArrow` takes it."""
        return lambda batches: self.work(batches)  # noqa: PLW0108 - Spark looks for the signature of a function

    def work(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The scores of record batches."""
        model = self.kind()
        for batch in batches:
            column = batch.column("image")
            start = int(np.frombuffer(column.buffers()[1], np.int32)[column.offset])
            images = np.frombuffer(column.buffers()[2], np.uint8)[start : start + len(column) * WIDTH]
            for first in range(0, len(column), 128):
                scores = model.scores(images[first * WIDTH : (first + 128) * WIDTH])
                ends = np.arange(len(scores) + 1, dtype=np.int32) * CLASSES
                yield pa.record_batch({"scores": pa.ListArray.from_arrays(ends, scores.reshape(-1))})
