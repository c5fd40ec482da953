"""TensorFlowTensor: a wrapper that TensorFlow accepts as a tensor, and that pydantic can validate."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

pytestmark = pytest.mark.needs("tensorflow")


def test_wrapped_tensor_is_accepted_as_a_tensor() -> None:
    import tensorflow as tf

    from quire.typing import TensorFlowTensor

    t = TensorFlowTensor(tensor=tf.zeros((224, 224)))
    for value in (t.tensor, t.unwrap(), t):
        broadcasted = tf.broadcast_to(value, (3, 224, 224))
        assert broadcasted.shape == (3, 224, 224)
        assert isinstance(broadcasted, tf.Tensor)


def test_functions_layers_and_operators_accept_wrapped_tensors() -> None:
    import tensorflow as tf

    from quire.typing import TensorFlowTensor

    t = TensorFlowTensor(tensor=tf.ones((2, 3)))
    assert tf.matmul(t, t, transpose_b=True).numpy().tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert (tf.ones((2, 3)) + t).numpy().sum() == 12
    assert (t * 2).shape == (2, 3)
    assert tf.keras.layers.Dense(4)(t).shape == (2, 4)
    assert tf.function(lambda value: value + 1)(t).numpy().sum() == 12


def test_pydantic_validates_wrapped_tensors() -> None:
    import tensorflow as tf

    from quire.typing import TensorFlowTensor

    adapter: Any = TypeAdapter(TensorFlowTensor)
    ours = adapter.validate_python(tf.zeros((5,)))
    assert isinstance(ours, TensorFlowTensor)
    assert ours.unwrap().shape == (5,)
    shaped: Any = TypeAdapter(TensorFlowTensor[5])
    assert shaped.validate_python(tf.zeros((5,))).shape == (5,)
    with pytest.raises(ValueError, match=r"\(5,\)"):
        shaped.validate_python(tf.zeros((4,)))


def test_document_field_holds_a_wrapped_tensor() -> None:
    import tensorflow as tf

    from quire import BaseDocument
    from quire.typing import TensorFlowTensor

    class Picture(BaseDocument):
        pixels: TensorFlowTensor

    picture = Picture(pixels=tf.zeros((2, 2)))
    assert isinstance(picture.pixels, TensorFlowTensor)
    assert tf.reduce_sum(picture.pixels).numpy() == 0
