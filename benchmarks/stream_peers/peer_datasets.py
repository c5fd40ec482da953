"""Hugging Face datasets: an Arrow folder with typed features; variants are ways to read it, or a hand-written column.

- `rows`: torch's format and DataLoader as its documentation has them;
- `batches`: the same with a batch sampler, so that a batch is one lookup;
- `iterable`: as an iterable dataset with a shuffle buffer;
- `binary`: tensors as one binary column, which the user cuts out by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Array2D, Array3D, Features, List, Value
from protocol import Columns, Rows, Task, run
from rows import rows_of, stack_rows
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

FEATURES = {
    "row": Value("int64"),
    "image": Array3D((3, 64, 64), "uint8"),
    "label": Value("int64"),
    "text": Value("string"),
    "emb": List(Value("float32"), length=128),
    "caption": Value("string"),
    "meta": {"source": Value("string"), "ts": Value("int64"), "tags": List(Value("string"))},
    "mask": Array2D((32, 32), "uint8"),
    "feat": List(Value("float32"), length=32),
    "y": Value("int32"),
}
TENSORS = ("image", "emb", "mask", "feat")
SHAPES = {"emb": (128,), "mask": (32, 32), "feat": (32,)}
BUFFER = 10_000


def make(task: Task, batches: Iterable[Columns]) -> None:
    """Write with `from_generator` and `save_to_disk`, with the number of shards of the workload."""
    first, binary = next(rows_of(task.workload.batches(1))), task.variant == "binary"
    features = {name: Value("binary") if binary and name in TENSORS else FEATURES[name] for name in first}
    if task.workload.name == "documents" and not binary:
        features["image"] = Array3D((3, 32, 32), "uint8")
    made = datasets.Dataset.from_generator(
        _packed if binary else rows_of,
        gen_kwargs={"batches": list(batches)},
        features=Features(features),
        cache_dir=str(task.folder) + ".cache",
    )
    made.save_to_disk(str(task.folder), num_shards=task.workload.shards)


def _packed(batches: list[Columns]) -> Iterator[dict[str, Any]]:
    for row in rows_of(batches):
        yield {name: value.tobytes() if name in TENSORS and value is not None else value for name, value in row.items()}


# --- read


def _open(task: Task) -> datasets.Dataset:
    dataset = datasets.load_from_disk(str(task.folder))
    return dataset if task.variant == "binary" else dataset.with_format("torch")


def read(task: Task) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch."""
    for columns in WAYS[task.variant](task):
        yield columns["row"].numpy(), columns


def _rows(task: Task) -> Iterator[Columns]:
    collate = _stack if task.workload.name == "documents" else None
    random = torch.Generator().manual_seed(task.seed)
    loader = DataLoader(
        _open(task),
        batch_size=task.batch,
        shuffle=task.shuffle,
        num_workers=task.workers,
        collate_fn=collate,
        generator=random,
    )
    yield from map(_narrow, loader)


def _stack(rows: list[dict[str, Any]]) -> Columns:
    columns = stack_rows([{**row, "meta": {**row["meta"], "tags": list(row["meta"]["tags"])}} for row in rows])
    return {**columns, **_present([row["mask"] for row in rows])}


def _present(masks: Any) -> Columns:
    """Its torch format converts a missing array to NaN, and therefore the others to float32."""
    stacked = masks if isinstance(masks, torch.Tensor) else torch.stack(list(masks))
    has_mask = ~stacked[:, 0, 0].isnan()
    return {"has_mask": has_mask, "mask": stacked.nan_to_num()}


def _batches(task: Task) -> Iterator[Columns]:
    dataset = _open(task)
    random = torch.Generator().manual_seed(task.seed)
    order: Any = RandomSampler(dataset, generator=random) if task.shuffle else SequentialSampler(dataset)
    sampler = BatchSampler(order, task.batch, drop_last=False)
    loader = DataLoader(
        dataset, sampler=sampler, batch_size=None, num_workers=task.workers, collate_fn=CONVERT[task.variant]
    )
    yield from loader


def _iterable(task: Task) -> Iterator[Columns]:
    dataset = datasets.load_from_disk(str(task.folder)).to_iterable_dataset(num_shards=max(4, task.workers))
    if task.shuffle:
        dataset = dataset.shuffle(seed=task.seed, buffer_size=BUFFER)
    collate = _stack if task.workload.name == "documents" else None
    loader = DataLoader(
        dataset.with_format("torch"), batch_size=task.batch, num_workers=task.workers, collate_fn=collate
    )
    yield from map(_narrow, loader)


def _narrow(columns: Columns) -> Columns:
    """Its torch format converts every integer to int64."""
    for name, dtype in (("image", torch.uint8), ("mask", torch.uint8), ("y", torch.int32)):
        if name in columns:
            columns[name] = columns[name].to(dtype)
    return columns


def _formatted(columns: Columns) -> Columns:
    """Return a batch in torch format."""
    if "meta" in columns:
        meta, masks = columns.pop("meta"), columns.pop("mask")
        columns["source"] = [value["source"] for value in meta]
        columns["ts"] = torch.stack([value["ts"] for value in meta])
        columns["tags"] = [list(value["tags"]) for value in meta]
        columns |= _present(masks)
    return _narrow(columns)


def _unpacked(columns: Columns) -> Columns:
    """Return a batch whose tensors are lists of bytes."""
    made = {name: torch.tensor(values) for name, values in columns.items() if isinstance(values[0], int)}
    made |= {name: values for name, values in columns.items() if isinstance(values[0], str)}
    for name in ("image", "emb", "feat"):
        if name in columns:
            made[name] = _cut(name, columns[name])
    if "y" in made:
        made["y"] = made["y"].int()
    if "meta" in columns:
        made["source"] = [value["source"] for value in columns["meta"]]
        made["ts"] = torch.tensor([value["ts"] for value in columns["meta"]])
        made["tags"] = [value["tags"] for value in columns["meta"]]
        made["has_mask"] = torch.tensor([mask is not None for mask in columns["mask"]])
        made["mask"] = _cut("mask", [mask or bytes(1024) for mask in columns["mask"]])
    return made


def _cut(name: str, values: list[bytes]) -> torch.Tensor:
    dtype = np.uint8 if name in {"image", "mask"} else np.float32
    shape = SHAPES.get(name) or ((3, 64, 64) if len(values[0]) == 12288 else (3, 32, 32))
    return torch.from_numpy(np.frombuffer(bytearray(b"".join(values)), dtype).reshape(-1, *shape))


WAYS: dict[str, Callable[[Task], Iterator[Columns]]] = {
    "rows": _rows,
    "batches": _batches,
    "iterable": _iterable,
    "binary": _batches,
}
CONVERT: dict[str, Callable[[Columns], Columns]] = {"batches": _formatted, "binary": _unpacked}


def take(task: Task) -> Callable[[Rows], Columns]:
    """Take rows by a list of numbers; `shuffled` reads a shuffled dataset through its index table."""
    dataset = _open(task)
    if task.variant != "shuffled":
        convert = CONVERT[task.variant]
        return lambda rows: convert(dataset[rows.tolist()])
    shuffled = dataset.shuffle(seed=0)
    places = np.argsort(np.asarray(shuffled._indices["indices"]))  # the position of each row, so that it can be checked
    return lambda rows: _formatted(shuffled[places[rows].tolist()])


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
