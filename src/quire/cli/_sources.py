"""Sources: datasets and files of every readable format, opened with one interface.

`open_documents` returns a `DocumentSource`: the document class, passed or inferred; the number of rows and bytes, where
known; and the documents, read lazily.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from pydantic_core import from_json as parse_json

from quire import codec
from quire._extra_fields import Extra
from quire._optional import require
from quire.array import DocumentArray, DocumentBatch
from quire.cli._formats import IMPORTED_FORMATS, detect_format, iter_files
from quire.cli._schema_inference import Row, infer_document_type, infer_table_type, to_plain
from quire.codec import CsvOptions, compression_of, from_dict, iter_csv, iter_ndjson, rows_from_json, text_lines
from quire.columns import Columns, ColumnStatistics, StackOptions, Statistics, stack
from quire.documents import documents_of_files
from quire.errors import DecodeError, OptionError
from quire.files import guess_type
from quire.schema import Schema, parse_path

if TYPE_CHECKING:
    from quire.storage import StoredDataset

METADATA_FILE = "metadata.jsonl"
"""The file of a folder that holds further fields of its files: a line for each, with its name in 'file_name'."""
_BLOCK = 1024
_FOOTERS = 8
_DECOMPRESS: dict[str, Callable[..., Any]] = {"gzip": gzip.open, "bz2": bz2.open, "lzma": lzma.open}


@dataclass(frozen=True)
class SourceOptions:
    """Options of `open_documents`; most apply to some formats only."""

    document_type: Any = None
    """The class of the documents; None to infer it."""
    format: str | None = None
    """One of `SOURCE_FORMATS`; None to detect it."""
    columns: tuple[str, ...] | None = None
    delimiter: str | None = None
    extra: Extra | None = None
    """How unknown columns are handled; None for the default of the format."""
    split: str | None = None
    images: Any = None
    allow_pickle: bool = False
    sample: int | None = None
    """The number of rows from which a class is inferred; None for all."""


@dataclass(frozen=True)
class DocumentSource:
    """Documents of any format."""

    path: str
    format: str
    document_type: Any
    rows: int | None
    bytes: int | None
    items: Callable[[], Iterator[Any]]
    """Reads the documents in order; items are documents or batches."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Properties that `quire inspect` prints."""
    dataset: StoredDataset[Any] | None = None

    @property
    def schema(self) -> Schema:
        """The schema of the rows that are read."""
        schema: Schema = self.document_type.document_schema() if self.dataset is None else self.dataset.schema
        return schema

    def documents(self, start: int = 0) -> Iterator[Any]:
        """Yield the documents from row `start` on. Mapped datasets go there directly, other formats skip rows."""
        if self.dataset is not None and self.dataset._row_reader.is_mapped and start:
            for first in range(start, len(self.dataset), _BLOCK):
                yield from self.dataset[first : first + _BLOCK]
            return
        # Batches before the start are skipped as columns, without creating their documents.
        for item in self.items():
            if not isinstance(item, DocumentBatch):
                if not start:
                    yield item
                start -= start > 0
            elif start >= len(item):
                start -= len(item)
            else:
                yield from item[start:]
                start = 0

    def statistics(self, columns: list[str] | None, rows: int, bins: int, seed: int) -> dict[str, ColumnStatistics]:
        """Compute statistics of a sample of a dataset, or of the first rows of a file."""
        if self.dataset is not None:
            of_sample: dict[str, ColumnStatistics] = load_storage().column_statistics(
                self.dataset, columns, rows, seed, bins
            )
            return of_sample
        paths = None if columns is None else [parse_path(path) for path in columns]
        for path in paths or ():
            self.schema.resolve(path)
        statistics = Statistics(paths, seed)
        for block in self._stack_blocks(rows):
            statistics.add(block)
        return statistics.to_dict(bins)

    def _stack_blocks(self, rows: int) -> Iterator[Columns]:
        """Yield the first rows as columns; at least one block, so that a source without rows has its columns."""
        documents = islice(self.documents(), rows)
        options = StackOptions(shapes="ragged")
        while True:
            block = list(islice(documents, _BLOCK))
            yield stack(self.schema, block, options)
            if len(block) < _BLOCK:
                return


