"""Two processes train one model: rows are shared out, and nobody waits for a batch that the other does not have.

python examples/ddp.py     # writes some rows, and calls: torchrun --standalone --nproc-per-node 2 examples/ddp.py rows
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

ROWS = 2_003  # a prime: it divides into nothing


class Row(BaseDocument):
    """A vector, and a number that follows from it."""

    x: NdArray[float32, 3]
    y: float
    number: int


def write_rows(url: str) -> None:
    """What both processes read."""
    vectors = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    rows = (Row(x=x, y=float(x @ [1.0, -2.0, 0.5]), number=i) for i, x in enumerate(vectors))
    write_dataset(rows, url, schema=Row, format="arrow")


def train(url: str, epochs: int) -> tuple[nn.Module, list[int], list[int]]:
    """The model, how many steps each epoch took here, and the rows that the last one gave."""
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = StreamingDataset[Row](url, batch_size=32)  # knows its rank from torch.distributed
    steps: list[int] = []
    for _ in range(epochs):
        taken, numbers = 0, []
        for batch in dataset.loader():
            loss = nn.functional.mse_loss(model(batch.x).squeeze(1), batch.y.float())
            optimizer.zero_grad()
            loss.backward()  # gradients are averaged over the ranks here, so all must take the same steps
            optimizer.step()
            numbers += batch.number.tolist()
            taken += 1
        steps.append(taken)
    return model.module, steps, numbers


@torch.no_grad()
def evaluate(url: str, model: nn.Module) -> tuple[float, int]:
    """The error over all rows, and how many those are: a row that fills up the last batch does not count."""
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in StreamingDataset[Row](url, batch_size=32, shuffle=False, last="pad"):
        real = batch.mask()
        errors = (model(batch.x).squeeze(1) - batch.y) ** 2
        totals += torch.stack([errors[real].double().sum(), real.sum()])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1]), int(totals[1])


def gather(value: object) -> list[object]:
    """Of every rank, its value."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main(url: str) -> None:
    """What each process does."""
    dist.init_process_group("gloo")
    model, steps, numbers = train(url, epochs=3)
    error, counted = evaluate(url, model)
    all_steps, all_numbers = gather(steps), gather(numbers)
    weights = gather([parameter.tolist() for parameter in model.parameters()])
    if dist.get_rank() == 0:
        print("steps of the epochs:", *all_steps)
        print("rows of the last epoch:", *(len(found) for found in all_numbers))
        print(f"the error over {counted:,} rows: {error:.6f}")
        assert all_steps[0] == all_steps[1]  # equal steps on every rank
        assert sorted(all_numbers[0] + all_numbers[1]) == list(range(ROWS))  # every row once, on one of them
        assert weights[0] == weights[1]  # one model
        assert counted == ROWS
        assert error < 0.01
    dist.barrier()  # nobody leaves while another still speaks
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:  # torchrun started this process
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_rows(f"{folder}/rows")
            torchrun(["--standalone", "--nproc-per-node", "2", __file__, f"{folder}/rows"])
