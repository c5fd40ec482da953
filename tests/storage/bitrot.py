"""The bit-rot campaign: flip bytes of small datasets one by one, and read them in every way. Run as a script.

    python -m tests.storage.bitrot --stride 1 --work /dev/shm
    python -m tests.storage.bitrot --stores arrow pieces

The flips of a file take turns in nine ways to read it: `read`, rows in any order, one row at a time, with a filter,
without a class, with `verify='always'`, and streams with each of the three values of `on_error`. Each flip must lead to
the right values or to an error that names the damaged file: a `ShardError`, or a `StorageError` for logs. Damage must
never lead to other values, other exceptions, or a crash. It prints a line of JSON: the number of flips by file and
outcome, and a description of each that went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from quire import BaseDocument, DocumentArray
from quire.data import StreamingDataset
from quire.errors import ShardError, StorageError
from quire.storage import _block_table, open_dataset, write_dataset
from quire.typing import NdArray, float32, uint8
from tests.codec.round_trips import exact


class Color(Enum):
    RED = "red"
    BLUE = 2


class Numbers(BaseDocument):
    whole: int
    part: float
    flag: bool
    maybe: int | None


class Texts(BaseDocument):
    text: str
    blob: bytes
    maybe: str | None
    day: date
    when: datetime


class Tensors(BaseDocument):
    image: NdArray[uint8, 3, 4, 4]
    vector: NdArray[float32]
    maybe: NdArray[float32, 3] | None


class Part(BaseDocument):
    name: str
    size: int | None = None


class Nested(BaseDocument):
    part: Part
    maybe: Part | None
    parts: DocumentArray[Part]


class Lists(BaseDocument):
    numbers: list[int]
    words: list[str]
    table: dict[str, Any]
    color: Color
    either: int | str


def _numbers(n: int) -> Numbers:
    return Numbers(id=f"n{n}", whole=1000 + n, part=n / 7, flag=n % 2 == 0, maybe=None if n % 2 else n)


def _texts(n: int) -> Texts:
    moment = datetime(2024, 1, 1 + n, tzinfo=timezone.utc)
    text = f"text é {n}"
    return Texts(id=f"t{n}", text=text, blob=bytes([n, 255]), maybe=None if n % 2 else "x", day=moment, when=moment)


def _tensors(n: int) -> Tensors:
    image, vector = np.full((3, 4, 4), n, np.uint8), np.arange(n % 3, dtype=np.float32)
    return Tensors(id=f"a{n}", image=image, vector=vector, maybe=None if n % 2 else np.full(3, n, np.float32))


def _part(n: int) -> Part:
    return Part(id=f"p{n}", name=f"part {n}", size=None if n % 3 else n)


def _nested(n: int) -> Nested:
    parts = DocumentArray[Part]([_part(k) for k in range(n % 3)])
    return Nested(id=f"d{n}", part=_part(n), maybe=None if n % 2 else _part(n + 1), parts=parts)


def _lists(n: int) -> Lists:
    color = Color.RED if n % 2 else Color.BLUE
    table, either = {"a": n, "b": [None]}, n if n % 2 else str(n)
    return Lists(id=f"l{n}", numbers=[n] * (n % 3), words=["w"] * n, table=table, color=color, either=either)


MAKERS: dict[str, tuple[type[BaseDocument], Callable[[int], Any]]] = {
    "numbers": (Numbers, _numbers),
    "texts": (Texts, _texts),
    "tensors": (Tensors, _tensors),
    "nested": (Nested, _nested),
    "lists": (Lists, _lists),
}
STORES: dict[str, dict[str, Any]] = {
    "arrow": {"format": "arrow"},
    "pieces": {"format": "arrow", "group_bytes": 1 << 16},
    "parquet": {"format": "parquet"},
    "compressed": {"format": "parquet", "compression": {"id": "snappy"}},
    "lists": {"format": "parquet", "tensor_storage": "list"},
}
ROWS = 5


def write(folder: Path, schema: str, store: str) -> list[Any]:
    """Write a dataset of two shards."""
    document_type, make = MAKERS[schema]
    documents = [make(n) for n in range(ROWS)]
    options = {"group_bytes": 256, "durable": False, **STORES[store]}
    piece = 8 if store == "pieces" else _block_table.PIECE  # so that even small columns are verified in pieces
    with patch.object(_block_table, "PIECE", piece):
        for mode, part in (("create", documents[:3]), ("append", documents[3:])):
            write_dataset(part, folder, document_type=document_type, mode=mode, **options)
    return documents


class WrongError(AssertionError):
    """Damage that led neither to correct values nor to the expected error."""


def check(documents: Sequence[Any], results: Sequence[Any], what: str) -> None:
    """Return whether documents are the expected ones."""
    if not exact(list(results), list(documents)):
        raise WrongError(f"{what}: other values")


def read_all(folder: Path, documents: Sequence[Any], cache: Path) -> None:
    check(documents, list(open_dataset(folder, type(documents[0]), cache=cache).read().unstack()), "read")


def take(folder: Path, documents: Sequence[Any], cache: Path) -> None:
    dataset = open_dataset(folder, type(documents[0]), cache=cache)
    order = [3, 0, 4, 1, 2]
    check([documents[n] for n in order], list(dataset[order].unstack()), "take")


def take_always(folder: Path, documents: Sequence[Any], cache: Path) -> None:
    dataset = open_dataset(folder, type(documents[0]), cache=cache, verify="always")
    for order in ([4, 1], [2, 0, 3]):
        check([documents[n] for n in order], list(dataset[order].unstack()), "verify='always'")


def one_by_one(folder: Path, documents: Sequence[Any], cache: Path) -> None:
    dataset = open_dataset(folder, type(documents[0]), cache=cache)
    for number, document in enumerate(documents):
        check([document], [dataset[number]], "dataset[i]")


def filtered(folder: Path, documents: Sequence[Any], cache: Path) -> None:
    query = {"id": {"$in": [documents[1].id, documents[4].id]}}
    dataset = open_dataset(folder, type(documents[0]), where=query, cache=cache)
    check([documents[1], documents[4]], list(dataset[:].unstack()), "where")


def without_class(folder: Path, documents: Sequence[Any], cache: Path) -> None:
    dataset: Any = open_dataset(folder, cache=cache)
    if dataset.document_type is not type(documents[0]):
        raise WrongError("open_dataset without a class: another class")
    check(documents, list(dataset[:].unstack()), "open_dataset without a class")


def stream(folder: Path, documents: Sequence[Any], cache: Path, on_error: Any) -> None:
    by_id = {document.id: document for document in documents}
    storage = open_dataset(folder, type(documents[0]), cache=cache)
    how: Any = {"seed": 1, "on_error": on_error, "framework": "numpy", "shapes": "ragged"}
    dataset: Any = StreamingDataset[type(documents[0])](storage, 2, missing="mask", **how)  # type: ignore[misc]
    results = [document for batch in dataset for document in batch.unstack()]
    if any(document.id not in by_id for document in results):
        raise WrongError(f"stream, {on_error}: an id that was never written")
    check([by_id[document.id] for document in results], results, f"stream, {on_error}")
    if len(results) != len(documents) or len({document.id for document in results}) != len(documents):
        if not dataset.errors or on_error == "raise":
            raise WrongError(f"stream, {on_error}: {len(results)} rows, and no error was noted")
        raise ShardError(dataset.errors[0])


READERS: list[Callable[[Path, Sequence[Any], Path], None]] = [
    read_all,
    take,
    lambda folder, documents, cache: stream(folder, documents, cache, "skip"),
    filtered,
    lambda folder, documents, cache: stream(folder, documents, cache, "raise"),
    one_by_one,
    lambda folder, documents, cache: stream(folder, documents, cache, "replace"),
    without_class,
    take_always,
]


class Campaign:
    """Flips bytes of the files of datasets, and counts the outcomes."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.flips = 0

    def run(self, schema: str, store: str, stride: int, first: int) -> None:
        """Flip every n-th byte of a dataset."""
        folder = self.work / f"{schema}-{store}"
        documents = write(folder, schema, store)
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            kind = "log" if "_quire" in file.parts else store
            for offset in range(first % stride, file.stat().st_size, stride):
                self._flip(folder, documents, file, offset, kind)
        shutil.rmtree(folder)

    def _flip(self, folder: Path, documents: Sequence[Any], file: Path, offset: int, kind: str) -> None:
        mask = 0xFF if offset % 9 == 8 else 1 << offset % 9
        self.flips += 1
        flip_byte(file, offset, mask)
        try:
            outcome = self._read(READERS[self.flips % len(READERS)], folder, documents, file, kind)
        except Exception as error:  # noqa: BLE001 - everything else is wrong
            outcome = "wrong"
            last = "".join(traceback.format_exception(error)[-2:])
            self.wrong.append(f"{file.relative_to(self.work)}, byte {offset} ^ {mask:#x}: {last}")
        finally:
            flip_byte(file, offset, mask)
        self.counts[f"{kind}: {outcome}"] += 1

    def _read(self, read: Any, folder: Path, documents: Sequence[Any], file: Path, kind: str) -> str:
        cache = self.work / "cache"
        try:
            read(folder, documents, cache)
        except StorageError as error:
            is_named = file.name in str(error) or "no shard of the dataset can be read" in str(error)
            if is_named and (kind == "log" or isinstance(error, ShardError)):
                return "error"
            raise
        finally:
            shutil.rmtree(cache, ignore_errors=True)  # else copies of undamaged shards would be read
        return "right values"


