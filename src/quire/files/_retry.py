"""Calls to a remote store: within a deadline, retried while the failure may be temporary."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire._installation import install_command
from quire.errors import MissingDependencyError, OptionError, StorageError, StorageNotFoundError, UriError
from quire.files._throttling import report_throttling
from quire.files._uris import display_uri

T = TypeVar("T")

SLOWEST_TRANSFER = 1 << 20
"""Bytes per second: a request that sends or receives data gets its size divided by this as additional time."""
GONE_STATUS = (404, 410)
TEMPORARY_STATUS = (408, 425, 429)
THROTTLING_STATUS = (429, 503)
"""A store that answers with one of these asks for fewer requests."""
_OBSTORE_SCHEMES = ("http:", "https:", "s3:", "s3a:", "gs:", "gcs:", "az:", "abfs:", "abfss:", "adl:")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 8.0
_PERMANENT_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_MISTAKES = (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
_jitter = random.SystemRandom()  # leaves the state of `random` to the user, and differs in forked workers


def retry_pause(attempt: int) -> float:
    """Return the seconds to wait after attempt 0, 1, ...: they double, with a random factor."""
    return min(_FIRST_PAUSE * 2.0**attempt, _LONGEST_PAUSE) * _jitter.uniform(0.5, 1)


@dataclass(frozen=True)
class RemoteOptions:
    """How a remote store is accessed.

    A call that fails for a reason that may be temporary is retried up to `retries` times, after pauses that double.
    One attempt has `timeout` seconds, and all of them together `deadline`; large files are read in parts, and each
    part has as much. `storage_options` are keys, endpoints and headers, in the names of fsspec's filesystems.
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
class RemoteCall:
    """What is done at which address, for messages. Errors become StorageErrors; UriErrors stay as they are.

    `size` is the number of bytes that one request sends or receives, and `advice` is for a store that asks to wait for
    longer than the deadline.
    """

    what: str
    url: str
    size: int = 0
    advice: str = "Try again later, or pass RemoteOptions(deadline=...) with more seconds."

    def run(self, attempt: Callable[[float], T], options: RemoteOptions, *, own_time: bool = False) -> T:
        """Return the result of the first attempt that succeeds; each attempt gets the seconds that it may take.

        Attempts that limit their time themselves (`own_time`) may take long, and do not use up the deadline.
        """
        # Large requests get more time, for a single attempt and in all.
        extra = self.size / SLOWEST_TRANSFER
        start = time.monotonic()
        end = start + options.deadline + extra
        attempts = 0
        for number in range(options.retries + 1):
            began = time.monotonic()
            try:
                return attempt(min(options.timeout + extra, max(end - time.monotonic(), 0.001)))
            except Exception as error:  # noqa: BLE001 - stores raise errors of their own classes
                last = _find_cause(error)
            attempts += getattr(last, "attempts", 1)  # a client may have retried parts of it
            self._raise_if_permanent(last)
            answer = last.__cause__ if isinstance(last, UriError) else last
            requested = retry_after(answer)
            if _http_status(answer) in THROTTLING_STATUS:
                report_throttling(requested)
            # An upload of many minutes may break off at its end, and must get another attempt.
            end += time.monotonic() - began if own_time else 0
            if requested and time.monotonic() + requested >= end and not isinstance(last, UriError):
                raise StorageError(
                    f"{display_uri(self.url)}: {self.what} failed: the store limits the number of requests, and asks "
                    f"to wait for {requested:.0f} seconds. {self.advice}"
                ) from last
            pause = max(retry_pause(number), requested)
            if number == options.retries or time.monotonic() + pause >= end:
                break
            time.sleep(pause)
        if isinstance(last, UriError):
            raise last
        seconds, times = time.monotonic() - start, "once" if attempts == 1 else f"{attempts} times"
        raise StorageError(
            f"{display_uri(self.url)}: {self.what} failed, tried {times} in {seconds:.1f} seconds. The last reason: "
            f"{_describe_error(last)}. Try again later, or pass RemoteOptions with more retries or more seconds."
        ) from last

    def _raise_if_permanent(self, error: Exception) -> None:
        """Raise an error that another attempt would not change."""
        if isinstance(error, (StorageError, MissingDependencyError)):
            raise error
        if isinstance(error, UriError):
            if is_temporary(error):
                return
            raise error
        status, url = _http_status(error), display_uri(self.url)
        if isinstance(error, FileNotFoundError) or status in GONE_STATUS:
            raise StorageNotFoundError(f"{url}: there is no such file.") from error
        if isinstance(error, ImportError):
            extra = "http" if self.url.startswith(("http:", "https:")) else "remote"
            command = f" Run: {install_command(extra)}." if self.url.startswith(_OBSTORE_SCHEMES) else ""
            raise MissingDependencyError(
                f"{url}: a package that it needs is not installed ({error}).{command}"
            ) from error
        is_refused = 400 <= status < 500 and status not in TEMPORARY_STATUS
        if is_refused or isinstance(error, (*_PERMANENT_ERRORS, *_MISTAKES)):
            raise StorageError(
                f"{url}: {self.what} is not possible ({_describe_error(error)}). It was not tried again, "
                "because that would not help: check the address, the access rights and the storage_options."
            ) from error


def run_with_timeout(call: Callable[[], T], seconds: float) -> T:
    """Return the result of a call in a thread of its own, which is abandoned if it takes too long."""
    results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((True, call()))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            results.put((False, error))

    # Not a thread of a pool: calls that hang would occupy it, and the end of the process would wait for them.
    threading.Thread(target=run, daemon=True, name="quire-remote").start()
    try:
        succeeded, result = results.get(timeout=seconds)
    except queue.Empty:
        raise timeout_error(seconds) from None
    if succeeded:
        value: T = result
        return value
    raise result


def timeout_error(seconds: float) -> TimeoutError:
    """Return the error for an attempt that took more than `seconds`."""
    return TimeoutError(f"no answer within {seconds:.3g} seconds")


def _find_cause(error: Exception) -> Exception:
    """Return the error itself; over http, fsspec raises FileNotFoundError for any failure, so return its cause."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or isinstance(error, UriError) or not isinstance(cause, Exception):
        return error
    tp = type(cause)
    is_failure = isinstance(cause, OSError) or tp.__module__.startswith("aiohttp.") or "Timeout" in tp.__name__
    return cause if is_failure else error


def is_temporary(error: UriError) -> bool:
    """Return whether another attempt may succeed."""
    status = _http_status(error.__cause__)
    if status:
        return status >= 500 or status in TEMPORARY_STATUS
    is_invalid = isinstance(error.__cause__, ValueError)
    return isinstance(error, TimeoutError) or (error.__cause__ is not None and not is_invalid)


def _http_status(error: BaseException | None) -> int:
    """Return the HTTP status of an error, under the names that clients use; 0 if there is none."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(error, "code", None) or getattr(response, "status_code", None)
    return status if isinstance(status, int) else 0


def retry_after(error: BaseException | None) -> float:
    """Return the seconds that a server asks to wait before the next request; 0 if it does not say.

    obstore does not report the headers of answers, so this is for the Hub, for fsspec, and for plain HTTP.
    """
    headers = getattr(error, "headers", None) or getattr(getattr(error, "response", None), "headers", None)
    text = "" if headers is None else str(headers.get("Retry-After", ""))
    return float(text) if text.isdecimal() else 0.0  # it may also be a date, which few servers send


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else repr(error)
