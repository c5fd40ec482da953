"""Saving and loading arrays and batches as Parquet in one call: a plain file, or the folder of a dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from quire.document import BaseDocument
from quire.errors import EncodeError, OptionError, check_options
from quire.files import open_folder
from quire.storage._dataset import open_dataset
from quire.storage._dataset_writer import WriteOptions, count_rows_within, iter_columns, write_dataset
from quire.storage._layout import Layout
from quire.storage._shard_writer import ShardFile
from quire.storage._timestamps import TimestampChooser


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


def load_parquet(document_type: type[Any], path: str | os.PathLike[str], **more: Any) -> Any:
    """Read all rows of a file or a dataset into a batch; of `BaseDocument`, the class is that of the file."""
    return open_dataset(path, None if document_type is BaseDocument else document_type, **more).read()
