"""Reading pickles without running them.

A pickle is a program: it names functions and classes, calls them, and sets attributes of what they return. Here every
name is looked up in a short list of harmless functions, or becomes a class whose objects only keep their arguments and
their state. All other names are errors.

No function or class of numpy is reachable. A pickled `numpy.ndarray` could describe any memory with a forged shape,
strides or dtype, so pickles only fill placeholders for dtypes and arrays. Their content is checked, and they are
replaced by arrays when the pickle has been read.

What is allocated is in proportion to the size of the pickle, and so is the number of items of a result. A pickle refers
to a value that it has written before in 2 bytes, so it could copy a large value many times, or nest tuples that have
2**60 items in 200 bytes; all of them would be visited when such a tuple is hashed or shown.
"""

from __future__ import annotations

import datetime as dt
import io
import math
import pickle
import pickletools
import re
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Self

from quire.errors import DecodeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TYPE = re.compile(r"[A-Z]\w*Type")
_LIMIT_PER_BYTE = 16
"""The bytes that functions may allocate, and the items that the result may have, for each byte of the pickle."""
_SMALLEST_LIMIT = 1 << 20
_ABBREVIATION = reprlib.Repr()
_ABBREVIATION.maxlevel = 2
_MAX_TUPLE_DEPTH = 1000
"""The depth of tuples in tuples. Their hash recurses in C without a limit, which would overflow the stack of the
process. Python pickles no value that is nested deeper."""


@dataclass(frozen=True)
class PickledType:
    """A type that a pickle names. It cannot be called."""

    module: str
    name: str

    def __setstate__(self, state: Any) -> None:
        raise DecodeError("the pickle changes a type, which is refused.")


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


class PickledObject:
    """An instance of a class that is not looked up: it keeps the name of the class, the arguments and the state."""

    __slots__ = ("__dict__", "arguments")  # the slot, so that a state cannot replace the arguments
    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Self:
        pickled = super().__new__(cls)
        pickled.arguments = arguments
        return pickled

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    @property
    def kind(self) -> str:
        """The name of the class."""
        return type(self).__name__


class _Unpickler(pickle.Unpickler):
    """Looks up names with a function, and nowhere else."""

    def __init__(self, content: bytes, find: Callable[[str, str], Any]) -> None:
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
        raise DecodeError(f"the pickle refers to {_ABBREVIATION.repr(pid)} outside of itself, which is refused.")


