"""A batch is a pytree of JAX: tree.map, jit, vmap and grad."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset
from quire.errors import ColumnError
from quire.typing import NdArray, float32

pytestmark = pytest.mark.needs("jax")

import jax  # noqa: E402 - after the mark, by which this module is left out without JAX
import jax.numpy as jnp  # noqa: E402


class Inner(BaseDocument):
    x: NdArray[float32, 2]


class Row(BaseDocument):
    vector: NdArray[float32, 3]
    name: str
    inner: Inner


def make_rows(start: int = 0) -> DocumentArray[Row]:
    return DocumentArray[Row](
        Row(vector=np.full(3, n, np.float32), name=f"row {n}", inner=Inner(x=np.full(2, n, np.float32)))
        for n in range(start, start + 4)
    )


def make_batch(start: int = 0) -> DocumentBatch[Row]:
    return make_rows(start).stack(framework="jax")


def test_tree_map_keeps_texts() -> None:
    batch = make_batch()
    mapped = jax.tree.map(lambda array: array + 1, batch)
    assert type(mapped) is DocumentBatch[Row]
    assert mapped.vector[0].tolist() == [1.0] * 3
    assert mapped.inner.x[1].tolist() == [2.0] * 2
    assert mapped.name == batch.name


def test_paths_of_leaves_are_those_of_columns() -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(make_batch())
    assert [path[0].key for path, _ in leaves] == ["vector", "inner.x"]


def test_jit_compiles_once_for_batches_with_different_texts() -> None:
    traces = []

    @jax.jit
    def total(batch: Any) -> Any:
        traces.append(1)
        return batch.vector.sum() + batch.inner.x.sum()

    assert [float(total(make_batch(start))) for start in range(10)] == [float(5 * (4 * s + 6)) for s in range(10)]
    assert len(traces) == 1


def test_jit_returns_batches_without_the_texts_of_the_traced_one() -> None:
    double = jax.jit(lambda batch: jax.tree.map(lambda array: array * 2, batch))
    first, second = double(make_batch()), double(make_batch(10))
    assert second.vector[0].tolist() == [20.0] * 3
    assert len(second) == 4
    for result in (first, second):
        with pytest.raises(ColumnError, match=r"Row.name: not available"):
            result.name  # noqa: B018


def test_texts_are_not_available_inside_of_jit() -> None:
    with pytest.raises(ColumnError, match=r"Row.name: not available.*pass it as an argument"):
        jax.jit(lambda batch: len(batch.name))(make_batch())


def test_vmap_and_grad_take_batches() -> None:
    sums = jax.vmap(lambda row: row.vector.sum() + row.inner.x.sum())(make_batch())
    assert sums.tolist() == [0.0, 5.0, 10.0, 15.0]
    gradient = jax.grad(lambda batch: (batch.vector**2).sum())(make_batch())
    assert gradient.vector[2].tolist() == [4.0] * 3


def test_numpy_batches_of_a_dataset_are_trees_of_jax() -> None:
    dataset = MultiModalDataset[Row](make_rows(), framework="numpy")
    total = jax.jit(lambda batch: jnp.sum(batch.vector))
    assert sum(float(total(batch)) for batch in dataset.iter_batches(2)) == 18.0


def test_jax_imported_after_the_class_registers_it() -> None:
    import subprocess
    import sys

    code = """
import numpy as np
from quire import BaseDocument, DocumentArray
from quire.typing import NdArray
class Point(BaseDocument):
    at: NdArray[3]
docs = DocumentArray[Point](Point(at=np.ones(3, np.float32)) for _ in range(4))
docs.stack()
import jax
assert jax.tree.map(lambda a: a + 1, docs.stack(framework='jax')).at[0].tolist() == [2.0] * 3
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
