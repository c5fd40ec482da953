"""What forked workers of a DataLoader take in memory, epoch after epoch.

    python benchmarks/train.py --rows memory

Each contestant runs in a fresh process: it makes its dataset, forks the workers once (`persistent_workers`), and goes
through it in random order. Told are the unique bytes of the workers (USS: private pages, clean and dirty), summed, when
they have given their first batch and after every epoch, beside the resident bytes (RSS), which count shared pages too.
A worker should not grow; one that reads Python objects writes their counts of users, and so copies their pages.
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
    """The nested document."""

    text: str


class Picture(BaseDocument):
    """What is trained on: a vector, a label, and texts."""

    vector: TorchTensor[float32, 16]
    label: int
    name: str
    caption: Caption


class PlainRows(Dataset[dict[str, Any]]):
    """A list of dicts, as one writes it by hand."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def rows(number: int) -> Iterator[dict[str, Any]]:
    """The content of the documents."""
    for i in range(number):
        text = f"a caption of some words about picture number {i}"
        yield {"vector": torch.full((16,), float(i)), "label": i, "name": f"picture {i}", "caption": {"text": text}}


def quire_loader(number: int, options: dict[str, Any]) -> DataLoader[Any]:
    """Documents as columns."""
    dataset = MultiModalDataset[Picture](Picture(**row) for row in rows(number))
    return DataLoader(dataset, collate_fn=MultiModalDataset[Picture].collate_fn, **options)


def plain_loader(number: int, options: dict[str, Any]) -> DataLoader[Any]:
    """A list of dicts, collated by torch."""
    return DataLoader(PlainRows(list(rows(number))), **options)


CONTESTANTS: dict[str, Callable[[int, dict[str, Any]], DataLoader[Any]]] = {
    "quire": quire_loader,
    "list of dicts": plain_loader,
}


def memory(pids: list[int]) -> tuple[float, float]:
    """The unique and the resident MiB of processes, summed."""
    unique = resident = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size = line.split()[:2]
            unique += int(size) if name in ("Private_Clean:", "Private_Dirty:") else 0
            resident += int(size) if name == "Rss:" else 0
    return unique / _MIB, resident / _MIB


def watched(name: str) -> list[tuple[str, float, float]]:
    """The workers' memory at the start and after every epoch."""
    warnings.simplefilter("ignore")  # of more workers than cores
    options = {"batch_size": 256, "shuffle": True, "num_workers": WORKERS, "persistent_workers": True}
    loader = CONTESTANTS[name](DOCUMENTS, {**options, "multiprocessing_context": "fork"})
    gc.collect()
    found = []
    for epoch in range(EPOCHS):
        batches = iter(loader)
        next(batches)
        pids = [worker.pid for worker in batches._workers]  # type: ignore[attr-defined]
        if not epoch:
            found.append(("first batch", *memory(pids)))
        for _ in batches:
            pass
        found.append((f"epoch {epoch + 1}", *memory(pids)))
    return found


def section(_: int) -> Section:
    """Every contestant in a process of its own."""
    lines = []
    for name in CONTESTANTS:
        done = subprocess.run([sys.executable, __file__, name], check=True, stdout=subprocess.PIPE, text=True)
        for when, unique, resident in json.loads(done.stdout.splitlines()[-1]):
            lines.append([name, when, f"{unique:,.0f}", f"{resident:,.0f}"])
    return Section(
        "memory",
        "Memory of workers",
        f"{DOCUMENTS:,} documents with a vector, a number and texts, {WORKERS} forked workers, {EPOCHS} epochs in "
        "random order. *USS* are the bytes that the workers have for themselves, summed; *RSS* counts pages that they "
        "share with the trainer, too.",
        ["", "after", "USS MiB", "RSS MiB"],
        lines,
    )


if __name__ == "__main__":
    print(json.dumps(watched(sys.argv[1])))
