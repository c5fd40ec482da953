"""Seed 002: TensorFlowTensor. The line that fails there works here."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

pytestmark = pytest.mark.needs("tensorflow")


def test_a_wrapped_tensor_goes_where_a_tensor_goes() -> None:
    import tensorflow as tf

    from quire.typing import TensorFlowTensor

    t = TensorFlowTensor(tensor=tf.zeros((224, 224)))
    for given in (t.tensor, t.unwrap(), t):
        broadcasted = tf.broadcast_to(given, (3, 224, 224))
        assert broadcasted.shape == (3, 224, 224)
        assert isinstance(broadcasted, tf.Tensor)


def test_functions_layers_and_operators_take_it() -> None:
    import tensorflow as tf

    from quire.typing import TensorFlowTensor

    t = TensorFlowTensor(tensor=tf.ones((2, 3)))
    assert tf.matmul(t, t, transpose_b=True).numpy().tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert (tf.ones((2, 3)) + t).numpy().sum() == 12
    assert (t * 2).shape == (2, 3)
    assert tf.keras.layers.Dense(4)(t).shape == (2, 4)
    assert tf.function(lambda value: value + 1)(t).numpy().sum() == 12


def test_a_tensor_is_validated_as_one() -> None:
    """What the seed tries by subclassing tf.Tensor, and could not."""
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


def test_in_a_document() -> None:
    import tensorflow as tf

    from quire import BaseDocument
    from quire.typing import TensorFlowTensor

    class Picture(BaseDocument):
        pixels: TensorFlowTensor

    picture = Picture(pixels=tf.zeros((2, 2)))
    assert isinstance(picture.pixels, TensorFlowTensor)
    assert tf.reduce_sum(picture.pixels).numpy() == 0
