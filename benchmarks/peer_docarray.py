"""The schemas of core.py and wire.py in DocArray."""

from __future__ import annotations

from typing import Any

import torch
from docarray import BaseDoc, DocList
from docarray.data import MultiModalDataset
from docarray.documents import TextDoc
from docarray.typing import TorchTensor


class Author(BaseDoc):
    """A nested document."""

    name: str


class Article(BaseDoc):
    """The document that is constructed."""

    title: str
    tensor: TorchTensor[512]
    author: Author


class Picture(BaseDoc):
    """The document that is stacked, taken and iterated."""

    image: TorchTensor[3, 64, 64]
    label: int
    text: str


def pictures(rows: list[dict[str, Any]]) -> DocList[Picture]:
    """Create documents with their own tensor objects: DocArray changes the class of tensors that it receives."""
    return DocList[Picture](Picture(**{**row, "image": row["image"].detach()}) for row in rows)


class Passage(BaseDoc):
    """A text and its embedding."""

    text: str
    embedding: TorchTensor[512]


class Photo(BaseDoc):
    """A text and an image."""

    text: str
    image: TorchTensor[3, 224, 224]


def documents(schema: type[BaseDoc], rows: list[dict[str, Any]]) -> DocList[Any]:
    """Create documents with torch tensors, because DocArray does not stack arrays of numpy 2."""
    return DocList[schema](  # type: ignore[valid-type]
        schema(**{name: value if isinstance(value, str) else torch.from_numpy(value) for name, value in row.items()})
        for row in rows
    )


class SmallPicture(BaseDoc):
    """An image."""

    tensor: TorchTensor[3, 64, 64]


class Item(BaseDoc):
    """An image and its caption, nested."""

    image: SmallPicture
    caption: TextDoc


def normalise(tensor: Any) -> None:
    """Normalise an image in place: DocArray ignores a returned tensor."""
    tensor.sub_(0.5).div_(0.25)


def dataset(images: Any) -> Any:
    """Return DocArray's MultiModalDataset of nested images and captions."""
    pairs = enumerate(images)
    docs = DocList[Item](Item(image=SmallPicture(tensor=x), caption=TextDoc(text=f"caption {i}")) for i, x in pairs)
    return MultiModalDataset[Item](docs, preprocessing={"image.tensor": normalise})
