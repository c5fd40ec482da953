"""Writing datasets: documents, batches or what a generator gives, in shards, with memory bounded by a row group."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

import pyarrow as pa
from typing_extensions import Self

from quire._typing import is_document_type
from quire.array import DocumentBatch
from quire.codec._bytes import in_blocks
from quire.columns import Columns, StackOptions, stack
from quire.display import tracked
from quire.document import BaseDocument
from quire.errors import DocumentTypeError, OptionError, StorageError
from quire.files import Folder, RemoteOptions, open_folder
from quire.storage._layout import Layout, TensorStorage
from quire.storage._manifest import SUFFIXES, Log, Manifest, read_manifest
from quire.storage._sink import Format, ShardFile
from quire.tensors import describe

DocT = TypeVar("DocT", bound=BaseDocument)
Mode = Literal["create", "append", "resume", "overwrite"]
MiB = 1 << 20
_SMALL = MiB // 2
"""Record batches of fewer bytes are joined before they are written."""


@dataclass(frozen=True)
class WriteOptions:
    """How a dataset is written.

    `compression` maps columns of Parquet files ('image', 'meta.source') to 'zstd', 'none' and their like; by default
    tensors are not packed, and everything else is with zstd.
    """

    format: Format = "parquet"
    mode: Mode = "create"
    shard_bytes: int = 128 * MiB
    group_bytes: int = 4 * MiB
    tensor_storage: TensorStorage = "fixed"
    compression: Mapping[str, str] | None = None
    remote: RemoteOptions = field(default_factory=RemoteOptions)

    def __post_init__(self) -> None:
        if self.format not in SUFFIXES:
            raise OptionError(f"format={self.format!r}: use 'parquet' or 'arrow'.")
        if self.mode not in ("create", "append", "resume", "overwrite"):
            raise OptionError(f"mode={self.mode!r}: use 'create', 'append', 'resume' or 'overwrite'.")
        if min(self.shard_bytes, self.group_bytes) < 1:
            raise OptionError("shard_bytes and group_bytes are at least 1.")
        if self.tensor_storage != "fixed" and self.format == "arrow":
            raise OptionError("tensor_storage is about Parquet, which other readers read; Arrow shards are 'fixed'.")


class DatasetWriter(Generic[DocT]):
    """Writes documents and batches into the shards of a dataset; a shard counts as soon as it is whole.

    As a context manager, it commits what is left at the end; after an exception, the shard that was not whole is gone.
    """

    def __init__(
        self, url: str | os.PathLike[str], schema: type[DocT], options: WriteOptions | None = None, **more: Any
    ) -> None:
        self.options = replace(options or WriteOptions(), **more)
        self.layout = Layout(schema.document_schema(), self.options.tensor_storage)
        self.folder: Folder = open_folder(url, self.options.remote)
        self._old = read_manifest(self.folder, self.options.remote)
        _check_empty(self.folder, self._old, self.options.mode)
        self._log = Log.create(self.folder, self._old.logs if self.options.mode == "overwrite" else ())
        self._shard: ShardFile | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._shards = self._bytes = 0

    @property
    def rows_before(self) -> int:
        """The rows that the dataset had before this writer."""
        return 0 if self.options.mode == "overwrite" else sum(shard.rows for shard in self._old.shards)

    def write(self, data: DocumentBatch[DocT] | Iterable[DocT]) -> None:
        """Take documents, or a batch of them."""
        for columns in columns_in([data] if isinstance(data, DocumentBatch) else data, self):
            self._take(self.layout.encode(columns))

    def _take(self, batch: pa.RecordBatch) -> None:
        rows = _rows_within(batch, self.options.group_bytes)
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
        if self._shard is None:
            name = f"{self._log.name}-{self._shards:05d}{SUFFIXES[self.options.format]}"
            self._shard = ShardFile(self.folder, name, self.layout, {"compression": self.options.compression})
        self._shard.write(whole)
        if self._shard.size >= self.options.shard_bytes:
            self._commit()

    def _commit(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._log.add(shard.finish())
            self._shards += 1

    def close(self) -> None:
        """Write what is left; the dataset then has all of it."""
        self._flush()
        self._commit()
        if self._log.replaces:
            self._log.publish()
            for shard in self._old.shards:
                self.folder.delete(shard.name)
            for name in self._old.logs:
                self.folder.delete(f"_quire/{name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or error is None:
            self.close()
        elif self._shard is not None:
            self._shard.abandon(kind, error, traceback)


def _check_empty(folder: Folder, old: Manifest, mode: str) -> None:
    if mode == "create" and (old.shards or folder.list(tuple(SUFFIXES.values()))):
        raise StorageError(
            f"{folder.url}: there is a dataset already. Pass mode='append' to add to it, 'resume' to go on with a "
            "write that was broken off, or 'overwrite' to replace it."
        )


def _rows_within(batch: pa.RecordBatch, size: int) -> int:
    """How many rows of a batch make about so many bytes."""
    total = batch.nbytes
    return len(batch) or 1 if total <= size * 3 // 2 else max(1, len(batch) * size // total)


def columns_in(items: Iterable[Any], writer: DatasetWriter[Any]) -> Iterator[Columns]:
    """The columns of documents, mappings and batches as they come."""
    schema = writer.layout.schema
    options = StackOptions(shapes="ragged")

    def stacked(documents: Iterable[Any]) -> Iterator[Columns]:
        for block in in_blocks(documents, writer.options.group_bytes):
            yield stack(schema, block, options)

    pending: list[Any] = []
    for item in items:
        if isinstance(item, DocumentBatch):
            yield from stacked(pending)
            pending = []
            _check_type(schema.document_type, item.document_type, item)
            yield item._columns
        else:
            pending.append(_document(schema.document_type, item))
            if len(pending) == 512:
                yield from stacked(pending)
                pending = []
    yield from stacked(pending)


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
    items, document_type = _typed(data, schema)
    with DatasetWriter(url, document_type, options, **more) as writer:
        if writer.options.mode == "resume":
            items = _rest(items, writer.rows_before)
        total = len(data) if hasattr(data, "__len__") else None
        shown = tracked(items, "writing", None if isinstance(data, DocumentBatch) else total, show=show_progress)
        writer.write(shown)


def _typed(data: Any, schema: type[Any] | None) -> tuple[Iterable[Any], type[Any]]:
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
