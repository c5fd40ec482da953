"""Limits of servers and clients, and the accounting of bytes that enforces them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np
from typing_extensions import Self

from quire._lowlevel.allocator import return_free_memory
from quire.errors import OptionError, ServiceLimitError

MiB = 1 << 20
MESSAGE_BYTES = 4 * MiB
"""The default limit of one gRPC message, in every language."""
RESPONSE_BYTES = 256 * MiB
"""The default limit of one answer that a client accepts."""
_TRIM_BYTES, _TRIM_DELAY = 16 * MiB, 0.5


@dataclass(frozen=True)
class Limits:
    """What a server accepts; calls beyond it are refused with RESOURCE_EXHAUSTED.

    max_message_bytes: the size of one message; larger requests are sent in parts, as a stream.
    max_request_bytes: the size of one request, all its parts together.
    max_pending_bytes: the size of all requests in memory, received or running.
    max_concurrency: the number of unary calls that run at the same time.
    max_streams: the number of streams that are open at the same time. Requests above `max_message_bytes` are streams.
    max_queue: the number of unary calls, and of streams, that may wait in addition, for a thread or for their batch.
    max_stream_wait: how many seconds a stream waits while all `max_streams` are open and none of them ends.
    stream_idle_timeout: a stream is ended when the server has waited this many seconds for its caller, to send a value
        or to read a response; None for no limit.

    HTTP routes have no limit of their own for streams: streamed responses count as running calls.
    """

    max_message_bytes: int = MESSAGE_BYTES
    max_request_bytes: int = 256 * MiB
    max_pending_bytes: int = 1024 * MiB
    max_concurrency: int = 64
    max_streams: int = 64
    max_queue: int = 256
    max_stream_wait: float = 2.0
    stream_idle_timeout: float | None = 300.0

    def __post_init__(self) -> None:
        if self.stream_idle_timeout is not None and not 0 < self.stream_idle_timeout < math.inf:
            raise OptionError(
                f"stream_idle_timeout={self.stream_idle_timeout}: use a positive number of seconds, or None."
            )
        for field in fields(self):
            minimum = 0 if field.name in ("max_queue", "max_stream_wait") else 1
            if field.name != "stream_idle_timeout" and getattr(self, field.name) < minimum:
                raise OptionError(f"{field.name}={getattr(self, field.name)}: use {minimum} or more.")

    @property
    def max_calls(self) -> int:
        """The number of unary calls that may run or wait."""
        return self.max_concurrency + self.max_queue

    @property
    def max_open_streams(self) -> int:
        """The number of streams that may be open or wait."""
        return self.max_streams + self.max_queue


class RequestBudget:
    """The bytes of all requests that a server has in memory."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._taken = 0
        self._is_trimming = False

    def account(self) -> RequestAccount:
        """Open the account of one call, which releases its bytes at the end of a block."""
        return RequestAccount(self)

    def trim_memory(self) -> None:
        """Return the memory of a refused request to the system, once it is free.

        The allocator keeps memory for the next messages (see `retain_message_memory`), which is right for requests that
        are served, but a caller who is refused must not be able to leave hundreds of megabytes in the process.
        """
        with self._lock:
            if self._is_trimming:
                return
            self._is_trimming = True

        def trim() -> None:
            with self._lock:
                self._is_trimming = False
            return_free_memory()

        # The parts of the request are free when the call has ended, a moment from now.
        timer = threading.Timer(_TRIM_DELAY, trim)
        timer.daemon = True
        timer.start()

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

    __slots__ = ("_budget", "taken")

    def __init__(self, budget: RequestBudget) -> None:
        self._budget = budget
        self.taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, ServiceLimitError) and self.taken > _TRIM_BYTES:
            self._budget.trim_memory()
        self.clear()

    def take(self, size: int) -> None:
        """Count bytes of the request."""
        # The limit of the request comes first: beyond it, another attempt later would not help.
        limit = self._budget.limits.max_request_bytes
        if self.taken + size > limit:
            raise request_too_large(limit)
        self._budget.take(size)
        self.taken += size

    def clear(self) -> None:
        """Release all bytes."""
        self._budget.release(self.taken)
        self.taken = 0


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


def request_too_large(limit: int) -> ServiceLimitError:
    """Return the error for a request that is larger than the server accepts."""
    return call_too_large(
        f"the request has more than max_request_bytes={limit}. Send fewer documents at a time, with .stream()."
    )


def response_too_large(limit: int) -> ServiceLimitError:
    """Return the error for an answer that is larger than the client accepts."""
    return call_too_large(
        f"the response is larger than max_response_bytes={limit}. Ask for fewer documents at a time, with .stream(), "
        "or create the client with a larger max_response_bytes."
    )


def call_too_large(message: str) -> ServiceLimitError:
    """Return the error for a call that would be too large at any time."""
    error = ServiceLimitError(message)
    error.retryable = False
    return error


ChannelOptions = Sequence[tuple[str, Any]]
"""Options of gRPC itself, such as `("grpc.http2.max_pings_without_data", 0)`."""
KEEPALIVE_TIMEOUT = 20.0
"""How many seconds the other side has to answer a ping before the connection is closed."""
SHORTEST_KEEPALIVE = 10.0
"""How many seconds a server of quire requires between the pings of a client; gRPC's own default is 5 minutes."""


def keepalive_options(keepalive: float | None) -> list[tuple[str, Any]]:
    """Return the options of gRPC that detect connections to machines that are gone."""
    if keepalive is None:
        return []
    if isinstance(keepalive, bool) or not SHORTEST_KEEPALIVE <= keepalive < math.inf:
        raise OptionError(f"keepalive={keepalive!r}: use {SHORTEST_KEEPALIVE:g} seconds or more, or None for no pings.")
    return [
        ("grpc.keepalive_time_ms", int(keepalive * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def check_channel_options(options: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the caller's options of gRPC; raise OptionError for what is none."""
    for option in options:
        is_pair = isinstance(option, (tuple, list)) and len(option) == 2
        if not is_pair or not isinstance(option[0], str) or not option[0].startswith("grpc."):
            raise OptionError(
                f"options: {option!r} is no option of gRPC. Pass pairs, such as ('grpc.max_metadata_size', 16384)."
            )
    return [(name, value) for name, value in options]


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
