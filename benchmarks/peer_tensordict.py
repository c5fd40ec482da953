"""The schemas of core.py in tensordict."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, tensorclass


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
