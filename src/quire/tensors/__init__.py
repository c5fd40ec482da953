"""Tensor types for annotations, and one small interface to the tensors of every framework."""

from quire.tensors._convert import to_framework
from quire.tensors._framework import Framework, arrays_equal, cast_numbers, common_dtype
from quire.tensors._json import tensor_from_json, tensor_to_json
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

__all__ = [
    "DTYPES",
    "FRAMEWORKS",
    "AnyTensor",
    "DType",
    "Framework",
    "JaxArray",
    "NativeTensorFlow",
    "NdArray",
    "PaddleTensor",
    "Shape",
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
    "plain_tensor_type",
    "stored_framework",
    "tensor_from_json",
    "tensor_to_json",
    "tensor_type_of",
    "to_framework",
]
