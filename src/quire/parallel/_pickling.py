"""Pickling of values for other processes: with pickle, and with cloudpickle where plain pickle fails.

Plain pickle is fastest, so it is tried first. Classes and functions of `__main__` and local ones have no name that
another process could import. cloudpickle sends them by value, which takes milliseconds for a document class: so each
class is sent to a worker once and referred to by a key afterwards, in both directions.
"""

from __future__ import annotations

import copyreg
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
from quire.tensors import pickle_reducers

_UNNAMED_ERRORS = (pickle.PicklingError, AttributeError, TypeError)
"""What pickle raises for a value without an importable name."""

_numbers = itertools.count()
_keys: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_classes: WeakValueDictionary[str, type] = WeakValueDictionary()
_received: list[type] = []
"""Keeps the classes that a worker received by value alive."""


def has_cloudpickle() -> bool:
    """Return whether values without an importable name can be sent."""
    return find_spec("cloudpickle") is not None


def dump_value(value: Any, *, to_own: bool = True) -> tuple[bytes, frozenset[str]]:
    """Pickle a value; return the bytes and the keys of the classes that the receiver must know.

    Without `to_own`, for a pool that quire does not manage, classes are sent by value every time.
    """
    keys = set[str]()
    try:
        data = _dump(_Pickler if to_own and _keys else _PlainPickler, value, keys)
    except _UNNAMED_ERRORS:
        return _dump_by_value(value, to_own=to_own)
    if b"__main__" in data and has_cloudpickle():  # a worker's __main__ is another module
        return _dump_by_value(value, to_own=to_own)
    return data, frozenset(keys)


def load_value(data: bytes) -> Any:
    """Unpickle the bytes of `dump_value`; both ends are this program."""
    return pickle.loads(data)  # noqa: S301


def dump_classes(keys: Iterable[str]) -> list[tuple[str, bytes]]:
    """Pickle the classes of some keys by value."""
    cloudpickle = require("cloudpickle", extra="process", needed_for="sending a local class to a process")
    return [(key, cloudpickle.dumps(_classes[key], 5)) for key in keys]


def load_classes(received: Iterable[tuple[str, bytes]]) -> None:
    """Register the classes of `dump_classes`."""
    for key, data in received:
        if key not in _classes:  # a forked process may have inherited it
            cls = pickle.loads(data)  # noqa: S301 - from the parent process
            _keys[cls], _classes[key] = key, cls
            _received.append(cls)


def _dump_by_value(value: Any, *, to_own: bool) -> tuple[bytes, frozenset[str]]:
    name = getattr(value, "__qualname__", None) or f"a {type(value).__qualname__}"
    cloudpickle = require("cloudpickle", extra="process", needed_for=f"sending {name} to a process")
    keys = set[str]()
    data = _dump(_cloud_pickler(cloudpickle), value, keys) if to_own else cloudpickle.dumps(value, 5)
    return data, frozenset(keys)


def _dump(pickler_type: Any, value: Any, keys: set[str]) -> bytes:
    file = io.BytesIO()
    pickler = pickler_type(file, 5)
    pickler.keys = keys
    # For tensors that are not in documents. The table of the pickler is its own: other pickles do not change.
    pickler.dispatch_table = {**getattr(pickler, "dispatch_table", copyreg.dispatch_table), **pickle_reducers()}
    pickler.dump(value)
    return file.getvalue()


class _PlainPickler(pickle.Pickler):
    """Pickles classes by their names."""

    keys: set[str]


class _Pickler(pickle.Pickler):
    """Writes keys for classes without an importable name, and collects them in `keys`."""

    keys: set[str]

    def reducer_override(self, value: object) -> Any:
        return _reduce_to_key(value, self.keys) if isinstance(value, type) else NotImplemented


@functools.cache
def _cloud_pickler(cloudpickle: ModuleType) -> type[Any]:
    """Return the same pickler on top of cloudpickle's, for functions and everything else that it supports."""

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined, misc]
        keys: set[str]

        def reducer_override(self, value: object) -> Any:
            by_key = _reduce_to_key(value, self.keys) if isinstance(value, type) else NotImplemented
            return super().reducer_override(value) if by_key is NotImplemented else by_key

    return Pickler


def _reduce_to_key(cls: type, keys: set[str]) -> Any:
    """Reduce a class without an importable name to its key; NotImplemented for others."""
    key = _keys.get(cls)
    if key is None:
        # Classes like DocumentArray[T] are pickled by a recipe that names T.
        is_parametrized = "[" in cls.__name__
        if is_parametrized or not (cls.__module__ == "__main__" or "<locals>" in cls.__qualname__):
            return NotImplemented
        key = f"{os.getpid()}-{next(_numbers)}"
        _keys[cls], _classes[key] = key, cls
    keys.add(key)
    return _class_of, (key,)


def _class_of(key: str) -> type:
    return _classes[key]
