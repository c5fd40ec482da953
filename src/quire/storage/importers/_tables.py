"""Tables of Lance, Delta Lake and Iceberg, read by their own libraries: one version of a table, without deleted rows.

A table is given by its path, or as an object of its library, which may be any version, and may be in any store that the
library knows. lance starts threads that do not survive a fork, so nothing of these libraries is imported before a table
is read, and no process is forked here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from quire._optional import require
from quire.array import DocumentBatch
from quire.errors import DecodeError, OptionError, StorageError, StorageNotFoundError
from quire.files import display_uri
from quire.storage._layout import Layout
from quire.storage._schema_conversion import class_from_arrow
from quire.storage.importers._source import (
    BATCH_ROWS,
    ForeignDataset,
    ImportOptions,
    field_of_array,
    merge_fields,
    source_errors,
    to_batch,
    to_class_name,
)

TABLE_LIBRARIES = {"lance": "lance", "deltalake": "delta", "pyiceberg": "iceberg"}
"""The formats of the tables of libraries, by the package of their class."""


def read_lance(source: Any, document_type: type[Any] | None, options: ImportOptions) -> ForeignDataset:
    """Read a dataset of Lance: a path, or a `lance.LanceDataset`."""
    return _read_table(_LanceTable(source, options), document_type, options)


def read_delta(source: Any, document_type: type[Any] | None, options: ImportOptions) -> ForeignDataset:
    """Read a table of Delta Lake: a path, or a `deltalake.DeltaTable`."""
    return _read_table(_DeltaTable(source, options), document_type, options)


def read_iceberg(source: Any, document_type: type[Any] | None, options: ImportOptions) -> ForeignDataset:
    """Read a table of Iceberg: a `pyiceberg.table.Table`, a metadata file, or the local folder of a table."""
    return _read_table(_IcebergTable(source, options), document_type, options)


def _read_table(table: _Table, document_type: type[Any] | None, options: ImportOptions) -> ForeignDataset:
    document_type = document_type or _infer_class(table, options)
    layout = Layout(document_type.document_schema())

    def rows(first: int) -> Iterator[DocumentBatch[Any]]:
        for batch in table.batches(first):
            yield to_batch(layout, _plain_columns(batch), len(batch), table.where, options.extra)

    return ForeignDataset(document_type, rows, table.total)


def detect_table_format(source: object) -> str | None:
    """Return the format of a table: of an object by the package of its class, of a folder by its files."""
    if not isinstance(source, (str, os.PathLike)):
        return TABLE_LIBRARIES.get(type(source).__module__.partition(".")[0])
    text = os.fspath(source).rstrip("/")
    if text.endswith(".lance"):
        return "lance"
    if text.endswith(".metadata.json"):
        return "iceberg"
    folder = None if "://" in text else Path(text)
    if folder is None or not folder.is_dir():
        return None
    if (folder / "_delta_log").is_dir():
        return "delta"
    if (folder / "_versions").is_dir() and any((folder / "_versions").glob("*.manifest")):
        return "lance"
    return "iceberg" if any((folder / "metadata").glob("*.metadata.json")) else None


class _Table(ABC):
    """One version of a table."""

    where: str
    name: str
    total: int | None
    schema: pa.Schema

    @abstractmethod
    def batches(self, first: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows from `first` on, always in the same order."""


def _open_location(source: Any, options: ImportOptions, library: str) -> str:
    """Return the path of a table; options of a remote store are for the library, which has its own names for them."""
    location: str = os.fspath(source)
    if options.remote.storage_options:
        raise OptionError(
            f"{display_uri(location)}: storage_options are those of quire. Open the table with {library} and its own "
            "options, and pass the object."
        )
    if "://" not in location and not Path(location).exists():
        raise StorageNotFoundError(f"{location}: there is no such file or folder.")
    return location


