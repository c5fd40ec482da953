"""Static types of datasets: checked by mypy and pyright, and run as tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset
from typing_extensions import assert_type

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MixedDataset, MultiModalDataset, StreamingDataset, batched
from quire.storage import write_dataset
from quire.typing import Shape

pytestmark = pytest.mark.needs("torch", "pyarrow")


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


def test_batches_of_loaders_have_document_type(tmp_path: Path) -> None:
    ds = MultiModalDataset[Student](students())
    assert_type(ds.collate_fn([ds[0]]), DocumentBatch[Student])
    assert_type(ds.preprocess(students()), DocumentBatch[Student])
    assert_type(ds.preprocess(students().stack())[0], Student)
    # torch's own DataLoader yields Any, so the variable is declared. Both type checkers then know its type in the loop.
    batch: DocumentBatch[Student]
    for batch in DataLoader(ds, batch_size=2, collate_fn=ds.collate_fn):
        assert_type(batch, DocumentBatch[Student])
        assert_type(batch[0].embedding, torch.Tensor)
    for batch in ds.iter_batches(2):
        assert_type(batch, DocumentBatch[Student])
    write_dataset(students(), tmp_path / "data", Student)
    stream = StreamingDataset[Student](tmp_path / "data", 1)
    for batch in stream:
        assert_type(batch, DocumentBatch[Student])
    for batch in stream.loader():
        assert_type(batch, DocumentBatch[Student])
    for batch in MixedDataset([stream]):
        assert_type(batch, DocumentBatch[Student])
    for batch in MixedDataset({"a": stream}):
        assert_type(batch, DocumentBatch[Student])
    for batch in MixedDataset([stream], {"0": 1.0}, mix="row").loader(device="cpu"):
        assert_type(batch, DocumentBatch[Student])
    assert_type(stream.preprocess(students()), DocumentBatch[Student])
    assert_type(stream[0], Student)
    assert_type(stream[:1], DocumentBatch[Student])


if TYPE_CHECKING:

    def mixed_classes(one: StreamingDataset[Student], other: StreamingDataset[BaseDocument]) -> None:
        """A mix may have datasets of several classes; the class of its batches is then not known."""
        for batch in MixedDataset([one, other]):
            assert_type(batch, DocumentBatch[Any])

    def mistakes(anything: Any) -> None:
        """Each line is an error for both type checkers, which also report unused ignores."""
        MultiModalDataset[int](anything)  # type: ignore[type-var]  # pyright: ignore[reportInvalidTypeArguments]
        MultiModalDataset[Student](anything, shapes="cut")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
