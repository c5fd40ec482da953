"""Calls to a remote store: within a deadline, tried again while the reason may pass, with an error that tells all."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire._installation import install_command
from quire.errors import MissingDependencyError, OptionError, StorageError, StorageNotFoundError
from quire.files._uris import shown

T = TypeVar("T")

_SLOWEST = 1 << 20
"""Bytes a second: what is sent at once gets that much more time."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 8.0
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_MISTAKES = (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
_PASSING_STATUS = (408, 425, 429)
_GONE = (404, 410)
_chance = random.SystemRandom()  # leaves the state of `random` to the user, and differs in forked workers


@dataclass(frozen=True)
class RemoteOptions:
    """How a remote store is spoken to.

    A call that fails for a reason that may pass is tried again up to `retries` times, after pauses that double.
    One attempt has `timeout` seconds, and all of them together `deadline`; large files are read in parts, and each part
    has as much. `storage_options` go to fsspec's filesystem: keys, endpoints, headers.
    """

    retries: int = 5
    deadline: float = 60.0
    timeout: float = 30.0
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)  # they may hold secrets

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise OptionError(f"retries is 0 or more, got {self.retries}.")
        for name, seconds in (("deadline", self.deadline), ("timeout", self.timeout)):
            if not seconds > 0:
                raise OptionError(f"{name} is a number of seconds above 0, got {seconds}.")


@dataclass(frozen=True)
class Errand:
    """What is done at which address; `size` is what is sent at once, in bytes."""

    what: str
    url: str
    size: int = 0

    def run(self, attempt: Callable[[float], T], options: RemoteOptions, *, own_time: bool = False) -> T:
        """The result of the first attempt that succeeds; each is told the seconds that it has.

        Attempts that see to their time themselves (`own_time`) may take long, and then have it again.
        """
        extra = self.size / _SLOWEST
        start = time.monotonic()
        end = start + options.deadline + extra
        for number in range(options.retries + 1):
            began = time.monotonic()
            try:
                return attempt(min(options.timeout + extra, max(end - time.monotonic(), 0.001)))
            except Exception as error:  # noqa: BLE001 - stores raise errors of their own kinds
                last = _reason(error)
            self._check_lasting(last)
            end += time.monotonic() - began if own_time else 0
            pause = min(_FIRST_PAUSE * 2**number, _LONGEST_PAUSE) * _chance.uniform(0.5, 1)
            if number == options.retries or time.monotonic() + pause >= end:
                break
            time.sleep(pause)
        raise self._failure(number + 1, time.monotonic() - start, last) from last

    def _check_lasting(self, error: Exception) -> None:
        """Raise what another attempt would not change."""
        if isinstance(error, (StorageError, MissingDependencyError)):
            raise error
        if isinstance(error, FileNotFoundError) or _status(error) in _GONE:
            raise StorageNotFoundError(f"{shown(self.url)}: there is no such file.") from error
        if isinstance(error, ImportError):
            raise MissingDependencyError(f"{shown(self.url)}: {_install(self.url, error)}") from error
        refused = 400 <= _status(error) < 500 and _status(error) not in _PASSING_STATUS
        if refused or isinstance(error, (*_LASTING, *_MISTAKES)):
            raise StorageError(
                f"{shown(self.url)}: {self.what} is not possible ({_told(error)}). It was not tried again, "
                "because that would not help: check the address, the access rights and the storage_options."
            ) from error

    def _failure(self, attempts: int, seconds: float, last: Exception) -> StorageError:
        often = "once" if attempts == 1 else f"{attempts} times"
        return StorageError(
            f"{shown(self.url)}: {self.what} failed, tried {often} in {seconds:.1f} seconds. "
            f"The last reason: {_told(last)}. Try again later, or pass RemoteOptions with more retries or more seconds."
        )


def bounded(call: Callable[[], T], seconds: float) -> T:
    """The result of a call in a thread of its own, which is left behind if it takes too long."""
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((True, call()))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            answers.put((False, error))

    threading.Thread(target=run, daemon=True, name="quire-remote").start()
    try:
        done, answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise too_slow(seconds) from None
    if done:
        result: T = answer
        return result
    raise answer


def too_slow(seconds: float) -> TimeoutError:
    """The error of an attempt that had that many seconds."""
    return TimeoutError(f"no answer within {seconds:.3g} seconds")


def _reason(error: Exception) -> Exception:
    """The error itself; but over http, fsspec shows whatever went wrong as a missing file."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    tp = type(cause)
    broken = isinstance(cause, OSError) or tp.__module__.startswith("aiohttp.") or "Timeout" in tp.__name__
    return cause if broken else error


def _status(error: Exception) -> int:
    """The status of an answer by HTTP, as clients name it; 0 if there is none."""
    found = getattr(error, "status", None) or getattr(error, "code", None)
    return found if isinstance(found, int) else 0


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else repr(error)


def _install(url: str, error: ImportError) -> str:
    command = f" Run: {install_command('http')}." if url.startswith(("http:", "https:")) else ""
    return f"a package that it needs is not installed ({error}).{command}"
