"""Streams that are made by threads, several at a time, and read in order; few bytes wait in each.

Threads cannot be killed. When the consumer is interrupted or a source fails, a flag is set that the loops over rows
look at (`until_stopped`), so that a thread ends with the row that it is at and not with its partition.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

T = TypeVar("T")


BatchSource = Callable[[], Iterator[pa.RecordBatch]]


PREFETCH_BYTES = 64 << 20
"""So many bytes of record batches wait for the consumer at most, beside one for each thread."""


_JOIN_SECONDS = 1.0
"""How long an error or Ctrl-C waits for threads to end; those that are in a long call of a function are left alone."""


class Stopped(BaseException):
    """Ends the work of a thread whose results nobody waits for. It derives from BaseException to pass user code."""


class _Thread(threading.local):
    stop: threading.Event | None = None


_thread = _Thread()


def until_stopped(items: Iterable[T]) -> Iterator[T]:
    """The items, until the results of this thread are no longer needed: `Stopped` is raised instead of the next one.

    Loops that call functions of the user go over this. In threads that nobody stops it costs nothing.
    """
    return iter(items) if _thread.stop is None else _check_each(items, _thread.stop)


def _check_each(items: Iterable[T], stop: threading.Event) -> Iterator[T]:
    for item in items:
        if stop.is_set():
            raise Stopped
        yield item


def prefetch(sources: Sequence[BatchSource], workers: int, ahead: int = PREFETCH_BYTES) -> Iterator[pa.RecordBatch]:
    """The record batches of all sources, in order. The first error of any of them is raised at once."""
    workers = min(workers, len(sources))
    if workers < 2:
        for source in sources:
            yield from source()
        return
    lanes = _Prefetcher(sources, ahead // workers)
    threads = [threading.Thread(target=lanes.serve, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        yield from lanes.batches()
    except GeneratorExit:  # it may be the garbage collector that closes this, while its thread holds any lock
        lanes.close()
        raise
    except BaseException:
        lanes.close()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
    for thread in threads:
        thread.join()


class _Queue:
    """What waits of one source."""

    def __init__(self) -> None:
        self.waiting: deque[pa.RecordBatch] = deque()
        self.bytes = 0
        self.ended = False


class _Prefetcher:
    """The sources in their order; threads take the next one that nobody has begun."""

    def __init__(self, sources: Sequence[BatchSource], most: int) -> None:
        self._sources, self._most = sources, most
        self._lanes = [_Queue() for _ in sources]
        self._next = 0
        self._error: BaseException | None = None
        self._closed = False
        self._stop = threading.Event()
        """Set with `_closed`, and seen by the threads without the lock."""
        self._changed = threading.Condition()

    def serve(self) -> None:
        """What a thread does: one source after the other."""
        _thread.stop = self._stop
        while (number := self._take()) is not None:
            try:
                self._fill(self._sources[number](), self._lanes[number])
            except Stopped:
                return
            except BaseException as error:  # noqa: BLE001 - it is raised where the batches are wanted
                self._fail(error)
                return

    def _take(self) -> int | None:
        with self._changed:
            if self._closed or self._next == len(self._sources):
                return None
            self._next += 1
            return self._next - 1

    def _fill(self, batches: Iterator[pa.RecordBatch], lane: _Queue) -> None:
        for batch in batches:
            size = batch.nbytes
            with self._changed:
                while not self._closed and lane.waiting and lane.bytes + size > self._most:
                    self._changed.wait()
                if self._closed:
                    return
                lane.waiting.append(batch)
                lane.bytes += size
                self._changed.notify_all()
        with self._changed:
            lane.ended = True
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._close()

    def close(self) -> None:
        """Let threads end as soon as they can."""
        with self._changed:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._stop.set()
        self._changed.notify_all()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """What the consumer takes."""
        for lane in self._lanes:
            while (batch := self._from(lane)) is not None:
                yield batch

    def _from(self, lane: _Queue) -> pa.RecordBatch | None:
        stop = _thread.stop  # of the consumer, which may be a thread of other lanes
        with self._changed:
            while not (lane.waiting or lane.ended or self._error):
                if stop is not None and stop.is_set():
                    raise Stopped
                self._changed.wait(0.2)  # with an end, so that Ctrl-C is seen
            if self._error is not None:
                raise self._error
            if not lane.waiting:
                return None
            batch = lane.waiting.popleft()
            lane.bytes -= batch.nbytes
            self._changed.notify_all()
            return batch
