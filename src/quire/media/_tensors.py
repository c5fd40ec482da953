"""Tensors of any framework on their way to and from media."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import TensorError
from quire.tensors import framework_of, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


_SHORTER = {"float64": np.float32, "int64": np.int32}  # JAX has none of 64 bits, unless it is told to


def as_numpy(tensor: Any) -> NDArray[Any]:
    """A tensor of any framework, or lists of numbers, as an array; an error where that would lose something."""
    framework = framework_of(tensor)
    if framework is None:
        return np.asarray(tensor)
    reason = framework.convertible(tensor)
    if reason is not None:
        raise TensorError(f"the tensor cannot be written as media: {reason}.")
    return framework.to_numpy(tensor)


def as_tensor(array: Any, framework: str | None) -> Any:
    """An array as a tensor of a framework; numpy's own unless told. Of 32 bits where the framework has no 64."""
    if framework is None or framework == "numpy" or array is None:
        return array
    make = get_framework(framework).from_numpy
    try:
        return make(array)
    except TensorError:
        if array.dtype.name not in _SHORTER:
            raise
        return make(array.astype(_SHORTER[array.dtype.name]))
