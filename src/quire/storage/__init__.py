"""Datasets on disk: folders of plain Parquet or Arrow files, typed, with rows by their number."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.columns import ColumnStatistics
from quire.storage import _needs as _needs
from quire.storage._cache import ShardCache
from quire.storage._dataset import ReadOptions, StoredDataset, open_dataset
from quire.storage._dataset_writer import DatasetWriter, WriteOptions, write_dataset
from quire.storage._manifest import Shard
from quire.storage._pages import Pages as Pages
from quire.storage._parquet_io import load_parquet, save_parquet
from quire.storage._parquet_io import save_shard as save_shard
from quire.storage._previews import Count as Count
from quire.storage._previews import Head as Head
from quire.storage._previews import TensorHead as TensorHead
from quire.storage._shard_reader import Parts as Parts
from quire.storage._shard_reader import shard_errors as shard_errors
from quire.storage._statistics import column_statistics
from quire.storage._statistics import null_counts as null_counts
from quire.storage._tensor_codecs import has_mixed_tensors
from quire.storage._verification import Verify as Verify
from quire.storage._where import Split, Where

if TYPE_CHECKING:
    from quire.storage._huggingface import write_huggingface as write_huggingface
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

_LAZY = {"ImportOptions": "importers", "import_dataset": "importers", "write_huggingface": "_huggingface"}
"""Names that few programs use, by the module that defines them; it is imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"quire.storage.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
