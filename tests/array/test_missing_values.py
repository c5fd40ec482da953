"""Batches that raise on missing values, and `fill_missing`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import ColumnError, MissingValueError, PathError
from quire.typing import AnyTensor, NdArray, float32, uint8


class Inner(BaseDocument):
    number: int = 1
    weight: float | None = None


class Row(BaseDocument):
    label: int | None = None
    score: float | None = None
    vector: NdArray[float32, 2] | None = None
    image: NdArray[uint8] | None = None
    anything: AnyTensor | None = None
    big: int | None = None
    inner: Inner | None = None
    inners: DocumentArray[Inner] = []
    text: str | None = None


class Vector(BaseDocument):
    vector: NdArray[float32, 2] | None = None


def some_rows(**options: Any) -> DocumentBatch[Row]:
    full = {
        "label": 7,
        "vector": [1, 2],
        "anything": np.ones(3),
        "big": 1 << 70,
        "inner": Inner(weight=2.0),
        "inners": [Inner(weight=1.0), Inner()],
        "text": "a",
    }
    return DocumentArray[Row]([Row(id="a", **full), Row(id="b")]).stack(**options)


PARTIAL = ["label", "vector", "anything", "big", "inner.number", "inner.weight", "inners.weight"]


def test_unguarded_batch_reads_zeros_for_missing_values() -> None:
    batch = some_rows()
    assert batch.label.tolist() == [7, 0]
    assert batch.score.tolist() == [0, 0]
    assert batch.inner.number.tolist() == [1, 0]
    assert batch[:1].concat([batch, batch]).label.tolist() == [7, 0, 7, 0]


@pytest.mark.parametrize("path", PARTIAL)
def test_reading_a_column_with_missing_rows_raises(path: str) -> None:
    batch = some_rows()._guard_missing()
    with pytest.raises(MissingValueError, match=rf"Row\.{path}: row 1.* has no value \(1 of 2 are missing\)") as error:
        batch[path]
    assert f"batch.fill_missing({{'{path}': value}})" in str(error.value)
    assert f"batch.validity('{path}')" in str(error.value)
    owner: Any = batch
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    with pytest.raises(MissingValueError, match=rf"Row\.{path}: row 1"):
        getattr(owner, name)
    assert batch.validity(path).tolist() == [True, False]


def test_guarded_batch_reads_columns_without_missing_values() -> None:
    plain = some_rows()
    batch = copy.copy(plain)._guard_missing()
    assert batch.score is batch.image is None
    assert batch.text == ["a", None]
    assert batch.id == ["a", "b"]
    assert batch[1].label is None
    assert batch.unstack() == plain.unstack()
    assert batch.column("label").data.tolist() == [7, 0]
    assert batch[:1].label.tolist() == [7]
    assert batch[1:].label is None
    assert batch.inners.number.tolist() == [1, 1]
    assert batch.to_bytes() == plain.to_bytes()
    batch.label = [1, 2]
    assert batch.label.tolist() == [1, 2]


def test_batches_derived_from_guarded_batch_are_guarded() -> None:
    batch = some_rows()._guard_missing()
    created = [
        batch[[0, 1]],
        batch[::-1],
        batch.take([1, 0]),
        batch.shuffle(0),
        batch.filter(lambda _: True),
        batch.to_framework("numpy"),
        copy.copy(batch),
        copy.deepcopy(batch),
        pickle.loads(pickle.dumps(batch)),
        type(batch).concat([some_rows(), batch]),
        next(batch.batch(2)),
    ]
    for each in created:
        with pytest.raises(MissingValueError, match=r"Row\.label"):
            _ = each.label


# --- fill_missing


@pytest.mark.parametrize("guarded", [False, True])
def test_fill_missing_fills_only_rows_without_a_value(guarded: bool) -> None:
    batch = some_rows()._guard_missing() if guarded else some_rows()
    filled = batch.fill_missing({"label": -1, "vector": 5, "anything": np.zeros(3), "big": 0, "inner.weight": 1})
    assert filled.label.tolist() == [7, -1]
    assert filled.vector.tolist() == [[1, 2], [5, 5]]
    assert filled["anything"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert filled.big == [1 << 70, 0]
    assert filled["inner.weight"].tolist() == [2, 1]
    assert filled.validity("label").all()
    assert batch.validity("label").tolist() == [True, False]
    assert filled[1].label == -1
    assert filled[1].inner is None
    assert DocumentBatch[Row].from_bytes(filled.to_bytes()) == filled
    assert filled.score is None if guarded else filled.score.tolist() == [0, 0]


def test_fill_missing_fills_every_row_of_a_column_without_values() -> None:
    batch = some_rows()
    assert batch.fill_missing({"score": 2}).score.tolist() == [2, 2]
    assert batch.fill_missing({"image": np.ones((2, 1), np.uint8)}).image.shape == (2, 2, 1)
    assert batch.fill_missing({"inners.weight": 3}).inners.weight.tolist() == [1, 3]
    with pytest.raises(ColumnError, match=r"Row\.image: the rows have no common shape: give a tensor"):
        batch.fill_missing({"image": 0})


def test_fill_missing_fills_padded_and_ragged_columns() -> None:
    rows = DocumentArray[Row]([{"image": [1, 2]}, {"image": [3]}, {}])
    padded = rows.stack(shapes="pad").fill_missing({"image": 9})
    assert padded.image.tolist() == [[1, 2], [3, 0], [9, 9]]
    assert padded.mask("image").tolist() == [[True, True], [True, False], [True, True]]
    ragged = rows.stack(shapes="ragged").fill_missing({"image": [4, 5, 6]})
    assert [row.tolist() for row in ragged.image.values()] == [[1, 2], [3], [4, 5, 6]]
    with pytest.raises(ColumnError, match="no common shape"):
        rows.stack(shapes="ragged").fill_missing({"image": 9})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"label": 0.5}, r"Row\.label: a missing int cannot be filled with float 0\.5"),
        ({"vector": [1, 2, 3]}, r"Row\.vector: expected float32 \(2,\)"),
        ({"image": 256}, r"does not fit uint8"),
        ({"text": ""}, r"only missing numbers and tensors"),
        ({"inner": 0}, r"only missing numbers and tensors"),
        ("label", "give values by path"),
    ],
)
def test_fill_missing_rejects_values_that_do_not_fit(values: Any, message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        some_rows().fill_missing(values)


def test_fill_missing_rejects_unknown_paths() -> None:
    with pytest.raises(PathError, match="Did you mean 'label'"):
        some_rows().fill_missing({"lable": 0})


@pytest.mark.parametrize(
    "framework",
    [
        "numpy",
        pytest.param("torch", marks=pytest.mark.needs("torch")),
        pytest.param("tensorflow", marks=pytest.mark.needs("tensorflow")),
        pytest.param("jax", marks=pytest.mark.needs("jax")),
        pytest.param("paddle", marks=pytest.mark.needs("paddle")),
    ],
)
def test_fill_missing_keeps_the_framework_of_a_column(framework: str) -> None:
    rows = DocumentArray[Vector]([{"vector": [1, 2]}, {}]).stack().to_framework(framework)
    filled = rows.fill_missing({"vector": [3, 4]})
    assert type(filled.vector) is type(rows.vector)
    assert filled.to_framework("numpy").vector.tolist() == [[1, 2], [3, 4]]
    assert rows.to_framework("numpy").vector.tolist() == [[1, 2], [0, 0]]


@pytest.mark.needs("torch")
def test_gradients_flow_through_filled_columns() -> None:
    import torch

    batch = DocumentArray[Row]([Row(vector=[1, 2]), Row()]).stack(framework="torch")
    leaf = batch.vector.clone().requires_grad_()
    column = batch.column("vector")
    column.data = leaf  # type: ignore[attr-defined]
    batch.fill_missing({"vector": 3}).vector.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[1, 1], [0, 0]]
    assert batch.vector.dtype is torch.float32
