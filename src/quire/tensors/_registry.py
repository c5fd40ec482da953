"""Finds the framework of a value, without importing frameworks that are not loaded."""

from __future__ import annotations

import importlib
import sys
import warnings
from contextlib import suppress
from typing import Any

from quire._optional import is_loaded, require
from quire.errors import SchemaError, did_you_mean
from quire.tensors._framework import Framework

_MODULES = {  # by quire's name: the module, and a class that shows that its import is complete
    "numpy": ("numpy", "ndarray"),
    "torch": ("torch", "Tensor"),
    "tensorflow": ("tensorflow", "Tensor"),
    "jax": ("jax", "Array"),
    "paddle": ("paddle", "Tensor"),
    "scipy": ("scipy.sparse", "spmatrix"),
}
FRAMEWORKS = tuple(_MODULES)

_frameworks: dict[str, Framework] = {}
_by_type: dict[type[Any], Framework] = {}


def get_framework(name: str, *, needed_for: str | None = None) -> Framework:
    """Return the framework of that name, imported if necessary."""
    framework = _frameworks.get(name)
    if framework is None:
        if name not in _MODULES:
            raise SchemaError(f"{name!r} is not a framework. {did_you_mean(name, FRAMEWORKS)}")
        require(_MODULES[name][0], extra=name, needed_for=needed_for or f"framework={name!r}")
        framework = importlib.import_module(f"quire.tensors._{name}").framework
        _frameworks[name] = framework
    return framework


def stored_framework(name: str) -> Framework:
    """Return the framework that a stored tensor names.

    A tensor stored next to TensorFlow's may be paddle's, and paddle cannot be imported after TensorFlow. So if quire
    itself imports TensorFlow to decode a tensor, and paddle is installed, paddle is imported first.
    """
    if name == "tensorflow" and not is_loaded("tensorflow") and not is_loaded("paddle"):
        with suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an import that the user did not request
            get_framework("paddle")
    return get_framework(name)


def framework_of_type(tp: type[Any]) -> Framework | None:
    """Return the framework whose tensors are of this type, among those that are loaded."""
    framework = _by_type.get(tp)
    if framework is not None or tp.__module__ == "builtins":
        return framework
    for name, (module, class_name) in _MODULES.items():
        if hasattr(sys.modules.get(module), class_name) and get_framework(name).handles(tp):
            _by_type[tp] = get_framework(name)
            return _by_type[tp]
    return None


def loaded_frameworks() -> list[Framework]:
    """Return the frameworks that are imported, by quire or by anyone else."""
    return [get_framework(name) for name, (module, cls) in _MODULES.items() if hasattr(sys.modules.get(module), cls)]


def framework_of(value: object) -> Framework | None:
    """Return the framework of a tensor, or None for any other value."""
    framework = _by_type.get(type(value))
    return framework_of_type(type(value)) if framework is None else framework
