"""Shared memory of the workers of a DataLoader, which the trainer maps and gives back.

A piece is an anonymous file (`memfd_create`) that worker and trainer both map. The trainer opens it once, through the
worker's table of open files (`/proc/<pid>/fd/<number>`), and keeps the mapping.

The first byte of a piece says who owns it: 1 while the trainer has the tensor, 0 while the worker may write. The worker
sets it before the tensor is sent, and thus before its own arrays on the memory are gone. The trainer clears it when
nothing there refers to the memory any more. Each of the two hands out an array on the memory, whose finalizer reports
that it is unused in that process (see `quire._lowlevel.pool`).

Batches of varying sizes share pieces: sizes are rounded up, to four steps for each power of two, and the pages at the
end of a piece that are never written take no memory. Pieces that are not reused are released, see `SharedPool`.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire._lowlevel import is_safe
from quire._lowlevel.forks import ForkSafeLock, at_fork
from quire._lowlevel.pool import MemoryPool, Piece

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEADER = 4096
"""Bytes before the content, so that the content begins at a page: the owner, and from byte 8 on the size in use."""
_WORKER, _TRAINER, _RELEASED = 0, 1, 2
"""The owner of a piece. A released piece has no memory, and the trainer drops its mapping."""
_MAX_PIECES = 64
"""The pieces of a worker: each is an open file."""
_MAX_FREE_BYTES = 256 << 20
"""Free memory of a worker beyond this is released when it needs a piece of another size."""
_MAX_IDLE = 256
"""A free piece that none of this number of arrays has used is released when a piece of another size is needed."""


def measure_shared_memory() -> int | None:
    """Return the size of the system's folder for shared memory, which torch uses, or None if it has none."""
    folder = Path("/dev/shm")  # noqa: S108 - only looked up
    return shutil.disk_usage(folder).total if folder.is_dir() else None


class PieceId(NamedTuple):
    """Names a piece of shared memory to another process."""

    pid: int
    token: str
    number: int
    file: int

    @property
    def file_name(self) -> str:
        """The name of the anonymous file, which tells it from another one with the same number."""
        return f"quire-{self.token}-{self.number}"


# --- in the worker


class WorkerPiece(Piece):
    """Shared memory as the worker has it."""

    __slots__ = ("id", "last_use", "was_sent")

    def __init__(self, token: str, size: int) -> None:
        number = secrets.randbits(48)
        name = PieceId(os.getpid(), token, number, -1)
        file = os.memfd_create(name.file_name)
        os.ftruncate(file, _HEADER + size)
        self.id, self.was_sent, self.last_use = name._replace(file=file), False, 0
        super().__init__(mmap.mmap(file, _HEADER + size), _HEADER, size)

    @property
    def is_free(self) -> bool:
        """Whether the trainer does not use the memory."""
        owner: int = self.memory[0]
        return owner == _WORKER

    def hand_over(self) -> PieceId:
        """Let the trainer own the piece, and return its name."""
        self.was_sent, self.memory[0] = True, _TRAINER
        return self.id

    def release(self) -> None:
        """Return the memory to the system at once, although the trainer has it mapped. No array may be left on it."""
        self.memory[0] = _RELEASED
        with suppress(OSError):  # then it is returned when the trainer drops its mapping
            self.memory.madvise(mmap.MADV_REMOVE, _HEADER, self.size)
        os.close(self.id.file)


