"""Values as bytes for other processes: by pickle, and by cloudpickle where plain pickle cannot.

What plain pickle writes is fastest, so it is tried first. Classes and functions of `__main__` and of functions have no
name that another process could import. cloudpickle sends them by value, which takes milliseconds for a document class:
so a class goes to a worker once, and is called by a key from then on, in both directions.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import pickle
from collections.abc import Iterable
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from quire._optional import require

_UNNAMED = (pickle.PicklingError, AttributeError, TypeError)
"""What pickle raises when it cannot name a thing."""

_numbers = itertools.count()
_keys: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_classes: WeakValueDictionary[str, type] = WeakValueDictionary()
_received: list[type] = []
"""Keeps the classes that came by value alive in a worker."""


def has_cloudpickle() -> bool:
    """Whether things without an importable name can be sent."""
    return find_spec("cloudpickle") is not None


def pack(value: Any, *, to_own: bool = True) -> tuple[bytes, frozenset[str]]:
    """The bytes, and the keys of the classes that the receiver must know. Foreign pools get classes by value."""
    used = set[str]()
    try:
        data = _dumped(_Pickler, value, used) if to_own and _keys else pickle.dumps(value, 5)
    except _UNNAMED:
        return _pack_by_value(value, to_own=to_own)
    if b"__main__" in data and has_cloudpickle():
        return _pack_by_value(value, to_own=to_own)
    return data, frozenset(used)


def _pack_by_value(value: Any, *, to_own: bool) -> tuple[bytes, frozenset[str]]:
    cloudpickle = require("cloudpickle", extra="process", needed_for=f"sending {_describe(value)} to a process")
    used = set[str]()
    data = _dumped(_by_value(cloudpickle), value, used) if to_own else cloudpickle.dumps(value, 5)
    return data, frozenset(used)


def _dumped(pickler: Any, value: Any, used: set[str]) -> bytes:
    file = io.BytesIO()
    made = pickler(file, 5)
    made.used = used
    made.dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes keys for classes without a name, and notes them."""

    used: set[str]

    def reducer_override(self, value: Any) -> Any:
        return _keyed(value, self.used) if isinstance(value, type) else NotImplemented


@functools.cache
def _by_value(cloudpickle: ModuleType) -> type[Any]:
    """The same, with functions and everything else that cloudpickle can write."""

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined, misc]
        used: set[str]

        def reducer_override(self, value: Any) -> Any:
            keyed = _keyed(value, self.used) if isinstance(value, type) else NotImplemented
            return super().reducer_override(value) if keyed is NotImplemented else keyed

    return Pickler


def _keyed(cls: type, used: set[str]) -> Any:
    key = _key_of(cls)
    if key is None:
        return NotImplemented
    used.add(key)
    return _class_of, (key,)


def _key_of(cls: type) -> str | None:
    """The key of a class that was sent, or must be; None for one that can be imported."""
    key = _keys.get(cls)
    if key is None and (cls.__module__ == "__main__" or "<locals>" in cls.__qualname__) and _is_plain(cls):
        key = f"{os.getpid()}-{next(_numbers)}"
        _keys[cls], _classes[key] = key, cls
    return key


def _is_plain(cls: type) -> bool:
    """Whether the class is its own: classes like DocumentArray[T] are made by a recipe that names T."""
    return "[" not in cls.__name__


def _class_of(key: str) -> type:
    return _classes[key]


def definitions(keys: Iterable[str]) -> list[tuple[str, bytes]]:
    """The classes of some keys by value."""
    cloudpickle = require("cloudpickle", extra="process", needed_for="sending a local class to a process")
    return [(key, cloudpickle.dumps(_classes[key], 5)) for key in keys]


def define(received: Iterable[tuple[str, bytes]]) -> None:
    """Learn the classes of `definitions`."""
    for key, data in received:
        if key not in _classes:  # which a forked process may have inherited
            cls = pickle.loads(data)  # noqa: S301 - from the parent process
            _keys[cls], _classes[key] = key, cls
            _received.append(cls)


def unpack(data: bytes) -> Any:
    """The value of `pack`; both ends are this program."""
    return pickle.loads(data)  # noqa: S301


def _describe(value: Any) -> str:
    return getattr(value, "__qualname__", None) or f"a {type(value).__qualname__}"
