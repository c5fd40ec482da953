"""Train on the pages of a book."""

from __future__ import annotations

import torch
from schemas import Book, Page, Read, make_book
from torch.utils.data import DataLoader

from quire import DocumentArray, DocumentBatch
from quire.data import MultiModalDataset
from quire.errors import QuireError


def brighter(pixels: torch.Tensor) -> torch.Tensor:
    """Preprocessing of one field."""
    return pixels + 1.0


def loss_of(batch: DocumentBatch[Page], model: torch.nn.Module) -> torch.Tensor:
    """How wrong a model is about a batch."""
    guessed: torch.Tensor = model(batch.pixels)
    return torch.nn.functional.cross_entropy(guessed, batch.label)


def classify(
    pages: DocumentArray[Page], dataset: MultiModalDataset[Page], model: torch.nn.Module
) -> DocumentBatch[Read]:
    """Predict new pages as a service does: with the preprocessing of the training."""
    batch = dataset.preprocess(pages)
    guessed: torch.Tensor = model(batch.pixels)
    return batch.with_columns(Read, prediction=guessed.argmax(dim=1))


def titles(books: DocumentArray[Book]) -> list[str]:
    """Columns have the types of their fields."""
    return [book.title for book in books if len(book.pages) > 1]


def main() -> None:
    """From documents to a training step, and through bytes."""
    books = DocumentArray[Book]([make_book("A", 8), make_book("B", 1)])
    again = DocumentArray[Book].from_bytes(books.to_bytes())
    first: Book = again[0]
    some: DocumentArray[Book] = again[:1]
    assert titles(some) == [first.title]

    dataset = MultiModalDataset[Page](first.pages, {"pixels": brighter})
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))
    batch: DocumentBatch[Page]
    for batch in DataLoader(dataset, batch_size=4, collate_fn=dataset.collate_fn):
        loss_of(batch, model).backward()  # type: ignore[no-untyped-call] # torch does not declare its type

    read = classify(first.pages, dataset, model)
    assert read[0].prediction in (0, 1)
    assert [page.id for page in read] == [page.id for page in first.pages]

    try:
        DocumentArray[Book].from_bytes(b"no documents")
    except QuireError as error:
        assert "byte" in str(error)


if __name__ == "__main__":
    main()
