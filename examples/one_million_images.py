"""One million images through a file that is larger than what is in memory of it: written as they come, mapped as read.

python examples/one_million_images.py --images 1000000 --workers 4      # without options: 50,000, in seconds
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from quire import BaseDocument, DocumentArray
from quire.typing import NdArray, uint8


class Picture(BaseDocument):
    """A small colour image."""

    number: int
    pixels: NdArray[uint8, 32, 32, 3]


def pictures(number: int) -> Iterator[Picture]:
    """Images from nothing: a gradient, and another one for every number."""
    ramp = np.arange(32 * 32 * 3, dtype=np.uint32).reshape(32, 32, 3)
    for i in range(number):
        yield Picture(number=i, pixels=(ramp * (i % 251 + 1) // 64).astype(np.uint8))


def brightness(docs: DocumentArray[Picture]) -> np.ndarray:
    """The work of a processor: images become floats, and here a mean for each."""
    images = docs.stack().pixels.astype(np.float32) / 255
    means: np.ndarray = images.mean(axis=(1, 2, 3))
    return means


def peak_memory() -> str:
    """The most memory that this process has taken."""
    scale = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, kilobytes elsewhere
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale:.0f} MB at its peak"


def write(path: Path, number: int) -> None:
    """The documents are never together in memory."""
    started = time.perf_counter()
    DocumentArray[Picture].write_binary(pictures(number), path)
    seconds = time.perf_counter() - started
    print(f"written: {path.stat().st_size / 1e6:,.0f} MB, {number / seconds:,.0f} images a second, {peak_memory()}")


def read(path: Path, batch_size: int, workers: int) -> int:
    """Each batch is here as soon as a worker is done with it. How many images came."""
    started, count, total = time.perf_counter(), 0, 0.0
    for means in DocumentArray[Picture].dataloader(path, brightness, batch_size, num_workers=workers):
        count += len(means)
        total += float(means.sum())
    seconds = time.perf_counter() - started
    print(f"read: {count:,} images, mean {total / count:.3f}, {count / seconds:,.0f} a second, {peak_memory()}")
    return count


def main() -> None:
    """Write the file, and read it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000, help="how many")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for the file, which is kept there; by default it is not")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = (options.folder or Path(temporary)) / "da.protobuf.gz"
        write(path, options.images)
        assert read(path, options.batch_size, options.workers) == options.images


if __name__ == "__main__":
    main()
