"""The node cache: blocks of remote files on the local disk, and the fetcher that downloads them.

A *block* is a range of bytes of a remote file, such as a record batch of a shard. The node cache is a folder with one
file for each block. A file is written under a temporary name and renamed when it is complete, so that its existence
means that it is complete, whichever process wrote it and however that process ended. Readers open these files
themselves. They need the fetcher only for blocks that are missing.

A `Fetcher` downloads blocks with threads, those that are needed first before the others, and limits the size of the
folder. It runs in the process that reads (`LocalSource`), or in a process of its own for all readers of a machine
(`quire.files._fetcher`). This module is part of `files`, because the fetcher process has to start fast: everything in
`quire.storage` imports Arrow.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from quire._lowlevel.forks import at_fork
from quire.errors import StorageError
from quire.files._folder import Folder
from quire.files._throttling import watch_throttling

NOW = -1
"""The priority of a block that a reader waits for. Other priorities are positions of an epoch, from 0."""
_NAME = re.compile(r"([0-9a-f]{40})\.block")
_PART_NAME = re.compile(r"[0-9a-f]{40}\.(\d+)-\d+\.part")
_PART_BYTES = 8 << 20
"""Larger blocks, such as row groups of other writers, are downloaded in parts of this size, several at a time."""
FIRST_IN_FLIGHT = 16
"""The number of downloads at a time, before their speed is known."""
_LEAST_IN_FLIGHT, _MOST_IN_FLIGHT = 8, 64
_IDLE_SECONDS = 5.0
"""A thread without work ends after this time."""
_LONGEST_PAUSE = 10.0
PINNED_SHARE = 0.8
"""The part of the cache for blocks that stay there from epoch to epoch if the dataset does not fit."""
_ATTEMPTS = 8
"""A block may be removed between its download and its use, if the cache is nearly full; then it is downloaded again."""


class NodeCacheError(StorageError):
    """A node cache that is too small, or whose disk is full: not a fault of the data."""


class BlockRange(NamedTuple):
    """The bytes from `start` to `stop` of a remote file; `key` identifies their content, as 40 hex digits."""

    key: str
    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


Notify = Callable[[str, "Exception | None"], None]
"""A function that gets the key of a block when it is in the cache, or the error."""


# --- the files of a node cache


class NodeCache:
    """The files of a node cache, for any number of processes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._numbers = itertools.count()

    def path(self, key: str) -> Path:
        """Return the path of a block."""
        return self.place / f"{key}.block"

    def open(self, block: BlockRange) -> BinaryIO | None:
        """Open the file of a block; None if it is missing. A file of another size is removed."""
        try:
            file = self.path(block.key).open("rb")
        except FileNotFoundError:
            return None
        if os.fstat(file.fileno()).st_size == block.size:
            return file
        file.close()  # something else has truncated it: a complete file has the size of its block
        self.remove(block.key)
        return None

    def remove(self, key: str) -> None:
        """Remove the file of a block; processes that have mapped it keep its content."""
        self.path(key).unlink(missing_ok=True)

    def create(self, block: BlockRange) -> tuple[int, Path]:
        """Create a file of the size of a block under a temporary name, and return its descriptor and its path."""
        part = self.place / f"{block.key}.{os.getpid()}-{next(self._numbers)}.part"
        try:
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        except FileNotFoundError:  # the folder was removed
            self.make_folder()
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            # A disk that is full is found now, and not when the pages of a sparse file are written back.
            if block.size and hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(handle, 0, block.size)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                        raise
        except BaseException:
            os.close(handle)
            part.unlink(missing_ok=True)
            raise
        return handle, part

    def finish(self, handle: int, part: Path, block: BlockRange) -> None:
        """Give a complete file the name of its block."""
        size = os.fstat(handle).st_size
        if size != block.size:
            raise StorageError(
                f"{part}: the file has {size:,} bytes instead of {block.size:,}: another process wrote it."
            )
        part.rename(self.path(block.key))

    def write(self, block: BlockRange, *contents: bytes | memoryview) -> None:
        """Write a block whose content is known, unless that is impossible: it can be made again."""
        with suppress(OSError):
            self.make_folder()
            handle, part = self.create(block)
            try:
                for content in contents:
                    rest = memoryview(content)
                    while rest:
                        rest = rest[os.write(handle, rest) :]
                self.finish(handle, part, block)
            finally:
                os.close(handle)
                part.unlink(missing_ok=True)

    def scan(self) -> dict[str, int]:
        """Return the size of each block, the oldest one first; unfinished files of killed processes are removed."""
        blocks: list[tuple[int, str, int]] = []
        with suppress(FileNotFoundError), os.scandir(self.place) as entries:
            for entry in entries:
                name, part = _NAME.fullmatch(entry.name), _PART_NAME.fullmatch(entry.name)
                with suppress(FileNotFoundError):
                    if name:
                        status = entry.stat()
                        blocks.append((status.st_mtime_ns, name[1], status.st_size))
                    elif part and not _is_running(int(part[1])):
                        os.unlink(entry.path)  # noqa: PTH108 - a path as text
        return {key: size for _, key, size in sorted(blocks)}

    def make_folder(self) -> None:
        """Create the folder."""
        try:
            self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{self.place}: the folder of the cache cannot be created ({error.strerror}). Set the environment "
                "variable QUIRE_CACHE to a folder that can be written to."
            ) from error


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


