"""Dynamic batching: concurrent calls of an endpoint become one call of its function."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from quire.array import DocumentBatch
from quire.errors import FunctionError, ServiceLimitError, ServiceUnavailableError
from quire.services._endpoints import Endpoint
from quire.services._errors import as_call_error, log
from quire.services._metrics import NO_METRICS, Metrics
from quire.services._payloads import Rows
from quire.services._request_ids import current_request_id, use_request_id
from quire.services._tokens import count_tokens

ReadRows = Callable[[], Rows]
"""Reads the rows of a caller, anew each time: a function that failed may have changed the rows it received."""


class _Request:
    """The rows of one caller. Those of a request that is larger than a batch are processed in several pieces."""

    __slots__ = (
        "_answers",
        "_ends",
        "_lock",
        "_unanswered",
        "arrival",
        "future",
        "nbytes",
        "read",
        "request_id",
        "rows",
        "size",
        "taken",
    )

    def __init__(self, read: ReadRows, nbytes: int, tokens: str | None) -> None:
        self.read, self.nbytes, self.request_id = read, nbytes, current_request_id()
        self.rows = read()
        self.size = self._unanswered = len(self.rows)
        # The number of tokens up to the end of each row, after a 0.
        self._ends = None if tokens is None else np.concatenate([[0], np.cumsum(count_tokens(self.rows, tokens))])
        self.taken = 0
        self.future: Future[Any] = Future()
        self.arrival = time.monotonic()
        self._lock = threading.Lock()  # pieces may be answered by several threads
        self._answers: dict[int, Any] = {}

    @property
    def tokens(self) -> int:
        """The number of its tokens, 0 if they do not count."""
        return 0 if self._ends is None else int(self._ends[-1])

    def limit_rows(self, rows: int, tokens: float) -> int:
        """Return how many of the next rows, at most `rows`, have at most `tokens` tokens."""
        if self._ends is None or tokens == math.inf:
            return rows
        end = np.searchsorted(self._ends, self._ends[self.taken] + tokens, side="right") - 1
        return min(rows, int(end) - self.taken)

    def take(self, rows: int) -> _Piece:
        """Return the next rows as a piece of a batch."""
        piece = _Piece(self, self.taken, min(self.size, self.taken + rows))
        self.taken = piece.stop
        return piece

    def add_answer(self, start: int, stop: int, value: Any) -> None:
        """Answer the caller, once all pieces have been answered."""
        if stop - start == self.size:
            self._answer(value)
            return
        with self._lock:
            self._answers[start] = value
            self._unanswered -= stop - start
            is_last = self._unanswered == 0
        if is_last:
            self._answer(_concatenate([self._answers[start] for start in sorted(self._answers)]))

    # The first result counts: `close` may have failed a request whose function returns later.

    def _answer(self, value: Any) -> None:
        with suppress(InvalidStateError):
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class _Piece:
    """The rows of one request in a batch."""

    __slots__ = ("request", "start", "stop")

    def __init__(self, request: _Request, start: int, stop: int) -> None:
        self.request, self.start, self.stop = request, start, stop

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> int:
        ends = self.request._ends
        return 0 if ends is None else int(ends[self.stop] - ends[self.start])

    def rows(self, *, again: bool) -> Rows:
        """Return the rows; `again` reads them anew."""
        rows = self.request.read() if again else self.request.rows
        return rows if self.size == self.request.size else rows[self.start : self.stop]


class Batcher:
    """Combines the calls of one endpoint, and runs them in `batch_workers` threads of its own.

    A batch starts when `max_batch_size` rows or `max_batch_bytes` wait, or `max_wait` seconds after the first of them
    arrived. Requests that are larger than a batch are processed in pieces, which fill the batches of other requests:
    small requests do not wait until a large one is complete, and a large one is never left out twice in a row.
    """

    def __init__(self, endpoint: Endpoint, call: Callable[[Rows], Any], metrics: Metrics = NO_METRICS) -> None:
        """Create a batcher for an endpoint; `call` runs its function and waits for the result."""
        self._endpoint, self._call, self._metrics = endpoint, call, metrics
        options = endpoint.options
        self._max_size, self._max_wait, self._workers = options.max_batch_size, options.max_wait, options.batch_workers
        self._max_bytes, self._max_queue_time = options.max_batch_bytes or math.inf, options.max_queue_time
        self._max_tokens, self._tokens = options.max_batch_tokens or math.inf, options.tokens
        self._changed = threading.Condition()
        self._small: deque[_Request] = deque()
        self._large: deque[_Request] = deque()  # those that do not fit into one batch
        self._waiting_rows = self._waiting_bytes = self._waiting_tokens = 0  # of the small requests
        self._large_was_left_out = False
        self._running: dict[_Request, None] = {}  # an ordered set
        self._closed = False
        self._threads: set[threading.Thread] = set()

    def submit(self, read: ReadRows, nbytes: int = 0) -> Future[Any]:
        """Queue the rows of one caller. They are read here, so that bytes that cannot be read are the caller's error.

        The future has the rows that the function returned for this caller. `nbytes` is the size of the request.
        """
        request = _Request(read, nbytes, self._tokens)
        with self._changed:
            if self._closed:
                raise self._stopping_error()
            if len(self._threads) < self._workers:
                thread = threading.Thread(target=self._run, name=f"quire {self._endpoint.name}", daemon=True)
                self._threads.add(thread)
                thread.start()
            if request.size > self._max_size or request.tokens > self._max_tokens:
                self._large.append(request)
            else:
                self._small.append(request)
                self._waiting_rows += request.size
                self._waiting_bytes += nbytes
                self._waiting_tokens += request.tokens
            # Threads wait for a first request, or for a full batch; requests in between need not wake them.
            if len(self._small) <= 1 or self._is_full():
                self._changed.notify()
        return request.future

    def open(self) -> None:
        """Accept calls again, after `close`. Threads that outlived `close` go on with them."""
        with self._changed:
            self._closed = False

    def close(self, grace: float) -> None:
        """Accept no more calls, and wait up to `grace` seconds for those in the queue; then let the others fail."""
        deadline = time.monotonic() + grace
        with self._changed:
            self._closed = True
            threads = list(self._threads)
            self._changed.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():  # a function may stop its own server
                thread.join(max(0.0, deadline - time.monotonic()))
        # If the function still runs, nobody knows for how long: neither the callers of its batch nor those in the queue
        # may wait for it.
        with self._changed:
            if not self._closed:
                return  # opened again meanwhile
            abandoned = list({**self._running, **dict.fromkeys(self._large), **dict.fromkeys(self._small)})
            self._small.clear()
            self._large.clear()
            self._waiting_rows = self._waiting_bytes = self._waiting_tokens = 0
        if abandoned:
            log.warning("%s still runs, so calls were not answered: %d", self._endpoint.name, len(abandoned))
        for request in abandoned:
            request.fail(self._stopping_error())

    def _stopping_error(self) -> ServiceUnavailableError:
        return ServiceUnavailableError(f"{self._endpoint.name}: the server is stopping.")

    def _is_full(self) -> bool:
        is_full = self._waiting_rows >= self._max_size or self._waiting_bytes >= self._max_bytes
        return bool(self._large) or is_full or self._waiting_tokens >= self._max_tokens

    def _run(self) -> None:
        while (pieces := self._next_batch()) is not None:
            if pieces:
                now = time.monotonic()
                waits = [now - piece.request.arrival for piece in pieces if piece.start == 0]
                self._metrics.batch(self._endpoint.name, sum(piece.size for piece in pieces), waits)
                self._process(pieces)
            with self._changed:
                for piece in pieces:
                    request = piece.request
                    if request.future.done():  # also a large one that has failed, of which rows still wait
                        self._running.pop(request, None)
                        if request.taken < request.size:
                            with suppress(ValueError):
                                self._large.remove(request)
            del pieces  # so that the rows are not kept until the next batch

    def _next_batch(self) -> list[_Piece] | None:
        """Wait for the pieces of the next batch; None once the batcher is closed and the queue is empty."""
        with self._changed:
            while not self._small and not self._large:
                if self._closed:
                    # Under the lock, and not in `close`, which may give up before the thread ends: a batcher that is
                    # opened again meanwhile would get another thread, and run more batches at once.
                    self._threads.discard(threading.current_thread())
                    return None
                self._changed.wait()
            # The wait counts from the arrival, so a request that waited during the previous batch is not delayed again.
            while self._small and not self._is_full() and not self._closed:
                left = self._small[0].arrival + self._max_wait - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            pieces = self._take_pieces()
            if self._small or self._large:
                self._changed.notify()  # another thread may go on with them
            return pieces

    def _take_pieces(self) -> list[_Piece]:
        """Take the rows of a batch from the queues: of large requests what small ones leave, but not nothing twice."""
        pieces: list[_Piece] = []
        room, tokens = self._max_size, self._max_tokens
        if self._large_was_left_out:
            room -= self._take_from_large(pieces, max(1, room // 2), tokens / 2)
            tokens -= sum(piece.tokens for piece in pieces)
        nbytes = 0
        while self._small:
            request = self._small[0]
            # The first request of a batch is taken even if it has more than `max_batch_bytes`.
            if request.size > room or request.tokens > tokens or (pieces and nbytes + request.nbytes > self._max_bytes):
                break
            self._small.popleft()
            self._waiting_rows -= request.size
            self._waiting_bytes -= request.nbytes
            self._waiting_tokens -= request.tokens
            if self._begin(request):
                pieces.append(request.take(request.size))
                room -= request.size
                tokens -= request.tokens
                nbytes += request.nbytes
        rows_taken = self._take_from_large(pieces, room, tokens) if room and nbytes < self._max_bytes else 0
        self._large_was_left_out = bool(self._large) and not rows_taken and not self._large_was_left_out
        return pieces

    def _take_from_large(self, pieces: list[_Piece], room: int, tokens: float) -> int:
        """Take rows of the large requests in turn; return their number.

        A row with more tokens than a batch may have is a batch of its own.
        """
        while self._large:
            request = self._large[0]
            rows = room
            if self._max_bytes < math.inf and request.nbytes:
                rows = max(1, min(rows, int(self._max_bytes * request.size / request.nbytes)))
            rows = request.limit_rows(rows, tokens)
            if rows < 1 and pieces:
                return 0
            self._large.popleft()
            if request.taken == 0 and not self._begin(request):
                continue
            piece = request.take(max(1, rows))
            pieces.append(piece)
            if request.taken < request.size:
                self._large.append(request)
            return piece.size
        return 0

    def _begin(self, request: _Request) -> bool:
        """Return whether a request is to be processed: not if its caller is gone, or if it has waited for too long."""
        if not request.future.set_running_or_notify_cancel():
            return False
        waited = time.monotonic() - request.arrival
        if self._max_queue_time is not None and waited > self._max_queue_time:
            request.fail(
                ServiceLimitError(
                    f"{self._endpoint.name}: the call has waited for {waited:.3g} s, longer than "
                    f"max_queue_time={self._max_queue_time:g}. Try again later."
                )
            )
            return False
        self._running[request] = None
        return True

    def _process(self, pieces: Sequence[_Piece], *, again: bool = False) -> None:
        """Call the function for all pieces; if it fails, for each half, until the one at fault is alone."""
        try:
            answers = self._answer(pieces, [piece.rows(again=again) for piece in pieces])
        except BaseException as error:  # noqa: BLE001 - whatever it is, the callers wait for an answer
            if len(pieces) > 1:
                half = len(pieces) // 2
                self._process(pieces[:half], again=True)
                self._process(pieces[half:], again=True)
            else:
                request = pieces[0].request
                with use_request_id(request.request_id):
                    request.fail(as_call_error(self._endpoint.name, error))
            return
        for piece, answer in zip(pieces, answers, strict=True):
            piece.request.add_answer(piece.start, piece.stop, answer)

    def _answer(self, pieces: Sequence[_Piece], rows: Sequence[Rows]) -> list[Any]:
        """Call the function with the rows of all pieces, and split the result by piece."""
        result = self._call_checked(_concatenate(rows))
        if len(pieces) == 1:
            return [result]
        answers, start = [], 0
        for piece in pieces:
            answers.append(result[start : start + piece.size])
            start += piece.size
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


def close_batchers(batchers: Iterable[Batcher], grace: float) -> None:
    """Close all batchers within `grace` seconds together."""
    deadline = time.monotonic() + grace
    for batcher in batchers:
        batcher.close(max(0.0, deadline - time.monotonic()))


def _concatenate(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    rows_type = type(parts[0])
    if issubclass(rows_type, DocumentBatch):
        return rows_type.concat(parts, shapes="ragged")
    return rows_type(chain.from_iterable(parts))
