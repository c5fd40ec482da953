"""Estimator.from_keras: every kind of data, exact means, checkpoints, and several workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf

from quire import DocumentArray
from quire.data import StreamingDataset
from quire.distributed.estimator._options import ColumnSelection
from quire.distributed.estimator._ranks import RankInfo, World
from quire.distributed.estimator._tensorflow import KerasBackend, KerasTraining
from quire.distributed.tf.estimator import Estimator
from quire.errors import OptionError, PickleError, StorageNotFoundError
from tests.distributed.sample_training import WEIGHTS, Point, points, written

pytestmark = [pytest.mark.needs("torch", "tensorflow", "pyarrow", "fsspec", "xxhash", "cloudpickle")]
ROWS = 25


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence TensorFlow's own warnings."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("points") / "d", ROWS)


def linear(config: Any = None) -> Any:
    del config
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    return model


def arrays() -> tuple[np.ndarray, np.ndarray]:
    created = points(ROWS)
    return np.stack([point.x for point in created]), np.array([[point.y] for point in created], np.float32)


def generated(config: Any) -> Any:
    """Return a pipeline of a generator, with Python functions in it."""
    x, y = arrays()

    def rows() -> Iterator[Any]:
        yield from zip(x, y, strict=True)

    def halved(value: Any) -> Any:
        return value / 2

    def in_python(image: Any, label: Any) -> Any:
        first = tf.numpy_function(halved, [image], tf.float32)
        second = tf.py_function(lambda value: value * 2, [first], tf.float32)
        return tf.ensure_shape(second, (3,)), label

    signature = (tf.TensorSpec((3,), tf.float32), tf.TensorSpec((1,), tf.float32))
    created = tf.data.Dataset.from_generator(rows, output_signature=signature).map(in_python)
    return created.batch(config["batch_size"])


DATA: dict[str, Any] = {
    "arrays": lambda _: arrays(),
    "pipeline of batches": lambda _: tf.data.Dataset.from_tensor_slices(arrays()).shuffle(10).batch(4),
    "pipeline of rows": lambda _: tf.data.Dataset.from_tensor_slices((arrays()[0], arrays()[1][:, 0])).shuffle(10),
    "generator and functions": lambda _: generated({"batch_size": 4}),
    "creator": lambda _: generated,
    "stream": lambda folder: StreamingDataset[Point](folder, batch_size=4),
    "address": str,
    "documents": lambda _: DocumentArray[Point](points(ROWS)),
}


@pytest.mark.parametrize("kind", DATA)
def test_keras_fit_accepts_every_kind_of_data(kind: str, folder: Path) -> None:
    model = linear()
    documents = kind in ("stream", "address", "documents")
    columns: Any = {"feature_cols": ["x"], "labels_cols": ["y"]} if documents else {}
    history = Estimator.from_keras(keras_model=model).fit(DATA[kind](folder), epochs=12, batch_size=4, **columns)
    assert [logs["epoch"] for logs in history] == list(range(12))
    assert np.allclose(model.get_weights()[0][:, 0], WEIGHTS, atol=0.05)


def test_keras_means_and_predictions_match_keras() -> None:
    x, y = arrays()
    model = linear()
    estimator = Estimator.from_keras(keras_model=model)
    estimator.fit((x, y), batch_size=7)
    actual = estimator.evaluate((x, y), batch_size=7)
    assert [actual["loss"], actual["mae"]] == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-5)
    assert np.allclose(estimator.predict(x, batch_size=7), model.predict(x, verbose=0), atol=1e-6)
    documents = estimator.predict(DocumentArray[Point](points(ROWS)), feature_cols="x")
    assert documents[3].prediction.shape == (1,)


def test_keras_step_matches_the_step_of_keras() -> None:
    x, y = arrays()
    ours, theirs = linear(), linear()
    Estimator.from_keras(keras_model=ours).fit((x, y), epochs=3, batch_size=5, shuffle=False)
    theirs.fit(x, y, epochs=3, batch_size=5, shuffle=False, verbose=0)
    assert np.allclose(ours.get_weights()[0], theirs.get_weights()[0], atol=1e-6)


def test_keras_step_applies_loss_scaling() -> None:
    """As with mixed precision: the optimizer scales the loss, and scales the gradients back."""
    weights = []
    for own in (True, False):
        model = linear()
        model.compile(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        if own:
            model.train_on_batch(*arrays())
        else:
            Estimator.from_keras(model).fit(arrays(), batch_size=ROWS, shuffle=False)
        weights.append(model.get_weights()[0])
    assert np.allclose(*weights, atol=1e-6)


class OwnSteps(keras.Model):
    """Trains with half of the gradient, and reports a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y)) / 2
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "half": tf.constant(0.5)}

    def test_step(self, data: Any) -> Any:
        return {"loss": tf.cast(tf.shape(data[0])[0], tf.float32)}


def test_keras_honours_steps_of_a_model_on_one_worker() -> None:
    x, y = arrays()
    ours, theirs = OwnSteps(), OwnSteps()
    for model in (ours, theirs):
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        model(x)
    estimator = Estimator.from_keras(ours)
    [logs] = estimator.fit((x, y), batch_size=5, shuffle=False)
    expected = theirs.fit(x, y, batch_size=5, shuffle=False, verbose=0).history
    assert np.allclose(ours.get_weights()[0], theirs.get_weights()[0], atol=1e-6)
    assert logs == {"epoch": 0, "loss": pytest.approx(expected["loss"][0]), "half": 0.5}
    assert estimator.evaluate((x, y), batch_size=ROWS) == {"loss": float(ROWS)}
    assert len(estimator.predict(x)) == ROWS


