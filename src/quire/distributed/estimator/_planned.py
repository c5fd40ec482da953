"""Data with rows by number, shared out among ranks by the plan of an epoch: every row once, equal steps everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire._optional import require
from quire.data._epoch import RowOrder, Slice
from quire.distributed.estimator._items import Item, Position, Reading
from quire.distributed.estimator._world import World
from quire.errors import OptionError

DEFAULT_BATCH = 32


@dataclass(frozen=True)
class Rows:
    """A dataset with rows by number, and how batches are made of it.

    `sampler` gives the numbers of an epoch, in its own order; `loading` are keywords of torch's DataLoader.
    """

    dataset: Any
    batch_size: int = DEFAULT_BATCH
    shuffle: bool = True
    drop_last: bool = False
    sampler: Any = None
    loading: Mapping[str, Any] = field(default_factory=dict)


class Arrays:
    """Arrays of one length (a tuple, a dict, a nest of both) as a dataset that gives batches."""

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays
        lengths = {len(leaf) for leaf in leaves(arrays)}
        if len(lengths) != 1:
            raise OptionError(f"arrays of one length are rows, got lengths {sorted(lengths)}.")
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Any:
        return nested(self.arrays, lambda array: array[row])

    def __getitems__(self, rows: Sequence[int]) -> Any:
        return nested(self.arrays, lambda array: array[rows])


def leaves(nest: Any) -> Iterator[Any]:
    """The arrays of a nest."""
    parts = nest.values() if isinstance(nest, Mapping) else nest if isinstance(nest, (tuple, list)) else None
    if parts is None:
        yield nest
    else:
        for part in parts:
            yield from leaves(part)


def nested(nest: Any, change: Any) -> Any:
    """A nest of the same form, with each array changed."""
    if isinstance(nest, Mapping):
        return {name: nested(part, change) for name, part in nest.items()}
    return tuple(nested(part, change) for part in nest) if isinstance(nest, (tuple, list)) else change(nest)


class PlannedFeed:
    """One rank's share of a dataset with rows by number."""

    planned = resumable = True

    def __init__(self, rows: Rows, world: World, reading: Reading) -> None:
        self.rows, self.world, self.reading = rows, world, reading
        self.batch_size = reading.batch_size or rows.batch_size
        self.last = "drop" if rows.drop_last and reading.last == "keep" else reading.last
        self.resumable = rows.sampler is None
        if not len(rows.dataset):
            raise OptionError("the data has no rows.")

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        """The steps to the end of the epoch."""
        return self._share(epoch, position, self._numbers(epoch)).steps

    def items(self, epoch: int, position: Position | None = None) -> Iterator[Item]:
        """The batches of an epoch, from a position on."""
        numbers = self._numbers(epoch)
        share = self._share(epoch, position, numbers)
        steps = _Steps(share, numbers)
        for step, content in enumerate(_fetched(self.rows, steps, self.reading.framework)):
            places, real = steps.places(step)
            held = len(places) if real is None else int(real.sum())
            yield Item(content, held, rows_in(share, step), real, {"start": share.after(step)}, places)

    def _numbers(self, epoch: int) -> NDArray[np.int64] | None:
        """The rows that a sampler gives, in its order, the same on all ranks."""
        if self.rows.sampler is None or self.reading.shuffle is False:
            return None
        if hasattr(self.rows.sampler, "set_epoch"):
            self.rows.sampler.set_epoch(epoch)
        with _seeded(self.reading.seed + epoch):
            numbers = np.fromiter(self.rows.sampler, np.int64)
        known = self.world.gather(float(hash(numbers.tobytes()) % 2**48)) if self.world.size > 1 else [0.0]
        if len(set(known)) > 1:
            raise OptionError(
                "the sampler gives other rows on each rank, so that they cannot be shared out: let it follow torch's "
                "seed, or write a creator(rank, world_size, config)."
            )
        return numbers

    def _share(self, epoch: int, position: Position | None, numbers: NDArray[np.int64] | None) -> Slice:
        size = len(self.rows.dataset) if numbers is None else len(numbers)
        wanted = self.rows.shuffle if self.reading.shuffle is None else self.reading.shuffle
        order = RowOrder(size, self.reading.seed, "global" if wanted and numbers is None else False)
        start = 0 if position is None else position["start"]
        return Slice(order, epoch, start, self.world.rank, self.world.size, self.batch_size, self.last)


class _Steps:
    """The rows of each step of a share: what a DataLoader takes as batches. One without rows has a stand-in."""

    def __init__(self, share: Slice, numbers: NDArray[np.int64] | None) -> None:
        self.share, self.numbers = share, numbers

    def __len__(self) -> int:
        return self.share.steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            yield self.places(step)[0].tolist()

    def places(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        rows, real = self.share.rows(step)
        if not len(rows):
            rows, real = self.share.order.rows(self.share.epoch, np.zeros(1, np.int64)), np.zeros(1, np.bool_)
        if real is not None and real.all():
            real = None
        return (rows if self.numbers is None else self.numbers[rows]), real


def rows_in(share: Slice, step: int) -> int:
    """The rows of a step on all ranks together, without those that fill up."""
    full = share.world_size * share.batch_size
    if share.last == "drop" or step < share.steps - 1:
        return full
    return share.order.size - share.start - step * full


def _fetched(rows: Rows, steps: _Steps, framework: str) -> Iterator[Any]:
    """The batches of the steps: by a DataLoader, or by the dataset itself if nothing asks for one."""
    dataset = rows.dataset
    by_itself = hasattr(dataset, "__getitems__") and not rows.loading.get("num_workers")
    if by_itself and ("collate_fn" not in rows.loading or framework != "torch"):
        for step in steps:
            yield dataset.__getitems__(step)
    else:
        data: Any = require("torch.utils.data", extra="torch", needed_for="a DataLoader")
        yield from data.DataLoader(dataset, batch_sampler=steps, **rows.loading)


class _seeded:  # noqa: N801 - used like a function
    """Whatever draws from torch's generator meanwhile draws the same on every rank."""

    def __init__(self, seed: int) -> None:
        torch: Any = require("torch", extra="torch", needed_for="a sampler")
        self.torch, self.seed, self.kept = torch, seed, torch.random.fork_rng(devices=[])

    def __enter__(self) -> None:
        self.kept.__enter__()
        self.torch.manual_seed(self.seed)

    def __exit__(self, *error: object) -> None:
        self.kept.__exit__(*error)