def open_documents(path: str, options: SourceOptions) -> DocumentSource:
    """Open a file, a folder or a URL."""
    source_format = options.format or detect_format(path)
    if source_format in IMPORTED_FORMATS:
        load_storage()
        importers = importlib.import_module("quire.storage.importers")
        import_options = importers.ImportOptions(
            options.allow_pickle, options.images, Path(path).name, options.split, extra=options.extra or "ignore"
        )
        reading = importers.IMPORTERS[source_format](path, options.document_type, import_options)
        return DocumentSource(path, source_format, reading.document_type, reading.total, None, lambda: reading.rows(0))
    if source_format != "dataset" and options.columns is not None:
        raise OptionError(f"{path}: columns are chosen of datasets, Parquet and Arrow; this is {source_format}.")
    return _OPENERS[source_format](path, options)


def load_storage() -> ModuleType:
    """Import `quire.storage`, which needs an extra."""
    require("pyarrow", extra="parquet", needed_for="a dataset")
    return importlib.import_module("quire.storage")


def item_rows(item: object) -> int:
    """Return the number of rows of a batch; a document is one."""
    return len(item) if isinstance(item, DocumentBatch) else 1


# --- datasets


def _open_dataset(path: str, options: SourceOptions) -> DocumentSource:
    dataset: StoredDataset[Any] = load_storage().open_dataset(
        path, options.document_type, columns=options.columns, extra=options.extra or "ignore"
    )
    facts = {
        "shards": len(dataset.shards),
        "formats": sorted({shard.format for shard in dataset.shards}),
        # A dataset of other writers, or of one file, has no manifest with checksums.
        "checksums": bool(dataset.shards) and all(shard.xxh3 for shard in dataset.shards),
        **_describe_version(dataset),
        **_column_compression(dataset),
    }

    def items() -> Iterator[Any]:
        batch: Any = DocumentBatch[dataset.schema.document_type]  # type: ignore[name-defined]
        return map(batch._wrap, dataset._row_reader.read_parts())

    return DocumentSource(path, "dataset", dataset.document_type, len(dataset), dataset.nbytes, items, facts, dataset)


def _describe_version(dataset: StoredDataset[Any]) -> dict[str, Any]:
    """Return the version of a dataset that was changed, its tags, and how many rows of the files are deleted."""
    if dataset._version is None:
        return {}
    deleted = sum(shard.rows for shard in dataset.shards) - len(dataset)
    known = next((version for version in dataset.versions() if version.number == dataset.version), None)
    return {
        "version": dataset.version,
        **({"tags": list(known.tags)} if known is not None and known.tags else {}),
        # Other tools that read the files see these rows.
        **({"deleted_rows": deleted} if deleted else {}),
    }


def _column_compression(dataset: StoredDataset[Any]) -> dict[str, Any]:
    """Read the compression and sizes of columns from the footers of the first Parquet shards."""
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    storage = load_storage()
    sizes: dict[str, list[Any]] = {}
    # A footer costs a request each if the dataset is remote, and the first shards are typical of the rest.
    chosen = [shard for shard in dataset.shards if shard.format == "parquet"][:_FOOTERS]
    for shard in chosen:
        with (
            storage.shard_errors(dataset.folder, shard),
            arrow.PythonFile(storage.RangeReader(dataset.folder, shard), "r") as file,
        ):
            metadata = parquet.read_metadata(file)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for index in range(group.num_columns):
                column = group.column(index)
                entry = sizes.setdefault(column.path_in_schema, [set(), 0, 0])
                entry[0].add("none" if column.compression == "UNCOMPRESSED" else column.compression.lower())
                entry[1] += column.total_compressed_size
                entry[2] += column.total_uncompressed_size
    columns = {
        path: {"compression": "/".join(sorted(names)), "bytes": compressed, "uncompressed_bytes": uncompressed}
        for path, (names, compressed, uncompressed) in sizes.items()
    }
    return {"columns": columns, "columns_of_shards": len(chosen)} if columns else {}


