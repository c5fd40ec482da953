"""Benchmark iteration over the documents of a stored dataset, compared with reading all of them at once.

    python benchmarks/stored.py --rounds 7
    python benchmarks/stored.py --rows iterate_table --keep

The results are stored with those of stream.py. `--size` is the number of documents.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from contest import Builder, parse_options, run
from measure import Contestant, Row, repeated

from quire import BaseDocument
from quire.storage import StoredDataset, open_dataset, write_dataset
from quire.typing import NdArray, uint8

PACKAGES = ("quire", "numpy", "pydantic", "pyarrow", "xxhash")


class Picture(BaseDocument):
    """An image of 12 KB, its label and a caption."""

    pixels: NdArray[uint8, 3, 64, 64]
    label: int
    caption: str


class Place(BaseDocument):
    """A nested document."""

    city: str
    zone: int | None = None


class Sale(BaseDocument):
    """A row without tensors, so that most of the time is spent on making documents."""

    price: float
    amount: int | None = None
    note: str
    place: Place


def pictures(size: int) -> Any:
    """Yield random pictures."""
    generator = np.random.default_rng(0)
    for number in range(size):
        pixels = generator.integers(0, 256, (3, 64, 64), np.uint8)
        yield Picture(pixels=pixels, label=number, caption=f"picture number {number}")


def sales(size: int) -> Any:
    """Yield rows of a table."""
    for number in range(size):
        place = Place(city=f"city {number % 50}", zone=number % 3 or None)
        yield Sale(price=number / 8, amount=number % 9 or None, note=f"sale number {number}", place=place)


def iterate(dataset: StoredDataset[Any]) -> None:
    """Iterate over all documents, and drop them."""
    for _ in dataset:
        pass


def iterate_row(document_type: type[BaseDocument], rows: Any, file_format: Any, size: int) -> Row:
    """Iterate over a dataset that is open, from the page cache."""
    folder = Path(tempfile.mkdtemp(prefix="quire-stored-", dir=os.environ.get("QUIRE_BENCH_DATA")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_dataset(rows(size), folder / "d", document_type, format=file_format, show_progress=False)
    dataset = open_dataset(folder / "d", document_type, cache=folder / "cache")
    name = f"{size:,} documents of {document_type.__name__}, {file_format.capitalize()}"
    return Row(
        title=f"Iterate over a stored dataset: {name}",
        what="`for _ in dataset: pass`, a block of rows in memory at a time. The reference is "
        "`dataset.read().unstack()`, which has all of them in memory. Times are for all rows.",
        quire=Contestant("quire, for document in dataset", repeated(lambda: iterate(dataset))),
        reference=Contestant("quire, read().unstack()", repeated(lambda: dataset.read().unstack())),
        peers=[],
        target=2.0,
        unit="ms",
    )


BUILDERS: dict[str, Builder] = {
    "iterate_pictures_parquet": lambda size: iterate_row(Picture, pictures, "parquet", size),
    "iterate_pictures_arrow": lambda size: iterate_row(Picture, pictures, "arrow", size),
    "iterate_table_parquet": lambda size: iterate_row(Sale, sales, "parquet", size),
    "iterate_table_arrow": lambda size: iterate_row(Sale, sales, "arrow", size),
}


def main() -> int:
    """Measure, print, and store the results with `--keep`."""
    options = parse_options(__doc__ or "", BUILDERS)
    return run("stream", BUILDERS, options, PACKAGES)


if __name__ == "__main__":
    sys.exit(main())
