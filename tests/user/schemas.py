"""What the project is about."""

from __future__ import annotations

from typing import Annotated

import torch

from quire import BaseDocument, DocumentArray
from quire.typing import Shape


class Page(BaseDocument):
    """A page of a book."""

    text: str
    pixels: Annotated[torch.Tensor, Shape(3, 8, 8)]
    label: int = 0


class Read(BaseDocument):
    """A page, and what a model reads in it."""

    text: str
    prediction: int


class Book(BaseDocument):
    """A book, and its pages."""

    title: str
    pages: DocumentArray[Page]
    embedding: Annotated[torch.Tensor, Shape(4)] | None = None


def make_book(title: str, pages: int) -> Book:
    """A book of blank pages."""
    blank = [Page(text=f"page {i}", pixels=torch.zeros(3, 8, 8), label=i % 2) for i in range(pages)]
    return Book(title=title, pages=DocumentArray[Page](blank))
