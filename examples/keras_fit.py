"""Keras fits from documents in memory, and then from the same documents on disk: `model.fit` takes both.

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
    """A photo of a house, what is known about it, and whether it was sold."""

    photo: NdArray[uint8, 8, 8, 3]
    rooms: int
    age: float
    sold: bool


def houses(number: int) -> list[House]:
    """Bright and large houses are sold, from a seeded source."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(number):
        light, rooms = random.integers(64, 256), int(random.integers(1, 9))
        photo = random.integers(0, light, (8, 8, 3), dtype=np.uint8)
        made.append(House(photo=photo, rooms=rooms, age=random.uniform(0, 100), sold=light / 32 + rooms > 9))
    return made


@batched
def to_floats(photos: np.ndarray) -> np.ndarray:
    """Bytes to numbers about zero."""
    return photos.astype(np.float32) / 128 - 1


PREPROCESSING = {
    "photo": to_floats,
    "rooms": batched(lambda rooms: (rooms / 9).astype(np.float32)[:, None]),
    "sold": batched(lambda sold: sold.astype(np.float32)),
}


def make_model() -> tf.keras.Model:
    """Two inputs that are called like the fields, and a probability."""
    photo, rooms = tf.keras.Input((8, 8, 3), name="photo"), tf.keras.Input((1,), name="rooms")
    seen = tf.keras.layers.GlobalAveragePooling2D()(photo)
    both = tf.keras.layers.Dense(16, activation="relu")(tf.keras.layers.Concatenate()([seen, rooms]))
    model = tf.keras.Model({"photo": photo, "rooms": rooms}, tf.keras.layers.Dense(1, activation="sigmoid")(both))
    model.compile(optimizer=tf.keras.optimizers.Adam(0.02), loss="binary_crossentropy", metrics=["accuracy"])
    return model


def fit_in_memory(model: tf.keras.Model, documents: DocumentArray[House]) -> float:
    """The accuracy after some epochs, each shuffled anew."""
    dataset = MultiModalDataset[House](documents, PREPROCESSING, framework="numpy")
    data = dataset.to_tf_dataset(64, features=["photo", "rooms"], labels="sold", shuffle=True, seed=0)
    history = model.fit(data, epochs=3, shuffle=False, verbose=0)
    print("in memory:", [f"{accuracy:.2f}" for accuracy in history.history["accuracy"]])
    return float(history.history["accuracy"][-1])


def fit_from_disk(model: tf.keras.Model, url: str) -> float:
    """The accuracy after some more, of a dataset that may be larger than memory."""
    dataset = StreamingDataset[House](url, 64, PREPROCESSING, framework="numpy", seed=0)
    data = dataset.to_tf_dataset(features=["photo", "rooms"], labels="sold")
    history = model.fit(data, epochs=2, shuffle=False, verbose=0)
    print("from disk:", [f"{accuracy:.2f}" for accuracy in history.history["accuracy"]])
    return float(history.history["accuracy"][-1])


class Guess(BaseDocument):
    """What the model says, as a tensor of TensorFlow in a document."""

    sold: TensorFlowTensor[float32, 1]


def main() -> None:
    """Fit twice, and keep what the model says of a house as a document."""
    tf.keras.utils.set_random_seed(0)
    documents, model = DocumentArray[House](houses(2_000)), make_model()
    first = fit_in_memory(model, documents)
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(documents, f"{folder}/houses", format="arrow")
        second = fit_from_disk(model, f"{folder}/houses")
    assert 0.8 < first <= second + 0.02

    one = MultiModalDataset[House](documents, PREPROCESSING, framework="numpy").__getitems__([0])
    guess = Guess(sold=model({"photo": one.photo, "rooms": one.rooms})[0])
    assert Guess.from_bytes(guess.to_bytes()) == guess
    print(f"sold: {documents[0].sold}, the model says {float(tf.squeeze(guess.sold)):.2f}")


if __name__ == "__main__":
    main()
