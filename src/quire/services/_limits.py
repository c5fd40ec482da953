"""Limits of servers and clients, and the accounting of bytes that enforces them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache

import numpy as np

from quire.errors import OptionError, ServiceLimitError

MiB = 1 << 20
MESSAGE_BYTES = 4 * MiB
"""The default limit of one gRPC message, in every language."""
RESPONSE_BYTES = 256 * MiB
"""The default limit of one answer that a client accepts."""


@dataclass(frozen=True)
class Limits:
    """What a server accepts; calls beyond it are refused with RESOURCE_EXHAUSTED.

    max_message_bytes: the size of one message; larger requests are sent in parts, as a stream.
    max_request_bytes: the size of one request, all its parts together.
    max_pending_bytes: the size of all requests in memory, received or running.
    max_concurrency: the number of calls that run at the same time.
    max_queue: the number of calls that may wait in addition.
    max_stream_wait: how many seconds calls wait while open streams hold every thread and none of them ends.
    """

    max_message_bytes: int = MESSAGE_BYTES
    max_request_bytes: int = 256 * MiB
    max_pending_bytes: int = 1024 * MiB
    max_concurrency: int = 64
    max_queue: int = 256
    max_stream_wait: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            minimum = 0 if field.name in ("max_queue", "max_stream_wait") else 1
            if getattr(self, field.name) < minimum:
                raise OptionError(f"{field.name}={getattr(self, field.name)}: use {minimum} or more.")

    @property
    def max_calls(self) -> int:
        """The number of calls that may run or wait."""
        return self.max_concurrency + self.max_queue


class RequestBudget:
    """The bytes of all requests that a server has in memory."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._taken = 0

    @contextmanager
    def account(self) -> Iterator[RequestAccount]:
        """Open the account of one call, which releases its bytes at the end."""
        account = RequestAccount(self)
        try:
            yield account
        finally:
            account.clear()

    def take(self, size: int) -> None:
        """Count bytes that were received."""
        with self._lock:  # for the check and the addition: two requests must not take the same room
            if self._taken + size > self.limits.max_pending_bytes:
                raise ServiceLimitError(
                    "all requests in memory together would have more than "
                    f"max_pending_bytes={self.limits.max_pending_bytes}. Try again later."
                )
            self._taken += size

    def release(self, size: int) -> None:
        """Count bytes that are no longer in memory."""
        with self._lock:
            self._taken -= size


class RequestAccount:
    """The bytes that one call has in memory."""

    __slots__ = ("_budget", "_taken")

    def __init__(self, budget: RequestBudget) -> None:
        self._budget = budget
        self._taken = 0

    def take(self, size: int) -> None:
        """Count bytes of the request."""
        # The limit of the request comes first: beyond it, another attempt later would not help.
        limit = self._budget.limits.max_request_bytes
        if self._taken + size > limit:
            raise _too_large(
                f"the request has more than max_request_bytes={limit}. Send fewer documents at a time, with .stream()."
            )
        self._budget.take(size)
        self._taken += size

    def clear(self) -> None:
        """Release all bytes."""
        self._budget.release(self._taken)
        self._taken = 0


class ResponseAllowance:
    """The bytes that a client accepts for one answer."""

    __slots__ = ("_limit", "_taken")

    def __init__(self, limit: int) -> None:
        self._limit, self._taken = limit, 0

    def take(self, size: int) -> None:
        """Count bytes of the answer."""
        self._taken += size
        if self._taken > self._limit:
            raise response_too_large(self._limit)

    def clear(self) -> None:
        """Start to count the next answer."""
        self._taken = 0


def response_too_large(limit: int) -> ServiceLimitError:
    """Return the error for an answer that is larger than the client accepts."""
    return _too_large(
        f"the response is larger than max_response_bytes={limit}. Ask for fewer documents at a time, with .stream(), "
        "or create the client with a larger max_response_bytes."
    )


def _too_large(message: str) -> ServiceLimitError:
    error = ServiceLimitError(message)
    error.retryable = False
    return error


@cache
def retain_message_memory() -> None:
    """Let the allocator keep the memory of messages for the next ones instead of returning it to the system.

    Fresh memory costs more than copying into it, because the system clears every page on first use. glibc returns
    blocks above a threshold at once, and raises that threshold to the largest block that was ever freed (at most
    32 MiB). So one block is allocated and freed here, without touching it: twice the default size of a message, since
    gRPC allocates somewhat more than a message has. Other allocators are not affected. MALLOC_TRIM_THRESHOLD_ or
    MALLOC_MMAP_THRESHOLD_ in the environment turn this off.
    """
    np.empty(2 * MESSAGE_BYTES, np.uint8)
