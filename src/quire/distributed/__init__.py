"""Documents on clusters: the same API on threads of this process, on Ray and on Spark."""

import importlib
from typing import TYPE_CHECKING

from quire.errors import PartitionError

if TYPE_CHECKING:
    from quire.distributed._engine import Engine, Frame, Stage, engine
    from quire.distributed._groups import GroupedShards
    from quire.distributed._metrics import ShardStats, StageStats
    from quire.distributed._resources import Resources
    from quire.distributed._shards import DocumentShards
    from quire.distributed._spark import torch_distributor
    from quire.distributed.estimator import Estimator
    from quire.distributed.xshards import XShards

__all__ = [
    "DocumentShards",
    "Engine",
    "Estimator",
    "Frame",
    "GroupedShards",
    "PartitionError",
    "Resources",
    "ShardStats",
    "Stage",
    "StageStats",
    "XShards",
    "engine",
    "torch_distributor",
]
_HOMES = {
    "DocumentShards": "_shards",
    "Engine": "_engine",
    "Estimator": "estimator",
    "Frame": "_engine",
    "GroupedShards": "_groups",
    "Resources": "_resources",
    "ShardStats": "_metrics",
    "Stage": "_engine",
    "StageStats": "_metrics",
    "XShards": "xshards",
    "engine": "_engine",
    "torch_distributor": "_spark",
}
"""The modules of names that need pyarrow, an engine or a framework, which are optional dependencies."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("quire.distributed._require_pyarrow")
    return getattr(importlib.import_module(f"quire.distributed.{_HOMES[name]}"), name)
