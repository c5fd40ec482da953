"""The loader of a dataset for a trainer, and datasets that have none."""

from __future__ import annotations

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
