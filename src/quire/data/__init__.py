"""Datasets for training."""

import importlib
from typing import TYPE_CHECKING

from quire.data._dataset import MultiModalDataset
from quire.data._preprocessing import batched

if TYPE_CHECKING:
    from quire.data._measure import measure as measure
    from quire.data._mixing import MixedDataset
    from quire.data._spark import SparkConverter, from_spark
    from quire.data._streaming import StreamingDataset

__all__ = ["MixedDataset", "MultiModalDataset", "SparkConverter", "StreamingDataset", "batched", "from_spark"]

_HOMES = {
    "MixedDataset": "_mixing",
    "SparkConverter": "_spark",
    "StreamingDataset": "_streaming",
    "from_spark": "_spark",
    "measure": "_measure",
}
"""Where names are that need pyarrow, which is an extra."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"quire.data.{_HOMES[name]}"), name)