# --- text files


def _open_csv(path: str, options: SourceOptions) -> DocumentSource:
    layout = csv_options(path, options.delimiter)
    document_type, rows = options.document_type, None
    if document_type is None:
        with _open_text(path) as file, text_lines(file, layout.encoding) as lines:
            document_type, rows = infer_table_type(lines, layout, path, _stem(path), options.sample)

    def items() -> Iterator[Any]:
        with _open_text(path) as file:
            yield from iter_csv(document_type, file, layout, options.extra or "forbid")

    return DocumentSource(path, "csv", document_type, rows, _size(path), items)


def csv_options(path: str, delimiter: str | None) -> CsvOptions:
    """Return the layout of a CSV file: delimited by tabs if its name has the suffix .tsv."""
    return CsvOptions(delimiter or ("\t" if ".tsv" in Path(path).suffixes else None))


def _open_ndjson(path: str, options: SourceOptions) -> DocumentSource:
    document_type, rows = options.document_type, None
    if document_type is None:
        with _open_text(path) as file, text_lines(file, "utf-8") as lines:
            document_type, rows = infer_document_type(_parse_lines(lines, path), _stem(path), options.sample)

    def items() -> Iterator[Any]:
        with _open_text(path) as file:
            yield from iter_ndjson(document_type, file, extra=options.extra or "forbid")

    return DocumentSource(path, "ndjson", document_type, rows, _size(path), items)


def _open_json(path: str, options: SourceOptions) -> DocumentSource:
    with _open_text(path) as file:
        text = file.read().removeprefix(codecs.BOM_UTF8).strip()
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DecodeError(f"{path}: the file is UTF-16, and JSON is read as UTF-8: convert its encoding first.")
    if text[:1] == b"{":  # one row
        text = b"[" + text + b"]"
    elif text[:1] != b"[":
        raise DecodeError(
            f"{path}: a JSON file holds an object or a list of objects, and this one starts with "
            f"{text[:20].decode('utf-8', 'replace')!r}."
        )
    document_type = options.document_type
    if document_type is None:
        try:
            rows = parse_json(text)
        except ValueError as error:
            raise DecodeError(f"{path}: invalid JSON: {error}.") from error
        objects = (_check_object(row, f"{path}, row {number}") for number, row in enumerate(rows))
        document_type, _ = infer_document_type(objects, _stem(path))
    documents = rows_from_json(document_type, text, extra=options.extra or "forbid")
    return DocumentSource(path, "json", document_type, len(documents), _size(path), lambda: iter(documents))


@contextmanager
def _open_text(path: str) -> Iterator[IO[bytes]]:
    """Open a text file, decompressed if it is compressed."""
    # By content and not by suffix: downloads are often compressed without saying so in their names.
    with Path(path).open("rb") as file:
        compression = compression_of(file.read(8))
    if compression is None:
        with Path(path).open("rb") as file:
            yield file
    elif compression.name in _DECOMPRESS:
        with _DECOMPRESS[compression.name](path, "rb") as file:
            yield file
    else:
        raise DecodeError(
            f"{path}: text compressed with {compression.name} cannot be read here: decompress the file first."
        )


