"""Tensors in JSON: dtype, shape, framework and nested lists.

    {"framework": "torch", "dtype": "float32", "shape": [2, 2], "data": [[1.0, 2.0], [3.0, "NaN"]]}

With "encoding": "base64" the data is base64 of the bytes, in row-major order and little-endian.
A sparse tensor also has its `layout` and `indices`. Complex numbers are [real, imaginary].
The plain form is the data alone.
"""

from __future__ import annotations

import base64
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import TensorError
from quire.tensors._framework import Framework, Tensor, array_of, cast_numbers, common_dtype
from quire.tensors._registry import framework_of, stored_framework
from quire.tensors._spec import DTYPES, format_shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.tensors._spec import TensorSpec

_MAX_EMPTY = 10_000_000
"""Items or bytes that a tensor may allocate beyond its data: a short text must not exhaust the memory."""
_default_form: ContextVar[str] = ContextVar("quire_json_tensors", default="lists")
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@contextmanager
def plain_json_tensors() -> Iterator[None]:
    """Write tensors as plain nested lists inside the block, where the serialization context names no form."""
    token = _default_form.set("plain")
    try:
        yield
    finally:
        _default_form.reset(token)


def tensor_to_json(value: Tensor, form: str | None = None) -> object:
    """Convert a tensor to plain JSON values, in the default form unless one is passed.

    Forms are 'lists', 'base64' (text and sparse tensors stay lists), and 'plain' (sparse tensors stay objects).
    """
    form = form or _default_form.get()
    framework = framework_of(value)
    if framework is None:
        raise TensorError(f"{type(value).__name__} is not a tensor.")
    dtype = framework.dtype(value)
    head = {"framework": framework.name, "dtype": dtype, "shape": list(framework.shape(value))}
    if form == "base64" and not framework.is_sparse(value) and _has_bytes(dtype):
        return {**head, "encoding": "base64", "data": _to_base64(framework.to_numpy(value))}
    if not framework.is_sparse(value):
        data = _to_lists(framework.to_numpy(value), dtype)
        return data if form == "plain" else {**head, "data": data}
    indices, values = framework.to_coo(value)
    return {**head, "layout": framework.layout(value), "indices": indices.tolist(), "data": _to_lists(values, dtype)}


def tensor_from_json(content: Mapping[str, Any], target: Framework | None) -> Tensor:
    """Read a tensor; `target` overrides the framework that wrote it."""
    missing = [key for key in ("dtype", "shape", "data") if key not in content]
    if missing:
        raise TensorError(f"the object is not a tensor in JSON: it has no {' and no '.join(map(repr, missing))}")
    try:
        shape = tuple(map(operator.index, content["shape"]))
        framework = target or stored_framework(content.get("framework", "numpy"))
        layout = content.get("layout", "dense")
        if "encoding" in content:
            return framework.from_numpy(_from_base64(content, shape))
        if layout == "dense":
            return framework.from_numpy(_from_lists(content["data"], content["dtype"], shape))
        indices, values = _sparse_parts(content, shape)
        return framework.from_coo(indices, values, shape, layout)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TensorError(f"the object is not a tensor in JSON: {error}") from error


