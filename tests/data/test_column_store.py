"""How a dataset holds its documents: few objects, small pickles, no growth in workers."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest
import torch

from quire import BaseDocument, DocumentArray
from quire.columns import DocumentColumn, PackedColumn, ScalarColumn, TensorColumn
from quire.data import MultiModalDataset
from quire.typing import NdArray, TorchTensor, float32
from tests.data.sample_students import Student, students

pytestmark = pytest.mark.needs("torch")


class Caption(BaseDocument):
    text: str
    blob: bytes | None = None


class Picture(BaseDocument):
    pixels: TorchTensor[float32, 16]
    vector: NdArray[float32, 4]
    label: int
    weight: float | None = None
    caption: Caption


ROWS = 2_000
PAYLOAD = 16 * 4 + 4 * 4 + 8 + 8 + len("caption 1000")


def pictures(number: int = ROWS) -> DocumentArray[Picture]:
    return DocumentArray[Picture](
        Picture(
            pixels=torch.full((16,), float(i)),
            vector=np.ones(4, np.float32),
            label=i,
            weight=i / 2,
            caption=Caption(text=f"caption {i}", blob=None if i % 3 else b"x"),
        )
        for i in range(number)
    )


def test_texts_are_stored_in_one_buffer() -> None:
    columns = MultiModalDataset[Picture](pictures())._columns
    caption = columns.columns["caption"]
    assert isinstance(caption, DocumentColumn)
    for column in (columns.columns["id"], *caption.columns.columns.values()):
        assert isinstance(column, PackedColumn)
        assert isinstance(column.data, bytes)
    assert type(columns.columns["pixels"]) is TensorColumn
    assert type(columns.columns["label"]) is ScalarColumn
    assert {type(columns.columns[name].data) for name in ("pixels", "vector", "label")} == {torch.Tensor}


def test_number_of_objects_does_not_grow_with_rows() -> None:
    """A forked worker that reads an object writes its count of users, and so copies the page that it lies in."""

    def objects(number: int) -> int:
        documents = pictures(number)
        gc.collect()
        before = len(gc.get_objects())
        dataset = MultiModalDataset[Picture](documents)
        del documents
        gc.collect()
        dataset.__getitems__(range(10))
        return len(gc.get_objects()) - before + 0 * len(dataset)

    objects(10)
    assert objects(1_000) < objects(10) + 100


def test_batches_do_not_change_the_dataset() -> None:
    dataset = MultiModalDataset[Picture](pictures(100), {"caption.text": str.upper, "label": lambda label: label + 1})
    before = pickle.dumps(dataset._columns)
    for row in range(100):
        dataset.__getitems__([row, 0])
    assert pickle.dumps(dataset._columns) == before


def test_pickle_is_about_as_large_as_the_data() -> None:
    dataset = MultiModalDataset[Picture](pictures())
    ids = 2 * 32
    offsets = 4 * 8 + 2
    assert len(pickle.dumps(dataset)) < ROWS * (PAYLOAD + ids + offsets) * 1.05 + 10_000
    again = pickle.loads(pickle.dumps(dataset))
    assert type(again) is MultiModalDataset[Picture]
    assert again.__getitems__(range(ROWS)).identical(dataset.__getitems__(range(ROWS)))


def test_texts_that_cannot_be_encoded_stay_objects() -> None:
    documents = students(3)
    documents[1].name = "\ud800"  # half of a pair, which UTF-8 has not
    dataset = MultiModalDataset[Student](documents)
    assert dataset[1].name == "\ud800"
    assert dataset.__getitems__([1, 2]).name == ["\ud800", "name 2"]


def test_texts_of_every_alphabet_round_trip() -> None:
    texts = ["", "a", "ä", "日本", "🎈", "z"]
    dataset = MultiModalDataset[Caption](Caption(text=text, blob=text.encode() or None) for text in texts)
    for rows in ([0, 1, 2, 3, 4, 5], [5, 2, 2], [3]):
        batch = dataset.__getitems__(rows)
        assert batch.text == [texts[row] for row in rows]
        assert batch.blob == [texts[row].encode() or None for row in rows]


def test_changing_a_batch_does_not_change_the_dataset() -> None:
    dataset = MultiModalDataset[Picture](pictures(4))
    batch = dataset.__getitems__([0, 1])
    batch.pixels.zero_()
    batch.vector.zero_()
    batch.label = [7, 7]
    batch.caption.text = ["", ""]
    batch[0].caption.text = "x"
    assert dataset.__getitems__([0, 1]) == MultiModalDataset[Picture](pictures(4)).__getitems__([0, 1])
