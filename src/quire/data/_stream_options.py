"""The options of a StreamingDataset, and the row order that follows from them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import pyarrow.parquet as pq
from typing_extensions import TypedDict

from quire._optional import is_loaded, require
from quire.array import whole_number
from quire.columns import ShapePolicy, StackOptions
from quire.data._column_store import default_framework
from quire.data._epoch import Last, Order, RowOrder, Shuffle, choose_block
from quire.data._interleaved import InterleavedOrder, choose_lanes, find_blocks
from quire.data._missing import Missing, MissingOptions
from quire.errors import OptionError, check_options, did_you_mean
from quire.storage import LiveRows, RangeReader, ReadOptions, StoredDataset, Verify, VersionChoice, Where, shard_errors
from quire.tensors import describe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OnError = Literal["raise", "skip", "replace"]
MiB = 1 << 20


class Streaming(TypedDict, total=False):
    """The keywords of `StreamingDataset`.

    shuffle: 'block' (the default) mixes rows from all over the data, one window of blocks at a time; 'interleaved'
        reads many blocks at the same time, each of them once and on one node, which suits object stores; 'global' may
        put any row at any position; False keeps the order of the data.
    lanes: the number of blocks that shuffle='interleaved' reads at the same time, a power of two; by default, it
        follows from the size of the dataset.
    seed: determines the order of every epoch.
    last: the policy for rows that do not fill a batch on every rank: 'keep' (the default), 'drop' or 'pad'.
    columns: the paths of the fields to read. where: selects rows. version: the number of a version of the dataset, its
        tag or its time; by default the latest when the stream is opened. A state fits the same rows only.
    framework: the framework of the batches, torch by default. shapes: the policy for tensors of mixed shapes.
    missing: the policy for numbers and tensors that are None in some rows: 'raise' (the default), 'mask', or values by
        path, as for `MultiModalDataset`. If the shards have null counts, the error is raised here.
    rank, world_size: the share of this process; by default those of torch.distributed, or of the launcher's
        environment.
    mesh, data_dims: a `DeviceMesh` of torch, and the names of its dimensions that divide the data, such as
        ('dp_replicate', 'dp_shard'). Ranks that differ only in other dimensions, such as those of tensor parallelism,
        get the same batches.
    replication: the same without a mesh: every `replication` consecutive ranks get the same batches.
    epochs: the number of epochs of one pass; with None, a pass never ends.
    on_error: the policy for rows whose shard cannot be read: 'raise', 'skip' them, or 'replace' them by others.
    memory_bytes: the budget for a window of blocks, and for the batches that a loader prefetches.
    storage: where shards are cached, and the options of remote stores.
    allow_empty: whether the dataset may have no rows, or none that match `where`; otherwise that is an error.
    verify: when stored data is compared with its checksums: 'first_touch' (the default), 'always' or 'never'.
    bucket_by: the path of a list, a tensor or a length; batches then have rows of similar lengths.
    tracing: whether the waits for batches, the reads of rows and their preprocessing are recorded as spans of
        OpenTelemetry.
    max_tokens: with bucket_by, the most elements of a batch that is padded to its longest row; batches then have as
        many rows as fit, and at most `batch_size`.
    """

    shuffle: Shuffle
    lanes: int | None
    seed: int
    last: Last
    columns: Sequence[str] | None
    where: Where | None
    version: VersionChoice
    framework: str | None
    shapes: ShapePolicy
    missing: Missing
    rank: int | None
    world_size: int | None
    mesh: DeviceMesh | None
    data_dims: Sequence[str] | None
    replication: int
    epochs: int | None
    on_error: OnError
    memory_bytes: int
    storage: ReadOptions
    allow_empty: bool
    verify: Verify | None
    bucket_by: str | None
    max_tokens: int | None
    tracing: bool


@dataclass(frozen=True)
class StreamOptions:
    """The options of a StreamingDataset, checked; see `Streaming`."""

    shuffle: Shuffle = "block"
    seed: int = 0
    last: Last = "keep"
    columns: Sequence[str] | None = None
    where: Where | None = None
    version: VersionChoice = None
    framework: str | None = None
    shapes: ShapePolicy = "error"
    missing: Missing = "raise"
    rank: int | None = None
    world_size: int | None = None
    mesh: DeviceMesh | None = None
    data_dims: Sequence[str] | None = None
    replication: int = 1
    epochs: int | None = 1
    on_error: OnError = "raise"
    memory_bytes: int = 256 * MiB
    storage: ReadOptions = field(default_factory=ReadOptions)
    allow_empty: bool = False
    verify: Verify | None = None
    bucket_by: str | None = None
    max_tokens: int | None = None
    lanes: int | None = None
    tracing: bool = False

    def __post_init__(self) -> None:
        for name in ("seed", "rank", "world_size", "epochs", "max_tokens", "lanes"):
            if name == "seed" or getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.on_error not in ("raise", "skip", "replace"):
            raise OptionError(f"on_error={self.on_error!r}: use 'raise', 'skip' or 'replace'.")
        self._check_shuffle()
        if self.last not in ("drop", "pad", "keep"):
            raise OptionError(f"last: expected 'drop', 'pad' or 'keep', got {self.last!r}.")
        if self.epochs is not None and self.epochs < 1:
            raise OptionError(f"epochs={self.epochs}: at least one, or None for a pass that never ends.")
        if (self.rank is None) != (self.world_size is None):
            raise OptionError("rank and world_size go together: pass both, or neither.")
        self._check_replication()
        if self.memory_bytes < 1:
            raise OptionError(f"memory_bytes is a number of bytes above 0, got {self.memory_bytes}.")
        if self.verify is not None:
            object.__setattr__(self, "storage", replace(self.storage, verify=self.verify))
        self._check_buckets()
        # Both raise an error for unknown values.
        StackOptions(self.framework, self.shapes)
        MissingOptions.of(self.missing)

    def _check_shuffle(self) -> None:
        if self.shuffle not in ("block", "interleaved", "global", False):
            raise OptionError(f"shuffle: expected 'block', 'interleaved', 'global' or False, got {self.shuffle!r}.")
        if self.lanes is not None and self.shuffle != "interleaved":
            raise OptionError(f"lanes={self.lanes} is for shuffle='interleaved', and shuffle is {self.shuffle!r}.")

    def _check_replication(self) -> None:
        object.__setattr__(self, "replication", whole_number("replication", self.replication))
        if self.replication < 1:
            raise OptionError(f"replication={self.replication}: the number of ranks that get the same batches, from 1.")
        if self.mesh is not None:
            if self.rank is not None or self.replication != 1:
                other = "replication" if self.rank is None else "rank and world_size"
                raise OptionError(f"mesh says which rank gets which batches, and so does {other}: pass one of them.")
            object.__setattr__(self, "data_dims", find_data_dims(self.mesh, self.data_dims))
        elif self.data_dims is not None:
            raise OptionError("data_dims are dimensions of a mesh: pass mesh=, too.")
        elif self.rank is not None and self.world_size is not None:
            self._replicate(self.rank, self.world_size)

    def _replicate(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return the rank and the number of ranks among those that get different batches."""
        if world_size % self.replication:
            raise OptionError(
                f"replication={self.replication} does not divide the {world_size} ranks: batches would not go to the "
                "same number of them."
            )
        return rank // self.replication, world_size // self.replication

    def __getstate__(self) -> dict[str, Any]:
        """Return the options with numbers for a mesh, which belongs to the process groups of this process."""
        if self.mesh is None:
            return self.__dict__
        rank, world_size = self.rank_and_world_size()
        return {**self.__dict__, "mesh": None, "data_dims": None, "rank": rank, "world_size": world_size}

    def _check_buckets(self) -> None:
        if self.bucket_by is None:
            if self.max_tokens is not None:
                raise OptionError("max_tokens is about the lengths of a field: name it with bucket_by.")
            return
        if self.shuffle is False:
            raise OptionError(
                f"bucket_by={self.bucket_by!r} sorts rows by their lengths, and shuffle=False keeps the order of the "
                "data: use shuffle='block' or 'global'."
            )
        if self.shuffle == "interleaved":
            raise OptionError(
                f"bucket_by={self.bucket_by!r} puts rows of all lanes into one batch, and shuffle='interleaved' keeps "
                "the lanes of a rank apart from those of others: use shuffle='block' or 'global'."
            )
        if self.max_tokens is None:
            return
        if self.max_tokens < 1:
            raise OptionError(f"max_tokens={self.max_tokens}: at least 1.")
        if self.on_error == "replace":
            raise OptionError("on_error='replace' puts rows of other lengths into a batch of max_tokens: use 'skip'.")

    def resolved_framework(self) -> str:
        """Return the framework of the batches."""
        return self.framework or default_framework()

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and the number of ranks among those that get different batches.

        They follow from the options, or from torch.distributed or a launcher.
        """
        if self.mesh is not None:
            return find_data_rank(self.mesh, self.data_dims or ())
        return self._replicate(*self._rank_of_process())

    def _rank_of_process(self) -> tuple[int, int]:
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        # torch is not imported for this: a program that uses its process groups has imported it.
        if is_loaded("torch.distributed"):
            distributed: Any = require("torch.distributed", extra="torch", needed_for="ranks")
            if distributed.is_available() and distributed.is_initialized():
                return distributed.get_rank(), distributed.get_world_size()
        rank, world_size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if not rank and not world_size:
            return 0, 1
        try:
            return int(rank), int(world_size)
        except ValueError as error:
            raise OptionError(
                f"the environment says RANK={rank!r} and WORLD_SIZE={world_size!r}: both are numbers, or neither is "
                "there. Pass rank and world_size."
            ) from error


# --- meshes


def find_data_dims(mesh: Any, data_dims: Sequence[str] | None) -> tuple[str, ...]:
    """Check the dimensions of a mesh that divide the data, and return them."""
    if not all(hasattr(mesh, name) for name in ("get_coordinate", "mesh_dim_names", "shape")):
        raise OptionError(f"mesh takes a DeviceMesh of torch, got {describe(mesh)}.")
    names: tuple[str, ...] = tuple(mesh.mesh_dim_names or ())
    if data_dims is None:
        raise OptionError(
            f"mesh: name the dimensions that divide the data, of {names}; ranks that differ in others get the same "
            "batches: data_dims=(...)."
        )
    dims = (data_dims,) if isinstance(data_dims, str) else tuple(data_dims)
    unknown = [name for name in dims if name not in names]
    if unknown:
        raise OptionError(f"data_dims: the mesh has no dimension {unknown[0]!r}. {did_you_mean(unknown[0], names)}")
    if len(set(dims)) < len(dims):
        raise OptionError(f"data_dims={dims} names a dimension twice.")
    return dims


def find_data_rank(mesh: Any, data_dims: Sequence[str]) -> tuple[int, int]:
    """Return the rank of this process among those that get different batches, and their number."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise OptionError("this process is not part of the mesh, so that it has no share of the data.")
    names, rank, world_size = tuple(mesh.mesh_dim_names), 0, 1
    for name in data_dims:  # the last dimension counts by one, the one before it by the size of the last, ...
        size = mesh.shape[names.index(name)]
        rank, world_size = rank * size + coordinate[names.index(name)], world_size * size
    return rank, world_size


