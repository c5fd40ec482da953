"""The document classes that are loaded, by the name that bytes know them by.

A class that bytes name is never imported. What is not loaded becomes a dynamic document, which the floor of documents
provides, as the floor of arrays provides arrays: this module only knows whom to ask.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import ref

from quire._protocols import is_document_type

_classes: dict[str, list[ref[type[Any]]]] = {}
_makers: dict[str, Callable[..., Any]] = {}


def class_name(cls: type[Any]) -> str:
    """The name of a class in bytes: 'module:Class'."""
    return f"{cls.__module__}:{cls.__qualname__}"


def register(cls: type[Any]) -> None:
    """Remember a document class as the newest of its name; several may have one, as a notebook's cell runs again."""
    name = class_name(cls)
    _classes[name] = [known for known in _classes.get(name, []) if known() is not cls]

    def forget(gone: ref[type[Any]]) -> None:
        _classes[name] = [known for known in _classes.get(name, []) if known is not gone]
        if not _classes[name]:
            del _classes[name]

    _classes[name].append(ref(cls, forget))


def _named(name: str, types: Sequence[type[Any]]) -> Iterator[type[Any]]:
    """The classes of a name: of the given ones, then of those that are loaded, the newest first."""
    yield from (tp for tp in types if class_name(tp) == name and is_document_type(tp))
    known = list(_classes.get(name, ()))  # the collector may take classes out of the list meanwhile
    yield from (cls for reference in reversed(known) if (cls := reference()) is not None)


def find(
    name: str, expected: type[Any] | None, types: Sequence[type[Any]] = (), members: Sequence[type[Any]] = ()
) -> type[Any] | None:
    """The class of that name that is the expected one or a subclass of it; else the expected one.

    Where nothing is expected, the newest class of the name is meant. A field that is a union of documents gives its
    `members`: their subclasses come before other classes of the name.
    """
    if expected is not None:
        return next((cls for cls in _named(name, types) if issubclass(cls, expected)), expected)
    classes = list(_named(name, types))
    return next((cls for cls in classes if issubclass(cls, tuple(members))), classes[0] if classes else None)


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
