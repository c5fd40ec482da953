"""Write and read a file of one million images that are never in memory at the same time.

python examples/one_million_images.py --images 1000000 --workers 4      # default: 50,000 images, in seconds
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
    """Generate images with a different gradient for every number."""
    ramp = np.arange(32 * 32 * 3, dtype=np.uint32).reshape(32, 32, 3)
    for i in range(number):
        yield Picture(number=i, pixels=(ramp * (i % 251 + 1) // 64).astype(np.uint8))


def brightness(docs: DocumentArray[Picture]) -> np.ndarray:
    """Convert images to floats, and return the mean of each."""
    images = docs.stack().pixels.astype(np.float32) / 255
    means: np.ndarray = images.mean(axis=(1, 2, 3))
    return means


def peak_memory() -> str:
    """Return the peak memory of this process."""
    scale = 2**20 if sys.platform == "darwin" else 2**10  # bytes on macOS, kilobytes elsewhere
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale:.0f} MB peak memory"


def write(path: Path, number: int) -> None:
    """Write the images from a generator."""
    started = time.perf_counter()
    DocumentArray[Picture].save_binary_stream(pictures(number), path)
    seconds = time.perf_counter() - started
    print(f"written: {path.stat().st_size / 1e6:,.0f} MB, {number / seconds:,.0f} images per second, {peak_memory()}")


def read(path: Path, batch_size: int, workers: int) -> int:
    """Read the batches from workers as soon as they are ready, and return the number of images."""
    started, count, total = time.perf_counter(), 0, 0.0
    for means in DocumentArray[Picture].dataloader(path, brightness, batch_size, num_workers=workers):
        count += len(means)
        total += float(means.sum())
    seconds = time.perf_counter() - started
    print(f"read: {count:,} images, mean {total / count:.3f}, {count / seconds:,.0f} per second, {peak_memory()}")
    return count


def main() -> None:
    """Write the file, and read it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000, help="number of images")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="folder to keep the file in; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = (options.folder or Path(temporary)) / "da.protobuf.gz"
        write(path, options.images)
        assert read(path, options.batch_size, options.workers) == options.images


if __name__ == "__main__":
    main()
