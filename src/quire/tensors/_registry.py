"""Which framework a value belongs to, found without importing any framework that is not loaded."""

from __future__ import annotations

import importlib
import sys
import warnings
from contextlib import suppress
from typing import Any

from quire._optional import is_loaded, require
from quire.errors import SchemaError, did_you_mean
from quire.tensors._framework import Framework

_MODULES = {  # quire's name of a framework: its module, and the class by which a whole module is known
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
    """The framework of that name, imported now if it is not yet."""
    found = _frameworks.get(name)
    if found is None:
        if name not in _MODULES:
            raise SchemaError(f"{name!r} is not a framework. {did_you_mean(name, FRAMEWORKS)}")
        require(_MODULES[name][0], extra=name, needed_for=needed_for or f"framework={name!r}")
        found = importlib.import_module(f"quire.tensors._{name}").framework
        _frameworks[name] = found
    return found


def stored_framework(name: str) -> Framework:
    """The framework that a stored tensor names.

    A tensor stored next to TensorFlow's may be paddle's, and paddle cannot be imported after TensorFlow. So where quire
    itself imports TensorFlow to decode a tensor, and paddle is installed too, paddle goes first.
    """
    if name == "tensorflow" and not is_loaded("tensorflow") and not is_loaded("paddle"):
        with suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an import that no one asked for
            get_framework("paddle")
    return get_framework(name)


def framework_of_type(tp: type[Any]) -> Framework | None:
    """The framework whose tensors are of this type, among those that are loaded."""
    found = _by_type.get(tp)
    if found is not None or tp.__module__ == "builtins":
        return found
    for name, (module, known_by) in _MODULES.items():
        if hasattr(sys.modules.get(module), known_by) and get_framework(name).handles(tp):
            _by_type[tp] = get_framework(name)
            return _by_type[tp]
    return None


def framework_of(value: object) -> Framework | None:
    """The framework whose tensor the value is, or None for anything else."""
    found = _by_type.get(type(value))
    return framework_of_type(type(value)) if found is None else found
