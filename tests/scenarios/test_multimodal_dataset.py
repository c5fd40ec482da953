"""A MultiModalDataset of nested documents in a DataLoader, with preprocessing functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from quire import DocumentArray, DocumentBatch
from quire.data import MultiModalDataset
from tests.scenarios.thesis_dataset import Student, embed_title, get_students, normalize_embedding

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": "spawn"},
        {"num_workers": 2, "multiprocessing_context": "forkserver"},
    ],
    ids=["here", "fork", "spawn", "forkserver"],
)
def test_preprocessing_functions_change_nested_fields(options: dict[str, Any]) -> None:
    da: DocumentArray[Student] = get_students()
    ds: MultiModalDataset[Student] = MultiModalDataset[Student](
        da,
        preprocessing={"thesis.title": embed_title, "thesis": normalize_embedding},
    )
    loader: DataLoader[Student] = DataLoader(
        ds, batch_size=4, collate_fn=MultiModalDataset[Student].collate_fn, **options
    )
    batches: list[Any] = list(loader)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    for batch in batches:
        assert type(batch) is DocumentBatch[Student]
        assert torch.allclose(batch.thesis.title.embedding, torch.tensor([[0.6, 0.8]]).expand(len(batch), 2))
    titles = [text for batch in batches for text in batch.thesis.title.text]
    assert titles == [d.thesis.title.text for d in da]
    assert all(d.thesis.title.embedding is None for d in da)
