"""Reading files into shards: the driver plans which worker reads what, and the same code reads on every engine."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
from pydantic_core import from_json as parse_json

from quire._extra_fields import Extra, check_extra
from quire.codec import CsvOptions, iter_csv, iter_ndjson, rows_from_json
from quire.distributed._encoding import DocumentLayout, Encoder, RowResult, layout_from_arrow
from quire.distributed._sources import (
    PARTITION_BYTES,
    FileRef,
    Paths,
    PieceReader,
    TextPiece,
    assign_to_partitions,
    find_files,
    is_pattern,
    split_text_file,
)
from quire.distributed._stages import PartitionStage
from quire.documents import Document, address_field, content_field
from quire.errors import DecodeError, OptionError, StorageError, StorageNotFoundError
from quire.files import Folder, RemoteOptions, display_uri, guess_type
from quire.storage import (
    SUFFIXES,
    ReadOptions,
    Shard,
    ShardCache,
    ShardReader,
    count_rows,
    find_dataset,
    local_file,
    partition_values,
    read_arrow_schema,
    read_block_rows,
    read_partitioned_schema,
    refuse_unknown_columns,
    shard_errors,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FOOTER_THREADS = 16
_CSV_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz")
_MAX_NAMED = 4  # paths named in one message
_LARGE_BYTES = 1 << 16  # a larger file is taken to have rows
_INFERENCE_BYTES = 1 << 20
"""How much of a file is read to infer a class from it."""


FileKind = Literal["csv", "json", "binary"]
"""Rows of CSV files, objects of JSON files, or a document for each file."""


@dataclass(frozen=True)
class FileOptions:
    """How files are read."""

    delimiter: str | None = None
    encoding: str = "utf-8"
    extra: Extra = "forbid"
    """Whether fields and columns that the class does not have are errors, or ignored."""
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    allow_empty: bool = False
    """Whether there may be no files, or none with rows."""

    @property
    def csv(self) -> CsvOptions:
        return CsvOptions(self.delimiter, encoding=self.encoding)


class PartitionPlan(NamedTuple):
    """What is to be read: by which stage, in how many partitions, in which layout, and how many rows."""

    stage: ReadShards | ReadFiles
    partitions: int
    layout: DocumentLayout
    rows: int | None = None

    def digest(self) -> str:
        """Return a digest of the names and sizes of all files, and of how they are divided."""
        pieces: list[Any]
        if isinstance(self.stage, ReadShards):
            pieces = [
                [(piece.folder.url, piece.shard.name, piece.shard.bytes, tuple(piece.groups)) for piece in part]
                for part in self.stage.pieces
            ]
        else:
            pieces = [
                [(piece.file.url, piece.start, piece.stop, piece.lines, piece.rows) for piece in part]
                for part in self.stage.files
            ]
        return hashlib.blake2b(repr(pieces).encode(), digest_size=16).hexdigest()


def row_ids(url: str, first: int, rows: int) -> list[str]:
    """Return ids for rows of a file that has none: the same ones whenever and wherever it is read."""
    return [hashlib.blake2b(f"{url}\0{row}".encode(), digest_size=16).hexdigest() for row in range(first, first + rows)]


# --- Parquet and Arrow


class ShardPiece(NamedTuple):
    """Some row groups of a shard, and the number of the first row."""

    folder: Folder
    shard: Shard
    groups: range
    first: int
    deleted: NDArray[np.int64] | None = None
    """The deleted rows of the shard, if there are any."""

    @property
    def size(self) -> int:
        """The approximate number of bytes."""
        rows = sum(self.shard.groups[group] for group in self.groups)
        return self.shard.bytes * rows // max(self.shard.rows, 1)


@dataclass(frozen=True)
class ReadShards(PartitionStage):
    """Read the rows of Parquet and Arrow files."""

    pieces: Sequence[Sequence[ShardPiece]]
    target: DocumentLayout

    @property
    def schema(self) -> pa.Schema:
        return self.target.fields

    def work(self, partition: int, _: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        for piece in self.pieces[partition]:
            yield from self._read(piece)

    def _read(self, piece: ShardPiece) -> Iterator[pa.RecordBatch]:
        reader = ShardReader(piece.folder, self.target.layout, ShardCache(max_bytes=1))  # too small to keep anything
        url, row = piece.folder.join(piece.shard.name), piece.first
        lacks_ids = self.target.has_text_id and "id" not in partition_values(piece.shard.name)
        with shard_errors(piece.folder, piece.shard):
            for batch in reader.read_raw(piece.shard, piece.groups):
                rows = len(batch)
                if lacks_ids and "id" not in batch.schema.names:
                    schema = batch.schema.append(pa.field("id", pa.string(), nullable=False))
                    ids = pa.array(row_ids(url, row, rows), pa.string())
                    batch = pa.RecordBatch.from_arrays([*batch.columns, ids], schema=schema)  # noqa: PLW2901
                if piece.deleted is not None:
                    first, last = np.searchsorted(piece.deleted, [row, row + rows])
                    live = np.delete(np.arange(rows), piece.deleted[first:last] - row)
                    batch = batch.take(pa.array(live)) if last > first else batch  # noqa: PLW2901
                row += rows
                yield reader.conform(batch, piece.shard)


def _no_class_error() -> StorageError:
    return StorageError("there is no file to infer the class of the documents from. Pass document_type=...")


def _no_rows_error(paths: Paths) -> OptionError:
    places = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    named = ", ".join(display_uri(os.fspath(path)) for path in places[:_MAX_NAMED])
    more = f" and {len(places) - _MAX_NAMED} more" if len(places) > _MAX_NAMED else ""
    return OptionError(f"{named}{more}: there are no rows to read. Pass allow_empty=True if there may be none.")


def plan_parquet(
    paths: Paths,
    document_type: type[Any] | None,
    columns: Iterable[str] | None,
    partitions: int | None,
    workers: int,
    options: FileOptions,
) -> PartitionPlan:
    """Plan how to read Parquet or Arrow files, or a dataset, in pieces of whole row groups."""
    extra = options.extra
    check_extra(extra)
    files = _find_shards(paths, options.remote, allow_empty=options.allow_empty)
    # Many at a time: each footer is a small request, which may take long on an object store.
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        shards = list(pool.map(lambda item: (item[0], _load_groups(item[0], item[1])), files))
    deleted = [item[2] for item in files]
    rows = sum(shard.rows for _, shard in shards) - sum(len(gone) for gone in deleted if gone is not None)
    if not rows and not options.allow_empty:
        raise _no_rows_error(paths)
    if document_type is None and not shards:
        raise _no_class_error()
    layout = DocumentLayout(document_type) if document_type else layout_from_arrow(read_partitioned_schema(*shards[0]))
    if "forbid" in (extra, layout.document_type.__quire_extra__):
        for folder, shard in shards:
            where = display_uri(folder.join(shard.name))
            refuse_unknown_columns(
                layout.document_type.document_schema(), read_arrow_schema(folder, shard), extra, where
            )
    layout = layout if columns is None else layout.select(columns)
    # Each row group is assigned by itself, so that partitions have about the same size; neighbours are merged again.
    pieces = [
        ShardPiece(folder, shard, range(group, group + 1), sum(shard.groups[:group]), gone)
        for (folder, shard), gone in zip(shards, deleted, strict=True)
        for group in range(len(shard.groups))
    ]
    parts = [
        _merge_pieces(part)
        for part in assign_to_partitions(pieces, [piece.size for piece in pieces], partitions, workers)
    ]
    return PartitionPlan(ReadShards(parts, layout), len(parts), layout, rows)


def _find_shards(
    paths: Paths, remote: RemoteOptions, *, allow_empty: bool
) -> list[tuple[Folder, Shard, NDArray[np.int64] | None]]:
    """Return the shards of a dataset that quire wrote, with their deleted rows, or files."""
    if isinstance(paths, (str, os.PathLike)) and not is_pattern(paths):
        try:
            dataset = find_dataset(paths, ReadOptions(remote=remote))
        except StorageNotFoundError:
            if allow_empty:
                return []
            raise
        return [(dataset.folder, shard, dataset.deleted_rows(shard)) for shard in dataset.shards]
    files = find_files(paths, tuple(SUFFIXES.values()), remote, allow_empty=allow_empty)
    return [(file.folder, Shard(file.name, -1, file.size), None) for file in files]


def _load_groups(folder: Folder, shard: Shard) -> Shard:
    """Return a shard with the rows of its row groups, from its block table or its footer."""
    if shard.table is not None:
        return replace(shard, groups=read_block_rows(folder, shard))
    return shard if shard.groups or not shard.rows else count_rows(folder, replace(shard, rows=-1))


def _merge_pieces(pieces: Sequence[ShardPiece]) -> list[ShardPiece]:
    """Merge neighbours, so that a file is opened once."""
    merged: list[ShardPiece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last is not None and last.shard is piece.shard and last.groups.stop == piece.groups.start:
            merged[-1] = last._replace(groups=range(last.groups.start, piece.groups.stop))
        else:
            merged.append(piece)
    return merged


# --- files of text, and files as they are


@dataclass(frozen=True)
class ReadFiles(PartitionStage):
    """Read the documents in text files (`kind` 'csv' or 'json'), or a document for each file ('binary')."""

    kind: FileKind
    files: Sequence[Sequence[TextPiece]]
    target: DocumentLayout
    options: FileOptions

    @property
    def schema(self) -> pa.Schema:
        return self.target.fields

    def work(self, partition: int, _: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        return Encoder(self.target, self.target, partition, "raise").encode(self._results(self.files[partition]))

    def _results(self, parts: Sequence[TextPiece]) -> Iterator[RowResult]:
        row = 0
        for part in parts:
            for number, document in enumerate(self._documents(part), part.rows):
                yield RowResult(document, row, row_ids(part.file.url, number, 1)[0])
                row += 1

    def _documents(self, part: TextPiece) -> Iterator[Any]:
        if self.kind == "binary":
            yield self._read_whole(part.file)
            return
        with open_file(part.file) as source:
            lines: Any = source if part.stop is None else PieceReader(part, source)
            if self.options.allow_empty and not peek_byte(source):
                return
            if self.kind == "csv":
                how = csv_options_for(part.file, self.options)
                yield from iter_csv(self.target.document_type, lines, how, self.options.extra)
            elif part.stop is None and peek_byte(source) == b"[":
                yield from rows_from_json(self.target.document_type, source.read(), extra=self.options.extra)
            else:
                yield from iter_ndjson(self.target.document_type, lines, extra=self.options.extra)

    def _read_whole(self, file: FileRef) -> Any:
        schema = self.target.document_type.document_schema()
        address = address_field(schema)
        row: dict[str, Any] = {address: file.url, content_field(schema, "rb"): file.folder.read(file.name)}
        if "mime_type" in schema.by_name:
            row["mime_type"] = guess_type(file.url)
        return self.target.document_type(**row)


def csv_options_for(file: FileRef, options: FileOptions) -> CsvOptions:
    """Return the CSV options for a file; the suffix .tsv implies its delimiter."""
    tabs = options.delimiter is None and file.name.removesuffix(".gz").endswith(".tsv")
    return CsvOptions("\t", encoding=options.encoding) if tabs else options.csv


@contextmanager
def open_file(file: FileRef) -> Iterator[IO[bytes]]:
    """Open a file for reading; .gz files are decompressed."""
    with local_file(file.folder, file.name) as path:
        if file.name.endswith(".gz"):
            with gzip.open(path, "rb") as decompressed:
                yield decompressed  # type: ignore[misc]
        else:
            with path.open("rb") as plain:
                yield plain


def peek_byte(source: IO[bytes]) -> bytes:
    """Return the first byte that is not a space, and go back to the beginning of the file."""
    while (byte := source.read(1)).isspace():
        pass
    source.seek(0)
    return byte


def plan_files(
    kind: FileKind,
    paths: Paths,
    document_type: type[Any] | None,
    partitions: int | None,
    workers: int,
    options: FileOptions,
) -> PartitionPlan:
    """Plan how to read files, or pieces of large ones, in partitions of about the same size."""
    suffixes = {"csv": _CSV_SUFFIXES, "json": _JSON_SUFFIXES, "binary": ()}[kind]
    files = find_files(paths, suffixes, options.remote, allow_empty=options.allow_empty)
    if kind != "binary" and not options.allow_empty and not any(_has_rows(kind, file, options) for file in files):
        raise _no_rows_error(paths)
    if kind == "binary":
        layout = DocumentLayout(document_type or Document)
        content_field(layout.document_type.document_schema(), "rb")
    else:
        if document_type is None and not files:
            raise _no_class_error()
        layout = DocumentLayout(document_type) if document_type else _infer_layout(kind, files[0], options)
    if kind == "binary":
        pieces = [TextPiece(file) for file in files]
    else:
        # Large files are split, so that all files together have as many pieces as there are partitions.
        size = min(PARTITION_BYTES, sum(file.size for file in files) // (partitions or workers) + 1)
        pieces = [piece for file in files for piece in split_text_file(kind, file, size, options.encoding)]
    parts = assign_to_partitions(pieces, [piece.size for piece in pieces], partitions, workers)
    return PartitionPlan(
        ReadFiles(kind, parts, layout, options), len(parts), layout, len(files) if kind == "binary" else None
    )


def _has_rows(kind: Literal["csv", "json"], file: FileRef, options: FileOptions) -> bool:
    """Whether a text file has a row. Only small files are opened, up to the first that has one."""
    if file.size > _LARGE_BYTES:
        return True
    with open_file(file) as source:
        content = source.read(_LARGE_BYTES + 1)
    text = content.decode(options.encoding, errors="replace")
    if len(content) > _LARGE_BYTES:  # a small compressed file
        return True
    if kind == "json":
        return "".join(text.split()) not in ("", "[]")
    return sum(not line.isspace() for line in text.splitlines() if line) > 1  # the first line is the header


def _infer_layout(kind: str, file: FileRef, options: FileOptions) -> DocumentLayout:
    """Infer a class from the beginning of a file, and return its layout."""
    try:
        with open_file(file) as source:
            if kind == "csv":
                return _infer_csv_layout(source, csv_options_for(file, options))
            if peek_byte(source) == b"[":
                return layout_from_arrow(pa.Table.from_pylist(parse_json(source.read())).schema)
            content = b"".join(source.readlines(_INFERENCE_BYTES))
            return layout_from_arrow(pa.json.read_json(pa.BufferReader(content)).schema)
    except (pa.ArrowException, ValueError) as error:
        raise DecodeError(
            f"{display_uri(file.url)}: no class can be inferred from it: {error}. Pass document_type=..."
        ) from error


def _infer_csv_layout(source: IO[bytes], options: CsvOptions) -> DocumentLayout:
    if options.encoding.replace("-", "").lower() != "utf8":
        raise OptionError("a class can only be inferred from a CSV file in utf-8. Pass document_type=...")
    parse = pa.csv.ParseOptions(delimiter=options.delimiter or ",", newlines_in_values=True)
    convert = pa.csv.ConvertOptions(strings_can_be_null=True)
    read = pa.csv.ReadOptions(block_size=_INFERENCE_BYTES)
    with pa.csv.open_csv(source, read, parse, convert) as reader:
        return layout_from_arrow(reader.schema)
