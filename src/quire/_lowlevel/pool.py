"""`MemoryPool`: the memory of arrays that were freed, for the next ones."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
BYTES = np.dtype(np.uint8)


class Piece:
    """The memory of one array of `size` bytes, which begins at `start` of a buffer."""

    __slots__ = ("address", "memory", "size", "start")

    def __init__(self, memory: Any, start: int, size: int) -> None:
        self.memory, self.start, self.size = memory, start, size
        self.address = self.to_array().ctypes.data

    def to_array(self, dtype: np.dtype[Any] = BYTES) -> NDArray[Any]:
        """Return the memory as an array of one dimension.

        numpy lets views refer to the owner of their memory. The owner of this array is a `memoryview`, so that its
        views refer to the array itself, and the array lives as long as the last of them.
        """
        return np.frombuffer(self.memory, dtype, self.size // dtype.itemsize, self.start)

    @property
    def is_free(self) -> bool:
        """Whether the memory may be written to, given that no array of this process refers to it."""
        return True


class MemoryPool:
    """Memory for arrays of bytes. The memory of an array comes back when nothing refers to the array any more.

    Threads may use a pool together without a lock, and memory may come back between any two steps of any thread: a
    piece is taken out of a list or of a dict by a single `pop`, which only one thread wins.

    Arrays are handed out for every batch, when the copies of the batch before it have replaced the code and the objects
    in the caches of the processor. So the usual case runs little code: the memory of a few arrays comes back by the
    `append` of a list, without a function of Python. The limits are applied when other memory comes back, and when new
    memory is needed.
    """

    __slots__ = ("__weakref__", "_kept", "_loans", "_quick_loans", "_returned", "_self")
    _QUICK = _BATCH_PIECES
    """The number of arrays whose memory comes back to a list."""

    def __init__(self) -> None:
        self._kept: dict[int, Piece] = {}  # free pieces by address, the one that was freed last at the end
        self._returned: dict[int, list[_Loan]] = {}  # free pieces of the latest arrays, by size
        # Only the pool holds the references to its arrays, by address, and they refer to it weakly. So its free memory
        # is released with its last user, and the callbacks for the arrays that are left go with it.
        self._loans: dict[int, _Loan] = {}
        self._quick_loans: dict[int, _Loan] = {}  # those whose memory comes back to a list, also after it has
        self._self = weakref.ref(self)

    def __reduce__(self) -> tuple[type[MemoryPool], tuple[()]]:
        return type(self), ()

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return an uninitialised array of `size` bytes."""
        return self.take_array((size,), BYTES, size)

    def take_array(self, shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> NDArray[Any]:
        """Return an uninitialised array of a shape and dtype, which takes `size` bytes."""
        if size < MIN_BYTES or is_safe():
            return np.empty(shape, dtype)
        returned = self._returned.get(size)
        if returned:
            try:
                piece = returned.pop().piece
            except IndexError:  # another thread was faster
                pass
            else:
                array: NDArray[Any] = np.frombuffer(piece.memory, dtype, size // dtype.itemsize, piece.start)
                loan = self._quick_loans[piece.address] = _Loan(array, returned.append)
                loan.piece = piece
                return array.reshape(shape)
        return self._hand_out(self._find_free(size) or self._allocate(size), dtype).reshape(shape)

    def _hand_out(self, piece: Piece, dtype: np.dtype[Any] = BYTES) -> NDArray[Any]:
        array = piece.to_array(dtype)
        if len(self._quick_loans) < self._QUICK:
            loan = _Loan(array, self._returned.setdefault(piece.size, []).append)
            loan.piece = piece
            self._quick_loans[piece.address] = loan
        else:
            loan = _Loan(array, _give_back)
            loan.pool, loan.piece = self._self, piece
            self._loans[piece.address] = loan
        return array

    @property
    def _free(self) -> dict[int, Piece]:
        """The free pieces by address, after those of the latest arrays were added."""
        for returned in list(self._returned.values()):
            while returned:
                with suppress(IndexError):  # another thread was faster
                    piece = returned.pop(0).piece
                    self._quick_loans.pop(piece.address, None)
                    self._kept[piece.address] = piece
        return self._kept

    def _find_free(self, size: int) -> Piece | None:
        # A list of values allocates nothing per item that could start the garbage collector, and so a callback that
        # adds a piece to the dict while the list is created.
        for piece in list(self._free.values()):
            if piece.size == size and piece.is_free and self._kept.pop(piece.address, None) is piece:
                return piece
        return None

    def _allocate(self, size: int) -> Piece:
        self._release_old()
        # malloc maps a large block afresh each time until one of that size has been freed. So the first block is freed
        # at once: from then on, malloc keeps that much memory ready for the temporary results of user functions, too.
        np.empty(size + _LINE, np.uint8)
        block = np.empty(size + _LINE, np.uint8)
        return Piece(memoryview(block), -block.ctypes.data % _LINE, size)  # type: ignore[arg-type]

    def _keep(self, piece: Piece) -> None:
        """Add a piece to the free ones."""
        self._free[piece.address] = piece
        self._release_old()

    def _release_old(self) -> None:
        """Release old free pieces beyond the limits, and the lists of sizes that no array has any more."""
        pieces = list(self._free.values())
        # The memory that will come back to lists counts as free: no limit is applied when it does.
        sizes = [loan.piece.size for loan in list(self._quick_loans.values())]
        for size in [size for size in list(self._returned) if size not in sizes]:
            self._returned.pop(size, None)
        number, total, same_size = len(sizes), sum(sizes), Counter(sizes)
        for piece in reversed(pieces):
            number, total = number + 1, total + piece.size
            same_size[piece.size] += 1
            is_beyond_bytes = number > _BATCH_PIECES and total > _MAX_BYTES
            if is_beyond_bytes or number > _MAX_PIECES or same_size[piece.size] > _MAX_SAME_SIZE:
                self._kept.pop(piece.address, None)


class _Loan(weakref.ref["NDArray[Any]"]):
    """A reference to an array that was handed out, whose callback gives the memory of the array back."""

    __slots__ = ("piece", "pool")
    piece: Piece
    pool: weakref.ref[MemoryPool]


def _give_back(loan: _Loan, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    pool = loan.pool()
    if pool is not None and not is_finalizing():
        pool._loans.pop(loan.piece.address, None)
        pool._keep(loan.piece)


class _Placement(threading.local):
    take: Callable[[int], NDArray[np.uint8]] | None = None
    only_results: bool = False


take_from_pool = MemoryPool().take
"""Return an uninitialised array of bytes from the pool of the process."""
_placement = _Placement()


def take_buffer(size: int, *, is_result: bool = False) -> NDArray[np.uint8]:
    """Return an uninitialised array of bytes from the pool of the process; in `place_buffers`, from elsewhere.

    A result is memory that only the batch will refer to.
    """
    take = _placement.take
    return take_from_pool(size) if take is None or (_placement.only_results and not is_result) else take(size)


@contextmanager
def place_buffers(take: Callable[[int], NDArray[np.uint8]], *, only_results: bool = False) -> Iterator[None]:
    """Let `take_buffer` return arrays of a function in this thread, for instance in pinned memory.

    With `only_results`, only those for results: readers of shards that are not mapped may keep what they gather.
    """
    before = _placement.take, _placement.only_results
    _placement.take, _placement.only_results = take, only_results
    try:
        yield
    finally:
        _placement.take, _placement.only_results = before
