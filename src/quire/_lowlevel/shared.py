"""Shared memory of the workers of a DataLoader, which the trainer maps and gives back.

A piece is an anonymous file (`memfd_create`) that worker and trainer both map. The trainer opens it once, through the
worker's table of open files (`/proc/<pid>/fd/<number>`), and keeps the mapping.

The first byte of a piece says who owns it: 1 while the trainer has the tensor, 0 while the worker may write. The worker
sets it before the tensor is sent, and thus before its own arrays on the memory are gone. The trainer clears it when
nothing there refers to the memory any more. Each of the two hands out an array on the memory, whose finalizer tells
that it is unused in that process (see `quire._lowlevel.pool`).
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire._lowlevel import is_safe
from quire._lowlevel.forks import ForkSafeLock, at_fork
from quire._lowlevel.pool import MemoryPool, Piece

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEADER = 4096  # bytes before the content, so that the content begins at a page; the first byte is the owner
_MAX_PIECES = 64  # of a worker: each is an open file


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

    __slots__ = ("id", "was_sent")

    def __init__(self, token: str, size: int) -> None:
        number = secrets.randbits(48)
        name = PieceId(os.getpid(), token, number, -1)
        file = os.memfd_create(name.file_name)
        os.ftruncate(file, _HEADER + size)
        self.id, self.was_sent = name._replace(file=file), False
        super().__init__(mmap.mmap(file, _HEADER + size), _HEADER, size)

    @property
    def is_free(self) -> bool:
        """Whether the trainer does not use the memory."""
        owner: int = self.memory[0]
        return owner == 0

    def hand_over(self) -> PieceId:
        """Let the trainer own the piece, and return its name."""
        self.was_sent, self.memory[0] = True, 1
        return self.id


class SharedPool(MemoryPool):
    """The pieces of shared memory of one worker.

    No piece is dropped for being old: the trainer finds a piece by its file, and may not have opened it yet.
    """

    __slots__ = ("_pieces", "owner", "token")

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.token = os.getpid(), secrets.token_hex(8)
        self._pieces: dict[int, WorkerPiece] = {}

    def take_shared(self, size: int) -> NDArray[np.uint8] | None:
        """Return an array in shared memory; None if there are as many pieces as there may be, and none is free."""
        piece = self._find_free(size)
        if piece is None:
            if len(self._pieces) >= _MAX_PIECES:
                return None
            piece = WorkerPiece(self.token, size)
            self._pieces[piece.address] = piece
        self._pieces[piece.address].was_sent = False
        return self._hand_out(piece)

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
            piece = mapped[name] = TrainerPiece(name)
        piece.is_out = True
        array = piece.to_array()
        weakref.finalize(array, _return_to_worker, piece, os.getpid()).atexit = False
    return array


def _return_to_worker(piece: TrainerPiece, owner: int) -> None:
    # Without the lock, which the thread that runs this finalizer may be waiting for. Each array has one finalizer, and
    # the worker hands a piece over again only after the byte is cleared: last, so that `is_out` is not lost.
    if not piece.is_retired and os.getpid() == owner:
        piece.is_out = False
        piece.memory[0] = 0


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
