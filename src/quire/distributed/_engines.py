"""Which engines there are: each is imported when it is first asked for."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from quire.distributed._contract import Engine
from quire.errors import OptionError, check_options, did_you_mean

ENGINES = {
    "local": "quire.distributed._local:LocalEngine",
    "ray": "quire.distributed._ray:RayEngine",
    "spark": "quire.distributed._spark:SparkEngine",
}
"""The class of each engine; its fields are the options of `engine`."""
_NATIVE = {"pyarrow": "local", "pyspark": "spark", "ray": "ray"}
"""Whose objects the frames of an engine are."""
_made: dict[str, Engine] = {}


def engine(name: str | Engine = "local", **options: Any) -> Engine:
    """An engine by its name, or the engine that is given.

    Without options it is always the same one. `options` are the engine's own: `engine("local", backend="process")`,
    `engine("ray", num_cpus=2)`, `engine("spark", master="local[2]")`.
    """
    if not isinstance(name, str):
        if options:
            raise OptionError(f"options are for an engine that is made by its name, got {name!r}.")
        return name
    if name not in ENGINES:
        raise OptionError(f"engine={name!r}: there is no such engine. {did_you_mean(name, ENGINES)}")
    if options:
        return _make(name, options)
    if name not in _made:
        _made[name] = _make(name, {})
    return _made[name]


def _make(name: str, options: dict[str, Any]) -> Engine:
    module, _, cls = ENGINES[name].partition(":")
    engine_type = getattr(importlib.import_module(module), cls)
    parameters = inspect.signature(engine_type).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_options(f"engine({name!r})", options, [parameter.name for parameter in parameters])
    made: Engine = engine_type(**options)
    return made


def engine_of(native: Any) -> Engine:
    """The engine whose own object this is."""
    package = type(native).__module__.partition(".")[0]
    if package not in _NATIVE:
        raise OptionError(
            f"a {type(native).__name__} is of no engine: pass a Ray Dataset, a Spark DataFrame or an Arrow table, or "
            "say engine=."
        )
    return engine(_NATIVE[package])
