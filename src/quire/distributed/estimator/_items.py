"""What a step works on: a batch of this rank, and what it counts among those of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.array import DocumentBatch
from quire.data._epoch import Last
from quire.data._missing import MissingOptions
from quire.distributed.estimator._world import World
from quire.errors import OptionError

Position = Mapping[str, Any]


@dataclass(slots=True)
class Item:
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

    def items(self, epoch: int, position: Position | None = None) -> Iterator[Item]:
        """The batches of an epoch, from a position on."""
        ...


@dataclass(frozen=True)
class Reading:
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

    def in_order(self) -> Reading:
        """Every row once, as they lie: for evaluation and prediction."""
        return replace(self, shuffle=False, last="pad")


def rows_of(content: Any) -> int:
    """The number of rows of a batch, whatever it is made of."""
    if isinstance(content, DocumentBatch):
        return len(content)
    if isinstance(content, (tuple, list)) and content:
        return rows_of(content[0])
    if isinstance(content, Mapping) and content:
        return rows_of(next(iter(content.values())))
    shape = getattr(content, "shape", None)
    if shape is None or not len(shape):
        raise OptionError(f"a batch of {type(content).__name__} has no rows: give tensors, tuples or dicts of them.")
    return int(shape[0])


def item_of(content: Any) -> Item:
    """A batch of which no more is known than what is in it."""
    if isinstance(content, DocumentBatch):
        real = np.asarray(content.mask())
        return Item(content, int(real.sum()), real=None if real.all() else real)
    return Item(content, rows_of(content))


# --- steps of all ranks


def in_step(items: Iterator[Item], feed: Feed, world: World, last: Last) -> Iterator[Item]:
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
        yield from _asked(items, world, last)


def _asked(items: Iterator[Item], world: World, last: Last) -> Iterator[Item]:
    before: Item | None = None
    while True:
        item = next(items, None)
        rows, ready = world.sum([0 if item is None else item.rows, item is not None]).tolist()
        if not ready or (last == "drop" and ready < world.size):
            return
        if before is None:
            _check_first(item, world, int(ready))
        item = item or _idle(before)
        item.total, before = int(rows), item
        yield item


def _idle(before: Item | None) -> Item:
    assert before is not None
    return replace(before, rows=0, real=np.zeros(rows_of(before.content), np.bool_), position=None)


def _check_first(item: Item | None, world: World, ready: int) -> None:
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
    for leaf in _leaves(content):
        made.update(repr(leaf).encode() if isinstance(leaf, (str, bytes)) else np.ascontiguousarray(leaf).tobytes())
    return int.from_bytes(made.digest(), "little")


def _leaves(content: Any) -> Iterator[Any]:
    if isinstance(content, DocumentBatch):
        yield from content.id
    elif isinstance(content, Mapping):
        for part in content.values():
            yield from _leaves(part)
    elif isinstance(content, (tuple, list)):
        for part in content:
            yield from _leaves(part)
    elif content is not None:
        yield content
