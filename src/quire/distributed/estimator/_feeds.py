"""The data of a rank: batches, an epoch at a time, in step with the other ranks.

A `FeedSource` is sent to every rank and opens a `Feed` there, the rank's share of the data: by a plan over row numbers
(`IndexedFeed`), from a dataset in shards (`StreamFeed`), or as batches of which nothing else is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire._optional import require
from quire.array import DocumentBatch
from quire.data import Last, MissingOptions, PassStart, RowOrder, Slice, StreamingDataset
from quire.distributed.estimator._ranks import World
from quire.errors import OptionError

Position = Mapping[str, Any]


@dataclass(slots=True)
class RankBatch:
    """A batch of one rank. `rows` of it count, and `total` on all ranks (None: they must be asked).

    `valid` says which rows count, None that all do. `position` is where the data continues after it, and `indices` are
    the numbers of its rows in the data, if they are known.
    """

    content: Any
    rows: int
    total: int | None = None
    valid: NDArray[np.bool_] | None = None
    position: Position | None = None
    indices: NDArray[np.int64] | None = None


class Feed(Protocol):
    """The data of one rank, an epoch at a time."""

    planned: bool
    """Whether all ranks have the same number of steps, and know how many rows each step has in total."""
    resumable: bool
    """Whether it can continue from the position of a batch."""

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        """Return the steps to the end of the epoch; None if that is unknown."""
        ...

    def batches(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        """Yield the batches of an epoch, from a position on."""
        ...


@dataclass(frozen=True)
class FeedOptions:
    """How data is read: rows per step on each rank, the last rows, the order, and the framework.

    `batch_size` and `shuffle` default to the data's own if they are None.
    """

    batch_size: int | None = None
    last: Last = "keep"
    shuffle: bool | None = None
    seed: int = 0
    framework: str = "torch"
    config: Mapping[str, Any] = field(default_factory=dict)
    missing: MissingOptions = field(default_factory=MissingOptions)
    """How missing values are handled, for data that is not a dataset with options of its own."""

    def in_order(self) -> FeedOptions:
        """Return the options for evaluation and prediction: every row once, in order."""
        return replace(self, shuffle=False, last="pad")


def batch_length(content: object) -> int:
    """Return the number of rows of a batch, whatever it is made of."""
    if isinstance(content, DocumentBatch):
        return len(content)
    if isinstance(content, (tuple, list)) and content:
        return batch_length(content[0])
    if isinstance(content, Mapping) and content:
        return batch_length(next(iter(content.values())))
    shape = getattr(content, "shape", None)
    if shape is None or not len(shape):
        raise OptionError(f"a batch of {type(content).__name__} has no rows: give tensors, tuples or dicts of them.")
    return int(shape[0])


def to_rank_batch(content: object) -> RankBatch:
    """Return a batch of which only its content is known."""
    if isinstance(content, DocumentBatch):
        valid = np.asarray(content.mask())
        return RankBatch(content, int(valid.sum()), valid=None if valid.all() else valid)
    return RankBatch(content, batch_length(content))


# --- steps of all ranks


def synchronize_steps(items: Iterator[RankBatch], feed: Feed, world: World, last: Last) -> Iterator[RankBatch]:
    """Yield the batches of a rank, as many as the other ranks have, each with the total rows of all ranks.

    If the data has no plan, the ranks ask each other before every step. One without more data takes part with its last
    batch, of which no row counts; with 'drop', all stop when one does.
    """
    if world.size == 1:
        for batch in items:
            batch.total = batch.rows
            yield batch
        return
    if feed.planned:
        for batch in items:
            yield batch if batch.total is not None else replace(batch, total=int(world.sum([batch.rows])[0]))
        return
    before: RankBatch | None = None
    while True:
        item = next(items, None)
        rows, ready = world.sum([0 if item is None else item.rows, item is not None]).tolist()
        if not ready or (last == "drop" and ready < world.size):
            return
        if before is None:
            _check_first_batches(item, world, int(ready))
        if item is None:  # this rank has no more data: it repeats its last batch, of which no row counts
            assert before is not None
            nothing = np.zeros(batch_length(before.content), np.bool_)
            item = replace(before, rows=0, valid=nothing, position=None)
        item.total, before = int(rows), item
        yield item


def _check_first_batches(item: RankBatch | None, world: World, ready: int) -> None:
    """Raise unless every rank has data, and not all the same."""
    if ready < world.size:
        raise OptionError(
            f"{world.size - ready} of {world.size} ranks have no data at all: use fewer workers, or divide the data "
            "into smaller parts."
        )
    assert item is not None
    digests = world.gather(_digest(item.content))
    if len(set(digests)) < world.size:
        raise OptionError(
            f"the first batches of {world.size} ranks are the same: each rank would train on all of the data. Let the "
            "creator return the share of its rank: def creator(rank, world_size, config)."
        )


def _digest(content: object) -> int:
    """Return a hash of the values of a batch, small enough to be exact as a float."""
    digest = blake2b(digest_size=6)
    for leaf in _iter_leaves(content):
        digest.update(repr(leaf).encode() if isinstance(leaf, (str, bytes)) else np.ascontiguousarray(leaf).tobytes())
    return int.from_bytes(digest.digest(), "little")


def _iter_leaves(content: object) -> Iterator[Any]:
    if isinstance(content, DocumentBatch):
        yield from content.id
    elif isinstance(content, Mapping):
        for part in content.values():
            yield from _iter_leaves(part)
    elif isinstance(content, (tuple, list)):
        for part in content:
            yield from _iter_leaves(part)
    elif content is not None:
        yield content


class FeedSource(Protocol):
    """Data that can be sent to a rank, and opened there."""

    def open(self, world: World, feed_options: FeedOptions) -> Feed:
        """Return the share of a rank."""
        ...


DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class IndexedData:
    """A dataset with rows by number, and how batches are made of it.

    `sampler` yields the row numbers of an epoch, in its own order; `loading` are keywords of torch's DataLoader.
    """

    dataset: Any
    batch_size: int = DEFAULT_BATCH_SIZE
    shuffle: bool = True
    drop_last: bool = False
    sampler: Any = None
    loading: Mapping[str, Any] = field(default_factory=dict)


class ArrayDataset:
    """Arrays of one length (a tuple, a dict, a nest of both) as a dataset that returns batches."""

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays
        lengths = {len(leaf) for leaf in iter_arrays(arrays)}
        if len(lengths) != 1:
            raise OptionError(f"arrays must have the same length, got lengths {sorted(lengths)}.")
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Any:
        return map_arrays(self.arrays, lambda array: array[row])

    def __getitems__(self, rows: Sequence[int]) -> Any:
        return map_arrays(self.arrays, lambda array: array[rows])


def iter_arrays(nest: object) -> Iterator[Any]:
    """Yield the arrays of a nest."""
    parts = nest.values() if isinstance(nest, Mapping) else nest if isinstance(nest, (tuple, list)) else None
    if parts is None:
        yield nest
    else:
        for part in parts:
            yield from iter_arrays(part)


def map_arrays(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to each array of a nest."""
    if isinstance(nest, Mapping):
        return {name: map_arrays(part, change) for name, part in nest.items()}
    return tuple(map_arrays(part, change) for part in nest) if isinstance(nest, (tuple, list)) else change(nest)


