"""Tensors as messages: of every framework, dense or sparse, with the elements inline or in a buffer."""

from __future__ import annotations

import math
import re
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.codec._context import Reader, Writer
from quire.codec._messages import TensorField
from quire.codec._wire import (
    DELIMITED,
    encode_delimited,
    encode_packed,
    encode_text,
    encode_uint,
    iter_fields,
    read_text,
    read_uints,
)
from quire.errors import DecodeError, EncodeError, MissingDependencyError, QuireError, SchemaError, TensorError
from quire.tensors import Framework, common_dtype, framework_of, get_framework, stored_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_BUFFER_SIZE = 4096
"""Elements of at least this many bytes are a buffer of their own; fewer are part of the tensor's message."""
MAX_AXES = 64
_DTYPE_KINDS = "biufcVmMUS"
_DTYPE_NAME = re.compile(r"bool|u?int\d+|b?float\d+\w*|complex\d+|(datetime|timedelta)64(\[\w+\])?|(str|bytes)\d{1,9}")


# --- encoding


def encode_tensor(value: object, writer: Writer) -> bytes:
    """Encode a tensor of any framework, dense or sparse."""
    if (
        type(value) is np.ndarray
        and value.nbytes < MIN_BUFFER_SIZE
        and value.dtype.isbuiltin == 1
        and value.dtype.kind != "O"
    ):
        return _encode_array_head(value.dtype, value.shape) + encode_delimited(TensorField.DATA, value.tobytes())
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
    head = encode_tensor_head(framework, value, framework.shape(value))
    if indices is not None:
        positions = np.ascontiguousarray(indices, "<i8").tobytes()
        head += encode_text(TensorField.LAYOUT, framework.layout(value))
        head += encode_delimited(TensorField.INDICES, positions) + encode_uint(TensorField.SPARSE_AXES, len(indices))
    return head + encode_elements(array, writer)


def encode_lent_tensor(array: NDArray[Any], framework: Framework, writer: Writer) -> bytes:
    """Encode a view that was read with `lend`, as a tensor of the framework that it would become."""
    return _encode_description(array.dtype.name, array.shape, framework.name) + encode_elements(array, writer)


@lru_cache(1024)  # small arrays of one dtype and shape are written by the thousand: their heads are the same bytes
def _encode_array_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Encode what describes an array of one of numpy's own dtypes, except its elements."""
    if sys.byteorder == "big" or not _is_encodable(dtype):
        raise EncodeError(f"numpy's dtype {dtype} has no form on the wire.")
    return _encode_description(dtype.name, shape, "numpy")


def encode_tensor_head(framework: Framework, value: Any, shape: tuple[int, ...]) -> bytes:
    """Encode what describes a tensor, except its elements."""
    requires_grad = bool(getattr(value, "requires_grad", False))
    is_wrapped = framework.unwrap(value) is not value
    flags = encode_uint(TensorField.REQUIRES_GRAD, requires_grad) + encode_uint(TensorField.WRAPPED, is_wrapped)
    return _encode_description(framework.dtype(value), shape, framework.name) + flags


def _encode_description(dtype: str, shape: tuple[int, ...], framework: str) -> bytes:
    return (
        encode_text(TensorField.DTYPE, dtype)
        + encode_packed(TensorField.SHAPE, shape)
        + encode_text(TensorField.FRAMEWORK, framework)
    )


def encode_elements(array: NDArray[Any], writer: Writer) -> bytes:
    """Encode the elements of an array, inline or in a buffer."""
    if array.dtype.kind == "O":
        return _encode_strings(array)
    array = to_wire_array(array)
    if array.nbytes < MIN_BUFFER_SIZE:
        return encode_delimited(TensorField.DATA, array.tobytes())
    return encode_uint(TensorField.BUFFER, writer.add(array.reshape(-1).view(np.uint8)))


def encode_scalar(value: np.generic, writer: Writer) -> bytes:
    """Encode a numpy scalar."""
    array = np.asarray(value)
    return encode_text(TensorField.DTYPE, array.dtype.name) + encode_elements(array, writer)


def to_wire_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array whose memory is its elements in C order, little-endian; a copy only where it is not yet."""
    if not _is_encodable(array.dtype):
        raise EncodeError(f"numpy's dtype {array.dtype} has no form on the wire.")
    order = array.dtype.byteorder
    if order == ">" or (order == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array)


@lru_cache
def _is_encodable(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype has a name from which the same dtype is read."""
    if dtype.hasobject or dtype.names is not None or dtype.kind not in _DTYPE_KINDS:
        return False
    try:
        return bool(common_dtype(dtype.name) == dtype.newbyteorder("="))
    except QuireError:
        return False


