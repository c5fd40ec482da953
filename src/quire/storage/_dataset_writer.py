"""Writing datasets: documents and batches into shards, with memory bounded by a row group."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

import pyarrow as pa
from typing_extensions import Self

from quire._protocols import is_document_type, is_stored
from quire.array import DocumentBatch, whole_number
from quire.codec import split_blocks
from quire.columns import Columns, StackOptions, stack
from quire.display import track
from quire.document import BaseDocument
from quire.errors import (
    DecodeError,
    DocumentTypeError,
    EncodeError,
    OptionError,
    ShardError,
    StorageError,
    check_options,
)
from quire.files import Folder, RemoteOptions, display_uri, open_folder
from quire.schema import Schema, parse_path
from quire.storage._layout import Layout, Paths, TensorStorage
from quire.storage._manifest import (
    LOGS,
    SUFFIXES,
    Log,
    Manifest,
    Shard,
    commit_path,
    find_strays,
    list_side_files,
    write_index,
    writer_name,
)
from quire.storage._schema_conversion import conform_fields, narrow_class, stored_class_name
from quire.storage._shard_reader import read_arrow_schema, recover_shard
from quire.storage._shard_writer import Format, ShardFile, TimestampChooser
from quire.storage._versions import Change, Snapshot, VersionLog, read_state
from quire.tensors import describe

DocT = TypeVar("DocT", bound=BaseDocument)
Mode = Literal["create", "append", "resume", "overwrite"]
MiB = 1 << 20
_COMPRESSIONS = ("none", "zstd", "snappy", "gzip", "brotli", "lz4")
_SMALL = MiB // 2
"""Record batches of fewer bytes are concatenated before they are written."""


@dataclass(frozen=True)
class WriteOptions:
    """How a dataset is written.

    `compression` maps columns of Parquet files ('image', 'meta.source') to 'zstd', 'none' and others; by default,
    tensors are not compressed, and everything else is with zstd. A shard is flushed to the disk before it becomes part
    of the dataset; with `durable=False` the system may write it later, which is faster, and loses nothing unless the
    machine itself stops.
    """

    format: Format = "parquet"
    mode: Mode = "create"
    shard_bytes: int = 128 * MiB
    group_bytes: int = MiB
    tensor_storage: TensorStorage = "fixed"
    compression: Mapping[str, str] | None = None
    durable: bool = True
    remote: RemoteOptions = field(default_factory=RemoteOptions)

    def __post_init__(self) -> None:
        if self.format not in SUFFIXES:
            raise OptionError(f"format={self.format!r}: use 'parquet' or 'arrow'.")
        if self.mode not in ("create", "append", "resume", "overwrite"):
            raise OptionError(f"mode={self.mode!r}: use 'create', 'append', 'resume' or 'overwrite'.")
        if min(whole_number("shard_bytes", self.shard_bytes), whole_number("group_bytes", self.group_bytes)) < 1:
            raise OptionError("shard_bytes and group_bytes are at least 1.")
        if self.format == "arrow" and (self.tensor_storage != "fixed" or self.compression):
            raise OptionError(
                "tensor_storage and compression are options of Parquet files; Arrow files are mapped into memory as "
                "they are. Pass format='parquet'."
            )
        if self.compression is not None and not isinstance(self.compression, Mapping):
            raise OptionError(
                f"compression={self.compression!r}: it maps columns to their compression, as in {{'image': 'zstd'}}."
            )
        for path, compression in (self.compression or {}).items():
            is_known = compression in _COMPRESSIONS
            if compression != "none" and not (is_known and pa.Codec.is_available(compression)):
                raise OptionError(f"compression of {path!r}: {compression!r} is not one of {', '.join(_COMPRESSIONS)}.")


class RecordBatchWriter:
    """Writes record batches of one layout into shards of about `shard_bytes`, and adds each to a log when complete."""

    def __init__(self, folder: Folder, layout: Layout, options: WriteOptions, log: Log) -> None:
        self.folder, self.layout, self.options, self._log = folder, layout, options, log
        for path in options.compression or {}:
            layout.schema.resolve(parse_path(path))
        self._timestamps = TimestampChooser(layout)
        self._shard: ShardFile | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write a record batch of the layout, in row groups of about `group_bytes`."""
        rows = count_rows_within(batch, self.options.group_bytes)
        for start in range(0, len(batch), rows):
            self._add(batch.slice(start, rows))

    def _add(self, batch: pa.RecordBatch) -> None:
        """Collect small record batches up to about the size of a row group, and write them as one."""
        # Every row group costs metadata, a checksum per column, and a request: a stream of small batches, or of single
        # documents, must not become as many row groups.
        size = batch.nbytes
        if self._waiting and self._waiting_bytes + size > self.options.group_bytes:
            self._flush()
        self._waiting.append(batch)
        self._waiting_bytes += size
        if self._waiting_bytes >= min(self.options.group_bytes, max(_SMALL, self.options.group_bytes // 2)):
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        whole = self._waiting[0] if len(self._waiting) == 1 else pa.concat_batches(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        whole = self._timestamps.convert(whole)
        # A file has one type for each column, so a column of datetimes that changes its type begins a new shard.
        fields = whole.schema if self._timestamps.applies else None
        if fields is not None and self._shard is not None and self._shard.fields != fields:
            self._finish_shard()
        self.open_shard(fields).write(whole)
        if self._shard is not None and self._shard.size >= self.options.shard_bytes:
            self._finish_shard()

    def open_shard(self, fields: pa.Schema | None = None) -> ShardFile:
        """Return the shard that is being written; a new one, for record batches with `fields`, if there is none.

        Even without rows, it is kept.
        """
        if self._shard is None:
            self._log.begin()
            name = self._log.shard_name(len(self._log.lines), SUFFIXES[self.options.format])
            compression, durable = self.options.compression or {}, self.options.durable
            self._shard = ShardFile(self.folder, name, self.layout, compression, fields=fields, durable=durable)
        return self._shard

    def _finish_shard(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._log.add(shard.finish())

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._finish_shard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon(error)
            return
        try:
            self.close()
        except BaseException as failure:
            self._abandon(failure)
            raise

    def _abandon(self, error: BaseException) -> None:
        if self._shard is not None:
            self._shard.abandon(error)
        self._log.withdraw()


class DatasetWriter(RecordBatchWriter, Generic[DocT]):
    """Writes documents and batches into the shards of a dataset; a shard is part of it as soon as it is complete.

    Shards that are appended to a dataset are part of it when the writer is closed, all at once.

    As a context manager, it writes the last shard at the end; after an exception, the incomplete shard is removed.
    """

    def __init__(
        self, url: str | os.PathLike[str], document_type: type[DocT], options: WriteOptions | None = None, **more: Any
    ) -> None:
        check_options("write_dataset", more, WriteOptions.__dataclass_fields__)
        options = replace(options or WriteOptions(), **more)
        layout = Layout(document_type.document_schema(), options.tensor_storage)
        folder = open_folder(url, options.remote)
        if Path(folder.url).is_file():
            raise StorageError(
                f"{display_uri(folder.url)}: this is a file, and a dataset is a folder. Write to another path."
            )
        super().__init__(folder, layout, options, Log.create(folder, replaces=options.mode == "overwrite"))
        self._existing = prepare_target(folder, options, self._log)
        if options.mode == "append" and self._existing.shards:
            self._check_compatible(self._existing.shards[-1])

    def _check_compatible(self, shard: Shard) -> None:
        """Raise an error if the class cannot read what is stored already: no class could read both."""
        try:
            fields = read_arrow_schema(self.folder, shard)
        except ShardError:
            return  # verify() reports damaged shards, and new ones are none the worse for it
        arrays = {field.name: (field, pa.array([], field.type)) for field in fields}
        try:
            self.layout.schema.check_related(arrays, stored_class_name(fields, ""))
            conform_fields(self.layout.codecs, arrays, self.layout.schema, None, 0)
        except DecodeError as error:
            raise StorageError(
                f"{display_uri(self.folder.url)}: {self.layout.schema.name} is not compatible with the stored "
                f"documents. {error} Append documents of the same class, give new fields defaults, or write to "
                "another folder."
            ) from error

    @property
    def rows_before(self) -> int:
        """The number of rows that the dataset had before this writer."""
        return 0 if self.options.mode == "overwrite" else sum(shard.rows for shard in self._existing.shards)

    def _finish_shard(self) -> None:
        if self._shard is not None and not self._log.lines:
            prepare_append(self.folder, self._existing, self.options)
        super()._finish_shard()

    def write(self, data: DocumentBatch[DocT] | Iterable[DocT]) -> None:
        """Write documents, or a batch of them."""
        items = [data] if isinstance(data, DocumentBatch) else data
        for columns in iter_columns(items, self.layout.schema, self.options.group_bytes):
            self.write_batch(self.layout.encode(columns))

    def close(self) -> None:
        """Write what is left; the dataset then has all of it."""
        self._flush()
        if not self._log.lines and (self._log.replaces or not self._existing.shards):
            self.open_shard()  # without rows, so that the dataset exists, and has a class
        self._finish_shard()
        if self._log.replaces:
            replace_dataset(self.folder, self._log, self.options.remote)
        elif self._log.lines:
            confirm_append(self.folder, self._log, self.options.remote, self._existing)


# --- datasets that exist already


def prepare_target(folder: Folder, options: WriteOptions, log: Log, *, can_resume: bool = True) -> Manifest:
    """Return what the folder has already, after checking that the mode allows it.

    With mode='resume', complete shards of writers that were killed are added to the log first. `can_resume` says
    whether the caller has that mode.
    """
    manifest = read_state(folder, options.remote)
    strays = find_strays(folder, manifest)
    if options.mode == "create" and (manifest.shards or strays.keys() - {""}):
        resume = " 'resume' to continue a write that was interrupted," if can_resume else ""
        raise StorageError(
            f"{display_uri(folder.url)}: there is a dataset already. Pass mode='append' to add to it,{resume} or "
            "'overwrite' to replace it."
        )
    if "" in strays:
        raise StorageError(
            f"{display_uri(folder.url)}: {strays[''][0].name} was not written by quire, and would not be a part of the "
            "dataset. Write to another folder."
        )
    if options.mode == "resume" and manifest.snapshot is not None:
        _check_rows_in_order(folder, manifest.snapshot, options.remote)
        return manifest
    if options.mode != "resume":
        return manifest
    # A file gets its name when it is complete, and its line in the log after that. A writer that was killed in between
    # has left a complete shard without a line: it is added here, so that none of its rows is written again.
    writers = {writer_name(name) for name in manifest.logs}
    shards = list(manifest.shards)
    for writer in sorted(strays):
        if writer not in writers:
            raise StorageError(
                f"{display_uri(folder.url)}: {strays[writer][0].name} is of a writer that was to replace the dataset, "
                "and was interrupted. Pass mode='overwrite' to replace it from the beginning."
            )
        for stray in strays[writer]:
            shards.append(recover_shard(folder, stray))
            log.begin()
            log.add(shards[-1])
    return replace(manifest, shards=tuple(shards))


def prepare_append(folder: Folder, existing: Manifest | None, options: WriteOptions) -> None:
    """Make the content of a dataset its first version, before it is appended to: the append is the next one."""
    if options.mode == "append" and existing is not None and existing.shards and existing.snapshot is None:
        VersionLog(folder, options.remote).adopt()


def replace_dataset(folder: Folder, log: Log, remote: RemoteOptions) -> None:
    """Publish a log that replaces all others, and delete what they list."""
    before = read_state(folder, remote)
    versions = VersionLog(folder, remote)
    names = {entry.name for entry in folder.list(tuple(SUFFIXES.values()))}
    if any(json.loads(line)["name"] not in names for line in log.lines):
        raise StorageError(
            f"{display_uri(folder.url)}: another writer has overwritten the dataset in the meantime. Write it again."
        )
    # Publishing the log is the moment of the replacement: readers see the old shards before, and the new ones after.
    # Old files are deleted last. A writer that is killed in between leaves files that no log lists, and old logs that
    # the new one has replaced: the next replacement removes them.
    # If the dataset has commits, the commit is that moment instead, and the log has no effect before it.
    logs = (*before.logs, *before.old_logs)
    log.publish(logs, before.number + 1 if before.shards else 1)
    if versions.is_marked():
        shards = [Shard.from_dict(json.loads(line)) for line in log.lines]
        head = versions.write(lambda head: _overwrite(folder, head, shards))
        for number in versions.numbers():
            if number < head.number:
                folder.delete(commit_path(number))
    after = read_state(folder, remote)
    write_index(folder, after)
    strays = find_strays(folder, after)
    # Files without a writer are not from quire, and stay.
    leftover = [shard.name for writer, shards in strays.items() if writer and writer < log.name for shard in shards]
    for name in (*(shard.name for shard in before.shards), *before.old_shards, *leftover):
        folder.delete(name)
    for side in list_side_files(folder, remote):
        if side.name.rpartition("/")[2] < log.name:
            folder.delete(side.name)
    for name in logs:
        folder.delete(f"{LOGS}/{name}")


def _overwrite(folder: Folder, head: Snapshot, shards: list[Shard]) -> Change:
    if head.tags:
        tags = ", ".join(map(repr, sorted(head.tags)))
        raise StorageError(
            f"{display_uri(folder.url)}: overwriting the dataset would remove the versions with the tags {tags}. Write "
            "to another folder, or remove the tags with untag(). Nothing was changed."
        )
    return Change("overwrite", shards, starts_anew=True)


def _check_rows_in_order(folder: Folder, snapshot: Snapshot, remote: RemoteOptions) -> None:
    """Raise an error unless the rows are those that were written, in that order: 'resume' skips as many."""
    versions = VersionLog(folder, remote)
    kinds = {version.kind for version in versions.versions()}
    if not kinds <= {"write", "append", "tag", "untag"} or snapshot.dropped:
        raise StorageError(
            f"{display_uri(folder.url)}: mode='resume' skips as many documents as the dataset has, and its rows have "
            "been changed since they were written. Pass mode='append', or upsert() the documents."
        )


def confirm_append(folder: Folder, log: Log, remote: RemoteOptions, existing: Manifest | None) -> None:
    """Make a log part of the dataset, unless another writer has replaced that since it was `existing`.

    `existing` is None if the dataset had no shards.
    """
    overwritten = StorageError(
        f"{display_uri(folder.url)}: another writer has overwritten the dataset in the meantime, and what was "
        "written here is not part of it. Write it again."
    )
    manifest = read_state(folder, remote)
    if log.name not in map(writer_name, manifest.logs):
        raise overwritten
    versions = VersionLog(folder, remote)
    if versions.is_marked():
        # The lines of this log count no more by themselves. Those that were written before the first commit may be
        # part of it.
        shards = [Shard.from_dict(json.loads(line)) for line in log.lines]

        def append(head: Snapshot) -> Change | None:
            names = {shard.name for shard in head.shards}
            before = 0 if existing is None or existing.snapshot is None else existing.number
            if head.overwritten > before:
                raise overwritten
            missing = [shard for shard in shards if shard.name not in names]
            return Change("append", missing) if missing else None

        versions.write(append)
    write_index(folder, manifest)


# --- documents to columns


def count_rows_within(batch: pa.RecordBatch, size: int) -> int:
    """Return the number of rows of a batch that have about `size` bytes."""
    # Up to half of it more is not split off: a row group of a few rows is slow to read.
    total = batch.nbytes
    return len(batch) or 1 if total <= size * 3 // 2 else max(1, len(batch) * size // total)


def iter_columns(items: Iterable[Any], schema: Schema, block_bytes: int) -> Iterator[Columns]:
    """Yield the columns of documents, mappings and batches; documents in blocks of about `block_bytes`."""
    options = StackOptions(shapes="ragged")
    document_type = schema.document_type
    for is_batch, run in groupby(items, lambda item: isinstance(item, DocumentBatch)):
        if is_batch:
            for batch in run:
                _check_type(document_type, batch.document_type, batch)
                if batch.document_type is not document_type:
                    raise EncodeError(
                        f"the shards hold documents of {schema.name}, got a batch of the subclass "
                        f"{batch.document_type.__name__}, whose other fields would be lost. Write it as a dataset of "
                        "its own."
                    )
                yield batch._columns
            continue
        documents = (_to_document(document_type, item) for item in run)
        for block in split_blocks(documents, block_bytes):
            yield stack(schema, block, options)


def _to_document(document_type: type[Any], item: Any) -> Any:
    if isinstance(item, Mapping):
        return document_type.model_validate(item)
    _check_type(document_type, type(item), item)
    return item


def _check_type(expected: type[Any], item_type: type[Any], item: Any) -> None:
    if not (is_document_type(item_type) and issubclass(item_type, expected)):
        raise DocumentTypeError(
            f"a dataset of {expected.__name__} takes its documents and batches, got {describe(item)}."
        )


def write_dataset(
    data: Iterable[Any],
    url: str | os.PathLike[str],
    document_type: type[Any] | None = None,
    options: WriteOptions | None = None,
    *,
    show_progress: bool | None = None,
    **more: Any,
) -> None:
    """Write documents or batches, from any iterable, as a dataset in a folder.

    `more` are fields of `WriteOptions`: format='parquet' or 'arrow', mode='create', 'append', 'resume' or 'overwrite',
    shard_bytes, ... With 'resume', as many documents are skipped as the dataset has already: a job that was interrupted
    continues where it stopped, if it passes the same documents again.
    """
    check_options("write_dataset", more, ["document_type", "show_progress", *WriteOptions.__dataclass_fields__])
    items, document_type = resolve_document_type(data, document_type)
    with DatasetWriter(url, document_type, options, **more) as writer:
        if writer.options.mode == "resume":
            items = _skip_rows(items, writer.rows_before)
        if isinstance(data, (list, tuple)):
            total: int | None = sum(map(rows_of, data))
        else:
            total = len(data) if isinstance(data, Sized) else None
        writer.write(track(items, "writing", total, show=show_progress, size=rows_of))


def rows_of(item: Any) -> int:
    """Return the number of rows of a batch; a document is one."""
    return len(item) if isinstance(item, DocumentBatch) else 1


def resolve_document_type(data: Any, document_type: type[Any] | None) -> tuple[Iterable[Any], type[Any]]:
    """Return the items, and their class: `document_type`, that of a typed container, or that of the first item.

    Of a stored dataset of which some columns are read, it is a class with these columns.
    """
    if document_type is not None and not is_document_type(document_type):
        raise OptionError(f"document_type: expected a document class, as document_type=Student, got {document_type!r}.")
    if document_type is None and is_stored(data):
        schema: Schema = data.schema  # type: ignore[attr-defined]
        paths: Paths = data._paths  # type: ignore[attr-defined]
        if paths is not None and any((name,) not in paths for name in schema.document_type.model_fields):
            narrowed = narrow_class(schema, paths)
            batches: Iterator[DocumentBatch[Any]] = data.iter_batches()  # type: ignore[attr-defined]
            return (batch.with_columns(narrowed) for batch in batches), narrowed
    document_type = document_type or getattr(type(data), "document_type", None)
    items = [data] if isinstance(data, DocumentBatch) else data
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, Mapping, BaseDocument)):
        raise OptionError(f"expected documents, batches, or a generator of either, got {describe(data)}.")
    if document_type is None or document_type is BaseDocument:
        iterator = iter(items)
        first = next(iterator, None)
        document_type = first.document_type if isinstance(first, DocumentBatch) else type(first)
        if not is_document_type(document_type):
            first_item = "there are no documents" if first is None else f"the first item is {describe(first)}"
            raise OptionError(f"a dataset needs the documents' class: pass document_type=Student ({first_item}).")
        items = chain([first], iterator)
    return items, document_type


def _skip_rows(items: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield the items after the first `count` documents."""
    iterator = iter(items)
    while count:
        item = next(iterator, None)
        if item is None:
            return
        if rows_of(item) > count:
            yield item[count:]
            count = 0
        else:
            count -= rows_of(item)
    yield from iterator


# --- arrays and batches in one call


def save_parquet(data: Any, document_type: type[Any], path: str | os.PathLike[str], **more: Any) -> None:
    """Write the documents of an array or a batch: to one plain file if the path ends with .parquet, else a dataset."""
    if not os.fspath(path).endswith(".parquet"):
        write_dataset(data, path, document_type, **more)
        return
    check_options("save_parquet", more, WriteOptions.__dataclass_fields__)
    options = WriteOptions(**more)
    if options.mode != "create" or options.format != "parquet":
        raise OptionError(
            "a single Parquet file is always replaced: mode and format are options of datasets in folders."
        )
    save_shard(data, document_type, path, options)


def save_shard(data: Any, document_type: type[Any], path: str | os.PathLike[str], options: WriteOptions) -> None:
    """Write documents or batches, from any iterable, to one plain Parquet or Arrow file.

    A file has one type for each column. Datetimes are timestamps if all of them have no zone, or are in UTC. Documents
    of an iterator are written as they come, before that is known, and have the general type.
    """
    items = [data] if hasattr(data, "_columns") else data
    layout = Layout(document_type.document_schema(), options.tensor_storage)
    if iter(items) is items or not _write_file(items, layout, path, options, TimestampChooser(layout)):
        _write_file(items, layout, path, options, None)


def _write_file(
    items: Iterable[Any],
    layout: Layout,
    path: str | os.PathLike[str],
    options: WriteOptions,
    timestamps: TimestampChooser | None,
) -> bool:
    """Write a file; return False, and write nothing, if the chosen types of datetimes do not fit all of them."""
    parent, slash, name = os.fspath(path).rpartition("/")
    folder, compression = open_folder(parent + slash or ".", options.remote), options.compression or {}
    file: ShardFile | None = None
    try:
        for columns in iter_columns(items, layout.schema, options.group_bytes):
            batch = layout.encode(columns)
            rows = count_rows_within(batch, options.group_bytes)
            for start in range(0, len(batch), rows):
                part = batch.slice(start, rows)
                if timestamps is not None:
                    part = timestamps.convert(part)
                file = file or ShardFile(folder, name, layout, compression, fields=part.schema)
                if file.fields != part.schema:
                    file.abandon(EncodeError("a column has datetimes of several kinds"))
                    return False
                file.write(part)
        file = file or ShardFile(folder, name, layout, compression)
    except BaseException as error:
        if file is not None:
            file.abandon(error)
        raise
    file.finish()
    return True
