"""Lent columns: tensors that are views of a message until they are first accessed, and copies afterwards."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument, DocumentBatch
from quire.array import batch_from_message
from quire.codec import DecodeOptions
from quire.columns import LentColumn, TensorColumn
from quire.errors import DecodeError
from quire.typing import NdArray, TorchTensor, float32

LENT = DecodeOptions(lend=True)
DTYPES = ["bool", "uint8", "int16", "int64", "float16", "float32", "float64", "uint16", "complex64"]


class Thing(BaseDocument):
    value: NdArray | None


class Fixed(BaseDocument):
    value: NdArray[float32, 64, 64]


class Scan(BaseDocument):
    value: TorchTensor


def make_batch(rows: int, width: int, dtype: str) -> DocumentBatch[Thing]:
    numbers = np.random.default_rng(0).integers(0, 100, (rows, width, 8))
    return DocumentBatch[Thing].from_columns({"id": [str(i) for i in range(rows)], "value": numbers.astype(dtype)})


def read(batch: Any) -> Any:
    return batch_from_message(type(batch), batch.to_bytes(), LENT)


def column(batch: Any) -> Any:
    return batch._columns.columns["value"]


@given(st.integers(1, 9), st.integers(1, 200), st.sampled_from(DTYPES))
def test_lent_tensors_are_equal_independent_and_writable(rows: int, width: int, dtype: str) -> None:
    batch = make_batch(rows, width, dtype)
    data = batch.to_bytes()
    before = bytes(bytearray(data))
    lent = batch_from_message(type(batch), data, LENT)
    assert lent.to_bytes() == data  # without asking for the tensor
    assert lent.identical(batch)
    lent.value[...] = 1
    assert (lent.value == 1).all()
    assert lent.value is lent.value
    assert data == before
    assert batch_from_message(type(batch), data, LENT).identical(batch)


WAYS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda batch: batch[:],
    "take": lambda batch: batch[list(range(len(batch)))],
    "concat": lambda batch: type(batch).concat([batch[:0], batch]),
    "unstack": lambda batch: batch.unstack().stack(),
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "bytes": lambda batch: type(batch).from_bytes(batch.to_bytes()),
    "torch": lambda batch: batch.to("torch").to("numpy"),
}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("way", WAYS)
def test_operations_on_lent_tensors_use_copies(way: str) -> None:
    batch = make_batch(4, 200, "float32")
    data = batch.to_bytes()
    result = WAYS[way](batch_from_message(type(batch), data, LENT))
    assert result.identical(batch)
    result.value[0] = -1
    assert batch_from_message(type(batch), data, LENT).identical(batch)


def test_only_accessed_tensors_are_copied() -> None:
    lent = read(make_batch(4, 200, "float32"))
    assert type(column(lent)) is LentColumn
    assert len(column(lent)) == len(lent) == 4
    lent.to_bytes()
    assert column(lent).peek() is not None
    assert lent.value.flags.writeable
    assert column(lent).peek() is None
    small = read(make_batch(4, 2, "float32"))
    assert type(column(small)) is TensorColumn


def test_slices_share_memory_with_the_batch() -> None:
    lent = read(make_batch(4, 200, "float32"))
    lent[1:3].value[...] = 7
    assert (lent.value[1:3] == 7).all()
    assert not (lent.value[0] == 7).all()


def test_lent_and_other_batches_are_concatenated() -> None:
    batch = make_batch(4, 200, "float32")
    joined = DocumentBatch[Thing].concat([read(batch), batch, read(batch)])
    assert type(column(joined)) is TensorColumn
    assert joined.identical(DocumentBatch[Thing].concat([batch, batch, batch]))


def test_missing_values_of_lent_columns_are_kept() -> None:
    rows = [None if i % 2 else np.full((40, 8), i, np.float32) for i in range(8)]
    batch = DocumentBatch[Thing]([Thing(value=row) for row in rows])
    lent = read(batch)
    assert lent.to_bytes() == batch.to_bytes()
    assert [doc.value is None for doc in lent] == [row is None for row in rows]


def test_shapes_and_dtypes_are_checked_before_access() -> None:
    wrong = make_batch(4, 512, "float32")
    with pytest.raises(DecodeError, match=r"Fixed\.value: expected tensors of float32"):
        batch_from_message(DocumentBatch[Fixed], wrong.to_bytes(), LENT)
    with pytest.raises(DecodeError):
        batch_from_message(DocumentBatch[Thing], wrong.to_bytes()[:-10], LENT)


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("error")
def test_torch_tensors_are_lent() -> None:
    import torch

    batch = DocumentBatch[Scan].from_columns({"value": torch.arange(4096, dtype=torch.float32).reshape(4, 1024)})
    data = batch.to_bytes()
    lent = batch_from_message(DocumentBatch[Scan], data, LENT)
    assert type(column(lent)) is LentColumn
    assert lent.to_bytes() == data
    lent.value.add_(1)
    assert torch.equal(lent.value, batch.value + 1)
    assert batch_from_message(DocumentBatch[Scan], data, LENT).identical(batch)


def test_concurrent_threads_get_the_same_tensor() -> None:
    for _ in range(20):
        lent, start, results = read(make_batch(4, 200, "float32")), threading.Barrier(4), []

        def ask(lent: Any = lent, start: Any = start, results: list[Any] = results) -> None:
            start.wait()
            results.append(lent.value)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(value is results[0] for value in results)
