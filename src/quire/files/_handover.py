"""Pieces on their way from one thread to another, so that both work at once."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from quire.files._retry import too_slow


class GivenUpError(Exception):
    """The other side has given up, and wants no more or has no more."""


class Handover:
    """Pieces of bytes, in order; no more than `room` bytes, or one piece, wait to be taken."""

    def __init__(self, room: int) -> None:
        self._room, self._size = room, 0
        self._pieces: deque[Any] = deque()
        self._changed = threading.Condition()
        self._ended = self._given_up = False
        self._error: BaseException | None = None

    def put(self, piece: Any, seconds: float | None = None) -> None:
        """Hand over a piece, as soon as there is room; if there is none in time, the other side hangs."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._pieces and self._size + len(piece) > self._room and not self._given_up:
                left = None if until is None else until - time.monotonic()
                if left is not None and seconds is not None and left <= 0:
                    raise too_slow(seconds)
                self._changed.wait(left)
            if self._given_up:
                raise GivenUpError
            self._pieces.append(piece)
            self._size += len(piece)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """There are no more pieces; with an error, it is raised behind the last."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def give_up(self) -> None:
        """Leave: whoever hands over or takes is told so, and what waits is forgotten."""
        with self._changed:
            self._given_up = True
            self._pieces.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._ended or self._given_up)
                if self._given_up:
                    raise GivenUpError
                if not self._pieces:
                    break
                piece = self._pieces.popleft()
                self._size -= len(piece)
                self._changed.notify_all()
            yield piece
        if self._error is not None:
            raise self._error
