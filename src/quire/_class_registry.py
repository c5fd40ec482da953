"""The loaded document classes, by the name that they have in bytes.

A class that bytes name is never imported. Documents of a class that is not loaded become dynamic documents, and bytes
may hold arrays; both are defined in packages above this one, which register how they are made (`provide`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from weakref import ref

from quire._protocols import is_document_type

_classes: dict[str, list[ref[type[Any]]]] = {}
"""The classes of each name, the newest last. The references are weak, so that classes of notebooks can be collected."""
_makers: dict[str, Callable[..., Any]] = {}
"""How arrays and dynamic documents are made; see `provide`."""


def class_name(cls: type[Any]) -> str:
    """Return the name of a class in bytes: 'module:Class'."""
    return f"{cls.__module__}:{cls.__qualname__}"


def register(cls: type[Any]) -> None:
    """Register a document class as the newest of its name, of which a cell of a notebook that runs again makes more."""
    name = class_name(cls)
    _classes[name] = [known for known in _classes.get(name, []) if known() is not cls]

    def forget(gone: ref[type[Any]]) -> None:
        _classes[name] = [known for known in _classes.get(name, []) if known is not gone]
        if not _classes[name]:
            del _classes[name]

    _classes[name].append(ref(cls, forget))


def _iter_classes(name: str, types: Sequence[type[Any]]) -> Iterator[type[Any]]:
    """Yield the classes of a name: first those among `types`, then the registered ones, the newest first."""
    yield from (tp for tp in types if class_name(tp) == name and is_document_type(tp))
    known = list(_classes.get(name, ()))  # a copy, because garbage collection may remove classes from the list
    yield from (cls for reference in reversed(known) if (cls := reference()) is not None)


def find(
    name: str, expected: type[Any] | None, types: Sequence[type[Any]] = (), members: Sequence[type[Any]] = ()
) -> type[Any] | None:
    """Return the class of a name that is the expected one or a subclass of it; else the expected one.

    Without an expected class, return the newest class of the name. For a field that is a union of documents, subclasses
    of its `members` come before other classes of the name.
    """
    if expected is not None:
        return next((cls for cls in _iter_classes(name, types) if issubclass(cls, expected)), expected)
    classes = list(_iter_classes(name, types))
    return next((cls for cls in classes if issubclass(cls, tuple(members))), classes[0] if classes else None)


def provide(what: Literal["array", "batch", "dynamic"], make: Callable[..., Any]) -> None:
    """Register how arrays, batches or dynamic documents are made."""
    _makers[what] = make


def make_array(document_type: type[Any] | None, documents: list[Any], name: str) -> Any:
    """Return an array of documents; of any class, if only the name of the class is known."""
    if "array" not in _makers:
        importlib.import_module("quire.array")  # which provides itself
    return _makers["array"](document_type, documents, name)


def make_batch(document_type: type[Any], documents: list[Any]) -> Any:
    """Return the documents as a batch."""
    if "batch" not in _makers:
        importlib.import_module("quire.array")  # which provides itself
    return _makers["batch"](document_type, documents)


def make_dynamic(name: str, content: dict[str, Any]) -> Any:
    """Return a document of a class that is not loaded."""
    return _makers["dynamic"](name, content)
