"""Datasets in shards as the data of a training: the plan of an epoch is theirs, and so is the position in it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from quire.data import StreamingDataset
from quire.data._epoch import Slice
from quire.data._epoch_registry import Pass
from quire.distributed.estimator._items import Item, Position, Reading
from quire.distributed.estimator._planned import rows_in
from quire.distributed.estimator._world import World
from quire.errors import OptionError


class StreamFeed:
    """One rank's share of a `StreamingDataset`."""

    planned = resumable = True

    def __init__(self, dataset: StreamingDataset[Any], world: World, reading: Reading) -> None:
        self.dataset = shared_out(dataset, world, reading)
        self._counted = self.dataset.options.on_error != "skip"

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        """The steps to the end of the epoch."""
        return self._slice(epoch, position).steps

    def items(self, epoch: int, position: Position | None = None) -> Iterator[Item]:
        """The batches of an epoch, from a position on, made ahead by a thread."""
        share = self._slice(epoch, position)
        for step, batch in enumerate(self.dataset.loader()):
            there = np.asarray(batch.mask())
            content, real = (batch, None if there.all() else there) if len(batch) else self._stand_in()
            total = rows_in(share, step) if self._counted else None
            yield Item(content, int(there.sum()), total, real, batch.state, share.rows(step)[0])

    def _stand_in(self) -> tuple[Any, Any]:
        """A row that does not count, for a rank that has none."""
        return self.dataset[[0]], np.zeros(1, np.bool_)

    def _slice(self, epoch: int, position: Position | None) -> Slice:
        if position is None:
            self.dataset._passes.set(Pass(epoch))
            self.dataset._state = None
        else:
            self.dataset.load_state_dict(position)
        return self.dataset._slice(self.dataset._passes.next(1))


def shared_out(dataset: StreamingDataset[Any], world: World, reading: Reading) -> StreamingDataset[Any]:
    """A copy of a dataset for one rank. Ranks are the Estimator's business, and so is the number of epochs."""
    options = dataset.options
    if options.rank is not None and (options.rank, options.world_size) != (world.rank, world.size):
        raise OptionError(
            f"the dataset is for rank {options.rank} of {options.world_size} only: leave out rank and world_size, the "
            "Estimator shares it out."
        )
    made: StreamingDataset[Any] = pickle.loads(pickle.dumps(dataset))  # noqa: S301 - our own
    shuffle = options.shuffle if reading.shuffle is not False else False
    if options.shuffle is False and reading.shuffle:
        raise OptionError("shuffle=True, but the dataset was made with shuffle=False: leave one of them out.")
    made.options = replace(
        options,
        rank=world.rank,
        world_size=world.size,
        epochs=1,
        last=_last(options.last, reading.last),
        shuffle=shuffle,
    )
    made.order = replace(made.order, shuffle=shuffle)
    if reading.batch_size not in (None, dataset.batch_size):
        made.batch_size, made._together, made._ahead = reading.batch_size, 1, 1  # batches of another size, one by one
    made._slice(Pass())  # complains of what it does not know
    return made


def _last(own: Any, wanted: Any) -> Any:
    """What the dataset says stands, unless something else than the default is asked for."""
    return own if wanted == "keep" else wanted
