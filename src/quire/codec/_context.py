"""What an encoding gathers and what a decoding knows, beside the message itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from typing_extensions import TypedDict

from quire.codec._wire import split
from quire.errors import CodecError, DecodeError, check_options

MAX_DEPTH = 100
"""How deep values may lie inside each other."""
GiB = 1 << 30

MissingFramework = Literal["error", "numpy"]
UnknownFields = Literal["drop", "keep", "error"]


@dataclass
class Writer:
    """The buffers of a message in the making."""

    allow_pickle: bool = False
    buffers: list[Any] = field(default_factory=list)
    depth: int = 0

    def add(self, buffer: Any) -> int:
        """Take a buffer, or a list of such that follow one another; its number is told, from 1."""
        self.buffers.append(buffer)
        return len(self.buffers)


class Reading(TypedDict, total=False):
    """How bytes are to be read: the keywords of every call that reads them.

    copy: give tensors memory of their own (the default), or let them be views of the bytes.
    missing: a tensor whose framework is not installed is an 'error' (the default), or becomes 'numpy'.
    unknown: 'drop' (the default) or 'keep' fields that the class does not have, or take them for an 'error'.
    types: document classes to look for names in, before all that are loaded; and enums.
    allow_pickle: read pickles, which can run code.
    max_bytes: what one message may unpack to.
    max_ratio: how many times larger than its packed bytes a message of more than 64 MiB may be.
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
class ReadOptions:
    """How bytes are to be read; see `Reading`.

    With `lend`, a column's large tensors are copied when they are asked for, and so never where they are passed on.
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


DEFAULT_OPTIONS = ReadOptions()


def read_options(reading: Reading) -> ReadOptions:
    """The options that keywords ask for."""
    if not reading:
        return DEFAULT_OPTIONS
    check_options("reading bytes", reading, Reading.__annotations__)
    return ReadOptions(**reading)


_SMALL = 1 << 16
_FEW = 64
"""Comparing so many values with each other costs little."""
_ZONE = 12_000
"""About what the table of a time zone takes."""


CREDIT = 1 << 19
"""What values may take in memory beyond what the size of their message allows."""


class Reader:
    """One message: its small part, its buffers, how it is to be read, and what that has cost."""

    __slots__ = ("_buffers", "_zones", "data", "depth", "left", "options")

    def __init__(self, message: Any, options: ReadOptions, credit: float = CREDIT) -> None:
        size = len(message)
        self.options, self.depth = options, 0
        self.left = options.max_expansion * size + credit
        self._buffers: list[memoryview] | None = None
        self._zones: set[str] | None = None
        if size > _SMALL:
            self.data, self._buffers = split(message)
        else:
            self.data = bytes(message)

    def charge(self, size: float) -> None:
        """Take note of memory that values are about to take."""
        self.left -= size
        if self.left < 0:
            raise DecodeError(
                f"the values would take more than {self.options.max_expansion:g} times the memory of the message. "
                "Raise max_expansion if you trust the source."
            )

    def charge_zone(self, name: str) -> None:
        """Take note of a time zone: its table is large, and there once."""
        if self._zones is None:
            self._zones = set()
        if name not in self._zones:
            self.charge(_ZONE)
            self._zones.add(name)

    def charge_hashes(self, items: list[Any]) -> None:
        """Take note of the comparisons that hashing values costs: a stranger can choose numbers of one hash."""
        if len(items) > _FEW:
            hashes = np.fromiter(map(hash, items), np.int64, len(items))
            same = len(items) - len(np.unique(hashes))
            self.charge(same * same // 4 + 24 * len(items))

    def descend(self) -> None:
        """Go one level deeper."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise DecodeError(f"values lie more than {MAX_DEPTH} levels deep inside each other.")

    def buffer(self, number: int) -> memoryview:
        """A buffer by its number."""
        if self._buffers is None:
            self._buffers = split(self.data)[1]
        if not 0 < number <= len(self._buffers):
            raise DecodeError(f"the message refers to buffer {number} of {len(self._buffers)}.")
        return self._buffers[number - 1]
