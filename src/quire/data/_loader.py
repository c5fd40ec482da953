"""A loop of its own: batches made ahead by threads, in order, within a budget of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quire.array import DocumentBatch
from quire.columns import Columns, DocumentColumn, DocumentsColumn, PackedColumn, RaggedColumn, TensorColumn
from quire.data._group import Group
from quire.data._passes import new_mark
from quire.document import BaseDocument
from quire.errors import OptionError

if TYPE_CHECKING:
    from quire.data._streaming import StreamingDataset

DocT = TypeVar("DocT", bound=BaseDocument)


class Loader(Generic[DocT]):
    """The passes over a dataset; its state is that of the batches that were taken, not of those made ahead."""

    def __init__(self, dataset: StreamingDataset[DocT], prefetch: int, threads: int) -> None:
        if prefetch < 1 or threads < 1:
            raise OptionError(f"prefetch and threads are at least 1, got {prefetch} and {threads}.")
        self.dataset, self.prefetch, self.threads = dataset, prefetch, threads

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[DocumentBatch[DocT]]:
        dataset, mark = self.dataset, new_mark()
        for batch in self._batches(dataset.groups(mark)):
            dataset._state = batch._state
            yield batch
        dataset._passes.end(mark)

    def _batches(self, groups: Iterator[Group]) -> Iterator[DocumentBatch[DocT]]:
        """The batches of groups in order; while those of one are taken, others are made, if they have room."""
        waiting: deque[Future[deque[DocumentBatch[DocT]]]] = deque()
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="quire-loader")

        def submit(number: int) -> None:
            for group in islice(groups, max(0, number)):
                waiting.append(pool.submit(_fetched, self.dataset, group))

        largest = 1
        try:
            submit(1)
            while waiting:
                batches = waiting.popleft().result()
                largest = max(largest, sum(batch_bytes(batch._columns) for batch in batches))
                room = self.dataset.options.memory_bytes // largest - 1  # one is being taken
                submit(max(1, min(-(-self.prefetch // len(batches)), room)) - len(waiting))
                while batches:
                    yield batches.popleft()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: behind the last batch that was taken."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.dataset.load_state_dict(state)


def _fetched(dataset: StreamingDataset[DocT], group: Group) -> deque[DocumentBatch[DocT]]:
    return deque(dataset.fetch(group))


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
