"""What `fit` takes as data, as sources: objects that go to every rank and open there the share of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from quire._optional import is_loaded, require
from quire.array import DocumentArray, DocumentBatch
from quire.data import MultiModalDataset, StreamingDataset
from quire.distributed.estimator._creators import make_data, takes_rank
from quire.distributed.estimator._items import Feed, Item, Position, Reading, item_of
from quire.distributed.estimator._planned import DEFAULT_BATCH, Arrays, PlannedFeed, Rows
from quire.distributed.estimator._streams import StreamFeed
from quire.distributed.estimator._world import World
from quire.errors import OptionError
from quire.files import open_folder
from quire.storage import StoredDataset, open_dataset

_DATA = (
    "a DataLoader, a tf.data.Dataset, a function that makes one, a StreamingDataset, the address of a dataset, "
    "DocumentShards, a DataFrame of Spark, a Dataset of Ray, a DocumentArray, or arrays"
)


class Source(Protocol):
    """Data that can be sent to a rank, and opened there."""

    def open(self, world: World, reading: Reading) -> Feed:
        """The share of a rank."""
        ...


@dataclass(frozen=True)
class StreamSource:
    """A dataset in shards that is open already."""

    dataset: StreamingDataset[Any]

    def open(self, world: World, reading: Reading) -> Feed:
        """The share of a rank."""
        return StreamFeed(self.dataset, world, reading)


@dataclass(frozen=True)
class StoredSource:
    """A dataset in shards by its address. The class is found where it is opened, if none is given."""

    url: Any
    schema: type[Any] | None = None

    def open(self, world: World, reading: Reading) -> Feed:
        """The share of a rank."""
        stored = self.url if isinstance(self.url, StoredDataset) else open_dataset(self.url, self.schema)
        framework = "torch" if reading.framework == "torch" else "numpy"
        shuffle = "block" if reading.shuffle is not False else False
        made: Any = StreamingDataset[stored.document_type]  # type: ignore[name-defined]
        dataset = made(
            stored,
            reading.batch_size or DEFAULT_BATCH,
            seed=reading.seed,
            framework=framework,
            shuffle=shuffle,
            missing=reading.missing,
        )
        return StreamFeed(dataset, world, reading)


@dataclass(frozen=True)
class RowSource:
    """A dataset with rows by number."""

    rows: Rows

    def open(self, world: World, reading: Reading) -> Feed:
        """The share of a rank."""
        return PlannedFeed(self.rows, world, reading)


@dataclass(frozen=True)
class CreatorSource:
    """A function that makes the data on the rank itself."""

    creator: Callable[..., Any]

    def open(self, world: World, reading: Reading) -> Feed:
        """The share of a rank: the one that it makes, if it is told the rank; else a share of what it makes."""
        config = {**reading.config, "batch_size": reading.batch_size or DEFAULT_BATCH}
        make = partial(make_data, self.creator, config, world.rank, world.size)
        data = make()
        made = source_of(_Again(make) if isinstance(data, Iterator) else data, reading)
        if world.size > 1 and takes_rank(self.creator):
            return OwnFeed(made.open(World(), reading))
        return made.open(world, reading)


class _Again:
    """What a function that gives an iterator gives, as often as it is asked for."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


@dataclass(frozen=True)
class IterableSource:
    """Whatever gives batches, again in every epoch."""

    batches: Iterable[Any]

    def open(self, world: World, reading: Reading) -> Feed:
        """All of it on one rank; nobody can tell the shares of several."""
        del reading
        if world.size > 1:
            raise OptionError(
                f"a {type(self.batches).__name__} gives batches one after the other, and {world.size} ranks would each "
                "train on all of them. Pass a function that gives the share of a rank, creator(rank, world_size, "
                "config), or a StreamingDataset, or a DataLoader of a dataset with rows by number."
            )
        return IterableFeed(self.batches)


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

    def items(self, epoch: int, position: Position | None = None) -> Iterator[Item]:
        """The batches of an epoch, from its beginning."""
        del position
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)
        return map(item_of, self.batches)


class OwnFeed:
    """The share that a creator made for its rank: nobody knows how many steps the others have."""

    planned = resumable = False

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        """The steps of this rank."""
        return self.feed.steps(epoch, position)

    def items(self, epoch: int, position: Position | None = None) -> Iterator[Item]:
        """The batches of this rank."""
        return (replace(item, total=None, position=None) for item in self.feed.items(epoch, position))


# --- which source data is


