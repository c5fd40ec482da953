"""Train a contrastive model of images and captions, with MultiModalDataset and plain torch.

python examples/contrastive.py
"""

from __future__ import annotations

from itertools import product
from typing import Annotated

import torch
from torch import nn
from torch.utils.data import DataLoader

from quire import BaseDocument, DocumentArray, Text
from quire.data import MultiModalDataset, batched
from quire.typing import DType, Shape


class Picture(BaseDocument):
    """An image."""

    pixels: Annotated[torch.Tensor, Shape(3, 16, 16), DType("uint8")]


class Pair(BaseDocument):
    """A picture and its caption."""

    picture: Picture
    caption: Text


# --- data: a bright bar or square with a random colour and position, and a sentence that describes it

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "white": (1, 1, 1)}
SHAPES = {"square": (5, 5), "column": (7, 3), "beam": (3, 7)}
PLACES = {"top left": (1, 1), "top right": (1, 8), "bottom left": (8, 1), "bottom right": (8, 8)}
SUBJECTS = list(product(COLOURS, SHAPES, PLACES))  # 60 different captions
WORDS = sorted({word for subject in SUBJECTS for word in " ".join(subject).split()} | {"a", "at", "the"})


def make_pair(subject: tuple[str, str, str], random: torch.Generator) -> Pair:
    """Create a noisy picture of the subject, and its caption."""
    colour, shape, place = subject
    pixels = torch.randint(0, 120, (3, 16, 16), generator=random, dtype=torch.uint8)
    (row, column), (height, width) = PLACES[place], SHAPES[shape]
    shift = int(torch.randint(0, 2, (), generator=random))
    rows, columns = slice(row + shift, row + shift + height), slice(column, column + width)
    pixels[:, rows, columns] += 135 * torch.tensor(COLOURS[colour], dtype=torch.uint8)[:, None, None]
    return Pair(picture=Picture(pixels=pixels), caption=f"a {colour} {shape} at the {place}")


def make_pairs(number: int, random: torch.Generator) -> DocumentArray[Pair]:
    """Create pairs of all subjects, in turn."""
    return DocumentArray[Pair](make_pair(SUBJECTS[i % len(SUBJECTS)], random) for i in range(number))


# --- preprocessing: each function receives a whole column


@batched
def to_floats(pixels: torch.Tensor) -> torch.Tensor:
    """Convert bytes to floats around zero."""
    return pixels.float() / 128 - 1


@batched
def to_numbers(texts: list[str]) -> torch.Tensor:
    """Convert sentences of seven words to rows of seven numbers."""
    return torch.tensor([[WORDS.index(word) for word in text.split()] for text in texts])


def dataset_of(pairs: DocumentArray[Pair]) -> MultiModalDataset[Pair]:
    """Return the inputs of the model; the documents themselves are not changed."""
    return MultiModalDataset[Pair](pairs, preprocessing={"picture.pixels": to_floats, "caption.text": to_numbers})


# --- model


class TwoTowers(nn.Module):
    """Maps pictures and captions to unit vectors in one space."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 128), nn.ReLU(), nn.Linear(128, size))
        self.read = nn.EmbeddingBag(len(WORDS), size)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pixels: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Return the similarity of each picture and each caption."""
        pictures, captions = nn.functional.normalize(self.see(pixels)), nn.functional.normalize(self.read(words))
        similarity: torch.Tensor = self.scale.exp() * pictures @ captions.T
        return similarity


def train(model: TwoTowers, pairs: DocumentArray[Pair], epochs: int) -> list[float]:
    """Train the model, and return the mean loss of each epoch."""
    loader = DataLoader(dataset_of(pairs), batch_size=60, shuffle=True, collate_fn=MultiModalDataset[Pair].collate_fn)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    means = []
    for epoch in range(epochs):
        losses = []
        for batch in loader:  # a DocumentBatch[Pair], nested like the class
            similarity = model(batch.picture.pixels, batch.caption.text)
            own = torch.arange(len(batch))
            loss = (nn.functional.cross_entropy(similarity, own) + nn.functional.cross_entropy(similarity.T, own)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
        print(f"epoch {epoch}: loss {means[-1]:.3f}")
    return means


@torch.no_grad()
def accuracy(model: TwoTowers, pairs: DocumentArray[Pair]) -> float:
    """Return the fraction of pictures whose own caption is the most similar one."""
    [batch] = dataset_of(pairs).iter_batches(len(pairs))
    best = model(batch.picture.pixels, batch.caption.text).argmax(dim=1)
    return (best == torch.arange(len(pairs))).float().mean().item()


def main() -> None:
    """Train, and find the captions of new pictures."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    model, unseen = TwoTowers(), make_pairs(len(SUBJECTS), random)
    before = accuracy(model, unseen)
    losses = train(model, make_pairs(3_000, random), epochs=6)
    after = accuracy(model, unseen)
    print(f"new pictures with the right caption of {len(unseen)}: {before:.0%} before training, {after:.0%} after")
    assert losses[-1] < losses[0] / 2
    assert after > 20 / len(unseen)  # a random guess finds one of them


if __name__ == "__main__":
    main()
