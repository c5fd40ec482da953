"""The tensor types, one a framework; TensorFlow's is a wrapper and lives with TensorFlow."""

from __future__ import annotations

from quire.tensors._type import TensorType


class NdArray(metaclass=TensorType, framework="numpy"):
    """A numpy array: `NdArray`, `NdArray[3, 'h', 'w']`, `NdArray[float32, 3, ...]`."""


class TorchTensor(metaclass=TensorType, framework="torch"):
    """A torch tensor: `TorchTensor`, `TorchTensor[3, 'h', 'w']`, `TorchTensor[float32, 3, ...]`."""


class JaxArray(metaclass=TensorType, framework="jax"):
    """A jax array: `JaxArray`, `JaxArray[3, 'h', 'w']`, `JaxArray[float32, 3, ...]`."""


class PaddleTensor(metaclass=TensorType, framework="paddle"):
    """A paddle tensor: `PaddleTensor`, `PaddleTensor[3, 'h', 'w']`, `PaddleTensor[float32, 3, ...]`."""


class NativeTensorFlow(metaclass=TensorType, framework="tensorflow"):
    """A TensorFlow tensor as TensorFlow made it: what a field annotated `tf.Tensor` holds."""


class AnyTensor(metaclass=TensorType):
    """A tensor of any framework, held exactly as it was given; a list becomes a numpy array."""