class SharedPool(MemoryPool):
    """The pieces of shared memory of one worker.

    A piece that was handed over is never released: the trainer finds it by its file, and may not have opened it yet.
    Free pieces are released when a piece of another size is needed: those that have not been used for long, and the
    oldest ones if there are too many. So batches of one size, however large, keep their pieces.
    """

    __slots__ = ("_pieces", "_takes", "owner", "token")
    _QUICK = 0  # a piece that comes back is free only if the trainer does not use it

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.token = os.getpid(), secrets.token_hex(8)
        self._pieces: dict[int, WorkerPiece] = {}
        self._takes = 0

    def take_shared(self, size: int) -> NDArray[np.uint8] | None:
        """Return an array in shared memory; None if there are as many pieces as there may be, and none is free."""
        self._takes += 1
        step = 1 << (max(size, _HEADER).bit_length() - 3)
        rounded = -(-size // step) * step
        free = self._find_free(rounded)
        if free is None:
            self._release_free(rounded)
            if len(self._pieces) >= _MAX_PIECES:
                return None
            free = WorkerPiece(self.token, rounded)
            self._pieces[free.address] = free
        piece = self._pieces[free.address]
        piece.was_sent, piece.last_use = False, self._takes
        piece.memory[8:16] = size.to_bytes(8, "little")
        return self._hand_out(piece)[:size]

    def _release_free(self, size: int) -> None:
        """Make room for a new piece."""
        pieces = [self._pieces[piece.address] for piece in list(self._free.values()) if piece.is_free]
        total = size + sum(piece.size for piece in pieces)
        for piece in pieces:  # the one that was freed first at the start
            is_idle = self._takes - piece.last_use > _MAX_IDLE
            if not is_idle and total <= _MAX_FREE_BYTES and len(self._pieces) < _MAX_PIECES:
                continue
            if self._free.pop(piece.address, None) is piece:  # no other thread has taken it
                del self._pieces[piece.address]
                total -= piece.size
                piece.release()

    def find(self, address: int) -> WorkerPiece | None:
        """Return the piece whose content begins at an address."""
        return self._pieces.get(address)

    def _keep(self, piece: Piece) -> None:
        self._free[piece.address] = piece


def can_share() -> bool:
    """Return whether processes of one user can open each other's files, as on Linux."""
    if is_safe() or not hasattr(os, "memfd_create"):
        return False
    theirs, ours = Path(f"/proc/{os.getppid()}/fd"), Path("/proc/self/fd")
    return os.access(theirs, os.R_OK | os.X_OK) and ours.stat().st_uid == os.geteuid()


# --- in the trainer


class LostPieceError(Exception):
    """A piece cannot be opened: its worker has ended, or processes cannot open each other's files."""


class TrainerPiece(Piece):
    """Shared memory of a worker as the trainer has it."""

    __slots__ = ("is_out", "is_retired")

    def __init__(self, name: PieceId) -> None:
        path = Path(f"/proc/{name.pid}/fd/{name.file}")
        try:
            with path.open("r+b", buffering=0) as opened:
                is_same_file = name.file_name in str(path.readlink())
                memory = mmap.mmap(opened.fileno(), 0)
        except OSError as error:
            raise LostPieceError from error
        if not is_same_file:  # another process has the pid by now, or another file its number
            raise LostPieceError
        self.is_out = self.is_retired = False
        super().__init__(memory, _HEADER, len(memory) - _HEADER)


mapped: dict[PieceId, TrainerPiece] = {}
"""The pieces of all workers that the trainer has mapped."""
_lock = ForkSafeLock()


def open_piece(name: PieceId) -> NDArray[np.uint8]:
    """Return the content of a piece that a worker has handed over; the last reference to the array gives it back."""
    with _lock:
        piece = mapped.get(name)
        if piece is None:
            drop_pieces_of_ended_workers()
            for other, old in list(mapped.items()):
                if old.memory[0] == _RELEASED:
                    mapped.pop(other, None)
            piece = mapped[name] = TrainerPiece(name)
        piece.is_out = True
        array = piece.to_array()
        weakref.finalize(array, _return_to_worker, piece, os.getpid()).atexit = False
    # The tensor must not seem to be a view of a larger one, which would be copied before it is pickled.
    return array[: int.from_bytes(piece.memory[8:16], "little")]


def _return_to_worker(piece: TrainerPiece, owner: int) -> None:
    # Without the lock, which the thread that runs this finalizer may be waiting for. Each array has one finalizer, and
    # the worker hands a piece over again only after the byte is cleared: last, so that `is_out` is not lost.
    if not piece.is_retired and os.getpid() == owner:
        piece.is_out = False
        piece.memory[0] = _WORKER


def drop_pieces_of_ended_workers() -> None:
    """Unmap the pieces of workers that have ended."""
    for pid in {name.pid for name in list(mapped)}:
        if not Path(f"/proc/{pid}").exists():
            for name in [name for name in list(mapped) if name.pid == pid]:
                mapped.pop(name, None)


def _before_fork() -> None:
    # The mappings are shared, so a forked child sees the batches that the trainer holds now, and the trainer does not
    # know how long the child needs them. These pieces are never given back.
    for name, piece in list(mapped.items()):
        if piece.is_out:
            piece.is_retired = True
            mapped.pop(name, None)


at_fork(before=_before_fork, after_in_child=mapped.clear)
