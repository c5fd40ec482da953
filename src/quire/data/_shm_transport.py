"""The way of a batch from a worker of a DataLoader to the trainer: in memory that both have mapped, again and again.

torch gives each tensor new shared memory, whose pages cost many times what it takes to fill them. Here a worker keeps
its pieces. The first byte of a piece tells whether the trainer has it; when nothing there lies in it any more, the
trainer says so with the next batch that it takes. Small tensors go through the pipe, with the rest of the batch.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from weakref import WeakSet

from quire.data._arena import LEAST, Arena, Memory, counts_users, is_plain
from quire.errors import FunctionError
from quire.tensors import Framework

_HEAD = 4096  # bytes before the content; the first is 1 while the trainer has the piece
_MOST = 64  # pieces of a worker, each of which is an open file


# --- in the worker


class Piece(Memory):
    """Memory that the trainer can map, too, and whether it was sent there since it was filled last."""

    __slots__ = ("file", "memory", "number", "sent")

    def __init__(self, token: str, size: int) -> None:
        self.number, self.sent = secrets.randbits(48), False
        self.file = os.memfd_create(_name(token, self.number))
        os.ftruncate(self.file, _HEAD + size)
        self.memory = mmap.mmap(self.file, _HEAD + size)
        super().__init__(lambda: _content(self.memory))

    def is_free(self, size: int) -> bool:
        """Whether nobody uses it, here or there."""
        return self.size == size and self.memory[0] == 0 and self.is_unused


class SharedArena(Arena):
    """The pieces of one worker."""

    __slots__ = ("_most", "_owner", "_pieces_by_address", "_token")

    def __init__(self) -> None:
        super().__init__()
        self._owner, self._token = os.getpid(), secrets.token_hex(8)
        self._most = _MOST if _can_share() else 0
        self._pieces_by_address: dict[int, Piece] = {}

    def _obtain(self, size: int) -> Memory:
        pieces = self._pieces_by_address
        for address, piece in list(pieces.items()):
            if piece.is_lost:  # torch has moved it, to send it by its own way
                os.close(pieces.pop(address).file)
            elif piece.is_free(size) and pieces.pop(address, None) is piece:
                piece.sent = False
                return piece
        if len(pieces) >= self._most:
            return Memory(lambda: sys.modules["torch"].UntypedStorage._new_shared(size))  # torch's own way
        return Piece(self._token, size)

    def _keep(self, piece: Memory) -> None:
        if isinstance(piece, Piece):
            self._pieces_by_address[piece.storage.data_ptr()] = piece

    def handle(self, tensor: Any) -> Any:
        """What is sent in the place of a tensor: a small one's content, where a large one lies, or the tensor."""
        if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return tensor
        if tensor.nbytes < LEAST:
            return Inline(tensor.contiguous())
        piece = self._piece_of(tensor)
        if piece is None or piece.sent:
            tensor = self._empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
            piece = self._piece_of(tensor)
        return tensor if piece is None else Located(self.place, piece, tensor)

    def _piece_of(self, tensor: Any) -> Piece | None:
        return self._pieces_by_address.get(tensor.untyped_storage().data_ptr())

    @property
    def place(self) -> tuple[int, str]:
        """Whose pieces these are."""
        return self._owner, self._token


class Inline:
    """A small tensor on its way."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        torch, tensor = sys.modules["torch"], self.tensor
        start = tensor.storage_offset() * tensor.itemsize
        content = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (tensor.nbytes,))
        return _inline, (content.numpy().tobytes(), tensor.dtype, tuple(tensor.shape))


class Located:
    """A tensor on its way, in memory that the trainer has mapped, or will map."""

    __slots__ = ("content",)

    def __init__(self, place: tuple[int, str], piece: Piece, tensor: Any) -> None:
        piece.sent, piece.memory[0] = True, 1
        layout = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self.content = (*place, piece.number, piece.file, layout)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _located, self.content


_worker: SharedArena | None = None


def shared_arena() -> SharedArena:
    """The arena of this worker."""
    global _worker  # noqa: PLW0603
    if _worker is None or _worker.place[0] != os.getpid():
        _worker = SharedArena()
    return _worker


def _can_share() -> bool:
    """Whether processes can open each other's files here, as on Linux those of one user can."""
    if not (hasattr(os, "memfd_create") and counts_users()):
        return False
    theirs, ours = Path(f"/proc/{os.getppid()}/fd"), Path("/proc/self/fd")
    return os.access(theirs, os.R_OK | os.X_OK) and ours.stat().st_uid == os.geteuid()


