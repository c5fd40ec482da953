"""Train with torch on Spark: TorchDistributor starts the ranks, and a StreamingDataset returns the share of each.

python examples/torch_distributor.py --workers 2
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.distributed import torch_distributor
from quire.storage import write_dataset
from quire.typing import NdArray, float32


class Row(BaseDocument):
    """A vector, and a number computed from it."""

    x: NdArray[float32, 3]
    y: float


def train(url: str, epochs: int) -> float:
    """Train on one rank with plain torch."""
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = StreamingDataset[Row](url, batch_size=32, last="drop")  # the share of this rank
    loss = torch.zeros(())
    for _ in range(epochs):
        for batch in dataset.loader():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch.x).squeeze(1), batch.y.float())
            loss.backward()
            optimizer.step()
    return loss.item()


def main() -> None:
    """Write a dataset, and train on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder, "rows"))
        vectors = np.random.default_rng(0).normal(size=(options.rows, 3)).astype(np.float32)
        rows = (Row(x=x, y=float(x @ [1.0, -2.0, 0.5])) for x in vectors)
        write_dataset(rows, url, document_type=Row, format="arrow")
        loss = torch_distributor(train, url, epochs=3, workers=options.workers)
        print(f"loss of rank 0: {loss:.6f}")


if __name__ == "__main__":
    main()
