"""The loader of a dataset for a trainer, which knows how many steps of a pass are left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.data import WorkerLoader
from quire.errors import OptionError
from quire.tensors import describe


def make_loader(call: str, dataset: Any, workers: int, **options: Any) -> Any:
    """Return the loader of a dataset whose state is that of the batches that were taken."""
    if not callable(getattr(dataset, "loader", None)) or not callable(getattr(dataset, "load_state_dict", None)):
        raise OptionError(
            f"{call} takes a StreamingDataset, a MixedDataset, or windows or blocks of one, which know their position; "
            f"got {describe(dataset)}. A DataLoader cannot be resumed in the middle of an epoch: pass its dataset."
        )
    if workers:
        return WorkerLoader(dataset, workers)
    return dataset.loader(**options)


class PassLoader:
    """The batches of a loader, counted, so that a pass ends with its last batch.

    A trainer that knows the length of a pass asks for no batch after the last one. A generator would then stop in front
    of its end, and the length would still be that of the pass that was resumed when the trainer asks for the next one.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._taken = 0  # steps of the next pass that were taken before it was resumed
        self.passes = 0  # complete ones

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # A pass begins with its first batch: Lightning calls iter() twice an epoch.
        taken, self._taken = self._taken, 0
        length, batches = len(self), iter(self._loader)
        for batch in batches:
            taken += 1
            if taken == length:
                self.passes += 1
                for _ in batches:  # ends the pass
                    pass
            yield batch

    def steps_left(self) -> int:
        """Return the number of batches of the next pass, or of the rest of the one that is resumed."""
        return len(self) - self._taken

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was taken."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with any number of ranks and workers."""
        self._loader.load_state_dict(state)
        start = self._loader.state_dict()
        self._taken = start.get("taken", 0) + start.get("before", 0) + start["step"]
