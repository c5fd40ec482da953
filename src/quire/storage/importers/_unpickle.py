"""Reading pickles without running them.

A pickle is a program: it names functions and classes, calls them, and sets attributes of what they return. Here every
name is looked up in a short list of harmless functions, or becomes a stand-in that only keeps its arguments. All other
names are errors.

No function or class of numpy is reachable. A pickled `numpy.ndarray` could describe any memory with a forged shape,
strides or dtype, so pickles only fill placeholders for dtypes and arrays. Their content is checked, and they are
replaced by arrays when the pickle has been read. What is allocated is in proportion to the size of the pickle.
"""

from __future__ import annotations

import datetime as dt
import io
import math
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Sized
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Self

from quire.errors import DecodeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TYPE = re.compile(r"[A-Z]\w*Type")
_CALL_BYTES = 16
"""The bytes that functions may allocate for each byte of the pickle. A pickle refers to a value that it has written
before in 2 bytes, so without a limit a small pickle could copy a large value many times."""
_SMALLEST_LIMIT = 1 << 20


@dataclass(frozen=True)
class TypeName:
    """A type that a pickle names. It cannot be called."""

    module: str
    name: str


class PickleCall:
    """A function that a pickle may call.

    A pickle may set attributes of what it names, such as the default arguments of a function. It cannot do so here.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise DecodeError("the pickle changes a function, which is refused.")


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


def _load(content: bytes, find: FindName, finish: Callable[[Any], Any] = lambda value: value) -> Any:
    try:
        _check_opcodes(content)
        return finish(_Unpickler(content, find).load())
    except DecodeError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise DecodeError(f"the pickle is broken: {type(error).__name__}: {error}") from error


def _check_opcodes(content: bytes) -> None:
    """Raise for lengths beyond the end of the pickle, and for operations that would avoid the checks.

    The unpickler would allocate a table for as many values as the highest number of a value, up to 2**32.
    """
    for opcode, argument, _ in pickletools.genops(content):
        numbers_value = opcode.name in ("PUT", "BINPUT", "LONG_BINPUT")
        if numbers_value and isinstance(argument, int) and argument > len(content):
            raise DecodeError(f"the pickle numbers a value {argument:,}, more than its {len(content):,} bytes.")
        if opcode.name in ("EXT1", "EXT2", "EXT4"):
            raise DecodeError("the pickle names a function by a number of `copyreg`, which is refused.")


# --- schemas of Petastorm


def load_schema(content: bytes) -> Any:
    """Load a pickled Unischema as stand-ins; nothing of petastorm, pyspark or numpy is called."""
    return _load(content, _find_in_schema)


def _find_in_schema(module: str, name: str) -> Any:
    if module == "collections" and name == "OrderedDict":
        return PickleCall(OrderedDict)
    if (module, name) == ("pyspark.serializers", "_restore"):
        return PickleCall(_restore)
    if module in ("copy_reg", "copyreg") and name == "_reconstructor":
        return PickleCall(_reconstruct)
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
    """Load a pickled value that has only numbers, texts, containers, dates, and arrays of numpy.

    Arrays have booleans, integers, floats of up to 64 bits, complex numbers, texts, bytes or such values as objects.
    """
    names = _ValueNames(max(_CALL_BYTES * len(content), _SMALLEST_LIMIT))
    return _load(content, names.find, names.replace_placeholders)


class PickledDtype:
    """A dtype of a pickle: a type and a size, then the byte order, without fields, subarrays or metadata."""

    __slots__ = ("dtype",)
    __hash__ = None  # type: ignore[assignment]  # so that it is in no set and no key, where it could not be replaced

    def __init__(self, code: Any, limit: int) -> None:
        match = _DTYPE.fullmatch(code) if isinstance(code, str) else None
        if match is None or int(match[2] or 0) > limit:
            raise DecodeError(
                f"the pickle has an array or number of dtype {str(code)[:40]!r}, which is refused: only booleans, "
                "integers, floats, complex numbers, texts, bytes and objects are read."
            )
        self.dtype: np.dtype[Any] = np.dtype("O" if code[0] == "O" else code)

    def __setstate__(self, state: Any) -> None:
        # (3, byte order, subarray, names, fields, size, alignment, flags); version 4 has metadata.
        if not isinstance(state, tuple) or len(state) != 8 or state[0] != 3 or state[2:5] != (None, None, None):
            raise DecodeError("the pickle has a dtype with fields, subarrays or metadata, which is refused.")
        order, size = state[1], state[5]
        if order not in ("<", ">", "|", "=") or size not in (-1, self.dtype.itemsize):
            raise DecodeError(
                f"the pickle has a forged dtype: {self.dtype} with byte order {order!r} and {size!r} bytes."
            )
        self.dtype = self.dtype.newbyteorder(order)


class PickledArray:
    """An array of a pickle, which is filled once."""

    __slots__ = ("_names", "array", "items")
    __hash__ = None  # type: ignore[assignment]  # see PickledDtype

    def __init__(self, names: _ValueNames) -> None:
        self._names = names
        self.array: NDArray[Any] | None = None
        self.items: NDArray[Any] | None = None  # the same memory with one axis, if the array holds objects

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or state[0] != 1 or self.array is not None:
            raise DecodeError("the pickle has an array in a form that numpy does not write, which is refused.")
        _, shape, dtype, is_fortran, content = state
        if isinstance(content, list):
            self._fill_objects(content, shape, dtype)
        else:
            self.fill(content, shape, dtype, "F" if is_fortran else "C")

    def fill(self, content: Any, shape: Any, dtype: Any, order: Any, axes: Any = None) -> None:
        """Set the array to a copy of bytes, which must have the size of the shape."""
        kind = self._check(shape, dtype)
        if kind.hasobject or not isinstance(content, (bytes, bytearray)):
            raise DecodeError(f"the pickle has a {kind} array whose content is a {type(content).__name__}.")
        count = math.prod(shape)
        if len(content) != count * kind.itemsize:
            raise DecodeError(
                f"the pickle has a {kind} array of shape {shape} with {len(content):,} bytes, "
                f"which needs {count * kind.itemsize:,}."
            )
        if order not in ("C", "F", "K") or (axes is not None and order != "K"):
            raise DecodeError(f"the pickle has an array in order {order!r}, which is refused.")
        self._names.charge(len(content))
        # `frombuffer` accepts no empty buffer.
        flat = np.frombuffer(content, kind).copy() if len(content) else np.empty(count, kind)
        array = flat.reshape(shape, order="F" if order == "F" else "C")
        self.array = array if axes is None else array.transpose(axes)

    def _fill_objects(self, content: list[Any], shape: Any, dtype: Any) -> None:
        kind = self._check(shape, dtype)
        if not kind.hasobject or len(content) != math.prod(shape):
            raise DecodeError(f"the pickle has a {kind} array of shape {shape} with a list of {len(content):,} items.")
        self._names.charge(8 * len(content))
        self.items = np.empty(len(content), object)
        for number, item in enumerate(content):
            self.items[number] = item
        self.array = self.items.reshape(shape)

    def _check(self, shape: Any, dtype: Any) -> np.dtype[Any]:
        """Check the types of a shape and a dtype, and how many items an array has, also if they take no memory."""
        if not isinstance(dtype, PickledDtype):
            raise DecodeError(f"the pickle has an array whose dtype is a {type(dtype).__name__}.")
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise DecodeError(f"the pickle has an array of shape {str(shape)[:100]}, which is refused.")
        # An array of shape (2**40, 0) takes no memory, but 2**40 lists.
        self._names.charge(math.prod(shape[: shape.index(0)] if 0 in shape else shape))
        return dtype.dtype


class _ValueNames:
    """The names that a pickled value may use, and how many bytes its functions may still allocate."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit
        self._array_type = PickleCall(self._refuse_array_call)
        self._has_placeholders = False

    def find(self, module: str, name: str) -> Any:
        """Return the function of a name; None if the name is refused."""
        module = module.replace("numpy.core", "numpy._core").replace("__builtin__", "builtins")
        if (module, name) == ("numpy", "ndarray"):
            return self._array_type
        if (module, name) in _CONSTRUCTORS:
            return PickleCall(lambda *arguments: self._construct(_CONSTRUCTORS[module, name], arguments))
        functions: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy", "dtype"): self._dtype,
            ("numpy._core.multiarray", "_reconstruct"): self._reconstruct,
            ("numpy._core.multiarray", "scalar"): self._scalar,
            ("numpy._core.numeric", "_frombuffer"): self._from_buffer,
        }
        function = functions.get((module, name))
        return None if function is None else PickleCall(function)

    def charge(self, size: int) -> None:
        """Count bytes or items that are allocated; raise if the pickle is too small for them."""
        self._left -= size
        if self._left < 0:
            raise DecodeError(
                f"the pickle has arrays or containers of {size:,} bytes or items and more, "
                "too many for its size: it was altered, or repeats itself to exhaust the memory."
            )

    def _construct(self, constructor: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        self.charge(sum(len(argument) for argument in arguments if isinstance(argument, Sized)))
        return constructor(*arguments)

    def _refuse_array_call(self, *_: Any) -> Any:
        raise DecodeError("the pickle calls numpy.ndarray, which is refused: it could describe any memory.")

    def _dtype(self, code: Any, align: Any = False, copy: Any = True) -> PickledDtype:  # noqa: FBT002 - numpy's
        self._has_placeholders = True
        return PickledDtype(code, self._limit)

    def _reconstruct(self, array_type: Any, shape: Any, code: Any) -> PickledArray:
        if array_type is not self._array_type or shape != (0,) or code not in (b"b", "b"):
            raise DecodeError("the pickle creates an array of another class or form than numpy writes: refused.")
        self._has_placeholders = True
        return PickledArray(self)

    def _from_buffer(self, content: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> PickledArray:
        placeholder = PickledArray(self)
        placeholder.fill(content, shape, dtype, order, axes)
        return placeholder

    def _scalar(self, dtype: Any, content: Any) -> Any:
        if not isinstance(dtype, PickledDtype) or dtype.dtype.hasobject or not isinstance(content, bytes):
            raise DecodeError("the pickle has a number in a form that numpy does not write, which is refused.")
        if len(content) != dtype.dtype.itemsize:
            raise DecodeError(f"the pickle has a number of dtype {dtype.dtype} with {len(content):,} bytes.")
        self.charge(len(content))
        return np.frombuffer(content, dtype.dtype)[0] if content else dtype.dtype.type()

    def replace_placeholders(self, value: Any) -> Any:
        """Replace dtypes and arrays in lists, tuples and dicts; other containers cannot hold them."""
        return self._replace(value, {}) if self._has_placeholders else value

    def _replace(self, value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
        # `done` also keeps the old values, whose ids would otherwise be given to new ones.
        kind = type(value)
        if kind is PickledDtype:
            return value.dtype
        if kind not in (list, tuple, dict, OrderedDict, PickledArray):
            return value
        if id(value) in done:
            return done[id(value)][1]
        if kind is tuple:
            replaced = tuple(self._replace(item, done) for item in value)
            done[id(value)] = value, replaced
            return replaced
        if kind is PickledArray:
            if value.array is None:
                raise DecodeError("the pickle has an array without content.")
            done[id(value)] = value, value.array
            for number, item in enumerate(() if value.items is None else value.items):
                value.items[number] = self._replace(item, done)
            return value.array
        done[id(value)] = value, value
        for key, item in enumerate(value) if kind is list else kind.items(value):
            value[key] = self._replace(item, done)
        return value


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Return bytes as older protocols write them: as text."""
    if encoding != "latin1":
        raise DecodeError(f"the pickle encodes a text as {encoding!r}, which is refused.")
    return text.encode(encoding)


def _empty_bytes() -> bytes:
    """Return what older protocols call `bytes` for; with a number, it would allocate as many bytes."""
    return b""


_DTYPE = re.compile(r"(b1|[iu][1248]|f[248]|c8|c16|O[48]?|[SU](\d{1,10}))")
_CONSTRUCTORS: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encode_latin1,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "bytes"): _empty_bytes,
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
