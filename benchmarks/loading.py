"""The rows of train.py about datasets: documents in memory, read with torch's DataLoader."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from contest import Builder, section_of
from measure import Contestant, Loop, Row, busy_processes, measure, peer, repeated
from results import Section
from torch.utils.data import DataLoader, Dataset

from quire import BaseDocument, DocumentArray, Text
from quire.data import MultiModalDataset, batched
from quire.typing import TorchTensor

SIDE = 64
BATCH = 64


class Picture(BaseDocument):
    """An image."""

    tensor: TorchTensor[3, SIDE, SIDE]


class Item(BaseDocument):
    """An image and its caption, nested."""

    image: Picture
    caption: Text


def items(size: int) -> tuple[torch.Tensor, DocumentArray[Item]]:
    """Return images, and documents that hold them."""
    images = torch.rand(size, 3, SIDE, SIDE)
    pairs = enumerate(images)
    return images, DocumentArray[Item](Item(image=Picture(tensor=x), caption=f"caption {i}") for i, x in pairs)


@batched
def normalise_column(tensor: torch.Tensor) -> None:
    """Normalise a column in place."""
    tensor.sub_(0.5).div_(0.25)


def normalise(tensor: torch.Tensor) -> torch.Tensor:
    """Normalise an image."""
    return (tensor - 0.5) / 0.25


class Gathered(Dataset[Any]):
    """A hand-written dataset for speed: one tensor, rows by index_select."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        return self.images.index_select(0, torch.tensor(rows)).sub_(0.5).div_(0.25)


class ByHand(Dataset[Any]):
    """A hand-written dataset with a dict per row, for default_collate."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images
        self.captions = [f"caption {i}" for i in range(len(images))]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"image": normalise(self.images[row]), "caption": self.captions[row]}


def identity(batch: Any) -> Any:
    """Return a batch that is collated already."""
    return batch


def epoch(dataset: Any, collate_fn: Any = None, workers: int = 0) -> Loop:
    """Return a loop of epochs in random order; workers stay alive between epochs."""
    loader = DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        collate_fn=collate_fn,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
    )

    def run() -> None:
        for _ in loader:
            pass

    return repeated(run)


def batched_row(size: int) -> Row:
    """Preprocess whole columns."""
    images, docs = items(size)
    dataset = MultiModalDataset[Item](docs, {"image.tensor": normalise_column})
    return Row(
        title=f"MultiModalDataset, {size:,} nested images and captions, batched preprocessing",
        what="A pass through a DataLoader, batch size 64. The reference has only the images, without texts and ids.",
        quire=Contestant("quire", epoch(dataset, dataset.collate_fn)),
        reference=Contestant("hand-written index_select", epoch(Gathered(images), identity)),
        peers=[peer("TensorDict", "tensordict", lambda theirs: epoch(theirs.Gathered(images), theirs.identity))],
        target=1.1,
        known="DocArray 20.8x, HF datasets 10.7x, TensorDict 1.7x",
        unit="ms",
    )


# --- an epoch of small rows, on an idle machine and next to other processes


class Thumbnail(BaseDocument):
    """An image of 12 KiB and its label."""

    image: TorchTensor[3, 32, 32]
    label: int


class Taken(Dataset[Any]):
    """A hand-written dataset whose batches are copied by numpy."""

    def __init__(self, images: Any) -> None:
        self.images = images
        self.labels = np.arange(len(images))

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = np.array(rows)
        return torch.from_numpy(np.take(self.images, chosen, 0)), torch.from_numpy(np.take(self.labels, chosen))


class Selected(Dataset[Any]):
    """A hand-written dataset whose batches are copied by torch, on all of its threads."""

    def __init__(self, images: Any) -> None:
        self.images, self.labels = torch.from_numpy(images), torch.arange(len(images))

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(rows)
        return self.images.index_select(0, chosen), self.labels.index_select(0, chosen)


def with_all_threads(loop: Loop) -> Loop:
    """Return a loop that runs with one thread of torch for each core, which is torch's default."""

    def threaded(calls: int) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)
        try:
            loop(calls)
        finally:
            torch.set_num_threads(threads)

    return threaded


