"""The schemas of core.py and loading.py in tensordict."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, tensorclass
from torch.utils.data import Dataset


@tensorclass
class Picture:
    """What is stacked."""

    image: torch.Tensor
    label: torch.Tensor
    text: str


def pictures(rows: list[dict[str, Any]]) -> list[Picture]:
    """A tensorclass for each row."""
    return [Picture(**{**row, "label": torch.tensor(row["label"])}, batch_size=[]) for row in rows]


def columns(images: torch.Tensor, labels: torch.Tensor) -> TensorDict:
    """What rows are taken of; without text, which a TensorDict holds only as an object of its own kind."""
    return TensorDict({"image": images, "label": labels}, [len(images)])


class Gathered(Dataset[Any]):
    """Images and numbers of captions, by TensorDict's own index."""

    def __init__(self, images: Any) -> None:
        self.data = TensorDict({"image": images, "caption": torch.arange(len(images))}, batch_size=[len(images)])

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, rows: list[int]) -> Any:
        found = self.data[torch.tensor(rows)]
        found["image"].sub_(0.5).div_(0.25)
        return found


def as_it_is(batch: Any) -> Any:
    """A collate_fn for batches that are made already."""
    return batch
