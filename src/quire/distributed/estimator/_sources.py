"""What `fit` takes as data, as sources: objects that are sent to every rank and open its share there.

Shards and frames of engines are first written as a dataset, by the engine, to a folder that all workers see.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire._optional import is_loaded, require
from quire.array import DocumentArray, DocumentBatch
from quire.data import MultiModalDataset, StreamingDataset, from_spark
from quire.distributed._shards import DocumentShards
from quire.distributed.estimator._feeds import (
    DEFAULT_BATCH_SIZE,
    ArrayDataset,
    CreatorFeed,
    Feed,
    FeedOptions,
    FeedSource,
    IndexedData,
    IndexedFeed,
    IterableFeed,
    StreamFeed,
)
from quire.distributed.estimator._options import create_data, takes_rank
from quire.distributed.estimator._partitions import write_xshards
from quire.distributed.estimator._ranks import World
from quire.distributed.xshards import XShards
from quire.errors import OptionError
from quire.files import open_folder
from quire.storage import StoredDataset, open_dataset

if TYPE_CHECKING:
    from types import ModuleType


def is_generated(document_type: type[Any]) -> bool:
    """Whether a class was inferred from columns, so that other processes have to infer it again."""
    return document_type.__module__ == "quire._parametrize"


_ACCEPTED_DATA = (
    "a DataLoader, a tf.data.Dataset, a function that returns one, a StreamingDataset, the URL of a dataset, "
    "DocumentShards, XShards, a Spark DataFrame, a Ray Dataset, a DocumentArray, or arrays"
)


@dataclass(frozen=True)
class StreamSource:
    """An open `StreamingDataset`."""

    dataset: StreamingDataset[Any]

    def open(self, world: World, feed_options: FeedOptions) -> Feed:
        return StreamFeed(self.dataset, world, feed_options)


@dataclass(frozen=True)
class StoredSource:
    """A dataset in shards, by its URL. Without a class, it is looked up where the dataset is opened."""

    url: Any
    document_type: type[Any] | None = None

    def open(self, world: World, feed_options: FeedOptions) -> Feed:
        stored = self.url if isinstance(self.url, StoredDataset) else open_dataset(self.url, self.document_type)
        framework = "torch" if feed_options.framework == "torch" else "numpy"
        shuffle = "block" if feed_options.shuffle is not False else False
        dataset_type: Any = StreamingDataset[stored.document_type]  # type: ignore[name-defined]
        dataset = dataset_type(
            stored,
            feed_options.batch_size or DEFAULT_BATCH_SIZE,
            seed=feed_options.seed,
            framework=framework,
            shuffle=shuffle,
            missing=feed_options.missing,
        )
        return StreamFeed(dataset, world, feed_options)


@dataclass(frozen=True)
class IndexedSource:
    """A dataset with rows by number."""

    rows: IndexedData

    def open(self, world: World, feed_options: FeedOptions) -> Feed:
        return IndexedFeed(self.rows, world, feed_options)


@dataclass(frozen=True)
class CreatorSource:
    """A function that creates the data on the rank itself."""

    creator: Callable[..., Any]

    def open(self, world: World, feed_options: FeedOptions) -> Feed:
        """Return what the creator makes for the rank, if it takes the rank; else a share of what it makes."""
        config = {**feed_options.config, "batch_size": feed_options.batch_size or DEFAULT_BATCH_SIZE}
        make = partial(create_data, self.creator, config, world.rank, world.size)
        data = make()
        source = rank_source(_Repeat(make) if isinstance(data, Iterator) else data, feed_options)
        if world.size > 1 and takes_rank(self.creator):
            return CreatorFeed(source.open(World(), feed_options))
        return source.open(world, feed_options)


class _Repeat:
    """An iterable that calls a function for each new iterator."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


@dataclass(frozen=True)
class IterableSource:
    """Any iterable of batches, which is iterated again in every epoch."""

    batches: Iterable[Any]

    def open(self, world: World, feed_options: FeedOptions) -> Feed:
        """Return all of it on one rank; it cannot be divided among several."""
        del feed_options
        if world.size > 1:
            raise OptionError(
                f"a {type(self.batches).__name__} is an iterable of batches, and {world.size} ranks would each train "
                "on all of them. Pass a function that returns the share of a rank, creator(rank, world_size, config), "
                "or a StreamingDataset, or a DataLoader of a dataset with rows by number."
            )
        return IterableFeed(self.batches)


# --- choosing the source


def rank_source(data: object, feed_options: FeedOptions) -> FeedSource:
    """Return the source of data that a rank can open; data of engines was written before."""
    plain = isinstance(data, (StoredDataset, str, os.PathLike, DocumentArray, DocumentBatch)) or callable(data)
    if not plain and feed_options.missing.missing not in ("raise", "read"):
        raise OptionError(
            f"missing is for documents, shards, frames and the URLs of datasets; a {type(data).__name__} has its "
            "own: MultiModalDataset[T](..., missing=...) or StreamingDataset[T](..., missing=...)."
        )
    if isinstance(data, StreamingDataset):
        return StreamSource(data)
    if isinstance(data, StoredDataset):
        return StoredSource(data)
    if isinstance(data, (str, os.PathLike)):
        return StoredSource(open_folder(data).url)  # absolute, because a worker has another working directory
    if isinstance(data, (DocumentArray, DocumentBatch)):
        dataset: Any = MultiModalDataset[data.document_type]  # type: ignore[name-defined]
        framework = "torch" if feed_options.framework == "torch" else "numpy"
        return IndexedSource(IndexedData(dataset(data, framework=framework, missing=feed_options.missing)))
    if isinstance(data, MultiModalDataset):
        return IndexedSource(IndexedData(data))
    if is_loaded("torch.utils.data"):
        source = _torch_source(data)
        if source is not None:
            return source
    return _plain_source(data)