class _Names:
    """The names that a pickle may use, and how many bytes or items it may still have."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._limit = self._left = max(_LIMIT_PER_BYTE * len(content), _SMALLEST_LIMIT)

    def load(self) -> Any:
        """Return the value of the pickle."""
        try:
            _check_opcodes(self._content, self._limit)
            value = self.finish(_Unpickler(self._content, self.find).load())
            items = _count_items(value, {})
        except DecodeError:
            raise
        except Exception as error:  # a broken pickle may raise anything
            raise DecodeError(f"the pickle is broken: {type(error).__name__}: {error}") from error
        if items > self._limit:
            raise _size_error(items)
        return value

    def find(self, module: str, name: str) -> Any:
        """Return what the pickle gets for a name; None if the name is refused."""
        raise NotImplementedError

    def finish(self, value: Any) -> Any:
        """Return the result for what the unpickler returned."""
        return value

    def charge(self, size: int) -> None:
        """Count bytes or items that are allocated; raise if the pickle is too small for them."""
        self._left -= size
        if self._left < 0:
            raise _size_error(size)

    def _constructor(self, constructor: Callable[..., Any]) -> PickleCall:
        def construct(*arguments: Any) -> Any:
            self.charge(sum(len(argument) for argument in arguments if isinstance(argument, Sized)))
            return constructor(*arguments)

        return PickleCall(construct)


def _size_error(size: int) -> DecodeError:
    return DecodeError(
        f"the pickle has arrays or containers of {size:,} bytes or items and more, "
        "too many for its size: it was altered, or repeats itself to exhaust the memory."
    )


def _check_opcodes(content: bytes, limit: int) -> None:
    """Raise for what would crash or stall the unpickler itself, before it runs."""
    tuples = _TupleSizes(limit)
    for opcode, argument, _ in pickletools.genops(content):  # raises for lengths beyond the end of the pickle
        # The unpickler would allocate a table for as many values as the highest number of a value, up to 2**32.
        if opcode.name in _PUT and isinstance(argument, int) and argument > len(content):
            raise DecodeError(f"the pickle numbers a value {argument:,}, more than its {len(content):,} bytes.")
        if opcode.name in ("EXT1", "EXT2", "EXT4"):
            raise DecodeError("the pickle names a function by a number of `copyreg`, which is refused.")
        tuples.follow(opcode, argument)


class _TupleSizes:
    """How many items of tuples a pickle makes Python visit.

    The hash of a tuple visits all of its items, and those of tuples in it: by recursion in C, and again for each key of
    a dict and item of a set. So the operations are followed with the number of items and the depth in the place of each
    value. Only tuples count: the hash of another value visits nothing, or there is none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._visited = 0
        self._stack: list[tuple[int, int]] = []  # items and depth
        self._marks: list[int] = []  # lengths of the stack: operations use the values above the last one
        self._memo: dict[int, tuple[int, int]] = {}

    def follow(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        """Follow an operation; raise if the tuples are too large."""
        name, stack = opcode.name, self._stack
        if name in _ATOMS:  # first, since most operations are of this kind
            stack.append(_ATOM)
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name == "POP" and self._marks and self._marks[-1] == len(stack):
            self._marks.pop()
        elif name == "MEMOIZE" or name in _PUT:
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in _GET:
            stack.append(self._memo[argument])
        elif opcode.stack_before:
            values = self._pop(opcode)
            if name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
                stack.append(self._size_of_tuple(values))
            else:
                self._visited += sum(items for items, _ in values)
                if self._visited > self._limit:
                    raise _size_error(self._visited)
                stack.extend([max(values, default=_ATOM)] * len(opcode.stack_after))

    def _pop(self, opcode: pickletools.OpcodeInfo) -> list[tuple[int, int]]:
        if pickletools.markobject in opcode.stack_before:  # the values above the mark, and some before it
            first = self._marks.pop() - opcode.stack_before.index(pickletools.markobject)
        else:
            first = len(self._stack) - len(opcode.stack_before)
        if first < (self._marks[-1] if self._marks else 0):
            raise DecodeError(f"the pickle is broken: {opcode.name} has too few values.")
        values = self._stack[first:]
        del self._stack[first:]
        return values

    def _size_of_tuple(self, values: list[tuple[int, int]]) -> tuple[int, int]:
        items = 1 + sum(items for items, _ in values)
        depth = 1 + max((depth for _, depth in values), default=0)
        if items > self._limit or depth > _MAX_TUPLE_DEPTH:
            raise DecodeError(
                f"the pickle nests tuples {depth:,} levels deep, with {items:,} items and more, which is refused."
            )
        return items, depth


_ATOM = (1, 0)
_PUT, _GET = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}
_ATOMS = {op.name for op in pickletools.opcodes if not op.stack_before and op.stack_after} - {"MARK"} - _GET
"""The operations that add a value and use none."""


