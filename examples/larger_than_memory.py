"""Train on data larger than memory, kill the process, and resume: every row is read exactly once.

The training process may allocate at most 64 MB after its imports (RLIMIT_DATA, on Linux); the dataset has 147 MB. The
process is killed at a batch, and the next process resumes from the last checkpoint.

python examples/larger_than_memory.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.storage import write_dataset
from quire.typing import NdArray, uint8

MEMORY = 64 << 20


class Photo(BaseDocument):
    """A picture, its number, and whether it is bright."""

    pixels: NdArray[uint8, 3, 64, 64]
    number: int
    bright: bool


def photos(number: int) -> Iterator[Photo]:
    """Generate random photos, one at a time."""
    random = np.random.default_rng(0)
    for i in range(number):
        bright = bool(random.random() < 0.5)
        pixels = random.integers(0, 256 if bright else 192, (3, 64, 64), dtype=np.uint8)
        yield Photo(pixels=pixels, number=i, bright=bright)


def limit_memory() -> None:
    """Limit further allocations of this process to `MEMORY`; mapped files do not count, copies of them do."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now = int(lines["VmData"].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (now + MEMORY, now + MEMORY))


def train(url: str, checkpoint: Path, killed_at: int | None) -> None:
    """Train for an epoch, from the checkpoint if there is one, with a checkpoint every 20 steps."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dataset = StreamingDataset[Photo](url, batch_size=64, seed=1, memory_bytes=MEMORY // 4)
    seen = torch.zeros(dataset.num_rows, dtype=torch.int64)
    limit_memory()
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dataset.load_state_dict(saved["data"])  # a few numbers: the next batch is the one after the checkpoint
        seen = saved["seen"]
        print(f"  resumes after {int(seen.sum()):,} rows")
    for step, batch in enumerate(dataset):
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        logits = model(batch.pixels.float() / 128 - 1).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.bright.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen[batch.number] += 1
        if step % 20 == 19 or int(seen.sum()) == dataset.num_rows:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "data": dataset.state_dict(), "seen": seen, "loss": loss.item()}, checkpoint)
    try:
        torch.empty(dataset.num_rows, 3, 64, 64, dtype=torch.uint8)
    except RuntimeError:
        print("  the memory limit works: all pictures at once do not fit")
    else:
        raise AssertionError("the dataset fits into memory")


def run_process(url: str, checkpoint: Path, killed_at: int | None) -> int | None:
    """Train in a new process, and return its exit code."""
    process = multiprocessing.get_context("spawn").Process(target=train, args=(url, checkpoint, killed_at))
    process.start()
    process.join()
    return process.exitcode


def main() -> None:
    """Write the dataset, train, kill the process, resume, and count the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=12_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        url, checkpoint = f"{folder}/photos", Path(folder, "checkpoint.pt")
        write_dataset(photos(rows), url, document_type=Photo, format="arrow")
        print(f"{rows:,} photos, {rows * 3 * 64 * 64 / 1e6:,.0f} MB, with {MEMORY >> 20} MB of memory for training")
        middle = rows // 64 // 2 + 17  # not at a checkpoint
        assert run_process(url, checkpoint, killed_at=middle) == -signal.SIGKILL
        print(f"killed at step {middle}")
        assert run_process(url, checkpoint, killed_at=None) == 0
        last = torch.load(checkpoint)
        print(f"every row once: {bool((last['seen'] == 1).all())}; last loss: {last['loss']:.3f}")
        assert (last["seen"] == 1).all()
        assert last["loss"] < 0.5  # a random guess has 0.69


if __name__ == "__main__":
    main()