def _encode_strings(array: NDArray[Any]) -> bytes:
    items = array.ravel().tolist()
    types = set(map(type, items))
    if not types <= {bytes} and not types <= {str}:
        raise EncodeError(
            "an array of objects has a form on the wire only where all of them are texts, or all are bytes."
        )
    is_text = types == {str}
    content = b"".join(encode_delimited(TensorField.STRINGS, item.encode() if is_text else item) for item in items)
    return content + encode_uint(TensorField.TEXT, is_text)


# --- decoding


def decode_tensor(reader: Reader, start: int, end: int) -> object:
    """Decode a tensor of the framework that it was written from."""
    return decode_tensor_parts(reader, TensorParts(reader, start, end))


def decode_tensor_parts(reader: Reader, parts: TensorParts) -> object:
    """Create the tensor of a message whose fields have been read."""
    framework = _find_framework(parts, reader)
    value: Any
    reader.charge(200)
    try:
        if parts.layout:
            value = parts.decode_sparse(reader, framework)
        else:
            value = framework.from_numpy(parts.elements(reader, parts.shape))
    except (TensorError, ValueError, TypeError, RuntimeError, OverflowError, NotImplementedError, IndexError) as error:
        if isinstance(error, DecodeError):
            raise
        raise DecodeError(f"a {framework.name} tensor of dtype {parts.dtype!r} cannot be read: {error}") from error
    if parts.requires_grad and framework.name == "torch":
        if not (value.is_floating_point() or value.is_complex()):
            raise DecodeError(f"a torch tensor of dtype {parts.dtype!r} has no gradient.")
        value.requires_grad_()
    if parts.wrapped and framework.name == "tensorflow":
        return framework.wrap(value)
    return value


def decode_lent_tensor(reader: Reader, parts: TensorParts) -> tuple[NDArray[Any], Framework] | None:
    """Return the elements as a view of the message, and the framework that they are for; None for special tensors.

    Only tensors whose later conversion cannot fail are lent: numpy and torch have all of `_LENDABLE_DTYPES`.
    """
    # A tensor inside of the message (without a buffer) is small, and would keep the whole message in memory.
    special = parts.layout or parts.requires_grad or parts.wrapped or not parts.buffer
    if special or parts.framework not in ("numpy", "torch") or parts.dtype not in _LENDABLE_DTYPES:
        return None
    if sys.byteorder == "big":
        return None
    framework = _find_framework(parts, reader)
    try:
        return parts.elements(reader, parts.shape, copy=False), framework
    except ValueError:  # a shape that numpy rejects; the error is raised where tensors are created
        return None


_LENDABLE_DTYPES = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"))

_TEXT_ATTRIBUTES = {TensorField.DTYPE: "dtype", TensorField.FRAMEWORK: "framework", TensorField.LAYOUT: "layout"}
_SPAN_ATTRIBUTES = {TensorField.DATA: "data", TensorField.INDICES: "indices"}
_NUMBER_ATTRIBUTES = {
    TensorField.BUFFER: "buffer",
    TensorField.REQUIRES_GRAD: "requires_grad",
    TensorField.WRAPPED: "wrapped",
    TensorField.TEXT: "is_text",
    TensorField.SPARSE_AXES: "sparse_axes",
}


