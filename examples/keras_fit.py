"""Train a Keras model with `model.fit` on documents in memory, and then on the same documents on disk.

python examples/keras_fit.py
"""

from __future__ import annotations

import tempfile

import numpy as np
import tensorflow as tf

from quire import BaseDocument, DocumentArray
from quire.data import MultiModalDataset, StreamingDataset, batched
from quire.storage import write_dataset
from quire.typing import NdArray, TensorFlowTensor, float32, uint8


class House(BaseDocument):
    """A photo of a house, its attributes, and whether it was sold."""

    photo: NdArray[uint8, 8, 8, 3]
    rooms: int
    age: float
    sold: bool


def houses(number: int) -> list[House]:
    """Create random houses, of which bright and large ones are sold."""
    random = np.random.default_rng(0)
    documents = []
    for _ in range(number):
        light, rooms = random.integers(64, 256), int(random.integers(1, 9))
        photo = random.integers(0, light, (8, 8, 3), dtype=np.uint8)
        documents.append(House(photo=photo, rooms=rooms, age=random.uniform(0, 100), sold=light / 32 + rooms > 9))
    return documents


@batched
def to_floats(photos: np.ndarray) -> np.ndarray:
    """Convert bytes to floats around zero."""
    return photos.astype(np.float32) / 128 - 1


PREPROCESSING = {
    "photo": to_floats,
    "rooms": batched(lambda rooms: (rooms / 9).astype(np.float32)[:, None]),
    "sold": batched(lambda sold: sold.astype(np.float32)),
}


def make_model() -> tf.keras.Model:
    """Create a model with two inputs named like the fields, and a probability as output."""
    photo, rooms = tf.keras.Input((8, 8, 3), name="photo"), tf.keras.Input((1,), name="rooms")
    seen = tf.keras.layers.GlobalAveragePooling2D()(photo)
    both = tf.keras.layers.Dense(16, activation="relu")(tf.keras.layers.Concatenate()([seen, rooms]))
    model = tf.keras.Model({"photo": photo, "rooms": rooms}, tf.keras.layers.Dense(1, activation="sigmoid")(both))
    model.compile(optimizer=tf.keras.optimizers.Adam(0.02), loss="binary_crossentropy", metrics=["accuracy"])
    return model


def fit_in_memory(model: tf.keras.Model, documents: DocumentArray[House]) -> float:
    """Train for several epochs, each with a new order, and return the accuracy."""
    dataset = MultiModalDataset[House](documents, PREPROCESSING, framework="numpy")
    data = dataset.to_tf_dataset(64, features=["photo", "rooms"], labels="sold", shuffle=True, seed=0)
    history = model.fit(data, epochs=3, shuffle=False, verbose=0)
    print("in memory:", [f"{accuracy:.2f}" for accuracy in history.history["accuracy"]])
    return float(history.history["accuracy"][-1])


def fit_from_disk(model: tf.keras.Model, url: str) -> float:
    """Train on a dataset that may be larger than memory, and return the accuracy."""
    dataset = StreamingDataset[House](url, 64, PREPROCESSING, framework="numpy", seed=0)
    data = dataset.to_tf_dataset(features=["photo", "rooms"], labels="sold")
    history = model.fit(data, epochs=2, shuffle=False, verbose=0)
    print("from disk:", [f"{accuracy:.2f}" for accuracy in history.history["accuracy"]])
    return float(history.history["accuracy"][-1])


class Prediction(BaseDocument):
    """A prediction, as a TensorFlow tensor in a document."""

    sold: TensorFlowTensor[float32, 1]


def main() -> None:
    """Train twice, and store a prediction as a document."""
    tf.keras.utils.set_random_seed(0)
    documents, model = DocumentArray[House](houses(2_000)), make_model()
    first = fit_in_memory(model, documents)
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(documents, f"{folder}/houses", format="arrow")
        second = fit_from_disk(model, f"{folder}/houses")
    assert 0.8 < first <= second + 0.02

    one = MultiModalDataset[House](documents, PREPROCESSING, framework="numpy").__getitems__([0])
    prediction = Prediction(sold=model({"photo": one.photo, "rooms": one.rooms})[0])
    assert Prediction.from_bytes(prediction.to_bytes()) == prediction
    print(f"sold: {documents[0].sold}, predicted probability {float(tf.squeeze(prediction.sold)):.2f}")


if __name__ == "__main__":
    main()
