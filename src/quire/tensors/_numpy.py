"""numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from quire.errors import TensorError
from quire.tensors._framework import DTypeObject, Framework, Tensor, arrays_equal, common_dtype
from quire.tensors._spec import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray


class NumpyFramework(Framework):
    """numpy.ndarray and its subclasses."""

    name = "numpy"
    native = np.ndarray
    default_dtypes: ClassVar[dict[str, str]] = {"f": "float64", "i": "int64", "c": "complex128"}

    def handles(self, tp: type[Any]) -> bool:
        return issubclass(tp, np.ndarray)

    def dtype(self, value: Tensor) -> str:
        return str(value.dtype.name)

    def native_dtype(self, name: str) -> DTypeObject:
        return common_dtype(name)

    def refusal(self, value: Tensor) -> str | None:
        if isinstance(value, np.ma.MaskedArray):
            return "the mask would be lost on the way (use .filled(), and keep the mask in a field of its own)"
        return None

    def to_numpy(self, value: Tensor) -> NDArray[Any]:
        return np.asarray(value)

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        return array

    def stack(self, values: Sequence[Any]) -> Tensor:
        if np.matrix in map(type, values):  # np.stack of matrices is a matrix, which has two axes only
            values = [np.asarray(value) for value in values]
        return np.stack(values)

    def concat(self, columns: Sequence[Any]) -> Tensor:
        return np.concatenate(columns)

    def take(self, column: Tensor, indices: NDArray[np.int64]) -> Tensor:
        return column.take(indices, axis=0)

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Tensor = None) -> Tensor:
        return np.zeros(shape, common_dtype(dtype))

    def equal(self, a: Tensor, b: Tensor) -> bool:
        return arrays_equal(a, b)

    def to_device(self, value: Tensor, device: object, *, non_blocking: bool = False) -> Tensor:
        return value  # numpy has main memory only: a column for another device is converted first

    def unstack(self, column: Tensor) -> list[Any]:
        if column.ndim > 1:
            return list(column)
        return [column[i, ...] for i in range(len(column))]  # a row of a vector is a 0-d array, not a scalar

    def row(self, column: Tensor, index: int) -> Tensor:
        return column[index, ...]

    def convertible(self, value: Tensor) -> str | None:
        known = value.dtype.name in DTYPES
        return super().convertible(value) if known else f"other frameworks have no dtype {value.dtype}"


def native_array(array: NDArray[Any], framework_name: str) -> NDArray[Any]:
    """Return the array in a layout that other frameworks can share: native byte order, whole strides, writable."""
    if not _is_known(array.dtype):
        raise TensorError(f"{framework_name} has no tensors of dtype {array.dtype}.")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.char in "qQ":  # long long: numpy's int64 on some platforms, which torch does not accept
        array = array.view(array.dtype.name)
    # torch accepts neither negative strides nor strides that are no multiple of the item size, and warns of read-only
    # memory, which it could write to.
    if not array.flags.writeable or any(step < 0 or step % array.itemsize for step in array.strides):
        array = array.copy()
    return array


@cache
def _is_known(dtype: np.dtype[Any]) -> bool:
    return dtype.name in DTYPES  # cached, because numpy builds the name on each access


framework = NumpyFramework()
