"""A loop of its own: batches made ahead by threads, in order, within a budget of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quire.array import DocumentBatch
from quire.columns import Columns, DocumentColumn, DocumentsColumn, PackedColumn, RaggedColumn, TensorColumn
from quire.data._epoch import Group
from quire.data._epoch_registry import new_mark
from quire.document import BaseDocument
from quire.errors import OptionError

if TYPE_CHECKING:
    from quire.data._streaming import StreamingDataset

DocT = TypeVar("DocT", bound=BaseDocument)
_FAST = 3


class Loader(Generic[DocT]):
    """The passes over a dataset; its state is that of the batches that were taken, not of those made ahead."""

    def __init__(self, dataset: StreamingDataset[DocT], prefetch: int, threads: int) -> None:
        if prefetch < 1 or threads < 1:
            raise OptionError(f"prefetch and threads are at least 1, got {prefetch} and {threads}.")
        self.dataset, self.prefetch, self.threads = dataset, prefetch, threads
        self._pace = _Pace()

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[DocumentBatch[DocT]]:
        dataset, mark = self.dataset, new_mark()
        for batch in self._batches(dataset.groups(mark, self._is_alone)):
            dataset._state = batch._state
            yield batch
        dataset._passes.end(mark)

    def _is_alone(self) -> bool:
        """Whether none are made ahead."""
        return self._pace.is_fast and self.dataset.only_copies

    def _batches(self, groups: Iterator[Group]) -> Iterator[DocumentBatch[DocT]]:
        """The batches of groups in order; while those of one are taken, others are made, if they have room."""
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="quire-loader")
        ahead = _Ahead(self, groups, pool)
        try:
            while (made := ahead.next(alone=self._is_alone())) is not None:
                yield from self._pace.timed(*made)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: behind the last batch that was taken."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.dataset.load_state_dict(state)


class _Ahead(Generic[DocT]):
    """The groups that are made ahead, as many as were asked for and as the budget allows, and one for each thread."""

    def __init__(self, loader: Loader[DocT], groups: Iterator[Group], pool: ThreadPoolExecutor) -> None:
        self._loader, self._groups, self._pool = loader, groups, pool
        self._waiting: deque[Future[tuple[float, deque[DocumentBatch[DocT]]]]] = deque()
        self._largest = 1

    def submit(self, number: int) -> None:
        """Let so many more be made."""
        for group in islice(self._groups, max(0, number)):
            self._waiting.append(self._pool.submit(_fetched, self._loader.dataset, group))

    def next(self, *, alone: bool) -> tuple[float, Iterator[DocumentBatch[DocT]]] | None:
        """The batches of the next group, and the seconds that they took; none are made ahead of who is alone."""
        if not self._waiting and not alone:
            self.submit(1)
        if not self._waiting:
            group = next(self._groups, None)
            return None if group is None else (0.0, self._loader.dataset.fetch(group))
        seconds, batches = self._waiting.popleft().result()
        if not alone:
            self._largest = max(self._largest, sum(batch_bytes(batch._columns) for batch in batches))
            self.submit(self._wanted(len(batches)) - len(self._waiting))
        return seconds, _popped(batches)

    def _wanted(self, length: int) -> int:
        loader = self._loader
        room = loader.dataset.options.memory_bytes // self._largest - 1  # one is being taken
        return max(1, min(max(loader.threads, -(-loader.prefetch // length)), room))


class _Pace:
    """How fast the loop takes batches.

    Rows that are only copied are made as fast by one thread as by several, and faster by the one that takes them, where
    they lie in its cache. So a loop that does next to nothing with its batches makes them itself.
    """

    def __init__(self) -> None:
        self._fast = 0  # groups in a row

    @property
    def is_fast(self) -> bool:
        """Whether it took several groups in a row faster than they are made."""
        return self._fast >= _FAST

    def timed(self, making: float, batches: Iterator[DocumentBatch[DocT]]) -> Iterator[DocumentBatch[DocT]]:
        """The batches, which took some time already."""
        taking, start = 0.0, perf_counter()
        for batch in batches:
            got = perf_counter()
            yield batch
            making, start, taking = making + got - start, perf_counter(), taking + perf_counter() - got
        self._fast = self._fast + 1 if taking < making / 2 else 0


def _fetched(dataset: StreamingDataset[DocT], group: Group) -> tuple[float, deque[DocumentBatch[DocT]]]:
    start = perf_counter()
    made = deque(dataset.fetch(group))
    return perf_counter() - start, made


def _popped(batches: deque[DocumentBatch[DocT]]) -> Iterator[DocumentBatch[DocT]]:
    while batches:
        yield batches.popleft()


def batch_bytes(columns: Columns) -> int:
    """About the bytes that the columns take."""
    return sum(map(_column_bytes, columns.columns.values()))


def _column_bytes(column: Any) -> int:
    if isinstance(column, DocumentColumn):
        return batch_bytes(column.columns)
    if isinstance(column, DocumentsColumn):
        return batch_bytes(column.flat)
    if isinstance(column, (TensorColumn, RaggedColumn)):
        data = column.data if isinstance(column, TensorColumn) else column.flat
        return int(getattr(data, "nbytes", 0))
    return len(column.data) if isinstance(column, PackedColumn) else 64 * len(column)
