"""Which framework a value belongs to, found without importing any framework that is not loaded."""

from __future__ import annotations

import importlib
from typing import Any

from quire._optional import is_loaded, require
from quire.errors import SchemaError, did_you_mean
from quire.tensors._framework import Framework

_MODULES = {  # quire's name of a framework: the module that must be loaded, and its extra
    "numpy": ("numpy", ""),
    "torch": ("torch", "torch"),
    "tensorflow": ("tensorflow", "tensorflow"),
    "jax": ("jax", "jax"),
    "paddle": ("paddle", "paddle"),
    "scipy": ("scipy.sparse", "scipy"),
}
FRAMEWORKS = tuple(_MODULES)

_frameworks: dict[str, Framework] = {}
_by_type: dict[type[Any], Framework] = {}


def get_framework(name: str, *, needed_for: str | None = None) -> Framework:
    """The framework of that name, imported now if it is not yet."""
    found = _frameworks.get(name)
    if found is None:
        if name not in _MODULES:
            raise SchemaError(f"{name!r} is not a framework. {did_you_mean(name, FRAMEWORKS)}")
        module, extra = _MODULES[name]
        require(module, extra=extra, needed_for=needed_for or f"framework={name!r}")
        found = importlib.import_module(f"quire.tensors._{name}").framework
        _frameworks[name] = found
    return found


def framework_of_type(tp: type[Any]) -> Framework | None:
    """The framework whose tensors are of this type, among those that are loaded."""
    found = _by_type.get(tp)
    if found is not None or tp.__module__ == "builtins":
        return found
    for name, (module, _) in _MODULES.items():
        if is_loaded(module) and get_framework(name).handles(tp):
            _by_type[tp] = get_framework(name)
            return _by_type[tp]
    return None


def framework_of(value: object) -> Framework | None:
    """The framework whose tensor the value is, or None for anything else."""
    return framework_of_type(type(value))
