"""Tensors of torch in memory that is reused.

Where the memory of earlier batches comes from, and why it is safe to use it again, is in `quire._lowlevel`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire._lowlevel import is_safe
from quire._lowlevel.pool import MemoryPool, take_buffer
from quire.tensors import get_framework

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


_MIN_BYTES = 1 << 20
"""The size of the smallest tensor that an arena keeps the memory of.

malloc maps large memory afresh only until memory of that size was freed once; from then on it reuses it, too. For a
batch of 768 KiB, that takes 7 us less than the bookkeeping of the pool, when caches are cold. The larger the memory,
the more pages malloc returns to the system between two batches, each of which is a page fault when it comes back.
"""


class RowSource:
    """A tensor whose rows are gathered again and again, with what every gathering needs to know about it."""

    __slots__ = ("address", "array", "dtype", "row_bytes", "row_shape", "tensor", "wrap")

    def __init__(self, tensor: torch.Tensor) -> None:
        framework = get_framework("torch")
        self.tensor, self.address = tensor, 0
        self.array: NDArray[Any] | None = framework.view_memory(tensor)
        """The memory of the tensor; None if numpy cannot gather its rows."""
        if self.array is not None and not self.array.flags.c_contiguous:
            self.array = None  # `take` would copy the whole of it
        if self.array is not None:
            self.address, self.dtype, self.row_shape = tensor.data_ptr(), self.array.dtype, self.array.shape[1:]
            self.row_bytes = math.prod(self.row_shape) * self.dtype.itemsize
            self.wrap: Callable[[NDArray[Any]], torch.Tensor] = framework.memory_wrapper(tensor)


class Arena:
    """Gathers and stacks torch's tensors in memory of earlier tensors that nothing refers to any more.

    Threads may use an arena together. The memory of a tensor belongs to an array of numpy, which torch keeps alive as
    long as a tensor, an array or a graph refers to its storage.
    """

    __slots__ = ("_pool",)

    def __init__(self) -> None:
        self._pool = MemoryPool()

    def __reduce__(self) -> tuple[type[Arena], tuple[()]]:
        return type(self), ()

    def take(self, source: RowSource, indices: NDArray[np.int64]) -> torch.Tensor:
        """Gather rows of a tensor by position; the positions must be valid."""
        # This runs for every column of every batch, and calls as little Python code as possible.
        array, tensor = source.array, source.tensor
        # The tensor may belong to a batch of the user, who has moved it to other memory or trains it.
        if array is None or tensor.data_ptr() != source.address or tensor.requires_grad:
            return self.take_tensor(tensor, indices)
        count = len(indices)
        size = count * source.row_bytes
        if size < _MIN_BYTES or is_safe():
            return source.wrap(array.take(indices, 0))
        rows = self._pool.take_array((count, *source.row_shape), source.dtype, size)
        # With any other mode, numpy would copy the rows twice: first into a buffer, for the case of a wrong index.
        array.take(indices, 0, rows, "clip")
        return source.wrap(rows)

    def take_tensor(self, tensor: torch.Tensor, indices: NDArray[np.int64]) -> torch.Tensor:
        """Gather rows of any tensor by position, also of one that needs torch for it."""
        framework: Any = get_framework("torch")
        out = self.empty((len(indices), *tensor.shape[1:]), tensor.dtype) if is_plain(tensor) else None
        taken: torch.Tensor = (
            framework.take(tensor, indices) if out is None else framework.take_into(tensor, indices, out)
        )
        return taken

    def stack(self, rows: list[Any]) -> torch.Tensor | None:
        """Stack tensors of one shape and dtype; None for other values, for which stacking them raises the error."""
        torch = sys.modules["torch"]
        if set(map(type, rows)) != {torch.Tensor} or len({row.dtype for row in rows}) > 1 or not is_plain(rows[0]):
            return None
        try:
            out = self.empty((len(rows), *rows[0].shape), rows[0].dtype)
            return get_framework("torch").stack_into(rows, out)  # type: ignore[no-any-return]
        except RuntimeError:  # several shapes, several devices, or a gradient
            return None

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialised array for a column of a batch: in pinned memory on the way to a device."""
        return take_buffer(math.prod(shape) * dtype.itemsize, is_result=True).view(dtype).reshape(shape)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised tensor in memory of the arena; None for a small one."""
        size = math.prod(shape) * dtype.itemsize
        if size < _MIN_BYTES or is_safe():
            return None
        tensor: torch.Tensor = sys.modules["torch"].frombuffer(self._pool.take(size), dtype=dtype)
        return tensor.view(shape)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is torch's own dense tensor in main memory, without a gradient."""
    torch = sys.modules["torch"]
    dense = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided
    return dense and not tensor.requires_grad and not tensor.is_nested
