"""Columns that hold one tensor exchange its memory through DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.columns import LentColumn, ScalarColumn, TensorColumn
from quire.typing import NdArray, float32


class Point(BaseDocument):
    at: NdArray[float32, 3]
    weight: float = 0.0
    path: NdArray[float32] | None = None
    name: str = ""


class Vector(BaseDocument):
    at: NdArray[float32, 3]


def batch_of(framework: str) -> DocumentBatch[Point]:
    points = [Point(at=np.full(3, n, np.float32), weight=n, path=np.zeros(n, np.float32)) for n in range(4)]
    return DocumentArray[Point](points).stack(framework=framework, shapes="ragged")


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("path", ["at", "weight"])
def test_numpy_takes_columns_without_a_copy(path: str) -> None:
    column: Any = batch_of("numpy").column(path)
    array = np.from_dlpack(column)
    assert address(array) == address(column.data)
    assert array.shape == column.data.shape
    assert column.__dlpack_device__() == (1, 0)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("path", ["at", "weight"])
def test_torch_and_numpy_take_columns_of_each_other_without_a_copy(framework: str, path: str) -> None:
    import torch

    column: Any = batch_of(framework).column(path)
    start = column.data.data_ptr() if framework == "torch" else address(column.data)
    assert torch.from_dlpack(column).data_ptr() == start
    assert address(np.from_dlpack(column)) == start


@pytest.mark.needs("jax")
@pytest.mark.parametrize("framework", ["numpy", "jax"])
def test_jax_takes_columns_without_a_copy(framework: str) -> None:
    import jax

    vectors = DocumentArray[Vector]([Vector(at=np.full(3, n, np.float32)) for n in range(4)])
    column: Any = vectors.stack(framework=framework).column("at")
    start = column.data.unsafe_buffer_pointer() if framework == "jax" else address(column.data)
    array = jax.dlpack.from_dlpack(column)
    assert (np.asarray(array) == np.asarray(column.data)).all()
    if start % 64 == 0:  # jax copies data that is not aligned
        assert array.unsafe_buffer_pointer() == start


def test_slice_of_a_batch_shares_memory() -> None:
    batch = batch_of("numpy")
    part: Any = batch[1:3].column("at")
    assert address(np.from_dlpack(part)) == address(batch.at) + batch.at[0].nbytes


def test_lent_column_gives_its_own_copy() -> None:
    borrowed = np.ones((2, 3), np.float32)
    field = Point.document_schema().by_name["at"]
    lent = LentColumn.lend(TensorColumn(field, borrowed, batch_of("numpy").column("at").framework))  # type: ignore[attr-defined]
    array = np.from_dlpack(lent)  # type: ignore[arg-type]
    assert address(array) == address(lent.data) != address(borrowed)


def test_columns_without_one_tensor_have_no_dlpack() -> None:
    batch = batch_of("numpy")
    assert isinstance(batch.column("weight"), ScalarColumn)
    for path in ("path", "name"):
        assert not hasattr(batch.column(path), "__dlpack__")
