"""paddle tensors (dense: paddle's sparse tensors end the process when they are pickled)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from quire.errors import TensorError
from quire.tensors._framework import Framework, arrays_equal, common_dtype
from quire.tensors._numpy import native_array

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PaddleFramework(Framework):
    """paddle.Tensor."""

    name = "paddle"
    native = paddle.Tensor

    def handles(self, tp: type[Any]) -> bool:
        return issubclass(tp, paddle.Tensor)

    def dtype(self, value: Any) -> str:
        return str(value.dtype).rpartition(".")[2]

    def native_dtype(self, name: str) -> Any:
        found = getattr(paddle, name, None)
        if not isinstance(found, paddle.dtype):
            raise TensorError(f"paddle has no dtype {name!r}.")
        return found

    def device(self, value: Any) -> str:
        return str(value.place)

    def layout(self, value: Any) -> str:
        return "dense" if value.is_dense() else "sparse"

    def to_numpy(self, value: Any) -> NDArray[Any]:
        array: NDArray[Any] = value.detach().numpy()
        name = self.dtype(value)
        return array if array.dtype.name == name else array.view(common_dtype(name))

    def from_numpy(self, array: NDArray[Any]) -> Any:
        self.native_dtype(array.dtype.name)
        array = native_array(array, "paddle")
        if array.dtype.name == "bfloat16":
            return paddle.to_tensor(array.view(np.uint16), dtype="bfloat16")
        if array.dtype.kind == "V" or array.dtype.name.startswith("float8"):
            return paddle.to_tensor(array.view(np.uint8)).view(self.native_dtype(array.dtype.name))
        return paddle.to_tensor(array)

    def stack(self, values: Sequence[Any]) -> Any:
        return paddle.stack(values)

    def concat(self, columns: Sequence[Any]) -> Any:
        return paddle.concat(columns)

    def take(self, column: Any, indices: NDArray[np.int64]) -> Any:
        if not len(indices):
            return column[:0]
        return paddle.index_select(column, paddle.to_tensor(indices))

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Any = None) -> Any:
        return self.from_numpy(np.zeros(shape, common_dtype(dtype)))

    def equal(self, a: Any, b: Any) -> bool:
        if a.dtype != b.dtype or a.shape != b.shape or a.place != b.place:
            return False
        return arrays_equal(self.to_numpy(a), self.to_numpy(b))

    def to_device(self, value: Any, device: Any, *, non_blocking: bool = False) -> Any:
        return value.to(device, blocking=not non_blocking)

    def copy(self, value: Any, memo: dict[int, Any]) -> Any:
        if value.is_leaf:
            return super().copy(value, memo)
        made = value.detach().clone()
        made.stop_gradient = False
        return memo.setdefault(id(value), made)

    def convertible(self, value: Any) -> str | None:
        if not value.stop_gradient:
            return "it is part of a gradient graph (use .detach())"
        return super().convertible(value)


framework = PaddleFramework()
