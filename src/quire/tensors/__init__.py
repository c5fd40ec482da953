"""Tensor types for annotations, and one small interface to the tensors of every framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.tensors._convert import to_framework
from quire.tensors._framework import DTypeObject, Framework, Tensor, arrays_equal, cast_numbers, common_dtype
from quire.tensors._json import plain_json_tensors, tensor_from_json, tensor_to_json
from quire.tensors._pickling import pickle_reducers, to_picklable
from quire.tensors._registry import FRAMEWORKS, framework_of, framework_of_type, get_framework, stored_framework
from quire.tensors._spec import DTYPES, TensorSpec, dtype_name, format_shape
from quire.tensors._types import (
    AnyTensor,
    DType,
    JaxArray,
    NativeTensorFlow,
    NdArray,
    PaddleTensor,
    Shape,
    TensorType,
    TorchTensor,
    describe,
    expand_alias,
    native_tensor_type,
    plain_tensor_type,
    tensor_type_of,
)

if TYPE_CHECKING:
    from quire.tensors._tensorflow import TensorFlowTensor as TensorFlowTensor
else:

    def __getattr__(name: str) -> object:
        if name == "TensorFlowTensor":  # its base class is TensorFlow's, so it needs that import
            from quire._optional import require  # noqa: PLC0415

            require("tensorflow", extra="tensorflow", needed_for=name)
            from quire.tensors._tensorflow import TensorFlowTensor  # noqa: PLC0415

            globals()[name] = TensorFlowTensor
            return TensorFlowTensor
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Not TensorFlowTensor: a star import must not import TensorFlow.
__all__ = [
    "DTYPES",
    "FRAMEWORKS",
    "AnyTensor",
    "DType",
    "DTypeObject",
    "Framework",
    "JaxArray",
    "NativeTensorFlow",
    "NdArray",
    "PaddleTensor",
    "Shape",
    "Tensor",
    "TensorSpec",
    "TensorType",
    "TorchTensor",
    "arrays_equal",
    "cast_numbers",
    "common_dtype",
    "describe",
    "dtype_name",
    "expand_alias",
    "format_shape",
    "framework_of",
    "framework_of_type",
    "get_framework",
    "native_tensor_type",
    "pickle_reducers",
    "plain_json_tensors",
    "plain_tensor_type",
    "stored_framework",
    "tensor_from_json",
    "tensor_to_json",
    "tensor_type_of",
    "to_framework",
    "to_picklable",
]
