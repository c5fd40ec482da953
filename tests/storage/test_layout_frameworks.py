"""Tensors of every framework round-trip through Arrow data."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import create_model

from quire import BaseDocument
from quire.storage._layout import Layout
from quire.tensors import DType, Shape
from quire.typing import AnyTensor, float32
from tests.codec.round_trips import exact
from tests.storage.sample_documents import encoded, gathered

pytestmark = pytest.mark.needs("pyarrow")


def _class(**fields: Any) -> Any:
    """Make a document class whose annotations are values of the test."""
    return create_model("Row", __base__=BaseDocument, **{name: (tp, ...) for name, tp in fields.items()})


def _comes_back(documents: list[Any], document_type: type[Any]) -> None:
    layout = Layout(document_type.document_schema())
    assert exact(gathered(layout, [encoded(documents, document_type)], [2, 0, 1]), [documents[n] for n in (2, 0, 1)])


@pytest.mark.needs("torch")
def test_torch_tensors_round_trip() -> None:
    import torch

    row_type = _class(
        fixed=Annotated[torch.Tensor, Shape(2), DType("bfloat16")], ragged=torch.Tensor, any_one=AnyTensor
    )
    documents = [
        row_type(fixed=torch.ones(2, dtype=torch.bfloat16) * n, ragged=torch.arange(n), any_one=torch.ones(n, 1))
        for n in range(3)
    ]
    _comes_back(documents, row_type)
    assert (
        type(gathered(Layout(row_type.document_schema()), [encoded(documents, row_type)], [1])[0].fixed) is torch.Tensor
    )


@pytest.mark.needs("tensorflow")
def test_tensorflow_tensors_round_trip() -> None:
    import tensorflow as tf

    from quire.typing import TensorFlowTensor

    row_type = _class(fixed=TensorFlowTensor[float32, 2], any_one=AnyTensor)
    documents = [row_type(fixed=tf.ones(2) * n, any_one=tf.ones((n, 1))) for n in range(3)]
    result = gathered(Layout(row_type.document_schema()), [encoded(documents, row_type)], [2, 0])
    assert isinstance(result[0].fixed, TensorFlowTensor)
    assert result[0].fixed.numpy().tolist() == [2, 2]
    assert result[0].any_one.shape == (2, 1)
    assert result[1].any_one.shape == (0, 1)


@pytest.mark.needs("jax")
def test_jax_tensors_round_trip() -> None:
    import jax
    import jax.numpy as jnp

    row_type = _class(fixed=Annotated[jax.Array, Shape(2), DType("float32")], any_one=AnyTensor)
    documents = [row_type(fixed=jnp.ones(2) * n, any_one=jnp.ones((n, 1))) for n in range(3)]
    _comes_back(documents, row_type)
    assert isinstance(
        gathered(Layout(row_type.document_schema()), [encoded(documents, row_type)], [1])[0].any_one, jax.Array
    )