def _parse_lines(lines: Iterator[str], path: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                value = parse_json(line)
            except ValueError as error:
                raise DecodeError(f"{where}: invalid JSON: {error}.") from error
            yield _check_object(value, where)


def _check_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DecodeError(f"{where}: a row must be a JSON object, got {type(value).__name__}.")
    return value


# --- quire's own files


def _open_binary(path: str, options: SourceOptions) -> DocumentSource:
    """Open what `save_binary` or `push` wrote; documents of a class that is not imported get an inferred class."""
    is_remote = "://" in path  # a remote file is streamed: its header cannot be read in advance
    type_name, facts = ("", {}) if is_remote else _read_header(path)
    document_type = options.document_type or codec.find(type_name, None)
    array: Any = DocumentArray if document_type is None else DocumentArray[document_type]  # type: ignore[valid-type]

    def documents() -> Iterator[Any]:
        if is_remote:
            return iter(array.pull_stream(path, show_progress=False, allow_pickle=options.allow_pickle))
        return iter(array.load_binary(path, streaming=True, allow_pickle=options.allow_pickle))

    rows = facts.get("rows")
    if document_type is not None:
        return DocumentSource(path, "quire", document_type, rows, _size(path), documents, facts)
    class_name = type_name.rpartition(":")[2] or _stem(path)
    document_type, count = infer_document_type(documents(), class_name, options.sample)
    # The documents are of an open class, which has no columns, so each is converted to the inferred one.

    def converted() -> Iterator[Any]:
        return (from_dict(document_type, to_plain(document)) for document in documents())

    return DocumentSource(path, "quire", document_type, count if rows is None else rows, _size(path), converted, facts)


def _read_header(path: str) -> tuple[str, dict[str, Any]]:
    """Return the class name and the properties that a file of quire declares."""
    options = codec.read_options({})
    with Path(path).open("rb") as file:
        compression = compression_of(file.read(8))
        facts: dict[str, Any] = {"compression": "none" if compression is None else compression.name, "index": False}
        file.seek(0)
        # A pickle has neither a header nor an index, and is not read without --allow-pickle.
        if not codec.starts_stream(file, None):
            return "", facts
        index = codec.read_index(file, options)
        type_name = codec.Header(next(codec.read_segments(file, options))).type_name
    facts = {"class": type_name, **facts, "index": index is not None}
    if index is not None:
        facts |= {"blocks": len(index.counts), "rows": sum(index.counts)}
    return type_name, facts


# --- folders of files


class File(Row):
    """A file of a folder."""

    path: str
    """The path relative to the folder."""
    mime_type: str | None = None
    content: bytes


def _open_files(path: str, options: SourceOptions) -> DocumentSource:
    """Open a folder as one document per file; `metadata.jsonl` adds fields."""
    folder = Path(path)
    files = [file for file in iter_files(folder) if file.name != METADATA_FILE]
    if not files:
        raise DecodeError(f"{path}: there are no files in the folder.")
    size = sum(file.stat().st_size for file in files)
    if options.document_type is not None:
        array: Any = DocumentArray[options.document_type]  # type: ignore[name-defined]
        names = options.document_type.model_fields.keys()
        # Classes like `Document` hold the content in one of these fields; others only get the path.
        mode: Any = "rb" if names & {"blob", "bytes_"} else "r" if "text" in names else None

        def documents() -> Iterator[Any]:
            for file in files:
                yield from documents_of_files(array, [str(file)], read_mode=mode, to_dataturi=False)

        return DocumentSource(path, "files", options.document_type, len(files), size, documents)
    metadata: dict[str, dict[str, Any]] = {}
    if (folder / METADATA_FILE).exists():
        with text_lines(folder / METADATA_FILE, "utf-8") as lines:
            for fields in _parse_lines(lines, str(folder / METADATA_FILE)):
                metadata[str(fields.pop("file_name", ""))] = fields

    def row(file: Path, content: bytes) -> dict[str, Any]:
        name = file.relative_to(folder).as_posix()
        return {**metadata.get(name, {}), "path": name, "mime_type": guess_type(name), "content": content}

    document_type: Any = File
    if metadata:  # the class is inferred without reading the contents, which may be large
        document_type, _ = infer_document_type((row(file, b"") for file in files), _stem(path))

    def items() -> Iterator[Any]:
        return (from_dict(document_type, row(file, file.read_bytes())) for file in files)

    return DocumentSource(path, "files", document_type, len(files), size, items, {"metadata": bool(metadata)})


def _stem(path: str) -> str:
    return Path(path).name.partition(".")[0] or "Row"


def _size(path: str) -> int | None:
    return None if "://" in path else Path(path).stat().st_size


_OPENERS: dict[str, Callable[[str, SourceOptions], DocumentSource]] = {
    "dataset": _open_dataset,
    "quire": _open_binary,
    "csv": _open_csv,
    "ndjson": _open_ndjson,
    "json": _open_json,
    "files": _open_files,
}
