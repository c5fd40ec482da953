"""Send batches from the workers of a DataLoader to the trainer in shared memory that is reused.

torch allocates new shared memory for every tensor, whose page faults cost many times what filling it does. Here, a
worker keeps its pieces of shared memory. A piece is an anonymous file (`memfd_create`) that worker and trainer both
map. The trainer opens it once, through the worker's table of open files (`/proc/<pid>/fd/<number>`), and keeps the
mapping.

The first byte of a piece says who owns it: 1 while the trainer has the tensor, 0 while the worker may write. The worker
sets it when the tensor is pickled. The trainer clears it when nothing there refers to the memory any more, which it
checks whenever it receives a batch. Tensors below 64 KiB go through the pipe, with the rest of the batch.

Where processes cannot open each other's files, and beyond 64 pieces in a worker, torch sends the tensors its own way.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from quire._fork import ForkSafeLock
from quire.data._arena import MIN_BYTES, Arena, Memory, counts_references, is_plain
from quire.errors import FunctionError
from quire.tensors import Framework

if TYPE_CHECKING:
    import torch

    from quire.array import DocumentBatch

    Layout = tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]
    """The dtype, offset, shape and strides of a tensor in its memory."""

_HEADER = 4096  # bytes before the content, so that the content begins at a page; the first byte is the owner
_MAX_PIECES = 64  # of a worker: each is an open file


# --- in the worker


class WorkerPiece(Memory):
    """Shared memory as the worker has it."""

    __slots__ = ("file", "memory", "number", "was_sent")

    def __init__(self, token: str, size: int) -> None:
        self.number, self.was_sent = secrets.randbits(48), False
        self.file = os.memfd_create(_piece_name(token, self.number))
        os.ftruncate(self.file, _HEADER + size)
        self.memory = mmap.mmap(self.file, _HEADER + size)
        super().__init__(lambda: _content(self.memory))

    @property
    def is_free(self) -> bool:
        """Whether neither the trainer nor this process uses the memory."""
        # In this order: the thread that sends a tensor sets the byte before it drops the tensor. If the byte was read
        # first, the tensor could be sent and dropped before the second check, and the batch would be overwritten.
        return self.is_unused and self.memory[0] == 0

    def close(self) -> None:
        os.close(self.file)


class SharedArena(Arena):
    """The pieces of shared memory of one worker.

    No piece is dropped for being old: the trainer finds a piece by its file, and may not have opened it yet.
    """

    __slots__ = ("_limit", "owner", "token")

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.token = os.getpid(), secrets.token_hex(8)
        self._limit = _MAX_PIECES if _can_open_files_of_workers() else 0

    def _find_free(self, size: int) -> Memory | None:
        piece = super()._find_free(size)
        if isinstance(piece, WorkerPiece):
            piece.was_sent = False
        return piece

    def _allocate(self, size: int) -> Memory:
        if len(self._kept) >= self._limit:
            return Memory(lambda: sys.modules["torch"].UntypedStorage._new_shared(size))
        return WorkerPiece(self.token, size)

    def prepare(self, tensor: torch.Tensor) -> Any:
        """Return what to pickle in place of a tensor: its content, its place in shared memory, or the tensor itself."""
        if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return tensor
        if tensor.nbytes < MIN_BYTES:
            return InlineTensor(tensor.contiguous())
        piece = self._kept.get(tensor.untyped_storage().data_ptr())
        if piece is None or (isinstance(piece, WorkerPiece) and piece.was_sent):
            # The tensor is in other memory, or shares its piece with a tensor that was sent before. The trainer gives
            # a piece back once, so each tensor gets a piece of its own.
            room = self.empty(tuple(tensor.shape), tensor.dtype)
            if room is None:
                return tensor
            tensor = room.copy_(tensor)
            piece = self._kept.get(tensor.untyped_storage().data_ptr())
        return SharedTensor(self, piece, tensor) if isinstance(piece, WorkerPiece) else tensor


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

    def __init__(self, arena: SharedArena, piece: WorkerPiece, tensor: torch.Tensor) -> None:
        piece.was_sent, piece.memory[0] = True, 1
        layout = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self.content = (arena.owner, arena.token, piece.number, piece.file, layout)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _restore_shared, self.content


_worker_arena: SharedArena | None = None


def shared_arena() -> SharedArena:
    """Return the arena of this worker process."""
    global _worker_arena  # noqa: PLW0603
    if _worker_arena is None or _worker_arena.owner != os.getpid():  # a forked child has its own
        _worker_arena = SharedArena()
    return _worker_arena


def _can_open_files_of_workers() -> bool:
    """Return whether processes of one user can open each other's files, as on Linux."""
    if not (hasattr(os, "memfd_create") and counts_references()):
        return False
    theirs, ours = Path(f"/proc/{os.getppid()}/fd"), Path("/proc/self/fd")
    return os.access(theirs, os.R_OK | os.X_OK) and ours.stat().st_uid == os.geteuid()


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


