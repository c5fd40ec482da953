"""`import_dataset`: write a dataset of another format, row by row, into shards."""

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
from quire.storage.importers import _huggingface, _mds, _petastorm, _tables, _webdataset
from quire.storage.importers._source import ForeignDataset, ImportOptions

ImportFormat = Literal["petastorm", "mds", "webdataset", "huggingface", "lance", "delta", "iceberg"]
Importer = Callable[[Any, type[Any] | None, ImportOptions], ForeignDataset]

IMPORTERS: Mapping[str, Importer] = {
    "petastorm": _petastorm.read_petastorm,
    "mds": _mds.read_mds,
    "webdataset": _webdataset.read_webdataset,
    "huggingface": _huggingface.read_huggingface,
    "lance": _tables.read_lance,
    "delta": _tables.read_delta,
    "iceberg": _tables.read_iceberg,
}
"""The functions that read formats, by name."""

_MARKER_FILES = {
    _petastorm.METADATA: "petastorm",
    _mds.INDEX: "mds",
    _huggingface.STATE: "huggingface",
    _huggingface.SPLITS: "huggingface",
}
_OPTIONS = {field.name for field in fields(ImportOptions)}


def import_dataset(
    source: Any,
    target: str | os.PathLike[str],
    format: ImportFormat | None = None,  # noqa: A002 - the name that users expect
    document_type: type[Any] | None = None,
    *,
    options: WriteOptions | None = None,
    show_progress: bool | None = None,
    **more: Any,
) -> StoredDataset[Any]:
    """Write a dataset of Petastorm, MDS, WebDataset, Hugging Face, Lance, Delta Lake or Iceberg, and open the result.

    The rows become documents in shards. Without `format`, it is detected by the files of the folder. Without
    `document_type`, a class is made from the metadata of the source. `more` are fields of `ImportOptions`
    (allow_pickle, images, name, split, remote, extra) and of `WriteOptions` (mode, shard_bytes, ...); with
    mode='resume', an import that was interrupted continues where it stopped. Memory is bounded by a row group; no code
    from the source is ever run, not even with allow_pickle=True.
    """
    import_options = ImportOptions(**{name: more.pop(name) for name in _OPTIONS & more.keys()})
    check_options("import_dataset", more, [*WriteOptions.__dataclass_fields__, *_OPTIONS])
    options = replace(options or WriteOptions(), **more)
    source_format = format or _detect_format(source, import_options)
    if source_format not in IMPORTERS:
        hint = did_you_mean(source_format, IMPORTERS)
        raise OptionError(f"format={source_format!r} is not a format that can be imported. {hint}")
    foreign = IMPORTERS[source_format](source, document_type, import_options)
    with DatasetWriter(target, foreign.document_type, options) as writer:
        done = writer.rows_before if options.mode == "resume" else 0
        left = None if foreign.total is None else max(0, foreign.total - done)
        writer.write(track(foreign.rows(done), "importing", left, show=show_progress, size=rows_of))
    return open_dataset(target, foreign.document_type, options=ReadOptions(remote=options.remote))


def _detect_format(source: Any, options: ImportOptions) -> str:
    """Return the format of a folder, by the files in it."""
    if (table := _tables.detect_table_format(source)) is not None:
        return table
    if not isinstance(source, (str, os.PathLike)):
        return "huggingface"
    folder = open_folder(source, options.remote)
    prefixes = ("", f"{options.split}/") if options.split else ("",)
    for marker, name in _MARKER_FILES.items():
        if any(folder.exists(f"{prefix}{marker}") for prefix in prefixes):
            return name
    if folder.list(_webdataset.SUFFIXES):
        return "webdataset"
    raise OptionError(
        f"{display_uri(folder.url)}: the format cannot be detected by the files: "
        f"pass format={' or '.join(map(repr, IMPORTERS))}."
    )
