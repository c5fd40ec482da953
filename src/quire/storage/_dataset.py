"""Stored datasets: the class that users work with, and how one is opened.

`quire.storage._row_reader` reads the rows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, overload

import numpy as np
import pyarrow as pa
from typing_extensions import Unpack

from quire._class_registry import class_name
from quire._extra_fields import Extra, check_extra
from quire._parametrize import ParametrizedMeta
from quire._protocols import is_document_type
from quire.array import (
    Batches,
    DocumentBatch,
    FieldNames,
    Found,
    MapWork,
    Metric,
    NearestRows,
    bind,
    check_method_typo,
    explain_vector_field,
    find_column,
    html,
    map_batches,
    map_documents,
    resolve_index,
    resolve_positions,
    sample_positions,
    split_positions,
    vector_field,
)
from quire.columns import Column
from quire.display import GALLERY, facts_table, format_bytes, print_facts, track
from quire.document import BaseDocument
from quire.errors import (
    DocumentTypeError,
    OptionError,
    PathError,
    SchemaError,
    ShardError,
    StorageError,
    StorageNotFoundError,
    check_options,
    reject_unknown_options,
)
from quire.files import Folder, HubFolder, RemoteOptions, compile_glob, display_uri, open_folder, scheme_of
from quire.schema import join_path, parse_path
from quire.storage._cache import ShardCache
from quire.storage._interchange import open_stream
from quire.storage._layout import Layout, layout_fingerprint, paths_within, resolve_columns
from quire.storage._live_rows import LiveRows, RowSelection
from quire.storage._manifest import SUFFIXES, Shard, list_plain_files, read_manifest
from quire.storage._remote_blocks import NodeTailCache, keep_tail
from quire.storage._row_reader import RowReader
from quire.storage._schema_conversion import class_from_arrow, loaded_class, refuse_unknown_columns, stored_class_name
from quire.storage._shard_reader import (
    ShardReader,
    count_rows,
    partition_values,
    read_arrow_schema,
    read_null_count,
)
from quire.storage._verification import VerifiedBlocks, Verify, check_verify
from quire.storage._versions import Snapshot, Version, VersionLog
from quire.storage._where import Split, Where, matching_rows
from quire.tensors import describe, framework_of

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from quire.storage._row_changes import Difference, Upserted

DocT = TypeVar("DocT", bound=BaseDocument)
NewT = TypeVar("NewT", bound=BaseDocument)
R = TypeVar("R")
_FOOTER_THREADS = 16
"""The number of footers of plain files that are read at a time."""


@dataclass(frozen=True)
class ReadOptions:
    """The cache for shards that must be fetched or converted, options of remote stores, and when data is verified.

    cache, cache_bytes: a folder on the local disk, and its size; by default, half of the free disk space, and at most
        100 GB. Blocks of remote shards are kept there, and copies of shards that must be converted.
    prefetch_bytes: how much a `StreamingDataset` downloads before it is needed; by default, 128 MiB for all workers of
        a rank together.
    verify: 'first_touch' (the default) compares a column of a block with its checksum when a row of it is first read,
        a large column in pieces of 64 KiB or a row; 'always' at every read, 'never' not at all.
    """

    cache: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    verify: Verify = "first_touch"
    prefetch_bytes: int | None = None

    def __post_init__(self) -> None:
        check_verify(self.verify)
        if self.prefetch_bytes is not None and self.prefetch_bytes < 1:
            raise OptionError(f"prefetch_bytes is a number of bytes above 0, got {self.prefetch_bytes}.")


class StoredDataset(Generic[DocT], metaclass=ParametrizedMeta):
    """A dataset in a folder: `dataset[i]` is a document, `dataset[[3, 1]]` and `dataset[10:20]` are batches.

    Opening a dataset reads the list of its shards; a shard is opened when one of its rows is first read. Datasets can
    be pickled, and used by many processes and threads.
    """

    document_type: ClassVar[type[Any]] = BaseDocument

    def __init__(
        self,
        url: Location | DatasetFiles,
        columns: Iterable[str] | None = None,
        where: Where | None = None,
        options: ReadOptions | None = None,
        *,
        version: VersionChoice = None,
        **more: Any,
    ) -> None:
        check_options(type(self).__name__, more, ["columns", "where", "version", *ReadOptions.__dataclass_fields__])
        if self.document_type is BaseDocument:
            raise SchemaError("StoredDataset needs the documents' class: StoredDataset[Student](...).")
        self.options = replace(options or ReadOptions(), **more)
        files = url if isinstance(url, DatasetFiles) else find_dataset(url, self.options, version=version)
        self.folder, self._file = files.folder, files.file
        self._paths = resolve_columns(self.document_type.document_schema(), columns)
        cache = ShardCache(self.options.cache, self.options.cache_bytes)
        self.shards: tuple[Shard, ...] = self._count_rows(files.shards, cache)
        self._version: int | None = None if files.snapshot is None else files.snapshot.number
        self._is_pinned = files.is_pinned
        self._open(cache, _live_rows(self.shards, files.snapshot))
        if where is not None:
            reader = self._row_reader
            reader.rows = matching_rows(reader.shard_reader, self.shards, where, rows=reader.rows)

    def _open(
        self, cache: ShardCache, rows: RowSelection | None = None, verified: VerifiedBlocks | None = None
    ) -> None:
        layout = Layout(self.document_type.document_schema(), paths=self._paths)
        self.schema = layout.schema
        reader = ShardReader(self.folder, layout, cache, self.options.verify)
        self._row_reader = RowReader(reader, self.shards, rows, verified)

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return bind(cls, parameter)

    def _count_rows(self, shards: Sequence[Shard], cache: ShardCache) -> tuple[Shard, ...]:
        """Return the shards that have rows; the number of rows of plain files is in their footers."""
        # Footers may be remote, and each takes a request or two: read some at a time.
        if any(shard.rows < 0 for shard in shards):
            keep = partial(keep_tail, self.folder, cache)
            with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
                shards = list(pool.map(lambda shard: count_rows(self.folder, shard, keep), shards))
        return tuple(shard for shard in shards if shard.rows)

    def __len__(self) -> int:
        return len(self._row_reader)

    @property
    def nbytes(self) -> int:
        """The size of all shards in bytes."""
        return self._row_reader.nbytes

    # --- rows

    @overload
    def __getitem__(self, key: int) -> DocT: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | NDArray[Any]) -> DocumentBatch[DocT]: ...
    def __getitem__(self, key: Any) -> Any:
        """Return a document by position; by slice, list or mask, a batch; by path, a column, as a batch has it."""
        if isinstance(key, str):
            return self._read_column(key)[key] if key else self
        rows = resolve_index(key, len(self))
        return self.take(rows)[0] if isinstance(rows, int) else self.take(rows)

    def take(self, indices: Any) -> DocumentBatch[DocT]:
        """Return the rows at these positions as a batch: an int, a slice, a list, an array or a mask."""
        document_type = self.schema.document_type
        rows = resolve_positions(indices, len(self))
        return DocumentBatch[document_type]._wrap(self._row_reader.gather(rows))  # type: ignore[valid-type]

    def sample(
        self, n: int | None = None, seed: int | None = None, *, fraction: float | None = None
    ) -> StoredDataset[DocT]:
        """Return a dataset of n different rows, or of a fraction of them, chosen at random, in the stored order."""
        return self._select_rows(sample_positions(len(self), n, fraction, seed))

    def split(
        self, *parts: float, by: str | None = None, shuffle: bool = False, seed: int | None = None
    ) -> list[StoredDataset[DocT]]:
        """Split into datasets by fractions or by counts; see `DocumentArray.split`. Each has the stored order."""
        rows = split_positions(len(self), parts, by, self._values_at, shuffle=shuffle, seed=seed)
        return [self._select_rows(positions) for positions in rows]

    def _values_at(self, path: str) -> list[Any]:
        parts = self.narrow([path])._row_reader.read_parts()
        return [value for columns in parts for value in find_column(columns, path).values()]

    def _select_rows(self, positions: NDArray[np.int64]) -> StoredDataset[DocT]:
        return self._with_state(rows=self._row_reader.stored_rows(np.sort(positions)))

    # --- columns

    def __getattr__(self, name: str) -> Any:
        """Read a column. Methods and attributes come first: a field called 'shards' is read as dataset['shards']."""
        if name.startswith("_") or "schema" not in self.__dict__:  # never a field, or not set up yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return self[name]
        except PathError:
            check_method_typo(type(self), self.schema, name)
            raise

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.schema.by_name})

    def column(self, path: str) -> Column:
        """Read a column of all rows as a batch holds it: data, validity, offsets, shapes."""
        return self._read_column(path).column(path)

    def _read_column(self, path: str) -> DocumentBatch[DocT]:
        """Read one column of all rows, and no other."""
        schema = self.document_type.document_schema()
        parts = parse_path(path)
        schema.resolve(parts)
        return self.narrow(map(join_path, paths_within(schema, [parts], self._paths))).read()

    # --- queries

    def filter(self, query: Callable[[DocT], Any] | Mapping[str, Any] | Split) -> StoredDataset[DocT]:
        """Return a dataset of the rows for which a function is true, or that match a query: `{'price': {'$lt': 5}}`.

        The matching rows are found now, by reading the columns of the query, without row groups that cannot match;
        for a function, all columns. Only their numbers are kept: the rows are read when they are needed.
        """
        reader = self._row_reader
        rows = matching_rows(reader.shard_reader, self.shards, query, rows=reader.rows, columns=self._paths)
        return self._with_state(rows=rows)

    def find(
        self,
        query: Any,
        field: str = "embedding",
        *,
        metric: Metric = "cosine",
        limit: int = 10,
        **names: Unpack[FieldNames],
    ) -> Found[DocT]:
        """Find the nearest rows to a vector, or to a document by its own field; exact."""
        return self.find_batch([query], field, metric=metric, limit=limit, **names)[0]

    def find_batch(
        self,
        queries: Any,
        field: str = "embedding",
        *,
        metric: Metric = "cosine",
        limit: int = 10,
        **names: Unpack[FieldNames],
    ) -> list[Found[DocT]]:
        """Find the nearest rows to each of many vectors, or documents; rows without a vector are left out.

        The column of vectors is read and compared in parts; then the nearest rows are read.
        """
        schema = self.document_type.document_schema()
        field = vector_field(field, names, schema)
        queries = queries if framework_of(queries) is not None else list(queries)
        with explain_vector_field():
            schema.resolve(parse_path(field))
        vectors = self.narrow(map(join_path, paths_within(schema, [parse_path(field)], self._paths)))._row_reader
        batch_type: Any = DocumentBatch[self.document_type]  # type: ignore[name-defined]
        search = NearestRows(queries, field, metric, limit)
        start = 0
        for columns in vectors.read_parts() if len(self) else [vectors.gather(np.arange(0))]:
            rows, matrix = batch_type._wrap(columns)._vectors(field)
            search.add(start + rows, matrix)
            start += len(columns)
        nearest = search.results()
        # The nearest rows of all queries are read at once, and a row that is near to several queries is read once.
        positions = np.unique(np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in nearest)]))
        batch = self._with_state(rows=self._row_reader.stored_rows(positions)).read()
        return [Found(batch.take(np.searchsorted(positions, rows)).unstack(), scores) for rows, scores in nearest]

    # --- parallel work

    def map(self, func: Callable[[DocT], R], **how: Unpack[MapWork]) -> Iterator[R]:
        """Yield the result of a function for each document, in order, each as soon as it is ready.

        Documents are read as the workers need them, in blocks of rows. See `DocumentArray.map`.
        """
        return map_documents(self, len(self), func, how)

    def map_batch(
        self,
        func: Callable[[DocumentBatch[DocT]], R],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        **how: Unpack[MapWork],
    ) -> Iterator[R]:
        """Yield the result of a function for each batch of `batch_size` rows, read by position; see `map`."""
        return map_batches(Batches(self.take, len(self), batch_size, shuffle=shuffle, seed=seed), func, how)

    # --- all rows

    def __iter__(self) -> Iterator[DocT]:
        """Yield the documents in order. They are read in blocks of rows, of which a few are in memory.

        Blocks are row groups or record batches, or parts of about 16 MiB of large ones. The tensors of documents of one
        block share its memory.
        """
        return (document for columns in self._row_reader.read_parts() for document in columns.iter_documents())

    def iter_batches(self, batch_size: int = 1024) -> Iterator[DocumentBatch[DocT]]:
        """Yield the rows in order, `batch_size` at a time."""
        for start in range(0, len(self), batch_size):
            yield self.take(np.arange(start, min(start + batch_size, len(self))))

    def read(self) -> DocumentBatch[DocT]:
        """Read all rows into one batch."""
        # Rows that a filter chose are copied from mapped shards one by one; without rows, there is nothing to read.
        if not len(self) or (self._row_reader.rows is not None and self._row_reader.is_mapped):
            return self.take(np.arange(len(self)))
        batch: Any = DocumentBatch[self.schema.document_type]  # type: ignore[name-defined]
        parts = track(self._row_reader.read_parts(), "reading", len(self), size=len)
        return batch.concat(map(batch._wrap, parts), shapes="ragged")  # type: ignore[no-any-return]

    def to_dataframe(self) -> pd.DataFrame:
        """Read all rows, and convert them to a pandas data frame; see `DocumentBatch.to_dataframe`."""
        return self.read().to_dataframe()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return the rows as a PyCapsule, for libraries that take Arrow data: polars, DuckDB, pandas, pyarrow.

        Record batches of some megabytes are read as they are needed. The columns are those of
        `DocumentBatch.to_arrow`, except that times with a zone are in UTC.
        """
        return open_stream(self).__arrow_c_stream__(requested_schema)

    @reject_unknown_options
    def push_to_hub(  # noqa: PLR0913 - by name
        self,
        repo_id: str,
        *,
        split: str = "train",
        config: str | None = None,
        append: bool = False,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        token: str | bool | None = None,
        shard_bytes: int = 500 << 20,
        show_progress: bool | None = None,
    ) -> str:
        """Write the rows as a split of a dataset on the Hugging Face Hub, and return its address at the new commit.

        The repository 'owner/name' is created if it does not exist, private if `private`. A split of the same name is
        replaced, or with `append` gets more files; other splits stay. `revision` is a branch, which is created if it
        does not exist. Parquet files with the features of `datasets`, and the metadata of the card, are written in one
        commit: either all is changed or nothing. The token is that of `hf auth login` or HF_TOKEN.
        """
        push = import_module("quire.storage._hub_writer").push_to_hub  # rarely needed
        address: str = push(
            self,
            self.schema,
            len(self),
            repo_id,
            show_progress=show_progress,
            split=split,
            config=config,
            append=append,
            private=private,
            revision=revision,
            commit_message=commit_message,
            token=token,
            shard_bytes=shard_bytes,
        )
        return address

    # --- other views of the same rows

    def narrow(self, columns: Iterable[str]) -> StoredDataset[DocT]:
        """Return the same rows of the same shards, with some of the columns."""
        paths = resolve_columns(self.document_type.document_schema(), columns)
        return self._with_state(_paths=paths, verified=None)  # the flags of verified blocks are per column

    def _with_state(self, **changes: Any) -> StoredDataset[DocT]:
        dataset: StoredDataset[DocT] = object.__new__(type(self))
        dataset.__setstate__({**self.__getstate__(), **changes})
        return dataset

    def _open_as(self, document_type: type[Any], caller: str) -> StoredDataset[Any]:
        """Return the rows for a container of a class: `DocumentArray[T](dataset)`.

        Rows of a subclass stay what they are. A later version of the class (a subclass, or a class of the same name
        that was defined again) reads the shards by the rules of schema evolution. Others are an error.
        """
        own = self.document_type
        if issubclass(own, document_type):
            return self
        url = self.folder.url if self._file is None else self.folder.join(self._file)
        if not issubclass(document_type, own) and class_name(own) != class_name(document_type):
            name = document_type.__name__
            raise DocumentTypeError(
                f"{caller}: the dataset {display_uri(url)} was opened as {own.__name__}, whose documents are not of "
                f"{name}. To read its rows as {name}, by the rules of schema evolution, open it with "
                f"document_type={name}."
            )
        columns = None if self._paths is None else map(join_path, self._paths)
        paths = resolve_columns(document_type.document_schema(), columns)
        dataset: StoredDataset[Any] = object.__new__(StoredDataset[document_type])  # type: ignore[valid-type]
        dataset.__setstate__({**self.__getstate__(), "_paths": paths, "verified": None})
        dataset._refuse_unknown_columns("ignore")
        return dataset

    def _refuse_unknown_columns(self, extra: Extra) -> None:
        """Raise an error if `extra`, or the class, forbids columns that the class has no field for, and there are."""
        check_extra(extra)
        if "forbid" in (extra, self.document_type.__quire_extra__):
            for shard in self.shards:
                name = display_uri(self.folder.join(shard.name))
                stored_schema = read_arrow_schema(self.folder, shard)
                refuse_unknown_columns(self.document_type.document_schema(), stored_schema, extra, name)

    # --- versions

    @property
    def version(self) -> int:
        """The number of the version; it is larger after every change."""
        if self._version is None:
            raise StorageError(
                f"{display_uri(self.folder.url)}: quire did not write this dataset, and it has no versions."
            )
        return self._version

    def versions(self) -> list[Version]:
        """Return the versions that can be opened: number, time, kind of the change, rows, tags.

        A dataset that was not changed since it was written has one.
        """
        known = self._version_log().versions()
        if known:
            return known
        return [self._version_log().resolve(None, None).public()]

    def _version_log(self) -> VersionLog:
        _ = self.version
        return VersionLog(self.folder, self.options.remote)

    def _at(self, snapshot: Snapshot) -> StoredDataset[DocT]:
        """Return the rows of another version."""
        shards = tuple(shard for shard in snapshot.shards if shard.rows)
        return self._with_state(
            shards=shards,
            rows=_live_rows(shards, snapshot),
            verified=None,
            _version=snapshot.number,
            _is_pinned=True,
        )

    def _begin_change(self, act: str, *, needs_columns: bool = True) -> VersionLog:
        """Return the log of versions for a change; raise an error if this is only a part of the dataset."""
        log = self._version_log()
        reason = None
        if self._is_pinned:
            reason = f"it was opened at version {self.version}; open it without version= or as_of="
        elif self._row_reader.is_filtered:
            reason = "some of its rows were selected; pass the condition to the method itself"
        elif needs_columns and self._paths is not None:
            reason = "some of its columns were selected; open it without columns="
        if reason is not None:
            raise StorageError(f"{display_uri(self.folder.url)}: {act}() changes the latest version: {reason}.")
        return log

    def _move_to(self, snapshot: Snapshot) -> None:
        """Become the latest version. Iterators and views that exist keep the rows that they have."""
        if snapshot.number != self._version:
            self.__setstate__({**self._at(snapshot).__getstate__(), "_is_pinned": False})

    def delete(self, where: Where) -> int:
        """Delete the rows that match a filter, and return how many. No file is rewritten.

        The rows are gone for all readers of the new version. Older versions have them until `cleanup`, and other tools
        see them in the files until `compact`.
        """
        log = self._begin_change("delete", needs_columns=False)
        snapshot, count = _row_changes().delete(self, log, where)
        self._move_to(snapshot)
        return int(count)

    def upsert(self, documents: DocumentBatch[DocT] | Iterable[DocT], key: str = "id") -> Upserted:
        """Write documents; each takes the place of the rows with the same key, if there are any.

        Returns how many keys were replaced and inserted. All is changed in one step. The rows come after all others. A
        key that comes twice in the documents, or is None, is an error, and nothing is changed.
        """
        log = self._begin_change("upsert")
        snapshot, counts = _row_changes().upsert(self, log, documents, key)
        self._move_to(snapshot)
        upserted: Upserted = counts
        return upserted

    def update(self, where: Where, /, **columns: Any) -> int:
        """Set columns of the rows that match a filter, and return how many: `update({'id': 'x'}, label=3)`.

        The class checks the values. The changed rows come after all others.
        """
        log = self._begin_change("update")
        snapshot, count = _row_changes().update(self, log, where, columns)
        self._move_to(snapshot)
        return int(count)

    def add_columns(
        self,
        function: Callable[[DocumentBatch[DocT]], Any],
        document_type: type[NewT],
        *,
        batch_size: int = 1024,
        workers: int | None = None,
        restart: bool = False,
    ) -> StoredDataset[NewT]:
        """Compute new columns of all rows, and return the dataset with them; no file is rewritten.

        `document_type` has all fields of this class, and the new ones. The function gets batches of at most
        `batch_size` rows, in `workers` threads, and returns the new columns by name, or a batch with them:
        `add_columns(lambda batch: {'embedding': embed(batch.image)}, document_type=Embedded)`. As with
        `DocumentBatch.with_columns`, types, shapes and lengths are checked, and validators of the class are not run.

        Everything is changed in one step. After an error or an interruption, the same call continues: shards that
        were finished are not computed again, unless `restart`. A call whose function has another name, or whose
        fields have other types, is an error then.
        """
        log = self._begin_change("add_columns")
        add = import_module("quire.storage._added_columns").add_columns  # rarely needed
        snapshot = add(self, log, function, document_type, batch_size, workers, restart=restart)
        self._move_to(snapshot)
        dataset: StoredDataset[NewT] = object.__new__(StoredDataset[document_type])  # type: ignore[valid-type]
        dataset.__setstate__({**self.__getstate__(), "verified": None})
        return dataset

    def tag(self, name: str, version: int | None = None) -> None:
        """Give a version a name, by default this one: `open_dataset(url, version='train-1')`. `cleanup` keeps it."""
        _row_changes().tag(self._version_log(), name, self.version if version is None else version)

    def untag(self, name: str) -> None:
        """Remove a tag; the version stays until `cleanup`."""
        _row_changes().untag(self._version_log(), name)

    def diff(self, older: int | str, newer: int | str = "latest") -> Difference:
        """Return the rows that were added and removed between two versions, each as a dataset.

        A row that was changed is in both: in `removed` as it was, and in `added` as it is now.
        """
        if self._row_reader.is_filtered:
            raise StorageError(
                f"{display_uri(self.folder.url)}: diff() compares all rows, and some of this dataset were selected. "
                "Call it on the dataset itself, and filter the result."
            )
        difference: Difference = _row_changes().diff(self, self._version_log(), older, newer)
        return difference

    def compact(self, **more: Any) -> int:
        """Rewrite shards that have deleted rows without them, and merge small shards; return the number of new shards.

        The rows and their order stay. `more` are fields of `WriteOptions`: shard_bytes, format, compression, ... The
        old files stay until `cleanup`. If another writer changes one of the shards meanwhile, it is a ConflictError.
        """
        log = self._begin_change("compact")
        before = {shard.name for shard in self.shards}
        snapshot = _row_changes().compact(self, log, more)
        self._move_to(snapshot)
        return sum(shard.name not in before for shard in snapshot.shards)

    def cleanup(self, older_than: timedelta = timedelta(days=7), *, uncommitted: timedelta = timedelta(days=7)) -> int:
        """Remove versions that were replaced longer ago than `older_than`, and their files; return the bytes of these.

        Versions with a tag stay, and what they need. Files of writers that began longer ago than `uncommitted`, and
        never finished, are removed as well.
        """
        log = self._begin_change("cleanup", needs_columns=False)
        snapshot, removed = _row_changes().cleanup(self, log, older_than, uncommitted)
        self._move_to(snapshot)
        return int(removed)

    # --- metadata

    def verify(self, *, show_progress: bool | None = None) -> None:
        """Read every shard, and compare its size, checksums and rows with what was written.

        The error names all damaged shards.
        """
        faults = self.faults(show_progress=show_progress)
        if faults:
            details = "".join(f"\n  {error}" for _, error in faults)
            raise ShardError(f"{len(faults)} of {len(self.shards)} shards cannot be read:{details}") from faults[0][1]

    def faults(self, *, show_progress: bool | None = None) -> list[tuple[Shard, ShardError]]:
        """Return the shards that are not what was written, each with the error."""
        faults = []
        shards = track(self.shards, "verifying", self.nbytes, show=show_progress, size=lambda shard: shard.bytes)
        for shard in shards:
            try:
                self._row_reader.shard_reader.check(shard)
            except ShardError as error:
                faults.append((shard, error))
        return faults

    def null_count(self, path: str) -> int | None:
        """Return the number of rows without a value at a path; None if the metadata of shards does not have it.

        No data is read: block tables of format 2 have the number, and so have the footers of most Parquet files.
        """
        self.document_type.document_schema().resolve(parse_path(path))
        if self._row_reader.rows is not None:
            return None
        # A shard of another version of the class may lack the column, or have it under another name or type.
        whole = layout_fingerprint(self.document_type.document_schema())
        counts = [read_null_count(self.folder, shard, path) if shard.layout == whole else None for shard in self.shards]
        return None if None in counts else sum(count for count in counts if count is not None)

    # --- display

    def summary(self) -> None:
        """Print the type, the number of rows and shards, the fields, and the values of the first row."""
        print_facts(type(self).__name__, self._facts(), self.schema, next(iter(self._first_rows(1)), None))

    def __rich__(self) -> Any:
        return facts_table(type(self).__name__, self._facts(), self.schema, next(iter(self._first_rows(1)), None))

    def _repr_html_(self) -> str:
        return self._render(type(self).__name__, {})

    def _render(self, title: str, facts: Mapping[str, object]) -> str:
        """Render the first rows, with facts about the dataset and those that are passed."""
        own = {"shards": f"{len(self.shards):,}", "size": format_bytes(self.nbytes)}
        return html(title, self.schema, list(self._first_rows(GALLERY)), len(self), facts={**own, **facts})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} in {len(self.shards)} shards>"

    def _facts(self) -> dict[str, Any]:
        return {"rows": len(self), "shards": len(self.shards), "bytes": self.nbytes}

    def _first_rows(self, count: int) -> Iterable[Any]:
        """Return documents to show; none of a remote dataset, so that showing it fetches nothing."""
        if not len(self) or self.folder.local_path(self.shards[0].name) is None:
            return ()
        if self._row_reader.rows is not None or self._row_reader.is_mapped:
            return self[: min(count, len(self))]
        return next(self._row_reader.read_parts()).slice(slice(0, count)).documents()

    # --- pickling

    def __getstate__(self) -> dict[str, Any]:
        # Other processes share the cache and the flags of verified blocks, and open shards themselves.
        reader = self._row_reader
        names = ("options", "folder", "shards", "_file", "_paths", "_version", "_is_pinned")
        kept = {name: self.__dict__[name] for name in names}
        return {**kept, "rows": reader.rows, "cache": reader.shard_reader.cache, "verified": reader.verified}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cache, rows, verified = state.pop("cache"), state.pop("rows"), state.pop("verified")
        self.__dict__.update(state)
        self._open(cache, rows, verified)


