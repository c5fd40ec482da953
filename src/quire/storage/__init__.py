"""Datasets on disk: folders of plain Parquet or Arrow files, typed, with random access to rows.

Modules, from the user's calls down to bytes:

- `_dataset`, `_dataset_writer`: open, read, write and save datasets;
- `_row_reader`, `_row_locations`: rows by number, and by memory address; `_remote_blocks`: blocks of remote shards;
- `_versions`, `_row_changes`, `_live_rows`: versions, changes of rows, and which rows are left;
- `_where`, `_statistics`, `_pages`: filters, statistics, and rows for viewers;
- `_shard_reader`, `_shard_writer`, `_manifest`: shards, and the logs that list them;
- `_block_table`, `_verification`: checksums; `_cache`, `_locks`: local copies, and locks between processes;
- `_layout`, `_arrow_codec`, `_nested_codecs`, `_tensor_codecs`: how each kind of field is stored in Arrow;
- `_interchange`, `_interchange_codecs`: Arrow data for other libraries;
- `_schema_conversion`, `_spark_types`, `_huggingface`, `importers`: data of other tools, and other versions of a class;
- `_hub_reader`, `_hub_writer`: datasets on the Hugging Face Hub.

Names without an entry in `__all__` are for other packages of quire.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.columns import ColumnStatistics
from quire.storage import _requirements as _requirements
from quire.storage._arrow_codec import EXTENSION_METADATA as EXTENSION_METADATA
from quire.storage._arrow_codec import EXTENSION_NAME as EXTENSION_NAME
from quire.storage._arrow_codec import is_list_type as is_list_type
from quire.storage._arrow_codec import read_extension as read_extension
from quire.storage._block_table import checksum as checksum
from quire.storage._cache import ShardCache
from quire.storage._cache import default_folder as default_folder
from quire.storage._dataset import Location as Location
from quire.storage._dataset import ReadOptions, StoredDataset, open_dataset
from quire.storage._dataset import VersionChoice as VersionChoice
from quire.storage._dataset import find_dataset as find_dataset
from quire.storage._dataset import load_parquet as load_parquet
from quire.storage._dataset import read_partitioned_schema as read_partitioned_schema
from quire.storage._dataset_writer import DatasetWriter, WriteOptions, write_dataset
from quire.storage._dataset_writer import RecordBatchWriter as RecordBatchWriter
from quire.storage._dataset_writer import confirm_append as confirm_append
from quire.storage._dataset_writer import count_rows_within as count_rows_within
from quire.storage._dataset_writer import iter_columns as iter_columns
from quire.storage._dataset_writer import prepare_append as prepare_append
from quire.storage._dataset_writer import prepare_target as prepare_target
from quire.storage._dataset_writer import replace_dataset as replace_dataset
from quire.storage._dataset_writer import resolve_document_type as resolve_document_type
from quire.storage._dataset_writer import save_parquet as save_parquet
from quire.storage._dataset_writer import save_shard as save_shard
from quire.storage._interchange import from_arrow as from_arrow
from quire.storage._interchange import to_arrow as to_arrow
from quire.storage._layout import ENUMS_KEY as ENUMS_KEY
from quire.storage._layout import Layout as Layout
from quire.storage._layout import Paths as Paths
from quire.storage._layout import resolve_columns as resolve_columns
from quire.storage._live_rows import LiveRows as LiveRows
from quire.storage._locks import lock_file as lock_file
from quire.storage._manifest import SUFFIXES as SUFFIXES
from quire.storage._manifest import Log as Log
from quire.storage._manifest import Shard
from quire.storage._manifest import encode_line as encode_line
from quire.storage._manifest import list_plain_files as list_plain_files
from quire.storage._manifest import read_manifest as read_manifest
from quire.storage._pages import BytesPreview as BytesPreview
from quire.storage._pages import ItemCount as ItemCount
from quire.storage._pages import Pages as Pages
from quire.storage._pages import TensorPreview as TensorPreview
from quire.storage._row_locations import RowLocations as RowLocations
from quire.storage._row_reader import RowReader as RowReader
from quire.storage._schema_conversion import class_from_arrow as class_from_arrow
from quire.storage._schema_conversion import conform_batch as conform_batch
from quire.storage._schema_conversion import loaded_class as loaded_class
from quire.storage._schema_conversion import refuse_unknown_columns as refuse_unknown_columns
from quire.storage._schema_conversion import register_class as register_class
from quire.storage._schema_conversion import stored_class_name as stored_class_name
from quire.storage._sequences import ElementRanges as ElementRanges
from quire.storage._shard_reader import RangeReader as RangeReader
from quire.storage._shard_reader import ShardReader as ShardReader
from quire.storage._shard_reader import count_rows as count_rows
from quire.storage._shard_reader import local_file as local_file
from quire.storage._shard_reader import partition_values as partition_values
from quire.storage._shard_reader import read_arrow_schema as read_arrow_schema
from quire.storage._shard_reader import read_block_rows as read_block_rows
from quire.storage._shard_reader import shard_errors as shard_errors
from quire.storage._spark_types import SPARK_FIELD_KEY as SPARK_FIELD_KEY
from quire.storage._spark_types import convert_array as convert_array
from quire.storage._spark_types import field_from_text as field_from_text
from quire.storage._spark_types import field_to_text as field_to_text
from quire.storage._spark_types import spark_arrow_schema as spark_arrow_schema
from quire.storage._spark_types import spark_type as spark_type
from quire.storage._statistics import column_statistics
from quire.storage._statistics import null_counts as null_counts
from quire.storage._tensor_codecs import TensorCodec as TensorCodec
from quire.storage._tensor_codecs import has_mixed_tensors as has_mixed_tensors
from quire.storage._verification import Verify as Verify
from quire.storage._versions import Version
from quire.storage._where import Split, Where

if TYPE_CHECKING:
    from quire.storage._hub_writer import push_to_hub as push_to_hub
    from quire.storage._huggingface import write_huggingface as write_huggingface
    from quire.storage._row_changes import Difference, Upserted
    from quire.storage.importers import ImportOptions, import_dataset

__all__ = [
    "ColumnStatistics",
    "DatasetWriter",
    "Difference",
    "ImportOptions",
    "ReadOptions",
    "Shard",
    "ShardCache",
    "Split",
    "StoredDataset",
    "Upserted",
    "Version",
    "Where",
    "WriteOptions",
    "column_statistics",
    "import_dataset",
    "open_dataset",
    "write_dataset",
]

_LAZY = {
    "Difference": "_row_changes",
    "ImportOptions": "importers",
    "import_dataset": "importers",
    "Upserted": "_row_changes",
    "push_to_hub": "_hub_writer",
    "write_huggingface": "_huggingface",
}
"""Names that few programs use, by the module that defines them; it is imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"quire.storage.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