class _LanceTable(_Table):
    def __init__(self, source: Any, options: ImportOptions) -> None:
        lance = require("lance", extra="lance", needed_for="a dataset of Lance")
        if isinstance(source, (str, os.PathLike)):
            location = _open_location(source, options, "lance.dataset")
            with source_errors(location):
                source = lance.dataset(location)
        self.where, self._dataset = str(source.uri), source
        self.name = _last_part(self.where)
        self.schema, self.total = source.schema, source.count_rows()

    def batches(self, first: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        with source_errors(self.where):
            # Large values that are stored as blobs are read as bytes, and not as their places in files.
            scanner = self._dataset.scanner(
                columns, offset=first or None, batch_size=BATCH_ROWS, scan_in_order=True, blob_handling="all_binary"
            )
            yield from scanner.to_batches()


class _DeltaTable(_Table):
    def __init__(self, source: Any, options: ImportOptions) -> None:
        deltalake = require("deltalake", extra="delta", needed_for="a table of Delta Lake")
        if isinstance(source, (str, os.PathLike)):
            location = _open_location(source, options, "deltalake.DeltaTable")
            with _delta_errors(deltalake, location), source_errors(location):
                source = deltalake.DeltaTable(location)
        self.where, self._table, self._library = str(source.table_uri), source, deltalake
        self.name = _last_part(self.where)
        with _delta_errors(deltalake, self.where):
            self.total = source.count()
            self.schema = pa.schema(source.schema().to_arrow())
        protocol = source.protocol()
        features = {*(protocol.reader_features or ())}
        self._has_order = not features & {"deletionVectors", "columnMapping"} and protocol.min_reader_version != 2

    def batches(self, first: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        with _delta_errors(self._library, self.where), source_errors(self.where):
            if self._has_order:
                # Files in the order of the log, which does not change for a version.
                dataset = self._table.to_pyarrow_dataset()
                yield from _skip(dataset.scanner(columns=columns, batch_size=BATCH_ROWS).to_batches(), first)
                return
            if first:
                raise StorageError(
                    f"{display_uri(self.where)}: a table with deletion vectors or column mapping is read in no fixed "
                    "order, so that an import cannot be resumed: import it anew, with mode='overwrite'."
                )
            yield from _skip(pa.RecordBatchReader.from_stream(self._table.scan(columns)), 0)


class _IcebergTable(_Table):
    def __init__(self, source: Any, options: ImportOptions) -> None:
        module = require("pyiceberg.table", extra="iceberg", needed_for="a table of Iceberg")
        if isinstance(source, (str, os.PathLike)):
            location = _open_location(source, options, "pyiceberg")
            if Path(location).is_dir():
                location = str(_latest_metadata(Path(location)))
            with source_errors(location):
                source = module.StaticTable.from_metadata(location)
        self._scan = source.scan()
        self.where = str(source.metadata_location)
        self.name = _last_part(str(source.location()))
        arrow = require("pyiceberg.io.pyarrow", extra="iceberg", needed_for="a table of Iceberg")
        self.schema, self.total = arrow.schema_to_pyarrow(source.schema()), self._scan.count()

    def batches(self, first: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        with source_errors(self.where):
            scan = self._scan if columns is None else self._scan.select(*columns)
            yield from _skip(scan.to_arrow_batch_reader(), first)


def _last_part(location: str) -> str:
    """Return the name of a table by its folder."""
    return location.rstrip("/").rpartition("/")[2].removesuffix(".lance")


def _latest_metadata(folder: Path) -> Path:
    """Return the newest metadata file of a table; its name starts with its number, as `00002-` or `v2.`."""

    def number(path: Path) -> int:
        digits = path.name.removeprefix("v").split("-")[0].split(".")[0]
        return int(digits) if digits.isdecimal() else -1

    files = sorted((folder / "metadata").glob("*.metadata.json"), key=lambda path: (number(path), path.name))
    if not files:
        raise StorageError(f"{folder}: there is no metadata of an Iceberg table.")
    if len(files) > 1 and number(files[-1]) == number(files[-2]):
        raise StorageError(
            f"{folder}: {files[-2].name} and {files[-1].name} are metadata of the same version: pass the path of one."
        )
    return files[-1]


@contextmanager
def _delta_errors(library: Any, where: str) -> Iterator[None]:
    """Raise the errors of deltalake, which are none of Python's, as a `DecodeError`."""
    try:
        yield
    except library.exceptions.DeltaError as error:
        raise DecodeError(f"{display_uri(where)}: {error}") from error


def _skip(batches: Any, rows: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        left = batch.slice(min(rows, len(batch)))
        rows -= len(batch) - len(left)
        for start in range(0, len(left), BATCH_ROWS):
            yield left.slice(start, BATCH_ROWS)


def _plain_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    return {
        name: array.storage if isinstance(array, pa.ExtensionArray) else array
        for name, array in zip(batch.schema.names, batch.columns, strict=True)
    }


# --- the class of the documents


def _infer_class(table: _Table, options: ImportOptions) -> type[Any]:
    """Make a class of the schema; a field may be None if a row is null."""
    fields = {field.name: field for field in table.schema}
    # Most writers declare every column as nullable. Which ones are, only the data shows.
    nullable = [field.name for field in table.schema if _may_be_null(field)]
    seen: dict[str, pa.Field] = {}
    for batch in table.batches(0, nullable) if nullable else ():
        for name, array in _plain_columns(batch).items():
            own = field_of_array(name, array)
            seen[name] = merge_fields(seen[name], own) if name in seen else own
    for name in nullable:
        if name not in seen:
            raise DecodeError(
                f"{display_uri(table.where)}: no class can be inferred without rows. Pass document_type=..."
            )
        fields[name] = seen[name]
    return class_from_arrow(fields.values(), to_class_name(options.name or table.name or "Row"))


def _may_be_null(field: pa.Field) -> bool:
    if field.nullable:
        return True
    kind = field.type
    return any(_may_be_null(kind.field(i)) for i in range(kind.num_fields)) if pa.types.is_nested(kind) else False
