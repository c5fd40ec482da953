"""Which engine for objects goes with an engine for record batches."""

from __future__ import annotations

import importlib
from typing import Any

from quire.distributed._contract import Engine
from quire.distributed._engines import engine as get_engine
from quire.distributed._engines import engine_of
from quire.distributed._nests import is_frame
from quire.distributed._objects import ObjectEngine
from quire.errors import OptionError

_CLASSES = {
    "local": "_objects:LocalObjects",
    "ray": "_objects_ray:RayObjects",
    "spark": "_objects_spark:SparkObjects",
}


def object_engine(engine: str | Engine) -> ObjectEngine:
    """The engine for objects that goes with another."""
    found = get_engine(engine)
    if found.name not in _CLASSES:
        raise OptionError(f"engine={found.name!r} carries record batches alone: use DocumentShards, or another engine.")
    module, _, cls = _CLASSES[found.name].partition(":")
    made: ObjectEngine = getattr(importlib.import_module(f"quire.distributed.{module}"), cls)(found)
    return made


def engine_of_rows(native: Any) -> Engine:
    """The engine whose own collection of rows this is."""
    return get_engine("local") if is_frame(native) else engine_of(native)
