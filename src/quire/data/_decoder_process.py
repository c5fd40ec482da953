"""Decode rows in child processes, so that a crash of a decoder library is an error of a row.

A child gets a step and the bytes of a row through a pipe, and writes the decoded row back, which the parent reads into
the memory of the batch. Each thread that decodes has a child of its own, which it keeps. Children are programs of their
own and not forks: the workers of a DataLoader may not have children of `multiprocessing`, and a fork of a process with
threads may deadlock.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from quire._lowlevel.forks import at_fork
from quire.errors import DecodeError, FunctionError, QuireError
from quire.files import display_uri

if TYPE_CHECKING:
    from numpy.typing import NDArray

_REQUEST = struct.Struct("<QQ")  # the bytes of the pickled arguments, and of the content
_RESPONSE = struct.Struct("<Bq")  # the outcome; the length of the row (-1 for None), or of the message
_DECODED, _DAMAGED, _FAILED = range(3)


class DecoderProcess:
    """A child process that decodes one row at a time."""

    def __init__(self) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve_requests; serve_requests()"
        command = [sys.executable, "-c", code]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        _processes.add(self)
        _close_at_exit()

    def decode(
        self, step: Any, content: Any, row: NDArray[Any], where: str, draws: Sequence[float] | None
    ) -> int | None:
        """Call `decode_row` of a step in the child."""
        arguments = pickle.dumps((step, row.shape, row.dtype.str, where, draws))
        try:
            self._send(_REQUEST.pack(len(arguments), memoryview(content).nbytes), arguments, content)
            outcome, number = _RESPONSE.unpack(self._receive(_RESPONSE.size))
            if outcome == _DECODED:
                self._receive_into(row.reshape(-1).view(np.uint8).data)
                return None if number < 0 else number
            message = self._receive(number).decode()
        except (EOFError, OSError) as error:
            raise DecodeError(f"{display_uri(where)}: the decoder has crashed ({self._end()}).") from error
        except BaseException:  # the child may be in the middle of a row
            self.close()
            raise
        raise DecodeError(message) if outcome == _DAMAGED else FunctionError(message)

    @property
    def is_alive(self) -> bool:
        """Whether the child can decode another row."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the child."""
        self._process.kill()
        self._end()

    def forget(self) -> None:
        """Close the pipes in a forked process, whose child this is not, so that the child ends with its parent."""
        self._close_pipes()
        self._process.returncode = 0  # waiting for it would fail

    def _end(self) -> str:
        """Wait for a child that has closed its pipe, and return what ended it."""
        _processes.discard(self)
        self._close_pipes()
        code = self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        with suppress(ValueError):  # a signal without a name
            return signal.Signals(-code).name
        return f"signal {-code}"

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not sent to a child that has ended
                    pipe.close()

    def _send(self, *parts: Any) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        for part in parts:
            pipe.write(part)
        pipe.flush()

    def _receive_into(self, room: memoryview) -> None:
        pipe: Any = self._process.stdout
        if pipe.readinto(room) != room.nbytes:
            raise EOFError

    def _receive(self, size: int) -> bytes:
        content = bytearray(size)
        self._receive_into(memoryview(content))
        return bytes(content)


_processes: set[DecoderProcess] = set()
_idle: list[DecoderProcess] = []
"""The children that no thread uses. Lists and sets are changed by single operations, which are safe for threads."""


def decode_in_child(
    step: Any, content: Any, row: NDArray[Any], where: str, draws: Sequence[float] | None
) -> int | None:
    """Call `decode_row` of a step in a child process; a crash of the child raises a DecodeError."""
    try:
        process = _idle.pop()
    except IndexError:
        process = DecoderProcess()
    try:
        return process.decode(step, content, row, where, draws)
    finally:
        if process in _processes:
            _idle.append(process)


def close_processes() -> None:
    """End all children."""
    _idle.clear()
    for process in list(_processes):
        process.close()


def _forget_processes() -> None:
    for process in _processes:
        process.forget()
    _processes.clear()
    _idle.clear()


@cache
def _close_at_exit() -> None:
    """End the children with this process; registered by the first child, since importing quire has no effects."""
    atexit.register(close_processes)


at_fork(after_in_child=_forget_processes)


# --- in the child


def serve_requests() -> None:
    """Decode rows until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the whole group; the parent ends the child
    requests, responses = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints to the standard output would write into a response
    while header := requests.read(_REQUEST.size):
        arguments, size = (requests.read(length) for length in _REQUEST.unpack(header))
        _answer(arguments, size, responses)
        responses.flush()


def _answer(arguments: bytes, content: bytes, responses: IO[bytes]) -> None:
    try:
        step, shape, dtype, where, draws = pickle.loads(arguments)  # noqa: S301 - from the parent process
        row = np.zeros(shape, dtype)
        length = step.decode_row(content, row, where, draws)
    except DecodeError as error:
        outcome, text = _DAMAGED, str(error)
    except QuireError as error:
        outcome, text = _FAILED, str(error)
    except Exception as error:  # noqa: BLE001 - a fault of the step, which the parent raises
        outcome, text = _FAILED, f"{type(error).__name__}: {error}"
    else:
        responses.write(_RESPONSE.pack(_DECODED, -1 if length is None else length))
        responses.write(row.reshape(-1).view(np.uint8).data)
        return
    message = text.encode()
    responses.write(_RESPONSE.pack(outcome, len(message)))
    responses.write(message)