def epoch_row(size: int, where: str, target: float) -> Row:
    """Compare an epoch of a dataset with hand-written datasets; torch has its default number of threads."""
    images = np.random.default_rng(0).random((size, 3, 32, 32), np.float32)
    docs = DocumentArray[Thumbnail](Thumbnail(image=torch.from_numpy(x), label=i) for i, x in enumerate(images))
    dataset = MultiModalDataset[Thumbnail](docs)
    return Row(
        title=f"An epoch of {size:,} images of 12 KiB, {where}",
        what="A pass through a DataLoader without workers, batch size 64; torch has a thread for each core. The "
        "reference copies rows by `np.take` in `__getitems__`; it has no ids.",
        quire=Contestant("quire", with_all_threads(epoch(dataset, dataset.collate_fn))),
        reference=Contestant("hand-written np.take", with_all_threads(epoch(Taken(images), identity))),
        peers=[Contestant("hand-written index_select", with_all_threads(epoch(Selected(images), identity)))],
        target=target,
        unit="ms",
        turns=3,
        by_wall=True,
    )


def quiet_row(size: int) -> Row:
    """Measure an epoch on an idle machine."""
    return epoch_row(size * 3 // 5, "no other load", 1.1)


def contended_section(size: int) -> Section:
    """Measure an epoch while two other processes are busy."""
    row = epoch_row(size * 3 // 5, "next to two busy processes", 1.2)
    with busy_processes(2):
        return section_of("contended", measure(row, 5))


def per_row_row(size: int) -> Row:
    """Preprocess each image."""
    images, docs = items(size)
    dataset = MultiModalDataset[Item](docs, {"image.tensor": normalise})

    def docarray(theirs: Any) -> Loop:
        own = theirs.dataset(images)
        return epoch(own, own.collate_fn)

    return Row(
        title=f"MultiModalDataset, {size:,} nested images and captions, a function per image",
        what="A pass through a DataLoader, batch size 64. The reference is a Dataset of dicts with default_collate.",
        quire=Contestant("quire", epoch(dataset, dataset.collate_fn)),
        reference=Contestant("hand-written Dataset", epoch(ByHand(images))),
        peers=[peer("DocArray MultiModalDataset", "docarray", docarray)],
        target=1.2,
        known="DocArray 7.6x",
        unit="ms",
    )


def workers_row(size: int) -> Row:
    """Preprocess each image in two worker processes."""
    images, docs = items(size)
    dataset = MultiModalDataset[Item](docs, {"image.tensor": normalise})
    return Row(
        title=f"MultiModalDataset, {size:,} nested images and captions, 2 workers",
        what="A pass through a DataLoader with 2 workers, batch size 64, a function per image.",
        quire=Contestant("quire", epoch(dataset, dataset.collate_fn, 2)),
        reference=Contestant("hand-written Dataset", epoch(ByHand(images), None, 2)),
        peers=[],
        target=1.0,
        known="DocArray 10.9x",
        unit="ms",
        by_wall=True,
    )


class Large(BaseDocument):
    """An image of 224 x 224 pixels."""

    image: TorchTensor[3, 224, 224]


class Repeated(Dataset[Any]):
    """The same batch repeatedly, in fresh memory, so that only the transfer to the trainer is measured."""

    def __init__(self, dataset: Any, number: int) -> None:
        self.dataset, self.number = dataset, number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, _: int) -> Any:
        return self.dataset.__getitems__(list(range(32)))


class Bare(Dataset[Any]):
    """A dataset of one tensor."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        out = torch.empty(0).set_(torch.UntypedStorage._new_shared(len(rows) * self.images[0].nbytes))
        return torch.index_select(self.images, 0, torch.tensor(rows), out=out.view(len(rows), 3, 224, 224))


def loop_of_transfers(dataset: Any) -> Loop:
    """Return a loop that receives batches from one worker."""
    number = 64
    loader = DataLoader(
        Repeated(dataset, number),
        batch_size=None,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    source = batches()

    def loop(calls: int) -> None:
        for _ in itertools.islice(source, calls):
            pass

    return loop


def transfer_row(_: int) -> Row:
    """Transfer batches from a worker to the trainer."""
    images = torch.rand(64, 3, 224, 224)
    docs = DocumentArray[Large](Large(image=image) for image in images)
    return Row(
        title="Transfer of a batch of 32 images (3, 224, 224) from a worker",
        what="Both gather directly into shared memory; the batch of quire also has ids.",
        quire=Contestant("quire", loop_of_transfers(MultiModalDataset[Large](docs))),
        reference=Contestant("plain tensor", loop_of_transfers(Bare(images))),
        peers=[],
        target=1.1,
        known="DocArray 5x to 20x",
        unit="ms",
        calls=16,
        by_wall=True,
    )


BUILDERS: dict[str, Builder] = {
    "dataset_batched": batched_row,
    "quiet": quiet_row,
    "contended": contended_section,
    "dataset_per_row": per_row_row,
    "dataset_workers": workers_row,
    "worker_transfer": transfer_row,
}
