"""Prefetch the batches of a dataset with threads, in order and within a budget of memory, also to an accelerator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from quire.array import DocumentBatch
from quire.data._device_ring import DeviceRing, open_device, split_group
from quire.data._epoch_registry import Worker
from quire.document import BaseDocument
from quire.errors import OptionError

if TYPE_CHECKING:
    import torch

    from quire.data._device_ring import CopyDevice
    from quire.data._mixing import MixedDataset
    from quire.data._streaming import StreamingDataset

DocT = TypeVar("DocT", bound=BaseDocument)
T = TypeVar("T")
_FAST_GROUPS = 3
"""The number of groups in a row that a loop has to take fast before it makes its batches itself."""


class Loader(Generic[DocT]):
    """Iterates over a dataset. Its state is that of the batches that were taken, not of those prefetched.

    Rows that are only copied are copied as fast by one thread as by several, and even faster by the thread that then
    reads them, since they are in its cache. So a loop that spends less time on its batches than making them takes
    makes them itself, until it slows down again.

    With a `device`, the threads also start the copies of tensors to it; see `DeviceRing`.
    """

    def __init__(
        self,
        dataset: StreamingDataset[DocT] | MixedDataset[DocT],
        prefetch: int,
        threads: int,
        device: str | torch.device | CopyDevice | None = None,
    ) -> None:
        if prefetch < 1 or threads < 1:
            raise OptionError(f"prefetch and threads are at least 1, got {prefetch} and {threads}.")
        self.dataset, self.prefetch, self.threads = dataset, prefetch, threads
        self._device = open_device(device, dataset.framework)
        self._fast_groups = 0  # in a row

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[DocumentBatch[DocT]]:
        dataset, pass_id = self.dataset, Worker.alone().pass_id
        for batch in dataset.trace_pass(self._batches(dataset.groups(pass_id, self._is_alone))):
            dataset._state = batch._state
            yield batch
        dataset._end(pass_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was taken."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.dataset.load_state_dict(state)

    def _is_alone(self) -> bool:
        """Return whether the loop makes its batches itself."""
        return self._fast_groups >= _FAST_GROUPS and self.dataset.only_copies and self._device is None

    def _batches(self, groups: Iterator[Any]) -> Iterator[DocumentBatch[DocT]]:
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="quire-loader")
        prefetch, is_complete = _Prefetch(self, groups, pool), False
        try:
            while (group := prefetch.next(alone=self._is_alone())) is not None:
                yield from self._measure(*group)
            is_complete = True
        finally:
            # At the end of a pass the threads are idle, and waiting for them costs nothing. It matters if the program
            # forks next, for instance for the workers of a DataLoader: a thread that is just ending may hold a lock of
            # the C library or of an allocator, and this lock would stay locked in the child for ever. After a `break`,
            # threads may be in the middle of a batch, and the caller does not wait for them.
            pool.shutdown(wait=is_complete, cancel_futures=True)

    def _measure(self, making: float, batches: Iterator[DocumentBatch[DocT]]) -> Iterator[DocumentBatch[DocT]]:
        """Yield the batches of a group, and note whether the loop was faster than making them was.

        `making` are the seconds that were spent on the batches before; those that are made here are added.
        """
        taking, start = 0.0, perf_counter()
        for batch in batches:
            received = perf_counter()
            yield batch
            making, start, taking = making + received - start, perf_counter(), taking + perf_counter() - received
        self._fast_groups = self._fast_groups + 1 if taking < making / 2 else 0


class _Prefetch(Generic[DocT]):
    """The groups of batches that are made ahead: as many as `prefetch` and the memory budget allow."""

    def __init__(self, loader: Loader[DocT], groups: Iterator[Any], pool: ThreadPoolExecutor) -> None:
        # Batches on a device are made one by one, so that not more than `prefetch` of them are there.
        steps = groups if loader._device is None else (step for group in groups for step in split_group(group))
        self._loader, self._groups, self._pool = loader, steps, pool
        # A slot for each batch that is ahead, one for each thread that fills one, and one that was just handed out.
        device, slots = loader._device, loader.prefetch + loader.threads + 1
        self._ring = None if device is None else DeviceRing(device, slots)
        self._pending: deque[Future[_Group]] = deque()
        self._largest = 1  # bytes of a group

    def next(self, *, alone: bool) -> tuple[float, Iterator[DocumentBatch[DocT]]] | None:
        """Return the next group: the seconds that its batches took, and the batches. `alone` prefetches no more."""
        if not self._pending and not alone:
            self._submit(1)
        if not self._pending:
            group = next(self._groups, None)
            return None if group is None else (0.0, self._loader.dataset.fetch(group))
        seconds, nbytes, batches = self._pending.popleft().result()
        if not alone:
            self._largest = max(self._largest, nbytes)
            self._submit(self._count_groups(len(batches)) - len(self._pending))
        return seconds, _drain(batches) if self._ring is None else map(self._ring.hand_out, _drain(batches))

    def _submit(self, number: int) -> None:
        for group in islice(self._groups, max(0, number)):
            self._pending.append(self._pool.submit(self._fetch, group))

    def _fetch(self, group: Any) -> _Group:
        start, dataset = perf_counter(), self._loader.dataset
        if self._ring is None:
            batches: deque[Any] = deque(dataset.fetch(group))
            nbytes = sum(batch._columns.nbytes for batch in batches)
        else:
            batches = deque([self._ring.send(dataset, group)])
            nbytes = batches[0].batch._columns.nbytes
        return _Group(perf_counter() - start, nbytes, batches)

    def _count_groups(self, batches: int) -> int:
        """Return how many groups may be pending: enough for `prefetch` batches and for all threads, within memory."""
        loader = self._loader
        room = loader.dataset.memory_bytes // self._largest - 1  # without the one that is taken now
        return max(1, min(max(loader.threads, -(-loader.prefetch // batches)), room))


class _Group(NamedTuple):
    """A group of batches, or of batches on their way to a device: the seconds that it took, and its bytes."""

    seconds: float
    nbytes: int
    batches: deque[Any]


def _drain(batches: deque[T]) -> Iterator[T]:
    while batches:  # holds no reference to a batch that the loop has let go, so that its memory can be reused
        yield batches.popleft()
