"""Documents and functions at the top level of a module, where a spawned worker finds them."""

from __future__ import annotations

from typing import Any

import torch

from quire import BaseDocument, DocumentArray, Text
from quire.data import batched
from quire.typing import NdArray, TorchTensor, float32


class Thesis(BaseDocument):
    title: Text
    pages: int = 0


class Paper(BaseDocument):
    vector: TorchTensor[float32, 2]
    venue: str = ""


class Node(BaseDocument):
    name: str = ""
    children: DocumentArray[Node] = []


class Student(BaseDocument):
    name: str
    age: int = 0
    grade: float | None = None
    photo: TorchTensor[float32, 2, 3]
    vector: NdArray[float32, 3] = [1.0, 2.0, 3.0]
    shaped: TorchTensor | None = None
    tags: dict[str, Any] = {}
    words: list[str] = []
    thesis: Thesis
    spare: Thesis | None = None
    papers: DocumentArray[Paper] = []
    tree: Node = Node()


class Graduate(Student):
    honours: dict[str, int] = {}


def student(i: int, document_type: type[Student] = Student, **more: Any) -> Student:
    """Student i: each field tells the number."""
    fields = {
        "id": f"id{i}",
        "name": f"name {i}",
        "age": i,
        "grade": i / 2,
        "photo": torch.full((2, 3), float(i)),
        "shaped": torch.ones(2),
        "tags": {"numbers": [i]},
        "words": ["a"],
        "thesis": Thesis(title=f"title {i}", pages=i),
        "spare": Thesis(title="spare"),
        "papers": [Paper(vector=torch.full((2,), float(j)), venue=f"venue {j}") for j in range(i % 3)],
        "tree": Node(name="root", children=[Node(name="leaf")]),
    }
    return document_type(**{**fields, **more})


def students(number: int = 10) -> DocumentArray[Student]:
    """Return this number of students."""
    return DocumentArray[Student](student(i) for i in range(number))


def incomplete_students(number: int = 10) -> DocumentArray[Student]:
    """Students of whom every second has no grade, and two of three have no spare thesis."""
    documents = students(number)
    for i, document in enumerate(documents):
        document.grade = None if i % 2 else document.grade
        document.spare = None if i % 3 else document.spare
    return documents


# --- functions that workers run


def embed_title(title: Text) -> torch.Tensor:
    return torch.full((4,), float(len(title.text or "")))


def give_embedding(title: Text) -> None:
    title.embedding = embed_title(title)


def normalize_embedding(thesis: Thesis) -> None:
    thesis.title.embedding = thesis.title.embedding / thesis.title.embedding.norm()


def double(value: Any) -> Any:
    return value * 2


def add_to(value: torch.Tensor, number: float) -> torch.Tensor:
    return value + number


@batched
def double_all(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def fail_on_three(pages: int) -> int:
    if pages == 3:
        raise ValueError("three is not allowed")
    return pages


def mixed_at_five(name: str) -> Any:
    return 5 if name == "name 5" else name


class Scale:
    """A callable with a state."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.by