def check_stream_options(names: Iterable[str], batch_size: int) -> int:
    """Check the names of the options and the batch size, and return the size."""
    check_options("StreamingDataset", names, Streaming.__annotations__)
    size = whole_number("batch_size", batch_size)
    if size < 1:
        raise OptionError(f"batch_size={size}: a batch has at least one row.")
    return size


# --- the order of the rows


def choose_order(stored: StoredDataset[Any], options: StreamOptions) -> Order:
    """Choose the order of the rows; raise an error for one that the cache is too small for.

    Shards that are mapped, or fit into the cache, are read in small blocks. Otherwise each shard is fetched or decoded
    into the cache when one of its rows is read, so a block is about a shard, and a window what the cache can hold.
    """
    rows = len(stored)
    if options.shuffle == "interleaved":
        return _choose_interleaved(stored, options)
    if stored._row_reader.is_mapped or options.shuffle is False or not stored.shards:
        block, window = choose_block(rows, estimate_row_bytes(stored), options.memory_bytes)
    else:
        needed, room = int(stored.nbytes * _estimate_growth(stored)), stored._row_reader.shard_reader.cache.max_bytes
        if needed <= room:
            block, window = choose_block(rows, estimate_row_bytes(stored), options.memory_bytes)
        elif options.shuffle == "global":
            raise OptionError(
                f"shuffle='global' needs all shards at hand, and the cache holds {room:,} bytes of about {needed:,}. "
                "Use shuffle='block', or pass storage=ReadOptions(cache_bytes=...)."
            )
        else:
            # The cache has room for two windows: rows of the next window are read before the last rows of this one.
            # So each shard is fetched or decoded about once per epoch.
            shards = len(stored.shards)
            block, window = max(1, -(-rows // shards)), max(1, room * shards // (2 * needed))
    # A window of more than all units makes no other order, so it must not make another state either.
    window = min(window, max(1, -(-rows // block)))
    return RowOrder(rows, options.seed, options.shuffle, block, window)


def _choose_interleaved(stored: StoredDataset[Any], options: StreamOptions) -> InterleavedOrder:
    """Choose the interleaved order. It follows from the dataset alone, so that it is the same on every machine."""
    reader = stored._row_reader
    if stored.shards and not reader.is_mapped and not reader.reads_blocks:
        needed, room = int(stored.nbytes * _estimate_growth(stored)), reader.shard_reader.cache.max_bytes
        if needed > room:
            raise OptionError(
                f"shuffle='interleaved' reads all shards at the same time, and the cache holds {room:,} bytes of about "
                f"{needed:,}. Use shuffle='block', or pass storage=ReadOptions(cache_bytes=...)."
            )
    blocks = find_blocks(reader.block_starts())
    # With `where`, lanes are for the blocks that have selected rows: the others are not read.
    lanes = options.lanes
    if lanes is None:
        count = sum(shard.blocks or len(shard.groups) for shard in stored.shards)
        lanes = choose_lanes(blocks.filled, stored.nbytes * blocks.filled // max(count, 1))
    return InterleavedOrder(blocks, lanes, options.seed)


def estimate_row_bytes(stored: StoredDataset[Any]) -> float:
    """Return the approximate size of a row in the shards."""
    return stored.nbytes / max(int(stored._row_reader.starts[-1]), 1)


def compute_fingerprint(stored: StoredDataset[Any], order: Order) -> str:
    """Return a digest that identifies a dataset: the checksums of its shards (or names), and the selected rows.

    The blocks of shards without a checksum are part of it if the order depends on them.
    """
    digest = blake2b("\n".join(f"{s.rows} {s.xxh3 or s.name}" for s in stored.shards).encode(), digest_size=8)
    rows = stored._row_reader.rows
    if rows is not None:
        # Deleted rows are hashed with a mark: the same numbers of selected rows are another dataset.
        digest.update(b"deleted" + rows.deleted.tobytes() if isinstance(rows, LiveRows) else rows.tobytes())
    if order.lanes and not all(shard.xxh3 for shard in stored.shards):
        digest.update(stored._row_reader.block_starts().tobytes())
    return digest.hexdigest()


def explain_version(expected: int, actual: int) -> str:
    """Return what an error about a state of other rows says if it is of another version of the dataset."""
    if not expected or not actual or expected == actual:
        return ""
    return (
        f" It is of version {expected} of the dataset, and the stream reads version {actual}: open the dataset with "
        f"version={expected}."
    )


def _estimate_growth(stored: StoredDataset[Any]) -> float:
    """Return how much larger shards are in the cache than in the dataset, as the first shard is."""
    first = stored.shards[0]
    if first.format != "parquet" or stored._row_reader.reads_blocks:  # blocks are kept as they are stored
        return 1.0
    with shard_errors(stored.folder, first):
        metadata = pq.read_metadata(RangeReader(stored.folder, first))
    decompressed: int = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1.0, decompressed / max(first.bytes, 1))