def test_keras_rejects_steps_of_a_model_on_several_workers() -> None:
    model = OwnSteps()
    model.compile(optimizer="sgd", loss="mse")
    backend = KerasBackend(model, World(RankInfo(0, 2)), ColumnSelection())
    job: Any = SimpleNamespace(validation=None)
    with pytest.raises(OptionError, match=r"OwnSteps overrides train_step\(\), and 2 workers cannot call it"):
        KerasTraining(job, backend, backend.world)  # before the data is opened
    with pytest.raises(OptionError, match=r"OwnSteps overrides test_step\(\)"):
        backend.check_step("test_step")
    assert not backend.check_step("predict_step")


class Largest(keras.metrics.Metric):
    """Has a state that is not a sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # noqa: ARG002
        self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.value


class SumOfRows(keras.metrics.Mean):
    additive_state = True


def test_keras_rejects_non_additive_metrics_on_several_workers() -> None:
    model = linear()
    model.compile(optimizer="sgd", loss="mse", metrics=[Largest(), keras.metrics.AUC(), "mae"])
    KerasBackend(model, World(), ColumnSelection())
    with pytest.raises(OptionError, match=r"largest is of the class Largest.*additive_state = True"):
        KerasBackend(model, World(RankInfo(0, 2)), ColumnSelection())
    model.compile(optimizer="sgd", loss="mse", metrics=[SumOfRows(), keras.metrics.AUC()])
    KerasBackend(model, World(RankInfo(0, 2)), ColumnSelection())


def test_keras_passes_two_columns_as_two_inputs() -> None:
    user, item = keras.Input((), name="user"), keras.Input((), name="item")
    joined = keras.layers.Concatenate()([keras.layers.Reshape((1,))(user), keras.layers.Reshape((1,))(item)])
    model = keras.Model([user, item], keras.layers.Dense(1)(joined))
    estimator = Estimator.from_keras(model, compile_args={"optimizer": "sgd", "loss": "mse"})
    data = {"user": np.arange(8.0), "item": np.arange(8.0), "label": np.ones(8)}
    [logs] = estimator.fit(data, feature_cols=["user", "item"], labels_cols=["label"])
    assert np.isfinite(logs["loss"])


def test_keras_callbacks_are_called() -> None:
    x, y = arrays()
    stopping = keras.callbacks.EarlyStopping(monitor="loss", min_delta=100.0, patience=1)
    assert len(Estimator.from_keras(linear()).fit((x, y), epochs=9, callbacks=[stopping])) == 2


def test_keras_models_are_saved_and_loaded(tmp_path: Path) -> None:
    x, y = arrays()
    trained = Estimator.from_keras(linear(), model_dir=tmp_path / "m")
    trained.fit((x, y), epochs=2)
    expected = trained.predict(x)
    for name in ("model.keras", "model.weights.h5"):
        trained.save(tmp_path / name)
        fresh = Estimator.from_keras(model_creator=linear)
        fresh.load(tmp_path / name)
        assert np.allclose(fresh.predict(x), expected)
    fresh = Estimator.from_keras(linear())
    fresh.load(str(Estimator.latest_checkpoint(tmp_path / "m")))
    assert np.allclose(fresh.predict(x), expected)
    with pytest.raises(OptionError, match=r"\.keras file"):
        trained.save(tmp_path / "model.pt")
    with pytest.raises(StorageNotFoundError, match="there is no such file"):
        trained.load(tmp_path / "none.keras")


def test_keras_rejects_unusable_models_and_data() -> None:
    x, y = arrays()
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(OptionError, match="needs a compiled model"):
        Estimator.from_keras(plain).fit((x, y))
    with pytest.raises(OptionError, match="keras_model must be a Keras model"):
        Estimator.from_keras(5)
    with pytest.raises(OptionError, match="Pass feature_cols and label_cols"):
        Estimator.from_keras(linear()).fit(DocumentArray[Point](points(4)))
    with pytest.raises(PickleError, match="creates it there"):
        Estimator.from_keras(linear(), workers=2).fit(tf.data.Dataset.from_tensor_slices((x, y)))


def test_keras_two_workers_match_one_on_tf_data() -> None:
    one, two = linear(), linear()
    Estimator.from_keras(one).fit(arrays(), epochs=2, batch_size=10, shuffle=False)
    estimator = Estimator.from_keras(two, workers=2)
    history = estimator.fit(arrays(), epochs=2, batch_size=5, shuffle=False)
    assert np.allclose(one.get_weights()[0], two.get_weights()[0], atol=1e-5)
    alone = Estimator.from_keras(linear()).fit(arrays(), epochs=2, batch_size=10, shuffle=False)
    for first, second in zip(alone, history, strict=True):
        assert list(first.values()) == pytest.approx(list(second.values()), rel=1e-4)
    [logs] = estimator.fit(generated, batch_size=4)
    assert logs["epoch"] == 2
    assert logs["loss"] < history[0]["loss"]
