"""Benchmark the input pipeline of training, compared with hand-written loops and with other libraries.

    python benchmarks/train.py --rows overlap_thread jpeg_64 --rounds 5 --keep

Every row is one interleaved run (see measure.py); its result is a ratio, of wall times where work waits or is spread
over cores. Peers that are not installed are marked. `--size` does not affect the rows about overlap.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from typing import Any

import loading
import numpy as np
import torch
import train_memory
from contest import Builder, parse_options, run
from measure import Contestant, Loop, Row, repeated

from quire import BaseDocument, DocumentArray
from quire.parallel import Backend, Workers
from quire.typing import NdArray

PACKAGES = ("quire", "pydantic", "numpy", "torch", "pillow", "docarray", "tensordict")


# --- overlap: 1,024 documents, 16 a batch, 4 workers; a batch takes 1 s on a worker, 2 s on the accelerator; scaled

SCALE = 1 / 20
BATCHES = 1024 // 16


class Empty(BaseDocument):
    """A document without fields."""


def cpu_job(docs: Any) -> Any:
    """Simulate a second of preprocessing."""
    time.sleep(1 * SCALE)
    return docs


def gpu_job(_: Any) -> None:
    """Simulate two seconds of training."""
    time.sleep(2 * SCALE)


def ideal() -> None:
    """Wait for the first batch; from then on, the accelerator is the bottleneck."""
    cpu_job(None)
    for _ in range(BATCHES):
        gpu_job(None)


def overlap_row(backend: Backend, target: float, known: str) -> Row:
    """Compare `map_batch` on running workers, on workers that it starts, and after `apply_batch`."""
    docs = DocumentArray[Empty].empty(1024)
    pool = Workers(4, backend).warm_up()

    def consume(batches: Iterator[Any]) -> None:
        for batch in batches:
            gpu_job(batch)

    def without_overlap() -> None:
        docs.apply_batch(cpu_job, batch_size=16, pool=pool)
        consume(docs.batch(16))

    return Row(
        title=f"Overlap of map_batch and training, {backend} backend",
        what=f"{BATCHES} batches of 16, {1000 * SCALE:.0f} ms each on 4 workers, then {2000 * SCALE:.0f} ms in the "
        "main process.",
        quire=Contestant("quire, warm", repeated(lambda: consume(docs.map_batch(cpu_job, batch_size=16, pool=pool)))),
        reference=Contestant("ideal", repeated(ideal)),
        peers=[
            Contestant(
                "quire, with start-up",
                repeated(lambda: consume(docs.map_batch(cpu_job, batch_size=16, num_worker=4, backend=backend))),
            ),
            Contestant("apply_batch first, no overlap", repeated(without_overlap)),
        ],
        target=target,
        known=known,
        unit="ms",
        by_wall=True,
    )


# --- apply on JPEGs


class Photo(BaseDocument):
    """A compressed image and its decoded pixels."""

    data: bytes
    tensor: NdArray | None = None


def photos(size: int, side: int) -> DocumentArray[Photo]:
    """Create JPEGs of a smooth scene with noise, which take about as long to decode as photos of a camera."""
    from PIL import Image

    random, documents = np.random.default_rng(0), []
    for _ in range(size):
        coarse = Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8)).resize((side, side), 3)
        noisy = np.asarray(coarse).astype(np.int16) + random.integers(-12, 13, (side, side, 3))
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        documents.append(Photo(data=file.getvalue()))
    return DocumentArray[Photo](documents)


MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


def load(doc: Photo) -> Photo:
    """Decode, normalise, and move the channels first."""
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(doc.data)).convert("RGB"), np.float32)
    doc.tensor = np.moveaxis((pixels / 255 - MEAN) / DEVIATION, -1, 0)
    return doc


def jpeg_row(size: int, side: int, target: float, known: str) -> Row:
    """Compare `apply` on threads with a loop over the documents."""
    docs = photos(max(64, size * 224 // side // 40), side)

    def loop() -> None:
        for doc in docs:
            load(doc)

    return Row(
        title=f"apply on JPEGs, {side} px",
        what=f"Decode and normalise {len(docs):,} images on 2 threads.",
        quire=Contestant("quire", repeated(lambda: docs.apply(load, num_workers=2))),
        reference=Contestant("for loop", repeated(loop)),
        peers=[Contestant("plain ThreadPool", thread_pool(docs))],
        target=target,
        faster=True,
        known=known,
        unit="ms",
        by_wall=True,
    )


def thread_pool(docs: DocumentArray[Photo]) -> Loop:
    """Return a hand-written loop with a thread pool."""

    def work() -> None:
        with ThreadPool(2) as pool:
            for _ in pool.imap(load, docs):
                pass

    return repeated(work)


BUILDERS: dict[str, Builder] = {
    **loading.BUILDERS,
    "overlap_thread": lambda _: overlap_row("thread", 1.01, "DocArray v1 1.005x"),
    "overlap_process": lambda _: overlap_row("process", 1.02, "DocArray v1 1.014x"),
    "jpeg_224": lambda size: jpeg_row(size, 224, 1 / 1.5, "plain ThreadPool 1.5x to 1.7x"),
    "jpeg_64": lambda size: jpeg_row(size, 64, 1.0, "plain ThreadPool 0.85x"),
    "memory": train_memory.section,
}


if __name__ == "__main__":
    options = parse_options(__doc__ or "", BUILDERS)
    torch.set_num_threads(options.threads)
    sys.exit(run("train", BUILDERS, options, PACKAGES))
