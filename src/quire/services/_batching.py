"""Dynamic batching: concurrent calls of an endpoint become one call of its function."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any

from quire.array import DocumentBatch
from quire.errors import FunctionError, ServiceUnavailableError
from quire.services._endpoints import Endpoint
from quire.services._errors import as_call_error
from quire.services._payloads import Rows

ReadRows = Callable[[], Rows]
"""Reads the rows of a caller, anew each time: a function that failed may have changed the rows it received."""


class _Request:
    __slots__ = ("arrival", "future", "read", "rows", "size")

    def __init__(self, read: ReadRows) -> None:
        self.read = read
        self.rows = read()
        self.size = len(self.rows)
        self.future: Future[Any] = Future()
        self.arrival = time.monotonic()


class Batcher:
    """Combines the calls of one endpoint, and runs them one batch after the other in a thread of its own.

    A batch starts when `max_batch_size` rows wait, or `max_wait` seconds after the first of them arrived.
    """

    def __init__(self, endpoint: Endpoint, call: Callable[[Rows], Any]) -> None:
        """Create a batcher for an endpoint; `call` runs its function and waits for the result."""
        self._endpoint, self._call = endpoint, call
        self._max_size, self._max_wait = endpoint.options.max_batch_size, endpoint.options.max_wait
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._waiting_rows = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, read: ReadRows) -> Future[Any]:
        """Queue the rows of one caller. They are read here, so that bytes that cannot be read are the caller's error.

        The future has the rows that the function returned for this caller.
        """
        request = _Request(read)
        with self._changed:
            if self._closed:
                raise ServiceUnavailableError(f"{self._endpoint.name}: the server is stopping.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"quire {self._endpoint.name}", daemon=True)
                self._thread.start()
            self._waiting.append(request)
            self._waiting_rows += request.size
            # The thread waits for a first request, or for enough rows; requests in between need not wake it.
            if len(self._waiting) == 1 or self._waiting_rows >= self._max_size:
                self._changed.notify()
        return request.future

    def open(self) -> None:
        """Accept calls again, after `close`. A thread that outlived `close` goes on with them."""
        with self._changed:
            self._closed = False

    def close(self, grace: float) -> None:
        """Accept no more calls, and wait up to `grace` seconds for those in the queue."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(grace)

    def _run(self) -> None:
        while (requests := self._next_batch()) is not None:
            not_cancelled = [request for request in requests if request.future.set_running_or_notify_cancel()]
            if not_cancelled:
                self._process(not_cancelled)

    def _next_batch(self) -> list[_Request] | None:
        """Wait for the requests of the next batch; None once the batcher is closed and the queue is empty."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    # Under the lock, and not in `close`, which may give up before the thread ends: a batcher that is
                    # opened again meanwhile would get a second thread, and run two batches at once.
                    self._thread = None
                    return None
                self._changed.wait()
            # The wait counts from the arrival, so a request that waited during the previous batch is not delayed again.
            end = self._waiting[0].arrival + self._max_wait
            while self._waiting_rows < self._max_size and not self._closed and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            batch = [self._waiting.popleft()]  # even if it alone is larger than a batch
            size = batch[0].size
            while self._waiting and size + self._waiting[0].size <= self._max_size:
                batch.append(self._waiting.popleft())
                size += batch[-1].size
            self._waiting_rows -= size
            return batch

    def _process(self, requests: Sequence[_Request], *, again: bool = False) -> None:
        """Call the function for all requests; if it fails, for each half, until the one at fault is alone."""
        try:
            rows = [request.read() if again else request.rows for request in requests]
            answers = self._answer(requests, rows)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the callers wait for an answer
            if len(requests) > 1:
                half = len(requests) // 2
                self._process(requests[:half], again=True)
                self._process(requests[half:], again=True)
            else:
                requests[0].future.set_exception(as_call_error(self._endpoint.name, error))
            return
        for request, answer in zip(requests, answers, strict=True):
            request.future.set_result(answer)

    def _answer(self, requests: Sequence[_Request], rows: Sequence[Rows]) -> list[Any]:
        """Call the function with the rows of all requests, and split the result by request."""
        if len(requests) == 1 and requests[0].size > self._max_size:
            starts = range(0, requests[0].size, self._max_size)
            return [_concatenate([self._call_checked(rows[0][at : at + self._max_size]) for at in starts])]
        result = self._call_checked(_concatenate(rows))
        if len(requests) == 1:
            return [result]
        answers, start = [], 0
        for request in requests:
            answers.append(result[start : start + request.size])
            start += request.size
        return answers

    def _call_checked(self, rows: Rows) -> Rows:
        name = self._endpoint.name
        result: Rows = self._endpoint.output.convert(self._call(rows), f"{name}()")
        if len(result) != len(rows):
            raise FunctionError(
                f"{name} got {len(rows)} rows and returned {len(result)}: with max_batch_size, "
                "a function must return one row for each row, in order."
            )
        return result


def _concatenate(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    rows_type = type(parts[0])
    if issubclass(rows_type, DocumentBatch):
        return rows_type.concat(parts, shapes="ragged")
    return rows_type(chain.from_iterable(parts))
