"""Dynamic batching: calls that come at about the same time become one call of the function."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from quire.array import DocumentBatch
from quire.errors import FunctionError, QuireError, ServiceUnavailableError
from quire.services._endpoints import Endpoint
from quire.services._errors import function_failed

Make = Callable[[], Any]
"""Reads a caller's rows, each time anew: a function that failed may have changed those it got."""


class _Request:
    __slots__ = ("came", "future", "make", "rows", "value")

    def __init__(self, make: Make) -> None:
        self.make = make
        self.value = make()
        self.rows = len(self.value)
        self.future: Future[Any] = Future()
        self.came = time.monotonic()


class Batcher:
    """The calls of one endpoint that wait for each other."""

    def __init__(self, endpoint: Endpoint, call: Callable[[Any], Any]) -> None:
        """With the endpoint, and what calls its function and waits for it."""
        self._endpoint, self._call = endpoint, call
        self._size, self._wait = endpoint.options.max_batch_size, endpoint.options.max_wait
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._rows = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, make: Make) -> Future[Any]:
        """What the function will make of one caller's rows. They are read here, so that an error is the caller's."""
        request = _Request(make)
        with self._changed:
            if self._closed:
                raise ServiceUnavailableError(f"{self._endpoint.name}: the server is about to stop.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"quire {self._endpoint.name}", daemon=True)
                self._thread.start()
            self._waiting.append(request)
            self._rows += request.rows
            if len(self._waiting) == 1 or self._rows >= self._size:
                self._changed.notify()
        return request.future

    def open(self) -> None:
        """Take calls again, after `close`."""
        with self._changed:
            self._closed = False

    def close(self, grace: float) -> None:
        """Take no more calls; those that wait are worked on, for so many seconds."""
        with self._changed:
            self._closed = True
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None:
            thread.join(grace)

    def _run(self) -> None:
        while True:
            requests = self._next()
            if requests is None:
                return
            alive = [request for request in requests if request.future.set_running_or_notify_cancel()]
            if alive:
                self._work(alive)

    def _next(self) -> list[_Request] | None:
        """The requests of the next batch: as many rows as there may be, or as have come when the wait is over."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            end = self._waiting[0].came + self._wait
            while self._rows < self._size and not self._closed and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._take()

    def _take(self) -> list[_Request]:
        taken = [self._waiting.popleft()]
        rows = taken[0].rows
        while self._waiting and rows + self._waiting[0].rows <= self._size:
            taken.append(self._waiting.popleft())
            rows += taken[-1].rows
        self._rows -= rows
        return taken

    def _work(self, requests: Sequence[_Request], *, again: bool = False) -> None:
        """Call the function for all; if that fails, for each half, until who is to blame is alone."""
        try:
            values = [request.make() if again else request.value for request in requests]
            answers = self._answers(requests, values)
        except BaseException as error:  # noqa: BLE001 - whatever it is, somebody waits for an answer
            if len(requests) > 1:
                half = len(requests) // 2
                self._work(requests[:half], again=True)
                self._work(requests[half:], again=True)
            else:
                requests[0].future.set_exception(self._told(error))
            return
        for request, answer in zip(requests, answers, strict=True):
            request.future.set_result(answer)

    def _answers(self, requests: Sequence[_Request], values: Sequence[Any]) -> list[Any]:
        if len(requests) == 1 and requests[0].rows > self._size:
            parts = [self._one(values[0][at : at + self._size]) for at in range(0, requests[0].rows, self._size)]
            return [_merged(parts)]
        whole = self._one(_merged(values))
        if len(requests) == 1:
            return [whole]
        found, at = [], 0
        for request in requests:
            found.append(whole[at : at + request.rows])
            at += request.rows
        return found

    def _one(self, value: Any) -> Any:
        name = self._endpoint.name
        answer = self._endpoint.gives.check(self._call(value), f"{name}()")
        if len(answer) != len(value):
            raise FunctionError(
                f"{name} got {len(value)} rows and gave {len(answer)}: with max_batch_size, "
                "a function must give a row for each row, in order."
            )
        return answer

    def _told(self, error: BaseException) -> BaseException:
        return error if isinstance(error, QuireError) else function_failed(self._endpoint.name, error)


def _merged(values: Sequence[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    cls = type(values[0])
    if issubclass(cls, DocumentBatch):
        return cls.concat(values, shapes="ragged")
    return cls._trusted([document for value in values for document in value._documents])
