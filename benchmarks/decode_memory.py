"""Take 10,000 decoded batches, and print the resident memory of this process as JSON.

    python benchmarks/decode.py --rows memory

The images are small, so that the batches take minutes, and are decoded to a larger size, so that decoded rows are most
of the memory. The loop pauses from time to time, so that the loader prefetches as many batches as its budget allows.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from media_data import picture

from quire import BaseDocument
from quire.data import StreamingDataset, decode_image
from quire.media import to_image_bytes
from quire.storage import write_dataset

BATCHES, BATCH, BUDGET = 10_000, 64, 64 << 20
FIRST, STEP, PAUSE = range(500, 1000), 1000, 2.0


class Item(BaseDocument):
    """An encoded image."""

    content: bytes


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    """Take the batches, and print the results."""
    with tempfile.TemporaryDirectory() as folder:
        contents = [to_image_bytes(picture(16, seed), "jpeg") for seed in range(32)]
        write_dataset([Item(content=contents[row % 32]) for row in range(64 * BATCH)], folder, Item, format="arrow")
        step = {"content": decode_image(64, crop="random", flip=True, threads=2)}
        dataset = StreamingDataset[Item](folder, BATCH, step, memory_bytes=BUDGET)
        for taken, _ in enumerate(dataset.loader(prefetch=1)):
            if taken == 3:
                break
        before, used, samples = resident(), list[int](), list[tuple[int, int]]()
        while len(used) < BATCHES:
            for batch in dataset.loader(prefetch=1000):
                del batch
                if len(used) % STEP == STEP // 2:
                    time.sleep(PAUSE)
                used.append(resident())
                if len(used) % STEP == 0:
                    samples.append((len(used), used[-1]))
                if len(used) == BATCHES:
                    break
    result = {
        "batches": len(used),
        "budget": BUDGET,
        "before": before,
        "samples": samples,
        "peak": max(used) - before,
        "first": max(used[row] for row in FIRST),
        "last": max(used[-500:]),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
