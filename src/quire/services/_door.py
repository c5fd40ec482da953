"""Who is let in: calls up to the limit. Questions for the server's health do not count, and do not wait for others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from quire._optional import require
from quire.errors import ServiceLimitError
from quire.services._errors import KIND
from quire.services._limits import Limits

grpc: Any = require("grpc", extra="grpc", needed_for="a gRPC service")
HEALTH = "/grpc.health.v1.Health/"
_CHECKS = 64
"""So many questions for the health may wait."""


def too_many(limits: Limits) -> ServiceLimitError:
    """What callers are told of whom there are too many."""
    most = limits.max_concurrency + limits.max_queue
    return ServiceLimitError(f"{most} calls are in work or wait already (max_concurrency and max_queue). Try later.")


class Lane(ThreadPoolExecutor):
    """Threads, and the number of calls that they work on or that wait for them."""

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, name)
        self._counting = threading.Lock()
        self.held = 0

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a call wait for a thread."""
        future = super().submit(call, *args, **kwargs)
        with self._counting:
            self.held += 1
        future.add_done_callback(self._gone)
        return future

    def _gone(self, _: Future[Any]) -> None:
        with self._counting:
            self.held -= 1


class Door(grpc.ServerInterceptor):  # type: ignore[misc]
    """Sends away the calls that are too many, at once and without reading them."""

    def __init__(self, lane: Lane, limits: Limits) -> None:
        self._lane, self._most = lane, limits.max_concurrency + limits.max_queue
        self._checks, self._refusals = Lane(2, "quire health"), Lane(1, "quire refusals")
        self._refusal = str(too_many(limits))
        refuse = partial(self._refuse)
        refuse.experimental_thread_pool = self._refusals  # type: ignore[attr-defined]
        self._refused = grpc.stream_stream_rpc_method_handler(refuse)  # which does not wait for what is sent

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """The method that is called, or the refusal."""
        if details.method.startswith(HEALTH):
            return self._refused if self._checks.held >= _CHECKS else self._aside(continuation(details))
        return self._refused if self._lane.held >= self._most else continuation(details)

    def close(self) -> None:
        """End the threads."""
        self._checks.shutdown(wait=False)
        self._refusals.shutdown(wait=False)

    def _refuse(self, _: Any, context: Any) -> Any:
        context.set_trailing_metadata(((KIND, ServiceLimitError.__name__),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self._refusal)

    def _aside(self, method: Any) -> Any:
        """The method on threads of its own."""
        if method is None:
            return None
        arity = "unary_stream" if method.response_streaming else "unary_unary"
        answer, make = getattr(method, arity), getattr(grpc, f"{arity}_rpc_method_handler")
        moved: Any = partial(answer)
        moved.experimental_thread_pool = self._checks
        moved.experimental_non_blocking = getattr(answer, "experimental_non_blocking", False)
        return make(moved, method.request_deserializer, method.response_serializer)