class TrainerPiece(Memory):
    """Shared memory of a worker as the trainer has it."""

    __slots__ = ("is_out", "memory")

    def __init__(self, pid: int, name: str, file: int) -> None:
        path = Path(f"/proc/{pid}/fd/{file}")
        try:
            with path.open("r+b", buffering=0) as opened:
                is_same_file = name in str(path.readlink())
                self.memory = mmap.mmap(opened.fileno(), 0)
        except OSError as error:
            raise _lost_batch(pid) from error
        if not is_same_file:  # another process has the pid by now, or another file its number
            raise _lost_batch(pid)
        self.is_out = False
        super().__init__(lambda: _content(self.memory))


def _lost_batch(pid: int) -> FunctionError:
    return FunctionError(
        f"a batch of worker {pid} is lost: the process ended, or its files cannot be opened from here."
    )


_mapped: dict[tuple[int, str, int], TrainerPiece] = {}
"""The pieces of all workers that the trainer has mapped, by process, token and number."""
_mapped_lock = ForkSafeLock()
"""Held while pieces are received and returned: two threads must not return a piece twice, once before its next use."""


def _restore_shared(pid: int, token: str, number: int, file: int, layout: Layout) -> torch.Tensor:
    with _mapped_lock:
        return_unused_pieces()
        key = pid, token, number
        piece = _mapped.get(key)
        if piece is None:
            _drop_pieces_of_ended_workers()
            piece = _mapped[key] = TrainerPiece(pid, _piece_name(token, number), file)
        dtype, offset, shape, stride = layout
        tensor: torch.Tensor = sys.modules["torch"].empty(0, dtype=dtype).set_(piece.storage, offset, shape, stride)
        piece.is_out = True
    return tensor


def return_unused_pieces() -> None:
    """Give the pieces that nothing refers to any more back to their workers."""
    for key, piece in list(_mapped.items()):
        if piece.is_out and piece.is_lost:  # torch has moved it, to send it on to other processes
            _mapped.pop(key, None)
        elif piece.is_out and piece.is_unused:
            piece.is_out = False
            piece.memory[0] = 0


def _drop_pieces_of_ended_workers() -> None:
    for pid in {key[0] for key in list(_mapped)}:
        if not Path(f"/proc/{pid}").exists():
            for key in [key for key in list(_mapped) if key[0] == pid]:
                _mapped.pop(key, None)


def _before_fork() -> None:
    # The mappings are shared, so a forked child sees the batches that the trainer holds now, and the trainer does not
    # know how long the child needs them. These pieces are never given back.
    for key, piece in list(_mapped.items()):
        if piece.is_out:
            _mapped.pop(key, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_mapped.clear)


def _restore_inline(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    torch = sys.modules["torch"]
    if not content:
        return torch.empty(shape, dtype=dtype)  # type: ignore[no-any-return]
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)  # type: ignore[no-any-return]


def _restore_batch(batch_type: type[DocumentBatch[Any]], state: tuple[Any, ...]) -> DocumentBatch[Any]:
    batch = object.__new__(batch_type)
    batch.__setstate__(state)
    return batch


def _content(memory: mmap.mmap) -> torch.UntypedStorage:
    torch = sys.modules["torch"]
    return torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER).untyped_storage()  # type: ignore[no-any-return]


def _piece_name(token: str, number: int) -> str:
    return f"quire-{token}-{number}"
