"""The document classes that are loaded, by the name that bytes know them by.

A class that bytes name is never imported. What is not loaded becomes a dynamic document, which the floor of documents
provides, as the floor of arrays provides arrays: this module only knows whom to ask.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from quire._typing import is_document_type

_classes: dict[str, list[ref[type[Any]]]] = {}
_makers: dict[str, Callable[..., Any]] = {}


def class_name(cls: type[Any]) -> str:
    """The name of a class in bytes: 'module:Class'."""
    return f"{cls.__module__}:{cls.__qualname__}"


def register(cls: type[Any]) -> None:
    """Remember a document class: of those that have one name, the last that is still there is meant."""
    name = class_name(cls)

    def forget(gone: ref[type[Any]]) -> None:
        _classes[name].remove(gone)
        if not _classes[name]:
            del _classes[name]

    _classes.setdefault(name, []).append(ref(cls, forget))


def _loaded(name: str) -> type[Any] | None:
    return next((cls for cls in (known() for known in reversed(_classes.get(name, []))) if cls is not None), None)


def find(name: str, expected: type[Any] | None, types: Sequence[type[Any]] = ()) -> type[Any] | None:
    """The class of that name, if it is loaded and is the expected one or made from it; else the expected one."""
    found = next((tp for tp in types if class_name(tp) == name and is_document_type(tp)), None) or _loaded(name)
    if expected is None:
        return found
    return found if found is not None and issubclass(found, expected) else expected


def provide(what: str, make: Callable[..., Any]) -> None:
    """Say how an upper floor makes something that lower floors ask for."""
    _makers[what] = make


def make_array(document_type: type[Any] | None, documents: list[Any], name: str) -> Any:
    """An array of documents; of any class, where only the name of the class is known."""
    if "array" not in _makers:
        importlib.import_module("quire.array")  # it provides itself; nothing here knows more of it than its name
    return _makers["array"](document_type, documents, name)


def make_dynamic(name: str, content: dict[str, Any]) -> Any:
    """A document of a class that is not loaded."""
    return _makers["dynamic"](name, content)
