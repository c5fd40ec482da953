"""Static types of datasets: checked by mypy and pyright, and run as tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset
from typing_extensions import assert_type

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset, batched
from quire.typing import Shape

pytestmark = pytest.mark.needs("torch")


class Student(BaseDocument):
    name: str
    embedding: Annotated[torch.Tensor, Shape(2)]


def students() -> DocumentArray[Student]:
    return DocumentArray[Student](Student(name=name, embedding=torch.ones(2)) for name in ("Ada", "Bo"))


def shout(name: str) -> str:
    return name.upper()


@batched
def double(embedding: torch.Tensor) -> torch.Tensor:
    return embedding * 2


def test_dataset_items_have_document_type() -> None:
    ds = MultiModalDataset[Student](students(), {"name": shout, "embedding": [double]})
    assert_type(ds, MultiModalDataset[Student])
    assert_type(ds[0], Student)
    assert_type(ds[:1], MultiModalDataset[Student])
    assert_type(ds[[0, 1]], MultiModalDataset[Student])
    assert_type(len(ds), int)
    assert_type([document.name for document in ds], list[str])
    assert_type(ds.iter_batches(2), Iterator[DocumentBatch[Student]])
    assert_type(MultiModalDataset[Student].collate_fn([ds[0]]), DocumentBatch[Student])
    assert_type(double(torch.ones(2)), torch.Tensor)


def test_data_loader_accepts_dataset() -> None:
    ds = MultiModalDataset[Student](students())
    loader = DataLoader(ds, batch_size=2, collate_fn=MultiModalDataset[Student].collate_fn)
    assert_type(loader, DataLoader[Student])
    named: DataLoader[Student] = DataLoader(ds, collate_fn=ds.collate_fn)
    assert len(loader) == 1
    assert len(named) == 2
    assert len(Subset(ds, [0])) == 1


if TYPE_CHECKING:

    def mistakes(anything: Any) -> None:
        """Each line is an error for both type checkers, which also report unused ignores."""
        MultiModalDataset[int](anything)  # type: ignore[type-var]  # pyright: ignore[reportInvalidTypeArguments]
        MultiModalDataset[Student](anything, shapes="cut")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
