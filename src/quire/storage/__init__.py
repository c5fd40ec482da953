"""Datasets on disk: folders of plain Parquet or Arrow files, typed, with rows by their number."""

from quire.columns._statistics import ColumnStatistics
from quire.storage import _needs as _needs
from quire.storage._cache import ShardCache
from quire.storage._dataset import ReadOptions, StoredDataset, open_dataset
from quire.storage._in_hand import load_parquet, save_parquet
from quire.storage._manifest import Shard
from quire.storage._statistics import column_statistics
from quire.storage._tensors import has_mixed_tensors
from quire.storage._where import Split, Where
from quire.storage._write import DatasetWriter, WriteOptions, write_dataset
from quire.storage.importers import ImportOptions, import_dataset

__all__ = [
    "ColumnStatistics",
    "DatasetWriter",
    "ImportOptions",
    "ReadOptions",
    "Shard",
    "ShardCache",
    "Split",
    "StoredDataset",
    "Where",
    "WriteOptions",
    "column_statistics",
    "has_mixed_tensors",
    "import_dataset",
    "load_parquet",
    "open_dataset",
    "save_parquet",
    "write_dataset",
]
