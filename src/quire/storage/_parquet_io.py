"""Documents in hand as Parquet and back, in one call each: a plain file, or the folder of a dataset."""

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
        raise OptionError("one file of Parquet is always written anew: mode and format are for datasets in folders.")
    save_shard(data, document_type, path, options)


def save_shard(data: Any, document_type: type[Any], path: str | os.PathLike[str], options: WriteOptions) -> None:
    """Write documents, batches, or what a generator gives of them, to one plain file of Parquet or Arrow."""
    parent, slash, name = os.fspath(path).rpartition("/")
    layout = Layout(document_type.document_schema(), options.tensor_storage)
    packing = parquet_options(layout, options.compression or {})
    file = ShardFile(open_folder(parent + slash or ".", options.remote), name, layout, packing)
    try:
        _write_all(file, layout, data, options.group_bytes)
    except BaseException as error:
        file.abandon(error)
        raise
    file.finish()


def _write_all(file: ShardFile, layout: Layout, data: Any, group_bytes: int) -> None:
    items = [data] if hasattr(data, "_columns") else data
    for columns in iter_columns(items, layout.schema, group_bytes):
        batch = layout.encode(columns)
        rows = count_rows_within(batch, group_bytes)
        for start in range(0, len(batch), rows):
            file.write(batch.slice(start, rows))


def load_parquet(document_type: type[Any], path: str | os.PathLike[str], **more: Any) -> Any:
    """All rows of a file or a dataset as a batch, of the class that it holds where none is given."""
    return open_dataset(path, None if document_type is BaseDocument else document_type, **more).read()