def source_of(data: Any, reading: Reading) -> Source:
    """The source of data that a rank can open; shards and frames of engines were written out before."""
    plain = isinstance(data, (StoredDataset, str, os.PathLike, DocumentArray, DocumentBatch)) or callable(data)
    if not plain and reading.missing.missing not in ("raise", "read"):
        raise OptionError(
            f"missing is for documents, shards, frames and the addresses of datasets; a {type(data).__name__} has its "
            "own: MultiModalDataset[T](..., missing=...) or StreamingDataset[T](..., missing=...)."
        )
    if isinstance(data, StreamingDataset):
        return StreamSource(data)
    if isinstance(data, StoredDataset):
        return StoredSource(data)
    if isinstance(data, (str, os.PathLike)):
        return StoredSource(open_folder(data).url)  # absolute: a worker has another working directory
    if isinstance(data, (DocumentArray, DocumentBatch)):
        return _documents(data, reading)
    if isinstance(data, MultiModalDataset):
        return RowSource(Rows(data))
    if is_loaded("torch.utils.data"):
        found = _of_torch(data)
        if found is not None:
            return found
    if is_loaded("tensorflow") and _is_tf_dataset(data):
        tensorflow: Any = require("quire.distributed.estimator._tf_data", extra="tensorflow", needed_for="tf.data")
        return tensorflow.TfSource(data)  # type: ignore[no-any-return]
    return _of_others(data)


def _of_others(data: Any) -> Source:
    if _is_arrays(data):
        return RowSource(Rows(Arrays(data)))
    if callable(data):
        return CreatorSource(data)
    if isinstance(data, Iterable) and not isinstance(data, (Iterator, Mapping)):
        return IterableSource(data)
    raise OptionError(f"data is {_DATA}; got a {type(data).__name__}.")


def _documents(data: Any, reading: Reading) -> Source:
    dataset: Any = MultiModalDataset[data.document_type]
    framework = "torch" if reading.framework == "torch" else "numpy"
    return RowSource(Rows(dataset(data, framework=framework, missing=reading.missing)))


def _is_arrays(data: Any) -> bool:
    """Whether it is an array, or a tuple, a list or a dict of arrays; a list of tuples or dicts is batches."""
    if isinstance(data, list) and any(isinstance(part, (tuple, list, Mapping)) for part in data):
        return False
    if isinstance(data, Mapping):
        return bool(data) and all(map(_is_arrays, data.values()))
    if isinstance(data, (tuple, list)):
        return bool(data) and all(map(_is_arrays, data))
    return hasattr(data, "shape") and hasattr(data, "dtype") and len(data.shape) > 0


def _is_tf_dataset(data: Any) -> bool:
    tensorflow: Any = require("tensorflow", extra="tensorflow", needed_for="tf.data")
    return isinstance(data, tensorflow.data.Dataset)


def _of_torch(data: Any) -> Source | None:
    """The source of a DataLoader, or of a dataset of torch."""
    torch_data: Any = require("torch.utils.data", extra="torch", needed_for="a DataLoader")
    if isinstance(data, torch_data.DataLoader):
        return _of_loader(data, torch_data)
    if isinstance(data, torch_data.IterableDataset):
        return IterableSource(torch_data.DataLoader(data, batch_size=None))
    if isinstance(data, torch_data.Dataset) and hasattr(data, "__getitem__"):
        return RowSource(Rows(data, loading={"collate_fn": torch_data.default_collate}))
    return None


def _of_loader(loader: Any, torch_data: Any) -> Source:
    dataset = loader.dataset
    if isinstance(dataset, StreamingDataset):
        return StreamSource(dataset)
    if isinstance(dataset, torch_data.IterableDataset) or not hasattr(dataset, "__getitem__"):
        return IterableSource(loader)
    if type(loader.batch_sampler) is not torch_data.BatchSampler:
        return IterableSource(loader)
    known = type(loader.sampler) in (torch_data.SequentialSampler, torch_data.RandomSampler)
    plain = known and not getattr(loader.sampler, "replacement", False)
    plain = plain and len(loader.sampler) == len(dataset)
    return RowSource(
        Rows(
            dataset,
            loader.batch_size,
            shuffle=isinstance(loader.sampler, torch_data.RandomSampler),
            drop_last=loader.drop_last,
            sampler=None if plain else loader.sampler,
            loading=_loading(loader),
        )
    )


def _loading(loader: Any) -> dict[str, Any]:
    """The keywords of a DataLoader that have nothing to do with which rows there are."""
    found = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
    }
    if loader.num_workers:
        found["multiprocessing_context"] = _start_method(loader)
    return found


def _start_method(loader: Any) -> str | None:
    context = loader.multiprocessing_context
    return None if context is None else context.get_start_method()
