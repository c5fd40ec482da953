"""What forked workers of a DataLoader take in memory, epoch after epoch.

    python benchmarks/train_memory.py --documents 200000 --workers 4 --epochs 3

Each contestant runs in a fresh process: it makes its dataset, forks the workers once (`persistent_workers`), and goes
through it in random order. Told are the unique bytes of the workers (USS: private pages, clean and dirty), summed, when
they have given their first batch and after every epoch, beside the resident bytes (RSS), which count shared pages too.
A worker should not grow; one that reads Python objects writes their counts of users, and so copies their pages.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from quire import BaseDocument
from quire.data import MultiModalDataset
from quire.typing import TorchTensor, float32

_MIB = 1024


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


def measure(name: str, arguments: argparse.Namespace) -> None:
    """Print a line of the table for the start and for every epoch."""
    warnings.simplefilter("ignore")  # of more workers than cores
    options = {"batch_size": 256, "shuffle": True, "num_workers": arguments.workers, "persistent_workers": True}
    loader = CONTESTANTS[name](arguments.documents, {**options, "multiprocessing_context": "fork"})
    gc.collect()
    for epoch in range(arguments.epochs):
        batches = iter(loader)
        next(batches)
        pids = [worker.pid for worker in batches._workers]  # type: ignore[attr-defined]
        if not epoch:
            report(name, "first batch", pids)
        for _ in batches:
            pass
        report(name, f"epoch {epoch + 1}", pids)


def report(name: str, when: str, pids: list[int]) -> None:
    """One line of the table."""
    unique, resident = memory(pids)
    print(f"| {name:<13} | {when:<11} | {unique:>8.0f} | {resident:>8.0f} |", flush=True)


def main() -> None:
    """Run every contestant in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--only", choices=CONTESTANTS)
    arguments = parser.parse_args()
    if arguments.only:
        measure(arguments.only, arguments)
        return
    print(
        "|               | after       |  USS MiB |  RSS MiB |\n|---------------|-------------|----------|----------|"
    )
    for name in CONTESTANTS:
        subprocess.run([sys.executable, *sys.argv, "--only", name], check=True)


if __name__ == "__main__":
    main()
