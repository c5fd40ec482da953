"""Tensors as messages."""

from __future__ import annotations

import math
import re
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.codec._context import Reader, Writer
from quire.codec._wire import DELIMITED, delimited, fields, packed, read_text, read_uints, text, uint
from quire.errors import DecodeError, EncodeError, MissingDependencyError, QuireError, SchemaError, TensorError
from quire.tensors import Framework, common_dtype, framework_of, get_framework, stored_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGE = 4096
"""Elements of so many bytes go into a buffer of their own."""
MAX_AXES = 64
_KINDS = "biufcVmMUS"
_DTYPE_NAME = re.compile(r"bool|u?int\d+|b?float\d+\w*|complex\d+|(datetime|timedelta)64(\[\w+\])?|(str|bytes)\d{1,9}")


# --- out


def encode_tensor(value: Any, writer: Writer) -> bytes:
    """A tensor of any framework, dense or sparse."""
    if type(value) is np.ndarray and value.nbytes < LARGE and value.dtype.isbuiltin == 1 and value.dtype.kind != "O":
        return _array_head(value.dtype, value.shape) + delimited(5, value.tobytes())
    framework = framework_of(value)
    if framework is None:
        raise EncodeError(f"{type(value).__name__} is not a tensor.")
    reason = framework.refusal(value)
    if reason is not None:
        raise EncodeError(f"the {framework.name} tensor cannot be written: {reason}.")
    try:
        indices, array = framework.to_coo(value) if framework.is_sparse(value) else (None, framework.to_numpy(value))
    except (TensorError, RuntimeError, TypeError, NotImplementedError) as error:
        raise EncodeError(f"the {framework.name} tensor cannot be written: {error}") from error
    head = tensor_head(framework, value, framework.shape(value))
    if indices is not None:
        positions = np.ascontiguousarray(indices, "<i8").tobytes()
        head += text(4, framework.layout(value)) + delimited(7, positions) + uint(12, len(indices))
    return head + encode_elements(array, writer)


def encode_lent(array: NDArray[Any], framework: Framework, writer: Writer) -> bytes:
    """A tensor that was lent, of the framework that it is to be."""
    return text(1, array.dtype.name) + packed(2, array.shape) + text(3, framework.name) + encode_elements(array, writer)


@lru_cache(1024)
def _array_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What is told of an array of one of numpy's own dtypes beside its elements."""
    if sys.byteorder == "big" or not _has_form(dtype):
        raise EncodeError(f"numpy's dtype {dtype} has no form on the wire.")
    return text(1, dtype.name) + packed(2, shape) + text(3, "numpy")


def tensor_head(framework: Framework, value: Any, shape: tuple[int, ...]) -> bytes:
    """What is told of a tensor beside its elements."""
    flags = uint(9, int(bool(getattr(value, "requires_grad", False)))) + uint(
        10, int(framework.unwrap(value) is not value)
    )
    return text(1, framework.dtype(value)) + packed(2, shape) + text(3, framework.name) + flags


def encode_elements(array: NDArray[Any], writer: Writer) -> bytes:
    """The elements of an array, inline or in a buffer."""
    if array.dtype.kind == "O":
        return _encode_strings(array)
    array = plain_array(array)
    if array.nbytes < LARGE:
        return delimited(5, array.tobytes())
    return uint(6, writer.add(array.reshape(-1).view(np.uint8)))


def plain_array(array: NDArray[Any]) -> NDArray[Any]:
    """An array whose memory is its elements, row by row, little-endian."""
    if not _has_form(array.dtype):
        raise EncodeError(f"numpy's dtype {array.dtype} has no form on the wire.")
    order = array.dtype.byteorder
    if order == ">" or (order == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array)


@lru_cache
def _has_form(dtype: np.dtype[Any]) -> bool:
    if dtype.hasobject or dtype.names is not None or dtype.kind not in _KINDS:
        return False
    try:
        return bool(common_dtype(dtype.name) == dtype.newbyteorder("="))
    except QuireError:
        return False


def _encode_strings(array: NDArray[Any]) -> bytes:
    items = array.ravel().tolist()
    kinds = set(map(type, items))
    if not kinds <= {bytes} and not kinds <= {str}:
        raise EncodeError(
            "an array of objects has a form on the wire only where all of them are texts, or all are bytes."
        )
    is_text = kinds == {str}
    content = b"".join(delimited(8, item.encode() if is_text else item) for item in items)
    return content + uint(11, int(is_text))


