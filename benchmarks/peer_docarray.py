"""The schemas of core.py in DocArray."""

from __future__ import annotations

from typing import Any

from docarray import BaseDoc, DocList
from docarray.typing import TorchTensor


class Author(BaseDoc):
    """The nested document."""

    name: str


class Article(BaseDoc):
    """What is constructed."""

    title: str
    tensor: TorchTensor[512]
    author: Author


class Picture(BaseDoc):
    """What is stacked, taken and iterated."""

    image: TorchTensor[3, 64, 64]
    label: int
    text: str


def pictures(rows: list[dict[str, Any]]) -> DocList[Picture]:
    """Documents with tensor objects of their own: DocArray changes the class of those that it is given."""
    return DocList[Picture](Picture(**{**row, "image": row["image"].detach()}) for row in rows)
