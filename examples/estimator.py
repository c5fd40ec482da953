"""Train with an Estimator on local processes, on Ray or on Spark: only the name of the engine differs.

python examples/estimator.py --engine local --workers 2
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from quire import BaseDocument
from quire.distributed import Estimator
from quire.storage import write_dataset
from quire.typing import NdArray, float32


class Row(BaseDocument):
    """A vector, and a number computed from it."""

    x: NdArray[float32, 3]
    y: float


class Model(nn.Module):
    """A linear model from a vector to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a batch."""
        numbers: torch.Tensor = self.linear(x).squeeze(1)
        return numbers


def main() -> None:
    """Write a dataset, train on it, and evaluate the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="local", choices=["local", "ray", "spark"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder, "rows"))
        vectors = np.random.default_rng(0).normal(size=(options.rows, 3)).astype(np.float32)
        rows = (Row(x=x, y=float(x @ [1.0, -2.0, 0.5])) for x in vectors)
        write_dataset(rows, url, document_type=Row, format="arrow")
        estimator = Estimator.from_torch(
            model=Model(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.MSELoss(),
            metrics=["mae"],
            engine=options.engine,
            workers=options.workers,
            model_dir=Path(folder, "model"),
        )
        for logs in estimator.fit(url, epochs=3, batch_size=32, feature_cols="x", label_cols="y"):
            print(logs)
        print(estimator.evaluate(url, feature_cols="x", label_cols="y"))


if __name__ == "__main__":
    main()