class DatasetFiles(NamedTuple):
    """The shards of a dataset, and the folder that has them; `file` is set if the dataset is one file of it."""

    folder: Folder
    shards: Sequence[Shard]
    file: str | None = None
    infer_class: Callable[[], type[Any]] | None = None
    """Makes a class for the rows; by default, it is the class of the first shard."""
    snapshot: Snapshot | None = None
    """The version that the shards are of, if quire wrote the dataset in a folder."""
    is_pinned: bool = False
    """Whether the version was chosen by the caller."""

    def deleted_rows(self, shard: Shard) -> NDArray[np.int64] | None:
        """Return the deleted rows of a shard; None if there are none."""
        if self.snapshot is None or shard.name not in self.snapshot.deletes:
            return None
        return self.snapshot.deleted_rows(shard.name)


VersionChoice = int | str | datetime | None
"""The number of a version, its tag, or the time at which it was the latest; None for the latest."""
Location = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""The folder of a dataset, a file, a pattern of files such as 's3://bucket/part-*.parquet', or a list of files."""


def find_dataset(
    url: Location,
    options: ReadOptions,
    split: str | None = None,
    config: str | None = None,
    version: VersionChoice = None,
) -> DatasetFiles:
    """Find the shards of a dataset; `split` and `config` are those of a dataset on the Hugging Face Hub."""
    files = _find_dataset(url, options, split, config, version)
    if version is not None and not files.is_pinned:
        raise OptionError(
            f"version={version!r}: only datasets in folders that quire wrote have versions, and this is "
            f"{display_uri(os.fspath(url)) if isinstance(url, (str, os.PathLike)) else 'a list of files'}."
        )
    return files


def _find_dataset(
    url: Location, options: ReadOptions, split: str | None, config: str | None, version: VersionChoice
) -> DatasetFiles:
    if isinstance(url, (list, tuple)):
        return _list_files(url, options.remote)
    if not isinstance(url, (str, os.PathLike)):
        raise OptionError(f"a dataset is opened by a path, a URL or a list of files, got {describe(url)}.")
    address: Any = url
    pattern = os.fspath(address)
    is_local = "://" not in pattern
    # '?' and '[' are common in URLs, and files may have any of these characters in their names.
    has_wildcards = re.search(r"[*?\[]" if is_local else r"\*", pattern) is not None and scheme_of(pattern) != "hf"
    if has_wildcards and not (is_local and Path(pattern).expanduser().exists()):
        return _match_files(pattern, options.remote)
    folder, file = split_file(address, options.remote)
    if isinstance(folder, HubFolder):
        tails = NodeTailCache(ShardCache(options.cache, options.cache_bytes))
        opened = import_module("quire.storage._hub_reader").open_split(folder, split, config, tails)  # rarely needed
        if isinstance(opened, HubFolder):
            return list_shards(opened, None, options, version)
        return DatasetFiles(opened.folder, opened.shards, infer_class=opened.infer_class)
    for name, value in (("split", split), ("config", config)):
        if value is not None:
            raise OptionError(
                f"{display_uri(folder.url)}: {name}={value!r} is an option of datasets on the Hugging Face Hub "
                "(hf://datasets/owner/name), and this is none. where=Split(...) selects a part of the rows."
            )
    return list_shards(folder, file, options, version)


def _match_files(pattern: str, remote: RemoteOptions) -> DatasetFiles:
    """Return the files that match a pattern: '*' and '?' within a name, '**' for folders of any depth."""
    parts = pattern.split("/")
    first = next(place for place, part in enumerate(parts) if re.search(r"[*?\[]", part))
    folder = open_folder("/".join(parts[:first]) or ("/" if pattern.startswith("/") else "."), remote)
    expression = compile_glob("/".join(parts[first:]))
    entries = [e for e in folder.list(tuple(SUFFIXES.values()), hidden=True) if expression.fullmatch(e.name)]
    if not entries:
        raise StorageNotFoundError(
            f"{display_uri(pattern)}: no file that ends with {' or '.join(SUFFIXES.values())} matches this pattern."
        )
    return DatasetFiles(folder, [Shard(entry.name, -1, entry.size) for entry in entries])


def _list_files(paths: Sequence[Any], remote: RemoteOptions) -> DatasetFiles:
    """Return the files of a list, in this order; they are in one store."""
    suffixes = tuple(SUFFIXES.values())
    other = [path for path in paths if not isinstance(path, (str, os.PathLike))]
    if other:
        raise OptionError(f"a dataset is opened by its path or address, or a list of them, got {describe(other[0])}.")
    files = [os.fspath(path) for path in paths]
    wrong = [file for file in files if not file.endswith(suffixes)]
    if not files or wrong:
        cause = f"{display_uri(wrong[0])!r} is none" if wrong else "this one is empty"
        raise OptionError(f"a list of files has paths that end with {' or '.join(suffixes)}, and {cause}.")
    urls = [file if "://" in file else str(Path(file).expanduser().absolute()) for file in files]
    if len(set(urls)) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        raise OptionError(f"a list of files has {display_uri(twice)} twice: its rows would come twice.")
    # The folder of the dataset is the deepest one that all files are in; they must share at least a bucket.
    parents = [url.split("/")[:-1] for url in urls]
    common = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, zip(*parents, strict=False))]
    if not common or (any("://" in url for url in urls) and len(common) < 3):
        raise OptionError(f"a list of files has files of one store, got {urls[0]!r} and {urls[-1]!r}.")
    folder = open_folder("/".join(common) or "/", remote)
    if isinstance(folder, HubFolder):  # all files of one commit
        folder = folder.pin()
        folder.files()
    names = [url[len("/".join(common)) + 1 :] for url in urls]
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        sizes = list(pool.map(folder.size, names))
    return DatasetFiles(folder, [Shard(name, -1, size) for name, size in zip(names, sizes, strict=True)])


def list_shards(folder: Folder, file: str | None, options: ReadOptions, version: VersionChoice) -> DatasetFiles:
    """Return the shards of a version of a folder, or else its plain files; or the one `file` of it."""
    if file is not None:
        return DatasetFiles(folder, [Shard(file, -1, folder.size(file))], file)
    versions = VersionLog(folder, options.remote)
    snapshot = versions.latest()
    if version is not None or snapshot is not None:
        if isinstance(version, datetime):
            snapshot = versions.resolve(None, version)
        elif version is not None or snapshot is None:
            snapshot = versions.resolve(version, None)
        return DatasetFiles(folder, snapshot.shards, snapshot=snapshot, is_pinned=version is not None)
    manifest = read_manifest(folder, options.remote)
    if not manifest.logs:
        return DatasetFiles(folder, list_plain_files(folder))
    snapshot = Snapshot(manifest.number, manifest.time, "write", manifest.shards)
    return DatasetFiles(folder, manifest.shards, snapshot=snapshot)


def _row_changes() -> Any:
    return import_module("quire.storage._row_changes")  # rarely needed


def _live_rows(shards: Sequence[Shard], snapshot: Snapshot | None) -> LiveRows | None:
    """Return the rows of shards that were not deleted; None if none was."""
    if snapshot is None or not snapshot.deletes:
        return None
    starts = np.cumsum([0, *(shard.rows for shard in shards)], dtype=np.int64)
    deleted = [
        start + snapshot.deleted_rows(shard.name)
        for start, shard in zip(starts.tolist(), shards, strict=False)
        if shard.name in snapshot.deletes
    ]
    return LiveRows(int(starts[-1]), np.concatenate(deleted)) if deleted else None


def split_file(url: str | os.PathLike[str], remote: RemoteOptions) -> tuple[Folder, str | None]:
    """Return the folder at an address and None; for one Parquet or Arrow file, its folder and its name."""
    folder = open_folder(url, remote)
    if isinstance(folder, HubFolder):
        return folder, None
    if not folder.url.endswith(tuple(SUFFIXES.values())):
        if Path(folder.url).is_file():
            raise StorageError(
                f"{display_uri(folder.url)}: this is a file, and a dataset is a folder, or a file that ends with "
                f"{' or '.join(SUFFIXES.values())}. Files of save_binary are read by load_binary."
            )
        return folder, None
    # Spark writes folders whose names end with '.parquet', so the suffix alone does not make it a file.
    parent, _, name = folder.url.rpartition("/")
    outside = open_folder(parent or "/", remote)
    return (outside, name) if outside.exists(name) else (folder, None)


def read_partitioned_schema(folder: Folder, shard: Shard) -> pa.Schema:
    """Return the Arrow schema of a shard, with a column for each folder 'key=value' that it is in."""
    schema = read_arrow_schema(folder, shard)
    for key, value in partition_values(shard.name).items():
        if key not in schema.names:
            schema = schema.append(pa.field(key, pa.int64() if isinstance(value, int) else pa.string()))
    return schema


def _find_class(folder: Folder, shards: Sequence[Shard]) -> type[Any]:
    """Return the class of the first shard: the one that wrote it if that is loaded, else one made of its schema."""
    if not shards:
        raise StorageError(
            f"{display_uri(folder.url)}: there is no complete shard to infer the class from. "
            "Pass it: document_type=Student."
        )
    schema = read_partitioned_schema(folder, shards[0])
    return loaded_class(schema) or class_from_arrow(schema, stored_class_name(schema))


def open_dataset(  # noqa: PLR0913 - by name
    url: Location,
    document_type: type[DocT] | None = None,
    *,
    columns: Iterable[str] | None = None,
    where: Where | None = None,
    extra: Extra = "ignore",
    split: str | None = None,
    config: str | None = None,
    version: int | str | None = None,
    as_of: datetime | None = None,
    options: ReadOptions | None = None,
    **more: Any,
) -> StoredDataset[DocT]:
    """Open the dataset in a folder: one that quire wrote, or any folder of Parquet or Arrow files.

    A single file, a pattern such as 's3://bucket/2024/*.parquet', and a list of files are datasets, too. A dataset on
    the Hugging Face Hub is 'hf://datasets/owner/name', with '@revision' if it is not the main branch; `split` and
    `config` name one of its splits and configs, and are needed if there are several.

    `version` is the number of a version or a tag, and `as_of` the time of the version; by default, it is the latest.

    Without `document_type`, the class is the one that wrote the dataset if it is loaded, else one made from the files.
    `columns` are the paths of the fields to read. `where` selects rows: a query as `DocumentArray.filter` takes it, a
    `Split`, or a function. Columns that the class has no field for are ignored, or refused with `extra='forbid'`, for
    which the footers of all shards are read. `more` are fields of `ReadOptions`: cache, cache_bytes, remote, verify.
    """
    names = [  # for suggestions
        *("columns", "where", "extra", "split", "config", "version", "as_of"),
        *ReadOptions.__dataclass_fields__,
    ]
    check_options("open_dataset", more, names)
    options = replace(options or ReadOptions(), **more)
    if document_type is not None and not is_document_type(document_type):
        raise SchemaError(f"open_dataset: document_type takes a document class, got {describe(document_type)}.")
    if version is not None and as_of is not None:
        raise OptionError("a version is chosen by version= or by as_of=, and not by both.")
    files = find_dataset(url, options, split, config, version if as_of is None else as_of)
    row_type: Any = document_type
    if row_type is None:
        row_type = _find_class(files.folder, files.shards) if files.infer_class is None else files.infer_class()
    dataset: StoredDataset[DocT] = StoredDataset[row_type](files, columns, where, options)
    dataset._refuse_unknown_columns(extra)
    return dataset


def load_parquet(document_type: type[Any], path: str | os.PathLike[str], **more: Any) -> Any:
    """Read all rows of a file or a dataset into a batch; of `BaseDocument`, the class is that of the file."""
    return open_dataset(path, None if document_type is BaseDocument else document_type, **more).read()