def flip_byte(file: Path, offset: int, mask: int) -> None:
    """Change a byte in place; the same call again restores it."""
    handle = os.open(file, os.O_RDWR)
    try:
        old = os.pread(handle, 1, offset)
        os.pwrite(handle, bytes([old[0] ^ mask]), offset)
    finally:
        os.close(handle)


def datasets() -> Iterator[tuple[str, str]]:
    """All kinds of datasets: the class, and how it is stored."""
    for schema in MAKERS:
        yield schema, "arrow"
        yield schema, "pieces"
        yield schema, "parquet"
    yield "texts", "compressed"
    yield "tensors", "lists"


def main() -> int:
    """Run the campaign, or every n-th flip of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="flip every n-th byte")
    parser.add_argument("--first", type=int, default=0, help="begin with this one of them")
    parser.add_argument("--stores", nargs="+", choices=list(STORES), default=list(STORES), help="only some stores")
    parser.add_argument("--work", type=Path, default=None, help="a folder to work in, best in memory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bitrot-") as work:
        campaign = Campaign(Path(work))
        for number, (schema, store) in enumerate(datasets()):
            if store not in options.stores:
                continue
            campaign.run(schema, store, options.stride, options.first + number)
            print(schema, store, campaign.flips, dict(campaign.counts), file=sys.stderr, flush=True)  # noqa: T201
    report = {"flips": campaign.flips, "counts": dict(sorted(campaign.counts.items())), "wrong": campaign.wrong[:50]}
    print(json.dumps(report))  # noqa: T201 - what the test reads
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
