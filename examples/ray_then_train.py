"""Prepare documents on Ray, write a dataset, and train on it with torch, with one schema.

python examples/ray_then_train.py
"""

from __future__ import annotations

import tempfile
from typing import Annotated

import numpy as np
import torch
from torch import nn

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.distributed import DocumentShards
from quire.distributed import engine as engine_of
from quire.storage import write_dataset
from quire.typing import DType, NdArray, Shape, float32


class Recording(BaseDocument):
    """A tone with noise; some recordings are too short."""

    samples: Annotated[np.ndarray, Shape("n"), DType("int16")]
    high: bool


class Example(BaseDocument):
    """A training example."""

    spectrum: NdArray[float32, 64]
    high: bool


def recordings(number: int) -> list[Recording]:
    """Create random recordings of high and low tones."""
    random, documents = np.random.default_rng(0), []
    for i in range(number):
        high = bool(random.random() < 0.5)
        length = 40 if i % 50 == 0 else int(random.integers(256, 512))  # every 50th is too short
        tone = np.sin(np.arange(length) * random.uniform(*((0.9, 1.6) if high else (0.2, 0.8))))
        samples = (4_000 * (tone + random.normal(size=length))).astype(np.int16)
        documents.append(Recording(id=f"{i:05d}", samples=samples, high=high))
    return documents


class ToSpectrum:
    """A callable that is created once per worker, for expensive setup such as loading a model."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.window = np.hanning(2 * size)

    def __call__(self, recording: Recording) -> Example:
        """Return the power of 64 frequencies; a recording that is too short raises an error."""
        samples = recording.samples[: 2 * self.size] * self.window  # fails if the recording is too short
        power = np.abs(np.fft.rfft(samples))[: self.size] ** 2  # the tone exceeds the noise
        return Example(spectrum=(power / power.max()).astype(np.float32), high=recording.high)


def prepare(source: str, target: str) -> int:
    """Read, convert and write on Ray, skipping rows that fail; return the number of examples."""
    on_ray = engine_of("ray", num_cpus=2)
    shards = DocumentShards[Recording].read_parquet(source, num_partitions=4, engine=on_ray)
    examples = shards.map(ToSpectrum, 64, on_error="skip")
    train, test = examples.split(0.8, 0.2, seed=1)  # by a hash of the id, so the parts are always the same
    train.write_dataset(f"{target}/train", format="arrow")
    test.write_dataset(f"{target}/test", format="arrow")
    return len(examples)


def train(url: str, epochs: int) -> nn.Module:
    """Train on the dataset that Ray has written."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    dataset = StreamingDataset[Example](url, batch_size=32)
    for epoch in range(epochs):
        for batch in dataset.loader():
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch.spectrum).squeeze(1), batch.high.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: last loss {loss.item():.3f}")
    return model


@torch.no_grad()
def accuracy(url: str, model: nn.Module) -> float:
    """Return the fraction of examples that the model classifies correctly."""
    dataset = StreamingDataset[Example](url, batch_size=256, shuffle=False)
    is_correct = [(model(batch.spectrum).squeeze(1) > 0) == batch.high for batch in dataset]
    return torch.cat(is_correct).float().mean().item()


def main() -> None:
    """Create recordings, prepare them on Ray, and train."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(recordings(1_000), f"{folder}/recordings", document_type=Recording)
        number = prepare(f"{folder}/recordings", folder)
        print(f"{number} of 1000 recordings were long enough")
        assert number == 980
        test_accuracy = accuracy(f"{folder}/test", train(f"{folder}/train", epochs=4))
        print(f"accuracy on new examples: {test_accuracy:.0%}")
        assert test_accuracy > 0.9


if __name__ == "__main__":
    main()
