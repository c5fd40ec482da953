"""Pipelines of tf.data as the data of a training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from quire.distributed.estimator._items import Feed, Item, Position, Reading, item_of
from quire.distributed.estimator._planned import DEFAULT_BATCH
from quire.distributed.estimator._world import World
from quire.errors import OptionError, PickleError


@dataclass(frozen=True)
class TfSource:
    """A pipeline of this process. Other processes make theirs with a creator."""

    dataset: Any

    def open(self, world: World, reading: Reading) -> Feed:
        """The share of a rank."""
        return TfFeed(self.dataset, world, reading)

    def __reduce__(self) -> Any:
        raise PickleError(
            "a tf.data.Dataset lives in the process that made it, and cannot be sent to workers. Pass a function that "
            "makes it there: est.fit(lambda config: tf.data.Dataset...); generators and py_function then work, too."
        )


class TfFeed:
    """A rank's share of a pipeline: every so-manieth of its elements, which are rows or batches."""

    planned = resumable = False

    def __init__(self, dataset: Any, world: World, reading: Reading) -> None:
        if world.size > 1:
            if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
                raise OptionError("the pipeline never ends: leave out repeat(), fit() counts epochs.")
            dataset = dataset.shard(world.size, world.rank)
        if is_unbatched(dataset.element_spec):
            size = reading.batch_size or DEFAULT_BATCH
            dataset = dataset.batch(size, drop_remainder=reading.last == "drop")
        self.dataset = dataset

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        """The steps of the epoch, if they are known."""
        del epoch, position
        found = int(self.dataset.cardinality())
        return found if found >= 0 else None

    def items(self, epoch: int, position: Position | None = None) -> Iterator[Item]:
        """The batches of an epoch, from its beginning."""
        del epoch, position
        for content in self.dataset:
            item = item_of(content)
            item.real = np.ones(item.rows, np.bool_)
            yield item


def is_unbatched(spec: Any) -> bool:
    """Whether elements are rows: one of their tensors has no axis, or none has one of unknown or common length."""
    shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(spec) if leaf.shape.rank is not None]
    if not shapes:
        return False
    if any(not shape for shape in shapes):
        return True
    return len({shape[0] for shape in shapes}) > 1
