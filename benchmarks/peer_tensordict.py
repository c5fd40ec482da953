"""The schemas of core.py and loading.py in tensordict."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, tensorclass
from torch.utils.data import Dataset


@tensorclass
class Picture:
    """The row that is stacked."""

    image: torch.Tensor
    label: torch.Tensor
    text: str


def pictures(rows: list[dict[str, Any]]) -> list[Picture]:
    """Return a tensorclass per row."""
    return [Picture(**{**row, "label": torch.tensor(row["label"])}, batch_size=[]) for row in rows]


def stacked(rows: list[dict[str, Any]]) -> Picture:
    """Return a batch of rows, with a text in each."""
    return torch.stack(pictures(rows)).contiguous()


def columns(images: torch.Tensor, labels: torch.Tensor) -> TensorDict:
    """Return the columns that rows are taken of; without texts, which a TensorDict holds only as special objects."""
    return TensorDict({"image": images, "label": labels}, [len(images)])


class Gathered(Dataset[Any]):
    """A dataset of images and caption numbers that uses the indexing of TensorDict."""

    def __init__(self, images: Any) -> None:
        self.data = TensorDict({"image": images, "caption": torch.arange(len(images))}, batch_size=[len(images)])

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, rows: list[int]) -> Any:
        batch = self.data[torch.tensor(rows)]
        batch["image"].sub_(0.5).div_(0.25)
        return batch


def identity(batch: Any) -> Any:
    """Return a batch that is collated already."""
    return batch
