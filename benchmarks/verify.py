"""Benchmark the verification of stored data: verify='first_touch' compared with verify='never', on the same files.

    python benchmarks/verify.py --rounds 7
    python benchmarks/verify.py --rows later_epochs --keep

The results are stored with those of stream.py. A first epoch opens the dataset, so that nothing is verified yet; from
disk, the pages of the files are dropped before each turn, and wall time decides. `--size` is the number of images.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from contest import Builder, parse_options, run, section_of
from measure import Contestant, Loop, Row, measure
from results import Section

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, uint8

PACKAGES = ("quire", "numpy", "pyarrow", "xxhash", "torch")
BATCH = 64
_folders: dict[int, Path] = {}


class Picture(BaseDocument):
    """An image of 12 KB, its label and a caption."""

    pixels: NdArray[uint8, 3, 64, 64]
    label: int
    caption: str


def pictures(size: int) -> Path:
    """Return the folder of a dataset of `size` images, written once."""
    if size not in _folders:
        folder = Path(tempfile.mkdtemp(prefix="quire-verify-", dir=os.environ.get("QUIRE_BENCH_DATA")))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        generator = np.random.default_rng(0)

        def rows() -> Any:
            for number in range(size):
                pixels = generator.integers(0, 256, (3, 64, 64), np.uint8)
                yield Picture(pixels=pixels, label=number, caption=f"picture number {number}")

        write_dataset(rows(), folder / "d", document_type=Picture, format="arrow", show_progress=False)
        os.environ["QUIRE_CACHE"] = str(folder / "cache")  # opening a dataset checks all files in the cache
        _folders[size] = folder / "d"
    return _folders[size]


def stream(folder: Path, verify: Any) -> StreamingDataset[Picture]:
    """Return a shuffled dataset."""
    return StreamingDataset[Picture](folder, BATCH, seed=1, verify=verify, framework="numpy")


def epoch(dataset: StreamingDataset[Picture]) -> None:
    """Iterate over an epoch."""
    for _ in dataset:
        pass


def drop_pages(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.glob("*.arrow"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def contestants(build: Any) -> dict[str, Contestant]:
    """Return the two contestants."""
    return {
        "quire": Contestant("verify='first_touch'", build("first_touch")),
        "reference": Contestant("verify='never'", build("never")),
    }


def later_epochs(size: int) -> Row:
    """Read epochs of a dataset that is verified already."""
    folder = pictures(size)

    def build(verify: Any) -> Loop:
        dataset = stream(folder, verify)
        epoch(dataset)

        def loop(calls: int) -> None:
            for _ in range(calls):
                epoch(dataset)

        return loop

    what = f"Shuffled epochs of {size:,} pictures of 12 KB after the first, in batches of {BATCH}."
    return Row("Later epochs, verified", what, peers=[], target=1.01, unit="ms", calls=3, turns=9, **contestants(build))


def first_epoch(size: int, *, from_disk: bool) -> Row:
    """Open a dataset and read one epoch."""
    folder = pictures(size)

    def build(verify: Any) -> Loop:
        def loop(calls: int) -> None:
            for _ in range(calls):
                if from_disk:
                    drop_pages(folder)
                epoch(stream(folder, verify))

        return loop

    place = "disk" if from_disk else "the page cache"
    what = f"Opening a dataset of {size:,} pictures of 12 KB, and its first shuffled epoch in batches of {BATCH}."
    target = 1.03 if from_disk else 1.2
    title = f"First epoch from {place}, verified"
    row = Row(title, what, peers=[], target=target, unit="ms", turns=5, **contestants(build))
    return replace(row, by_wall=from_disk)


def first_gather(size: int) -> Section:
    """Take random rows of a new dataset: the worst case, because whole blocks are verified for single rows."""
    folder, generator = pictures(size), np.random.default_rng(1)

    def build(verify: Any) -> Loop:
        def loop(calls: int) -> None:
            for _ in range(calls):
                open_dataset(folder, Picture, verify=verify).take(generator.integers(0, size, 256))

        return loop

    what = f"Opening a dataset of {size:,} pictures of 12 KB, and taking 256 random rows from the page cache."
    row = Row("First random gather, verified", what, peers=[], target=1.0, unit="ms", **contestants(build))
    return replace(section_of("verify_gather", measure(row, 9)), goals=[])


BUILDERS: dict[str, Builder] = {
    "later_epochs": later_epochs,
    "first_epoch_disk": lambda size: first_epoch(size, from_disk=True),
    "first_epoch_cached": lambda size: first_epoch(size, from_disk=False),
    "first_gather": first_gather,
}


def main() -> int:
    """Measure, print, and store the results with `--keep`."""
    options = parse_options(__doc__ or "", BUILDERS)
    return run("stream", BUILDERS, options, PACKAGES)


if __name__ == "__main__":
    sys.exit(main())
