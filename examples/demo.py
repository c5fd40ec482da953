"""A complete small story: a schema, documents made from nothing, questions, and columns ready for training."""

from __future__ import annotations

from typing import Annotated

import torch

from quire import BaseDocument, DocumentArray, DocumentBatch, Text
from quire.typing import DType, Shape


class Thesis(BaseDocument):
    """What a student wrote; the title is a document of its own, with text and an embedding."""

    title: Text
    figure: Annotated[torch.Tensor, Shape(3, "height", "width"), DType("uint8")]


class Student(BaseDocument):
    """Somebody who wrote a thesis, perhaps with a grade already."""

    name: str
    grade: float | None = None
    thesis: Thesis


SUBJECTS = ("On Rivers", "On Stars", "On Bridges", "On Bees")


def make_student(number: int, random: torch.Generator) -> Student:
    """A student from a seeded source; nested documents may be written as plain values."""
    subject = number % len(SUBJECTS)
    embedding = torch.nn.functional.one_hot(torch.tensor(subject), 16).float()
    noise = 0.1 * torch.randn(16, generator=random)
    figure = torch.randint(0, 256, (3, 64, 64), generator=random, dtype=torch.uint8)
    title = Text(text=f"{SUBJECTS[subject]}, volume {number}", embedding=embedding + noise)
    grade = None if number % 5 == 0 else 1.0 + number % 4
    return Student(name=f"student {number}", grade=grade, thesis=Thesis(title=title, figure=figure))


def ask(students: DocumentArray[Student]) -> None:
    """Columns, filters and nearest neighbours on rows."""
    print("titles:", students.thesis.title.text[:2])
    print("best grades:", len(students.filter({"grade": {"$lte": 1.0}})))
    query = students[2].thesis.title.embedding
    found = students.find(query, "thesis.title.embedding", limit=3)
    print("nearest to", repr(students[2].thesis.title.text), "->", found.documents.thesis.title.text)


def columns(students: DocumentArray[Student]) -> DocumentBatch[Student]:
    """The same data as columns, all of it in torch."""
    batch = students.stack(framework="torch")
    graded = batch.validity("grade")
    print("figures:", tuple(batch.thesis.figure.shape), batch.thesis.figure.dtype)
    print("embeddings:", tuple(batch.thesis.title.embedding.shape))
    print("mean grade of the", int(graded.sum()), "graded:", round(float(batch.grade[graded].mean()), 3))
    return batch


def main() -> None:
    """Run the story."""
    random = torch.Generator().manual_seed(0)
    students = DocumentArray[Student](make_student(number, random) for number in range(400))
    Student.schema_summary()
    ask(students)
    batch = columns(students)
    assert batch.unstack() == students
    print("rows and columns agree:", len(batch), "students")


if __name__ == "__main__":
    main()
