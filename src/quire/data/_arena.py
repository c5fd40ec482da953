"""Memory of batches that nobody looks at any more, for the batches to come.

Fresh memory costs a fault for each of its pages when it is first written, which takes longer than the writing.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LEAST = 1 << 16
"""Bytes: smaller pieces come from memory that the allocator has at hand."""
_MOST_PIECES = 4  # of a size: what is gathered, the batch that is made, and those that a loop holds on to
_MOST_SIZES = 16  # those of the columns of a batch, and of the last batch of a pass


class Memory:
    """A piece of memory, which knows whether anybody else holds on to it."""

    __slots__ = ("_alone", "size", "storage")

    def __init__(self, make: Callable[[], Any]) -> None:
        self.storage = make()
        self.size: int = self.storage.nbytes()
        self._alone = self._references()

    def _references(self) -> int:
        """Those of tensors and arrays to the memory, and those of Python to the object that stands for it."""
        storage = self.storage
        tensors: int = sys.modules["torch"]._C._storage_Use_Count(storage._cdata)
        return tensors + sys.getrefcount(storage)

    @property
    def is_unused(self) -> bool:
        """Whether nothing else lies in it."""
        return self._references() == self._alone

    @property
    def is_lost(self) -> bool:
        """Whether torch has moved it to where other processes can map it, or has changed its size."""
        return bool(self.storage.is_shared()) or self.storage.nbytes() != self.size


def counts_users() -> bool:
    """Whether torch tells how many tensors lie in a piece of memory."""
    return hasattr(sys.modules["torch"]._C, "_storage_Use_Count")


class Arena:
    """Pieces of memory for torch's tensors, each used again once no tensor or array lies in it.

    A piece that was given to other processes is let go: who reads it there cannot be seen from here.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[int, list[Memory]] = {}

    def __reduce__(self) -> tuple[type[Arena], tuple[()]]:
        return Arena, ()

    def take(self, column: Any, indices: NDArray[np.int64]) -> Any:
        """Rows of a tensor by position."""
        torch = sys.modules["torch"]
        rows = torch.from_numpy(indices)
        if not is_plain(column):
            return column.index_select(0, rows if column.is_cpu else rows.to(column.device))
        out = self._empty((len(indices), *column.shape[1:]), column.dtype)
        return column.index_select(0, rows) if out is None else torch.index_select(column, 0, rows, out=out)

    def stack(self, rows: list[Any]) -> Any:
        """Tensors that are alike, as one; None for others, which torch itself tells."""
        torch = sys.modules["torch"]
        alike = set(map(type, rows)) == {torch.Tensor} and len({row.dtype for row in rows}) == 1 and is_plain(rows[0])
        try:
            return torch.stack(rows, out=self._empty((len(rows), *rows[0].shape), rows[0].dtype)) if alike else None
        except RuntimeError:  # of several shapes, on several devices, with a gradient
            return None

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor of any content; None for a small one."""
        torch = sys.modules["torch"]
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST or not counts_users():
            return None
        piece = self._obtain(size)
        made = torch.empty(0, dtype=dtype).set_(piece.storage, 0, shape)
        self._keep(piece)  # after the tensor is there: another thread sees that it is in use
        return made

    def _obtain(self, size: int) -> Memory:
        """Memory that nobody uses, taken out of what is kept."""
        return _free(self._pieces(size)) or _fresh(size)

    def _keep(self, piece: Memory) -> None:
        self._pieces(piece.size).append(piece)

    def _pieces(self, size: int) -> list[Memory]:
        found = self._kept.get(size)
        if found is None:
            self._kept = dict(list(self._kept.items())[1 - _MOST_SIZES :])
            found = self._kept.setdefault(size, [])
        return found


def _free(kept: list[Memory]) -> Memory | None:
    """A piece that nobody uses, taken out of those that are kept; None where there is none."""
    for _ in range(len(kept)):
        try:
            piece = kept.pop(0)
        except IndexError:  # another thread was faster
            return None
        if not piece.is_lost:
            if piece.is_unused:
                return piece
            kept.append(piece)
    del kept[: max(0, len(kept) - _MOST_PIECES + 1)]
    return None


def _fresh(size: int) -> Memory:
    """New memory. One piece is let go first: from then on, malloc keeps as much at hand for what functions make."""
    allocate = functools.partial(sys.modules["torch"].UntypedStorage, size)
    allocate()
    return Memory(allocate)


def is_plain(tensor: Any) -> bool:
    """Whether it is torch's own dense tensor in the memory of this process, without a gradient."""
    torch = sys.modules["torch"]
    dense = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided
    return dense and not tensor.requires_grad and not tensor.is_nested
