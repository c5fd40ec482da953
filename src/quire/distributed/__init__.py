"""Documents on clusters: the same calls on threads of this process, on Ray and on Spark."""

import importlib
from typing import TYPE_CHECKING

from quire.errors import PartitionError

if TYPE_CHECKING:
    from quire.distributed._contract import Engine, Frame, Stage
    from quire.distributed._engines import engine
    from quire.distributed._shards import DocumentShards
    from quire.distributed._torch_distributor import torch_distributor
    from quire.distributed.estimator import Estimator
    from quire.distributed.xshards import XShards

__all__ = [
    "DocumentShards",
    "Engine",
    "Estimator",
    "Frame",
    "PartitionError",
    "Stage",
    "XShards",
    "engine",
    "torch_distributor",
]

_HOMES = {
    "DocumentShards": "_shards",
    "Engine": "_contract",
    "Estimator": "estimator",
    "Frame": "_contract",
    "Stage": "_contract",
    "XShards": "xshards",
    "engine": "_engines",
    "torch_distributor": "_torch_distributor",
}
"""Where names are that need pyarrow, an engine or a framework, which are extras."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("quire.distributed._needs")
    return getattr(importlib.import_module(f"quire.distributed.{_HOMES[name]}"), name)
