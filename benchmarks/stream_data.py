"""The workloads of stream.py, and the folders in which each peer stores them in its own format.

Every row can be computed from its number, so that the rows of a peer can be checked. This file needs only numpy,
because the interpreters of all peers import it.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Rows = np.ndarray[Any, Any]
"""Row numbers."""
Columns = dict[str, Any]
"""An array or a list for each column."""

WRITTEN = 1000
"""Rows per batch that is written."""

_WORDS = ("river", "lantern", "orchard", "compass", "harbour", "meadow", "granite", "violin", "saffron", "glacier")
_SOURCES = ("camera", "scanner", "archive", "web")
_POOL = 1 << 24


@dataclass(frozen=True)
class Workload:
    """A number of rows and a batch size, for columns that a function creates."""

    name: str
    rows: int
    batch: int
    make: Callable[[Rows], Columns]
    shards: int
    """The number of files, for libraries with such an option."""

    def scaled(self, scale: float) -> Workload:
        """Return the workload with more or fewer rows; the batch size and the number of shards stay."""
        rows = max(self.batch, round(self.rows * scale))
        return Workload(self.name, rows, self.batch, self.make, min(self.shards, rows))

    @property
    def shard_rows(self) -> int:
        """Rows per shard."""
        return -(-self.rows // self.shards)

    def batches(self, size: int = WRITTEN) -> Iterator[Columns]:
        """Yield all rows in order."""
        for start in range(0, self.rows, size):
            yield self.make(np.arange(start, min(start + size, self.rows)))

    @property
    def raw_bytes(self) -> int:
        """The bytes of the columns, estimated from a sample: arrays as they are, texts in UTF-8."""
        sample = self.make(np.arange(min(self.rows, WRITTEN)))
        sampled = sum(_bytes_of(values) for values in sample.values())
        return round(sampled * self.rows / min(self.rows, WRITTEN))


def _bytes_of(values: Any) -> int:
    if isinstance(values, np.ndarray):
        return values.nbytes
    return sum(len(value.encode()) if isinstance(value, str) else _bytes_of(value) for value in values)


@cache
def _pool() -> np.ndarray[Any, Any]:
    """Return random bytes; tensors are windows of them, so that the tensor of a row follows from its number."""
    return np.random.default_rng(0).integers(0, 256, _POOL + (1 << 16), np.uint8)


def _windows(rows: Rows, shape: tuple[int, ...], salt: int) -> np.ndarray[Any, Any]:
    size = int(np.prod(shape))
    starts = (rows.astype(np.int64) * 1_000_003 + salt * 7919) % _POOL
    return np.lib.stride_tricks.sliding_window_view(_pool(), size)[starts].reshape(len(rows), *shape)


def _floats(rows: Rows, size: int, salt: int) -> np.ndarray[Any, Any]:
    """Return floats from -0.5 to 0.5 with 24 random bits, which do not compress well."""
    bits = _windows(rows, (4 * size,), salt).view(np.uint32) >> 8
    return bits.astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)


def _texts(rows: Rows) -> list[str]:
    return [f"a photo of a {_WORDS[row % 10]}, number {row}" for row in rows.tolist()]


def _captions(rows: Rows) -> list[str]:
    """Return texts of 40 to 120 bytes."""
    return [" ".join(_WORDS[(row + i * 7) % 10] for i in range(6 + row % 9)) + f" {row}" for row in rows.tolist()]


def pictures(rows: Rows) -> Columns:
    """Return images, labels and texts."""
    return {"row": rows, "image": _windows(rows, (3, 64, 64), 1), "label": rows * 7 % 1000, "text": _texts(rows)}


def tensors(rows: Rows) -> Columns:
    """Return images and labels."""
    return {"row": rows, "image": _windows(rows, (3, 64, 64), 1), "label": rows * 7 % 1000}


def documents(rows: Rows) -> Columns:
    """Return nested `meta` (source, ts, tags), optional masks, embeddings and captions."""
    has_mask = rows * 2_654_435_761 % 1000 < 700
    return {
        "row": rows,
        "image": _windows(rows, (3, 32, 32), 1),
        "emb": _floats(rows, 128, 2),
        "caption": _captions(rows),
        "label": rows * 7 % 1000,
        "source": [_SOURCES[row % 4] for row in rows.tolist()],
        "ts": rows * 1_000_003 + 1_700_000_000,
        "tags": [[_WORDS[(row + i) % 10] for i in range(row % 4)] for row in rows.tolist()],
        "has_mask": has_mask,
        "mask": _windows(rows, (32, 32), 3) * has_mask[:, None, None].astype(np.uint8),
    }


def table(rows: Rows) -> Columns:
    """Return 32 features and a class."""
    return {"row": rows, "feat": _floats(rows, 32, 4), "y": (rows * 10 // 1_000_003 % 10).astype(np.int32)}


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("pictures", 20_000, 256, pictures, 4),
        Workload("pictures_60k", 60_000, 256, pictures, 12),
        Workload("tensors", 20_000, 256, tensors, 4),
        Workload("documents", 50_000, 256, documents, 4),
        Workload("table", 1_000_000, 1024, table, 16),
        Workload("shards", 1_000_000, 256, table, 5_000),
        Workload("large", 400_000, 256, pictures, 80),
    )
}


# --- folders


def folder_of(root: Path, peer: str, variant: str, workload: Workload) -> Path:
    """Return the folder of a workload of this size; its data is recreated if the code that writes it has changed."""
    return root / f"{workload.name}-{workload.rows}" / f"{peer}-{variant}"


def is_made(folder: Path, recipe: Path) -> bool:
    """Whether the folder is complete, and written by the current code of the adapter."""
    mark = folder.with_suffix(".made")
    return mark.exists() and mark.read_text() == _fingerprint(recipe)


def mark_made(folder: Path, recipe: Path) -> None:
    """Record that the folder is complete."""
    folder.with_suffix(".made").write_text(_fingerprint(recipe))


def _fingerprint(recipe: Path) -> str:
    """Return a hash of the code that creates and writes the data, independent of formatting and comments."""
    texts = recipe.read_text().split("# --- read")[0], Path(__file__).read_text().split("# --- folders")[0]
    return hashlib.sha256("".join(ast.unparse(ast.parse(text)) for text in texts).encode()).hexdigest()


def size_of(folder: Path) -> int:
    """Return the bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- checks


def differences(workload: Workload, rows: Rows, columns: Columns) -> list[str]:
    """Return the names of columns that differ from what was written; columns that a peer cannot store are skipped."""
    expected, wrong = workload.make(rows), []
    for name, values in columns.items():
        if isinstance(expected[name], np.ndarray):
            array = np.asarray(values)
            same = array.dtype == expected[name].dtype and np.array_equal(array, expected[name])
        else:
            same = list(values) == expected[name]
        if not same:
            wrong.append(name)
    return wrong


def entropy(batches: list[Rows], rows: int) -> float:
    """Return the mean entropy, in bits, of the deciles of the dataset that the rows of a full batch come from."""
    whole = [batch for batch in batches if len(batch) == len(batches[0])]
    return float(np.mean([_bits(batch * 10 // rows) for batch in whole]))


def ideal_entropy(batches: list[Rows], rows: int) -> float:
    """Return the entropy of a random permutation, in batches of the same sizes."""
    order = np.random.default_rng(1).permutation(rows)
    return entropy(np.split(order, np.cumsum([len(batch) for batch in batches])[:-1]), rows)


def _bits(classes: Rows) -> float:
    shares = np.bincount(classes, minlength=10) / len(classes)
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())
