"""Estimators with data of tensorflow_datasets, torchvision, creator functions and Spark."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

pytestmark = [
    pytest.mark.needs("torch", "lightning", "tensorflow", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore"),
]


def load(name: str, split: str, data_dir: str) -> Any:
    """Return a tf.data pipeline of digits like tensorflow_datasets: dicts of one image and one label."""
    assert (name, split, data_dir) == ("mnist", "train", "digits")
    images = np.random.default_rng(0).integers(0, 256, (64, 28, 28, 1)).astype(np.uint8)
    return tf.data.Dataset.from_tensor_slices({"image": images, "label": np.arange(64) % 10})


tfds = SimpleNamespace(load=load)


class Digits(torch.utils.data.Dataset[Any]):
    """Return the same digits like torchvision: pairs of an image and a label."""

    def __init__(self, folder: str) -> None:
        assert folder == "digits"

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.full((1, 28, 28), row / 64), row % 10


def keras_model() -> Any:
    layers = [keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss, metrics=["accuracy"])
    return model


def preprocess(data: Any) -> Any:
    data["image"] = tf.cast(data["image"], tf.float32) / 255.0
    return data["image"], data["label"]


def test_fit_accepts_a_tf_data_pipeline() -> None:
    from quire.distributed.tf.estimator import Estimator

    dataset = tfds.load(name="mnist", split="train", data_dir="digits")
    dataset = dataset.map(preprocess)
    dataset = dataset.shuffle(1000)

    est = Estimator.from_keras(keras_model=keras_model())
    [logs] = est.fit(data=dataset)
    assert logs.keys() == {"epoch", "loss", "accuracy"}


def test_fit_accepts_a_torch_dataloader() -> None:
    from quire.distributed.pytorch import Estimator

    batch_size = 16
    train_loader = torch.utils.data.DataLoader(Digits("digits"), batch_size=batch_size, shuffle=True)
    torch_model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    torch_optim = torch.optim.SGD(torch_model.parameters(), lr=0.1)
    torch_criterion = torch.nn.CrossEntropyLoss()

    est = Estimator.from_torch(model=torch_model, optimizer=torch_optim, loss=torch_criterion)
    [logs] = est.fit(data=train_loader)
    assert np.isfinite(logs["loss"])


def test_fit_accepts_data_creator_functions() -> None:
    from quire.distributed import pytorch
    from quire.distributed.tf import estimator as tf_estimator

    def tf_data_creator(config: Any) -> Any:
        dataset = tfds.load(name="mnist", split="train", data_dir="digits")
        dataset = dataset.map(preprocess)
        dataset = dataset.shuffle(1000)
        return dataset.batch(config["batch_size"])

    def train_data_creator(config: Any) -> Any:
        return torch.utils.data.DataLoader(Digits(config["dir"]), batch_size=config["batch_size"], shuffle=True)

    est = tf_estimator.Estimator.from_keras(keras_model=keras_model())
    assert len(est.fit(tf_data_creator, epochs=2, batch_size=16)) == 2
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    other = pytorch.Estimator.from_torch(
        model=model, optimizer=torch.optim.Adam, loss=torch.nn.CrossEntropyLoss(), config={"dir": "digits"}
    )
    assert len(other.fit(train_data_creator, epochs=2, batch_size=16)) == 2


@pytest.mark.needs("pyspark")
def test_fit_and_predict_accept_a_spark_frame(tmp_path: Path) -> None:
    from quire.distributed import engine
    from quire.distributed._spark import spark_session
    from quire.distributed.tf.estimator import Estimator

    started = engine("spark", master="local[1]", **{"spark.sql.shuffle.partitions": "1"})
    spark = spark_session(master="local[1]")
    try:
        rows = [(float(n % 5), float(n % 3), float(n % 2)) for n in range(40)]
        spark.createDataFrame(rows, "user double, item double, label double").write.parquet(
            str(tmp_path / "data.parquet")
        )
        inputs = [keras.Input((1,), name="user"), keras.Input((1,), name="item")]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(inputs)))
        model.compile(optimizer="sgd", loss="mse")

        df = spark.read.parquet(str(tmp_path / "data.parquet"))
        est = Estimator.from_keras(keras_model=model)  # the model accepts two inputs and one label
        [logs] = est.fit(data=df, feature_cols=["user", "item"], labels_cols=["label"])
        assert np.isfinite(logs["loss"])
        predictions = est.predict(df, feature_cols=["user", "item"])
        assert predictions.columns == ["user", "item", "label", "prediction"]
        assert predictions.count() == 40
    finally:
        spark.stop()
        started.close()
