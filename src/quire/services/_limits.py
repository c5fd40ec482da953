"""Limits of a server and of a client, and the accounting of memory that enforces them."""

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
"""What gRPC takes in one message, unless told otherwise, in every language."""
ASIDE = 1024
"""So many more calls may be there that are about to be refused, or ask for the health; gRPC itself refuses others."""


@dataclass(frozen=True)
class Limits:
    """What a server takes on at most; beyond it, calls are refused with RESOURCE_EXHAUSTED.

    max_message_bytes: of one message; what is larger comes in parts, in a stream.
    max_request_bytes: of one request, all its parts together.
    max_pending_bytes: of all requests that are being read or worked on, together.
    max_concurrency: how many calls are worked on at once.
    max_queue: how many more may wait.
    max_stream_wait: how many seconds they wait while open streams hold every thread and none of them ends.
    """

    max_message_bytes: int = MESSAGE_BYTES
    max_request_bytes: int = 256 * MiB
    max_pending_bytes: int = 1024 * MiB
    max_concurrency: int = 64
    max_queue: int = 256
    max_stream_wait: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("max_queue", "max_stream_wait") else 1
            if getattr(self, field.name) < least:
                raise OptionError(f"{field.name}={getattr(self, field.name)}: use {least} or more.")


class Budget:
    """The bytes of all requests that are in memory."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._taken = 0

    @contextmanager
    def account(self) -> Iterator[Account]:
        """What one call takes, given back at its end."""
        account = Account(self)
        try:
            yield account
        finally:
            account.clear()

    def take(self, size: int) -> None:
        """Take note of bytes that have come."""
        with self._lock:
            if self._taken + size > self.limits.max_pending_bytes:
                raise ServiceLimitError(
                    "all requests in work together would take more than "
                    f"max_pending_bytes={self.limits.max_pending_bytes}. Try later."
                )
            self._taken += size

    def give(self, size: int) -> None:
        """Take note of bytes that are gone."""
        with self._lock:
            self._taken -= size


class Account:
    """The bytes that one call has in memory."""

    __slots__ = ("_budget", "_taken")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._taken = 0

    def take(self, size: int) -> None:
        """Take note of bytes of the request."""
        limit = self._budget.limits.max_request_bytes
        if self._taken + size > limit:
            raise ServiceLimitError(
                f"the request has more than max_request_bytes={limit}. Send fewer documents at a time, with .stream()."
            )
        self._budget.take(size)
        self._taken += size

    def clear(self) -> None:
        """Give everything back."""
        self._budget.give(self._taken)
        self._taken = 0


class Allowance:
    """The bytes that one answer may have, as its reader allows."""

    __slots__ = ("_most", "_taken")

    def __init__(self, most: int) -> None:
        self._most, self._taken = most, 0

    def take(self, size: int) -> None:
        """Take note of bytes of the answer."""
        self._taken += size
        if self._taken > self._most:
            raise answer_too_large(self._most)

    def clear(self) -> None:
        """The next answer begins."""
        self._taken = 0


def answer_too_large(most: int) -> ServiceLimitError:
    """What a caller is told of an answer that it does not want in memory."""
    return ServiceLimitError(
        f"the answer is larger than max_answer_bytes={most}. Ask for fewer documents at a time, with .stream(), "
        "or make the client with a larger max_answer_bytes."
    )


KEPT = 8 << 20
"""Twice the size of a message, unless limits say otherwise: gRPC takes some more than a message has."""


@cache
def keep_memory(size: int = KEPT) -> None:
    """Let the allocator keep what messages took for the next ones, and not give it back to the system each time.

    Fresh memory costs more than copying into it: the system clears every page, when it is touched first. glibc's
    allocator keeps blocks up to the largest that was ever freed (and 32 MiB), and twice as much in each of its arenas;
    so one is freed here. It was never touched, and others' allocators do not mind. MALLOC_TRIM_THRESHOLD_ or
    MALLOC_MMAP_THRESHOLD_ in the environment turn this off.
    """
    np.empty(size, np.uint8)
