"""Writing datasets: documents, batches or what a generator gives, in shards, with memory bounded by a row group."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

import pyarrow as pa
from typing_extensions import Self

from quire._protocols import is_document_type
from quire.array import DocumentBatch
from quire.codec._bytes import in_blocks
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
from quire.files import Folder, RemoteOptions, open_folder, shown
from quire.schema import Schema
from quire.storage._layout import Layout, TensorStorage
from quire.storage._manifest import (
    LOGS,
    SUFFIXES,
    Log,
    Manifest,
    Shard,
    find_strays,
    read_manifest,
    write_index,
    writer_name,
)
from quire.storage._schema_conversion import conform_fields
from quire.storage._shard_reader import read_arrow_schema, recover_shard
from quire.storage._shard_writer import Format, ShardFile, parquet_options
from quire.tensors import describe

DocT = TypeVar("DocT", bound=BaseDocument)
Mode = Literal["create", "append", "resume", "overwrite"]
MiB = 1 << 20
_CODECS = ("none", "zstd", "snappy", "gzip", "brotli", "lz4")
_SMALL = MiB // 2
"""Record batches of fewer bytes are joined before they are written."""


@dataclass(frozen=True)
class WriteOptions:
    """How a dataset is written.

    `compression` maps columns of Parquet files ('image', 'meta.source') to 'zstd', 'none' and their like; by default
    tensors are not packed, and everything else is with zstd. A shard is on the disk when it counts; with
    `durable=False` the system may write it later, which is faster, and loses nothing unless the machine itself stops.
    """

    format: Format = "parquet"
    mode: Mode = "create"
    shard_bytes: int = 128 * MiB
    group_bytes: int = 4 * MiB
    tensor_storage: TensorStorage = "fixed"
    compression: Mapping[str, str] | None = None
    durable: bool = True
    remote: RemoteOptions = field(default_factory=RemoteOptions)

    def __post_init__(self) -> None:
        if self.format not in SUFFIXES:
            raise OptionError(f"format={self.format!r}: use 'parquet' or 'arrow'.")
        if self.mode not in ("create", "append", "resume", "overwrite"):
            raise OptionError(f"mode={self.mode!r}: use 'create', 'append', 'resume' or 'overwrite'.")
        if min(self.shard_bytes, self.group_bytes) < 1:
            raise OptionError("shard_bytes and group_bytes are at least 1.")
        if self.format == "arrow" and (self.tensor_storage != "fixed" or self.compression):
            raise OptionError(
                "tensor_storage and compression are about Parquet files; those of Arrow are mapped into memory as they "
                "are. Pass format='parquet'."
            )
        for path, how in (self.compression or {}).items():
            if how != "none" and (how not in _CODECS or not pa.Codec.is_available(how)):
                raise OptionError(f"compression of {path!r}: {how!r} is none of {', '.join(_CODECS)}.")


class DatasetWriter(Generic[DocT]):
    """Writes documents and batches into the shards of a dataset; a shard counts as soon as it is whole.

    As a context manager, it commits what is left at the end; after an exception, the shard that was not whole is gone.
    """

    def __init__(
        self, url: str | os.PathLike[str], schema: type[DocT], options: WriteOptions | None = None, **more: Any
    ) -> None:
        check_options("write_dataset", more, WriteOptions.__dataclass_fields__)
        self.options = replace(options or WriteOptions(), **more)
        self.layout = Layout(schema.document_schema(), self.options.tensor_storage)
        self._parquet_options = parquet_options(self.layout, self.options.compression or {})
        self.folder: Folder = open_folder(url, self.options.remote)
        _check_no_file(self.folder)
        self._log = Log.create(self.folder, replaces=self.options.mode == "overwrite")
        self._old = prepare_target(self.folder, self.options, self._log)
        if self.options.mode == "append" and self._old.shards:
            _check_goes_with(self.folder, self._old.shards[-1], self.layout)
        self._shard: ShardFile | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0

    @property
    def rows_before(self) -> int:
        """The rows that the dataset had before this writer."""
        return 0 if self.options.mode == "overwrite" else sum(shard.rows for shard in self._old.shards)

    def write(self, data: DocumentBatch[DocT] | Iterable[DocT]) -> None:
        """Take documents, or a batch of them."""
        items = [data] if isinstance(data, DocumentBatch) else data
        for columns in iter_columns(items, self.layout.schema, self.options.group_bytes):
            self._take(self.layout.encode(columns))

    def _take(self, batch: pa.RecordBatch) -> None:
        rows = count_rows_within(batch, self.options.group_bytes)
        for start in range(0, len(batch), rows):
            self._group(batch.slice(start, rows))

    def _group(self, part: pa.RecordBatch) -> None:
        """Collect record batches up to about the size of a row group, and write them as one."""
        size = part.nbytes
        if self._waiting and self._bytes + size > self.options.group_bytes:
            self._flush()
        self._waiting.append(part)
        self._bytes += size
        if self._bytes >= min(self.options.group_bytes, max(_SMALL, self.options.group_bytes // 2)):
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        whole = self._waiting[0] if len(self._waiting) == 1 else pa.concat_batches(self._waiting)
        self._waiting, self._bytes = [], 0
        self._open_shard().write(whole)
        if self._shard is not None and self._shard.size >= self.options.shard_bytes:
            self._commit()

    def _open_shard(self) -> ShardFile:
        if self._shard is None:
            self._log.begin()
            name = self._log.shard_name(len(self._log.lines), SUFFIXES[self.options.format])
            self._shard = ShardFile(self.folder, name, self.layout, self._parquet_options, durable=self.options.durable)
        return self._shard

    def _commit(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._log.add(shard.finish())

    def close(self) -> None:
        """Write what is left; the dataset then has all of it."""
        self._flush()
        if not self._log.lines and (self._log.replaces or not self._old.shards):
            self._open_shard()  # without rows, so that the dataset is there, and tells of its class
        self._commit()
        if self._log.replaces:
            replace_dataset(self.folder, self._log, self.options.remote)
        elif self._log.lines:
            confirm_append(self.folder, self._log, self.options.remote)

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


def _check_no_file(folder: Folder) -> None:
    if Path(folder.url).is_file():
        raise StorageError(
            f"{shown(folder.url)}: there is a file already, and a dataset is a folder. Write to another."
        )


def prepare_target(folder: Folder, options: WriteOptions, log: Log) -> Manifest:
    """What there is already, if the mode goes with it."""
    old = read_manifest(folder, options.remote)
    found = find_strays(folder, old)
    if options.mode == "create" and (old.shards or found.keys() - {""}):
        raise StorageError(
            f"{shown(folder.url)}: there is a dataset already. Pass mode='append' to add to it, 'resume' to go on with "
            "a write that was broken off, or 'overwrite' to replace it."
        )
    if "" in found:
        raise StorageError(
            f"{shown(folder.url)}: {found[''][0].name} was not written by quire, and would not be a part of the "
            "dataset. Write to another folder."
        )
    return old if options.mode != "resume" else _resumed(folder, old, found, log)


def _check_goes_with(folder: Folder, shard: Shard, layout: Layout) -> None:
    """Whether the class that is to be appended could read what is there; else no class could read both."""
    try:
        fields = read_arrow_schema(folder, shard)
    except ShardError:
        return  # verify() tells of a damaged shard, and new ones are none the worse for it
    found = {field.name: (field, pa.array([], field.type)) for field in fields}
    try:
        conform_fields(layout.codecs, found, layout.schema, None, 0)
    except DecodeError as error:
        raise StorageError(
            f"{shown(folder.url)}: {layout.schema.name} does not go with the documents that are there. {error} Append "
            "documents of the same class, give new fields defaults, or write to another folder."
        ) from error


def _resumed(folder: Folder, old: Manifest, found: Mapping[str, list[Shard]], log: Log) -> Manifest:
    """With the shards that are whole, and whose writer was killed before it could say so."""
    writers = {writer_name(name) for name in old.logs}
    shards = list(old.shards)
    for writer in sorted(found):
        if writer not in writers:
            raise StorageError(
                f"{shown(folder.url)}: {found[writer][0].name} is of a writer that was to replace the dataset, and was "
                "broken off. Pass mode='overwrite' to do so from the beginning."
            )
        for stray in found[writer]:
            shards.append(recover_shard(folder, stray))
            log.begin()
            log.add(shards[-1])
    return replace(old, shards=tuple(shards))


def replace_dataset(folder: Folder, log: Log, remote: RemoteOptions) -> None:
    """Let the log take the place of all others, and remove what they told of."""
    now = read_manifest(folder, remote)
    names = {entry.name for entry in folder.list(tuple(SUFFIXES.values()))}
    if any(json.loads(line)["name"] not in names for line in log.lines):
        raise StorageError(
            f"{shown(folder.url)}: another writer has overwritten the dataset meanwhile. Write it again."
        )
    logs = (*now.logs, *now.old_logs)
    log.publish(logs)
    after = read_manifest(folder, remote)
    write_index(folder, after)
    left = [
        shard.name for writer, shards in find_strays(folder, after).items() if writer < log.name for shard in shards
    ]
    for name in (*(shard.name for shard in now.shards), *now.old_shards, *left):
        folder.delete(name)
    for name in logs:
        folder.delete(f"{LOGS}/{name}")


def confirm_append(folder: Folder, log: Log, remote: RemoteOptions) -> None:
    now = read_manifest(folder, remote)
    if log.name not in map(writer_name, now.logs):
        raise StorageError(
            f"{shown(folder.url)}: another writer has overwritten the dataset meanwhile, and what was written here is "
            "no part of it. Write it again."
        )
    write_index(folder, now)


def count_rows_within(batch: pa.RecordBatch, size: int) -> int:
    """How many rows of a batch make about so many bytes."""
    total = batch.nbytes
    return len(batch) or 1 if total <= size * 3 // 2 else max(1, len(batch) * size // total)


def iter_columns(items: Iterable[Any], schema: Schema, block_bytes: int) -> Iterator[Columns]:
    """The columns of documents, mappings and batches as they come; documents in blocks of about so many bytes."""
    options = StackOptions(shapes="ragged")

    for is_batch, run in groupby(items, lambda item: isinstance(item, DocumentBatch)):
        if is_batch:
            yield from (_batch_columns(schema, batch) for batch in run)
            continue
        documents = (_document(schema.document_type, item) for item in run)
        for block in in_blocks(documents, block_bytes):
            yield stack(schema, block, options)


def _batch_columns(schema: Schema, batch: DocumentBatch[Any]) -> Columns:
    _check_type(schema.document_type, batch.document_type, batch)
    if batch.document_type is not schema.document_type:
        raise EncodeError(
            f"the shards hold documents of {schema.name}, got a batch of the subclass {batch.document_type.__name__}, "
            "whose other fields would be lost. Write it as a dataset of its own."
        )
    return batch._columns


def _document(document_type: type[Any], item: Any) -> Any:
    if isinstance(item, Mapping):
        return document_type.model_validate(item)
    _check_type(document_type, type(item), item)
    return item


def _check_type(wanted: type[Any], found: type[Any], item: Any) -> None:
    if not (is_document_type(found) and issubclass(found, wanted)):
        raise DocumentTypeError(
            f"a dataset of {wanted.__name__} takes its documents and batches, got {describe(item)}."
        )


def write_dataset(
    data: Iterable[Any],
    url: str | os.PathLike[str],
    schema: type[Any] | None = None,
    options: WriteOptions | None = None,
    *,
    show_progress: bool | None = None,
    **more: Any,
) -> None:
    """Write documents, batches, or what a generator gives of them, as a dataset in a folder.

    `more` are fields of `WriteOptions`: format='parquet' or 'arrow', mode='create', 'append', 'resume' or 'overwrite',
    shard_bytes, ... With 'resume', as many documents are passed over as the dataset has already: so a job that was
    broken off goes on where it was, if it gives the same documents again.
    """
    items, document_type = resolve_document_type(data, schema)
    with DatasetWriter(url, document_type, options, **more) as writer:
        if writer.options.mode == "resume":
            items = _rest(items, writer.rows_before)
        writer.write(track(items, "writing", _total(data), show=show_progress, size=rows_of))


def rows_of(item: Any) -> int:
    """The rows of a batch; a document is one."""
    return len(item) if isinstance(item, DocumentBatch) else 1


def _total(data: Any) -> int | None:
    """How many rows there will be, where that is known."""
    if isinstance(data, (list, tuple)):
        return sum(map(rows_of, data))
    return len(data) if isinstance(data, Sized) else None


def resolve_document_type(data: Any, schema: type[Any] | None) -> tuple[Iterable[Any], type[Any]]:
    if schema is not None and not is_document_type(schema):
        raise OptionError(f"schema: expected a document class, as schema=Student, got {schema!r}.")
    known = schema or getattr(type(data), "document_type", None)
    items = [data] if isinstance(data, DocumentBatch) else data
    if known is None or known is BaseDocument:
        iterator = iter(items)
        first = next(iterator, None)
        known = first.document_type if isinstance(first, DocumentBatch) else type(first)
        if not is_document_type(known):
            raise OptionError("a dataset needs the documents' class: pass schema=Student.")
        items = _chained(first, iterator)
    return items, known


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _rest(items: Iterable[Any], done: int) -> Iterator[Any]:
    """What comes after so many documents."""
    iterator = iter(items)
    while done:
        item = next(iterator, None)
        if item is None:
            return
        if isinstance(item, DocumentBatch):
            if len(item) > done:
                yield item[done:]
                done = 0
            else:
                done -= len(item)
        else:
            done -= 1
    yield from iterator
