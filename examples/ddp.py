"""Train one model in two processes with DDP: both read the same number of batches, and every row once.

python examples/ddp.py     # writes a dataset, and runs: torchrun --standalone --nproc-per-node 2 examples/ddp.py rows
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.storage import write_dataset
from quire.typing import NdArray, float32

ROWS = 2_003  # a prime number, which no number of ranks divides


class Row(BaseDocument):
    """A vector, and a number computed from it."""

    x: NdArray[float32, 3]
    y: float
    number: int


def write_rows(url: str) -> None:
    """Write the dataset that both processes read."""
    vectors = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    rows = (Row(x=x, y=float(x @ [1.0, -2.0, 0.5]), number=i) for i, x in enumerate(vectors))
    write_dataset(rows, url, document_type=Row, format="arrow")


def train(url: str, epochs: int) -> tuple[nn.Module, list[int], list[int]]:
    """Return the model, the steps of each epoch on this rank, and the rows of the last epoch."""
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = StreamingDataset[Row](url, batch_size=32)  # gets its rank from torch.distributed
    steps: list[int] = []
    for _ in range(epochs):
        count, numbers = 0, []
        for batch in dataset.loader():
            loss = nn.functional.mse_loss(model(batch.x).squeeze(1), batch.y.float())
            optimizer.zero_grad()
            loss.backward()  # averages gradients over the ranks, so all ranks need the same number of steps
            optimizer.step()
            numbers += batch.number.tolist()
            count += 1
        steps.append(count)
    return model.module, steps, numbers


@torch.no_grad()
def evaluate(url: str, model: nn.Module) -> tuple[float, int]:
    """Return the error over all rows, and their number; rows that pad the last batch do not count."""
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in StreamingDataset[Row](url, batch_size=32, shuffle=False, last="pad"):
        real = batch.mask()
        errors = (model(batch.x).squeeze(1) - batch.y) ** 2
        totals += torch.stack([errors[real].double().sum(), real.sum()])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1]), int(totals[1])


def gather(value: object) -> list[object]:
    """Return the values of all ranks."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main(url: str) -> None:
    """Train and evaluate on one rank."""
    dist.init_process_group("gloo")
    model, steps, numbers = train(url, epochs=3)
    error, counted = evaluate(url, model)
    all_steps, all_numbers = gather(steps), gather(numbers)
    weights = gather([parameter.tolist() for parameter in model.parameters()])
    if dist.get_rank() == 0:
        print("steps per epoch:", *all_steps)
        print("rows of the last epoch:", *(len(numbers) for numbers in all_numbers))
        print(f"error over {counted:,} rows: {error:.6f}")
        assert all_steps[0] == all_steps[1]  # equal steps on every rank
        assert sorted(all_numbers[0] + all_numbers[1]) == list(range(ROWS))  # every row once, on one of the ranks
        assert weights[0] == weights[1]  # the same model
        assert counted == ROWS
        assert error < 0.01
    dist.barrier()  # no rank exits while another one still communicates
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:  # torchrun started this process
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_rows(f"{folder}/rows")
            torchrun(["--standalone", "--nproc-per-node", "2", __file__, f"{folder}/rows"])
