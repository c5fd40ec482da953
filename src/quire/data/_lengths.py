"""The lengths of the rows of a dataset as prefix sums, in a file of the cache that processes map.

Packing and bucketing need the lengths of all rows before the first batch, and a file of 8 bytes a row may be larger
than the memory that they should take. The file is written once for a dataset and a field.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import OptionError, StorageError
from quire.storage import ShardCache, StoredDataset, checksum

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

_MAGIC = int.from_bytes(b"QUIREIDX", "little")
_VERSION = "1"
"""A part of the keys of files: with another version, files are computed again."""


class LengthIndex:
    """The lengths of the rows of a dataset at a path; `prefix[i]` is the sum of those before row i."""

    prefix: Numbers

    def __init__(self, stored: StoredDataset[Any], path: str, fingerprint: str) -> None:
        self._arguments = stored, path, fingerprint
        self.path, self.cache = path, stored._row_reader.shard_reader.cache
        self.key = f"{fingerprint} {path}"
        self.kept: dict[Any, Numbers] = {}  # what orders derived from the lengths last
        [self.prefix] = open_arrays(self.cache, f"lengths {self.key}", self._compute)

    def _compute(self) -> list[Numbers]:
        stored, path, _ = self._arguments
        lengths = stored._row_reader.row_lengths(path)
        if len(lengths) and int(lengths.min()) < 0:
            row = int(np.flatnonzero(lengths < 0)[0])
            raise OptionError(f"{path!r}: row {row} is {int(lengths[row])}, and a length is at least 0.")
        return [np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])]

    def __len__(self) -> int:
        return len(self.prefix) - 1

    @property
    def total(self) -> int:
        """The sum of all lengths."""
        return int(self.prefix[-1])

    def lengths(self, rows: Numbers) -> Numbers:
        """Return the lengths of rows."""
        lengths: Numbers = self.prefix[rows + 1] - self.prefix[rows]
        return lengths

    def between(self, start: int, stop: int) -> Numbers:
        """Return the lengths of consecutive rows."""
        return np.diff(self.prefix[start : stop + 1])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments  # a spawned worker maps the file


def open_arrays(cache: ShardCache, name: str, compute: Callable[[], Sequence[Numbers]]) -> list[Numbers]:
    """Map the arrays of a file in the cache, which are computed if it is missing or damaged.

    If the cache has no room for the file, the arrays are returned as they were computed, in memory.
    """
    key = blake2b(f"{_VERSION} {name}".encode(), digest_size=20).hexdigest()
    computed: list[list[Numbers]] = []

    def make(target: Path) -> None:
        computed.append([np.ascontiguousarray(array, np.int64) for array in compute()])
        _write_arrays(target, computed[-1])

    for _ in range(2):
        try:
            with cache.open(key, make) as file:
                content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.int64)
        except StorageError:
            if computed:
                return computed[-1]
            raise
        arrays = _split_arrays(content)
        if arrays is not None:
            return arrays
        cache.remove(key)
    return [np.ascontiguousarray(array, np.int64) for array in compute()]


def _write_arrays(target: Path, arrays: Sequence[Numbers]) -> None:
    """Write a magic number, the number of arrays, their lengths, a checksum, and the arrays."""
    body = np.concatenate([np.zeros(0, np.int64), *arrays])
    head = np.array([_MAGIC, len(arrays), *map(len, arrays)], np.int64)
    digest = np.array([_digest(head, body)], np.int64)
    with target.open("wb") as file:
        for part in (head, digest, body):
            file.write(part.tobytes())


def _split_arrays(content: Numbers) -> list[Numbers] | None:
    """Return the arrays of a file; None if it is damaged."""
    if len(content) < 3 or content[0] != _MAGIC or not 0 <= content[1] <= len(content) - 3:
        return None
    count = int(content[1])
    head, body = content[: 2 + count], content[3 + count :]
    if len(body) != head[2:].sum() or content[2 + count] != _digest(head, body):
        return None
    return np.split(body, np.cumsum(head[2:])[:-1]) if count else []


def _digest(head: Numbers, body: Numbers) -> int:
    return int(np.uint64(checksum(head.tobytes(), body.data)).astype(np.int64))
