"""WorkerLoader: batches of a dataset that worker processes make, with the state of those that were taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quire._optional import require
from quire.array import DocumentBatch
from quire.document import BaseDocument
from quire.errors import OptionError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

DocT = TypeVar("DocT", bound=BaseDocument)


class WorkerLoader(Generic[DocT]):
    """A torch DataLoader with workers that has a state: that of the last batch that was taken.

    Each batch carries the state after it, from which any number of ranks and workers continues. So, unlike that of a
    StatefulDataLoader, the state does not depend on the number of workers.
    """

    def __init__(self, dataset: Any, workers: int, **options: Any) -> None:
        if workers < 1:
            raise OptionError(f"workers={workers}: at least one, or use dataset.loader(), which has threads.")
        data: Any = require("torch.utils.data", extra="torch", needed_for="workers")
        self._dataset = dataset
        self._state: dict[str, Any] | None = None  # after the last batch that was taken
        self._loader: DataLoader[Any] = data.DataLoader(dataset, batch_size=None, num_workers=workers, **options)

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[DocumentBatch[DocT]]:
        for batch in self._loader:
            self._state = batch.state
            yield batch
        # Only this process knows that all batches of all workers were taken.
        stream = getattr(self._dataset, "_stream", self._dataset)
        for part in (stream, *getattr(stream, "datasets", {}).values()):
            part._registry.end(part._registry.read().pass_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was taken."""
        state: dict[str, Any] = self._dataset.state_dict() if self._state is None else self._state
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with any number of ranks and workers."""
        self._dataset.load_state_dict(state)
        self._state = None
