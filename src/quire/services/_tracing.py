"""OpenTelemetry spans of calls, on clients and servers.

Servers and clients without tracing use `NO_TRACING`, whose methods do nothing. The context of a client's span is sent
as metadata (`traceparent`), so that the span of the server is its child.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from quire._optional import require
from quire.errors import QuireError
from quire.services._errors import Status

T = TypeVar("T")
_SERVICE = "quire.v1.Documents"


class CallSpan:
    """The span of one call; this class records nothing."""

    headers: tuple[tuple[str, str], ...] = ()
    """The metadata with which a client sends its context."""

    def activate(self) -> AbstractContextManager[object]:
        """Make the span the current one inside the block, which must not contain a `yield`."""
        return nullcontext()

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the span."""
        return function(*args)

    def end(self, status: Status | None = None) -> None:
        """End the span, with the status of a call that has failed; only the first time."""

    def fail(self, error: BaseException) -> None:
        """End the span of a client with an error."""


NO_SPAN = CallSpan()


class Tracing:
    """Starts the spans of calls; this class records nothing."""

    def begin_server(self, endpoint: str, metadata: Iterable[Any]) -> CallSpan:  # noqa: ARG002
        """Start the span of a call that a server has received with this metadata."""
        return NO_SPAN

    def begin_client(self, endpoint: str, target: str) -> CallSpan:  # noqa: ARG002
        """Start the span of a call that a client makes; it is a child of the current span."""
        return NO_SPAN


NO_TRACING = Tracing()


def open_tracing(*, enabled: bool) -> Tracing:
    """Return what starts the spans of a server or a client."""
    return OpenTelemetryTracing() if enabled else NO_TRACING


class OpenTelemetryTracing(Tracing):
    """Starts spans with the tracer provider of the process."""

    def __init__(self) -> None:
        self.trace: Any = require("opentelemetry.trace", extra="tracing", needed_for="tracing of a service")
        self.propagate: Any = require("opentelemetry.propagate", extra="tracing", needed_for="tracing of a service")
        self.tracer = self.trace.get_tracer("quire.services")

    def begin_server(self, endpoint: str, metadata: Iterable[Any]) -> CallSpan:
        carrier = {pair[0]: pair[1] for pair in metadata or () if isinstance(pair[1], str)}
        span = self.tracer.start_span(
            f"{_SERVICE}/{endpoint}",
            context=self.propagate.extract(carrier),
            kind=self.trace.SpanKind.SERVER,
            attributes=_attributes(endpoint),
        )
        return _RecordedSpan(self, span)

    def begin_client(self, endpoint: str, target: str) -> CallSpan:
        attributes = {**_attributes(endpoint), "server.address": target}
        span = self.tracer.start_span(f"{_SERVICE}/{endpoint}", kind=self.trace.SpanKind.CLIENT, attributes=attributes)
        recorded = _RecordedSpan(self, span)
        carrier: dict[str, str] = {}
        self.propagate.inject(carrier, context=self.trace.set_span_in_context(span))
        recorded.headers = tuple(carrier.items())
        return recorded


def _attributes(endpoint: str) -> dict[str, str]:
    """Return the attributes that the semantic conventions of RPCs name."""
    return {"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": endpoint}


class _RecordedSpan(CallSpan):
    def __init__(self, tracing: OpenTelemetryTracing, span: Any) -> None:
        self._tracing, self._span = tracing, span
        self._ended = False

    def activate(self) -> AbstractContextManager[object]:
        # Errors are recorded by `end`, which knows how the caller gets them.
        manager: AbstractContextManager[object] = self._tracing.trace.use_span(
            self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )
        return manager

    def run(self, function: Callable[..., T], *args: Any) -> T:
        with self.activate():
            return function(*args)

    def end(self, status: Status | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if status is not None:
            self._span.set_attribute("rpc.grpc.status_code", status.code)
            self._span.set_attribute("error.type", status.error_name or status.code)
            self._span.set_status(self._tracing.trace.StatusCode.ERROR, status.message)
        self._span.end()

    def fail(self, error: BaseException) -> None:
        if isinstance(error, GeneratorExit):  # the caller has closed a stream
            self.end()
            return
        code = getattr(error, "code", "") if isinstance(error, QuireError) else ""
        self.end(Status(str(code) or "UNKNOWN", str(error), type(error).__name__))
