"""Measure the memory of forked DataLoader workers over several epochs.

    python benchmarks/train.py --rows memory

Each contestant runs in a fresh process: it creates its dataset, forks the workers once (`persistent_workers`), and
iterates in random order. The results are the unique bytes of the workers (USS: private pages, clean and dirty), summed,
after their first batch and after every epoch, and the resident bytes (RSS), which also count shared pages. A worker
should not grow; one that reads Python objects writes their reference counts, and thereby copies their pages.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from results import Section
from torch.utils.data import DataLoader, Dataset

from quire import BaseDocument
from quire.data import MultiModalDataset
from quire.typing import TorchTensor, float32

_MIB = 1024
DOCUMENTS, WORKERS, EPOCHS = 200_000, 4, 3


class Caption(BaseDocument):
    """A nested document."""

    text: str


class Picture(BaseDocument):
    """A training document with a vector, a label and texts."""

    vector: TorchTensor[float32, 16]
    label: int
    name: str
    caption: Caption


class PlainRows(Dataset[dict[str, Any]]):
    """A hand-written dataset over a list of dicts."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def rows(number: int) -> Iterator[dict[str, Any]]:
    """Yield the fields of the documents."""
    for i in range(number):
        text = f"a caption of some words about picture number {i}"
        yield {"vector": torch.full((16,), float(i)), "label": i, "name": f"picture {i}", "caption": {"text": text}}


def quire_loader(number: int, options: dict[str, Any]) -> DataLoader[Any]:
    """Return a loader of documents, which are stored as columns."""
    dataset = MultiModalDataset[Picture](Picture(**row) for row in rows(number))
    return DataLoader(dataset, collate_fn=MultiModalDataset[Picture].collate_fn, **options)


def plain_loader(number: int, options: dict[str, Any]) -> DataLoader[Any]:
    """Return a loader of a list of dicts, collated by torch."""
    return DataLoader(PlainRows(list(rows(number))), **options)


CONTESTANTS: dict[str, Callable[[int, dict[str, Any]], DataLoader[Any]]] = {
    "quire": quire_loader,
    "list of dicts": plain_loader,
}


def memory(pids: list[int]) -> tuple[float, float]:
    """Return the unique and the resident MiB of processes, summed."""
    unique = resident = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size = line.split()[:2]
            unique += int(size) if name in ("Private_Clean:", "Private_Dirty:") else 0
            resident += int(size) if name == "Rss:" else 0
    return unique / _MIB, resident / _MIB


def measure_workers(name: str) -> list[tuple[str, float, float]]:
    """Return the memory of the workers after the first batch and after every epoch."""
    warnings.simplefilter("ignore")  # torch warns about more workers than cores
    options = {"batch_size": 256, "shuffle": True, "num_workers": WORKERS, "persistent_workers": True}
    loader = CONTESTANTS[name](DOCUMENTS, {**options, "multiprocessing_context": "fork"})
    gc.collect()
    measurements = []
    for epoch in range(EPOCHS):
        batches = iter(loader)
        next(batches)
        pids = [worker.pid for worker in batches._workers]  # type: ignore[attr-defined]
        if not epoch:
            measurements.append(("first batch", *memory(pids)))
        for _ in batches:
            pass
        measurements.append((f"epoch {epoch + 1}", *memory(pids)))
    return measurements


def section(_: int) -> Section:
    """Measure every contestant in a process of its own."""
    lines = []
    for name in CONTESTANTS:
        done = subprocess.run([sys.executable, __file__, name], check=True, stdout=subprocess.PIPE, text=True)
        for when, unique, resident in json.loads(done.stdout.splitlines()[-1]):
            lines.append([name, when, f"{unique:,.0f}", f"{resident:,.0f}"])
    return Section(
        "memory",
        "Memory of workers",
        f"{DOCUMENTS:,} documents with a vector, a number and texts, {WORKERS} forked workers, {EPOCHS} epochs in "
        "random order. *USS* is the memory private to the workers, summed; *RSS* also counts the pages that they share "
        "with the trainer.",
        ["", "after", "USS MiB", "RSS MiB"],
        lines,
    )


if __name__ == "__main__":
    print(json.dumps(measure_workers(sys.argv[1])))
