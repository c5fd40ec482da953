"""What a path holds: datasets and files of every format, opened alike."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from quire._extra_fields import Extra
from quire._optional import require
from quire._paths import parse_path
from quire.array import DocumentBatch
from quire.cli._forms import IMPORTED, form_of
from quire.cli._open_files import open_binary, open_csv, open_folder_of_files, open_json, open_ndjson
from quire.columns import Columns, StackOptions, stack
from quire.columns._statistics import ColumnStatistics, Statistics
from quire.errors import OptionError

_BLOCK = 1024


@dataclass(frozen=True)
class SourceOptions:
    """How a source is opened: its class and format, where they are given, and what goes with some formats."""

    document_type: Any = None
    form: str | None = None
    columns: tuple[str, ...] | None = None
    delimiter: str | None = None
    extra: Extra | None = None
    """What becomes of unknown columns; None for what the format does by default."""
    split: str | None = None
    images: Any = None
    allow_pickle: bool = False
    sample: int | None = None
    """So many rows tell the class that is made where none is given; None for all."""


@dataclass(frozen=True)
class Source:
    """Documents somewhere: their class, how many there are, what else is known, and they themselves."""

    path: str
    form: str
    document_type: Any
    rows: int | None
    bytes: int | None
    items: Callable[[], Iterator[Any]]
    """Documents and batches, in order."""
    facts: dict[str, Any] = field(default_factory=dict)
    dataset: Any = None
    """The `StoredDataset`, if it is one."""

    @property
    def schema(self) -> Any:
        """The plan of the rows that are read."""
        return self.document_type.document_schema() if self.dataset is None else self.dataset.schema

    def documents(self, start: int = 0) -> Iterator[Any]:
        """The rows from that one on as documents."""
        if self.dataset is not None and self.dataset.is_mapped and start:
            for first in range(start, len(self.dataset), _BLOCK):
                yield from self.dataset[first : first + _BLOCK]
            return
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
        """Those of a sample of a dataset, or of the first rows of a file."""
        if self.dataset is not None:
            found: dict[str, ColumnStatistics] = storage().column_statistics(self.dataset, columns, rows, seed, bins)
            return found
        paths = None if columns is None else [parse_path(path) for path in columns]
        for path in paths or ():
            self.schema.resolve(path)
        told = Statistics(paths, seed)
        for part in self._parts(rows):
            told.add(part)
        return told.to_dict(bins)

    def _parts(self, rows: int) -> Iterator[Columns]:
        documents = islice(self.documents(), rows)
        options = StackOptions(shapes="ragged")
        while True:
            block = list(islice(documents, _BLOCK))
            yield stack(self.schema, block, options)
            if len(block) < _BLOCK:
                return


def storage() -> Any:
    """quire.storage, which needs an extra."""
    require("pyarrow", extra="parquet", needed_for="a dataset")
    return importlib.import_module("quire.storage")


def open_source(path: str, options: SourceOptions) -> Source:
    """What is at a path."""
    form = options.form or form_of(path)
    if form == "dataset":
        return _stored(path, options)
    if form in IMPORTED:
        return _imported(path, form, options)
    if options.columns is not None:
        raise OptionError(f"{path}: columns are chosen of datasets, Parquet and Arrow; this is {form}.")
    made = _OPENERS[form](path, options)
    return Source(path, form, *made)


_OPENERS: dict[str, Callable[[str, Any], tuple[Any, int | None, int | None, Any, dict[str, Any]]]] = {
    "quire": open_binary,
    "csv": open_csv,
    "ndjson": open_ndjson,
    "json": open_json,
    "files": open_folder_of_files,
}


def _stored(path: str, options: SourceOptions) -> Source:
    dataset = storage().open_dataset(
        path, options.document_type, columns=options.columns, extra=options.extra or "ignore"
    )
    facts = {
        "shards": len(dataset.shards),
        "formats": sorted({shard.format for shard in dataset.shards}),
        "checksums": bool(dataset.shards) and all(shard.xxh3 for shard in dataset.shards),
        **importlib.import_module("quire.cli._packing").packing_of(dataset),
    }

    def items() -> Iterator[Any]:
        batch: Any = DocumentBatch[dataset.schema.document_type]  # type: ignore[name-defined]
        return map(batch._wrap, dataset._read_parts())

    return Source(path, "dataset", dataset.document_type, len(dataset), dataset.nbytes, items, facts, dataset)


def _imported(path: str, form: str, options: SourceOptions) -> Source:
    storage()
    importing = importlib.import_module("quire.storage.importers._import")
    how = importing.ImportOptions(
        options.allow_pickle, options.images, Path(path).name, options.split, extra=options.extra or "ignore"
    )
    reading = importing.IMPORTERS[form](path, options.document_type, how)
    return Source(path, form, reading.document_type, reading.total, None, lambda: reading.rows(0))
