"""Saving and loading arrays and batches as Parquet in one call: a plain file, or the folder of a dataset."""

from __future__ import annotations

import os
from typing import Any

from quire.document import BaseDocument
from quire.errors import OptionError, check_options
from quire.files import open_folder
from quire.storage._dataset import open_dataset
from quire.storage._dataset_writer import WriteOptions, count_rows_within, iter_columns, write_dataset
from quire.storage._layout import Layout
from quire.storage._shard_writer import ShardFile, parquet_options


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
    """Write documents or batches, from any iterable, to one plain Parquet or Arrow file."""
    parent, slash, name = os.fspath(path).rpartition("/")
    layout = Layout(document_type.document_schema(), options.tensor_storage)
    folder = open_folder(parent + slash or ".", options.remote)
    file = ShardFile(folder, name, layout, parquet_options(layout, options.compression or {}))
    try:
        items = [data] if hasattr(data, "_columns") else data
        for columns in iter_columns(items, layout.schema, options.group_bytes):
            batch = layout.encode(columns)
            rows = count_rows_within(batch, options.group_bytes)
            for start in range(0, len(batch), rows):
                file.write(batch.slice(start, rows))
    except BaseException as error:
        file.abandon(error)
        raise
    file.finish()


def load_parquet(document_type: type[Any], path: str | os.PathLike[str], **more: Any) -> Any:
    """Read all rows of a file or a dataset into a batch; of `BaseDocument`, the class is that of the file."""
    return open_dataset(path, None if document_type is BaseDocument else document_type, **more).read()
