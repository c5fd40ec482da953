"""What a worker does: call the function on a few items, and report results or the failure."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from quire.parallel._pickling import dump_value, load_value

Function: TypeAlias = Callable[[Any], Any]


class WorkerTraceback(Exception):  # noqa: N818 - the text of an error, used as its cause
    """The traceback of an error in another process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass
class Failure:
    """An error that a function raised, and the offset of the item in the task."""

    offset: int
    error: BaseException | None
    summary: str
    traceback: str = ""

    def cause(self) -> BaseException:
        """Return the original error, with the traceback of the other process as its cause.

        If the error could not be pickled, the traceback alone.
        """
        if not self.traceback:
            assert self.error is not None
            return self.error
        worker_traceback = WorkerTraceback(self.traceback)
        if self.error is None:
            return worker_traceback
        self.error.__cause__ = worker_traceback
        return self.error


@dataclass
class Outcome:
    """The results of some items, up to a failure if there was one, and the seconds they took."""

    seconds: float = 0.0
    results: list[Any] = field(default_factory=list)
    failure: Failure | None = None


def run_task(function: Function, items: Iterable[Any]) -> Outcome:
    """Call the function on each of the items; stop at an error."""
    outcome = Outcome()
    started = time.perf_counter()
    for offset, item in enumerate(items):
        try:
            outcome.results.append(function(item))
        except BaseException as error:  # noqa: BLE001 - the consumer of the results raises it
            outcome.failure = Failure(offset, error, summary_of(error))
            break
    outcome.seconds = time.perf_counter() - started
    return outcome


def summary_of(error: BaseException) -> str:
    """Return the type and the message of an error."""
    return f"{type(error).__name__}: {error}"


# --- in another process


def dump_outcome(outcome: Outcome, *, to_own: bool = True) -> bytes:
    """Pickle an outcome; a result that cannot be pickled becomes a failure."""
    if outcome.failure:
        outcome.failure = _portable_failure(outcome.failure)
    try:
        return dump_value(outcome, to_own=to_own)[0]
    except Exception as error:  # noqa: BLE001 - pickling runs code of the values
        return dump_value(Outcome(outcome.seconds, [], _pickling_failure(outcome.results, error)))[0]


def _portable_failure(failure: Failure) -> Failure:
    """Return the failure with the traceback as text, and with the error only if it can be unpickled."""
    error = failure.error
    assert error is not None
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        load_value(dump_value(error)[0])
    except Exception:  # noqa: BLE001 - many errors cannot be created again from their arguments
        error = None
    return Failure(failure.offset, error, failure.summary, text)


def _pickling_failure(results: Sequence[Any], error: Exception) -> Failure:
    for offset, result in enumerate(results):
        try:
            dump_value(result)
        except Exception as own:  # noqa: BLE001
            return _portable_failure(Failure(offset, own, f"its result cannot be sent back: {summary_of(own)}"))
    return _portable_failure(Failure(0, error, f"the results cannot be sent back: {summary_of(error)}"))


_last: tuple[str, Function] | None = None


def run_pickled_task(token: str, function: bytes, items: bytes) -> bytes:
    """Run a task in a process of the caller's pool, with everything pickled; the function is unpickled once."""
    global _last  # noqa: PLW0603 - a cache of this process
    if _last is None or _last[0] != token:
        _last = token, load_value(function)
    return dump_outcome(run_task(_last[1], load_value(items)), to_own=False)
