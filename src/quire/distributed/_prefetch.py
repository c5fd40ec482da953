"""Record batches produced ahead by threads, several sources at a time, and consumed in order.

Threads cannot be killed. When the consumer is interrupted or a source fails, a flag is set that the loops over rows
check (`until_stopped`), so that a thread ends after its current row and not after its partition.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from quire._lowlevel.forks import ForkSafeCondition

T = TypeVar("T")
BatchSource = Callable[[], Iterator[pa.RecordBatch]]
PREFETCH_BYTES = 64 << 20
"""The most bytes of record batches that wait for the consumer, not counting one batch per thread."""
_JOIN_SECONDS = 1.0
"""How long an error or Ctrl-C waits for threads; those in a long call of a user's function are left alone."""


class Stopped(BaseException):
    """Ends a thread whose results nobody waits for. A BaseException, so that user code does not catch it."""


class _Thread(threading.local):
    stop: threading.Event | None = None


_thread = _Thread()


def until_stopped(items: Iterable[T]) -> Iterator[T]:
    """Yield the items; raise `Stopped` once the results of this thread are no longer needed.

    Loops that call functions of the user iterate over this. In threads that nobody stops it costs nothing.
    """
    return iter(items) if _thread.stop is None else _check_each(items, _thread.stop)


def _check_each(items: Iterable[T], stop: threading.Event) -> Iterator[T]:
    for item in items:
        if stop.is_set():
            raise Stopped
        yield item


def prefetch(sources: Sequence[BatchSource], workers: int, ahead: int = PREFETCH_BYTES) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of all sources, in order. The first error of any of them is raised at once."""
    workers = min(workers, len(sources))
    if workers < 2:  # a thread would gain nothing
        for source in sources:
            yield from source()
        return
    prefetcher = _Prefetcher(sources, ahead // workers)
    threads = [threading.Thread(target=prefetcher.serve, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        yield from prefetcher.batches()
    except GeneratorExit:
        # The garbage collector may have closed this generator, in a thread that holds any lock: do not wait here.
        prefetcher.close()
        raise
    except BaseException:
        prefetcher.close()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
    for thread in threads:
        thread.join()


class _Queue:
    """The record batches of one source that wait for the consumer."""

    def __init__(self) -> None:
        self.waiting: deque[pa.RecordBatch] = deque()
        self.bytes = 0
        self.ended = False


class _Prefetcher:
    """The sources in order; each thread takes the next one that no other has begun."""

    def __init__(self, sources: Sequence[BatchSource], most: int) -> None:
        self._sources, self._most = sources, most
        self._queues = [_Queue() for _ in sources]
        self._next = 0
        self._error: BaseException | None = None
        self._closed = False
        self._stop = threading.Event()
        """Set with `_closed`, and seen by the threads without the lock."""
        self._changed = ForkSafeCondition()

    def serve(self) -> None:
        """Read one source after the other, in a worker thread."""
        _thread.stop = self._stop
        while (number := self._claim_source()) is not None:
            try:
                self._fill(self._sources[number](), self._queues[number])
            except Stopped:
                return
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread of the consumer
                self._fail(error)
                return

    def _claim_source(self) -> int | None:
        # In order, so that the source that the consumer waits for is always among those in progress.
        with self._changed:
            if self._closed or self._next == len(self._sources):
                return None
            self._next += 1
            return self._next - 1

    def _fill(self, batches: Iterator[pa.RecordBatch], queue: _Queue) -> None:
        for batch in batches:
            size = batch.nbytes
            with self._changed:
                # An empty queue takes any batch: one over the limit would otherwise never pass.
                while not self._closed and queue.waiting and queue.bytes + size > self._most:
                    self._changed.wait()
                if self._closed:
                    return
                queue.waiting.append(batch)
                queue.bytes += size
                self._changed.notify_all()
        with self._changed:
            queue.ended = True
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error  # later errors are often consequences of the first
            self._close()

    def close(self) -> None:
        """Let the threads end as soon as they can."""
        with self._changed:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._stop.set()
        self._changed.notify_all()

    def batches(self) -> Iterator[pa.RecordBatch]:
        for queue in self._queues:
            while (batch := self._next_batch(queue)) is not None:
                yield batch

    def _next_batch(self, queue: _Queue) -> pa.RecordBatch | None:
        stop = _thread.stop  # of the consumer, which may itself be a worker thread of another prefetch
        with self._changed:
            while not (queue.waiting or queue.ended or self._error):
                if stop is not None and stop.is_set():
                    raise Stopped
                self._changed.wait(0.2)  # with a timeout, so that Ctrl-C is noticed
            if self._error is not None:
                raise self._error
            if not queue.waiting:
                return None
            batch = queue.waiting.popleft()
            queue.bytes -= batch.nbytes
            self._changed.notify_all()
            return batch