def _plain_source(data: object) -> FeedSource:
    """Return the source of a dataset of TensorFlow, of arrays, of a function, or of any iterable of batches."""
    if is_loaded("tensorflow"):
        tensorflow: Any = require("tensorflow", extra="tensorflow", needed_for="tf.data")
        if isinstance(data, tensorflow.data.Dataset):
            sources: Any = require("quire.distributed.estimator._tensorflow", extra="tensorflow", needed_for="tf.data")
            return sources.TfSource(data)  # type: ignore[no-any-return]
    if _is_arrays(data):
        return IndexedSource(IndexedData(ArrayDataset(data)))
    if callable(data):
        return CreatorSource(data)
    if isinstance(data, Iterable) and not isinstance(data, (Iterator, Mapping)):
        return IterableSource(data)
    raise OptionError(f"data must be {_ACCEPTED_DATA}; got a {type(data).__name__}.")


def _is_arrays(data: object) -> bool:
    """Whether it is an array, or a tuple, list or dict of arrays; a list of tuples or dicts is batches."""
    if isinstance(data, list) and any(isinstance(part, (tuple, list, Mapping)) for part in data):
        return False
    if isinstance(data, Mapping):
        return bool(data) and all(map(_is_arrays, data.values()))
    if isinstance(data, (tuple, list)):
        return bool(data) and all(map(_is_arrays, data))
    return hasattr(data, "shape") and hasattr(data, "dtype") and len(data.shape) > 0


def _torch_source(data: object) -> FeedSource | None:
    """Return the source of a DataLoader, or of a torch dataset; None for other data."""
    torch_data: Any = require("torch.utils.data", extra="torch", needed_for="a DataLoader")
    if isinstance(data, torch_data.DataLoader):
        return _loader_source(data, torch_data)
    if isinstance(data, torch_data.IterableDataset):
        return IterableSource(torch_data.DataLoader(data, batch_size=None))
    if isinstance(data, torch_data.Dataset) and hasattr(data, "__getitem__"):
        return IndexedSource(IndexedData(data, loading={"collate_fn": torch_data.default_collate}))
    return None


def _loader_source(loader: Any, torch_data: ModuleType) -> FeedSource:
    """Return the source of a DataLoader: its dataset, if ranks can divide the rows; else its batches as they come."""
    dataset = loader.dataset
    if isinstance(dataset, StreamingDataset):
        return StreamSource(dataset)
    if isinstance(dataset, torch_data.IterableDataset) or not hasattr(dataset, "__getitem__"):
        return IterableSource(loader)
    if type(loader.batch_sampler) is not torch_data.BatchSampler:
        return IterableSource(loader)
    # In order, or a permutation of all rows: the feed computes the same for each rank. Any other sampler is asked.
    known = type(loader.sampler) in (torch_data.SequentialSampler, torch_data.RandomSampler)
    plain = known and not getattr(loader.sampler, "replacement", False)
    plain = plain and len(loader.sampler) == len(dataset)
    # The keywords of the loader that do not determine which rows it loads.
    loading = {name: getattr(loader, name) for name in ("collate_fn", "num_workers", "pin_memory", "worker_init_fn")}
    if loader.num_workers:
        context = loader.multiprocessing_context
        loading["multiprocessing_context"] = None if context is None else context.get_start_method()
    return IndexedSource(
        IndexedData(
            dataset,
            loader.batch_size,
            shuffle=isinstance(loader.sampler, torch_data.RandomSampler),
            drop_last=loader.drop_last,
            sampler=None if plain else loader.sampler,
            loading=loading,
        )
    )


@dataclass(frozen=True)
class FrameSource:
    """A Spark DataFrame that was written to a folder as Parquet."""

    converter: Any

    def open(self, world: World, feed_options: FeedOptions) -> Feed:
        framework = "torch" if feed_options.framework == "torch" else "numpy"
        shuffle = "block" if feed_options.shuffle is not False else False
        size = feed_options.batch_size or DEFAULT_BATCH_SIZE
        dataset = self.converter.dataset(
            size, seed=feed_options.seed, framework=framework, shuffle=shuffle, missing=feed_options.missing
        )
        return StreamFeed(dataset, world, feed_options)


def make_source(data: object, feed_options: FeedOptions, folder: Path) -> FeedSource:
    """Return the source of data; what belongs to an engine is first written to a folder, by that engine."""
    if is_spark_frame(data):
        return FrameSource(from_spark(data, cache=folder / "frames"))
    if isinstance(data, XShards):
        return write_xshards(data, folder, feed_options.missing.only)
    if is_ray_dataset(data):
        data = DocumentShards.from_ray(data)
    if isinstance(data, DocumentShards):
        url = folder / f"shards-{uuid.uuid4().hex}"
        data.write_dataset(url, format="arrow")
        return StoredSource(str(url), None if is_generated(data.document_type) else data.document_type)
    return rank_source(data, feed_options)


def is_spark_frame(data: object) -> bool:
    """Whether it is a Spark DataFrame."""
    return type(data).__module__.startswith("pyspark.sql") and hasattr(data, "mapInArrow")


def is_ray_dataset(data: object) -> bool:
    """Whether it is a Ray Dataset."""
    return type(data).__module__.startswith("ray.data") and hasattr(data, "iter_batches")
