"""Send batches from the workers of a DataLoader to the trainer in shared memory that is reused.

torch allocates new shared memory for every tensor, whose page faults cost many times what filling it does. Here, a
worker keeps its pieces of shared memory, and the trainer gives them back (`quire._lowlevel.shared`). Tensors below 64
KiB go through the pipe, with the rest of the batch.

Where processes cannot open each other's files, and beyond 64 pieces in a worker, torch sends the tensors its own way.
"""

from __future__ import annotations

import math
import os
import sys
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from quire._lowlevel.pool import MIN_BYTES
from quire._lowlevel.shared import LostPieceError, PieceId, SharedPool, WorkerPiece, can_share, open_piece
from quire.data._arena import Arena, RowSource, is_plain
from quire.errors import FunctionError
from quire.tensors import Framework, get_framework

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from quire.array import DocumentBatch

    Layout = tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]
    """The dtype, offset, shape and strides of a tensor in its memory."""


# --- in the worker


class SharedArena(Arena):
    """Gathers and stacks tensors in the shared memory of one worker."""

    __slots__ = ("_can_share", "_pieces", "owner")

    def __init__(self) -> None:
        super().__init__()
        self._pieces, self._can_share = SharedPool(), can_share()
        self.owner = self._pieces.owner

    def take(self, source: RowSource, indices: NDArray[np.int64]) -> torch.Tensor:
        """Gather rows of a tensor by position; the positions must be valid."""
        return self.take_tensor(source.tensor, indices)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialised array for a column of a batch, in shared memory."""
        torch = sys.modules["torch"]
        room = self.empty((math.prod(shape) * dtype.itemsize,), torch.uint8)
        memory: NDArray[Any] = np.empty(shape, dtype) if room is None else room.numpy()
        return memory.view(dtype).reshape(shape)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised tensor in shared memory; None for a small one."""
        size = math.prod(shape) * dtype.itemsize
        if size < MIN_BYTES:
            return None
        torch = sys.modules["torch"]
        memory = self._pieces.take_shared(size) if self._can_share else None
        if memory is None:
            storage = torch.UntypedStorage._new_shared(size)
            return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[no-any-return]
        return torch.frombuffer(memory, dtype=dtype).view(shape)  # type: ignore[no-any-return]

    def prepare(self, tensor: torch.Tensor) -> Any:
        """Return what to pickle in place of a tensor: its content, its place in shared memory, or the tensor itself."""
        if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return tensor
        if tensor.nbytes < MIN_BYTES:
            if not tensor.is_contiguous():
                torch = sys.modules["torch"]
                tensor = get_framework("torch").copy_into(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))
            return InlineTensor(tensor)
        piece = self._find_piece(tensor)
        if piece is None or piece.was_sent:
            # The tensor is in other memory, or shares its piece with a tensor that was sent before. The trainer gives
            # a piece back once, so each tensor gets a piece of its own.
            if piece is None and tensor.is_shared():  # type: ignore[no-untyped-call]
                return tensor
            room = self.empty(tuple(tensor.shape), tensor.dtype)
            if room is None:
                return tensor
            tensor = get_framework("torch").copy_into(tensor, room)
            piece = self._find_piece(tensor)
        return tensor if piece is None else SharedTensor(piece, tensor)

    def _find_piece(self, tensor: torch.Tensor) -> WorkerPiece | None:
        return self._pieces.find(tensor.untyped_storage().data_ptr())


class InlineTensor:
    """A small tensor that is pickled with its content."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        torch, tensor = sys.modules["torch"], self.tensor
        start = tensor.storage_offset() * tensor.itemsize
        content = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (tensor.nbytes,))
        return _restore_inline, (content.numpy().tobytes(), tensor.dtype, tuple(tensor.shape))


class SharedTensor:
    """A tensor that is pickled as its place in a piece of shared memory; creating it hands the piece over."""

    __slots__ = ("content",)

    def __init__(self, piece: WorkerPiece, tensor: torch.Tensor) -> None:
        layout = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self.content = (piece.hand_over(), layout)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _restore_shared, self.content


_worker_arena: SharedArena | None = None


def shared_arena() -> SharedArena:
    """Return the arena of this worker process."""
    global _worker_arena  # noqa: PLW0603
    if _worker_arena is None or _worker_arena.owner != os.getpid():  # a forked child has its own
        _worker_arena = SharedArena()
    return _worker_arena


_registered: WeakSet[type[Any]] = WeakSet()


def use_shared_memory(batch_type: type[DocumentBatch[Any]]) -> None:
    """Let batches of a class be sent from this worker in shared memory.

    A class that cannot be pickled raises its error here. Later, the queue of the DataLoader pickles in a thread of its
    own, which only prints errors, and the trainer would wait for the batch for ever.
    """
    if batch_type not in _registered:
        ForkingPickler.dumps(batch_type)
        ForkingPickler.register(batch_type, _reduce_batch)
        _registered.add(batch_type)


def _reduce_batch(batch: DocumentBatch[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Pickle a batch for the trainer; an error is pickled in its place, and raised there."""
    try:
        arena = shared_arena()
        columns, *rest = batch.__getstate__()

        def prepare(framework: Framework, tensor: Any) -> tuple[Framework, Any]:
            return framework, arena.prepare(tensor) if framework.name == "torch" else tensor

        return _restore_batch, (type(batch), (columns.map_tensors(prepare), *rest))
    except Exception as error:  # noqa: BLE001 - whatever it is, the trainer must not wait for the batch
        return _raise_in_trainer, (os.getpid(), f"{type(error).__name__}: {error}")


def _raise_in_trainer(pid: int, error: str) -> Any:
    raise FunctionError(f"worker {pid} could not send a batch: {error}.")


# --- in the trainer


def _restore_shared(name: PieceId, layout: Layout) -> torch.Tensor:
    torch = sys.modules["torch"]
    try:
        storage = torch.frombuffer(open_piece(name), dtype=torch.uint8).untyped_storage()
    except LostPieceError as error:
        raise FunctionError(
            f"a batch of worker {name.pid} is lost: the process ended, or its files cannot be opened from here."
        ) from error
    dtype, offset, shape, stride = layout
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)  # type: ignore[no-any-return]


def _restore_inline(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    torch = sys.modules["torch"]
    if not content:
        return torch.empty(shape, dtype=dtype)  # type: ignore[no-any-return]
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)  # type: ignore[no-any-return]


def _restore_batch(batch_type: type[DocumentBatch[Any]], state: tuple[Any, ...]) -> DocumentBatch[Any]:
    batch = object.__new__(batch_type)
    batch.__setstate__(state)
    return batch
