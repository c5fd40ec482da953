"""The base of datasets that regroup the rows of a `StreamingDataset`: windows of rows, and blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quire.array import DocumentBatch
from quire.data._epoch_registry import register_with_torch
from quire.data._loader import Loader
from quire.document import BaseDocument

if TYPE_CHECKING:
    import torch

    from quire.data._streaming import StreamingDataset

RowT = TypeVar("RowT", bound=BaseDocument)


class DerivedStream(Generic[RowT]):
    """Batches of `RowT` from a copy of a dataset that counts, shuffles, divides and resumes other units than rows.

    The units are for instance windows, or tokens. Only the fetching of the copy turns their numbers into rows.
    """

    _stream: Any

    def _copy_stream(self, dataset: StreamingDataset[Any], **changes: Any) -> None:
        """Copy a dataset with other attributes, and without a state."""
        self._stream = object.__new__(type(dataset))
        self._stream.__dict__.update(dataset.__dict__, _state=None, **changes)
        register_with_torch(type(self))

    @property
    def batch_size(self) -> int:
        """The number of windows, or of blocks, in a batch."""
        size: int = self._stream.batch_size
        return size

    def __iter__(self) -> Iterator[DocumentBatch[RowT]]:
        """Iterate over one pass: the batches of this rank, or those of this DataLoader worker."""
        batches: Iterator[DocumentBatch[RowT]] = iter(self._stream)
        return batches

    def __len__(self) -> int:
        """Count the batches of the current pass on this rank, or of the next pass when none is under way."""
        return len(self._stream)

    def loader(self, prefetch: int = 4, threads: int = 1, *, device: str | torch.device | None = None) -> Loader[RowT]:
        """Prefetch the batches of a pass with threads of this process; see `StreamingDataset.loader`."""
        return Loader(self._stream, prefetch, threads, device)

    # --- state

    @property
    def epoch(self) -> int:
        """The first epoch of the current pass, or of the next pass when none is under way."""
        epoch: int = self._stream.epoch
        return epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass begin with an epoch."""
        self._stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that this process took."""
        state: dict[str, Any] = self._stream.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with any number of ranks and workers; tokens also with another block length."""
        self._stream.load_state_dict(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register_with_torch(type(self))
