"""paddle tensors: only dense ones, because pickling a sparse one terminates the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from quire.errors import PickleError, TensorError
from quire.tensors._framework import DTypeObject, Framework, Tensor, arrays_equal, common_dtype
from quire.tensors._numpy import native_array

if TYPE_CHECKING:
    from numpy.typing import NDArray


_UNSUPPORTED = ("uint16", "uint32", "uint64")  # paddle's uint16 is bfloat16; it cannot convert the other two


class PaddleFramework(Framework):
    """paddle.Tensor."""

    name = "paddle"
    native = paddle.Tensor
    refuses_some = True

    def handles(self, tp: type[Any]) -> bool:
        return issubclass(tp, paddle.Tensor)

    def dtype(self, value: Tensor) -> str:
        return str(value.dtype).rpartition(".")[2]

    def native_dtype(self, name: str) -> DTypeObject:
        dtype = getattr(paddle, name, None)
        if not isinstance(dtype, paddle.dtype) or name in _UNSUPPORTED:
            raise TensorError(f"paddle has no dtype {name!r}.")
        return dtype

    def device(self, value: Tensor) -> str:
        return str(value.place)

    def layout(self, value: Tensor) -> str:
        return "dense" if value.is_dense() else "sparse"

    def refusal(self, value: Tensor) -> str | None:
        if value.is_dense():
            return None
        return "a sparse paddle tensor would end the process when pickled (use .to_dense())"

    def to_numpy(self, value: Tensor) -> NDArray[Any]:
        if not value.is_dense():
            raise TensorError("a sparse paddle tensor has no dense form here: call .to_dense() yourself.")
        array: NDArray[Any] = value.detach().numpy()
        name = self.dtype(value)
        return array if array.dtype.name == name else array.view(common_dtype(name))

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        self.native_dtype(array.dtype.name)
        array = native_array(array, "paddle")
        if array.dtype.name == "bfloat16":
            return paddle.to_tensor(array.view(np.uint16), dtype="bfloat16")
        if array.dtype.name.startswith("float8"):
            return paddle.to_tensor(array.view(np.uint8)).view(self.native_dtype(array.dtype.name))
        return paddle.to_tensor(array)

    def stack(self, values: Sequence[Any]) -> Tensor:
        return paddle.stack(values)

    def concat(self, columns: Sequence[Any]) -> Tensor:
        return paddle.concat(columns)

    def take(self, column: Tensor, indices: NDArray[np.int64]) -> Tensor:
        if not len(indices):
            return column[:0]
        return paddle.index_select(column, paddle.to_tensor(indices))

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Tensor = None) -> Tensor:
        return self.from_numpy(np.zeros(shape, common_dtype(dtype)))

    def equal(self, a: Tensor, b: Tensor) -> bool:
        if a.dtype != b.dtype or a.shape != b.shape or a.place != b.place:
            return False
        return arrays_equal(self.to_numpy(a), self.to_numpy(b))

    def cast(self, value: Tensor, dtype: str) -> Tensor:
        return value.astype(dtype)

    def to_device(self, value: Tensor, device: object, *, non_blocking: bool = False) -> Tensor:
        return value.to(device, blocking=not non_blocking)

    def copy(self, value: Tensor, memo: dict[int, Any]) -> Tensor:
        if value.is_leaf:
            return super().copy(value, memo)
        clone = value.detach().clone()
        clone.stop_gradient = False
        return memo.setdefault(id(value), clone)

    def to_pickle(self, value: Tensor, memo: dict[Any, Any], *, alone: bool) -> Any:
        if type(value) is not paddle.Tensor or (value.is_dense() and not _is_float8(value)):
            return value
        return memo.setdefault(id(value), _StandIn(value))

    def convertible(self, value: Tensor) -> str | None:
        if not value.stop_gradient:
            return "it is part of a gradient graph (use .detach())"
        if not value.place.is_cpu_place():
            return f"it is on {value.place} (use .cpu())"
        return super().convertible(value)


class _StandIn:
    """Stands for a tensor in a pickle that paddle cannot load, or must not write."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return _reduce(self.tensor)


def _is_float8(value: Tensor) -> bool:
    return str(value.dtype).startswith("paddle.float8")


def _reduce(value: Tensor) -> Any:
    """Reduce a tensor: paddle cannot load the float8 tensors that it pickles, and a sparse one ends the process."""
    if not value.is_dense():
        raise PickleError("A sparse paddle tensor cannot be pickled: paddle would end the process. Use .to_dense().")
    if not _is_float8(value):
        return value.__reduce_ex__(2)
    return _load_float8, (framework.to_numpy(value), value.stop_gradient)


def _load_float8(array: NDArray[Any], stop_gradient: bool) -> Any:  # noqa: FBT001
    tensor = framework.from_numpy(array)
    tensor.stop_gradient = stop_gradient
    return tensor


PaddleFramework.reducers = {paddle.Tensor: _reduce}
framework = PaddleFramework()
