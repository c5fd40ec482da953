"""`MemoryPool`: the memory of arrays that were freed, for the next ones."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._lowlevel import is_safe

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_BYTES = 1 << 16
"""The size of the smallest array that is worth a piece of its own; malloc has memory for smaller ones ready."""
_MAX_BYTES = 128 << 20
"""Free memory beyond this is released, except for the pieces of about one batch."""
_BATCH_PIECES = 4
_MAX_SAME_SIZE = 8
"""Free pieces of one size that are kept: those of the columns of a batch, and of a batch that is read ahead."""
_MAX_PIECES = 64
_LINE = 64
"""Arrays begin at a multiple of this. malloc returns large memory 16 bytes after the start of a page; copying rows
there that are aligned to pages in their file takes a third longer."""


class Piece:
    """The memory of one array of `size` bytes, which begins at `start` of a buffer."""

    __slots__ = ("address", "memory", "size", "start")

    def __init__(self, memory: Any, start: int, size: int) -> None:
        self.memory, self.start, self.size = memory, start, size
        self.address = self.to_array().ctypes.data

    def to_array(self) -> NDArray[np.uint8]:
        """Return the memory as an array.

        numpy lets views refer to the owner of their memory. The owner of this array is a `memoryview`, so that its
        views refer to the array itself, and the array lives as long as the last of them.
        """
        return np.frombuffer(self.memory, np.uint8, self.size, self.start)

    @property
    def is_free(self) -> bool:
        """Whether the memory may be written to, given that no array of this process refers to it."""
        return True


class MemoryPool:
    """Memory for arrays of bytes. The memory of an array comes back when nothing refers to the array any more.

    Threads may use a pool together without a lock, and a finalizer may give memory back between any two steps of any
    thread: a piece is taken out of the dict by a single `pop`, which only one thread wins.
    """

    __slots__ = ("__weakref__", "_free")

    def __init__(self) -> None:
        self._free: dict[int, Piece] = {}  # by address, the one that was freed last at the end

    def __reduce__(self) -> tuple[type[MemoryPool], tuple[()]]:
        return type(self), ()

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return an uninitialised array of `size` bytes."""
        if size < MIN_BYTES or is_safe():
            return np.empty(size, np.uint8)
        return self._hand_out(self._find_free(size) or self._allocate(size))

    def _hand_out(self, piece: Piece) -> NDArray[np.uint8]:
        array = piece.to_array()
        # The pool is referenced weakly: its free memory is released with its last user, not with the last array.
        weakref.finalize(array, _give_back, weakref.ref(self), piece).atexit = False
        return array

    def _find_free(self, size: int) -> Piece | None:
        # A list of values allocates nothing per item that could start the garbage collector, and so a finalizer that
        # adds a piece to the dict while the list is created.
        for piece in list(self._free.values()):
            if piece.size == size and piece.is_free and self._free.pop(piece.address, None) is piece:
                return piece
        return None

    def _allocate(self, size: int) -> Piece:
        # malloc maps a large block afresh each time until one of that size has been freed. So the first block is freed
        # at once: from then on, malloc keeps that much memory ready for the temporary results of user functions, too.
        np.empty(size + _LINE, np.uint8)
        block = np.empty(size + _LINE, np.uint8)
        return Piece(memoryview(block), -block.ctypes.data % _LINE, size)  # type: ignore[arg-type]

    def _keep(self, piece: Piece) -> None:
        """Add a piece to the free ones, and release old ones beyond the limits."""
        self._free[piece.address] = piece
        pieces = list(self._free.values())
        same_size = [other for other in pieces if other.size == piece.size]
        old = set(same_size[:-_MAX_SAME_SIZE]) | set(pieces[:-_MAX_PIECES])
        total = sum(other.size for other in pieces)
        for other in pieces[:-_BATCH_PIECES]:
            if total <= _MAX_BYTES:
                break
            old.add(other)
            total -= other.size
        for other in old:
            self._free.pop(other.address, None)


def _give_back(pool: weakref.ref[MemoryPool], piece: Piece) -> None:
    owner = pool()
    if owner is not None:
        owner._keep(piece)


class _Placement(threading.local):
    take: Callable[[int], NDArray[np.uint8]] | None = None


take_from_pool = MemoryPool().take
"""Return an uninitialised array of bytes from the pool of the process."""
_placement = _Placement()


def take_buffer(size: int) -> NDArray[np.uint8]:
    """Return an uninitialised array of bytes from the pool of the process; in `place_buffers`, from elsewhere."""
    take = _placement.take
    return take_from_pool(size) if take is None else take(size)


@contextmanager
def place_buffers(take: Callable[[int], NDArray[np.uint8]]) -> Iterator[None]:
    """Let `take_buffer` return arrays of a function in this thread, for instance in pinned memory."""
    before, _placement.take = _placement.take, take
    try:
        yield
    finally:
        _placement.take = before
