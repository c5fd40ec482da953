"""What a step works on: a batch of this rank, and what it counts among those of all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """A batch of one rank. `rows` of it count, `total` do on all ranks (None: they must be asked).

    `real` tells which rows count, None that all do. `position` is where the data goes on behind it, and `places` are
    the places of its rows in the data, where they are known.
    """

    content: Any
    rows: int
    total: int | None = None
    real: NDArray[np.bool_] | None = None
    position: Position | None = None
    places: NDArray[np.int64] | None = None


class Feed(Protocol):
    """The data of one rank, an epoch at a time."""

    planned: bool
    """Whether all ranks have the same number of steps, and know how many rows each step has altogether."""
    resumable: bool
    """Whether it goes on from the position of an item."""

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        """The steps to the end of the epoch; None if nobody knows."""
        ...

    def items(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        """The batches of an epoch, from a position on."""
        ...


@dataclass(frozen=True)
class FeedOptions:
    """How data is read: so many rows a step on each rank, what becomes of the last ones, in which order, for whom.

    `batch_size` and `shuffle` that are None are the data's own.
    """

    batch_size: int | None = None
    last: Last = "keep"
    shuffle: bool | None = None
    seed: int = 0
    framework: str = "torch"
    config: Mapping[str, Any] = field(default_factory=dict)
    missing: MissingOptions = field(default_factory=MissingOptions)
    """What becomes of missing values, of data that is no dataset with options of its own."""

    def in_order(self) -> FeedOptions:
        """Every row once, as they lie: for evaluation and prediction."""
        return replace(self, shuffle=False, last="pad")


def batch_length(content: Any) -> int:
    """The number of rows of a batch, whatever it is made of."""
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


def to_rank_batch(content: Any) -> RankBatch:
    """A batch of which no more is known than what is in it."""
    if isinstance(content, DocumentBatch):
        real = np.asarray(content.mask())
        return RankBatch(content, int(real.sum()), real=None if real.all() else real)
    return RankBatch(content, batch_length(content))


# --- steps of all ranks


def synchronize_steps(items: Iterator[RankBatch], feed: Feed, world: World, last: Last) -> Iterator[RankBatch]:
    """The items of a rank, as many as the other ranks have, each with the number of rows of all ranks.

    Where the data has no plan the ranks ask each other before every step. One that has no more takes part with its last
    batch, of which no row counts; with 'drop', all stop when one does.
    """
    if world.size == 1:
        for item in items:
            item.total = item.rows
            yield item
    elif feed.planned:
        for item in items:
            yield item if item.total is not None else replace(item, total=int(world.sum([item.rows])[0]))
    else:
        yield from _synchronize_unplanned(items, world, last)


def _synchronize_unplanned(items: Iterator[RankBatch], world: World, last: Last) -> Iterator[RankBatch]:
    before: RankBatch | None = None
    while True:
        item = next(items, None)
        rows, ready = world.sum([0 if item is None else item.rows, item is not None]).tolist()
        if not ready or (last == "drop" and ready < world.size):
            return
        if before is None:
            _check_first_batches(item, world, int(ready))
        item = item or _make_idle_batch(before)
        item.total, before = int(rows), item
        yield item


def _make_idle_batch(before: RankBatch | None) -> RankBatch:
    assert before is not None
    return replace(before, rows=0, real=np.zeros(batch_length(before.content), np.bool_), position=None)


def _check_first_batches(item: RankBatch | None, world: World, ready: int) -> None:
    """Every rank has data, and not all the same."""
    if ready < world.size:
        raise OptionError(
            f"{world.size - ready} of {world.size} ranks have no data at all: use fewer workers, or share the data out "
            "in smaller parts."
        )
    assert item is not None
    digests = world.gather(_digest(item.content))
    if len(set(digests)) < world.size:
        raise OptionError(
            f"the first batches of {world.size} ranks are the same: each rank would train on all of the data. Let the "
            "creator give the share of its rank: def creator(rank, world_size, config)."
        )


def _digest(content: Any) -> int:
    """A number for the values of a batch, small enough to be exact as a float."""
    made = blake2b(digest_size=6)
    for leaf in _iter_leaves(content):
        made.update(repr(leaf).encode() if isinstance(leaf, (str, bytes)) else np.ascontiguousarray(leaf).tobytes())
    return int.from_bytes(made.digest(), "little")


def _iter_leaves(content: Any) -> Iterator[Any]:
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


class Source(Protocol):
    """Data that can be sent to a rank, and opened there."""

    def open(self, world: World, reading: FeedOptions) -> Feed:
        """The share of a rank."""
        ...


DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class IndexedData:
    """A dataset with rows by number, and how batches are made of it.

    `sampler` gives the numbers of an epoch, in its own order; `loading` are keywords of torch's DataLoader.
    """

    dataset: Any
    batch_size: int = DEFAULT_BATCH_SIZE
    shuffle: bool = True
    drop_last: bool = False
    sampler: Any = None
    loading: Mapping[str, Any] = field(default_factory=dict)


class ArrayDataset:
    """Arrays of one length (a tuple, a dict, a nest of both) as a dataset that gives batches."""

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays
        lengths = {len(leaf) for leaf in iter_arrays(arrays)}
        if len(lengths) != 1:
            raise OptionError(f"arrays of one length are rows, got lengths {sorted(lengths)}.")
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Any:
        return map_arrays(self.arrays, lambda array: array[row])

    def __getitems__(self, rows: Sequence[int]) -> Any:
        return map_arrays(self.arrays, lambda array: array[rows])


def iter_arrays(nest: Any) -> Iterator[Any]:
    """The arrays of a nest."""
    parts = nest.values() if isinstance(nest, Mapping) else nest if isinstance(nest, (tuple, list)) else None
    if parts is None:
        yield nest
    else:
        for part in parts:
            yield from iter_arrays(part)


def map_arrays(nest: Any, change: Any) -> Any:
    """A nest of the same form, with each array changed."""
    if isinstance(nest, Mapping):
        return {name: map_arrays(part, change) for name, part in nest.items()}
    return tuple(map_arrays(part, change) for part in nest) if isinstance(nest, (tuple, list)) else change(nest)


class IndexedFeed:
    """One rank's share of a dataset with rows by number."""

    planned = resumable = True

    def __init__(self, rows: IndexedData, world: World, reading: FeedOptions) -> None:
        self.rows, self.world, self.reading = rows, world, reading
        self.batch_size = reading.batch_size or rows.batch_size
        self.last = "drop" if rows.drop_last and reading.last == "keep" else reading.last
        self.resumable = rows.sampler is None
        if not len(rows.dataset):
            raise OptionError("the data has no rows.")

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        """The steps to the end of the epoch."""
        return self._share(epoch, position, self._numbers(epoch)).steps

    def items(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        """The batches of an epoch, from a position on."""
        numbers = self._numbers(epoch)
        share = self._share(epoch, position, numbers)
        steps = _StepRows(share, numbers)
        for step, content in enumerate(_fetch_batches(self.rows, steps, self.reading.framework)):
            places, real = steps.places(step)
            held = len(places) if real is None else int(real.sum())
            yield RankBatch(content, held, count_step_rows(share, step), real, {"start": share.after(step)}, places)

    def _numbers(self, epoch: int) -> NDArray[np.int64] | None:
        """The rows that a sampler gives, in its order, the same on all ranks."""
        if self.rows.sampler is None or self.reading.shuffle is False:
            return None
        if hasattr(self.rows.sampler, "set_epoch"):
            self.rows.sampler.set_epoch(epoch)
        with _seed_torch(self.reading.seed + epoch):
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


class _StepRows:
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


def count_step_rows(share: Slice, step: int) -> int:
    """The rows of a step on all ranks together, without those that fill up."""
    full = share.world_size * share.batch_size
    if share.last == "drop" or step < share.steps - 1:
        return full
    return share.order.size - share.start - step * full


def _fetch_batches(rows: IndexedData, steps: _StepRows, framework: str) -> Iterator[Any]:
    """The batches of the steps: by a DataLoader, or by the dataset itself if nothing asks for one."""
    dataset = rows.dataset
    by_itself = hasattr(dataset, "__getitems__") and not rows.loading.get("num_workers")
    if by_itself and ("collate_fn" not in rows.loading or framework != "torch"):
        for step in steps:
            yield dataset.__getitems__(step)
    else:
        data: Any = require("torch.utils.data", extra="torch", needed_for="a DataLoader")
        yield from data.DataLoader(dataset, batch_sampler=steps, **rows.loading)


class _seed_torch:  # noqa: N801 - used like a function
    """Whatever draws from torch's generator meanwhile draws the same on every rank."""

    def __init__(self, seed: int) -> None:
        torch: Any = require("torch", extra="torch", needed_for="a sampler")
        self.torch, self.seed, self.kept = torch, seed, torch.random.fork_rng(devices=[])

    def __enter__(self) -> None:
        self.kept.__enter__()
        self.torch.manual_seed(self.seed)

    def __exit__(self, *error: object) -> None:
        self.kept.__exit__(*error)


class StreamFeed:
    """One rank's share of a `StreamingDataset`."""

    planned = resumable = True

    def __init__(self, dataset: StreamingDataset[Any], world: World, reading: FeedOptions) -> None:
        self.dataset = dataset_for_rank(dataset, world, reading)
        self._counted = self.dataset.options.on_error != "skip"

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        """The steps to the end of the epoch."""
        return self._slice(epoch, position).steps

    def items(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        """The batches of an epoch, from a position on, made ahead by a thread."""
        share = self._slice(epoch, position)
        for step, batch in enumerate(self.dataset.loader()):
            there = np.asarray(batch.mask())
            content, real = (batch, None if there.all() else there) if len(batch) else self._stand_in()
            total = count_step_rows(share, step) if self._counted else None
            yield RankBatch(content, int(there.sum()), total, real, batch.state, share.rows(step)[0])

    def _stand_in(self) -> tuple[Any, Any]:
        """A row that does not count, for a rank that has none."""
        return self.dataset[[0]], np.zeros(1, np.bool_)

    def _slice(self, epoch: int, position: Position | None) -> Slice:
        if position is None:
            self.dataset._registry.set_next(PassStart(epoch))
            self.dataset._state = None
        else:
            self.dataset.load_state_dict(position)
        return self.dataset._slice(self.dataset._registry.current_start(1))


def dataset_for_rank(dataset: StreamingDataset[Any], world: World, reading: FeedOptions) -> StreamingDataset[Any]:
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
        last=_resolve_last(options.last, reading.last),
        shuffle=shuffle,
    )
    made.order = replace(made.order, shuffle=shuffle)
    if reading.batch_size not in (None, dataset.batch_size):
        made.batch_size, made._group_size, made._group_size_ahead = reading.batch_size, 1, 1  # batches of another size, one by one
    made._slice(PassStart())  # complains of what it does not know
    return made


def _resolve_last(own: Any, wanted: Any) -> Any:
    """What the dataset says stands, unless something else than the default is asked for."""
    return own if wanted == "keep" else wanted


class IterableFeed:
    """Batches one after the other."""

    planned = resumable = False

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        """The steps of the epoch, if the iterable has a length."""
        del epoch, position
        try:
            return len(self.batches)  # type: ignore[arg-type]
        except TypeError:
            return None

    def items(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        """The batches of an epoch, from its beginning."""
        del position
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)
        return map(to_rank_batch, self.batches)


class CreatorFeed:
    """The share that a creator made for its rank: nobody knows how many steps the others have."""

    planned = resumable = False

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        """The steps of this rank."""
        return self.feed.steps(epoch, position)

    def items(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        """The batches of this rank."""
        return (replace(item, total=None, position=None) for item in self.feed.items(epoch, position))
