"""Tensors of every framework behind one small set of verbs."""

from quire.tensors._annotations import DType, Shape, plain_tensor_type, tensor_type_of
from quire.tensors._convert import to_framework
from quire.tensors._framework import Framework, cast_numbers, common_dtype
from quire.tensors._json import tensor_from_json, tensor_to_json
from quire.tensors._registry import FRAMEWORKS, framework_of, framework_of_type, get_framework, stored_framework
from quire.tensors._spec import DTYPES, TensorSpec, dtype_name, format_shape
from quire.tensors._type import TensorType, describe
from quire.tensors._types import AnyTensor, JaxArray, NativeTensorFlow, NdArray, PaddleTensor, TorchTensor

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
    "cast_numbers",
    "common_dtype",
    "describe",
    "dtype_name",
    "format_shape",
    "framework_of",
    "framework_of_type",
    "get_framework",
    "plain_tensor_type",
    "stored_framework",
    "tensor_from_json",
    "tensor_to_json",
    "tensor_type_of",
    "to_framework",
]
