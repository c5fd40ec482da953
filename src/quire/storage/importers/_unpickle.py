"""Reading pickles without running them.

A pickle is a program: it names functions and classes, and calls them. Here every name is looked up in a short list of
harmless ones, or becomes a stand-in that only keeps its arguments. All other names are errors.
"""

from __future__ import annotations

import datetime as dt
import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from typing_extensions import Self

from quire.errors import DecodeError

_TYPE = re.compile(r"[A-Z]\w*Type")


@dataclass(frozen=True)
class TypeName:
    """A type that a pickle names. It cannot be called."""

    module: str
    name: str


class StandIn:
    """An instance of a class that is not looked up: it keeps the name of the class, the arguments and the state."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Self:
        stand_in = super().__new__(cls)
        stand_in.__dict__["arguments"] = arguments
        return stand_in

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    @property
    def kind(self) -> str:
        """The name of the class."""
        return type(self).__name__


FindName = Callable[[str, str], Any]
"""A function from a module and a name to what a pickle may use for it; None if the name is refused."""


class _Unpickler(pickle.Unpickler):
    """Looks up names with a function, and nowhere else."""

    def __init__(self, content: bytes, find: FindName) -> None:
        super().__init__(io.BytesIO(content))
        self._find = find
        self._known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for, the same one for the whole pickle."""
        if (module, name) not in self._known:
            value = self._find(module, name)
            if value is None:
                raise DecodeError(f"the pickle names {module}.{name}, which is refused: nothing of that name is run.")
            self._known[module, name] = value
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse values outside of the pickle."""
        raise DecodeError(f"the pickle refers to {pid!r} outside of itself, which is refused.")


def _load(content: bytes, find: FindName) -> Any:
    try:
        return _Unpickler(content, find).load()
    except DecodeError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise DecodeError(f"the pickle is broken: {type(error).__name__}: {error}") from error


# --- schemas of Petastorm


def load_schema(content: bytes) -> Any:
    """Load a pickled Unischema as stand-ins; nothing of petastorm, pyspark or numpy is called."""
    return _load(content, _find_in_schema)


def _find_in_schema(module: str, name: str) -> Any:
    if module == "collections" and name == "OrderedDict":
        return OrderedDict
    if (module, name) == ("pyspark.serializers", "_restore"):
        return _restore
    if module in ("copy_reg", "copyreg") and name == "_reconstructor":
        return _reconstruct
    if module in ("petastorm.unischema", "petastorm.codecs") or (module, name) == ("numpy", "dtype"):
        return type(name, (StandIn,), {})
    if module == "pyspark.sql.types" and _TYPE.fullmatch(name):
        return type(name, (StandIn,), {})
    if module in ("numpy", "builtins", "__builtin__") or (module, name) == ("decimal", "Decimal"):
        return TypeName(module, name)
    return None


def _restore(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:  # noqa: ARG001 - Spark's signature
    """Return a named tuple as older versions of Spark pickle it."""
    return type(str(name), (StandIn,), {})(*values)


def _reconstruct(cls: Any, base: Any, state: Any) -> Any:  # noqa: ARG001 - the signature of copyreg
    """Return an object as the oldest protocols of pickle do."""
    if not (isinstance(cls, type) and issubclass(cls, StandIn)):
        raise DecodeError(f"the pickle creates a {cls!r}, which is refused.")
    return cls()


# --- values


def load_value(content: bytes) -> Any:
    """Load a pickled value that has only numbers, texts, containers, dates, and arrays of numpy."""
    return _load(content, lambda module, name: _VALUES.get((_current_module(module), name)))


def _current_module(module: str) -> str:
    """Return the present name of a module that numpy or Python has renamed."""
    return module.replace("numpy.core", "numpy._core").replace("__builtin__", "builtins")


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Return bytes as older protocols write them: as text."""
    if encoding != "latin1":
        raise DecodeError(f"the pickle encodes a text as {encoding!r}, which is refused.")
    return text.encode(encoding)


def _numpy_functions() -> dict[tuple[str, str], Any]:
    """Return the functions that pickles of numpy call, under the names of the installed version."""
    array, number = np.zeros(1), np.float64(1)
    functions: list[Any] = [array.__reduce__()[0], array.__reduce_ex__(5)[0], number.__reduce__()[0]]
    names: dict[tuple[str, str], Any] = {(_current_module(each.__module__), each.__name__): each for each in functions}
    return names | {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}


_VALUES: Mapping[tuple[str, str], Any] = {
    **_numpy_functions(),
    ("_codecs", "encode"): _encode_latin1,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("decimal", "Decimal"): Decimal,
    ("datetime", "datetime"): dt.datetime,
    ("datetime", "date"): dt.date,
    ("datetime", "time"): dt.time,
    ("datetime", "timedelta"): dt.timedelta,
    ("datetime", "timezone"): dt.timezone,
}
