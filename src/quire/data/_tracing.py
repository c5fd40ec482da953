"""OpenTelemetry spans of streaming datasets and their loaders: how long a loop waits for its batches, and what for.

A pass is a span, and each batch is a child of it that lasts while the loop waits. Reading rows and preprocessing them
are spans of their own, in the thread where they happen: below that of the batch if the loop does it itself, otherwise
below that of the pass. Datasets without tracing use `NO_TRACING`, which adds nothing to a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from typing_extensions import Self

from quire._optional import require
from quire.files import count_blocks

T = TypeVar("T")
BatchT = TypeVar("BatchT")
_END: Any = object()
_PURPOSE = "tracing of a dataset"


class StreamTracing:
    """Records the spans of a dataset; this class records nothing."""

    def trace_pass(
        self,
        batches: Iterator[BatchT],
        others: Sequence[StreamTracing] = (),  # noqa: ARG002
        **attributes: Any,  # noqa: ARG002
    ) -> Iterator[BatchT]:
        """Return the batches of a pass, which is recorded with the waits for them; `others` belong to it as well."""
        return batches

    def trace_gather(self, gathered: Iterator[T]) -> Iterator[T]:
        """Return what is gathered for each batch, which is recorded."""
        return gathered

    def trace_finish(self, finish: Callable[[], T]) -> Callable[[], T]:
        """Return a function that preprocesses a batch, which is recorded."""
        return finish


NO_TRACING = StreamTracing()


def open_stream_tracing(*, enabled: bool) -> StreamTracing:
    """Return what records the spans of a dataset."""
    return OpenTelemetryStreamTracing() if enabled else NO_TRACING


class OpenTelemetryStreamTracing(StreamTracing):
    """Records spans with the tracer provider of the process, also in worker processes that have one."""

    def __init__(self) -> None:
        self._trace: Any = require("opentelemetry.trace", extra="tracing", needed_for=_PURPOSE)
        self._tracer = self._trace.get_tracer("quire.data")
        self._pass: Any = None  # the context of the pass that runs, for threads that gather for it

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def __copy__(self) -> Self:
        return self

    def trace_pass(
        self, batches: Iterator[BatchT], others: Sequence[StreamTracing] = (), **attributes: Any
    ) -> Iterator[BatchT]:
        named = {f"quire.{name}": value for name, value in attributes.items()}
        span = self._tracer.start_span("quire.data.pass", attributes=named)
        recorders = [self, *(other for other in others if isinstance(other, OpenTelemetryStreamTracing))]
        context = self._trace.set_span_in_context(span)
        for recorder in recorders:
            recorder._pass = context
        number = rows = 0
        try:
            while (batch := self._wait_for_batch(batches, context)) is not _END:
                number, rows = number + 1, rows + len(batch)
                yield batch
                del batch  # its memory can be reused as soon as the loop has let it go
        except GeneratorExit:
            raise
        except BaseException as error:
            self._fail(span, error)
            raise
        finally:
            for recorder in recorders:
                if recorder._pass is context:  # not that of a pass that began later
                    recorder._pass = None
            span.set_attributes({"quire.batches": number, "quire.rows": rows})
            span.end()

    def _wait_for_batch(self, batches: Iterator[Any], context: Any) -> Any:
        span = self._tracer.start_span("quire.data.batch", context=context)
        with self._activate(span):
            batch = next(batches, _END)
        if batch is not _END:  # a span that has not ended is not recorded
            span.set_attributes({"quire.rows": len(batch), "quire.bytes": batch._columns.nbytes})
            span.end()
        return batch

    def trace_gather(self, gathered: Iterator[T]) -> Iterator[T]:
        while True:
            span = self._start("quire.data.gather")
            with self._activate(span), count_blocks() as blocks:
                item = next(gathered, _END)
            if item is _END:
                return
            if blocks.opened:
                span.set_attributes(
                    {
                        "quire.blocks.opened": blocks.opened,
                        "quire.blocks.cached": blocks.opened - blocks.waited,
                        "quire.blocks.bytes": blocks.nbytes,
                        "quire.blocks.wait_seconds": blocks.wait_seconds,
                    }
                )
            span.end()
            yield item
            del item

    def trace_finish(self, finish: Callable[[], T]) -> Callable[[], T]:
        def traced() -> T:
            span = self._start("quire.data.preprocess")
            with self._activate(span):
                result = finish()
            span.end()
            return result

        return traced

    def _start(self, name: str) -> Any:
        """Start a span below that of the current thread, or below the pass in threads that work for it."""
        is_inside = self._trace.get_current_span().get_span_context().is_valid
        return self._tracer.start_span(name, context=None if is_inside else self._pass)

    @contextmanager
    def _activate(self, span: Any) -> Iterator[None]:
        """Make a span the current one; an error ends it."""
        with self._trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except BaseException as error:
                self._fail(span, error)
                span.end()
                raise

    def _fail(self, span: Any, error: BaseException) -> None:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(self._trace.StatusCode.ERROR, str(error))