class IndexedFeed:
    """One rank's share of a dataset with rows by number.

    The plan of an epoch assigns every row to one rank, and the same number of steps to all ranks.
    """

    planned = resumable = True

    def __init__(self, rows: IndexedData, world: World, feed_options: FeedOptions) -> None:
        self.rows, self.world, self.feed_options = rows, world, feed_options
        self.batch_size = feed_options.batch_size or rows.batch_size
        self.last = "drop" if rows.drop_last and feed_options.last == "keep" else feed_options.last
        self.resumable = rows.sampler is None
        if not len(rows.dataset):
            raise OptionError("the data has no rows.")

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        return self._share(epoch, position, self._sample_rows(epoch)).steps

    def batches(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        numbers = self._sample_rows(epoch)
        share = self._share(epoch, position, numbers)
        steps = _StepRows(share, numbers)
        for step, content in enumerate(self._fetch(steps)):
            indices, valid = steps.indices(step)
            rows = len(indices) if valid is None else int(valid.sum())
            yield RankBatch(content, rows, count_step_rows(share, step), valid, {"start": share.after(step)}, indices)

    def _sample_rows(self, epoch: int) -> NDArray[np.int64] | None:
        """Return the rows that a sampler yields, in its order; the same on all ranks."""
        if self.rows.sampler is None or self.feed_options.shuffle is False:
            return None
        if hasattr(self.rows.sampler, "set_epoch"):
            self.rows.sampler.set_epoch(epoch)
        torch: Any = require("torch", extra="torch", needed_for="a sampler")
        with torch.random.fork_rng(devices=[]):  # one seed, so that the sampler draws the same rows on every rank
            torch.manual_seed(self.feed_options.seed + epoch)
            numbers = np.fromiter(self.rows.sampler, np.int64)
        digest = blake2b(numbers.tobytes(), digest_size=6).digest()  # 48 bits: exact as a float
        if len(set(self.world.gather(int.from_bytes(digest, "little")))) > 1:
            raise OptionError(
                "the sampler yields different rows on each rank, so they cannot be divided among ranks: let it use "
                "torch's seed, or write a creator(rank, world_size, config)."
            )
        return numbers

    def _fetch(self, steps: _StepRows) -> Iterator[Any]:
        """Yield the batches of the steps: by a DataLoader, or by the dataset itself if that is enough."""
        dataset, loading = self.rows.dataset, self.rows.loading
        by_itself = hasattr(dataset, "__getitems__") and not loading.get("num_workers")
        if by_itself and ("collate_fn" not in loading or self.feed_options.framework != "torch"):
            for step in steps:
                yield dataset.__getitems__(step)
        else:
            data: Any = require("torch.utils.data", extra="torch", needed_for="a DataLoader")
            yield from data.DataLoader(dataset, batch_sampler=steps, **loading)

    def _share(self, epoch: int, position: Position | None, numbers: NDArray[np.int64] | None) -> Slice:
        size = len(self.rows.dataset) if numbers is None else len(numbers)
        shuffle = self.rows.shuffle if self.feed_options.shuffle is None else self.feed_options.shuffle
        order = RowOrder(size, self.feed_options.seed, "global" if shuffle and numbers is None else False)
        start = 0 if position is None else position["start"]
        return Slice(order, epoch, start, self.world.rank, self.world.size, self.batch_size, self.last)


class _StepRows:
    """The rows of each step of a share, as the batch sampler of a DataLoader. An empty step has a stand-in row."""

    def __init__(self, share: Slice, numbers: NDArray[np.int64] | None) -> None:
        self.share, self.numbers = share, numbers

    def __len__(self) -> int:
        return self.share.steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            yield self.indices(step)[0].tolist()

    def indices(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        rows, valid = self.share.rows(step)
        if not len(rows):
            rows, valid = self.share.order.rows(self.share.epoch, np.zeros(1, np.int64)), np.zeros(1, np.bool_)
        if valid is not None and valid.all():
            valid = None
        return (rows if self.numbers is None else self.numbers[rows]), valid


def count_step_rows(share: Slice, step: int) -> int:
    """Return the rows of a step on all ranks together, without padding."""
    full = share.world_size * share.batch_size
    if share.last == "drop" or step < share.steps - 1:
        return full
    return share.order.size - share.start - step * full


class StreamFeed:
    """One rank's share of a `StreamingDataset`, which plans the epoch and knows the position in it."""

    planned = resumable = True

    def __init__(self, dataset: StreamingDataset[Any], world: World, feed_options: FeedOptions) -> None:
        self.dataset = dataset_for_rank(dataset, world, feed_options)
        self._is_counted = self.dataset.options.on_error != "skip"

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        return self._slice(epoch, position).steps

    def batches(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        """Yield the batches of an epoch, from a position on, prefetched by a thread."""
        share = self._slice(epoch, position)
        for step, batch in enumerate(self.dataset.loader()):
            mask = np.asarray(batch.mask())
            content, valid = batch, None if mask.all() else mask
            if not len(batch):  # a rank without rows takes the step with one that does not count
                content, valid = self.dataset[[0]], np.zeros(1, np.bool_)
            total = count_step_rows(share, step) if self._is_counted else None
            yield RankBatch(content, int(mask.sum()), total, valid, batch.state, share.rows(step)[0])

    def _slice(self, epoch: int, position: Position | None) -> Slice:
        if position is None:
            self.dataset._registry.set_next(PassStart(epoch))
            self.dataset._state = None
        else:
            self.dataset.load_state_dict(position)
        return self.dataset._slice(self.dataset._registry.current_start(1))


def dataset_for_rank(dataset: StreamingDataset[Any], world: World, feed_options: FeedOptions) -> StreamingDataset[Any]:
    """Return a copy of a dataset for one rank. The Estimator decides ranks and the number of epochs."""
    options = dataset.options
    if options.rank is not None and (options.rank, options.world_size) != (world.rank, world.size):
        raise OptionError(
            f"the dataset is for rank {options.rank} of {options.world_size} only: leave out rank and world_size, the "
            "Estimator divides it among ranks."
        )
    copy = deepcopy(dataset)  # unlike pickle, it needs no name for the class, which may be local to a function
    shuffle = options.shuffle if feed_options.shuffle is not False else False
    if options.shuffle is False and feed_options.shuffle:
        raise OptionError("shuffle=True, but the dataset has shuffle=False: leave one of them out.")
    copy.options = replace(
        options,
        rank=world.rank,
        world_size=world.size,
        epochs=1,
        last=options.last if feed_options.last == "keep" else feed_options.last,  # 'keep' is the default
        shuffle=shuffle,
        lanes=options.lanes if shuffle else None,
    )
    if not shuffle:
        copy.order = copy.order.unshuffled()
    if feed_options.batch_size not in (None, dataset.batch_size):
        # The sizes of groups were chosen for batches of another size.
        copy.batch_size, copy._group_size, copy._group_size_ahead = feed_options.batch_size, 1, 1
    copy._slice(PassStart())  # raises for options that do not go together
    return copy


class IterableFeed:
    """Batches of an iterable."""

    planned = resumable = False

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        del epoch, position
        try:
            return len(self.source)  # type: ignore[arg-type]
        except TypeError:
            return None

    def batches(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        del position
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
        return map(to_rank_batch, self.source)


class CreatorFeed:
    """The share that a creator made for its rank: how many steps the other ranks have is unknown."""

    planned = resumable = False

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        return self.feed.steps(epoch, position)

    def batches(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        return (replace(item, total=None, position=None) for item in self.feed.batches(epoch, position))
