"""Reading pickles without running them: names stand for values of our own, and all other names are refused."""

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
    """A type that a pickle names; it cannot be called."""

    module: str
    name: str


class Standing:
    """What a pickle makes of a class that is not looked up: its name, what it was made from, and its state."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Self:
        made = super().__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    @property
    def kind(self) -> str:
        """The name of the class."""
        return type(self).__name__


Found = Callable[[str, str], Any]


class _Unpickler(pickle.Unpickler):
    """Looks up names where it is told, and nowhere else."""

    def __init__(self, content: bytes, find: Found) -> None:
        super().__init__(io.BytesIO(content))
        self._find = find
        self._known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for, the same for the whole pickle."""
        if (module, name) not in self._known:
            found = self._find(module, name)
            if found is None:
                raise DecodeError(f"the pickle names {module}.{name}, which is refused: nothing of that name is run.")
            self._known[module, name] = found
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Values outside of the pickle are refused."""
        raise DecodeError(f"the pickle refers to {pid!r} outside of itself, which is refused.")


def _load(content: bytes, find: Found) -> Any:
    try:
        return _Unpickler(content, find).load()
    except DecodeError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise DecodeError(f"the pickle is broken: {type(error).__name__}: {error}") from error


# --- schemas of Petastorm


def load_schema(content: bytes) -> Any:
    """A pickled Unischema, in values of our own; nothing of petastorm, pyspark or numpy is called."""
    return _load(content, _schema_name)


def _schema_name(module: str, name: str) -> Any:
    if module == "collections" and name == "OrderedDict":
        return OrderedDict
    if (module, name) == ("pyspark.serializers", "_restore"):
        return _restored
    if module in ("copy_reg", "copyreg") and name == "_reconstructor":
        return _reconstructed
    if module in ("petastorm.unischema", "petastorm.codecs") or (module, name) == ("numpy", "dtype"):
        return type(name, (Standing,), {})
    if module == "pyspark.sql.types" and _TYPE.fullmatch(name):
        return type(name, (Standing,), {})
    if module in ("numpy", "builtins", "__builtin__") or (module, name) == ("decimal", "Decimal"):
        return TypeName(module, name)
    return None


def _restored(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:  # noqa: ARG001 - as it is called
    """A named tuple as older versions of Spark pickle it."""
    return type(str(name), (Standing,), {})(*values)


def _reconstructed(cls: Any, base: Any, state: Any) -> Any:  # noqa: ARG001 - as it is called
    """An object as the oldest protocols of pickle make it."""
    if not (isinstance(cls, type) and issubclass(cls, Standing)):
        raise DecodeError(f"the pickle makes a {cls!r}, which is refused.")
    return cls()


# --- values


def load_value(content: bytes) -> Any:
    """A pickled value of plain parts: numbers, texts, containers, dates, and numpy's arrays."""
    return _load(content, lambda module, name: _VALUES.get((_newer(module), name)))


def _newer(module: str) -> str:
    return module.replace("numpy.core", "numpy._core").replace("__builtin__", "builtins")


def _latin(text: str, encoding: str) -> bytes:
    """Bytes as the older protocols write them."""
    if encoding != "latin1":
        raise DecodeError(f"the pickle encodes a text as {encoding!r}, which is refused.")
    return text.encode(encoding)


def _numpy_parts() -> dict[tuple[str, str], Any]:
    """What numpy's own pickles call, as it names them itself."""
    array, number = np.zeros(1), np.float64(1)
    called: list[Any] = [array.__reduce__()[0], array.__reduce_ex__(5)[0], number.__reduce__()[0]]
    found: dict[tuple[str, str], Any] = {(_newer(each.__module__), each.__name__): each for each in called}
    return found | {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}


_VALUES: Mapping[tuple[str, str], Any] = {
    **_numpy_parts(),
    ("_codecs", "encode"): _latin,
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
