"""Datasets that are open: rows by their number, wherever their shards lie."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

import numpy as np
import pyarrow as pa

from quire._extra_fields import Extra, check_extra
from quire._parametrize import ParametrizedMeta
from quire._protocols import is_document_type
from quire.array import DocumentBatch
from quire.array._index import resolve_index
from quire.array._rows import bind, html
from quire.columns import Columns
from quire.display import GALLERY, facts_table, print_facts, track
from quire.document import BaseDocument
from quire.errors import DecodeError, SchemaError, ShardError, StorageError, check_options
from quire.files import Folder, RemoteOptions, open_folder, shown
from quire.schema import parse_path
from quire.storage._block_table import Pieces, count_regions
from quire.storage._cache import ShardCache
from quire.storage._layout import CLASS_KEY, Layout, layout_fingerprint, resolve_columns
from quire.storage._locks import no_fork
from quire.storage._manifest import SUFFIXES, Shard, list_plain_files, read_manifest
from quire.storage._range_index import RangeIndex
from quire.storage._row_locations import RowLocations
from quire.storage._schema_conversion import class_from_arrow, loaded_class, refuse_unknown_columns
from quire.storage._shard_reader import (
    Block,
    ShardReader,
    SpoiledCopyError,
    count_rows,
    partition_values,
    read_arrow_schema,
    read_null_count,
    shard_errors,
)
from quire.storage._verification import VerifiedBlocks, Verify, check_verify
from quire.storage._where import Where, matching_rows
from quire.tensors import Framework, describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

DocT = TypeVar("DocT", bound=BaseDocument)
_FOOTERS = 16
"""So many footers of plain files are read at a time."""
_LARGE = 16 << 20
"""Bytes of a shard of which a part may be read ahead."""
_SLOTS = 64
"""Parts in which a copy of a shard in the cache is verified."""
_MOST_OPEN = 16_384
"""Of more shards, all are closed before the next is opened: a process has a limited number of mappings."""


@dataclass(frozen=True)
class ReadOptions:
    """Where shards are cached that must be fetched or converted, how stores are asked, and when data is verified.

    verify: 'first_touch' (the default) compares a column of a block with its checksum when a row of it is first read,
        a large column in pieces of 64 KiB or a row; 'always' at every read, 'never' not at all.
    """

    cache: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    verify: Verify = "first_touch"

    def __post_init__(self) -> None:
        check_verify(self.verify)


class StoredDataset(Generic[DocT], metaclass=ParametrizedMeta):
    """A dataset in a folder: `dataset[i]` is a document, `dataset[[3, 1]]` and `dataset[10:20]` are batches.

    Opening it reads which shards there are; a shard is opened when one of its rows is asked for. It can be pickled and
    used in many processes and threads.
    """

    document_type: ClassVar[type[Any]] = BaseDocument
    _opened: NDArray[np.int64]
    _batch_starts: NDArray[np.int64]
    _virtual: int
    _cached: int

    def __init__(
        self,
        url: str | os.PathLike[str],
        columns: Iterable[str] | None = None,
        where: Where | None = None,
        options: ReadOptions | None = None,
        **more: Any,
    ) -> None:
        if self.document_type is BaseDocument:
            raise SchemaError("StoredDataset needs the documents' class: StoredDataset[Student](...).")
        self.options = replace(options or ReadOptions(), **more)
        self.folder, self._file = split_file(url, self.options.remote)
        schema = self.document_type.document_schema()
        self._paths = resolve_columns(schema, columns)
        self.layout = Layout(schema, paths=self._paths)
        self.schema = self.layout.schema
        self.shards: tuple[Shard, ...] = _shards_in(self)
        self.starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum([s.rows for s in self.shards], dtype=np.int64)])
        cache = ShardCache(self.options.cache, self.options.cache_bytes)
        self.reader = ShardReader(self.folder, self.layout, cache, self.options.verify)
        self._start(None)
        self.rows: NDArray[np.int64] | None = _rows(self, where)

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return bind(cls, parameter)

    def __len__(self) -> int:
        return int(self.starts[-1]) if self.rows is None else len(self.rows)

    @property
    def nbytes(self) -> int:
        """The bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    # --- rows

    @overload
    def __getitem__(self, key: int) -> DocT: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | NDArray[Any]) -> DocumentBatch[DocT]: ...
    def __getitem__(self, key: Any) -> Any:
        """A document by position; by slice, list or mask, a batch."""
        rows = resolve_index(key, len(self))
        if isinstance(rows, int):
            return self.take(np.array([rows]))[0]
        return self.take(np.arange(len(self))[rows] if isinstance(rows, slice) else rows)

    def take(self, rows: NDArray[np.int64]) -> DocumentBatch[DocT]:
        """The rows at these positions."""
        document_type = self.schema.document_type
        return DocumentBatch[document_type]._wrap(self.gather(rows))  # type: ignore[valid-type]

    def gather(self, rows: NDArray[np.int64], framework: Framework | None = None) -> Columns:
        """The columns of rows by position, copied; with the tensors of a framework, or of those that fields name."""
        [columns] = self.gather_parts([rows], framework)
        return columns

    def gather_parts(self, parts: Sequence[NDArray[np.int64]], framework: Framework | None = None) -> Iterator[Columns]:
        """The columns of several parts of rows, each when it is asked for; the shards are opened now."""
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        with self._lock:
            found = self._located(self._stored(rows))
        found.framework = framework
        return self._gather_located(found, [*map(len, parts)], rows)

    def _gather_located(self, found: RowLocations, sizes: Sequence[int], rows: NDArray[np.int64]) -> Iterator[Columns]:
        """Gather rows whose shards are open; what goes wrong names the shard."""
        try:
            yield from self.layout.gather_parts(found, sizes)
        except SpoiledCopyError:  # nothing was gathered yet, and the copy is gone from the cache: make another
            self._close_shards(rows)
            with self._lock:
                again = self._located(self._stored(rows))
            again.framework = found.framework
            yield from self.layout.gather_parts(again, sizes)
        except DecodeError:
            numbers = self.shards_of(rows)
            for number in np.unique(numbers).tolist():
                with self._lock, shard_errors(self.folder, self.shards[number]):
                    self.layout.gather(self._located(self._stored(rows[numbers == number])))
            raise

    def read_ahead(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Let the system read runs of rows before they are asked for, of shards that are mapped as they are.

        From the first such call on, it reads nothing else of shards that are opened but what is asked for. Small
        shards are left alone: all would have to be opened, and there is not much in them to read too much of.
        """
        if self.rows is not None or not self.is_mapped or self.nbytes < _LARGE * len(self.shards) or not len(begins):
            return
        self.reader.advise_random, self._addresses.asked = True, self.layout.read_ahead_parts
        with self._lock:
            first, last = self._located(begins), self._located(ends - 1)
        lengths = np.append(self._batch_starts[1:], self._virtual) - self._batch_starts
        counts = np.minimum(ends - begins, lengths[first.batches] - first.places)
        self.layout.read_ahead(first, counts)
        across = np.flatnonzero(first.batches != last.batches)
        if len(across):
            rest = RowLocations(self._addresses, last.batches[across], np.zeros(len(across), np.int64))
            self.layout.read_ahead(rest, last.places[across] + 1)

    def _located(self, rows: NDArray[np.int64]) -> RowLocations:
        """Where the rows are; the shards that they are in are opened."""
        shards = self._shard_starts.find(rows)
        if (self._opened[shards] < 0).any():
            self._open_shards(np.unique(shards))
        virtual = self._opened[shards] + rows - self.starts[shards]
        batches = self._batches_at.find(virtual)
        return RowLocations(self._addresses, batches, virtual - self._batch_starts[batches])

    def _open_shards(self, shards: NDArray[np.int64]) -> None:
        if self._addresses.count + len(shards) > _MOST_OPEN or self._cached > self.reader.cache.max_bytes:
            self._forget()  # of what the cache has removed, the disk is free when no one has it open
        starts = [self._batch_starts]
        try:
            for number in shards[self._opened[shards] < 0].tolist():
                with no_fork():
                    blocks = self.reader.open(self.shards[number])
                    located = [self.layout.locate(block.batch) for block in blocks]
                pieces = self._remember_checks(number, blocks, located)
                self._opened[number] = self._virtual
                self._cached += 0 if self.is_mapped else sum(block.batch.nbytes for block in blocks)
                for block, parts, own_pieces in zip(blocks, located, pieces, strict=True):
                    self._addresses.add(parts, block.batch, block.check, own_pieces)
                    starts.append(np.array([self._virtual]))
                    self._virtual += len(block.batch)
        finally:
            self._batch_starts = np.concatenate(starts)  # those before one that cannot be read are open
            self._batches_at = RangeIndex(self._batch_starts, self._virtual)

    def _close_shards(self, rows: NDArray[np.int64]) -> None:
        """Let the shards of rows be opened again when they are needed: damaged copies were removed from the cache."""
        with self._lock:
            for number in np.unique(self.shards_of(rows)).tolist():
                self._opened[number] = -1
                self._verified.flags[self._slots[number] : self._slots[number + 1]] = 0

    def _remember_checks(
        self, number: int, blocks: Sequence[Block], located: Sequence[list[int]]
    ) -> list[dict[int, Pieces]]:
        """Let the checks of a shard use the memory that worker processes share: flags for the pieces of each block.

        A copy in the cache may have more blocks than there are slots: then several share one, and each of them is
        verified with the others of its slot. Only the pieces of shards that are mapped as they are have flags.
        """
        pieces: list[dict[int, Pieces]] = [{} for _ in blocks]
        first, slots = int(self._slots[number]), int(self._slots[number + 1] - self._slots[number])
        flags, count = self._verified.flags, len(blocks)
        keep = self.options.verify != "always"
        for place, block in enumerate(blocks):
            if block.check is not None:
                slot = place if count <= slots else place * slots // count
                if count > slots:
                    block.check.widen(range(-(-slot * count // slots), -(-(slot + 1) * count // slots)))
                block.check.remember(flags[first + slot], keep=keep)
                if self._piece_flags[number] < self._piece_flags[number + 1]:
                    pieces[place] = block.check.split(located[place], self._data_parts, int(self._piece_flags[number]))
        return pieces

    def _start(self, verified: VerifiedBlocks | None) -> None:
        self._lock = threading.RLock()
        self._shard_starts = RangeIndex(self.starts[:-1], int(self.starts[-1]))
        sizes = [shard.blocks if self._can_map(shard) and shard.table else _SLOTS for shard in self.shards]
        self._slots: NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        regions = [
            count_regions(shard.table[1]) if self._can_map(shard) and shard.table else 0 for shard in self.shards
        ]
        self._piece_flags: NDArray[np.int64] = np.cumsum([1, *regions], dtype=np.int64)
        self._data_parts = [part for codec in self.layout.codecs for part in codec.data_parts()]
        shape = int(self._slots[-1]), len(self.layout.codecs), sum(regions)
        self._verified = verified or VerifiedBlocks(*shape)
        self._forget()
        _alive.add(self)

    def _can_map(self, shard: Shard) -> bool:
        return shard.format == "arrow" and self.folder.local_path(shard.name) is not None

    def _forget(self) -> None:
        """Close all shards; rows that are being gathered keep theirs."""
        self._addresses = self.layout.addresses()
        self._addresses.remember(self._verified.pieces, keep=self.options.verify != "always")
        if self.reader.advise_random:
            self._addresses.asked = self.layout.read_ahead_parts
        self._opened = np.full(len(self.shards), -1, np.int64)
        self._batch_starts, self._virtual = np.zeros(0, np.int64), 0
        self._batches_at = RangeIndex(self._batch_starts, 0)
        self._cached = 0  # the bytes of copies in the cache that are open

    def _stored(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers in the shards of rows by position."""
        return rows if self.rows is None else self.rows[rows]

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of the shards that rows are in."""
        return self._shard_starts.find(self._stored(rows))

    def open_shard(self, number: int) -> None:
        """Open a shard, if it is not open; one that cannot be read is an error."""
        with self._lock:
            if self._opened[number] < 0:
                self._open_shards(np.array([number]))

    @property
    def is_mapped(self) -> bool:
        """Whether rows are read from the shards themselves, without a copy in the cache."""
        if not self.shards:
            return True
        return self._can_map(self.shards[0])

    @property
    def fits_cache(self) -> bool:
        """Whether the cache has room for all shards."""
        return self.reader.cache.holds(self.nbytes)

    def iter_batches(self, batch_size: int = 1024) -> Iterator[DocumentBatch[DocT]]:
        """The rows in order; shards that would have to be written anew are read as they are, a part at a time."""
        for start in range(0, len(self), batch_size):
            yield self.take(np.arange(start, min(start + batch_size, len(self))))

    def read(self) -> DocumentBatch[DocT]:
        """All rows in one batch."""
        parts = list(track(self._read_parts(), "reading", len(self), size=len)) if self.rows is None else []
        if not parts:
            return self.take(np.arange(len(self)))
        batch: Any = DocumentBatch[self.schema.document_type]  # type: ignore[name-defined]
        return batch.concat([batch._wrap(part) for part in parts], shapes="ragged")  # type: ignore[no-any-return]

    def _read_parts(self) -> Iterator[Columns]:
        for shard in self.shards:
            with shard_errors(self.folder, shard):
                for batch in self.reader.read(shard):
                    yield self.reader.columns(batch)

    def verify(self, *, show_progress: bool | None = None) -> None:
        """Read every shard, and compare its size, checksum and rows with what was written. The error names all bad."""
        bad = self.faults(show_progress=show_progress)
        if bad:
            told_all = "".join(f"\n  {error}" for _, error in bad)
            raise ShardError(f"{len(bad)} of {len(self.shards)} shards cannot be read:{told_all}") from bad[0][1]

    def faults(self, *, show_progress: bool | None = None) -> list[tuple[Shard, ShardError]]:
        """The shards that are not what was written, each with what is wrong."""
        bad = []
        sizes = track(self.shards, "verifying", self.nbytes, show=show_progress, size=lambda shard: shard.bytes)
        for shard in sizes:
            try:
                self.reader.check(shard)
            except ShardError as error:
                bad.append((shard, error))
        return bad

    def null_count(self, path: str) -> int | None:
        """The number of rows without a value at a path, from the metadata of shards; None if that does not say.

        No data is read: block tables of format 2 have the number, and so have the footers of most Parquet files.
        """
        self.document_type.document_schema().resolve(parse_path(path))
        if self.rows is not None:
            return None
        whole = layout_fingerprint(self.document_type.document_schema())
        counts = [read_null_count(self.folder, shard, path) if shard.layout == whole else None for shard in self.shards]
        return None if None in counts else sum(count for count in counts if count is not None)

    # --- display

    def summary(self) -> None:
        """Print the type, the rows and shards, the fields, and what the first row has in them."""
        print_facts(type(self).__name__, facts_of(self), self.schema, next(iter(first_rows(self, 1)), None))

    def __rich__(self) -> Any:
        return facts_table(type(self).__name__, facts_of(self), self.schema, next(iter(first_rows(self, 1)), None))

    def _repr_html_(self) -> str:
        return html(type(self).__name__, self.schema, list(first_rows(self, GALLERY)), len(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} in {len(self.shards)} shards>"

    def __getstate__(self) -> dict[str, Any]:
        kept = ("options", "folder", "shards", "starts", "rows", "_file", "_paths")
        shared = {"cache": self.reader.cache, "verified": self._verified}
        return {**{name: self.__dict__[name] for name in kept}, **shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cache, verified = state.pop("cache"), state.pop("verified", None)
        self.__dict__.update(state)
        self.layout = Layout(self.document_type.document_schema(), paths=self._paths)
        self.schema = self.layout.schema
        self.reader = ShardReader(self.folder, self.layout, cache, self.options.verify)
        self._start(verified)


def facts_of(dataset: StoredDataset[Any]) -> dict[str, Any]:
    """What is known of a dataset without a look at its rows."""
    return {"rows": len(dataset), "shards": len(dataset.shards), "bytes": dataset.nbytes}


def first_rows(dataset: StoredDataset[Any], count: int) -> Iterable[Any]:
    """Some documents to show; none of a store that is elsewhere, since showing fetches nothing."""
    if not len(dataset) or dataset.folder.local_path(dataset.shards[0].name) is None:
        return ()
    if dataset.rows is not None or dataset.is_mapped:
        return dataset[: min(count, len(dataset))]
    part = next(dataset._read_parts())
    return part.slice(slice(0, count)).documents()


_alive: weakref.WeakSet[StoredDataset[Any]] = weakref.WeakSet()


def _forked() -> None:
    """In a child, let go of what other threads of the parent were just doing."""
    for dataset in list(_alive):
        if dataset._lock.acquire(blocking=False):
            dataset._lock.release()
        else:
            dataset._start(dataset._verified)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _rows(dataset: StoredDataset[Any], where: Where | None) -> NDArray[np.int64] | None:
    return None if where is None else matching_rows(dataset.reader, dataset.shards, where)


def _shards_in(dataset: StoredDataset[Any]) -> tuple[Shard, ...]:
    """The shards that have rows."""
    folder = dataset.folder
    shards = list_shards(folder, dataset._file, dataset.options)
    if any(shard.rows < 0 for shard in shards):
        with ThreadPoolExecutor(_FOOTERS) as pool:
            shards = list(pool.map(lambda shard: count_rows(folder, shard), shards))
    return tuple(shard for shard in shards if shard.rows)


def list_shards(folder: Folder, file: str | None, options: ReadOptions) -> Sequence[Shard]:
    """The shards that the logs tell of, or else the plain files of the folder; or the one file that was asked for."""
    if file is not None:
        return [Shard(file, -1, folder.size(file))]
    found = read_manifest(folder, options.remote)
    return found.shards if found.logs else list_plain_files(folder)


def class_of(folder: Folder, shards: Sequence[Shard]) -> type[Any]:
    """The class of the first shard: loaded, or made."""
    if not shards:
        raise StorageError(
            f"{shown(folder.url)}: no shard is whole that could tell the class. Pass it: schema=Student."
        )
    schema = read_arrow_schema(folder, shards[0])
    for key, value in partition_values(shards[0].name).items():
        if key not in schema.names:
            schema = schema.append(pa.field(key, pa.int64() if isinstance(value, int) else pa.string()))
    name = (schema.metadata or {}).get(CLASS_KEY, b"").decode()
    return loaded_class(schema) or class_from_arrow(schema, name.rpartition(":")[2].rpartition(".")[2] or "Row")


def split_file(url: str | os.PathLike[str], remote: RemoteOptions) -> tuple[Folder, str | None]:
    """The folder at an address; or that of the one Parquet or Arrow file that is there, and its name."""
    folder = open_folder(url, remote)
    if not folder.url.endswith(tuple(SUFFIXES.values())):
        if Path(folder.url).is_file():
            raise StorageError(
                f"{shown(folder.url)}: this is a file, and a dataset is a folder, or a file that ends with "
                f"{' or '.join(SUFFIXES.values())}. Files of save_binary are read by load_binary."
            )
        return folder, None
    parent, _, name = folder.url.rpartition("/")
    outside = open_folder(parent or "/", remote)
    return (outside, name) if outside.exists(name) else (folder, None)


def open_dataset(
    url: str | os.PathLike[str],
    schema: type[DocT] | None = None,
    *,
    columns: Iterable[str] | None = None,
    where: Where | None = None,
    extra: Extra = "ignore",
    options: ReadOptions | None = None,
    **more: Any,
) -> StoredDataset[DocT]:
    """The dataset in a folder: one that quire wrote, or any folder of Parquet or Arrow files.

    Without a class, it is the one that wrote the dataset if that is loaded, else one made from what the files hold.
    `columns` are the paths of the fields to read, `where` tells which rows: a query as `DocumentArray.filter` takes it,
    a `Split`, or a function. Columns that the class has no field for are ignored, or refused with `extra='forbid'`, for
    which the footers of all shards are read. `more` are fields of `ReadOptions`: cache, cache_bytes, remote, verify.
    """
    check_options("open_dataset", more, ReadOptions.__dataclass_fields__)
    options = replace(options or ReadOptions(), **more)
    document_type: Any = schema
    if document_type is not None and not is_document_type(document_type):
        raise SchemaError(f"open_dataset: schema takes a document class, got {describe(document_type)}.")
    if document_type is None:
        folder, file = split_file(url, options.remote)
        document_type = class_of(folder, list_shards(folder, file, options))
    dataset = StoredDataset[document_type](url, columns, where, options)
    check_extra(extra)
    if "forbid" in (extra, document_type.__quire_extra__):
        for shard in dataset.shards:
            columns_of_shard = read_arrow_schema(dataset.folder, shard)
            name = shown(dataset.folder.join(shard.name))
            refuse_unknown_columns(document_type.document_schema(), columns_of_shard, extra, name)
    return dataset
