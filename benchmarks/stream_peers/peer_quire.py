"""quire: typed shards and StreamingDataset. A variant is 'format/shuffle/loop', as in 'arrow/block/direct'."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from protocol import Columns, Rows, Task, run
from torch.utils.data import DataLoader

from quire import BaseDocument, DocumentBatch
from quire.data import StreamingDataset
from quire.storage import write_dataset
from quire.typing import TorchTensor, float32, uint8


class Tensors(BaseDocument):
    """An image and a label."""

    id: ClassVar[None] = None
    row: int
    image: TorchTensor[uint8, 3, 64, 64]
    label: int


class Picture(Tensors):
    """An image, a label and a text."""

    text: str


class Meta(BaseDocument):
    """The nested document."""

    id: ClassVar[None] = None
    source: str
    ts: int
    tags: list[str]


class Document(BaseDocument):
    """A document with fields of every kind."""

    id: ClassVar[None] = None
    row: int
    image: TorchTensor[uint8, 3, 32, 32]
    emb: TorchTensor[float32, 128]
    caption: str
    label: int
    meta: Meta
    mask: TorchTensor[uint8, 32, 32] | None


class Sample(BaseDocument):
    """Features and a class."""

    id: ClassVar[None] = None
    row: int
    feat: TorchTensor[float32, 32]
    y: int


SCHEMAS: dict[str, type[BaseDocument]] = {
    "pictures": Picture,
    "pictures_60k": Picture,
    "large": Picture,
    "tensors": Tensors,
    "documents": Document,
    "table": Sample,
    "shards": Sample,
}
NESTED = ("source", "ts", "tags")


def prepare(task: Task, batches: Iterable[Columns]) -> Iterator[DocumentBatch[Any]]:
    """Yield typed batches, as a model or another dataset produces them."""
    schema = SCHEMAS[task.workload.name]
    for columns in batches:
        fields = {name: _tensor(values) for name, values in columns.items()}
        if schema is Document:
            fields["meta"] = DocumentBatch[Meta].from_columns({name: fields.pop(name) for name in NESTED})
            masks, present = fields.pop("mask"), fields.pop("has_mask").tolist()
            fields["mask"] = [mask if is_present else None for mask, is_present in zip(masks, present, strict=True)]
        yield DocumentBatch[schema].from_columns(fields)  # type: ignore[valid-type]


def _tensor(values: Any) -> Any:
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


def make(task: Task, batches: Iterable[DocumentBatch[Any]]) -> None:
    """Write shards of the default size, or of the rows of a shard if the workload has many."""
    schema, kind = SCHEMAS[task.workload.name], task.variant.split("/")[0]
    sizes = {}
    if task.workload.name == "shards":
        batches = (part for batch in batches for part in batch.batch(task.workload.shard_rows))
        sizes = {"shard_bytes": 1, "group_bytes": 200 * task.workload.shard_rows}  # more than one part, fewer than two
    durable = not task.variant.endswith("/unsynced")
    write_dataset(batches, task.folder, document_type=schema, format=kind, durable=durable, **sizes)


# --- read


def _dataset(task: Task) -> StreamingDataset[Any]:
    shuffle: Any = task.variant.split("/")[1] if task.shuffle else False
    kind = StreamingDataset[SCHEMAS[task.workload.name]]  # type: ignore[misc]
    options: Any = {"shuffle": shuffle, "seed": task.seed, "framework": "torch", "missing": "mask"}
    return kind(task.folder, batch_size=task.batch, **options)


def _batches(task: Task) -> Iterable[DocumentBatch[Any]]:
    """Return batches of this process (`direct`), of threads (`loader`), or of a DataLoader with workers."""
    dataset, loop = _dataset(task), task.variant.split("/")[2]
    if loop == "loader":
        return dataset.loader(prefetch=4, threads=task.workers)
    if task.workers:
        return DataLoader(dataset, batch_size=None, num_workers=task.workers)
    return dataset


def _columns(batch: DocumentBatch[Any]) -> Columns:
    """Read every column."""
    names = [name for name in type(batch).document_type.model_fields if name not in {"meta", "mask"}]
    columns = {name: batch[name] for name in names}
    if "meta" in type(batch).document_type.model_fields:
        columns |= {name: batch[f"meta.{name}"] for name in NESTED}
        columns |= {"mask": batch["mask"], "has_mask": batch.validity("mask")}
    if "y" in columns:
        columns["y"] = columns["y"].int()
    return columns


def read(task: Task) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch."""
    for batch in _batches(task):
        columns = _columns(batch)
        yield columns["row"].numpy(), columns


def take(task: Task) -> Callable[[Rows], Columns]:
    """Take rows by a list of numbers."""
    dataset = _dataset(task)
    return lambda rows: _columns(dataset[rows])


def resume(task: Task, stop: int) -> tuple[list[Rows], list[Rows], float, Any]:
    """Load the state, as JSON, into a new dataset."""
    dataset = _dataset(task)
    batches = iter(dataset)
    before = [np.array(next(batches)["row"]) for _ in range(stop)]
    state = json.dumps(dataset.state_dict())
    started = time.perf_counter()
    dataset = _dataset(task)
    dataset.load_state_dict(json.loads(state))
    batches = iter(dataset)
    after = [np.array(next(batches)["row"])]
    seconds = time.perf_counter() - started
    return before, after + [np.array(batch["row"]) for batch in batches], seconds, json.loads(state)


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