class TensorParts:
    """The fields of a tensor message; `data` and `indices` are positions in the message."""

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
        for number, wire_type, a, b in iter_fields(data, start, end):
            if wire_type == DELIMITED:
                if number in _TEXT_ATTRIBUTES:
                    setattr(self, _TEXT_ATTRIBUTES[number], read_text(data, a, b))
                elif number in _SPAN_ATTRIBUTES:
                    setattr(self, _SPAN_ATTRIBUTES[number], (a, b))
                elif number == TensorField.SHAPE:
                    # A varint has at most 10 bytes. No more are read than the limit below needs to be exceeded.
                    shape += read_uints(data, wire_type, a, min(b, a + 10 * MAX_AXES + 10))
                elif number == TensorField.STRINGS:
                    reader.charge(41 + b - a)
                    self.strings.append(data[a:b])
            elif number in _NUMBER_ATTRIBUTES:
                setattr(self, _NUMBER_ATTRIBUTES[number], a)
            elif number == TensorField.SHAPE:
                shape.append(a)
            if len(shape) > MAX_AXES:
                raise DecodeError(f"a tensor has more than {MAX_AXES} axes.")
        self.shape = tuple(shape)

    def elements(self, reader: Reader, shape: tuple[int, ...] | None, *, copy: bool | None = None) -> NDArray[Any]:
        """Return the elements as a numpy array; without a shape, as a vector of all.

        The number of elements is checked against the number of bytes before memory is allocated.
        """
        if self.dtype in ("string", "object"):
            return self._string_elements(shape)
        dtype = _parse_dtype(self.dtype)
        if sys.byteorder == "big":
            dtype = dtype.newbyteorder("<")
        if self.buffer:
            data: Any = reader.buffer(self.buffer)
            start, size = 0, len(data)
        else:
            data, start = reader.data, self.data[0]
            size = self.data[1] - start
        if shape is not None and math.prod(shape) * dtype.itemsize != size:
            expected = math.prod(shape) * dtype.itemsize
            raise DecodeError(f"a tensor of {self.dtype} {shape} has {expected} bytes, but {size} are there.")
        if size % dtype.itemsize:
            raise DecodeError(f"{size} bytes are no whole number of {self.dtype} elements.")
        if not size:
            return np.empty(0 if shape is None else shape, dtype)
        # Elements inside of the message are always copied: a view would keep the whole message in memory, and its
        # elements would not be aligned.
        reader.charge(size)  # also for a buffer, since many tensors may refer to the same one
        array: NDArray[Any] = np.frombuffer(data, dtype, size // dtype.itemsize, start)
        if not dtype.isnative:
            array = array.astype(dtype.newbyteorder("="))
        elif (reader.options.copy if copy is None else copy) or not self.buffer:
            array = array.copy()
        return array if shape is None else array.reshape(shape)

    def decode_sparse(self, reader: Reader, framework: Framework) -> object:
        """Create a sparse tensor from its coordinates: `indices` has a row of int64 for each of the sparse axes."""
        start, end = self.indices
        shape, axes = self.shape, self.sparse_axes
        entries = (end - start) // (8 * axes) if axes else 0
        if not 0 < axes <= len(shape) or end - start != 8 * axes * entries:
            raise DecodeError(f"a sparse tensor of shape {shape} has {end - start} bytes of indices for {axes} axes.")
        indices = np.frombuffer(reader.data[start:end], "<i8").astype(np.int64).reshape(axes, entries)
        if max(shape) >= 1 << 62 or (indices < 0).any() or (indices >= np.array(shape[:axes]).reshape(-1, 1)).any():
            raise DecodeError(f"a sparse tensor of shape {shape} has an index outside of it.")
        if not self.layout.endswith("coo"):  # the other layouts take memory for every row, even for empty ones
            reader.charge(16 * max(shape) * (entries if "dia" in self.layout else 1))
            if self.layout.endswith(("lil", "dok")):  # Python lists and numbers
                reader.charge(160 * shape[0] + 250 * entries)
        values = self.elements(reader, (entries, *shape[axes:]))
        return framework.from_coo(indices, values, shape, self.layout)

    def _string_elements(self, shape: tuple[int, ...] | None) -> NDArray[Any]:
        array = np.empty(len(self.strings), dtype=object)
        try:
            array[:] = [str(item, "utf-8") for item in self.strings] if self.is_text else self.strings
        except UnicodeDecodeError as error:
            raise DecodeError(f"a text in a tensor is not UTF-8: {error.reason}.") from error
        if shape is not None and math.prod(shape) != len(array):
            raise DecodeError(f"a tensor of strings {shape} has {len(array)} elements.")
        return array if shape is None else array.reshape(shape)


@lru_cache
def _parse_dtype(name: str) -> np.dtype[Any]:
    if not _DTYPE_NAME.fullmatch(name):
        raise DecodeError(f"{name[:40]!r} is not a dtype.")
    try:
        dtype = common_dtype(name)
    except (TensorError, TypeError, ValueError, OverflowError) as error:
        raise DecodeError(f"{name[:40]!r} is not a dtype.") from error
    if not _is_encodable(dtype) or dtype.itemsize == 0:
        raise DecodeError(f"dtype {name[:40]!r} cannot be read.")
    return dtype


def _find_framework(parts: TensorParts, reader: Reader) -> Framework:
    try:
        return stored_framework(parts.framework or "numpy")
    except SchemaError as error:
        raise DecodeError(f"{parts.framework[:40]!r} is not a framework.") from error
    except MissingDependencyError as error:
        if reader.options.missing == "numpy" and not parts.layout:
            return get_framework("numpy")
        raise type(error)(f"{error} (or pass missing='numpy' to read the tensor as numpy)", name=error.name) from error


def decode_scalar(reader: Reader, start: int, end: int) -> np.generic:
    """Decode a numpy scalar."""
    array = TensorParts(reader, start, end).elements(reader, None)
    if len(array) != 1:
        raise DecodeError(f"a scalar has {len(array)} elements.")
    scalar: np.generic = array[0]
    return scalar
