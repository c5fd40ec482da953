"""What a worker does: call the function on a few items, and tell what came of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from quire.parallel._shipping import pack, unpack

Function: TypeAlias = Callable[[Any], Any]


class WorkerTraceback(Exception):  # noqa: N818 - it is the text of an error, told as the cause of one
    """The traceback of an error in another process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass
class Failure:
    """An error that a function raised: on which of the items, and what."""

    offset: int
    error: BaseException | None
    summary: str
    traceback: str = ""

    def cause(self) -> BaseException:
        """The original error, whose cause is the other process's traceback; that alone if the error did not travel."""
        if not self.traceback:
            assert self.error is not None
            return self.error
        told = WorkerTraceback(self.traceback)
        if self.error is None:
            return told
        self.error.__cause__ = told
        return self.error


@dataclass
class Outcome:
    """What came of some items: their results, up to a failure if there was one, and the time that they took."""

    seconds: float = 0.0
    results: list[Any] = field(default_factory=list)
    failure: Failure | None = None


def work_on(function: Function, items: Iterable[Any]) -> Outcome:
    """Call the function on each of the items; an error ends it."""
    outcome = Outcome()
    started = time.perf_counter()
    for offset, item in enumerate(items):
        try:
            outcome.results.append(function(item))
        except BaseException as error:  # noqa: BLE001 - all of them are told to whoever asked for the work
            outcome.failure = Failure(offset, error, summary_of(error))
            break
    outcome.seconds = time.perf_counter() - started
    return outcome


def summary_of(error: BaseException) -> str:
    """The type and the text of an error."""
    return f"{type(error).__name__}: {error}"


# --- in another process


def packed_outcome(outcome: Outcome, *, to_own: bool = True) -> bytes:
    """An outcome as bytes; a result that cannot travel is a failure."""
    if outcome.failure:
        outcome.failure = _portable(outcome.failure)
    try:
        return pack(outcome, to_own=to_own)[0]
    except Exception as error:  # noqa: BLE001 - pickling runs code of the values
        return pack(Outcome(outcome.seconds, [], _unsendable(outcome.results, error)))[0]


def _portable(failure: Failure) -> Failure:
    """The failure with the traceback as text, and with the error only if it survives the journey."""
    error = failure.error
    assert error is not None
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        unpack(pack(error)[0])
    except Exception:  # noqa: BLE001 - many errors cannot be made anew from their arguments
        error = None
    return Failure(failure.offset, error, failure.summary, text)


def _unsendable(results: Sequence[Any], error: Exception) -> Failure:
    for offset, result in enumerate(results):
        try:
            pack(result)
        except Exception as found:  # noqa: BLE001
            return _portable(Failure(offset, found, f"its result cannot be sent back: {summary_of(found)}"))
    return _portable(Failure(0, error, f"the results cannot be sent back: {summary_of(error)}"))


# --- in a process of somebody else's pool

_last: tuple[str, Function] | None = None


def work_packed(token: str, function: bytes, items: bytes) -> bytes:
    """What `work_on` gives, with everything packed; the function is unpacked once a process."""
    global _last  # noqa: PLW0603 - it is what this process has in hand
    if _last is None or _last[0] != token:
        _last = token, unpack(function)
    return packed_outcome(work_on(_last[1], unpack(items)), to_own=False)