def _sparse_parts(content: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the indices and values of a sparse tensor; if the last axes are dense, each value is an array."""
    rows, entries = content["indices"], len(content["data"])
    positions = np.array(rows).reshape(len(rows), entries)
    if positions.size and positions.dtype.kind != "i":
        raise TensorError("the indices are not whole numbers")
    indices: NDArray[np.int64] = positions.astype(np.int64)
    sizes = np.array(shape[: len(rows)], np.int64).reshape(-1, 1)
    if len(rows) > len(shape) or (indices < 0).any() or (indices >= sizes).any():
        raise TensorError("an index is outside of the shape")
    # COO has memory for its entries only. Other layouts also have an array along an axis ('csr'), or one of the whole
    # axis for each diagonal ('dia'), so that a short text could allocate much.
    if (
        not str(content["layout"]).endswith("coo")
        and max(shape) * (entries if "dia" in content["layout"] else 1) > _MAX_EMPTY
    ):
        raise TensorError("the shape is too large for its entries")
    return indices, _from_lists(content["data"], content["dtype"], (entries, *shape[len(rows) :]))


def json_schema(title: str, spec: TensorSpec) -> dict[str, Any]:
    """Return the JSON schema of a tensor field: the object above, or nested lists of numbers."""
    shape = None if spec.shape is None else ["..." if d is Ellipsis else d for d in spec.shape]
    axes: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    if spec.shape is not None and Ellipsis not in spec.shape:
        axes |= {"minItems": len(spec.shape), "maxItems": len(spec.shape)}
    if spec.fixed_shape is not None:
        axes["const"] = list(spec.fixed_shape)
    dtype: dict[str, Any] = {"type": "string"} if spec.dtype is None else {"const": spec.dtype}
    if spec.dtypes is not None:
        dtype["enum"] = list(spec.dtypes)
    tensor = {
        "type": "object",
        "properties": {
            "framework": {"type": "string"},
            "dtype": dtype,
            "shape": axes,
            "data": {"description": "Nested lists of the values, row by row; or base64 of their bytes."},
            "encoding": {"const": "base64"},
            "layout": {"type": "string"},
            "indices": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        },
        "required": ["dtype", "shape", "data"],
    }
    return {
        "title": title,
        "description": f"A tensor: {spec}.",
        "anyOf": [tensor, {"type": "array", "items": {}}],
        "x-tensor": {"dtype": spec.dtype, "shape": shape},
    }


def _to_lists(array: NDArray[Any], dtype: str) -> object:
    kind = array.dtype.kind
    if dtype == "string":
        return np.vectorize(_decode_text, otypes=[object])(array).tolist() if array.size else array.tolist()
    if kind in "mM":
        return array.astype(np.int64).tolist()  # in the dtype's own unit
    if kind == "U":
        return array.tolist()
    if dtype not in DTYPES:
        raise TensorError(f"a tensor of dtype {dtype} has no JSON form.")
    if kind == "c":
        array = np.stack([array.real, array.imag], axis=-1)
    elif dtype.startswith(("bfloat", "float8")):
        array = array.astype(np.float32)
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array.tolist()
    # JSON has no numbers for these, and pydantic would write them as null.
    words = array.astype(object)
    for word, number in _NOT_FINITE.items():
        words[np.isnan(array) if word == "NaN" else array == number] = word
    return words.tolist()


def _from_lists(data: Any, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Convert nested lists to an array; they must match the shape."""
    if dtype == "string":
        return _check_shape(_check_texts(np.array(data, dtype=object)), shape)
    numpy_dtype = common_dtype(dtype)
    if numpy_dtype.kind == "U":
        return _cast_texts(_check_shape(_check_texts(np.array(data, dtype=object)), shape), numpy_dtype)
    if numpy_dtype.kind in "mM":
        return cast_numbers(_check_shape(array_of(data), shape), np.dtype(np.int64)).astype(numpy_dtype)
    if dtype not in DTYPES:
        raise TensorError(f"{dtype!r} is not a dtype of tensors")
    array = array_of(data)
    if array.dtype.kind == "O":
        array = np.vectorize(_parse_number, otypes=[np.float64])(array)
    if numpy_dtype.kind != "c":
        return cast_numbers(_check_shape(array, shape), numpy_dtype)
    # A complex number is a list of its real and its imaginary part, which is how numpy stores it.
    pairs = np.ascontiguousarray(_check_shape(array, (*shape, 2)), np.float64)
    return cast_numbers(pairs.view(np.complex128)[..., 0], numpy_dtype)


def _has_bytes(dtype: str) -> bool:
    return dtype in DTYPES or dtype.startswith(("datetime64", "timedelta64"))


def _to_base64(array: NDArray[Any]) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<"), order="C").tobytes()).decode("ascii")


def _from_base64(content: Mapping[str, Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Decode an array; the data must have exactly the size of the dtype and the shape."""
    encoding, data, name = content["encoding"], content["data"], content["dtype"]
    if encoding != "base64" or content.get("layout", "dense") != "dense":
        raise TensorError(f"{encoding!r} is not an encoding of dense tensors: there is 'base64'")
    if not isinstance(data, str) or not isinstance(name, str) or not _has_bytes(name):
        raise TensorError(f"there is no base64 form of dtype {name!r} with data of {type(data).__name__}")
    dtype = common_dtype(name)
    # The size of the data follows from the length of the text: 4 characters are 3 bytes, except for the padding.
    expected, actual = math.prod(shape) * dtype.itemsize, len(data) // 4 * 3 - data[-2:].count("=")
    if min(shape, default=0) < 0 or actual != expected:  # checked before anything is allocated
        raise TensorError(f"the data has {actual} bytes, and {name} {format_shape(shape)} has {expected}")
    raw = np.frombuffer(bytearray(base64.b64decode(data, validate=True)), dtype.newbyteorder("<"))
    if dtype.kind == "b" and (raw.view(np.uint8) > 1).any():
        raise TensorError("a byte is neither true nor false")
    return raw.astype(dtype, copy=False).reshape(shape)


def _check_shape(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if array.shape != shape and (array.size or 0 not in shape):
        raise TensorError(f"the data has shape {format_shape(array.shape)}, and not {format_shape(shape)}")
    return array.reshape(shape)  # an empty list has no further axes


def _check_texts(array: NDArray[Any]) -> NDArray[Any]:
    if not all(isinstance(item, str) for item in array.flat):
        raise TensorError("the data holds something else than str")
    return array


def _cast_texts(texts: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Cast texts to a dtype with a fixed number of characters."""
    lengths = [len(text) for text in texts.flat]
    if max(lengths, default=0) > dtype.itemsize // 4 or dtype.itemsize * texts.size > _MAX_EMPTY + 100 * sum(lengths):
        raise TensorError(f"the texts do not fit dtype {dtype.name}")
    return texts.astype(dtype)


def _parse_number(value: Any) -> float:
    return _NOT_FINITE[value] if isinstance(value, str) else float(value)


def _decode_text(value: object) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise TensorError("a string tensor whose bytes are not UTF-8 has no JSON form.") from None
