"""import_dataset(): a foreign dataset, row by row, into shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from quire.display import track
from quire.errors import OptionError, check_options, did_you_mean
from quire.files import display_uri, open_folder
from quire.storage._dataset import ReadOptions, StoredDataset, open_dataset
from quire.storage._dataset_writer import DatasetWriter, WriteOptions, rows_of
from quire.storage.importers import _huggingface, _mds, _petastorm, _webdataset
from quire.storage.importers._source import ForeignDataset, ImportOptions

ImportFormat = Literal["petastorm", "mds", "webdataset", "huggingface"]
Importer = Callable[[Any, type[Any] | None, ImportOptions], ForeignDataset]

IMPORTERS: Mapping[str, Importer] = {
    "petastorm": _petastorm.read_petastorm,
    "mds": _mds.read_mds,
    "webdataset": _webdataset.read_webdataset,
    "huggingface": _huggingface.read_huggingface,
}
"""How the formats are read, by their names."""

_SIGNS = {
    _petastorm.METADATA: "petastorm",
    _mds.INDEX: "mds",
    _huggingface.STATE: "huggingface",
    _huggingface.SPLITS: "huggingface",
}
_OPTIONS = {field.name for field in fields(ImportOptions)}


def import_dataset(
    source: Any,
    target: str | os.PathLike[str],
    format: ImportFormat | None = None,  # noqa: A002 - what users know it by
    schema: type[Any] | None = None,
    *,
    options: WriteOptions | None = None,
    show_progress: bool | None = None,
    **more: Any,
) -> StoredDataset[Any]:
    """Write a dataset of Petastorm, MDS, WebDataset or Hugging Face anew, as documents in shards, and open it.

    Without a format, it is the one that the files of the folder tell. Without a class, one is made of what the source
    tells about itself. `more` are fields of `ImportOptions` (allow_pickle, images, name, split, remote, extra) and of
    `WriteOptions` (mode, shard_bytes, ...); with mode='resume', an import that was broken off goes on where it was.
    Memory is bounded by a row group; no code from the source is ever run, not even with allow_pickle=True.
    """
    reading_options = ImportOptions(**{name: more.pop(name) for name in _OPTIONS & more.keys()})
    check_options("import_dataset", more, [*WriteOptions.__dataclass_fields__, *_OPTIONS])
    options = replace(options or WriteOptions(), **more)
    reading = _importer(format, source, reading_options)(source, schema, reading_options)
    with DatasetWriter(target, reading.document_type, options) as writer:
        done = writer.rows_before if options.mode == "resume" else 0
        rows = track(reading.rows(done), "importing", _left(reading.total, done), show=show_progress, size=rows_of)
        writer.write(rows)
    return open_dataset(target, reading.document_type, options=ReadOptions(remote=options.remote))


def _left(total: int | None, done: int) -> int | None:
    return None if total is None else max(0, total - done)


def _importer(name: str | None, source: Any, options: ImportOptions) -> Importer:
    found = name or _guessed(source, options)
    if found not in IMPORTERS:
        raise OptionError(f"format={found!r} is not a format that is imported. {did_you_mean(found, IMPORTERS)}")
    return IMPORTERS[found]


def _guessed(source: Any, options: ImportOptions) -> str:
    """The format that the files of a folder tell."""
    if not isinstance(source, (str, os.PathLike)):
        return "huggingface"
    folder = open_folder(source, options.remote)
    prefixes = ("", f"{options.split}/") if options.split else ("",)
    for sign, name in _SIGNS.items():
        if any(folder.exists(f"{prefix}{sign}") for prefix in prefixes):
            return name
    if folder.list(_webdataset.SUFFIXES):
        return "webdataset"
    raise OptionError(
        f"{display_uri(folder.url)}: the files do not tell their format: "
        f"pass format={' or '.join(map(repr, IMPORTERS))}."
    )