_known: WeakSet[type[Any]] = WeakSet()


def send_quickly(batch_type: type[Any]) -> None:
    """Let batches of a class go to the trainer in the pieces of this worker."""
    if batch_type not in _known:
        ForkingPickler.dumps(batch_type)  # an error here is told; one in the thread that sends is not, and hangs
        ForkingPickler.register(batch_type, _reduce_batch)
        _known.add(batch_type)


def _reduce_batch(batch: Any) -> tuple[Any, tuple[Any, ...]]:
    arena = shared_arena()
    columns, *rest = batch.__getstate__()

    def handled(framework: Framework, tensor: Any) -> tuple[Framework, Any]:
        return framework, arena.handle(tensor) if framework.name == "torch" else tensor

    return _restored, (type(batch), (columns.map_tensors(handled), *rest))


# --- in the trainer


class Mapped(Memory):
    """A piece of a worker, as the trainer has it."""

    __slots__ = ("memory", "out")

    def __init__(self, pid: int, name: str, file: int) -> None:
        path = Path(f"/proc/{pid}/fd/{file}")
        try:
            with path.open("r+b", buffering=0) as opened:
                is_it = name in str(path.readlink())
                self.memory = mmap.mmap(opened.fileno(), 0)
        except OSError as error:
            raise _gone(pid) from error
        if not is_it:
            raise _gone(pid)
        self.out = False
        super().__init__(lambda: _content(self.memory))


def _gone(pid: int) -> FunctionError:
    return FunctionError(
        f"a batch of worker {pid} is lost: the process ended, or its files cannot be opened from here."
    )


_mapped: dict[tuple[int, str, int], Mapped] = {}


def _located(pid: int, token: str, number: int, file: int, layout: tuple[Any, ...]) -> Any:
    torch = sys.modules["torch"]
    give_back()
    key = pid, token, number
    piece = _mapped.get(key)
    if piece is None:
        _forget_the_dead()
        piece = _mapped[key] = Mapped(pid, _name(token, number), file)
    dtype, offset, shape, stride = layout
    tensor = torch.empty(0, dtype=dtype).set_(piece.storage, offset, shape, stride)
    piece.out = True  # after the tensor is there: another thread sees that it is in use
    return tensor


def give_back() -> None:
    """Tell the workers which pieces nobody looks at any more."""
    for key, piece in list(_mapped.items()):
        if piece.out and piece.is_lost:  # by torch moved elsewhere, to be sent on to other processes
            _mapped.pop(key, None)
        elif piece.out and piece.is_unused:
            piece.out = False
            piece.memory[0] = 0


def _forget_the_dead() -> None:
    for pid in {key[0] for key in list(_mapped)}:
        if not Path(f"/proc/{pid}").exists():
            for key in [key for key in list(_mapped) if key[0] == pid]:
                _mapped.pop(key, None)


def _before_fork() -> None:
    """A child will see what lies in the pieces that are out: they are never given back."""
    for key, piece in list(_mapped.items()):
        if piece.out:
            _mapped.pop(key, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_mapped.clear)


def _inline(content: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    torch = sys.modules["torch"]
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def _restored(batch_type: type[Any], state: tuple[Any, ...]) -> Any:
    batch = object.__new__(batch_type)
    batch.__setstate__(state)
    return batch


def _content(memory: mmap.mmap) -> Any:
    torch = sys.modules["torch"]
    return torch.frombuffer(memory, dtype=torch.uint8, offset=_HEAD).untyped_storage()


def _name(token: str, number: int) -> str:
    return f"quire-{token}-{number}"