# --- downloads


@dataclass(eq=False)
class _Job:
    """A block that is queued or being downloaded."""

    folder: Folder
    block: BlockRange
    priority: int
    waiting: list[Notify] = field(default_factory=list)
    is_started: bool = False
    handle: int = -1
    path: Path = field(default_factory=Path)
    parts_left: int = 0
    error: Exception | None = None


class _Part(NamedTuple):
    job: _Job
    start: int
    stop: int


class Fetcher:
    """Downloads blocks into a node cache, of at most `max_bytes`, for any number of clients.

    A client requests blocks that it will need, and releases them when it has passed them. Downloads start in the order
    of priorities. When there is no room, blocks that no client has requested are removed, the oldest first; but a
    *pinned* set, chosen by the keys, stays if it fits, so that a dataset larger than the cache is partly there in the
    next epoch. If a client waits for a block, requested blocks that nobody waits for are removed, too.

    The number of downloads at a time follows the measured throughput: it grows while more of them are faster. After
    answers that ask for fewer requests (429, 503), it is halved, and no download starts for a moment.
    """

    def __init__(self, place: Path, max_bytes: int) -> None:
        self.cache, self.max_bytes = NodeCache(place), max_bytes
        self.cache.make_folder()
        self._lock = threading.Condition()
        self._jobs: dict[str, _Job] = {}
        self._queue: list[tuple[int, int, str]] = []
        self._numbers = itertools.count()
        self._parts: deque[_Part] = deque()
        self._users: dict[str, dict[Hashable, int]] = {}  # by key, the clients that have requested it, and priorities
        self._requested: dict[Hashable, dict[str, int]] = {}  # the same by client
        self._sizes = self.cache.scan()
        self._bytes, self._reserved = sum(self._sizes.values()), 0
        self._next_scan = 0.0
        self._pinned_share = 1.0
        self._totals: dict[str, int] = {}
        # Blocks that nobody has requested, in the order in which they may be removed.
        self._free: OrderedDict[str, None] = OrderedDict()
        self._pinned: OrderedDict[str, None] = OrderedDict()
        for key in self._sizes:
            self._set_free(key)
        self._threads = self._active = 0
        self._in_flight = _InFlight()
        self.requests = self.received = 0
        """The number of reads, and of bytes, so far."""

    # --- clients

    def expect(self, dataset: str, total_bytes: int) -> None:
        """Learn the size of a dataset, which decides which part of it is pinned if not all of it fits."""
        with self._lock:
            self._totals[dataset] = total_bytes
            total = sum(self._totals.values())
            self._pinned_share = 1.0 if total <= self.max_bytes else PINNED_SHARE * self.max_bytes / total
            for key in [*self._free, *self._pinned]:
                self._free.pop(key, None)
                self._pinned.pop(key, None)
                self._set_free(key)

    def request(self, client: Hashable, folder: Folder, blocks: Iterable[tuple[BlockRange, int]]) -> None:
        """Download blocks, each with a priority, before they are needed."""
        with self._lock:
            for block, priority in blocks:
                self._users.setdefault(block.key, {})[client] = priority
                self._requested.setdefault(client, {})[block.key] = priority
                if block.key in self._sizes:
                    self._free.pop(block.key, None)
                    self._pinned.pop(block.key, None)
                else:
                    self._enqueue(folder, block, priority)
            self._start_threads()

    def add(self, key: str, size: int) -> None:
        """Count a block that a reader has written, and make room for it."""
        with self._lock:
            if key not in self._sizes:
                self._bytes += size
                self._sizes[key] = size
                self._set_free(key)
            self._make_room(0, is_urgent=False)

    def fetch(self, folder: Folder, blocks: Iterable[BlockRange]) -> None:
        """Download blocks that are needed now. They may be removed like those that nobody has requested."""
        with self._lock:
            for block in blocks:
                if block.key not in self._sizes:
                    self._enqueue(folder, block, NOW)
            self._start_threads()

    def need(self, folder: Folder, block: BlockRange, notify: Notify) -> None:
        """Download a block that a reader waits for, and call `notify` with the key and the error or None."""
        with self._lock:
            if block.key in self._sizes and block.key not in self._jobs:
                if self.cache.path(block.key).exists():
                    notify(block.key, None)
                    return
                self._drop(block.key)  # it was removed by somebody else
            self._enqueue(folder, block, NOW).waiting.append(notify)
            self._start_threads()

    def release(self, client: Hashable, keys: Iterable[str]) -> None:
        """Take back requests of a client: it has passed these blocks."""
        with self._lock:
            own = self._requested.get(client, {})
            for key in keys:
                if own.pop(key, None) is not None:
                    self._forget_user(client, key)
            self._lock.notify()  # there may be room now

    def leave(self, client: Hashable) -> None:
        """Take back all requests of a client."""
        self.release(client, list(self._requested.get(client, ())))
        with self._lock:
            self._requested.pop(client, None)

    def ensure_threads(self) -> None:
        """Start threads if there is work and too few of them; called from time to time while somebody waits."""
        with self._lock:
            self._start_threads()

    def _forget_user(self, client: Hashable, key: str) -> None:
        users = self._users.get(key, {})
        users.pop(client, None)
        if users:
            return
        self._users.pop(key, None)
        job = self._jobs.get(key)
        if job is not None and not job.is_started and not job.waiting:
            del self._jobs[key]  # its entry in the queue is skipped
        if key in self._sizes:
            self._set_free(key)

    def _enqueue(self, folder: Folder, block: BlockRange, priority: int) -> _Job:
        job = self._jobs.get(block.key)
        if job is None:
            job = self._jobs[block.key] = _Job(folder, block, priority)
        elif job.is_started or job.priority <= priority:
            return job
        job.priority = priority
        heapq.heappush(self._queue, (priority, next(self._numbers), block.key))
        return job

    # --- room

    def _set_free(self, key: str) -> None:
        """Let a block be removed when there is no room."""
        # Block tables and footers have keys that begin with zeros, so that they are always pinned.
        is_pinned = int(key[:8], 16) < self._pinned_share * 2**32
        (self._pinned if is_pinned else self._free)[key] = None

    def _drop(self, key: str) -> None:
        self._bytes -= self._sizes.pop(key, 0)
        self._free.pop(key, None)
        self._pinned.pop(key, None)

    def _notice_others(self) -> None:
        """Count blocks that other processes have written or removed: two programs may have a fetcher each."""
        began = time.monotonic()
        sizes = self.cache.scan()
        for key in self._sizes.keys() - sizes.keys():
            self._drop(key)
        for key in sizes.keys() - self._sizes.keys() - self._jobs.keys():
            self._sizes[key] = sizes[key]
            self._bytes += sizes[key]
            if key not in self._users:
                self._set_free(key)
        # At most a hundredth of the time is spent on it.
        self._next_scan = time.monotonic() + max(10.0, 100 * (time.monotonic() - began))

    def _make_room(self, size: int, *, is_urgent: bool) -> bool:
        """Remove blocks until `size` bytes fit, and return whether they do."""
        if self._bytes + self._reserved + size > self.max_bytes // 2 and time.monotonic() >= self._next_scan:
            self._notice_others()
        for group in (self._free, self._pinned):
            while group and self._bytes + self._reserved + size > self.max_bytes:
                self._remove(next(iter(group)))
        if self._bytes + self._reserved + size <= self.max_bytes:
            return True
        if is_urgent:
            # What is needed last goes first. Readers that have it open keep it; others download it again.
            last = sorted(self._sizes, key=lambda key: min(self._users.get(key, {"": 0}).values()))
            while last and self._bytes + self._reserved + size > self.max_bytes:
                self._remove(last.pop())
        return self._bytes + self._reserved + size <= self.max_bytes

    def _remove(self, key: str) -> None:
        self._drop(key)
        with suppress(OSError):
            self.cache.remove(key)

    def _full_error(self, block: BlockRange, error: OSError) -> NodeCacheError:
        return NodeCacheError(
            f"{self.cache.place}: a block of {block.size:,} bytes of {block.name} cannot be written to the cache: "
            f"{error.strerror or error}. Free space on this disk, or pass another folder as cache= of ReadOptions."
        )

    # --- threads

    def _start_threads(self) -> None:
        waiting = len(self._jobs) + len(self._parts)
        while self._threads < min(self._in_flight.limit, self._active + waiting):
            self._threads += 1
            threading.Thread(target=self._run, daemon=True, name="quire-fetcher").start()
        self._lock.notify()

    def _run(self) -> None:
        try:
            while (part := self._next_part()) is not None:
                self._download(part)
        finally:
            with self._lock:
                self._threads -= 1

    def _next_part(self) -> _Part | None:
        """Wait for the next part to download; None if the thread is not needed any more."""
        until = time.monotonic() + _IDLE_SECONDS
        with self._lock:
            while True:
                pause = self._in_flight.pause()
                if pause <= 0 and self._active < self._in_flight.limit:
                    part = self._choose_part()
                    if part is not None:
                        self._active += 1
                        self._in_flight.begin()
                        # One thread wakes the next one while there is work. Waking all of them for every block would
                        # let dozens of threads compete for the lock, and most of them would find nothing to do.
                        if (self._queue or self._parts) and self._active < self._in_flight.limit:
                            self._lock.notify()
                        return part
                wait = until - time.monotonic()
                if wait <= 0 and not self._queue and not self._parts:
                    return None
                # Releases, requests and downloads that end wake the thread; the timeout is for what they do not cover.
                self._lock.wait(min(pause, 1.0) if pause > 0 else wait if 0 < wait < 1 else 1.0)

    def _choose_part(self) -> _Part | None:
        if self._parts:
            return self._parts.popleft()
        while self._queue:
            priority, _, key = self._queue[0]
            job = self._jobs.get(key)
            if job is None or job.is_started or job.priority != priority:
                heapq.heappop(self._queue)
                continue
            if self._settle(job):
                heapq.heappop(self._queue)
                continue
            part = self._start(job)
            if part is not None or job.error is None:
                return part
        return None

    def _settle(self, job: _Job) -> bool:
        """Finish a job that needs no download: another process has written the block, or it can never fit."""
        path, size = self.cache.path(job.block.key), job.block.size
        with suppress(OSError):
            if path.stat().st_size == size:
                self._complete(job)
                return True
        if size > self.max_bytes:
            job.error = NodeCacheError(
                f"{self.cache.place}: a block of {size:,} bytes of {job.block.name} does not fit into a cache of "
                f"{self.max_bytes:,} bytes. Pass a larger cache_bytes, or write the dataset with smaller blocks "
                "(group_bytes)."
            )
            self._complete(job)
            return True
        return False

    def _start(self, job: _Job) -> _Part | None:
        """Reserve room for a block, and return its first part; None if there is no room now."""
        block = job.block
        if not self._make_room(block.size, is_urgent=job.priority == NOW):
            return None  # downloads that are under way become removable when they are complete
        heapq.heappop(self._queue)
        job.is_started = True
        while True:
            try:
                job.handle, job.path = self.cache.create(block)
                break
            except OSError as error:
                # Other files have filled the disk: the cache gives back what nobody has requested.
                if error.errno in (errno.ENOSPC, errno.EDQUOT) and (self._free or self._pinned):
                    for _ in range(16):
                        if self._free or self._pinned:
                            self._remove(next(iter(self._free or self._pinned)))
                    continue
                job.error = error if isinstance(error, StorageError) else self._full_error(block, error)
                self._complete(job)
                return None
        self._reserved += block.size
        bounds = [*range(block.start, block.stop, _PART_BYTES), block.stop]
        parts = [_Part(job, *pair) for pair in itertools.pairwise(bounds)] or [_Part(job, block.start, block.stop)]
        job.parts_left = len(parts)
        self._parts.extend(parts[1:])
        if len(parts) > 1:
            self._start_threads()
        return parts[0]

    def _download(self, part: _Part) -> None:
        job, block = part.job, part.job.block
        error: Exception | None = None
        if job.error is None:
            try:
                with watch_throttling(self._slow_down):
                    content = job.folder.read_buffer(block.name, part.start, part.stop)
                place = part.start - block.start
                while content:
                    written = os.pwrite(job.handle, content, place)
                    content, place = content[written:], place + written
            except StorageError as failure:
                error = failure
            except OSError as failure:
                error = self._full_error(block, failure)
            except Exception as failure:  # noqa: BLE001 - it belongs to those who wait for the block
                error = failure
        with self._lock:
            self._active -= 1
            self.requests += 1
            self.received += part.stop - part.start
            self._in_flight.end(part.stop - part.start)
            job.error = job.error or error
            job.parts_left -= 1
            if not job.parts_left:
                self._finish(job)
            self._start_threads()

    def _slow_down(self, seconds: float) -> None:
        with self._lock:
            self._in_flight.slow_down(seconds)

    def _finish(self, job: _Job) -> None:
        try:
            if job.error is None:
                self.cache.finish(job.handle, job.path, job.block)
        except (OSError, StorageError) as error:
            job.error = error if isinstance(error, StorageError) else self._full_error(job.block, error)
        finally:
            os.close(job.handle)
            self._reserved -= job.block.size
        if job.error is not None:
            with suppress(OSError):
                job.path.unlink(missing_ok=True)
        self._complete(job)

    def _complete(self, job: _Job) -> None:
        key = job.block.key
        del self._jobs[key]
        if job.error is None:
            self._bytes += job.block.size - self._sizes.get(key, 0)
            self._sizes[key] = job.block.size
            if key not in self._users:
                self._set_free(key)
        for notify in job.waiting:
            notify(key, job.error)


