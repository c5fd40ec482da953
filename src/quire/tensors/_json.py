"""Tensors in JSON: dtype, shape, framework and nested lists.

    {"framework": "torch", "dtype": "float32", "shape": [2, 2], "data": [[1.0, 2.0], [3.0, "NaN"]]}

A sparse tensor has its `layout` and `indices` beside the values. Complex numbers are [real, imaginary].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import TensorError
from quire.tensors._framework import Framework, common_dtype
from quire.tensors._registry import framework_of, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.tensors._spec import TensorSpec

_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def tensor_to_json(value: Any) -> dict[str, Any]:
    """A tensor as plain JSON values."""
    framework = framework_of(value)
    if framework is None:
        raise TensorError(f"{type(value).__name__} is not a tensor.")
    head = {
        "framework": framework.name,
        "dtype": framework.dtype(value),
        "shape": list(framework.shape(value)),
    }
    if not framework.is_sparse(value):
        return {**head, "data": _to_lists(framework.to_numpy(value))}
    indices, values = framework.to_coo(value)
    return {**head, "layout": framework.layout(value), "indices": indices.tolist(), "data": _to_lists(values)}


def tensor_from_json(content: Mapping[str, Any], target: Framework | None) -> Any:
    """The tensor again; `target` overrides the framework that was written."""
    try:
        dtype, shape, data = content["dtype"], tuple(content["shape"]), content["data"]
        framework = target or get_framework(content.get("framework", "numpy"))
        layout = content.get("layout", "dense")
        if layout == "dense":
            return framework.from_numpy(_from_lists(data, dtype).reshape(shape))
        indices = np.array(content["indices"], np.int64).reshape(len(shape), -1)
        return framework.from_coo(indices, _from_lists(data, dtype), shape, layout)
    except (KeyError, TypeError, ValueError) as error:
        raise TensorError(f"the object is not a tensor in JSON: {error}") from error


def json_schema(title: str, spec: TensorSpec) -> dict[str, Any]:
    """The JSON schema of a tensor field: the object above, or nested lists of numbers."""
    shape = None if spec.shape is None else ["..." if d is Ellipsis else d for d in spec.shape]
    axes: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    if spec.shape is not None and Ellipsis not in spec.shape:
        axes |= {"minItems": len(spec.shape), "maxItems": len(spec.shape)}
    if spec.fixed_shape is not None:
        axes["const"] = list(spec.fixed_shape)
    tensor = {
        "type": "object",
        "properties": {
            "framework": {"type": "string"},
            "dtype": {"type": "string"} if spec.dtype is None else {"const": spec.dtype},
            "shape": axes,
            "data": {"description": "Nested lists of the values, row by row."},
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


def _to_lists(array: NDArray[Any]) -> Any:
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], axis=-1)
    elif array.dtype.kind == "O":
        return np.vectorize(_text, otypes=[object])(array).tolist() if array.size else array.tolist()
    elif array.dtype.kind not in "biuf":
        array = array.astype(np.float32)  # the short floats
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array.tolist()
    words = array.astype(object)
    for word, number in _NOT_FINITE.items():
        words[np.isnan(array) if word == "NaN" else array == number] = word
    return words.tolist()


def _from_lists(data: Any, dtype: str) -> NDArray[Any]:
    if dtype == "string":
        return np.array(data, dtype=object)
    array = np.array(data)
    if array.dtype.kind in "OU":
        array = np.array(data, dtype=object)
        array = np.vectorize(lambda x: _NOT_FINITE.get(x, x), otypes=[np.float64])(array)
    if dtype.startswith("complex"):
        array = array.reshape(-1, 2) if array.size else array.reshape(0, 2)
        array = array[:, 0] + 1j * array[:, 1]
    return array.astype(common_dtype(dtype)) if array.size else np.zeros(array.shape, common_dtype(dtype))


def _text(value: Any) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise TensorError("a string tensor whose bytes are not UTF-8 has no JSON form.") from None