# --- in


def decode_tensor(reader: Reader, start: int, end: int) -> Any:
    """The tensor again, in the framework that it was written from."""
    return decode_parts(reader, TensorParts(reader, start, end))


def decode_parts(reader: Reader, parts: TensorParts) -> Any:
    """The tensor of a message whose fields have been read."""
    framework = _framework(parts, reader)
    reader.charge(200)
    try:
        if parts.layout:
            value = _sparse(parts, framework, reader)
        else:
            value = framework.from_numpy(parts.elements(reader, parts.shape))
    except (TensorError, ValueError, TypeError, RuntimeError, OverflowError, NotImplementedError, IndexError) as error:
        if isinstance(error, DecodeError):
            raise
        raise DecodeError(f"a {framework.name} tensor of dtype {parts.dtype!r} cannot be read: {error}") from error
    return _finished(value, parts, framework)


def lent_tensor(reader: Reader, parts: TensorParts) -> tuple[NDArray[Any], Framework] | None:
    """The elements as a view of the message, and the framework whose tensor they are to be; None for what is special.

    Only where no error can come later: both frameworks have all these dtypes.
    """
    special = parts.layout or parts.requires_grad or parts.wrapped or not parts.buffer
    if special or parts.framework not in ("numpy", "torch") or parts.dtype not in _LENT or sys.byteorder == "big":
        return None
    framework = _framework(parts, reader)
    try:
        return parts.elements(reader, parts.shape, copy=False), framework
    except ValueError:  # numpy's, of a shape that it does not take: told where tensors are made
        return None


_LENT = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"))


def _finished(value: Any, parts: TensorParts, framework: Framework) -> Any:
    if parts.requires_grad and framework.name == "torch":
        if not (value.is_floating_point() or value.is_complex()):
            raise DecodeError(f"a torch tensor of dtype {parts.dtype!r} has no gradient.")
        value.requires_grad_()
    if parts.wrapped and framework.name == "tensorflow":
        return framework.wrap(value)
    return value


_TEXTS = {1: "dtype", 3: "framework", 4: "layout"}
_SPANS = {5: "data", 7: "indices"}
_NUMBERS = {6: "buffer", 9: "requires_grad", 10: "wrapped", 11: "is_text", 12: "sparse_axes"}