class _InFlight:
    """The number of downloads at a time, from the measured throughput.

    The number that keeps a link busy is (latency + time of a block) * throughput / bytes of a block. None of them is
    known, and throughput is measured: the number grows by half while that makes downloads faster by a tenth.
    """

    def __init__(self) -> None:
        self.limit = FIRST_IN_FLIGHT
        self._active = 0
        self._bytes = self._count = 0
        self._busy_since = self._busy_seconds = 0.0
        self._best = 0.0
        self._settled = 0
        self._paused_until = 0.0
        self._pauses = 0

    def begin(self) -> None:
        """Note that a download starts."""
        if not self._active:
            self._busy_since = time.monotonic()
        self._active += 1

    def end(self, size: int) -> None:
        """Note that a download has ended, and adapt the limit after some of them."""
        now = time.monotonic()
        self._active -= 1
        self._bytes, self._count = self._bytes + size, self._count + 1
        if not self._active:
            self._busy_seconds += now - self._busy_since
            self._busy_since = now
        if self._count < 2 * self.limit:
            return
        busy = self._busy_seconds + (now - self._busy_since if self._active else 0.0)
        rate = self._bytes / max(busy, 1e-6)
        self._bytes = self._count = 0
        self._busy_seconds, self._busy_since = 0.0, now
        self._pauses = 0
        if rate > 1.1 * self._best or self._settled >= 32:
            self._best, self._settled = rate, 0
            self.limit = min(self.limit + self.limit // 2, _MOST_IN_FLIGHT)
        else:
            self._settled += 1

    def slow_down(self, seconds: float) -> None:
        """Halve the limit, and start no download for a moment."""
        now = time.monotonic()
        if now < self._paused_until:
            return
        self._pauses += 1
        pause = max(seconds, min(0.1 * 2**self._pauses, _LONGEST_PAUSE))
        self._paused_until = now + pause
        self.limit = max(_LEAST_IN_FLIGHT, self.limit // 2)
        self._best, self._settled = 0.0, 0

    def pause(self) -> float:
        """Return the seconds until the next download may start."""
        return self._paused_until - time.monotonic()


# --- sources of blocks


@dataclass
class BlockCounts:
    """The blocks that a thread has opened."""

    opened: int = 0
    waited: int = 0
    """The blocks that were not in the cache."""
    nbytes: int = 0
    wait_seconds: float = 0.0


_counting = threading.local()


@contextmanager
def count_blocks() -> Iterator[BlockCounts]:
    """Count the blocks that this thread opens inside the block."""
    outer, counts = getattr(_counting, "counts", None), BlockCounts()
    _counting.counts = counts
    try:
        yield counts
    finally:
        _counting.counts = outer


class BlockSource(ABC):
    """Blocks of remote files, on the local disk."""

    is_shared = False
    """Whether other processes of the same program read the same blocks."""

    def __init__(self, place: Path) -> None:
        self.cache = NodeCache(place)

    @abstractmethod
    def expect(self, folder: Folder, total_bytes: int) -> None:
        """Learn the size of a dataset before its blocks are requested."""

    @abstractmethod
    def request(self, folder: Folder, blocks: Sequence[tuple[BlockRange, int]]) -> None:
        """Start to download blocks, each with a priority, and return at once."""

    @abstractmethod
    def fetch(self, folder: Folder, blocks: Sequence[BlockRange]) -> None:
        """Start to download blocks that are opened next, several at a time; unlike `request`, they are not kept."""

    @abstractmethod
    def release(self, blocks: Iterable[BlockRange]) -> None:
        """Take back requests: this process has passed these blocks."""

    @abstractmethod
    def add(self, key: str, size: int) -> None:
        """Report a block that this process has written into the cache by itself."""

    @abstractmethod
    def wait(self, folder: Folder, block: BlockRange) -> None:
        """Wait until a block is in the cache; raise the error if it cannot be downloaded."""

    def open(self, folder: Folder, block: BlockRange) -> BinaryIO:
        """Open the file of a block, which is downloaded if it is missing."""
        started = None
        for _ in range(_ATTEMPTS):
            file = self.cache.open(block)
            if file is not None:
                self._count(block, started)
                return file
            started = started or time.monotonic()
            self.wait(folder, block)
        raise NodeCacheError(
            f"{self.cache.place}: blocks of {block.name} are removed from the cache before they can be read: it is too "
            "small for what is read at a time. Pass a larger cache_bytes."
        )

    @staticmethod
    def _count(block: BlockRange, started: float | None) -> None:
        """Count an opened block, for which the thread has waited since `started`, if at all."""
        counts: BlockCounts | None = getattr(_counting, "counts", None)
        if counts is not None:
            counts.opened += 1
            counts.nbytes += block.size
            if started is not None:
                counts.waited += 1
                counts.wait_seconds += time.monotonic() - started


class LocalSource(BlockSource):
    """Downloads in threads of this process."""

    def __init__(self, place: Path, max_bytes: int) -> None:
        super().__init__(place)
        self.fetcher = Fetcher(place, max_bytes)

    def expect(self, folder: Folder, total_bytes: int) -> None:
        self.fetcher.expect(folder.url, total_bytes)

    def request(self, folder: Folder, blocks: Sequence[tuple[BlockRange, int]]) -> None:
        self.fetcher.request(self, folder, blocks)

    def fetch(self, folder: Folder, blocks: Sequence[BlockRange]) -> None:
        self.fetcher.fetch(folder, blocks)

    def release(self, blocks: Iterable[BlockRange]) -> None:
        self.fetcher.release(self, [block.key for block in blocks])

    def add(self, key: str, size: int) -> None:
        self.fetcher.add(key, size)

    def wait(self, folder: Folder, block: BlockRange) -> None:
        event, errors = threading.Event(), list[Exception]()

        def notify(_: str, error: Exception | None) -> None:
            if error is not None:
                errors.append(error)
            event.set()

        self.fetcher.need(folder, block, notify)
        while not event.wait(5.0):
            self.fetcher.ensure_threads()
        if errors:
            raise errors[0]


_sources: dict[tuple[Path, int], LocalSource] = {}
_sources_lock = threading.Lock()


def open_local_source(place: Path, max_bytes: int) -> LocalSource:
    """Return the source of this process for a node cache, which all datasets share."""
    with _sources_lock:
        key = place, max_bytes
        if key not in _sources:
            _sources[key] = LocalSource(place, max_bytes)
        return _sources[key]


def _forget_sources() -> None:
    """In a forked child, start anew: the threads of the parent do not exist here."""
    global _sources_lock  # noqa: PLW0603 - of the process, as forks are
    _sources_lock = threading.Lock()
    _sources.clear()


at_fork(after_in_child=_forget_sources)
