"""What became of ranks: what each brings home, what went wrong on it, or that it was lost."""

from __future__ import annotations

import logging
import pickle
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.distributed.estimator._job import Outcome
from quire.errors import FunctionError, QuireError

_log = logging.getLogger("quire.distributed")
_COMMUNICATION = ("torch.distributed", "torch.nn.parallel", "torch.autograd", "torch._tensor", "tensorflow")
"""Modules whose calls of native code talk to other ranks; a step's gradients are exchanged within `backward`."""
_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "address already in use",
    "eaddrinuse",
    "collective ops is aborted",
    "socket closed",
    "heartbeat",
    "gloo",
)
"""How gloo and TensorFlow describe a lost connection: they raise a RuntimeError, or an error that says no more."""


class LostRanksError(Exception):
    """A rank is gone: killed, or cut off from the others. Another attempt may fare better."""


class RemoteTraceback(Exception):  # noqa: N818 - it is text, as that of concurrent.futures
    """The traceback of an error in another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Attempt:
    """The folder in which the ranks of one attempt leave what they have to say."""

    folder: Path

    def keep(self, rank: int, outcome: Outcome) -> None:
        """Bring home what a rank made."""
        _written(self.folder / f"outcome-{rank}", pickle.dumps(outcome, 5))

    def keep_error(self, rank: int, error: BaseException) -> None:
        """Bring home what went wrong on a rank."""
        text = "".join(traceback.format_exception(error))
        try:
            content = pickle.dumps((error, text))
            pickle.loads(content)  # noqa: S301 - our own
        except Exception:  # noqa: BLE001 - any class may fail in its own way
            content = pickle.dumps((None, text))
        _written(self.folder / f"error-{rank}", content)

    def outcomes(self, size: int) -> list[Outcome]:
        """What all ranks made."""
        return [pickle.loads((self.folder / f"outcome-{rank}").read_bytes()) for rank in range(size)]  # noqa: S301

    @property
    def has_error(self) -> bool:
        """Whether something went wrong on a rank, and was not that another one is gone."""
        return any(self.folder.glob("error-*"))

    def raise_error(self) -> None:
        """Raise what a rank raised; errors of quire as they are."""
        for path in sorted(self.folder.glob("error-*")):
            error, text = pickle.loads(path.read_bytes())  # noqa: S301 - our own ranks wrote it
            remote, rank = RemoteTraceback(text), path.name.rpartition("-")[2]
            if isinstance(error, QuireError):
                raise error from remote
            last = text.strip().splitlines()[-1]
            made = FunctionError(f"rank {rank} failed: {last}")
            if error is None:
                raise made from remote
            error.__cause__ = remote
            raise made from error


def _written(path: Path, content: bytes) -> None:
    """A file that is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


def is_lost(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone.

    That is an error which the communication of a framework itself has raised: its innermost frame is theirs. What is
    raised by code of the user (a callback, a model, a pipeline), or by a library that it calls, is an error of that
    code, whatever it says.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    origin = "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__", ""))
    if isinstance(error, QuireError) or not origin.startswith(_COMMUNICATION):
        return False
    name, text = type(error).__name__, str(error).lower()
    if name in ("DistNetworkError", "DistStoreError", "DistBackendError"):
        return True
    if name == "UnknownError" and "collective ops" not in text:
        return False  # TensorFlow wraps errors of Python functions in a pipeline in it
    return any(words in text for words in _PEER)


def with_restarts(launch: Callable[[Attempt], list[Outcome]], folder: Path, restarts: int) -> list[Outcome]:
    """Launch ranks, and do it again when some of them are lost: they go on from the last checkpoint."""
    for number in range(restarts + 1):
        attempt = Attempt(folder / f"attempt-{number}")
        attempt.folder.mkdir(parents=True)
        try:
            return launch(attempt)
        except LostRanksError as lost:
            attempt.raise_error()
            if number == restarts:
                raise FunctionError(f"{lost} This was attempt {number + 1}: max_restarts={restarts}.") from lost
            _log.warning("%s Training goes on from the last checkpoint.", lost)
        finally:
            shutil.rmtree(attempt.folder, ignore_errors=True)
    raise AssertionError


def lost(rank: Any, why: str) -> LostRanksError:
    """The error about a rank that is gone."""
    return LostRanksError(f"rank {rank} was lost: {why}.")
