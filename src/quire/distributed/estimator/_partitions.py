"""XShards as data: partitions of arrays or data frames, written by their workers, and predictions on them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from quire.distributed.estimator._feeds import (
    DEFAULT_BATCH_SIZE,
    Feed,
    FeedOptions,
    IndexedData,
    IndexedFeed,
    RankBatch,
    iter_arrays,
    map_arrays,
)
from quire.distributed.estimator._job import Recipe
from quire.distributed.estimator._options import ColumnSelection
from quire.distributed.estimator._ranks import RankInfo, World
from quire.distributed.xshards import XShards
from quire.errors import ColumnError, OptionError


def is_frame(part: object) -> bool:
    """Whether a partition is a data frame."""
    return hasattr(part, "columns") and hasattr(part, "iloc")


def partition_arrays(part: Any, names: Sequence[str] | None = None) -> Any:
    """Return the arrays of a partition: the columns of a data frame by name, or a dict, list or tuple as it is."""
    if is_frame(part):
        chosen = list(part.columns) if names is None else list(names)
        absent = [name for name in chosen if name not in part.columns]
        if absent:
            raise ColumnError(f"{absent[0]!r}: the data frame has no such column.")
        return {name: _column_array(str(name), part[name]) for name in chosen}
    if isinstance(part, Mapping) and names is not None and all(name in part for name in names):
        part = {name: part[name] for name in names}
    arrays = map_arrays(part, np.asarray)
    for array in iter_arrays(arrays):
        if array.ndim == 0 or array.dtype.kind not in "biufcSU":
            raise OptionError(
                f"a partition is a {type(part).__name__} with values that are no arrays of numbers: use "
                "transform_shard() to make dicts of arrays, such as {'x': features, 'y': labels}, or data frames."
            )
    return arrays


def _column_array(name: str, column: Any) -> Any:
    """Return a column of a data frame as an array; lists of one length become its second axis."""
    if column.isna().any():
        raise ColumnError(f"{name!r}: the column has missing values. Fill or drop them with transform_shard().")
    array = np.asarray(column)
    if array.dtype.kind == "O":
        array = np.asarray(column.tolist()) if not isinstance(column.iloc[0], np.ndarray) else np.stack(column.tolist())
    if array.dtype.kind not in "biufcSU":
        raise ColumnError(f"{name!r}: the column cannot be converted to an array; its values are of mixed kinds.")
    return array


@dataclass(frozen=True)
class WrittenPartition:
    """The files of a partition, nested as its arrays are, and its number of rows."""

    files: Any
    rows: int


def write_partition(part: Any, folder: str, names: tuple[str, ...] | None) -> WrittenPartition:
    """Write the arrays of a partition, where it is, so that ranks can map them."""
    arrays = partition_arrays(part, names)
    lengths = {len(array) for array in iter_arrays(arrays)}
    if len(lengths) != 1:
        raise OptionError(f"arrays of a partition must have the same length, got lengths {sorted(lengths)}.")

    def write(array: Any) -> str:
        path = Path(folder) / f"{uuid.uuid4().hex}.npy"
        np.save(path, array, allow_pickle=False)
        return str(path)

    return WrittenPartition(map_arrays(arrays, write), lengths.pop())


class PartitionDataset:
    """Rows by number, in memory-mapped arrays of several partitions."""

    def __init__(self, parts: Sequence[WrittenPartition]) -> None:
        self.parts = [part for part in parts if part.rows]
        self._ends = np.cumsum([part.rows for part in self.parts])
        self._arrays: list[Any] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> Any:
        return map_arrays(self.__getitems__([row]), lambda array: array[0])

    def __getitems__(self, rows: Sequence[int]) -> Any:
        if self._arrays is None:
            self._arrays = [map_arrays(part.files, _map_file) for part in self.parts]
        numbers = np.asarray(rows, np.int64)
        owners = np.searchsorted(self._ends, numbers, side="right")
        chunks: list[Any] = []
        places: list[Any] = []
        for owner in np.unique(owners):
            place = np.flatnonzero(owners == owner)
            local = numbers[place] - (self._ends[owner] - self.parts[owner].rows)
            chunks.append(map_arrays(self._arrays[owner], itemgetter(local)))
            places.append(place)
        order = np.argsort(np.concatenate(places), kind="stable")
        return _join(chunks, order)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}


def _map_file(path: str) -> Any:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _join(chunks: list[Any], order: Any) -> Any:
    first = chunks[0]
    if isinstance(first, Mapping):
        return {name: _join([chunk[name] for chunk in chunks], order) for name in first}
    if isinstance(first, tuple):
        return tuple(_join([chunk[place] for chunk in chunks], order) for place in range(len(first)))
    return np.concatenate(chunks)[order]


@dataclass(frozen=True)
class PartitionSource:
    """The written partitions of XShards."""

    parts: tuple[WrittenPartition, ...]

    def open(self, world: World, feed_options: FeedOptions) -> Feed:
        return IndexedFeed(IndexedData(PartitionDataset(self.parts)), world, feed_options)


def write_xshards(shards: XShards, folder: Path, names: tuple[str, ...] | None) -> PartitionSource:
    """Write the partitions of XShards to a folder that all workers see."""
    target = folder / f"partitions-{uuid.uuid4().hex}"
    target.mkdir(parents=True)
    return PartitionSource(tuple(shards.transform_shard(write_partition, str(target), names).collect()))


class PartitionPredictor:
    """A model in a worker: takes partitions, and returns them with the outputs."""

    def __init__(self, recipe: Recipe, selection: ColumnSelection, output_col: str, batch_size: int | None) -> None:
        self.output_col, self.batch_size, self.selection = output_col, batch_size or DEFAULT_BATCH_SIZE, selection
        self.backend = recipe.backend(RankInfo(), World(), selection)
        self.backend.begin(training=False)

    def __call__(self, part: Any) -> Any:
        arrays = partition_arrays(part, self.selection.paths)
        rows = len(next(iter_arrays(arrays)))
        outputs = []
        for start in range(0, rows, self.batch_size):
            stop = min(start + self.batch_size, rows)
            batch = map_arrays(arrays, itemgetter(slice(start, stop)))
            outputs.append(self.backend.predict(RankBatch(batch, stop - start)))
        output = _join(outputs, slice(None)) if outputs else np.zeros(0)
        if is_frame(part):
            return part.assign(**{self.output_col: list(output) if output.ndim > 1 else output})
        return {**part, self.output_col: output} if isinstance(part, Mapping) else {self.output_col: output}


def predict_xshards(
    shards: XShards, recipe: Recipe, selection: ColumnSelection, output_col: str, batch_size: int | None
) -> XShards:
    """Return XShards with the outputs: as a key of dicts, a column of data frames, or dicts of their own."""
    return shards.transform_shard(PartitionPredictor, recipe, selection, output_col, batch_size)
