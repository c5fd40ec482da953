"""Reuse the memory of batches that are no longer in use for the next batches.

The operating system maps fresh memory page by page, with a fault at the first write to each page. For a batch of
images, these faults take longer than filling the memory does.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

MIN_BYTES = 1 << 16
"""The size of the smallest tensor that is worth a piece of its own; malloc has memory for smaller ones ready."""
_MAX_PIECES = 4  # of one size: the piece that is gathered into, the batch, and those that a training loop keeps
_MAX_SIZES = 16  # one for each column of a batch, and those of the last batch of an epoch


class Memory:
    """A piece of memory for one tensor, which knows whether anything still refers to it."""

    __slots__ = ("_unused_count", "size", "storage")

    def __init__(self, allocate: Callable[[], torch.UntypedStorage]) -> None:
        self.storage = allocate()
        self.size: int = self.storage.nbytes()
        self._unused_count = self._count_references()

    def _count_references(self) -> int:
        # torch counts the tensors, and the arrays and views made from them. The Python object of the storage is counted
        # by Python: a user may keep `tensor.untyped_storage()` alone.
        storage = self.storage
        tensors: int = sys.modules["torch"]._C._storage_Use_Count(storage._cdata)
        return tensors + sys.getrefcount(storage)

    @property
    def is_unused(self) -> bool:
        """Whether no tensor, array or view of this process refers to the memory."""
        return self._count_references() == self._unused_count

    @property
    def is_free(self) -> bool:
        """Whether the memory may be written to again."""
        return self.is_unused

    @property
    def is_lost(self) -> bool:
        """Whether torch has moved the memory to where other processes can map it, or has resized it."""
        return bool(self.storage.is_shared()) or self.storage.nbytes() != self.size

    def close(self) -> None:
        """Release what the memory holds besides itself."""


def counts_references() -> bool:
    """Return whether torch counts the tensors of a storage; without that, memory is never reused."""
    return hasattr(sys.modules["torch"]._C, "_storage_Use_Count")


class Arena:
    """Pieces of memory for torch's tensors. A piece is reused once nothing refers to it.

    Threads may use an arena together without a lock. A piece is taken out of the dict by a single `pop`, which only one
    thread wins, is checked, and is put back when its tensor exists: from then on, others see that it is in use. A piece
    that torch has shared with other processes is dropped, since its users there cannot be counted.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[int, Memory] = {}  # by address, the one that was handed out last at the end

    def __reduce__(self) -> tuple[type[Arena], tuple[()]]:
        return type(self), ()

    def take(self, column: torch.Tensor, indices: NDArray[np.int64]) -> torch.Tensor:
        """Gather rows of a tensor by position."""
        torch = sys.modules["torch"]
        rows = torch.from_numpy(indices)
        if not is_plain(column):
            return column.index_select(0, rows if column.is_cpu else rows.to(column.device))
        out = self.empty((len(indices), *column.shape[1:]), column.dtype)
        return column.index_select(0, rows) if out is None else torch.index_select(column, 0, rows, out=out)

    def stack(self, rows: list[Any]) -> torch.Tensor | None:
        """Stack tensors of one shape and dtype; None for other values, for which stacking them raises the error."""
        torch = sys.modules["torch"]
        if set(map(type, rows)) != {torch.Tensor} or len({row.dtype for row in rows}) > 1 or not is_plain(rows[0]):
            return None
        try:
            return torch.stack(rows, out=self.empty((len(rows), *rows[0].shape), rows[0].dtype))  # type: ignore[no-any-return]
        except RuntimeError:  # several shapes, several devices, or a gradient
            return None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised tensor in a piece of memory; None for a small one."""
        size = math.prod(shape) * dtype.itemsize
        if size < MIN_BYTES or not counts_references():
            return None
        piece = self._find_free(size) or self._allocate(size)
        # `set_` makes a tensor on memory that exists; only then is the piece visible to others again.
        tensor: torch.Tensor = sys.modules["torch"].empty(0, dtype=dtype).set_(piece.storage, 0, shape)
        if not piece.is_lost:
            self._kept[piece.storage.data_ptr()] = piece
        return tensor

    def _find_free(self, size: int) -> Memory | None:
        """Take a piece that nothing refers to out of the arena."""
        for address, piece in list(self._kept.items()):
            if piece.size != size:
                continue
            if piece.is_lost:
                if self._kept.pop(address, None) is piece:
                    piece.close()
            elif piece.is_free and self._kept.pop(address, None) is piece:
                if piece.is_free:  # again: another thread may have used the piece between the check and `pop`
                    return piece
                self._kept[address] = piece
        return None

    def _allocate(self, size: int) -> Memory:
        """Allocate a new piece, and forget old ones beyond the limits; their memory is freed with their last tensor."""
        kept = list(self._kept.items())
        sizes = list(dict.fromkeys(piece.size for _, piece in kept if piece.size != size))
        old_sizes = set(sizes[: max(0, len(sizes) - _MAX_SIZES + 1)])
        same_size = [address for address, piece in kept if piece.size == size]
        for address in same_size[: max(0, len(same_size) - _MAX_PIECES + 1)]:
            self._kept.pop(address, None)
        for address, piece in kept:
            if piece.size in old_sizes:
                self._kept.pop(address, None)
        allocate = functools.partial(sys.modules["torch"].UntypedStorage, size)
        # malloc maps a large block afresh each time until one of that size has been freed. So the first block is freed
        # at once: from then on, malloc keeps that much memory ready for the temporary results of user functions, too.
        allocate()
        return Memory(allocate)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is torch's own dense tensor in main memory, without a gradient."""
    torch = sys.modules["torch"]
    dense = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided
    return dense and not tensor.requires_grad and not tensor.is_nested