def _count_items(value: Any, counts: dict[int, int]) -> int:
    """Count the items of a value as often as it refers to them; a container in itself counts once."""
    parts: Iterable[Any]
    if isinstance(value, dict):
        parts = chain(value, value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif isinstance(value, PickledObject):
        parts = (value.arguments, value.__dict__)
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        parts = value.flat
    else:
        return 1
    if id(value) not in counts:
        counts[id(value)] = 1
        counts[id(value)] = 1 + sum(_count_items(part, counts) for part in parts)
    return counts[id(value)]


# --- schemas of Petastorm


def load_schema(content: bytes) -> Any:
    """Load a pickled Unischema as objects of type `PickledObject`; nothing of petastorm, pyspark or numpy is called."""
    return _SchemaNames(content).load()


class _SchemaNames(_Names):
    def find(self, module: str, name: str) -> Any:
        if module == "collections" and name == "OrderedDict":
            return self._constructor(OrderedDict)
        if (module, name) == ("pyspark.serializers", "_restore"):
            return PickleCall(_restore)
        if module in ("copy_reg", "copyreg") and name == "_reconstructor":
            return PickleCall(_reconstruct)
        if module in ("petastorm.unischema", "petastorm.codecs") or (module, name) == ("numpy", "dtype"):
            return type(name, (PickledObject,), {})
        if module == "pyspark.sql.types" and _TYPE.fullmatch(name):
            return type(name, (PickledObject,), {})
        if module in ("numpy", "builtins", "__builtin__") or (module, name) == ("decimal", "Decimal"):
            return PickledType(module, name)
        return None


def _restore(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:  # noqa: ARG001 - Spark's signature
    """Return a named tuple as older versions of Spark pickle it."""
    return type(name, (PickledObject,), {})(*values)


def _reconstruct(cls: Any, base: Any, state: Any) -> Any:  # noqa: ARG001 - the signature of copyreg
    """Return an object as the oldest protocols of pickle do."""
    if not (isinstance(cls, type) and issubclass(cls, PickledObject)):
        raise DecodeError(f"the pickle creates a {_ABBREVIATION.repr(cls)}, which is refused.")
    return cls(*state) if isinstance(state, tuple) else cls()  # a named tuple, as UnischemaField, has its values here


# --- values


def load_value(content: bytes) -> Any:
    """Load a pickled value that has only numbers, texts, containers, dates, and arrays of numpy.

    Arrays have booleans, integers, floats of up to 64 bits, complex numbers, texts, bytes or such values as objects.
    """
    return _ValueNames(content).load()


class PickledDtype:
    """A dtype of a pickle: a type and a size, then the byte order, without fields, subarrays or metadata."""

    __slots__ = ("dtype",)
    __hash__ = None  # type: ignore[assignment]  # so that it is in no set and no key, where it could not be replaced

    def __init__(self, code: Any, limit: int) -> None:
        match = _DTYPE.fullmatch(code) if isinstance(code, str) else None
        if match is None or int(match[2] or 0) > limit:
            raise DecodeError(
                f"the pickle has an array or number of dtype {_ABBREVIATION.repr(code)}, which is refused: only "
                "booleans, integers, floats, complex numbers, texts, bytes and objects are read."
            )
        self.dtype: np.dtype[Any] = np.dtype("O" if code[0] == "O" else code)

    def __setstate__(self, state: Any) -> None:
        # (3, byte order, subarray, names, fields, size, alignment, flags); version 4 has metadata.
        if not isinstance(state, tuple) or len(state) != 8 or state[0] != 3 or state[2:5] != (None, None, None):
            raise DecodeError("the pickle has a dtype with fields, subarrays or metadata, which is refused.")
        order, size = state[1], state[5]
        if order not in ("<", ">", "|", "=") or size not in (-1, self.dtype.itemsize):
            raise DecodeError(
                f"the pickle has a forged dtype: {self.dtype} with byte order "
                f"{_ABBREVIATION.repr(order)} and {_ABBREVIATION.repr(size)} bytes."
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
            raise DecodeError(f"the pickle has an array in order {_ABBREVIATION.repr(order)}, which is refused.")
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
            raise DecodeError(f"the pickle has an array of shape {_ABBREVIATION.repr(shape)}, which is refused.")
        # An array of shape (2**40, 0) takes no memory, but 2**40 lists.
        self._names.charge(math.prod(shape[: shape.index(0)] if 0 in shape else shape))
        return dtype.dtype


class _ValueNames(_Names):
    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._array_type = PickleCall(self._refuse_array_call)
        self._has_placeholders = False

    def find(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core").replace("__builtin__", "builtins")
        if (module, name) == ("numpy", "ndarray"):
            return self._array_type
        if (module, name) in _CONSTRUCTORS:
            return self._constructor(_CONSTRUCTORS[module, name])
        functions: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy", "dtype"): self._dtype,
            ("numpy._core.multiarray", "_reconstruct"): self._reconstruct,
            ("numpy._core.multiarray", "scalar"): self._scalar,
            ("numpy._core.numeric", "_frombuffer"): self._from_buffer,
        }
        function = functions.get((module, name))
        return None if function is None else PickleCall(function)

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

    def finish(self, value: Any) -> Any:
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
        raise DecodeError(f"the pickle encodes a text as {_ABBREVIATION.repr(encoding)}, which is refused.")
    return text.encode(encoding)


_DTYPE = re.compile(r"(b1|[iu][1248]|f[248]|c8|c16|O[48]?|[SU](\d{1,10}))")
_CONSTRUCTORS: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encode_latin1,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "bytes"): lambda: b"",  # older protocols call it so; with a number, it would allocate as many bytes
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
