"""Which epoch a pass over a dataset is: told by a small file, so that every worker process of a pass knows the same."""

from __future__ import annotations

import os
import struct
import tempfile
import weakref
from pathlib import Path
from typing import NamedTuple

from quire.storage._locks import locked

_RECORD = struct.Struct("<QQQQ")
_NEW = 0
"""The mark of a pass that has not begun."""


class Pass(NamedTuple):
    """Where a pass begins: the epoch, the position in it, and how many epochs of the pass are done."""

    epoch: int = 0
    position: int = 0
    done: int = 0


class Passes:
    """The passes over one dataset.

    Workers that are started for every pass anew do not know how many there were. So the first of a pass to come, which
    it tells by a mark that all of its workers have, writes down the epoch; the others read it.
    """

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="quire-passes-")
        os.close(handle)
        self.path = Path(name)
        self._owner = os.getpid()
        self._cleanup = weakref.finalize(self, _remove, self.path, self._owner)
        self.set(Pass())

    @property
    def _lock(self) -> Path:
        return self.path.with_name(f"{self.path.name}.lock")

    def set(self, start: Pass) -> None:
        """Say where the next pass begins."""
        with locked(self._lock):
            self.path.write_bytes(_RECORD.pack(_NEW, *start))

    def next(self) -> Pass:
        """Where the next pass will begin, if none is under way, else the one that is."""
        return Pass(*_RECORD.unpack(self.path.read_bytes())[1:])

    def begin(self, mark: int, epochs: int) -> Pass:
        """Where the pass of this mark begins: as was set, or so many epochs behind the one before."""
        with locked(self._lock):
            known, *start = _RECORD.unpack(self.path.read_bytes())
            if known not in (mark, _NEW):
                start = [start[0] - start[2] + epochs, 0, 0]
            self.path.write_bytes(_RECORD.pack(mark, *start))
        return Pass(*start)

    def __reduce__(self) -> tuple[object, ...]:
        return _attached, (str(self.path),)


def _attached(path: str) -> Passes:
    made = object.__new__(Passes)
    made.path = Path(path)
    return made


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not in a worker that was forked
        path.unlink(missing_ok=True)
