"""Documents and preprocessing functions of students and theses, in a module that worker processes can import."""

from __future__ import annotations

import torch

from quire import BaseDocument, DocumentArray
from quire.documents import Text


class Thesis(BaseDocument):
    title: Text


class Student(BaseDocument):
    thesis: Thesis


def get_students() -> DocumentArray[Student]:
    titles = [f"thesis {'x' * i}" for i in range(10)]
    return DocumentArray[Student](Student(thesis=Thesis(title=Text(text=title))) for title in titles)


def embed_title(title: Text) -> None:
    title.embedding = torch.tensor([3.0, 4.0]) * len(title.text or "")


def normalize_embedding(thesis: Thesis) -> Thesis:
    thesis.title.embedding = thesis.title.embedding / thesis.title.embedding.norm()
    return thesis
