"""The state of one encoding or decoding: options, buffers, nesting depth, and memory accounting.

Bytes may come from an untrusted source, and a few bytes can describe values that take much memory. Decoders therefore
report the memory of each value to `Reader.charge` before they create it, and the sum is bounded by the size of the
message (`max_expansion`) plus a small credit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from typing_extensions import TypedDict

from quire.codec._wire import Bytes, split_buffers
from quire.errors import CodecError, DecodeError, check_options

MAX_DEPTH = 100
"""How deep values may be nested."""
MAX_ROWS = 1 << 48
"""More rows than any batch or file has. Numbers of rows are checked against it where nothing else bounds them, so that
products with the size of a row fit into 64 bits."""
GiB = 1 << 30

MissingFramework = Literal["error", "numpy"]
UnknownFields = Literal["drop", "keep", "error"]


class Reading(TypedDict, total=False):
    """The keywords of every call that reads bytes.

    copy: give tensors memory of their own (the default), or let them be views of the bytes.
    missing: a tensor whose framework is not installed is an 'error' (the default), or becomes 'numpy'.
    unknown: 'drop' (the default) or 'keep' fields that the class does not have, or raise an 'error'.
    types: document classes and enums to look up names in, before all loaded document classes.
    allow_pickle: read pickles, which can run code.
    max_bytes: the size that one message may have after decompression.
    max_ratio: how many times larger than its compressed bytes a message of more than 64 MiB may be.
    max_expansion: how many times the size of the message its values may take in memory.
    """

    copy: bool
    missing: MissingFramework
    unknown: UnknownFields
    types: Sequence[type[Any]]
    allow_pickle: bool
    max_bytes: int
    max_ratio: float
    max_expansion: float


@dataclass(frozen=True)
class DecodeOptions:
    """How to read bytes; see `Reading`.

    With `lend`, the large tensors of a column are views that are copied on first access, and so never if they are
    only passed on.
    """

    copy: bool = True
    missing: MissingFramework = "error"
    unknown: UnknownFields = "drop"
    types: Sequence[type[Any]] = ()
    allow_pickle: bool = False
    max_bytes: int = 8 * GiB
    max_ratio: float = 250
    max_expansion: float = 28
    lend: bool = False

    def __post_init__(self) -> None:
        if self.missing not in ("error", "numpy"):
            raise CodecError(f"missing={self.missing!r}: use 'error' or 'numpy'.")
        if self.unknown not in ("drop", "keep", "error"):
            raise CodecError(f"unknown={self.unknown!r}: use 'drop', 'keep' or 'error'.")


DEFAULT_OPTIONS = DecodeOptions()


def read_options(reading: Reading) -> DecodeOptions:
    """Return the options of some keywords."""
    if not reading:
        return DEFAULT_OPTIONS
    check_options("reading bytes", reading, Reading.__annotations__)
    return DecodeOptions(**reading)


@dataclass
class Writer:
    """The state of an encoding: the buffers of the outermost message."""

    allow_pickle: bool = False
    buffers: list[Any] = field(default_factory=list)
    depth: int = 0

    def add(self, buffer: Any) -> int:
        """Add a buffer, or a list of pieces that make up one buffer; return its number, starting with 1."""
        self.buffers.append(buffer)
        return len(self.buffers)


_MEMORY_CREDIT = 1 << 19
"""Bytes that values may take beyond what the size of their message allows."""
_MIN_SPLIT_SIZE = 1 << 16
"""Messages up to this size are copied whole; larger ones are split, so that their buffers are not copied."""
_FEW_HASHES = 64
"""Comparing this many values with each other costs little."""
_ZONE_SIZE = 12_000
"""The approximate memory of the table of a time zone."""


class MemoryBudget:
    """The memory credit of a stream, which its blocks share: it is granted once and not for each block."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: float = _MEMORY_CREDIT


class Reader:
    """The state of a decoding: the small part of a message, its buffers, the options, and the memory left."""

    __slots__ = ("_buffers", "_zones", "data", "depth", "left", "options")

    def __init__(self, message: Bytes, options: DecodeOptions, credit: float = _MEMORY_CREDIT) -> None:
        size = len(message)
        self.options, self.depth = options, 0
        self.left = options.max_expansion * size + credit
        self._buffers: list[memoryview] | None = None
        self._zones: set[str] | None = None
        if size > _MIN_SPLIT_SIZE:
            self.data, self._buffers = split_buffers(message)
        else:
            self.data = bytes(message)

    def charge(self, size: float) -> None:
        """Account for memory that values are about to take; raise an error if the budget is exceeded."""
        self.left -= size
        if self.left < 0:
            raise DecodeError(
                f"the values would take more than {self.options.max_expansion:g} times the memory of the message. "
                "Raise max_expansion if you trust the source."
            )

    def charge_zone(self, name: str) -> None:
        """Account for the table of a time zone, once for each zone, as Python caches them."""
        if self._zones is None:
            self._zones = set()
        if name not in self._zones:
            self.charge(_ZONE_SIZE)
            self._zones.add(name)

    def charge_hashes(self, items: list[Any]) -> None:
        """Account for the comparisons of hashing: an attacker can choose many numbers with the same hash."""
        if len(items) > _FEW_HASHES:
            # n values with one hash are compared with each other n * n / 2 times when they are put into a table.
            hashes = np.fromiter(map(hash, items), np.int64, len(items))
            same = len(items) - len(np.unique(hashes))
            self.charge(same * same // 4 + 24 * len(items))

    def descend(self) -> None:
        """Enter a nested value; the caller decrements `depth` when it is done."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise DecodeError(f"values are nested more than {MAX_DEPTH} levels deep.")

    def buffer(self, number: int) -> memoryview:
        """Return a buffer by its number, starting with 1."""
        if self._buffers is None:
            self._buffers = split_buffers(self.data)[1]
        if not 0 < number <= len(self._buffers):
            raise DecodeError(f"the message refers to buffer {number} of {len(self._buffers)}.")
        return self._buffers[number - 1]
