"""The same dataset for numpy, TensorFlow, JAX and paddle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.data import MultiModalDataset, batched
from quire.errors import ColumnError, OptionError, QuireError
from quire.typing import NdArray, float32


class Meaning(BaseDocument):
    text: str
    weight: float = 1.0


class Sample(BaseDocument):
    vector: NdArray[float32, 3]
    label: int
    score: float | None = None
    name: str = ""
    meaning: Meaning
    tags: dict[str, Any] = {}


def samples(number: int = 10) -> DocumentArray[Sample]:
    return DocumentArray[Sample](
        Sample(
            id=str(i),
            vector=np.full(3, i, np.float32),
            label=i,
            score=None if i % 2 else i,
            name=f"name {i}",
            meaning=Meaning(text=f"text {i}"),
        )
        for i in range(number)
    )


def dataset(number: int = 10, **options: Any) -> MultiModalDataset[Sample]:
    options = {"missing": "mask", **options}
    return MultiModalDataset[Sample](samples(number), {"vector": double, "name": len}, **options)


@batched
def double(vector: Any) -> Any:
    return vector * 2


# --- iter_batches


def test_numpy_batches_have_arrays() -> None:
    batches = list(dataset().iter_batches(4, framework="numpy"))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    for batch in batches:
        assert {type(batch[name]) for name in ("vector", "label", "score", "name")} == {np.ndarray}
        assert batch.vector.tolist() == [[2.0 * label] * 3 for label in batch.label.tolist()]
        assert batch.validity("score").tolist() == [label % 2 == 0 for label in batch.label.tolist()]
    own = dataset(framework="numpy").__getitems__([1])
    assert {type(own[name]) for name in ("vector", "label", "score", "name")} == {np.ndarray}


def test_iter_batches_orders_shuffles_and_drops_the_last() -> None:
    ds = dataset()

    def labels(**options: Any) -> list[int]:
        return [int(label) for batch in ds.iter_batches(4, **options) for label in batch.label]

    assert labels() == list(range(10))
    assert labels(drop_last=True) == list(range(8))
    assert sorted(labels(shuffle=True)) == list(range(10))
    assert labels(shuffle=True, seed=1) == labels(shuffle=True, seed=1) != labels(shuffle=True, seed=2)
    assert list(ds[:0].iter_batches(4)) == []
    with pytest.raises(QuireError):
        list(ds.iter_batches(0))


@pytest.mark.needs("torch")
def test_torch_is_the_default_if_installed() -> None:
    import torch

    [batch] = dataset().iter_batches(10)
    assert {type(batch[name]) for name in ("vector", "label", "score", "name")} == {torch.Tensor}


@pytest.mark.needs("jax")
def test_jax_batches_have_jax_arrays() -> None:
    import jax
    import jax.numpy as jnp

    for ds in (dataset(), dataset(framework="jax")):
        for batch in ds.iter_batches(4, framework="jax", shuffle=True, seed=0):
            assert isinstance(batch.vector, jax.Array)
            assert batch.label.dtype == jnp.int32
            assert batch.score.dtype == batch.meaning.weight.dtype == jnp.float32
            assert jnp.array_equal(batch.vector[:, 0], 2 * batch.label)
            assert jnp.array_equal(batch.validity("score"), batch.label % 2 == 0)
            gradient = jax.grad(lambda w, x: (x @ w).sum())(jnp.ones(3), batch.vector)
            assert gradient.shape == (3,)


@pytest.mark.needs("tensorflow")
def test_tensorflow_batches_have_tensorflow_tensors() -> None:
    import tensorflow as tf

    for batch in dataset().iter_batches(4, framework="tensorflow"):
        assert isinstance(batch.label, tf.Tensor)
        assert isinstance(batch.vector, tf.Tensor)
        assert batch.vector.shape == (len(batch), 3)


@pytest.mark.needs("paddle")
def test_paddle_fields_are_changed_in_place() -> None:
    """The values that a function gets may be copies of the column: what it does to them is not lost."""
    import paddle

    from quire.typing import PaddleTensor

    class Heavy(BaseDocument):
        tensor: PaddleTensor

    def change(tensor: Any) -> None:
        tensor[0] = 7.0

    ds = MultiModalDataset[Heavy]([Heavy(tensor=paddle.ones([2]))], {"tensor": change})
    assert ds[0].tensor.tolist() == [7.0, 1.0]
    [batch] = ds.iter_batches(1, framework="paddle")
    assert isinstance(batch.tensor, paddle.Tensor)


# --- to_tf_dataset


@pytest.mark.needs("tensorflow")
def test_element_specs_are_typed() -> None:
    import tensorflow as tf

    spec = dataset().to_tf_dataset(4, labels="label").element_spec
    assert spec == (
        {
            "vector": tf.TensorSpec((None, 3), tf.float32),
            "score": tf.TensorSpec((None,), tf.float64),
            "name": tf.TensorSpec((None,), tf.int64),
            "meaning": {
                "text": tf.TensorSpec((None,), tf.string),
                "weight": tf.TensorSpec((None,), tf.float64),
            },
        },
        tf.TensorSpec((None,), tf.int64),
    )


@pytest.mark.needs("tensorflow")
def test_features_and_labels_are_selected_by_path() -> None:
    ds = dataset()
    one = next(iter(ds.to_tf_dataset(4, features="vector")))
    assert one.numpy().tolist() == [[2.0 * i] * 3 for i in range(4)]
    features, labels = next(iter(ds.to_tf_dataset(4, features=["vector", "meaning.text"], labels=["label"])))
    assert set(features) == {"vector", "meaning.text"}
    assert features["meaning.text"].numpy().tolist() == [b"text 0", b"text 1", b"text 2", b"text 3"]
    assert labels["label"].numpy().tolist() == [0, 1, 2, 3]
    with pytest.raises(ColumnError, match=r"tags: a dict\[str, Any\] has no form as a TensorFlow tensor"):
        ds.to_tf_dataset(4, features="tags")
    with pytest.raises(QuireError, match="Did you mean 'label'"):
        ds.to_tf_dataset(4, labels="lable")


@pytest.mark.needs("tensorflow")
def test_tf_dataset_shuffles_every_pass_anew() -> None:
    def passes(**options: Any) -> list[list[int]]:
        data = dataset().to_tf_dataset(4, features="label", **options)
        return [[int(label) for batch in data for label in batch] for _ in range(3)]

    shuffled = passes(shuffle=True, seed=5)
    assert all(sorted(one) == list(range(10)) for one in shuffled)
    assert shuffled[0] != shuffled[1] != shuffled[2]
    assert passes(shuffle=True, seed=5) == shuffled
    assert passes() == [list(range(10))] * 3
    assert passes(drop_last=True) == [list(range(8))] * 3
    assert len(dataset().to_tf_dataset(4)) == 3
    assert len(dataset().to_tf_dataset(4, drop_last=True)) == 2


@pytest.mark.needs("tensorflow")
def test_keras_model_fits_and_predicts() -> None:
    import tensorflow as tf

    data = dataset(32).to_tf_dataset(8, features="vector", labels="label", shuffle=True, seed=0)
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    model.compile(optimizer=tf.keras.optimizers.SGD(1e-5), loss="mse")
    history = model.fit(data, epochs=3, shuffle=False, verbose=0).history["loss"]
    assert len(history) == 3
    assert history[-1] < history[0]
    assert model.predict(dataset(32).to_tf_dataset(8, features="vector"), verbose=0).shape == (32, 1)


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("size", [0, -1, "4", 1.5])
def test_to_tf_dataset_rejects_invalid_batch_sizes(size: Any) -> None:
    with pytest.raises(OptionError, match="batch_size"):
        dataset().to_tf_dataset(size)
