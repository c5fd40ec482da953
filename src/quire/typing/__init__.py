"""Field types: tensor types, shapes, dtypes, URLs, encoded media and ids.

To a static type checker each tensor type is the framework's own class. The subscripted form
`TorchTensor[3, 'h', 'w']` is for run time only; `Annotated[torch.Tensor, Shape(3, 'h', 'w')]` means the same and is
understood by type checkers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.tensors import DType, Shape, TensorSpec, dtype_name
from quire.typing._annotations import (
    ProtoNumber,
    bfloat16,
    bool_,
    complex64,
    complex128,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from quire.typing._id import ID, new_id
from quire.typing._media_bytes import (
    AudioBytes,
    ImageBytes,
    Mesh3DBytes,
    PointCloud3DBytes,
    TextBytes,
    VideoBytes,
)
from quire.typing._urls import AnyUrl, AudioUrl, ImageUrl, Mesh3DUrl, PointCloud3DUrl, Schemes, TextUrl, VideoUrl

if TYPE_CHECKING:
    from typing import TypeAlias

    import jax
    import numpy as np
    import paddle
    import torch

    from quire.tensors import TensorFlowTensor as TensorFlowTensor

    NdArray: TypeAlias = np.ndarray[Any, Any]
    TorchTensor: TypeAlias = torch.Tensor
    JaxArray: TypeAlias = jax.Array
    PaddleTensor: TypeAlias = paddle.Tensor
    AnyTensor: TypeAlias = Any
else:
    from quire.tensors import AnyTensor, JaxArray, NdArray, PaddleTensor, TorchTensor

    def __getattr__(name: str) -> object:
        if name == "TensorFlowTensor":  # its base class is TensorFlow's, so it needs that import
            from quire.tensors import TensorFlowTensor

            globals()[name] = TensorFlowTensor
            return TensorFlowTensor
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Not TensorFlowTensor: a star import must not import TensorFlow.
__all__ = [
    "ID",
    "AnyTensor",
    "AnyUrl",
    "AudioBytes",
    "AudioUrl",
    "DType",
    "ImageBytes",
    "ImageUrl",
    "JaxArray",
    "Mesh3DBytes",
    "Mesh3DUrl",
    "NdArray",
    "PaddleTensor",
    "PointCloud3DBytes",
    "PointCloud3DUrl",
    "ProtoNumber",
    "Schemes",
    "Shape",
    "TensorSpec",
    "TextBytes",
    "TextUrl",
    "TorchTensor",
    "VideoBytes",
    "VideoUrl",
    "bfloat16",
    "bool_",
    "complex64",
    "complex128",
    "dtype_name",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "new_id",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]


def __dir__() -> list[str]:
    return [*__all__, "TensorFlowTensor"]