class TensorParts:
    """The fields of a tensor message."""

    __slots__ = (
        *("buffer", "data", "dtype", "framework", "indices", "is_text"),
        *("layout", "requires_grad", "shape", "sparse_axes", "strings", "wrapped"),
    )

    def __init__(self, reader: Reader, start: int, end: int) -> None:
        data = reader.data
        self.dtype = self.framework = self.layout = ""
        self.data, self.indices = (0, 0), (0, 0)
        self.buffer = self.sparse_axes = self.requires_grad = self.wrapped = self.is_text = 0
        self.strings: list[bytes] = []
        shape: list[int] = []
        for number, kind, a, b in fields(data, start, end):
            if kind == DELIMITED:
                if number in _TEXTS:
                    setattr(self, _TEXTS[number], read_text(data, a, b))
                elif number in _SPANS:
                    setattr(self, _SPANS[number], (a, b))
                elif number == 2:
                    shape += read_uints(data, kind, a, min(b, a + 10 * MAX_AXES + 10))  # more are refused below
                elif number == 8:
                    reader.charge(41 + b - a)
                    self.strings.append(data[a:b])
            elif number in _NUMBERS:
                setattr(self, _NUMBERS[number], a)
            elif number == 2:
                shape.append(a)
            if len(shape) > MAX_AXES:
                raise DecodeError(f"a tensor has more than {MAX_AXES} axes.")
        self.shape = tuple(shape)

    def elements(self, reader: Reader, shape: tuple[int, ...] | None, *, copy: bool | None = None) -> NDArray[Any]:
        """The elements as numpy; their number is checked against the bytes that are there. None: a vector of all."""
        if self.dtype in ("string", "object"):
            return self._strings(shape)
        dtype = self._numpy_dtype()
        if self.buffer:
            data: Any = reader.buffer(self.buffer)
            start, size = 0, len(data)
        else:
            data, start = reader.data, self.data[0]
            size = self.data[1] - start
        if shape is not None and math.prod(shape) * dtype.itemsize != size:
            wanted = math.prod(shape) * dtype.itemsize
            raise DecodeError(f"a tensor of {self.dtype} {shape} has {wanted} bytes, but {size} are there.")
        if size % dtype.itemsize:
            raise DecodeError(f"{size} bytes are no whole number of {self.dtype} elements.")
        if not size:
            return np.empty(0 if shape is None else shape, dtype)
        reader.charge(size)  # a buffer may be that of many tensors
        array: NDArray[Any] = np.frombuffer(data, dtype, size // dtype.itemsize, start)
        if not dtype.isnative:
            array = array.astype(dtype.newbyteorder("="))
        elif (reader.options.copy if copy is None else copy) or not self.buffer:
            array = array.copy()
        return array if shape is None else array.reshape(shape)

    def _numpy_dtype(self) -> np.dtype[Any]:
        dtype = _stored_dtype(self.dtype)
        return dtype.newbyteorder("<") if sys.byteorder == "big" else dtype

    def _strings(self, shape: tuple[int, ...] | None) -> NDArray[Any]:
        array = np.empty(len(self.strings), dtype=object)
        try:
            array[:] = [str(item, "utf-8") for item in self.strings] if self.is_text else self.strings
        except UnicodeDecodeError as error:
            raise DecodeError(f"a text in a tensor is not UTF-8: {error.reason}.") from error
        if shape is not None and math.prod(shape) != len(array):
            raise DecodeError(f"a tensor of strings {shape} has {len(array)} elements.")
        return array if shape is None else array.reshape(shape)


@lru_cache
def _stored_dtype(name: str) -> np.dtype[Any]:
    if not _DTYPE_NAME.fullmatch(name):
        raise DecodeError(f"{name[:40]!r} is not a dtype.")
    try:
        dtype = common_dtype(name)
    except (TensorError, TypeError, ValueError, OverflowError) as error:
        raise DecodeError(f"{name[:40]!r} is not a dtype.") from error
    if not _has_form(dtype) or dtype.itemsize == 0:
        raise DecodeError(f"dtype {name[:40]!r} cannot be read.")
    return dtype


def _framework(parts: TensorParts, reader: Reader) -> Framework:
    try:
        return stored_framework(parts.framework or "numpy")
    except SchemaError as error:
        raise DecodeError(f"{parts.framework[:40]!r} is not a framework.") from error
    except MissingDependencyError as error:
        if reader.options.missing == "numpy" and not parts.layout:
            return get_framework("numpy")
        raise type(error)(f"{error} (or pass missing='numpy' to read the tensor as numpy)", name=error.name) from error


def _sparse(parts: TensorParts, framework: Framework, reader: Reader) -> Any:
    start, end = parts.indices
    shape, axes = parts.shape, parts.sparse_axes
    entries = (end - start) // (8 * axes) if axes else 0
    if not 0 < axes <= len(shape) or end - start != 8 * axes * entries:
        raise DecodeError(f"a sparse tensor of shape {shape} has {end - start} bytes of indices for {axes} axes.")
    indices = np.frombuffer(reader.data[start:end], "<i8").astype(np.int64).reshape(axes, entries)
    if max(shape) >= 1 << 62 or (indices < 0).any() or (indices >= np.array(shape[:axes]).reshape(-1, 1)).any():
        raise DecodeError(f"a sparse tensor of shape {shape} has an index outside of it.")
    if not parts.layout.endswith("coo"):  # the others take memory for every row, whatever it holds
        reader.charge(16 * max(shape) * (entries if "dia" in parts.layout else 1))
        if parts.layout.endswith(("lil", "dok")):  # lists and numbers of Python
            reader.charge(160 * shape[0] + 250 * entries)
    values = parts.elements(reader, (entries, *shape[axes:]))
    return framework.from_coo(indices, values, shape, parts.layout)


def decode_scalar(reader: Reader, start: int, end: int) -> Any:
    """A numpy scalar."""
    array = TensorParts(reader, start, end).elements(reader, None)
    if len(array) != 1:
        raise DecodeError(f"a scalar has {len(array)} elements.")
    return array[0]
