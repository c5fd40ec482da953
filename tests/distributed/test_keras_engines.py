"""Keras on Ray and on Spark: two workers take the same steps as one local process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest

from quire.distributed import DocumentShards
from quire.distributed.tf.estimator import Estimator
from tests.distributed.sample_training import Point, points

pytestmark = [
    pytest.mark.needs("torch", "tensorflow", "pyarrow", "fsspec", "xxhash", "cloudpickle", "ray", "pyspark"),
    pytest.mark.filterwarnings("ignore"),
]
ROWS = 25


@pytest.fixture(scope="module", params=["ray", "spark"])
def name(request: pytest.FixtureRequest, start_engine: Callable[[str], Any]) -> str:
    """An engine by name. Ray comes first: it may hang in a process with TensorFlow that starts Java."""
    start_engine(request.param)
    return str(request.param)


def linear(config: Any = None) -> Any:
    del config
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    return model


def arrays() -> tuple[np.ndarray, np.ndarray]:
    created = points(ROWS)
    return np.stack([point.x for point in created]), np.array([[point.y] for point in created], np.float32)


def test_two_workers_of_an_engine_match_one_process(name: str) -> None:
    alone, together = linear(), linear()
    expected = Estimator.from_keras(alone).fit(arrays(), epochs=2, batch_size=10, shuffle=False)
    estimator = Estimator.from_keras(together, engine=name, workers=2)
    history = estimator.fit(arrays(), epochs=2, batch_size=5, shuffle=False)
    for mine, other in zip(together.get_weights(), alone.get_weights(), strict=True):
        assert np.allclose(mine, other, atol=1e-5)
    for first, second in zip(expected, history, strict=True):
        assert list(first.values()) == pytest.approx(list(second.values()), rel=1e-4)


def test_keras_predicts_on_shards_of_an_engine(name: str, start_engine: Callable[[str], Any]) -> None:
    estimator = Estimator.from_keras(linear())
    estimator.fit(arrays(), epochs=2, batch_size=5)
    shards = DocumentShards[Point].from_documents(points(ROWS), num_partitions=2, engine=start_engine(name))
    actual = {
        document.number: float(document.prediction[0]) for document in estimator.predict(shards, feature_cols="x")
    }
    expected = estimator.predict(arrays()[0])[:, 0].tolist()
    assert actual == pytest.approx(dict(enumerate(expected)), abs=1e-5)
